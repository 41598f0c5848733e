"""One container that is read: a plain one, or a protected one."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from aifs.core.errors import Unavailable
from aifs.data.objects.protected import ProtectedObjects
from aifs.data.patience import in_time
from aifs.data.reading.blocks import BLOCK_MAX, ObjectSource
from aifs.data.reading.patterns import Pattern
from aifs.data.server import DataServer, Missing
from aifs.data.servers import Servers
from aifs.data.workers import gather
from aifs.layout.striped import Striped

STRIPE_BLOCK = BLOCK_MAX
"""Bytes of a plain container that are fetched at once: about a stripe."""


class Entry(NamedTuple):
    """What the table says of a container. ``lost``: mask of columns that must not be read."""

    layout: Striped
    length: int
    lost: int = 0


OnDamage = Callable[[int, int, int], None]
"""Called with the container, 0 and the column whose object is missing, short or wrong. Does not
block.
"""


class PlainReader:
    """One object, opened by the first read. ``users``: reads that are under way."""

    def __init__(self, servers: Servers, container: int, entry: Entry) -> None:
        self.entry = entry
        self.users = 0
        self._servers = servers
        self._cache = servers.cache
        self._server: DataServer = servers[entry.layout.servers[0]]
        self._key = (0, container)
        self._fd: int | None = None
        self._length = 0  # when it was opened
        self._pattern = Pattern()
        # Files are dealt out to containers on all servers, and read ahead in each of them.
        self._window = max(self._cache.window_max // len(servers.capacity()), 2 * STRIPE_BLOCK)
        self._source = ObjectSource(
            self._server, self._key, self._read_into, STRIPE_BLOCK, self.in_use
        )
        self._retired = False

    def in_use(self, change: int) -> None:
        self.users += change
        if self._retired and not self.users:
            self.close()

    def covers(self, end: int) -> bool:
        """Whether what is known of the container will do to read up to ``end``: its object itself
        says how long it is.
        """
        return True

    def read_now(self, offset: int, target: memoryview) -> bool:
        """Fill ``target`` if that can be done without waiting."""
        if self._server.may_inline:
            try:
                self._read_all(target, offset)
            except Missing:
                return False  # ``read`` will say so
            return True
        return self._fd is not None and self._server.read_cached(self._fd, target, offset)

    async def read(self, offset: int, target: memoryview) -> None:
        """Fill ``target``. Raises Missing, Unavailable."""
        if self.read_now(offset, target):
            return
        ahead = self._pattern.observe(offset, len(target), self._window)
        if self._pattern.random:
            self.in_use(1)
            await gather(
                [(self._server.workers, self._read_all, (target, offset))], partial(self.in_use, -1)
            )
            return
        end = (
            -(-(offset + len(target)) // STRIPE_BLOCK) * STRIPE_BLOCK
        )  # whole blocks: the container may have grown
        with in_time(self._server.workers.patience):
            done = await self._cache.fetch_into(self._source, offset, target, end)
        self._require(done, target, offset)
        self._read_ahead(ahead)

    def _read_ahead(self, ranges: list[tuple[int, int]]) -> None:
        for begin, length in ranges:
            end = min(begin + length, self._length)
            for number in range(begin // STRIPE_BLOCK, -(-end // STRIPE_BLOCK)):
                if not self._cache.read_ahead(self._source, number, self._length):
                    self._pattern.refused(begin, number * STRIPE_BLOCK)
                    return

    def _require(self, done: int, buffer: memoryview, offset: int) -> None:
        if done < len(buffer):
            path = self._server.object_path(*self._key)
            raise Unavailable(
                f"{self._server.name}: {path} ends before byte {offset + len(buffer)}"
            )

    def retire(self) -> None:
        """Close it when nobody reads it any more."""
        self._retired = True
        self.in_use(0)

    def close(self) -> None:
        if self._fd is not None:
            self._server.close_object(self._fd)
            self._fd = None

    # --- in worker threads, or where that takes microseconds ---

    def _read_all(self, buffer: memoryview, offset: int) -> None:
        self._require(self._read_into(buffer, offset), buffer, offset)

    def _read_into(self, buffer: memoryview, offset: int) -> int:
        """Bytes read, fewer only at the container's end."""
        if self._fd is None:
            self._open()
        return self._server.read(self._key, self._fd, buffer, offset)

    def _open(self) -> None:
        server, key = self._server, self._key
        with server.lock_of(key[1]):
            if self._fd is not None:
                return
            fd = server.open_object(key, create=False, write=False)
            if fd is None:
                raise Missing(f"{server.name}: {server.object_path(*key)} is missing")
            try:
                self._length = server.stat(key, fd).length
            except BaseException:
                server.storage.close(fd)
                raise
            self._fd = fd


class ProtectedReader:
    """Several objects, as those of a protected file."""

    def __init__(self, servers: Servers, container: int, entry: Entry, on_damage: OnDamage) -> None:
        self.entry = entry
        self.users = 0
        self._objects = ProtectedObjects(
            servers, entry.layout, 0, container, lost=entry.lost, on_damage=on_damage
        )

    def in_use(self, change: int) -> None:
        self.users += change

    def covers(self, end: int) -> bool:
        return end <= self.entry.length

    def read_now(self, offset: int, target: memoryview) -> bool:
        return False

    async def read(self, offset: int, target: memoryview) -> None:
        target[:] = await self._objects.read(offset, len(target), self.entry.length)

    def retire(self) -> None:
        self._objects.close()

    close = retire


Reader = PlainReader | ProtectedReader
