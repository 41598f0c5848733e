"""The library of training jobs: checkpoints that appear whole or not at all
(docs/guide/checkpoints.md), and files that ranks save together (docs/guide/grouped.md).

Works on a mount of AIFS, through its files and extended attributes alone, and in any other
directory. Modules are imported when a name of theirs is first used, so that starts are fast.
"""

from typing import TYPE_CHECKING

from aifs.core.on_demand import on_demand

if TYPE_CHECKING:
    from aifs.client.checkpoints.catalog import (
        Checkpoint,
        keep,
        latest,
        list_checkpoints,
        remove,
        verify,
    )
    from aifs.client.checkpoints.manifest import CheckpointError, Manifest
    from aifs.client.checkpoints.publishing import commit, publish
    from aifs.client.checkpoints.ranks import RanksMissing
    from aifs.client.checkpoints.saving import checkpoint
    from aifs.client.coordination import GroupError, GroupExpired, InvalidGroup, RankDied
    from aifs.client.grouped import Group, group_getfile, group_putfile
    from aifs.client.putting import Saved, getfile, putfile

_MODULES = {
    "Checkpoint": "checkpoints.catalog",
    "CheckpointError": "checkpoints.manifest",
    "Group": "grouped",
    "GroupError": "coordination",
    "GroupExpired": "coordination",
    "InvalidGroup": "coordination",
    "Manifest": "checkpoints.manifest",
    "RankDied": "coordination",
    "RanksMissing": "checkpoints.ranks",
    "Saved": "putting",
    "checkpoint": "checkpoints.saving",
    "commit": "checkpoints.publishing",
    "getfile": "putting",
    "group_getfile": "grouped",
    "group_putfile": "grouped",
    "keep": "checkpoints.catalog",
    "latest": "checkpoints.catalog",
    "list_checkpoints": "checkpoints.catalog",
    "publish": "checkpoints.publishing",
    "putfile": "putting",
    "remove": "checkpoints.catalog",
    "verify": "checkpoints.catalog",
}
"""The module of this package in which each public name is found."""

__all__ = [*_MODULES]

__getattr__ = on_demand(__name__, _MODULES)
