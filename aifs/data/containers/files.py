"""Reading of containers, by descriptors that all files share.

Bytes that lie in the page cache are read on the trio thread straight into the answer, as striped
objects are. Everything else of a plain container goes through the read cache, in pieces of about a
stripe; what will be read next is seen here and not at the files: files that were stored together
lie together, so who reads them in this order reads ahead, too. Protected containers are read as
protected files are (see protected.py), which does the same.
"""

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial

from aifs.core.errors import Unavailable
from aifs.core.log import logger
from aifs.data.checking.checks import Untold
from aifs.data.checking.suspects import suspect_sets
from aifs.data.containers import chunk_codec
from aifs.data.containers.readers import Entry, OnDamage, PlainReader, ProtectedReader, Reader
from aifs.data.objects.protected import ProtectedObjects
from aifs.data.reading.blocks import object_name
from aifs.data.reading.chunk_cache import ChunkCache
from aifs.data.server import Missing, name_of
from aifs.data.servers import Servers
from aifs.layout.interleaved import HEADER_BYTES, Location
from aifs.layout.striped import Striped

_log = logger(__name__)

_OPEN_MAX = 64

Find = Callable[[int], Awaitable[Entry | None]]
"""The table's entry of a container; None if it has none (any more)."""

Check = Callable[[memoryview], None]
"""Raises ValueError, in a worker thread, if these bytes are not what they should be."""


class ContainerFiles:
    """Used from one trio thread. ``on_damage`` is told of columns of protected containers."""

    def __init__(self, servers: Servers, find: Find, on_damage: OnDamage) -> None:
        self.servers = servers
        self._on_damage = on_damage
        self._find = find
        self._open: OrderedDict[int, Reader] = OrderedDict()  # by container, used last at the end
        self._chunks = ChunkCache(servers.budget)

    def changed(self, container: int, layout: Striped) -> None:
        """Bytes have been appended to a container, or what an append left behind its end counts no
        more.
        """
        for number in layout.servers:
            if (server := self.servers.find(number)) is not None:
                self.servers.cache.invalidate(object_name(server, (0, container)))

    def moved(self, container: int) -> None:
        """The table says something else of a container now: where it is, or which columns are good.
        Does not block.
        """
        self._chunks.forget(container)
        self._retire(container)

    def _retire(self, container: int) -> None:
        reader = self._open.pop(container, None)
        if reader is not None:
            reader.retire()

    # --- bytes ---

    def read_now(self, container: int, offset: int, target: memoryview) -> bool:
        """Fill ``target`` from byte ``offset`` of a container, if that can be done without
        waiting.
        """
        reader = self._open.get(container)
        if reader is None:
            return False
        self._open.move_to_end(container)
        return reader.read_now(offset, target)

    async def read(self, container: int, offset: int, target: memoryview) -> None:
        """Fill ``target`` from byte ``offset`` of a container. Raises Missing, Unavailable."""
        reader = await self._reader(container, offset + len(target))
        reader.in_use(1)
        try:
            await reader.read(offset, target)
        finally:
            reader.in_use(-1)

    # --- bytes that are checked ---

    async def read_right(
        self, container: int, offset: int, target: memoryview, check: Check
    ) -> None:
        """The same for bytes that are right if ``check`` says so. Those of a protected container
        are put together from other columns until they are. Raises Missing, Unavailable, Untold."""
        await self.read(container, offset, target)
        entry = (await self._reader(container, offset + len(target))).entry
        wrong = await self._work(entry.layout, _what_is_wrong, check, target)
        if wrong:
            await self._put_right(container, entry, offset, target, check, wrong)

    async def _put_right(
        self,
        container: int,
        entry: Entry,
        offset: int,
        target: memoryview,
        check: Check,
        wrong: str,
    ) -> None:
        layout, length, lost = entry
        columns = {extent.index for extent in layout.extents(offset, len(target))}
        for suspects in suspect_sets(layout, columns, lost) if layout.is_protected else ():
            without = sum(1 << column for column in suspects)
            objects = ProtectedObjects(self.servers, layout, 0, container, lost=without)
            try:
                await objects.read_into(offset, target, length)
            except Unavailable:
                continue
            finally:
                objects.close()
            if not await self._work(layout, _what_is_wrong, check, target):
                for column in suspects:
                    if not lost >> column & 1:
                        server = name_of(layout.servers[column])
                        _log.warning(
                            "container %d: %s holds wrong bytes near byte %d",
                            container,
                            server,
                            offset,
                        )
                        self._on_damage(container, 0, column)
                return
        where = f"container {container}"
        if not layout.is_protected:
            server = self.servers[layout.servers[0]]
            where = f"{server.name}: {server.object_path(0, container)}"
        raise Untold(f"{where}: chunk at {offset}: {wrong}")

    async def read_stored(self, place: Location, target: memoryview) -> None:
        """A chunk as it is stored, with its header, checked. Raises Missing, Unavailable."""
        await self.read_right(place.container, place.offset, target, partial(_check_stored, place))

    async def read_chunk(self, place: Location) -> memoryview:
        """The raw bytes of a chunk, checked; fetched once for all who ask meanwhile, and kept for a
        while. Raises Missing, Unavailable, Untold."""
        return await self._chunks.get(place, self._fetch)

    def find_chunk(self, place: Location) -> memoryview | None:
        """The same if it is in memory."""
        return self._chunks.find(place)

    async def _fetch(self, place: Location, target: memoryview) -> None:
        offset = place.offset + HEADER_BYTES
        stored = target if place.codec == chunk_codec.PLAIN else memoryview(bytearray(place.stored))
        if not self.read_now(place.container, offset, stored):
            await self.read(place.container, offset, stored)
        entry = (await self._reader(place.container, offset + place.stored)).entry
        wrong = await self._work(entry.layout, _decode, place, stored, target)
        if wrong:
            await self._put_right(
                place.container, entry, offset, stored, partial(_check, place), wrong
            )
            await self._work(entry.layout, _decode, place, stored, target)

    async def _work(self, layout: Striped, function: Callable, *args: object) -> object:
        """In a worker thread of whichever of the container's servers has the least to do."""
        return await self.servers.run(self.servers.idlest(layout.servers), function, *args)

    # --- descriptors ---

    async def _reader(self, container: int, end: int) -> Reader:
        """Of a container that has at least ``end`` bytes. Raises Missing if the table does not have
        it.
        """
        reader = self._open.get(container)
        if reader is None or not reader.covers(end):
            entry = await self._find(container)
            if entry is None:
                raise Missing(f"container {container} does not exist")
            reader = self._open.get(container)  # others may have been faster
            if reader is None or reader.entry != entry:
                self._retire(container)
                reader = self._open[container] = self._new(container, entry)
                self._close_some(_OPEN_MAX)
        self._open.move_to_end(container)
        return reader

    def _new(self, container: int, entry: Entry) -> Reader:
        if entry.layout.is_protected:
            return ProtectedReader(
                self.servers, container, entry, partial(self._damaged, entry.layout)
            )
        return PlainReader(self.servers, container, entry)

    def _damaged(self, layout: Striped, container: int, ino: int, column: int) -> None:
        """Found by a reader that goes by this layout; if it is not the one in use any more, the
        column may have moved.
        """
        reader = self._open.get(container)
        if reader is not None and reader.entry.layout.servers[column] == layout.servers[column]:
            self._on_damage(container, ino, column)

    def _close_some(self, keep: int) -> None:
        for container in list(self._open)[: len(self._open) - keep]:
            if not self._open[container].users:
                self._open.pop(container).close()

    def close_idle(self) -> None:
        """Close what nobody reads now, so that deleted containers give back their space. Does not
        block.
        """
        self._close_some(0)

    def close(self) -> None:
        """Close all, each when what is under way has been read. Nobody begins to read any more.
        Does not block.
        """
        while self._open:
            self._open.popitem()[1].retire()


# --- in worker threads ---


def _what_is_wrong(check: Callable[[memoryview], None], data: memoryview) -> str:
    try:
        check(data)
    except ValueError as error:
        return str(error)
    return ""


def _check(place: Location, stored: memoryview) -> None:
    """Raises ValueError if these are not the stored bytes of the chunk."""
    if chunk_codec.digest_of(chunk_codec.decode(stored, place.codec, place.raw)) != place.digest:
        raise ValueError("its checksum is wrong")


def _check_stored(place: Location, stored: memoryview) -> None:
    """The same, with the header before them."""
    header = chunk_codec.unpack_header(stored)
    if (header.stored, header.raw, header.codec, header.digest) != place[3:]:
        raise ValueError("its header is not what it was")
    _check(place, stored[HEADER_BYTES:])


def _decode(place: Location, stored: memoryview, target: memoryview) -> str:
    """Fill ``target`` with the raw bytes; what is wrong with the stored ones, or ""."""
    try:
        data = chunk_codec.decode(stored, place.codec, place.raw)
        if chunk_codec.digest_of(data) != place.digest:
            raise ValueError("its checksum is wrong")
    except ValueError as error:
        return str(error)
    if data is not target:
        target[:] = data
    return ""
