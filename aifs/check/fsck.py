"""fsck: check a whole unused store, and mend it without guessing.

1. The metadata is read as it is (``scan``, ``names``). Records other than stored are named, and
   count as empty, which no record with contents is.

2. Records that recovery would trip over are mended, and the store is recovered as by a mount;
   without leave to mend, not if that would damage it further.

3. The rest of the metadata is mended (``repair``).

4. The objects on the data servers and the burst copies are compared with the inodes (``objects``).

5. If asked for, all bytes that have checksums are read (``deep``).
"""

import dataclasses
from collections.abc import Collection
from functools import partial

import trio

from aifs.burst.making import MakingTools
from aifs.burst.pool import Movers
from aifs.burst.tier import BurstTier
from aifs.burst.transfer import Limiter, Mover
from aifs.check import repair
from aifs.check.findings import (
    NAMELESS,
    RECORDS,
    RECOVERY,
    SILENT,
    FsckReport,
    Problem,
    Progress,
    Subject,
)
from aifs.check.objects import ObjectCheck
from aifs.check.records import KINDS, Records
from aifs.check.scan import MetadataScan
from aifs.core.config import Config
from aifs.core.errors import FsError, Unavailable
from aifs.core.tasks import run_each
from aifs.core.upkeep import Upkeep
from aifs.files.collector import Collector
from aifs.files.damage import Needs
from aifs.meta import chunks, degraded, keys, moves, namespace, shared
from aifs.meta.kv import DamagedRecord, Engine, ReadTransaction, Transaction
from aifs.meta.records import decode_inode
from aifs.store.backup import Backup
from aifs.store.ids import IdAllocator
from aifs.store.store import Store, set_clean, used_alone
from aifs.upkeep import scrub_state
from aifs.upkeep.from_copies import Judgement, judge_copy
from aifs.upkeep.moves import Strays
from aifs.upkeep.scrub_state import Findings
from aifs.upkeep.scrubbing import PIECE, Item, Lost, Scrubber, ScrubResult, joined
from aifs.vfs.recovery import Recovered, load_copies, recover

_BATCH = 2048
_LAST = b"\xff" * 512


def check(
    config: Config,
    repair: bool,
    progress: Progress | None = None,
    deep: bool = False,
    force: bool = False,
) -> FsckReport:
    """Check an unmounted store; ``repair``: mend it, durably. Blocks.

    ``deep``: also compare all files with checksums. ``force``: the claiming host is dead, so it is
    taken over after some seconds. A store not closed in order is recovered, also without
    ``repair``. Raises StoreError and StoreBusy as a mount does, Unavailable or NoSpace if the
    metadata cannot be changed.
    """
    return trio.run(
        _check, config, repair, deep, force, progress or (lambda what, done, total: None)
    )


async def _check(
    config: Config, repair: bool, deep: bool, force: bool, progress: Progress
) -> FsckReport:
    report = FsckReport()
    async with used_alone(config, force, lambda error: True) as store:
        await _check_store(store, repair, deep, progress, report)
    return report


async def _check_store(
    store: Store, repair: bool, deep: bool, progress: Progress, report: FsckReport
) -> None:
    damaged = await _find_damaged(store.engine)
    store.engine.read_damaged_as(b"")
    scan = MetadataScan(store.engine, [*store.servers, *store.servers.elsewhere], progress)
    await scan.run()
    problems = [*damaged.values(), *scan.records.problems]
    if repair:
        await _mend(store.engine, problems, RECOVERY)
    if all(problem.repaired for problem in problems if problem.stage == RECOVERY):
        problems += await _recover(store, report)
    if repair:
        await _mend(store.engine, problems, RECORDS)
        await _mend(store.engine, problems, NAMELESS)
    objects = ObjectCheck(store, scan, progress)
    await objects.run()
    late = list(objects.problems)
    if deep:
        late += await DeepCheck(store, scan.records, progress).run(
            {problem.subject for problem in late}
        )
    found = [*problems, *late]
    if repair:
        await _mend(store.engine, late, RECORDS)
        await objects.move_orphans_aside()
        store.engine.read_damaged_as(None)
        for key, problem in damaged.items():
            problem.repaired = await store.engine.view(_is_whole, key)
        await store.engine.barrier()
    report.findings = [problem.finding() for problem in found if problem.kind != SILENT]
    report.counts = objects.counts | report.counts


async def _recover(store: Store, report: FsckReport) -> list[Problem]:
    """Recover the store like a mount, with counts in the report. Returns the problem that prevented
    it."""
    upkeep = Upkeep()  # which does nothing here
    backup = Backup(store.config, store.uuid, store.engine, store.servers, upkeep)
    tier = BurstTier(
        store.config, store.servers, store.engine, IdAllocator(store.engine).take, upkeep
    )
    collector = Collector(store.engine, store.servers, backup, tier, upkeep, store.role)
    try:
        await backup.load(read_only=True)  # its references are left to the next mount
        recovered = Recovered()
        await recover(store, tier, collector, recovered)
        findings = Findings()
        findings.begin(await scrub_state.load(store.engine))
        needs = Needs(store.engine, store.servers, findings.wrong_objects)
        await load_copies(store, tier, collector, needs, recovered)
        await collector.drain()
        strays = Strays(store.engine, store.servers, backup, upkeep, on_swept=lambda: None)
        await strays.load()
        await strays.sweep()
        if not store.clean:
            await set_clean(store, True)
    except FsError as error:
        where = store.config.meta.directory
        return [Problem("unrecovered", where, str(error), where=where)]
    counts = dataclasses.asdict(recovered)
    report.counts["undrained"] = counts.pop("undrained")
    for name, number in counts.items():
        if number:
            report.counts[f"recovered_{name}"] = number
    return []


async def _mend(engine: Engine, problems: list[Problem], stage: int) -> None:
    for problem in problems:
        if problem.stage != stage or problem.fix is None:
            continue
        await trio.lowlevel.checkpoint()
        try:
            await engine.transact(problem.fix)
            problem.repaired = True
        except FsError as error:
            problem.detail += f"; cannot be repaired: {error}"


# --- damaged records: those whose check values are wrong ------------------------------------------


async def _find_damaged(engine: Engine) -> dict[bytes, Problem]:
    """Problems by key. Reads all records; none with an engine that reads damaged ones as something
    else."""
    found: dict[bytes, Problem] = {}
    start = b"\0"
    while True:
        last, detail = await engine.view(_read, start)
        if last is None:
            return found
        if detail:
            found[last] = _problem(last, detail)
        start = last + b"\0"
        await trio.lowlevel.checkpoint()


def _read(tx: ReadTransaction, start: bytes) -> tuple[bytes | None, str]:
    """A batch's last key, None at the end; and the record's fault there."""
    key = None
    try:
        for key, _ in tx.range(start, _LAST, _BATCH):
            pass
    except DamagedRecord as error:
        return error.key, str(error)
    return key, ""


def _problem(key: bytes, detail: str) -> Problem:
    fix, stage = None, RECORDS  # the check of its kind knows what may take its place
    if any(kind.letter == key[:1] and kind.is_mark for kind in KINDS):
        fix, stage = partial(repair.put, key=key, value=b""), RECOVERY
    elif key[:1] == b"x":
        fix = partial(repair.delete, key=key)
    where = f"record {keys.describe(key)}"
    return Problem("damaged-record", where, detail, fix, stage, where)


def _is_whole(tx: ReadTransaction, key: bytes) -> bool:
    """Whether the record is readable by now, or gone."""
    try:
        tx.get(key)
    except DamagedRecord:
        return False
    return True


_TOLD_MAX = 8
"""Ranges of one file that are named one by one."""

_AT_ONCE, _DEEP_BATCH = 4, 256
"""Object sets that are looked at by themselves at the same time; and altogether."""


class DeepCheck:
    """The check of bytes: a scrub of the whole unused store, without repair.

    All bytes with checksums are read once from data servers, several object sets at a time: MiBs of
    striped files, except written in place or mostly holes, and chunks of containers. All columns of
    protected ones are read. Clean burst copies must have the same bytes. Files and objects known to
    miss bytes are left out.
    """

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
        """Return the problems; ``damaged``: inodes of files with missing bytes, and paths of
        containers' objects."""
        self._damaged = damaged
        await self._records.for_each(*keys.all_of(b"t"), self._expect_container)
        await self._records.for_each(*keys.all_of(b"i"), self._expect_file)
        for first in range(0, len(self._items), _DEEP_BATCH):
            batch = self._items[first : first + _DEEP_BATCH]
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
        first = await self._view(shared.users, inode.oid, 1) if inode.named else [ino]
        if layout is not None and (layout.is_protected or has_checksums) and first == [ino]:
            if ino not in self._damaged:
                await self._expect(inode.named_by, inode.oid, await self._records.unread(inode.oid))
        if inode.layout is not None and inode.copy is not None and ino not in self._damaged:
            self._cached.append(ino)

    async def _expect(self, ino: int, oid: int, unread: int) -> None:
        """Have an object set read, unless it needs ``unread`` or absent servers' columns, named
        already."""
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
            [user] = await self._view(shared.users, oid, 1) or [ino]
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
        """A column that a mount will make anew once on record."""
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
