"""Groups whose files must have one size, groups of jobs that were killed, and how groups ended that
others have followed; on the filesystem in process."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from aifs.core.errors import (
    Busy,
    FsError,
    GroupCancelled,
    GroupTimeout,
    Invalid,
    NoAttribute,
    NotFound,
    Stale,
)
from aifs.saves import listed
from aifs.vfs import Caller, Filesystem
from tests.contract.test_group_hints import ROOT, SIZE, ask, durable, group_in, in_state, make, tree
from tests.support import stores
from tests.support.stores import LIMIT_S, call, opened, put, read_file
from tests.support.stores import fs as fs

CUT = SIZE - 1


@pytest.fixture
def process() -> Iterator[subprocess.Popen]:
    """A process that may be a rank."""
    with subprocess.Popen(["sleep", "1000"]) as started:
        yield started
        started.kill()


async def ended(fs: Filesystem, ino: int, group_id: int = 0) -> FsError | None:
    """What who waits for the group is told."""
    try:
        await fs.groups.wait(ino, group_id, True, LIMIT_S)
    except FsError as error:
        return error
    return None


async def commit(fs: Filesystem, ino: int, rank: int, file: bytes = b"") -> None:
    await call(fs, ino, "group.commit", rank=rank, file=os.fsdecode(file))


# --- one size -------------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("name", [b"1", b"\xff1"])
async def test_files_that_are_closed_with_other_sizes_fail_the_group(
    directory: Path, name: bytes
) -> None:
    async with opened(directory) as fs:
        top = await group_in(fs, "ranks=2,same_size=yes,publish=final")
        inos = [await make(fs, top, b"0", b"a" * SIZE), await make(fs, top, name, b"a" * CUT)]
        told = await in_state(fs, top, "failed")
        shown = name.decode(errors="replace").replace("\ufffd", "?")
        assert (
            told["error"] == f"/step/{shown} has {CUT} bytes, not the {SIZE} of /step/0"
            and told["unequal"]
        )
        error = await ended(fs, top)
        assert isinstance(error, Invalid) and str(error) == told["error"]
        await stores.drained(fs, *inos)
        assert [len(await read_file(fs, ino)) for ino in inos] == [SIZE, CUT]
        with pytest.raises(NotFound):
            await fs.lookup(ROOT, b"final")
    async with opened(directory) as fs:
        assert isinstance(await ended(fs, top), Invalid), "as it was on record"


async def test_a_file_counts_as_it_is_when_the_last_one_is_closed(fs: Filesystem) -> None:
    top = await group_in(fs, "ranks=2,same_size=yes")
    ino = await make(fs, top, b"0", b"a" * CUT)
    await stores.rewrite(fs, ino, b"a" * SIZE)
    await make(fs, top, b"1", b"b" * SIZE)
    assert (await durable(fs, top))["same_size"]


async def test_a_file_that_is_written_again_while_sizes_are_compared(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listed, "_DESCRIBED_AT_ONCE", 1)
    looked: list[int] = []

    async def view(function: Any, *args: Any) -> Any:
        found = await engine_view(function, *args)
        if function is listed.paths_of:
            looked.append(args[0][0].ino)
            if len(looked) == 2:
                await stores.rewrite(fs, inos[0], b"a" * SIZE)
        return found

    async with opened(directory) as fs:
        top = await group_in(fs, "ranks=2,same_size=yes")
        engine_view = fs.store.engine.view
        monkeypatch.setattr(fs.store.engine, "view", view)
        inos = [await make(fs, top, b"0", b"a" * CUT), await make(fs, top, b"1", b"a" * SIZE)]
        await durable(fs, top)
        assert looked == inos


async def test_a_rank_whose_file_has_another_size_is_refused(fs: Filesystem) -> None:
    """It may write it once more, and commit."""
    top = await group_in(fs, "ranks=3,same_size=yes,commit=explicit")
    inos = [
        await make(fs, top, b"%d" % rank, b"a" * (CUT if rank == 1 else SIZE)) for rank in range(3)
    ]
    await commit(fs, top, 2, b"2")
    with pytest.raises(Invalid, match=f"rank 1: /step/1 has {CUT} bytes, not the {SIZE} of rank 2"):
        await put(fs, top, "group.commit", "1 1")
    assert "rank 1: /step/1" in (await ask(fs, top))["refused"]
    with pytest.raises(Invalid, match="rank 0: sub/x is no file"):
        await commit(fs, top, 0, b"sub/x")
    with pytest.raises(Invalid, match="not the path"):
        await commit(fs, top, 0, b"../x")
    await commit(fs, top, 0, b"0")
    await stores.rewrite(fs, inos[1], b"a" * SIZE)
    await put(fs, top, "group.commit", "1 1")
    assert (await durable(fs, top))["duplicate_bytes"] == 2 * SIZE


async def test_the_last_commit_finds_files_that_nobody_named(directory: Path) -> None:
    async with opened(directory) as fs:
        top = await group_in(fs, "ranks=2,same_size=yes,commit=explicit")
        await make(fs, top, b"0", b"a" * SIZE)
        await make(fs, top, b".aifs-commit.0.json", b"{}")
        await commit(fs, top, 0, b"0")
    async with opened(directory) as fs:
        await make(fs, top, b"1", b"a" * CUT)
        with pytest.raises(Invalid, match=f"/step/1 has {CUT} bytes, not the {SIZE} of rank 0"):
            await commit(fs, top, 1)
        assert (await ask(fs, top))["state"] == "failed"


@pytest.mark.parametrize("by", ["commit", "group.commit"])
async def test_a_pending_directory_with_other_sizes_is_not_published(fs, by):
    await put(fs, ROOT, "publish", "burst", Caller())
    top = await group_in(fs, "ranks=2,same_size=yes,commit=explicit", b"final.pending")
    await put(fs, top, "pending", "ranks=2")
    for rank, size in enumerate((SIZE, CUT)):
        await make(fs, top, b"%d" % rank, b"a" * size)
        try:
            await put(fs, top, by, f"{rank}")
        except Invalid as error:
            assert by == "group.commit" and rank == 1, error
    with pytest.raises(
        Busy, match=f"/final.pending/1 has {CUT} bytes, not the {SIZE} of /final.pending/0"
    ):
        await fs.rename(ROOT, b"final.pending", ROOT, b"final")
    assert "/final.pending/1" in (await ask(fs, top, "pending"))["refused"]
    await in_state(fs, top, "failed")
    await put(fs, top, "group", "name=step,ranks=2,commit=explicit")
    with pytest.raises(Busy, match="2 of 2 ranks have not committed"):
        await fs.rename(ROOT, b"final.pending", ROOT, b"final")
    for rank in range(2):
        await put(fs, top, by, f"{rank}")
    await fs.rename(ROOT, b"final.pending", ROOT, b"final")


# --- groups of other jobs -------------------------------------------------------------------------


async def test_what_another_job_has_left_does_not_count(
    directory: Path, process: subprocess.Popen
) -> None:
    rank = Caller(1000, 1000, process.pid)
    async with opened(directory) as fs:
        top = await group_in(fs, "ranks=2,commit=explicit,job=1")
        left = (await ask(fs, top))["id"]
        await call(fs, top, "group.join", rank, rank=0)
        with pytest.raises(
            Invalid, match="job 2 cannot begin: job 1 is writing here, and its ranks 0 live"
        ):
            await put(fs, top, "group", "name=step,ranks=2,commit=explicit,job=2")
        await commit(fs, top, 0)
        await put(fs, top, "group", "name=step,ranks=2,commit=explicit")
        await put(fs, top, "group", "name=step,ranks=2,commit=explicit,job=1")
        assert (await ask(fs, top))["id"] == left, "of any job, or the same one"
        process.kill()
        while (await ask(fs, top))["members"][0]["pid"]:
            await trio.sleep(0.002)
        await put(fs, top, "group", "name=step,ranks=3,commit=explicit,job=2")
        told = await ask(fs, top)
        assert told["missing"] == [0, 1, 2] and told["job"] == "2"
        error = await ended(fs, top, left)
        assert isinstance(error, GroupCancelled) and "job 2 has begun anew" in str(error)


# --- groups that were followed --------------------------------------------------------------------


async def test_who_asks_late_is_told_how_its_own_group_ended(directory: Path) -> None:
    async with opened(directory) as fs:
        top = await tree(fs, b"step")
        numbers = []
        for timeout in ("10min", "10min", "10ms", "10min"):
            await put(fs, top, "group", f"name=step,ranks=1,timeout={timeout}")
            numbers.append((await ask(fs, top))["id"])
            if len(numbers) == 1:
                await make(fs, top, b"0", b"a" * SIZE)
                await durable(fs, top)
            elif len(numbers) == 2:
                await call(fs, top, "group.cancel", reason="rank 0: no time")
            elif len(numbers) == 3:
                await in_state(fs, top, "expired")
        assert await ended(fs, top, numbers[0]) is None
        cancelled, expired = await ended(fs, top, numbers[1]), await ended(fs, top, numbers[2])
        assert isinstance(cancelled, GroupCancelled) and str(cancelled) == "rank 0: no time"
        assert isinstance(expired, GroupTimeout)
        assert (await call(fs, top, "group.state", id=numbers[0]))["bytes"] == SIZE
        assert (await ask(fs, top, f"group.{numbers[1]}"))["error"] == "rank 0: no time"
        other = await tree(fs, b"other")
        for ino, wrong in ((top, 10**9), (other, numbers[0])):
            with pytest.raises((Stale, NoAttribute)):
                await ask(fs, ino, f"group.{wrong}")
    async with opened(directory) as fs:
        await call(fs, top, "group.cancel", reason="at last")
    async with opened(directory) as fs:
        await put(fs, top, "group", "name=step,ranks=1")
        assert str(await ended(fs, top, numbers[3])) == "at last", (
            "from the record that it replaced"
        )


async def test_of_many_groups_the_last_are_known(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aifs.saves.table._FOLLOWED_MAX", 2)
    async with opened(directory) as fs:
        top, numbers = await tree(fs, b"step"), []
        for _ in range(4):
            await put(fs, top, "group", "name=step,ranks=1")
            numbers.append((await ask(fs, top))["id"])
            await put(fs, top, "group", "")
        with pytest.raises(Stale):
            await call(fs, top, "group.state", id=numbers[0])
        assert (await call(fs, top, "group.state", id=numbers[1]))["id"] == numbers[1]
