"""Lines of text, plain or compressed: each is a row, a ``str`` without the line's end (Arrow: one
column ``text``); also for ``jsonl``.

Rows are counted by reading all bytes once, at memchr's speed: a computed order needs it exactly. A
compressed file is one block. A byte order mark at the start belongs to no row.
"""

import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from aifs.core.errors import DatasetError
from aifs.datasets.formats.columns import naming
from aifs.datasets.formats.reading import (
    ROW_BYTES_MAX,
    DatasetFile,
    InMemory,
    OpenBlock,
    require_rows,
    row_bytes_checked,
)
from aifs.datasets.index import BLOCK_BYTES, BLOCK_ROWS, FileBytes, RowBlock
from aifs.datasets.order import ChosenBlocks, OrderSources, in_order
from aifs.datasets.virtual import Joined

if TYPE_CHECKING:
    import pyarrow

NAME = "text"
SUFFIXES: tuple[str, ...] = (".txt", ".text", ".txt.gz", ".txt.zst")

GZIP = b"\x1f\x8b"
ZSTD = b"\x28\xb5\x2f\xfd"
_SKIPPED = tuple(bytes((low,)) + b"\x2a\x4d\x18" for low in range(0x50, 0x60))
"""Of frames that hold no data: pzstd writes one at the beginning."""

BOM = b"\xef\xbb\xbf"

_SPACE = re.compile(rb"\n[ \t\r\n]")
BLANK = b" \t\r\n"
"""Lines of these alone are blank."""

_GZIP_READ = 64 << 10
"""A piece's rest is copied after each member: small members in large pieces would be slow."""

_ZSTD_READ = 4 << 10
"""A block of 4 bytes may become 128 KiB."""


def is_compressed(head: bytes) -> bool:
    """Whether a file that begins so is one of gzip or zstd."""
    return head.startswith((GZIP, ZSTD, *_SKIPPED))


def line_blocks(file: FileBytes, skip_blank: bool) -> Iterator[RowBlock]:
    """Runs of whole lines. ``skip_blank``: lines of spaces alone are no rows."""
    head = file.read(0, 4)
    if is_compressed(head):
        if rows := _count(decompressed(file), skip_blank):
            yield RowBlock(0, file.size, rows)
        return
    start = len(BOM) if head.startswith(BOM) else 0
    while start < file.size:
        data = file.read(start, BLOCK_BYTES)
        if not data:
            raise DatasetError(f"the file ends at byte {start} while it is read")
        if start + len(data) < file.size:
            data = data[: data.rfind(b"\n") + 1]
        if not data:  # no newline in it
            length = _line_end(file, start + BLOCK_BYTES) - start
            yield RowBlock(start, row_bytes_checked(start, length), 1)
            start += length
            continue
        at = 0
        for end in _thousands(data):
            if rows := rows_of(data[at:end], skip_blank):
                yield RowBlock(start + at, end - at, rows)
            at = end
        start += len(data)


def rows_of(data: bytes, skip_blank: bool) -> int:
    """How many rows there are in whole lines; the last one may have no newline."""
    if skip_blank and (data[:1] in BLANK or _SPACE.search(data)):
        return sum(1 for line in data.split(b"\n") if line.strip(BLANK))
    return data.count(b"\n") + (not data.endswith(b"\n")) if data else 0


def _thousands(data: bytes) -> Iterator[int]:
    """Ends of runs of ``BLOCK_ROWS`` lines, the last shorter."""
    left = data.count(b"\n") + (not data.endswith(b"\n"))
    at = 0
    while left > BLOCK_ROWS:
        # Lines of usual length would end here: a few steps lead to the line that is meant.
        end = at + (len(data) - at) * BLOCK_ROWS // left
        found = data.count(b"\n", at, end)
        while found < BLOCK_ROWS:
            end = data.index(b"\n", end) + 1
            found += 1
        while found > BLOCK_ROWS:
            end = data.rindex(b"\n", at, end)
            found -= 1
        at = data.rindex(b"\n", at, end) + 1
        yield at
        left -= BLOCK_ROWS
    if at < len(data):
        yield len(data)


def _line_end(file: FileBytes, at: int) -> int:
    while at < file.size and (data := file.read(at, BLOCK_BYTES)):
        if (found := data.find(b"\n")) >= 0:
            return at + found + 1
        at += len(data)
    return file.size


def _count(chunks: Iterator[bytes], skip_blank: bool) -> int:
    rows = 0
    rest: list[bytes] = []  # of the line that has not ended
    for chunk in chunks:
        cut = chunk.rfind(b"\n") + 1
        if cut:
            rows += rows_of(b"".join([*rest, chunk[:cut]]), skip_blank)
            rest = []
        rest.append(chunk[cut:])
    return rows + rows_of(b"".join(rest), skip_blank)


def decompressed(file: FileBytes) -> Iterator[bytes]:
    """A gzip or zstd file's bytes, without byte order mark, in pieces of some MiB at most. Raises
    DatasetError if damaged, torn, or above 1 GiB: it is one block in memory."""
    total = 0
    head = b""  # until it can be told from a byte order mark
    unpacked = _gzip(file) if file.read(0, 2) == GZIP else _zstd(file)
    for data in unpacked:
        total += len(data)
        if total > ROW_BYTES_MAX:
            raise DatasetError(
                f"more than {ROW_BYTES_MAX} bytes when decompressed: store it in smaller files, or"
                " decompressed"
            )
        if total - len(data) < len(BOM):
            head += data
            if total < len(BOM):
                continue
            data = head.removeprefix(BOM)
        yield data
    if total < len(BOM):
        yield head


def _gzip(file: FileBytes) -> Iterator[bytes]:
    def unpack(member: Any, data: bytes) -> tuple[bytes, bytes]:
        return member.decompress(data, BLOCK_BYTES), member.unconsumed_tail or member.unused_data

    begin = partial(zlib.decompressobj, wbits=31)
    # Zeros between members are padding, as gzip has it.
    return _members(file, "gzip", _GZIP_READ, b"\0", begin, unpack, zlib.error)


def _zstd(file: FileBytes) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError as error:
        raise DatasetError("a zstd file: pip install zstandard, or decompress it") from error

    def unpack(frame: Any, data: bytes) -> tuple[bytes, bytes]:
        return frame.decompress(data), frame.unused_data

    begin = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompressobj
    return _members(file, "zstd", _ZSTD_READ, b"", begin, unpack, zstandard.ZstdError)


def _members(
    file: FileBytes,
    kind: str,
    read_bytes: int,
    padding: bytes,
    begin: Callable[[], Any],
    unpack: Callable[[Any, bytes], tuple[bytes, bytes]],
    fault: type[Exception],
) -> Iterator[bytes]:
    """The contents of a file's members (frames) in order. ``begin`` makes a decompressor;
    ``unpack`` gives it data, and returns content and rest. ``padding`` before a member is
    skipped."""
    at, data = 0, b""
    member: Any = None
    try:
        while data or at < file.size:
            if not data:
                data = file.read(at, read_bytes)
                at += len(data)
                if not data:
                    break
            if member is None:
                data = data.lstrip(padding)
                if not data:
                    continue
                member = begin()
            unpacked, data = unpack(member, data)
            yield unpacked
            if member.eof:
                member = None
    except fault as error:
        raise DatasetError(f"damaged {kind} data before byte {at}: {error}") from error
    if member is not None:
        raise DatasetError(f"the {kind} data end at byte {at}, too early: the file is torn")


def blocks(file: FileBytes, options: Mapping[str, Any]) -> Iterator[RowBlock]:
    return line_blocks(file, skip_blank=False)


def lines_of(file: DatasetFile, block: RowBlock) -> list[bytes]:
    """All lines of a block, without their ends."""
    data = file.read(block.offset, block.length)
    if is_compressed(data) and block.length == file.size:
        with naming(file.path, block.offset):
            data = b"".join(decompressed(InMemory(data)))
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return [line.removesuffix(b"\r") for line in lines]


class _Lines:
    def __init__(self, path: str, block: RowBlock, lines: list[bytes]) -> None:
        require_rows(path, block.offset, len(lines), block.rows)
        self._path = path
        self._offset = block.offset
        self._lines = lines

    def take(self, rows: Sequence[int]) -> list[str]:
        with naming(self._path, self._offset):
            return [self._lines[row].decode() for row in rows]

    def batch(self, first: int, rows: int) -> "pyarrow.RecordBatch":
        import pyarrow

        lines = pyarrow.array(self._lines[first : first + rows], pyarrow.large_binary())
        with naming(self._path, self._offset):
            return pyarrow.record_batch([lines.cast(pyarrow.large_string())], names=["text"])


def open_file(file: DatasetFile, options: Mapping[str, Any]) -> OpenBlock:
    return lambda number, block: _Lines(file.path, block, lines_of(file, block))


def order(blocks: ChosenBlocks, sources: OrderSources) -> Joined:
    """Lines. Where the last one of a file has no newline, one is added."""
    torn = set()
    for file in blocks.files():
        with blocks.naming(file):
            if _lacks_newline(sources.open(file)):
                torn.add(file)

    def ends_torn(file: int, block: RowBlock) -> bool:
        return file in torn and block.offset + block.length == blocks.index.sizes[file]

    return in_order(blocks, lambda file, block: b"\n" if ends_torn(file, block) else b"")


def _lacks_newline(file: FileBytes) -> bool:
    """Whether the last line does not end. Raises DatasetError for compressed lines."""
    if is_compressed(file.read(0, 4)):
        raise DatasetError("compressed lines cannot be put into another order; decompress them")
    return file.read(file.size - 1, 1) != b"\n"
