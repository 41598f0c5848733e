"""``aifs fsck --rebuild-from-servers --merge``: what the servers have and the metadata does not
know of becomes files.

So after a restore of an older backup: files that were stored since come back under their path
hints, and files that were rewritten since get their newer bytes. All else of the metadata stays.
Nothing is deleted, but chunks in containers that a rewritten file does not need any more are dead.
"""

import stat
import time
from collections.abc import Collection, Sequence

import trio

from aifs.check import fsck
from aifs.check.findings import Progress, printable
from aifs.check.repair import fresh_id
from aifs.check.salvage.containers import SavedContainers
from aifs.check.salvage.inventory import Inventory, Saved
from aifs.check.salvage.metadata import container_ends, put_bytes, put_container
from aifs.check.salvage.rebuild import Result, Row, all_generations, find_drained
from aifs.check.salvage.striped import from_copy
from aifs.check.salvage.tree import place_of
from aifs.core.config import Config
from aifs.core.tasks import first_error
from aifs.layout.interleaved import Extent, Interleaved, Location
from aifs.layout.striped import Striped
from aifs.meta import chunks, keys, namespace, shared
from aifs.meta.degraded import drop_degraded, put_degraded
from aifs.meta.keys import ROOT_INO
from aifs.meta.kv import ReadTransaction, Transaction
from aifs.meta.namespace import NAME_MAX, find_inode
from aifs.meta.records import Copy, Inode, decode_dentry
from aifs.store.store import Store, open_store


def merge(config: Config, verify: bool, progress: Progress) -> Result:
    """Add what is unknown to the metadata, which is checked and recovered first. Blocks; durable on
    return.

    ``verify``: as for rebuild. Raises StoreError, StoreBusy, NoSpace, Unavailable.
    """
    fsck.check(config, repair=False, progress=progress)
    return trio.run(_merge, config, verify, progress)


async def _merge(config: Config, verify: bool, progress: Progress) -> Result:
    store = await open_store(config)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.engine.run)
            result = await _merge_into(store, verify, progress)
            await store.engine.barrier()
            nursery.cancel_scope.cancel()
    except BaseException as error:  # noqa: BLE001 (raised again, out of its group)
        store.abandon()
        raise first_error(error) from None
    store.close()
    return result


async def _merge_into(store: Store, verify: bool, progress: Progress) -> Result:
    result, inventory = Result(store.config.meta.directory), Inventory()
    await inventory.take(
        store.servers, progress, lambda text: result.rows.append(Row("server", "", text))
    )
    # Labels may name servers that were removed since.
    known = set(store.servers)
    containers = SavedContainers(
        store.servers,
        {oid: parts for (ino, oid), parts in inventory.sets.items() if not ino},
        progress,
    )
    await containers.scan()
    await store.engine.view(_forget_dead, containers)
    unknown = await store.engine.view(
        _unknown, all_generations(inventory, containers), inventory.copies.keys()
    )
    found = await find_drained(
        store.servers, inventory, containers, verify, progress, result, unknown
    )
    for one in [
        one
        for one in found
        if isinstance(one.layout, Striped) and not known.issuperset(one.layout.servers)
    ]:
        found.remove(one)
        result.rows.append(
            Row(
                "incomplete", printable(one.path), "it was on a server that the store does not have"
            )
        )
    for copy, part in inventory.copies.items():
        if (
            part.label is not None
            and part.length
            and await store.engine.view(_is_new, part.label.ino, copy.id)
        ):
            newer = [one for one in found if one.ino == part.label.ino]
            if all(one.mtime_ns < part.mtime_ns for one in newer):
                found = [one for one in found if one not in newer] + [
                    from_copy(part.label, copy, part)
                ]
    await _put(store, containers, found, result)
    return result


def _forget_dead(tx: ReadTransaction, containers: SavedContainers) -> None:
    """Pass over generations of which all chunks lie where the metadata knows a container: if they
    were alive, it would know them, too."""
    ends: dict[int, int] = {}

    def is_new(place: Location) -> bool:
        if place.container not in ends:
            record = chunks.find_container(tx, place.container)
            ends[place.container] = 0 if record is None else record.length
        return place.offset >= ends[place.container]

    for generations in containers.generations.values():
        for oid, generation in list(generations.items()):
            if not any(is_new(place) for places in generation.places.values() for place in places):
                del generations[oid]


def _unknown(
    tx: ReadTransaction, generations: dict[int, set[int]], copies: Collection[Copy]
) -> dict[int, set[int]]:
    """The generations that are newer than what the metadata has of their inodes."""
    unknown: dict[int, set[int]] = {}
    for ino, oids in generations.items():
        inode = find_inode(tx, ino)
        least = -1
        if inode is not None and not (inode.in_burst and inode.copy not in copies):
            least = inode.oid if inode.is_file and not inode.in_burst else max(oids)
        newer = {oid for oid in oids if oid > least and tx.get(keys.garbage(oid)) is None}
        if newer:
            unknown[ino] = newer
    return unknown


def _is_new(tx: ReadTransaction, ino: int, copy_id: int) -> bool:
    known = (
        tx.get(keys.burst_copy(copy_id)) is not None or tx.get(keys.garbage(copy_id)) is not None
    )
    return not known and find_inode(tx, ino) is None


async def _put(
    store: Store, containers: SavedContainers, found: Sequence[Saved], result: Result
) -> None:
    for saved in found:
        saved.extents = await store.engine.view(_with_known_places, saved.extents)
    for container, end in container_ends(found).items():
        await store.engine.transact(_put_container, containers, container, end)
    added = newer = 0
    replaced: list[int] = []
    for saved in sorted(found, key=lambda one: (-one.mtime_ns, one.ino)):
        path, was_known, old = await store.engine.transact(_put_file, saved)
        replaced += old
        added, newer = added + (not was_known), newer + was_known
        if was_known:
            result.rows.append(
                Row("newer", printable(saved.path), "has the bytes that were stored last now")
            )
        elif path != saved.path:
            result.rows.append(Row("renamed", printable(path), "its path is taken, or not known"))
        if saved.note:
            result.rows.append(Row("doubtful", printable(path), saved.note))
    for oid in replaced:  # at last, as others may have chunks in common with these
        await store.engine.transact(chunks.drop_chunks, oid)
    states = [row.state for row in result.rows]
    result.counts = {
        "added": added,
        "newer": newer,
        "bytes": sum(one.size for one in found),
        "incomplete": states.count("incomplete"),
        "doubtful": states.count("doubtful"),
    }


def _with_known_places(tx: ReadTransaction, extents: Sequence[Extent]) -> list[Extent]:
    """Shared chunks lie where the metadata says, if it knows them."""
    known = shared.find_all_shared(tx, {extent.digest for extent in extents if extent.shared})
    return [
        extent._replace(place=known[extent.digest].place)
        if extent.shared and extent.digest in known
        else extent
        for extent in extents
    ]


def _put_container(tx: Transaction, containers: SavedContainers, container: int, end: int) -> None:
    record = chunks.find_container(tx, container)
    if record is None:
        put_container(tx, (containers, container, end))
    elif (
        record.layout.is_protected
        and end > record.length
        and (lost := containers.lost(container, end))
    ):
        put_degraded(tx, container, 0, lost)


def _put_file(tx: Transaction, saved: Saved) -> tuple[bytes, bool, list[int]]:
    """Its path, whether the metadata had the file already, with other bytes, and the id of the list
    of these, which is to be dropped."""
    replaced: list[int] = []
    inode, now = find_inode(tx, saved.ino), time.time_ns()
    if inode is not None:
        if inode.copy is not None:
            namespace.discard_copy(tx, inode.copy)  # a cache of the older bytes
        if isinstance(inode.layout, Interleaved):
            replaced.append(inode.oid)
        elif inode.layout is not None:
            namespace.drop_checksums(tx, inode.oid)
            drop_degraded(tx, inode.oid)
        tx.delete(keys.dirty(inode.ino))
        inode.data, inode.copy = None, None
        inode.layout, inode.oid, inode.size, inode.blocks = (
            saved.layout,
            saved.oid,
            saved.size,
            saved.blocks,
        )
        inode.mtime_ns, inode.ctime_ns = saved.mtime_ns, now
        put_bytes(tx, saved, inode)
        return saved.path, True, replaced
    mode = saved.mode if stat.S_ISREG(saved.mode) else stat.S_IFREG | 0o600
    parents, name = place_of(saved)
    parent, path = _directory(tx, parents, saved)
    chosen, number = name, 0
    while tx.get(keys.dentry(parent, chosen)) is not None:
        suffix = b".%d" % saved.ino + (b".%d" % number if number else b"")
        chosen, number = name[: NAME_MAX - len(suffix)] + suffix, number + 1
    inode = Inode(
        saved.ino,
        mode,
        saved.uid,
        saved.gid,
        1,
        0,
        saved.size,
        saved.blocks,
        saved.mtime_ns,
        saved.mtime_ns,
        now,
        parent,
        saved.oid,
        layout=saved.layout,
        copy=saved.copy,
    )
    namespace.put_name(tx, parent, chosen, inode, inode.ino)
    namespace.touch(tx, namespace.get_directory(tx, parent), now)
    tx.add(keys.COUNTER_INODES, 1)
    put_bytes(tx, saved, inode)
    return path + b"/" + chosen, False, replaced


def _directory(tx: Transaction, parents: Sequence[bytes], saved: Saved) -> tuple[int, bytes]:
    """The directory of these names, made as far as it does not exist; another name where a file has
    one of them.
    """
    parent, path = ROOT_INO, b""
    for name in parents:
        ino = _find(tx, parent, name)
        while ino is not None and not namespace.get_inode(tx, ino).is_dir:
            name = name[: NAME_MAX - 4] + b".dir"
            ino = _find(tx, parent, name)
        if ino is None:
            now, ino = time.time_ns(), fresh_id(tx)
            mode, uid, gid = stat.S_IFDIR | 0o755, saved.uid, saved.gid
            namespace.create(
                tx, parent, name, Inode(ino, mode, uid, gid, 2, 0, 0, 0, now, now, now)
            )
        parent, path = ino, path + b"/" + name
    return parent, path


def _find(tx: ReadTransaction, parent: int, name: bytes) -> int | None:
    record = tx.get(keys.dentry(parent, name))
    return None if record is None else decode_dentry(record).ino
