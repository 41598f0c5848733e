"""The data servers and burst directories of a store."""

import logging
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import trio

from aifs.core import files
from aifs.core.budget import Budget
from aifs.core.errors import FsError, StoreError, Unavailable
from aifs.data.health import Hedging
from aifs.data.patience import FOR_EVER, ask_all, giving_up
from aifs.data.reading.blocks import Blocks, NoBlocks
from aifs.data.reading.buffers import BufferPool
from aifs.data.reading.read_cache import ReadCache
from aifs.data.server import DataServer, name_of, role_of
from aifs.data.source_storage import SourceStorage
from aifs.data.storage import Space
from aifs.data.storages import storage_at
from aifs.data.workers import Completions, Workers, gather
from aifs.layout.imported import SOURCE
from aifs.layout.placement import ACTIVE, BURST_FIRST, LOST, Candidate, weight_of

_log = logging.getLogger(__name__)

BUDGET = 512 << 20

_FULL = 1 << 20
"""Bytes left with which a server is called full."""

_LOOK_S = 10.0
_LOOK_AGAIN_S = 1.0  # at one that does not work
_SAY_S = 1.0
_END_S = 30.0
_LOST = "it is lost"
_WITHOUT = (
    "unprotected files may have bytes there; put it right, or mount without it and them: "
    "-o data.missing=allow"
)


class Servers:
    """The registered data servers, and from id BURST_FIRST burst directories. Used from one trio
    thread.

    Files are striped over the data servers alone (``capacity``), whose space users see; the rest
    means both. Each has worker threads, so that a hung one holds no others up: those of data
    servers about ``threads`` together, at least two each.
    """

    def __init__(
        self,
        table: Mapping[int, str],
        store: str,
        threads: int = 16,
        budget: Budget | None = None,
        patience_s: float = FOR_EVER,
        lost_after_s: float = FOR_EVER,
        hedge_s: float = 0.0,
        elsewhere: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """``table``: id to absolute path; ``store``: uuid; ``patience_s``: see patience.py;
        ``lost_after_s``: until a failing server is given up; ``hedge_s``, ``elsewhere``: see
        Hedging, there. Does no I/O: ``check_identity`` comes next."""
        self.elsewhere = dict(elsewhere)
        """Burst directories of other hosts, which are none of those in use: which host, by id."""
        self.buffers = BufferPool()
        self.budget = budget or Budget(BUDGET)
        """Memory for all that is read and moved."""
        self.cache = ReadCache(self.budget)
        self.blocks: Blocks = NoBlocks()
        """Clean blocks that are kept nearer."""
        self.descriptors = Descriptors()
        self.hedging = Hedging(hedge_s)
        self._store = store
        self._completions = Completions()
        self._threads = threads
        self.patience_s = patience_s
        self.lost_after_s = lost_after_s
        self._gone: frozenset[DataServer] = frozenset()  # when that was last judged
        self.changes = 0
        """Counts how often servers were given up, or have come back."""
        self.is_refused_room = False
        """Somebody has found no room since the trash was last asked to give way."""
        self._look_at_s = 0.0  # when all are looked at again, by trio's clock
        self._limit = max(2, -(-threads // max(sum(number < BURST_FIRST for number in table), 1)))
        """Worker threads that each server has at most."""
        self.read_only = False
        """As said when they were identified."""
        self._tells: dict[str, Callable[[], None]] = {}
        """By role, called from any thread when one begins to fail, or works again."""
        self._servers = {number: self._new(number, table[number]) for number in sorted(table)}
        """By id; data servers first."""
        self._buckets = DataServer(
            SOURCE, SourceStorage(), store, Workers(name_of(SOURCE), threads, self._completions)
        )
        """In place of a data server for imported files; in no table, and none of these."""
        self._removed: list[DataServer] = [self._buckets]
        """Those that are not in use, whose threads end with the others."""
        self._looking: set[int] = set()
        """Ids of those that are being looked at."""
        self._given_up = ""
        """Why all servers are left alone; '' while they are not."""
        self.prefer: dict[int, int] = {}
        """The server that should take over the objects of another one, by the number of that."""

    def _new(self, number: int, path: str) -> DataServer:
        if number >= BURST_FIRST:
            workers = Workers(
                f"burst directory {number - BURST_FIRST}", self._threads, self._completions
            )
        else:
            workers = Workers(
                f"data server {number}", self._limit, self._completions, self.patience_s
            )
        tell = partial(self._changed, role_of(number))
        return DataServer(number, storage_at(path), self._store, workers, tell)

    def keep_blocks(self, blocks: Blocks) -> None:
        """From now on these are kept; object sets that were made before do without."""
        self.blocks = blocks

    def tell_of(self, role: str, tell: Callable[[], None]) -> None:
        """Call ``tell`` soon, in this trio run, when a server of this role begins to fail or works
        again."""
        self._tells[role] = partial(
            trio.lowlevel.current_trio_token().run_sync_soon, tell, idempotent=True
        )

    def _changed(self, role: str) -> None:
        if role in self._tells:
            with suppress(trio.RunFinishedError):
                self._tells[role]()

    def __getitem__(self, number: int) -> DataServer:
        try:
            return self._servers[number]
        except KeyError:
            if number == SOURCE:
                return self._buckets
            kind = "data server" if number < BURST_FIRST else "burst directory"
            number %= BURST_FIRST
            raise Unavailable(f"{kind} {number} is not registered in this store") from None

    def find(self, number: int) -> DataServer | None:
        """The server, or None if the table has none of that number: it may have been removed."""
        return self._buckets if number == SOURCE else self._servers.get(number)

    def __iter__(self) -> Iterator[int]:
        return iter(self._servers)

    def __len__(self) -> int:
        return len(self._servers)

    def values(self) -> Iterable[DataServer]:
        return self._servers.values()

    def capacity(self) -> tuple[DataServer, ...]:
        """The data servers, by ascending id."""
        return tuple(server for server in self._servers.values() if server.role == "data")

    def burst(self) -> tuple[DataServer, ...]:
        """The burst directories, by ascending id."""
        return tuple(server for server in self._servers.values() if server.role == "burst")

    def usable(self, storage_class: str = "") -> tuple[int, ...]:
        """Ascending ids of data servers for new files, or a class: working ones, or all if none
        is."""
        return tuple(server.id for server in self._chosen(storage_class))

    @property
    def all_in_place(self) -> bool:
        """Whether the objects of all data servers can be changed."""
        return all(server.storage.in_place for server in self.capacity())

    def append(self, numbers: Iterable[int]) -> bool:
        """Whether objects on all of these servers can grow; they cannot in buckets."""
        known = map(self.find, numbers)
        return all(server is None or server.storage.append for server in known)

    def in_place(self, numbers: Iterable[int]) -> bool:
        """Whether objects on all of these servers can be changed."""
        known = map(self.find, numbers)
        return all(server is None or server.storage.in_place for server in known)

    def candidates(self, storage_class: str = "") -> tuple[Candidate, ...]:
        """``usable`` servers, without full ones while others are not, with failure domains and
        weights by free space. Maybe none of another class."""
        usable = self._chosen(storage_class)
        chosen = tuple(s for s in usable if s.seen is None or s.seen.available > _FULL) or usable
        free = [server.seen.available if server.seen else 0 for server in chosen]
        most = max(free, default=0)
        return tuple(
            Candidate(server.id, server.domain or f"server {server.id}", weight_of(its, most))
            for server, its in zip(chosen, free, strict=True)
        )

    def of_class(self, storage_class: str = "") -> tuple[DataServer, ...]:
        """Servers of a class, working or not; all if none is for new files."""
        active = tuple(server for server in self.capacity() if server.standing == ACTIVE)
        chosen = tuple(server for server in active if server.storage_class == storage_class)
        return chosen if chosen or storage_class else active

    def class_of(self, numbers: Sequence[int]) -> str:
        """The class of the first of these servers if that has servers in use, else "" (new
        files)."""
        server = self.find(numbers[0])
        found = "" if server is None else server.storage_class
        return found if self._chosen(found) else ""

    def _chosen(self, storage_class: str = "") -> tuple[DataServer, ...]:
        active = self.of_class(storage_class)
        present = tuple(server for server in active if not (server.absent or server.missing))
        return tuple(server for server in present if server.health.usable) or present or active

    def drop(self, number: int) -> None:
        """Do without this one: nothing refers to what lies there."""
        server = self._servers.pop(number)
        server.absent = "it has been removed from the store"  # for those that still hold it
        self._removed.append(server)
        self.prefer.pop(number, None)

    def classify(
        self,
        number: int,
        standing: str,
        domain: str,
        successor: int | None,
        storage_class: str = "",
    ) -> None:
        """Take over what the table says of a server. One that is lost is not used any more."""
        server = self._servers[number]
        server.standing, server.domain = standing, domain
        server.storage_class = storage_class
        if standing == LOST:
            server.absent = _LOST
        if standing != ACTIVE:  # what lies there has to leave in any case
            server.given_up, server.down_since_s = False, None
        if successor is not None:
            self.prefer[number] = successor
        else:
            self.prefer.pop(number, None)

    def give_up(self, reason: str) -> None:
        """Use none of them any more: calls that have not begun are answered with Unavailable."""
        self._given_up = reason
        for server in self._servers.values():
            server.absent = reason

    def check_identity(self, read_only: bool = False, dispensable: Collection[int] = ()) -> None:
        """Check that each directory is there, has the right marker, is writable, and used once.

        ``dispensable`` ones that fail are absent, and logged. Blocks. Raises StoreError, with
        directory, fault and advice.
        """
        self.require(self.identify(read_only), dispensable)

    def identify(self, read_only: bool = False) -> dict[int, str]:
        """Look at all servers that are not lost, at once: faults by number, also for late answers.
        Blocks, at most ``patience_s``. Raises StoreError if two have one directory."""
        self.read_only = read_only
        asked = [server for server in self._servers.values() if server.standing != LOST]
        answers = ask_all(
            [(server.workers.patience, _meet, (server, read_only)) for server in asked],
            self.patience_s,
        )
        wrong: dict[int, str] = {}
        seen: dict[Hashable, DataServer] = {}
        for server, answer in zip(asked, answers, strict=True):
            if server.storage.place is not None:
                other = seen.setdefault(server.storage.place, server)
                if other is not server:
                    raise StoreError(
                        f"{server.name}: {server.address} is the directory of {other.name} "
                        f"({other.address}) too; each needs its own"
                    )
            if isinstance(answer, FsError | StoreError):
                wrong[server.id] = str(answer)
            elif answer is not None:
                raise answer
        return wrong

    def require(
        self,
        wrong: Mapping[int, str],
        dispensable: Collection[int] = (),
        stakes: Mapping[int, str] | None = None,
    ) -> None:
        """Do without ``wrong`` servers that are ``dispensable``. Raises StoreError for another,
        with what is at stake."""
        for number, error in wrong.items():
            server = self._servers[number]
            if number not in dispensable:
                raise StoreError(f"{error}; {(stakes or {}).get(number, _WITHOUT)}")
            server.absent = error
            kind = "data server" if server.role == "data" else "burst directory"
            _log.warning("the store does without a %s for now: %s", kind, error)

    async def make_ready(
        self, number: int, path: str, domain: str = "", storage_class: str = ""
    ) -> DataServer:
        """Look at a directory with its marker, in a thread, to take it in. Raises StoreError."""
        server = self._new(number, path)
        server.domain, server.storage_class = domain, storage_class
        self._removed.append(server)  # its threads end with the others if it is not taken in
        try:
            with giving_up():
                await self.run(server, _meet, server, self.read_only)
        except FsError as error:
            raise StoreError(str(error)) from None
        self._removed.remove(server)
        return server

    def take_in(self, server: DataServer) -> None:
        """New files may use it from now on."""
        self._servers = dict(sorted((self._servers | {server.id: server}).items()))

    # --- in the background ---

    def watch_again_s(self, is_busy: bool) -> float:
        """Seconds to the next ``watch``: few while servers are used, or one fails."""
        return _LOOK_AGAIN_S if is_busy or any(map(_fails, self.capacity())) else _LOOK_S

    async def watch(self) -> None:
        """Look at free space and health, except of hung servers still being looked at: may be
        called again before it returns."""
        is_time = trio.current_time() >= self._look_at_s
        if is_time:
            self._look_at_s = trio.current_time() + _LOOK_S
        self.judge()
        async with trio.open_nursery() as nursery:
            for server in self.capacity():
                if is_time or _fails(server):
                    nursery.start_soon(self._look_at, server)
        self.judge()

    def look_soon(self) -> bool:
        """Have the next ``watch`` look at all, unless looked at in the last second; whether it
        should."""
        is_old = trio.current_time() >= self._look_at_s - _LOOK_S + _LOOK_AGAIN_S
        if is_old:
            self._look_at_s = 0.0
        return is_old

    async def look(self) -> None:
        """Look at each data server; one that hangs is not waited for longer than usual."""
        async with trio.open_nursery() as nursery:
            for server in self.capacity():
                nursery.start_soon(self._look_at, server)
        self.judge()

    async def _look_at(self, server: DataServer) -> None:
        if self._given_up or server.standing == LOST or server.id in self._looking:
            return
        self._looking.add(server.id)
        try:
            with giving_up(), suppress(Unavailable):
                await self.run(server, server.look, self.read_only)
        finally:
            self._looking.discard(server.id)
        if not server.hangs:
            server.workers.patience.answered.set()
        if server.standing == LOST:  # it was given up meanwhile
            server.absent = _LOST
        if self._given_up:
            server.absent = self._given_up

    def judge(self) -> None:
        """Note failing servers, since when, and give up those failing too long; at most half: else
        this host rather cannot reach them."""
        now_s = time.monotonic()
        active = [server for server in self.capacity() if server.standing == ACTIVE]
        returned = False
        for server in active:
            if _does_not_work(server):
                server.down_since_s = server.down_since_s or now_s
            else:
                server.down_since_s = None
                if server in self._gone:
                    server.is_back = returned = True
        late = {
            server
            for server in active
            if server.down_since_s is not None and now_s >= server.down_since_s + self.lost_after_s
        }
        if 2 * len(late) > len(active):
            late = set()
        before = {server for server in active if server.given_up}
        for server in active:
            server.given_up = server in late
        for server in late - before:
            _log.warning(
                "%s (%s) has not worked for %g s, what is protected is made anew on others: %s",
                server.name,
                server.address,
                self.lost_after_s,
                server.last_error,
            )
        self._gone = frozenset(server for server in active if server.is_gone)
        if late != before or returned:
            self.changes += 1

    def idlest(self, numbers: Iterable[int]) -> DataServer:
        """The least busy of these servers. Raises Unavailable."""
        known = [self._servers[number] for number in numbers if number in self._servers]
        if not known:
            raise Unavailable(
                "none of the data servers that are needed is registered in this store"
            )
        return min(known, key=lambda server: (server.hangs, server.workers.outstanding))

    # --- calls ---

    async def run(self, server: DataServer, function: Callable[..., Any], *args: Any) -> Any:
        """``function(*args)`` in a worker thread of ``server``. Not cancellable."""
        return (await gather([(server.workers, function, args)]))[0]

    async def sync_all(self) -> None:
        """Make all earlier writes durable on servers present. Raises Unavailable or NoSpace, after
        all have been tried."""
        await gather([(s.workers, s.sync_all, ()) for s in self._servers.values() if not s.absent])

    async def spaces(self, servers: Sequence[DataServer]) -> list[Space | None]:
        """Space of each server's filesystem; None if unknown. Of a data server silent for a second,
        as last seen."""
        found: list[Space | None] = [server.seen for server in servers]

        async def ask(number: int, server: DataServer) -> None:
            with trio.move_on_after(_SAY_S if server.role == "data" else FOR_EVER):
                [found[number]] = await gather(
                    [(server.workers, space_or_none, (server,))], abandonable=True
                )

        async with trio.open_nursery() as nursery:
            for number, server in enumerate(servers):
                if not server.hangs:
                    nursery.start_soon(ask, number, server)
        return found

    def statfs(self) -> Space:
        """Space of all working data servers, as last seen, each storage once, without free space
        that takes no new files. Does not block."""
        servers = sorted(self.capacity(), key=lambda server: server.standing == ACTIVE)
        by_pool = {
            server.storage.pool: seen if server.standing == ACTIVE else seen.without_free()
            for server in servers
            if (seen := server.seen) is not None
        }
        return Space(
            *(sum(getattr(space, field) for space in by_pool.values()) for field in Space._fields)
        )

    async def status(self) -> list[dict[str, Any]]:
        """For ``aifs status``: role, id in it, path, domain, class, standing, state, used_bytes,
        free_bytes (None: unknown), last_error, read_bytes (by requests since the mount)."""
        servers = tuple(self._servers.values())
        return [_status(*pair) for pair in zip(servers, await self.spaces(servers), strict=True)]

    def rows(self) -> list[dict[str, Any]]:
        """The same, with the space as it was last seen. Does not block."""
        return [_status(server, server.seen) for server in self._servers.values()]

    def describe_waiting(self) -> str:
        """Which servers have calls that have not ended; '' if none."""
        servers = (*self._servers.values(), *self._removed)
        return _describe({server: server.workers.outstanding for server in servers})

    def close(self) -> tuple[list[threading.Thread], str]:
        """End worker threads after their work. Returns those stuck with a hung server, and words
        for that, which are logged. Blocks."""
        stuck: dict[DataServer, list[threading.Thread]] = {}
        until_s = time.monotonic() + max(self.patience_s, _END_S)
        servers = (*self._servers.values(), *self._removed)
        for server in servers:
            server.workers.end()
        for server in servers:
            stuck[server] = server.workers.join(until_s)
        words = _describe({server: len(threads) for server, threads in stuck.items()})
        if words:
            _log.warning("%s", words)
        return [thread for threads in stuck.values() for thread in threads], words


def _describe(calls: Mapping[DataServer, int]) -> str:
    return ", ".join(
        f"{server.name} ({server.address}) has not answered {count} call{'s' * (count != 1)}"
        for server, count in calls.items()
        if count
    )


def _status(server: DataServer, space: Space | None) -> dict[str, Any]:
    return {
        "role": server.role,
        "id": server.number,
        "path": server.address,
        "domain": server.domain,
        "class": server.storage_class,
        "standing": server.standing,
        "state": server.state,
        "used_bytes": space.total - space.free if space else None,
        "free_bytes": space.available if space else None,
        "last_error": server.last_error,
        "read_bytes": server.read_bytes,
    }


def _meet(server: DataServer, read_only: bool) -> None:
    """Raises StoreError if the directory is not the server's."""
    server.identify(read_only)
    server.seen = space_or_none(server)


def space_or_none(server: DataServer) -> Space | None:
    """The space of its storage; None if that fails. Blocks."""
    try:
        return server.space()
    except FsError:
        return None


def _does_not_work(server: DataServer) -> bool:
    return bool(server.absent or server.missing) or server.health.state != "ok"


def _fails(server: DataServer) -> bool:
    return server.down_since_s is not None or server.health.state != "ok"


_OTHERS = (
    256  # files made ahead, containers that are written, the database, the kernel's connection
)
_ROOM_S = 5.0  # what is in use so long cannot be closed
_RETRY_S = 0.01


class DescriptorUser(Protocol):
    """A user that keeps objects open."""

    used: bool
    """Set whenever they are used."""

    def close_idle(self) -> int:
        """Close unused descriptors, which open again on demand; how many. Does not block."""


class Descriptors:
    """Of all users in a mount, as many as they are. Used from one trio thread."""

    def __init__(self) -> None:
        most = files.descriptors_max()
        self._max = self._room_at = max((most - _OTHERS) // 2, most // 4)
        self._users: list[Callable[[], Iterable[DescriptorUser]]] = []

    def add_users(self, users: Callable[[], Iterable[DescriptorUser]]) -> None:
        """``users`` returns those that may give up descriptors."""
        self._users.append(users)

    def remove_users(self, users: Callable[[], Iterable[DescriptorUser]]) -> None:
        """They use none any more."""
        self._users.remove(users)

    async def find_room(self) -> None:
        """Wait until descriptors may be opened: unused open ones take none from others."""
        count = files.descriptors()
        if count <= self._max:
            self._room_at = self._max
        if count <= self._room_at:
            return
        if not self._make_room():
            return
        with trio.move_on_after(_ROOM_S):  # workers close them, which may have much to do
            while files.descriptors() > self._max * 3 // 2:
                await trio.sleep(_RETRY_S)

    def _make_room(self) -> bool:
        """Close descriptors until a quarter is free, first of users idle since the last call;
        whether there were any."""
        excess = files.descriptors() - self._max * 3 // 4
        closed = 0
        users = [user for each in self._users for user in each()]
        for user in sorted(users, key=lambda user: user.used):
            if closed >= excess:
                break
            closed += user.close_idle()
        for user in users:
            user.used = False
        # Where calls use them all, it is not tried again before there are some more, or there have
        # been fewer.
        self._room_at = max(self._max, files.descriptors() + self._max // 8)
        return closed > 0
