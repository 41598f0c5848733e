"""Processes that are ranks: which one a request comes from, and when it has ended."""

import os
import select
from pathlib import Path

import trio

from aifs.core import files
from aifs.core.errors import NotSupported


def process_of(thread: int) -> int:
    """The process that the kernel's number of a thread belongs to. Raises NotSupported if it cannot
    be seen from here: then it has ended, or lives where processes have other numbers."""
    try:
        lines = Path(f"/proc/{thread}/status").read_text(errors="replace").splitlines()
        return int(next(line for line in lines if line.startswith("Tgid:")).split()[1])
    except (OSError, StopIteration):
        raise NotSupported(
            f"process {thread} cannot be seen, so nobody could tell when it ends"
        ) from None


def watch(process: int) -> int | None:
    """A descriptor for ``wait_for_end``; None if the process has ended."""
    try:
        return os.pidfd_open(process)
    except ProcessLookupError:
        return None


def lives(process: int) -> bool:
    """Now; a task that waits for its end hears of that a little later."""
    pidfd = watch(process)
    if pidfd is None:
        return False
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return not poll.poll(0)
    finally:
        files.close_file(pidfd)


async def wait_for_end(pidfd: int) -> None:
    """Until the process has ended. Closes the descriptor."""
    try:
        await trio.lowlevel.wait_readable(pidfd)
    finally:
        files.close_file(pidfd)
