"""Locks between two hosts over real connections."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from aifs.core.errors import Deadlock, WouldBlock
from aifs.files.lock_homes import FCNTL, SERVICE, PeerHosts
from aifs.files.lock_table import LAST, Lock
from aifs.files.locks import Locks
from aifs.peers.peers import PeerAddress, Peers
from tests.support.memory_engine import MemoryEngine


@asynccontextmanager
async def two_hosts() -> AsyncIterator[list[Locks]]:
    """The locks of two hosts with one map."""
    engine, hosts = MemoryEngine(), []
    peers = [Peers("store", name, b"secret", ("127.0.0.1", 0)) for name in ("a", "b")]
    members = [
        PeerAddress(name, number, f"127.0.0.1:{one.port}")
        for number, (name, one) in enumerate(zip("ab", peers, strict=True), 1)
    ]
    async with trio.open_nursery() as nursery:
        for number, one in enumerate(peers, 1):
            one.update(number, members)
            hosts.append(Locks(engine, PeerHosts(one)))
            one.serve(SERVICE, hosts[-1].answer)
            nursery.start_soon(one.run)
            nursery.start_soon(hosts[-1].run)
        yield hosts
        nursery.cancel_scope.cancel()


def whole(locks: Locks) -> Lock:
    return Lock(locks.owner(1), 0, LAST, True, 0)


async def test_locks_go_from_host_to_host() -> None:
    async with two_hosts() as (one, other):
        await one.lock(7, 0, FCNTL, whole(one), False)
        with pytest.raises(WouldBlock):
            await other.lock(7, 0, FCNTL, whole(other), False)
        assert await other.test(7, FCNTL, whole(other)) == whole(one)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(other.lock, 7, 0, FCNTL, whole(other), True)
            await trio.testing.wait_all_tasks_blocked(0.05)
            await one.unlock(7, FCNTL, one.owner(1), 0, LAST)
        with trio.move_on_after(0.05):
            await one.lock(7, 0, FCNTL, whole(one), True)
        await other.flush(7, other.owner(1))
        await one.lock(7, 0, FCNTL, whole(one), False)


async def test_a_circle_over_two_hosts() -> None:
    async with two_hosts() as (one, other):
        await one.lock(1, 0, FCNTL, whole(one), False)
        await other.lock(2, 0, FCNTL, whole(other), False)
        refused = []

        async def wait_for(locks: Locks, ino: int, own: int) -> None:
            try:
                await locks.lock(ino, 0, FCNTL, whole(locks), True)
            except Deadlock:
                refused.append(locks)
            await locks.unlock(own, FCNTL, locks.owner(1), 0, LAST)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait_for, one, 2, 1)
            nursery.start_soon(wait_for, other, 1, 2)
        assert refused
