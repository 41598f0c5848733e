"""From parts of chunks to whole ones, then better: exchange until the slowest is as fast as it
gets.

Parts are rounded down, and what is left over is placed chunk by chunk where it ends first. Then
chunks move, a class at a time, from where they cost most to where they cost least; a move is made
if it lowers the sum over sources, destinations and links of exp(sharpness * (time / longest time -
1)). For a class, the counts that obey constraints 1 and 2 are the bases of a polymatroid, and
single exchanges lead to the optimum of a convex function over it; over classes this is coordinate
descent, which converges for a smooth convex sum, and the sum tends to the longest time as sharpness
grows (the exponential potential of fractional packing: Plotkin, Shmoys, Tardos 1995). So it not
only repairs rounding, but also finds plans where the flow knows too little (several replicas over
limited links). One exchange costs O(holders * destinations), and only classes that touch what is
slowest are tried.
"""

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable

from aifs.core.errors import NoSpace
from aifs.group.pattern import Link, Pattern
from aifs.group.plan import Share, problems
from aifs.group.relaxed import Part

_SHARPNESS = (5, 20, 60, 200, 600, 2000)
_BLUNT = 1.0
_STALE_MAX = 20  # rounds that do not make the time shorter, at each sharpness
# relative to the lower bound: what more could be gained is less than bandwidths are known to
_GOOD = 2e-3
_PROGRESS = 2e-4  # relative to the lower bound: less does not count
_OVERFULL = 1e6  # the price of a chunk beyond memory or space: more than anything else costs
# links that are looked at in all: a second or two, which only large patterns with links need
_PRICED_MAX = 1_000_000
_TRIED = 3  # of the dearest and the cheapest links: chunks are whole, so the best pair may not do
# of the cheapest holders and destinations of a class: more of them are looked at in later rounds
_NEAR = 12
_TOO_STEEP = 300.0  # exp of more is out of range soon


class _Meter:
    """Bytes at a source, destination or link, and their cost."""

    __slots__ = ("bandwidth", "bytes", "cap")

    def __init__(self, bandwidth: int, cap: int | None = None) -> None:
        self.bandwidth, self.cap, self.bytes = bandwidth, math.inf if cap is None else cap, 0

    @property
    def time_s(self) -> float:
        return self.bytes / self.bandwidth

    def cost(self, size: int, sharpness: float, longest_s: float) -> float:
        """What it costs when ``size`` bytes more (or, negative, fewer) go through."""
        total = self.bytes + size
        cost = math.exp(min(_TOO_STEEP, sharpness * (total / (self.bandwidth * longest_s) - 1)))
        if self.cap is not math.inf:
            fill = total / self.cap if self.cap else 2.0 * (total > 0)
            cost += math.exp(min(_TOO_STEEP, sharpness * (fill - 1))) + _OVERFULL * max(
                0.0, fill - 1
            )
        return cost


class Assignment:
    """Whole chunks by class, source and destination; changes step by step."""

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern
        self.counts: list[dict[Link, int]] = [defaultdict(int) for _ in pattern.classes]
        self._stored: list[dict[int, int]] = [defaultdict(int) for _ in pattern.classes]
        self._sources = [_Meter(node.bandwidth, node.memory) for node in pattern.sources]
        self._destinations = [_Meter(node.bandwidth, node.space) for node in pattern.destinations]
        self._links = {link: _Meter(bandwidth) for link, bandwidth in pattern.links.items()}
        self._priced = 0
        self._meters = [*self._sources, *self._destinations, *self._links.values()]

    def add(self, kind: int, link: Link, count: int) -> None:
        """Let ``count`` more chunks of a class go over a link; fewer if negative."""
        counts = self.counts[kind]
        counts[link] += count
        if not counts[link]:
            del counts[link]
        self._stored[kind][link[1]] += count
        for meter in self._path(link):
            meter.bytes += count * self.pattern.classes[kind].size

    def _path(self, link: Link) -> list[_Meter]:
        path = [self._sources[link[0]], self._destinations[link[1]]]
        wire = self._links.get(link)
        return path if wire is None else [*path, wire]

    def _has_room(self, kind: int, destination: int) -> bool:
        return self._stored[kind].get(destination, 0) < self.pattern.classes[kind].count

    @property
    def time_s(self) -> float:
        return max(meter.time_s for meter in self._meters)

    @property
    def fits(self) -> bool:
        return all(meter.bytes <= meter.cap for meter in self._meters)

    def shares(self) -> tuple[Share, ...]:
        return tuple(
            Share(kind, *link, count)
            for kind, counts in enumerate(self.counts)
            for link, count in sorted(counts.items())
        )

    def place(self, parts: Iterable[Part]) -> None:
        """Begin with ``parts``, rounded; at the end every class has all its copies."""
        wanted: list[dict[Link, float]] = [defaultdict(float) for _ in self.pattern.classes]
        for part in parts:
            wanted[part.kind][part.source, part.destination] += part.chunks
        for kind, links in enumerate(wanted):
            count = self.pattern.classes[kind].count
            for link, chunks in links.items():
                whole = min(int(chunks + 1e-6), count - self._stored[kind][link[1]])
                if whole > 0:
                    self.add(kind, link, whole)
        for kind in sorted(range(len(wanted)), key=lambda kind: -self.pattern.classes[kind].size):
            self._fill(kind, wanted[kind])

    def _fill(self, kind: int, wanted: dict[Link, float]) -> None:
        """Place the copies of a class that are missing where they end first, few of them among the
        cut parts.
        """
        chunks = self.pattern.classes[kind]
        missing = chunks.count * self.pattern.replicas - sum(self.counts[kind].values())
        cut = {link for link, part in wanted.items() if part > self.counts[kind].get(link, 0)}
        while missing > 0:
            cut = {link for link in cut if self._has_room(kind, link[1])}
            if (
                not cut or missing > chunks.count // 16
            ):  # more than rounding took: constraint 2 was broken
                cut = {
                    (source, destination)
                    for source in chunks.sources
                    for destination in range(len(self.pattern.destinations))
                    if self._has_room(kind, destination)
                }
            link = min(cut, key=lambda link: (self._end(link, chunks.size), link))
            step = min(max(1, missing // 16), chunks.count - self._stored[kind][link[1]])
            self.add(kind, link, step)
            missing -= step

    def _end(self, link: Link, size: int) -> tuple[bool, float]:
        path = self._path(link)
        full = any(meter.bytes + size > meter.cap for meter in path)
        return full, max((meter.bytes + size) / meter.bandwidth for meter in path)

    def improve(self, lower_bound_s: float) -> None:
        """Exchange until the time is close to the lower bound, or nothing helps."""
        good_s = lower_bound_s * (1 + _GOOD)
        for sharpness in _SHARPNESS:
            best_s, stale = self.time_s, 0
            if sharpness * (best_s / lower_bound_s - 1) < _BLUNT and self.fits:
                continue  # it would level what is far from the longest, and gain nothing there
            while stale < _STALE_MAX and self._priced < _PRICED_MAX:
                if not self._round(good_s, sharpness):
                    break
                stale += 1
                if self.time_s < best_s - _PROGRESS * lower_bound_s:
                    best_s, stale = self.time_s, 0

    def _round(self, good_s: float, sharpness: float) -> int:
        """Try one exchange for every class that may matter; how many were made."""
        longest_s = self.time_s
        return sum(
            self._exchange(kind, sharpness, longest_s)
            for kind in self._busy(good_s)
            if self._priced < _PRICED_MAX
        )

    def _busy(self, good_s: float) -> list[int]:
        """The classes that have chunks where it takes longer than ``good_s``, or where they do not
        fit.
        """
        hot = {
            id(meter) for meter in self._meters if meter.time_s > good_s or meter.bytes > meter.cap
        }
        return [
            kind
            for kind, counts in enumerate(self.counts)
            if any(id(meter) in hot for link in counts for meter in self._path(link))
        ]

    def _exchange(self, kind: int, sharpness: float, longest_s: float) -> bool:
        """Move chunks of a class from where they cost most to where they cost least. False: that
        gains nothing.
        """
        chunks, counts = self.pattern.classes[kind], self.counts[kind]
        prices = self._prices(kind, chunks.size, sharpness, longest_s)
        for gone in heapq.nlargest(_TRIED, counts, prices.__getitem__):
            open_to = (
                link for link in prices if link[1] == gone[1] or self._has_room(kind, link[1])
            )
            for came in heapq.nsmallest(_TRIED, open_to, prices.__getitem__):
                most = counts[gone]
                if came[1] != gone[1]:
                    most = min(most, chunks.count - self._stored[kind][came[1]])
                step = (
                    self._step(gone, came, most, chunks.size, sharpness, longest_s)
                    if came != gone
                    else 0
                )
                if step:
                    self.add(kind, gone, -step)
                    self.add(kind, came, step)
                    return True
        return False

    def _step(
        self, gone: Link, came: Link, most: int, size: int, sharpness: float, longest_s: float
    ) -> int:
        """How many chunks to move from one link to another, up to ``most``; 0: moving any gains
        nothing.
        """
        step, best, trial = 0, 1e-12, 1
        while trial <= most:
            gain = self._gain(gone, came, trial * size, sharpness, longest_s)
            if gain <= best * (1 + 1e-9):
                break
            step, best = trial, gain
            trial *= 2
        return step

    def _prices(
        self, kind: int, size: int, sharpness: float, longest_s: float
    ) -> dict[Link, float]:
        """What a chunk costs, over links that a class uses and those between the cheapest ends that
        it may use: the same to come as to go, so that what two links share does not count."""

        def price(meter: _Meter) -> float:
            return meter.cost(size, sharpness, longest_s) - meter.cost(-size, sharpness, longest_s)

        used = self.counts[kind]
        egress = {
            source: price(self._sources[source]) for source in self.pattern.classes[kind].sources
        }
        ingress = {number: price(meter) for number, meter in enumerate(self._destinations)}
        senders = heapq.nsmallest(_NEAR, egress, egress.__getitem__)
        takers = heapq.nsmallest(_NEAR, ingress, ingress.__getitem__)
        prices = {}
        for link in dict.fromkeys((*used, *itertools.product(senders, takers))):
            wire = self._links.get(link)
            prices[link] = (
                egress[link[0]] + ingress[link[1]] + (0.0 if wire is None else price(wire))
            )
        self._priced += len(prices)
        return prices

    def _gain(self, gone: Link, came: Link, size: int, sharpness: float, longest_s: float) -> float:
        change: dict[_Meter, int] = defaultdict(int)
        for meter in self._path(gone):
            change[meter] -= size
        for meter in self._path(came):
            change[meter] += size
        return sum(
            meter.cost(0, sharpness, longest_s) - meter.cost(amount, sharpness, longest_s)
            for meter, amount in change.items()
            if amount
        )


def shares(pattern: Pattern, parts: Iterable[Part], lower_bound_s: float) -> tuple[Share, ...]:
    """The shares of a plan in whole chunks, close to ``parts`` or better. Raises NoSpace: they do
    not fit the caps.
    """
    if not pattern.classes:
        return ()
    assignment = Assignment(pattern)
    assignment.place(parts)
    first, first_s = assignment.shares(), assignment.time_s if assignment.fits else math.inf
    assignment.improve(lower_bound_s)
    found = assignment.shares() if assignment.fits and assignment.time_s < first_s else first
    broken = problems(pattern, found)
    if broken:
        raise NoSpace(f"whole chunks do not fit: {broken[0]}")
    return found
