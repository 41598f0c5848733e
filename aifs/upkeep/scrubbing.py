"""Verifying one file or container of a store in use, and repairing it: what a scrub does with each.

Nothing holds up programs: what is found counts only if the record that it was read for is the same
still afterwards, else it is looked at again. A file with a dirty mark, whose bytes may change any
time, is put off.

Repair is in place, and only of what nobody ever changes in place: protected objects, which are
written once. The bytes that belong there are written, synced and read back. What cannot be repaired
so is handed to the rebuild.
"""

from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from aifs.core.errors import FsError
from aifs.core.tasks import run_all
from aifs.data.checking.checks import ContainerCheck, FileCheck
from aifs.data.checking.digests import DIGEST_BYTES, DIGESTS_AT_ONCE, HASHED
from aifs.data.checking.inspection import STEP, Inspection
from aifs.data.checking.window import LONG, UNREADABLE, WRONG, Check, Flaw, Loss, Verdict
from aifs.data.objects.recovery import forget_columns
from aifs.data.reading.buffers import BudgetedBuffers
from aifs.data.servers import Servers
from aifs.files.chunk_users import User, users_of
from aifs.layout.interleaved import STRIPE
from aifs.layout.placement import LOST
from aifs.meta import degraded, forms, moves
from aifs.meta.kv import Engine, ReadTransaction
from aifs.meta.moves import SetRecord

_PRIORITY = "best-effort"
_TRIES = 3
_AT_ONCE = 2  # windows of one file
_AHEAD = 32  # MiBs that a window has at most


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


@dataclass(slots=True)
class ScrubResult:
    """What came of some object sets. ``flaws``: ranges of objects, or whole ones, that were wrong;
    of these ``repaired`` in place, ``rebuilding`` handed on. Without leave to repair they stay as
    they are."""

    read_bytes: int = 0
    flaws: int = 0
    repaired: int = 0
    rebuilding: int = 0
    lost: list[Lost] = field(default_factory=list)

    def add(self, other: "ScrubResult") -> None:
        self.read_bytes += other.read_bytes
        self.flaws += other.flaws
        self.repaired += other.repaired
        self.rebuilding += other.rebuilding
        self.lost += other.lost


class _Changed(Exception):
    """The object set is not what it was when it was read, or cannot be read now."""


class Scrubber:
    """Verifies object sets, each by one call; several calls may go on at a time. Used from one trio
    thread.
    """

    def __init__(
        self,
        engine: Engine,
        servers: Servers,
        throttle: Callable[[int], Awaitable[None]],
        request: Callable[[int, int, Iterable[int]], Awaitable[bool]],
    ) -> None:
        """``throttle`` is awaited with the bytes of each piece that has been read; ``request``: see
        Rebuild.
        """
        self.engine = engine
        self.servers = servers
        self.buffers = BudgetedBuffers(servers.budget)
        self.throttle = throttle
        self.request = request

    async def scrub(self, ino: int, oid: int, found: ScrubResult, repair: bool) -> bool:
        """Verify the objects ``oid`` of a file, or a container (``ino`` 0), and add to ``found``
        what is found.

        False if that cannot be told now: the file is being changed, or a server does not answer.
        Raises FsError where the metadata cannot be read.
        """
        for _ in range(_TRIES):
            seen = await self.engine.view(_see, ino, oid)
            if seen.objects is None:
                # it is gone, or has other objects, which were verified when they were made
                return True
            if seen.is_changing:
                return False
            scrub = _Scrub(self, seen, seen.objects, repair)
            try:
                await scrub.run()
                found.add(scrub.found)
                return True
            except _Changed:
                found.read_bytes += scrub.found.read_bytes
            finally:
                scrub.close()
        return False


class _Seen(NamedTuple):
    """What the metadata says of an object set. ``unread``: mask of columns that must not be
    read.
    """

    objects: SetRecord | None
    unread: int
    is_changing: bool


def _see(tx: ReadTransaction, ino: int, oid: int) -> _Seen:
    is_changing = ino != 0 and moves.is_changing(tx, ino, oid)  # a container only grows
    return _Seen(moves.find_objects(tx, ino, oid), degraded.find_unread(tx, oid), is_changing)


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
        gone = [
            number
            for number in self._layout.servers
            if (s := scrubber.servers.find(number)) is None or s.absent
        ]
        absent = (
            sum(1 << self._layout.servers.index(number) for number in gone)
            if self._layout.is_protected
            else 0
        )
        self._inspection = Inspection(
            scrubber.servers,
            scrubber.buffers,
            self._layout,
            self._ino,
            self._oid,
            self._size,
            unread=seen.unread | absent,
            step=STEP if self._ino else 2 * STRIPE,
            background=_PRIORITY,
        )
        self._has_failed = False
        self._users: list[User] | None = None
        self._wrong: set[int] = set()  # columns that are left as they are
        self._to_rebuild: set[int] = set()

    def close(self) -> None:
        self._inspection.close()

    async def run(self) -> None:
        """Raises _Changed."""
        if self._ino:
            _, digests = await self._engine.view(forms.get_checksums, self._oid, 0)
            starts = await self._inspection.starts(bool(digests))
            await run_all(*[partial(self._judge_each, iter(starts))] * min(_AT_ONCE, len(starts)))
        else:
            at = 0
            while at < self._size:
                at = await self._judge(at)
        # Behind its end an open container has what nobody has recorded, and a plain file what a
        # crash has left (I4).
        if self._ino and self._layout.is_protected and (excess := await self._inspection.excess()):
            await self._confirm()
            await self._deal_with(excess)
        if self._repair and self._to_rebuild:
            await self._hand_on()
        elif self._wrong:
            reason = "can be repaired from the file's other objects"
            self.found.lost.append(
                Lost(
                    self._ino,
                    self._oid,
                    0,
                    self._size,
                    self._on(self._wrong),
                    reason,
                    for_good=False,
                )
            )

    async def _judge_each(self, following: Iterator[int]) -> None:
        for at in following:
            if self._has_failed:
                return
            try:
                await self._judge(at)
            except BaseException:
                self._has_failed = True
                raise

    async def _judge(self, at: int) -> int:
        """Deal with the window from ``at`` on; returns where the next one begins."""
        known = self._inspection.known
        verdict = await self._verdict(at)
        if verdict.flaws or verdict.losses:  # only what is wrong twice is wrong
            self._inspection.known = known
            verdict = await self._verdict(at)
        at = verdict.next
        if verdict.flaws or verdict.losses:
            for loss in verdict.losses:
                at = max(at, await self._note_loss(loss))
            await self._deal_with(verdict.flaws)
        return at

    async def _verdict(self, at: int) -> Verdict:
        """On the window from ``at`` on. Raises _Changed where it finds fault with what has changed
        meanwhile.
        """
        number = at // HASHED
        first, digests = await self._engine.view(forms.get_checksums, self._oid, number)
        verdict = await self._inspection.judge(at, await self._check(number, first, digests))
        self.found.read_bytes += verdict.read_bytes
        await self._scrubber.throttle(verdict.read_bytes)
        if verdict.flaws or verdict.losses:
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
        """Raises _Changed unless all is as it was when it was read, also the ``digests`` of MiB
        ``number``.
        """
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

    # --- what is wrong ---

    async def _deal_with(self, flaws: list[Flaw]) -> None:
        if not self._layout.is_protected:
            return  # what lacks is lost, and told as that
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
        """A server that answers nothing says nothing about its objects, unless it is lost. Raises
        _Changed.
        """
        server = self._scrubber.servers.find(self._layout.servers[column])
        if server is None or server.standing == LOST:
            return
        try:
            await self._scrubber.servers.run(server, server.list_range, 0, 0)
        except FsError:
            raise _Changed from None

    async def _patch(self, flaw: Flaw) -> bool:
        """Put right in place what is wrong; whether it is, durably.

        The object was open for this already when it was read. So if it has been deleted meanwhile
        it is not made again.
        """
        columns, column = self._inspection.columns, flaw.column
        try:
            if flaw.kind is LONG:
                await columns.settle(column, flaw.offset)
            elif flaw.right is None:
                return False
            else:
                await columns.write(column, flaw.offset, flaw.right)
            await columns.sync(column)
            there = memoryview(bytearray(flaw.length))
            done = await columns.read(column, flaw.offset, there)
        except FsError:
            return False
        is_right = done == 0 if flaw.kind is LONG else bytes(there[:done]) == flaw.right
        forget_columns(self._scrubber.servers.cache, self._layout, (self._ino, self._oid))
        self.found.repaired += is_right
        return is_right

    async def _hand_on(self) -> None:
        if await self._scrubber.request(self._oid, self._ino, self._to_rebuild):
            self.found.rebuilding += len(self._to_rebuild)
            return
        await self._confirm()
        await self._lose(
            0,
            self._size,
            self._on(self._to_rebuild),
            "more objects are lost than the others can replace",
        )

    def _on(self, columns: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted({self._layout.servers[column] for column in columns}))

    # --- what is lost ---

    async def _note_loss(self, loss: Loss) -> int:
        """Returns where to go on, if nobody knew where what is lost ends."""
        for column in loss.columns:
            await self._require_answers(column)
        servers = self._on(loss.columns)
        reason = "the bytes do not have their checksum, and nothing tells what they were"
        if not loss.certain:
            reason = (
                "the objects contradict one another, and there is no checksum that tells "
                "which one is right"
            )
        end = loss.end
        if end < 0:
            users = await self._load_users()
            end = min((user.start for user in users if user.start > loss.start), default=self._size)
        await self._lose(loss.start, end, servers, reason)
        return end

    async def _load_users(self) -> list[User]:
        if self._users is None:
            self._users = await users_of(self._engine, self._oid)
        return self._users

    async def _lose(self, start: int, end: int, servers: tuple[int, ...], reason: str) -> None:
        if self._ino:
            self.found.lost.append(Lost(self._ino, self._oid, start, end, servers, reason))
            return
        for user in await self._load_users():  # what is dead is no loss
            if user.start < end and start < user.end:
                self.found.lost.append(
                    Lost(user.ino, user.oid, user.first, user.last + 1, servers, reason)
                )
