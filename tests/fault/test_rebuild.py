"""Rebuild: whatever is lost comes back, servers are left with nothing behind, and files change
meanwhile as they like.
"""

import errno
import os
import random
import shutil
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio

from aifs.core import faults
from aifs.data.chunk_codec import unpack_header
from aifs.files.types import ROOT
from aifs.layout.interleaved import HEADER_BYTES
from aifs.layout.placement import DRAINING, LOST
from aifs.layout.striped import Striped
from aifs.meta import degraded, keys, moves
from aifs.meta.chunks import decode_list
from aifs.meta.keys import ROOT_INO
from aifs.vfs.filesystem import Filesystem
from tests.support import modes, stores
from tests.support.data_servers import failing
from tests.support.points import crash
from tests.support.spoil import flip
from tests.support.stores import (
    drained,
    moved_out,
    numbers,
    read_file,
    require_sound,
    served,
    whole,
)
from tests.support.stores import fs as fs

SERVERS = 7
UNIT = 4096
SETTINGS = modes.STRIPED | {
    "layout.unit": UNIT,
    "layout.count": 2,
    "burst.drain_delay": "0s",
    "burst.throttle_max": "0s",
    "burst.stage_for_write": 0,
    "meta.backup_interval": 0,
}
REDUNDANT = {
    "2+1": {"layout.ec": "2+1"},
    "3+2": {"layout.ec": "3+2"},
    "2x2": {"layout.replicas": 2},
    "1x3": {"layout.replicas": 3, "layout.count": 1},
}
SIZES = [3000, UNIT, 40 * UNIT + 17, (2 << 20) + 5000]

redundant = pytest.mark.parametrize("kind", REDUNDANT)
mostly_long = pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind in ("2+1", "2x2") else pytest.mark.long)
        for kind in REDUNDANT
    ],
)

mounted = partial(stores.opened, base=SETTINGS, servers=SERVERS)
pytestmark = pytest.mark.store(base=SETTINGS, servers=SERVERS)


async def write_file(fs: Filesystem, name: bytes, data: bytes) -> int:
    """A new file, on the capacity tier alone."""
    ino = await stores.write_file(fs, name, data)
    await moved_out(fs, ino)
    return ino


class Files:
    """Some files with random bytes."""

    def __init__(self, seed: int = 1) -> None:
        self._rng = random.Random(seed)
        self.contents: dict[int, bytes] = {}

    async def write(self, fs: Filesystem, sizes: list[int] = SIZES) -> None:
        for size in sizes:
            data = self._rng.randbytes(size)
            self.contents[await write_file(fs, b"%d" % len(self.contents), data)] = data

    async def check(self, fs: Filesystem) -> None:
        for ino, data in self.contents.items():
            assert await read_file(fs, ino) == data

    async def layouts(self, fs: Filesystem) -> dict[int, Striped]:
        inodes = [await fs.getattr(ino) for ino in self.contents]
        return {inode.ino: inode.layout for inode in inodes if isinstance(inode.layout, Striped)}


async def left(fs: Filesystem, number: int) -> None:
    """Wait until nothing lies on the server."""
    while fs.rebuild.left(number) != (0, 0):
        await fs.rebuild.news()


def objects_on(fs: Filesystem, number: int) -> list[Path]:
    found = Path(fs.store.servers[number].address).glob("objects/*/*/*")
    return sorted(found)


async def object_path(fs: Filesystem, ino: int, column: int) -> Path:
    inode = await fs.getattr(ino)
    return Path(fs.store.servers[inode.layout.servers[column]].where((ino, inode.oid)))


def remove(path: Path) -> None:
    path.unlink(missing_ok=True)


def empty(path: Path) -> None:
    if path.exists():
        os.truncate(path, 0)


def truncate(path: Path) -> None:
    if path.exists():
        os.truncate(path, max(path.stat().st_size - 1, 0))


def garble(path: Path) -> None:
    if path.exists():
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


# --- columns that are lost ------------------------------------------------------------------------


@pytest.mark.sweep
@mostly_long
@pytest.mark.parametrize("spoil", [remove, empty, truncate, garble])
async def test_columns_that_were_lost_are_made_anew(directory, kind, spoil):
    files = Files()
    async with mounted(directory, REDUNDANT[kind]) as fs:
        await files.write(fs)
        for ino, layout in (await files.layouts(fs)).items():
            oid = (await fs.getattr(ino)).oid
            for column in range(len(layout.servers)):
                before = (
                    (await object_path(fs, ino, column)).read_bytes()
                    if layout.object_length(column, 1)
                    else None
                )
                doomed = [column]
                if layout.tolerates > 1:
                    doomed.append((column + 1) % len(layout.servers))
                for number in doomed:
                    spoil(await object_path(fs, ino, number))
                assert await fs.rebuild.request(oid, ino, doomed)
                await whole(fs)
                assert not await fs.store.engine.view(degraded.is_marked, oid)
                assert before is None or (await object_path(fs, ino, column)).read_bytes() == before
        await files.check(fs)


@redundant
async def test_a_read_that_meets_a_missing_column_has_it_rebuilt(directory, kind):
    files = Files()
    async with mounted(directory, REDUNDANT[kind]) as fs:
        await files.write(fs, SIZES[1:3])
        for ino, layout in (await files.layouts(fs)).items():
            noticed = 0
            for column in layout.copies(0):  # one of which is the one that is read
                path = await object_path(fs, ino, column)
                path.unlink()
                await files.check(fs)
                await whole(fs)
                noticed += path.exists()
                if not path.exists():
                    await fs.rebuild.request((await fs.getattr(ino)).oid, ino, [column])
                    await whole(fs)
                assert path.exists()
            assert noticed


@pytest.mark.sweep
@pytest.mark.store(REDUNDANT["3+2"])
async def test_wrong_bytes_are_not_spread(fs: Filesystem) -> None:
    """A column is told by the right ones of the others, and the wrong ones are found and mended,
    too."""
    files = Files()
    await files.write(fs, [3 << 20])
    [ino] = files.contents
    before = [(await object_path(fs, ino, column)).read_bytes() for column in range(5)]
    for column in range(5):
        (await object_path(fs, ino, column)).unlink()
        garble(await object_path(fs, ino, (column + 2) % 5))
        assert await fs.rebuild.request((await fs.getattr(ino)).oid, ino, [column])
        await whole(fs)
        now = [(await object_path(fs, ino, column)).read_bytes() for column in range(5)]
        assert now[column] == before[column]
        garbled = (column + 2) % 5
        if now[garbled] != before[garbled]:  # parity that nobody had to read
            assert await fs.rebuild.request((await fs.getattr(ino)).oid, ino, [garbled])
            await whole(fs)
        assert [(await object_path(fs, ino, column)).read_bytes() for column in range(5)] == before
    await files.check(fs)


@pytest.mark.store(REDUNDANT["2+1"], sound=False)
async def test_what_cannot_be_told_is_left_and_named(fs: Filesystem) -> None:
    files = Files()
    await files.write(fs, [10 * UNIT])
    [ino] = files.contents
    oid = (await fs.getattr(ino)).oid
    for column in range(2):
        garble(await object_path(fs, ino, column))
    (await object_path(fs, ino, 2)).unlink()
    assert await fs.rebuild.request(oid, ino, [0])
    while not fs.rebuild.status()["failed"]:
        await fs.rebuild.news()
    [failed] = fs.rebuild.status()["failed"]
    assert failed["path"] == "/0" and failed["oid"] == oid and failed["reason"]
    assert not await fs.rebuild.request(oid, ino, [1]), "more than the file survives"
    assert await fs.store.engine.view(degraded.find_unread, oid) == 1


# --- servers --------------------------------------------------------------------------------------


async def change(fs: Filesystem, number: int, standing: str) -> None:
    await fs.store.table.change(number, standing)
    fs.rebuild.look()


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["plain", *REDUNDANT])
async def test_a_server_that_is_drained_holds_nothing_afterwards(directory, kind):
    files = Files()
    async with mounted(directory, REDUNDANT.get(kind, {})) as fs:
        await files.write(fs, SIZES * 6)
        for number in (0, 3):
            assert objects_on(fs, number)
            await change(fs, number, DRAINING)
            await left(fs, number)
            await fs.collector.drain()
            assert objects_on(fs, number) == []
        assert not await numbers(fs, b"m") and not await numbers(fs, b"q")
        await files.check(fs)
        for layout in (await files.layouts(fs)).values():
            assert not {0, 3} & set(layout.servers) and len(set(layout.servers)) == len(
                layout.servers
            )
        await files.write(fs, SIZES * 2)
        assert objects_on(fs, 0) == []
    async with mounted(directory) as fs:
        await files.check(fs)


@pytest.mark.sweep
@redundant
async def test_a_lost_server_is_made_up_for(directory, kind):
    files = Files()
    async with mounted(directory, REDUNDANT[kind]) as fs:
        await files.write(fs, SIZES * 3)
    shutil.rmtree(directory / "data" / "2")
    async with mounted(directory) as fs:
        await files.check(fs)
        await change(fs, 2, LOST)
        await left(fs, 2)
        await files.check(fs)
        for layout in (await files.layouts(fs)).values():
            assert 2 not in layout.servers
        assert not await numbers(fs, b"m")


@pytest.mark.sweep
@mostly_long
@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.ENOSPC], ids=errno.errorcode.get)
async def test_a_server_that_takes_nothing_is_passed_over(directory, kind, number):
    """A column that cannot be made anew in its place is made elsewhere."""
    files = Files()
    async with mounted(directory, REDUNDANT[kind]) as fs:
        await files.write(fs, SIZES[2:3])
        [ino] = files.contents
        inode = await fs.getattr(ino)
        (await object_path(fs, ino, 0)).unlink()
        server = fs.store.servers[inode.layout.servers[0]]
        with failing(
            ("create", "open", "write_at", "make_dir", "truncate", "sync_file"),
            server.address,
            number,
        ) as failed:
            assert await fs.rebuild.request(inode.oid, ino, [0])
            await whole(fs)
        assert failed
        assert (await fs.getattr(ino)).layout.servers[0] != server.id
        await files.check(fs)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["plain", "2x2"])
async def test_files_that_lie_on_all_servers_are_laid_out_anew_to_leave_one(directory, kind):
    files = Files()
    async with mounted(directory, REDUNDANT.get(kind, {}) | {"layout.count": 0}) as fs:
        await files.write(fs, SIZES)
        await change(fs, 1, DRAINING)
        await left(fs, 1)
        await fs.collector.drain()
        assert objects_on(fs, 1) == [] and not await numbers(fs, b"m")
        for layout in (await files.layouts(fs)).values():
            assert len(layout.servers) == SERVERS - 1 and layout.is_protected == (kind != "plain")
        await files.check(fs)


@pytest.mark.store({"layout.ec": "5+2"})
async def test_files_that_need_all_servers_stay(fs: Filesystem) -> None:
    files = Files()
    await files.write(fs, [20 * UNIT])
    await change(fs, 1, DRAINING)
    while not fs.rebuild.status()["failed"]:
        await fs.rebuild.news()
    assert fs.rebuild.left(1)[0] == 1
    assert "no other server" in fs.rebuild.status()["failed"][0]["reason"]
    await fs.store.table.change(1, "active")
    await whole(fs)
    await files.check(fs)


# --- meanwhile ------------------------------------------------------------------------------------


async def paused_move(fs: Filesystem, number: int, act: Callable[[], Awaitable[None]]) -> None:
    """Have all leave a server; when the first object is being written somewhere, ``act`` before it
    goes on."""
    waiting, go_on = trio.Event(), trio.Event()

    async def hold() -> None:
        waiting.set()
        await go_on.wait()

    fs.rebuild.mover.make_way = hold
    await change(fs, number, DRAINING)
    await waiting.wait()
    await act()
    go_on.set()
    await left(fs, number)


@pytest.mark.sweep("what")
@pytest.mark.parametrize("kind", ["plain", "2+1", pytest.param("2x2", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "what", ["unlink", "rewrite", "append", "truncate", "rename", "read", "evict"]
)
async def test_files_change_while_they_move(directory, kind, what):
    files = Files()
    async with mounted(directory, REDUNDANT.get(kind, {})) as fs:
        await files.write(fs, [30 * UNIT] * 8)

        async def act() -> None:
            for ino, data in list(files.contents.items()):
                name = b"%d" % list(files.contents).index(ino)
                if what == "rename":
                    await fs.rename(ROOT_INO, name, ROOT_INO, b"new " + name)
                elif what == "read":
                    assert await read_file(fs, ino) == data
                elif what == "evict":
                    await fs.stager.stage(ino)
                elif what != "unlink":
                    opened = await fs.open(
                        ino, os.O_RDWR | (os.O_TRUNC if what == "rewrite" else 0)
                    )
                    if what == "truncate":
                        await fs.files.truncate(ino, 5 * UNIT + 3)
                        files.contents[ino] = data[: 5 * UNIT + 3]
                    else:
                        old = b"" if what == "rewrite" else data
                        await fs.write(opened.handle, len(old), b"new" * UNIT)
                        files.contents[ino] = old + b"new" * UNIT
                    await fs.release(opened.handle)
            if what == "unlink":
                for number, ino in enumerate(list(files.contents)):
                    await fs.unlink(ROOT_INO, b"%d" % number)
                    fs.forget([ino])
                files.contents.clear()
            await fs.sync()
            await fs.collector.drain()

        await paused_move(fs, 1, act)
        await drained(fs, *files.contents)
        await fs.rebuild.strays.sweep()
        await fs.collector.drain()
        assert objects_on(fs, 1) == []
        await files.check(fs)
        assert not await numbers(fs, b"m")


@pytest.mark.sweep
@pytest.mark.store(REDUNDANT["2x2"])
async def test_open_files_are_read_from_their_new_places(fs: Filesystem) -> None:
    files = Files()
    await files.write(fs, [(1 << 20) + 30 * UNIT] * 6)
    handles = {ino: (await fs.open(ino, os.O_RDONLY)).handle for ino in files.contents}
    for ino, handle in handles.items():
        assert bytes(await fs.read(handle, 0, UNIT)) == files.contents[ino][:UNIT]
    for number in (0, 1, 2):
        await change(fs, number, DRAINING)
    for number in (0, 1, 2):
        await left(fs, number)
        shutil.rmtree(Path(fs.store.servers[number].address) / "objects", ignore_errors=True)
    for ino, handle in handles.items():
        data = b"".join([bytes(await fs.read(handle, at, 1 << 20)) for at in (0, 1 << 20)])
        assert data == files.contents[ino]
        await fs.release(handle)


@pytest.mark.store(REDUNDANT["2x2"] | {"rebuild.bandwidth": "1MiB", "rebuild.workers": 2})
async def test_moves_are_throttled_and_make_way(fs: Filesystem) -> None:
    files = Files()
    await files.write(fs, [UNIT * 3] * 4)
    taken: list[int] = []
    take = fs.rebuild.limiter.take

    async def counted(size: int) -> None:
        taken.append(size)
        await take(0)

    fs.rebuild.limiter.take = counted
    assert fs.rebuild.limiter.rate == 1 << 20
    await change(fs, 1, DRAINING)
    await left(fs, 1)
    await whole(fs)
    status = fs.rebuild.status()
    assert sum(taken) >= status["moved_bytes"] > 0
    assert (
        status["bandwidth"] == 1 << 20
        and status["left_objects"] == 0
        and status["servers"][1] == (0, 0)
    )


# --- protection that is due -----------------------------------------------------------------------


@pytest.mark.sweep
@redundant
async def test_files_that_were_written_in_place_are_protected_later(directory, kind):
    files = Files()
    async with mounted(
        directory, REDUNDANT[kind] | {"burst.directories": [], "burst.capacity": 0}
    ) as fs:
        for number, size in enumerate(SIZES):
            data = random.Random(number).randbytes(size)
            opened, inode = await fs.create(ROOT_INO, b"%d" % number, 0o600, os.O_RDWR, ROOT)
            await fs.write(opened.handle, 0, data)
            files.contents[inode.ino] = data
            assert not (await fs.getattr(inode.ino)).layout.is_protected
            await fs.fsync(opened.handle)
            await fs.release(opened.handle)
        await whole(fs)
        assert all(layout.is_protected for layout in (await files.layouts(fs)).values())
        await files.check(fs)
        assert not await numbers(fs, b"q")
    async with mounted(directory) as fs:
        await files.check(fs)


# --- crashes --------------------------------------------------------------------------------------

POINTS = sorted(name for name in faults.POINTS if name.startswith(("vfs.move.", "vfs.relayout.")))


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["plain", "2x2", pytest.param("2+1", marks=pytest.mark.long)])
@pytest.mark.parametrize("point", [point for point in POINTS if point.startswith("vfs.move.")])
async def test_a_move_that_a_crash_has_ended_is_finished_by_the_next_mount(directory, kind, point):
    files = Files()
    async with mounted(directory, REDUNDANT.get(kind, {})) as fs:
        await files.write(fs, [30 * UNIT] * 6)
    for number in range(1, 3):
        with pytest.raises(faults.SimulatedCrash):
            async with served(modes.config_of(directory)) as fs:
                faults.arm(point, crash)
                await change(fs, number, DRAINING)
                await trio.sleep_forever()
        faults.disarm_all()
        await require_sound(modes.config_of(directory))
        async with mounted(directory) as fs:
            await files.check(fs)
            await left(fs, number)
            assert objects_on(fs, number) == [] and not await numbers(fs, b"m")
            await files.check(fs)
            await change(fs, number, "active")


async def test_strays_of_servers_that_are_gone_are_forgotten(fs: Filesystem) -> None:
    files = Files()
    await files.write(fs, [10 * UNIT])
    [ino] = files.contents
    oid = (await fs.getattr(ino)).oid
    for stray in (moves.Stray(ino, oid, 60), moves.Stray(0, 999_999, 61)):
        await fs.store.engine.transact(moves.put_stray, stray)
        fs.rebuild.strays.add(stray)
    assert await fs.rebuild.strays.sweep() == 0
    assert not await numbers(fs, b"m")


# --- containers, burst copies, successors ---------------------------------------------------------


async def interleaved(fs: Filesystem, files: Files, sizes: list[int]) -> None:
    """Files in containers, which stay in the burst tier as well."""
    inos = []
    for size in sizes:
        data = random.Random(size).randbytes(size)
        ino = await stores.write_file(fs, b"%d" % len(files.contents), data)
        files.contents[ino] = data
        inos.append(ino)
    await drained(fs, *inos)


@pytest.mark.parametrize("kind", ["plain", "2+1", "2x2"])
async def test_containers_leave_a_server_too(directory, kind):
    files = Files()
    settings = REDUNDANT.get(kind, {}) | {"layout.kind": "interleaved"}
    async with mounted(directory, settings) as fs:
        await interleaved(fs, files, [100, 5000, 60_000, 3000, 100_000, 70_000])
        for number in (0, 1, 2):
            await change(fs, number, DRAINING)
        for number in (0, 1, 2):
            await left(fs, number)
            await fs.collector.drain()
            assert objects_on(fs, number) == []
        await files.check(fs)
        for ino in files.contents:
            await fs.evictor.evict(ino)
        await files.check(fs)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["2+1", "2x2"])
@pytest.mark.parametrize("spoil", [remove, truncate])
async def test_columns_of_containers_are_made_anew(directory, kind, spoil):
    files = Files()
    async with mounted(directory, REDUNDANT[kind] | {"layout.kind": "interleaved"}) as fs:
        await interleaved(fs, files, [5000, 60_000, 3000, 100_000])
        for ino in files.contents:
            await fs.evictor.evict(ino)
        containers = await numbers(fs, b"t")
        for container in containers:
            objects = await fs.store.engine.view(moves.find_objects, 0, container)
            for column, server in enumerate(objects.layout.servers):
                path = Path(fs.store.servers[server].where((0, container)))
                before = path.read_bytes()
                spoil(path)
                assert await fs.rebuild.request(container, 0, [column])
                await whole(fs)
                assert path.read_bytes() == before
        await files.check(fs)


@asynccontextmanager
async def containers_of(directory: Path, kind: str, sizes: list[int], sound: bool = True):
    """A filesystem with files in containers alone; it, the files, and the paths of the columns of
    each container."""
    files = Files()
    async with mounted(
        directory, REDUNDANT[kind] | {"layout.kind": "interleaved"}, sound=sound
    ) as fs:
        await interleaved(fs, files, sizes)
        for ino in files.contents:
            await fs.evictor.evict(ino)
        paths = {}
        for container in await numbers(fs, b"t"):
            layout = (await fs.store.engine.view(moves.find_objects, 0, container)).layout
            servers = fs.store.servers
            paths[container] = [
                Path(servers[number].where((0, container))) for number in layout.servers
            ]
        yield fs, files, paths


CHUNKED = [5000, 60_000, 3000, 900_000, 1 << 20, 1 << 20, 100_000] * 4


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["1x3", "3+2"])
async def test_wrong_bytes_of_containers_are_not_spread(directory, kind):
    """Of a lost column, a wrong byte in one that is left, in any part of it: in records, headers,
    chunks, padding."""
    rng = random.Random(2)
    async with containers_of(directory, kind, CHUNKED) as (fs, files, paths):
        for container, columns in paths.items():
            before = [path.read_bytes() for path in columns]
            assert max(map(len, before)) > 0
            for number in range(len(columns)):
                garbled = (number + 1) % len(columns)
                columns[number].unlink()
                for at in (2, 70, len(before[0]) - 1, *rng.choices(range(len(before[0])), k=5)):
                    flip(columns[garbled], at)
                assert await fs.rebuild.request(container, 0, [number])
                await whole(fs)
                assert columns[number].read_bytes() == before[number]
                if columns[garbled].read_bytes() != before[garbled]:  # nobody had to read it
                    assert await fs.rebuild.request(container, 0, [garbled])
                    await whole(fs)
                assert [path.read_bytes() for path in columns] == before
        await files.check(fs)


async def test_a_wrong_survivor_of_a_container_is_not_copied(directory):
    async with containers_of(directory, "2x2", CHUNKED[:5], sound=False) as (fs, _, paths):
        for container, columns in paths.items():
            size = columns[0].stat().st_size
            flip(columns[1], size - 100)
            columns[0].unlink()
            assert await fs.rebuild.request(container, 0, [0])
        while len(fs.rebuild.status()["failed"]) < len(paths):
            await fs.rebuild.news()
        for failed in fs.rebuild.status()["failed"]:
            assert "not what their checksums say" in failed["reason"]
            assert await fs.store.engine.view(degraded.find_unread, failed["oid"]) == 1


async def test_what_no_file_needs_does_not_hold_up_the_rebuild(directory):
    """A chunk that cannot be told any more, not even where it ends; its file is deleted."""
    async with containers_of(directory, "2x2", [100_000] * 40, sound=False) as (fs, files, paths):
        places = await fs.store.engine.view(
            lambda tx: [
                extent.place
                for _, value in tx.range(*keys.all_of(b"l"))
                for extent in decode_list(value)[1]
            ]
        )
        offsets = {
            container: sorted(p.offset for p in places if p.container == container)
            for container in paths
        }
        container = max(offsets, key=lambda container: len(offsets[container]))
        columns, place = paths[container], offsets[container][1]
        oid = unpack_header(columns[0].read_bytes()[place : place + HEADER_BYTES]).oid
        [ino] = [i for i in files.contents if (await fs.getattr(i)).oid == oid]
        await fs.unlink(ROOT_INO, b"%d" % list(files.contents).index(ino))
        fs.forget([ino])
        await fs.collector.drain()
        del files.contents[ino]
        for path in columns:
            flip(path, place)
        columns[0].unlink()
        assert await fs.rebuild.request(container, 0, [0])
        await whole(fs)
        assert columns[0].read_bytes() == columns[1].read_bytes()
        await files.check(fs)


@pytest.mark.sweep
async def test_a_wrong_replica_of_a_container_is_not_moved(directory):
    async with containers_of(directory, "2x2", CHUNKED) as (fs, files, paths):
        right = {container: columns[0].read_bytes() for container, columns in paths.items()}
        for container, columns in paths.items():
            flip(columns[0], len(right[container]) // 2)
        for container in paths:
            number = (await fs.store.engine.view(moves.find_objects, 0, container)).layout.servers[
                0
            ]
            await change(fs, number, DRAINING)
            await left(fs, number)
            await fs.store.table.change(number, "active")
        for container in paths:
            layout = (await fs.store.engine.view(moves.find_objects, 0, container)).layout
            for number in layout.servers:
                assert (
                    Path(fs.store.servers[number].where((0, container))).read_bytes()
                    == right[container]
                )
        await files.check(fs)


@pytest.mark.sweep
@pytest.mark.store(REDUNDANT["2+1"])
async def test_a_successor_takes_over(fs: Filesystem, directory) -> None:
    files = Files()
    await files.write(fs, SIZES * 2)
    held = {ino for ino, layout in (await files.layouts(fs)).items() if 2 in layout.servers}
    number = await fs.store.table.add(str(directory / "data" / "new"))
    fs.store.servers.prefer[2] = number
    fs.store.servers.classify(2, DRAINING, "", number)
    fs.rebuild.look()
    await left(fs, 2)
    after = {ino for ino, layout in (await files.layouts(fs)).items() if number in layout.servers}
    assert held and held == after
    await files.check(fs)
