"""The plan of a grouped write: which source sends which chunks to which destination, so that all
are stored as early as possible.

A *source* (a burst device) sends chunks; a *destination* (what a container is laid out like) takes
them. Chunks of one size that the same sources hold form a *class*: any holder may send any chunk of
it. Bandwidths are bytes per second. These are the constraints of AITurbo's write plan (Hao et al.,
Fast Cloud Storage for AI Jobs via Grouped I/O, FAST '26) as far as they can bind here, where
redundancy is the destination's own:

1. each chunk is sent once, by a source that holds it;
2. egress: a source sends no more than t times its bandwidth in t seconds, and all sources of a host
   together no more than t times that of its *link*, where that is known;
3. ingress: a destination takes no more than t times its bandwidth, and than its space.

Sources and destinations do not meet but in the bytes. So which holder sends a byte is one flow
from sets of holders to sources, and where bytes are put is another, from one pool to the
destinations; each has its least time, and no plan beats the longer one. The two are joined by
laying all bytes on a line and cutting it at the borders of both. Of each piece the whole chunks
are taken; the few that remain go, one by one, where they end first.
"""

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from aifs.core.errors import NoSpace


class Source(NamedTuple):
    """``link``: its host's, an index of Pattern.links; None: it has one that is as fast as all of
    its sources, at least."""

    bandwidth: int
    link: int | None = None


class Destination(NamedTuple):
    """Takes at most ``space`` bytes (None: no limit)."""

    bandwidth: int
    space: int | None = None


class ChunkClass(NamedTuple):
    """``chunks`` chunks of ``size`` bytes, each held by every one of ``sources`` (indices,
    ascending, at least one)."""

    size: int
    chunks: int
    sources: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return self.size * self.chunks


class Pattern(NamedTuple):
    """One grouped write. There is a source and a destination, and bandwidths and sizes are above
    zero."""

    sources: Sequence[Source]
    destinations: Sequence[Destination]
    classes: Sequence[ChunkClass]
    links: Sequence[int] = ()
    """Bandwidths of hosts."""

    @property
    def bytes(self) -> int:
        return sum(kind.bytes for kind in self.classes)


class Transfer(NamedTuple):
    """The chunks from ``first`` to before ``end`` of class ``kind`` (its index) go from a source to
    a destination."""

    kind: int
    first: int
    end: int
    source: int
    destination: int


class Plan(NamedTuple):
    transfers: list[Transfer]
    time_s: float
    """How long it takes where everything runs at its bandwidth."""
    lower_bound_s: float
    """No plan at all, not even one that cuts chunks, takes less."""


def plan(pattern: Pattern) -> Plan:
    """The plan of a grouped write. Raises NoSpace."""
    if not pattern.classes:
        return Plan([], 0.0, 0.0)
    senders, egress_s = _senders(pattern)
    takers, ingress_s = _takers(pattern)
    counts: list[dict[tuple[int, int], int]] = []
    for chunks in pattern.classes:
        parts: defaultdict[tuple[int, int], float] = defaultdict(float)
        for source, destination, length in _cut(chunks.bytes, senders[chunks.sources], takers):
            parts[source, destination] += length
        whole = {link: int(length / chunks.size + 1e-9) for link, length in parts.items()}
        counts.append({link: count for link, count in whole.items() if count})
    time_s = _place_others(pattern, counts)
    return Plan(_transfers(counts), time_s, max(egress_s, ingress_s))


def _place_others(pattern: Pattern, counts: list[dict[tuple[int, int], int]]) -> float:
    """Let the chunks that are missing in ``counts`` go where they end first; returns when the last
    one ends. Raises NoSpace."""
    sent, taken = [0] * len(pattern.sources), [0] * len(pattern.destinations)
    passed = [0] * len(pattern.links)

    def move(link: tuple[int, int], length: int) -> None:
        sent[link[0]] += length
        taken[link[1]] += length
        host = pattern.sources[link[0]].link
        if host is not None:
            passed[host] += length

    for chunks, links in zip(pattern.classes, counts, strict=True):
        for link, count in links.items():
            move(link, count * chunks.size)

    def sends(number: int) -> float:
        """When one more chunk would be sent by then."""
        bandwidth, host = pattern.sources[number]
        own_s = (sent[number] + size) / bandwidth
        return own_s if host is None else max(own_s, (passed[host] + size) / pattern.links[host])

    def takes(number: int) -> float:
        return (taken[number] + size) / pattern.destinations[number].bandwidth

    for size, _, chunks, links in sorted(
        (chunks.size, kind, chunks, links)
        for kind, (chunks, links) in enumerate(zip(pattern.classes, counts, strict=True))
    )[::-1]:
        for _ in range(chunks.chunks - sum(links.values())):
            open_to = [
                number
                for number, node in enumerate(pattern.destinations)
                if node.space is None or taken[number] + size <= node.space
            ]
            if not open_to:
                raise NoSpace(f"no data server has room for one more chunk of {size} bytes")
            source, destination = min(chunks.sources, key=sends), min(open_to, key=takes)
            links[source, destination] = links.get((source, destination), 0) + 1
            move((source, destination), size)
    rates = [source.bandwidth for source in pattern.sources]
    rates += [destination.bandwidth for destination in pattern.destinations]
    loads = zip([*sent, *taken, *passed], [*rates, *pattern.links], strict=True)
    return max(load / rate for load, rate in loads)


def _transfers(counts: list[dict[tuple[int, int], int]]) -> list[Transfer]:
    found = []
    for kind, links in enumerate(counts):
        first = 0
        for link, count in links.items():
            found.append(Transfer(kind, first, first + count, *link))
            first += count
    return found


class _Line:
    """Bytes in a row, cut into pieces with an owner each; taken from the front. Where all pieces
    are empty, the bytes being lost in rounding, the first owner has them."""

    def __init__(self, pieces: list[tuple[int, float]]) -> None:
        self._pieces = [(owner, length) for owner, length in pieces if length > 0] or pieces[:1]
        self._at, self.left = 0, self._pieces[0][1]

    @property
    def owner(self) -> int:
        return self._pieces[self._at][0]

    @property
    def is_last(self) -> bool:
        return self._at + 1 == len(self._pieces)

    def take(self, length: float) -> None:
        """Take no more than ``left``; the last piece never ends, since sums of parts are
        rounded."""
        self.left -= length
        if self.left <= 0 and not self.is_last:
            self._at += 1
            self.left = self._pieces[self._at][1]


def _cut(length: float, senders: _Line, takers: _Line) -> Iterator[tuple[int, int, float]]:
    """The next ``length`` bytes, as (source, destination, length) between borders of the lines."""
    while length > 0:
        step = min([length, *(line.left for line in (senders, takers) if not line.is_last)])
        yield senders.owner, takers.owner, step
        senders.take(step)
        takers.take(step)
        length -= step


def _senders(pattern: Pattern) -> tuple[dict[tuple[int, ...], _Line], float]:
    """For every set of holders its bytes, cut up among them, and the least time in which they can
    be sent."""
    sizes: defaultdict[tuple[int, ...], int] = defaultdict(int)
    for chunks in pattern.classes:
        sizes[chunks.sources] += chunks.bytes
    start, end = len(pattern.sources), len(pattern.sources) + 1
    network = Network(end + 1 + len(sizes) + len(pattern.links))
    first_link = end + 1 + len(sizes)
    edges: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for node, (holders, size) in enumerate(sizes.items(), end + 1):
        network.add(start, node, cap=size)
        edges[holders] = [(holder, network.add(node, holder)) for holder in holders]
    for number, source in enumerate(pattern.sources):
        over = end if source.link is None else first_link + source.link
        network.add(number, over, source.bandwidth)
    for number, bandwidth in enumerate(pattern.links):
        network.add(first_link + number, end, bandwidth)
    soonest_s = pattern.bytes / sum(source.bandwidth for source in pattern.sources)
    time_s = network.least_time(start, end, pattern.bytes, soonest_s)
    lines = {
        holders: _Line([(holder, network.flow(edge)) for holder, edge in found])
        for holders, found in edges.items()
    }
    return lines, time_s


def _takers(pattern: Pattern) -> tuple[_Line, float]:
    """All bytes, cut up among the destinations, and the least time in which they can be taken.
    Raises NoSpace."""
    left, rate = pattern.bytes, sum(node.bandwidth for node in pattern.destinations)
    by_time_s = sorted(
        (node.space / node.bandwidth, node.space, node.bandwidth)
        for node in pattern.destinations
        if node.space is not None
    )
    for full_s, space, bandwidth in by_time_s:
        if full_s * rate >= left:
            break
        left -= space
        rate -= bandwidth
        if not rate:
            raise NoSpace(
                f"the data servers have room for {pattern.bytes - left} bytes of a group "
                f"that needs {pattern.bytes}"
            )
    time_s = left / rate
    return _Line(
        [(number, _most(node, time_s)) for number, node in enumerate(pattern.destinations)]
    ), time_s


def _most(node: Destination, time_s: float) -> float:
    length = node.bandwidth * time_s
    return length if node.space is None else min(length, node.space)


# Maximum flow, and the least time in which a flow fits through edges whose capacity grows with
# time.
#
# Maximum flow is Dinic's algorithm (Dinitz 1970): O(V^2 E), near linear on the shallow graphs of a
# plan. The least time is found by the discrete Newton method on minimum cuts (Radzik 1992,
# "Newton's method for fractional combinatorial optimization"): a cut that is too small at time t
# says, being linear in t, from which time on it is large enough; the next t is that time. Every t
# on the way is a lower bound, and the last is exact; a handful of steps do.

_EXACT = 1e-9  # relative: what a flow may lack and still be called whole


class Network:
    """A directed graph whose edges hold at most min(rate * t, cap) at time t."""

    def __init__(self, nodes: int) -> None:
        self.edges_of: list[list[int]] = [[] for _ in range(nodes)]
        self.head: list[int] = []
        self.rate: list[float] = []
        self.cap: list[float] = []
        self.residual: list[float] = []

    def add(self, tail: int, head: int, rate: float = math.inf, cap: float = math.inf) -> int:
        """Add an edge and return its number; its reverse has the next one."""
        number = len(self.head)
        for here, there, *limits in ((tail, head, rate, cap), (head, tail, 0.0, 0.0)):
            self.edges_of[here].append(len(self.head))
            self.head.append(there)
            self.rate.append(limits[0])
            self.cap.append(limits[1])
        return number

    def capacity(self, edge: int, time: float) -> float:
        return min(self.rate[edge] * time, self.cap[edge])

    def flow(self, edge: int) -> float:
        """What the last computed flow sends through an edge."""
        return self.residual[edge + 1]

    def max_flow(self, start: int, end: int, time: float, enough: float) -> float:
        """The value of a maximum flow at ``time``; stops when it is within rounding of
        ``enough``."""
        self.residual = [
            0.0 if edge & 1 else self.capacity(edge, time) for edge in range(len(self.head))
        ]
        self._least = enough * _EXACT * 1e-3  # less than this is rounding
        total = 0.0
        while total < enough * (1 - _EXACT) and self._label(start, end):
            total += self._block(start, end)
        return total

    def reached(self, start: int) -> list[bool]:
        """The side of ``start`` in the minimum cut of the last maximum flow."""
        self._label(start, -1)
        return [level >= 0 for level in self._level]

    def _label(self, start: int, end: int) -> bool:
        """Breadth first: the distance of every node from ``start``, -1 where residuals do not
        lead."""
        level = self._level = [-1] * len(self.edges_of)
        level[start] = 0
        queue = deque([start])
        residual, heads, least = self.residual, self.head, self._least
        while queue:
            node = queue.popleft()
            for edge in self.edges_of[node]:
                head = heads[edge]
                if level[head] < 0 and residual[edge] > least:
                    level[head] = level[node] + 1
                    queue.append(head)
        return end >= 0 and level[end] >= 0

    def _block(self, start: int, end: int) -> float:
        """Send a blocking flow along labels that rise, path by path; without recursion, since paths
        may be long."""
        level = self._level
        residual = self.residual
        heads = self.head
        edges_of = self.edges_of
        least = self._least
        tried = [0] * len(edges_of)  # edges of a node that lead nowhere any more
        path: list[int] = []
        node, total = start, 0.0
        while True:
            if node == end:
                amount = min(residual[edge] for edge in path)
                total += amount
                full = len(path)
                for depth in range(len(path) - 1, -1, -1):
                    edge = path[depth]
                    residual[edge] -= amount
                    residual[edge ^ 1] += amount
                    if residual[edge] <= least:
                        full = depth
                node = heads[path[full] ^ 1]
                del path[full:]
                continue
            edges = edges_of[node]
            for position in range(tried[node], len(edges)):
                edge = edges[position]
                if level[heads[edge]] == level[node] + 1 and residual[edge] > least:
                    tried[node] = position
                    path.append(edge)
                    node = heads[edge]
                    break
            else:
                if not path:
                    return total
                tried[node] = len(edges)
                node = heads[path.pop() ^ 1]
                tried[node] += 1

    def least_time(
        self,
        start: int,
        end: int,
        demand: float,
        time: float,
    ) -> float:
        """The least time, not below ``time``, at which ``demand`` flows, which there must be; the
        flow is left in place."""
        while self.max_flow(start, end, time, demand) < demand * (1 - _EXACT):
            inside = self.reached(start)
            cut = [
                edge
                for edge in range(0, len(self.head), 2)
                if inside[self.head[edge + 1]] and not inside[self.head[edge]]
            ]
            growing = [edge for edge in cut if self.rate[edge] * time < self.cap[edge]]
            rate = sum(self.rate[edge] for edge in growing)
            fixed = sum(self.cap[edge] for edge in cut if self.rate[edge] * time >= self.cap[edge])
            later = (demand - fixed) / rate
            if later <= time * (1 + _EXACT):  # rounding stands where the exact answer would be
                later = time * (1 + 10 * _EXACT)
            time = later
        return time
