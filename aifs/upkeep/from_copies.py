"""Making files whole again from their clean burst copies, where the data servers cannot tell all
bytes.

Nothing is written to objects: the copy becomes the file again, as if somebody had opened it for
writing (docs/design/burst.md), in one transaction, and the usual drain brings it to servers that
work, under the file's policy. What is left of its objects is garbage. Before that the copy is read,
and compared with the file's checksums; where there are none, the clean copy is trusted if it has
the file's length.
"""

from collections.abc import Iterable, Set
from contextlib import suppress
from dataclasses import replace
from enum import Enum, auto
from typing import Any

import trio

from aifs.burst.transfer import Limiter, Mover
from aifs.core.errors import FsError, NotFound, Stale
from aifs.core.log import logger
from aifs.data.server import DataServer
from aifs.data.servers import Servers
from aifs.files.chunk_users import users_of
from aifs.files.containers import Containers
from aifs.files.drain import Drain
from aifs.files.file_io import FileIO
from aifs.files.needs import Needs
from aifs.files.open_inode import OpenInode
from aifs.layout.placement import DRAINING, LOST
from aifs.meta import keys, sharing
from aifs.meta.kv import Engine
from aifs.meta.records import Inode
from aifs.meta.server_uses import scan_endangered
from aifs.upkeep.judging import Judgement, judge_copy
from aifs.upkeep.scrub_state import Findings

_log = logger(__name__)


class RestoreOutcome(Enum):
    RESTORED = auto()  # no data server is needed to read the file
    NOTHING = auto()  # it has no copy that is right
    BUSY = (
        auto()
    )  # it is being changed, or read by programs past us, or its copy cannot be read now


class FromCopies:
    """Used from one trio thread."""

    def __init__(
        self,
        engine: Engine,
        servers: Servers,
        io: FileIO,
        containers: Containers,
        drain: Drain,
        needs: Needs,
        findings: Findings,
    ) -> None:
        self._engine = engine
        self._servers = servers
        self._io = io
        self._containers = containers
        self._drain = drain
        self._needs = needs
        self._findings = findings
        self._movers = io.sets.movers(Mover(servers.budget, Limiter(0), "best-effort"))
        self._useless: set[tuple[int, int]] = (
            set()
        )  # ids of copies that are wrong, each with the oid of its file then
        self._rescued_from: Set[int] = (
            frozenset()
        )  # all that could be was rescued from these servers
        self._files = 0

    async def rescue(self, leaving: Set[int] = frozenset()) -> None:
        """Restore all files that cannot be read without the servers ``leaving`` and those that are
        lost, or to be left and absent. Costs nothing while there are none, and little when it has
        been done."""
        gone = leaving | frozenset(
            server.id for server in self._servers.capacity() if _has_gone(server)
        )
        self._rescued_from &= gone
        if gone <= self._rescued_from:
            return
        busy = False
        start, end = keys.all_of(b"b")
        while start:
            inos, start = await self._engine.view(scan_endangered, start, end, gone)
            for ino in inos:
                try:
                    busy |= await self.restore(ino) is RestoreOutcome.BUSY
                except (
                    FsError
                ) as error:  # a damaged record, or no room in the metadata: others can be restored
                    _log.info("inode %d cannot be restored from its burst copy: %s", ino, error)
                    busy = True
            await trio.lowlevel.checkpoint()
        if not busy and not leaving:
            self._rescued_from = gone

    async def restore_users(self, ino: int, oid: int) -> bool:
        """Restore the files with these objects, or with ``ino`` 0 all that have chunks in a
        container; whether there are any, and none of them needs it any more."""
        if ino:
            inos = set(await self._engine.view(sharing.users, oid)) or {ino}
        else:
            inos = {user.ino for user in await users_of(self._engine, oid)}
        return bool(inos) and await self.restore_each(inos, 0 if ino else oid) == inos

    async def restore_each(self, inos: Iterable[int], container: int = 0) -> set[int]:
        """Restore these, who have lost bytes in a ``container``, if one is named; those that are
        restored. Nothing is appended to that any more."""
        if container:
            await self._containers.retire(lambda other, _: other == container)
        return {ino for ino in sorted(inos) if await self.restore(ino) is RestoreOutcome.RESTORED}

    async def restore(self, ino: int) -> RestoreOutcome:
        """Have the file read from its copy alone, and drained from there, if it has a clean one
        that is right.

        Durable on return. Raises Unavailable, NoSpace where the metadata cannot be read or changed.
        """
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
                with trio.CancelScope(
                    shield=True
                ):  # who writes next relies on that all of it is done (B6)
                    await self._io.burst.leave_capacity(file)
            except FsError as error:
                _log.info("inode %d cannot be restored from its burst copy: %s", inode.ino, error)
                return RestoreOutcome.BUSY
        finally:
            file.gate.leave_alone()
        self._needs.released(copy.id)
        self._findings.restored(inode.ino)
        self._files += 1
        trust = (
            ", which is trusted: there are no checksums" if judgement is Judgement.UNTOLD else ""
        )
        _log.info(
            "inode %d: the data servers lack bytes of it; restored from its burst copy%s",
            inode.ino,
            trust,
        )
        with suppress(FsError):  # else its dirty mark stays, and write-back says what is wrong
            await self._io.sync(file)
        return RestoreOutcome.RESTORED

    def is_useless(self, inode: Inode) -> bool:
        """Whether the copy of a file was found to be wrong, or could not be read, since
        ``look_again``.
        """
        assert inode.copy is not None
        return (inode.copy.id, inode.oid) in self._useless

    def look_again(self) -> None:
        """What could not be read may be readable now."""
        self._useless.clear()
        self._rescued_from = frozenset()

    def status(self) -> dict[str, Any]:
        """What ``aifs status`` shows."""
        return {"restored_files": self._files}


def _has_gone(server: DataServer) -> bool:
    return server.standing == LOST or (server.standing == DRAINING and bool(server.absent))
