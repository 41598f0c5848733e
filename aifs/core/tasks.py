"""Running several things at once, with the errors of one."""

import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeGuard, TypeVar

import trio

from aifs.core.errors import FsError

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup  # trio brings it there


def first_error(error: BaseException) -> BaseException:
    """The error itself, or the first one inside a group: nurseries wrap even a single error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


Item = TypeVar("Item")

_AT_ONCE = 128
"""Of many files that are synced together, each holds descriptors meanwhile."""


async def run_all(*functions: Callable[[], Awaitable[Any]]) -> None:
    """Await all ``functions``, some at a time; if some fail the rest finishes, and the first error
    is raised. They must not wait for one another."""
    if len(functions) < 2:  # a nursery costs more than most of what is asked for
        for function in functions:
            await function()
        return
    errors: list[Exception] = []
    places = trio.CapacityLimiter(_AT_ONCE)

    async def run(function: Callable[[], Awaitable[Any]]) -> None:
        try:
            async with places:
                await function()
        except Exception as error:  # noqa: BLE001 (raised below)
            errors.append(error)

    async with trio.open_nursery() as nursery:
        for function in functions:
            nursery.start_soon(run, function)
    if errors:
        raise errors[0]


async def run_each(
    at_once: int, items: Iterable[Item], do: Callable[[Item], Awaitable[Any]]
) -> None:
    """Await ``do`` for each item, ``at_once`` at a time. A failing task ends, others go on; the
    first error is raised."""
    following = iter(items)

    async def work() -> None:
        for item in following:
            await do(item)

    await run_all(*[work] * at_once)


T = TypeVar("T")


async def some_of(
    attempts: Sequence[Callable[[], Awaitable[T]]], needed: int, delay_s: float
) -> dict[int, T]:
    """The first ``needed`` results of ``attempts``, by number.

    They begin in order: as many as needed at once, one more for each failure, and every
    ``delay_s``. Superfluous ones are cancelled. Raises the first error if too many fail.
    """
    results: dict[int, T] = {}
    errors: list[FsError] = []
    begun = 0

    def begin() -> bool:
        nonlocal begun
        if begun == len(attempts):
            return False
        nursery.start_soon(attempt, begun)
        begun += 1
        return True

    async def attempt(number: int) -> None:
        try:
            result = await attempts[number]()
        except FsError as error:
            errors.append(error)
            if len(attempts) - len(errors) < needed:
                nursery.cancel_scope.cancel()
            else:
                begin()
        else:
            if len(results) < needed:
                results[number] = result
            if len(results) == needed:
                nursery.cancel_scope.cancel()

    async def hurry() -> None:
        while begun < len(attempts):
            await trio.sleep(delay_s)
            begin()

    async with trio.open_nursery() as nursery:
        while begun < min(needed, len(attempts)):
            begin()
        if needed < len(attempts):
            nursery.start_soon(hurry)
    if len(results) < needed:
        raise errors[0]
    return results


def is_complete(items: Sequence[T | None]) -> TypeGuard[Sequence[T]]:
    """Whether no item is None."""
    return None not in items
