"""A metadata directory made anew, of files that are known, servers and containers."""

import json
import os
import stat
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import trio

from aifs.check.repair import LOST_AND_FOUND
from aifs.check.salvage.containers import SavedContainers
from aifs.check.salvage.inventory import Saved
from aifs.check.salvage.tree import Directory, Named
from aifs.core import files
from aifs.core.tasks import first_error
from aifs.layout.interleaved import HEADER_BYTES, Interleaved, is_variable
from aifs.layout.striped import Striped
from aifs.meta import chunks, keys, namespace
from aifs.meta.chunks import Container
from aifs.meta.degraded import put_degraded
from aifs.meta.extents import put_extents
from aifs.meta.keys import ROOT_INO
from aifs.meta.kv import Transaction
from aifs.meta.lmdb_engine import LmdbEngine
from aifs.meta.records import Inode
from aifs.meta.servers import ServerRecord, mark_unprotected, put_servers
from aifs.store import directories
from aifs.store.owner import OwnerLock
from aifs.store.store import FORMAT

_BATCH = 256


@dataclass(frozen=True, slots=True)
class Plan:
    """A store as its metadata is going to tell it. ``next_id``: beyond all that it has ever used;
    ``first_seq``: the same of transactions."""

    uuid: str
    table: Mapping[int, ServerRecord]
    directories: Sequence[Directory]
    files: Sequence[Named]
    containers: SavedContainers
    next_id: int
    first_seq: int


async def build(meta: str, plan: Plan) -> None:
    """Make the metadata directory, which must be empty or missing; durable on return. If it fails
    nothing is left there.

    Raises StoreError, NoSpace, Unavailable.
    """
    files.make_dirs(meta)
    owner = OwnerLock(meta, "")
    try:
        await _write(meta, plan)
        directories.mark(meta, plan.uuid, "meta", 0)
    except BaseException as error:  # noqa: BLE001 (raised again, out of its group)
        directories.erase("meta", meta)
        raise first_error(error) from None
    finally:
        owner.release(orderly=True)


async def _write(meta: str, plan: Plan) -> None:
    engine = LmdbEngine(meta, first_seq=plan.first_seq)
    used = container_ends([named.saved for named in plan.files])
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.run)
            await engine.transact(_put_first, plan)
            await _put_all(engine, _put_directory, plan.directories)
            await _put_all(engine, put_container, [(plan.containers, *row) for row in used.items()])
            await _put_all(engine, _put_file, plan.files)
            nursery.cancel_scope.cancel()
        engine.close()
    except BaseException:
        engine.abandon()
        raise


async def _put_all(
    engine: LmdbEngine, put: Callable[[Transaction, Any], None], rows: Sequence[Any]
) -> None:
    def put_some(tx: Transaction, some: Sequence[Any]) -> None:
        for row in some:
            put(tx, row)

    for start in range(0, len(rows), _BATCH):
        await engine.transact(put_some, rows[start : start + _BATCH])
        await engine.barrier()


def container_ends(saved_files: Iterable[Saved]) -> dict[int, int]:
    """Where the last chunk of each container ends that one of these has."""
    ends: dict[int, int] = {}
    for saved in saved_files:
        for place in saved.places:
            end = place.offset + HEADER_BYTES + place.stored
            ends[place.container] = max(ends.get(place.container, 0), end)
    return ends


def _put_first(tx: Transaction, plan: Plan) -> None:
    now_s = time.time_ns() // 10**9
    # Closed in order, so that nothing is looked for in the last ids; of another boot, so that no
    # cache is trusted.
    superblock = {
        "format": FORMAT,
        "uuid": plan.uuid,
        "created_s": now_s,
        "clean": True,
        "boot": None,
        "rebuilt_s": now_s,
    }
    tx.put(keys.SUPERBLOCK, json.dumps(superblock).encode())
    tx.add(keys.COUNTER_IDS, plan.next_id)
    tx.add(keys.COUNTER_INODES, len(plan.directories) + len(plan.files))
    put_servers(tx, plan.table)


def _put_directory(tx: Transaction, directory: Directory) -> None:
    now = time.time_ns()
    name = directory.path.rpartition(b"/")[2]
    own = directory.ino == ROOT_INO or directory.path == b"/" + LOST_AND_FOUND
    uid, gid = (os.getuid(), os.getgid()) if own else (directory.uid, directory.gid)
    mode = stat.S_IFDIR | (0o700 if name == LOST_AND_FOUND and own else 0o755)
    inode = Inode(
        directory.ino,
        mode,
        uid,
        gid,
        directory.links,
        0,
        0,
        0,
        now,
        now,
        now,
        parent=directory.parent,
    )
    namespace.put_inode(tx, inode)
    if directory.ino != ROOT_INO:
        namespace.put_name(tx, directory.parent, name, inode, directory.ino)


def put_container(tx: Transaction, row: tuple[SavedContainers, int, int]) -> None:
    """Record a container, without its chunks yet, of which files have some up to a given end.

    Sealed: what lies behind the last one is nobody's.
    """
    containers, container, end = row
    layout = containers.layout_of(container)
    tx.put(keys.container(container), Container(layout, 0, 0).encode())
    if not layout.is_protected:
        mark_unprotected(tx, layout.servers)
    elif lost := containers.lost(container, end):
        put_degraded(tx, container, 0, lost)


def _put_file(tx: Transaction, named: Named) -> None:
    saved, now = named.saved, time.time_ns()
    mode = saved.mode if stat.S_ISREG(saved.mode) else stat.S_IFREG | 0o600
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
        named.parent,
        saved.oid,
        layout=saved.layout,
        copy=saved.copy,
    )
    namespace.put_name(tx, named.parent, named.name, inode, inode.ino)
    put_bytes(tx, saved, inode)


def put_bytes(tx: Transaction, saved: Saved, inode: Inode) -> None:
    """Record an inode, and all that belongs to its bytes."""
    namespace.put_inode(tx, inode)
    if isinstance(saved.layout, Striped):
        namespace.put_checksums(tx, saved.oid, saved.digests)
        if not saved.layout.is_protected:
            mark_unprotected(tx, saved.layout.servers)
        elif saved.lost:
            put_degraded(tx, saved.oid, saved.ino, saved.lost)
        if saved.dirty:
            tx.put(keys.dirty(saved.ino), b"")
    elif is_variable(saved.layout):
        put_extents(
            tx,
            {saved.oid: saved.extents},
            {extent.digest for extent in saved.extents if extent.shared},
        )
    elif isinstance(saved.layout, Interleaved):
        chunks.put_chunks(tx, saved.oid, saved.chunks)
    if saved.copy is not None and saved.layout is None:
        namespace.put_undrained(tx, inode, durable=True, now=time.time_ns())
    elif saved.copy is not None:
        namespace.put_copy(tx, saved.ino, saved.copy, undrained=False, durable=True, now=0)
