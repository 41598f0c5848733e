"""Reading of containers, by descriptors that all files share.

Bytes in the page cache are read on the trio thread. The rest of a plain container goes through the
read cache, in pieces of about a stripe. Read-ahead works on containers, not files: files stored
together lie together, so reading them in this order is ahead, too.
"""

from collections.abc import Awaitable, Callable, Hashable
from functools import partial
from typing import Any, NamedTuple

from aifs.core.errors import Unavailable
from aifs.data import chunk_codec
from aifs.data.checks import Untold
from aifs.data.objects.cached_reads import Fetching, object_name
from aifs.data.objects.checked_reads import Wrong, put_right
from aifs.data.objects.columns import Columns
from aifs.data.objects.object_set import ObjectSet, OnDamage, Reading
from aifs.data.patience import gives_up, in_time
from aifs.data.reading.read_cache import BLOCK_MAX, FilledSource
from aifs.data.server import DataServer, MissingObject
from aifs.data.servers import Servers
from aifs.layout.interleaved import HEADER_BYTES, Location
from aifs.layout.striped import Striped

STRIPE_BLOCK = BLOCK_MAX
"""Bytes of a plain container that are fetched at once: about a stripe."""


class ContainerEntry(NamedTuple):
    """The entry of a container in the table."""

    layout: Striped
    length: int
    unread: int = 0
    """Mask of columns that must not be read."""
    is_sealed: bool = False
    """It never grows any more."""

    def size(self, end: int) -> int:
        """The container's length for reads up to ``end``; the object of a plain one may have
        grown."""
        if self.layout.is_protected:
            return self.length
        return -(-max(self.length, end) // STRIPE_BLOCK) * STRIPE_BLOCK

    def is_grown_to(self, entry: "ContainerEntry") -> bool:
        """Whether readers of this one go on by ``entry``: a plain one may have grown."""
        length = entry.length if self.layout.is_protected else self.length
        return self == entry._replace(length=length, is_sealed=self.is_sealed)

    def fixed(self, block: int) -> int:
        """How many bytes never change, in whole blocks where more may come."""
        return self.length if self.is_sealed else self.length - self.length % block


class _Open:
    """A container that is read."""

    __slots__ = ("close_idle", "entry", "objects", "used")

    def __init__(self, entry: ContainerEntry, objects: ObjectSet) -> None:
        self.entry = entry
        self.objects = objects
        self.used = True
        """See descriptors.DescriptorUser, as ``close_idle``."""
        self.close_idle = objects.close_idle


Find = Callable[[int], Awaitable[ContainerEntry | None]]
"""The table's entry of a container; None if it has none (any more)."""

Check = Callable[[memoryview], None]
"""Raises ValueError, in a worker thread, if these bytes are not what they should be."""


class ContainerFiles:
    """Used from one trio thread. ``on_damage`` is told of columns of protected containers."""

    def __init__(self, servers: Servers, find: Find, on_damage: OnDamage) -> None:
        self.servers = servers
        self._on_damage = on_damage
        self._find = find
        self._open: dict[int, _Open] = {}  # by container
        self._moved: Callable[[int], None] = lambda container: None
        self._forgotten: Callable[[], None] = lambda: None
        servers.descriptors.add_users(self._open.values)

    def tell(self, moved: Callable[[int], None], forgotten: Callable[[], None]) -> None:
        """Call these by ``moved`` and ``forget``: others have descriptors of containers, too."""
        self._moved, self._forgotten = moved, forgotten

    def changed(self, container: int, layout: Striped) -> None:
        """Bytes were appended, or what an append left behind the end is void."""
        for number in layout.servers:
            if (server := self.servers.find(number)) is not None:
                self.servers.cache.invalidate(object_name(server, (0, container)))

    def moved(self, container: int) -> None:
        """The table has new places or good columns of a container. Does not block."""
        self.servers.cache.invalidate(_chunks_of(container))
        self._retire(container)
        self._moved(container)

    def follow(self, container: int, layout: Striped | None) -> None:
        """Another host has changed a container's entry (None: removed). One that only grew, or has
        less alive, is read on: see ``_opened``. Does not block."""
        found = self._open.get(container)
        if found is None or found.entry.layout != layout:
            self.moved(container)

    def _retire(self, container: int) -> None:
        found = self._open.pop(container, None)
        if found is not None:
            found.objects.close()

    # --- bytes ---

    def read_now(self, container: int, offset: int, target: memoryview) -> bool:
        """Fill ``target`` from byte ``offset``, if that needs no waiting."""
        found = self._open.get(container)
        if found is None:
            return False
        found.used = True
        try:
            return found.objects.read_now(offset, target, offset + len(target))
        except Unavailable:
            return False  # ``read`` will say so

    async def read(self, container: int, offset: int, target: memoryview) -> None:
        """Fill ``target`` from byte ``offset``. Raises MissingObject, Unavailable."""
        end = offset + len(target)
        found = await self._opened(container, end)
        objects = found.objects
        objects.in_use(1)
        try:
            # Else the first read would pass the page cache by, and fetch a whole stripe.
            if await objects.open() and objects.read_now(offset, target, end):
                return
            await objects.fill(offset, target, found.entry.size(end))
        finally:
            objects.in_use(-1)

    async def view(self, container: int, offset: int, length: int) -> memoryview:
        """The bytes in place if in one piece of memory: not to be changed, reused once no view is
        left. Cancellable."""
        found = await self._opened(container, offset + length)
        objects = found.objects
        objects.in_use(1)
        try:
            await objects.open()  # as in ``read``
            return await objects.read(offset, length, found.entry.size(offset + length))
        finally:
            objects.in_use(-1)

    async def local_files(
        self, container: int, end: int
    ) -> tuple[int, list[tuple[DataServer, int]]]:
        """Stripe unit, and ObjectSet.local_files, of a container of ``end`` bytes. Raises
        MissingObject, Unavailable."""
        found = await self._opened(container, end)
        found.objects.in_use(1)
        try:
            local = await found.objects.local_files(max(found.entry.length, end))
        finally:
            found.objects.in_use(-1)
        is_open = self._open.get(container) is found
        return found.entry.layout.unit, local if is_open else []

    # --- bytes that are checked ---

    async def read_right(
        self, container: int, offset: int, target: memoryview, check: Check
    ) -> None:
        """``read`` bytes that ``check`` finds right, of a protected container by other columns if
        need be. Raises MissingObject, Unavailable, Untold."""
        await self.read(container, offset, target)
        entry = (await self._opened(container, offset + len(target))).entry
        wrong = await self._work(entry.layout, _what_is_wrong, check, target)
        if wrong:
            await self._put_right(container, entry, offset, target, check, wrong)

    async def _put_right(
        self,
        container: int,
        entry: ContainerEntry,
        offset: int,
        target: memoryview,
        check: Check,
        wrong: str,
    ) -> None:
        layout, length, unread, _ = entry
        columns = Columns(self.servers, layout, 0, container)
        where = f"container {container}"

        async def is_right() -> bool:
            return not await self._work(layout, _what_is_wrong, check, target)

        found = Wrong(columns, unread, length, offset, where, self._on_damage)
        try:
            if self.servers.blocks.correct(container):  # they may be what is wrong
                await self.read(container, offset, target)
                if await is_right():
                    return
            if await put_right(found, target, is_right):
                return
        finally:
            columns.close()
        if not layout.is_protected:
            server = self.servers[layout.servers[0]]
            where = f"{server.name}: {server.where((0, container))}"
        raise Untold(f"{where}: chunk at {offset}: {wrong}")

    async def read_stored(self, place: Location, target: memoryview) -> None:
        """A chunk as it is stored, with its header, checked. Raises MissingObject, Unavailable."""
        await self.read_right(place.container, place.offset, target, partial(_check_stored, place))

    async def read_chunk(self, place: Location) -> memoryview:
        """A chunk's raw bytes, checked; fetched once for all readers meanwhile, and kept a while.
        Raises MissingObject, Unavailable, Untold."""
        cache, name = self.servers.cache, _chunks_of(place.container)
        block = cache.find(name, place.offset, place.raw)
        if block is None:
            source = FilledSource(name, place.raw, partial(self._fetch, place))
            block = cache.start_whole(source, place.offset, place.raw)
        if not (block.loading and gives_up()):
            return await block.bytes()
        layout = (await self._opened(place.container, place.offset)).entry.layout
        with in_time(self.servers.idlest(layout.servers).workers.patience):
            return await block.bytes()

    def has_chunk(self, place: Location) -> bool:
        """Whether it is in memory, or on its way there."""
        return self.servers.cache.peek(_chunks_of(place.container), place.offset) is not None

    async def _fetch(self, place: Location, memory: memoryview, _: int) -> int:
        target = memory[: place.raw]
        offset = place.offset + HEADER_BYTES
        stored = target if place.codec == chunk_codec.PLAIN else memoryview(bytearray(place.stored))
        if not self.read_now(place.container, offset, stored):
            await self.read(place.container, offset, stored)
        entry = (await self._opened(place.container, offset + place.stored)).entry
        wrong = await self._work(entry.layout, _decode, place, stored, target)
        if wrong:
            await self._put_right(
                place.container, entry, offset, stored, partial(_check, place), wrong
            )
            await self._work(entry.layout, _decode, place, stored, target)
        return place.raw

    async def _work(self, layout: Striped, function: Callable[..., Any], *args: Any) -> Any:
        return await self.servers.run(self.servers.idlest(layout.servers), function, *args)

    # --- descriptors ---

    async def _opened(self, container: int, end: int) -> _Open:
        """A container of at least ``end`` bytes. Raises MissingObject if the table does not have
        it."""
        found = self._open.get(container)
        if found is None or end > found.entry.length:
            if found is None:  # one file may lie in many containers
                await self.servers.descriptors.find_room()
            entry = await self._find(container)
            if entry is None:
                raise MissingObject(f"container {container} does not exist")
            found = self._open.get(container)  # others may have been faster
            if found is None or not found.entry.is_grown_to(entry):
                self._retire(container)
                found = self._open[container] = _Open(entry, self._objects_of(container, entry))
            # The read cache may have what lay behind the length as it was known before, from before
            # another host wrote there.
            self.changed(container, entry.layout)
            found.entry = entry
            found.objects.fixed(entry.fixed(self.servers.blocks.block))
        found.used = True
        return found

    def _objects_of(self, container: int, entry: ContainerEntry) -> ObjectSet:
        cache, layout = self.servers.cache, entry.layout
        # Files are dealt out to containers on all servers, and read ahead in each of them.
        window = max(cache.window_max // max(len(self.servers.capacity()), 1), 2 * STRIPE_BLOCK)
        return ObjectSet(
            self.servers,
            layout,
            0,
            container,
            reading=Reading(
                entry.unread,
                partial(self._damaged, layout),
                near=True,
                fetching=Fetching() if layout.is_protected else Fetching(STRIPE_BLOCK, window, 0),
            ),
        )

    def _damaged(self, layout: Striped, container: int, ino: int, column: int) -> None:
        """A reader by this layout found damage; if it is an old one, the column may have moved."""
        found = self._open.get(container)
        if found is not None and found.entry.layout.servers[column] == layout.servers[column]:
            self._on_damage(container, ino, column)

    def forget(self) -> None:
        """Close and forget all, once reads have ended, to free deleted containers. Does not
        block."""
        while self._open:
            self._open.popitem()[1].objects.close()
        self._forgotten()

    def close(self) -> None:
        """The same, for good."""
        self.forget()
        self.servers.descriptors.remove_users(self._open.values)


def _chunks_of(container: int) -> Hashable:
    """The container's chunks in the read cache, by offset: they never change."""
    return ("chunks", container)


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
    header = chunk_codec.unpack_header(stored)
    if (header.stored, header.raw, header.codec, header.digest) != place[3:]:
        raise ValueError("its header is not what it was")
    _check(place, stored[HEADER_BYTES:])


def _decode(place: Location, stored: memoryview, target: memoryview) -> str:
    """Fill ``target`` with the raw bytes; returns the fault of the stored ones, or ""."""
    try:
        data = chunk_codec.decode(stored, place.codec, place.raw)
        if chunk_codec.digest_of(data) != place.digest:
            raise ValueError("its checksum is wrong")
    except ValueError as error:
        return str(error)
    if data is not target:
        target[:] = data
    return ""
