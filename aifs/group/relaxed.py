"""The plan in bytes, as if chunks could be cut: maximum flows, and the least time in which they
fit.

Without links of their own, sources and destinations do not meet: which holder sends a byte
(constraints 1, 3, 6) is one flow from sets of holders to sources, where bytes are put (4, 7, and 2
as "a destination takes no byte twice") another. Each has its least time, the larger one is the
optimum, and each side is loaded by its own. The two are joined by laying all bytes on a line R
times over and cutting it at the borders of both (McNaughton's wrap-around rule, which keeps 2).
With links, it is one flow from sets of holders over sources and links to destinations. For R = 1 it
is exact too. For R > 1 it knows constraint 2 only summed over classes: its time is a lower bound,
and ``whole`` puts right what it breaks.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from aifs.core.errors import NoSpace
from aifs.group.network import Network
from aifs.group.pattern import ChunkClass, Destination, Pattern, Source

_SHOWN = 3


class Part(NamedTuple):
    """``chunks`` (any fraction) of class ``kind`` go from ``source`` to ``destination``."""

    kind: int
    source: int
    destination: int
    chunks: float


def relax(pattern: Pattern) -> tuple[list[Part], float]:
    """The parts of a plan that may cut chunks, and a lower bound of every plan's time. Raises
    NoSpace.
    """
    if not pattern.classes:
        return [], 0.0
    return _linked(pattern) if pattern.links else _joined(pattern)


def _room(pattern: Pattern, destination: Destination) -> float:
    return pattern.bytes if destination.space is None else min(destination.space, pattern.bytes)


def _memory(source: Source) -> float:
    return math.inf if source.memory is None else source.memory


def _fastest(pattern: Pattern, *sides: Sequence[Source] | Sequence[Destination]) -> float:
    """The time if all nodes of each side could be busy to the end."""
    return (
        pattern.replicas
        * pattern.bytes
        / min(sum(node.bandwidth for node in side) for side in sides)
    )


class _Holders:
    """The classes by who holds them: all that a flow needs to know of them."""

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern
        self.classes: dict[tuple[int, ...], list[ChunkClass]] = defaultdict(list)
        for chunks in pattern.classes:
            self.classes[chunks.sources].append(chunks)

    def add_to(
        self, network: Network, start: int, first: int, first_source: int
    ) -> dict[tuple[int, ...], list[int]]:
        """Edges from ``start`` to a node per set of holders, and on to each holder; returns the
        latter.
        """
        edges = {}
        for node, (holders, classes) in enumerate(self.classes.items(), first):
            copies = self.pattern.replicas * sum(chunks.bytes for chunks in classes)
            network.add(start, node, cap=copies)
            edges[holders] = [network.add(node, first_source + holder) for holder in holders]
        return edges

    def queues(
        self, network: Network, edges: dict[tuple[int, ...], list[int]]
    ) -> dict[tuple[int, ...], "_Line"]:
        """For every set of holders, its bytes cut up among them as they flow."""
        return {
            holders: _Line(
                [
                    (holder, network.flow(edge))
                    for holder, edge in zip(holders, numbers, strict=True)
                ]
            )
            for holders, numbers in edges.items()
        }


class _Line:
    """Bytes in a row, cut into pieces with an owner each; taken from the front."""

    def __init__(self, pieces: list[tuple[int, float]]) -> None:
        self._pieces = [(owner, length) for owner, length in pieces if length > 0]
        self._at, self.left = 0, self._pieces[0][1] if self._pieces else 0.0

    @property
    def owner(self) -> int:
        return self._pieces[self._at][0]

    @property
    def is_last(self) -> bool:
        return self._at + 1 == len(self._pieces)

    def take(self, length: float) -> None:
        """Take no more than ``left``; the last piece never ends, since sums of parts are
        rounded.
        """
        self.left -= length
        if self.left <= 0 and not self.is_last:
            self._at += 1
            self.left = self._pieces[self._at][1]


def _cut(length: float, *lines: _Line) -> float:
    """How much of ``length`` comes before the next border of a line; taken from each."""
    step = min([length, *(line.left for line in lines if not line.is_last)])
    for line in lines:
        line.take(step)
    return step


def _joined(pattern: Pattern) -> tuple[list[Part], float]:
    """No links: two flows, joined."""
    holders, demand = _Holders(pattern), pattern.replicas * pattern.bytes
    start, end = len(pattern.sources), len(pattern.sources) + 1
    network = Network(end + 1 + len(holders.classes))
    edges = holders.add_to(network, start, end + 1, 0)
    limits: dict[int, Source | Destination] = {
        network.add(number, end, source.bandwidth, _memory(source)): source
        for number, source in enumerate(pattern.sources)
    }
    fastest = _fastest(pattern, pattern.sources)
    lower = network.least_time(
        start, end, demand, fastest, lambda cut: _too_small(network, cut, limits, demand)
    )
    senders = holders.queues(network, edges)

    network = Network(2)
    limits = {
        network.add(0, 1, destination.bandwidth, _room(pattern, destination)): destination
        for destination in pattern.destinations
    }
    fastest = _fastest(pattern, pattern.destinations)
    time = network.least_time(
        0, 1, demand, fastest, lambda cut: _too_small(network, cut, limits, demand)
    )
    takers = _Line([(number, network.flow(edge)) for number, edge in enumerate(limits)])
    parts = []
    for _ in range(pattern.replicas):
        for kind, chunks in enumerate(pattern.classes):
            sender, left = senders[chunks.sources], float(chunks.bytes)
            while left > 0:
                source, destination = sender.owner, takers.owner
                step = _cut(left, sender, takers)
                parts.append(Part(kind, source, destination, step / chunks.size))
                left -= step
    return parts, max(lower, time)


def _linked(pattern: Pattern) -> tuple[list[Part], float]:
    """One flow: set of holders, source, link, destination."""
    holders, demand = _Holders(pattern), pattern.replicas * pattern.bytes
    count, start = len(pattern.sources), 0
    ingress, egress = 1, 1 + count
    first_destination = egress + count
    end = first_destination + len(pattern.destinations)
    network = Network(end + 1 + len(holders.classes))
    edges = holders.add_to(network, start, end + 1, ingress)
    held = [0] * count
    for chunks in pattern.classes:
        for source in chunks.sources:
            held[source] += chunks.bytes
    limits: dict[int, Source | Destination] = {}
    for number, sender in enumerate(pattern.sources):
        edge = network.add(ingress + number, egress + number, sender.bandwidth, _memory(sender))
        limits[edge] = sender
    wires = [
        [
            network.add(
                egress + source,
                first_destination + number,
                pattern.links.get((source, number), math.inf),
                size,
            )
            for number in range(len(pattern.destinations))
        ]
        for source, size in enumerate(held)
    ]
    for number, taker in enumerate(pattern.destinations):
        edge = network.add(first_destination + number, end, taker.bandwidth, _room(pattern, taker))
        limits[edge] = taker
    fastest = _fastest(pattern, pattern.sources, pattern.destinations)
    lower = network.least_time(
        start, end, demand, fastest, lambda cut: _too_small(network, cut, limits, demand)
    )
    senders = holders.queues(network, edges)
    sent: list[defaultdict[int, float]] = [defaultdict(float) for _ in range(count)]
    for kind, chunks in enumerate(pattern.classes):
        queue, left = senders[chunks.sources], float(chunks.bytes * pattern.replicas)
        while left > 0:
            source = queue.owner
            step = _cut(left, queue)
            sent[source][kind] += step
            left -= step
    parts = []
    for source, kinds in enumerate(sent):
        takers = _Line([(number, network.flow(edge)) for number, edge in enumerate(wires[source])])
        for _ in range(
            pattern.replicas
        ):  # copies of a chunk lie far apart, so mostly at distinct destinations
            for kind, size in kinds.items():
                left = size / pattern.replicas
                while left > 0:
                    destination = takers.owner
                    step = _cut(left, takers)
                    parts.append(Part(kind, source, destination, step / pattern.classes[kind].size))
                    left -= step
    return parts, lower


def _too_small(
    network: Network,
    cut: list[int],
    limits: Mapping[int, Source | Destination],
    demand: int,
) -> NoSpace:
    passed = int(sum(network.cap[edge] for edge in cut))
    nodes = [limits[edge] for edge in cut if edge in limits]
    capped = [
        f"memory of {node.name}"
        for node in nodes
        if isinstance(node, Source) and node.memory is not None
    ]
    capped += [
        f"space of {node.name}"
        for node in nodes
        if isinstance(node, Destination) and node.space is not None
    ]
    more = f" and {len(capped) - _SHOWN} more" if len(capped) > _SHOWN else ""
    return NoSpace(
        f"{', '.join(capped[:_SHOWN])}{more}: only {passed} of {demand} bytes fit at any time"
    )
