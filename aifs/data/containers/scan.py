"""The chunks of a container, by the headers in it."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from aifs.core.errors import Unavailable
from aifs.data import chunk_codec
from aifs.data.chunk_codec import ChunkHeader
from aifs.data.containers.appending import Tools
from aifs.data.containers.files import ContainerEntry, ContainerFiles
from aifs.layout.interleaved import HEADER_BYTES
from aifs.layout.striped import Striped

_WINDOW = 64 << 10
"""Read at once: the headers of many small chunks, or not much more than that of a large one."""

_TOGETHER = 512  # chunks that are told together, about


class Scanning(NamedTuple):
    """The next chunks of a container are to be found."""

    container: int
    entry: ContainerEntry
    offset: int
    """Of the first header."""


class ScannedChunk(NamedTuple):
    """A chunk in a container, by its header."""

    offset: int
    header: ChunkHeader


class Scanned(NamedTuple):
    """Some chunks, and the offset behind them."""

    chunks: Sequence[ScannedChunk]
    offset: int


async def scan(asked: Scanning, tools: Tools, cancelled: Callable[[], bool]) -> Scanned | None:
    """Carry it out; None once ``cancelled``. Raises Unavailable for damage."""
    (container, entry, offset), found = asked, list[ScannedChunk]()
    with tools.reading(((container, entry),)) as files:
        chunks = ContainerScan(files, container, entry.layout, entry.length, offset)
        while len(found) < _TOGETHER and chunks.offset < entry.length:
            if cancelled():
                return None
            found += await chunks.following()
    return Scanned(found, chunks.offset)


class ContainerScan:
    """Goes through the chunks of a container, once."""

    def __init__(
        self, files: ContainerFiles, container: int, layout: Striped, length: int, offset: int = 0
    ) -> None:
        """``offset``: of the first header."""
        self._files = files
        self._container = container
        self._layout = layout
        self._length = length
        self._offset = offset

    @property
    def offset(self) -> int:
        """Behind what has been gone through."""
        return self._offset

    async def following(self) -> list[ScannedChunk]:
        """The next chunks, none at the end. Raises Unavailable for damage."""
        found: list[ScannedChunk] = []
        while self._offset < self._length and not found:
            size = min(_WINDOW, self._length - self._offset)
            window = memoryview(bytearray(size))
            await self._files.read(self._container, self._offset, window)
            server = self._files.servers.idlest(self._layout.servers)
            found, done = await self._files.servers.run(server, self._parse, window)
            if not done:
                found, done = await self._careful()
            self._offset += done
        return found

    def _parse(self, window: memoryview) -> tuple[list[ScannedChunk], int]:
        """Chunks with headers in the window, and their bytes; none if the first header is cut or
        damaged. In a worker thread."""
        found: list[ScannedChunk] = []
        at = 0
        while at < len(window):
            if self._is_padding(at, window[at : at + 1]):
                at = self._row_end(at)
                continue
            try:
                header = chunk_codec.unpack_header(window[at : at + HEADER_BYTES])
            except ValueError:
                break
            found.append(ScannedChunk(self._offset + at, header))
            at += HEADER_BYTES + header.stored
        return found, at

    async def _careful(self) -> tuple[list[ScannedChunk], int]:
        """``_parse`` of one header, if need be by other columns."""
        header_bytes = memoryview(bytearray(HEADER_BYTES))
        if self._offset + HEADER_BYTES > self._length:
            raise Unavailable(f"container {self._container} at {self._offset}: it ends too early")
        await self._files.read_right(
            self._container, self._offset, header_bytes, self._check_header
        )
        if self._is_padding(0, header_bytes):
            return [], self._row_end(0)
        header = chunk_codec.unpack_header(header_bytes)
        return [ScannedChunk(self._offset, header)], HEADER_BYTES + header.stored

    def _check_header(self, data: memoryview) -> None:
        if not self._is_padding(0, data):
            chunk_codec.unpack_header(data)

    def _is_padding(self, at: int, data: memoryview) -> bool:
        row_ends_here = (self._offset + at) % self._layout.row == 0
        return self._layout.parity > 0 and not row_ends_here and chunk_codec.is_padding(data)

    def _row_end(self, at: int) -> int:
        row = self._layout.row
        return -(-(self._offset + at) // row) * row - self._offset
