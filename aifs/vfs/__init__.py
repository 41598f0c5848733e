"""The filesystem without FUSE: POSIX semantics, open files, durability, recovery. Imports meta,
data, layout, core.

``open_filesystem`` gives a ``Filesystem``; ``store.format_store`` makes the store that it opens.
"""

from aifs.vfs.filesystem import Filesystem
from aifs.vfs.lifecycle import open_filesystem
from aifs.vfs.types import Caller, SetAttr, StatFs

__all__ = ["Caller", "Filesystem", "SetAttr", "StatFs", "open_filesystem"]
