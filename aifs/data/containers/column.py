"""The right bytes of one column of a protected container, checked chunk by chunk.

A container says itself what its bytes should be: each chunk has a header with a checksum. So it is
gone through from its beginning, window by window, and only what has been judged becomes part of the
column. No more columns are read than the bytes take as long as they are right. What is wrong,
whichever columns tell it, is an error if a file needs it; else it stays as it is.

A column of a coded container that is only moved is copied from where it lies; a wrong byte in it
stays as wrong as it was.
"""

from collections.abc import Awaitable, Callable, Sequence

import trio

from aifs.core.errors import FsError, Unavailable
from aifs.data.checking.checks import ContainerCheck, Untold
from aifs.data.inspecting.inspection import Inspection
from aifs.data.inspecting.window import Loss, Verdict
from aifs.data.objects.columns import Columns
from aifs.data.reading.buffers import BudgetedBuffers
from aifs.data.servers import Servers
from aifs.layout.interleaved import STRIPE

LoadLive = Callable[[], Awaitable[Sequence[tuple[int, int]]]]
"""Start and end of all chunks of a container that files need."""

_STEP = 2 * STRIPE


class _Dead:
    """Takes all up to ``end`` as it is."""

    def __init__(self, end: int) -> None:
        self.end = end

    def at(self, data: memoryview, offset: int, is_last: bool) -> tuple[int, bool | None] | None:
        return (min(len(data), self.end - offset), True) if offset < self.end else None


class ContainerColumn:
    """Tells one column of a container that nobody appends to."""

    def __init__(
        self,
        servers: Servers,
        buffers: BudgetedBuffers,
        columns: Columns,
        size: int,
        column: int,
        unread: int,
        load_live: LoadLive,
    ) -> None:
        """``columns`` are those of the container. ``unread``: mask of columns that must not be
        read.
        """
        self.wrong: set[int] = set()
        """Other columns that turned out to have wrong bytes."""
        self._columns = columns
        self._buffers = buffers
        self._layout = layout = columns.layout
        self._container = columns.key[1]
        """Its id."""
        self._size = size
        self._column = column
        self._load_live = load_live
        self._is_copied = layout.parity > 0 and not unread >> column & 1
        """Whether the column is told by its own bytes, as long as they are right."""
        self._inspection = Inspection(servers, buffers, columns, size, unread=unread, step=_STEP)
        self._spare = self._not_needed(unread)
        """Mask of columns that are read only where others are not enough."""
        self._check: ContainerCheck | _Dead = self._new_check()
        """Of what follows: of chunks, or of bytes that nobody needs."""
        self._at = 0
        """Where in the container it goes on."""
        self._turn = trio.Lock()
        """Held by whoever tells the next piece."""

    def _new_check(self) -> ContainerCheck:
        return ContainerCheck(self._layout.row if self._layout.parity else 1)

    def _not_needed(self, unread: int) -> int:
        """The mask of columns that are read only where others are not enough."""
        layout = self._layout
        usable = [column for column in range(len(layout.servers)) if not unread >> column & 1]
        usable.sort(key=lambda column: (column != self._column, not self._columns.is_good(column)))
        return sum(1 << column for column in usable[layout.width :])

    async def following(self) -> tuple[int, memoryview] | None:
        """The next bytes of the column, and their offset; None behind the last ones. Several tasks
        may ask at a time.

        Raises Unavailable, which says why they cannot be told.
        """
        async with self._turn:
            if self._is_copied:
                try:
                    return await self._copy()
                except FsError:
                    self._is_copied, self._at = (
                        False,
                        0,
                    )  # all of it: only the first chunk's place is known
                    self._spare = 0
            while self._at < self._size:
                verdict, offset, right = await self._inspection.tell(
                    self._at, self._check, self._column, self._spare
                )
                self.wrong |= {flaw.column for flaw in verdict.flaws if flaw.column != self._column}
                await self._go_on(verdict)
                if right:
                    return offset, right
            return None

    async def _copy(self) -> tuple[int, memoryview] | None:
        offset, end = self._at, self._layout.object_length(self._column, self._size)
        if offset == end:
            return None
        part = (await self._buffers.take(STRIPE))[: end - offset]
        if await self._columns.read(self._column, offset, part) < len(part):
            raise Unavailable(f"column {self._column} ends before byte {offset + len(part)}")
        self._at += len(part)
        return offset, part

    async def _go_on(self, verdict: Verdict) -> None:
        for loss in verdict.losses:
            await self._require_dead(loss)
        self._at = verdict.next
        if isinstance(self._check, _Dead) and self._at >= self._check.end:
            self._check = self._new_check()

    async def _require_dead(self, loss: Loss) -> None:
        """Go on behind what nobody can tell, if no file needs it. Raises Untold."""
        live = await self._load_live()
        end = loss.end
        if end < 0:  # of a header: the next place that is known
            end = min((start for start, _ in live if start > loss.start), default=self._size)
            self._check = _Dead(end)
        if self._inspection.failed or any(
            start < end and loss.start < stop for start, stop in live
        ):
            raise Untold(
                f"container {self._container}: bytes {loss.start} to {end - 1} are not what their "
                "checksums say, whichever columns tell them"
            )
