"""Megatron's pair of files: a ``.bin`` of tokens, and an ``.idx`` that says where its documents
begin. A row is a document.

The .idx (little-endian): ``MMIDIDX\\0\\0``, version 1 (u64), a code for the type of tokens (u8),
how many sequences (u64) and document bounds (u64); the tokens of each sequence (i32), where each
begins in the .bin (i64), the first sequence of each document and the end (i64); perhaps modes (i8).
"""

import bisect
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from aifs.core.errors import DatasetError
from aifs.datasets.formats.reading import row_bytes_checked
from aifs.datasets.index import BLOCK_BYTES, BLOCK_ROWS, FileBytes, RowBlock

NAME = "megatron"
SUFFIXES: tuple[str, ...] = (".bin",)

MAGIC = b"MMIDIDX\0\0"

DTYPES = {
    1: ("uint8", 1),
    2: ("int8", 1),
    3: ("int16", 2),
    4: ("int32", 4),
    5: ("int64", 8),
    6: ("float64", 8),
    7: ("float32", 4),
    8: ("uint16", 2),
}
"""Name and bytes of a token, by code."""

VERSION = 1

HEADER = struct.Struct("<9sQBQQ")


class Documents:
    """Where the documents of a .bin lie, as its .idx says. Reads what it is asked for alone."""

    def __init__(self, idx: FileBytes, bin_size: int) -> None:
        """Raises DatasetError if this is no .idx, not all of one, or one of another .bin."""
        head = idx.read(0, HEADER.size)
        if len(head) < HEADER.size or not head.startswith(MAGIC):
            raise DatasetError("its .idx is none of Megatron's, or torn")
        # How many sequences there are.
        _, version, code, self.sequences, bounds = HEADER.unpack(head)
        if version != VERSION or code not in DTYPES or bounds < 1:
            raise DatasetError(f"its .idx has version {version}, type {code}, {bounds} bounds")
        # Of the type of tokens.
        self.code = code
        # Of a token: its numpy name, its bytes.
        self.dtype, self.itemsize = DTYPES[code]
        # How many documents there are.
        self.count = bounds - 1
        # Where in the .idx the three lists begin.
        self.lengths_at = HEADER.size
        # (of where sequences begin in the .bin)
        self.pointers_at = self.lengths_at + 4 * self.sequences
        # (of the first sequences of documents)
        self.bounds_at = self.pointers_at + 8 * self.sequences
        if self.bounds_at + 8 * bounds > idx.size:
            raise DatasetError(
                f"its .idx has {idx.size} bytes, too few for {self.sequences} sequences and"
                f" {self.count} documents: it is torn"
            )
        self._idx = idx
        # Where the last sequence ends in the .bin.
        self.end = 0
        if self.sequences:
            last = self._number(self.lengths_at + 4 * (self.sequences - 1), "<i")
            self.end = self._pointer(self.sequences - 1) + last * self.itemsize
        if self.end != bin_size or self.bound(0) or self.bound(self.count) != self.sequences:
            raise DatasetError(
                f"its .idx tells of {self.end} bytes, of {bin_size}: it belongs to another .bin,"
                " its sequences are not in order, or one of both is torn"
            )

    def start(self, document: int) -> int:
        """The offset of its first byte in the .bin; of ``count`` the end."""
        sequence = self.bound(document)
        at = self._pointer(sequence) if sequence < self.sequences else self.end
        if not (0 <= sequence <= self.sequences and 0 <= at <= self.end):
            raise DatasetError(f"document {document} begins at byte {at}, of {self.end}")
        return at

    def at(self, offset: int) -> int:
        """The first document that begins at ``offset`` or later."""
        return bisect.bisect_left(range(self.count), offset, key=self.start)

    def bound(self, document: int) -> int:
        """The number of its first sequence; of ``count`` that of all. Not checked."""
        return self._number(self.bounds_at + 8 * document, "<q")

    def _pointer(self, sequence: int) -> int:
        return self._number(self.pointers_at + 8 * max(sequence, 0), "<q")

    def _number(self, at: int, kind: str) -> int:
        data = self._idx.read(at, struct.calcsize(kind))
        if len(data) < struct.calcsize(kind):
            raise DatasetError("its .idx ends while it is read")
        return struct.unpack(kind, data)[0]


def blocks(file: FileBytes, options: Mapping[str, Any]) -> Iterator[RowBlock]:
    """A few reads of the .idx per block, and none of the .bin."""
    try:
        documents = Documents(file.beside(".idx"), file.size)
    except FileNotFoundError as error:
        raise DatasetError("its .idx is missing") from error
    first = start = 0
    while first < documents.count:
        last = min(first + BLOCK_ROWS, documents.count)
        end = documents.start(last)
        if end - start > BLOCK_BYTES:
            fits = bisect.bisect_right(
                range(first + 1, last), start + BLOCK_BYTES, key=documents.start
            )
            last = first + max(1, fits)
            end = documents.start(last)
        # Empty documents stay with what follows them at the same byte: so an offset tells where a
        # block begins.
        if last < documents.count and documents.start(last - 1) == end:
            last = first + 1 + bisect.bisect_left(range(first + 1, last), end, key=documents.start)
            if end == start:
                last = (
                    first
                    + 1
                    + bisect.bisect_right(
                        range(first + 1, documents.count), end, key=documents.start
                    )
                )
                end = documents.start(last)
        if not start <= end <= documents.end:
            raise DatasetError(f"document {last} begins at byte {end}, before document {first}")
        if last == first + 1:
            row_bytes_checked(start, end - start)
        yield RowBlock(start, end - start, last - first)
        first, start = last, end
