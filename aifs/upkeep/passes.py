"""A pass over the object sets, or other records, of a store in use."""

from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

import trio

Found = TypeVar("Found")


async def do_all(
    at_once: int, items: Iterable[Found], do: Callable[[Found], Awaitable[object]]
) -> None:
    """Await ``do`` for each item, ``at_once`` of them at the same time. It handles its errors."""
    following = iter(items)

    async def work() -> None:
        for item in following:
            await do(item)

    async with trio.open_nursery() as nursery:
        for _ in range(at_once):
            nursery.start_soon(work)
