"""Asking several for the same, where some answers are enough."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeGuard, TypeVar

import trio

from aifs.core.errors import FsError

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
