"""What a training job imports: checkpoints that appear whole or not at all. See docs/checkpoints.md.

Works on a mount of AIFS and in any other directory; speaks to a mount only through its files and extended
attributes.
"""

from aifs.client.catalog import Checkpoint, keep, latest, list_checkpoints, remove, verify
from aifs.client.manifest import CheckpointError, Manifest
from aifs.client.publishing import commit, publish
from aifs.client.ranks import RanksMissing
from aifs.client.saving import checkpoint

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Manifest",
    "RanksMissing",
    "checkpoint",
    "commit",
    "keep",
    "latest",
    "list_checkpoints",
    "publish",
    "remove",
    "verify",
]
