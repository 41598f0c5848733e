"""Clean burst copies: making files whole from them where data servers lost bytes, and verifying
them.

A wrong copy is dropped; the file is whole without it. To make a file whole, its copy becomes the
file again, as if opened for writing (docs/design/burst.md), in one transaction; the usual drain
brings it to working servers by its policy, and its old objects are garbage. Before, the copy is
compared with the file's checksums; without any it is trusted if it has the file's length.
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from enum import Enum, auto
from typing import Any, NamedTuple

import trio

from aifs.burst.making import MakingTools, never
from aifs.burst.pool import Movers
from aifs.burst.transfer import Limiter, Mover
from aifs.core import files
from aifs.core.errors import FsError, NotFound, Stale
from aifs.core.log import logger
from aifs.data.checks import DIGEST_BYTES, HASHED, CheckedPart, differ
from aifs.data.server import DataServer
from aifs.files.containers import Containers
from aifs.files.damage import Needs
from aifs.files.drain import Drain
from aifs.files.file_io import FileIO
from aifs.files.open_inode import OpenInode
from aifs.files.services import Services
from aifs.layout.placement import DRAINING, LOST
from aifs.meta import chunks, forms, namespace, shared
from aifs.meta.kv import Engine, ReadTransaction
from aifs.meta.records import Copy, Inode
from aifs.meta.server_uses import scan_endangered, users_of
from aifs.meta.slices import Walk
from aifs.upkeep.evict import Evictor
from aifs.upkeep.scrub_state import Findings
from aifs.upkeep.scrubbing import Lost, ScrubResult

_log = logger(__name__)


COPIES_PIECE = 64 << 20
"""Bytes of copies that are compared together, at most."""

LISTED = 4 << 20
"""Bytes of a file whose checksums are looked up in one go."""

_ALIGNED = 256 << 10  # memory is taken in multiples of this


class Judgement(Enum):
    """On a clean burst copy: right by checksums; wrong; of the file's length, with checksums
    missing; or unreadable now."""

    RIGHT = auto()
    WRONG = auto()
    UNTOLD = auto()
    UNREADABLE = auto()


class CopyRange(NamedTuple):
    """A part of a clean burst copy, to be compared."""

    place: Copy
    size: int
    """Of the whole file."""
    parts: Sequence[CheckedPart]


async def compare(
    copies: Sequence[CopyRange], tools: MakingTools, cancelled: Callable[[], bool] = never
) -> Sequence[Judgement] | None:
    """Whether each copy has its file's length, and these checksums; never UNTOLD. None if
    ``cancelled``."""
    found = []
    for asked in copies:
        if cancelled():
            return None
        device = tools.servers.find(asked.place.server)
        if device is None:
            found.append(Judgement.UNREADABLE)
            continue
        length = max((part.length for part in asked.parts), default=0)
        memory = await tools.buffers.take(max(-(-length // _ALIGNED), 1) * _ALIGNED)
        try:
            found.append(await tools.servers.run(device, _compare, device, asked, memory))
        except FsError:
            found.append(Judgement.UNREADABLE)  # which says nothing of its bytes
    return found


def _compare(device: DataServer, asked: CopyRange, memory: memoryview) -> Judgement:
    """Blocks. Raises FsError if the copy cannot be opened."""
    key = 0, asked.place.id
    fd = device.open_object(key, False, False)
    if fd is None:
        return Judgement.WRONG
    try:
        if device.stat(key, fd).length != asked.size:
            return Judgement.WRONG
        is_wrong = differ(device, key, fd, asked.parts, memory)
        return Judgement.WRONG if is_wrong else Judgement.RIGHT
    finally:
        files.close_file(fd)


async def judge_copy(
    engine: Engine,
    movers: Movers,
    inode: Inode,
    throttle: Callable[[int], Awaitable[None]] | None = None,
    piece: int = COPIES_PIECE,
) -> Judgement:
    """Compare a file's clean burst copy with its checksums; a missing one is wrong. ``piece``:
    bytes at a time; ``throttle`` is awaited with each piece's."""
    assert inode.copy is not None
    at, is_told = 0, True
    while is_told:
        parts, start = list[CheckedPart](), at
        while at < min(start + piece, inode.size) and is_told:
            try:
                listed = await engine.view(find_parts, inode, at)
            except FsError:
                listed = ()  # fsck names the damaged list, and the copy may be all that is whole
            is_told = bool(listed)
            parts += listed
            # A chunk may reach beyond what was looked up.
            at = listed[-1].start + listed[-1].length if listed else at
        answers = await movers.carry_out(compare, [CopyRange(inode.copy, inode.size, parts)])
        assert answers is not None  # nothing cancels it
        if answers[0] is not Judgement.RIGHT:
            return answers[0]
        if throttle is not None and at > start:
            await throttle(at - start)
        if at >= inode.size:
            return Judgement.RIGHT
    return Judgement.UNTOLD


# --- transaction functions ------------------------------------------------------------------------


def find_parts(tx: ReadTransaction, inode: Inode, start: int) -> Sequence[CheckedPart]:
    """The checksums of a file for some MiB from ``start`` on; none if nobody has them."""
    end = min(start + LISTED, inode.size)
    if inode.chunks is not None:
        return _extents(tx, inode, inode.chunks.chunk, start, end)
    number = start // HASHED
    first, digests = forms.get_checksums(tx, inode.oid, number)
    # The record has all of the piece: its length is a multiple of that.
    digests = digests[(number - first) * DIGEST_BYTES :]
    return [
        CheckedPart(offset, min(HASHED, inode.size - offset), digests[place : place + DIGEST_BYTES])
        for offset, place in zip(
            range(start, end, HASHED), range(0, len(digests), DIGEST_BYTES), strict=False
        )
    ]


def _extents(
    tx: ReadTransaction, inode: Inode, chunk: int, start: int, end: int
) -> Sequence[CheckedPart]:
    """Of chunks, and zeros, that begin in this range."""
    parts: list[CheckedPart] = []
    at = start
    while at < end:
        offset, found = chunks.get_extents(tx, inode.oid, chunk, at)
        for length, place, _ in found:
            at = offset + length
            if place is not None and length and start <= offset < end:
                parts.append(CheckedPart(offset, length, place.digest))
            elif place is None and (first := max(offset, start)) < (stop := min(at, end)):
                parts.append(CheckedPart(first, stop - first, None))
            offset = at
    return parts


_SEEN_AT_ONCE = 16  # records of files
_SMALL = 1 << 20  # bytes of a file that is compared together with others


class RestoreOutcome(Enum):
    RESTORED = auto()  # no data server is needed to read the file
    NOTHING = auto()  # it has no copy that is right
    BUSY = auto()
    """It is being changed, or read by programs past us, or its copy cannot be read now."""


class FromCopies:
    """Used from one trio thread."""

    def __init__(
        self,
        services: Services,
        io: FileIO,
        containers: Containers,
        drain: Drain,
        needs: Needs,
        findings: Findings,
    ) -> None:
        self._engine = services.engine
        self._servers = servers = services.servers
        self._io = io
        self._containers = containers
        self._drain = drain
        self._needs = needs
        self._findings = findings
        self._movers = io.sets.movers(Mover(servers.budget, Limiter(0), "best-effort"))
        self._useless = set[tuple[int, int]]()
        """Ids of copies that are wrong, each with the oid of its file then."""
        self._rescued_from: Set[int] = frozenset()
        """All files that could be were rescued from these servers."""
        self._files = 0

    async def rescue(self, leaving: Set[int] = frozenset()) -> None:
        """Restore files unreadable without the servers ``leaving``, lost, or left and absent. Costs
        nothing without such servers, and little when done."""
        gone = leaving | frozenset(
            server.id for server in self._servers.capacity() if _has_gone(server)
        )
        self._rescued_from &= gone
        if gone <= self._rescued_from:
            return
        busy = False
        async for ino in Walk(self._engine, b"b", scan_endangered, gone):
            try:
                busy |= await self.restore(ino) is RestoreOutcome.BUSY
            except FsError as error:  # a damaged record, or no room: others can be restored
                _log.info("inode %d cannot be restored from its burst copy: %s", ino, error)
                busy = True
        if not busy and not leaving:
            self._rescued_from = gone

    async def restore_users(self, ino: int, oid: int) -> bool:
        """Restore the files with these objects, or (``ino`` 0) with chunks in a container; whether
        there are any, all restored."""
        if ino:
            inos = set(await self._engine.view(shared.users, oid)) or {ino}
        else:
            inos = {user.ino for user in await users_of(self._engine, {oid})}
        return bool(inos) and await self.restore_each(inos, 0 if ino else oid) == inos

    async def restore_each(self, inos: Iterable[int], container: int = 0) -> set[int]:
        """Restore these files, with lost bytes in ``container``, to which nothing is appended any
        more, if named; returns those restored."""
        if container:
            await self._containers.retire(lambda other, _: other == container)
        return {ino for ino in sorted(inos) if await self.restore(ino) is RestoreOutcome.RESTORED}

    async def restore(self, ino: int) -> RestoreOutcome:
        """Have a file with a right clean copy read from that alone, and drained. Durable on return.
        Raises Unavailable, NoSpace if the metadata cannot be read or changed."""
        try:
            file = await self._io.inodes.acquire(ino)
        except (NotFound, Stale):
            return RestoreOutcome.NOTHING
        was_elsewhere = not file.inode.in_burst
        try:
            return await self._restore(file)
        finally:
            with trio.CancelScope(shield=True):
                await self._io.inodes.release(file)
                if was_elsewhere and file.inode.in_burst and file.inode.nlink and not file.writers:
                    self._drain.closed(file.inode)

    async def _restore(self, file: OpenInode) -> RestoreOutcome:
        inode, copy, changes = file.inode, file.copy, file.changes
        if inode.layout is None:
            return RestoreOutcome.RESTORED
        if copy is None or self.is_useless(inode) or not inode.nlink:
            return RestoreOutcome.NOTHING
        if file.marked or file.on_object:
            return RestoreOutcome.BUSY
        judgement = await judge_copy(self._engine, self._movers, replace(inode))
        await file.gate.enter_alone()
        try:
            changed = file.copy is not copy or file.changes != changes or file.marked
            if changed or file.on_object or not inode.nlink:
                return RestoreOutcome.RESTORED if inode.in_burst else RestoreOutcome.BUSY
            if judgement is Judgement.UNREADABLE:
                return RestoreOutcome.BUSY
            if judgement is Judgement.WRONG:
                self._useless.add((copy.id, inode.oid))
                return RestoreOutcome.NOTHING
            file.changes += 1
            try:
                # The next writer relies on that all of it is done (B6).
                with trio.CancelScope(shield=True):
                    await self._io.burst.leave_capacity(file)
            except FsError as error:
                _log.info("inode %d cannot be restored from its burst copy: %s", inode.ino, error)
                return RestoreOutcome.BUSY
        finally:
            file.gate.leave_alone()
        self._needs.released(copy.id)
        self._findings.restored(inode.ino)
        self._files += 1
        trust = ""
        if judgement is Judgement.UNTOLD:
            trust = ", which is trusted: there are no checksums"
        message = (
            "inode %d: bytes of it are missing on the data servers; restored from its burst copy%s"
        )
        _log.info(message, inode.ino, trust)
        with suppress(FsError):  # else its dirty mark stays, and write-back says what is wrong
            await self._io.sync(file)
        return RestoreOutcome.RESTORED

    def is_useless(self, inode: Inode) -> bool:
        """Whether the copy was wrong, or unreadable, since ``look_again``."""
        assert inode.copy is not None
        return (inode.copy.id, inode.oid) in self._useless

    def look_again(self) -> None:
        """Copies that could not be read may be readable now."""
        self._useless.clear()
        self._rescued_from = frozenset()

    def status(self) -> dict[str, Any]:
        """Figures for ``aifs status``."""
        return {"restored_files": self._files}


def _has_gone(server: DataServer) -> bool:
    return server.standing == LOST or (server.standing == DRAINING and bool(server.absent))


# --- verifying ----------------------------------------------------------------------------------


class CopyScrubber:
    """Used from one trio thread."""

    def __init__(
        self,
        engine: Engine,
        movers: Movers,
        evictor: Evictor,
        throttle: Callable[[int], Awaitable[None]],
        piece: Callable[[], int],
        give_way: Callable[[], Awaitable[None]],
    ) -> None:
        """``throttle``, ``piece``, ``give_way``: as of Scrubber."""
        self._engine = engine
        self._movers = movers
        self._evictor = evictor
        self._throttle = throttle
        self._piece = piece
        self._give_way = give_way

    async def find_right(self, inos: Sequence[int]) -> set[int]:
        """Files with right copies, if known, or none. Others are left to ``scrub``."""
        right = set[int]()
        for first in range(0, len(inos), _SEEN_AT_ONCE):
            some = inos[first : first + _SEEN_AT_ONCE]
            asked = dict[int, CopyRange]()
            seen = await self._engine.view(_see_small, some, min(self._piece(), _SMALL))
            for ino, copy in zip(some, seen, strict=True):
                if isinstance(copy, CopyRange):
                    asked[ino] = copy
                elif copy:
                    right.add(ino)
            if asked:
                answers = await self._movers.carry_out(compare, list(asked.values()))
                assert answers is not None  # nothing cancels it
                right.update(
                    ino
                    for ino, answer in zip(asked, answers, strict=True)
                    if answer is not Judgement.WRONG
                )
                await self._throttle(sum(copy.size for copy in asked.values()))
            await self._give_way()
        return right

    async def scrub(self, ino: int, found: ScrubResult, repair: bool) -> bool:
        """Verify a clean copy by its checksums; whether a wrong one was dropped."""
        inode = await self._engine.view(namespace.find_inode, ino)
        if inode is None or inode.copy is None or not _is_cached(inode):
            return False
        judgement = await judge_copy(
            self._engine, self._movers, inode, self._throttle, self._piece()
        )
        if judgement is not Judgement.WRONG or not await self._is_same(inode):
            return False
        found.flaws += 1
        if any(lost.ino == ino for lost in found.lost):
            return False  # neither is whole
        if repair and await self._evictor.evict(ino):
            found.repaired += 1
            return True
        reason = (
            f"its burst copy has other bytes, and is {'in use' if repair else 'left'}; the "
            "data servers have the right ones"
        )
        found.lost.append(
            Lost(ino, inode.oid, 0, inode.size, (inode.copy.server,), reason, for_good=False)
        )
        return False

    async def _is_same(self, before: Inode) -> bool:
        """Whether the copy was clean all the time: programs change it only as the file."""
        inode = await self._engine.view(namespace.find_inode, before.ino)
        if inode is None:
            return False
        return all(getattr(inode, n) == getattr(before, n) for n in ("copy", "oid", "layout"))


def _is_cached(inode: Inode) -> bool:
    return inode.copy is not None and not inode.in_burst and inode.layout is not None


def _see_small(tx: ReadTransaction, inos: Sequence[int], limit: int) -> list[CopyRange | bool]:
    """The range to compare of each file; True: no clean copy; False: more than ``limit`` bytes,
    damaged records, or no checksums."""
    found: list[CopyRange | bool] = []
    for ino in inos:
        try:
            inode = namespace.find_inode(tx, ino)
            if inode is None or inode.copy is None or not _is_cached(inode):
                found.append(True)
                continue
            parts = find_parts(tx, inode, 0) if inode.size <= limit else ()
            found.append(CopyRange(inode.copy, inode.size, parts) if parts else False)
        except FsError:
            found.append(False)
    return found
