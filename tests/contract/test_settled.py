"""Many small files that are read at once, as those of ``files.tar``: the right bytes in whatever
form they are, or an error, and none is opened as long as all is simple."""

import io
import os
import tarfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

from aifs.core.errors import FsError, Stale
from aifs.data.server import DataServer
from aifs.files.file_io import FileIO
from aifs.files.types import ROOT as BY_ROOT
from aifs.files.virtual import FIRST
from aifs.layout.hint import Policy
from aifs.meta.keys import ROOT_INO as ROOT
from aifs.vfs import Filesystem
from tests.support import modes, stores
from tests.support.cluster import cluster as cluster
from tests.support.cluster import north as north
from tests.support.cluster import south as south
from tests.support.stores import moved_out, opened, read_file, rewrite, write_file

SIZES = [100, 5000, 40_000, 100_000, 1 << 20, 0, 70_000, 9000]
FORMS: dict[str, tuple[Mapping[str, object], bool]] = {
    "containers": (modes.INTERLEAVED, True),
    "replicated containers": (modes.INTERLEAVED | modes.REPLICAS, True),
    "coded containers": (modes.INTERLEAVED | modes.CODED, True),
    "objects": (modes.STRIPED, True),
    "copies": (modes.INTERLEAVED, False),
}
"""Settings, and whether the copies in the burst tier are evicted."""

ONE_BY_ONE: dict[str, tuple[Mapping[str, object], bool]] = {
    "compressed": (modes.INTERLEAVED | {"layout.compress": "zstd:3"}, True),
    "checked": (modes.INTERLEAVED | {"data.verify": "read"}, True),
    "replicated objects": (modes.STRIPED | modes.REPLICAS, True),
}


def content_of(number: int) -> bytes:
    return bytes((number, 7)) * (SIZES[number] // 2)


@asynccontextmanager
async def stored(
    directory: Path, settings: Mapping[str, object], is_evicted: bool = True
) -> AsyncIterator[tuple[Filesystem, dict[bytes, int]]]:
    """A filesystem with files that are drained, and their inode numbers by name."""
    base = modes.ON
    async with opened(directory, settings, base=base) as fs:
        inos = {
            b"%d" % number: await write_file(fs, b"%d" % number, content_of(number))
            for number in range(len(SIZES))
        }
        await (moved_out if is_evicted else stores.drained)(fs, *inos.values())
        yield fs, inos


async def read_archive(fs: Filesystem, top: int = ROOT) -> dict[str, bytes]:
    """The files of an archive by name."""
    inode = await fs.lookup(FIRST | top, b"files.tar")
    whole = await read_file(fs, inode.ino)
    with tarfile.open(fileobj=io.BytesIO(whole)) as tar:
        return {
            member.name: file.read()
            for member in tar
            if member.isreg() and (file := tar.extractfile(member)) is not None
        }


EXPECTED = {str(number): content_of(number) for number in range(len(SIZES))}


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """How many files were read one by one."""
    seen: Counter[str] = Counter()
    whole = FileIO.read

    async def read(self: FileIO, *args: object) -> object:
        seen["one by one"] += 1
        return await whole(self, *args)  # type: ignore[arg-type]

    with patch.object(FileIO, "read", read):
        yield seen


@pytest.mark.parametrize("form", FORMS)
async def test_none_is_opened(form: str, directory: Path) -> None:
    async with stored(directory, *FORMS[form]) as (fs, _):
        with counting() as seen:
            assert await read_archive(fs) == EXPECTED
        assert not seen


@pytest.mark.parametrize("form", ONE_BY_ONE)
async def test_what_is_not_simple_is_read_one_by_one(form: str, directory: Path) -> None:
    async with stored(directory, *ONE_BY_ONE[form]) as (fs, _):
        with counting() as seen:
            assert await read_archive(fs) == EXPECTED
        assert seen


async def test_files_in_all_states_beside_each_other(directory: Path) -> None:
    async with stored(directory, modes.INTERLEAVED) as (fs, inos):
        handle, *_ = await fs.open(inos[b"3"], os.O_RDWR)
        await fs.write(handle, 0, b"new")  # open, and in the burst tier alone
        await rewrite(fs, inos[b"2"], b"rewritten" * 1000)
        await fs.rename(ROOT, b"1", ROOT, b"renamed", 0, BY_ROOT)
        await fs.unlink(ROOT, b"0")
        ino = await write_file(fs, b"variable", b"")
        await stores.set_policy(fs, ino, Policy(kind="striped"))
        await rewrite(fs, ino, b"z" * 300_000)
        found = await read_archive(fs)
        await fs.release(handle)
    assert found == {
        "renamed": content_of(1),
        "2": b"rewritten" * 1000,
        "3": b"new" + content_of(3)[3:],
        **{str(number): content_of(number) for number in (4, 5, 6, 7)},
        "variable": b"z" * 300_000,
    }


async def test_clones_and_what_is_compacted(directory: Path) -> None:
    async with stored(directory, modes.INTERLEAVED) as (fs, inos):
        top = (await fs.mkdir(ROOT, b"d", 0o755, BY_ROOT)).ino
        for name in inos:
            await fs.rename(ROOT, name, top, name, 0, BY_ROOT)
        await fs.clone(ROOT, b"d", ROOT, b"clone", BY_ROOT)
        clone = (await fs.lookup(ROOT, b"clone")).ino
        assert await read_archive(fs, clone) == EXPECTED
        for number in (0, 2, 4):
            await fs.unlink(top, b"%d" % number)
        await fs.compaction.compact()
        assert await read_archive(fs, clone) == EXPECTED


@pytest.mark.parametrize("form", ["objects", "copies"])
async def test_no_bytes_of_two_versions(form: str, directory: Path) -> None:
    """A file that is changed while it is read in place."""
    async with stored(directory, *FORMS[form]) as (fs, inos):
        inode = await fs.lookup(FIRST | ROOT, b"files.tar")
        handle, *_ = await fs.open(inode.ino, os.O_RDONLY)
        view = type(fs.store.engine).view
        is_changed = False

        async def change(self: object, function: Callable, *args: object) -> object:
            nonlocal is_changed
            if function.__name__ == "_unmarked" and not is_changed:
                is_changed = True
                await stores.overwrite(fs, inos[b"3"], 0, b"other bytes")
            return await view(self, function, *args)  # type: ignore[arg-type]

        with patch.object(type(fs.store.engine), "view", change), pytest.raises(Stale):
            await fs.read(handle, 0, inode.size)
        assert is_changed
        await fs.release(handle)
        found = await read_archive(fs)
        assert found.pop("3") == b"other bytes" + content_of(3)[11:]
        assert found.items() <= EXPECTED.items()


async def test_a_server_that_fails(directory: Path) -> None:
    """Others tell what its containers hold, where they are protected."""
    async with stored(directory, modes.INTERLEAVED | modes.REPLICAS) as (fs, _):
        fs.store.servers[0].absent = "it has been unplugged"
        assert await read_archive(fs) == EXPECTED
        fs.store.servers[0].absent = ""


async def test_a_server_that_fails_and_has_the_only_copy(directory: Path) -> None:
    async with stored(directory, modes.INTERLEAVED) as (fs, _):
        for number in range(4):
            fs.store.servers[number].absent = "it has been unplugged"
        with pytest.raises(FsError, match="unplugged"):
            await read_archive(fs)
        for number in range(4):
            fs.store.servers[number].absent = ""
        assert await read_archive(fs) == EXPECTED


async def test_a_copy_that_is_evicted_meanwhile(directory: Path) -> None:
    """It is gone when it is looked for; the data servers have the bytes."""
    async with stored(directory, modes.INTERLEAVED, is_evicted=False) as (fs, _):
        with patch.object(DataServer, "read_object", lambda *_: 0):
            assert await read_archive(fs) == EXPECTED


async def test_files_of_another_host(north: Filesystem, south: Filesystem) -> None:
    """In its burst tier alone, or there and on the servers, or changed there just before."""
    inos = [
        await write_file(north, b"%d" % number, content_of(number)) for number in range(len(SIZES))
    ]
    assert await read_archive(south) == EXPECTED
    await stores.drained(north, *inos[:6])
    await moved_out(north, *inos[:3])
    for fs in (north, south, north):
        assert await read_archive(fs) == EXPECTED
    await stores.overwrite(north, inos[3], 0, b"other bytes")
    found = await read_archive(south)
    assert found.pop("3") == b"other bytes" + content_of(3)[11:]
    assert found.items() <= EXPECTED.items()
