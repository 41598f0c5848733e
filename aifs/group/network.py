"""Maximum flow, and the least time in which a flow fits through edges whose capacity grows with
time.

Maximum flow is Dinic's algorithm (Dinitz 1970): O(V^2 E), near linear on the shallow graphs of a
plan. The least time is found by the discrete Newton method on minimum cuts (Radzik 1992, "Newton's
method for fractional combinatorial optimization"): a cut that is too small at time t says, being
linear in t, from which time on it is large enough; the next t is that time. Every t on the way is a
lower bound, and the last is exact; a handful of steps do.
"""

import math
from collections import deque

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
        ``enough``.
        """
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
        lead.
        """
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
        may be long.
        """
        level, residual, heads, edges_of, least = (
            self._level,
            self.residual,
            self.head,
            self.edges_of,
            self._least,
        )
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
        flow is left in place.
        """
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
