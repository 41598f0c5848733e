"""Rows of an object set in memory: the bytes of each column, the right bytes, the differences.

Pure except for the memory. ``judge`` takes long, and is called in worker threads.
"""

from collections.abc import Collection, Iterator
from itertools import chain
from typing import NamedTuple, Protocol

from aifs.data.checks import source_of, suspect_sets
from aifs.data.objects.coding import code_of
from aifs.data.reading.buffers import is_equal, scatter
from aifs.layout.striped import Striped

MISSING, SHORT, LONG, UNREADABLE, WRONG = "missing", "short", "long", "unreadable", "wrong"
"""Kinds of flaws."""

_BLOCK = 4096  # flaws are told in whole blocks

Span = tuple[int, int]
"""Start and end."""


class Flaw(NamedTuple):
    """Wrong bytes of a column's object; ``right``: the bytes that belong there, None if unknown."""

    column: int
    kind: str
    offset: int
    length: int
    right: bytes | None = None


class Loss(NamedTuple):
    """Lost bytes of the file, or container, and their columns. ``end`` -1: unknown. ``certain``
    False: columns differ, without a checksum."""

    start: int
    end: int
    columns: tuple[int, ...]
    certain: bool = True


class Verdict(NamedTuple):
    """On one window. ``next``: the next one's start; ``read_bytes``: of all columns."""

    flaws: list[Flaw]
    losses: list[Loss]
    next: int
    read_bytes: int

    @property
    def is_right(self) -> bool:
        """Whether nothing is wrong there."""
        return not self.flaws and not self.losses


class Check(Protocol):
    """Judges bytes: a file's by checksums, a container's by chunks."""

    def at(self, data: memoryview, offset: int, is_last: bool) -> tuple[int, bool | None] | None:
        """Judge the piece at ``offset``, with ``data`` from there to the window's end, ``is_last``:
        its length, and whether it is right (None: unknown). None: it ends in a later window. (0,
        False): its end is unknown."""


class Window:
    """Bytes ``begin`` to ``end`` of a file: whole rows if it is coded."""

    def __init__(self, layout: Striped, size: int, begin: int, end: int, unread: int) -> None:
        self.layout, self.size, self.begin, self.end = layout, size, begin, end
        self.found: dict[int, tuple[int, memoryview]] = {}
        """By column, the window's offset in the object, and the memory for what is read there."""
        self.failed: dict[int, str] = {}
        """By column, the kind of flaw of those that have not all of it."""
        self.carried: bytes | memoryview = b""
        """The file's first bytes, as told by the window before."""
        self.doubtful: list[Span] = []
        """Spans of the file that nobody knows about."""
        self._unread = unread
        self._offsets = [0] * layout.width
        """By data column, where in its object the window begins."""
        # Of the window, by data column.
        self._spans: list[list[Span]] = [[] for _ in range(layout.width)]
        for index, object_offset, file_offset, length in layout.extents(begin, end - begin):
            if not self._spans[index]:
                self._offsets[index] = object_offset
            self._spans[index].append((file_offset - begin, file_offset - begin + length))
        self._lengths = [sum(b - a for a, b in spans) for spans in self._spans]
        """By data column, how many bytes of it the window has."""
        self._apart = [
            c for c in range(len(layout.servers)) if c >= layout.width or len(self._spans[c]) > 1
        ]
        """Columns with memory of their own: parity, copies, and those in several spans."""
        self.space = end - begin + sum(self._lengths[self._like(column)] for column in self._apart)
        """Bytes of memory that ``place`` needs."""
        self.space += layout.parity * self._lengths[0]  # of what it should be
        self._told: tuple[int, memoryview] | None = None
        """The bytes as told without a mask of columns, and that mask; or None."""
        self._truth = memoryview(b"")
        """The file's bytes as they should be, as far as that is known."""
        self._parities: list[memoryview] = []
        """The parity of ``_truth``; empty before it is needed."""

    def _like(self, column: int) -> int:
        return self.layout.data_column(column) or 0

    def place(self, memory: memoryview) -> None:
        """Lay the window out in ``space`` bytes: the file's, then those read apart."""
        used = self.end - self.begin
        self._plain = memory[:used]
        for column in range(len(self.layout.servers)):
            like = self._like(column)
            if column in self._apart:
                target = memory[used : used + self._lengths[like]]
                used += len(target)
            else:
                [(start, end)] = self._spans[column] or [(0, 0)]
                target = self._plain[start:end]
            self.found[column] = self._offsets[like], target
        length = self._lengths[0]
        ends = (
            range(used + length, used + length * self.layout.parity + 1, length) if length else ()
        )
        self._encoding = [memory[end - length : end] for end in ends]

    # --- the file's bytes ---

    def judge(self, start: int, check: Check) -> Verdict:
        """Judge from ``start`` of the file on; ``carried`` and ``doubtful`` are the next window's
        then."""
        for column in range(self.layout.width):
            if column in self._apart:
                scatter(self.found[column][1], [self._plain[a:b] for a, b in self._spans[column]])
        self._plain[: len(self.carried)] = self.carried
        unread = self._unread | sum(1 << column for column in self.failed)
        told = self._without(unread)
        truth, losses, unsure = told or self._plain, [], []
        at, is_last = start - self.begin, self.end == self.size
        while at < len(truth):
            found = check.at(truth[at:], self.begin + at, is_last)
            if found is None:
                break
            length, is_right = found
            columns = self._touched(at, at + length) if length else range(self.layout.width)
            if (
                is_right is None
                and told is None
                and any(unread >> column & 1 for column in columns)
            ):
                is_right = False
            if is_right is False:
                better = self._elsewhere(unread, columns, check, at, is_last)
                if better is None:
                    end = self.begin + at + length if length else -1
                    losses.append(Loss(self.begin + at, end, tuple(columns)))
                    self.doubtful.append((self.begin + at, self.end if end < 0 else end))
                    if not length:
                        break
                else:
                    length, data = better
                    if truth is self._plain:
                        truth = memoryview(bytearray(truth))
                    truth[at : at + length] = data[at : at + length]
            elif is_right is None:
                unsure.append((at, at + length))
            at += length
        self._truth = truth
        flaws, unclear = self._flaws(truth, start - self.begin, at, unsure)
        self._carry(truth, at)
        read_bytes = sum(
            len(target)
            for column, (_, target) in self.found.items()
            if not self._unread >> column & 1
        )
        return Verdict(flaws, losses + unclear, self.begin + at, read_bytes)

    def _without(self, unread: int) -> memoryview | None:
        """The file's bytes by the other columns; None if too few."""
        lacking = [
            column
            for column in range(self.layout.width)
            if unread >> column & 1 and self._lengths[column]
        ]
        if not lacking:
            return self._plain
        if self._told is not None and self._told[0] == unread:
            return self._told[1]
        data = memoryview(bytearray(self._plain))
        for column in lacking:
            right = self._column_without(unread, column)
            if right is None:
                return None
            scatter(right, [data[a:b] for a, b in self._spans[column]])
        # What has been judged already, maybe without other columns.
        data[: len(self.carried)] = self.carried
        self._told = unread, data
        return data

    def _column_without(self, unread: int, column: int) -> memoryview | None:
        layout = self.layout
        source = source_of(layout, column, unread)
        if source is not None:
            return self.found[source][1]
        others = {c: target for c, (_, target) in self.found.items() if not unread >> c & 1}
        if not layout.parity or len(others) < layout.width:
            return None
        units = dict(list(others.items())[: layout.width])
        whole = memoryview(bytearray(self._lengths[0]))
        code_of(layout.width, layout.parity).reconstruct(units, column, whole)
        return whole[: self._lengths[column]]

    def _elsewhere(
        self, unread: int, columns: Collection[int], check: Check, at: int, is_last: bool
    ) -> tuple[int, memoryview] | None:
        """Length and bytes of the piece at ``at``, from columns without which it is right."""
        told = self._told
        last = [told[0]] if told is not None and told[0] & unread == unread else []
        for mask in chain(last, suspect_sets(self.layout, columns, unread)):
            data = self._without(mask) if mask != unread else None
            if (
                data is not None
                and (found := check.at(data[at:], self.begin + at, is_last))
                and found[1]
            ):
                return found[0], data
        return None

    def _touched(self, start: int, end: int) -> list[int]:
        return [
            c for c, spans in enumerate(self._spans) if any(a < end and start < b for a, b in spans)
        ]

    def _carry(self, truth: memoryview, at: int) -> None:
        """Keep what the next window needs of its first row."""
        row = self.layout.row if self.layout.parity else 1
        begin = at // row * row  # the window begins with a row
        self.carried = bytes(truth[begin:at])
        self.doubtful = [(a, b) for a, b in self.doubtful if b > self.begin + begin]

    def tell(self, start: int, check: Check, column: int) -> tuple[Verdict, int, memoryview]:
        """``judge``, with offset and bytes of ``column`` in completely judged rows."""
        verdict, layout = self.judge(start, check), self.layout
        end = verdict.next - self.begin
        if layout.parity and verdict.next < self.size:
            end -= end % layout.row
        if layout.parity and column >= layout.width:
            right = self._encoded(self._truth)[column - layout.width][
                : -(-end // layout.row) * layout.unit
            ]
        else:
            right = self._joined(self._truth[:end], self._like(column))
        return verdict, self._offsets[self._like(column)], right

    # --- what is wrong ---

    def _flaws(
        self, truth: memoryview, start: int, end: int, unsure: list[Span]
    ) -> tuple[list[Flaw], list[Loss]]:
        """Columns' differences from the file's bytes, and losses where the right column is
        unknown."""
        flaws = [
            Flaw(column, kind, self.found[column][0], len(self.found[column][1]))
            for column, kind in self.failed.items()
            if kind is not UNREADABLE
        ]
        losses: list[Loss] = []
        doubtful = [(a - self.begin, b - self.begin) for a, b in self.doubtful]
        for column, (offset, found) in self.found.items():
            kind = self.failed.get(column, WRONG)
            if (
                self._unread >> column & 1
                or kind in (MISSING, SHORT)
                or (column < self.layout.width and truth is self._plain)
            ):
                continue
            pieces = (
                self._parity if column >= self.layout.width and self.layout.parity else self._copies
            )
            for place, right, span in pieces(column, truth, start, end):
                there = found[place : place + len(right)]
                if _overlap(span, doubtful) or (kind is WRONG and is_equal(there, right)):
                    continue
                if _overlap(span, unsure) and kind is WRONG:
                    losses.append(
                        Loss(self.begin + span[0], self.begin + span[1], (column,), certain=False)
                    )
                    continue
                for a, b in [(0, len(right))] if kind is UNREADABLE else _differences(there, right):
                    flaws.append(Flaw(column, kind, offset + place + a, b - a, bytes(right[a:b])))
        return flaws, losses

    def _copies(
        self, column: int, truth: memoryview, start: int, end: int
    ) -> Iterator[tuple[int, memoryview, Span]]:
        """(place, right bytes, span of the window) of a data column or replica."""
        place = 0
        for a, b in self._spans[self._like(column)]:
            first, last = max(a, start), min(b, end)
            for low, high in self._cut(first, last):
                yield place + low - a, truth[low:high], (low, high)
            place += b - a

    def _cut(self, start: int, end: int) -> Iterator[Span]:
        for a, b in sorted((a - self.begin, b - self.begin) for a, b in self.doubtful):
            if start < min(a, end):
                yield start, min(a, end)
            start = max(start, min(b, end))
        if start < end:
            yield start, end

    def _parity(
        self, column: int, truth: memoryview, start: int, end: int
    ) -> Iterator[tuple[int, memoryview, Span]]:
        """``_copies`` of parity, for each row known to its end."""
        layout = self.layout
        parities = self._encoded(truth)
        right = parities[column - layout.width]
        for number, low in enumerate(range(0, end, layout.row)):
            high = min(low + layout.row, len(truth))
            if start < high <= end:
                yield (
                    number * layout.unit,
                    right[number * layout.unit : (number + 1) * layout.unit],
                    (low, high),
                )

    def _encoded(self, truth: memoryview) -> list[memoryview]:
        if not self._parities:
            layout = self.layout
            if truth is self._plain and not self.carried:
                units = [self.found[column][1] for column in range(layout.width)]
            else:
                units = [self._joined(truth, column) for column in range(layout.width)]
            self._parities = self._encoding
            code_of(layout.width, layout.parity).encode(units, self._parities)
        return self._parities

    def _joined(self, data: memoryview, column: int) -> memoryview:
        parts = [data[a:b] for a, b in self._spans[column]]
        return parts[0] if len(parts) == 1 else memoryview(bytearray().join(parts))


def _overlap(span: Span, others: list[Span]) -> bool:
    return any(a < span[1] and span[0] < b for a, b in others)


def _differences(found: memoryview, right: memoryview) -> Iterator[Span]:
    """Spans of whole blocks that differ."""
    start = None
    for offset in range(0, len(right), _BLOCK):
        differs = not is_equal(found[offset : offset + _BLOCK], right[offset : offset + _BLOCK])
        if differs and start is None:
            start = offset
        elif not differs and start is not None:
            yield start, offset
            start = None
    if start is not None:
        yield start, len(right)
