"""The sizes that the kernel is told of files that grow without its knowing: another host changes
them, or a program does past its page cache.

The kernel fills the page that holds a file's end with zeros. If it learns a larger size while it
keeps that page, programs read the zeros in place of what was written there. So it is told the size
from before until it has dropped its pages.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import trio

from aifs.files.kernel import Kernel
from aifs.meta.records import Inode


class _Held:
    """``size``: the largest one that is told. ``holders``: how many are not done with the pages.
    ``is_listed``: the kernel may keep the size."""

    __slots__ = ("free", "holders", "is_listed", "size")

    def __init__(self, size: int) -> None:
        self.size, self.holders, self.is_listed = size, 0, False
        self.free = trio.Event()


class ToldSizes:
    """Used from one trio thread."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._held: dict[int, _Held] = {}
        """By inode number, files of which the kernel may keep the page with a former end."""

    def hold(self, ino: int, size: int) -> None:
        """From now on the kernel is told this size of a file at most, until ``let_go`` is called
        as often."""
        self._held.setdefault(ino, _Held(size)).holders += 1
        self.lower(ino, size)

    def lower(self, ino: int, size: int) -> None:
        """A file has had this size meanwhile; nothing if it is not held."""
        if ino in self._held:
            self._held[ino].size = min(self._held[ino].size, size)

    def let_go(self, ino: int) -> None:
        """The kernel has dropped the pages."""
        held = self._held[ino]
        held.holders -= 1
        if not held.holders:
            del self._held[ino]
            held.free.set()
            if held.is_listed:
                self._kernel.drop_attributes_soon([ino])

    @contextmanager
    def held(self, ino: int, size: int) -> Iterator[None]:
        """Within the block a file of this size may grow. At its end the kernel has no pages from
        before."""
        self.hold(ino, size)
        try:
            yield
        finally:
            self.let_go(ino)

    def drop_pages_soon(self, ino: int, size: int) -> None:
        """A file of this size has grown. The request that is being answered may hold pages."""
        self.hold(ino, size)
        self._kernel.drop_pages_soon(ino, lambda: self.let_go(ino))

    @property
    def inos(self) -> Collection[int]:
        """The files of which the kernel is told a size from before."""
        return self._held.keys()

    def size(self, inode: Inode, is_listed: bool = False) -> int:
        """What the kernel is told now. It must not keep a size that is not the inode's, unless it
        ``is_listed`` with others."""
        held = self._held.get(inode.ino)
        if held is None or inode.size <= held.size:
            self.lower(inode.ino, inode.size)
            return inode.size
        held.is_listed |= is_listed
        return held.size

    async def settled(self, ino: int) -> None:
        """The kernel may be told the size as it is. Never awaited by a request that may hold
        pages, or the lock of a directory."""
        while ino in self._held:
            await self._held[ino].free.wait()
