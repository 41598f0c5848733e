"""What groups of one name had in common, for those that ask to reuse it: which chunks were copies
of each other.

The ranks of a training job write the same shapes at each step, and what was equal across them is
equal again: replicated parameters. With the hint ``reuse`` the first of such chunks is hashed, its
copies are compared with it by samples only. What is checked: sizes and borders of all members, so
nothing is reused for a file of another shape; that no copy counts that was zero, or equal to
another chunk of its own file, before (optimizer state of the first steps is equal, too, but only as
long as it has not been used: AITurbo's false duplicates); that the first is not zero now; and the
samples. What cannot be told: a copy that differs from its first somewhere between the samples. Then
its file gets the bytes of the other one. So this is for who knows that replicas are equal; without
the hint every byte is hashed.
"""

import random
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from blake3 import blake3

from aifs.vfs.groups.sharing import Chunk, Cut

_NAMES_MAX = 64
_SAMPLE = 4096
_SAMPLES = 8  # of each chunk
_COMPARED = 64  # chunks


class Shape(NamedTuple):
    """What a member must have in common with one of the last group. ``name`` tells alike ones
    apart.
    """

    size: int
    borders: bytes
    name: bytes


def shape_of(size: int, ranges: Sequence[tuple[int, int]], name: bytes) -> Shape:
    """``ranges``: offset and length of each chunk."""
    digest = blake3()
    for start in range(0, len(ranges), 4096):  # other threads want their turn
        digest.update(repr(ranges[start : start + 4096]).encode())
    return Shape(size, digest.digest(), name)


class Pattern(NamedTuple):
    """The members' shapes, ascending; ``firsts``: for each that is a copy, of which other chunk.
    Members are numbered in the order of their shapes."""

    shapes: Sequence[tuple[int, bytes]]
    firsts: dict[Chunk, Chunk]


class Patterns:
    """The last pattern of each name, of those used last. Used from one trio thread."""

    def __init__(self) -> None:
        self._by_name: OrderedDict[str, Pattern] = OrderedDict()

    def knows(self, name: str) -> bool:
        """Whether anything could be reused."""
        return name in self._by_name and bool(self._by_name[name].firsts)

    def find(self, name: str, shapes: Sequence[Shape]) -> dict[Chunk, Chunk]:
        """Which chunks should be copies, and of which others, by the members' numbers in
        ``shapes``; none where the shapes are not what they were."""
        pattern = self._by_name.get(name)
        order = _order(shapes)
        if pattern is None or [shapes[number][:2] for number in order] != pattern.shapes:
            return {}
        return {(order[m], c): (order[first], d) for (m, c), (first, d) in pattern.firsts.items()}

    def put(self, name: str, pattern: Pattern) -> None:
        self._by_name[name] = pattern
        self._by_name.move_to_end(name)
        if len(self._by_name) > _NAMES_MAX:
            self._by_name.popitem(last=False)


def pattern_of(shapes: Sequence[Shape], members: Sequence[Cut]) -> Pattern:
    """Of a group all of whose chunks have been hashed. Takes long for many of them."""
    order = _order(shapes)
    return Pattern(
        [shapes[number][:2] for number in order], copies([members[number] for number in order])
    )


def _order(shapes: Sequence[Shape]) -> list[int]:
    return sorted(range(len(shapes)), key=lambda number: shapes[number])


def copies(members: Sequence[Cut]) -> dict[Chunk, Chunk]:
    """Chunks that are equal across members, but for zeros and for what is twice in one of them;
    each copy, and its first.
    """
    places: dict[bytes, list[Chunk]] = {}
    for member, (_, digests, _) in enumerate(members):
        for number, digest in enumerate(digests):
            if digest:
                places.setdefault(digest, []).append((member, number))
    found = {}
    for first, *others in places.values():
        if others and len({member for member, _ in (first, *others)}) == 1 + len(others):
            found.update(dict.fromkeys(others, first))
    return found


def fill(found: Sequence[dict[int, bytes]], firsts: Mapping[Chunk, Chunk]) -> bool:
    """Give copies the digests of their firsts, by member and chunk; False where a first has none,
    or is zero.
    """
    for (member, number), (first, of) in firsts.items():
        digest = found[member][number] = found[first].get(of, b"")
        if not digest:
            return False
    return True


def batches(firsts: Mapping[Chunk, Chunk]) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """What is compared at once: the members of some copies and of their firsts, and the numbers of
    both chunks.
    """
    by_members: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for (member, number), (first, of) in firsts.items():
        by_members.setdefault((member, first), []).append((number, of))
    return [
        (member, first, chunks[start : start + _COMPARED])
        for (member, first), chunks in by_members.items()
        for start in range(0, len(chunks), _COMPARED)
    ]


def samples(length: int, choose: Callable[[int], int] = random.randrange) -> list[tuple[int, int]]:
    """Which bytes of a chunk are compared: offsets and lengths; others each time, so that a
    difference shows in the end.
    """
    if length <= _SAMPLE * _SAMPLES:
        return [(0, length)]
    part = length // _SAMPLES
    return [(number * part + choose(part - _SAMPLE + 1), _SAMPLE) for number in range(_SAMPLES)]
