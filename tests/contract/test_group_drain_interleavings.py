"""Storing a group while others do something at any of its steps: whatever it is, every file keeps
its own bytes.
"""

import random
from collections.abc import Awaitable, Callable

import pytest
import trio

from aifs.core.errors import Unavailable
from aifs.layout.hint import Policy
from aifs.saves.group_drain import DrainOutcome, GroupReport, Prepared
from aifs.vfs.filesystem import Filesystem
from tests.contract.test_group_drain import mounted, remove, write_file
from tests.support.stores import read_file, rewrite

pytestmark = pytest.mark.sweep

CHUNK = 4096
POLICIES = [Policy(), Policy(replicas=2), Policy(servers=(2,))]
STEPS = range(1, 120, 8)
SETTINGS = {"layout.inline_limit": "0", "layout.compact_above": "0.05"}


class AtStep(trio.abc.Instrument):
    """Calls something when tasks have taken so many steps more."""

    def __init__(self) -> None:
        self._left = 0
        self._act: Callable[[], object] = lambda: None

    def arm(self, steps: int, act: Callable[[], object]) -> None:
        self._left, self._act = steps, act

    def disarm(self) -> bool:
        """Nothing is called any more; whether it has been."""
        left, self._left = self._left, 0
        return left <= 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._left -= 1
        if self._left == 0:
            self._act()


class Step:
    """One group of three files with other policies, which have chunks in common with each other and
    with files of before."""

    def __init__(
        self, fs: Filesystem, rng: random.Random, contents: dict[bytes, bytes], pool: list[bytes]
    ) -> None:
        self.fs, self.rng, self.contents, self._pool = fs, rng, contents, pool
        self.inos: dict[bytes, int] = {}
        self.scope = trio.CancelScope()

    def data(self) -> bytes:
        return b"".join(self.rng.choices(self._pool, k=6)) + self.rng.randbytes(
            self.rng.randrange(1, CHUNK)
        )

    async def write(self, number: int) -> list[Prepared]:
        members = []
        for rank, policy in enumerate(POLICIES):
            name = b"%d-%d" % (number, rank)
            self.contents[name] = self.data()
            self.inos[name] = await write_file(self.fs, name, self.contents[name], policy)
            members.append(Prepared(self.inos[name]))
            await self.fs.group_drain.prepare(members[-1], CHUNK, GroupReport())
        return members


async def cancel(step: Step, name: bytes, old: bytes) -> None:
    step.scope.cancel()


async def break_lease(step: Step, name: bytes, old: bytes) -> None:
    if step.inos[name] in step.fs.io.table.open:
        step.fs.io.table.open[step.inos[name]].cancel_lease()


async def write_again(step: Step, name: bytes, old: bytes) -> None:
    step.contents[name] = step.data()
    await rewrite(step.fs, step.inos[name], step.contents[name])


async def delete(step: Step, name: bytes, old: bytes) -> None:
    del step.contents[name]
    await remove(step.fs, name, step.inos[name])


async def delete_what_is_leaned_on(step: Step, name: bytes, old: bytes) -> None:
    del step.contents[old]
    await remove(step.fs, old, (await step.fs.lookup(1, old)).ino)


async def compact(step: Step, name: bytes, old: bytes) -> None:
    await step.fs.compaction.compact()


async def lose_sight_of_containers(step: Step, name: bytes, old: bytes) -> None:
    """What is read back cannot be, from now on."""

    async def unreadable(*args: object) -> None:
        raise Unavailable("not now")

    step.fs.containers.files.read_stored = unreadable


ACTS = [
    cancel,
    break_lease,
    write_again,
    delete,
    delete_what_is_leaned_on,
    compact,
    lose_sight_of_containers,
]


@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__)
async def test_at_any_step(directory, act: Callable[[Step, bytes, bytes], Awaitable[None]]) -> None:
    rng, contents = random.Random(act.__name__), {}
    pool = [rng.randbytes(CHUNK) for _ in range(10)] + [bytes(CHUNK)]
    async with mounted(directory, SETTINGS) as fs, trio.open_nursery() as nursery:
        instrument, read_stored, acted = AtStep(), fs.containers.files.read_stored, 0
        trio.lowlevel.add_instrument(instrument)
        for number, steps in enumerate(STEPS):
            pool[number % 10] = rng.randbytes(CHUNK)
            old = rng.choice([*contents, b""])
            step, done = Step(fs, rng, contents, pool), trio.Event()
            members = await step.write(number)

            async def run(step: Step = step, old: bytes = old, done: trio.Event = done) -> None:
                if old or act is not delete_what_is_leaned_on:
                    await act(step, rng.choice(sorted(step.inos)), old)
                done.set()

            instrument.arm(steps, lambda run=run: nursery.start_soon(run))
            with step.scope:
                await fs.group_drain.store(members, CHUNK, GroupReport())
            if instrument.disarm():
                await done.wait()
                acted += 1
            fs.containers.files.read_stored = read_stored
            assert all(member.outcome is not None for member in members)
            if act in (compact, lose_sight_of_containers):
                assert [member.outcome for member in members] == [DrainOutcome.DRAINED] * len(
                    members
                )
            alive = {ino for name, ino in step.inos.items() if name in contents}
            for member in members:
                if member.outcome is DrainOutcome.DRAINED and member.ino in alive:
                    await fs.evictor.evict(member.ino)
        trio.lowlevel.remove_instrument(instrument)
        assert acted
    async with mounted(directory) as fs:
        for name, data in contents.items():
            assert await read_file(fs, (await fs.lookup(1, name)).ino) == data, name
