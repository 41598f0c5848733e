"""Files that exist by arithmetic alone: their bytes are literal ones and ranges of other files.

Pure. Who has such a file reads it by asking for the pieces of a range, and by reading from the
sources what is theirs.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol


class SourceRange(NamedTuple):
    """Bytes of another file."""

    source: int
    """The number of that file, in whatever the virtual file was made of."""
    offset: int
    length: int


Piece = bytes | SourceRange


class VirtualBytes(Protocol):
    """What a virtual file holds. It never changes."""

    @property
    def size(self) -> int: ...

    def pieces(self, offset: int, length: int) -> Iterator[Piece]:
        """What bytes ``offset`` to ``offset + length`` are, in order; they end where the file
        ends. No piece is empty."""
        ...


def cut(pieces: Iterator[Piece], skip: int, length: int) -> Iterator[Piece]:
    """Of these pieces the bytes from ``skip`` on, ``length`` at most."""
    for piece in pieces:
        if length <= 0:
            return
        size = piece.length if isinstance(piece, SourceRange) else len(piece)
        if skip >= size:
            skip -= size
            continue
        taken = min(size - skip, length)
        if isinstance(piece, SourceRange):
            yield SourceRange(piece.source, piece.offset + skip, taken)
        else:
            yield piece[skip : skip + taken]
        length -= taken
        skip = 0
