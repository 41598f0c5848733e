"""The clean blocks of one burst device, in memory, and their order of eviction. Pure: no I/O, no
clock.

A *source* is an object set or a container, named by its id. 128 blocks in a row are a *segment*,
the unit of eviction: so the map of 8 TB is one object for each 128 MiB (``block_size``), with 8
bytes for each block: 90 MiB.

Eviction is S3-FIFO (Yang et al., 2023): a new segment enters a small queue, a tenth of the room; if
used again before its end it goes to the main queue, else it goes, and its name is remembered for a
while: if it comes back, it enters the main queue. So a scan passes through the small queue alone.
Uses in close succession are one: neighbours of a small file are read next.
"""

import struct
from collections import OrderedDict
from collections.abc import Iterable, Iterator

BLOCKS = 128
"""Blocks in a segment: the bits of its masks."""

SUM_BYTES = 8
"""Of the checksum of a block."""

BLOCK_MIN, BLOCK_MAX = 64 << 10, 1 << 20
_BLOCKS_MAX = 1 << 23
SEGMENTS_MAX = 1 << 17
"""Of small files each is one, and takes half a KiB of memory or more."""

_SMALL_SHARE = 10
"""The small queue has one part in so many of the room."""
_CLOSE_SHARE = 16
"""Uses are one if fewer bytes than one part in so many of the room were used in between."""
_USES_MAX = 3
_ROUND_SHARE = 4 * _CLOSE_SHARE
"""It is asked what others have read when one part in so many of the room was used."""

_MAGIC = b"AIFSBLK2"
_HEAD = struct.Struct("<8sIQQ")
_SEGMENT = struct.Struct(f"<QI{BLOCKS // 8}s")


def block_size(room: int) -> int:
    """The bytes of a block where the devices have ``room`` bytes: so many blocks fit in memory."""
    size = BLOCK_MIN
    while size < BLOCK_MAX and room // size > _BLOCKS_MAX:
        size *= 2
    return size


class BlockSegment:
    """Blocks in a row of one source. A segment that has left the map never comes back."""

    __slots__ = ("checked", "have", "is_main", "number", "source", "sums", "used_at", "uses")

    def __init__(self, source: int, number: int, have: int = 0, sums: bytes = b"") -> None:
        self.source = source
        self.number = number
        self.have = have
        """Mask of the blocks that are there."""
        self.checked = 0
        """Mask of blocks that this process has compared with their checksums, or written."""
        self.sums = bytearray(have.bit_length() * SUM_BYTES)
        self.is_main = False
        self.uses = 0
        self.used_at = 0
        at = 0
        for bit in self.bits():
            self.sums[bit * SUM_BYTES : (bit + 1) * SUM_BYTES] = sums[at : at + SUM_BYTES]
            at += SUM_BYTES

    def bits(self) -> Iterator[int]:
        """The numbers, in the segment, of the blocks that are there."""
        return (bit for bit in range(BLOCKS) if self.have >> bit & 1)

    def sum_of(self, bit: int) -> bytes:
        """The checksum of a block."""
        return bytes(self.sums[bit * SUM_BYTES : (bit + 1) * SUM_BYTES])


class BlockMap:
    """See above. Used from one trio thread."""

    def __init__(self, block: int) -> None:
        self.block = block
        self.limit = 0
        """Bytes that blocks may take."""
        self.bytes = 0
        """That they take; a block counts whole."""
        self.sources: dict[int, dict[int, BlockSegment]] = {}
        """By id, and number, all segments."""
        self._small: OrderedDict[BlockSegment, None] = OrderedDict()
        """The small queue, the oldest segment first."""
        self._main: OrderedDict[BlockSegment, None] = OrderedDict()
        """The main queue."""
        self._small_blocks = 0
        """Blocks of all in the small one."""
        self._gone: OrderedDict[tuple[int, int], None] = OrderedDict()
        """Names of segments that left the small queue, the oldest first."""
        self._used = 0
        """Bytes that have come or were read: the clock of all this."""
        self.held_sources: dict[int, None] = {}
        """Whole sources that stay, because programs use their files; the oldest first."""
        self.held_bytes = 0
        """Of these, which do not count below the limit."""
        self._asked_at = 0
        """On this clock, when it was asked what others have read."""

    @property
    def segments(self) -> int:
        return len(self._small) + len(self._main)

    @property
    def excess(self) -> int:
        """Bytes of blocks that have to go; of one, if all that is too many is a segment."""
        loose = self.bytes - self.held_bytes
        too_many = self.block if loose and self.segments > SEGMENTS_MAX else 0
        return max(loose - self.limit, too_many)

    def span(self, source: int, offset: int, length: int) -> list[tuple[BlockSegment, int]] | None:
        """The segments of a range, each with the mask of its blocks; None if one is missing."""
        numbers = self.sources.get(source)
        if numbers is None:
            return None
        first, last = offset // self.block, (offset + length - 1) // self.block
        found: list[tuple[BlockSegment, int]] = []
        for number, mask in _masks(first, last):
            segment = numbers.get(number)
            if segment is None or segment.have & mask != mask:
                return None
            found.append((segment, mask))
        return found

    def held(self, source: int, offset: int, length: int) -> int:
        """How many bytes are there of a range, from its start on."""
        index, last = offset // self.block, (offset + length - 1) // self.block
        numbers = self.sources.get(source, {})
        while index <= last and (segment := numbers.get(index // BLOCKS)) is not None:
            have = segment.have >> index % BLOCKS
            run = (have ^ have + 1).bit_length() - 1  # bits that are set, from the lowest on
            index += run
            if index % BLOCKS or not run:
                break
        return max(0, min(index * self.block - offset, length))

    def is_current(self, segment: BlockSegment) -> bool:
        return self.sources.get(segment.source, {}).get(segment.number) is segment

    def has(self, source: int, index: int) -> bool:
        """Whether block ``index`` of a source is there."""
        segment = self.sources.get(source, {}).get(index // BLOCKS)
        return segment is not None and bool(segment.have >> index % BLOCKS & 1)

    def bytes_of(self, source: int) -> int:
        """Of one source."""
        segments = self.sources.get(source, {}).values()
        return sum(segment.have.bit_count() for segment in segments) * self.block

    def bytes_in(self, source: int, offset: int, length: int) -> int:
        """How many bytes are there of a range."""
        numbers = self.sources.get(source)
        if numbers is None or not length:
            return 0
        first, last = offset // self.block, (offset + length - 1) // self.block
        blocks = sum(
            (numbers[number].have & mask).bit_count()
            for number, mask in _masks(first, last)
            if number in numbers
        )
        beside = self.has(source, first) * (offset - first * self.block)
        beside += self.has(source, last) * ((last + 1) * self.block - offset - length)
        return blocks * self.block - beside

    # --- what comes, and is used ---

    def put(self, source: int, index: int, checksum: bytes) -> None:
        """Block ``index`` is there, and has been checked."""
        number, bit = divmod(index, BLOCKS)
        segment = self.sources.get(source, {}).get(number)
        if segment is None:
            segment = BlockSegment(source, number)
            segment.used_at = self._used
            self._enter(segment, (source, number) in self._gone)
        if not segment.have >> bit & 1:
            segment.have |= 1 << bit
            self._count(segment, 1)
        segment.checked |= 1 << bit
        segment.sums.extend(bytes(max(0, (bit + 1) * SUM_BYTES - len(segment.sums))))
        segment.sums[bit * SUM_BYTES : (bit + 1) * SUM_BYTES] = checksum
        self._used += self.block

    def use(self, segment: BlockSegment, length: int) -> None:
        """So many bytes of it were read."""
        self._used += length
        if self._used - segment.used_at > self.limit // _CLOSE_SHARE:
            segment.used_at = self._used
            segment.uses = min(segment.uses + 1, _USES_MAX)

    def want(self, source: int, offset: int, length: int, is_wanted: bool) -> None:
        """A range is read soon, so its segments stay as if read often; or it is not needed soon."""
        numbers = self.sources.get(source, {})
        first, last = offset // self.block, (offset + length - 1) // self.block
        for number in range(first // BLOCKS, last // BLOCKS + 1):
            if (segment := numbers.get(number)) is not None:
                segment.uses = _USES_MAX if is_wanted else 0

    def use_segments(self, source: int, mask: int) -> None:
        """Something of these segments was read: bit ``n mod 64`` for segment ``n``."""
        for number, segment in self.sources.get(source, {}).items():
            if mask >> number % 64 & 1:
                self.use(segment, 0)

    def is_round_over(self) -> bool:
        """Whether it is time to ask for that: often enough that uses are close that are one."""
        is_over = self._used - self._asked_at > self.limit // _ROUND_SHARE
        if is_over:
            self._asked_at = self._used
        return is_over

    # --- what goes ---

    def hold(self, source: int, is_held: bool) -> None:
        """Whether a whole source stays."""
        if is_held != (source in self.held_sources):
            change = self.bytes_of(source) if is_held else -self.bytes_of(source)
            if is_held:
                self.held_sources[source] = None
            else:
                del self.held_sources[source]
            self.held_bytes += change
            self.limit = max(0, self.limit - change)  # until somebody looks at the device

    def drop(self, segment: BlockSegment, mask: int) -> None:
        """These blocks of it count no more."""
        if self.is_current(segment):
            blocks = (segment.have & mask).bit_count()
            self._count(segment, -blocks)
            if segment.source in self.held_sources:
                self.held_bytes -= blocks * self.block
            segment.have &= ~mask
            segment.checked &= ~mask

    def end(self, source: int) -> bool:
        """All of a source counts no more, held or not. Whether there was anything."""
        if source in self.held_sources:
            self.hold(source, False)
        segments = self.sources.get(source)
        for segment in list(segments.values()) if segments else ():
            self._leave(segment)
        return segments is not None

    def evict(self) -> BlockSegment | None:
        """Take the first segment to go off the map; None: there is none, or all are held."""
        while self.bytes > self.held_bytes:
            is_small = self._small_blocks * self.block * _SMALL_SHARE >= self.limit
            if self._small and (is_small or not self._main):
                segment = next(iter(self._small))
                self._leave(segment)
                if segment.uses or segment.source in self.held_sources:
                    segment.uses = 0
                    self._enter(segment, True)
                    continue
                self._gone[segment.source, segment.number] = None
                while len(self._gone) > self.segments:
                    self._gone.popitem(last=False)
                return segment
            segment = next(iter(self._main))
            if segment.uses or segment.source in self.held_sources:
                segment.uses = max(0, segment.uses - 1)
                self._main.move_to_end(segment)
                continue
            self._leave(segment)
            return segment
        return None

    def _enter(self, segment: BlockSegment, is_main: bool) -> None:
        segment.is_main = is_main
        self.sources.setdefault(segment.source, {})[segment.number] = segment
        (self._main if is_main else self._small)[segment] = None
        self._gone.pop((segment.source, segment.number), None)
        self._count(segment, segment.have.bit_count())

    def _leave(self, segment: BlockSegment) -> None:
        numbers = self.sources[segment.source]
        del numbers[segment.number]
        if not numbers:
            del self.sources[segment.source]
        del (self._main if segment.is_main else self._small)[segment]
        self._count(segment, -segment.have.bit_count())

    def _count(self, segment: BlockSegment, blocks: int) -> None:
        self.bytes += blocks * self.block
        if not segment.is_main:
            self._small_blocks += blocks

    # --- on disk ---

    def snapshot(self) -> list[tuple[BlockSegment, int]]:
        """All segments, in the order in which they would go, with their blocks: for ``encode``."""
        return [(segment, segment.have) for queue in (self._small, self._main) for segment in queue]

    def restore(self, segments: Iterable[BlockSegment]) -> None:
        """Take over an earlier process's ``snapshot``, unchecked, into an empty map."""
        for segment in segments:
            self._enter(segment, segment.is_main)


def _masks(first: int, last: int) -> Iterator[tuple[int, int]]:
    """Segments, by number, of these blocks and those between, each with a mask."""
    for number in range(first // BLOCKS, last // BLOCKS + 1):
        low, high = max(first - number * BLOCKS, 0), min(last - number * BLOCKS, BLOCKS - 1)
        yield number, (1 << high + 1) - (1 << low)


def encode(block: int, state: int, segments: Iterable[tuple[BlockSegment, int]]) -> bytes:
    """A snapshot without checksum, valid for ``state``. May run in a thread; blocks gone meanwhile
    may be in it."""
    parts = [b""]
    for segment, have in segments:
        sums = b"".join(segment.sum_of(bit) for bit in range(BLOCKS) if have >> bit & 1)
        mask = have.to_bytes(BLOCKS // 8, "little")
        parts.append(_SEGMENT.pack(segment.source, segment.number << 1 | segment.is_main, mask))
        parts.append(sums)
    parts[0] = _HEAD.pack(_MAGIC, block, state, len(parts) // 2)
    return b"".join(parts)


def decode(block: int, state: int, record: bytes) -> list[BlockSegment]:
    """The segments of a snapshot. Raises ValueError if damaged, or of other block size or
    ``state``."""
    try:
        *about, count = _HEAD.unpack_from(record)
        if about != [_MAGIC, block, state]:
            raise ValueError("a map of other blocks")
        found, at = list[BlockSegment](), _HEAD.size
        for _ in range(count):
            source, number, mask = _SEGMENT.unpack_from(record, at)
            have = int.from_bytes(mask, "little")
            at += _SEGMENT.size
            end = at + have.bit_count() * SUM_BYTES
            segment = BlockSegment(source, number >> 1, have, record[at:end])
            segment.is_main = bool(number & 1)
            found.append(segment)
            at = end
    except struct.error:
        raise ValueError("a map that is cut off") from None
    if at != len(record):
        raise ValueError("a map of another length")
    return found
