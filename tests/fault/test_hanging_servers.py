"""A data server that does not answer stops nobody else; and what it does when it answers at last,
long after, harms nobody.
"""

import os
import re
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from aifs.burst import queue
from aifs.core.errors import StoreBusy, StoreError, Unavailable
from aifs.core.faults import SimulatedCrash
from aifs.data import patience
from aifs.data.objects.columns import Columns
from aifs.data.objects.object_set import ObjectSet
from aifs.data.server import DataServer
from aifs.files.types import SetAttr
from aifs.layout.placement import DRAINING
from aifs.layout.striped import Striped
from aifs.meta import chunks
from aifs.meta.backup import newest, parse_name
from aifs.store import backup
from aifs.upkeep import scrub
from aifs.vfs import open_filesystem
from aifs.vfs.filesystem import Filesystem
from tests.support import modes, stores
from tests.support.data_servers import hooked, open_below
from tests.support.hanging import ALL, WAIT_S, answered, hanging, until
from tests.support.stores import drained, moved_out, overwrite, read_file, write_file

SETTINGS = (
    modes.ON
    | modes.STRIPED
    | {
        "data.timeout": "100ms",
        "layout.inline_limit": 0,
        "burst.stage_for_write": 0,
    }
)
MODES = {
    "plain": {},
    "replicas": modes.REPLICAS,
    "coded": modes.CODED,
    "interleaved": {"layout.kind": "interleaved"},
    "interleaved-replicas": modes.REPLICAS | {"layout.kind": "interleaved"},
    "interleaved-coded": modes.CODED | {"layout.kind": "interleaved"},
}
SERVERS = 3
BAD = 1
OID = 1 << 40  # no file's
SMALL = 3000  # many fit into a container


@pytest.fixture(autouse=True)
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """So that the paths of all descriptors are known, and everything is done by workers; and failed
    drains are soon tried again."""
    monkeypatch.setattr(queue, "_BACK_OFF_MIN_S", 0.05)
    with hooked():
        yield


@asynccontextmanager
async def opened(
    directory: Path,
    mode: str,
    settings: dict[str, object] | None = None,
    sound: bool = True,
    servers: int = SERVERS,
) -> AsyncIterator[Filesystem]:
    """``sound``: the server answers when this ends. However slow the machine is, the others do not
    seem to hang."""
    settings = MODES[mode] | (settings or {})
    async with stores.opened(
        directory, settings, base=SETTINGS, servers=servers, sound=sound
    ) as fs:
        for each in fs.store.servers.capacity():
            if each.id != BAD:
                each.workers.patience.configured_s = patience.FOR_EVER
        yield fs
        if sound:
            server(fs).workers.patience.configured_s = patience.FOR_EVER


def data_of(name: bytes, size: int) -> bytes:
    return name * (size // len(name)) + b"end"


async def write_some(fs: Filesystem, *names: bytes, size: int = 300_000) -> dict[int, bytes]:
    return {await write_file(fs, name, data_of(name, size)): data_of(name, size) for name in names}


async def check(fs: Filesystem, contents: dict[int, bytes]) -> None:
    for ino, data in contents.items():
        assert await read_file(fs, ino) == data


async def whole(fs: Filesystem) -> None:
    """Nothing is due any more."""
    fs.rebuild.look()
    while not (fs.rebuild.idle and not fs.rebuild.status()["failing_objects"]):
        fs.damage.due()
        await fs.rebuild.news()


def server(fs: Filesystem, number: int = BAD):
    return fs.store.servers[number]


# --- all that goes on -----------------------------------------------------------------------------


def longer(*values: str) -> list[object]:
    return [pytest.param(value, marks=pytest.mark.long) for value in values]


def cases() -> Iterator[object]:
    chosen = {("coded", "sync_file"), ("interleaved", "write_at"), ("plain", "open_file")}
    for mode in MODES:
        yield pytest.param(mode, ALL, id=f"{mode}-all")
        for op in ("open_file", "write_at", "sync_file", "sync_dir"):  # nothing is cut there
            marks = [] if (mode, op) in chosen else pytest.mark.long
            yield pytest.param(mode, (op,), id=f"{mode}-{op}", marks=marks)


@pytest.mark.sweep
@pytest.mark.parametrize(("mode", "ops"), list(cases()))
async def test_others_go_on_and_what_lands_late_harms_nobody(
    directory: Path, mode: str, ops: tuple[str, ...]
) -> None:
    async with opened(directory, mode) as fs:
        before = await write_some(fs, b"before")
        await moved_out(fs, *before)
        doomed = await write_some(fs, b"doomed")
        await moved_out(fs, *doomed)
        with hanging(server(fs).address, ops) as hang:
            contents: dict[int, bytes] = {}
            number = 0
            while not server(fs).hangs:  # until one has met it
                contents |= (
                    some := await write_some(fs, b"first %d" % number, b"second %d" % number)
                )
                number += 1
                await drained(fs, *some)
            assert server(fs).state == "failing"
            assert re.search(
                r"^data server 1 \(.*\): \w+ .* has not ended within 0\.\d s$",
                server(fs).last_error,
            )
            assert BAD not in fs.store.servers.usable()
            # Nobody waits for it again, and nothing is asked of it.
            held = list(hang.held)
            contents |= (later := await write_some(fs, b"third", b"fourth"))
            await drained(fs, *later)
            await fs.mkdir(stores.ROOT_INO, b"new", 0o700, stores.ROOT)
            await fs.unlink(stores.ROOT_INO, b"doomed")
            await until(lambda: not fs.collector.due)
            await fs.rename(stores.ROOT_INO, b"third", stores.ROOT_INO, b"fifth", 0)
            await fs.statfs()
            await fs.status.tell()
            if mode in ("replicas", "coded"):
                await check(fs, before | contents)
            assert hang.held == held
            hang.release()
        await answered(fs, BAD)
        await until(lambda: server(fs).state == "ok")
        assert hang.landed
        await whole(fs)
        await moved_out(fs, *contents)
        contents |= (last := await write_some(fs, b"sixth", b"seventh"))
        await moved_out(fs, *last)
        await check(fs, before | contents)
    async with opened(directory, mode) as fs:
        await check(fs, before | contents)


# --- containers -----------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("op", ["write_at", "truncate", *longer("sync_file", "start_writing")])
async def test_a_container_that_something_may_land_in_is_not_appended_to(
    directory: Path, op: str
) -> None:
    async with opened(directory, "interleaved") as fs:
        contents = await write_some(fs, *(b"old %d" % n for n in range(12)), size=SMALL)
        await drained(fs, *contents)
        containers = await fs.store.engine.view(open_on_bad)
        assert containers
        paths = [server(fs).where((0, container)) for container in containers]
    if op == "truncate":
        for path in paths:
            os.truncate(path, os.path.getsize(path) + 99)  # as a failed append leaves it
    async with opened(directory, "interleaved") as fs:
        with hanging(server(fs).address, (op,)) as hang:
            number = 0
            while not hang.held:
                contents |= (some := await write_some(fs, b"new %d" % number, size=SMALL))
                number += 1
                await drained(fs, *some)
            caught = {int(path.rpartition("/")[2].partition(".")[0], 16) for _, path in hang.held}
            contents |= (
                some := await write_some(fs, *(b"later %d" % n for n in range(8)), size=SMALL)
            )
            await drained(fs, *some)
            touched: set[str] = set()
            hang.release()
        await answered(fs, BAD)
        with hooked(lambda op, path: touched.add(path) if op in ("write_at", "truncate") else None):
            contents |= (
                some := await write_some(fs, *(b"last %d" % n for n in range(12)), size=SMALL)
            )
            await drained(fs, *some)
        assert touched.isdisjoint(server(fs).where((0, container)) for container in caught)
        assert caught.isdisjoint(await fs.store.engine.view(open_on_bad))
        await check(fs, contents)
        await moved_out(fs, *contents)
        await check(fs, contents)


def open_on_bad(tx) -> set[int]:
    """Containers there that may be appended to."""
    return {
        oid for oid, record in chunks.open_containers(tx).items() if record.layout.servers == (BAD,)
    }


# --- groups ---------------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("mode", ["plain", "replicas"])
async def test_groups_are_stored_by_others(directory: Path, mode: str) -> None:
    async with opened(directory, mode) as fs:
        with hanging(server(fs).address, ("write_at",)) as hang:
            contents: dict[int, bytes] = {}
            number = 0
            while not server(fs).hangs or number < 3:
                top = (await fs.mkdir(stores.ROOT_INO, b"%d" % number, 0o755, stores.ROOT)).ino
                await fs.setxattr(top, b"user.aifs.group", b"name=step,ranks=2,dedup=128KiB")
                ranks = [
                    await write_file(
                        fs, b"%d" % rank, data_of(b"%d.%d" % (number, rank), 300_000), top
                    )
                    for rank in (0, 1)
                ]
                contents |= {
                    ino: data_of(b"%d.%d" % (number, rank), 300_000)
                    for rank, ino in enumerate(ranks)
                }
                await fs.drain.wait(ranks)
                number += 1
            hang.release()
        await answered(fs, BAD)
        await whole(fs)
        await moved_out(fs, *contents)
        await check(fs, contents)


# --- columns --------------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("op", ["write_at", "truncate", *longer("open_file", "sync_file")])
async def test_a_column_that_is_made_anew_in_its_place(directory: Path, op: str) -> None:
    """It is, when what was left of the attempt before has landed."""
    async with opened(directory, "coded", {"layout.unit": 4096}) as fs:
        contents = await write_some(fs, b"a", b"b", b"c")
        await moved_out(fs, *contents)
        paths = {}
        for ino in contents:
            inode = await fs.getattr(ino)
            paths[ino] = server(fs).where((ino, inode.oid))
            os.truncate(paths[ino], 0)
            os.truncate(paths[ino], 400_000)
        with hanging(server(fs).address, (op,)) as hang:
            for ino in contents:
                inode = await fs.getattr(ino)
                assert await fs.rebuild.request(inode.oid, ino, [inode.layout.servers.index(BAD)])
            await until(lambda: server(fs).hangs)
            await until(lambda: not fs.rebuild.status()["active_objects"])
            await check(fs, contents)
            held = list(hang.held)
            fs.damage.due()
            await fs.rebuild.news()
            assert hang.held == held
            hang.release()
        await answered(fs, BAD)
        await whole(fs)
        await check(fs, contents)
        for ino, path in paths.items():
            inode = await fs.getattr(ino)
            column = inode.layout.servers.index(BAD)
            assert os.path.getsize(path) == inode.layout.object_length(column, inode.size)
    (directory / "data" / "0").rename(directory / "away")  # so that what was made is needed
    async with opened(directory, "coded", sound=False) as fs:
        await check(fs, contents)
    (directory / "away").rename(directory / "data" / "0")


@pytest.mark.sweep("mode")
@pytest.mark.parametrize(
    "mode",
    [
        "plain",
        "coded",
        "interleaved",
        *longer("replicas", "interleaved-replicas", "interleaved-coded"),
    ],
)
async def test_nobody_waits_for_its_bytes_in_the_background(
    directory: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scrub goes through all there is, files that can be told by others leave the server, staging
    of others goes on."""
    monkeypatch.setattr(scrub, "_PAUSE_S", 0.01)
    async with opened(directory, mode, {"layout.count": 1}, servers=SERVERS + 1) as fs:
        contents = await write_some(fs, *(b"%d" % number for number in range(12)))
        await moved_out(fs, *contents)
    async with opened(directory, mode) as fs:
        with hanging(server(fs).address, (*ALL, "read_at")) as hang:
            fs.scrub.start()
            await fs.scrub.wait()
            assert fs.scrub.status()["wrong_ranges"] == 0
            assert await stores.numbers(fs, b"q") == []
            await fs.store.table.change(BAD, DRAINING)
            fs.rebuild.look()
            await until(lambda: fs.rebuild.status()["left_objects"])
            await fs.rebuild.news()
            for ino in contents:
                fs.stager.request(await fs.getattr(ino))
            await until(
                lambda: (
                    not fs.stager.status()["active_files"]
                    and not fs.stager.status()["waiting_files"]
                )
            )
            assert hang.held
            hang.release()
        await answered(fs, BAD)
        await check(fs, contents)


# --- files that are written in place --------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("op", ["truncate", "sync_file"])
async def test_what_a_program_writes_comes_after_what_lands_late(directory: Path, op: str) -> None:
    """The settling of a closed file is given up, and would cut what is written after it."""
    settings = modes.OFF | {
        "data.writeback_interval": "100ms",
        "meta.commit_interval": "10ms",
        "layout.count": 1,
    }
    async with opened(directory, "plain", settings) as fs:
        ino = await write_file(fs, b"file", b"x" * 50_000)
        while (await fs.getattr(ino)).layout.servers != (BAD,):
            await fs.unlink(stores.ROOT_INO, b"file")
            ino = await write_file(fs, b"file", b"x" * 50_000)
        with hanging(server(fs).address, (op,)) as hang:
            async with trio.open_nursery() as nursery:

                async def cut_and_write() -> None:
                    with patience.giving_up():  # as what nobody waits for is
                        try:
                            await fs.setattr(ino, SetAttr(size=10_000), stores.ROOT)
                            await fs.writeback.sync_inode(ino)
                        except Unavailable:
                            pass

                nursery.start_soon(cut_and_write)
                await until(lambda: server(fs).hangs)
                done = trio.Event()

                async def write() -> None:
                    await overwrite(fs, ino, 10_000, b"y" * 90_000)
                    done.set()

                nursery.start_soon(write)
                await trio.testing.wait_all_tasks_blocked()
                assert not done.is_set()
                hang.release()
        assert (await read_file(fs, ino))[10_000:] == b"y" * 90_000
    async with opened(directory, "plain") as fs:
        assert (await read_file(fs, ino))[10_000:] == b"y" * 90_000


async def test_who_waits_for_a_call_that_hangs_hangs_too(directory: Path) -> None:
    """Objects of a server are opened and removed in turn."""
    async with opened(directory, "plain") as fs:
        each = [
            Columns(fs.store.servers, Striped(4096, (BAD,)), 7, OID + number) for number in (0, 16)
        ]

        async def write(columns: Columns) -> None:
            with patience.giving_up(), pytest.raises(Unavailable):
                await columns.write(0, 0, b"x")

        with hanging(server(fs).address, ("open_file",)) as hang:
            with trio.fail_after(WAIT_S):
                async with trio.open_nursery() as nursery:
                    for columns in each:
                        nursery.start_soon(write, columns)
            hang.release()
        await answered(fs, BAD)
        for columns in each:
            await columns.settle(0, 0)
            columns.close()


async def test_what_is_about_to_be_removed_is_not_opened_by_a_reader(directory: Path) -> None:
    """Else what is written there later, by the same descriptor, would be lost."""
    async with opened(directory, "plain") as fs:
        layout = Striped(4096, (BAD,))
        before, after = (ObjectSet(fs.store.servers, layout, 7, OID) for _ in range(2))
        await before.write(0, b"x" * 100)
        async with trio.open_nursery() as nursery:
            with server(fs).lock_of(OID):  # somebody hangs there
                with patience.giving_up(), pytest.raises(Unavailable), trio.fail_after(WAIT_S):
                    await before.settle(0)
                asked = server(fs).workers.outstanding
                nursery.start_soon(after.read, 0, 100, 200, False)
                await trio.testing.wait_all_tasks_blocked()
                assert server(fs).workers.outstanding == asked
        await answered(fs, BAD)
        await after.write(0, b"y" * 100)
        for objects in before, after:
            objects.close()
        again = ObjectSet(fs.store.servers, layout, 7, OID)
        assert await again.read(0, 100, 100, False) == b"y" * 100
        await again.settle(0)
        again.close()


async def test_a_descriptor_is_kept_until_a_read_that_hangs_has_ended(directory: Path) -> None:
    async with opened(directory, "plain") as fs:
        layout = Striped(4096, (BAD,))
        objects = Columns(fs.store.servers, layout, 0, OID)
        await objects.write(0, 0, b"x" * 100)
        reader = ObjectSet(fs.store.servers, layout, 0, OID)
        path = server(fs).where((0, OID))
        await objects.sync(0)
        objects.close_idle()
        await answered(fs, BAD)
        assert path not in open_below(directory)
        with hanging(server(fs).address, ("read_into",)) as hang:
            with patience.giving_up(), pytest.raises(Unavailable):
                await reader.fill(0, memoryview(bytearray(100)), 100)
            reader.close()
            assert path in open_below(directory)
            hang.release()
        await answered(fs, BAD)
        await until(lambda: path not in open_below(directory))
        await objects.settle(0, 0)
        objects.close()


async def test_a_close_does_not_wait_for_ever(directory: Path) -> None:
    """Else an unmount would wait for it."""
    settings = modes.OFF | {"layout.unit": 4096}
    async with opened(directory, "plain", settings) as fs:
        with hanging(server(fs).address, ("truncate",)):
            inos = []
            for number in range(SERVERS):
                # On each of them the first unit of one, which are holes then.
                (handle, *_), inode = await fs.create(
                    stores.ROOT_INO, b"%d" % number, 0o600, os.O_RDWR, stores.ROOT
                )
                await fs.write(handle, 12 * 4096, b"x" * 4096)
                await fs.release(handle)
                inos.append(inode.ino)
            assert server(fs).hangs
        await answered(fs, BAD)
        for ino in inos:
            assert await read_file(fs, ino) == bytes(12 * 4096) + b"x" * 4096
            await overwrite(fs, ino, 4096, b"y" * 4096)
            assert (
                await read_file(fs, ino)
                == bytes(4096) + b"y" * 4096 + bytes(10 * 4096) + b"x" * 4096
            )


# --- backups --------------------------------------------------------------------------------------


async def test_backups_go_to_other_servers(directory: Path) -> None:
    async with opened(directory, "replicas", {"meta.backup_interval": "1h"}) as fs:
        await fs.backup.ship()
        with hanging(server(fs).address) as hang, patience.giving_up():
            number = 0
            while not server(fs).hangs:
                await fs.mkdir(stores.ROOT_INO, b"%d" % number, 0o700, stores.ROOT)
                number += 1
                await fs.backup.ship()
            await fs.mkdir(stores.ROOT_INO, b"last", 0o700, stores.ROOT)
            await fs.backup.ship()
            shipped = fs.backup.status()["sequence"]
            names = set()
            for other in (0, 2):
                names |= backup.sizes(server(fs, other)).keys()
            assert newest(filter(None, map(parse_name, names))).seq == shipped
            assert hang.held
            hang.release()
        await answered(fs, BAD)
        assert backup.sizes(server(fs))  # it has landed
        await fs.mkdir(stores.ROOT_INO, b"after", 0o700, stores.ROOT)
        await fs.backup.ship()
        names = set().union(*(backup.sizes(server(fs, number)) for number in range(SERVERS)))
        assert (
            newest(filter(None, map(parse_name, names))).seq
            == fs.backup.status()["sequence"]
            > shipped
        )


# --- the end --------------------------------------------------------------------------------------


@pytest.mark.sweep("mode")
@pytest.mark.parametrize("mode", ["plain", "replicas", "interleaved"])
async def test_a_mount_ends_though_a_server_hangs(
    directory: Path, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """In order: what lies there is drained, or stays where it is. Nobody gets the store before all
    has landed."""
    contents = {}
    with hanging(str(directory / "data" / str(BAD))) as hang:
        hang.release()
        async with opened(directory, mode, sound=False) as fs:
            hang.again()
            number = 0
            while not server(fs).hangs:
                contents |= (some := await write_some(fs, b"%d" % number))
                number += 1
                await drained(fs, *some)
            await fs.unlink(stores.ROOT_INO, b"0")
            del contents[next(iter(contents))]
        assert re.search(r"data server 1 \(.*\) has not answered \d calls?", caplog.text)
        with pytest.raises(StoreBusy):
            async with open_filesystem(modes.config_of(directory)):
                pass
        hang.release()
    while True:
        try:
            async with opened(directory, mode) as fs:
                assert fs.store.clean
                await whole(fs)
                await check(fs, contents)
                break
        except StoreBusy:
            await trio.sleep(0.01)


@pytest.mark.sweep
async def test_a_mount_ends_though_what_is_written_there_cannot_be_synced(directory: Path) -> None:
    settings = modes.OFF | {
        "data.writeback_interval": "1h",
        "layout.count": 1,
        "data.timeout": "100ms",
    }
    async with opened(directory, "plain", settings) as fs:
        for number in range(9):
            await write_file(fs, b"%d" % number, b"x" * 50_000)
    objects = str(directory / "data" / str(BAD) / "objects")
    with hanging(objects, ("sync_file",)), pytest.raises(Unavailable):
        async with opened(directory, "plain", sound=False) as fs:
            for number in range(9):
                await overwrite(
                    fs, (await fs.lookup(stores.ROOT_INO, b"%d" % number)).ino, 0, b"y" * 50_000
                )
    while True:
        try:
            async with opened(directory, "plain") as fs:
                for number in range(9):
                    ino = (await fs.lookup(stores.ROOT_INO, b"%d" % number)).ino
                    assert await read_file(fs, ino) == b"y" * 50_000
                break
        except StoreBusy:
            await trio.sleep(0.01)


# --- what is asked of the whole -------------------------------------------------------------------


async def test_space_is_told_though_a_server_does_not_say_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(directory, "replicas") as fs:
        whole_space = await fs.statfs()
        go = threading.Event()
        space = DataServer.space
        monkeypatch.setattr(
            DataServer, "space", lambda it: (it.id != BAD or go.wait(60)) and space(it)
        )
        monkeypatch.setattr("aifs.data.servers._SAY_S", 0.05)
        try:
            assert (await fs.statfs()).blocks == whole_space.blocks
            status = await fs.status.tell()
            assert [row["used_bytes"] is not None for row in status["servers"]] == [True] * SERVERS
        finally:
            go.set()


# --- the beginning --------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("mode", ["replicas", "interleaved-coded"])
async def test_a_store_is_opened_though_a_server_hangs_that_it_can_do_without(
    directory: Path, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is used again when it has answered."""
    async with opened(directory, mode) as fs:
        contents = await write_some(fs, b"a", b"b", b"c")
        await moved_out(fs, *contents)
    with hanging(str(directory / "data" / str(BAD)), (*ALL, "read_file")) as hang:
        async with opened(directory, mode) as fs:
            assert server(fs).hangs
            assert re.fullmatch(
                r"data server 1 \(.*\): reach .* has not ended within 0\.1 s", server(fs).absent
            )
            await check(fs, contents)
            contents |= (some := await write_some(fs, b"d", b"e"))
            await drained(fs, *some)
            held = list(hang.held)
            await fs.statfs()
            await fs.status.tell()
            assert hang.held == held
            hang.release()
            await answered(fs, BAD)
            await fs.store.servers.look()
            await until(lambda: server(fs).state == "ok")
            await whole(fs)
            await check(fs, contents)
    assert "does without a data server for now: data server 1" in caplog.text


async def test_a_store_is_not_opened_while_a_server_hangs_that_it_needs(directory: Path) -> None:
    async with opened(directory, "plain") as fs:
        contents = await write_some(fs, b"a", b"b", b"c")
        await moved_out(fs, *contents)
    with hanging(str(directory / "data" / str(BAD)), ("read_file",)):
        with pytest.raises(
            StoreError, match=r"^data server 1 .* has not ended within 0\.1 s; unprotected files"
        ):
            async with opened(directory, "plain"):
                pass
    async with opened(directory, "plain") as fs:
        await check(fs, contents)


async def test_what_is_recovered_does_not_wait_for_a_server(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that was written in place there stays to be settled."""
    settings = modes.OFF | {"data.writeback_interval": "1h", "layout.count": 1}
    with pytest.raises(SimulatedCrash):
        async with opened(directory, "plain", settings, sound=False) as fs:
            for number in range(9):
                await write_file(fs, b"%d" % number, b"x" * 50_000)
            raise SimulatedCrash
    with hanging(str(directory / "data" / str(BAD)), ("sync_file", "truncate")) as hang:
        async with opened(directory, "plain", sound=False) as fs:
            assert "could not be settled, the next mount will try again" in caplog.text
            hang.release()
            await answered(fs, BAD)
    async with opened(directory, "plain") as fs:
        for number in range(9):
            ino = (await fs.lookup(stores.ROOT_INO, b"%d" % number)).ino
            assert await read_file(fs, ino) == b"x" * 50_000
