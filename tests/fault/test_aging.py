"""Old files move to another class of data servers (user.aifs.age)."""

import os
import time
from pathlib import Path

import pytest
import trio

from aifs.core import faults
from aifs.core.errors import FsError, Invalid, NoAttribute, NotPermitted
from aifs.core.faults import SimulatedCrash
from aifs.files.types import ROOT, SetAttr
from aifs.meta.keys import ROOT_INO
from aifs.vfs import Caller, Filesystem
from tests.support import stores
from tests.support.aged import COLD, DATA, KINDS, make, old_file, opened, passed, rule, servers_of
from tests.support.aged import fs as fs
from tests.support.points import armed, crash, once
from tests.support.stores import by_kind, moved_out, read_file, require_sound, served, write_file

every_kind = by_kind(KINDS)

pytestmark = pytest.mark.store(KINDS["plain"])


@every_kind
async def test_old_files_move_and_others_stay(fs: Filesystem, kind: str) -> None:
    old = await old_file(fs, "old")
    young = await old_file(fs, "young", days=20)
    read = await old_file(fs, "read")
    await fs.setattr(read, SetAttr(atime_ns=time.time_ns()), ROOT)
    assert not await servers_of(fs, old) & COLD, "new files go elsewhere"
    tolerates = (await fs.getattr(old)).objects.tolerates
    await rule(fs, ROOT_INO, "30d:cold")
    assert await servers_of(fs, old) <= COLD
    assert (await fs.getattr(old)).objects.tolerates == tolerates
    assert not (await servers_of(fs, young) | await servers_of(fs, read)) & COLD
    assert await read_file(fs, old) == DATA
    status = fs.aging.status()
    assert (status["files"], status["left_files"]) == (1, 0) and status["bytes"] >= len(DATA)
    await stores.rewrite(fs, old, DATA[::-1])
    await moved_out(fs, old)
    assert not await servers_of(fs, old) & COLD, "it is new again"
    assert await read_file(fs, old) == DATA[::-1]


async def test_the_nearest_rule_holds_for_what_was_there_before(scratch: Path) -> None:
    config = await make(scratch, KINDS["plain"])
    async with opened(config) as fs:
        upper = (await fs.mkdir(ROOT_INO, b"upper", 0o755, ROOT)).ino
        lower = (await fs.mkdir(upper, b"lower", 0o755, ROOT)).ino
        deep = (await fs.mkdir(lower, b"deep", 0o755, ROOT)).ino
        outside = await old_file(fs, "outside")
        above = await old_file(fs, "above", upper)
        below = await old_file(fs, "below", deep)
        await rule(fs, lower, "60d:cold")
        await rule(fs, upper, "30d:cold")
        assert await servers_of(fs, above) <= COLD
        assert not (await servers_of(fs, below) | await servers_of(fs, outside)) & COLD
        await fs.removexattr(lower, b"user.aifs.age", ROOT)
        await passed(fs)
        assert await servers_of(fs, below) <= COLD
        assert not await servers_of(fs, outside) & COLD
        await rule(fs, lower, "1d:cold")
        await fs.unlink(deep, b"below")
        await fs.rmdir(lower, b"deep")
        await fs.rmdir(upper, b"lower")
    async with served(config) as fs:
        assert await stores.numbers(fs, b"f") == [upper], "a directory takes its rule along"


async def test_a_rule_is_set_by_the_owner_and_makes_sense(fs: Filesystem) -> None:
    top = (await fs.mkdir(ROOT_INO, b"top", 0o777, stores.OWNER)).ino
    with pytest.raises(NotPermitted):
        await rule(fs, top, "30d:cold", Caller(uid=5, gid=5))
    wrong = ["30d", "cold", "30d:", ":cold", "soon:cold", "30d:Cold", "30d:a/b", "-1d:a"]
    for text in (*wrong, "30d:nosuchclass", "30d:nosuchclass,compress=zstd"):
        with pytest.raises(Invalid):
            await rule(fs, top, text, stores.OWNER)
    with pytest.raises(NoAttribute):
        await stores.get(fs, top, "age")
    await rule(fs, top, " 720h:cold ", stores.OWNER)
    assert await stores.get(fs, top, "age") == "30d:cold"
    file = await write_file(fs, b"file", b"", top)
    with pytest.raises(FsError):
        await rule(fs, file, "30d:cold")


@pytest.mark.store(KINDS["coded"], cold=2)
async def test_a_file_stays_where_the_class_cannot_protect_it(fs: Filesystem) -> None:
    old = await old_file(fs, "old")
    await rule(fs, ROOT_INO, "30d:cold")
    assert not await servers_of(fs, old) & COLD
    assert fs.aging.status()["left_files"] == 1
    assert "too few data servers" in fs.aging.status()["reason"]
    for server in fs.store.servers.capacity():
        server.storage_class = ""
    await passed(fs)
    assert "the class cold" in fs.aging.status()["reason"]
    assert await read_file(fs, old) == DATA


@pytest.mark.store({"layout.kind": "interleaved"})
async def test_small_files_in_containers_stay(fs: Filesystem) -> None:
    old = await old_file(fs, "old")
    before = (await fs.getattr(old)).layout
    await rule(fs, ROOT_INO, "30d:cold")
    assert (await fs.getattr(old)).layout == before
    assert fs.aging.status()["left_files"] == 0


@every_kind
async def test_a_file_that_changes_meanwhile_keeps_what_was_written(fs, kind):
    old = await old_file(fs, "old")
    handle, *_ = await fs.open(old, os.O_RDWR)
    reached, written = trio.Event(), trio.Event()

    async def write() -> None:
        await reached.wait()
        await fs.write(handle, 0, b"new")
        await fs.release(handle)
        written.set()

    with armed("vfs.relayout.copied", reached.set):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            await rule(fs, ROOT_INO, "30d:cold")
            reached.set()  # it may have stayed from the start, as it is open for writing
    await written.wait()
    assert await read_file(fs, old) == b"new" + DATA[3:]


@pytest.mark.sweep
@every_kind
async def test_a_crash_leaves_the_file_whole_and_the_next_pass_moves_it(
    scratch: Path, kind: str
) -> None:
    config = await make(scratch, KINDS[kind])
    async with opened(config) as fs:
        old = await old_file(fs, "old")
    with pytest.raises(SimulatedCrash):
        async with served(config) as fs:
            crashed = once("vfs.relayout.copied", crash)
            await stores.put(fs, ROOT_INO, "age", "30d:cold", ROOT)
            await trio.sleep_forever()
    assert crashed
    faults.disarm_all()
    await require_sound(config)
    async with served(config) as fs:
        await passed(fs)
        assert await servers_of(fs, old) <= COLD
        assert await read_file(fs, old) == DATA
        await fs.collector.drain(urgent=True)
    await require_sound(config)


@pytest.mark.store(KINDS["replicas"])
async def test_what_leaves_a_cold_server_goes_to_another_one(fs: Filesystem) -> None:
    old = await old_file(fs, "old")
    await rule(fs, ROOT_INO, "30d:cold")
    gone = min(await servers_of(fs, old))
    await stores.put(fs, ROOT_INO, "server-drain", {"id": gone}, ROOT)
    with trio.fail_after(30):
        while gone in await servers_of(fs, old):
            await fs.rebuild.news()
    assert await servers_of(fs, old) <= COLD - {gone}
    assert await read_file(fs, old) == DATA
