"""How an open store is served, for whoever has to go by it."""

from dataclasses import dataclass

from aifs.core.errors import ReadOnly
from aifs.meta.records import Inode

_ATIME_INTERVAL_NS = 24 * 3600 * 10**9  # relatime, as in mount(8)

_NEVER_NS = (1 << 64) - 1


@dataclass(slots=True)
class ServeOptions:
    """``mountpoint``: '' without a kernel. ``atime``: one of ATIMES, the rule by which opening a
    file for reading is an access; it may be changed at any time.
    """

    mountpoint: str = ""
    read_only: bool = False
    atime: str = "relatime"

    def access_due_ns(self, inode: Inode) -> int:
        """From when on opening this file for reading is an access, and is not one again for a day;
        0: each time is one.
        """
        if self.atime == "strictatime":
            return 0
        if self.atime == "noatime":
            return _NEVER_NS
        if inode.atime_ns <= max(inode.mtime_ns, inode.ctime_ns):
            return 1
        return max(1, inode.atime_ns + _ATIME_INTERVAL_NS)

    def require_writable(self) -> None:
        """Raises ReadOnly. For requests that the kernel lets pass on a read-only mount."""
        if self.read_only:
            raise ReadOnly()
