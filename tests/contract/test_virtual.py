"""Virtual files on the filesystem in process: what a mount does not get to."""

import errno
import os
from pathlib import Path

import pytest

from aifs.core.errors import Invalid, NotFound, ReadOnly, Stale
from aifs.vfs import Caller, SetAttr
from aifs.vfs.virtual import walking
from aifs.vfs.virtual.numbers import FIRST, NAME
from tests.support.stores import opened, write_file

ROOT = 1


async def test_a_name_on_record_comes_first(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one of a store of an earlier version."""
    async with opened(directory) as fs:
        ino = await write_file(fs, b"file", b"content")
        virtual = await fs.lookup(ROOT, NAME)
        assert virtual.ino == FIRST | ROOT
        monkeypatch.setattr("aifs.vfs.virtual.numbers.NAME", b"elsewhere")
        await fs.rename(ROOT, b"file", ROOT, NAME)
        monkeypatch.undo()
        assert (await fs.lookup(ROOT, NAME)).ino == ino
        await fs.rename(ROOT, NAME, ROOT, b"file")
        assert (await fs.lookup(ROOT, NAME)).ino == virtual.ino
        with pytest.raises(ReadOnly):
            await fs.rename(ROOT, b"file", ROOT, NAME)
        with pytest.raises(ReadOnly):
            await fs.unlink(ROOT, NAME)


async def test_too_many_files_are_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(directory) as fs:
        for number in range(5):
            await write_file(fs, f"file{number}".encode(), b"content")
        monkeypatch.setattr(walking, "MEMBERS_MAX", 4)
        with pytest.raises(Invalid, match="more than 4 files"):
            await fs.lookup(FIRST | ROOT, b"files.tar")
        refused = fs.refusals.find(ROOT, Caller())
        assert refused is not None
        assert (refused["request"], refused["errno"]) == ("files.tar", errno.EINVAL)


async def test_paths_and_rights_that_would_cost_much_are_refused(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(directory) as fs:
        top = ROOT
        for _ in range(20):
            top = (await fs.mkdir(top, b"d" * 250, 0o755, Caller())).ino
        with monkeypatch.context() as patch:
            patch.setattr(walking, "TEXT_MAX", 50_000)
            with pytest.raises(Invalid, match="bytes of paths"):
                await fs.lookup(FIRST | ROOT, b"files.tar")
        for number in range(3):
            ino = await write_file(fs, b"%d" % number, b"content")
            await fs.setattr(ino, SetAttr(mode=0o600 + number), Caller())
        with monkeypatch.context() as patch:
            patch.setattr(walking, "RIGHTS_MAX", 3)
            with pytest.raises(Invalid, match="different owners, modes and ACLs"):
                await fs.lookup(FIRST | ROOT, b"files.tar")
        assert (await fs.lookup(FIRST | ROOT, b"files.tar")).size


async def test_what_is_made_again_has_another_number(directory: Path) -> None:
    async with opened(directory) as fs:
        await write_file(fs, b"file", b"content")
        first = await fs.lookup(FIRST | ROOT, b"files.tar")
        assert (await fs.lookup(FIRST | ROOT, b"files.tar")).ino == first.ino
        handle = (await fs.open(first.ino, os.O_RDONLY)).handle
        await fs.unlink(ROOT, b"file")
        second = await fs.lookup(FIRST | ROOT, b"files.tar")
        assert second.ino != first.ino
        assert await fs.getattr(first.ino) == first
        await fs.release(handle)
        with pytest.raises(Stale):
            await fs.getattr(first.ino)
        with pytest.raises(NotFound):
            await fs.lookup(FIRST | ROOT, b"other.tar")
        await fs.mkdir(ROOT, b"gone", 0o755, Caller())
        gone = (await fs.lookup(ROOT, b"gone")).ino
        await fs.rmdir(ROOT, b"gone")
        with pytest.raises(NotFound):
            await fs.lookup(gone, NAME)
        with pytest.raises(NotFound):
            await fs.lookup(FIRST | gone, b"files.tar")
