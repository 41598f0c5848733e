"""Files that several hosts read together: each MiB comes from servers once, then from host to host.

Nothing depends on it: a MiB that does not come soon is fetched from servers, and one that comes has
to match its checksum on record. So files without checksums (written in place) come from servers.
"""

from collections.abc import Callable, Hashable
from typing import NamedTuple, Protocol

from aifs.data.checks import HASHED
from aifs.data.objects.cached_reads import Stage
from aifs.data.objects.checked_reads import CheckedReads, FileBlocks, LoadDigests, name_of_checked
from aifs.data.objects.columns import Columns
from aifs.data.reading.read_cache import ReadCache
from aifs.data.servers import Servers
from aifs.data.storage import Key

TOGETHER_FROM = 8 << 20
"""Bytes of a file; other hosts do not hear of readers of smaller ones."""


class Others(Protocol):
    """The other hosts that read a file, as far as they are known."""

    @property
    def is_alone(self) -> bool:
        """There are none."""

    async def meet(self) -> None:
        """Wait, for a short time, until it is known which other hosts read it."""

    def read_to(self, end: int) -> None:
        """Bytes up to ``end`` are being read here. Does not block."""

    async def fetch(self, offset: int, part: memoryview) -> bool:
        """Fill ``part`` with a MiB, or the last bytes, if another host is to have it and gives it
        soon; whether it did. It may be wrong."""

    def end(self, giver: "Giver") -> None:
        """Nobody reads the file by way of ``giver`` any more. Does not block."""


class Giver(Protocol):
    """A reader that gives other hosts bytes of a file."""

    async def give(self, offset: int, load: bool) -> memoryview | None:
        """A MiB, or the last bytes; None if not here. ``load``: fetch it then. Raises
        Unavailable."""


Join = Callable[[Key, Giver], Others]
"""A large file is read here: other hosts hear of that when they ``meet``. Does not block."""


class Sharing(NamedTuple):
    """The means to read a file together with other hosts."""

    load: LoadDigests
    join: Join


class TogetherReads:
    """Of one object set. See Stage."""

    def __init__(
        self,
        servers: Servers,
        columns: Columns,
        below: Stage,
        checked: CheckedReads,
        join: Join,
    ) -> None:
        """``checked``: checks bytes from hosts, and reads what none gives."""
        self._servers = servers
        self._key = columns.key
        self._below = below
        self.read_past, self.read_now, self.find = below.read_past, below.read_now, below.find
        self._checked = checked
        self._join = join
        name = name_of_checked(columns.key)
        self._blocks = FileBlocks(servers, columns.layout, name, HASHED, self._fill, columns.in_use)
        self._others: Others | None = None
        """Those that read the file; None: they have not been told that it is read here."""
        self._size = 0
        """Of the file."""
        self._fetched: set[int] = set()
        """The MiBs that are being fetched from the servers."""

    async def read(self, offset: int, length: int, size: int, strict: bool = True) -> memoryview:
        """See Stage. Bytes without checksums, files without other readers, and reads of no stream
        go to the stage below."""
        if strict and size >= TOGETHER_FROM:
            data = await self._read_together(offset, length, size)
            if data is not None:
                return data
        return await self._below.read(offset, length, size, strict)

    async def _read_together(self, offset: int, length: int, size: int) -> memoryview | None:
        self._size, covers = size, self._checked.covers
        if self._others is None:
            if not await covers(offset):
                return None
            self._others = self._others or self._join(self._key, self)
        self._others.read_to(offset + length)
        await self._others.meet()
        if self._others.is_alone:
            return None
        if not (await covers(offset) and await covers(offset + length - 1)):
            return None
        return await self._blocks.read(offset, length, size, only_streams=True)

    def forget(self) -> None:
        """See Stage."""
        self._checked.forget()

    def end(self) -> None:
        """See Stage."""
        self._below.end()
        if self._others is not None:
            self._others.end(self)

    async def give(self, offset: int, load: bool) -> memoryview | None:
        """See Giver."""
        number, length = offset // HASHED, min(HASHED, self._size - offset)
        if length <= 0 or offset % HASHED:
            return None
        block = self._servers.cache.peek(self._blocks.name, number)
        is_there = block is not None and not (block.loading and number not in self._fetched)
        if load or is_there:
            return await self._blocks.fetch(offset, length, self._size)
        # This host may be waiting for the asking one, now or soon: so only what is here counts.
        memory = memoryview(bytearray(length))
        return memory if await self.find(offset, memory) else None

    async def _fill(self, offset: int, part: memoryview, size: int) -> None:
        if self._others is not None and await self._checked.covers(offset):
            # What was read, or read ahead, before other hosts were known is here.
            for fetch in (self.find, self._others.fetch):
                if await fetch(offset, part) and await self._checked.is_right(offset, part):
                    return
        self._fetched.add(offset // HASHED)
        try:
            await self._checked.fill(offset, part, size)
        finally:
            self._fetched.discard(offset // HASHED)


def find_kept(cache: ReadCache, key: Key, offset: int) -> memoryview | None:
    """A MiB of a file that nobody reads any more, if the cache has kept it. Does not block."""
    name: Hashable = name_of_checked(key)
    block = cache.peek(name, offset // HASHED)
    return None if block is None else block.view
