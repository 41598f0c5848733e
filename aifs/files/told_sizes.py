"""The sizes that the kernel is told of files that grow without its knowing: another host changes
them, or a program does past its page cache.

The kernel fills the page that holds a file's end with zeros. If it learns a larger size while it
keeps that page, programs read the zeros in place of what was written there. So it is told the size
from before until it has dropped its pages.
"""

from collections.abc import Iterator, Set
from contextlib import contextmanager

import trio

from aifs.files.kernel import Kernel
from aifs.meta.records import Inode


class Hold:
    """``size``: the largest one that is told until it is let go. ``is_listed``: the kernel may keep
    what it was told meanwhile."""

    __slots__ = ("free", "ino", "is_listed", "size")

    def __init__(self, ino: int, size: int) -> None:
        self.ino, self.size, self.is_listed = ino, size, False
        self.free = trio.Event()


class ToldSizes:
    """Used from one trio thread."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._held: dict[int, list[Hold]] = {}
        """By inode number, files of which the kernel may keep the page with a former end."""

    def hold(self, ino: int, size: int) -> Hold:
        """From now on the kernel is told this size of a file at most, until ``let_go``."""
        hold = Hold(ino, size)
        self._held.setdefault(ino, []).append(hold)
        self.lower(ino, size)
        return hold

    def lower(self, ino: int, size: int) -> None:
        """A file has had this size meanwhile; nothing if it is not held."""
        for hold in self._held.get(ino, ()):
            hold.size = min(hold.size, size)

    def let_go(self, hold: Hold) -> None:
        """The kernel has dropped the pages from before."""
        self._held[hold.ino].remove(hold)
        if not self._held[hold.ino]:
            del self._held[hold.ino]
        hold.free.set()
        if hold.is_listed:
            self._kernel.drop_attributes_soon([hold.ino])

    @contextmanager
    def held(self, ino: int, size: int) -> Iterator[None]:
        """Within the block a file of this size may grow. At its end the kernel has no pages from
        before."""
        hold = self.hold(ino, size)
        try:
            yield
        finally:
            self.let_go(hold)

    def drop_pages_soon(self, ino: int, size: int) -> None:
        """A file of this size has grown. The request that is being answered may hold pages."""
        hold = self.hold(ino, size)
        self._kernel.drop_pages_soon(ino, lambda: self.let_go(hold))

    @property
    def inos(self) -> Set[int]:
        """The files of which the kernel is told a size from before."""
        return self._held.keys()

    def size(self, inode: Inode, is_listed: bool = False) -> int:
        """What the kernel is told now. It must not keep a size that is not the inode's, unless it
        ``is_listed`` with others."""
        holds = self._held.get(inode.ino)
        if holds is None:
            return inode.size
        told = min(hold.size for hold in holds)
        if inode.size <= told:
            self.lower(inode.ino, inode.size)
            return inode.size
        for hold in holds:
            hold.is_listed |= is_listed
        return told

    async def settled(self, ino: int) -> None:
        """The kernel may be told the size as it is now; later growth is not waited for. Never
        awaited by a request that may hold pages, or the lock of a directory."""
        for hold in tuple(self._held.get(ino, ())):
            await hold.free.wait()
