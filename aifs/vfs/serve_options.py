"""How an open store is served, for whoever has to go by it."""

from dataclasses import dataclass

from aifs.core.errors import ReadOnly


@dataclass(slots=True)
class ServeOptions:
    """``mountpoint``: '' without a kernel. ``atime``: one of ATIMES, the rule by which opening a
    file for reading is an access; it may be changed at any time.
    """

    mountpoint: str = ""
    read_only: bool = False
    atime: str = "relatime"

    def require_writable(self) -> None:
        """Raises ReadOnly. For requests that the kernel lets pass on a read-only mount."""
        if self.read_only:
            raise ReadOnly()
