"""Descriptors of the daemon: open files that nobody uses take none, and a want of them is nobody
else's fault.
"""

import errno
import os
import resource
from collections.abc import Iterator

import pytest
import trio

from aifs.core import files
from aifs.core.errors import OutOfMemory, Unavailable
from aifs.data import servers
from aifs.data.marker import NAME as MARKER
from aifs.files.types import Caller
from aifs.meta.keys import ROOT_INO
from aifs.vfs.filesystem import Filesystem
from tests.support import modes
from tests.support.data_servers import failing, hooked
from tests.support.stores import LIMIT_S, drained, moved_out, opened, read_file, write_file
from tests.support.stores import fs as fs

MAX = 200
"""Descriptors that the process may have, beside those that it has already."""

GREEDY, OTHER = Caller(uid=1001, gid=1001), Caller(uid=1002, gid=1002)
WAYS = {
    "burst": modes.WAITING,
    "striped": modes.OFF,
    "interleaved": modes.ON | modes.INTERLEAVED,
    "coded": modes.ON | modes.CODED,
    "verified": modes.ON | {"data.verify": "read"},
}


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What crashes that earlier tests simulated have left open does not count."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + MAX, hard))
    monkeypatch.setattr(files, "_open", set())
    monkeypatch.setattr(files, "descriptors_max", lambda: MAX)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(params=WAYS.values(), ids=WAYS)
def way(request: pytest.FixtureRequest) -> dict[str, object]:
    return request.param


def content(number: int) -> bytes:
    return b"%d " % number * 2000


async def create(fs: Filesystem, number: int, caller: Caller) -> tuple[int, int]:
    """Inode number, and a handle."""
    (handle, *_), inode = await fs.create(ROOT_INO, b"%d" % number, 0o644, os.O_RDWR, caller)
    await fs.write(handle, 0, content(number))
    return inode.ino, handle


@pytest.mark.sweep
async def test_who_has_many_files_open_takes_nothing_from_others(directory, few, way):
    async with opened(directory, way, servers=4) as fs:
        held = [await create(fs, number, GREEDY) for number in range(3 * MAX)]
        ino = await write_file(fs, b"other", content(0), caller=OTHER)
        assert await read_file(fs, ino) == content(0)
        for number, (ino, handle) in enumerate(held):
            assert bytes(await fs.read(handle, 0, 1 << 20)) == content(number)
            assert (await fs.getattr(ino)).size == len(content(number))
        for number in (0, MAX, -1):
            await fs.write(held[number][1], 5, b"x")
            await fs.fsync(held[number][1])
        for _, handle in held:
            await fs.release(handle)
        await drained(fs, *(ino for ino, _ in held))
        assert {server.state for server in fs.store.servers.values()} == {"ok"}


async def test_after_a_rush_idle_files_give_way_as_early_as_before_it(directory, few, monkeypatch):
    """While all descriptors were in use it was no use to ask for room; later it is again."""
    count = files.descriptors
    monkeypatch.setattr(servers, "_ROOM_S", 0)
    async with opened(directory, modes.OFF, servers=2) as fs:
        held = [(await create(fs, number, GREEDY))[1] for number in range(2)]

        async def create_when(descriptors: int) -> None:
            monkeypatch.setattr(files, "descriptors", lambda: descriptors)
            held.append((await create(fs, len(held), GREEDY))[1])

        await create_when(MAX)
        await create_when(0)
        before = count()
        await create_when(MAX * 3 // 4)
        with trio.fail_after(LIMIT_S):  # workers close them
            while count() > before:
                await trio.sleep(0.01)
        monkeypatch.setattr(files, "descriptors", count)
        for handle in held:
            await fs.release(handle)


@pytest.mark.sweep
async def test_many_that_read_cold_files(directory, few, way):
    async with opened(directory, way, servers=4) as fs:
        inos = [await write_file(fs, b"%d" % number, content(number)) for number in range(2 * MAX)]
        if fs.tier.has_devices:
            await moved_out(fs, *inos)
        handles = [(await fs.open(ino, os.O_RDONLY)).handle for ino in inos]
        for _ in range(2):
            for number, handle in enumerate(handles):
                assert bytes(await fs.read(handle, 0, 1 << 20)) == content(number)
        for handle in handles:
            await fs.release(handle)


@pytest.mark.parametrize("where", [modes.OFF, modes.WAITING], ids=["striped", "burst"])
async def test_what_cannot_be_written_when_a_descriptor_is_closed_is_told_by_fsync(
    directory, where
):
    with hooked():
        async with opened(directory, where, servers=2, sound=False) as fs:
            (handle, *_), inode = await fs.create(ROOT_INO, b"f", 0o644, os.O_RDWR, OTHER)
            await fs.write(handle, 0, bytes(1 << 20))
            below = str(directory / "data") if where is modes.OFF else str(directory)
            with failing("sync_file", below) as failed:
                assert fs.io.table.open[inode.ino].close_idle()
                with trio.fail_after(60):
                    while not failed:
                        await trio.sleep(0.01)
            with pytest.raises(Unavailable, match="lost earlier"):
                await fs.fsync(handle)
            await fs.release(handle)


@pytest.mark.store(modes.OFF, servers=2)
@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
async def test_a_want_of_descriptors_is_no_fault_of_a_server(fs, directory, number):
    ino = await write_file(fs, b"f", content(1))
    for op in ("open_file", "read_file"):
        with failing(op, str(directory), number):
            handle, *_ = await fs.open(ino, os.O_RDONLY)
            for server in fs.store.servers.values():
                with pytest.raises(OutOfMemory):
                    server.get_blob(MARKER) if (op == "read_file") else server.open_object(
                        (ino, ino), create=False
                    )
            await fs.release(handle)
        assert {server.state for server in fs.store.servers.values()} == {"ok"}
    assert await read_file(fs, ino) == content(1)


class Spy:
    """Has nothing to give up, and counts how often it was asked to."""

    def __init__(self) -> None:
        self.used = True
        self.asked = 0

    def close_idle(self) -> int:
        self.asked += 1
        return 0


async def test_who_uses_none_any_more_is_not_asked_for_them(monkeypatch):
    room, gone, there = servers.Descriptors(), [Spy()], [Spy()]
    users = gone.copy
    room.add_users(users)
    room.add_users(there.copy)
    room.remove_users(users)
    monkeypatch.setattr(files, "descriptors", files.descriptors_max)
    await room.find_room()
    assert (gone[0].asked, there[0].asked) == (0, 1)
