"""Programs that work on the same files at once while everything in the background goes on, on
engines that let others run at each transaction; and a daemon that dies in the middle of it.

Each program writes to a part of a file that is its own, so it knows what it must read there; some
have a file of their own, which they cut, empty, replace and delete as well.
"""

import os
import random
import shutil
import signal
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio

from aifs.core import faults
from aifs.core.errors import NotFound
from aifs.files.types import SetAttr
from aifs.layout.hint import Policy
from aifs.layout.placement import ACTIVE, DRAINING
from aifs.layout.striped import Striped
from aifs.meta.keys import ROOT_INO
from aifs.saves.group_drain import GroupReport, Prepared
from aifs.store import backup
from aifs.vfs import Filesystem, open_filesystem
from tests.support import engines, lives, modes
from tests.support.churn import MODES, SETTINGS, UNIT
from tests.support.kernel import Kernel
from tests.support.powercut import make_sizes_small
from tests.support.stores import OWNER, assert_sound, set_policy, write_file

pytestmark = pytest.mark.sweep

PART = 3 * UNIT
STEPS = 25
SHARED, WRITERS, OWNED = 2, 3, 3
LIMIT_S = 300
POINTS = sorted(
    name for name in faults.POINTS if name.startswith(("vfs.", "burst.", "data.", "meta."))
)
LOCK = threading.Lock()
"""Who holds it can be sure that nobody begins a call, or has one acknowledged."""


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    make_sizes_small(monkeypatch)
    monkeypatch.setattr(backup, "PART_BYTES", 2000)
    monkeypatch.setattr(backup, "_MIN_BASE_BYTES", 2000)


class Part:
    """What a program knows of the bytes that are its own: ``start`` on, in the file ``name``."""

    def __init__(self, name: bytes, start: int, sure: bytes | None) -> None:
        self.name = name
        self.start = start
        self.sure = sure
        """What was acknowledged; None: there is no such file."""
        self.begun = sure
        """What it is if the call that is under way counts."""

    def begin(self, after: bytes | None) -> None:
        with LOCK:
            self.begun = after

    def done(self) -> None:
        with LOCK:
            self.sure = self.begun

    def require(self, found: bytes | None, length: int | None = None) -> None:
        """``found`` is the file from ``start`` on, up to ``length``."""
        if found is None or self.sure is None or self.begun is None:
            assert found in (self.sure, self.begun), f"{self.name}: {found!r}"
            return
        if length is None:  # all of the file: its size is known, too
            assert len(found) in (len(self.sure), len(self.begun)), (
                f"{self.name} has {len(found)} bytes, not {len(self.sure)}"
            )
        size = max(len(self.sure), len(self.begun))
        found, sure, begun = (
            data[:size].ljust(size, b"\0") for data in (found, self.sure, self.begun)
        )
        wrong = [at for at in range(size) if found[at] != sure[at] and found[at] != begun[at]]
        assert not wrong, (
            f"{self.name}: {len(wrong)} bytes from {self.start + wrong[0]} on are not what was"
            f" written: {found[wrong[0]]}, not {sure[wrong[0]]} or {begun[wrong[0]]}"
        )


class Program:
    """Works on one part of one file, by handles of its own."""

    def __init__(self, kernel: Kernel, part: Part, rng: random.Random, is_owner: bool) -> None:
        self.kernel = kernel
        self.part = part
        self.rng = rng
        self.is_owner = is_owner
        self.handle: int | None = None
        self.ino = 0

    async def run(self) -> None:
        for _ in range(STEPS):
            await self.step()
        await self.close()

    async def step(self) -> None:
        kinds = [self.write] * 6 + [self.look] * 3 + [self.close] * 3 + [self.sync, self.touch]
        if self.is_owner:
            kinds += [self.cut, self.empty, self.replace, self.remove]
        await self.rng.choice(kinds)()

    async def opened(self, flags: int = os.O_RDWR) -> int:
        if self.handle is None:
            try:
                self.ino = (await self.kernel.lookup(ROOT_INO, self.part.name)).ino
            except NotFound:
                self.part.begin(b"")
                self.handle, inode = await self.kernel.create(
                    ROOT_INO, self.part.name, 0o644, os.O_RDWR, OWNER
                )
                self.part.done()
                self.ino = inode.ino
            else:
                self.handle = await self.kernel.open(self.ino, flags)
        return self.handle

    async def close(self) -> None:
        if self.handle is not None:
            handle, self.handle = self.handle, None
            await self.kernel.release(handle)

    async def alter(self, after: bytes | None, call: Callable[..., Awaitable], *args) -> None:
        self.part.begin(after)
        await call(*args)
        self.part.done()

    async def write(self) -> None:
        handle, part = await self.opened(), self.part
        offset = self.rng.choice((0, self.rng.randrange(PART), len(part.sure)))
        length = min(self.rng.choice((100, 1500, UNIT, 2 * UNIT)), PART - offset)
        if length <= 0:
            return
        data = bytes([self.rng.randint(1, 255)]) * length
        before = part.sure.ljust(offset, b"\0")
        after = before[:offset] + data + before[offset + length :]
        await self.alter(after, self.kernel.write, handle, part.start + offset, data)

    async def look(self) -> None:
        if self.handle is None and self.part.sure is None:
            return
        handle = await self.opened(self.rng.choice((os.O_RDONLY, os.O_RDWR)))
        found = bytes(await self.kernel.read(handle, self.part.start, PART))
        self.part.require(found, None if self.is_owner else PART)
        if self.rng.random() < 0.5:
            await self.close()
        elif self.handle is not None:  # it may be open for reading alone
            await self.close()

    async def sync(self) -> None:
        await self.kernel.fsync(await self.opened())

    async def touch(self) -> None:
        await self.opened()
        mode = self.rng.choice((0o600, 0o640, 0o644))
        inode = await self.kernel.setattr(self.ino, SetAttr(mode=mode), OWNER)
        assert self.is_owner is False or inode.mode & 0o777 == mode

    async def cut(self) -> None:
        handle = await self.opened()
        size = self.rng.choice((0, self.rng.randint(0, len(self.part.sure)), PART))
        after = self.part.sure[:size].ljust(size, b"\0")
        handle = self.rng.choice((handle, None))
        await self.alter(after, self.kernel.setattr, self.ino, SetAttr(size=size), OWNER, handle)

    async def empty(self) -> None:
        await self.close()
        self.part.begin(b"")
        await self.opened(os.O_RDWR | os.O_TRUNC)
        self.part.done()

    async def replace(self) -> None:
        """As editors do."""
        await self.close()
        data = bytes([self.rng.randint(1, 255)]) * self.rng.choice((10, 1500, PART))
        new = b"new %d" % self.rng.getrandbits(40)
        handle, _ = await self.kernel.create(ROOT_INO, new, 0o644, os.O_RDWR, OWNER)
        await self.kernel.write(handle, 0, data)
        if self.rng.random() < 0.5:
            await self.kernel.fsync(handle)
        await self.kernel.release(handle)
        was = self.ino
        await self.alter(data, self.kernel.rename, ROOT_INO, new, ROOT_INO, self.part.name)
        if was:
            self.kernel.forget([was])

    async def remove(self) -> None:
        if self.part.sure is None:
            return
        await self.opened()
        was = self.ino
        await self.alter(None, self.kernel.unlink, ROOT_INO, self.part.name)
        if self.rng.random() < 0.5:
            await self.close()
        self.kernel.forget([was])
        await self.close()


class Background:
    """Asks for all that moves bytes."""

    def __init__(self, fs: Filesystem, rng: random.Random) -> None:
        self.fs = fs
        self.rng = rng

    async def run(self) -> None:
        while True:
            kinds = [self.drain, self.evict, self.stage] * 4
            kinds += [self.compact, self.rebuild, self.leave, self.lay_out, self.group, self.sync]
            await self.rng.choice(kinds)()
            await trio.lowlevel.checkpoint()

    async def choose(self) -> int:
        entries = await self.fs.readdir(ROOT_INO, 0)
        return self.rng.choice([inode.ino for _, inode, _ in entries] or [0])

    async def drain(self) -> None:
        self.fs.drain.request([await self.choose()])

    async def evict(self) -> None:
        await self.attempt(self.fs.evictor.evict)

    async def stage(self) -> None:
        await self.attempt(self.fs.stager.stage)

    async def attempt(self, call: Callable[..., Awaitable], *args) -> None:
        if ino := await self.choose():
            try:
                await call(ino, *args)
            except NotFound:
                pass

    async def compact(self) -> None:
        await self.fs.compaction.compact()

    async def sync(self) -> None:
        await self.fs.sync()

    async def rebuild(self) -> None:
        async def request(ino: int) -> None:
            inode = await self.fs.getattr(ino)
            if isinstance(inode.layout, Striped) and inode.layout.is_protected:
                column = self.rng.randrange(len(inode.layout.servers))
                await self.fs.rebuild.request(inode.oid, ino, [column])

        await self.attempt(request)

    async def leave(self) -> None:
        servers = self.fs.store.servers
        number = self.rng.choice([server.id for server in servers.capacity()])
        servers.classify(number, DRAINING, "", None)
        self.fs.rebuild.look()
        with trio.move_on_after(0.05):
            await self.fs.rebuild.news()
        servers.classify(number, ACTIVE, "", None)

    async def lay_out(self) -> None:
        policy = Policy(replicas=self.rng.choice((1, 2)))
        await self.attempt(lambda ino: set_policy(self.fs, ino, policy))

    async def group(self) -> None:
        members = [Prepared(ino) for ino in {await self.choose() for _ in range(3)} - {0}]
        try:
            for member in members:
                await self.fs.group_drain.prepare(member, UNIT, GroupReport())
            await self.fs.group_drain.store(members, UNIT, GroupReport())
        finally:
            for member in members:
                await self.fs.group_drain.release(member)


def parts() -> list[tuple[Part, bool]]:
    shared = [
        (Part(b"shared%d" % file, number * PART, b""), False)
        for file in range(SHARED)
        for number in range(WRITERS)
    ]
    return shared + [(Part(b"own%d" % number, 0, None), True) for number in range(OWNED)]


async def make_shared(directory: Path) -> None:
    async with open_filesystem(modes.config_of(directory)) as fs:
        for file in range(SHARED):
            await write_file(fs, b"shared%d" % file)


async def work(directory: Path, known: list[tuple[Part, bool]], rng: random.Random) -> None:
    with trio.fail_after(LIMIT_S):
        async with open_filesystem(modes.config_of(directory)) as fs, Kernel(fs) as kernel:
            async with trio.open_nursery() as background:
                for _ in range(2):
                    background.start_soon(Background(fs, random.Random(rng.random())).run)
                async with trio.open_nursery() as programs:
                    for part, is_owner in known:
                        program = Program(kernel, part, random.Random(rng.random()), is_owner)
                        programs.start_soon(program.run)
                background.cancel_scope.cancel()


def live(
    writer: int, directory: Path, known: list[tuple[Part, bool]], seed: str, is_killed: bool
) -> None:
    """In a process of its own; ``is_killed``: until some fault point is reached, if it is."""
    rng = random.Random(seed)
    if is_killed:
        left = rng.choice((1, rng.randint(1, 8), rng.randint(1, 60)))

        def die() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                LOCK.acquire()  # for good
                lives.send(writer, (known, True))
                os.kill(os.getpid(), signal.SIGKILL)

        faults.arm(rng.choice(POINTS), die)
    trio.run(work, directory, known, rng)
    lives.send(writer, (known, False))


async def look(directory: Path, known: list[tuple[Part, bool]], was_killed: bool) -> None:
    """All that was acknowledged is there; it is what is known from here on."""
    async with open_filesystem(modes.config_of(directory)) as fs, Kernel(fs) as kernel:
        for part, is_owner in known:
            try:
                ino = (await fs.lookup(ROOT_INO, part.name)).ino
            except NotFound:
                found = None
            else:
                handle = await kernel.open(ino, os.O_RDONLY)
                found = bytes(await kernel.read(handle, part.start, PART))
                await kernel.release(handle)
            # A file that was being written may end in the middle of that.
            part.require(found, None if is_owner and not was_killed else PART)
            part.sure = part.begun = found


def sweep(directory: Path, mode: str, seed: int) -> None:
    """Two lives of a daemon; the first one is killed."""
    known, was_killed = parts(), True
    engines.seed(seed)
    modes.make_store(directory, SETTINGS | MODES[mode])
    trio.run(make_shared, directory)
    for is_killed in (True, False):
        text = f"{mode} {seed} {is_killed}"
        known, was_killed = lives.in_child(live, directory, known, text, is_killed)
        trio.run(look, directory, known, was_killed)
        assert_sound(modes.config_of(directory))


@pytest.mark.engines
@pytest.mark.parametrize("mode", MODES)
def test_what_programs_write_at_once_is_there(scratch: Path, mode: str) -> None:
    sweep(scratch / "0", mode, seed=0)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", MODES)
def test_many_programs_at_once(scratch: Path, mode: str) -> None:
    for seed in range(1000, 1030):
        sweep(scratch / str(seed), mode, seed)
        shutil.rmtree(scratch / str(seed))
