"""Moving the metadata of a store from one host's directory into a database, and back: ``aifs meta
copy``. The bytes on the data servers stay where they are.

The markers of the data servers tell which place counts: they name the database, or none. A
directory counts if no marker names a database, a database if one does. So one write switches: the
first marker changed on the way into a database, the last one on the way back. ``copying`` in a
directory's superblock means that all servers have to be asked, ``moved`` in the old place's that it
never counts again. docs/design/moving.md has the crash table.
"""

import json
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import trio

from aifs.core import faults, files
from aifs.core.config import Config
from aifs.core.errors import StoreBusy, StoreError
from aifs.core.tasks import first_error
from aifs.data.marker import NAME as MARKER
from aifs.data.marker import Marker, read_marker
from aifs.data.patience import Patience, ask_all
from aifs.data.server import name_of, role_of
from aifs.data.storage import ASIDE, BACKUP
from aifs.data.storages import below, storage_at
from aifs.layout.placement import BURST_FIRST, LOST
from aifs.meta import chunks, keys
from aifs.meta.crossing import Crossing, Pair, Tally
from aifs.meta.hosts import HostRecord, decode_host
from aifs.meta.hosts import name_of as host_name
from aifs.meta.kv import Engine, ReadTransaction
from aifs.meta.lmdb_engine import LmdbEngine
from aifs.meta.memtable import Writes
from aifs.meta.records import decode_burst
from aifs.meta.replicated import blocking
from aifs.meta.replicated.blocking import BlockingDatabase, Numbering
from aifs.meta.servers import ServerRecord, read_table
from aifs.meta.slices import read_slice
from aifs.store import directories
from aifs.store.cluster import find_store, require_replica
from aifs.store.owner import NAME as OWNER
from aifs.store.owner import OwnerLock
from aifs.store.ownership import end_rights
from aifs.store.restore import FoundBackups, beyond_backups, load
from aifs.store.server_table import id_of
from aifs.store.store import Store, change_superblock, require_current, used_alone

_ANSWER_S = 30.0
_SLICE = 2048
_RECORD_BYTES = 100
"""What a record takes, about, with its key."""

_END = b"\xff" * 512

NOTED = faults.declare("meta.copy.noted", "the directory says that its metadata are being copied")
FILLED = faults.declare(
    "meta.copy.filled", "the new place has all records, verified; the old one counts"
)
MARKED = faults.declare("meta.copy.marked", "a data server's marker has been changed")
DECIDED = faults.declare(
    "meta.copy.decided", "the new place counts; burst directories are as they were"
)
TIDIED = faults.declare("meta.copy.tidied", "burst directories are made anew; no record says so")

Table = dict[int, ServerRecord]

Show = Callable[[int, int], None]
"""Bytes that are copied, and about how many there are."""


@dataclass(slots=True)
class Copied:
    """What was copied. ``records`` is 0 if it had been, and only what was left was done."""

    records: int = 0
    bytes: int = 0
    digest: str = ""
    """As Tally.digest, of the new place, read again."""


def copy_metadata(old: Config, new: Config, show: Show) -> Copied:
    """Make the place ``new``, without a store, have the metadata of ``old``, and be the store.
    Blocks. The next call repeats, or finishes, an interrupted one. Raises StoreError, StoreBusy:
    then ``old`` is the store as before. NoSpace, Unavailable."""
    if old.is_cluster == new.is_cluster:
        both = "in a database" if old.is_cluster else "in a directory of one host"
        raise StoreError(
            f"{old.source} and {new.source}: the metadata of both are {both}; they are copied from "
            "a directory into a database (meta.engine postgresql), or back"
        )
    directories.require_distinct([old.meta.directory, new.meta.directory])
    return trio.run(_copy, old, new, show)


async def _copy(old: Config, new: Config, show: Show) -> Copied:
    store, markers = _read_markers(new)
    in_database = any(marker.database for marker in markers.values())
    place: _Directory | _Database = (_Database if new.is_cluster else _Directory)(old, new, store)
    copied = Copied()
    if in_database == new.is_cluster:
        await place.require_unfinished()
    else:
        await place.require_free()
        async with used_alone(old, False, _is_crash) as opened:
            if opened.uuid != store:
                raise StoreError(
                    f"{new.source}: its data servers are of store {store}, and {old.source} is "
                    f"store {opened.uuid}; both must name the same servers"
                )
            await _require_quiet(opened)
            table = _same_servers(await opened.engine.view(read_table), new, markers)
            await _seal(opened.engine)
            copied = await place.fill(opened, table, show)
            faults.reach(FILLED)
            _mark_servers(new, markers)
    _mark_servers(new, markers)  # what was interrupted on the way
    faults.reach(DECIDED)
    await place.finish()
    return copied


# --- what must hold -------------------------------------------------------------------------------


def _is_crash(error: BaseException) -> bool:
    return isinstance(first_error(error), faults.SimulatedCrash)


def _read_markers(config: Config) -> tuple[str, dict[str, Marker]]:
    """The uuid of the data servers' store, and their markers, by path. Raises StoreError unless all
    agree."""
    places = [storage_at(path) for path in config.servers]
    answers = ask_all([(Patience(), place.read_marker, ()) for place in places], _ANSWER_S)
    markers: dict[str, Marker] = {}
    for path, answer in zip(config.servers, answers, strict=True):
        if isinstance(answer, StoreError | OSError):
            raise StoreError(f"{config.source}: {answer}")
        if not isinstance(answer, Marker):
            raise answer
        markers[path] = answer
    if not markers:
        raise StoreError(f"{config.source}: names no data servers")
    stores = {marker.store: path for path, marker in markers.items()}
    if len(stores) > 1:
        one, other = list(stores.values())[:2]
        raise StoreError(
            f"{config.source}: {one} and {other} are of different stores; correct the configuration"
        )
    return next(iter(stores)), markers


def _same_servers(table: Table, config: Config, markers: dict[str, Marker]) -> Table:
    """The data servers' rows for the new place. Raises StoreError if it names others."""
    known = {number: row for number, row in table.items() if role_of(number) == "data"}
    found = {id_of(marker.role, marker.id): path for path, marker in markers.items()}
    for number, path in found.items():
        if number not in known:
            raise StoreError(f"{config.source}: {path} is no data server of the store")
    for number, row in known.items():
        if number in found:
            path = directories.recorded_path(config, found[number])
            known[number] = replace(row, path=path)
        elif row.state != LOST:
            raise StoreError(
                f"{config.source}: {name_of(number)} of the store ({row.path}) is missing; all "
                "data servers must be named"
            )
    return known


async def _require_quiet(store: Store) -> None:
    """Require that all hosts closed it in order, and nothing waits. Raises StoreBusy."""
    view, source = store.engine.view, store.config.source
    remedy = f"aifs mount {source} MNT, then aifs umount --drain MNT"
    if store.hosts is None:
        if not store.clean:
            raise StoreBusy(f"{source}: the store was not closed in order: {remedy}")
    else:
        unclean = await view(_find_unclean, store.engine.host)
        if unclean or not store.clean:
            names = ", ".join(unclean) or store.config.host.name
            raise StoreBusy(
                f"{source}: {names} did not close the store in order: there, aifs mount, then aifs "
                "umount --drain"
            )
    undrained = await view(_find_undrained)
    if undrained:
        where, count = next(iter(undrained.items()))
        at = f" on host {where}; there" if where else ""
        raise StoreBusy(f"{source}: files that are undrained: {count}{at}: {remedy}")
    if marked := await view(lambda tx: list(tx.range(*keys.all_of(b"w"), limit=1))):
        raise StoreBusy(
            f"{source}: inode {keys.number(marked[0][0])} was not settled when the store was "
            f"closed, as a data server did not work: {remedy}"
        )


def _find_unclean(tx: ReadTransaction, own: int) -> list[str]:
    hosts = [decode_host(value) for _, value in tx.range(*keys.all_of(b"p"))]
    return [host.name for host in hosts if not host.clean]


def _find_undrained(tx: ReadTransaction) -> dict[str, int]:
    """Files with their only bytes in the burst tier, by host name, "" with one host."""
    table, counts = read_table(tx), dict[str, int]()
    for _, value in tx.range(*keys.all_of(b"b")):
        record = decode_burst(value)
        if record.undrained:
            row = table.get(record.server)
            name = host_name(tx, row.host) if row is not None and row.host else ""
            counts[name] = counts.get(name, 0) + 1
    return counts


async def _seal(engine: Engine) -> None:
    """End appends to containers: the new place has other hosts."""
    for container in await engine.view(chunks.open_containers):
        await engine.transact(chunks.seal_container, container)
    await engine.barrier()


# --- the copy -------------------------------------------------------------------------------------


def _superblock(found: dict[str, Any], **fields: object) -> bytes:
    """The new place's, of no boot that a cache could be trusted for."""
    return json.dumps(found | {"clean": True, "boot": None} | fields).encode()


def _mark_servers(config: Config, markers: dict[str, Marker]) -> None:
    """Name the place of the metadata on the data servers, small numbers first."""
    for path, marker in sorted(markers.items(), key=lambda item: item[1].id):
        if marker.database != config.meta.url:
            markers[path] = replace(marker, database=config.meta.url)
            storage_at(path).mark(markers[path])
            faults.reach(MARKED)


def _pairs_of(engine: Engine) -> Iterator[Pair]:
    """The whole map, in order; in a thread of trio's."""
    start = b"\1"
    while start:
        records, start = trio.from_thread.run(engine.view, read_slice, start, _END, _SLICE)
        yield from records


class _Copying:
    """The records on their way, in a thread of trio's."""

    def __init__(self, old: Engine, crossing: Crossing, show: Show, expected: int) -> None:
        """``expected``: about how many bytes they are."""
        self._old = old
        self._crossing = crossing
        self._show = show
        self._expected = expected
        self._sent = Tally()

    def pairs(self) -> Iterator[Pair]:
        """As the new place is to have them, in order."""
        pairs = self._sent.through(self._crossing.pairs(_pairs_of(self._old)))
        for number, pair in enumerate(pairs):
            if number % _SLICE == 0:
                done = self._sent.bytes
                self._show(done, max(done, self._expected))
            yield pair

    def require_same(self, pairs: Iterable[Pair], where: str) -> Copied:
        """The new place, read again, has what was sent. Raises StoreError."""
        sent, found = self._sent, Tally()
        for _ in found.through(pairs):
            pass
        if (found.records, found.digest) != (sent.records, sent.digest):
            raise StoreError(
                f"{where}: has {found.records} records of digest {found.digest}, and "
                f"{sent.records} of digest {sent.digest} were copied; the old place stays the store"
            )
        return Copied(found.records, found.bytes, found.digest)


async def _expected_bytes(engine: Engine) -> int:
    """Each inode has a record, a name, and a place."""
    inodes = await engine.view(ReadTransaction.counter, keys.COUNTER_INODES)
    return 3 * _RECORD_BYTES * inodes


class _Database:
    """The new place is a database, and the old one a directory."""

    def __init__(self, old: Config, new: Config, store: str) -> None:
        self._old, self._new, self._store = old, new, store

    def _open(self) -> BlockingDatabase:
        return BlockingDatabase(self._new.meta.url, self._new.meta.secret)

    async def require_unfinished(self) -> None:
        """Require a copied store whose old place does not record the end. Raises StoreError,
        StoreBusy."""
        with self._open() as database:
            there = database.holds_store() and find_store(database, moved=True) == self._store
            superblock = json.loads(database.get(keys.SUPERBLOCK) or b"{}") if there else {}
            if superblock.get("copying") != self._old.meta.directory:
                raise _is_there_already(self._old, "a database")
            database.require_unused()
        require_current(await _superblock_in(self._old.meta.directory), self._old.source)

    async def require_free(self) -> None:
        """Require no store, or an earlier attempt's, or one from before the way back. Raises
        StoreError."""
        url = self._new.meta.url
        with self._open() as database:
            if database.holds_store() and find_store(database, moved=True) != self._store:
                raise StoreError(f"{url}: holds another store; name an empty database")
        require_replica(self._new.meta.directory, self._store, url)

    async def fill(self, old: Store, table: Table, show: Show) -> Copied:
        engine, url, name = old.engine, self._new.meta.url, self._new.host.name
        superblock = await engine.view(_read_superblock)
        after = Numbering(superblock.get("sessions", 0), superblock.get("feed", 0))
        await change_superblock(engine, copying=url)
        faults.reach(NOTED)
        extra = {keys.server(number): row.encode() for number, row in table.items()}
        extra[keys.host(1)] = HostRecord(name).encode()
        extra[keys.SUPERBLOCK] = _superblock(superblock, copying=self._old.meta.directory)
        copying = _Copying(engine, Crossing(1, extra), show, await _expected_bytes(engine))

        def copy() -> Copied:
            with self._open() as database, database.transaction() as cursor:
                cursor.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
                blocking.make(cursor, url, erase=True, after=after)
                blocking.put_host(cursor, name)
                blocking.put_pairs(cursor, copying.pairs())
                return copying.require_same(blocking.all_pairs(cursor), url)

        return await trio.to_thread.run_sync(copy)

    async def finish(self) -> None:
        with self._open() as database:
            known = {keys.number(key) for key in database.values(*keys.all_of(b"s"))}
        async with _metadata_in(self._old.meta.directory) as engine:
            for path in _burst_paths(self._old, await engine.view(read_table)).values():
                # It has nothing but caches; a host of the new place may have it in use again.
                with suppress(StoreError):
                    marker = storage_at(path).read_marker()
                    if marker.store == self._store and id_of("burst", marker.id) not in known:
                        storage_at(path).erase()
            faults.reach(TIDIED)
            await change_superblock(engine, moved=self._new.meta.url, copying=None)


class _Directory:
    """The new place is a directory, and the old one a database."""

    def __init__(self, old: Config, new: Config, store: str) -> None:
        self._old, self._new, self._store = old, new, store
        self._meta = new.meta.directory

    async def require_unfinished(self) -> None:
        """As _Database's."""
        found = await _superblock_in(self._meta) if self._is_of_store() else {}
        if found.get("copying") != self._old.meta.url:
            raise _is_there_already(self._old, "a directory of one host")

    async def require_free(self) -> None:
        """As _Database's."""
        if self._is_of_store():
            found = await _superblock_in(self._meta)
            if found and not (found.get("copying") or found.get("moved")):
                raise StoreError(f"{self._meta}: holds a store already; use an empty directory")
        elif os.path.isdir(self._meta) and set(os.listdir(self._meta)) - {ASIDE, OWNER}:
            directories.require_usable("meta", self._meta)
        for path in self._new.burst.directories:
            directories.require_usable("burst", path, force=_is_of(path, self._store))

    def _is_of_store(self) -> bool:
        """Whether the directory has this store's metadata. Raises StoreError for others."""
        if not os.path.lexists(os.path.join(self._meta, MARKER)):
            return False
        marker = read_marker(self._meta)
        if (marker.store, marker.role) != (self._store, "meta"):
            raise StoreError(f"{self._meta}: holds something else; use an empty directory")
        return True

    async def fill(self, old: Store, table: Table, show: Show) -> Copied:
        engine, url, meta = old.engine, self._old.meta.url, self._meta
        with BlockingDatabase(url, self._old.meta.secret) as database:
            with database.transaction() as cursor:
                numbering = blocking.find_numbering(cursor)
        places = [storage_at(path) for path in self._new.servers]
        beyond = beyond_backups(FoundBackups(self._store, places, BACKUP).sizes)
        first = BURST_FIRST + await engine.view(ReadTransaction.counter, keys.COUNTER_BURST)
        for number, path in enumerate(self._new.burst.directories, first):
            table[number] = ServerRecord(directories.recorded_path(self._new, path))
        extra = {keys.server(number): row.encode() for number, row in table.items()}
        used = first - BURST_FIRST + len(self._new.burst.directories)
        extra[keys.COUNTER_BURST] = used.to_bytes(8, "little")
        extra[keys.SUPERBLOCK] = _superblock(
            await engine.view(_read_superblock),
            copying=url,
            sessions=numbering.session,
            feed=numbering.feed,
            restored_from=0,  # what was backed up before is of another time
            restored_to=beyond,
        )
        copying = _Copying(engine, Crossing(0, extra), show, await _expected_bytes(engine))
        files.make_dirs(meta)
        owner = OwnerLock(meta, "")
        try:
            directories.erase("meta", meta)
            directories.mark(meta, self._store, "meta", 0)
            faults.reach(NOTED)
            await _fill(LmdbEngine(meta, first_seq=beyond), copying)
            written = LmdbEngine(meta)
            try:
                pairs = partial(copying.require_same, _pairs_of(written), meta)
                copied = await trio.to_thread.run_sync(pairs)
            finally:
                written.close()
        finally:
            owner.release(orderly=True)
        end_rights(meta, self._store, self._new.servers, wait=False)
        return copied

    async def finish(self) -> None:
        async with _metadata_in(self._meta) as engine:
            for number, path in _burst_paths(self._new, await engine.view(read_table)).items():
                if not _is_of(path, self._store, number - BURST_FIRST):
                    storage_at(path).erase()  # if it is of this store: it has nothing but caches
                    files.make_dirs(path)
                    directories.mark(path, self._store, "burst", number - BURST_FIRST)
            faults.reach(TIDIED)
            with BlockingDatabase(self._old.meta.url, self._old.meta.secret) as database:
                superblock = json.loads(database.get(keys.SUPERBLOCK) or b"{}")
                moved = json.dumps(superblock | {"moved": self._meta}).encode()
                database.put(keys.SUPERBLOCK, moved)
            await change_superblock(engine, copying=None)


async def _fill(engine: LmdbEngine, copying: _Copying) -> None:
    """The first batch says that it is being copied."""

    def put_all() -> None:
        pairs = copying.pairs()
        while batch := Writes(islice(pairs, _SLICE)):
            trio.from_thread.run(load, engine, batch)

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.run)
            await trio.to_thread.run_sync(put_all)
            nursery.cancel_scope.cancel()
    except BaseException as error:
        engine.abandon()
        raise first_error(error) from None
    engine.close()


def _is_there_already(old: Config, where: str) -> StoreError:
    return StoreError(
        f"{old.source}: the metadata of this store are in {where} already, as its data servers say"
    )


def _is_of(path: str, store: str, number: int | None = None) -> bool:
    """Whether a burst directory is marked as the store's, with that number."""
    with suppress(StoreError):
        marker = storage_at(path).read_marker()
        return (marker.store, marker.role) == (store, "burst") and number in (None, marker.id)
    return False


def _burst_paths(config: Config, table: Table) -> dict[int, str]:
    return {
        number: below(config.source, row.path)
        for number, row in table.items()
        if role_of(number) == "burst"
    }


@asynccontextmanager
async def _metadata_in(directory: str) -> AsyncIterator[LmdbEngine]:
    """Unused metadata."""
    owner = OwnerLock(directory, "")
    try:
        engine = LmdbEngine(directory)
        try:
            yield engine
        except BaseException:
            engine.abandon()
            raise
        engine.close()
    finally:
        owner.release(orderly=True)


async def _superblock_in(directory: str) -> dict[str, Any]:
    """Empty if there is none."""
    async with _metadata_in(directory) as engine:
        return await engine.view(_read_superblock)


def _read_superblock(tx: ReadTransaction) -> dict[str, Any]:
    return json.loads(tx.get(keys.SUPERBLOCK) or b"{}")
