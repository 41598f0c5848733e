"""Data servers that fail, fill up, vanish, are slow or are not what they should be."""

import errno
import json
import logging
import os
import random
import re
import subprocess
import threading
from pathlib import Path

import pytest
import trio
import trio.testing

from aifs.core.errors import NoSpace, QuotaExceeded, StoreError, Unavailable
from aifs.data.objects.object_set import ObjectSet, delete_batch
from aifs.data.servers import Servers
from aifs.layout.striped import Striped
from tests.support.data_servers import (
    STORE,
    data_servers,
    failing,
    hooked,
    list_window,
    make_server,
    make_table,
    open_below,
    opened,
)
from tests.support.powercut import PowerCut

INO, OID = 7, 0x101
MIB = 1 << 20
FOUR = Striped(4096, (0, 1, 2, 3))
WAIT_S = 60  # for what must happen; a test that waits so long fails


@pytest.fixture
def servers(tmp_path):
    """Four servers under a hook, so that all calls go to threads and all descriptors have paths."""
    with hooked(), data_servers(tmp_path) as servers:
        yield servers


def new_objects(servers: Servers, layout: Striped = FOUR, oid: int = OID) -> ObjectSet:
    return ObjectSet(servers, layout, INO, oid, new=True)


def messages(caplog, level: int) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == level]


# --- errors ---------------------------------------------------------------------------------------


async def test_a_failing_server_concerns_what_lies_on_it_alone(servers, caplog):
    caplog.set_level(logging.INFO)
    objects, other = new_objects(servers), new_objects(servers, Striped(4096, (0, 2, 3)), OID + 1)
    await objects.write(0, b"a" * 16384)
    with failing(("read_into", "write_at"), servers[1].address) as failed:
        for _ in range(3):
            with pytest.raises(
                Unavailable,
                match=f"^data server 1 .*: write {servers[1].where((INO, OID))}: .*Errno 5",
            ):
                await objects.write(0, b"b" * 16384)
            with pytest.raises(Unavailable, match="^data server 1 .*: read "):
                await objects.read(4096, 100, 16384, True)
        assert failed.count("write_at") == failed.count("read_into") == 3
        assert [server.state for server in servers.values()] == ["ok", "failing", "ok", "ok"]
        assert "Errno 5" in servers[1].last_error
        assert servers.usable() == (0, 2, 3)
        await other.write(0, b"c" * 16384)
        assert await other.read(0, 16384, 16384, True) == b"c" * 16384
        assert await objects.read(0, 4096, 16384, True) == b"b" * 4096
    (status,) = [entry for entry in await servers.status() if entry["state"] == "failing"]
    assert status["id"] == 1
    await objects.write(0, b"d" * 16384)
    assert servers[1].state == "failing"  # reading has not been tried again
    assert await objects.read(4096, 4096, 16384, True) == b"d" * 4096
    assert servers[1].state == "ok"
    assert servers.usable() == (0, 1, 2, 3)
    assert len(messages(caplog, logging.WARNING)) == 1
    assert re.fullmatch(
        r"data server 1 \(.*\) is failing: .*", messages(caplog, logging.WARNING)[0]
    )
    assert re.fullmatch(r"data server 1 \(.*\) works again", messages(caplog, logging.INFO)[0])
    await servers.cache.settle()  # what is read ahead holds descriptors
    objects.close()
    other.close()


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, NoSpace), (errno.EDQUOT, QuotaExceeded)]
)
async def test_a_full_server_is_not_a_failing_one(servers, number, kind):
    objects = new_objects(servers)
    await objects.write(0, b"a" * 16384)
    for op in ("write_at", "truncate", "sync_file"):
        with failing(op, servers[2].address, number) as failed, pytest.raises(kind):
            await objects.write(16384, b"b" * 16384)
            await objects.settle(100_000)
            await objects.sync()
        assert failed == [op]
    with failing("open_file", servers[2].address, number) as failed, pytest.raises(kind):
        await new_objects(servers, oid=OID + 1).write(8192, b"x")
    assert failed == ["open_file"]
    assert servers[2].state == "ok"
    assert await objects.read(0, 16384, 16384, True) == b"a" * 16384
    objects.close()


async def test_after_a_failed_write_the_objects_can_be_settled(servers):
    objects = new_objects(servers)
    await objects.write(0, b"a" * 16384)
    with failing("write_at", servers[3].address, errno.ENOSPC), pytest.raises(NoSpace):
        await objects.write(16384, b"b" * 16384)
    await objects.settle(16384)
    assert [os.path.getsize(server.where((INO, OID))) for server in servers.values()] == [4096] * 4
    assert await objects.read(0, 16384, 16384, True) == b"a" * 16384
    objects.close()


async def test_lost_bytes_are_not_forgotten_by_the_next_sync(servers):
    objects = new_objects(servers)
    await objects.write(0, b"a" * 16384)
    with failing("sync_file", servers[1].address), pytest.raises(Unavailable):
        await objects.sync()
    with pytest.raises(Unavailable, match="bytes were lost earlier: data server 1"):
        await objects.sync()
    await objects.settle(0)
    await objects.sync()
    objects.close()


async def test_names_that_could_not_be_synced_are_tried_again(servers):
    objects = new_objects(servers)
    await objects.write(0, b"a" * 16384)
    with failing("sync_dir", servers[1].address) as failed, pytest.raises(Unavailable):
        await objects.sync()
    assert failed
    calls = []
    with hooked(lambda op, path: calls.append((op, path.startswith(servers[1].address)))):
        await objects.sync()
    assert ("sync_dir", True) in calls
    assert servers[1].state == "ok"
    objects.close()


async def test_deletions_that_fail_are_named(servers):
    for oid in (OID, OID + 1, OID + 2):
        objects = new_objects(servers, FOUR if oid != OID + 1 else Striped(4096, (0, 1)), oid)
        await objects.write(0, b"x" * 16384)
        objects.close()
    doomed = {OID: (INO, FOUR), OID + 1: (INO, Striped(4096, (0, 1))), OID + 2: (INO, FOUR)}
    with failing("unlink", servers[2].address):
        failed = await delete_batch(servers, doomed)
    assert set(failed) == {OID, OID + 2}
    assert sorted(await list_window(servers, 0, 1000)) == [(2, INO, OID), (2, INO, OID + 2)]
    with failing("sync_dir", servers[2].address):
        assert set(await delete_batch(servers, {OID + 2: doomed[OID + 2]})) == {OID + 2}
    assert await delete_batch(servers, doomed) == {}
    assert await list_window(servers, 0, 1000) == []


async def test_a_server_that_is_not_registered(servers):
    objects = new_objects(servers, Striped(4096, (0, 8)))
    for use in (objects.read(4096, 10, 8192), objects.write(4096, b"x"), objects.settle(8192)):
        with pytest.raises(Unavailable, match="^data server 8 is not registered"):
            await use
    objects.close()
    assert servers.find(8) is None
    # What lies there is nobody's concern.
    assert await delete_batch(servers, {OID: (INO, Striped(4096, (0, 8)))}) == {}


# --- directories that vanish ----------------------------------------------------------------------


@pytest.mark.parametrize("replacement", ["nothing", "empty", "another server"])
async def test_a_vanished_directory_is_an_error_and_never_made_anew(servers, tmp_path, replacement):
    """As after an unmount: what is below the mount point then is another directory, or none."""
    objects = new_objects(servers)
    await objects.write(0, b"a" * 16384)
    await objects.settle(16384)
    path = Path(servers[1].address)
    path.rename(tmp_path / "away")
    if replacement == "empty":
        path.mkdir()
    elif replacement == "another server":
        make_server(path, 5)
    before = sorted(tmp_path.rglob("*"))
    later = ObjectSet(servers, FOUR, INO, OID)
    with pytest.raises(Unavailable):
        await later.read(4096, 10, 16384, False)  # not zeros
    with pytest.raises(Unavailable):
        await later.write(4096, b"x")
    with pytest.raises(Unavailable):
        await new_objects(servers, oid=OID + 0x1000).write(4096, b"x")
    with pytest.raises(Unavailable):
        await list_window(servers, 0, 1000)
    assert set(await delete_batch(servers, {OID + 5: (INO, FOUR)})) == {OID + 5}
    with pytest.raises(Unavailable):
        await servers.sync_all()
    assert sorted(tmp_path.rglob("*")) == before
    assert servers[1].state == "failing"
    if replacement != "empty":
        assert servers.statfs().total > 0
    # What was open when it went away still works; and when the directory is back, so does all else.
    assert await objects.read(0, 16384, 16384, True) == b"a" * 16384
    if replacement == "another server":
        (path / ".aifs").unlink()
    if replacement != "nothing":
        path.rmdir()
    (tmp_path / "away").rename(path)
    assert await later.read(0, 16384, 16384, True) == b"a" * 16384
    objects.close()
    later.close()


# --- slow servers ---------------------------------------------------------------------------------


async def test_servers_work_in_parallel_for_one_request(servers):
    objects = new_objects(servers)
    await objects.write(0, b"a" * 16384)
    await objects.settle(16384)
    meeting = threading.Barrier(4)

    def meet(op: str, path: str) -> None:
        if op in ("read_into", "write_at", "sync_file"):
            meeting.wait(WAIT_S)  # BrokenBarrierError unless all four are under way at once

    with hooked(meet):
        assert await objects.read(0, 16384, 16384, True) == b"a" * 16384
        await objects.write(0, b"b" * 16384)
        await objects.sync()
    assert not meeting.broken
    objects.close()


async def test_requests_to_one_server_overlap(servers):
    objects = new_objects(servers, Striped(4096, (0,)))
    await objects.write(0, b"a" * 16384)
    meeting = threading.Barrier(2)

    def meet(op: str, path: str) -> None:
        if op == "read_into":
            meeting.wait(WAIT_S)

    async def read(offset: int) -> None:
        assert await objects.read(offset, 4096, 16384, True) == b"a" * 4096

    with hooked(meet):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read, 0)
            nursery.start_soon(read, 8192)
    assert not meeting.broken
    objects.close()


class Stall:
    """Operations ``op`` below ``path`` wait until ``release``."""

    def __init__(self, op: str, path: str) -> None:
        self._op, self._path = op, path
        self._token = trio.lowlevel.current_trio_token()
        self.arrived = trio.Event()
        self._go = threading.Event()
        self.count = 0

    def __call__(self, op: str, path: str) -> None:
        if op == self._op and path.startswith(self._path):
            self.count += 1
            self._token.run_sync_soon(self.arrived.set)
            assert self._go.wait(WAIT_S)

    def release(self) -> None:
        self._go.set()


async def test_a_server_that_hangs_does_not_hold_up_others(servers):
    """Not even with more requests to it than there are threads."""
    objects = new_objects(servers)
    await objects.write(0, b"a" * 16384)
    stall = Stall("read_into", servers[1].address)
    done = []

    async def read(offset: int) -> None:
        await objects.read(offset, 4096, 16384, True)
        done.append(offset)

    with hooked(stall):
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(read, 4096)
            await stall.arrived.wait()
            async with trio.open_nursery() as others:
                for offset in (0, 8192, 12288) * 5:
                    others.start_soon(read, offset)
            assert sorted(done) == [0] * 5 + [8192] * 5 + [12288] * 5
            stall.release()
    assert done.count(4096) == 20
    objects.close()


async def test_a_cancelled_read_leaves_its_thread_buffer_and_descriptor(servers, tmp_path):
    """It ends at once; neither the buffer nor the descriptor is given to others while the thread
    uses them."""
    objects = new_objects(servers, Striped(MIB, (1,)))
    await objects.write(0, b"a" * MIB)
    stall = Stall("read_into", servers[1].address)
    with hooked(stall):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(objects.read, 0, MIB, MIB, False)
            await stall.arrived.wait()
            nursery.cancel_scope.cancel()
        objects.close()
        await trio.testing.wait_all_tasks_blocked()
        assert open_below(tmp_path) == [servers[1].where((INO, OID))]
        others = [servers.buffers.take(MIB) for _ in range(40)]
        for other in others:
            other[:] = b"b" * MIB
        stall.release()
        with trio.fail_after(60):
            while open_below(tmp_path):  # until the thread has ended
                await trio.sleep(0.01)
    assert all(bytes(other) == b"b" * MIB for other in others)
    servers.close()


async def test_a_change_during_a_sync_is_not_forgotten(servers):
    objects = new_objects(servers, Striped(4096, (1,)))
    await objects.write(0, b"a")
    stall = Stall("sync_file", servers[1].address)
    with hooked(stall):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(objects.sync)
            await stall.arrived.wait()
            await objects.write(0, b"b")
            stall.release()
    calls = []
    with hooked(lambda op, path: calls.append(op)):
        await objects.sync()
    assert "sync_file" in calls
    objects.close()


async def test_a_second_sync_does_not_return_before_the_bytes_are_durable(servers):
    objects = new_objects(servers, Striped(4096, (1,)))
    await objects.write(0, b"a")
    stall = Stall("sync_file", servers[1].address)
    returned = []

    async def sync() -> None:
        await objects.sync()
        returned.append(True)

    with hooked(stall):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sync)
            await stall.arrived.wait()
            nursery.start_soon(sync)
            await trio.testing.wait_all_tasks_blocked()
            assert returned == []
            stall.release()
    assert stall.count == 2
    objects.close()


async def test_an_unexpected_error_reaches_the_caller_and_ends_no_thread(servers):
    objects = new_objects(servers)
    await objects.write(0, b"a" * 16384)

    def explode(op: str, path: str) -> None:
        if op == "read_into":
            raise RuntimeError("not an OSError")

    for _ in range(20):
        with hooked(explode), pytest.raises(RuntimeError, match="not an OSError"):
            await objects.read(0, 16384, 16384, True)
    assert await objects.read(0, 16384, 16384, True) == b"a" * 16384
    objects.close()


# --- identity -------------------------------------------------------------------------------------


def remove_marker(path: Path) -> None:
    (path / ".aifs").unlink()


def remove_directory(path: Path) -> None:
    remove_marker(path)
    path.rmdir()


def make_file(path: Path) -> None:
    remove_directory(path)
    path.write_bytes(b"")


def change(field: str, value: object):
    def edit(path: Path) -> None:
        marker = json.loads((path / ".aifs").read_bytes())
        (path / ".aifs").write_text(json.dumps(marker | {field: value}))

    return edit


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (remove_marker, "it has no marker .aifs"),
        (remove_directory, "there is no such directory; is its filesystem mounted"),
        (make_file, "there is no such directory"),
        (change("store", "other"), "its marker says data 2 of store other, not data 2 of store"),
        (change("role", "burst"), "its marker says burst 2"),
        (change("id", 1), "its marker says data 1 of store"),
        (change("format", "aifs 9"), "format 'aifs 9'"),
    ],
)
def test_a_wrong_directory_is_refused_by_name(tmp_path, spoil, complaint):
    table = make_table(tmp_path, 4)
    spoil(Path(table[2]))
    servers = Servers(table, STORE)
    with pytest.raises(StoreError, match=f"^data server 2: {table[2]}.*{complaint}"):
        servers.check_identity()


def test_one_directory_may_not_serve_twice(tmp_path):
    table = make_table(tmp_path, 2)
    (tmp_path / "alias").symlink_to(table[0])
    servers = Servers(table | {2: f"{tmp_path}/alias"}, STORE)
    with pytest.raises(
        StoreError,
        match=f"^data server 2: .*/alias is the directory of data server 0 .{table[0]}. too",
    ):
        servers.check_identity()


@pytest.fixture
def read_only_servers(tmp_path):
    """Two servers, the second on a filesystem that is mounted read-only."""
    if os.getuid() != 0:
        pytest.skip("needs root to mount a filesystem")
    mountpoint = tmp_path / "disk"
    mountpoint.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", mountpoint], check=True)
    try:
        table = {0: make_server(tmp_path / "server0", 0), 1: make_server(mountpoint / "server1", 1)}
        with opened(table) as servers:

            async def fill() -> None:
                objects = new_objects(servers, Striped(4096, (0, 1)))
                await objects.write(0, b"a" * 8192)
                objects.close()

            trio.run(fill)
        subprocess.run(["mount", "-o", "remount,ro", mountpoint], check=True)
        yield table
    finally:
        subprocess.run(["umount", mountpoint], check=True)


async def test_a_read_only_server_serves_read_only_mounts_alone(read_only_servers):
    servers = Servers(read_only_servers, STORE)
    with pytest.raises(StoreError, match=r"^data server 1: .*cannot be written to; .*-o ro"):
        servers.check_identity()
    servers.check_identity(read_only=True)
    objects = ObjectSet(servers, Striped(4096, (0, 1)), INO, OID)
    assert await objects.read(0, 8192, 8192, True) == b"a" * 8192
    objects.close()
    servers.close()


async def test_a_server_is_added_while_others_work(servers, tmp_path):
    with pytest.raises(StoreError, match="^data server 9: .*there is no such directory"):
        await servers.make_ready(9, f"{tmp_path}/nine")
    assert len(servers) == 4
    servers.take_in(await servers.make_ready(9, make_server(tmp_path / "nine", 9)))
    assert servers.usable() == (0, 1, 2, 3, 9)
    objects = new_objects(servers, Striped(4096, (9, 0)))
    await objects.write(0, b"a" * 8192)
    assert await objects.read(0, 8192, 8192, True) == b"a" * 8192
    objects.close()


# --- power cuts -----------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(12))
def test_what_was_synced_survives_a_power_cut(tmp_path, seed):
    """Files that share directories are written, synced, left unsynced and deleted; then the power
    goes."""
    rng = random.Random(seed)
    root = tmp_path / "store"
    root.mkdir()
    table = make_table(root, 3)
    synced: dict[int, bytes] = {}
    deleted: set[int] = set()

    async def live() -> None:
        with opened(table) as servers:
            oids = [base + step for base in (0x0F0, 0x1F0, 0x1FFF0) for step in range(0, 40, 9)]
            rng.shuffle(oids)
            layout = Striped(4096, (0, 1, 2))
            for oid in oids:
                objects = ObjectSet(servers, layout, INO, oid, new=True)
                data = rng.randbytes(rng.randrange(1, 30_000))
                await objects.write(0, data)
                if rng.random() < 0.6:
                    await objects.settle(len(data))
                    await objects.sync()
                    synced[oid] = data
                objects.close()
                if synced and rng.random() < 0.3:
                    victim = rng.choice(sorted(synced))
                    assert await delete_batch(servers, {victim: (INO, layout)}) == {}
                    del synced[victim]
                    deleted.add(victim)

    async def check(after: Path) -> None:
        with opened({number: f"{after}/server{number}" for number in table}) as servers:
            layout = Striped(4096, (0, 1, 2))
            for oid, data in synced.items():
                objects = ObjectSet(servers, layout, INO, oid)
                assert await objects.read(0, len(data), len(data), True) == data
                objects.close()
            assert not deleted & {oid for _, _, oid in await list_window(servers, 0, 1 << 20)}

    with PowerCut(root) as cut:
        trio.run(live)
        for number in range(4):
            cut.materialise(tmp_path / f"after{number}", rng)
    assert synced
    assert deleted
    for number in range(4):
        trio.run(check, tmp_path / f"after{number}")


@pytest.mark.parametrize("seed", range(6))
def test_settle_and_sync_make_the_work_of_a_dead_process_durable(tmp_path, seed):
    """Killed before it synced anything: the next process settles, then the power goes."""
    rng = random.Random(seed)
    root = tmp_path / "store"
    root.mkdir()
    table = make_table(root, 3)
    layout = Striped(4096, (2, 0, 1))
    data = rng.randbytes(50_000)

    async def write() -> None:
        with opened(table) as servers:
            objects = ObjectSet(servers, layout, INO, OID, new=True)
            await objects.write(0, data)
            objects.close()

    async def recover() -> None:
        with opened(table) as servers:
            objects = ObjectSet(servers, layout, INO, OID)
            await objects.settle(40_000)
            await objects.sync()
            objects.close()

    async def check(after: Path) -> None:
        with opened({number: f"{after}/server{number}" for number in table}) as servers:
            objects = ObjectSet(servers, layout, INO, OID)
            assert await objects.read(0, 40_000, 40_000, True) == data[:40_000]
            for index, number in enumerate(layout.servers):
                path = servers[number].where((INO, OID))
                assert os.path.getsize(path) == layout.object_length(index, 40_000)
            objects.close()

    with PowerCut(root) as cut:
        trio.run(write)
        trio.run(recover)
        cut.materialise(tmp_path / "after", rng)
    trio.run(check, tmp_path / "after")
