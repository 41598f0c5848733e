"""Verifying one file or container of a store in use, and repairing it: the judge of scrubs.

Right object sets, nearly all, are found elsewhere (inspecting), many small ones at a time; the rest
is looked at here. Programs are not held up: a finding counts only if the record is the same
afterwards, else the object set is looked at again. A file with a dirty mark is put off.

Only protected objects, written once, are repaired in place: the right bytes are written, synced and
read back. The rebuild gets the rest.
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from aifs.burst.making import MakingTools, never
from aifs.burst.pool import Movers
from aifs.core import faults
from aifs.core.errors import FsError
from aifs.core.tasks import run_each
from aifs.data.checks import (
    DIGEST_BYTES,
    DIGESTS_AT_ONCE,
    HASHED,
    ContainerCheck,
    FileCheck,
)
from aifs.data.inspecting.inspection import STEP, Inspection
from aifs.data.inspecting.window import LONG, UNREADABLE, WRONG, Check, Flaw, Loss, Span, Verdict
from aifs.data.objects.columns import Columns
from aifs.data.objects.recovery import forget_columns
from aifs.data.reading.buffers import BudgetedBuffers
from aifs.data.servers import Servers
from aifs.layout.interleaved import STRIPE
from aifs.layout.placement import LOST
from aifs.meta import degraded, forms, moves, shared
from aifs.meta.kv import Engine, ReadTransaction
from aifs.meta.moves import SetRecord
from aifs.meta.server_uses import User, users_of

_PATCHED = faults.declare("vfs.repair.patched", "wrong bytes are right, other hosts do not know it")

_PRIORITY = "best-effort"
_SETS_AT_ONCE = 4  # object sets
_WINDOWS_AT_ONCE = 2  # of one file

Known = tuple[bytes | memoryview, Sequence[Span]]
"""See Inspection.known."""

NOTHING: Known = (b"", ())


class ObjectRange(NamedTuple):
    """A part of an object set that nobody changes, to be read from all its servers."""

    objects: SetRecord
    unread: int
    """Mask of columns that are not to be read."""
    start: int
    """The first byte; of a file, where a window begins (Inspection.step)."""
    end: int
    """The window behind the last, or a file's end. A container's last window begins before it, and
    may end behind it."""
    digests: bytes = b""
    """The checksums of a file from ``start`` on, for all its windows; b"": it has none."""
    known: Known = NOTHING
    """Of a container: the results of the windows before ``start``."""


class Inspected(NamedTuple):
    """The result of a range."""

    read_bytes: int
    """From all columns together."""
    next: int
    """All before it has been read, and is right but for ``wrong``."""
    wrong: Sequence[int] = ()
    """Starts of wrong windows. A container's first ends the work, at ``next``: later ones depend on
    it."""
    excess: bool = False
    """Whether an object is too long; looked for with a protected file's end."""
    known: Known = NOTHING
    """Of a container: as ``ObjectRange.known``, for the window that begins at ``next``."""

    @property
    def is_right(self) -> bool:
        return not self.wrong and not self.excess


def inspection_of(
    servers: Servers, buffers: BudgetedBuffers, objects: SetRecord, unread: int
) -> Inspection:
    """As scrubs use it, so that a second look sees the same windows. To be closed."""
    ino, oid, layout, size = objects
    step = STEP if ino else 2 * STRIPE
    columns = Columns(servers, layout, ino, oid, background=_PRIORITY)
    return Inspection(servers, buffers, columns, size, unread=unread, step=step)


async def inspect(
    ranges: Sequence[ObjectRange], tools: MakingTools, cancelled: Callable[[], bool] = never
) -> Sequence[Inspected] | None:
    """The result of each range, in order; None if ``cancelled`` has become true meanwhile."""
    found: dict[int, Inspected] = {}

    async def look(numbered: tuple[int, ObjectRange]) -> None:
        number, asked = numbered
        if not cancelled():
            about = tools.servers, tools.buffers, asked.objects, asked.unread
            with closing(inspection_of(*about)) as inspection:
                inspect_one = _inspect_file if asked.objects.ino else _inspect_container
                found[number] = await inspect_one(asked, inspection)

    await run_each(min(_SETS_AT_ONCE, len(ranges)), enumerate(ranges), look)
    return None if len(found) < len(ranges) else [found[number] for number in range(len(ranges))]


async def _inspect_file(asked: ObjectRange, inspection: Inspection) -> Inspected:
    layout, size = asked.objects.layout, asked.objects.size
    check = FileCheck(size, asked.start // HASHED, asked.digests)
    wrong, read_bytes = set[int](), 0

    async def judge(at: int) -> None:
        nonlocal read_bytes
        verdict = await inspection.judge(at, check)
        read_bytes += verdict.read_bytes
        if not verdict.is_right:
            wrong.add(at)

    starts = await inspection.starts(bool(asked.digests), asked.start, asked.end)
    await run_each(min(_WINDOWS_AT_ONCE, len(starts)), starts, judge)
    has_end = layout.is_protected and asked.end == size
    excess = bool(await inspection.excess()) if has_end else False
    return Inspected(read_bytes, asked.end, sorted(wrong), excess)


async def _inspect_container(asked: ObjectRange, inspection: Inspection) -> Inspected:
    layout = asked.objects.layout
    check = ContainerCheck(layout.row if layout.parity else 1)
    at, read_bytes, known = asked.start, 0, asked.known
    while at < asked.end:
        inspection.known = known
        verdict = await inspection.judge(at, check)
        read_bytes += verdict.read_bytes
        if not verdict.is_right:
            return Inspected(read_bytes, at, (at,), known=known)
        at, known = verdict.next, inspection.known
    return Inspected(read_bytes, at, known=known)


PIECE = 64 << 20
"""Bytes of files, or containers, that are looked at together, at most."""

_TRIES = 3
_AT_ONCE = 4  # pieces of small object sets
_SEEN_AT_ONCE = 16  # records of object sets
_AHEAD = 32  # MiBs that a window has at most

Item = tuple[int, int]
"""Inode number and oid; (0, id) of a container."""


class Lost(NamedTuple):
    """Bytes of a file, or container, that are not repaired."""

    ino: int
    """The file; 0: the container ``oid``."""
    oid: int
    """Of its objects, or its chunk list."""
    start: int
    """The first byte."""
    end: int
    """The one behind the last."""
    servers: tuple[int, ...]
    """Those that the bytes lie on."""
    reason: str
    """Why they are not repaired, for people."""
    for_good: bool = True
    """They cannot be."""
    could_be_read: bool = True
    """They are there, and other bytes than they should be."""


def joined(ranges: Iterable[Lost]) -> list[Lost]:
    """The ranges in order; those that touch, and differ in nothing else, as one."""
    found: list[Lost] = []
    for lost in sorted(ranges):
        if found and found[-1] == lost._replace(start=found[-1].start, end=lost.start):
            found[-1] = found[-1]._replace(end=lost.end)
        else:
            found.append(lost)
    return found


@dataclass(slots=True)
class ScrubResult:
    """Results. ``flaws``: wrong ranges of objects, or whole ones; of these ``repaired`` in place,
    ``rebuilding`` handed on; others, without leave to repair, stay."""

    flaws: int = 0
    repaired: int = 0
    rebuilding: int = 0
    lost: list[Lost] = field(default_factory=list)
    wrong: list[tuple[int, int, int]] = field(default_factory=list)
    """Inode number, oid and column of objects left wrong, in sets with right bytes elsewhere."""

    def add(self, other: "ScrubResult") -> None:
        self.flaws += other.flaws
        self.repaired += other.repaired
        self.rebuilding += other.rebuilding
        self.lost += other.lost
        self.wrong += other.wrong


class _Changed(Exception):
    """The object set has changed since it was read, or cannot be read now."""


class Scrubber:
    """Verifies object sets, one a call, several at a time. Used from one trio thread."""

    def __init__(
        self,
        engine: Engine,
        servers: Servers,
        movers: Movers,
        throttle: Callable[[int], Awaitable[None]],
        piece: Callable[[], int],
        give_way: Callable[[], Awaitable[None]],
        request: Callable[[int, int, Iterable[int]], Awaitable[bool]] | None = None,
    ) -> None:
        """``throttle`` is awaited with each piece's bytes; ``piece``: bytes to look at together;
        ``give_way``: see LoopShare; ``request``: see Rebuild, for repair."""
        self.engine = engine
        self.servers = servers
        self.buffers = BudgetedBuffers(servers.budget)
        self.movers = movers
        self.throttle = throttle
        self.piece = piece
        self.request = request
        self.give_way = give_way

    async def find_right(self, items: Sequence[Item]) -> set[Item]:
        """Object sets that need no more: all right, or gone. Others, and large ones, are left to
        ``scrub``."""
        right, pieces = set[Item](), list[list[ObjectRange]]()
        size, limit = 0, self.piece()
        for first in range(0, len(items), _SEEN_AT_ONCE):
            some = items[first : first + _SEEN_AT_ONCE]
            for item, whole in zip(
                some, await self.engine.view(_see_small, some, limit), strict=True
            ):
                if whole is None:
                    continue
                seen, digests = whole
                if seen.objects is None:
                    right.add(item)
                    continue
                if not pieces or size + seen.objects.size > limit:
                    pieces.append([])
                    size = 0
                size += seen.objects.size
                unread = self.unread(seen, seen.objects)
                pieces[-1].append(ObjectRange(seen.objects, unread, 0, seen.objects.size, digests))
            await self.give_way()

        async def look(piece: list[ObjectRange]) -> None:
            with suppress(FsError):  # a server hangs: they are looked at one by one
                for asked, answer in zip(piece, await self.inspect(piece), strict=True):
                    if answer.is_right:
                        right.add((asked.objects.ino, asked.objects.oid))

        await run_each(min(_AT_ONCE, len(pieces)), pieces, look)
        return right

    async def inspect(self, ranges: Sequence[ObjectRange]) -> Sequence[Inspected]:
        """The result of each range, at the pace of the pass."""
        answers = await self.movers.carry_out(inspect, ranges)
        assert answers is not None  # nothing cancels it
        await self.throttle(sum(answer.read_bytes for answer in answers))
        return answers

    def unread(self, seen: "_Seen", objects: SetRecord) -> int:
        """Mask of columns not to read: also on gone servers, if others suffice."""
        layout = objects.layout
        if not layout.is_protected:
            return seen.unread
        servers = [self.servers.find(number) for number in layout.servers]
        gone = (c for c, server in enumerate(servers) if server is None or server.absent)
        return seen.unread | sum(1 << column for column in gone)

    async def scrub(self, ino: int, oid: int, found: ScrubResult, repair: bool) -> bool:
        """Verify objects of a file, or a container (``ino`` 0), adding to ``found``. False if it
        has to wait: the file is being changed, or a server is silent. Raises FsError if the
        metadata cannot be read."""
        for _ in range(_TRIES):
            seen = await self.engine.view(_see, ino, oid)
            if seen.objects is None:
                return True  # gone, or other objects, which were verified when they were made
            if seen.is_changing:
                return False
            scrub = _Scrub(self, seen, seen.objects, repair)
            try:
                await scrub.run()
                found.add(scrub.found)
                return True
            except _Changed:
                pass
            finally:
                scrub.close()
        return False


class _Seen(NamedTuple):
    """The records of an object set. ``unread``: mask of columns that must not be read."""

    objects: SetRecord | None
    unread: int
    is_changing: bool


def _see(tx: ReadTransaction, ino: int, oid: int) -> _Seen:
    is_changing = ino != 0 and moves.is_changing(tx, ino, oid)  # a container only grows
    return _Seen(moves.find_objects(tx, ino, oid), degraded.find_unread(tx, oid), is_changing)


def _see_small(
    tx: ReadTransaction, items: Sequence[Item], limit: int
) -> list[tuple[_Seen, bytes] | None]:
    """Each with all its checksums; None if larger than ``limit``, changing, or of a damaged
    record."""
    found: list[tuple[_Seen, bytes] | None] = []
    for ino, oid in items:
        try:
            seen = _see(tx, ino, oid)
        except FsError:
            found.append(None)
            continue
        if seen.objects is not None and (seen.is_changing or seen.objects.size > limit):
            found.append(None)
            continue
        is_file = ino != 0 and seen.objects is not None
        found.append((seen, forms.get_checksums(tx, oid, 0)[1] if is_file else b""))
    return found


class _Scrub:
    """One attempt at one object set."""

    def __init__(self, scrubber: Scrubber, seen: _Seen, objects: SetRecord, repair: bool) -> None:
        """``objects``: those of ``seen``."""
        self.found = ScrubResult()
        self._engine = scrubber.engine
        self._scrubber = scrubber
        self._seen = seen
        self._objects = objects
        self._ino, self._oid, self._layout, self._size = objects
        self._repair = repair
        self._unread = scrubber.unread(seen, objects)
        self._inspection = inspection_of(scrubber.servers, scrubber.buffers, objects, self._unread)
        self._users: list[User] | None = None
        self._wrong: set[int] = set()  # columns that are left as they are
        self._to_rebuild: set[int] = set()

    def close(self) -> None:
        self._inspection.close()

    async def run(self) -> None:
        """Raises _Changed."""
        at, known = 0, NOTHING
        while True:
            [found] = await self._scrubber.inspect([await self._range(at, known)])
            at, known = found.next, found.known
            for wrong in found.wrong:
                self._inspection.known = known
                after = await self._judge(wrong)
                if not self._ino:
                    at, known = after, self._inspection.known
            if at >= self._size:
                break
        # Behind its end an open container has chunks that are not on record yet, and a plain file
        # leftovers of a crash (I4).
        if found.excess and (excess := await self._inspection.excess()):
            await self._confirm()
            await self._deal_with(excess)
        if self._repair and self._to_rebuild:
            await self._hand_on()
        elif self._wrong:
            self.found.wrong += [(self._ino, self._oid, column) for column in sorted(self._wrong)]
            servers, reason = self._on(self._wrong), "can be repaired from the file's other objects"
            lost = Lost(self._ino, self._oid, 0, self._size, servers, reason, for_good=False)
            self.found.lost.append(lost)

    async def _range(self, at: int, known: Known) -> ObjectRange:
        step = self._inspection.step
        length = max(self._scrubber.piece() // step, 1) * step
        end = min(at + length, self._size)
        digests = await self._digests(at, end) if self._ino else b""
        if self._ino and not digests:  # then nothing is read of a hole, however long it is
            data, _ = await self._inspection.data_range(at, self._size)
            end = min(max(end, data - data % step), self._size)
        return ObjectRange(self._objects, self._unread, at, end, digests, known)

    async def _digests(self, start: int, end: int) -> bytes:
        digests, first, last = b"", start // HASHED, -(-end // HASHED)
        for number in range(first - first % DIGESTS_AT_ONCE, last, DIGESTS_AT_ONCE):
            digests += (await self._engine.view(forms.get_checksums, self._oid, number))[1]
        skipped = first % DIGESTS_AT_ONCE * DIGEST_BYTES
        return digests[skipped : skipped + (last - first) * DIGEST_BYTES]

    async def _judge(self, at: int) -> int:
        known = self._inspection.known
        verdict = await self._verdict(at)
        if not verdict.is_right:  # only a window that is wrong twice is wrong
            self._inspection.known = known
            verdict = await self._verdict(at)
        at = verdict.next
        if not verdict.is_right:
            short = {flaw.column for flaw in verdict.flaws if flaw.kind is not WRONG}
            short |= self._inspection.failed
            for loss in verdict.losses:
                at = max(at, await self._note_loss(loss, short.isdisjoint(loss.columns)))
            await self._deal_with(verdict.flaws)
        return at

    async def _verdict(self, at: int) -> Verdict:
        """On the window from ``at`` on. Raises _Changed for faults in a changed object set."""
        number = at // HASHED
        first, digests = await self._engine.view(forms.get_checksums, self._oid, number)
        verdict = await self._inspection.judge(at, await self._check(number, first, digests))
        await self._scrubber.throttle(verdict.read_bytes)
        if not verdict.is_right:
            await self._confirm(number, digests)
        return verdict

    async def _check(self, number: int, first: int, digests: bytes) -> Check:
        if not self._ino:
            return ContainerCheck(self._layout.row if self._layout.parity else 1)
        if (
            number - first + _AHEAD > DIGESTS_AT_ONCE
            and len(digests) == DIGESTS_AT_ONCE * DIGEST_BYTES
        ):
            _, more = await self._engine.view(
                forms.get_checksums, self._oid, first + DIGESTS_AT_ONCE
            )
            digests += more
        return FileCheck(self._size, first, digests)

    async def _confirm(self, number: int = 0, digests: bytes | None = None) -> None:
        """Raises _Changed unless all is as when read, also the ``digests`` of MiB ``number``."""
        seen = await self._engine.view(_see, self._ino, self._oid)
        now = seen.objects
        if now is None or seen.is_changing or seen.unread != self._seen.unread:
            raise _Changed
        if now._replace(size=0) != self._objects._replace(size=0) or now.size < self._size:
            raise _Changed
        if self._ino and now.size != self._size:
            raise _Changed
        if (
            digests is not None
            and (await self._engine.view(forms.get_checksums, self._oid, number))[1] != digests
        ):
            raise _Changed

    # --- flaws ---

    async def _deal_with(self, flaws: list[Flaw]) -> None:
        if not self._layout.is_protected:
            return  # missing bytes are losses
        for flaw in flaws:
            if flaw.kind is UNREADABLE:
                await self._require_answers(flaw.column)
            is_patch = flaw.kind in (WRONG, LONG)
            if is_patch or flaw.column not in self._to_rebuild | self._wrong:
                self.found.flaws += 1
            if not self._repair:
                self._wrong.add(flaw.column)
            elif not (is_patch and await self._patch(flaw)):
                self._to_rebuild.add(flaw.column)

    async def _require_answers(self, column: int) -> None:
        """Raises _Changed for a silent server, which tells nothing of its objects, unless lost."""
        server = self._scrubber.servers.find(self._layout.servers[column])
        if server is None or server.standing == LOST:
            return
        try:
            await self._scrubber.servers.run(server, server.list_range, 0, 0)
        except FsError:
            raise _Changed from None

    async def _patch(self, flaw: Flaw) -> bool:
        """Repair wrong bytes in place; whether they are right now, durably; hosts hear of it.

        The object was open when read, so a deleted one is not made again. Raises FsError if the
        metadata cannot be changed.
        """
        columns, column = self._inspection.columns, flaw.column
        if flaw.kind is not LONG and flaw.right is None:
            return False
        if not await self._engine.transact(moves.begin_repair, self._oid, self._ino):
            raise _Changed
        await self._engine.barrier()  # or a power cut may leave the right bytes, and this undone
        try:
            if flaw.right is None:
                await columns.settle(column, flaw.offset)
            else:
                await columns.write(column, flaw.offset, flaw.right)
            await columns.sync(column)
            there = memoryview(bytearray(flaw.length))
            done = await columns.read(column, flaw.offset, there)
        except FsError:
            return False
        faults.reach(_PATCHED)
        is_right = done == 0 if flaw.kind is LONG else bytes(there[:done]) == flaw.right
        forget_columns(self._scrubber.servers.cache, self._layout, (self._ino, self._oid))
        self._scrubber.servers.blocks.correct(self._oid)  # they were read when it was wrong
        await self._engine.transact(degraded.note_repair, self._oid)
        self.found.repaired += is_right
        return is_right

    async def _hand_on(self) -> None:
        request = self._scrubber.request
        assert request is not None
        if await request(self._oid, self._ino, self._to_rebuild):
            self.found.rebuilding += len(self._to_rebuild)
            return
        await self._confirm()
        reason = "more objects are lost than the others can replace"
        await self._lose(Lost(0, 0, 0, self._size, self._on(self._to_rebuild), reason))

    def _on(self, columns: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted({self._layout.servers[column] for column in columns}))

    # --- losses ---

    async def _note_loss(self, loss: Loss, could_be_read: bool) -> int:
        """Returns where to go on, if the loss's end was unknown."""
        for column in loss.columns:
            await self._require_answers(column)
        reason = "the bytes do not have their checksum, and there is no other copy of them"
        if not loss.certain:
            reason = (
                "the objects contradict one another, and there is no checksum that tells "
                "which one is right"
            )
        end = loss.end
        if end < 0:
            users = await self._load_users()
            end = min((user.start for user in users if user.start > loss.start), default=self._size)
        servers = self._on(loss.columns)
        await self._lose(Lost(0, 0, loss.start, end, servers, reason, could_be_read=could_be_read))
        return end

    async def _load_users(self) -> list[User]:
        if self._users is None:
            self._users = await users_of(self._engine, {self._oid})
        return self._users

    async def _lose(self, lost: Lost) -> None:
        if self._ino:
            users = await self._engine.view(shared.users, self._oid)
            for ino in users or [self._ino]:
                self.found.lost.append(lost._replace(ino=ino, oid=self._oid))
            return
        for user in await self._load_users():  # dead chunks are no loss
            if user.start < lost.end and lost.start < user.end:
                of_file = lost._replace(ino=user.ino, oid=user.oid)
                self.found.lost.append(of_file._replace(start=user.first, end=user.last + 1))
