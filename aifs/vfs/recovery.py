"""Recovery by a mount after a crash (docs/design/metadata.md, crash table); the journal is
replayed.

It deals with this host's dirty marks, orphans, garbage, and last windows of ids. For other dead
hosts the holder of the role does what is possible without their burst directories (``take_over``);
the rest waits for their next mount.
"""

import os
import stat
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from aifs.burst.making import MakingTools
from aifs.burst.pool import Movers
from aifs.burst.tier import BurstTier
from aifs.burst.transfer import Limiter, Mover
from aifs.core import clock
from aifs.core.errors import FsError, Unavailable
from aifs.core.log import logger
from aifs.core.tasks import run_all
from aifs.core.upkeep import Role
from aifs.data.objects.object_set import ObjectSet, delete_objects
from aifs.data.server import DataServer, MissingObject
from aifs.data.workers import outcomes
from aifs.files.collector import Collector
from aifs.files.damage import Needs
from aifs.files.drain import Undrained
from aifs.layout.placement import LOST
from aifs.layout.striped import Striped
from aifs.meta import chunks, dooming, forms, keys, moves, namespace, paths, shared
from aifs.meta.kv import ReadTransaction, Transaction
from aifs.meta.records import BurstRecord, Copy, Garbage, Inode, decode_burst, decode_garbage
from aifs.store.ids import last_windows, take_ids
from aifs.store.store import Store
from aifs.upkeep.from_copies import Judgement, judge_copy

_log = logger(__name__)

_SLICE = 256
_LISTED_MAX = 2000
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


class StillOpen(NamedTuple):
    """What recovery has left to who goes on with the mount of a daemon that has died."""

    dirty: list[int]
    """Files with dirty marks, which programs may have open or mapped."""
    orphans: list[int]
    """Inodes without a name, which the kernel may know."""


async def recover(
    store: Store,
    tier: BurstTier,
    collector: Collector,
    recovered: Recovered,
    is_mounted: bool = False,
) -> StillOpen:
    """Bring the store into order, and count; the collector deletes.

    A file on a failing server keeps its dirty mark until a later mount; so does an absent server
    the record of objects to look for. The rebuild deletes moved objects. ``is_mounted``: the kernel
    and programs still have the mount.
    """
    recovered.transactions = store.engine.recovered
    abandoned = await store.engine.view(_read_unfinished)
    if abandoned:
        await store.engine.transact(dooming.put_abandoned, abandoned)
    if not (store.clean or store.same_boot):
        await _restore_marks(store, tier)
    dirty, orphans, garbage = await store.engine.view(_read_in_flight, collector.is_ours)
    recovered.unsynced_files = len(dirty)
    recovered.orphans = len(orphans)
    recovered.garbage = len(garbage)
    still = StillOpen(dirty, orphans) if is_mounted else StillOpen([], [])
    if is_mounted:
        dirty, orphans = [], []
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
    recovered.unknown_objects = await delete_unknown_objects(store)
    return still


def _read_unfinished(tx: ReadTransaction) -> list[int]:
    """Tops of trees that this host was making."""
    return [ino for ino, maker in dooming.all_makers(tx).items() if maker == tx.host]


def _read_in_flight(
    tx: ReadTransaction, is_ours: Callable[[Garbage], bool]
) -> tuple[list[int], list[int], list[int]]:
    """Files with dirty marks of this host, its orphans, and its garbage."""
    host = tx.host
    orphans, holds = _read_orphans(tx)
    held = [ino for ino in orphans if (host in holds[ino] if host else not holds[ino])]
    garbage = [oid for oid, record in _read_garbage(tx) if record is None or is_ours(record)]
    return _numbers_of(tx, b"w", {host}), held, garbage + _numbers_of(tx, b"y", {host})


def _numbers_of(tx: ReadTransaction, kind: bytes, hosts: Set[int]) -> list[int]:
    """Numbers of a kind's records that name one of these hosts."""
    found = tx.range(*keys.all_of(kind))
    return [keys.number(key) for key, value in found if keys.host_of(value) in hosts]


def _read_orphans(tx: ReadTransaction) -> tuple[list[int], defaultdict[int, set[int]]]:
    """All orphans, and the hosts that hold each."""
    orphans, holds = list[int](), defaultdict[int, set[int]](set)
    for key, _ in tx.range(*keys.all_of(b"o")):
        if keys.is_hold(key):
            ino, host = keys.hold_parts(key)
            holds[ino].add(host)
        else:
            orphans.append(keys.number(key))
    return orphans, holds


def _read_garbage(tx: ReadTransaction) -> Iterator[tuple[int, Garbage | None]]:
    """With None for a damaged record, which fsck names."""
    for key, value in tx.range(*keys.all_of(b"g")):
        try:
            yield keys.number(key), decode_garbage(value)
        except Unavailable:
            yield keys.number(key), None


async def take_over(store: Store, role: Role, collector: Collector) -> None:
    """Deal, as holder of the role, with garbage that is no host's, and what hosts without session
    have left. Called on getting the role, and after each end of a session.

    Dirty marks stay, because newest bytes may be in those hosts' burst directories; so do windows
    of ids. Hosts are looked up after the records: a host with a new session deals with its own.
    """
    engine = store.engine
    left = await engine.view(_read_left)
    dead = left.hosts - await role.ask_live()
    if dead:
        for container in await engine.transact(_inherit, left, dead):
            for oid in await engine.transact(chunks.seal_container, container):
                collector.add_garbage(oid)
    orphans, garbage = await engine.view(_read_nobodys)
    for ino in orphans:
        collector.add_orphan(ino)
    for oid in garbage:
        collector.add_garbage(oid)


class _Left(NamedTuple):
    """What hosts are at, by the keys of the records: which host."""

    made: dict[bytes, int]
    lists: dict[bytes, int]
    containers: dict[bytes, int]
    trees: dict[bytes, int]
    holds: dict[bytes, int]

    @property
    def hosts(self) -> set[int]:
        return {host for part in self for host in part.values()}


def _read_left(tx: ReadTransaction) -> _Left:
    lists, containers = (
        {key: keys.host_of(value) for key, value in tx.range(*keys.all_of(kind))}
        for kind in (b"y", b"a")
    )
    made = {keys.garbage(oid): record.maker for oid, record in _read_garbage(tx) if record}
    trees = {keys.doomed(ino): maker for ino, maker in dooming.all_makers(tx).items()}
    holds = {
        key: keys.hold_parts(key)[1] for key, _ in tx.range(*keys.all_of(b"o")) if keys.is_hold(key)
    }
    return _Left(
        *(
            {key: host for key, host in part.items() if host}
            for part in (made, lists, containers, trees, holds)
        )
    )


def _inherit(tx: Transaction, left: _Left, dead: Set[int]) -> list[int]:
    """Make what dead hosts left nobody's; returns containers to seal."""
    for key, host in left.made.items():
        if host in dead and (record := tx.get(key)) is not None:
            garbage = decode_garbage(record)
            if garbage.maker == host:
                tx.put(key, garbage._replace(maker=0).encode())
    for key, host in left.lists.items():
        if host in dead and (record := tx.get(key)) is not None and keys.host_of(record) == host:
            tx.put(key, keys.host_value(0))
    dooming.put_abandoned(
        tx, [keys.number(key) for key, host in left.trees.items() if host in dead]
    )
    for key, host in left.holds.items():
        if host in dead:
            tx.delete(key)
    return [keys.number(key) for key, host in left.containers.items() if host in dead]


def _read_nobodys(tx: ReadTransaction) -> tuple[list[int], list[int]]:
    """Orphans that nobody holds, and garbage that is no host's."""
    orphans, holds = _read_orphans(tx)
    garbage = [oid for oid, record in _read_garbage(tx) if record is None or not record.maker]
    return [ino for ino in orphans if not holds[ino]], garbage + _numbers_of(tx, b"y", {0})


async def _restore_marks(store: Store, tier: BurstTier) -> None:
    """Restore dirty marks that a power cut has undone: the copy's length differs from the record's,
    or cannot be read now."""
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
        return  # readers of the file get the error
    except FsError:
        unlike.append(inode.ino)
    finally:
        copy.close()


def _put_marks(tx: Transaction, inos: list[int]) -> None:
    for ino in inos:
        namespace.put_mark(tx, ino)


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
    """Take over what the burst copy says, and sync it. One undone by a power cut leaves an empty
    file."""
    place = inode.copy
    assert place is not None
    copy = tier.open(place)
    try:
        await copy.ensure_open()
        status = copy.stat()
        inode.size = status.st_size
        inode.blocks = status.st_blocks
        inode.mtime_ns = status.st_mtime_ns
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
    stored = namespace.find_inode(tx, ino) if tx.host else inode
    if inode is not None and stored is not None and not namespace.has_form_of(stored, inode):
        return  # a host that had a mirror has taken the file over meanwhile
    tx.delete(keys.dirty(ino))
    if inode is not None:
        namespace.put_inode(tx, inode)


async def delete_unknown_objects(store: Store) -> int:
    """Delete objects in the host's last windows of ids without inode or garbage record (I7).

    A server that fails is recorded, with the window, for the next mount.
    """
    servers = store.servers
    unlisted = await store.engine.view(read_unlisted)
    earlier = [window for window in unlisted if window.server not in servers.elsewhere]
    windows = dict.fromkeys(earlier)
    if not store.clean:
        newest = await last_windows(store.engine)
        windows |= dict.fromkeys(Unlisted(n, *window) for n in servers for window in newest)
    asked = [window for window in windows if _may_have_objects(servers.find(window.server))]
    calls = [
        (servers[number].workers, servers[number].list_range, (first, end))
        for number, first, end in asked
    ]
    missed = list[Unlisted]()
    unknown: dict[tuple[int, int], list[Unlisted]] = {}
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
    """Not on a lost server."""
    return server is not None and server.standing != LOST


class Unlisted(NamedTuple):
    """Unknown objects with first <= id < end may lie on a server not looked at (key ``j
    unlisted``)."""

    server: int
    first: int
    end: int

    @property
    def key(self) -> bytes:
        return keys.job(_UNLISTED + struct.pack(">HQQ", *self))


def read_unlisted(tx: ReadTransaction) -> list[Unlisted]:
    start = keys.job(_UNLISTED)
    return [
        Unlisted(*struct.unpack(">HQQ", key[len(start) :]))
        for key, _ in tx.range(start, start + b"\xff" * 19)
    ]


def _put_unlisted(tx: Transaction, done: set[Unlisted], missed: set[Unlisted]) -> None:
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
    if inode is not None and inode.layout is not None and inode.oid == oid:
        return True
    return bool(shared.users(tx, oid, 1))


# --- burst copies ---------------------------------------------------------------------------------


async def load_copies(
    store: Store, tier: BurstTier, collector: Collector, needs: Needs, recovered: Recovered
) -> list[Undrained]:
    """Tell the tier its copies; returns those to drain.

    A cached copy that is not durable counts only until the machine starts anew: a power cut may
    have damaged it. Then it is kept if needed and right by its checksums.
    """
    undrained: list[Undrained] = []
    unreachable = defaultdict[str, list[int]](list)
    sources = _Sources(store, needs)
    start, end = keys.all_of(b"b")
    while batch := await store.engine.view(_read_copies, start, end):
        for copy_id, record, inode in batch:
            start = keys.burst_copy(copy_id + 1)
            if record.of is not None:
                if record.server in store.servers:
                    tier.mirrors(copy_id, record.server, record.of.size)
                continue
            if (
                inode is None
                or inode.copy != (record.server, copy_id)
                or inode.in_burst != record.undrained
            ):
                continue  # fsck names it
            if record.server in store.servers.elsewhere:
                continue
            server = store.servers.find(record.server)
            if server is not None and server.absent and record.undrained:
                unreachable[server.name].append(record.ino)
            elif server is None or server.absent:
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
    for name, inos in unreachable.items():
        await _list_lost(store, name, inos)
    return undrained


async def _list_lost(store: Store, directory: str, inos: Sequence[int]) -> None:
    """Name the files whose newest bytes are in a missing burst directory, for users."""
    engine, what = store.engine, f"{len(inos)} files cannot be read without {directory}"
    if store.servers.read_only:
        _log.warning("%s", what)
        return
    named = [await engine.view(paths.describe, ino) for ino in inos[:_LISTED_MAX]]
    where = await engine.transact(put_list, directory, named, len(inos))
    _log.warning("%s; %s names them", what, where)


class _Sources:
    """Copies that may be all there is of their files."""

    def __init__(self, store: Store, needs: Needs) -> None:
        self._store = store
        self._needs = needs
        self._movers: Movers | None = None

    async def has(self, inode: Inode) -> bool:
        """Whether only its copy, unsynced before a power cut, has a file; it is on record as
        durable then."""
        engine, servers = self._store.engine, self._store.servers
        assert inode.copy is not None
        if not await self._needs.find({inode.copy.id: inode.ino}):
            return False
        if self._movers is None:
            mover = Mover(servers.budget, Limiter(0), "none")
            self._movers = Movers(MakingTools(servers, mover))
            _log.warning(
                "the machine was started anew, and data servers miss bytes of files with burst "
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


NAME = b"lost+found"

_LIST_BYTES = 48 << 10


def fresh_id(tx: Transaction) -> int:
    # The counter is beyond all ids that were handed out.
    return take_ids(tx, 1) - 1


def lost_and_found(tx: Transaction, now_ns: int) -> Inode:
    """The directory, which is made if it is missing."""
    name, suffix = NAME, 0
    while tx.get(keys.dentry(keys.ROOT_INO, name)) is not None:
        inode = namespace.lookup(tx, keys.ROOT_INO, name)
        if inode.is_dir:
            return inode
        suffix += 1
        name = b"%s.%d" % (NAME, suffix)
    new = _new(fresh_id(tx), stat.S_IFDIR | 0o700, 2, now_ns)
    return namespace.create(tx, keys.ROOT_INO, name, new)


def put_list(tx: Transaction, title: str, paths: Iterable[str], count: int) -> str:
    """List files in a file of /lost+found, new unless listed before; returns its path. ``paths``:
    as many of ``count`` files as fit."""
    now_ns = clock.kernel_ns()
    text, listed = bytearray(), 0
    for path in paths:
        line = path.encode("utf-8", "surrogateescape").replace(b"\n", rb"\n") + b"\n"
        if len(text) + len(line) > _LIST_BYTES:
            break
        text += line
        listed += 1
    if listed < count:
        text += b"and %d more; aifs fsck names all\n" % (count - listed)
    parent, stem = lost_and_found(tx, now_ns), title.replace(" ", "-")
    name, suffix = stem, 0
    while tx.get(keys.dentry(parent.ino, name.encode())) is not None:
        if namespace.lookup(tx, parent.ino, name.encode()).data == text:
            break
        suffix += 1
        name = f"{stem}.{suffix}"
    else:
        new = _new(fresh_id(tx), stat.S_IFREG | 0o400, 1, now_ns)
        new.size, new.data = len(text), bytes(text)
        namespace.create(tx, parent.ino, name.encode(), new)
    return f"/{NAME.decode()}/{name}"


def _new(ino: int, mode: int, links: int, now_ns: int) -> Inode:
    return Inode(ino, mode, os.getuid(), os.getgid(), links, 0, 0, 0, now_ns, now_ns, now_ns)
