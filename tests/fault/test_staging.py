"""Staging: what is copied from servers is checked; what is brought into blocks is read once."""

import os
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import trio

from aifs.data.checks import Untold
from aifs.meta.keys import ROOT_INO
from aifs.vfs import Filesystem
from tests.support import modes
from tests.support.data_servers import hooked
from tests.support.stores import OWNER, ask, moved_out, opened, read_file, write_file
from tests.support.stores import fs as fs

SIZE = (9 << 20) + 4321
KINDS = {
    "striped": {},
    "one server": {"layout.count": "1"},
    "interleaved": {"layout.kind": "interleaved"},
    "replicated": {"layout.replicas": "2"},
    "coded": {"layout.ec": "2+1"},
}
PLAIN = ("striped", "one server", "interleaved")
REQUEST = 128 << 10  # of a program that reads a file in one go


async def idle(fs: Filesystem) -> None:
    while any(fs.stager.status()[count] for count in ("active_files", "waiting_files")):
        await trio.sleep(0.01)
    await fs.store.servers.cache.settle()


def flip(directory: Path) -> None:
    """One bit, of one byte of a file, on one server."""
    path = max((directory / "data").glob("*/objects/*/*/*"), key=lambda path: path.stat().st_size)
    with path.open("r+b") as file:
        # In the middle of a container of four whole chunks lies the third one's header, which
        # nobody needs who reads: the record of the chunk says all. At a third lies its second.
        file.seek(path.stat().st_size // 3)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 16]))


async def by_reading(fs: Filesystem, ino: int) -> None:
    await fs.setxattr(ino, b"user.aifs.tier", b"pinned")
    await read_file(fs, ino)


async def by_asking(fs: Filesystem, ino: int) -> None:
    await fs.setxattr(ino, b"user.aifs.tier", b"pinned")
    fs.stager.request(await fs.getattr(ino))


async def by_opening(fs: Filesystem, ino: int) -> None:
    assert await fs.stager.stage(ino) == ((await fs.getattr(ino)).copy is not None)


WAYS = {"read": by_reading, "asked": by_asking, "now": by_opening}


@pytest.mark.sweep
@pytest.mark.store(modes.STRIPED | {"burst.blocks": "always"})
@pytest.mark.parametrize("tier", ["", "burst", "pinned"])
async def test_a_hint_says_whether_reading_brings_all_of_a_file(fs: Filesystem, tier: str) -> None:
    ino = await write_file(fs, b"file", os.urandom(SIZE))
    await moved_out(fs, ino)
    await fs.tier.look()
    if tier:
        await fs.setxattr(ino, b"user.aifs.tier", tier.encode())
    handle = (await fs.open(ino, os.O_RDONLY)).handle
    await fs.read(handle, 0, 4096)
    await fs.release(handle)
    await idle(fs)
    state = await ask(fs, ino, "state")
    assert (state["copy"], state["state"]) == (tier == "pinned", "cached" if tier else "clean")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", ["memory", "disk"])
async def test_a_bit_that_flips_on_a_server_does_not_become_the_burst_copy(
    directory: Path, kind: str, way: str, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    data = os.urandom(SIZE)
    act: Callable[[Filesystem, int], Awaitable[None]] = WAYS[way]
    # With a hook, all requests go to the workers, as those for a disk do.
    with nullcontext() if place == "memory" else hooked():
        async with opened(directory, KINDS[kind], sound=False) as fs:
            ino = await write_file(fs, b"file", data)
            await moved_out(fs, ino)
            flip(directory)
            await act(fs, ino)
            await idle(fs)
            copy = (await fs.getattr(ino)).copy
            if kind in PLAIN:
                assert copy is None, "the wrong bytes have been staged"
                told = [line for line in caplog.messages if f"inode {ino} is not staged: " in line]
                assert len(told) == 1
            else:
                while (
                    await fs.getattr(ino)
                ).copy is None:  # the column that is wrong is being made anew
                    await fs.stager.stage(ino)
                assert await read_file(fs, ino) == data


@pytest.mark.parametrize("kind", KINDS)
async def test_a_bit_that_flips_on_a_server_is_not_copied_to_another_file(
    directory: Path, kind: str
) -> None:
    """By copy_file_range(2), with which cp copies."""
    data = os.urandom(SIZE)
    async with opened(directory, KINDS[kind], sound=False) as fs:
        ino = await write_file(fs, b"file", data)
        await moved_out(fs, ino)
        flip(directory)
        source = (await fs.open(ino, os.O_RDONLY)).handle
        (target, *_), made = await fs.create(ROOT_INO, b"copy", 0o644, os.O_RDWR, OWNER)

        async def copy() -> None:
            done = 4097  # not where a MiB begins
            while done < SIZE:
                done += await fs.copy_file_range(source, done, target, done - 4097, SIZE, OWNER)

        if kind in PLAIN:
            with pytest.raises(Untold):
                await copy()
        else:
            await copy()
            assert await read_file(fs, made.ino) == data[4097:]
        await fs.release(source)
        await fs.release(target)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("verify", ["off", "read"])
async def test_a_cold_file_is_read_once_from_its_servers(
    directory: Path, kind: str, verify: str
) -> None:
    size = 48 << 20
    data = os.urandom(size)
    with hooked():  # each read is a request to a server, then
        settings = KINDS[kind] | {"data.verify": verify, "data.hedge": "off"}
        settings |= {"burst.blocks": "always"}
        async with opened(directory, settings) as fs:
            ino = await write_file(fs, b"file", data)
            await moved_out(fs, ino)
            await fs.tier.look()
            await fs.setxattr(ino, b"user.aifs.tier", b"burst")
            servers = fs.store.servers
            before = sum(server.read_bytes for server in servers.capacity())
            handle = (await fs.open(ino, os.O_RDONLY)).handle
            for at in range(0, size, REQUEST):
                assert await fs.read(handle, at, REQUEST) == data[at : at + REQUEST]
            await fs.release(handle)
            await idle(fs)
            assert await fs.stager.warm(ino)
            from_servers = sum(server.read_bytes for server in servers.capacity()) - before
            assert from_servers <= 1.01 * size
            assert await read_file(fs, ino) == data
