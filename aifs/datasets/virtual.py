"""Files by arithmetic: their bytes are literals and ranges of other files. Pure: ask for a range's
pieces, and read them from the sources."""

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

_NUMBER = 8
_LANES = 1 << 10  # numbers that are shifted at once


class SourceRange(NamedTuple):
    """Bytes of another file."""

    source: int
    """The number of that file among the sources of the virtual file."""
    offset: int
    length: int


class ShiftedNumbers(NamedTuple):
    """Little-endian 64-bit integers of another file, each plus a constant: moved positions."""

    source: int
    offset: int
    """Of the first number, which ``length`` may hold the end of alone."""
    length: int
    plus: int
    skip: int = 0
    """Bytes of the first number that are left out: below 8."""

    @property
    def numbers(self) -> SourceRange:
        """All numbers that are needed, whole."""
        whole = -(-(self.skip + self.length) // _NUMBER) * _NUMBER
        return SourceRange(self.source, self.offset, whole)

    def shifted(self, data: bytes | memoryview) -> bytes:
        """These bytes, if ``data`` are the ``numbers``."""
        parts = [
            _plus(bytes(data[at : at + _NUMBER * _LANES]), self.plus)
            for at in range(0, len(data), _NUMBER * _LANES)
        ]
        return b"".join(parts)[self.skip : self.skip + self.length]


Piece = bytes | SourceRange | ShiftedNumbers

Buffer = bytes | bytearray | array


class VirtualBytes(Protocol):
    """The content of a virtual file. It never changes."""

    @property
    def size(self) -> int: ...

    @property
    def memory(self) -> int:
        """About how many bytes are kept for it."""
        ...

    def pieces(self, offset: int, length: int) -> Iterator[Piece]:
        """The pieces of ``length`` bytes from ``offset``, none empty, to the file's end."""
        ...

    def columns(self) -> Iterable[Buffer]:
        """All that decides the pieces, always in the same order."""
        ...


class Joined:
    """The ``VirtualBytes`` of pieces in order of adding; complete before it is read. 40 bytes each,
    and literals."""

    def __init__(self) -> None:
        self.size = 0
        """In bytes."""
        self._starts = array("q")  # of pieces
        self._sources = array("q")  # -1: literal bytes
        self._offsets = array("q")  # in the source; of literal ones their number
        self._lengths = array("q")  # in bytes
        self._plus = array("q")  # of shifted numbers; 0: bytes as they are
        self._literals: list[bytes] = []  # by number

    def __len__(self) -> int:
        """Pieces."""
        return len(self._starts)

    @property
    def memory(self) -> int:
        """As VirtualBytes."""
        return 40 * len(self) + sum(80 + len(literal) for literal in self._literals)

    @property
    def sources(self) -> int:
        """All sources have numbers below this."""
        return max(self._sources, default=-1) + 1

    def columns(self) -> Iterable[Buffer]:
        """As VirtualBytes."""
        numbers = self._starts, self._sources, self._offsets, self._lengths, self._plus
        return *numbers, *self._literals

    def add(self, piece: Piece) -> None:
        if isinstance(piece, bytes):
            place, plus, length = (-1, len(self._literals)), 0, len(piece)
            self._literals.append(piece)
        else:
            place, length = piece[:2], piece.length
            plus = piece.plus if isinstance(piece, ShiftedNumbers) else 0
        if not length:
            return
        self._starts.append(self.size)
        self._sources.append(place[0])
        self._offsets.append(place[1])
        self._lengths.append(length)
        self._plus.append(plus)
        self.size += length

    def pieces(self, offset: int, length: int) -> Iterator[Piece]:
        """As VirtualBytes."""
        if not 0 <= offset < self.size:
            return iter(())
        number = bisect_right(self._starts, offset) - 1
        found = map(self._piece, range(number, len(self)))
        return cut(found, offset - self._starts[number], length)

    def _piece(self, number: int) -> Piece:
        source, offset = self._sources[number], self._offsets[number]
        if source < 0:
            return self._literals[offset]
        length, plus = self._lengths[number], self._plus[number]
        if plus:
            return ShiftedNumbers(source, offset, length, plus)
        return SourceRange(source, offset, length)


def cut(pieces: Iterator[Piece], skip: int, length: int) -> Iterator[Piece]:
    """Of these pieces the bytes from ``skip`` on, ``length`` at most."""
    for piece in pieces:
        if length <= 0:
            return
        size = len(piece) if isinstance(piece, bytes) else piece.length
        if skip >= size:
            skip -= size
            continue
        taken = min(size - skip, length)
        if isinstance(piece, SourceRange):
            yield SourceRange(piece.source, piece.offset + skip, taken)
        elif isinstance(piece, ShiftedNumbers):
            whole, within = divmod(piece.skip + skip, _NUMBER)
            offset = piece.offset + whole * _NUMBER
            yield ShiftedNumbers(piece.source, offset, taken, piece.plus, within)
        else:
            yield piece[skip : skip + taken]
        length -= taken
        skip = 0


def _plus(data: bytes, plus: int) -> bytes:
    """``plus`` added to each number of ``data``, by one long addition."""
    bits = 8 * len(data)
    ones = ((1 << bits) - 1) // ((1 << 8 * _NUMBER) - 1)
    # Of numbers that are none of a whole file's one may borrow from the next: their sum is cut.
    total = int.from_bytes(data, "little") + plus * ones
    return (total & ((1 << bits) - 1)).to_bytes(len(data), "little")
