"""Walking a range of records, a slice of it in each view, so that no view takes long."""

from collections.abc import Callable, Iterable
from typing import Any

import trio

from aifs.core.loop_share import LoopShare
from aifs.meta import keys
from aifs.meta.kv import Engine, ReadTransaction

SLICE = 512
"""Records that are looked at in one go, where each takes microseconds."""


def read_slice(
    tx: ReadTransaction, start: bytes, end: bytes, limit: int = 0
) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Up to ``limit`` (0: SLICE) records from start to end, and where the next slice starts
    (b"")."""
    limit = limit or SLICE
    records = list(tx.range(start, end, limit))
    return records, records[-1][0] + b"\0" if len(records) == limit else b""


class Walk:
    """An asynchronous iterator over a view's finds in all records of a kind, with other tasks
    between slices; one task uses it, and may stop anywhere."""

    def __init__(
        self,
        engine: Engine,
        kind: bytes,
        read: Callable[..., tuple[Iterable[Any], bytes]] = read_slice,
        *args: Any,
        start: bytes = b"",
        share: LoopShare | None = None,
    ) -> None:
        """``read``: a view of a range, and ``args``; returns items, and where the next slice starts
        (b"": nowhere). ``start``: the first key, if not the kind's. ``share``: requests go
        first."""
        first, self._end = keys.all_of(kind)
        self._engine = engine
        self._start = start or first
        self._read = read
        self._args = args
        self._share = share
        self._items: list[Any] = []
        """Items that have not been returned yet, the next one last."""

    def __aiter__(self) -> "Walk":
        return self

    async def __anext__(self) -> Any:
        while not self._items:
            if not self._start:
                raise StopAsyncIteration
            found = await self._engine.view(self._read, self._start, self._end, *self._args)
            self._items, self._start = list(found[0])[::-1], found[1]
            await trio.lowlevel.checkpoint()
            if self._share is not None:
                await self._share.give_way()
        return self._items.pop()
