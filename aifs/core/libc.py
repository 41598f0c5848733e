"""C library functions missing in Python. ctypes is imported on a call, as slow as a quarter of a
small command's imports."""

import functools
from typing import Any

PR_SET_PDEATHSIG = 1
"""prctl: which signal this process gets when its parent ends."""


@functools.cache
def library() -> Any:
    """The C library, whose errors ``ctypes.get_errno`` tells."""
    import ctypes

    return ctypes.CDLL(None, use_errno=True)


def call(function: str, *arguments: Any) -> int:
    """0 if ``function`` has returned 0, else the number of its error. Integers have 64 bits."""
    import ctypes

    given = [ctypes.c_int64(each) if isinstance(each, int) else each for each in arguments]
    return ctypes.get_errno() if getattr(library(), function)(*given) else 0
