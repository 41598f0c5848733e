"""Random operations of two and three hosts at once, on their filesystems in process, over a real
database: one namespace explains what they have seen. And the search for it: what it refuses.
"""

import errno
import os
import random
import stat
from contextlib import suppress
from pathlib import Path

import pytest
import trio

from aifs.core.errors import FsError, NotFound, Stale
from aifs.meta.keys import ROOT_INO
from aifs.vfs import Filesystem
from tests.support import histories
from tests.support.histories import Event, History, Name, Unexplained, require_explained
from tests.support.imagined import OneNamespace
from tests.support.joined import joined
from tests.support.postgres import TestDatabase
from tests.support.stores import OWNER, read_file


class Process:
    """What uses a host's filesystem, one operation after the other."""

    def __init__(
        self, fs: Filesystem, history: History, chance: random.Random, directories: list[int]
    ) -> None:
        """``directories``: all that were ever made, which all processes share."""
        self._fs = fs
        self._host = fs.store.engine.host
        self._history = history
        self._chance = chance
        self._directories = directories
        self._temporary = b"t%d.%d" % (self._host, chance.randrange(10**9))

    async def work(self, steps: int) -> None:
        for _ in range(steps):
            kind, args = histories.draw(self._chance, self._directories)
            with suppress(FsError):  # it is in the history
                await getattr(self, "_" + kind)(*args)

    async def _create(self, name: Name) -> None:
        handle = await self._make(name)
        await self._fs.release(handle)

    async def _make(self, name: Name) -> int:
        with self._history.doing(self._host, "create", name) as event:
            opened, inode = await self._fs.create(*name, 0o644, os.O_RDWR | os.O_EXCL, OWNER)
            event.result = inode.ino
        return opened.handle

    async def _replace(self, name: Name) -> None:
        temporary = name[0], self._temporary
        handle = await self._make(temporary)
        try:
            ino = self._fs.handles[handle].file.inode.ino
            content = self._history.contents[ino] = self._chance.randbytes(5000)
            await self._fs.write(handle, 0, content)
        finally:
            await self._fs.release(handle)
        try:
            await self._rename(temporary, name)
        except FsError:
            await self._unlink(temporary)

    async def _link(self, old: Name, new: Name) -> None:
        ino = await self._lookup(old)
        with self._history.doing(self._host, "link", ino, new) as event:
            event.result = (await self._fs.link(ino, *new)).ino

    async def _unlink(self, name: Name) -> None:
        with self._history.doing(self._host, "unlink", name) as event:
            await self._fs.unlink(*name)
            event.result = 0

    async def _rename(self, old: Name, new: Name) -> None:
        await self._look_up(old, new)
        with self._history.doing(self._host, "rename", old, new) as event:
            await self._fs.rename(*old, *new)
            event.result = 0

    async def _mkdir(self, name: Name) -> None:
        with self._history.doing(self._host, "mkdir", name) as event:
            event.result = (await self._fs.mkdir(*name, 0o755, OWNER)).ino
            self._directories.append(event.result)

    async def _rmdir(self, name: Name) -> None:
        await self._look_up(name)
        with self._history.doing(self._host, "rmdir", name) as event:
            await self._fs.rmdir(*name)
            event.result = 0

    async def _look_up(self, *names: Name) -> None:
        """As the kernel does before it asks for more."""
        for name in names:
            with suppress(FsError):
                await self._fs.lookup(*name)

    async def _lookup(self, name: Name) -> int:
        with self._history.doing(self._host, "lookup", name) as event:
            inode = await self._fs.lookup(*name)
            event.result = inode.ino, 0 if stat.S_ISDIR(inode.mode) else inode.nlink
        return inode.ino

    async def _open(self, name: Name) -> None:
        """And read: files are whole when they get a name that is looked up."""
        ino = await self._lookup(name)
        with suppress(Stale, NotFound):  # it was removed meanwhile
            found = await read_file(self._fs, ino)
            assert found == self._history.contents.get(ino, b""), f"file {ino} has other bytes"

    async def _list(self, directory: int) -> None:
        with self._history.doing(self._host, "list", directory) as event:
            found: set[bytes] = set()
            cookie = 0
            while part := list(await self._fs.readdir(directory, cookie, 3)):
                found |= {name for name, _, _ in part}
                cookie = part[-1][2]
            event.result = found


async def play(hosts: list[Filesystem], seed: int, processes: int, steps: int) -> History:
    """So many processes at each host, each with so many operations."""
    chance, history, directories = random.Random(seed), History(), list[int]()
    async with trio.open_nursery() as nursery:
        for fs in hosts:
            for _ in range(processes):
                process = Process(fs, history, random.Random(chance.random()), directories)
                nursery.start_soon(process.work, steps)
    return history


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("count", "seed"),
    [(2, 0), *(pytest.param(2 + seed % 2, seed, marks=LONG) for seed in range(1, 40))],
)
async def test_one_namespace_explains_what_hosts_see(
    scratch: Path, database: TestDatabase, count: int, seed: int, request: pytest.FixtureRequest
) -> None:
    is_long = request.config.getoption("--long")
    async with joined(scratch, database, count) as hosts:
        history = await play(hosts, seed, 2, 300 if is_long else 60)
        listings = [sorted(await everything(fs)) for fs in hosts]
        assert all(found == listings[0] for found in listings)
    require_explained(history.events)


async def everything(fs: Filesystem) -> list[tuple[bytes, int]]:
    """All names of a host that has heard of all."""
    fs.store.engine.session.sure_until_s = 0.0  # type: ignore[attr-defined]
    await fs.store.engine.sure()
    found, pending = [], [ROOT_INO]
    while pending:
        for name, inode, _ in await fs.readdir(pending.pop(), 0, 1000):
            found.append((name, inode.ino))
            if stat.S_ISDIR(inode.mode):
                pending.append(inode.ino)
    return found


# --- the search -----------------------------------------------------------------------------------

A, B = (1, b"a"), (1, b"b")


def _event(host: int, kind: str, *args: object, at: tuple[float, float]) -> Event:
    *args, result = args
    return Event(host, kind, tuple(args), result, *at)


SHAPES = [(hosts, kernel, dies) for hosts in (2, 3) for kernel in (0, 1) for dies in (0, 1)]


def imagined(shape: tuple[int, int, int], seed: int, steps: int) -> tuple[list[Event], bool]:
    hosts, has_kernel, dies = shape
    one = OneNamespace(hosts, bool(has_kernel), seed)
    one.play(steps, bool(dies))
    return one.events, bool(has_kernel)


@pytest.mark.sweep
@pytest.mark.parametrize("shape", SHAPES)
def test_what_one_namespace_may_show_is_explained(
    shape: tuple[int, int, int], request: pytest.FixtureRequest
) -> None:
    for seed in range(200 if request.config.getoption("--long") else 8):
        require_explained(*imagined(shape, seed, 900))


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if not shape[2]])
def test_what_was_there_at_another_time_is_refused(shape: tuple[int, int, int]) -> None:
    """All of one name, and what else is found there is long over, or will be."""
    refused = tried = 0
    for seed in range(8):
        events, has_kernel = imagined(shape, seed, 400)
        looks = [one for one in events if one.kind == "open"]
        wrong = random.Random(seed).choice(looks)
        others = [
            one.result
            for one in looks
            if one.args == wrong.args
            and one.result not in (wrong.result, -errno.ENOENT)
            and abs(one.begin - wrong.begin) > 100
        ]
        if others:
            wrong.result = others[0]
            tried += 1
            try:
                require_explained(events, has_kernel)
            except Unexplained:
                refused += 1
    assert tried and refused == tried


def test_what_is_no_history_of_one_namespace_is_refused() -> None:
    made = _event(1, "create", A, 7, at=(0, 1))
    seen = _event(2, "lookup", A, (7, 1), at=(2, 3))
    unseen = _event(2, "lookup", A, -errno.ENOENT, at=(2, 3))
    moved = _event(1, "rename", A, B, 0, at=(4, 5))
    removed = _event(2, "unlink", A, 0, at=(4, 5))
    for explained in (
        [made, seen],
        [made, unseen],  # a create may be heard of late
        [made, moved, _event(2, "lookup", B, (7, 1), at=(4, 4.5))],
        [made, moved, _event(2, "lookup", B, -errno.ENOENT, at=(4.5, 6))],
        [made, removed, _event(1, "lookup", A, (7, 1), at=(4.5, 6))],
        [made, _event(2, "create", B, histories.UNKNOWN, at=(0, 1)), moved],
        [made, _event(2, "create", B, histories.UNKNOWN, at=(0, 1))],
        [_event(2, "create", A, histories.UNKNOWN, at=(0, 1)), seen],
        [made, moved, _event(2, "list", 1, {b"a", b"b"}, at=(4, 6))],
    ):
        require_explained(explained)
    for wrong in (
        [seen],
        [made, _event(1, "lookup", A, -errno.ENOENT, at=(2, 3))],  # its own
        [made, _event(2, "create", A, 8, at=(2, 3))],
        [made, moved, removed],
        [made, moved, _event(2, "lookup", B, -errno.ENOENT, at=(6, 7))],
        [made, moved, _event(2, "lookup", A, (7, 1), at=(6, 7))],
        [made, moved, _event(2, "list", 1, {b"a"}, at=(6, 7))],
        [made, _event(2, "lookup", A, (7, 2), at=(2, 3))],
        [made, _event(2, "create", B, histories.UNKNOWN, at=(5, 1)), moved, removed],
    ):
        with pytest.raises(Unexplained):
            require_explained(wrong)
