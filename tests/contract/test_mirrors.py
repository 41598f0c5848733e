"""Mirrors: second copies, on other hosts, of what is in a burst tier alone; what is there when the
home dies, when it comes back, and when the mirror's host dies."""

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trio

from aifs.burst.mirrors import KEEP
from aifs.core.config import Config
from aifs.core.errors import StoreError, Unavailable
from aifs.core.faults import SimulatedCrash
from aifs.layout.hint import Policy
from aifs.meta import mirrors
from aifs.meta.keys import ROOT_INO
from aifs.meta.records import (
    BurstRecord,
    Copy,
    MirrorOf,
    decode_burst,
    decode_policy,
    encode_policy,
)
from aifs.peers.peers import CALL_S
from aifs.vfs import Filesystem, SetAttr
from tests.support.cluster import Cluster, cluster_of
from tests.support.points import armed, crash, once
from tests.support.stores import OWNER, drained, overwrite, read_file, write_file

DATA = bytes(range(256)) * 1000


def test_records_and_policies_are_read_as_they_were_written() -> None:
    plain = BurstRecord(7, 0x8000, undrained=True, durable=False, since_ns=5)
    for record in (
        plain,
        plain._replace(mirror=Copy(0x8001, 9)),
        plain._replace(of=MirrorOf(8, 100, -1, 4)),
        plain._replace(mirror=Copy(0x8001, 9), of=MirrorOf(8, 100, 3, 4)),
    ):
        assert decode_burst(record.encode()) == record
    for policy in (Policy(mirror=1), Policy(mirror=1, publish="capacity"), Policy(replicas=2)):
        assert decode_policy(encode_policy(policy)) == policy


class Hosts:
    """A cluster whose hosts begin, and die, in any order."""

    def __init__(self, cluster: Cluster, nursery: trio.Nursery) -> None:
        self.cluster, self._nursery = cluster, nursery
        self._ends: dict[str, trio.Event] = {}
        self._over: dict[str, trio.Event] = {}
        self._killed: set[str] = set()

    async def begin(self, name: str) -> Filesystem:
        self._ends[name], self._over[name] = trio.Event(), trio.Event()
        return await self._nursery.start(self._serve, name)

    async def _serve(self, name: str, task_status: trio.TaskStatus[Filesystem]) -> None:
        with suppress(SimulatedCrash):
            async with self.cluster.mounted(name) as fs:
                task_status.started(fs)
                await self._ends[name].wait()
                if name in self._killed:
                    raise SimulatedCrash(name)
        self._over[name].set()

    async def kill(self, name: str) -> None:
        """Its session has ended when this returns."""
        self._killed.add(name)
        await self.end(name)
        self._killed.discard(name)

    async def end(self, name: str) -> None:
        self._ends.pop(name).set()
        await self.until_over(name)

    async def until_over(self, name: str) -> None:
        await self._over[name].wait()

    async def end_all(self) -> None:
        for name in list(self._ends):
            await self.end(name)


@asynccontextmanager
async def hosts(directory: Path, **settings: str) -> AsyncIterator[Hosts]:
    async with cluster_of(directory, settings) as cluster, trio.open_nursery() as nursery:
        made = Hosts(cluster, nursery)
        yield made
        await made.end_all()


@pytest.fixture
async def two(directory: Path) -> AsyncIterator[Hosts]:
    async with hosts(directory) as two:
        yield two


async def synced_file(fs: Filesystem, name: bytes, data: bytes = DATA) -> int:
    """A file that is to have a mirror, closed and synced."""
    (handle, *_), inode = await fs.create(ROOT_INO, name, 0o644, os.O_RDWR, OWNER)
    await fs.setxattr(inode.ino, b"user.aifs.mirror", b"1")
    await fs.write(handle, 0, data)
    await fs.fsync(handle)
    await fs.release(handle)
    return inode.ino


async def mirror_of(fs: Filesystem, ino: int) -> Copy | None:
    found = await fs.store.engine.view(mirrors.look_up, ino)
    return None if found is None else found.mirror


async def until_home(fs: Filesystem, ino: int) -> None:
    """The host has taken the file over."""
    own = [server.id for server in fs.store.servers.burst()]
    while (copy := (await fs.getattr(ino)).copy) is None or copy.server not in own:
        await trio.sleep(0.001)


async def test_who_has_not_heard_of_a_file_is_asked_for_a_mirror_again(two, monkeypatch):
    """What is made in a directory of one's own is told before other hosts hear of it."""
    north, south = await two.begin("north"), await two.begin("south")
    put_mirror = mirrors.put_mirror
    has_heard: list[bool] = []

    def put_if_heard(*arguments: Any) -> list[int] | None:
        return put_mirror(*arguments) if has_heard else None

    async def shown(of_all: bool = False) -> None:
        has_heard.append(True)

    monkeypatch.setattr(mirrors, "put_mirror", put_if_heard)
    monkeypatch.setattr(north.store.engine, "shown", shown)
    (handle, *_), inode = await north.create(ROOT_INO, b"f", 0o644, os.O_RDWR, OWNER)
    await north.setxattr(inode.ino, b"user.aifs.mirror", b"1")
    has_heard.clear()
    await north.write(handle, 0, DATA)
    await north.fsync(handle)
    await north.release(handle)
    assert (await mirror_of(north, inode.ino)) is not None
    assert south.tier.mirror_bytes == len(DATA)


async def test_what_was_synced_survives_its_home(two: Hosts) -> None:
    north, south = await two.begin("north"), await two.begin("south")
    ino = await synced_file(north, b"f")
    assert south.tier.mirror_bytes == len(DATA)
    await overwrite(north, ino, len(DATA), b"and more, not synced")
    await two.kill("north")
    await until_home(south, ino)
    assert await read_file(south, ino) == DATA
    assert south.tier.mirror_bytes == 0
    await overwrite(south, ino, 0, b"new")
    north = await two.begin("north")
    assert await read_file(north, ino) == b"new" + DATA[3:]
    await north.collector.drain()
    await drained(south, ino)
    assert await read_file(north, ino) == b"new" + DATA[3:]


async def test_a_host_that_has_lost_its_disk_comes_back_without_what_has_no_mirror(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
):
    async with hosts(scratch / "s", **{"host.home_wait": "0s"}) as two:
        north, south = await two.begin("north"), await two.begin("south")
        kept = await synced_file(north, b"kept")
        lost = await write_file(north, b"lost", DATA)
        await two.kill("south")
        await two.kill("north")
        shutil.rmtree(scratch / "s" / "burst")
        with pytest.raises(StoreError, match="2 files .* mount without them: -o burst.missing=a"):
            await two.begin("north")
        config = two.cluster.config

        def allowing(name: str) -> Config:
            known = config(name)
            burst = known.burst.model_copy(update={"missing": "allow"})
            return known.model_copy(update={"burst": burst})

        monkeypatch.setattr(two.cluster, "config", allowing)
        with pytest.raises(StoreError, match="1 files have mirrors on other hosts"):
            await two.begin("north")
        south = await two.begin("south")
        await until_home(south, kept)
        north = await two.begin("north")
        for fs in (north, south):
            assert await read_file(fs, kept) == DATA
            handle, *_ = await fs.open(lost, os.O_RDONLY)
            with pytest.raises(Unavailable):
                await fs.read(handle, 0, 10)
            await fs.release(handle)
            place = await fs.lookup(ROOT_INO, b"lost+found")
            listed = await fs.lookup(place.ino, b"burst-directory-0")
            assert await read_file(fs, listed.ino) == b"/lost\n"
        await south.unlink(ROOT_INO, b"lost")
        south.forget([lost])
        await south.collector.drain()
        await two.end("north")
        monkeypatch.undo()
        north = await two.begin("north")


async def test_a_mirror_goes_with_what_it_is_of(two: Hosts) -> None:
    north, south = await two.begin("north"), await two.begin("south")
    inos = [await synced_file(north, name) for name in (b"a", b"b", b"c")]
    assert south.tier.mirror_bytes == 3 * len(DATA)
    await drained(north, inos[0])
    assert await mirror_of(north, inos[0]) is None
    await north.unlink(ROOT_INO, b"b")
    north.forget([inos[1]])
    await north.collector.drain()
    first = await mirror_of(north, inos[2])
    handle = (await north.open(inos[2], os.O_RDWR)).handle
    await north.write(handle, 0, b"new")
    await north.fsync(handle)
    second = await mirror_of(north, inos[2])
    await north.fsync(handle)
    assert await mirror_of(north, inos[2]) == second != first
    await north.release(handle)
    await south.collector.drain()
    assert south.tier.mirror_bytes == len(DATA)


async def test_what_is_written_under_an_mtime_that_was_set_before_gets_a_mirror(two: Hosts) -> None:
    north, south = await two.begin("north"), await two.begin("south")
    ino = await synced_file(north, b"f")
    for data in (DATA, DATA[::-1]):
        handle = (await north.open(ino, os.O_RDWR)).handle
        await north.write(handle, 0, data)
        await north.setattr(ino, SetAttr(mtime_ns=5), OWNER)
        await north.fsync(handle)
        await north.release(handle)
    await two.kill("north")
    await until_home(south, ino)
    assert await read_file(south, ino) == DATA[::-1]
    await two.begin("north")


async def test_a_host_that_is_not_connected_is_not_waited_for(two, caplog, monkeypatch):
    north, _ = await two.begin("north"), await two.begin("south")
    calls, waits = two.cluster.calls["north"], list[float]()
    call = calls.call

    async def counted(*args: Any, timeout_s: float = 5.0, **others: Any) -> Any:
        waits.append(timeout_s)
        return await call(*args, timeout_s=timeout_s, **others)

    monkeypatch.setattr(calls, "call", counted)
    two.cluster.silent.add("south")
    ino = await synced_file(north, b"f")
    assert ino in north.io.mirrors.lacking
    assert waits == [CALL_S]
    assert "has no mirror" in caplog.text
    caplog.clear()
    two.cluster.silent.clear()


async def test_who_wrote_by_way_of_a_home_that_died_is_told(two: Hosts) -> None:
    """South has the mirror, which lacks what it has written there since the last fsync."""
    north, south = await two.begin("north"), await two.begin("south")
    ino = await synced_file(north, b"f")
    await north.open(ino, os.O_RDWR)
    there = (await south.open(ino, os.O_RDWR)).handle
    await south.write(there, 0, b"lost")
    await two.kill("north")
    await until_home(south, ino)
    await south.io.by_home.follow_bytes(ino)
    with pytest.raises(Unavailable, match="bytes were lost"):
        await south.fsync(there)
    await south.fsync(there)
    await south.release(there)
    assert await read_file(south, ino) == DATA
    await two.begin("north")


async def test_without_a_second_host_publishing_drains(two: Hosts, caplog) -> None:
    north = await two.begin("north")
    ino = await synced_file(north, b"f")
    assert "has no mirror" in caplog.text
    caplog.clear()
    assert north.io.mirrors.lacking == {ino}
    await north.rename(ROOT_INO, b"f", ROOT_INO, b"g")
    assert not (await north.getattr(ino)).in_burst
    south = await two.begin("south")
    south.tier.admit = lambda *_: None  # type: ignore[method-assign,assignment]
    other = await synced_file(north, b"h")
    assert other in north.io.mirrors.lacking
    assert await mirror_of(north, other) is None


async def test_what_has_been_drained_lacks_no_mirror(scratch: Path, caplog, monkeypatch):
    monkeypatch.setattr("aifs.burst.mirrors._PRUNE_AT", 2)
    async with hosts(scratch / "s") as two:
        north = await two.begin("north")
        first = await synced_file(north, b"f")
        caplog.clear()
        await drained(north, first)
        second = await synced_file(north, b"g")
        assert north.io.mirrors.lacking <= {second}
        await drained(north, second)
        assert not await north.io.mirrors.find_lacking()


async def test_what_has_lost_its_mirror_is_drained(two: Hosts) -> None:
    north, _ = await two.begin("north"), await two.begin("south")
    ino = await synced_file(north, b"f")
    await two.kill("south")
    await north.drain.wait([ino])
    assert not (await north.getattr(ino)).in_burst
    await two.begin("south")


@pytest.mark.sweep
@pytest.mark.parametrize("point", ["hosts.mirror.copied", "hosts.mirror.kept"])
async def test_a_mirror_host_that_dies_while_it_copies(two: Hosts, point: str, caplog) -> None:
    north, south = await two.begin("north"), await two.begin("south")
    services = two.cluster.calls["south"].services
    keep = services[KEEP]

    async def dies(*args: Any) -> Any:
        try:
            return await keep(*args)
        except SimulatedCrash:
            raise Unavailable("the connection to host south has ended") from None

    services[KEEP] = dies
    with armed(point, crash):
        ino = await synced_file(north, b"f")
    assert "has no mirror" in caplog.text
    caplog.clear()
    await two.kill("south")
    south = await two.begin("south")
    assert await read_file(south, ino) == DATA
    await drained(north, ino)
    await south.collector.drain()
    assert south.tier.mirror_bytes == 0


async def test_whole_directories_have_mirrors(two: Hosts) -> None:
    north, south = await two.begin("north"), await two.begin("south")
    made = await north.mkdir(ROOT_INO, b"step", 0o755, OWNER)
    await north.setxattr(made.ino, b"user.aifs.mirror", b"1")
    assert await north.getxattr(made.ino, b"user.aifs.mirror") == b"1"
    inos = [await write_file(north, name, DATA, made.ino) for name in (b"a", b"b")]
    await north.rename(ROOT_INO, b"step", ROOT_INO, b"shown")
    assert south.tier.mirror_bytes == 2 * len(DATA)
    await two.kill("north")
    for ino in inos:
        await until_home(south, ino)
        assert await read_file(south, ino) == DATA
    await two.begin("north")


async def test_a_mirror_host_that_dies_when_it_has_taken_over(two: Hosts) -> None:
    north, _ = await two.begin("north"), await two.begin("south")
    ino = await synced_file(north, b"f")
    assert not once("hosts.mirror.taken", crash)
    await two.kill("north")
    await two.until_over("south")
    south, north = await two.begin("south"), await two.begin("north")
    await until_home(south, ino)
    assert await read_file(north, ino) == DATA
    await drained(south, ino)
