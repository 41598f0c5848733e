"""Outcomes of other threads' work: waited for by blocking, or awaited under asyncio and trio."""

import concurrent.futures
import sys
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


class Future(concurrent.futures.Future[T]):
    """``result(timeout)``, ``exception(timeout)``, ``done()``, ``add_done_callback`` as of
    concurrent.futures, or ``await``. It cannot be cancelled: if one thread stops waiting, the
    others still wait."""

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
