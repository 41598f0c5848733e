"""The sources of virtual files, and the right to read them."""

import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import trio

from aifs.core.budget import Budget
from aifs.core.errors import AccessDenied, NotFound, OutOfMemory, Stale
from aifs.datasets.virtual import Joined, VirtualBytes
from aifs.files.file_io import FileIO
from aifs.files.permissions import READ, SEARCH
from aifs.files.settled import Source
from aifs.meta import acl
from aifs.meta.askers import Asker
from aifs.meta.records import Inode


async def read_source(io: FileIO, source: Source, offset: int, length: int) -> bytes | memoryview:
    """All of these bytes. Raises Stale, with the name, if it is not that file any more."""
    ino, size, mtime_ns, name = source
    try:
        file = await io.inodes.acquire(ino)
    except NotFound:
        raise Stale(f"{os.fsdecode(name)} has been removed") from None
    try:
        data = await io.read(file, offset, length)
        now = io.inodes.attributes(file)
        if (now.size, now.mtime_ns) != (size, mtime_ns) or len(data) != length:
            raise Stale(f"{os.fsdecode(name)} has changed")
        return data
    finally:
        await io.inodes.release(file)


class ReadRight(NamedTuple):
    """The part of an inode that decides which users may read it."""

    acl: bytes
    mode: int
    uid: int
    gid: int


def right_to(inode: Inode) -> ReadRight:
    return ReadRight(inode.acl, inode.mode, inode.uid, inode.gid)


def require_all(rights: Collection[ReadRight], asker: Asker) -> None:
    """Raises AccessDenied unless ``asker`` may read these, and search the directories."""
    if asker.uid == 0:
        return
    for right in rights:
        wanted = READ | SEARCH if right.mode >> 12 == 4 else READ
        if not acl.granted(*right, asker.uid, set(asker.gids), wanted):
            raise AccessDenied("the caller may not read all that the file is made of")


@dataclass(frozen=True, slots=True)
class VirtualContent:
    """What a virtual file was made to hold. It never changes."""

    bytes: VirtualBytes
    """In terms of the numbers of sources."""
    source: Callable[[int], Source]
    """The source of a number."""
    memory: int
    """About how many bytes are kept for it."""
    rights: frozenset[ReadRight]
    """To all of them, and to the directories above."""
    mtime_ns: int
    """When the newest of them changed."""
    fingerprint: int
    """The same as long as sources and their order are."""


async def signature_of(content: VirtualContent) -> bytes:
    """16 bytes: the same in each process for the same bytes of the same sources."""
    if content.memory < _AT_ONCE_BYTES:
        return _signature(content)
    return await trio.to_thread.run_sync(_signature, content)


def _signature(content: VirtualContent) -> bytes:
    digest = blake2b(digest_size=16)
    for column in content.bytes.columns():
        digest.update(column)
    if isinstance(content.bytes, Joined):  # others have in their columns what they are made of
        for number in range(content.bytes.sources):
            digest.update(repr(content.source(number)).encode())
    return digest.digest()


_AT_ONCE_BYTES = 64 << 10
"""What is kept of so little is read in less time than a thread takes."""

Counted = Callable[[int], Awaitable[None]]
"""Called with how many names have been found; waits for memory for them."""

_ALL, _OF_USER, _IDLE = 3 / 8, 1 / 4, 1 / 8
"""Parts of the budget: of all, a user's open ones, and unopened ones remembered. A tree of a
million short paths fits in a user's."""

_OF_USER_AT_ONCE, _AT_ONCE = 2, 4
"""Virtual files that are made at a time for a user, and for all; others wait."""

_NAME_BYTES = 1 << 10
"""Of memory, for each name that one is made of, while it is made."""

_NAMES = 1 << 10
"""Names with memory from the beginning; it grows by four."""


class VirtualMemory:
    """Used from one trio thread."""

    def __init__(self, budget: Budget, forget: Callable[[], bool]) -> None:
        """``forget``: let go of one that nobody has open; False if there is none."""
        self._budget = budget
        self._forget = forget
        self.taken = 0
        """Bytes, of all."""
        self._open = Counter[tuple[int, int]]()
        """By user and number of the file, how often the user has it open."""
        self._of_user = Counter[int]()
        """Bytes that a user has open."""
        self._turns: dict[int, trio.CapacityLimiter] = {}
        """By user, of users that have one made."""
        self._makings = trio.CapacityLimiter(_AT_ONCE)
        """Of all users."""
        self._large = trio.CapacityLimiter(1)
        """Held by the maker of one with so many names that it may take all memory for that."""
        budget.add_cache(self._give_back)

    @property
    def idle_max(self) -> int:
        """Bytes of those that nobody has open."""
        return int(self._budget.total * _IDLE)

    async def take(self, size: int) -> None:
        """For a file that has been made. Raises OutOfMemory if others, which are open, have it."""
        most = int(self._budget.total * _ALL)
        while self.taken + size > most:
            if not self._forget():
                raise OutOfMemory(
                    f"a virtual file takes {size:,} bytes of memory, and those that are open "
                    f"{self.taken:,}: all may have {most:,} (3/8 of memory.budget)"
                )
        self.taken += size
        try:
            await self._budget.acquire(size)
        except BaseException:
            self.taken -= size
            raise

    def leave(self, size: int) -> None:
        """The file is gone."""
        self.taken -= size
        self._budget.release(size)

    def open(self, uid: int, ino: int, size: int) -> None:
        """A user opens a file of so many bytes. Raises OutOfMemory for too much, except for
        root."""
        most = int(self._budget.total * _OF_USER)
        if not self._open[uid, ino]:
            if uid and self._of_user[uid] + size > most:
                raise OutOfMemory(
                    f"virtual files that a user has open may take {most:,} bytes of memory (1/4 of "
                    f"memory.budget), and those of this user take {self._of_user[uid]:,}: this one "
                    f"takes {size:,}"
                )
            self._of_user[uid] += size
        self._open[uid, ino] += 1

    def close(self, uid: int, ino: int, size: int) -> None:
        self._open[uid, ino] -= 1
        if not self._open[uid, ino]:
            del self._open[uid, ino]
            self._of_user[uid] -= size
            if not self._of_user[uid]:
                del self._of_user[uid]

    @asynccontextmanager
    async def making(self, uid: int) -> AsyncIterator[Counted]:
        """A user has a file made, inside; the maker says how many names it is made of so far."""
        turn = self._turns.setdefault(uid, trio.CapacityLimiter(_OF_USER_AT_ONCE))
        try:
            async with turn, self._makings, AsyncExitStack() as large:
                most = int(self._budget.total * _OF_USER)
                held = min(_NAMES * _NAME_BYTES, most)
                await self._budget.acquire(held)

                async def counted(names: int) -> None:
                    nonlocal held
                    while held < min(names * _NAME_BYTES, most):
                        wanted = min(4 * held, most)
                        self._budget.release(held)  # a task that waits for memory has none
                        held = 0
                        if wanted == most:
                            await large.enter_async_context(self._large)
                        await self._budget.acquire(wanted)
                        held = wanted

                try:
                    yield counted
                finally:
                    self._budget.release(held)
        finally:
            if not turn.borrowed_tokens and not turn.statistics().tasks_waiting:
                self._turns.pop(uid, None)

    def _give_back(self, size: int) -> None:
        end = self.taken - size
        while self._budget.short and self.taken > end and self._forget():
            pass
