"""fsck: check a whole store that nobody uses, and mend it as far as that needs no guessing.

1. The metadata is read: records that are not as they were stored are named, and count as empty from
then on, which no record is that holds something. It is judged as it is (``scan``, ``names``),
before anything acts on it.

2. Records that recovery would trip over are mended, and the store is recovered as by a mount.
Without leave to mend, a store that recovery would damage further is not recovered.

3. The rest of the metadata is mended (``repair``).

4. The objects on the data servers and the burst copies are compared with the inodes (``objects``).

5. If asked for, all bytes that have checksums are read (``deep``).
"""

import dataclasses
from functools import partial

import trio

from aifs.burst.tier import BurstTier
from aifs.check import repair
from aifs.check.deep import DeepCheck
from aifs.check.findings import NAMELESS, RECORDS, RECOVERY, SILENT, FsckReport, Problem, Progress
from aifs.check.objects import ObjectCheck
from aifs.check.records import KINDS
from aifs.check.scan import MetadataScan
from aifs.core.config import Config
from aifs.core.errors import FsError
from aifs.core.upkeep import Upkeep
from aifs.files.collector import Collector
from aifs.files.needs import Needs
from aifs.meta import keys
from aifs.meta.kv import DamagedRecord, Engine, ReadTransaction
from aifs.store.backup import Backup
from aifs.store.ids import IdAllocator
from aifs.store.store import Store, open_store, set_clean
from aifs.upkeep import scrub_state
from aifs.upkeep.moves import Strays
from aifs.upkeep.scrub_state import Findings
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
    """Check the store, which must not be mounted; with ``repair`` mend it, durably on return.
    Blocks.

    ``deep``: also read all files that have checksums, and compare. ``force``: the host that has
    claimed the store is dead, so it is taken over, which waits for some seconds. A store that was
    not closed in order is recovered, also without ``repair``, as the next mount would do.

    Raises StoreError and StoreBusy as a mount does, Unavailable or NoSpace if the metadata cannot
    be changed.
    """
    return trio.run(
        _check, config, repair, deep, force, progress or (lambda what, done, total: None)
    )


async def _check(
    config: Config, repair: bool, deep: bool, force: bool, progress: Progress
) -> FsckReport:
    store = await open_store(config, force=force, alone=True)
    report, failure = FsckReport(), None
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.engine.run)
            nursery.start_soon(store.ownership.run)
            try:
                await _check_store(store, repair, deep, progress, report)
            except Exception as error:  # noqa: BLE001 (raised again below)
                failure = error  # out of the nursery it would come as a group
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure
    except BaseException:
        store.abandon()
        raise
    store.close()
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
    """Recover the store, as a mount does first; the counts go to the report. Returns the problem
    that prevented it."""
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
    """The problems by key. Reads all records; an engine that reads damaged ones as something else
    finds none."""
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
    """The last key of a batch, None at the end; and the fault of the record there."""
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
    """Whether the record can be read by now, or is gone."""
    try:
        tx.get(key)
    except DamagedRecord:
        return False
    return True
