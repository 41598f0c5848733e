"""A run of the model test is a chain of *lives*.

Each life opens the store in a process of its own, and ends with a clean close or with SIGKILL. The
oracle travels from one to the next.
"""

import logging
import os
import pickle
import re
import signal
import traceback
from collections.abc import Callable
from typing import Any

import trio

from aifs.core.config import Config
from aifs.vfs import open_filesystem
from tests.support.kernel import Kernel
from tests.support.lockstep import Life
from tests.support.oracle import ROOT, Oracle, Stamp
from tests.support.sequences import Op

_STUCK_S = 120  # an operation that takes longer will never end


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


class Mismatch(AssertionError):
    """The filesystem and the oracle disagree, or the log complained."""

    @property
    def kind(self) -> str:
        """The same for two mismatches that look like one fault."""
        return re.sub(r"\d+|b'[^']*'", "#", str(self).splitlines()[0])[:60]


def run(config: Config, ops: list[Op]) -> int:
    """All operations, on a freshly formatted store; returns how often it was killed. Raises
    Mismatch."""
    oracle, numbers, position, kills = Oracle(keeps=config.trash.keep_s > 0), {ROOT: ROOT}, 0, 0
    while position < len(ops):
        oracle, numbers, position, killed = in_child(_live, config, oracle, numbers, ops, position)
        kills += killed
    return kills


def in_child(function: Callable, *args: Any) -> Any:
    """What ``function`` returns in a process of its own. Where that ends with ``True`` the process
    was killed."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            function(writer, *args)
        except BaseException as error:  # noqa: BLE001 - the parent raises it
            send(writer, _explain(error))
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert answer, f"the child process ended with status {status} and said nothing"
    found = pickle.loads(answer)
    if isinstance(found, str):
        raise Mismatch(found)
    assert os.WIFSIGNALED(status) == found[-1], (
        "a process was not killed when it should have been, or was"
    )
    return found


def _explain(error: BaseException) -> str:
    """The message, then the stack, of the one error in what may be a group of groups."""
    while exceptions := getattr(error, "exceptions", None):
        error = exceptions[0]
    notes = " ".join(getattr(error, "__notes__", ()))
    return f"{type(error).__name__}: {error} {notes}\n" + "".join(
        traceback.format_exception(error, chain=False)
    )


def send(writer: int, value: Any) -> None:
    with os.fdopen(writer, "wb", closefd=False) as pipe:
        pickle.dump(value, pipe)


def _live(
    writer: int, config: Config, oracle: Oracle, numbers: dict[int, int], ops: list[Op], start: int
) -> None:
    warnings = _Warnings()
    logging.getLogger().addHandler(warnings)

    def die(position: int) -> None:
        assert not warnings.lines, f"the log complains: {warnings.lines}"
        oracle.end(crashed=True)
        send(writer, (oracle, _known(oracle, numbers), position + 1, True))
        os.kill(os.getpid(), signal.SIGKILL)

    position = trio.run(_live_async, config, oracle, numbers, ops, start, die)
    assert not warnings.lines, f"the log complains: {warnings.lines}"
    oracle.end(crashed=False)
    send(writer, (oracle, _known(oracle, numbers), position, False))


async def _live_async(
    config: Config,
    oracle: Oracle,
    numbers: dict[int, int],
    ops: list[Op],
    start: int,
    die: Callable[[int], None],
) -> int:
    """Run operations up to a remount, a crash or the end; returns where to go on."""
    async with open_filesystem(config) as fs, Kernel(fs) as kernel:
        life = Life(kernel, oracle, numbers, config)
        root = oracle.inodes[ROOT]
        if start == 0:
            real = await fs.getattr(ROOT)
            for name in ("atime", "mtime", "ctime"):
                setattr(root, name, Stamp(getattr(real, name + "_ns"), getattr(real, name + "_ns")))
        await life.run(("compare",))
        for position in range(start, len(ops)):
            op = ops[position]
            if op[0] == "remount":
                break
            if op[0] == "crash":
                die(position)
            try:
                with trio.fail_after(_STUCK_S):
                    await life.run(op)
            except Exception as error:
                error.add_note(f"at operation {position}: {op!r}"[:500])
                raise
        else:
            await life.run(("compare",))
        life.close_maps()
        return position + 1


def _known(oracle: Oracle, numbers: dict[int, int]) -> dict[int, int]:
    return {ino: number for ino, number in numbers.items() if ino in oracle.inodes}
