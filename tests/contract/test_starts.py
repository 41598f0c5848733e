"""What the filesystem in process records of the start of a job (reads)."""

import os
from functools import partial
from pathlib import Path

import pytest
import trio

from aifs.burst import copy
from aifs.core.errors import FsError, Invalid, NoAttribute
from aifs.core.start_record import BLOCK, SUFFIX, StartRecord, decode
from aifs.files.types import AHEAD, SetAttr
from aifs.reads import starts
from aifs.vfs import Caller, Filesystem
from tests.support import modes, stores
from tests.support.kernel import Kernel
from tests.support.stores import OWNER, ask, moved_out, put, read_file, write_file
from tests.support.stores import fs as fs

ROOT, OTHER = 1, Caller(uid=2000, gid=2000)
ADMIN = Caller(uid=0, gid=0)
SHAPE = modes.WAITING

opened = partial(stores.opened, base=SHAPE)
pytestmark = pytest.mark.store(base=SHAPE)


async def job(fs: Filesystem) -> int:
    return (await fs.mkdir(ROOT, b"job", 0o755, OWNER)).ino


async def look(
    fs: Filesystem, ino: int, *offsets: int, caller: Caller = OWNER, flags: int = 0
) -> None:
    """A program reads a few bytes at each place."""
    handle, *_ = await fs.open(ino, os.O_RDONLY | flags, caller=caller)
    for offset in offsets:
        await fs.read(handle, offset, 10)
    await fs.release(handle)


async def old_file(fs: Filesystem, name: bytes, size: int) -> int:
    """One that has not been changed in this second."""
    ino = await write_file(fs, name, b"x" * size)
    await fs.setattr(ino, SetAttr(mtime_ns=10**18), ADMIN)
    return ino


async def ended(fs: Filesystem, directory: int) -> None:
    while (await ask(fs, directory, "start"))["state"] != "ended":
        await trio.lowlevel.checkpoint()


async def recorded(fs: Filesystem, directory: int, run: str, caller: Caller = OWNER) -> StartRecord:
    await put(fs, directory, "start", "stop", caller=caller)
    await ended(fs, directory)
    inode = await fs.lookup(directory, f"{run}{SUFFIX}".encode())
    return decode(await read_file(fs, inode.ino))


async def test_what_is_read_is_recorded_in_order(fs: Filesystem) -> None:
    top = await job(fs)
    large = await write_file(fs, b"large", b"x" * 6 * BLOCK)
    small = await write_file(fs, b"small", b"y" * 5000)
    unread = await write_file(fs, b"unread", b"z" * 5000)
    await write_file(fs, b"tiny", b"t")
    await moved_out(fs, large, small, unread)
    await put(fs, top, "start", "record=first")
    await look(fs, small, 0)
    await look(fs, large, 4 * BLOCK, 0)
    await look(fs, small, 0)
    await look(fs, (await fs.lookup(ROOT, b"tiny")).ino, 0)
    found = await recorded(fs, top, "first")
    assert [(file.path, file.ino, file.runs) for file in found.files] == [
        ("/small", small, ((0, 1),)),
        ("/large", large, ((0, 1), (4, 1))),
    ]
    told = await ask(fs, top, "start")
    assert told == {
        "run": "first",
        "state": "ended",
        "files": 2,
        "bytes": 2 * BLOCK + 5000,
        "notes": [],
    }


async def test_it_is_a_file_of_whoever_has_asked(fs: Filesystem) -> None:
    top = await job(fs)
    await put(fs, top, "start", "record=1")
    await recorded(fs, top, "1")
    inode = await fs.lookup(top, b"1.start")
    assert (inode.uid, inode.gid, inode.mode & 0o777) == (1000, 1000, 0o644)


async def test_what_others_read_or_the_start_itself_writes_is_not(fs: Filesystem) -> None:
    top = await job(fs)
    theirs = await write_file(fs, b"theirs", b"x" * 5000)
    changed = await write_file(fs, b"changed", b"x" * 5000)
    gone = await write_file(fs, b"gone", b"x" * 5000)
    await moved_out(fs, theirs, changed, gone)
    await put(fs, top, "start", "record=1")
    await look(fs, theirs, 0, caller=OTHER)
    for ino in (changed, gone):
        await look(fs, ino, 0)
    await stores.overwrite(fs, changed, 0, b"new")
    await fs.unlink(ROOT, b"gone")
    await write_file(fs, b"log", b"x" * 5000)
    assert (await recorded(fs, top, "1")).files == ()


async def test_a_file_with_several_names_is_found_by_the_one_that_was_used(fs: Filesystem) -> None:
    top = await job(fs)
    both = await write_file(fs, b"cached", b"x" * 5000)
    env = (await fs.mkdir(ROOT, b"env", 0o755, OWNER)).ino
    await fs.link(both, env, b"linked")
    await moved_out(fs, both)
    await put(fs, top, "start", "record=1")
    await fs.lookup(env, b"linked")
    await look(fs, both, 0)
    assert [file.path for file in (await recorded(fs, top, "1")).files] == ["/env/linked"]


async def test_what_is_read_ahead_is_recorded_if_the_job_opens_it(fs: Filesystem) -> None:
    """Else it would stay in the records for ever."""
    top = await job(fs)
    used = await write_file(fs, b"used", b"x" * 3 * BLOCK)
    unused = await write_file(fs, b"unused", b"x" * 5000)
    await moved_out(fs, used, unused)
    await put(fs, top, "start", "record=1")
    for ino in (used, unused):
        await look(fs, ino, 0)
    assert len((await recorded(fs, top, "1")).files) == 2
    await put(fs, top, "start", "record=2")
    for ino in (used, unused):
        await look(fs, ino, 0, flags=AHEAD)
    await look(fs, used, 2 * BLOCK)
    found = await recorded(fs, top, "2")
    assert [(file.ino, file.runs) for file in found.files] == [(used, ((0, 1), (2, 1)))]


@pytest.mark.sweep
@pytest.mark.parametrize("reader", [AHEAD, 0])
@pytest.mark.parametrize("size", [5000, 2 * BLOCK])
async def test_opens_are_heard_of_while_a_start_is_recorded(
    directory: Path, monkeypatch: pytest.MonkeyPatch, reader: int, size: int
) -> None:
    """What a prefetcher, or somebody before, has opened is lent when it is left alone: the bridge
    answers the open of the job if the file is small, and tells of it."""
    monkeypatch.setattr(copy, "resident", lambda fd, size, step: None)
    async with opened(directory) as fs, Kernel(fs) as kernel:
        top = await job(fs)
        ino = await old_file(fs, b"file", size)
        before = [await kernel.open(ino, os.O_RDONLY) for _ in range(not reader)]
        await put(fs, top, "start", "record=1", caller=ADMIN)
        if reader:
            before.append(await kernel.open(ino, os.O_RDONLY | reader))
        for handle in before:
            await kernel.release(handle)
        answered = kernel.answered
        handle = await kernel.open(ino, os.O_RDONLY)
        assert kernel.answered - answered == (size <= BLOCK)
        await kernel.read(handle, 0, 10)
        await kernel.release(handle)
        found = await recorded(fs, top, "1", ADMIN)
        assert [file.ino for file in found.files] == [ino]
        for _ in range(2):
            await kernel.release(await kernel.open(ino, os.O_RDONLY))
        assert kernel.find_lent(ino) is not None and kernel.answered >= 2


async def test_what_is_answered_without_us_is_recorded_in_order(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the user who has asked alone, and not what is read ahead, or has changed meanwhile."""
    monkeypatch.setattr(copy, "resident", lambda fd, size, step: None)
    async with opened(directory) as fs, Kernel(fs) as kernel:
        top = await job(fs)
        inos = [await old_file(fs, b"%d" % n, 5000) for n in range(3)]
        large = await old_file(fs, b"large", 2 * BLOCK)
        changed, unused, used = inos

        async def use(ino: int, flags: int = 0, uid: int = ADMIN.uid) -> None:
            handle = await kernel.open(ino, os.O_RDONLY | flags, uid)
            await kernel.read(handle, 0, 10)
            await kernel.release(handle)

        for ino in inos:
            await use(ino)
        before = kernel.answered
        await put(fs, top, "start", "record=1", caller=ADMIN)
        await use(unused, uid=OTHER.uid)
        await use(unused, AHEAD)
        for ino in (used, changed, large, used):
            await use(ino)
        assert kernel.answered == before + 5
        handle = await kernel.open(changed, os.O_WRONLY)
        await kernel.write(handle, 0, b"new")
        await kernel.release(handle)
        found = await recorded(fs, top, "1", ADMIN)
        assert [file.ino for file in found.files] == [used, large]


async def test_without_cachestat_files_that_are_passed_through_count_as_a_whole(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy, "resident", lambda fd, size, step: None)
    async with opened(directory) as fs:
        top = await job(fs)
        ino = await write_file(fs, b"file", b"x" * 3 * BLOCK)
        await put(fs, top, "start", "record=1")
        await look(fs, ino, 0)
        assert (await recorded(fs, top, "1")).files[0].runs == ((0, 3),)
        assert "cachestat" in (await ask(fs, top, "start"))["notes"][0]


async def test_the_last_three_are_kept(fs: Filesystem) -> None:
    top = await job(fs)
    for run in "abcde":
        await put(fs, top, "start", f"record={run}")
        await recorded(fs, top, run)
    names = [name for name, *_ in await fs.readdir(top, 0)]
    assert sorted(names) == [b"c.start", b"d.start", b"e.start"]


async def test_who_has_begun_it_ends_it(fs: Filesystem) -> None:
    """Ranks of a host begin the same start; the last one ends it. Another start ends it, too."""
    top = await job(fs)
    for _ in range(2):
        await put(fs, top, "start", "record=1")
    await put(fs, top, "start", "stop")
    assert (await ask(fs, top, "start"))["state"] == "recording"
    await put(fs, top, "start", "record=2")
    assert (await ask(fs, top, "start"))["run"] == "2"
    await recorded(fs, top, "2")
    await put(fs, top, "start", "stop")  # once more than it was begun
    await fs.lookup(top, b"1.start")


async def test_it_ends_by_itself(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starts, "WINDOW_S", 0.01)
    async with opened(directory) as fs:
        top = await job(fs)
        await put(fs, top, "start", "record=1")
        await ended(fs, top)
        await fs.lookup(top, b"1.start")


async def test_a_directory_that_is_gone_has_no_record(fs: Filesystem) -> None:
    top = await job(fs)
    await put(fs, top, "start", "record=1")
    await fs.rmdir(ROOT, b"job")
    await put(fs, top, "start", "stop")
    await ended(fs, top)
    assert "no record was written" in fs.starts.tell(top)["notes"][0]


async def test_what_is_refused(fs: Filesystem) -> None:
    top, file = await job(fs), await write_file(fs, b"file", b"x", caller=OWNER)
    for text in ("", "record", "record=", "record=../x", "prefetch", "start"):
        with pytest.raises(Invalid):
            await put(fs, top, "start", text)
    with pytest.raises(NoAttribute):
        await ask(fs, top, "start")
    with pytest.raises(FsError):
        await put(fs, file, "start", "record=1")
    with pytest.raises(FsError):
        await fs.setxattr(top, b"user.aifs.start", b"record=1", caller=OTHER)


async def test_a_record_of_a_kernel_without_cachestat_serves_one_with_it(fs, monkeypatch):
    """And the other way round: what either has recorded of a file that is opened stays."""
    top = await job(fs)
    ino = await write_file(fs, b"file", b"x" * 3 * BLOCK)
    for run, runs in (("1-new", ((1, 1),)), ("2-old", ((0, 3),)), ("3-new", ((0, 3),))):
        seen = iter([[0, 0, 0], [0, 9, 0]])
        tell = {"old": lambda *_: None, "new": lambda *_, seen=seen: next(seen)}
        monkeypatch.setattr(copy, "resident", tell[run[2:]])
        await put(fs, top, "start", f"record={run}")
        await look(fs, ino, BLOCK)
        assert (await recorded(fs, top, run)).files[0].runs == runs
        assert bool((await ask(fs, top, "start"))["notes"]) == run.endswith("old")
