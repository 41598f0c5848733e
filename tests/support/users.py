"""Functions run in processes of their own, as another user or at the same time as the test."""

import os
import pickle
import traceback
from collections.abc import Callable
from typing import Any


def in_process(
    function: Callable[[], Any], uid: int = 0, gid: int | None = None, groups: tuple[int, ...] = ()
) -> Any:
    """What ``function()`` returns, or the OSError that it raises, in a child process of user
    ``uid``.

    The group is ``uid`` too unless ``gid`` is given.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        answer: tuple[str, Any]
        try:
            os.close(reader)
            if uid:
                os.setgroups(groups)
                group = uid if gid is None else gid
                os.setresgid(group, group, group)
                os.setresuid(uid, uid, uid)
            answer = ("value", function())
        except OSError as error:
            answer = ("error", error)
        except BaseException:  # noqa: BLE001 - the parent raises it
            answer = ("bug", traceback.format_exc())
        os.write(writer, pickle.dumps(answer))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        kind, value = pickle.loads(pipe.read())
    os.waitpid(pid, 0)
    if kind == "error":
        raise value
    assert kind == "value", value
    return value


def errno_of(function: Callable[..., Any], *args: Any, **options: Any) -> int:
    """The errno that ``function(*args, **options)`` fails with; 0 if it succeeds."""
    try:
        function(*args, **options)
    except OSError as error:
        assert error.errno is not None
        return error.errno
    return 0
