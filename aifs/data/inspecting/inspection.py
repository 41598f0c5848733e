"""Reading an object set by columns, and judging data, replicas, parity. For scrub and fsck.

All columns of a *window* of some MiB are read from all servers at once; the file's bytes are
compared with checksums (``data/checks.py``). If wrong, columns are left out until they are
right (``window``). That gives each column's bytes: all else that was read is a *flaw*.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from aifs.core.errors import FsError
from aifs.core.tasks import run_all
from aifs.data.checks import HASHED
from aifs.data.inspecting.window import (
    LONG,
    MISSING,
    SHORT,
    UNREADABLE,
    Check,
    Flaw,
    Span,
    Verdict,
    Window,
)
from aifs.data.objects.columns import Columns
from aifs.data.objects.holes import pieces_with_data
from aifs.data.reading.buffers import BudgetedBuffers
from aifs.data.servers import Servers

STEP = 4 << 20
"""Bytes of a file in a window, about."""

_SIZE_STEP = 1 << 20  # of buffers, so that those that are free fit


class Inspection:
    """Of one object set that nobody changes. To be closed."""

    def __init__(
        self,
        servers: Servers,
        buffers: BudgetedBuffers,
        columns: Columns,
        size: int,
        *,
        unread: int = 0,
        step: int = STEP,
    ) -> None:
        """``unread``: mask of columns to leave out. ``step``: more bytes than one check covers.
        ``columns``: closed with this."""
        self.columns = columns
        self._servers = servers
        self._buffers = buffers
        self._layout = layout = columns.layout
        self._size = size
        self._unread = unread
        self.failed: set[int] = set()
        """Columns that had not all of the last window."""
        self._row = layout.row if layout.parity else 1
        grain = math.lcm(self._row, HASHED)
        self.step = grain * -(-step // grain) if layout.parity else step
        """Windows at multiples of this are independent, and may be judged at the same time."""
        self.known: tuple[bytes | memoryview, Sequence[Span]] = b"", ()
        """Of the next window's first row: right first bytes, and unknown ranges. Callers may keep
        it to judge the window again."""

    def close(self) -> None:
        self.columns.close()

    def _readable(self) -> list[int]:
        return [
            column for column in range(len(self._layout.servers)) if not self._unread >> column & 1
        ]

    async def starts(self, has_checksums: bool, start: int = 0, end: int = -1) -> Sequence[int]:
        """Starts of the file's windows to judge between ``start`` and ``end`` (-1: its end).
        Without checksums, those where a column has bytes, and the last, which show short
        objects."""
        end = self._size if end < 0 else end
        every = range(start, end, self.step)
        if has_checksums:
            return every
        found = {at async for at in pieces_with_data(self, end, self.step, start)}
        last = range(0, self._size, self.step)[-2:]
        return sorted(found.union(at for at in last if at in every))

    async def data_range(self, offset: int, size: int, strict: bool = True) -> tuple[int, int]:
        """See Sparse."""
        return await self.columns.any_data(self._readable(), offset, size)

    async def excess(self) -> list[Flaw]:
        """Objects that are longer than they should be."""
        flaws: list[Flaw] = []

        async def look(column: int) -> None:
            end = self._layout.object_length(column, self._size)
            try:
                if await self.columns.read(column, end, memoryview(bytearray(1))):
                    flaws.append(Flaw(column, LONG, end, 1))
            except FsError:
                pass  # reading its bytes says so

        await run_all(*(partial(look, column) for column in self._readable()))
        return flaws

    async def judge(self, start: int, check: Check) -> Verdict:
        """Look at the window of whole rows from ``start``: where another ended, or behind a
        loss."""
        window = await self._look(start, self._unread)
        verdict = await self._work(window.judge, start, check)
        self.known = window.carried, window.doubtful
        return verdict

    async def tell(
        self, start: int, check: Check, column: int, spare: int
    ) -> tuple[Verdict, int, memoryview]:
        """``judge``, with offset and bytes of ``column`` in completely judged rows. Columns
        ``spare`` are read only if needed."""
        for unread in dict.fromkeys((self._unread | spare, self._unread)):
            window = await self._look(start, unread)
            verdict, offset, right = await self._work(window.tell, start, check, column)
            if not verdict.losses:
                break
        self.known = window.carried, window.doubtful
        return verdict, offset, right

    async def _look(self, start: int, unread: int) -> Window:
        carried, doubtful = self.known
        begin = start // self._row * self._row
        end = min(-(-(start + self.step) // self._row) * self._row, self._size)
        if begin + len(carried) != start:
            carried, doubtful = b"", [(begin, start)]
        window = Window(self._layout, self._size, begin, end, unread)
        window.carried, window.doubtful = carried, list(doubtful)
        memory = await self._buffers.take(-(-window.space // _SIZE_STEP) * _SIZE_STEP)
        window.place(memory)
        wanted = {c: found for c, found in window.found.items() if found[1] and not unread >> c & 1}
        calls = [
            (c, self.columns.read_now, (c, target, offset))
            for c, (offset, target) in wanted.items()
        ]
        for (column, (offset, target)), answer in zip(
            wanted.items(), await self.columns.attempt(calls), strict=True
        ):
            done = 0 if isinstance(answer, FsError) else answer
            if done < len(target):
                window.failed[column] = SHORT if offset + done else MISSING
                target[done:] = bytes(len(target) - done)
            if isinstance(answer, FsError):
                window.failed[column] = UNREADABLE
        self.failed = set(window.failed)
        return window

    async def _work(self, function: Callable[..., Any], *args: Any) -> Any:
        return await self._servers.run(self._servers.idlest(self._layout.servers), function, *args)
