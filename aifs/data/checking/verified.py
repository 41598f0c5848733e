"""Reading striped files so that every MiB that comes from servers is compared with its checksum:
what is copied elsewhere always is, what programs read with ``data.verify: read``.

What is read is whole MiBs of the file, through the read cache, where only checked bytes enter: so
each is checked once as long as it is cached. Where a checksum differs, a protected file's bytes are
told without the columns that may be wrong, by trying which. Files without checksums, which are
those that were written in place, are read as they are.
"""

from collections.abc import Awaitable, Callable

import trio

from aifs.core.errors import FsError, Unavailable
from aifs.core.log import logger
from aifs.data.checking.checks import Untold
from aifs.data.checking.digests import DIGEST_BYTES, DIGESTS_AT_ONCE, HASHED
from aifs.data.checking.suspects import source_of, suspect_sets
from aifs.data.containers.chunk_codec import digest_of
from aifs.data.objects.columns import Columns
from aifs.data.objects.protected import ProtectedObjects
from aifs.data.objects.striped import StripedObjects
from aifs.data.reading.blocks import Block
from aifs.data.reading.cached_reads import collect
from aifs.data.reading.patterns import Pattern
from aifs.data.servers import Servers
from aifs.layout.striped import Striped

_log = logger(__name__)

LoadDigests = Callable[[int], Awaitable[tuple[int, bytes]]]
"""Checksums of the DIGESTS_AT_ONCE MiBs of a file among which is the one asked for: number of the
first, and BLAKE3 of each; b"": none."""

OnDamage = Callable[[int, int, int], None]
"""Called with oid, ino and the column whose object has wrong bytes. Does not block."""


class VerifiedObjects:
    """StripedObjects or ProtectedObjects, with checked reads. It is a Source of the read cache, for
    the file's bytes.

    Changes go straight through; from the first one on nothing is known of checksums until they are
    loaded again.
    """

    block = HASHED

    def __init__(
        self,
        servers: Servers,
        inner: StripedObjects | ProtectedObjects,
        layout: Striped,
        ino: int,
        oid: int,
        load: LoadDigests,
        on_damage: OnDamage = lambda oid, ino, column: None,
        lost: int = 0,
    ) -> None:
        """``lost``: mask of columns that must not be read."""
        self.name = ("verified", ino, oid)
        self._servers = servers
        self._inner = inner
        self._layout = layout
        self._key = (ino, oid)
        self._load_digests = load
        self._on_damage = on_damage
        self._lost = lost
        self._digests: dict[int, tuple[int, bytes]] = {}  # by MiB: the record that it is in
        self._generation = 0
        self._size = 0
        self._pattern = Pattern()
        self._columns = Columns(servers, layout, ino, oid)

    # --- what is not checked ---

    async def backing(self, size: int) -> int | None:
        """None: whoever reads by himself checks nothing."""
        return None

    async def write(self, offset: int, data: bytes | memoryview) -> None:
        self._forget()
        await self._inner.write(offset, data)

    async def punch(self, offset: int, length: int) -> None:
        self._forget()
        await self._inner.punch(offset, length)

    async def data_range(self, offset: int, size: int, strict: bool = True) -> tuple[int, int]:
        """As StripedObjects.data_range; but what has checksums may be no hole, even where it seems
        to be one.
        """
        if strict and offset < size and await self._digest(offset // HASHED):
            return offset, size
        return await self._inner.data_range(offset, size, strict)

    async def trim(self, size: int) -> None:
        self._forget()
        await self._inner.trim(size)

    async def settle(self, size: int) -> None:
        self._forget()
        await self._inner.settle(size)

    def blocks(self) -> int | None:
        return self._inner.blocks()

    async def sync(self, all_objects: bool = False) -> None:
        await self._inner.sync(all_objects)

    def close_idle(self) -> int:
        return self._inner.close_idle() + self._columns.close_idle()

    def close(self) -> None:
        self._inner.close()
        self._columns.close()

    def _forget(self) -> None:
        self._generation += 1
        self._digests.clear()
        self._servers.cache.invalidate(self.name)

    # --- reading ---

    async def read(self, offset: int, length: int, size: int, strict: bool) -> memoryview:
        """As StripedObjects.read. Raises Untold for bytes that are wrong and cannot be told
        otherwise.
        """
        first, last = offset // HASHED, (offset + length - 1) // HASHED
        if not strict or not (await self._digest(first) and await self._digest(last)):
            return await self._inner.read(offset, length, size, strict)
        self._size = size
        ahead = self._pattern.observe(offset, length, self._servers.cache.window_max)
        blocks = [self._block(number) for number in range(first, last + 1)]
        self._read_ahead(ahead)
        if None not in blocks:
            return await collect(blocks, offset, length)
        del blocks
        return await self._servers.cache.fetch(self, offset, length, size)

    async def read_into(self, offset: int, buffer: memoryview, size: int) -> None:
        """The same into ``buffer``, past all caches; ``offset`` is a multiple of a MiB, and the end
        another or the file's.
        """
        for start in range(0, len(buffer), HASHED):
            await self._read_checked(offset + start, buffer[start : start + HASHED], size)

    async def is_right(self, offset: int, part: memoryview) -> bool:
        """Whether these bytes of the file, a MiB or its last ones, have their checksum, or there is
        none.
        """
        expected = await self._digest(offset // HASHED)
        return not expected or await self._digest_of(part) == expected

    def _block(self, number: int) -> Block | None:
        needed = min(HASHED, self._size - number * HASHED)
        cache = self._servers.cache
        return cache.find(self, number, needed) or cache.start(self, number, self._size)

    def _read_ahead(self, ranges: list[tuple[int, int]]) -> None:
        for begin, length in ranges:
            for number in range(begin // HASHED, -(-min(begin + length, self._size) // HASHED)):
                if not self._servers.cache.read_ahead(self, number, self._size):
                    self._pattern.refused(begin, number * HASHED)
                    return

    @property
    def busy(self) -> bool:
        """See read_cache.Source."""
        return all(
            self._servers[number].workers.busy
            for number in self._layout.servers[: self._layout.width]
        )

    def start(
        self, tell: Callable[[int | BaseException], None], buffer: memoryview, offset: int
    ) -> None:
        """See read_cache.Source."""
        size = self._size
        trio.lowlevel.spawn_system_task(
            self._load, tell, buffer[: min(HASHED, size - offset)], offset, size
        )

    async def _load(
        self, tell: Callable[[int | BaseException], None], part: memoryview, offset: int, size: int
    ) -> None:
        try:
            await self._read_checked(offset, part, size)
        except Exception as error:  # noqa: BLE001 (raised again where the bytes are waited for)
            tell(error)
        else:
            tell(len(part))

    async def _read_checked(self, offset: int, part: memoryview, size: int) -> None:
        expected = await self._digest(offset // HASHED)
        if expected and await self._read_at_once(offset, part) == expected:
            return
        await self._inner.read_into(offset, part, size)
        if expected and await self._digest_of(part) != expected:
            await self._tell_right(offset, part, size, expected)

    async def _read_at_once(self, offset: int, part: memoryview) -> bytes | None:
        """Fill ``part`` and return its checksum, by one call, while it is in the processor's cache,
        if it lies in one object of an unprotected file: for all else others know better who is to
        be asked. None also for what cannot be read."""
        index, object_offset, _, length = next(self._layout.extents(offset, len(part)))
        if self._layout.is_protected or length < len(part):
            return None
        [answer] = await self._columns.attempt(
            [(index, self._read_and_hash, (index, part, object_offset))]
        )
        return None if isinstance(answer, FsError) else answer

    def _read_and_hash(self, column: int, part: memoryview, offset: int) -> bytes | None:
        return (
            digest_of(part) if self._columns.read_now(column, part, offset) == len(part) else None
        )

    async def _digest(self, number: int) -> bytes:
        """The checksum of a MiB; b"" if it has none."""
        record = self._digests.get(number // DIGESTS_AT_ONCE)
        if record is None:
            generation = self._generation
            record = await self._load_digests(number)
            if generation == self._generation:
                self._digests[number // DIGESTS_AT_ONCE] = record
        first, digests = record
        return digests[(number - first) * DIGEST_BYTES : (number - first + 1) * DIGEST_BYTES]

    async def _digest_of(self, part: memoryview) -> bytes:
        servers = [
            self._servers[number] for number in self._layout.servers if number in self._servers
        ]
        idlest = min(
            servers, key=lambda server: server.workers.outstanding
        )  # one that hangs is not
        return await self._servers.run(idlest, digest_of, part)

    # --- wrong bytes ---

    async def _tell_right(self, offset: int, part: memoryview, size: int, expected: bytes) -> None:
        """Fill ``part`` with the bytes that have the checksum ``expected``, and report whose were
        wrong.
        """
        (ino, oid), layout = self._key, self._layout
        touched = {extent.index for extent in layout.extents(offset, len(part))}
        for suspects in suspect_sets(layout, touched, self._lost):
            try:
                await read_without(self._columns, layout, suspects, offset, part, size)
            except FsError:
                continue
            if await self._digest_of(part) == expected:
                self._report(suspects, offset)
                return
        where = " or ".join(
            f"{self._servers[number].name} ({self._servers[number].object_path(ino, oid)})"
            for number in (layout.servers[column] for column in sorted(touched))
        )
        end = offset + len(part) - 1
        raise Untold(
            f"inode {ino}: bytes {offset} to {end}, on {where}, do not have their checksum"
        )

    def _report(self, suspects: frozenset[int], offset: int) -> None:
        ino, oid = self._key
        wrong = [column for column in sorted(suspects) if not self._lost >> column & 1]
        for column in wrong:
            self._on_damage(oid, ino, column)
        if not wrong:
            _log.info(
                "inode %d: bytes from %d on had a wrong checksum once, and a right one when read again",
                ino,
                offset,
            )


class FollowedObjects:
    """For who copies a striped file while others read it: by way of the caches that these use, so
    that each byte comes from its server once for all, and checked."""

    def __init__(
        self,
        objects: StripedObjects | ProtectedObjects | VerifiedObjects,
        checked: VerifiedObjects,
    ) -> None:
        """``objects``: as the others read them; of nobody else. ``checked`` tells what is wrong
        there.
        """
        self._objects = objects
        self._checked = checked

    async def read_into(self, offset: int, buffer: memoryview, size: int) -> None:
        """As of VerifiedObjects, but for the caches."""
        for start in range(0, len(buffer), HASHED):
            part = buffer[start : start + HASHED]
            part[:] = await self._objects.read(offset + start, len(part), size, True)
            if not await self._checked.is_right(offset + start, part):
                await self._checked.read_into(offset + start, part, size)

    async def data_range(self, offset: int, size: int, strict: bool = True) -> tuple[int, int]:
        """As of VerifiedObjects."""
        return await self._checked.data_range(offset, size, strict)

    def close(self) -> None:
        self._objects.close()
        self._checked.close()


async def read_without(
    columns: Columns,
    layout: Striped,
    suspects: frozenset[int],
    offset: int,
    part: memoryview,
    size: int,
) -> None:
    """Fill ``part`` with bytes of a file of ``size`` bytes, told by columns that are not
    ``suspects``. Raises Unavailable.
    """
    for index, object_offset, file_offset, length in layout.extents(offset, len(part)):
        target = part[file_offset - offset : file_offset - offset + length]
        source = source_of(layout, index, suspects)
        if source is None:
            target[:] = await columns.reconstruct(index, object_offset, length, size, suspects)
        elif len(found := await columns.fetch(source, object_offset, length)) < length:
            raise Unavailable(f"column {source} ends too early")
        else:
            target[:] = found
