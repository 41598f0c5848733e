"""A plan: how many chunks of each class go from which source to which destination, how long that
takes, and why.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from aifs.group.pattern import Destination, Link, Pattern, Source


class Share(NamedTuple):
    """``count`` chunks of class ``kind`` (its index) go from ``source`` to ``destination``."""

    kind: int
    source: int
    destination: int
    count: int  # type: ignore[assignment]


class Transfer(NamedTuple):
    """The chunks ``first`` to ``first + count - 1`` of a class go from a source to a
    destination.
    """

    kind: int
    first: int
    count: int  # type: ignore[assignment]
    source: int
    destination: int


class Load(NamedTuple):
    """What a plan asks of one source, destination or link."""

    role: str
    """``source``, ``destination`` or ``link``."""
    name: str
    bytes: int
    bandwidth: int | None
    """None: a link without a limit of its own."""
    time_s: float
    """How long it is busy."""


@dataclass(frozen=True)
class Plan:
    """An answer to ``pattern``. ``lower_bound_s``: no plan at all, not even one that cuts chunks,
    takes less.
    """

    pattern: Pattern
    shares: tuple[Share, ...]
    lower_bound_s: float
    solver: str

    @cached_property
    def link_bytes(self) -> dict[Link, int]:
        """Bytes by pair of source and destination, for those that carry any."""
        loads: dict[Link, int] = defaultdict(int)
        for share in self.shares:
            loads[share.source, share.destination] += (
                share.count * self.pattern.classes[share.kind].size
            )
        return dict(loads)

    @cached_property
    def loads(self) -> tuple[Load, ...]:
        """Every source, every destination, then every link that carries bytes."""
        pattern = self.pattern
        sent, taken = [0] * len(pattern.sources), [0] * len(pattern.destinations)
        for (source, destination), size in self.link_bytes.items():
            sent[source] += size
            taken[destination] += size
        ends: tuple[tuple[str, Sequence[Source | Destination], list[int]], ...] = (
            ("source", pattern.sources, sent),
            ("destination", pattern.destinations, taken),
        )
        found = [
            Load(role, node.name, size, node.bandwidth, size / node.bandwidth)
            for role, nodes, sizes in ends
            for node, size in zip(nodes, sizes, strict=True)
        ]
        for link, size in sorted(self.link_bytes.items()):
            bandwidth = pattern.links.get(link)
            time_s = size / bandwidth if bandwidth else 0.0
            found.append(Load("link", pattern.link_name(*link), size, bandwidth, time_s))
        return tuple(found)

    @cached_property
    def bottleneck(self) -> Load:
        """What is busy longest."""
        return max(self.loads, key=lambda load: load.time_s)

    @property
    def time_s(self) -> float:
        """How long the plan takes where everything runs at its bandwidth: as long as its bottleneck
        is busy.
        """
        return self.bottleneck.time_s

    @property
    def gap(self) -> float:
        """How much longer than the lower bound, as a fraction: 0.01 is 1 %."""
        return self.time_s / self.lower_bound_s - 1 if self.lower_bound_s else 0.0

    def balance(self, role: str) -> float:
        """Mean busy time of all sources (destinations) over the longest of them: 1 is perfect."""
        times = [load.time_s for load in self.loads if load.role == role]
        return sum(times) / len(times) / max(times) if max(times, default=0.0) else 1.0

    def transfers(self) -> Iterator[Transfer]:
        """The plan by chunks: which of a class's chunks go where; the replicas of a chunk go to
        distinct destinations.

        McNaughton's wrap-around rule (1959): copies are laid out destination by destination, and
        copy i is of chunk i mod count. A destination has at most ``count`` copies, next to each
        other, so never two of one chunk.
        """
        by_kind: dict[int, list[Share]] = defaultdict(list)
        for share in self.shares:
            by_kind[share.kind].append(share)
        for kind, shares in sorted(by_kind.items()):
            count, slot = self.pattern.classes[kind].count, 0
            for share in sorted(shares, key=lambda share: share.destination):
                left = share.count
                while left:
                    first = slot % count
                    length = min(left, count - first)
                    yield Transfer(kind, first, length, share.source, share.destination)
                    slot += length
                    left -= length


def problems(pattern: Pattern, shares: Sequence[Share]) -> list[str]:
    """Which of the constraints 1, 2, 6 and 7 the shares break, in words; empty for a plan that can
    be carried out.
    """
    found = []
    copies = [0] * len(pattern.classes)
    stored: defaultdict[tuple[int, int], int] = defaultdict(int)
    sent, taken = [0] * len(pattern.sources), [0] * len(pattern.destinations)
    for kind, source, destination, count in shares:
        chunks = pattern.classes[kind]
        if source not in chunks.sources or count <= 0:
            found.append(
                f"class {kind}: {pattern.sources[source].name} cannot send {count} chunks of it"
            )
        copies[kind] += count
        stored[kind, destination] += count
        sent[source] += count * chunks.size
        taken[destination] += count * chunks.size
    for kind, chunks in enumerate(pattern.classes):
        if copies[kind] != chunks.count * pattern.replicas:
            found.append(f"class {kind}: {copies[kind]} copies of {chunks.count} chunks")
    for (kind, destination), count in stored.items():
        if count > pattern.classes[kind].count:
            found.append(
                f"class {kind}: a chunk is twice on {pattern.destinations[destination].name}"
            )
    for sender, size in zip(pattern.sources, sent, strict=True):
        if sender.memory is not None and size > sender.memory:
            found.append(
                f"source {sender.name}: {size} bytes are more than its memory of {sender.memory}"
            )
    for taker, size in zip(pattern.destinations, taken, strict=True):
        if taker.space is not None and size > taker.space:
            found.append(
                f"destination {taker.name}: {size} bytes are more than its space of {taker.space}"
            )
    return found
