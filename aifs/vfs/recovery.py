"""What a mount does after a crash (docs/metadata.md, crash table). The journal has been replayed by then.

The work depends on what was in flight: dirty marks, orphans, garbage, and the last window of ids.
"""

from dataclasses import dataclass

from aifs.core.errors import FsError, Unavailable
from aifs.core.log import logger
from aifs.core.tasks import run_all
from aifs.data.striped import StripedObjects, delete_objects, list_window
from aifs.layout.striped import Striped
from aifs.meta import keys, namespace
from aifs.meta.kv import ReadTransaction, Transaction
from aifs.meta.records import Inode
from aifs.vfs.collector import Collector
from aifs.vfs.ids import last_window
from aifs.vfs.store import Store

_log = logger(__name__)


@dataclass(slots=True)
class Recovered:
    """Counts of what recovery dealt with."""

    transactions: int = 0  # replayed from the journal
    unsynced_files: int = 0  # had a dirty mark
    orphans: int = 0  # unlinked, but open when the daemon died
    garbage: int = 0  # object sets that were waiting for deletion
    unknown_objects: int = 0  # made shortly before a power cut that undid their files

    def __str__(self) -> str:
        parts = [
            (self.transactions, "transactions replayed"),
            (self.unsynced_files, "unsynced files settled"),
            (self.orphans, "deleted files that were open removed"),
            (self.garbage, "sets of garbage objects queued for deletion"),
            (self.unknown_objects, "objects of lost files deleted"),
        ]
        return ", ".join(f"{count} {what}" for count, what in parts if count) or "nothing to recover"


async def recover(store: Store, collector: Collector) -> Recovered:
    """Bring the store into order; what only needs deleting is left to the collector.

    A file on a server that does not work keeps its dirty mark, and is settled by a later mount.
    """
    recovered = Recovered(transactions=store.engine.recovered)
    dirty, orphans, garbage = await store.engine.view(_read_in_flight)
    recovered.unsynced_files, recovered.orphans, recovered.garbage = len(dirty), len(orphans), len(garbage)
    for ino in orphans:
        collector.add_orphan(ino)
    for oid in garbage:
        collector.add_garbage(oid)
    for start in range(0, len(dirty), 64):
        await run_all(*(lambda ino=ino: _settle(store, ino) for ino in dirty[start : start + 64]))
    if not store.clean:
        recovered.unknown_objects = await _delete_unknown_objects(store)
    return recovered


def _read_in_flight(tx: ReadTransaction) -> tuple[list[int], list[int], list[int]]:
    def numbers(kind: bytes) -> list[int]:
        return [keys.number(key) for key, _ in tx.range(*keys.all_of(kind))]

    return numbers(b"w"), numbers(b"o"), numbers(b"g")


async def _settle(store: Store, ino: int) -> None:
    try:
        inode, is_orphan = await store.engine.view(_read_settling, ino)
        if inode is not None and inode.layout is not None and not is_orphan:
            await _settle_objects(store, inode)
        await store.engine.transact(_put_settled, ino, inode)
    except FsError as error:
        _log.warning("inode %d could not be settled, the next mount will try again: %s", ino, error)


async def _settle_objects(store: Store, inode: Inode) -> None:
    objects = StripedObjects(store.servers, inode.layout, inode.ino, inode.oid)
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
    """Delete objects in the last window of ids that neither an inode nor a garbage record knows (I7)."""
    unknown: dict[tuple[int, int], list[int]] = {}
    first, end = await last_window(store.engine)
    for server, ino, oid in await list_window(store.servers, first, end):
        if not await store.engine.view(_is_known, ino, oid):
            unknown.setdefault((ino, oid), []).append(server)
    for (ino, oid), servers in unknown.items():
        await delete_objects(store.servers, Striped(1 << 20, tuple(servers)), ino, oid)
    return sum(map(len, unknown.values()))


def _is_known(tx: ReadTransaction, ino: int, oid: int) -> bool:
    if tx.get(keys.garbage(oid)) is not None:
        return True
    try:
        inode = namespace.find_inode(tx, ino)
    except Unavailable:
        return True  # nobody can tell, so nothing is deleted
    return inode is not None and inode.layout is not None and inode.oid == oid
