"""A store on disk: making one, opening one.

The metadata holds the store's identity and the table of its data servers and burst directories
(server_table); every directory carries the same identity in its marker.
"""

import json
import os
import stat
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field

import trio

from aifs.core import files
from aifs.core.budget import Budget
from aifs.core.config import Config, is_directory_source
from aifs.core.errors import StoreError, Unavailable
from aifs.core.kinds import is_path
from aifs.core.role import Role
from aifs.data.marker import FORMAT, NAME, read_marker
from aifs.data.patience import FOR_EVER
from aifs.data.servers import Servers
from aifs.data.storages import below
from aifs.meta import keys
from aifs.meta.keys import FIRST_FREE_ID, ROOT_INO
from aifs.meta.kv import Engine, ReadTransaction, Transaction
from aifs.meta.lmdb_database import BrokenDatabase
from aifs.meta.lmdb_engine import LmdbEngine
from aifs.meta.namespace import put_inode
from aifs.meta.records import Inode
from aifs.meta.servers import ServerRecord, put_servers, read_table
from aifs.peers.peers import Peers
from aifs.store import directories
from aifs.store.owner import OwnerLock
from aifs.store.ownership import Ownership, require_unused
from aifs.store.server_table import (
    ServerTable,
    adopt_domains,
    id_of,
    load_servers,
    require_registered,
)


@dataclass(slots=True)
class Store:
    """An open store."""

    config: Config
    uuid: str
    """Its identity, as in the markers of its servers."""
    clean: bool
    """It was closed in order, so nothing needs to be recovered."""
    same_boot: bool
    """The kernel that was running when it was last used is running still, with all that it had in
    its page cache.
    """
    engine: LmdbEngine
    servers: Servers
    table: ServerTable
    owner: OwnerLock
    ownership: Ownership
    role: Role = field(default_factory=Role)
    """Whether this host does the work of the whole store."""
    peers: Peers | None = None
    """The other hosts; None: the store has one."""

    def close(self, orderly: bool = True) -> None:
        """Blocks; the metadata is durable when it returns. The caller has stopped all use of the
        store.

        ``orderly``: all else is durable too. Raises Unavailable, with the store let go, if
        something acknowledged is not on stable storage.
        """
        if orderly:
            self.ownership.give_back()
        self.tell()
        stuck, waits_for = self.servers.close()
        try:
            self.engine.close()
        except BaseException:
            orderly = False
            raise
        finally:
            self.owner.release(orderly, stuck, waits_for)

    def tell(self) -> None:
        """Say in the owner's file what is waited for, for who unmounts."""
        with suppress(OSError):
            self.owner.tell(self.servers.describe_waiting())

    def abandon(self) -> None:
        """Let go without writing anything, as the death of the process would."""
        stuck, waits_for = self.servers.close()
        self.engine.abandon()
        self.owner.release(orderly=False, stuck=stuck, waits_for=waits_for)


# --- format ---------------------------------------------------------------------------------------


def format_store(config: Config, force: bool) -> str:
    """Make an empty store in the configured directories; returns its uuid. Blocks; durable when it
    returns.

    Without ``force`` all directories must be empty or missing; with it, stores in them are erased.
    Files that are not a store's are never erased. Raises StoreError, StoreBusy.
    """
    meta = config.meta.directory
    roles = [("meta", 0, meta)]
    roles += [("data", number, path) for number, path in enumerate(config.servers)]
    roles += [("burst", number, path) for number, path in enumerate(config.burst.directories)]
    directories.require_distinct([path for _, _, path in roles])
    for role, _, path in roles:
        directories.require_usable(role, path, force=force)
    files.make_dirs(meta)
    owner = OwnerLock(meta, "")
    try:
        require_unused(path for role, _, path in roles if role != "meta")
        for role, _, path in roles:
            if is_path(path):
                files.make_dirs(path)
            directories.erase(role, path)
        identity = str(uuid.uuid4())
        for role, number, path in roles[1:]:
            directories.mark(path, identity, role, number)
        domains = {place.path: place.domain for place in config.places}
        table = {
            id_of(role, number): ServerRecord(
                directories.recorded_path(config, path), domain=domains.get(path, "")
            )
            for role, number, path in roles[1:]
        }
        engine = LmdbEngine(meta)
        try:
            trio.run(engine.transact, _write_first_records, identity, table)
        finally:
            engine.close()
        # The marker of the metadata directory comes last: without it there is no store.
        directories.mark(meta, identity, "meta", 0)
    finally:
        owner.release(orderly=True)
    return identity


def _write_first_records(tx: Transaction, identity: str, table: dict[int, ServerRecord]) -> None:
    now = time.time_ns()
    superblock = {"format": FORMAT, "uuid": identity, "created_s": now // 10**9, "clean": True}
    tx.put(keys.SUPERBLOCK, json.dumps(superblock).encode())
    tx.add(keys.COUNTER_IDS, FIRST_FREE_ID)
    tx.add(keys.COUNTER_INODES, 1)
    root = Inode(ROOT_INO, 0o040755, os.getuid(), os.getgid(), 2, 0, 0, 0, now, now, now)
    root.parent, root.birth_ns = ROOT_INO, now
    put_inode(tx, root)
    put_servers(tx, table)


# --- open -----------------------------------------------------------------------------------------


def require_metadata(config: Config) -> None:
    """There is a directory for the metadata. Raises StoreError, which says what to do; OSError if
    it may not be seen.
    """
    meta, source = config.meta.directory, config.source
    with suppress(FileNotFoundError, NotADirectoryError):
        if stat.S_ISDIR(os.stat(meta).st_mode):
            return
    if any(
        os.path.lexists(os.path.join(path, NAME))
        for path in (*config.servers, *config.burst.directories)
    ):
        what = (
            "is missing, but other directories of the store are there; is its filesystem mounted?"
        )
        raise StoreError(f"{meta}: {what} If it is lost: aifs meta restore {source}")
    raise StoreError(f"{source}: there is no store; make one with: aifs format {source}")


async def open_store(
    config: Config,
    *,
    mountpoint: str = "",
    read_only: bool = False,
    adding: str = "",
    force: bool = False,
) -> Store:
    """Own and open a store, with its journal replayed. Raises StoreError, StoreBusy.

    ``adding``: a directory that the configuration may name though it is no part of the store yet.
    ``force``: whoever has claimed its directories is dead.

    Opening blocks the thread: it is done before anything else runs in it.
    """
    meta = config.meta.directory
    require_metadata(config)
    marker = read_marker(meta)
    owner = OwnerLock(meta, mountpoint)
    engine = servers = None
    try:
        # Whoever mounts waits; a command may take the time to look at everything.
        engine = LmdbEngine(meta, config.meta.commit_interval_s, thorough=not mountpoint)
        superblock, table = await _read_identity(engine, meta, config.source)
        if superblock["uuid"] != marker.store:
            raise StoreError(
                f"{meta}: the metadata belongs to another store than the directory's marker says"
            )
        if superblock["format"] != FORMAT:
            raise StoreError(
                f"{meta}: the store has format {superblock['format']!r}; this version knows "
                f"{FORMAT!r} alone"
            )
        elsewhere = {n: row.host for n, row in table.items() if row.host not in (0, engine.host)}
        paths = {
            number: below(config.source, record.path)
            for number, record in table.items()
            if number not in elsewhere
        }
        if not is_directory_source(config.source):
            require_registered(config, list(paths.values()), adding)
        await adopt_domains(config, engine)
        identity, budget = superblock["uuid"], Budget(config.memory.budget)
        servers = Servers(
            paths,
            identity,
            threads=config.data.threads,
            budget=budget,
            patience_s=config.data.timeout_s or FOR_EVER,
            lost_after_s=config.data.lost_after_s or FOR_EVER,
            hedge_s=config.data.hedge_s,
            elsewhere=elsewhere,
        )
        await load_servers(config, engine, servers, read_only)
        same_boot = superblock.get("boot") == files.boot_id()
        rows = ServerTable(config, identity, engine, servers)
        ownership = Ownership(meta, mountpoint, owner, servers)
        await ownership.take(force)
        return Store(
            config,
            identity,
            superblock["clean"],
            same_boot,
            engine,
            servers,
            rows,
            owner,
            ownership,
        )
    except BaseException as error:
        if servers is not None:
            servers.close()
        if engine is not None:
            engine.abandon()
        owner.release(orderly=True)
        if isinstance(error, BrokenDatabase):
            how = f"mv {meta} {meta}.damaged && aifs meta restore {config.source}"
            raise StoreError(f"{error}. Restore it from the last backup: {how}") from error
        raise


async def _read_identity(
    engine: Engine, meta: str, source: str
) -> tuple[dict, dict[int, ServerRecord]]:
    """The superblock, and the table of servers. Raises StoreError if they are damaged."""

    def read(tx: ReadTransaction) -> tuple[dict, dict[int, ServerRecord]]:
        superblock = json.loads(tx.get(keys.SUPERBLOCK) or b"")
        known = {key: superblock[key] for key in ("uuid", "format", "clean")}
        return known | {"boot": superblock.get("boot")}, read_table(tx)

    try:
        return await engine.view(read)
    except (ValueError, TypeError, KeyError, Unavailable) as error:
        raise StoreError(
            f"{meta}: the store's own records are damaged ({error}). Restore them from the last "
            f"backup: mv {meta} {meta}.damaged && aifs meta restore {source}"
        ) from error


async def set_clean(engine: Engine, clean: bool) -> None:
    """Record whether the store is closed in order, durably when this returns."""

    def update(tx: Transaction) -> None:
        superblock = json.loads(tx.get(keys.SUPERBLOCK) or b"")
        superblock |= {"clean": clean, "boot": files.boot_id()}
        tx.put(keys.SUPERBLOCK, json.dumps(superblock).encode())

    await engine.transact(update)
    await engine.barrier()
