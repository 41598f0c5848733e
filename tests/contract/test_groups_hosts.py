"""Groups of which the ranks are on two hosts: who commits, what is shown, who dies; and that what
is equal on both is stored once.
"""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from aifs.core import faults
from aifs.core.errors import FsError, GroupCancelled, Invalid, MemberDied, NotFound, Unavailable
from aifs.core.faults import SimulatedCrash
from aifs.meta.keys import ROOT_INO
from aifs.saves import joint, parts, storing
from aifs.saves.protocol import Commit
from aifs.vfs import Caller, Filesystem
from tests.support import stores
from tests.support.cluster import Cluster, cluster_of, two_hosts
from tests.support.cluster import cluster as cluster
from tests.support.cluster import north as north
from tests.support.cluster import south as south
from tests.support.points import armed
from tests.support.stores import LIMIT_S, OWNER, ask, put, read_file

ADMIN = Caller()
ALIVE = Caller(pid=os.getpid())
DATA = bytes(range(256)) * 2000
OTHER = DATA[::-1]


async def make(fs: Filesystem, parent: int, name: bytes, data: bytes) -> int:
    return await stores.write_file(fs, name, data, parent, OWNER)


async def begin(fs: Filesystem, text: str, name: bytes = b"step") -> int:
    """A directory with a group, which both hosts know."""
    ino = (await fs.mkdir(ROOT_INO, name, 0o755, OWNER)).ino
    await put(fs, ino, "group", "name=step,ranks=2," + text, ADMIN)
    return ino


async def commit(fs: Filesystem, ino: int, rank: int) -> None:
    await put(fs, ino, "group.commit", str(rank), OWNER)


async def durable(fs: Filesystem, ino: int) -> dict:
    await fs.groups.wait(ino, 0, True, LIMIT_S)
    return await ask(fs, ino, "group")


async def undrained(fs: Filesystem, *inos: int) -> list[int]:
    return [ino for ino in inos if (await fs.getattr(ino)).in_burst]


async def test_ranks_on_both_hosts_commit_and_all_is_drained(north, south):
    ino = await begin(north, "commit=explicit")
    here = await make(north, ino, b"0", DATA)
    there = await make(south, ino, b"1", OTHER)
    await commit(south, ino, 1)
    assert (await ask(north, ino, "group"))["missing"] == [0]
    assert (await ask(south, ino, "group"))["state"] == "open"
    await commit(north, ino, 0)
    for fs in (north, south):
        told = await durable(fs, ino)
        assert (told["state"], told["error"]) == ("durable", "")
        assert told["bytes"] == len(DATA) + len(OTHER)
    assert not await undrained(north, here, there)
    assert await read_file(south, here) == DATA and await read_file(north, there) == OTHER
    await put(north, ino, "group", "name=next,ranks=2,commit=explicit", OWNER)
    await south.groups.wait(ino, told["id"], True, LIMIT_S)
    assert (await ask(south, ino, f"group.{told['id']}"))["state"] == "durable"


async def test_files_that_are_closed_on_both_hosts_complete_a_group(north, south):
    ino = await begin(south, "same_size=yes")
    there = await make(south, ino, b"1", DATA)
    handle, *_ = await south.open(there, 1)  # so it counts no more
    here = await make(north, ino, b"0", DATA)
    while (await ask(north, ino, "group"))["missing_files"] != 1:
        await trio.sleep(0.001)
    assert (await ask(south, ino, "group"))["state"] == "open"
    await south.release(handle)
    for fs in (north, south):
        assert (await durable(fs, ino))["state"] == "durable"
    assert not await undrained(north, here, there)


@pytest.mark.parametrize("options", ["", "commit=explicit,"])
async def test_sizes_that_differ_on_two_hosts(north, south, options):
    ino = await begin(north, options + "same_size=yes")
    await make(north, ino, b"0", DATA)
    await make(south, ino, b"1", DATA + b"more")
    with suppress(FsError):
        await commit(south, ino, 1)
        await commit(north, ino, 0)
    for fs in (north, south):
        with pytest.raises(Invalid, match="bytes, not the"):
            await fs.groups.wait(ino, 0, True, LIMIT_S)


async def test_sizes_of_a_host_that_does_not_answer_at_once(scratch: Path, monkeypatch):
    monkeypatch.setattr(parts, "_AGAIN_S", 0.01)
    async with two_hosts(scratch / "s") as (north, south, cluster):
        services, tries = cluster.calls["south"].services, list[int]()
        files = services[parts.FILES]

        async def late(*args: Any) -> Any:
            tries.append(1)
            if len(tries) < 3:
                raise Unavailable("host south has not answered for 5 s")
            return await files(*args)

        monkeypatch.setitem(services, parts.FILES, late)
        ino = await begin(north, "commit=explicit,same_size=yes")
        for rank, fs in enumerate((north, south)):
            await make(fs, ino, b"%d" % rank, DATA)
        await commit(south, ino, 1)
        await commit(north, ino, 0)
        assert (await durable(south, ino))["state"] == "durable"
        assert len(tries) == 3


@pytest.mark.sweep
@pytest.mark.parametrize("last", [0, 1])
async def test_what_a_group_publishes_is_whole_on_both_hosts(scratch: Path, last: int):
    async with two_hosts(scratch / "s") as hosts:
        north, south, _ = hosts
        ino = await begin(north, "commit=explicit,publish=final")
        files = [await make(fs, ino, b"%d" % rank, DATA) for rank, fs in enumerate(hosts[:2])]
        await commit(hosts[1 - last], ino, 1 - last)
        await commit(hosts[last], ino, last)
        for fs in (north, south):
            assert (await fs.lookup(ROOT_INO, b"final")).ino == ino
            with pytest.raises(NotFound):
                await fs.lookup(ROOT_INO, b"step")
            assert [await read_file(fs, file) for file in files] == [DATA, DATA]
            assert (await durable(fs, ino))["published"]


async def test_a_pending_directory_takes_its_ranks_from_both_hosts(north, south):
    ino = (await north.mkdir(ROOT_INO, b"tmp", 0o755, OWNER)).ino
    await put(north, ino, "pending", "ranks=2,step=7", OWNER)
    there = await make(south, ino, b"1", DATA)
    await south.groups.commit_pending(ino, Commit(1, ((b"1", len(DATA)),)))
    await south.lookup(ROOT_INO, b"tmp")
    with pytest.raises(FsError, match="1 of 2 ranks have not committed"):
        await south.rename(ROOT_INO, b"tmp", ROOT_INO, b"final")
    await make(north, ino, b"0", DATA)
    await north.groups.commit_pending(ino, Commit(0, ((b"0", len(DATA)), (b"1", len(DATA)))))
    await south.rename(ROOT_INO, b"tmp", ROOT_INO, b"final")
    assert (await north.lookup(ROOT_INO, b"final")).ino == ino
    assert await read_file(north, there) == DATA


async def test_one_rank_commits_for_files_of_another_host(north, south):
    """What was not synced there is durable before the commit is."""
    ino = (await north.mkdir(ROOT_INO, b"tmp", 0o755, OWNER)).ino
    await put(north, ino, "pending", "ranks=1", OWNER)
    files = [await make(south, ino, name, DATA) for name in (b"a", b"b")]
    assert set(files) <= set(await stores.numbers(north, b"w"))
    await north.groups.commit_pending(ino, Commit(0, ((b"a", len(DATA)),)))
    assert set(files) & set(await stores.numbers(north, b"w")) == {files[1]}
    await north.groups.commit_pending(ino, Commit(0, again=True))
    assert not set(files) & set(await stores.numbers(north, b"w"))
    more = await make(south, ino, b"c", DATA)
    await north.rename(ROOT_INO, b"tmp", ROOT_INO, b"final")
    assert more not in await stores.numbers(south, b"w")


@pytest.mark.sweep
@pytest.mark.parametrize("how", ["named", "abandoned"])
async def test_a_directory_is_pending_no_more_while_its_files_are_stored(
    cluster, north, south, monkeypatch, how
):
    """By way of the host that does not see to its group, which goes on."""
    real, is_done = cluster.calls["south"].services[parts.STORE], trio.Event()

    async def store(*args: Any) -> Any:
        await is_done.wait()
        return await real(*args)

    monkeypatch.setitem(cluster.calls["south"].services, parts.STORE, store)
    ino = await begin(north, "commit=explicit,pending=yes")
    files = [await make(fs, ino, name, DATA) for fs, name in ((north, b"0"), (south, b"1"))]
    await commit(south, ino, 1)
    await commit(north, ino, 0)
    while {fs.group_table.by_directory[ino].state for fs in (north, south)} != {"draining"}:
        await trio.sleep(0.001)
    if how == "named":
        await south.lookup(ROOT_INO, b"step")
        await south.rename(ROOT_INO, b"step", ROOT_INO, b"final")
    else:
        await south.groups.abandon(ino, OWNER)
    is_done.set()
    for fs in (north, south):
        assert (await durable(fs, ino))["state"] == "durable"
    assert not await undrained(north, *files)


async def test_a_file_that_is_written_on_another_host_is_not_closed(north, south):

    async def missing(count: int, *hosts: Filesystem) -> None:
        for fs in hosts:
            while (await ask(fs, ino, "group"))["missing_files"] != count:
                await trio.sleep(0.001)

    ino = await begin(north, "same_size=no")
    there = await make(south, ino, b"1", DATA)
    await missing(1, north)
    handle, *_ = await north.open(there, os.O_WRONLY)
    await missing(2, north, south)
    await north.write(handle, 0, OTHER)
    await north.release(handle)
    await missing(1, north, south)
    await make(north, ino, b"0", DATA)
    assert (await durable(south, ino))["state"] == "durable"
    assert await read_file(south, there) == OTHER


async def test_a_host_waits_for_who_sees_to_a_group_whose_time_is_over(north, south):
    """It does not look at it again and again."""
    ino = await begin(north, "commit=explicit")
    group = south.group_table.by_directory[ino]
    before, options = group.record, group.record.options
    group.record = before._replace(options=options._replace(timeout_ms=1), created_ns=0)
    for rank in range(2):
        group.commit(rank)  # which north has not seen to yet
    assert group.deadline() < trio.current_time()
    assert await south.group_life.work() > 0 and group.is_open
    group.record = before
    await south.groups.cancel(ino)


@pytest.mark.parametrize("how", ["named", "published"])
async def test_a_host_that_was_not_heard_of_yet_is_no_dead_one(cluster, north, south, how):
    ino = (await north.mkdir(ROOT_INO, b"tmp", 0o755, OWNER)).ino
    there = await make(south, ino, b"1", DATA)
    cluster.roles["north"].live -= {south.store.engine.host}
    if how == "named":
        await north.rename(ROOT_INO, b"tmp", ROOT_INO, b"final")
    else:
        await put(north, ino, "publish-as", json.dumps({"final": "final"}), ADMIN)
    assert there not in await stores.numbers(north, b"w")
    assert (await south.lookup(ROOT_INO, b"final")).ino == ino


async def test_a_group_is_cancelled_from_the_other_host(north, south):
    ino = await begin(north, "commit=explicit")
    files = [await make(fs, ino, b"f", DATA) for fs in (north,)]
    files.append(await make(south, ino, b"g", DATA))
    await south.groups.cancel(ino, reason="enough")
    for fs in (north, south):
        with pytest.raises(GroupCancelled, match="enough"):
            await fs.groups.wait(ino, 0, True, LIMIT_S)
    await stores.drained(north, files[0])
    await stores.drained(south, files[1])


async def test_ranks_of_one_job_live_on_both_hosts(north: Filesystem, south: Filesystem) -> None:
    ino = await begin(north, "commit=explicit,job=one")
    await south.groups.join(ino, 0, 1, ALIVE)
    with pytest.raises(Invalid, match="joined on another host"):
        await north.groups.join(ino, 0, 1, ALIVE)
    with pytest.raises(Invalid, match="ranks 1 live"):
        await put(north, ino, "group", "name=step,ranks=2,commit=explicit,job=two", OWNER)
    told = (await ask(north, ino, "group"))["members"]
    assert [one["state"] for one in told] == ["missing", "joined"]


# --- what is equal on both hosts ---

PART = 64 << 10
PARTS = [bytes([number]) * 5 + os.urandom(PART - 5) for number in range(16)]
SAME, MORE = b"".join(PARTS[:12]), b"".join(PARTS[8:])


async def saved(
    north: Filesystem, south: Filesystem, here: bytes, there: bytes, name: bytes = b"step"
) -> tuple[int, int]:
    """A group with a file of each host, to which both have committed: its directory, and the file
    of south."""
    ino = await begin(north, "commit=explicit,dedup=64KiB", name)
    await make(north, ino, b"0", here)
    file = await make(south, ino, b"1", there)
    await commit(south, ino, 1)
    await commit(north, ino, 0)
    return ino, file


async def kept_no_more(fs: Filesystem) -> None:
    """The lists that hosts have made for all are dropped."""
    while await stores.numbers(fs, b"y"):
        await trio.sleep(0.005)


@pytest.mark.sweep
async def test_what_both_hosts_have_is_stored_once_by_both(north, south):
    ino, there = await saved(north, south, SAME, MORE)
    told = await durable(north, ino)
    assert (told["distinct_bytes"], told["duplicate_bytes"]) == (16 * PART, 4 * PART)
    assert 16 * PART <= told["stored_bytes"] < 16 * PART * 1.01
    assert sum(told["plan"]["servers"].values()) == told["stored_bytes"]
    assert not await undrained(north, there)
    for fs in (north, south):
        assert fs.group_drain.status()["stored_bytes"] > 2 * PART
        assert await read_file(fs, there) == MORE
    await kept_no_more(north)
    again, _ = await saved(north, south, SAME, SAME, b"again")
    assert (await durable(south, again))["found_bytes"] == 2 * len(SAME)


async def test_a_host_with_a_slow_link_stores_less(scratch: Path):
    async with cluster_of(scratch / "s") as cluster:
        cluster.bandwidths = {"north": 1 << 30, "south": 1}
        async with cluster.mounted("north") as north, cluster.mounted("south") as south:
            ino, there = await saved(north, south, SAME, SAME)
            assert (await durable(south, ino))["distinct_bytes"] == len(SAME)
            assert south.group_drain.status()["stored_bytes"] == 0
            assert await read_file(south, there) == SAME


@pytest.mark.sweep
@pytest.mark.parametrize("service", [joint.OFFER, joint.KEEP, parts.STORE])
async def test_a_host_fails_on_the_way(scratch: Path, monkeypatch, service: str):
    """Others store what it was to, and it what is its own, as soon as it hears again."""
    monkeypatch.setattr(joint, "_ASKED_S", 0.05)
    async with two_hosts(scratch / "s") as (north, south, cluster):
        real = cluster.calls["south"].services[service]

        async def fail(*args: Any) -> Any:
            cluster.silent.add("south")
            if service != joint.OFFER:
                await real(*args)  # which nobody hears of
            raise Unavailable("host south is not there")

        monkeypatch.setitem(cluster.calls["south"].services, service, fail)
        ino, there = await saved(north, south, SAME, MORE)
        assert (await durable(south, ino))["state"] == "durable"
        assert not await undrained(north, there)
        for fs in (north, south):
            assert await read_file(fs, there) == MORE
        await kept_no_more(north)
        cluster.silent.clear()


async def test_chunks_that_are_kept_of_a_group_that_ends_meanwhile(scratch: Path, monkeypatch):
    monkeypatch.setattr(storing, "_BATCH_CHUNKS", 1)
    async with two_hosts(scratch / "s") as (north, south, _):
        ended: list[int] = []

        def end() -> None:
            """As both do when they hear that it has ended."""
            group = north.group_table.by_directory[ino].record.id
            ended.append(group)
            for fs in (north, south):
                fs.group_drain.let_go(group)

        ino = await begin(north, "commit=explicit,dedup=64KiB")
        with armed("vfs.group.kept", end):
            await make(north, ino, b"0", SAME)
            await make(south, ino, b"1", SAME)
            await commit(south, ino, 1)
            await commit(north, ino, 0)
            assert (await durable(south, ino))["state"] == "durable"
        assert len(ended) > 2
        for fs in (north, south):
            await kept_no_more(fs)


async def test_who_waits_to_keep_chunks_of_a_group_that_ends_keeps_none(north, south, monkeypatch):
    drain, ended = south.group_drain, list[int]()
    keep, store = drain.keep, drain.storing.keep

    async def keep_twice(group: int, *args: Any) -> set[bytes]:
        async def end(*others: Any) -> set[bytes]:
            await trio.testing.wait_all_tasks_blocked()  # the other one waits for this
            drain.let_go(group)
            ended.append(group)
            return await store(*others)

        monkeypatch.setattr(drain.storing, "keep", end)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep, group, *args)
            return await keep(group, *args)

    monkeypatch.setattr(drain, "keep", keep_twice)
    ino, there = await saved(north, south, SAME, MORE)
    assert (await durable(north, ino))["state"] == "durable"
    assert len(ended) == 1
    assert await read_file(north, there) == MORE
    await kept_no_more(north)


async def test_chunks_that_are_kept_by_a_host_that_dies(scratch: Path):
    async with cluster_of(scratch / "s") as cluster, cluster.mounted("south") as south:
        with suppress(SimulatedCrash):
            async with cluster.mounted("north") as north:
                faults.arm("vfs.group.kept", crash)
                ino, there = await saved(north, south, SAME, SAME)
                await trio.sleep_forever()
        faults.disarm_all()
        with pytest.raises(Unavailable, match="host north"):
            await south.groups.wait(ino, 0, True, LIMIT_S)
        assert not await undrained(south, there)
        async with cluster.mounted("north") as north:
            await kept_no_more(north)
            assert await read_file(north, there) == SAME


# --- hosts that die ---


async def test_the_files_of_a_host_that_dies_before_all_have_committed(cluster, north):
    ino = await begin(north, "commit=explicit,publish=final")
    with pytest.raises(SimulatedCrash):
        async with cluster.mounted("south") as south:
            there = await make(south, ino, b"1", DATA)
            await commit(south, ino, 1)
            raise SimulatedCrash
    with pytest.raises(Unavailable, match="host south ended, which had files of it"):
        await north.groups.wait(ino, 0, True, LIMIT_S)
    await put(north, ino, "group", "", OWNER)
    async with cluster.mounted("south") as south:
        await stores.drained(south, there)
        assert await read_file(north, there) == DATA


async def test_what_a_dead_host_has_not_drained_is_not_published(cluster, north):
    ino = (await north.mkdir(ROOT_INO, b"tmp", 0o755, OWNER)).ino
    with pytest.raises(SimulatedCrash):
        async with cluster.mounted("south") as south:
            there = await make(south, ino, b"1", DATA)
            await south.writeback.sync_files([there])
            raise SimulatedCrash
    with pytest.raises(Unavailable, match="/tmp/1: its newest bytes are on host south"):
        await put(north, ino, "publish-as", json.dumps({"final": "final"}), ADMIN)
    await north.rename(ROOT_INO, b"tmp", ROOT_INO, b"other")
    async with cluster.mounted("south"):
        await put(north, ino, "publish-as", json.dumps({"final": "final"}), ADMIN)
        assert (await north.lookup(ROOT_INO, b"final")).ino == ino


async def test_a_rank_whose_host_dies_may_come_again_elsewhere(cluster, north):
    for grace, outcome in ("60s", None), ("0s", MemberDied):
        ino = (await north.mkdir(ROOT_INO, grace.encode(), 0o755, OWNER)).ino
        text = f"name=step,ranks=2,commit=explicit,grace={grace}"
        await put(north, ino, "group", text, OWNER)
        with pytest.raises(SimulatedCrash):
            async with cluster.mounted("south") as south:
                await south.groups.join(ino, 0, 1, ALIVE)
                raise SimulatedCrash
        if outcome is None:
            while 1 not in (await north.group_table.find(ino)).away:
                await trio.sleep(0.001)
            await north.groups.join(ino, 0, 1, ALIVE)
        else:
            with pytest.raises(outcome, match="rank 1"):
                await north.groups.wait(ino, 0, True, LIMIT_S)


@pytest.mark.sweep
@pytest.mark.parametrize("point", ["", "vfs.group.committed", "vfs.group.published"])
async def test_the_host_that_sees_to_a_group_dies(scratch: Path, point: str):
    """Who has the role goes on with it."""
    async with cluster_of(scratch / "s") as cluster, cluster.mounted("south") as south:
        with suppress(SimulatedCrash):
            async with cluster.mounted("north") as north:
                ino = await begin(north, "commit=explicit,publish=final")
                there = await make(south, ino, b"1", DATA)
                if not point:
                    raise SimulatedCrash
                faults.arm(point, crash)
                await commit(south, ino, 1)
                await commit(north, ino, 0)
                await trio.sleep_forever()
        faults.disarm_all()
        if not point:
            await commit(south, ino, 1)
            await commit(south, ino, 0)
        assert (await durable(south, ino))["published"]
        assert not await undrained(south, there)
        assert (await south.lookup(ROOT_INO, b"final")).ino == ino
        async with cluster.mounted("north") as north:
            assert (await durable(north, ino))["state"] == "durable"
            assert await read_file(north, there) == DATA


async def test_a_host_dies_before_its_files_are_drained(cluster, north):
    with pytest.raises(SimulatedCrash):
        async with cluster.mounted("south") as south:
            ino, there = await _committed_unasked(cluster, north, south)
            raise SimulatedCrash
    with pytest.raises(Unavailable, match="its files on host south were not on the data"):
        await north.groups.wait(ino, 0, True, LIMIT_S)
    cluster.silent.clear()
    async with cluster.mounted("south") as south:
        await stores.drained(south, there)
        assert await read_file(north, there) == OTHER


async def test_a_host_that_is_not_asked_stores_by_itself(scratch: Path, monkeypatch):
    monkeypatch.setattr(joint, "_ASKED_S", 0.1)
    async with two_hosts(scratch / "s") as (north, south, cluster):
        ino, there = await _committed_unasked(cluster, north, south)
        assert (await durable(south, ino))["state"] == "durable"
        assert not await undrained(north, there)
        cluster.silent.clear()


async def _committed_unasked(
    cluster: Cluster, north: Filesystem, south: Filesystem
) -> tuple[int, int]:
    """A group to which both have committed, of which south's files are not asked for."""
    ino = await begin(north, "commit=explicit")
    await make(north, ino, b"0", DATA)
    there = await make(south, ino, b"1", OTHER)
    await commit(south, ino, 1)
    cluster.silent.add("south")
    await commit(north, ino, 0)
    return ino, there


def crash() -> None:
    raise SimulatedCrash
