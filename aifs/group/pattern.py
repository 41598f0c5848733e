"""The problem of a grouped write: who holds which chunks, who takes them, and how fast bytes move
between them.

A *source* (a host, or a burst device of this one) sends chunks; a *destination* (a data server)
takes them. Chunks of one size that the same sources hold form a *class*: any holder may send any
chunk of it. Each chunk goes to R distinct destinations (its replicas). All times are seconds, sizes
bytes, bandwidths bytes per second.

An assignment x[k, s, d] (chunks of class k sent by s to d) that takes t seconds obeys seven
constraints, those of AITurbo's write plan (Hao et al., Fast Cloud Storage for AI Jobs via Grouped
I/O, FAST '26), stated here for our terms:

1. every chunk is assigned R times, by sources that hold it:
                                    sum over s, d of x[k, s, d] = R count[k]
2. the replicas of a chunk lie on distinct destinations:
                                    sum over s of x[k, s, d] <= count[k]
3. egress of a source:              sum over k, d of size[k] x[k, s, d] <= t bandwidth[s]
4. ingress of a destination:        sum over k, s of size[k] x[k, s, d] <= t bandwidth[d]
5. a link between two:              sum over k of size[k] x[k, s, d] <= t bandwidth[s, d]
6. memory of a source, which holds what it sends until all of it is durable:
                                    sum over k, d of size[k] x[k, s, d] <= memory[s]
7. space of a destination:          sum over k, s of size[k] x[k, s, d] <= space[d]

Counts that obey 2 can always be dealt out to single chunks (``plan.Plan.chunks``), so classes lose
nothing.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from blake3 import blake3

from aifs.core.errors import Invalid

Link = tuple[int, int]
"""Indices of a source and a destination."""


@dataclass(frozen=True, slots=True)
class Source:
    """Sends up to ``bandwidth`` bytes/s, and at most ``memory`` bytes in one plan (None: no
    limit).
    """

    name: str
    bandwidth: int
    memory: int | None = None


@dataclass(frozen=True, slots=True)
class Destination:
    """Takes up to ``bandwidth`` bytes/s, and at most ``space`` bytes in one plan (None: no
    limit).
    """

    name: str
    bandwidth: int
    space: int | None = None


@dataclass(frozen=True, slots=True)
class ChunkClass:
    """``count`` chunks of ``size`` bytes, each held by every one of ``sources`` (indices,
    ascending).
    """

    size: int
    count: int
    sources: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return self.size * self.count


@dataclass(frozen=True)
class Pattern:
    """One grouped write. ``links`` holds the bandwidths of those pairs that have a limit of their
    own.

    Raises Invalid, which names what is wrong.
    """

    sources: tuple[Source, ...]
    destinations: tuple[Destination, ...]
    classes: tuple[ChunkClass, ...]
    links: Mapping[Link, int] = field(default_factory=dict)
    replicas: int = 1

    def __post_init__(self) -> None:
        for kind, nodes in (("source", self.sources), ("destination", self.destinations)):
            if not nodes:
                raise Invalid(f"a pattern needs at least one {kind}")
            name, times = Counter(node.name for node in nodes).most_common(1)[0]
            if times > 1:
                raise Invalid(f"{kind} {name} is given twice")
            for node in nodes:
                if node.bandwidth <= 0:
                    raise Invalid(
                        f"{kind} {node.name}: a bandwidth of {node.bandwidth} moves nothing"
                    )
        if not 1 <= self.replicas <= len(self.destinations):
            raise Invalid(
                f"{self.replicas} replicas need as many destinations, not {len(self.destinations)}"
            )
        for number, chunks in enumerate(self.classes):
            if chunks.size <= 0 or chunks.count <= 0:
                raise Invalid(
                    f"class {number}: {chunks.count} chunks of {chunks.size} bytes are no chunks"
                )
            if not chunks.sources or list(chunks.sources) != sorted(set(chunks.sources)):
                raise Invalid(
                    f"class {number}: its sources must be given once each, in ascending order"
                )
            if chunks.sources[0] < 0 or chunks.sources[-1] >= len(self.sources):
                raise Invalid(f"class {number}: there is no such source")
        for (source, destination), bandwidth in self.links.items():
            if not (0 <= source < len(self.sources) and 0 <= destination < len(self.destinations)):
                raise Invalid(
                    f"link {source} to {destination}: there is no such source or destination"
                )
            if bandwidth <= 0:
                raise Invalid(
                    f"{self.link_name(source, destination)}: a bandwidth of {bandwidth} moves "
                    "nothing"
                )

    def link_name(self, source: int, destination: int) -> str:
        return f"{self.sources[source].name} to {self.destinations[destination].name}"

    @cached_property
    def bytes(self) -> int:
        """Distinct bytes, each counted once whatever the number of holders and replicas."""
        return sum(chunks.bytes for chunks in self.classes)

    @cached_property
    def fingerprint(self) -> str:
        """Equal for patterns that differ in nothing but bandwidths and caps: what a plan can be
        used again for.
        """
        shape = (
            tuple(source.name for source in self.sources),
            tuple(destination.name for destination in self.destinations),
            tuple((chunks.size, chunks.count, chunks.sources) for chunks in self.classes),
            sorted(self.links),
            self.replicas,
        )
        return blake3(repr(shape).encode()).hexdigest()
