"""Locks over hosts that die, hang, are cut off and come: nobody has a lock twice, nobody waits for
ever, nothing is left behind.
"""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from aifs.core.errors import Deadlock, WouldBlock
from aifs.files.lock_homes import FCNTL, FLOCK, IDLE_S
from aifs.files.lock_table import LAST, Lock, LockOwner
from tests.support.lock_hosts import LEASE_S, Cluster, Judge, SimulatedHost

INO = 7
LIMIT_S = 1000.0
"""Of simulated time."""


@asynccontextmanager
async def simulated(seed: int = 0, faults: float = 0.0) -> AsyncIterator[tuple[Cluster, Any]]:
    """A cluster, and where its hosts run. A test in which somebody waits for ever fails."""
    with trio.fail_after(LIMIT_S):
        async with trio.open_nursery() as nursery:
            yield Cluster(seed, faults), nursery
            nursery.cancel_scope.cancel()


def whole(host: SimulatedHost, number: int = 1, exclusive: bool = True) -> Lock:
    return Lock(LockOwner(host.session, number), 0, LAST, exclusive, 0)


async def lock(host: SimulatedHost, ino: int = INO, number: int = 1, wait: bool = True) -> None:
    await host.locks.lock(ino, 0, FCNTL, whole(host, number), wait)


async def unlock(host: SimulatedHost, ino: int = INO, number: int = 1) -> None:
    await host.locks.unlock(ino, FCNTL, LockOwner(host.session, number), 0, LAST)


async def test_who_locks_alone_asks_nobody(autojump_clock: object) -> None:
    async with simulated() as (cluster, nursery):
        host, other = cluster.join(nursery), cluster.join(nursery)
        for _ in range(20):
            await lock(host)
            await unlock(host)
        assert (host.transactions, cluster.asked) == (1, 0)
        assert host.locks.status() == {"homes": 1, "locked": 0, "waiting": 0}
        await lock(other)
        assert await host.locks.test(INO, FCNTL, whole(host)) == whole(other)
        with pytest.raises(WouldBlock):
            await lock(host, wait=False)
        await unlock(other)
        assert cluster.asked == 2
        await trio.sleep(IDLE_S + 2)
        assert host.locks.status() == {"homes": 0, "locked": 0, "waiting": 0}
        assert cluster.feed[-1] == {b"L" + INO.to_bytes(8, "big"): None}


async def test_a_circle_over_hosts_is_ended_and_a_chain_is_not(autojump_clock: object) -> None:
    async with simulated() as (cluster, nursery):
        hosts = [cluster.join(nursery) for _ in range(3)]
        for number, host in enumerate(hosts):
            await lock(host, number + 1)
        ended: list[str] = []

        async def wait_for(host: SimulatedHost, ino: int) -> None:
            try:
                await lock(host, ino)
                ended.append("has it")
                await unlock(host, ino)
            except Deadlock:
                ended.append("circle")
            await unlock(host, host.session)

        async with trio.open_nursery() as waiting:
            waiting.start_soon(wait_for, hosts[0], 2)
            waiting.start_soon(wait_for, hosts[1], 3)
            await trio.sleep(60)
            assert ended == []
            waiting.start_soon(wait_for, hosts[2], 1)
        assert ended[0] == "circle" and ended[-1] == "has it"


async def test_flock_knows_no_circles(autojump_clock: object) -> None:
    async with simulated() as (cluster, nursery):
        hosts = [cluster.join(nursery) for _ in range(2)]
        for number, host in enumerate(hosts):
            await host.locks.lock(number + 1, 0, FLOCK, whole(host), True)
        with trio.move_on_after(60) as scope:
            async with trio.open_nursery() as waiting:
                for number, host in enumerate(hosts):
                    waiting.start_soon(host.locks.lock, 2 - number, 0, FLOCK, whole(host), True)
        assert scope.cancelled_caught


async def test_the_locks_of_a_dead_host_are_free_when_its_lease_is_over(
    autojump_clock: object,
) -> None:
    """Be it the home of them, or not."""
    for home in (0, 1):
        async with simulated() as (cluster, nursery):
            hosts = [cluster.join(nursery) for _ in range(3)]
            await lock(hosts[home])
            await unlock(hosts[home])
            await lock(hosts[0])
            await trio.sleep(20)
            began_s = trio.current_time()
            nursery.start_soon(hosts[0].kill)
            await lock(hosts[2])
            assert LEASE_S - 2 < trio.current_time() - began_s < LEASE_S + 2


async def test_what_others_hold_outlives_its_home(autojump_clock: object) -> None:
    async with simulated() as (cluster, nursery):
        home, holder, third = [cluster.join(nursery) for _ in range(3)]
        await lock(home)
        await unlock(home)
        await lock(holder)
        await home.kill()
        with pytest.raises(WouldBlock):
            await lock(third, wait=False)
        async with trio.open_nursery() as waiting:
            waiting.start_soon(lock, third)
            await trio.sleep(30)
            await unlock(holder)
        assert third.locks.status()["locked"] == 1


async def test_close_is_over_for_who_asks_after_it(autojump_clock: object) -> None:
    """Though RELEASE is answered later: who locks on this host waits for it."""
    async with simulated() as (cluster, nursery):
        host = cluster.join(nursery)
        await host.locks.lock(INO, 5, FLOCK, whole(host, 1), False)
        await host.locks.lock(INO, 5, FCNTL, whole(host, 2), False)
        host.locks.begin_close(INO)

        async def end() -> None:
            await trio.sleep(1)
            await host.locks.end_close(INO, 5, host.locks.owner(1), True)

        nursery.start_soon(end)
        await host.locks.lock(INO, 6, FLOCK, whole(host, 3), False)
        await host.locks.lock(INO, 6, FCNTL, whole(host, 4), False)
        await host.locks.flush(INO, host.locks.owner(4))
        await host.locks.unlock(INO, FLOCK, host.locks.owner(3), 0, LAST)
        assert host.locks.status()["locked"] == 0


async def test_a_lock_ends_with_the_file_by_which_its_owner_has_locked_last(
    autojump_clock: object,
) -> None:
    """Closes of files that were open for reading before the inode was locked are not told: the
    owner has closed that file long ago, and others have it open. What the owner has locked since by
    another file stays when the last of them closes it."""
    async with simulated() as (cluster, nursery):
        host, other = cluster.join(nursery), cluster.join(nursery)
        owner = host.locks.owner(1)
        for locks_at_once in (False, True):
            await host.locks.lock(INO, 5, FCNTL, whole(host, exclusive=False), False)
            if locks_at_once:
                assert host.locks.lock_at_once(INO, 6, FCNTL, whole(host), False)
            else:
                await host.locks.lock(INO, 6, FCNTL, whole(host), False)
            host.locks.begin_close(INO)
            await host.locks.end_close(INO, 5, None, True)
            with pytest.raises(WouldBlock):
                await lock(other, wait=False)
            host.locks.begin_close(INO)
            await host.locks.flush(INO, owner)
            await host.locks.end_close(INO, 6, None, True)
        await lock(other, wait=False)


async def test_a_lock_that_is_granted_while_a_file_is_closed_stays(autojump_clock: object) -> None:
    async with simulated() as (cluster, nursery):
        home, host = cluster.join(nursery), cluster.join(nursery)
        await lock(home)
        await unlock(home)
        await host.locks.lock(INO, 5, FCNTL, whole(host, exclusive=False), False)
        serve = home.serve

        async def closed_meanwhile(session: int, request: Any) -> Any:
            answer = await serve(session, request)
            if request[0] == "lock" and home.serve is not serve:
                home.serve = serve  # type: ignore[method-assign]
                host.locks.begin_close(INO)
                await host.locks.end_close(INO, 5, None, True)
            return answer

        home.serve = closed_meanwhile  # type: ignore[method-assign]
        await host.locks.lock(INO, 6, FCNTL, whole(host), False)
        with pytest.raises(WouldBlock):
            await lock(home, wait=False)


async def test_a_signal_comes_while_the_grant_is_on_its_way(autojump_clock: object) -> None:
    """The lock has become free just before who waits for it asked again, so its home has had nobody
    wait. Its answer is lost, and the lock is not left behind."""
    async with simulated() as (cluster, nursery):
        home, waiter = cluster.join(nursery), cluster.join(nursery)
        await lock(home)
        serve, signal = home.serve, trio.CancelScope()

        async def grant_and_interrupt(session: int, request: Any) -> Any:
            begins_to_wait = request[0] == "lock" and request[-1]
            if begins_to_wait:
                await unlock(home)
            answer = await serve(session, request)
            if begins_to_wait:
                signal.cancel()
            return answer

        home.serve = grant_and_interrupt  # type: ignore[method-assign]
        with signal:
            await lock(waiter)
        assert signal.cancel_called and not signal.cancelled_caught  # so it has the lock
        with pytest.raises(WouldBlock):
            await lock(home, wait=False)
        await unlock(waiter)
        await lock(home, wait=False)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(12))
async def test_nobody_has_a_lock_twice(autojump_clock: object, seed: int) -> None:
    """Programs on hosts lock, wait, give up and close; hosts die, freeze and come; connections end
    before and after a request has been carried out."""
    async with simulated(seed, faults=0.03) as (cluster, nursery):
        judge, choose = Judge(cluster), random.Random(seed)
        hosts = [cluster.join(nursery) for _ in range(4)]
        async with trio.open_nursery() as programs:
            for host in hosts:
                for number in range(3):
                    programs.start_soon(host.program, _use_locks, judge, choose, number)
            await trio.sleep(choose.random() * 5)
            fault = choose.choice(["kill", "freeze", "both"])
            if fault != "freeze":
                nursery.start_soon(hosts[choose.randrange(2)].kill)
            if fault != "kill":
                nursery.start_soon(hosts[2].freeze, choose.choice([1, 4, 8, 25]))
                programs.start_soon(_end_when_over, hosts[2])
            await trio.sleep(choose.random() * 15)
            late = cluster.join(nursery)
            programs.start_soon(late.program, _use_locks, judge, choose, 1)
        await trio.sleep(LEASE_S + IDLE_S + 5)
        for session in cluster.live():
            status = cluster.hosts[session].locks.status()
            assert status == {"homes": 0, "locked": 0, "waiting": 0}, session


async def _end_when_over(host: SimulatedHost) -> None:
    """The programs of a host that has lost its session get errors, and end."""
    for _ in range(60):
        await trio.sleep(1)
        if host.is_over:
            await host.kill()
            return


async def _use_locks(host: SimulatedHost, judge: Judge, choose: random.Random, number: int) -> None:
    locks = host.locks
    for turn in range(40):
        ino, space = choose.choice([1, 2]), choose.choice([FCNTL, FLOCK])
        start = choose.randrange(3) if space == FCNTL else 0
        end = start + choose.randrange(3) if space == FCNTL else LAST
        owner = locks.owner(number)
        wanted = Lock(owner, start, end, choose.random() < 0.6, turn)
        with trio.move_on_after(choose.choice([0.001, 0.02, 1, 1000])):
            try:
                waits = choose.random() < 0.8
                if not locks.lock_at_once(ino, number, space, wanted, waits):
                    await locks.lock(ino, number, space, wanted, waits)
            except WouldBlock:
                continue
            judge.take(ino, space, wanted)
            with trio.CancelScope(shield=True):
                await trio.sleep(choose.random() * 0.3)
                judge.give(ino, space, wanted)
                if space == FCNTL and choose.random() < 0.3:
                    if not locks.flush_at_once(ino, owner):
                        await locks.flush(ino, owner)
                elif choose.random() < 0.3:
                    locks.begin_close(ino)
                    await locks.end_close(ino, number, owner, True)
                elif not locks.unlock_at_once(ino, space, owner, 0, LAST):
                    await locks.unlock(ino, space, owner, 0, LAST)
