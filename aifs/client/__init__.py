"""The library of training jobs: checkpoints that appear whole or not at all
(docs/guide/checkpoints.md), and files that ranks save together (docs/guide/grouped.md).

Works on a mount of AIFS, through its files and extended attributes alone, and in any other
directory. Modules are imported when a name of theirs is first used, so that starts are fast.
"""

from typing import TYPE_CHECKING

from aifs.core.on_demand import by_name, on_demand

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

_MODULES = by_name(
    {
        "checkpoints.catalog": "Checkpoint keep latest list_checkpoints remove verify",
        "checkpoints.manifest": "CheckpointError Manifest",
        "checkpoints.publishing": "commit publish",
        "checkpoints.ranks": "RanksMissing",
        "checkpoints.saving": "checkpoint",
        "coordination": "GroupError GroupExpired InvalidGroup RankDied",
        "grouped": "Group group_getfile group_putfile",
        "putting": "Saved getfile putfile",
    }
)
"""The module of this package in which each public name is found."""

__all__ = [*_MODULES]

__getattr__ = on_demand(__name__, _MODULES)
