"""Which bytes of a group have to be stored, and by which host: equal chunks are one. Pure.

*Found* chunks are in the store. *New* ones have *holders*, members that have them, and are stored
once. For the planner, sources are the holders' burst devices, destinations slots, that is layouts
of containers (files/containers.py); chunks of about one length with the same sources are a class.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from aifs.layout.interleaved import redundancy_of
from aifs.layout.redundancy import Redundancy
from aifs.layout.striped import Striped
from aifs.saves.planner import ChunkClass, Destination, Pattern, Plan, Source

_ROUNDING = 64 << 10  # of lengths, in what the planner is asked: so there are few classes

Chunk = tuple[int, int]
"""Number of a member, and of a chunk in it."""


Chunks = dict[bytes, tuple[int, tuple[int, ...]]]
"""Distinct chunks of a host, by digest: length, and ascending burst devices."""


class Cut(NamedTuple):
    """The chunks of one member in order: (offset, length) and digest of each, b"" of zeros."""

    ranges: Sequence[tuple[int, int]]
    digests: Sequence[bytes]


class Holder(NamedTuple):
    """A member (its number), and where in it the chunk begins."""

    member: int
    offset: int


@dataclass(slots=True)
class Need:
    """A distinct chunk: its length, and a holder for each member with it, in order."""

    length: int
    holders: list[Holder] = field(default_factory=list)


class Amounts(NamedTuple):
    """A group's bytes that are zeros, that are duplicates, and that are distinct."""

    zero: int
    duplicate: int
    distinct: int


def distinct(members: Iterable[Cut]) -> tuple[dict[bytes, Need], Amounts]:
    """The distinct chunks of all members by digest, as met, and their sums."""
    needs: dict[bytes, Need] = {}
    zero = duplicate = alone = 0
    for member, (ranges, digests) in enumerate(members):
        for (offset, length), digest in zip(ranges, digests, strict=True):
            if not digest:
                zero += length
                continue
            need = needs.get(digest)
            if need is None:
                need = needs[digest] = Need(length)
                alone += length
            else:
                duplicate += length
            if not need.holders or need.holders[-1].member != member:
                need.holders.append(Holder(member, offset))
    return needs, Amounts(zero, duplicate, alone)


# --- protection -----------------------------------------------------------------------------------


class Asked(NamedTuple):
    """What the policy of a file says of where its bytes go. ``servers``: none: any."""

    servers: tuple[int, ...]
    redundancy: Redundancy


def protects(layout: Striped, redundancy: Redundancy) -> bool:
    """Whether a chunk in this layout is as safe as ``redundancy`` asks."""
    return redundancy_of(layout).tolerates >= redundancy.tolerates


def is_allowed(layout: Striped, servers: Collection[int]) -> bool:
    """Whether all columns lie on ``servers`` (none: any)."""
    return not servers or set(layout.servers) <= set(servers)


# --- plans ----------------------------------------------------------------------------------------


def data_columns(slot: Striped) -> int:
    """Each column of such a container takes one part in so many of the bytes."""
    return redundancy_of(slot).data or 1


class Question(NamedTuple):
    """What the planner is asked, and the digests of the chunks of each class, in order."""

    pattern: Pattern
    classes: list[list[bytes]]


def ask(
    new: Mapping[bytes, Need],
    devices: Sequence[int],
    sources: Mapping[int, int],
    slots: Sequence[Striped],
    servers: Mapping[int, tuple[int, int | None]],
    links: Mapping[int, tuple[int, int]] = MappingProxyType({}),
) -> Question:
    """``devices``: each member's burst device. ``sources``: their bandwidths. ``servers``:
    bandwidth, and known free bytes, of data servers. ``links``: known hosts and link bandwidths of
    devices."""
    order = sorted(sources)
    hosts = sorted(set(links.values()))
    place = {device: number for number, device in enumerate(order)}
    chunks: dict[tuple[int, tuple[int, ...]], list[bytes]] = {}
    for digest, need in new.items():
        holders = tuple(sorted({place[devices[holder.member]] for holder in need.holders}))
        chunks.setdefault((-(-need.length // _ROUNDING) * _ROUNDING, holders), []).append(digest)
    kinds = sorted(chunks)
    pattern = Pattern(
        [
            Source(sources[device], hosts.index(links[device]) if device in links else None)
            for device in order
        ],
        [_destination(slot, slots, servers) for slot in slots],
        [ChunkClass(size, len(chunks[size, holders]), holders) for size, holders in kinds],
        [bandwidth for _, bandwidth in hosts],
    )
    return Question(pattern, [chunks[kind] for kind in kinds])


def _destination(
    slot: Striped, slots: Sequence[Striped], servers: Mapping[int, tuple[int, int | None]]
) -> Destination:
    """As fast as the slowest of its servers, each shared by its slots."""
    share = data_columns(slot)
    bandwidth, space = [], []
    for server in slot.servers:
        users = sum(server in other.servers for other in slots)
        rate, free = servers[server]
        bandwidth.append(rate * share // users)
        if free is not None:
            space.append(free * share // users)
    return Destination(max(1, min(bandwidth)), min(space, default=None))


class Assigned(NamedTuple):
    """The number of the slot that takes a chunk, and the burst device that sends it."""

    slot: int
    device: int


def answer(question: Question, plan: Plan, sources: Iterable[int]) -> dict[bytes, Assigned]:
    """Where each chunk goes. ``sources``: as in the question."""
    order = sorted(sources)
    found: dict[bytes, Assigned] = {}
    for kind, first, end, source, destination in plan.transfers:
        assigned = Assigned(destination, order[source])
        found.update(dict.fromkeys(question.classes[kind][first:end], assigned))
    return found
