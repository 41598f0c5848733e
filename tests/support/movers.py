"""Work for mover processes: functions that are sent there by reference."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import trio

from aifs.burst.making import MakingTools
from aifs.core import files
from aifs.core.log import logger


async def pid(value: object, tools: MakingTools, cancelled: Callable[[], bool]) -> int:
    return os.getpid()


async def echo(value: object, tools: MakingTools, cancelled: Callable[[], bool]) -> object:
    return value


class Unprintable:
    """Nobody can print it in a moment."""

    def __repr__(self) -> str:
        raise AssertionError("it is long")


async def policy(value: object, tools: MakingTools, cancelled: Callable[[], bool]) -> int:
    """How the system schedules this process."""
    return os.sched_getscheduler(0)


async def fail(error: Exception, tools: MakingTools, cancelled: Callable[[], bool]) -> None:
    raise error


async def take(size: int, tools: MakingTools, cancelled: Callable[[], bool]) -> tuple[int, int]:
    """So many bytes of memory, at once."""
    return os.getpid(), len(await tools.mover.buffers.take(size))


async def warn(text: str, tools: MakingTools, cancelled: Callable[[], bool]) -> None:
    logger("aifs.test").warning("%s", text)


def require_process() -> None:
    """Not in that of the test."""
    assert "aifs.burst.child" in sys.orig_argv


async def die(value: object, tools: MakingTools, cancelled: Callable[[], bool]) -> None:
    require_process()
    os.kill(os.getpid(), signal.SIGKILL)


async def damage(args: tuple, tools: MakingTools, cancelled: Callable[[], bool]) -> None:
    tools.on_damage(*args)


async def pieces(path: str, tools: MakingTools, cancelled: Callable[[], bool]) -> int:
    """Piece after piece, until it is cancelled; what it has begun is in a file."""
    begun = 0
    while not cancelled():
        await tools.mover.begin(1)
        begun += 1
        Path(path).write_text(str(begun))
        await trio.sleep(0.001)
        tools.mover.end(1)
    return begun


async def pieces_at_once(count: int, tools: MakingTools, cancelled: Callable[[], bool]) -> None:
    """So many pieces, each of which may begin when it may."""

    async def move() -> None:
        await tools.mover.begin(1)
        await trio.lowlevel.checkpoint()
        tools.mover.end(1)

    async with trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(move)


class _Killer:
    """A hook that ends the process before the last of so many operations."""

    def __init__(self, op: str, count: int) -> None:
        self.op, self.count = op, count

    def before(self, op: str, path: str) -> None:
        self.count -= op == self.op
        if not self.count:
            os.kill(os.getpid(), signal.SIGKILL)

    def after(self, op: str, path: str, *args: object) -> None:
        pass


async def die_at(which: tuple[str, int], tools: MakingTools, cancelled: Callable[[], bool]) -> int:
    """This process will die at the nth operation of a kind that follows."""
    require_process()
    files.set_hook(_Killer(*which))
    return os.getpid()


class _Waiter:
    """A hook that waits in writes as long as a file exists."""

    def __init__(self, path: str) -> None:
        self.path = path

    def before(self, op: str, path: str) -> None:
        while op == "write_at" and os.path.exists(self.path):
            time.sleep(0.005)

    def after(self, op: str, path: str, *args: object) -> None:
        pass


async def hang_while(path: str, tools: MakingTools, cancelled: Callable[[], bool]) -> int:
    require_process()
    files.set_hook(_Waiter(path))
    return os.getpid()


class _Failer:
    """A hook that fails writes."""

    def before(self, op: str, path: str) -> None:
        if op == "write_at":
            raise OSError(5, "the device fails")

    def after(self, op: str, path: str, *args: object) -> None:
        pass


async def fail_writes(value: object, tools: MakingTools, cancelled: Callable[[], bool]) -> None:
    require_process()
    files.set_hook(_Failer())
