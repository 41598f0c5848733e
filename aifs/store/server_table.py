"""The table of an open store's servers: added, on the way out, lost, removed; and maybe missing.

The metadata's table counts; a configuration names directories when a store is made, and failure
domains at each opening. Changes are durable on return, one transaction each, then followed in use.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

import trio

from aifs.core import faults, files
from aifs.core.config import Config
from aifs.core.errors import Busy, Invalid, StoreError, Unavailable
from aifs.core.log import logger
from aifs.core.names import absolute, is_path
from aifs.data.patience import FOR_EVER, giving_up
from aifs.data.server import DataServer, name_of, role_of
from aifs.data.servers import Servers
from aifs.data.storages import below, storage_at
from aifs.layout.placement import ACTIVE, BURST_FIRST, LOST
from aifs.layout.striped import Striped
from aifs.meta import keys, servers
from aifs.meta.hosts import read_hosts
from aifs.meta.kv import Engine, ReadTransaction, Transaction
from aifs.meta.records import Garbage, decode_burst, decode_garbage
from aifs.meta.servers import ServerRecord
from aifs.store import directories

_log = logger(__name__)

_MARKED = faults.declare(
    "vfs.server.marked", "a new server's directory has its marker, the table does not have it"
)
_REMOVED = faults.declare(
    "vfs.server.removed", "a server is out of the table, its directory has its marker still"
)


def id_of(role: str, number: int) -> int:
    """The id in the table of a server, or burst directory, with that number."""
    return BURST_FIRST + number if role == "burst" else number


class ServerTable:
    """Used from one trio thread. ``servers`` are those in use."""

    def __init__(self, config: Config, store: str, engine: Engine, servers: Servers) -> None:
        self._config = config
        self._store = store
        self._engine = engine
        self._servers = servers
        self._changing = trio.Lock()

    async def find(self, server_id: int) -> ServerRecord:
        """Raises Invalid if the table has none of that id."""
        record = await self._engine.view(servers.get_server, server_id)
        if record is None:
            raise Invalid(f"there is no {name_of(server_id)} in this store")
        return record

    async def add(
        self, directory: str, role: str = "data", domain: str = "", storage_class: str = ""
    ) -> int:
        """Make ``directory`` a 'data' server or 'burst' directory for new files, or, of a class,
        aged ones; returns its id. Raises StoreError if it is no empty directory."""
        return await self._add(directory, role, domain, storage_class)

    async def replace(self, server_id: int, directory: str, state: str) -> int:
        """Make ``directory`` the successor of a server, which gets ``state``; returns its id. It
        may have a lost server's path. Raises Invalid, StoreError."""
        of = await self.find(server_id)
        return await self._add(directory, "data", of.domain, of.storage_class, server_id, state)

    async def _add(
        self,
        directory: str,
        role: str,
        domain: str,
        storage_class: str,
        old: int | None = None,
        state: str = "",
    ) -> int:
        directory = absolute(directory)
        async with self._changing:
            lost = old if state == LOST else None
            others = [server for server in self._servers.values() if server.id != lost]
            server_id = await self._engine.view(servers.next_number, role)
            number = server_id % BURST_FIRST
            # Whatever may be wrong with the directory, it must not hold up the mount.
            limit_s = self._config.data.timeout_s or FOR_EVER
            with trio.move_on_after(limit_s) as scope:
                await trio.to_thread.run_sync(
                    self._mark, directory, others, role, number, abandon_on_cancel=True
                )
            if scope.cancelled_caught:
                # The marker may be written at any time later: no other directory gets this number.
                await self._engine.transact(servers.reserve_number, server_id)
                raise StoreError(
                    f"{directory}: has not answered within {limit_s:g} s; it is not added"
                )
            faults.reach(_MARKED)
            server = await self._servers.make_ready(server_id, directory, domain, storage_class)
            host = self._engine.host if role == "burst" else 0
            path = directories.recorded_path(self._config, directory)
            record = ServerRecord(path, domain=domain, host=host, storage_class=storage_class)
            rows = {server_id: record}
            if old is not None:
                rows[old] = replace(await self.find(old), state=state, successor=server_id)
            await self._engine.transact(servers.put_servers, rows)
            self._servers.take_in(server)
            await self._engine.barrier()
            if old is not None:
                self._classify(old, rows[old])
        return server_id

    def _mark(self, directory: str, others: list[DataServer], role: str, number: int) -> None:
        paths = [directory, self._config.meta.directory, *(server.address for server in others)]
        silent = [server.address for server in others if server.absent or server.hangs]
        if role == "burst" and not is_path(directory):
            raise StoreError(f"{directory}: a burst directory must be on a disk of this machine")
        try:
            directories.require_distinct(paths, silent)
            directories.require_usable(role, directory, store=self._store)
            directories.mark(directory, self._store, role, number, self._config.meta.url)
        except OSError as error:
            raise StoreError(f"{directory}: {error.strerror}") from error

    async def change(self, server_id: int, state: str) -> None:
        """Record a server's state; one in use again has no successor. Raises Invalid."""
        async with self._changing:
            record = replace(await self.find(server_id), state=state)
            if state == ACTIVE:
                record = replace(record, successor=None)
            await self._engine.transact(servers.put_server, server_id, record)
            await self._engine.barrier()
            self._classify(server_id, record)

    def _classify(self, server_id: int, record: ServerRecord) -> None:
        if self._servers.find(server_id) is not None:
            self._servers.classify(
                server_id, record.state, record.domain, record.successor, record.storage_class
            )

    async def follow(self, server_id: int) -> None:
        """Follow another host's change of a server's record. An unreachable data server is logged;
        its files are EIO."""
        async with self._changing:
            record = await self._engine.view(servers.get_server, server_id)
            if self._servers.find(server_id) is None:
                if record is None or role_of(server_id) == "burst":
                    return  # another host's burst directory
                try:
                    path = below(self._config.source, record.path)
                    server = await self._servers.make_ready(
                        server_id, path, record.domain, record.storage_class
                    )
                except StoreError as error:
                    _log.warning("a new server cannot be used: %s", error)
                    return
                self._servers.take_in(server)
            elif record is None:
                self._servers.drop(server_id)
                return
            self._classify(server_id, record)

    async def require_settled(self, server_id: int) -> None:
        """Require that nothing is being made, moved or deleted on a server unrecorded. Raises
        Busy."""
        await self._engine.view(_require_settled, server_id)

    async def remove(self, server_id: int) -> None:
        """Take an unused server out of the table, and its marker. Raises Busy if something on its
        way will use it: try later."""
        async with self._changing:
            server = self._servers.find(server_id)
            # What is to be deleted in a burst directory that is gone has nobody to wait for.
            is_gone = server is not None and server.role == "burst" and bool(server.absent)
            await self._engine.transact(_remove, server_id, is_gone)
            await self._engine.barrier()
            faults.reach(_REMOVED)
            if server is not None:
                was_absent = server.absent or server.hangs
                self._servers.drop(server_id)
                if not was_absent:
                    with giving_up(), suppress(Unavailable):  # what it has may stay
                        await self._servers.run(server, _give_up, server)


def _give_up(server: DataServer) -> None:
    with server.workers.patience.asking("remove", server.address):
        directories.give_up(server)


def _remove(tx: Transaction, server_id: int, is_gone: bool) -> None:
    record = servers.get_server(tx, server_id)
    if record is None or record.state == ACTIVE:
        raise Busy(f"{name_of(server_id)} is in use")
    if record.state == LOST or is_gone:
        _forget_garbage(tx, server_id)
    else:
        _require_settled(tx, server_id)
    servers.remove_server(tx, server_id)


def _require_settled(tx: ReadTransaction, server_id: int) -> None:
    """Objects are recorded as garbage before they are made, or deleted."""
    if any(_garbage_on(tx, server_id)):
        raise Busy(f"objects on {name_of(server_id)} are being made or deleted just now")
    if any(keys.stray_parts(key)[1] == server_id for key, _ in tx.range(*keys.all_of(b"m"))):
        raise Busy(f"objects on {name_of(server_id)} are being moved just now")


def _garbage_on(tx: ReadTransaction, server_id: int) -> Iterator[tuple[bytes, Garbage]]:
    for key, value in tx.range(*keys.all_of(b"g")):
        garbage = decode_garbage(value)
        if server_id in garbage.layout.servers:
            yield key, garbage


def _forget_garbage(tx: Transaction, server_id: int) -> None:
    """Forget garbage on a lost server."""
    for key, garbage in list(_garbage_on(tx, server_id)):
        layout = garbage.layout
        others = tuple(number for number in layout.servers if number != server_id)
        if others:
            left = garbage._replace(layout=Striped(layout.unit, others))
            tx.put(key, left.encode())
        else:
            tx.delete(key)


# --- when a store is opened -----------------------------------------------------------------------


async def load_servers(config: Config, engine: Engine, in_use: Servers, read_only: bool) -> None:
    """Tell ``in_use`` the table, and see which servers are there.

    A data server without unprotected bytes, or as configured, and a burst directory with caches
    alone, may be missing, with a warning. Raises StoreError, naming the first other one at fault.
    """
    records, unprotected = (
        await engine.view(servers.read_table),
        await engine.view(servers.find_unprotected),
    )
    for server_id, record in records.items():
        if server_id in in_use.elsewhere:
            continue
        in_use.classify(
            server_id, record.state, record.domain, record.successor, record.storage_class
        )
    dispensable = set[int]()
    for server in in_use.capacity():
        if config.data.missing == "allow" or server.id not in unprotected:
            dispensable.add(server.id)
    wrong, stakes = in_use.identify(read_only), dict[int, str]()
    for server in in_use.burst():
        if server.id in wrong:
            count, mirrored = await engine.view(_count_undrained, server)
            if not count:
                wrong[server.id] += "; only cached copies lie there"
                dispensable.add(server.id)
            elif config.burst.missing == "refuse":
                stakes[server.id] = (
                    f"{count} files have their newest bytes there alone: mount its filesystem or "
                    "put the directory back; or, if they are lost, mount without them: "
                    "-o burst.missing=allow"
                )
            elif mirrored:
                stakes[server.id] = (
                    f"{mirrored} files have mirrors on other hosts, which take them over while this"
                    " host does not have the store mounted: mount again in some seconds"
                )
            else:
                dispensable.add(server.id)
    in_use.require(wrong, dispensable, stakes)
    written_once = [server for server in in_use.capacity() if not server.storage.in_place]
    if written_once and not in_use.burst():
        raise StoreError(
            f"{written_once[0].name}: {written_once[0].address}: objects there are written once, "
            "so files need a burst directory that they can change in; name one in burst.directories"
        )


def _count_undrained(tx: ReadTransaction, server: DataServer) -> tuple[int, int]:
    """Files with newest bytes there, and those with a copy on another host."""
    records = map(decode_burst, (value for _, value in tx.range(*keys.all_of(b"b"))))
    found = [record for record in records if record.undrained and record.server == server.id]
    return len(found), sum(record.mirror is not None for record in found)


async def adopt_places(config: Config, engine: Engine) -> None:
    """Take over the configuration's failure domains and classes into the table, durably."""
    named = {
        place.path: place
        for place in config.places
        if place.domain or place.storage_class is not None
    }

    def adopt(tx: Transaction) -> int:
        changed, table = 0, servers.read_table(tx)
        paths = {number: below(config.source, row.path) for number, row in table.items()}
        same = directories.same_directories(named, list(paths.values()))
        places = {same[path]: place for path, place in named.items() if path in same}
        for server_id, record in table.items():
            place = places.get(paths[server_id])
            if place is None or role_of(server_id) != "data" or record.state == LOST:
                continue
            after = replace(record, domain=place.domain or record.domain)
            if place.storage_class is not None:
                after = replace(after, storage_class=place.storage_class)
            if after != record:
                servers.put_server(tx, server_id, after)
                changed += 1
        return changed

    if named:
        changed = await engine.transact(adopt)
        if changed:
            await engine.barrier()


async def register_burst(config: Config, engine: Engine, store: str) -> None:
    """Put this host's configured burst directories into the table. Blocks; durable. Raises
    StoreError if one is not empty."""
    table = await engine.view(servers.read_table)
    own = [below(config.source, row.path) for row in table.values() if row.host == engine.host]
    known = directories.same_directories(config.burst.directories, own)
    new = [path for path in config.burst.directories if path not in known]
    for path in new:
        _require_nobodys(path, table, store, await engine.view(read_hosts))
        directories.require_usable("burst", path, store=store)
        server_id = await engine.transact(servers.take_number, "burst")
        files.make_dirs(path)
        directories.mark(path, store, "burst", server_id - BURST_FIRST, config.meta.url)
        row = ServerRecord(directories.recorded_path(config, path), host=engine.host)
        await engine.transact(servers.put_server, server_id, row)
    if new:
        await engine.barrier()


def _require_nobodys(
    path: str, table: Mapping[int, ServerRecord], store: str, hosts: Mapping[int, str]
) -> None:
    """Require that it is no burst directory of the store. Raises StoreError, naming its host."""
    try:
        marker = storage_at(path).read_marker()
    except StoreError:
        return
    row = table.get(id_of(marker.role, marker.id))
    if marker.store == store and row is not None:
        name = hosts.get(row.host, f"number {row.host}")
        raise StoreError(
            f"{path}: is a burst directory of host {name}, which may have the only copy of files "
            f"there; if this is that host, set host.name to {name}, else name another directory"
        )


def note_elsewhere(
    in_use: Servers, host: int, writes: Mapping[bytes, bytes | None], length: int
) -> None:
    """A tap of the engine of a host of many: burst directories that others add are known here."""
    for key, value in writes.items():
        if key[:1] == b"s" and value is not None:
            row = servers.decode_server(value)
            if row.host not in (0, host):
                in_use.elsewhere[keys.number(key)] = row.host


def require_registered(config: Config, paths: list[str], adding: str) -> None:
    """Require that a configuration file's directories (``paths``) are in the table, except
    ``adding``. Raises StoreError."""
    known = [*paths, *filter(None, (adding,))]
    named = [("server", "", path) for path in config.servers]
    named += [("burst directory", "--burst ", path) for path in config.burst.directories]
    same = directories.same_directories([path for _, _, path in named], known)
    for kind, option, path in named:
        if path not in same:
            raise StoreError(
                f"{config.source}: {kind} {path} is not part of the store; add it with: "
                f"aifs server add {option}{config.source} {path}; or, if it has been removed, take "
                "it out of the file"
            )
