"""The check of bytes: a scrub of the whole store, with nobody else there, that repairs nothing.

All bytes that have checksums are read from their data servers and compared. Striped files have a
checksum for each MiB, except where they were written in place or are mostly holes; in containers
each chunk has one. Of protected files and containers all columns are read, replicas and parity too.
Clean burst copies, which programs read, must have the same bytes. Files and objects that have been
found to lack bytes by the other checks are left out.
"""

from collections.abc import Collection
from functools import partial

import trio

from aifs.burst.making import MakingTools
from aifs.burst.movers import Movers
from aifs.burst.transfer import Limiter, Mover
from aifs.check import repair
from aifs.check.findings import Problem, Progress, Subject
from aifs.check.records import Records
from aifs.core.errors import FsError, Unavailable
from aifs.core.tasks import run_each
from aifs.meta import chunks, degraded, keys, moves, namespace, sharing
from aifs.meta.kv import Transaction
from aifs.meta.records import decode_inode
from aifs.store.store import Store
from aifs.upkeep.judging import Judgement, judge_copy
from aifs.upkeep.scrubbing import PIECE, Item, Lost, Scrubber, ScrubResult, joined

_TOLD_MAX = 8
"""Ranges of one file that are named one by one."""

_AT_ONCE, _BATCH = 4, 256
"""Object sets that are looked at by themselves at the same time; and altogether."""


class DeepCheck:
    """Reads everything once, several object sets at the same time. Changes nothing."""

    def __init__(self, store: Store, records: Records, progress: Progress) -> None:
        self._engine = store.engine
        self._view = store.engine.view
        self._servers = store.servers
        mover = Mover(store.servers.budget, Limiter(0), "none")
        self._movers = Movers(MakingTools(store.servers, mover))
        work = self._engine, store.servers, self._movers
        pace = self._have_read, lambda: PIECE, trio.lowlevel.checkpoint
        self._scrubber = Scrubber(*work, *pace)
        self._records = records
        self._table = records.table
        self._progress = progress
        self._found = ScrubResult()
        self._damaged: Collection[Subject] = ()
        """Subjects of problems that the other checks have found."""
        self._items: list[Item] = []
        """Object sets that are to be read."""
        self._cached: list[int] = []
        """Inodes of files with a clean burst copy."""
        self._done = 0
        """Bytes that have been read."""
        self._expected = 0
        """Bytes that there are to be read."""
        self._problems: list[Problem] = []

    async def run(self, damaged: Collection[Subject]) -> list[Problem]:
        """Return the problems; ``damaged``: inode numbers of files that lack bytes, and paths of
        objects of containers."""
        self._damaged = damaged
        await self._records.for_each(*keys.all_of(b"t"), self._expect_container)
        await self._records.for_each(*keys.all_of(b"i"), self._expect_file)
        for first in range(0, len(self._items), _BATCH):
            batch = self._items[first : first + _BATCH]
            right = await self._scrubber.find_right(batch)
            await run_each(_AT_ONCE, (item for item in batch if item not in right), self._scrub)
        self._progress("bytes", self._expected, self._expected)
        copies = {ino: await self._judge_copy(ino) for ino in self._cached}
        wrong_copies = {ino for ino, judged in copies.items() if judged is Judgement.WRONG}
        for ino in sorted({lost.ino for lost in self._found.lost if lost.for_good} | wrong_copies):
            await self._name(ino, copies.get(ino, Judgement.UNREADABLE))
        for wrong in sorted(self._found.wrong):
            await self._name_wrong(*wrong)
        return sorted(self._problems, key=lambda problem: (problem.where, problem.kind))

    async def _expect_container(self, key: bytes, value: bytes) -> None:
        if len(key) != len(keys.container(0)):
            return  # named by the check of the records
        try:
            layout = chunks.decode_container(value).layout
        except FsError:
            return  # as well
        number = keys.number(key)
        unread = await self._records.unread(number)
        for column, server in enumerate(layout.servers):
            found = self._servers.find(server)
            if found is not None and found.where((0, number)) in self._damaged:
                unread |= 1 << column
        await self._expect(0, number, unread)

    async def _expect_file(self, key: bytes, value: bytes) -> None:
        ino = keys.number(key)
        if len(key) != len(keys.inode(0)) or not self._records.is_readable(ino):
            return  # named by the check of the records
        inode = decode_inode(ino, value)
        layout = inode.objects
        has_checksums = await self._records.get(keys.checksums(inode.oid, 0)) is not None
        first = await self._view(sharing.users, inode.oid, 1) if inode.named else [ino]
        if layout is not None and (layout.is_protected or has_checksums) and first == [ino]:
            if ino not in self._damaged:
                await self._expect(inode.named_by, inode.oid, await self._records.unread(inode.oid))
        if inode.layout is not None and inode.copy is not None and ino not in self._damaged:
            self._cached.append(ino)

    async def _expect(self, ino: int, oid: int, unread: int) -> None:
        """Have an object set read, unless columns of ``unread`` and of absent servers are
        needed: that is named already."""
        try:
            objects = await self._view(moves.find_objects, ino, oid)
        except FsError as error:
            await self._name_unread(ino, oid, str(error))
            return
        if objects is None:
            return
        layout = objects.layout
        for column, number in enumerate(layout.servers):
            server = self._servers.find(number)
            unread |= (server is None or bool(server.absent)) << column
        if layout.survives(unread):
            self._items.append((ino, oid))
            lengths = (layout.object_length(c, objects.size) for c in range(len(layout.servers)))
            self._expected += sum(length for c, length in enumerate(lengths) if not unread >> c & 1)

    # --- reading ---

    async def _have_read(self, count: int) -> None:
        self._done += count
        self._progress("bytes", min(self._done, self._expected), self._expected)

    async def _scrub(self, item: Item) -> None:
        # Nobody changes it, so if it cannot be told a server does not answer.
        reason = "its data servers do not answer"
        try:
            if await self._scrubber.scrub(*item, self._found, repair=False):
                return
        except FsError as error:  # a record is damaged
            reason = str(error)
        await self._name_unread(*item, reason)

    async def _judge_copy(self, ino: int) -> Judgement:
        inode = await self._view(namespace.get_inode, ino)
        if inode.copy is None or inode.copy.server not in self._servers:
            return Judgement.UNREADABLE
        return await judge_copy(self._engine, self._movers, inode)

    # --- findings ---

    async def _name_unread(self, ino: int, oid: int, reason: str) -> None:
        user: Subject = f"container {oid}"
        if ino:
            [user] = await self._view(sharing.users, oid, 1) or [ino]
        where = await self._view(self._table.where, user)
        self._problems.append(Problem("unreadable-bytes", user, reason, where=where))

    async def _name(self, ino: int, copy: Judgement) -> None:
        """``copy``: the judgement on the file's burst copy."""
        inode = await self._view(namespace.get_inode, ino)
        where = await self._view(self._table.path, ino)
        device = path = ""  # of the copy
        if copy is not Judgement.UNREADABLE:
            assert inode.copy is not None
            server = self._servers[inode.copy.server]
            device, path = server.name, server.where((0, inode.copy.id))
        bad = [lost for lost in self._found.lost if lost.ino == ino and lost.for_good]
        for kind, is_there in (("unreadable-bytes", False), ("wrong-checksum", True)):
            ranges = joined(lost for lost in bad if lost.could_be_read is is_there)
            named = [self._describe(lost) for lost in ranges[:_TOLD_MAX]]
            if len(ranges) > _TOLD_MAX:
                named.append(f"and {len(ranges) - _TOLD_MAX} more ranges")
            if copy is Judgement.RIGHT:
                named.append(f"its burst copy is whole: {path}")
            if ranges:
                self._problems.append(Problem(kind, ino, "; ".join(named), where=where))
        if copy is Judgement.WRONG:
            # If the data servers do not have all bytes either, each may have those that the other
            # has lost.
            fix = None if bad else partial(repair.drop_copy, ino=ino)
            detail = f"{device}: {path} has other bytes than the file"
            self._problems.append(Problem("bad-cache", ino, detail, fix, where=where))

    def _describe(self, lost: Lost) -> str:
        names = " or ".join(self._servers[number].name for number in lost.servers)
        return f"bytes {lost.start} to {lost.end - 1}, on {names}"

    async def _name_wrong(self, ino: int, oid: int, column: int) -> None:
        """A column that a mount will make anew from the others once it is on record."""
        objects = await self._view(moves.find_objects, ino, oid)
        assert objects is not None
        server = self._servers[objects.layout.servers[column]]
        path = server.where((ino, oid))
        if path in self._damaged:
            return
        user = await self._view(moves.find_user, ino, oid) if ino else 0
        where = await self._view(self._table.path, user) if ino else path
        fix = partial(_put_damaged, oid=oid, ino=ino, mask=1 << column)
        detail = f"{server.name}: {path} has wrong bytes, which the other objects tell"
        self._problems.append(Problem("degraded", user or path, detail, fix, where=where))


def _put_damaged(tx: Transaction, oid: int, ino: int, mask: int) -> None:
    if not moves.put_damaged(tx, oid, ino, mask) and mask & ~degraded.find_unread(tx, oid):
        raise Unavailable("too many of its objects are wrong")
