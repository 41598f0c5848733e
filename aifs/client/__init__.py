"""What a training job imports: checkpoints that appear whole or not at all (docs/checkpoints.md),
and files that ranks save together (docs/grouped.md).

Works on a mount of AIFS and in any other directory; speaks to a mount only through its files and
extended attributes.
"""

from aifs.client.catalog import Checkpoint, keep, latest, list_checkpoints, remove, verify
from aifs.client.coordination import GroupError, GroupExpired, InvalidGroup, RankDied
from aifs.client.grouped import Group, group_getfile, group_putfile
from aifs.client.manifest import CheckpointError, Manifest
from aifs.client.publishing import commit, publish
from aifs.client.putting import Saved, getfile, putfile
from aifs.client.ranks import RanksMissing
from aifs.client.saving import checkpoint

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Group",
    "GroupError",
    "GroupExpired",
    "InvalidGroup",
    "Manifest",
    "RankDied",
    "RanksMissing",
    "Saved",
    "checkpoint",
    "commit",
    "getfile",
    "group_getfile",
    "group_putfile",
    "keep",
    "latest",
    "list_checkpoints",
    "publish",
    "putfile",
    "remove",
    "verify",
]
