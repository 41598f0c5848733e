"""Reading striped files with every MiB from servers compared with its checksum: always for copies
elsewhere, for programs with ``data.verify: read``.

Whole MiBs are read, through the read cache, which only checked bytes enter. If a checksum differs,
a protected file's bytes are told without columns that may be wrong. Files without checksums (those
written in place) are read as they are.
"""

from collections.abc import Awaitable, Callable, Hashable
from typing import NamedTuple

from aifs.core.errors import FsError, Unavailable
from aifs.core.log import logger
from aifs.core.tasks import is_complete
from aifs.data.checks import (
    DIGEST_BYTES,
    DIGESTS_AT_ONCE,
    HASHED,
    Untold,
    source_of,
    suspect_sets,
)
from aifs.data.chunk_codec import digest_of
from aifs.data.objects.cached_reads import WHOLE_BLOCKS_FROM, Stage, collect
from aifs.data.objects.columns import Columns, columns_of
from aifs.data.reading.patterns import AccessPattern
from aifs.data.reading.read_cache import FilledSource
from aifs.data.server import name_of
from aifs.data.servers import Servers
from aifs.data.storage import Key
from aifs.layout.striped import Striped

_log = logger(__name__)

LoadDigests = Callable[[int], Awaitable[tuple[int, bytes]]]
"""Checksums of DIGESTS_AT_ONCE MiBs around the given one: first number, BLAKE3s; b"": none."""

OnDamage = Callable[[int, int, int], None]
"""Called with oid, ino and the column whose object has wrong bytes. Does not block."""


class CheckedReads:
    """Of one object set. After a change, checksums are loaded again."""

    def __init__(
        self,
        servers: Servers,
        columns: Columns,
        below: Stage,
        load: LoadDigests,
        on_damage: OnDamage,
        unread: int,
    ) -> None:
        """``unread``: mask of columns that must not be read."""
        self._servers = servers
        self._layout = layout = columns.layout
        self._columns = columns
        self._below = below
        self.read_now, self.find = below.read_now, below.find
        self.end = below.end
        self._load = load
        self._on_damage = on_damage
        self._unread = unread
        self._digests: dict[int, tuple[int, bytes]] = {}  # by MiB: the record that it is in
        self._generation = 0
        name = name_of_checked(columns.key)
        self._blocks = FileBlocks(servers, layout, name, HASHED, self.fill, columns.in_use)

    async def read(self, offset: int, length: int, size: int, strict: bool = True) -> memoryview:
        """See Stage. Raises Untold for bytes that are wrong, whichever columns tell them."""
        data = None
        if strict and await self.covers(offset) and await self.covers(offset + length - 1):
            data = await self._blocks.read(offset, length, size)
        return await self._below.read(offset, length, size, strict) if data is None else data

    async def read_past(self, offset: int, buffer: memoryview, size: int) -> None:
        """See Stage. ``offset`` is a multiple of a MiB, and the end another or the file's."""
        for start in range(0, len(buffer), HASHED):
            await self.fill(offset + start, buffer[start : start + HASHED], size)

    async def is_right(self, offset: int, part: memoryview) -> bool:
        """Whether a MiB of the file, or its last bytes, match any checksum."""
        expected = await self._digest(offset // HASHED)
        return not expected or await self._digest_of(part) == expected

    async def covers(self, offset: int) -> bool:
        """Whether the byte has a checksum."""
        return bool(await self._digest(offset // HASHED))

    def forget(self) -> None:
        """See Stage."""
        self._below.forget()
        self._generation += 1
        self._digests.clear()
        self._blocks.forget()

    async def fill(self, offset: int, part: memoryview, size: int) -> None:
        """Fill ``part`` with a MiB of the file, or its last bytes, checked."""
        expected = await self._digest(offset // HASHED)
        if expected and await self._read_at_once(offset, part) == expected:
            return
        await self._below.read_past(offset, part, size)
        if expected and await self._digest_of(part) != expected:
            await self._tell_right(offset, part, size, expected)

    async def _read_at_once(self, offset: int, part: memoryview) -> bytes | None:
        """Fill ``part`` and return its checksum by one call, while in the processor's cache, if it
        is in one object of an unprotected file. None otherwise, and if unreadable."""
        index, object_offset, _, length = next(self._layout.extents(offset, len(part)))
        if self._layout.is_protected or length < len(part):
            return None
        [answer] = await self._columns.attempt(
            [(index, self._read_and_hash, (index, part, object_offset))]
        )
        return None if isinstance(answer, FsError) else answer

    def _read_and_hash(self, column: int, part: memoryview, offset: int) -> bytes | None:
        done = self._columns.read_now(column, part, offset)
        return digest_of(part) if done == len(part) else None

    async def _digest(self, number: int) -> bytes:
        record = self._digests.get(number // DIGESTS_AT_ONCE)
        if record is None:
            generation = self._generation
            record = await self._load(number)
            if generation == self._generation:
                self._digests[number // DIGESTS_AT_ONCE] = record
        first, digests = record
        return digests[(number - first) * DIGEST_BYTES : (number - first + 1) * DIGEST_BYTES]

    async def _digest_of(self, part: memoryview) -> bytes:
        idlest = self._servers.idlest(self._layout.servers)
        return await self._servers.run(idlest, digest_of, part)

    # --- wrong bytes ---

    async def _tell_right(self, offset: int, part: memoryview, size: int, expected: bytes) -> None:
        """Fill ``part`` with bytes of the checksum ``expected``, and report wrong columns."""
        (ino, oid), layout = self._columns.key, self._layout
        touched = {extent.column for extent in layout.extents(offset, len(part))}

        async def is_right() -> bool:
            return await self._digest_of(part) == expected

        what = f"inode {ino}"
        wrong = Wrong(self._columns, self._unread, size, offset, what, self._on_damage)
        if await put_right(wrong, part, is_right):
            return
        where = " or ".join(
            f"{self._servers[number].name} ({self._servers[number].where((ino, oid))})"
            for number in (layout.servers[column] for column in sorted(touched))
        )
        end = offset + len(part) - 1
        raise Untold(f"{what}: bytes {offset} to {end}, on {where}, do not have their checksum")


def name_of_checked(key: Key) -> Hashable:
    """The name of a file's checked MiBs in the read cache."""
    return ("verified", *key)


class Wrong(NamedTuple):
    """Bytes of a file, or a container, that do not have their checksum."""

    columns: Columns
    unread: int
    """Mask of columns that must not be read."""
    size: int
    """Of the file or container."""
    offset: int
    """Where the bytes begin."""
    what: str
    """The file or container, for people."""
    on_damage: OnDamage


async def put_right(
    wrong: Wrong, part: memoryview, is_right: Callable[[], Awaitable[bool]]
) -> bool:
    """Fill ``part`` with bytes that ``is_right``, without columns that may be wrong, which are
    reported. False: no choice of columns gives them."""
    columns, unread, size, offset, what, on_damage = wrong
    layout = columns.layout
    touched = {extent.column for extent in layout.extents(offset, len(part))}
    for without in suspect_sets(layout, touched, unread):
        try:
            await _read_without(columns, without, offset, part, size)
        except FsError:
            continue
        if not await is_right():
            continue
        ino, oid = columns.key
        for column in columns_of(without & ~unread):
            server = name_of(layout.servers[column])
            _log.warning("%s: %s holds wrong bytes near byte %d", what, server, offset)
            on_damage(oid, ino, column)
        if not without & ~unread:
            _log.info("%s: bytes from %d on were wrong once, and right again", what, offset)
        return True
    return False


async def _read_without(
    columns: Columns,
    unread: int,
    offset: int,
    part: memoryview,
    size: int,
) -> None:
    """Fill ``part`` with bytes of a file, by columns outside ``unread``. Raises Unavailable."""
    layout = columns.layout
    for index, object_offset, file_offset, length in layout.extents(offset, len(part)):
        target = part[file_offset - offset : file_offset - offset + length]
        source = source_of(layout, index, unread)
        if source is None:
            target[:] = await columns.reconstruct(index, object_offset, length, size, unread)
        elif len(found := await columns.fetch(source, object_offset, length)) < length:
            raise Unavailable(f"column {source} ends too early")
        else:
            target[:] = found


FillRange = Callable[[int, memoryview, int], Awaitable[None]]
"""Fills memory with the bytes of the file from an offset on; last the file's size."""


class FileBlocks(FilledSource):
    """Of one file, whose bytes nobody changes."""

    def __init__(
        self,
        servers: Servers,
        layout: Striped,
        name: Hashable,
        block: int,
        fill: FillRange,
        in_use: Callable[[int], None],
    ) -> None:
        """``name`` and ``block``: see BlockSource; ``in_use``: see FilledSource."""
        super().__init__(name, block, self._fill_block, in_use)
        self._servers = servers
        self._layout = layout
        self._fill_range = fill
        self._pattern = AccessPattern()
        self._size = 0

    async def read(
        self, offset: int, length: int, size: int, only_streams: bool = False
    ) -> memoryview | None:
        """Bytes of a file. ``only_streams``: None for a read of no stream, unless others have had
        the blocks filled. Raises errors of ``fill``."""
        cache, pattern, block = self._servers.cache, self._pattern, self.block
        ahead = pattern.observe(offset, length, cache.window_max)
        numbers = range(offset // block, (offset + length - 1) // block + 1)
        blocks = [
            cache.find(self.name, n, min(block, offset + length - n * block)) for n in numbers
        ]
        is_stream = pattern.following or length >= WHOLE_BLOCKS_FROM
        if only_streams and None in blocks and (pattern.random or not is_stream):
            return None
        self._size = size
        blocks = [
            found or cache.start(self, number, size)
            for number, found in zip(numbers, blocks, strict=True)
        ]
        self._read_ahead(ahead)
        if is_complete(blocks):
            return await collect(blocks, offset, length, block)
        del blocks  # nobody who waits for memory may hold any
        return await cache.fetch(self, offset, length, size)

    async def fetch(self, offset: int, length: int, size: int) -> memoryview:
        """The same, of one block, for a caller that does not read the file itself."""
        self._size = size
        return await self._servers.cache.fetch(self, offset, length, size)

    def _read_ahead(self, ranges: list[tuple[int, int]]) -> None:
        for begin, length in ranges:
            end = min(begin + length, self._size)
            for number in range(begin // self.block, -(-end // self.block)):
                if not self._servers.cache.read_ahead(self, number, self._size):
                    self._pattern.refused(begin, number * self.block)
                    return

    def forget(self) -> None:
        """Blocks that have been filled may have wrong bytes, or will have."""
        self._servers.cache.invalidate(self.name)

    @property
    def busy(self) -> bool:
        """See BlockSource."""
        servers = (self._servers.find(number) for number in self._layout.servers)
        return all(server is None or server.workers.busy for server in servers)

    async def _fill_block(self, buffer: memoryview, offset: int) -> int:
        part = buffer[: min(self.block, self._size - offset)]
        await self._fill_range(offset, part, self._size)
        return len(part)
