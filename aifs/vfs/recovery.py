"""What a mount does after a crash (docs/metadata.md, crash table). The journal has been replayed by
then.

The work depends on what was in flight: dirty marks, orphans, garbage, and the last window of ids.
"""

import struct
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from aifs.burst.making import MakingTools
from aifs.burst.tier import BurstTier
from aifs.burst.transfer import Limiter, Mover
from aifs.core.errors import FsError, Unavailable
from aifs.core.log import logger
from aifs.core.tasks import run_all
from aifs.data.objects.object_set import ObjectSet, delete_objects
from aifs.data.server import DataServer, MissingObject
from aifs.data.workers import outcomes
from aifs.files.collector import Collector
from aifs.files.drain import Undrained
from aifs.files.needs import Needs
from aifs.layout.placement import LOST
from aifs.layout.striped import Striped
from aifs.meta import forms, keys, moves, namespace
from aifs.meta.kv import ReadTransaction, Transaction
from aifs.meta.records import BurstRecord, Copy, Inode, decode_burst
from aifs.movers.movers import Movers
from aifs.store.ids import last_windows
from aifs.store.store import Store
from aifs.upkeep.judging import Judgement, judge_copy

_log = logger(__name__)

_SLICE = 256
_UNLISTED = b"unlisted"


@dataclass(slots=True)
class Recovered:
    """Counts of what recovery dealt with."""

    transactions: int = 0  # replayed from the journal
    unsynced_files: int = 0  # had a dirty mark
    orphans: int = 0  # unlinked, but open when the daemon died
    garbage: int = 0  # object sets that were waiting for deletion
    unknown_objects: int = 0  # made ahead for new files, or for files that a power cut has undone
    undrained: int = 0  # files whose newest bytes are in the burst tier alone
    strays: int = 0  # objects that were on the move to another server
    dropped_copies: int = 0  # cached in the burst tier, but not known to be on stable storage

    def __str__(self) -> str:
        parts = [
            (self.transactions, "transactions replayed"),
            (self.unsynced_files, "unsynced files settled"),
            (self.orphans, "deleted files that were open removed"),
            (self.garbage, "sets of garbage objects queued for deletion"),
            (self.unknown_objects, "unused objects deleted"),
            (self.strays, "moved objects to be deleted"),
            (self.dropped_copies, "cached copies dropped"),
            (self.undrained, "files to drain"),
        ]
        return (
            ", ".join(f"{count} {what}" for count, what in parts if count) or "nothing to recover"
        )


async def recover(
    store: Store, tier: BurstTier, collector: Collector, recovered: Recovered
) -> None:
    """Bring the store into order, and count what has been dealt with; what only needs deleting is
    left to the collector.

    A file on a server that does not work keeps its dirty mark, and is settled by a later mount; so
    does a server that is absent the record of what is to be looked for there. Moved objects are the
    rebuild's to delete.
    """
    recovered.transactions = store.engine.recovered
    if not (store.clean or store.same_boot):
        await _restore_marks(store, tier)
    dirty, orphans, garbage = await store.engine.view(_read_in_flight)
    recovered.unsynced_files, recovered.orphans, recovered.garbage = (
        len(dirty),
        len(orphans),
        len(garbage),
    )
    for ino in orphans:
        collector.add_orphan(ino)
    for oid in garbage:
        collector.add_garbage(oid)
    recovered.strays = len(await store.engine.view(moves.load_strays))
    unsettled: dict[int, FsError] = {}
    for start in range(0, len(dirty), 64):
        some = dirty[start : start + 64]
        await run_all(
            *(lambda ino=ino: _settle(store, tier, collector, ino, unsettled) for ino in some)
        )
    if unsettled:
        ino, error = next(iter(unsettled.items()))
        what = "%d files, such as inode %d, could not be settled, the next mount will try again: %s"
        _log.warning(what, len(unsettled), ino, error)
    recovered.unknown_objects = await _delete_unknown_objects(store)


def _read_in_flight(tx: ReadTransaction) -> tuple[list[int], list[int], list[int]]:
    def numbers(kind: bytes) -> list[int]:
        return [keys.number(key) for key, _ in tx.range(*keys.all_of(kind))]

    return numbers(b"w"), numbers(b"o"), numbers(b"g") + numbers(b"y")


async def _restore_marks(store: Store, tier: BurstTier) -> None:
    """A power cut may undo a dirty mark, but not all that was written to the copy of the file
    after it: then the copy has another length than the record says. Such files have their marks
    again on return, and so have those whose copies do not tell at present.
    """
    start, end = keys.all_of(b"b")
    while batch := await store.engine.view(_read_copies, start, end):
        start = keys.burst_copy(batch[-1][0] + 1)
        unlike: list[int] = []
        await run_all(
            *(
                partial(_compare_length, tier, inode, unlike)
                for copy_id, record, inode in batch
                if record.undrained
                and inode is not None
                and inode.in_burst
                and inode.copy == Copy(record.server, copy_id)
                and _may_have_objects(store.servers.find(record.server))
            )
        )
        if unlike:
            await store.engine.transact(_put_marks, unlike)


async def _compare_length(tier: BurstTier, inode: Inode, unlike: list[int]) -> None:
    assert inode.copy is not None
    copy = tier.open(inode.copy)
    try:
        await copy.ensure_open()
        if copy.stat().st_size != inode.size:
            unlike.append(inode.ino)
    except MissingObject:
        return  # who reads the file is told
    except FsError:
        unlike.append(inode.ino)
    finally:
        copy.close()


def _put_marks(tx: Transaction, inos: list[int]) -> None:
    for ino in inos:
        tx.put(keys.dirty(ino), b"")


async def _settle(
    store: Store, tier: BurstTier, collector: Collector, ino: int, unsettled: dict[int, FsError]
) -> None:
    try:
        inode, is_orphan = await store.engine.view(_read_settling, ino)
        if inode is not None and not is_orphan:
            if inode.in_burst:
                await _settle_copy(store, tier, collector, inode)
            elif inode.layout is not None:
                await _settle_objects(store, inode)
        await store.engine.transact(_put_settled, ino, inode)
    except FsError as error:
        unsettled[ino] = error


async def _settle_copy(store: Store, tier: BurstTier, collector: Collector, inode: Inode) -> None:
    """Take over what the burst copy says, and sync it. One that a power cut has undone leaves an
    empty file.
    """
    place = inode.copy
    assert place is not None
    copy = tier.open(place)
    try:
        await copy.ensure_open()
        status = copy.stat()
        inode.size, inode.blocks, inode.mtime_ns = (
            status.st_size,
            status.st_blocks,
            status.st_mtime_ns,
        )
        await copy.sync()
    except MissingObject:
        if store.same_boot or await store.engine.view(_is_durable, place.id):
            raise
        _log.warning(
            "inode %d was not on stable storage when the power went: it is empty now", inode.ino
        )
        inode.copy, inode.size, inode.blocks = None, 0, 0
        for oid in await store.engine.transact(forms.change_forms, [forms.FormChange(inode)]):
            collector.add_garbage(oid)
    finally:
        copy.close()


def _is_durable(tx: ReadTransaction, copy_id: int) -> bool:
    record = tx.get(keys.burst_copy(copy_id))
    return record is None or decode_burst(record).durable


async def _settle_objects(store: Store, inode: Inode) -> None:
    layout = inode.objects
    assert layout is not None
    objects = ObjectSet(store.servers, layout, inode.ino, inode.oid)
    try:
        await objects.settle(inode.size)
        await objects.sync()
        inode.blocks = objects.blocks() or 0
    finally:
        objects.close()


def _read_settling(tx: ReadTransaction, ino: int) -> tuple[Inode | None, bool]:
    return namespace.find_inode(tx, ino), tx.get(keys.orphan(ino)) is not None


def _put_settled(tx: Transaction, ino: int, inode: Inode | None) -> None:
    tx.delete(keys.dirty(ino))
    if inode is not None:
        namespace.put_inode(tx, inode)


async def _delete_unknown_objects(store: Store) -> int:
    """Delete objects in the last window of ids that neither an inode nor a garbage record knows
    (I7).

    A server that does not say what it has, or does not delete it, is put on record, with the
    window, for the next mount.
    """
    servers = store.servers
    earlier = await store.engine.view(_read_unlisted)
    windows = dict.fromkeys(earlier)
    if not store.clean:
        newest = await last_windows(store.engine)
        windows |= dict.fromkeys(_Unlisted(number, *newest) for number in servers)
    asked = [window for window in windows if _may_have_objects(servers.find(window.server))]
    calls = [
        (servers[number].workers, servers[number].list_range, (first, end))
        for number, first, end in asked
    ]
    missed = list[_Unlisted]()
    unknown: dict[tuple[int, int], list[_Unlisted]] = {}
    for window, found in zip(asked, await outcomes(calls) if calls else [], strict=True):
        if isinstance(found, FsError):
            missed.append(window)
        elif isinstance(found, BaseException):
            raise found
        else:
            for ino, oid in found:
                if not await store.engine.view(_is_known, ino, oid):
                    unknown.setdefault((ino, oid), []).append(window)
    for (ino, oid), where in unknown.items():
        try:
            layout = Striped(1 << 20, tuple({window.server: None for window in where}))
            await delete_objects(servers, layout, ino, oid)
        except FsError as error:
            _log.warning("object %d of no file stays for now: %s", oid, error)
            missed += where
    if set(earlier) != set(missed):
        await store.engine.transact(
            _put_unlisted, set(earlier) - set(missed), set(missed) - set(earlier)
        )
    return sum(map(len, unknown.values()))


def _may_have_objects(server: DataServer | None) -> bool:
    """What lies on a server that is lost is nobody's concern any more."""
    return server is not None and server.standing != LOST


class _Unlisted(NamedTuple):
    """Unknown objects with first <= id < end may lie on a server that could not be looked at (key
    ``j unlisted``).
    """

    server: int
    first: int
    end: int

    @property
    def key(self) -> bytes:
        return keys.job(_UNLISTED + struct.pack(">HQQ", *self))


def _read_unlisted(tx: ReadTransaction) -> list[_Unlisted]:
    start = keys.job(_UNLISTED)
    return [
        _Unlisted(*struct.unpack(">HQQ", key[len(start) :]))
        for key, _ in tx.range(start, start + b"\xff" * 19)
    ]


def _put_unlisted(tx: Transaction, done: set[_Unlisted], missed: set[_Unlisted]) -> None:
    for window in done:
        tx.delete(window.key)
    for window in missed:
        tx.put(window.key, b"")


def _is_known(tx: ReadTransaction, ino: int, oid: int) -> bool:
    if tx.get(keys.garbage(oid)) is not None:
        return True
    if ino == 0:
        return tx.get(keys.burst_copy(oid)) is not None or tx.get(keys.container(oid)) is not None
    try:
        inode = namespace.find_inode(tx, ino)
    except Unavailable:
        return True  # nobody can tell, so nothing is deleted
    return inode is not None and inode.layout is not None and inode.oid == oid


# --- burst copies ---------------------------------------------------------------------------------


async def load_copies(
    store: Store, tier: BurstTier, collector: Collector, needs: Needs, recovered: Recovered
) -> list[Undrained]:
    """Tell the tier what it holds; returns what has to be drained.

    A cached copy that is not durable counts only while the machine has not been started anew: a
    power cut may have left anything in it. Then it is kept if it is needed, and has its checksums.
    """
    undrained: list[Undrained] = []
    sources = _Sources(store, needs)
    start, end = keys.all_of(b"b")
    while batch := await store.engine.view(_read_copies, start, end):
        for copy_id, record, inode in batch:
            start = keys.burst_copy(copy_id + 1)
            if (
                inode is None
                or inode.copy != (record.server, copy_id)
                or inode.in_burst != record.undrained
            ):
                continue  # fsck names it
            server = store.servers.find(record.server)
            if server is None or server.absent:
                # What the missing directory holds is on record as garbage, should it ever come
                # back.
                await store.engine.transact(forms.put_without_copy, record.ino, copy_id)
                recovered.dropped_copies += 1
            elif record.undrained:
                undrained.append(Undrained(record.ino, record.since_ns, inode.size))
                tier.dirty(copy_id, record.server, inode.space)
            elif record.durable or store.same_boot or await sources.has(inode):
                tier.clean(copy_id, record.server, inode.space)
                tier.pinned(copy_id, inode.policy is not None and inode.policy.tier == "pinned")
            else:
                collector.add_garbage(
                    await store.engine.transact(forms.put_without_copy, record.ino, copy_id)
                )
                recovered.dropped_copies += 1
    recovered.undrained = len(undrained)
    return undrained


class _Sources:
    """Copies that may be all there is of their files."""

    def __init__(self, store: Store, needs: Needs) -> None:
        self._store = store
        self._needs = needs
        self._movers: Movers | None = None

    async def has(self, inode: Inode) -> bool:
        """Whether the data servers cannot tell a file, but its copy can, though it was not synced
        before a power cut. It is on record as durable then."""
        engine, servers = self._store.engine, self._store.servers
        assert inode.copy is not None
        if not await self._needs.find({inode.copy.id: inode.ino}):
            return False
        if self._movers is None:
            mover = Mover(servers.budget, Limiter(0), "none")
            self._movers = Movers(MakingTools(servers, mover))
            _log.warning(
                "the machine was started anew, and data servers lack bytes of files with burst "
                "copies that were never synced: these are read and compared with checksums now"
            )
        judgement = await judge_copy(engine, self._movers, inode)
        _log.info("inode %d: its burst copy is %s", inode.ino, judgement.name.lower())
        if judgement is not Judgement.RIGHT:
            return False
        await engine.transact(forms.put_durable, inode.copy.id)  # it has outlived the machine
        return True


def _read_copies(
    tx: ReadTransaction, start: bytes, end: bytes
) -> list[tuple[int, BurstRecord, Inode | None]]:
    found = [(keys.number(key), decode_burst(value)) for key, value in tx.range(start, end, _SLICE)]
    return [(copy_id, record, _find_readable(tx, record.ino)) for copy_id, record in found]


def _find_readable(tx: ReadTransaction, ino: int) -> Inode | None:
    try:
        return namespace.find_inode(tx, ino)
    except Unavailable:
        return None
