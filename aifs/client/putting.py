"""``putfile`` and ``getfile``: a tensor, tensors or a buffer as a file, and back."""

import concurrent.futures
import os
import re
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from aifs.client.checkpoints import attributes, locks
from aifs.client.checkpoints.attributes import delays
from aifs.client.checkpoints.publishing import PathLike, plain
from aifs.client.torch.contents import Content, Loaded, content_of, map_file
from aifs.client.torch.saving import write_file
from aifs.client.torch.sinks import writing_method
from aifs.core import trees

T = TypeVar("T")


class Future(concurrent.futures.Future[T]):
    """``result(timeout)``, ``exception(timeout)``, ``done()``, ``add_done_callback`` as of
    concurrent.futures, or ``await``. It cannot be cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()

    def __await__(self) -> Generator[Any, Any, T]:
        if _is_in_trio():
            return _wait_in_trio(self).__await__()
        import asyncio  # which most programs do not have loaded

        return asyncio.wrap_future(self).__await__()

    def settle(self, function: Callable[[], T]) -> None:
        """The outcome is the result of ``function``, or its error."""
        try:
            result = function()
        except BaseException as error:
            self.set_exception(error)
        else:
            self.set_result(result)


def _is_in_trio() -> bool:
    trio = sys.modules.get("trio")
    try:
        return trio is not None and trio.lowlevel.current_task() is not None
    except RuntimeError:
        return False


async def _wait_in_trio(future: Future[T]) -> T:
    import trio

    token, done = trio.lowlevel.current_trio_token(), trio.Event()

    def wake(_: Any) -> None:
        with suppress(trio.RunFinishedError):
            token.run_sync_soon(done.set)

    future.add_done_callback(wake)
    await done.wait()
    return future.result()


_WRITERS = 2

_pool: ThreadPoolExecutor | None = None
_latest: dict[str, Future[None]] = {}  # path -> the last put of it that is not in the buffer
_changing = threading.Lock()


def _after_fork() -> None:
    """The threads of the pool do not exist in a child."""
    global _pool, _changing
    _pool, _changing = None, threading.Lock()
    _latest.clear()


os.register_at_fork(after_in_child=_after_fork)


@dataclass(frozen=True)
class Saved:
    """The file ``path``, on its way. Its memory must not change before ``buffered`` is done: the
    file has its name, and is durable in the burst tier (elsewhere: in the filesystem). ``durable``:
    it is on the data servers, like all files of a group on a mount."""

    path: str
    buffered: Future[None]
    durable: Future[None]


def putfile(path: PathLike, data: Any, metadata: Mapping[str, str] | None = None) -> Saved:
    """Save ``data`` as the file ``path``, in the background; on a mount it is drained at once.

    A tensor, or a mapping of names to tensors, of torch or numpy, becomes a file of tensors in the
    format of safetensors, with ``metadata``; anything else that has the buffer protocol becomes the
    file as it is. Puts of one path by one process follow each other: the last one stays. Raises
    TypeError, ValueError for data that cannot be saved; the futures raise OSError."""
    global _pool
    target, content = plain(path), content_of(data, metadata)
    saved = Saved(target, Future(), Future())
    with _changing:
        before = _latest.get(target)
        _pool = _pool or ThreadPoolExecutor(_WRITERS, "aifs-put")
        _pool.submit(_put, saved, content, before)
        _latest[target] = saved.buffered
    saved.buffered.add_done_callback(lambda done: _forget(target, done))
    return saved


def _forget(target: str, done: concurrent.futures.Future[None]) -> None:
    with _changing:
        if _latest.get(target) is done:
            del _latest[target]


def getfile(path: PathLike) -> Loaded:
    """The file ``path``, mapped: read when used, changes are not written. Raises OSError."""
    target = plain(path)
    return Loaded(target, map_file(target))


def write_content(target: str, content: Content) -> None:
    """Make the file ``target`` appear, whole and durable; remove killed attempts' files. Raises
    OSError."""
    directory, name = os.path.split(target)
    trees.make_durable_dir(directory)
    left_over = re.compile(re.escape(f".{name}.") + r"[0-9a-f]{8}\.tmp")
    for entry in os.listdir(directory):
        if left_over.fullmatch(entry):
            with suppress(OSError):  # another has just removed it, or it is another user's
                locks.remove_abandoned(os.path.join(directory, entry))
    write_file(target, content.write, sync=True, method=writing_method(directory, content.size))


def _put(saved: Saved, content: Content, before: Future[None] | None) -> None:
    try:
        if before is not None:  # it has been taken from the queue earlier, so this ends
            before.exception()
        write_content(saved.path, content)
        is_mount = attributes.is_aifs(saved.path)
    except BaseException as error:
        saved.buffered.set_exception(error)
        saved.durable.set_exception(error)
        return
    saved.buffered.set_result(None)
    if is_mount:
        in_background("aifs-durable", lambda: saved.durable.settle(lambda: _drain(saved.path)))
    else:
        saved.durable.set_result(None)


def _drain(path: str) -> None:
    """Wait until the file is on the capacity tier. Raises OSError."""
    attributes.put(path, attributes.DRAIN, "")
    for _ in delays():
        if not attributes.ask_json(path, attributes.DRAIN)["files"]:
            return


def in_background(name: str, function: Callable[[], None]) -> None:
    """In a thread that does not keep the process from ending."""
    threading.Thread(target=function, name=name, daemon=True).start()
