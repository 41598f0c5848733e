"""The filesystem without FUSE: POSIX semantics, open files, durability, recovery.

``open_filesystem`` gives a ``Filesystem``; ``store.format_store`` makes the store that it opens.
"""

from aifs.files.types import Caller, SetAttr, StatFs
from aifs.vfs.filesystem import Filesystem
from aifs.vfs.lifecycle import open_filesystem

__all__ = ["Caller", "Filesystem", "SetAttr", "StatFs", "open_filesystem"]
