"""Large files that several hosts read at the same time: who fetches what, and what if it fails."""

import itertools
import json
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from aifs.core.errors import Busy
from aifs.data.checks import HASHED
from aifs.meta.keys import ROOT_INO
from aifs.peers.transport import Answer
from aifs.vfs import Filesystem
from tests.support import modes
from tests.support.cluster import Cluster, cluster_of
from tests.support.stores import moved_out, overwrite, write_file

MIBS = 12
DATA = random.Random(7).randbytes(MIBS * HASHED + 4321)
SETTINGS = modes.STRIPED | modes.BY_DAEMON
HOSTS = ("a", "b", "c")


class Readers:
    """A file on data servers that have to be waited for, read by several hosts."""

    def __init__(self, cluster: Cluster, hosts: list[Filesystem], ino: int) -> None:
        self.cluster, self.hosts, self.ino = cluster, hosts, ino
        self.handles: dict[int, int] = {}

    async def open(self, *numbers: int) -> None:
        """These hosts begin to read."""
        for number in numbers:
            opened = await self.hosts[number].open(self.ino, os.O_RDONLY)
            self.handles[number] = opened.handle
            await self.read(number, HASHED)

    async def read(self, number: int, end: int = len(DATA)) -> None:
        """One host reads the file up to there, as a program does."""
        step = HASHED // 4
        for offset in range(0, end, step):
            data = await self.hosts[number].read(self.handles[number], offset, step)
            assert bytes(data) == DATA[offset : offset + step]

    async def read_all(self) -> None:
        """All that have it open read all of it."""
        async with trio.open_nursery() as nursery:
            for number in self.handles:
                nursery.start_soon(self.read, number)
        await self.settled()

    async def settled(self) -> int:
        """See ``fetched``, when nothing is under way any more."""
        for host in self.hosts:
            await host.store.servers.cache.settle()
        return self.fetched

    @property
    def fetched(self) -> int:
        """Bytes that data servers were asked for, by all hosts."""
        return sum(s.read_bytes for host in self.hosts for s in host.store.servers.capacity())

    async def told(self, what: str) -> list[int]:
        told = [await host.getxattr(ROOT_INO, b"user.aifs.status") for host in self.hosts]
        return [json.loads(status)["together"][what] for status in told]


@asynccontextmanager
async def readers(directory: Path) -> AsyncIterator[Readers]:
    async with cluster_of(directory, SETTINGS, HOSTS) as cluster:
        async with cluster.mounted("a") as a, cluster.mounted("b") as b, cluster.mounted("c") as c:
            ino = await write_file(a, b"f", DATA)
            await moved_out(a, ino)
            for host in (a, b, c):
                for server in host.store.servers.capacity():
                    server.storage.in_memory = server.storage.can_read_cached = False
            reading = Readers(cluster, [a, b, c], ino)
            yield reading
            for number, handle in reading.handles.items():
                await reading.hosts[number].release(handle)


@pytest.fixture
async def three(directory: Path) -> AsyncIterator[Readers]:
    async with readers(directory) as three:
        yield three


@pytest.mark.sweep
async def test_each_mib_is_fetched_once_and_passed_on(three: Readers) -> None:
    await three.open(0, 1, 2)
    before = three.fetched
    await three.read_all()
    assert three.fetched - before <= len(DATA)
    received, given = await three.told("received_bytes"), await three.told("given_bytes")
    assert sum(received) == sum(given) >= 2 * len(DATA) - 12 * HASHED
    assert min(given) > 0


@pytest.mark.sweep
async def test_who_comes_later_gets_what_others_have_read(three: Readers) -> None:
    await three.open(0)
    await three.read(0)
    before = three.fetched
    await three.open(1, 2)
    await three.read_all()
    assert three.fetched - before <= 4 * HASHED  # until they have met


async def test_who_begins_asks_servers_for_nothing_that_others_have(three: Readers) -> None:
    await three.open(0)
    before = await three.settled()
    await three.open(1, 2)
    assert await three.settled() == before


async def test_the_share_of_a_host_that_has_ended_is_fetched_once(three: Readers) -> None:
    await three.open(0, 1, 2)
    await three.hosts[0].release(three.handles.pop(0))
    await three.read_all()
    assert three.fetched <= len(DATA) + 2 * HASHED  # what that one alone had


@pytest.mark.sweep
async def test_a_lone_reader_asks_nobody(three: Readers) -> None:
    await three.open(0)
    await three.read_all()
    assert await three.told("received_bytes") == await three.told("files") == [0, 0, 0]


@pytest.mark.sweep
async def test_hosts_that_fail_are_done_without(three: Readers) -> None:
    kinds = itertools.cycle([Busy("too much to do"), b"", bytes(HASHED), b"x"])

    async def fails(*_: Any) -> Answer:
        kind = next(kinds)
        if isinstance(kind, Busy):
            raise kind
        return Answer(None, kind)

    await three.open(0, 1, 2)
    three.cluster.calls["a"].services["together.give"] = fails
    await three.read_all()
    assert (await three.told("files")) == [1, 1, 1]


async def test_hosts_that_have_gone_are_done_without(three: Readers) -> None:
    await three.open(0, 1)
    three.cluster.silent.add("a")
    await three.read(1)
    assert (await three.told("files"))[1] == 0
    three.cluster.silent.clear()


@pytest.mark.sweep
async def test_files_that_are_written_in_place_are_read_from_servers(three: Readers) -> None:
    await overwrite(three.hosts[0], three.ino, 5, DATA[5:6])
    await three.open(0, 1, 2)
    await three.read_all()
    assert sum(await three.told("received_bytes")) == 0
