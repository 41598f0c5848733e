"""Members of a group that are ready to be stored, and having their chunks hashed, by all cores."""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager

import trio

from aifs.burst.copy import BurstCopy
from aifs.burst.pool import Movers
from aifs.core.errors import FsError
from aifs.core.tasks import run_all
from aifs.files.draining import Draining
from aifs.saves.digests import TOGETHER, CopyToHash, Hashing, hash_chunks
from aifs.saves.group import GroupReport
from aifs.saves.sharing import Chunk, Cut

_SLICE = 16 << 20  # bytes that are hashed before others get their turn
_SLICE_CHUNKS = 4096
_REST_S = 0.02
Column = tuple[int, list[Chunk]]
"""Chunks of the same length that are looked at together: the length, and which."""


class Prepared(Draining):
    """A member, a file of the burst tier, from the beginning of its drain. ``outcome``: None while
    it can be stored."""

    def __init__(
        self,
        ino: int,
        on_cancel: Callable[["Prepared"], None] | None = None,
        hurry: Callable[[], bool] = lambda: True,
    ) -> None:
        super().__init__(ino)
        self.size = 0
        """In bytes."""
        self.cut = Cut((), ())
        """Its chunks; without digests as long as it has not been hashed."""
        self.hashed: dict[int, bytes] = {}
        """The digests found so far, by the chunks' numbers."""
        self.level = 0
        """Of zstd; 0 for no compression."""
        self.on_cancel = on_cancel
        """Called, on the trio thread, before the file is changed; or None."""
        self.hurry = hurry
        """Whether it is about to be stored, so that its digests are waited for."""
        self.unwanted = False
        """It is to be released as soon as that can be."""
        self.busy = trio.Lock()
        """Held while it is being prepared."""

    @property
    def is_hashed(self) -> bool:
        return len(self.cut.digests) == len(self.cut.ranges)

    def cancel(self) -> None:
        super().cancel()
        if self.on_cancel is not None:
            self.on_cancel(self)


class Hasher:
    """All hashing of one store. Used from one trio thread."""

    def __init__(self, lanes: int, movers: Movers) -> None:
        """``lanes``: processors; twice as many threads read and hash, since reads wait. Half of
        them if nobody waits for digests, a quarter while other work needs processors."""
        self.hashed_bytes = 0
        self._lanes = lanes
        self._waiting = trio.lowlevel.ParkingLot()
        self._active = 0
        self._movers = movers

    async def hash(
        self,
        members: Sequence[Prepared],
        report: GroupReport,
        waited_for: bool,
    ) -> None:
        """Make missing digests of these leased members.

        Chunks of one number and length are hashed together, equal ones once. ``waited_for``: use at
        least one lane; else end early once a member is in a hurry. Cancelled or unwanted members
        get no more digests, unreadable ones an outcome. Digests made are kept.
        """
        begin = trio.current_time()
        slices = _slices(members)
        copies = [_copy_of(member.copy) for member in members]

        def is_over() -> bool:
            hurry = not waited_for and any(member.hurry() for member in members)
            return hurry or all(map(_is_out, members))

        async def work() -> None:
            for columns in slices:
                async with self._place(is_over, waited_for):
                    if is_over():
                        return
                    await self._hash_some(members, copies, columns, report, waited_for)

        await run_all(*[work] * 2 * self._lanes)
        report.hash_s += trio.current_time() - begin

    async def _hash_some(
        self,
        members: Sequence[Prepared],
        copies: Sequence[CopyToHash],
        columns: Sequence[Column],
        report: GroupReport,
        waited_for: bool,
    ) -> None:
        wanted = [
            (
                length,
                [(member, number) for member, number in chunks if not _is_out(members[member])],
            )
            for length, chunks in columns
        ]
        used = {member for _, chunks in wanted for member, _ in chunks}
        if not used:
            return
        columns = [
            (length, [(member, members[member].cut.ranges[number][0]) for member, number in chunks])
            for length, chunks in wanted
        ]
        asked = Hashing({member: copies[member] for member in used}, columns)
        # A rank that waits should not wait for a process to be started, too.
        found = await self._movers.carry_out(hash_chunks, asked, here=waited_for)
        assert found is not None  # nothing cancels it
        for (length, chunks), (digests, compared) in zip(wanted, found, strict=True):
            hashed = length * len(chunks) - compared
            self.hashed_bytes += hashed
            report.hashed_bytes += hashed
            report.compared_bytes += compared
            for (member, number), found_ in zip(chunks, digests, strict=True):
                if isinstance(found_, FsError):
                    if not _is_out(members[member]):
                        members[member].outcome = found_
                else:
                    members[member].hashed[number] = found_

    def hurry(self) -> None:
        """Some members have come to be in a hurry: the tasks that hash them notice at once."""
        self._waiting.unpark_all()

    def _allowed(self, waited_for: bool) -> int:
        if self._movers.tools.mover.is_in_the_way():
            return max(self._lanes // 4, int(waited_for))
        return 2 * self._lanes if waited_for else max(self._lanes // 2, 1)

    @asynccontextmanager
    async def _place(self, is_over: Callable[[], bool], waited_for: bool) -> AsyncIterator[None]:
        while not is_over() and self._active >= self._allowed(waited_for):
            with trio.move_on_after(_REST_S):  # what is allowed changes without an event
                await self._waiting.park()
        self._active += 1
        try:
            yield
        finally:
            self._active -= 1
            self._waiting.unpark()


def _is_out(member: Prepared) -> bool:
    return member.cancelled or member.unwanted or member.outcome is not None


def _copy_of(copy: BurstCopy) -> CopyToHash:
    status = copy.stat()
    return CopyToHash(copy.place, status.st_blocks * 512 < status.st_size)


def _slices(members: Sequence[Prepared]) -> Iterator[list[Column]]:
    """Missing digests, in slices done at a time; some may be empty."""
    columns: list[Column] = []
    size = seen = 0
    for number in range(max((len(member.cut.ranges) for member in members), default=0)):
        by_length: dict[int, list[Chunk]] = {}
        for place, member in enumerate(members):
            ranges = member.cut.ranges
            if number < len(ranges) and number not in member.hashed:
                by_length.setdefault(ranges[number][1], []).append((place, number))
        for length, chunks in by_length.items():
            for start in range(0, len(chunks), TOGETHER):
                some = chunks[start : start + TOGETHER]
                columns.append((length, some))
                size += length * len(some)
                if size >= _SLICE:
                    yield columns
                    columns, size, seen = [], 0, 0
        seen += len(members)
        if seen >= _SLICE_CHUNKS:
            yield columns
            columns, size, seen = [], 0, 0
    yield columns
