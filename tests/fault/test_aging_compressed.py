"""Old files are compressed (user.aifs.age with compress=)."""

import errno
import os
import random
from pathlib import Path

import pytest
import trio

from aifs.core import faults
from aifs.core.faults import SimulatedCrash
from aifs.files import transitions
from aifs.files.types import ROOT
from aifs.layout import interleaved
from aifs.layout.interleaved import CHUNK
from aifs.meta.keys import ROOT_INO
from aifs.vfs.filesystem import Filesystem
from tests.support import stores
from tests.support.aged import COLD, KINDS, aged, make, old_file, opened, passed, rule, servers_of
from tests.support.aged import fs as fs
from tests.support.data_servers import failing
from tests.support.points import armed, crash, once
from tests.support.stores import by_kind, moved_out, read_file, require_sound, served, write_file

WORDS = b"".join(b"weight %d of layer %d\n" % (n, n % 7) for n in range(120_000))
NOISE = random.Random("noise").randbytes(CHUNK)
DATA = WORDS + NOISE + WORDS[:1234]

every_kind = by_kind(KINDS)

pytestmark = pytest.mark.store(KINDS["plain"])


async def info_of(fs: Filesystem, ino: int) -> dict:
    return await stores.ask(fs, ino, "info")


async def is_compressed(fs: Filesystem, ino: int) -> bool:
    return (await info_of(fs, ino))["form"] == "interleaved"


@pytest.mark.sweep
@every_kind
async def test_old_files_are_kept_compressed_in_the_class(scratch: Path, kind: str) -> None:
    config = await make(scratch, KINDS[kind])
    async with opened(config) as fs:
        old = await old_file(fs, "old", data=DATA)
        young = await old_file(fs, "young", days=20, data=DATA)
        before = (await fs.getattr(old)).objects
        await rule(fs, ROOT_INO, "30d:cold,compress=zstd:3")
        assert await stores.get(fs, ROOT_INO, "age") == "30d:cold,compress=zstd:3"
        info = await info_of(fs, old)
        assert info["form"] == "interleaved" and set(info["layout"]["servers"]) <= COLD
        assert info["size"] == len(DATA) and CHUNK < info["stored_bytes"] < len(DATA) / 2
        assert info["compression"] == round(len(DATA) / info["stored_bytes"], 2)
        assert info["layout"]["replicas"] == before.replicas
        assert info["layout"]["parity"] == before.parity
        assert not await is_compressed(fs, young)
        assert await read_file(fs, old) == DATA
        status = fs.aging.status()
        assert (status["files"], status["compressed_files"]) == (1, 1)
    async with served(config) as fs:
        await passed(fs)
        assert fs.aging.status()["files"] == 0, "nothing is left to do"
        assert await read_file(fs, old) == DATA


@pytest.mark.sweep
async def test_without_a_class_files_are_compressed_where_they_are(fs: Filesystem) -> None:
    top = (await fs.mkdir(ROOT_INO, b"top", 0o755, ROOT)).ino
    cold = await old_file(fs, "cold", data=DATA)
    await rule(fs, ROOT_INO, "30d:cold")
    hot = await old_file(fs, "hot", top, data=DATA)
    await rule(fs, top, "30d:compress=zstd")
    assert not set((await info_of(fs, hot))["layout"]["servers"]) & COLD
    assert not await is_compressed(fs, cold)
    await rule(fs, ROOT_INO, "30d:compress=zstd")
    assert await is_compressed(fs, cold) and await is_compressed(fs, hot)
    assert set((await info_of(fs, cold))["layout"]["servers"]) <= COLD


async def test_what_does_not_get_smaller_is_stored_as_it_is(fs: Filesystem) -> None:
    old = await old_file(fs, "old", data=NOISE)
    await rule(fs, ROOT_INO, "30d:compress=zstd")
    info = await info_of(fs, old)
    assert len(NOISE) < info["stored_bytes"] < len(NOISE) + 100 and info["compression"] == 1.0
    assert await read_file(fs, old) == NOISE


@pytest.mark.sweep
@pytest.mark.store(KINDS["replicas"])
async def test_a_compressed_file_that_is_changed_is_an_ordinary_one_again(fs: Filesystem) -> None:
    changed = await old_file(fs, "changed", data=DATA)
    cut = await old_file(fs, "cut", data=DATA)
    await rule(fs, ROOT_INO, "30d:compress=zstd")
    assert await is_compressed(fs, changed) and await is_compressed(fs, cut)
    await fs.clone(ROOT_INO, b"changed", ROOT_INO, b"clone", ROOT)
    clone = (await fs.lookup(ROOT_INO, b"clone")).ino
    assert await is_compressed(fs, clone)
    await stores.overwrite(fs, changed, 100, b"new")
    await stores.overwrite(fs, cut, 0, b"short", os.O_TRUNC)
    await moved_out(fs, changed, cut)
    assert not await is_compressed(fs, changed)
    assert await read_file(fs, changed) == DATA[:100] + b"new" + DATA[103:]
    assert await read_file(fs, cut) == b"short"
    assert await read_file(fs, clone) == DATA


@pytest.mark.sweep
@pytest.mark.store(KINDS["coded"])
async def test_a_file_that_changes_while_it_is_compressed_keeps_what_was_written(fs):
    old = await old_file(fs, "old", data=DATA)
    reached, written = trio.Event(), trio.Event()

    async def write() -> None:
        await reached.wait()
        await stores.overwrite(fs, old, 0, b"new")
        written.set()

    with armed("vfs.compress.copied", reached.set):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            await rule(fs, ROOT_INO, "30d:cold,compress=zstd")
    await written.wait()
    assert await read_file(fs, old) == b"new" + DATA[3:]


@pytest.mark.sweep
@every_kind
async def test_a_crash_leaves_the_file_whole_and_the_next_pass_compresses_it(
    scratch: Path, kind: str
) -> None:
    config = await make(scratch, KINDS[kind])
    async with opened(config) as fs:
        old = await old_file(fs, "old", data=DATA)
    for point in ("data.append.written", "vfs.compress.copied"):
        with pytest.raises(SimulatedCrash):
            async with served(config) as fs:
                crashed = once(point, crash)
                await stores.put(fs, ROOT_INO, "age", "30d:cold,compress=zstd", ROOT)
                await trio.sleep_forever()
        assert crashed
        faults.disarm_all()
        await require_sound(config)
    async with served(config) as fs:
        await passed(fs)
        assert await is_compressed(fs, old)
        assert await read_file(fs, old) == DATA
        await fs.collector.drain(urgent=True)
    await require_sound(config)


async def test_a_full_class_leaves_the_file_and_takes_nothing(
    fs: Filesystem, scratch: Path
) -> None:
    old = await old_file(fs, "old", data=DATA)
    with failing("write_at", f"{scratch}/store/cold", errno.ENOSPC) as failed:
        await rule(fs, ROOT_INO, "30d:cold,compress=zstd")
        assert failed
        assert not await is_compressed(fs, old)
        assert fs.aging.status()["left_files"] and fs.aging.status()["reason"]
    await passed(fs)
    assert await is_compressed(fs, old)
    assert await read_file(fs, old) == DATA


@pytest.mark.sweep
async def test_bytes_that_nobody_can_tell_stay_where_they_are(fs: Filesystem) -> None:
    old = await old_file(fs, "old", data=DATA)
    inode = await fs.getattr(old)
    path = fs.store.servers[inode.objects.servers[0]].where((old, inode.oid))
    right = Path(path).read_bytes()
    Path(path).write_bytes(bytes(100) + right[100:])
    await rule(fs, ROOT_INO, "30d:cold,compress=zstd")
    assert not await is_compressed(fs, old)
    assert "checksum" in fs.aging.status()["reason"]
    Path(path).write_bytes(right)
    await passed(fs)
    assert await is_compressed(fs, old)
    assert await read_file(fs, old) == DATA


@pytest.mark.store(KINDS["coded"], cold=2)
async def test_protection_is_never_less_than_before(fs: Filesystem) -> None:
    old = await old_file(fs, "old", data=DATA)
    await rule(fs, ROOT_INO, "30d:cold,compress=zstd")
    assert not await is_compressed(fs, old)
    assert "3 data servers" in fs.aging.status()["reason"]


@pytest.mark.sweep
async def test_a_long_list_is_recorded_beforehand(fs, monkeypatch):
    monkeypatch.setattr(transitions, "LISTED_AT_ONCE", 1)
    changed = await old_file(fs, "changed", data=DATA)

    async def change() -> None:
        await reached.wait()
        await stores.overwrite(fs, changed, 0, b"new")

    reached = trio.Event()
    with armed("vfs.containers.listed", reached.set):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(change)
            await rule(fs, ROOT_INO, "30d:cold,compress=zstd")
    assert await read_file(fs, changed) == b"new" + DATA[3:]
    old = await old_file(fs, "old", data=DATA)
    await passed(fs)
    assert await is_compressed(fs, old)
    assert await read_file(fs, old) == DATA


async def test_what_is_mostly_holes_moves_as_it_is(fs, monkeypatch):
    monkeypatch.setattr(interleaved, "_HOLES_LISTED", CHUNK)
    old = await write_file(fs, b"old")
    await stores.overwrite(fs, old, 40 * CHUNK, b"end")
    await aged(fs, old)
    await rule(fs, ROOT_INO, "30d:cold,compress=zstd")
    assert await servers_of(fs, old) <= COLD
    await passed(fs)
    assert fs.aging.status()["files"] == 1, "it is where it should be"
    assert await read_file(fs, old) == bytes(40 * CHUNK) + b"end"


@pytest.mark.sweep
async def test_what_is_compressed_stays_in_its_class(fs: Filesystem) -> None:
    old = await old_file(fs, "old", data=DATA)
    await rule(fs, ROOT_INO, "30d:cold,compress=zstd")
    before = await info_of(fs, old)
    [part] = before["parts"]
    assert await fs.compaction.evacuate(int(Path(part["path"]).stem, 16))
    after = await info_of(fs, old)
    assert part not in after["parts"], "it was rewritten"
    assert after["layout"] == before["layout"] and {part["server"]} <= COLD
    await stores.put(fs, ROOT_INO, "server-drain", {"id": part["server"]}, ROOT)
    with trio.fail_after(30):
        while part["server"] in (await info_of(fs, old))["layout"]["servers"]:
            await fs.rebuild.news()
    assert set((await info_of(fs, old))["layout"]["servers"]) < COLD
    assert await read_file(fs, old) == DATA
