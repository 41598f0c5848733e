"""Backups of an unmounted store's metadata: making, listing, restoring.

Later writes are unknown to restored metadata, and not deleted: records that would have other
objects deleted, or trust changed bytes, stay out (``_disarm``), and no id is given out again.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import trio

from aifs.core import files
from aifs.core.config import Config, is_directory_source
from aifs.core.errors import StoreError, Unavailable
from aifs.core.limits import within
from aifs.core.log import logger
from aifs.core.names import is_path
from aifs.core.tasks import first_error
from aifs.core.upkeep import Upkeep
from aifs.data.directory_storage import DirectoryStorage
from aifs.data.marker import FORMAT
from aifs.data.patience import Patience, ask_all
from aifs.data.storage import ASIDE, BACKUP, Storage
from aifs.data.storages import below, storage_at
from aifs.meta import chunks, keys, namespace
from aifs.meta.backup import (
    BASE,
    Chain,
    Name,
    Segment,
    chains,
    decode_segment,
    newest,
    parse_name,
    said_ns,
)
from aifs.meta.kv import Transaction
from aifs.meta.lmdb_engine import LmdbEngine
from aifs.meta.memtable import Writes
from aifs.meta.records import decode_burst
from aifs.meta.servers import read_table, reserve_number
from aifs.store import directories
from aifs.store.backup import Backup
from aifs.store.owner import NAME as OWNER_NAME
from aifs.store.owner import OwnerLock
from aifs.store.ownership import end_rights, require_unused
from aifs.store.server_table import id_of
from aifs.store.store import open_store

_log = logger(__name__)

_NOT_RESTORED = b"gmjv"
"""Records that would delete objects with newer files, or place of a job that went on."""

_IDS_LOST_AT_MOST = 1 << 32
"""Ids that may have been given out since the backup without leaving an object."""

_SEQS_LOST_AT_MOST = 1 << 40
"""Numbers of transactions in unreadable servers' backups, at most: of some 250 mounts."""

_ANSWER_S = 10.0  # what a directory may take to say whether it is there
_BATCH = 2048
_SYNC_EVERY = 32  # batches


def back_up(config: Config, to: str) -> None:
    """Back up an unused store now: on the data servers, or a base in the directory ``to``. Blocks.
    Raises StoreError, StoreBusy, NoSpace, Unavailable."""

    async def make() -> None:
        store = await open_store(config)
        try:
            backup = Backup(config, store.uuid, store.engine, store.servers, Upkeep())
            if to:
                await backup.write_to(to)
            else:
                await backup.load(read_only=False)
                await backup.ship()
        finally:
            store.close()

    trio.run(make)


# --- what there is ---


@dataclass(frozen=True, slots=True)
class RestorableState:
    """A state that can be restored."""

    seq: int
    """The number of its last transaction."""
    created_ns: int
    """When its last file was made, since the epoch; 0: unknown, it is ``damaged``."""
    segments: int
    """How many files it takes."""
    bytes: int
    """Of these together."""
    generation: int = 1
    """Of its base; 1 is the newest one."""
    damaged: str = ""
    """What is wrong with it; '' if nothing is."""


class FoundBackups:
    """The segments in some storages, each perhaps in several of them."""

    def __init__(self, store: str, places: Sequence[Storage], folder: str) -> None:
        """``folder``: prefix of their blobs' names. Raises StoreError for an unreadable storage."""
        self._store = store
        self._folder = folder
        self._places: dict[Name, list[Storage]] = {}
        self.sizes: dict[Name, int] = {}
        for place in places:
            try:
                listed = place.list_blobs(folder)
            except OSError as error:
                raise StoreError(f"{place.address}: {error.strerror}") from error
            for text, size in listed.items():
                name = parse_name(text)
                if name is not None:
                    self._places.setdefault(name, []).append(place)
                    self.sizes[name] = size

    def read(self, name: Name) -> Segment:
        """The segment, from the first copy of it that is whole. Raises Unavailable."""
        error: Exception = Unavailable(f"{name}: is missing")
        for place in self._places.get(name, ()):
            text = os.path.join(self._folder, str(name))
            try:
                return decode_segment(name, self._store, place.get_blob(text) or b"")
            except (Unavailable, StoreError, OSError) as raised:
                _log.warning("%s/%s is not used: %s", place.address, text, raised)
                error = raised
        raise Unavailable(str(error)) from error

    def whole_chain(self, at: int | None) -> Chain:
        """The newest state whose segments are all whole. Raises StoreError if there is none."""
        usable = set(self._places)
        while (chain := newest(usable, at)) is not None:
            damaged = [name for name in chain.segments if not self._is_whole(name)]
            if not damaged:
                return chain
            usable.difference_update(damaged)
        what = "no backup" if at is None else f"no backup of the state at {at} or before"
        raise StoreError(
            f"{what} of the metadata of store {self._store} is whole, or there is none"
        )

    def said_ns(self, name: Name) -> int:
        """When a segment was made, as it says itself, whole or not; 0 if nobody can tell."""
        for place in self._places[name]:
            with suppress(StoreError, OSError):
                head = place.get_blob(os.path.join(self._folder, str(name))) or b""
                if made_ns := said_ns(head):
                    return made_ns
        return 0

    def _is_whole(self, name: Name) -> bool:
        try:
            self.read(name)
        except Unavailable:
            return False
        return True


def answering(config: Config) -> Config:
    """Without the servers and burst directories that do not answer in time, which are logged."""

    def answers(path: str) -> bool:
        try:
            within(_ANSWER_S, storage_at(path).read_marker)
        except TimeoutError as error:
            _log.warning("%s is done without: %s", path, error.strerror)
            return False
        except StoreError:
            pass  # it says that it is none
        return True

    places = tuple(place for place in config.places if answers(place.path))
    burst = tuple(filter(answers, config.burst.directories))
    return config.model_copy(
        update={
            "places": places,
            "burst": config.burst.model_copy(update={"directories": burst}),
        }
    )


def find(config: Config, source: str) -> tuple[str, FoundBackups]:
    """The store's uuid by the data servers, and backups there or in the directory ``source``.
    Raises StoreError, also if a database has the metadata."""
    if config.is_cluster:
        raise _in_database(config.source, config.meta.url)
    stores: dict[str, str] = {}
    places: list[Storage] = []
    for path in config.servers:
        storage = storage_at(path)
        try:
            marker = storage.read_marker()
        except StoreError as error:
            _log.warning("not used: %s", error)
            continue
        if marker.database:
            raise _in_database(path, marker.database)
        stores[marker.store] = path
        places.append(storage)
    if not stores:
        what = "none of its data servers can be read, so nobody knows which store it is"
        raise StoreError(
            f"{config.source}: {what}; if servers were added or replaced, name these in the "
            "configuration"
        )
    if len(stores) > 1:
        one, other = list(stores.values())[:2]
        raise StoreError(
            f"{config.source}: {one} and {other} are of different stores; correct the configuration"
        )
    (store,) = stores
    if source and not os.path.isdir(source):
        raise StoreError(f"{source}: there is no such directory")
    if source:
        return store, FoundBackups(store, [DirectoryStorage(source)], "")
    return store, FoundBackups(store, places, BACKUP)


def _in_database(place: str, database: str) -> StoreError:
    return StoreError(
        f"{place}: the metadata of this store are in {database}, and are backed up and restored "
        "there (pg_dump, pg_restore); a host's replica is made anew by its next mount"
    )


def states(found: FoundBackups) -> Iterator[RestorableState]:
    """The newest state of each base, newest first. Reads only the last segment, and the base's:
    they tell times, and damage."""
    for chain in chains(found.sizes):
        try:
            found.read(_base_of(chain))
            yield _state(found, chain)
        except Unavailable as error:
            size = sum(found.sizes[name] for name in chain.segments)
            yield RestorableState(
                chain.seq, 0, len(chain.segments), size, _generation(found, chain), str(error)
            )


def _state(found: FoundBackups, chain: Chain) -> RestorableState:
    """Raises Unavailable if its last segment is damaged."""
    return RestorableState(
        chain.seq,
        found.read(chain.segments[-1]).created_ns,
        len(chain.segments),
        sum(found.sizes[name] for name in chain.segments),
        _generation(found, chain),
    )


def _base_of(chain: Chain) -> Name:
    """The last part of its base."""
    return next(name for name in chain.segments if name.kind == BASE and name.seq is not None)


def _generation(found: FoundBackups, chain: Chain) -> int:
    bases = {_base_of(other).after for other in chains(found.sizes)}
    return 1 + sum(base > _base_of(chain).after for base in bases)


# --- restore ---


def restore(config: Config, source: str, at: int | None, force: bool = False) -> RestorableState:
    """Make the metadata directory from the newest whole backup (``at``: up to that transaction).
    Blocks.

    Processes with other metadata of these servers lose their right, and stop when they notice.
    Raises StoreError, also for a non-empty metadata directory; nothing is left there then.
    StoreBusy, unless ``force``: the servers are seen in use.
    """
    meta = config.meta.directory
    if os.path.isdir(meta) and set(os.listdir(meta)) - {ASIDE, OWNER_NAME}:
        raise StoreError(
            f"{meta}: is not empty; move what is there away first, it may hold more than any backup"
        )
    places = (*config.servers, *config.burst.directories)
    if not force:
        require_unused(places)
    store, found = find(config, source)
    chain = found.whole_chain(at)
    state = _state(found, chain)
    wanted = newest(found.sizes, at)
    if wanted is not None and wanted != chain:
        said = found.said_ns(wanted.segments[-1])
        _log.warning(
            "the newest backup, of sequence %d, is damaged: restored is generation %d, sequence "
            "%d, which is %s older",
            wanted.seq,
            state.generation,
            state.seq,
            f"{max(said - state.created_ns, 0) // 10**9} s" if said else "an unknown time",
        )
    _, everywhere = find(config, "") if source else (store, found)
    beyond = beyond_backups(found.sizes, everywhere.sizes)
    files.make_dirs(meta)
    owner = OwnerLock(meta, "")
    try:
        trio.run(_build, config, found, chain, beyond)
        directories.mark(meta, store, "meta", 0)
    except BaseException as error:  # noqa: BLE001 (raised again, out of its group)
        directories.erase("meta", meta)
        raise first_error(error) from None
    finally:
        owner.release(orderly=True)
    end_rights(meta, store, places, wait=force)
    return state


def beyond_backups(*names: Iterable[Name]) -> int:
    """A transaction number that no backup has, also none on unreadable servers."""
    numbers = (name.seq or name.after for some in names for name in some)
    return max(numbers, default=0) + _SEQS_LOST_AT_MOST


async def _build(config: Config, found: FoundBackups, chain: Chain, beyond: int) -> None:
    engine = LmdbEngine(config.meta.directory, config.meta.commit_interval_s, first_seq=beyond)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.run)
            for name in chain.segments:
                await load(engine, found.read(name).writes())
            await _disarm(engine)
            await engine.transact(_finish, config, chain.seq, beyond)
            await engine.barrier()
            nursery.cancel_scope.cancel()
        engine.close()
    except BaseException:
        engine.abandon()
        raise


async def load(engine: LmdbEngine, writes: Writes) -> None:
    """Make all these changes. ``engine`` runs."""
    batches = list(writes.items())
    for number, start in enumerate(range(0, len(batches), _BATCH)):
        await engine.transact(_put_all, batches[start : start + _BATCH])
        if number % _SYNC_EVERY == 0:
            await engine.barrier()
        await trio.lowlevel.checkpoint()


def _put_all(tx: Transaction, changes: list[tuple[bytes, bytes | None]]) -> None:
    for key, value in changes:
        if value is None:
            tx.delete(key)
        else:
            tx.put(key, value)


async def _disarm(engine: LmdbEngine) -> None:
    """Take out untrue records, or ones dangerous to unknown objects."""
    for container in await engine.view(chunks.open_containers):
        # Newer chunks may lie behind its end.
        await engine.transact(chunks.seal_container, container)
    for kind in _NOT_RESTORED:
        start, end = keys.all_of(bytes((kind,)))
        while await engine.transact(_drop_some, start, end):
            await trio.lowlevel.checkpoint()
    start, end = keys.all_of(b"b")
    while last := await engine.transact(_distrust_copies, start, end):
        start = last + b"\0"
        await trio.lowlevel.checkpoint()


def _drop_some(tx: Transaction, start: bytes, end: bytes) -> bool:
    found = [key for key, _ in tx.range(start, end, _BATCH)]
    for key in found:
        tx.delete(key)
    return bool(found)


def _distrust_copies(tx: Transaction, start: bytes, end: bytes) -> bytes:
    """A burst copy that was a cache may have newer bytes; an only copy is taken as it is. Handles
    some records; returns the last key, b"" for none."""
    records = list(tx.range(start, end, _BATCH))
    for key, value in records:
        try:
            record = decode_burst(value)
            inode = namespace.find_inode(tx, record.ino)
        except Unavailable:
            continue  # fsck's to name
        if record.undrained:
            # Should it be missing, the file is not just empty.
            tx.put(key, record._replace(durable=True).encode())
            if inode is not None and inode.in_burst:
                namespace.put_mark(tx, inode.ino)  # it may have got another size
        elif inode is not None and inode.copy is not None and not inode.in_burst:
            inode.copy = None
            namespace.put_inode(tx, inode)
            tx.delete(key)
    return records[-1][0] if records else b""


def _finish(tx: Transaction, config: Config, seq: int, beyond: int) -> None:
    superblock = json.loads(tx.get(keys.SUPERBLOCK) or b"{}")
    if superblock.get("format") != FORMAT:
        raise StoreError(
            f"the backup is of a store of format {superblock.get('format')!r}; this version knows "
            f"{FORMAT!r} alone"
        )
    # Closed in order, so that nothing is looked for in the last ids; of another boot, so that no
    # cache is trusted.
    superblock |= {"clean": True, "boot": None, "restored_from": seq, "restored_to": beyond}
    tx.put(keys.SUPERBLOCK, json.dumps(superblock).encode())
    for path in (*config.servers, *config.burst.directories):
        with suppress(StoreError):  # one that was added since keeps its number
            marker = storage_at(path).read_marker()
            reserve_number(tx, id_of(marker.role, marker.id))
    recorded = [record.path for record in read_table(tx).values()]
    if not is_directory_source(config.source) and any(
        is_path(path) and not os.path.isabs(path) for path in recorded
    ):
        what = (
            "the store was made with a directory as SOURCE, which its servers lie in; restore "
            "it with that"
        )
        raise StoreError(f"{config.source}: {what} (aifs.yaml in it can name others)")
    paths = {below(config.source, path) for path in recorded}
    paths |= {*config.servers, *config.burst.directories}
    answers = ask_all([(Patience(), storage_at(path).id_bound, ()) for path in paths], _ANSWER_S)
    highest = max((answer for answer in answers if isinstance(answer, int)), default=0)
    ids = tx.counter(keys.COUNTER_IDS)
    tx.add(keys.COUNTER_IDS, max(highest - ids, 0) + _IDS_LOST_AT_MOST)
