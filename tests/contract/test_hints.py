"""The hints of the burst tier on the filesystem in process: what they tell, set, start and
refuse.
"""

import os

import pytest
import trio

from aifs.cli.info import describe_layout
from aifs.core.errors import (
    Busy,
    FsError,
    Invalid,
    NoAttribute,
    NotPermitted,
    NotSupported,
    TimedOut,
)
from aifs.vfs import Caller, Filesystem
from tests.support import modes, stores
from tests.support.stores import OWNER, ask, call, get, put, read_file
from tests.support.stores import fs as fs

ROOT, OTHER = 1, Caller(uid=2000, gid=2000)
SIZE = 40 << 10
SHAPE = modes.WAITING | {"layout.unit": "4KiB"}

pytestmark = pytest.mark.store(base=SHAPE)


async def make(fs: Filesystem, parent: int, name: bytes, size: int = SIZE) -> int:
    """A closed file of OWNER's."""
    return await stores.write_file(fs, name, bytes([name[0]]) * size, parent, OWNER)


async def tree(fs: Filesystem, name: bytes) -> int:
    return (await fs.mkdir(ROOT, name, 0o755, OWNER)).ino


async def state(fs: Filesystem, ino: int) -> str:
    return (await ask(fs, ino, "state"))["state"]


async def until_staged(fs: Filesystem, ino: int) -> None:
    while (await ask(fs, ino, "state"))["staging"]:
        await trio.lowlevel.checkpoint()


# --- policies -------------------------------------------------------------------------------------


async def test_policies_can_be_taken_back(fs: Filesystem) -> None:
    top = await tree(fs, b"top")
    said = {
        "layout": "unit=8KiB",
        "tier": "capacity",
        "expected_size": "1GiB",
        "publish": "capacity",
    }
    for name, text in said.items():
        await put(fs, top, name, text)
    for name in said:
        await fs.removexattr(top, b"user.aifs." + name.encode(), OWNER)
    assert (await fs.getattr(top)).policy is None
    with pytest.raises(NoAttribute):
        await fs.removexattr(top, b"user.aifs.layout", OWNER)


async def test_policies_are_inherited_and_keep_each_other(fs: Filesystem) -> None:
    top = await tree(fs, b"top")
    assert await get(fs, top, "tier") == "default"
    for missing in ("layout", "expected_size"):
        with pytest.raises(NoAttribute):
            await get(fs, top, missing)
    await put(fs, top, "tier", "capacity")
    with pytest.raises(NoAttribute):
        await get(fs, top, "layout")
    await put(fs, top, "layout", "unit=8KiB,count=2")
    await put(fs, top, "expected_size", "3MiB")
    below = (await fs.mkdir(top, b"below", 0o755, OWNER)).ino
    ino = await make(fs, below, b"file")
    for one in (top, below):
        assert await get(fs, one, "layout") == "unit=8KiB,count=2"
        assert await get(fs, one, "expected_size") == "3MiB"
    assert await get(fs, ino, "tier") == "capacity"
    assert (await ask(fs, ino, "info"))["form"] == "striped"
    assert (await ask(fs, ino, "info"))["layout"]["unit"] == 8 << 10
    await put(fs, top, "tier", "default")
    await put(fs, top, "layout", "count=0")
    await put(fs, top, "expected_size", "0")
    assert (await fs.getattr(top)).policy is None


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tier", ""),
        ("tier", "fast"),
        ("expected_size", "much"),
        ("expected_size", "8EiB"),
        ("layout", "unit=1"),
        ("layout", "servers=7"),
        ("layout", "servers=32768"),
        ("drain", "now"),
        ("stage", "1"),
    ],
)
async def test_wrong_values_are_refused(fs: Filesystem, name: str, value: str) -> None:
    ino = await make(fs, ROOT, b"file", 0)
    with pytest.raises(Invalid):
        await put(fs, ino, name, value)


async def test_a_backup_goes_to_an_absolute_path(fs: Filesystem) -> None:
    """A relative one would lie below wherever the daemon works."""
    for path in ("copies", "./copies", "../copies"):
        with pytest.raises(Invalid):
            await put(fs, ROOT, "backup", f"1:{path}", Caller())
    assert fs.backup.status()["answers"] == {}


async def test_what_a_file_will_be_laid_out_by_is_settled_once_it_has_bytes(fs: Filesystem) -> None:
    ino = await make(fs, ROOT, b"file")
    for name, value in (("layout", "count=1"), ("expected_size", "1MiB")):
        with pytest.raises(Invalid):
            await put(fs, ino, name, value)
    await put(fs, ino, "tier", "pinned")
    assert await get(fs, ino, "tier") == "pinned"


async def test_only_what_is_known_can_be_set(fs: Filesystem) -> None:
    link = (await fs.symlink(ROOT, b"link", b"x", OWNER)).ino
    for name in ("state", "info", "status", "server-add", "nonsense"):
        with pytest.raises(NotPermitted):
            await put(fs, ROOT, name)
    for name in ("state", "tier", "nonsense"):
        with pytest.raises(NoAttribute):
            await get(fs, link, name)
    assert await fs.listxattr(ROOT) == []


# --- state, drain ---------------------------------------------------------------------------------


async def test_state_counts_what_lies_where(fs: Filesystem) -> None:
    top = await tree(fs, b"top")
    below = (await fs.mkdir(top, b"below", 0o755, OWNER)).ino
    assert await ask(fs, top, "state") == {
        "state": "clean",
        "since_s": None,
        "bytes": dict.fromkeys(("dirty", "draining", "clean", "cached"), 0),
        "files": dict.fromkeys(("dirty", "draining", "clean", "cached"), 0),
        "block_bytes": 0,
    }
    dirty = await make(fs, below, b"dirty")
    await fs.link(dirty, top, b"again")
    await fs.symlink(top, b"link", b"x", OWNER)
    clean = await make(fs, below, b"clean")
    await fs.wait_drained(clean)
    await put(fs, clean, "evict")
    for number in range(100):
        await make(fs, below, b"n%d" % number, 0)
    found = await ask(fs, top, "state")
    assert found["state"] == "dirty" and found["since_s"] > 1e9
    assert found["bytes"] == {"dirty": SIZE, "draining": 0, "clean": SIZE, "cached": 0}
    assert found["files"]["clean"] == 1
    assert sum(found["files"].values()) == 102
    one = await ask(fs, dirty, "state")
    assert (one["state"], one["open"], one["copy"], one["pinned"], one["staging"]) == (
        "dirty",
        False,
        True,
        False,
        False,
    )
    handle, *_ = await fs.open(dirty, os.O_RDONLY)
    assert (await ask(fs, dirty, "state"))["open"]
    await fs.release(handle)


@pytest.mark.engines
async def test_drain_moves_a_tree_and_nothing_else(fs: Filesystem) -> None:
    top, other = await tree(fs, b"top"), await tree(fs, b"other")
    below = (await fs.mkdir(top, b"below", 0o755, OWNER)).ino
    inos = [await make(fs, below, b"%c" % number) for number in range(97, 107)]
    beside = await make(fs, other, b"beside")
    before = await ask(fs, top, "drain")
    assert (before["files"], before["bytes"], before["open_files"]) == (10, 10 * SIZE, 0)
    assert before["oldest_since_ns"] > 1e18
    assert (await ask(fs, ROOT, "drain"))["files"] == 11
    await put(fs, top, "drain")
    await fs.wait_drained(top)
    assert await ask(fs, top, "drain") == {
        "files": 0,
        "bytes": 0,
        "open_files": 0,
        "oldest_since_ns": None,
        "error": "",
        "hosts": {},
        "again_files": 0,
        "again_in_s": None,
    }
    assert [await state(fs, ino) for ino in inos] == ["cached"] * 10
    assert await state(fs, beside) == "dirty"
    assert await read_file(fs, inos[3]) == b"d" * SIZE
    info = await ask(fs, inos[0], "info")
    assert (info["form"], info["copy"]["state"]) == ("striped", "cached")
    assert os.path.getsize(info["copy"]["path"]) == SIZE


async def test_waiting_for_an_open_file_ends_with_the_time_out(fs: Filesystem) -> None:
    ino = await make(fs, ROOT, b"file")
    handle, *_ = await fs.open(ino, os.O_RDWR)
    assert (await ask(fs, ROOT, "drain"))["open_files"] == 1
    with pytest.raises(TimedOut):
        await fs.wait_drained(ROOT, 0.05)
    await fs.release(handle)
    await fs.wait_drained(ROOT, 10)
    assert await state(fs, ino) == "cached"


@pytest.mark.sweep
async def test_state_of_a_large_tree_does_not_hold_up_others(fs: Filesystem) -> None:
    top = await tree(fs, b"top")
    for number in range(1000):
        await make(fs, top, b"%d" % number, 0)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(others)
        before = turns
        assert sum((await ask(fs, top, "state"))["files"].values()) == 1000
        assert turns - before >= 1000 // 64
        nursery.cancel_scope.cancel()


# --- stage, evict ---------------------------------------------------------------------------------


@pytest.mark.engines
@pytest.mark.store(modes.STRIPED | {"burst.blocks": "always"})
async def test_evict_and_stage(fs: Filesystem) -> None:
    ino = await make(fs, ROOT, b"file")
    with pytest.raises(Busy):
        await put(fs, ino, "evict")
    await fs.wait_drained(ino)
    for caller, name in ((OTHER, "evict"), (OTHER, "stage")):
        with pytest.raises(NotPermitted):
            await put(fs, ino, name, caller=caller)
    handle, *_ = await fs.open(ino, os.O_RDONLY)
    with pytest.raises(Busy):
        await put(fs, ino, "evict")
    await fs.release(handle)
    await put(fs, ino, "tier", "pinned")
    with pytest.raises(Busy):
        await put(fs, ino, "evict", caller=Caller())
    await put(fs, ino, "tier", "default")
    await put(fs, ino, "evict")
    await put(fs, ino, "evict")
    assert await state(fs, ino) == "clean"
    assert "copy" not in await ask(fs, ino, "info")
    await fs.tier.look()  # it is known how much room blocks have
    await put(fs, ino, "stage")
    await until_staged(fs, ino)
    told = await ask(fs, ino, "state")
    assert (told["state"], told["copy"], told["block_bytes"]) == ("cached", False, SIZE)
    await put(fs, ino, "tier", "pinned")
    await put(fs, ino, "stage")
    await until_staged(fs, ino)
    assert (await ask(fs, ino, "state"))["copy"], "a copy stays, blocks may go"
    assert await read_file(fs, ino) == b"f" * SIZE


@pytest.mark.engines
async def test_evict_takes_many_files_and_trees_at_once(fs: Filesystem) -> None:
    top, other = await tree(fs, b"top"), await tree(fs, b"other")
    below = (await fs.mkdir(top, b"below", 0o755, OWNER)).ino
    inos = [await make(fs, below, b"%c" % number) for number in range(97, 107)]
    beside = await make(fs, other, b"beside")
    assert await call(fs, top, "evict") == {"files": 0, "bytes": 0, "kept": {"dirty": 10}}
    await fs.wait_drained(ROOT)
    assert await call(fs, top, "evict", OTHER) == {"files": 0, "bytes": 0, "kept": {"owner": 10}}
    handle, *_ = await fs.open(inos[0], os.O_RDONLY)
    await put(fs, inos[1], "tier", "pinned")
    told = await call(fs, ROOT, "evict", inos=[*inos[:5], 1 << 60])
    assert told == {"files": 3, "bytes": 3 * SIZE, "kept": {"open": 1, "pinned": 1}}
    await fs.release(handle)
    told = await call(fs, other, "evict", inos=[top, beside])
    assert told == {"files": 7, "bytes": 7 * SIZE, "kept": {"pinned": 1}}
    assert [await state(fs, ino) for ino in inos] == ["clean", "cached", *["clean"] * 8]
    assert await call(fs, beside, "evict") == {"files": 0, "bytes": 0, "kept": {}}
    assert await read_file(fs, inos[3]) == b"d" * SIZE


@pytest.mark.store(modes.STRIPED | {"burst.blocks": "always"})
async def test_stage_takes_many_files_at_once(fs: Filesystem) -> None:
    top = await tree(fs, b"top")
    inos = [await make(fs, top, b"%c" % number) for number in range(97, 107)]
    await fs.wait_drained(ROOT)
    none = {"files": 0, "bytes": 0, "there": 0, "kept": {}}
    assert await call(fs, top, "stage", OTHER, inos=inos) == none | {"there": 10}
    await call(fs, top, "evict")
    await fs.tier.look()  # it is known how much room blocks have
    assert await call(fs, top, "stage", OTHER, inos=inos) == none | {"kept": {"owner": 10}}
    await put(fs, inos[0], "tier", "pinned")
    await put(fs, inos[1], "tier", "capacity")
    told = await call(fs, ROOT, "stage", inos=[*inos[:4], inos[0], 1 << 60], limit=2 * SIZE)
    assert told == none | {
        "files": 2,
        "bytes": 2 * SIZE,
        "kept": {"capacity": 1, "limit": 1},
    }
    assert await call(fs, inos[3], "stage") == none | {"files": 1, "bytes": SIZE}
    told = await call(fs, ROOT, "stage", inos=inos)
    assert told == none | {"files": 6, "bytes": 6 * SIZE, "there": 3, "kept": {"capacity": 1}}
    states = [(await ask(fs, ino, "state")) for ino in inos]
    assert [told["state"] for told in states] == ["cached", "clean", *["cached"] * 8]
    assert [told["copy"] for told in states] == [True, *[False] * 9]
    assert await read_file(fs, inos[3]) == b"d" * SIZE


@pytest.mark.store({"burst.blocks": "auto"})
async def test_what_is_as_near_is_not_staged(fs: Filesystem) -> None:
    ino = await make(fs, ROOT, b"file")
    await fs.wait_drained(ROOT)
    await call(fs, ino, "evict")
    told = await call(fs, ino, "stage")
    assert told == {"files": 0, "bytes": 0, "there": 0, "kept": {"near": 1}}


async def test_only_files_can_be_staged_and_evicted(fs: Filesystem) -> None:
    for name in ("stage", "evict"):
        with pytest.raises(Invalid):
            await put(fs, ROOT, name, caller=Caller())
    with pytest.raises(Invalid):
        await call(fs, ROOT, "stage")


@pytest.mark.store({"burst.directories": ""})
async def test_without_a_burst_tier(fs: Filesystem) -> None:
    ino = await make(fs, ROOT, b"file")
    assert await state(fs, ino) == "clean"
    await put(fs, ino, "drain")
    await fs.wait_drained(ROOT, 1)
    await put(fs, ino, "evict")
    with pytest.raises(NotSupported):
        await put(fs, ino, "stage")
    with pytest.raises(NotSupported):
        await call(fs, ino, "stage")
    status = await ask(fs, ROOT, "status")
    assert status["burst"]["devices"] == []


async def test_a_pinned_file_stays_when_it_has_been_drained_or_staged(fs: Filesystem) -> None:
    top = await tree(fs, b"top")
    await put(fs, top, "tier", "pinned")
    ino = await make(fs, top, b"file")
    await fs.wait_drained(ino)
    assert (await ask(fs, ino, "state"))["pinned"]
    assert (await ask(fs, ROOT, "status"))["burst"]["devices"][0]["pinned_bytes"] >= SIZE


# --- reports --------------------------------------------------------------------------------------


async def test_info_names_the_containers_of_an_interleaved_file(fs: Filesystem) -> None:
    top = await tree(fs, b"top")
    await put(fs, top, "layout", "kind=interleaved")
    ino = await make(fs, top, b"file")
    await fs.wait_drained(ino)
    info = await ask(fs, ino, "info")
    assert (info["form"], info["layout"]["kind"]) == ("interleaved", "interleaved")
    assert await get(fs, ino, "layout") == "kind=interleaved,count=0"
    (part,) = info["parts"]
    assert [part["server"]] == info["layout"]["servers"]
    assert 0 < part["bytes"] <= os.path.getsize(part["path"])


@pytest.mark.parametrize(
    ("policy", "columns", "replicas", "parity", "width"),
    [("replicas=3", 3, 3, 0, 1), ("ec=2+1", 3, 1, 1, 2)],
)
async def test_info_of_a_protected_interleaved_file_tells_its_redundancy(
    fs, policy, columns, replicas, parity, width
):
    """All servers that have a part of it, and not the first one alone."""
    top = await tree(fs, b"top")
    await put(fs, top, "layout", f"kind=interleaved,{policy}")
    ino = await make(fs, top, b"file")
    await fs.wait_drained(ino)
    info = await ask(fs, ino, "info")
    layout = info["layout"]
    assert (layout["replicas"], layout["parity"], layout["width"]) == (replicas, parity, width)
    assert len(layout["servers"]) == len(info["parts"]) == columns
    assert sorted(part["server"] for part in info["parts"]) == layout["servers"]
    for part in info["parts"]:
        assert 0 < part["bytes"] <= os.path.getsize(part["path"])
    said = describe_layout(layout)
    assert ("3 replicas" if replicas > 1 else "2+1 coded") in said


async def test_status_has_a_part_for_each_module(fs: Filesystem) -> None:
    fs.kernel.status = lambda: {"in_use": True, "passthrough": True}
    await make(fs, ROOT, b"file")
    status = await ask(fs, ROOT, "status")
    assert [server["id"] for server in status["servers"]] == [0, 1, 2, 3]
    assert [device["dirty_bytes"] for device in status["burst"]["devices"]] == [SIZE]
    assert (status["drain"]["files"], status["drain"]["bytes"]) == (1, SIZE)
    assert status["memory"]["total_bytes"] > 0 and "hits" in status["cache"]
    assert status["bridge"] == {"in_use": True, "passthrough": False}


async def test_answers_keep_their_length_while_numbers_grow(fs: Filesystem) -> None:
    for name in ("state", "drain", "status"):
        assert len(await get(fs, ROOT, name)) % 64 == 0


async def test_hints_of_a_file_that_is_gone(fs: Filesystem) -> None:
    for name in ("state", "drain", "info", "tier"):
        with pytest.raises(FsError):
            await get(fs, 999_999, name)
