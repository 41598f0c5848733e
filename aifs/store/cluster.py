"""A store of many hosts: the metadata are in a database, used by hosts with sessions; each metadata
directory has a replica, which can be made anew."""

import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import trio

from aifs.core.config import Config
from aifs.core.errors import StoreBusy, StoreError, Unavailable
from aifs.core.names import is_path
from aifs.data.marker import NAME as MARKER
from aifs.data.marker import Identity, Marker, check_identity, read_marker
from aifs.data.patience import Patience, ask_all
from aifs.data.server import role_of
from aifs.data.servers import Servers
from aifs.data.storages import below, storage_at
from aifs.layout.placement import LOST
from aifs.meta import keys
from aifs.meta.kv import Engine
from aifs.meta.lmdb_engine import LmdbEngine
from aifs.meta.replicated import blocking
from aifs.meta.replicated.blocking import BlockingDatabase
from aifs.meta.replicated.database import AnswerLost
from aifs.meta.replicated.engine import ReplicatedEngine
from aifs.meta.replicated.sessions import BEAT_S, LEASE_S, STOP_S, Member, Session, taken
from aifs.meta.servers import decode_server
from aifs.store import directories
from aifs.store.hosts import Hosts, enter, own_address
from aifs.store.owner import NAME as OWNER
from aifs.store.owner import OwnerLock
from aifs.store.ownership import StoreRight
from aifs.store.store import require_current

log = logging.getLogger(__name__)

_LOOK_S = 0.5

_ANSWER_S = 10.0
"""How long a data server may take to say whose it is."""

_ALONE = "alone:0"
"""The address of a session that allows no other one."""

Put = Callable[[Iterable[tuple[bytes, bytes]]], None]


@contextmanager
def making(config: Config, erase: bool) -> Iterator[Put]:
    """Make a store in the database, there after the block, of the pairs put in it. ``erase``: in
    place of another. Blocks. Raises StoreError, StoreBusy."""
    url = config.meta.url
    with BlockingDatabase(url, config.meta.secret) as database:
        if erase and database.holds_store():
            database.watch_silent()
        with database.transaction() as cursor:
            # The block may have much to erase elsewhere.
            cursor.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
            blocking.make(cursor, url, erase)
            yield partial(blocking.put_pairs, cursor)


def find_store(database: BlockingDatabase, moved: bool = False) -> str:
    """The uuid of a database's store; ``moved``: also if moved away. Raises StoreError."""
    database.require_store()
    try:
        superblock = json.loads(database.get(keys.SUPERBLOCK) or b"")
        if not moved:
            require_current(superblock, database.url)
        return superblock["uuid"]
    except (ValueError, TypeError, KeyError):
        raise StoreError(
            f"{database.url}: the record that says which store it holds is damaged; restore the "
            "database from a backup of it"
        ) from None


def find_unused(config: Config) -> str:
    """The uuid of the configured database's store, unused by hosts; "" if there is none. Blocks.
    Raises StoreError, StoreBusy."""
    with BlockingDatabase(config.meta.url, config.meta.secret) as database:
        if not database.holds_store():
            return ""
        database.require_unused()
        return find_store(database, moved=True)


def _require_own_servers(config: Config, database: BlockingDatabase, store: str) -> None:
    """Check that this host's data servers are the store's; silent ones are left to the open, and
    buckets, because obstore's threads do not survive the fork of a daemon. Raises StoreError."""
    rows = database.values(*keys.all_of(b"s"))
    wanted = {path: Identity(store, "data", -1) for path in config.servers}
    for key, value in rows.items():
        try:
            number, row = keys.number(key), decode_server(value)
        except Unavailable:
            continue  # which is told when it is opened
        if role_of(number) == "data" and row.state != LOST:
            wanted[below(config.source, row.path)] = Identity(store, "data", number)
    wanted = {path: identity for path, identity in wanted.items() if is_path(path)}
    places = [storage_at(path) for path in wanted]
    answers = ask_all([(Patience(), place.read_marker, ()) for place in places], _ANSWER_S)
    for (path, identity), marker in zip(wanted.items(), answers, strict=True):
        if not isinstance(marker, Marker):
            continue
        if marker.store != store:
            raise StoreError(
                f"{path}: is of store {marker.store}, and {database.url} holds store {store}; "
                f"correct servers, or meta.url, in {config.source}"
            )
        if identity.id >= 0:
            check_identity(path, marker, identity)
    markers = [marker for marker in answers if isinstance(marker, Marker)]
    if markers and not any(marker.database for marker in markers):
        raise StoreError(
            f"{database.url}: the data servers say that the metadata of this store are in a "
            "directory of one host; mount it there, or copy them here: aifs meta copy"
        )


def require_replica(directory: str, store: str, url: str) -> bool:
    """Check that the directory holds this store's replica, or nothing; whether it is marked. Raises
    StoreError."""
    if not os.path.lexists(os.path.join(directory, MARKER)):
        if not os.path.isdir(directory) or set(os.listdir(directory)) - {OWNER}:
            directories.require_usable("replica", directory)
        return False
    marker = read_marker(directory)
    if marker.role != "replica":
        raise StoreError(
            f"{directory}: holds the metadata of a store of its own, not a replica; name another "
            "meta.directory"
        )
    if marker.store != store:
        raise StoreError(
            f"{directory}: is the replica of store {marker.store}, and {url} holds store {store}; "
            f"correct meta.url, or, if that store is gone: rm -r {directory}"
        )
    return True


def _require_free_name(name: str, database: BlockingDatabase) -> None:
    for one in database.live_hosts():
        if one.name == name:
            raise StoreBusy(taken(name, one.address, one.lease_left_s))


class ClusterMetadata:
    """In a database."""

    def __init__(self, config: Config, mountpoint: str, alone: bool, goes_on: bool) -> None:
        """``alone``: no other host may have a session at the same time. ``goes_on``: with the
        session of a daemon that has died."""
        host = {"address": _ALONE if alone else own_address(config)}
        config = config.model_copy(update={"host": config.host.model_copy(update=host)})
        self._config = config
        self._thorough = not mountpoint  # a command may take the time to look at all of the replica
        self._goes_on = goes_on
        self._replica = config.meta.directory
        self._session: Session | None = None  # when it is open
        self.hosts: Hosts | None = None  # the same; as of Metadata, also what follows
        self.where = config.meta.url
        with BlockingDatabase(config.meta.url, config.meta.secret) as database:
            self.store = find_store(database)  # its uuid
            # Whether the directory says that it is the replica.
            self._is_marked = require_replica(self._replica, self.store, self.where)
            if not self._is_marked:  # else a session of this name may be this host's own
                _require_free_name(config.host.name, database)
            _require_own_servers(config, database, self.store)
        # For messages.
        self.remedy = f"If the database is right, have the replica made anew: rm -r {self._replica}"

    async def open(self) -> ReplicatedEngine:
        config = self._config
        if not self._is_marked:
            directories.mark(self._replica, self.store, "replica", 0)
        local = LmdbEngine(self._replica, config.meta.commit_interval_s, thorough=self._thorough)
        try:
            engine, self.hosts = await enter(config, self.store, local, self._goes_on)
        except BaseException:
            local.abandon()
            raise
        self._session = engine.session
        try:
            await self._end_silent(self.hosts)
            self._require_room(self.hosts.members)
        except BaseException:
            self.give_up(engine)
            raise
        return engine

    async def _end_silent(self, hosts: Hosts) -> None:
        """End sessions without lease, so that none returns during a check; live hosts get a lease's
        time, because the database may have been away."""
        assert self._session is not None
        alone = self._config.host.address == _ALONE
        while any(
            one.lease_left_s <= 0 and (alone or one.address == _ALONE) for one in hosts.members
        ):
            await trio.sleep(BEAT_S)
            with suppress(AnswerLost):
                await self._session.beat()
            await self._session.end_silent()
            await hosts.look()

    def give_up(self, engine: Engine) -> None:
        """Others need not wait until the lease is over."""
        if self.hosts is not None:
            self.hosts.peers.close()
        if self._goes_on:
            return engine.abandon()  # another daemon may
        try:
            engine.close()
        except Unavailable as error:
            log.warning("%s", error)

    def _require_room(self, members: Iterable[Member]) -> None:
        """Check that a host that is, or wants to be, alone is. Two at once may both be refused."""
        assert self._session is not None
        others = [
            one for one in members if one.session != self._session.number and one.lease_left_s > 0
        ]
        for one in others:
            if one.address == _ALONE:
                raise StoreBusy(f"{self.where}: the store is being checked on host {one.name}")
        if others and self._config.host.address == _ALONE:
            names = ", ".join(one.name for one in others)
            raise StoreBusy(f"{self.where}: the store is in use by {names}; unmount it there first")

    def right(self, owner: OwnerLock, servers: Servers) -> StoreRight:
        assert self._session is not None and self.hosts is not None
        return SessionRight(self._session, self.hosts, servers, owner, self.where)


class SessionRight(StoreRight):
    """The right of who has a session, which the engine keeps, and gives back when it is closed."""

    def __init__(
        self, session: Session, hosts: Hosts, servers: Servers, owner: OwnerLock, url: str
    ) -> None:
        """``owner``: its file reports doubts to others. ``url``: of the database."""
        super().__init__(servers)
        self._session = session
        self._hosts = hosts
        self._owner = owner
        self._url = url
        self._sure_at_s = time.time()
        """When the lease was last seen to be without doubt."""

    async def take(self, force: bool = False) -> None:
        pass

    async def run(self) -> None:
        """Keep up what is known of the other hosts, too."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._hosts.run)
            while not (why := self._session.ended):
                self.look()
                await trio.sleep(_LOOK_S)
            self._end(f"this host's session has ended ({why}); nothing is written any more")

    def look(self) -> None:
        """Say in the log, and in the owner file, when the lease comes into doubt, and is sure."""
        doubt = ""
        if self._session.is_sure:
            self._sure_at_s = time.time()
        else:
            since, until = self._sure_at_s - STOP_S, self._sure_at_s - STOP_S + LEASE_S
            why = " ".join(self._session.fault.split()) or "it has not been heard for too long"
            is_over = "ended" if time.time() >= until else "ends"
            doubt = (
                f"the database {self._url} does not answer since {_clock(since)}, and all that asks"
                f" waits for it; the lease of this host {is_over} at {_clock(until)}: {why}"
            )
        if doubt != self.doubt:
            if doubt and not self.doubt:
                log.warning("%s", doubt)
            elif not doubt:
                log.warning("the database answers; the lease of this host is without doubt again")
            self.doubt = doubt
            with suppress(OSError):
                self._owner.tell(doubt)

    def give_back(self) -> None:
        pass


def _clock(time_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time_s))
