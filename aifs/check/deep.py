"""The check of bytes: everything that has a checksum is read from its data servers and compared.

Striped files have a checksum per MiB unless they were written in place or are mostly holes; what
lies in containers has one per chunk. Of protected files and containers all columns are read,
replicas and parity too. Cached burst copies, which are what programs read, must have the same
bytes. What the other checks have found to lack bytes is passed over.
"""

from collections.abc import Collection, Iterable
from functools import partial
from typing import NamedTuple

import trio

from aifs.burst.making import MakingTools
from aifs.burst.transfer import Limiter, Mover
from aifs.check import repair
from aifs.check.findings import Problem, Progress, Subject
from aifs.check.records import Records
from aifs.core.errors import FsError, Unavailable
from aifs.data.checking.checks import ContainerCheck, FileCheck
from aifs.data.checking.digests import DIGESTS_AT_ONCE, HASHED
from aifs.data.inspecting.inspection import STEP, Inspection
from aifs.data.inspecting.window import UNREADABLE as NOT_READ
from aifs.data.inspecting.window import WRONG, Check
from aifs.files.chunk_users import users_of
from aifs.layout.interleaved import STRIPE
from aifs.layout.striped import Striped
from aifs.meta import chunks, degraded, forms, keys, moves, namespace, sharing
from aifs.meta.kv import Transaction
from aifs.meta.records import decode_inode
from aifs.movers.movers import Movers
from aifs.store.store import Store
from aifs.upkeep.judging import Judgement, judge_copy

_AT_ONCE = 4
"""Files and containers that are read at the same time."""

_TOLD_MAX = 8
"""Ranges of one file that are told one by one."""


class _Bad(NamedTuple):
    """Bytes of a file that are not what they should be, and the numbers of the servers that they
    lie on.
    """

    kind: str
    start: int
    end: int
    servers: tuple[int, ...]


class _Objects(NamedTuple):
    """An object set that is to be read. ``ino`` 0: a container."""

    ino: int
    oid: int
    size: int


class DeepCheck:
    """Reads everything once, several object sets at the same time. Changes nothing."""

    def __init__(self, store: Store, records: Records, progress: Progress) -> None:
        self._engine = store.engine
        self._view = store.engine.view
        self._servers = store.servers
        tools = MakingTools(store.servers, Mover(store.servers.budget, Limiter(0), "none"))
        self._movers = Movers(tools)
        self._buffers = tools.buffers
        self._records = records
        self._table = records.table
        self._progress = progress
        self._waiting: list[_Objects] = []
        """Object sets that are still to be read; the last one is next."""
        self._cached: list[int] = []
        """Inodes of files with a clean burst copy."""
        self._bad: dict[int, list[_Bad]] = {}
        """By inode, the ranges that are not what they should be."""
        self._bad_caches: set[int] = set()
        """Inodes whose burst copies have other bytes than their files."""
        self._done = 0
        """Bytes that have been read."""
        self._expected = 0
        """Bytes that there are to be read."""
        self._problems: list[Problem] = []
        """What has been found."""

    async def run(self, damaged: Collection[Subject]) -> list[Problem]:
        """What is found; ``damaged``: inode numbers of files that lack bytes, and paths of objects
        of containers.
        """
        await self._records.for_each(*keys.all_of(b"t"), self._expect_container)
        await self._records.for_each(*keys.all_of(b"i"), self._expect_file)
        self._waiting = [
            objects
            for objects in reversed(self._waiting)
            if not objects.ino or objects.ino not in damaged
        ]
        self._expected = sum(objects.size for objects in self._waiting)
        async with trio.open_nursery() as nursery:
            for _ in range(_AT_ONCE):
                nursery.start_soon(self._read_all, damaged)
        for ino in self._cached:
            if ino not in damaged:
                await self._compare_cache(ino)
        for ino in sorted(self._bad.keys() | self._bad_caches):
            await self._tell(ino)
        return sorted(self._problems, key=lambda problem: (problem.where, problem.kind))

    async def _expect_container(self, key: bytes, value: bytes) -> None:
        if len(key) != len(keys.container(0)):
            return  # named by the check of the records
        try:
            self._waiting.append(
                _Objects(0, keys.number(key), chunks.decode_container(value).length)
            )
        except FsError:
            pass  # as well

    async def _expect_file(self, key: bytes, value: bytes) -> None:
        if len(key) != len(keys.inode(0)):
            return  # named as damaged already
        ino = keys.number(key)
        if not self._records.is_readable(ino):
            return
        inode = decode_inode(ino, value)
        layout = inode.objects
        has_checksums = await self._records.get(keys.checksums(inode.oid, 0)) is not None
        first = await self._view(sharing.users, inode.oid, 1) if inode.named else [ino]
        if layout is not None and (layout.is_protected or has_checksums) and first == [ino]:
            self._waiting.append(_Objects(inode.named_by, inode.oid, inode.size))
        if inode.layout is not None and inode.copy is not None:
            self._cached.append(ino)

    # --- reading ---

    async def _read_all(self, damaged: Collection[Subject]) -> None:
        while self._waiting:
            await self._read(self._waiting.pop(), damaged)

    async def _read(self, objects: _Objects, damaged: Collection[Subject]) -> None:
        ino, oid, size = objects
        found, unread = await self._view(
            lambda tx: (moves.find_objects(tx, ino, oid), degraded.find_unread(tx, oid))
        )
        if found is None:
            return
        layout = found.layout
        for column, number in enumerate(layout.servers):
            server = self._servers.find(number)
            if server is None or server.absent or (not ino and server.where((0, oid)) in damaged):
                unread |= 1 << column
        if not layout.survives(unread):
            return  # named already
        step = STEP if ino else 2 * STRIPE
        inspection = Inspection(
            self._servers, self._buffers, layout, ino, oid, size, unread=unread, step=step
        )
        try:
            wrong = await self._inspect(inspection, objects, layout)
        finally:
            inspection.close()
        if wrong:
            await self._tell_wrong(objects, layout, wrong)

    async def _inspect(
        self, inspection: Inspection, objects: _Objects, layout: Striped
    ) -> set[int]:
        """Note what is lost; returns the columns that are wrong, but told right by others."""
        starts, at, told, wrong = None, 0, 0, set[int]()
        if objects.ino:
            _, digests = await self._view(forms.get_checksums, objects.oid, 0)
            starts = iter(await inspection.starts(bool(digests)))
            at = next(starts, objects.size)
        while at < objects.size:
            verdict = await inspection.judge(at, await self._check(objects, layout, at))
            at = verdict.next
            unread = {flaw.column for flaw in verdict.flaws if flaw.kind is not WRONG}
            unread |= inspection.failed
            for loss in verdict.losses:
                kind = "unreadable-bytes" if unread.intersection(loss.columns) else "wrong-checksum"
                servers = tuple(sorted({layout.servers[column] for column in loss.columns}))
                if objects.ino:
                    for ino in await self._view(sharing.users, objects.oid) or [objects.ino]:
                        bad = _Bad(kind, loss.start, loss.end, servers)
                        self._bad.setdefault(ino, []).append(bad)
                else:
                    at = max(
                        at, await self._lose_chunks(objects, kind, loss.start, loss.end, servers)
                    )
            if layout.is_protected:
                wrong |= {flaw.column for flaw in verdict.flaws if flaw.kind in (WRONG, NOT_READ)}
            if starts is not None:
                at = next(starts, objects.size)
            self._done += min(at, objects.size) - told
            told = min(at, objects.size)
            self._progress("bytes", self._done, self._expected)
        return wrong

    async def _check(self, objects: _Objects, layout: Striped, at: int) -> Check:
        if not objects.ino:
            return ContainerCheck(layout.row if layout.parity else 1)
        first, digests = await self._view(forms.get_checksums, objects.oid, at // HASHED)
        _, more = await self._view(forms.get_checksums, objects.oid, first + DIGESTS_AT_ONCE)
        return FileCheck(objects.size, first, digests + more)

    async def _lose_chunks(
        self, objects: _Objects, kind: str, start: int, end: int, servers: tuple[int, ...]
    ) -> int:
        """Note the files that have chunks in a span of a container; returns where to go on. Dead
        chunks are no loss.
        """
        users = await users_of(self._engine, objects.oid)
        if end < 0:
            end = min((user.start for user in users if user.start > start), default=objects.size)
        for user in users:
            if user.start < end and start < user.end:
                self._bad.setdefault(user.ino, []).append(
                    _Bad(kind, user.first, user.last + 1, servers)
                )
        return end

    async def _compare_cache(self, ino: int) -> None:
        inode = await self._view(namespace.get_inode, ino)
        if inode.copy is not None and inode.copy.server in self._servers:
            if await judge_copy(self._engine, self._movers, inode) is Judgement.WRONG:
                self._bad_caches.add(ino)

    # --- what is found ---

    async def _tell(self, ino: int) -> None:
        inode, bad = await self._view(namespace.get_inode, ino), self._bad.get(ino, [])
        where = await self._view(self._table.path, ino)
        device = path = ""  # of its burst copy
        if inode.copy is not None:
            server = self._servers[inode.copy.server]
            device, path = server.name, server.where((0, inode.copy.id))
        for kind in sorted({item.kind for item in bad}):
            ranges = _joined(item for item in bad if item.kind == kind)
            told = [self._describe(item) for item in ranges[:_TOLD_MAX]]
            if len(ranges) > _TOLD_MAX:
                told.append(f"and {len(ranges) - _TOLD_MAX} more ranges")
            if ino in self._cached and ino not in self._bad_caches:
                told.append(f"its burst copy is whole: {path}")
            self._problems.append(Problem(kind, ino, "; ".join(told), where=where))
        if ino in self._bad_caches:
            # Where the data servers do not have all bytes either, each may have those that the
            # other lacks.
            fix = None if bad else partial(repair.drop_copy, ino=ino)
            detail = f"{device}: {path} has other bytes than the file"
            self._problems.append(Problem("bad-cache", ino, detail, fix, where=where))

    def _describe(self, bad: _Bad) -> str:
        names = " or ".join(self._servers[number].name for number in bad.servers)
        return f"bytes {bad.start} to {bad.end - 1}, on {names}"

    async def _tell_wrong(self, objects: _Objects, layout: Striped, wrong: set[int]) -> None:
        """Columns that a mount will make anew from the others once they are on record."""
        ino, oid, _ = objects
        for column in sorted(wrong):
            server = self._servers[layout.servers[column]]
            path = server.where((ino, oid))
            user = await self._view(moves.find_user, ino, oid) if ino else 0
            where = await self._view(self._table.path, user) if ino else path
            fix = partial(_put_damaged, oid=oid, ino=ino, mask=1 << column)
            detail = f"{server.name}: {path} has wrong bytes, which the other objects tell"
            self._problems.append(Problem("degraded", user or path, detail, fix, where=where))


def _put_damaged(tx: Transaction, oid: int, ino: int, mask: int) -> None:
    if not moves.put_damaged(tx, oid, ino, mask) and mask & ~degraded.find_unread(tx, oid):
        raise Unavailable("too many of its objects are wrong")


def _joined(ranges: Iterable[_Bad]) -> list[_Bad]:
    """Ranges that touch, on the same servers, as one."""
    joined: list[_Bad] = []
    for bad in sorted(ranges, key=lambda item: item.start):
        last = joined[-1] if joined else None
        if last is not None and (last.end, last.servers) == (bad.start, bad.servers):
            joined[-1] = last._replace(end=bad.end)
        else:
            joined.append(bad)
    return joined
