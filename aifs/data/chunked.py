"""Reading interleaved files: chunk by chunk, from containers that many files share.

Chunks that are stored as they are and lie in the page cache are read on the trio thread straight into the answer, as
striped objects are. Everything else goes through the read cache, in pieces of about a stripe. What will be read next
is seen at the containers, not at the files: files that were stored together lie together, so who reads them in this
order reads ahead, too.
"""

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from aifs.core import files
from aifs.core.errors import Unavailable
from aifs.core.tasks import run_all
from aifs.data import chunk_codec
from aifs.data.chunk_codec import PLAIN
from aifs.data.patterns import Pattern
from aifs.data.read_cache import BLOCK_MAX, ObjectSource, object_name
from aifs.data.server import DataServer, Missing
from aifs.data.servers import Servers
from aifs.layout.interleaved import HEADER_BYTES, Interleaved, Location

Chunks = Sequence[Location | None]
Load = Callable[[int], Awaitable[tuple[int, Chunks]]]
"""Where some chunks of a file lie, among them the one asked for: number of the first, places (None: a hole)."""

STRIPE_BLOCK = BLOCK_MAX
"""Bytes of a container that are fetched at once: about a stripe."""

_OPEN_MAX = 64
_DECODED_MAX = 4


class _File:
    """A container that is read; opened by the first read. ``users``: reads that are under way."""

    def __init__(self, server: DataServer, container: int) -> None:
        self.server = server
        self.key = (0, container)
        self.fd: int | None = None
        self.length = 0  # when it was opened
        self.users = 0
        self.pattern = Pattern()
        self.source = ObjectSource(server, self.key, self.read_into, STRIPE_BLOCK, self.in_use)

    def in_use(self, change: int) -> None:
        self.users += change

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Bytes read, fewer only at the container's end. Blocks; in workers, or where that takes microseconds."""
        if self.fd is None:
            self._open()
        return self.server.read(self.key, self.fd, buffer, offset)

    def _open(self) -> None:
        server, key = self.server, self.key
        with server.lock_of(key[1]):
            if self.fd is not None:
                return
            fd = server.open_object(key, create=False, write=False)
            if fd is None:
                raise Missing(f"{server.name}: {server.object_path(*key)} is missing")
            try:
                self.length = server.stat(key, fd).st_size
            except BaseException:
                files.close_file(fd)
                raise
            self.fd = fd

    def read_all(self, buffer: memoryview, offset: int) -> None:
        self.require(self.read_into(buffer, offset), buffer, offset)

    def require(self, done: int, buffer: memoryview, offset: int) -> None:
        if done < len(buffer):
            path = self.server.object_path(*self.key)
            raise Unavailable(f"{self.server.name}: {path} ends before byte {offset + len(buffer)}")

    def close(self) -> None:
        if self.fd is not None:
            self.server.close_object(self.fd)
            self.fd = None


class ContainerFiles:
    """Reading of containers, by descriptors that all files share. Used from one trio thread."""

    def __init__(self, servers: Servers, verify: bool) -> None:
        """``verify``: compare every chunk with its checksum each time it is read from its server."""
        self.servers = servers
        self.verify = verify
        self._cache = servers.cache
        self._open: OrderedDict[int, _File] = OrderedDict()  # by container, used last at the end
        self._decoded: OrderedDict[tuple[int, int], memoryview] = OrderedDict()

    def changed(self, server: int, container: int) -> None:
        """Bytes have been appended to a container, or what an append left behind its end counts no more."""
        self._cache.invalidate(object_name(self.servers[server], (0, container)))

    # --- bytes ---

    def read_now(self, place: Location, offset: int, target: memoryview) -> bool:
        """Fill ``target`` from byte ``offset`` of a container, if that can be done without waiting."""
        file = self._file(place)
        if file.server.may_inline:
            try:
                file.read_all(target, offset)
            except Missing:
                return False  # ``read`` will say so
            return True
        return file.fd is not None and file.server.read_cached(file.fd, target, offset)

    async def read(self, place: Location, offset: int, target: memoryview) -> None:
        """Fill ``target`` from byte ``offset`` of a container. Raises Missing, Unavailable."""
        file = self._file(place)
        ahead = file.pattern.observe(offset, len(target), self._cache.window_max)
        file.users += 1
        try:
            if file.pattern.random:
                await self.servers.run(file.server, file.read_all, target, offset)
            else:
                await self._read_through_cache(file, offset, target)
                self._read_ahead(file, ahead)
        finally:
            file.users -= 1

    async def _read_through_cache(self, file: _File, offset: int, target: memoryview) -> None:
        length = len(target)
        end = -(-(offset + length) // STRIPE_BLOCK) * STRIPE_BLOCK  # whole blocks: the container may have grown
        data = await self._cache.fetch(file.source, offset, length, end)
        file.require(len(data), target, offset)
        target[:] = data

    def _read_ahead(self, file: _File, ranges: list[tuple[int, int]]) -> None:
        for begin, length in ranges:
            end = min(begin + length, file.length)
            for number in range(begin // STRIPE_BLOCK, -(-end // STRIPE_BLOCK)):
                if not self._cache.read_ahead(file.source, number, file.length):
                    file.pattern.refused(begin, number * STRIPE_BLOCK)
                    return

    async def read_chunk(self, place: Location) -> memoryview:
        """The raw bytes of a chunk, checked if that is asked for. Raises Missing, Unavailable."""
        key = place.container, place.offset
        data = self._decoded.get(key)
        if data is None:
            stored = memoryview(bytearray(place.stored))
            if not self.read_now(place, place.offset + HEADER_BYTES, stored):
                await self.read(place, place.offset + HEADER_BYTES, stored)
            server = self.servers[place.server]
            data = await self.servers.run(server, _decode, server, place, stored, self.verify)
            self._decoded[key] = data
            if len(self._decoded) > _DECODED_MAX:
                self._decoded.popitem(last=False)
        return data

    # --- descriptors ---

    def _file(self, place: Location) -> _File:
        file = self._open.get(place.container)
        if file is None:
            file = self._open[place.container] = _File(self.servers[place.server], place.container)
            self._close_some(_OPEN_MAX)
        else:
            self._open.move_to_end(place.container)
        return file

    def _close_some(self, keep: int) -> None:
        for container in list(self._open)[: len(self._open) - keep]:
            if not self._open[container].users:
                self._open.pop(container).close()

    def close_idle(self) -> None:
        """Close what nobody reads now, so that deleted containers give back their space. Does not block."""
        self._close_some(0)


class ChunkedObjects:
    """One interleaved file, for reading: what StripedObjects are for a striped one. It never changes."""

    def __init__(self, containers: ContainerFiles, layout: Interleaved, load: Load) -> None:
        self._containers = containers
        self._layout = layout
        self._load = load
        self._first = 0
        self._chunks: Chunks = ()

    async def read(self, offset: int, length: int, size: int, strict: bool) -> memoryview:
        """Exactly ``length`` bytes of a file that has ``size``, as StripedObjects.read; what lacks is never zeros."""
        buffer = self._containers.servers.buffers.take(length)
        waiting = []
        done = 0
        while done < length:
            index, within = divmod(offset + done, self._layout.chunk)
            part = buffer[done : done + min(self._layout.chunk - within, length - done)]
            done += len(part)
            place = await self._find(index)
            if not self._read_now(place, index, within, part):
                waiting.append((place, index, within, part))
        if len(waiting) == 1:
            await self._read_part(*waiting[0])
        elif waiting:
            await run_all(*(partial(self._read_part, *args) for args in waiting))
        return buffer

    def _read_now(self, place: Location | None, index: int, within: int, part: memoryview) -> bool:
        if place is None:
            part[:] = bytes(len(part))
            return True
        if within + len(part) > place.raw:
            raise Unavailable(f"chunk {index} in container {place.container} has {place.raw} bytes only")
        if place.codec != PLAIN or self._containers.verify:
            return False
        return self._containers.read_now(place, place.offset + HEADER_BYTES + within, part)

    async def _read_part(self, place: Location, index: int, within: int, part: memoryview) -> None:
        try:
            await self._read_waiting(place, within, part)
        except Missing:
            self._chunks = ()
            moved = await self._find(index)
            if moved is None or moved == place:
                raise
            await self._read_waiting(moved, within, part)  # it was compacted meanwhile

    async def _read_waiting(self, place: Location, within: int, part: memoryview) -> None:
        if place.codec == PLAIN and not self._containers.verify:
            await self._containers.read(place, place.offset + HEADER_BYTES + within, part)
        else:
            part[:] = (await self._containers.read_chunk(place))[within : within + len(part)]

    async def _find(self, index: int) -> Location | None:
        if not 0 <= index - self._first < len(self._chunks):
            self._first, self._chunks = await self._load(index)
            if index - self._first >= len(self._chunks):
                raise Unavailable(f"chunk {index} lacks in the list of chunks")
        return self._chunks[index - self._first]

    async def is_hole(self, offset: int) -> bool:
        """Whether the whole chunk that byte ``offset`` lies in is a hole."""
        return await self._find(offset // self._layout.chunk) is None

    def blocks(self) -> None:
        """Unknown here: the inode's record has it."""

    async def sync(self) -> None:
        """Nothing to do: it was durable before it was recorded."""

    def close(self) -> None:
        """Nothing to give up: descriptors are shared."""


# --- in worker threads ---


def _decode(server: DataServer, place: Location, stored: memoryview, verify: bool) -> memoryview:
    try:
        data = chunk_codec.decode(stored, place.codec, place.raw)
        if verify and chunk_codec.digest_of(data) != place.digest:
            raise ValueError("its checksum is wrong")
    except ValueError as error:
        path = server.object_path(0, place.container)
        raise Unavailable(f"{server.name}: {path}: chunk at {place.offset}: {error}") from None
    return data
