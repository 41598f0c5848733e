"""The daemon dies at any transaction of what goes to the trash, comes back, or is emptied."""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest
import trio
import trio.testing

from aifs.core import faults
from aifs.core.errors import NoAttribute
from aifs.core.faults import SimulatedCrash
from aifs.files.types import ROOT
from aifs.meta.journal import AFTER_APPEND
from aifs.meta.keys import ROOT_INO
from aifs.vfs import SetAttr
from aifs.vfs.filesystem import Filesystem
from aifs.vfs.trash_requests import Restoring
from tests.contract import test_trash
from tests.contract.test_trash import kept, make_tree, names, remove_by_shell, require_tree
from tests.support import stores
from tests.support.stores import OWNER, numbers, put, require_sound

CRASHES = 60
at_rest = test_trash.at_rest


async def remove(fs: Filesystem) -> None:
    await remove_by_shell(fs, ROOT_INO, b"top")


async def remove_at_one_stroke(fs: Filesystem) -> None:
    await fs.remove_tree(ROOT_INO, b"top", OWNER)
    await fs.trash.add_up()


async def remove_before_a_quota(fs: Filesystem) -> None:
    await remove(fs)
    await put(fs, ROOT_INO, "quota", "files=1000", ROOT)


async def restore(fs: Filesystem) -> None:
    await fs.restore(Restoring(ROOT_INO, b"top"), OWNER)


async def empty(fs: Filesystem) -> None:
    await fs.empty_trash([], OWNER)
    await fs.doomed.empty()
    await fs.collector.drain()


async def empty_old(fs: Filesystem) -> None:
    fs.trash.now_ns = lambda: 1 << 62
    await fs.trash.expire()
    await empty(fs)


async def _crash(directory: Path, act: Callable[[Filesystem], Awaitable[None]], at: int) -> bool:
    """Whether it came to as many transactions, and the daemon has died at that one."""
    passed = 0

    def step() -> None:
        nonlocal passed
        passed += 1
        if passed >= at:  # nothing that the process does later counts
            raise SimulatedCrash

    try:
        async with stores.served(test_trash.modes.config_of(directory)) as fs:
            faults.arm(AFTER_APPEND, step)
            await act(fs)
            faults.disarm_all()
    except SimulatedCrash:
        faults.disarm_all()
        return True
    return False


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("before", "act", "again", "fewest"),
    [
        (None, remove, remove, 6),
        (None, remove_at_one_stroke, remove_at_one_stroke, 2),
        (remove, restore, restore, 4),
        (remove_at_one_stroke, restore, restore, 1),
        pytest.param(remove_before_a_quota, restore, restore, 8, marks=pytest.mark.long),
        (remove, empty, empty, 3),
        (remove_at_one_stroke, empty, empty, 3),
        pytest.param(remove, empty_old, empty_old, 3, marks=pytest.mark.long),
    ],
)
async def test_a_crash_at_any_transaction_loses_nothing(
    scratch: Path,
    before: Callable[[Filesystem], Awaitable[None]] | None,
    act: Callable[[Filesystem], Awaitable[None]],
    again: Callable[[Filesystem], Awaitable[None]],
    fewest: int,
) -> None:
    """After the next mount the same goes on, and then all is as if nothing had happened."""
    crashes = 0
    while crashes < CRASHES:
        directory = scratch / f"store{crashes}"
        async with test_trash.with_trash(directory, sound=False) as fs:
            top = await make_tree(fs)
            if before is not None:
                await before(fs)
        crashed = await _crash(directory, act, crashes + 1)
        await require_sound(test_trash.modes.config_of(directory))
        async with test_trash.opened(directory) as fs:
            await _require_outcome(fs, act, again, top)
        if not crashed:
            break
        crashes += 1
    assert fewest <= crashes < CRASHES


async def _require_outcome(
    fs: Filesystem,
    act: Callable[[Filesystem], Awaitable[None]],
    again: Callable[[Filesystem], Awaitable[None]],
    top: int,
) -> None:
    is_there = b"top" in await names(fs, ROOT_INO)
    if act in (remove, remove_at_one_stroke):
        if is_there:
            await again(fs)
        await restore(fs)
        await require_tree(fs, top)
    elif act is restore:
        if not is_there:
            await again(fs)
        await require_tree(fs, top)
        assert await kept(fs) == []
        with suppress(NoAttribute):
            assert (await stores.ask(fs, ROOT_INO, "quota"))["used_files"] == 7
    else:
        assert not is_there
        await again(fs)
        with trio.fail_after(30):  # the daemon itself may have a file open that it writes back
            while await numbers(fs, b"i") != [ROOT_INO]:
                await trio.testing.wait_all_tasks_blocked(0.01)
                await fs.collector.drain()


async def test_the_mount_that_sets_a_trash_may_die_at_it(scratch: Path) -> None:
    directory = scratch / "store"
    async with test_trash.opened(directory) as fs:
        await fs.setattr(ROOT_INO, SetAttr(mode=0o777), ROOT)

    async def rule(fs: Filesystem) -> None:
        await put(fs, ROOT_INO, "trash", "7d", ROOT)

    assert await _crash(directory, rule, 1)
    async with test_trash.opened(directory) as fs:
        assert await stores.get(fs, ROOT_INO, "trash") == "7d"
