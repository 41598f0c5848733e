"""What a training job imports: checkpoints that appear whole or not at all
(docs/guide/checkpoints.md), and files that ranks save together (docs/guide/grouped.md).

Works on a mount of AIFS and in any other directory; speaks to a mount only through its files and
extended attributes.

A module is imported when something of it is asked for: the programs that start a job want little of
it, and soon.
"""

from typing import TYPE_CHECKING

from aifs.client.on_demand import on_demand

if TYPE_CHECKING:
    from aifs.client.catalog import Checkpoint, keep, latest, list_checkpoints, remove, verify
    from aifs.client.coordination import GroupError, GroupExpired, InvalidGroup, RankDied
    from aifs.client.grouped import Group, group_getfile, group_putfile
    from aifs.client.manifest import CheckpointError, Manifest
    from aifs.client.publishing import commit, publish
    from aifs.client.putting import Saved, getfile, putfile
    from aifs.client.ranks import RanksMissing
    from aifs.client.saving import checkpoint

_MODULES = {
    "Checkpoint": "catalog",
    "CheckpointError": "manifest",
    "Group": "grouped",
    "GroupError": "coordination",
    "GroupExpired": "coordination",
    "InvalidGroup": "coordination",
    "Manifest": "manifest",
    "RankDied": "coordination",
    "RanksMissing": "ranks",
    "Saved": "putting",
    "checkpoint": "saving",
    "commit": "publishing",
    "getfile": "putting",
    "group_getfile": "grouped",
    "group_putfile": "grouped",
    "keep": "catalog",
    "latest": "catalog",
    "list_checkpoints": "catalog",
    "publish": "publishing",
    "putfile": "putting",
    "remove": "catalog",
    "verify": "catalog",
}
"""Of this package, by the names that they give it."""

__all__ = [*_MODULES]

__getattr__ = on_demand(__name__, _MODULES)
