"""A store on disk: making and opening it. The metadata have its identity and table of servers
(server_table); each directory has the identity in its marker."""

import json
import os
import stat
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from aifs.core import clock, faults, files
from aifs.core.budget import Budget
from aifs.core.config import Config, is_directory_source
from aifs.core.errors import StoreError, Unavailable
from aifs.core.kinds import ServerPlace
from aifs.core.names import is_path
from aifs.core.upkeep import Role
from aifs.data.marker import FORMAT, NAME, read_marker
from aifs.data.patience import FOR_EVER
from aifs.data.servers import Servers
from aifs.data.storages import below
from aifs.layout.placement import LOST
from aifs.meta import keys
from aifs.meta.hosts import HostRecord, find_host, put_host, put_name
from aifs.meta.keys import FIRST_FREE_ID, ROOT_INO
from aifs.meta.kv import Engine, ReadTransaction, Transaction
from aifs.meta.lmdb_database import BrokenDatabase
from aifs.meta.lmdb_engine import LmdbEngine
from aifs.meta.namespace import put_inode
from aifs.meta.records import Inode
from aifs.meta.servers import ServerRecord, put_servers, read_table
from aifs.peers.peers import Alone, Peers
from aifs.store import directories
from aifs.store.owner import OwnerLock
from aifs.store.ownership import Metadata, Ownership, StoreRight, require_unused
from aifs.store.server_table import (
    ServerTable,
    adopt_places,
    id_of,
    load_servers,
    note_elsewhere,
    register_burst,
    require_registered,
)

if TYPE_CHECKING:
    from aifs.store.hosts import Hosts

_MADE = faults.declare("store.format.made", "a new store has its records; nothing is marked")

_BEYOND = b"\xff" * 512
"""Larger than all keys."""


@dataclass(slots=True)
class Store:
    """An open store."""

    config: Config
    uuid: str
    """Its identity, as in the markers of its servers."""
    clean: bool
    """It was closed in order, so nothing needs to be recovered."""
    same_boot: bool
    """The kernel of its last use is still running, with its page cache."""
    engine: Engine
    servers: Servers
    table: ServerTable
    owner: OwnerLock
    ownership: StoreRight
    role: Role = field(default_factory=Role)
    """Whether this host does the work of the whole store."""
    peers: Peers = field(default_factory=Alone)
    """The connections to other hosts."""
    hosts: "Hosts | None" = None
    """All hosts that have it mounted; None: it has one."""

    def close(self, orderly: bool = True) -> None:
        """Close an unused store. Blocks; the metadata are durable on return. ``orderly``: all else
        is, too. Raises Unavailable, with the store let go, if an acknowledged change is not on
        stable storage."""
        if orderly:
            self.ownership.give_back()
        self.tell()
        self.peers.close()
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
            self.owner.tell(self.ownership.doubt or self.servers.describe_waiting())

    def abandon(self) -> None:
        """Let go without writing anything, as the death of the process would."""
        self.peers.close()
        stuck, waits_for = self.servers.close()
        self.engine.abandon()
        self.owner.release(orderly=False, stuck=stuck, waits_for=waits_for)


# --- format ---------------------------------------------------------------------------------------


def format_store(config: Config, force: bool) -> str:
    """Make an empty store in the configured directories, and database; returns its uuid. Blocks;
    durable on return.

    Without ``force`` they must be empty or missing; with it, stores there are erased, never other
    files. Raises StoreError, StoreBusy.
    """
    meta_role = "replica" if config.is_cluster else "meta"
    roles = [(meta_role, 0, config.meta.directory)]
    roles += [("data", number, path) for number, path in enumerate(config.servers)]
    roles += [("burst", number, path) for number, path in enumerate(config.burst.directories)]
    directories.require_distinct([path for _, _, path in roles])
    for role, _, path in roles:
        directories.require_usable(role, path, force=force)
    if not force:
        directories.require_empty_source(config)
    else:
        erased = _store_in_database(config)
        for role, _, path in roles:
            directories.require_erasable(path, erased)
    owner: OwnerLock | None = None
    identity = str(uuid.uuid4())
    try:
        with _making(config, force) as put:
            files.make_dirs(config.meta.directory)
            owner = OwnerLock(config.meta.directory, "")
            _format(config, roles, identity, put)
        faults.reach(_MADE)
        # The markers come when a database has the store, so that who asks to erase what a crash has
        # left is told by it that all of it is of that store. That of the metadata directory is the
        # last one: without it there is no store.
        for role, number, path in [*_registered(config, roles), roles[0]]:
            directories.mark(path, identity, role, number, config.meta.url)
    finally:
        if owner is not None:
            owner.release(orderly=True)
    return identity


_Role = tuple[str, int, str]
"""What a directory is for, its number within that, and its path."""

_Put = Callable[[Iterable[tuple[bytes, bytes]]], None]
"""Puts the pairs of the map into a database."""


def _making(config: Config, force: bool) -> AbstractContextManager[_Put | None]:
    """See cluster.making; None for a store of one host."""
    if not config.is_cluster:
        return nullcontext()
    from aifs.store.cluster import making

    return making(config, force)


def _store_in_database(config: Config) -> str:
    """The uuid of a store made anew there, unused by hosts; or ""."""
    if not config.is_cluster:
        return ""
    from aifs.store.cluster import find_unused

    return find_unused(config)


def _registered(config: Config, roles: list[_Role]) -> list[_Role]:
    """Those in the table; with many hosts, each adds its burst directories when mounting."""
    return [each for each in roles[1:] if each[0] == "data" or not config.is_cluster]


def _format(config: Config, roles: list[_Role], identity: str, put: _Put | None) -> None:
    """All except markers."""
    meta_role, _, meta = roles[0]
    require_unused(path for _, _, path in roles[1:])
    for role, _, path in roles:
        if is_path(path):
            files.make_dirs(path)
        directories.erase(role, path)
    said = {place.path: place for place in config.places}
    table = {
        id_of(role, number): ServerRecord(
            directories.recorded_path(config, path),
            domain=place.domain,
            storage_class=place.storage_class or "",
        )
        for role, number, path in _registered(config, roles)
        for place in [said.get(path, ServerPlace(path))]
    }
    engine = LmdbEngine(meta)
    try:
        trio.run(engine.transact, _write_first_records, identity, table)
        if put is not None:
            put(trio.run(engine.view, all_pairs))
    finally:
        engine.close()
    if put is not None:
        directories.erase(meta_role, meta)  # the first mount makes the replica


def all_pairs(tx: ReadTransaction) -> list[tuple[bytes, bytes]]:
    """The whole map, in order."""
    return list(tx.range(b"\0", _BEYOND))


def _write_first_records(tx: Transaction, identity: str, table: dict[int, ServerRecord]) -> None:
    now = clock.kernel_ns()
    superblock = {"format": FORMAT, "uuid": identity, "created_s": now // 10**9, "clean": True}
    tx.put(keys.SUPERBLOCK, json.dumps(superblock).encode())
    tx.add(keys.COUNTER_IDS, FIRST_FREE_ID)
    tx.add(keys.COUNTER_INODES, 1)
    root = Inode.new(ROOT_INO, 0o040755, os.getuid(), os.getgid(), now, nlink=2, birth_ns=now)
    root.parent = ROOT_INO
    put_inode(tx, root)
    put_servers(tx, table)


# --- open -----------------------------------------------------------------------------------------


def require_metadata(config: Config) -> None:
    """Require a metadata directory. Raises StoreError, with advice; OSError if it may not be
    seen."""
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


class _LocalMetadata:
    """In the metadata directory, locked, with all directories of the store claimed."""

    def __init__(self, config: Config, mountpoint: str) -> None:
        require_metadata(config)
        self._config = config
        self._mountpoint = mountpoint
        meta = config.meta.directory
        marker = read_marker(meta)
        if marker.role != "meta":
            raise StoreError(
                f"{meta}: is a replica of metadata in a database, and no store of its own; set "
                "meta.engine to postgresql"
            )
        self.store, self.where = marker.store, meta
        self.hosts: Hosts | None = None
        self.remedy = (
            f"Restore it from the last backup: mv {meta} {meta}.damaged && aifs meta restore "
            f"{config.source}"
        )

    async def open(self) -> LmdbEngine:
        # Whoever mounts waits; a command may take the time to look at everything.
        meta = self._config.meta
        return LmdbEngine(meta.directory, meta.commit_interval_s, thorough=not self._mountpoint)

    def give_up(self, engine: Engine) -> None:
        engine.abandon()

    def right(self, owner: OwnerLock, servers: Servers) -> StoreRight:
        return Ownership(self._config.meta.directory, self._mountpoint, owner, servers)


def find_metadata(
    config: Config, mountpoint: str = "", alone: bool = False, goes_on: bool = False
) -> Metadata:
    """Find a store's metadata. Blocks; changes nothing. Raises StoreError, with advice."""
    if config.is_cluster:
        # It needs packages that a store of one host does not.
        from aifs.store.cluster import ClusterMetadata

        return ClusterMetadata(config, mountpoint, alone, goes_on)
    return _LocalMetadata(config, mountpoint)


async def open_store(
    config: Config,
    *,
    mountpoint: str = "",
    read_only: bool = False,
    adding: str = "",
    force: bool = False,
    alone: bool = False,
    goes_on: bool = False,
) -> Store:
    """Own and open a store, its journal replayed. Blocks: called before anything else runs. Raises
    StoreError, StoreBusy.

    ``adding``: a directory that the configuration may name before it belongs to the store.
    ``force``: the process that claimed its directories is dead. ``alone``: no other host may use
    the store. ``goes_on``: with the mount of a daemon that has died.
    """
    metadata = find_metadata(config, mountpoint, alone, goes_on)
    meta = config.meta.directory
    files.make_dirs(meta)
    owner = OwnerLock(meta, mountpoint)
    engine = servers = None
    try:
        engine = await metadata.open()
        identity, clean, boot, copying = await _read_identity(engine, metadata)
        if config.is_cluster:
            table = await engine.view(read_table)
            named = [below(config.source, record.path) for record in table.values()]
            require_registered(config, [*named, *config.burst.directories], adding)
            await register_burst(config, engine, identity)
        if engine.host:  # also of a command: what that leaves is this host's
            await engine.transact(put_name, config.host.name)
        table = await engine.view(read_table)
        elsewhere = {n: row.host for n, row in table.items() if row.host not in (0, engine.host)}
        paths = {
            number: below(config.source, record.path)
            for number, record in table.items()
            if number not in elsewhere
        }
        if not is_directory_source(config.source):
            require_registered(config, list(paths.values()), adding)
        await adopt_places(config, engine)
        servers = Servers(
            paths,
            identity,
            threads=config.data.threads,
            budget=Budget(config.memory.budget),
            patience_s=config.data.timeout_s or FOR_EVER,
            lost_after_s=config.data.lost_after_s or FOR_EVER,
            hedge_s=config.data.hedge_s,
            elsewhere=elsewhere,
        )
        if config.is_cluster:
            engine.listen(partial(note_elsewhere, servers, engine.host))
        await load_servers(config, engine, servers, read_only)
        if not config.is_cluster:
            _require_not_in_database(config.source, servers, copying)
        rows = ServerTable(config, identity, engine, servers)
        right = metadata.right(owner, servers)
        await right.take(force)
        same_boot = boot == files.boot_id()
        store = Store(config, identity, clean, same_boot, engine, servers, rows, owner, right)
        if (hosts := metadata.hosts) is not None:
            store.hosts, store.role, store.peers = hosts, hosts.role, hosts.peers
        return store
    except BaseException as error:
        if servers is not None:
            servers.close()
        if engine is not None:
            metadata.give_up(engine)
        owner.release(orderly=True)
        if isinstance(error, BrokenDatabase):
            raise StoreError(f"{error}. {metadata.remedy}") from error
        raise


@asynccontextmanager
async def used_alone(
    config: Config, force: bool, abandons: Callable[[BaseException], bool]
) -> AsyncIterator[Store]:
    """A store that no other host uses, opened, until the block ends. ``abandons``: whether nothing
    is written any more after this error of the block. Raises as ``open_store``."""
    store = await open_store(config, force=force, alone=True)
    failure: BaseException | None = None
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.engine.run)
            nursery.start_soon(store.ownership.run)
            try:
                yield store
            except BaseException as error:  # noqa: BLE001 (raised again, out of the nursery)
                failure = error
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure
    except BaseException as raised:
        if abandons(raised):
            store.abandon()
        else:
            store.close()
        raise
    store.close()


def _require_not_in_database(source: str, servers: Servers, copying: str) -> None:
    """Require that the markers name no database; ``copying`` (where the metadata were being
    copied): all servers', see copying.py. Raises StoreError."""
    for server in servers.capacity():
        if server.database:
            raise StoreError(
                f"{source}: the metadata of this store are in {server.database}, as {server.name} "
                f"({server.address}) says: use a SOURCE with meta.engine postgresql"
            )
        if copying and server.standing != LOST and (server.absent or server.missing):
            raise StoreError(
                f"{source}: its metadata were being copied, here or to {copying}, and {server.name}"
                f" ({server.address}), which must say which of both count, is not there"
            )


def require_current(superblock: Mapping[str, Any], where: str) -> None:
    """Require this format of metadata, and that they are the store's. ``where``: their place.
    Raises StoreError."""
    if (form := superblock.get("format", FORMAT)) != FORMAT:
        raise StoreError(
            f"{where}: the store has format {form!r}; this version knows {FORMAT!r} alone"
        )
    if moved := superblock.get("moved"):
        raise StoreError(
            f"{where}: the metadata of this store are in {moved} now (aifs meta copy); these are "
            "what they were, and can be deleted"
        )


async def _read_identity(engine: Engine, metadata: Metadata) -> tuple[str, bool, str | None, str]:
    """The store's uuid; whether this host closed it in order, and its boot then; where its metadata
    were being copied, or "". Raises StoreError if damaged, or unexpected."""

    def read(tx: ReadTransaction) -> tuple[dict[str, Any], bool, str | None]:
        superblock = json.loads(tx.get(keys.SUPERBLOCK) or b"")
        read_table(tx)
        clean, boot = superblock["clean"], superblock.get("boot")
        if engine.host:
            host = find_host(tx, engine.host)
            clean, boot = (host.clean, host.boot) if host is not None else (True, None)
        return superblock, clean, boot

    try:
        superblock, clean, boot = await engine.view(read)
        identity, _ = superblock["uuid"], superblock["format"]
    except (ValueError, TypeError, KeyError, Unavailable) as error:
        raise StoreError(
            f"{metadata.where}: the store's own records are damaged ({error}). {metadata.remedy}"
        ) from error
    if identity != metadata.store:
        raise StoreError(
            f"{metadata.where}: the metadata belongs to another store than the directory's marker "
            "says"
        )
    require_current(superblock, metadata.where)
    return identity, clean, boot, superblock.get("copying", "")


async def change_superblock(engine: Engine, **fields: object) -> None:
    """These fields have other values, durably on return; None: they are gone."""

    def change(tx: Transaction) -> None:
        superblock = json.loads(tx.get(keys.SUPERBLOCK) or b"{}") | fields
        kept = {name: value for name, value in superblock.items() if value is not None}
        tx.put(keys.SUPERBLOCK, json.dumps(kept).encode())

    await engine.transact(change)
    await engine.barrier()


async def set_clean(store: Store, clean: bool) -> None:
    """Record whether this host has closed the store in order, durably when this returns."""

    def update(tx: Transaction) -> None:
        if tx.host:
            host = HostRecord(store.config.host.name, clean, files.boot_id())
            put_host(tx, tx.host, host)
        else:
            superblock = json.loads(tx.get(keys.SUPERBLOCK) or b"")
            superblock |= {"clean": clean, "boot": files.boot_id()}
            tx.put(keys.SUPERBLOCK, json.dumps(superblock).encode())

    await store.engine.transact(update)
    await store.engine.barrier()
