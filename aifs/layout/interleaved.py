"""Interleaved layout: a file is cut into chunks, which lie in *containers* that many files share.
Pure.

The chunks of all files that are stored together, in the order of the files, fill *stripes* of 4 MiB
and their headers; each stripe is appended as a whole to a container of the next server. So few
large writes go to every server whatever the sizes of the files, one large file is spread over all
servers, and files that lie side by side are read together.

A container is laid out as a file is (see striped): a plain one is one object, a replicated one
several, and a coded one is striped in small units over its data columns, so that each stripe is
spread over all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from aifs.layout.kinds import Layout
from aifs.layout.redundancy import PLAIN, Redundancy
from aifs.layout.striped import Striped

CHUNK = 1 << 20
"""Chunk size of new files."""

CHUNK_MAX = 4 << 20

HEADER_BYTES = 64
"""Of the header before each chunk in a container (see data/chunk_codec.py)."""

STRIPE = 4 * (CHUNK + HEADER_BYTES)
"""Bytes, headers included, that are appended to one container at a time."""

_HOLES_LISTED = 1 << 30

UNIT = 64 << 10
"""The stripe unit of containers."""


class Location(NamedTuple):
    """Where a chunk lies."""

    server: int
    """Where the container's first column was when the chunk was appended; where it is now the table
    says.
    """
    container: int
    """Its id."""
    offset: int
    """Of its header in the container."""
    stored: int  # bytes behind the header
    raw: int  # bytes of the file
    codec: int
    """How what is stored is compressed (data/chunk_codec.py)."""
    digest: bytes  # BLAKE3-256 of the file's bytes


class Extent(NamedTuple):
    """A range of an interleaved file: ``length`` bytes in a chunk, or zeros (``place`` is None).

    ``shared``: other files, or other ranges of this one, may name the same chunk; it is known by
    its digest, so where it lies ``place`` says as of now, or not yet (``is_named``).
    """

    length: int
    place: Location | None = None
    shared: bool = False

    @property
    def digest(self) -> bytes:
        """Of the bytes; b"" for zeros."""
        return b"" if self.place is None else self.place.digest

    @property
    def is_named(self) -> bool:
        """Whether only the digest of the shared chunk is known, not its place."""
        return self.shared and self.place is not None and not self.place.container


def named(length: int, digest: bytes) -> Extent:
    """A shared chunk of which only the digest is known."""
    return Extent(length, Location(0, 0, 0, 0, length, 0, digest), True)


class Stripe(NamedTuple):
    """Chunks ``first`` to ``end`` - 1 of those that are dealt out, and the number of the slot that
    they go to.
    """

    slot: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Interleaved(Layout):
    """The layout of one file: how many bytes its chunks have at most. Its chunk list says where
    they lie. Chunks of a file that was stored by itself have all this size, except the last one;
    those of a file of a group have different sizes.
    """

    chunk: int

    kind: ClassVar[str] = "interleaved"

    @property
    def chunks(self) -> "Interleaved":
        """See Layout."""
        return self

    @property
    def is_possible(self) -> bool:
        """See Layout."""
        return 0 < self.chunk <= CHUNK_MAX

    def count(self, size: int) -> int:
        """How many chunks of one size a file of ``size`` bytes is cut into."""
        return -(-size // self.chunk)

    def length(self, index: int, size: int) -> int:
        """Bytes of chunk ``index`` of these: all are whole except the last one."""
        return min(self.chunk, size - index * self.chunk)


def may_list(size: int, allocated: int) -> bool:
    """Whether a file is to be interleaved. Not if it is large and mostly holes: its list has an
    entry for each hole of the size of a chunk. Such a file is striped, whatever its policy says.
    """
    return size <= max(_HOLES_LISTED, 2 * allocated)


def container_layout(servers: tuple[int, ...], redundancy: Redundancy = PLAIN) -> Striped:
    """Of a container on these servers: as many as the redundancy needs, one for a plain
    container.
    """
    return Striped(UNIT, servers, redundancy.replicas, redundancy.parity)


def redundancy_of(layout: Striped) -> Redundancy:
    """The redundancy of a container that is laid out so."""
    return (
        Redundancy(layout.replicas, layout.width, layout.parity)
        if layout.parity
        else Redundancy(layout.replicas)
    )


def padded(layout: Striped, length: int) -> int:
    """Where the next append begins: coded containers grow by whole rows, so that no row is ever
    changed.
    """
    return -(-length // layout.row) * layout.row if layout.parity else length


def deal(sizes: Sequence[int], slots: int, start: int) -> list[Stripe]:
    """Chunks as stripes, in order: each as full as it gets, in the slot behind the last one's.

    A slot is what takes one stripe at a time: a server, or a set of them. ``sizes`` include
    headers. ``start``: the slot of the first stripe, taken modulo their number.
    """
    stripes: list[Stripe] = []
    first, filled = 0, 0
    for index, size in enumerate(sizes):
        if filled + size > STRIPE and index > first:
            stripes.append(Stripe((start + len(stripes)) % slots, first, index))
            first, filled = index, 0
        filled += size
    if len(sizes) > first:
        stripes.append(Stripe((start + len(stripes)) % slots, first, len(sizes)))
    return stripes
