"""Calls that may never end, such as a stat below a hung mount, by a child that can be left behind:
a thread in the kernel would keep its process from ending."""

import errno
import os
import pickle
import select
import signal
import time
from collections.abc import Callable
from typing import Any

_PART = 1 << 16


def within(limit_s: float, function: Callable[..., Any], *args: Any) -> Any:
    """What ``function(*args)`` returns or raises, in a child of this single-threaded process.
    Raises TimeoutError after ``limit_s``; the child ends when it can."""
    answer, pipe = os.pipe()
    child = os.fork()
    if child == 0:
        _answer(pipe, function, args)
    os.close(pipe)
    try:
        data = _receive(answer, limit_s)
    except TimeoutError:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, os.WNOHANG)
        raise
    finally:
        os.close(answer)
    os.waitpid(child, 0)
    result = pickle.loads(data)
    if isinstance(result, Exception):
        raise result
    return result


def _receive(pipe: int, limit_s: float) -> bytes:
    """All that is written to the pipe. Raises TimeoutError."""
    data, until_s = bytearray(), time.monotonic() + limit_s
    readable = select.poll()
    readable.register(pipe, select.POLLIN)
    while readable.poll(max(0.0, 1000 * (until_s - time.monotonic()))):
        part = os.read(pipe, _PART)
        if not part:
            return bytes(data)
        data += part
    raise TimeoutError(errno.ETIMEDOUT, f"no answer within {limit_s:g} s")


def _answer(pipe: int, function: Callable[..., Any], args: tuple) -> None:
    """In the child. Never returns. Drops what others of its parent wait for, such as output
    pipes."""
    os.closerange(0, pipe)
    os.closerange(pipe + 1, os.sysconf("SC_OPEN_MAX"))
    try:
        try:
            result = function(*args)
        except Exception as error:  # noqa: BLE001 (raised again by the parent)
            result = error
        data = pickle.dumps(result)
        while data:
            data = data[os.write(pipe, data) :]
    finally:
        os._exit(0)
