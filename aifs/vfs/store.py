"""A store on disk: making one, opening one, adding data servers to it.

The metadata holds the store's identity and the table of its data servers and burst directories; every directory
carries the same identity in its marker. The table is what counts: a configuration names directories when a store is
made. Format 2 has burst directories in the table; format 1 knew them by their markers alone.
"""

import json
import os
import time
import uuid
from dataclasses import dataclass
from datetime import datetime, timezone

import trio

from aifs.core import files
from aifs.core.budget import Budget
from aifs.core.config import Config, is_directory_source
from aifs.core.errors import StoreError
from aifs.core.log import logger
from aifs.data.marker import FORMAT as MARKER_FORMAT
from aifs.data.marker import NAME as MARKER_NAME
from aifs.data.marker import Marker, read_marker, write_marker
from aifs.data.server import DataServer
from aifs.data.servers import Servers
from aifs.layout.placement import BURST_FIRST
from aifs.meta import keys
from aifs.meta.keys import FIRST_FREE_ID, ROOT_INO
from aifs.meta.kv import Engine, ReadTransaction, Transaction
from aifs.meta.lmdb_engine import LmdbEngine
from aifs.meta.namespace import put_inode
from aifs.meta.records import Inode, decode_burst
from aifs.vfs.owner import NAME as OWNER_NAME
from aifs.vfs.owner import OwnerLock

FORMAT = 2

_log = logger(__name__)

LOST_AND_FOUND = "lost+found"
"""Left alone in every directory: the filesystem's own below a mount point, and what fsck has moved aside."""

_OWN_NAMES = {
    "meta": {OWNER_NAME, "data.mdb", "journal.0", "journal.1"},
    "data": {"objects"},
    "burst": {"objects"},
}


@dataclass(slots=True)
class Store:
    """An open store.

    ``clean``: it was closed in order, so nothing needs to be recovered. ``same_boot``: the kernel that was running when it
    was last used is running still, with all that it had in its page cache.
    """

    config: Config
    uuid: str
    clean: bool
    same_boot: bool
    engine: LmdbEngine
    servers: Servers
    owner: OwnerLock

    def close(self, orderly: bool = True) -> None:
        """Blocks; the metadata is durable when it returns. The caller has stopped all use of the store.

        ``orderly``: all else is durable too. Raises Unavailable, with the store let go, if something acknowledged
        is not on stable storage.
        """
        self.servers.close()
        try:
            self.engine.close()
        except BaseException:
            orderly = False
            raise
        finally:
            self.owner.release(orderly)

    def abandon(self) -> None:
        """Let go without writing anything, as the death of the process would."""
        self.servers.close()
        self.engine.abandon()
        self.owner.release(orderly=False)


# --- format ------------------------------------------------------------------------------------------


def format_store(config: Config, force: bool) -> str:
    """Make an empty store in the configured directories; returns its uuid. Blocks; durable when it returns.

    Without ``force`` all directories must be empty or missing; with it, stores in them are erased. Files that
    are not a store's are never erased. Raises StoreError, StoreBusy.
    """
    meta = config.meta.directory
    roles = [("meta", 0, meta)]
    roles += [("data", number, path) for number, path in enumerate(config.servers)]
    roles += [("burst", number, path) for number, path in enumerate(config.burst.directories)]
    _require_distinct([path for _, _, path in roles])
    for role, _, path in roles:
        _require_usable(role, path, force)
    files.make_dirs(meta)
    owner = OwnerLock(meta, "")
    try:
        for role, _, path in roles:
            files.make_dirs(path)
            _erase(role, path)
        identity = str(uuid.uuid4())
        created = datetime.now(timezone.utc).isoformat(timespec="seconds")
        for role, number, path in roles[1:]:
            write_marker(path, Marker(MARKER_FORMAT, identity, role, number, created))
        paths = {_id_of(role, number): _recorded_path(config, path) for role, number, path in roles[1:]}
        engine = LmdbEngine(meta)
        try:
            trio.run(engine.transact, _write_first_records, identity, paths)
        finally:
            engine.close()
        # The marker of the metadata directory comes last: without it there is no store.
        write_marker(meta, Marker(MARKER_FORMAT, identity, "meta", 0, created))
    finally:
        owner.release(orderly=True)
    return identity


def _write_first_records(tx: Transaction, identity: str, paths: dict[int, str]) -> None:
    now = time.time_ns()
    superblock = {"format": FORMAT, "uuid": identity, "created_s": now // 10**9, "clean": True}
    tx.put(keys.SUPERBLOCK, json.dumps(superblock).encode())
    tx.add(keys.COUNTER_IDS, FIRST_FREE_ID)
    tx.add(keys.COUNTER_INODES, 1)
    root = Inode(ROOT_INO, 0o040755, os.getuid(), os.getgid(), 2, 0, 0, 0, now, now, now, parent=ROOT_INO)
    put_inode(tx, root)
    for number, path in paths.items():
        _put_server(tx, number, path)


def _server_ids(tx: ReadTransaction) -> list[int]:
    return [keys.number(key) for key, _ in tx.range(*keys.all_of(b"s"))]


def _id_of(role: str, number: int) -> int:
    return BURST_FIRST + number if role == "burst" else number


def _put_server(tx: Transaction, number: int, path: str) -> None:
    tx.put(keys.server(number), json.dumps({"path": path}).encode())


def _require_distinct(paths: list[str]) -> None:
    seen: dict[str, str] = {}
    for path in paths:
        real = os.path.realpath(path)
        for other, named in seen.items():
            if os.path.commonpath([real, other]) in (real, other):
                raise StoreError(f"{path}: is, holds, or lies in {named}; each needs a directory of its own")
        seen[real] = path


def _foreign(role: str, path: str) -> list[str]:
    """Names in ``path`` that a directory of this role does not have."""
    return sorted(set(os.listdir(path)) - {MARKER_NAME, LOST_AND_FOUND} - _OWN_NAMES[role])


def _require_usable(role: str, path: str, force: bool) -> None:
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise StoreError(f"{path}: is not a directory; name one for the {role} files") from None
    if not set(names) - {LOST_AND_FOUND}:
        return
    foreign = _foreign(role, path)
    if foreign:
        raise StoreError(f"{path}: holds {foreign[0]!r}, which is not a store's; use an empty directory")
    if not force:
        raise StoreError(f"{path}: holds a store already; --force erases it and all files in it")


def _erase(role: str, path: str) -> None:
    for name in _OWN_NAMES[role] | {MARKER_NAME}:
        own = os.path.join(path, name)
        for directory, _, names in os.walk(own, topdown=False):
            for inner in names:
                files.unlink(os.path.join(directory, inner))
            files.remove_dir(directory)
        if os.path.lexists(own) and name != OWNER_NAME:
            files.unlink(own)
    files.sync_dir(path)


# --- open --------------------------------------------------------------------------------------------


async def open_store(
    config: Config, *, mountpoint: str = "", read_only: bool = False, adding: str = ""
) -> Store:
    """Own and open a store, with its journal replayed. Raises StoreError, StoreBusy.

    ``adding``: a directory that the configuration may name though it is no part of the store yet.

    Opening blocks the thread: it is done before anything else runs in it.
    """
    meta = config.meta.directory
    if not os.path.isdir(meta):
        raise StoreError(f"{config.source}: there is no store; make one with: aifs format {config.source}")
    marker = read_marker(meta)
    owner = OwnerLock(meta, mountpoint)
    engine = servers = None
    try:
        engine = LmdbEngine(meta, config.meta.commit_interval_s)
        superblock, paths = await _read_identity(engine, meta)
        if superblock["uuid"] != marker.store:
            raise StoreError(f"{meta}: the metadata belongs to another store than the directory's marker says")
        if superblock["format"] == 1:
            paths |= await _upgrade(engine, config, marker.store)
        elif superblock["format"] != FORMAT:
            raise StoreError(f"{meta}: the store has format {superblock['format']}; this version knows 1 and {FORMAT}")
        table = {number: os.path.join(config.source, path) for number, path in paths.items()}
        _require_registered(config, table, adding)
        budget = Budget(config.memory.budget)
        servers = Servers(table, superblock["uuid"], threads=config.data.threads, budget=budget)
        await _check_burst(engine, servers, read_only)
        servers.check_identity(read_only=read_only)
        same_boot = superblock.get("boot") == files.boot_id()
        return Store(config, superblock["uuid"], superblock["clean"], same_boot, engine, servers, owner)
    except BaseException:
        if servers is not None:
            servers.close()
        if engine is not None:
            engine.abandon()
        owner.release(orderly=True)
        raise


async def _read_identity(engine: Engine, meta: str) -> tuple[dict, dict[int, str]]:
    """The superblock, and the path of each server. Raises StoreError if they are damaged."""

    def read(tx: ReadTransaction) -> tuple[dict, dict[int, str]]:
        superblock = json.loads(tx.get(keys.SUPERBLOCK) or b"")
        servers = {keys.number(key): json.loads(value)["path"] for key, value in tx.range(*keys.all_of(b"s"))}
        known = {key: superblock[key] for key in ("uuid", "format", "clean")}
        return known | {"boot": superblock.get("boot")}, servers

    try:
        return await engine.view(read)
    except (ValueError, TypeError, KeyError) as error:
        raise StoreError(f"{meta}: the store's own records are damaged; restore the directory from a copy") from error


async def _upgrade(engine: Engine, config: Config, identity: str) -> dict[int, str]:
    """Make a store of format 1 one of format 2: its burst directories, of which it made no use, enter the table.

    Returns their paths, as recorded, by id. Durable on return.
    """
    paths = {}
    for path in config.burst.directories:
        try:
            marker = read_marker(path)
            if (marker.store, marker.role) != (identity, "burst"):
                raise StoreError(f"{path}: its marker says {marker.role} of store {marker.store}")
        except StoreError as error:
            _log.warning("a burst directory is not used: %s", error)
        else:
            paths[_id_of("burst", marker.id)] = _recorded_path(config, path)

    def upgrade(tx: Transaction) -> None:
        for number, path in paths.items():
            _put_server(tx, number, path)
        superblock = json.loads(tx.get(keys.SUPERBLOCK)) | {"format": FORMAT}
        tx.put(keys.SUPERBLOCK, json.dumps(superblock).encode())

    await engine.transact(upgrade)
    await engine.barrier()
    _log.info("the store was upgraded from format 1 to %d, with %d burst directories", FORMAT, len(paths))
    return paths


async def _check_burst(engine: Engine, servers: Servers, read_only: bool) -> None:
    """Each burst directory is there, or is done without: its cached copies are no loss.

    Raises StoreError if files of the store lie there alone.
    """
    for server in servers.burst():
        try:
            server.identify(read_only)
        except StoreError as error:
            count = await engine.view(_count_undrained, server)
            if count:
                stake = f"{count} files have their newest bytes there alone"
                advice = "mount its filesystem or put the directory back"
                raise StoreError(f"{error}; {stake}: {advice}") from error
            _log.warning("%s; only cached copies lie there, so the store does without it", error)
            servers.drop(server.id)


def _count_undrained(tx: ReadTransaction, server: DataServer) -> int:
    records = map(decode_burst, (value for _, value in tx.range(*keys.all_of(b"b"))))
    return sum(record.undrained for record in records if record.server == server.id)


def _require_registered(config: Config, table: dict[int, str], adding: str) -> None:
    if is_directory_source(config.source):
        return
    known = {os.path.realpath(path) for path in (*table.values(), *filter(None, (adding,)))}
    named = [("server", "", path) for path in config.servers]
    named += [("burst directory", "--burst ", path) for path in config.burst.directories]
    for kind, option, path in named:
        if os.path.realpath(path) not in known:
            raise StoreError(
                f"{config.source}: {kind} {path} is not part of the store; add it with: "
                f"aifs server add {option}{config.source} {path}"
            )


async def set_clean(engine: Engine, clean: bool) -> None:
    """Record whether the store is closed in order, durably when this returns."""

    def update(tx: Transaction) -> None:
        superblock = json.loads(tx.get(keys.SUPERBLOCK))
        superblock |= {"clean": clean, "boot": files.boot_id()}
        tx.put(keys.SUPERBLOCK, json.dumps(superblock).encode())

    await engine.transact(update)
    await engine.barrier()


# --- add a server ------------------------------------------------------------------------------------


def add_server(config: Config, directory: str, role: str = "data") -> int:
    """Add a directory to a store that is not mounted; returns its id. Blocks; durable when it returns."""

    async def add() -> int:
        store = await open_store(config, adding=directory)
        try:
            return await register_server(store, directory, role)
        finally:
            store.close()

    return trio.run(add)


async def register_server(store: Store, directory: str, role: str = "data") -> int:
    """Make ``directory`` a data server ('data') or burst directory ('burst') of the open store; returns its id.

    New files use it from now on. Durable when this returns. Raises StoreError if it is not an empty directory.
    """
    directory = os.path.abspath(directory)
    _require_distinct([directory, store.config.meta.directory, *(s.path for s in store.servers.values())])
    _require_usable(role, directory, force=False)
    # Of the table, not of those in use: one that the store does without keeps its number.
    table = await store.engine.view(_server_ids)
    first = _id_of(role, 0)
    server_id = max((number for number in table if (number >= BURST_FIRST) == (role == "burst")), default=first - 1) + 1
    number = server_id - first
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    files.make_dirs(directory)
    write_marker(directory, Marker(MARKER_FORMAT, store.uuid, role, number, created))
    await store.engine.transact(_put_server, server_id, _recorded_path(store.config, directory))
    store.servers.add(server_id, directory)  # before anything waits: the next one takes the next number
    await store.engine.barrier()
    return server_id


def _recorded_path(config: Config, path: str) -> str:
    """Relative for what lies below a source directory, so that the whole can be moved."""
    below = is_directory_source(config.source) and os.path.commonpath([config.source, path]) == config.source
    return os.path.relpath(path, config.source) if below else path
