"""Calls that may never end, such as a stat below a mount that hangs: asked by a process that can be
left behind.

A thread that waits in the kernel keeps its process from ending, whatever is done to it; a child
keeps only itself.
"""

import errno
import os
import signal
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any


def within(limit_s: float, function: Callable[..., Any], *args: Any) -> Any:
    """What ``function(*args)`` returns or raises, by a child of this process, which must have one
    thread.

    Raises TimeoutError if it has not ended after ``limit_s``; the child ends when the system lets
    it.
    """
    answer, pipe = Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        _answer(pipe, function, args)
    pipe.close()
    with answer:
        if not answer.poll(limit_s):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, os.WNOHANG)
            raise TimeoutError(errno.ETIMEDOUT, f"no answer within {limit_s:g} s")
        result = answer.recv()
    os.waitpid(child, 0)
    if isinstance(result, Exception):
        raise result
    return result


def _answer(pipe: Connection, function: Callable[..., Any], args: tuple) -> None:
    """In the child. Never returns. It holds nothing of its parent's that others wait for, such as a
    pipe of its output.
    """
    os.closerange(0, pipe.fileno())
    os.closerange(pipe.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
    try:
        try:
            result = function(*args)
        except Exception as error:  # noqa: BLE001 (raised again by the parent)
            result = error
        pipe.send(result)
    finally:
        os._exit(0)
