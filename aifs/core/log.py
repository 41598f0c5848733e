"""The log: its place, form, and the stacks for SIGUSR1. Lines name their level, for tests.
Configuration files are never logged whole."""

import faulthandler
import gc
import logging
import logging.handlers
import os
import stat
import sys
import threading
import traceback
from collections.abc import Iterator
from io import TextIOWrapper
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import trio

FORMAT = "%(asctime)s.%(msecs)03d %(levelname)s %(name)s: %(message)s"
TIME_FORMAT = "%Y-%m-%dT%H:%M:%S"
FILE_BYTES = 10 << 20
FILES_KEPT = 5

logger = logging.getLogger
"""The logger of a module: ``logger(__name__)``."""


def setup(file: str | None, level: str) -> None:
    """Log to ``file`` (rotating; its directory is made) or, None, to stderr, also uncaught
    exceptions. Only the owner (and, if allowed, group) can read it: it names users' files. OSError
    if unwritable."""
    handler: logging.Handler
    if file is None:
        handler = logging.StreamHandler()
    else:
        os.makedirs(os.path.dirname(file), exist_ok=True)
        # What programs and users say may be no text.
        handler = _PrivateFile(
            file, maxBytes=FILE_BYTES, backupCount=FILES_KEPT, errors="backslashreplace"
        )
    handler.setFormatter(logging.Formatter(FORMAT, TIME_FORMAT))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    root.setLevel(level.upper())
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = lambda args: _log_uncaught(
        args.exc_type, args.exc_value, args.exc_traceback
    )


def dump_threads_at(number: int) -> None:
    """Have a signal write the stacks of all threads to the log, also if none of them runs
    Python."""
    (handler,) = logging.getLogger().handlers
    assert isinstance(handler, logging.StreamHandler)
    # Of its own: a descriptor of the log becomes another file's when the log is rotated.
    faulthandler.register(number, os.dup(handler.stream.fileno()))


class _PrivateFile(logging.handlers.RotatingFileHandler):
    def _open(self) -> TextIOWrapper:
        stream: Any = open(
            self.baseFilename,
            self.mode,
            encoding=self.encoding,
            errors=self.errors,
            opener=lambda path, flags: os.open(path, flags, 0o600),
        )
        status = os.fstat(stream.fileno())
        if stat.S_ISREG(status.st_mode) and status.st_mode & 0o007:  # an earlier version made it
            os.fchmod(stream.fileno(), stat.S_IMODE(status.st_mode) & ~0o007)
        return stream


def _log_uncaught(kind: Any, value: Any, trace: Any) -> None:
    logging.getLogger("aifs").critical(
        "an exception that nobody caught", exc_info=(kind, value, trace)
    )


def dump_stacks(logger: logging.Logger) -> None:
    """Log all stacks of threads and tasks at any log level. May run in a signal handler."""
    text = format_stacks()
    logger.handle(logger.makeRecord(logger.name, logging.INFO, __file__, 0, text, (), None))


def format_stacks() -> str:
    """All thread stacks, and, on trio's thread, the tree of tasks with stacks."""
    return "\n".join(["stacks of all threads and tasks", *_thread_lines(), *_task_lines()])


def _thread_lines() -> Iterator[str]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        yield f"thread {names.get(ident, 'not made by Python')} ({ident})"
        yield from _frame_lines(list(traceback.walk_stack(frame))[::-1], "  ")


def running_tasks(
    root: "trio.lowlevel.Task | None" = None,
) -> "Iterator[tuple[trio.lowlevel.Task, int]]":
    """The tasks of a scheduler by its root, without one those of this thread's, if any, with their
    depth; parents first."""
    if "trio" not in sys.modules:
        return
    import trio

    try:
        root = root or trio.lowlevel.current_root_task()
    except RuntimeError:  # this thread does not run trio
        return
    tasks = [(root, 0)] if root else []
    while tasks:
        task, depth = tasks.pop()
        yield task, depth
        children = [child for nursery in task.child_nurseries for child in nursery.child_tasks]
        tasks += [(child, depth + 1) for child in children]


def _task_lines() -> Iterator[str]:
    for task, depth in running_tasks():
        yield from stack_lines(task, "    " * depth)


def stack_lines(task: "trio.lowlevel.Task", indent: str = "") -> Iterator[str]:
    """The name of a task, and where it stands."""
    yield f"{indent}task {task.name}"
    yield from _frame_lines(list(_await_frames(task.coro)), f"{indent}  ")


def _await_frames(awaited: Any) -> Iterator[tuple[FrameType, int]]:
    """The frames of a coroutine and what it awaits, also through pyfuse3's compiled wrapper, where
    trio's own version ends."""
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is not None:
            yield frame, frame.f_lineno
        following = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
        if following is None and not hasattr(awaited, "cr_await"):
            inside = [one for one in gc.get_referents(awaited) if hasattr(one, "cr_await")]
            following = inside[0] if len(inside) == 1 else None
        awaited = following


def _frame_lines(frames: list[tuple[FrameType, int]], indent: str) -> Iterator[str]:
    for summary in traceback.StackSummary.extract(iter(frames)):
        yield f"{indent}{summary.filename}:{summary.lineno} {summary.name}: {summary.line}"
