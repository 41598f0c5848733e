"""Interleaved layout: a file is cut into chunks in *containers* that files share. Pure.

Chunks of files stored together fill *stripes* of 4 MiB and headers, in order; each is appended to a
container of the next server. So servers get few large writes, a large file is spread over all, and
neighbours are read together. A container is laid out like a file (see striped): plain as one
object, replicated as several, coded in small units over data columns, so each stripe is on all of
them.
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
    """Of the container's first column at the append; the table knows the present one."""
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
    """``length`` bytes of an interleaved file in a chunk, or zeros (``place`` is None). ``shared``:
    the chunk, known by digest, may be named elsewhere, and ``place`` is its present one, or none
    yet (``is_named``)."""

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
    """Dealt chunks ``first`` to ``end`` - 1, and their slot's number."""

    slot: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Interleaved(Layout):
    """A file's layout: the largest chunk; the chunk list has places. All chunks but the last have
    this size in a file stored by itself, not in a group's."""

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
    """Whether to interleave a file: not a large one of mostly holes, whose list has an entry a
    hole."""
    return size <= max(_HOLES_LISTED, 2 * allocated)


def container_layout(servers: tuple[int, ...], redundancy: Redundancy = PLAIN) -> Striped:
    """A container's on these servers: as the redundancy needs, one for a plain one."""
    return Striped(UNIT, servers, redundancy.replicas, redundancy.parity)


def redundancy_of(layout: Striped) -> Redundancy:
    """The redundancy of a container that is laid out so."""
    return (
        Redundancy(layout.replicas, layout.width, layout.parity)
        if layout.parity
        else Redundancy(layout.replicas)
    )


def padded(layout: Striped, length: int) -> int:
    """Where the next append begins: coded containers grow by whole rows, never changed."""
    return -(-length // layout.row) * layout.row if layout.parity else length


def deal(sizes: Sequence[int], slots: int, start: int) -> list[Stripe]:
    """Chunks (``sizes`` with headers) as full stripes, in order, each in the next slot: a server,
    or set of them, that takes one at a time. ``start``: the first one's slot, modulo their
    number."""
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
