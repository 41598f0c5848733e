"""The basis of a group's plan: chunks in the store that can be leaned on, and speeds of devices.

A chunk can be leaned on if its container protects it as asked. Else it is *bad*, and stored anew
for all files. On servers outside the policy, the file needs its *own*: a move could be against
others' policies. A chunk is read back before its first, second, fourth ... use: cheap, and often
for widely used ones. An unreadable one is bad; if protected better than asked, the file has its
own.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import trio

from aifs.core.budget import Budget
from aifs.core.config import Config
from aifs.core.errors import Unavailable
from aifs.core.tasks import run_all
from aifs.data.server import DataServer
from aifs.data.servers import Servers
from aifs.files.containers import Containers
from aifs.layout.interleaved import HEADER_BYTES, Location, redundancy_of
from aifs.layout.striped import Striped
from aifs.meta import chunks, shared
from aifs.meta.kv import Engine, ReadTransaction
from aifs.meta.shared import Shared
from aifs.saves import sharing
from aifs.saves.sharing import Asked, Need
from aifs.store.directories import same_directories

_AT_ONCE = 512  # digests that are looked up before other tasks get their turn
_READ_AT_ONCE = 4

_UNKNOWN = 1 << 30  # only ratios matter, as long as nothing else is known
# by what fraction a rate has to differ from the one in use: measured ones are never the same twice
_NOTICEABLE = 0.35


@dataclass
class KnownChunks:
    """Digests in the store. ``known`` can be leaned on, ``bad`` and ``own`` not; ``verified`` were
    read."""

    known: set[bytes] = field(default_factory=set)
    own: set[bytes] = field(default_factory=set)
    bad: list[bytes] = field(default_factory=list)
    verified: int = 0


async def look_up(
    engine: Engine,
    budget: Budget,
    containers: Containers,
    asked: Asked,
    needs: Mapping[bytes, Need],
    kept: Collection[bytes] = (),
) -> KnownChunks:
    """Judge the store's chunks; those ``kept`` just now are not read. Raises Unavailable if the
    metadata cannot be read."""
    found, doubtful = KnownChunks(), []
    layouts: dict[int, Striped | None] = {}
    tolerates: dict[int, int] = {}  # by container: how many servers may be lost
    digests = list(needs)
    for start in range(0, len(digests), _AT_ONCE):
        some, new = await engine.view(_find, digests[start : start + _AT_ONCE])
        layouts |= new
        tolerates |= {
            number: redundancy_of(layout).tolerates
            for number, layout in new.items()
            if layout is not None
        }
        await trio.lowlevel.checkpoint()
        for digest, (place, references) in some.items():
            layout, need = layouts[place.container], needs[digest]
            if (
                layout is None
                or place.raw != need.length
                or not sharing.protects(layout, asked.redundancy)
            ):
                found.bad.append(digest)
            elif not sharing.is_allowed(layout, asked.servers):
                found.own.add(digest)
            elif digest in kept:
                found.known.add(digest)
            elif (references + len(need.holders)).bit_length() > references.bit_length():
                doubtful.append(place)
            else:
                found.known.add(digest)
    following = iter(doubtful)

    async def is_good(place: Location) -> bool:
        size = HEADER_BYTES + place.stored
        async with budget.reserve(size):
            try:
                await containers.files.read_stored(place, memoryview(bytearray(size)))
            except Unavailable:
                return False
        return True

    async def verify_some() -> None:
        for place in following:
            if await is_good(place):
                found.known.add(place.digest)
            elif tolerates[place.container] > asked.redundancy.tolerates:
                found.own.add(place.digest)
            else:
                found.bad.append(place.digest)

    await run_all(*[verify_some] * min(_READ_AT_ONCE, len(doubtful)))
    found.verified = len(doubtful)
    return found


def _find(
    tx: ReadTransaction, digests: Sequence[bytes]
) -> tuple[dict[bytes, Shared], dict[int, Striped | None]]:
    """Chunks in the store, and their containers' layouts."""
    found = shared.find_all_shared(tx, digests)
    layouts: dict[int, Striped | None] = {}
    for container in {known.place.container for known in found.values()}:
        record = chunks.find_container(tx, container)
        layouts[container] = None if record is None else record.layout
    return found, layouts


class Bandwidths:
    """Bytes per second of burst devices and data servers, for plans: configured, else measured.
    Used from one trio thread."""

    def __init__(self, config: Config, servers: Servers) -> None:
        self._servers = servers
        self._of_burst = config.burst.bandwidth
        self._configured = {place.path: place.bandwidth for place in config.places}
        same = same_directories(self._configured, [server.address for server in servers.capacity()])
        self._configured |= {same[path]: self._configured[path] for path in same}
        self._used: dict[int, int] = {}

    def of_burst(self, devices: Iterable[int]) -> dict[int, int]:
        """By number of the burst directory."""
        measured = {number: self._servers[number].giving.rate for number in devices}
        return {number: self._of_burst or rate for number, rate in self._steady(measured).items()}

    def of_servers(self) -> dict[int, int]:
        """By number of the data server."""
        servers = self._servers.capacity()
        measured = self._steady({server.id: server.writing.rate for server in servers})
        return {server.id: self._said_of(server) or measured[server.id] for server in servers}

    def free(self) -> dict[int, int | None]:
        """Bytes that each data server has left, as last seen."""
        return {
            server.id: server.seen.available if server.seen else None
            for server in self._servers.capacity()
        }

    def _said_of(self, server: DataServer) -> int:
        return self._configured.get(server.address, 0)

    def _steady(self, measured: dict[int, int]) -> dict[int, int]:
        """Unmeasured ones count as the fastest; similar ones as equal."""
        fastest = max(measured.values(), default=0) or _UNKNOWN
        for number, rate in measured.items():
            rate = rate or fastest
            if rate > fastest * (1 - _NOTICEABLE):
                rate = fastest
            used = self._used.get(number, 0)
            if abs(rate - used) > _NOTICEABLE * used:
                self._used[number] = rate
        return {number: self._used[number] for number in measured}
