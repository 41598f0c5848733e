"""Hosts of a cluster in one process, as far as locks need them: a database with sessions and a
feed, replicas that lag behind, connections that are slow and end. Times are those of trio's clock,
which a test lets jump.
"""

import json
import random
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from typing import Any

import trio

from aifs.core.errors import Unavailable
from aifs.core.tasks import first_error
from aifs.files.lock_table import Lock
from aifs.files.locks import Locks
from aifs.meta.kv import ReadTransaction
from tests.support.engines import put_all
from tests.support.memory_engine import MemoryEngine

LEASE_S = 10.0
BEAT_S = 1.0
STOP_S = 5.0
SILENCE_S = 3.0

Writes = dict[bytes, bytes | None]


class Died(Exception):
    """The session of a host is over: its mount has ended."""


class Cluster:
    """The database and the network. ``faults``: how often a request fails though nobody has
    died."""

    def __init__(self, seed: int = 0, faults: float = 0.0) -> None:
        self.random = random.Random(seed)
        self.faults = faults
        self.hosts: dict[int, SimulatedHost] = {}
        """By session, all that there have ever been."""
        self.feed: list[Writes] = []
        self.changed = trio.Event()
        """Set when the feed has grown."""
        self.asked = 0
        """Requests from host to host."""

    def live(self) -> set[int]:
        now = trio.current_time()
        return {session for session, host in self.hosts.items() if host.lease_end > now}

    def join(self, nursery: trio.Nursery) -> "SimulatedHost":
        host = SimulatedHost(self, len(self.hosts) + 1)
        self.hosts[host.session] = host
        nursery.start_soon(host.run)
        return host

    async def delay(self, longest_s: float = 0.002) -> None:
        await trio.sleep(self.random.random() * longest_s)


class SimulatedHost:
    """One host, its replica, and its locks. It has what ``Locks`` wants of an engine and of
    hosts."""

    def __init__(self, cluster: Cluster, session: int) -> None:
        self._cluster = cluster
        self.session = session
        self.lease_end = trio.current_time() + LEASE_S
        """By the database."""
        self._beaten_s = trio.current_time()
        self._known: Set[int] = cluster.live() | {session}
        self._replica = MemoryEngine()
        self._cursor = 0
        self._links: set[trio.CancelScope] = set()
        self._scope = trio.CancelScope()
        self._programs: list[trio.CancelScope] = []
        self.is_cut = False
        """It reaches neither the database nor others."""
        self._thawed = trio.Event()
        self._thawed.set()
        self.transactions = 0
        self.locks = Locks(self, self)  # type: ignore[arg-type]  # what it uses of an engine

    async def run(self) -> None:
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._beat)
                    nursery.start_soon(self._follow)
                    await self.locks.run()
        except BaseException as error:
            if not isinstance(first_error(error), Died):
                raise

    async def program(self, function: Callable[..., Any], *args: Any) -> None:
        """What runs on the host, and dies with it."""
        with trio.CancelScope() as scope, suppress(Died):
            self._programs.append(scope)
            await function(self, *args)

    # --- faults ---

    async def kill(self) -> None:
        """The host dies with all that runs there."""
        self._scope.cancel()
        for scope in self._programs:
            scope.cancel()
        await self.cut()

    async def cut(self) -> None:
        """The host reaches nobody from now on; others notice soon."""
        self.is_cut = True
        await trio.sleep(SILENCE_S)
        for link in list(self._links):
            link.cancel()

    async def freeze(self, for_s: float) -> None:
        """Its daemon is stopped, and goes on later, as if nothing had happened."""
        self._thawed = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.cut)
            await trio.sleep(for_s)
        self._thawed.set()

    @property
    def is_over(self) -> bool:
        return self.lease_end <= trio.current_time()

    # --- the engine ---

    async def transact(self, function: Callable[..., Any], *args: Any) -> Any:
        await self._certain()
        await self._cluster.delay()
        await self._reach_database()
        await self._catch_up()
        before = await self._replica.view(_all)
        result = await self._replica.transact(function, *args)
        after = await self._replica.view(_all)
        writes = {
            key: after.get(key) for key in before | after if before.get(key) != after.get(key)
        }
        if writes:
            self._cluster.feed.append(writes)
            self._cursor = len(self._cluster.feed)
            self._cluster.changed.set()
            self._cluster.changed = trio.Event()
        self.transactions += 1
        await self._cluster.delay()
        await self._thawed.wait()
        return result

    async def view(self, function: Callable[..., Any], *args: Any) -> Any:
        await self._certain()
        await self._thawed.wait()
        return await self._replica.view(function, *args)

    @property
    def is_sure(self) -> bool:
        return self._thawed.is_set() and trio.current_time() - self._beaten_s <= STOP_S

    async def _certain(self) -> None:
        """Return while it is certain that the session goes on; never if it is over."""
        while trio.current_time() - self._beaten_s > STOP_S:
            if self.is_over:
                raise Died
            await trio.sleep(0.1)

    async def _reach_database(self) -> None:
        while self.is_cut or self.is_over:
            if self.is_over:
                raise Died
            await trio.sleep(0.1)

    async def _catch_up(self) -> None:
        for writes in self._cluster.feed[self._cursor :]:
            await self._replica.transact(put_all, writes)
        self._cursor = len(self._cluster.feed)

    async def _follow(self) -> None:
        while True:
            await self._cluster.changed.wait()
            await self._cluster.delay(0.005 if self._cluster.random.random() < 0.9 else 0.5)
            if not self.is_cut:
                await self._catch_up()
            else:
                await trio.sleep(1)

    async def _beat(self) -> None:
        while True:
            await self._thawed.wait()
            begun_s = trio.current_time()
            if not self.is_cut and not self.is_over:
                await self._cluster.delay()
                self.lease_end = trio.current_time() + LEASE_S
                self._known = self._cluster.live()
                await self._catch_up()
                self._beaten_s = begun_s
            await trio.sleep(BEAT_S)

    # --- the other hosts ---

    def live(self) -> Set[int]:
        return self._known

    async def ask(self, session: int, request: Sequence[Any]) -> Any:
        cluster = self._cluster
        other = cluster.hosts[session]
        cluster.asked += 1
        with trio.CancelScope() as link:
            self._links.add(link)
            other._links.add(link)
            try:
                while self.is_cut or other.is_cut:
                    await trio.sleep(0.5)
                    if cluster.random.random() < 0.3:
                        raise Unavailable("cut")
                await cluster.delay()
                await self._fail_at_times()
                await other._thawed.wait()
                answer = await other.serve(self.session, json.loads(json.dumps(request)))
                await other._thawed.wait()
                await cluster.delay(0.002 if cluster.random.random() < 0.9 else 1)
                await self._fail_at_times()
                await self._thawed.wait()
                return json.loads(json.dumps(answer))
            finally:
                self._links.discard(link)
                other._links.discard(link)
        raise Unavailable("the connection has ended")

    async def serve(self, session: int, request: Sequence[Any]) -> Any:
        try:
            return await self.locks.serve(session, request)
        except Died:
            raise Unavailable("the connection has ended") from None

    async def _fail_at_times(self) -> None:
        if self._cluster.random.random() < self._cluster.faults:
            raise Unavailable("the connection has ended")


class Judge:
    """Who holds what, as programs know it: no two may hold what cannot be held together."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._held: dict[tuple[int, int], list[Lock]] = {}

    def take(self, ino: int, space: int, lock: Lock) -> None:
        live = self._cluster.live()
        held = self._held.setdefault((ino, space), [])
        for other in held:
            is_rival = (
                other.owner != lock.owner and {other.owner.session, lock.owner.session} <= live
            )
            if is_rival and other.overlaps(lock.start, lock.end):
                assert not (other.exclusive or lock.exclusive), f"{other} and {lock} of {ino}"
        held.append(lock)

    def give(self, ino: int, space: int, lock: Lock) -> None:
        self._held[ino, space].remove(lock)


def _all(tx: ReadTransaction) -> dict[bytes, bytes]:
    return dict(tx.range(b"L", b"M"))
