"""Backups of the metadata on the data servers, while the store is in use (docs/design/metadata.md,
B1 to B5).

A base if none can be continued, daily, after larger increments, and when a server is on its way
out; else an increment every ``meta.backup_interval``, and at an orderly close. Two generations are
kept, each a base with its increments. ``covered`` holds deletions back until no newest backup
refers to what is deleted.
"""

import json
import math
import os
import time
from collections.abc import Callable, Set
from typing import Any

import trio

from aifs.core import faults, files
from aifs.core.config import Config
from aifs.core.errors import FsError, NoSpace, Unavailable, from_oserror
from aifs.core.log import logger
from aifs.core.upkeep import NEVER_S, Upkeep, Work
from aifs.data.directory_storage import put_file
from aifs.data.server import DataServer
from aifs.data.servers import Servers
from aifs.data.storage import BACKUP
from aifs.layout.placement import ACTIVE
from aifs.meta import journal, keys
from aifs.meta.backup import BASE, INCREMENT, Name, Segment, newest, parse_name
from aifs.meta.kv import Engine, ReadTransaction
from aifs.meta.memtable import Writes

_log = logger(__name__)

HOLD_S = 10.0
"""How long a deletion waits for others that the same increment can cover."""

PART_BYTES = 4 << 20
"""Changes in one part of a base; an increment of this size is made early."""

CHANGES_MAX = 256 << 20
"""Bytes of changes that wait while no server takes them; beyond, a base has to be made."""

BASE_AGE_S = 86400.0

_SLICE = 256  # records that are read at a time: some 300 us
_LAST = b"\xff" * 512
_RETRY_S = 30.0
_ANSWERS_MAX = 8
_MIN_BASE_BYTES = 1 << 20  # increments of less never call for a new base

_BASE_PART = faults.declare(
    "vfs.backup.base_part", "a part of a base is on the servers, perhaps not the last one"
)
_SHIPPED = faults.declare(
    "vfs.backup.shipped", "a backup is on the servers, what it makes useless is not deleted"
)

Put = Callable[[str, bytes], Any]


class Backup:
    """Made before the engine is used, so that it sees all changes. Used from one trio thread."""

    def __init__(
        self, config: Config, store: str, engine: Engine, servers: Servers, upkeep: Upkeep
    ) -> None:
        self.interval_s = 0.0 if config.is_cluster else config.meta.backup_interval_s
        """0: none are made by themselves. Those of a cluster's metadata are the database's."""
        self._files = BackupFiles(servers, config.meta.backup_copies)
        self._store = store
        self._engine = engine
        self._read_only = False
        """The store is mounted so, and no backup is made."""
        # since _after; while that is None, since a base that is being taken was begun
        self._changes: Writes = {}
        self._changed_bytes = 0
        """What ``_changes`` take, keys and values."""
        self._forgotten = 0  # how often there were too many of them
        self._scanned: list[
            Writes
        ] = []  # what has changed since a base that is being taken was begun
        self._after: int | None = (
            None  # the state that the next increment goes on from; None: a base is due
        )
        self._shipped: int | None = (
            None  # the state that the newest backup makes; None: there is none
        )
        # as that; what transactions up to this one have given up, it does not name
        self._covered = -1
        self._making: int | None = None  # one of this state, or a later one, is being made
        self._base_bytes = 0
        """Of the newest base, compressed."""
        self._increment_bytes = 0
        """Of the increments since."""
        self.base_at_s = -float("inf")
        """When that base was made, by trio's clock."""
        self._base_servers: frozenset[int] = frozenset()  # those that there were
        self._shipped_at_s = 0.0  # since the epoch
        self._last_error = ""
        """What the last attempt has failed with; '' if it has not."""
        self._gave_up = False
        """There is no room for backups, so deletions do not wait for them."""
        self._abandoned = (0, 0)
        """Backups of states between these two are of what there was before a restore."""
        self._waiting = 0
        """How many calls of ``covered`` wait."""
        self._requests: list[tuple[str, str]] = []
        """Backups that users have asked for and that are still to be made: token and directory."""
        self._answers: dict[str, str] = {}
        """By token, what has come of the latest ones: '' if all is well."""
        self._shipping = trio.Lock()
        """Held while a backup is made."""
        self._upkeep = upkeep
        self._due_at_s = math.inf  # by trio's clock
        self._advanced = trio.Event()
        """Set, and replaced, when a backup has been made."""
        self._listens = bool(self.interval_s)
        """Whether the engine tells ``_tap`` of changes."""
        if self._listens:
            engine.listen(self._tap)

    def _tap(self, writes: Writes, length: int) -> None:
        if self.interval_s and (self._after is not None or self._scanned):
            # Else only a base can follow.
            self._changes.update(writes)
            self._changed_bytes += length
            if self._changed_bytes > CHANGES_MAX:
                self._changes, self._changed_bytes, self._after = {}, 0, None
                self._forgotten += 1
            elif self._changed_bytes > PART_BYTES and self._after is not None:
                if not self._last_error:
                    self._upkeep.wake(Work.BACKUP)
        for changes in self._scanned:
            changes.update(writes)

    async def load(self, read_only: bool) -> None:
        """Find earlier mounts' backups. ``read_only``: nothing is added."""
        if not self.interval_s:
            return
        self._due_at_s = trio.current_time() + self.interval_s
        if read_only:
            self._read_only, self.interval_s, self._changes = True, 0.0, {}
        self._abandoned = await self._engine.view(_find_abandoned)
        sizes = await self._files.sizes()
        found = {
            name: size for text, size in sizes.items() if (name := parse_name(text)) is not None
        }
        chain = newest(found)
        if chain is None:
            return
        self._shipped = self._covered = chain.seq
        untouched = self._engine.seq == self._engine.opened_seq
        if untouched and chain.seq == self._engine.found_seq:
            self._covered = self._engine.seq  # numbers are passed over when a store is opened
            self._after = chain.seq
            self.base_at_s = trio.current_time()
            self._base_servers = self._files.servers()
            self._base_bytes = sum(found[name] for name in chain.segments if name.kind == BASE)
            self._increment_bytes = sum(
                found[name] for name in chain.segments if name.kind == INCREMENT
            )
        elif not read_only:
            self._due_at_s = trio.current_time()  # the next one has to be a base

    # --- what others ask ---

    async def covered(self, seq: int, urgent: bool = False) -> bool:
        """Wait until the newest backup refers to nothing given up by transactions up to ``seq``.
        True: it may be deleted (at once without backups). False: no backup could be made; ask
        later."""
        if self._is_covered(seq):
            return True
        if self._read_only:
            return False
        self._waiting += 1
        try:
            with trio.move_on_after(0 if urgent else min(HOLD_S, self.interval_s)):
                while not self._is_covered(seq):
                    await self._advanced.wait()
            if not self._is_covered(seq):
                await self.ship(seq)
        except NoSpace as error:
            if not self._gave_up:
                _log.warning("deletions no longer wait for backups of the metadata: %s", error)
            self._gave_up = True
        except FsError:
            return False
        finally:
            self._waiting -= 1
        return True

    def is_without(self, since: int, until: int) -> bool:
        """Whether no backup, also one being made, needs what came after ``since`` and ended by
        ``until``."""
        if self._making is not None and until > self._making:
            return False
        return self._is_covered(until) or self._covered <= since

    def _is_covered(self, seq: int) -> bool:
        if self._making is not None and seq > self._making:
            return False
        return (
            self._shipped is None
            or self._covered >= seq
            or self._gave_up
            or not (self.interval_s or self._read_only)
        )

    async def ship(self, seq: int | None = None) -> None:
        """Have the newest backup include the state after ``seq`` (None: now). Raises NoSpace,
        Unavailable."""
        wanted = self._engine.seq if seq is None else seq
        async with self._shipping:
            after = self._after
            if after is not None and self._shipped is not None and self._shipped >= wanted:
                return
            self._making = self._engine.seq
            try:
                if after is None or self._is_base_due():
                    await self._make_base()
                else:
                    await self._make_increment(after)
            except FsError as error:
                self._last_error = str(error)
                raise
            finally:
                self._making = None
            self._last_error = ""
            self._gave_up = False
            self._shipped_at_s = time.time()
            advanced, self._advanced = self._advanced, trio.Event()
            advanced.set()
            faults.reach(_SHIPPED)

    async def leave_servers(self) -> None:
        """Have the newest backup on no server on its way out. Raises NoSpace, Unavailable."""
        if self.interval_s and self._shipped is not None and self._is_server_leaving():
            await self.ship()

    async def write_to(self, directory: str) -> int:
        """Make a base in a user's directory, made if missing; returns its bytes. Raises NoSpace,
        Unavailable."""

        async def put(name: str, data: bytes) -> None:
            await trio.to_thread.run_sync(put_in_directory, directory, name, data)

        _, length = await self._take_base(put)
        return length

    def request(self, token: str, directory: str) -> None:
        """Have a backup made in the background, on the servers or in a directory; ``status`` has
        the result by token: "", or an error."""
        self._requests.append((token, directory))
        self._upkeep.wake(Work.BACKUP)

    def status(self) -> dict[str, Any]:
        """``sequence``: the newest backup's state; ``changed_bytes``: since; ``answers``: to the
        last requests, by token."""
        return {
            "interval_s": self.interval_s,
            "sequence": self._shipped,
            "time_s": self._shipped_at_s or None,
            "base_bytes": self._base_bytes,
            "increment_bytes": self._increment_bytes,
            "changed_bytes": self._changed_bytes,
            "waiting_deletions": self._waiting,
            "last_error": self._last_error,
            "answers": self._answers,
        }

    # --- in the background ---

    async def work(self) -> float:
        """Make the backups that are due, or asked for; in how many seconds the next one is due."""
        while self._requests:
            await self._answer(*self._requests.pop(0))
        if not self.interval_s:
            return NEVER_S
        is_much = self._changed_bytes > PART_BYTES and not self._last_error
        if trio.current_time() >= self._due_at_s or is_much:
            failing = self._last_error
            self._due_at_s = trio.current_time() + self.interval_s
            try:
                if self._changes or self._after is None:
                    await self.ship()
            except FsError as error:
                if not failing:
                    _log.warning("the backup of the metadata has to wait: %s", error)
                self._due_at_s = trio.current_time() + min(_RETRY_S, self.interval_s)
        return self._due_at_s - trio.current_time()

    async def _answer(self, token: str, directory: str) -> None:
        answer = ""
        try:
            if directory:
                await self.write_to(directory)
            else:
                await self.ship()
        except FsError as error:
            answer = str(error)
        self._answers[token] = answer
        while len(self._answers) > _ANSWERS_MAX:
            del self._answers[next(iter(self._answers))]

    async def finish(self) -> None:
        """The store is about to be closed, and nothing changes any more: the last backup."""
        if not self.interval_s:
            return
        try:
            if self._changes or self._after is None:
                await self.ship()
        except FsError as error:
            _log.warning("the metadata is not in the backups as it is now: %s", error)

    # --- making them ---

    def _is_base_due(self) -> bool:
        late = trio.current_time() - self.base_at_s > BASE_AGE_S
        large = self._increment_bytes > max(self._base_bytes, _MIN_BASE_BYTES)
        return late or large or self._is_server_leaving() or not self.interval_s

    def _is_server_leaving(self) -> bool:
        return not self._base_servers <= self._files.servers()

    async def _make_increment(self, after: int) -> None:
        """``after``: the state to continue from."""
        seq, forgotten, taken = self._engine.seq, self._forgotten, self._take_changes()
        name = Name(INCREMENT, after, 0, seq)
        try:
            await self._engine.barrier(seq)
            self._increment_bytes += await self._put_segment(name, taken[0], self._files.put)
        except BaseException:
            self._give_back(taken, forgotten)
            raise
        self._shipped = self._covered = seq
        self._after = seq if self._forgotten == forgotten else None

    def _take_changes(self) -> tuple[Writes, int]:
        taken = self._changes, self._changed_bytes
        self._changes, self._changed_bytes = {}, 0
        return taken

    def _give_back(self, taken: tuple[Writes, int], forgotten: int) -> None:
        if self._forgotten != forgotten:
            return
        changes, length = taken
        changes.update(self._changes)  # newer
        self._changes = changes
        self._changed_bytes += length

    async def _make_base(self) -> None:
        # Increments go on beside the base: each state can then be made from the base before, too.
        if self._after is not None and self._changes:
            await self._make_increment(self._after)
        goes_on = self._after is not None
        if not goes_on:
            self._take_changes()
        begin, forgotten = self._engine.seq, self._forgotten
        servers = self._files.servers()
        try:
            seq, length = await self._take_base(self._files.put)
        except FsError:  # else every attempt would leave its parts, where room is what lacks
            await self._files.delete(lambda text: _is_part(parse_name(text), begin))
            raise
        self._shipped = self._covered = seq
        if not goes_on and self._forgotten == forgotten:
            self._after = begin
        self._base_bytes, self._increment_bytes = length, 0
        self.base_at_s, self._base_servers = trio.current_time(), servers
        kept = await self._older_generation(begin)
        await self._files.delete(lambda text: _is_useless(parse_name(text), begin, kept))

    async def _older_generation(self, begin: int) -> Set[Name]:
        """The newest state's segments without the base begun there, of this history (see
        restore)."""
        first, end = self._abandoned
        names = {name for text in await self._files.sizes() if (name := parse_name(text))}
        chain = newest(
            name
            for name in names
            if not _is_part(name, begin)
            and not first < (name.after if name.seq is None else name.seq) < end
        )
        return frozenset(chain.segments if chain is not None else ())

    async def _take_base(self, put: Put) -> tuple[int, int]:
        """The base's state and length. Records are read in slices, with other tasks between."""
        begin = self._engine.seq
        changes: Writes = {}
        self._scanned.append(changes)
        if not self._listens:
            self._listens = True
            self._engine.listen(self._tap)
        start: bytes | None = b"\0"
        part, length = 0, 0
        try:
            while start is not None:
                writes, start = await self._read_part(start)
                writes.update(changes)
                changes.clear()
                seq = self._engine.seq
                name = Name(BASE, begin, part, seq if start is None else None)
                if start is None:
                    await self._engine.barrier(seq)
                length += await self._put_segment(name, writes, put)
                part += 1
                faults.reach(_BASE_PART)
        finally:
            self._scanned.remove(changes)
        return seq, length

    async def _read_part(self, start: bytes) -> tuple[Writes, bytes | None]:
        """Records from ``start`` on, and where to go on; None at the end. Changes meanwhile are in
        ``_scanned``, which the caller puts over them."""
        writes: Writes = {}
        size = 0
        while True:
            records = await self._engine.view(_read_slice, start)
            writes.update(records)
            if len(records) < _SLICE:
                return writes, None
            start = records[-1][0] + b"\0"
            size += sum(len(key) + len(value) for key, value in records)
            if size > PART_BYTES:
                return writes, start
            await trio.lowlevel.checkpoint()

    async def _put_segment(self, name: Name, writes: Writes, put: Put) -> int:
        data = await trio.to_thread.run_sync(_encode, name, self._store, writes)
        await put(str(name), data)
        return len(data)


def _is_useless(name: Name | None, begin: int, kept: Set[Name]) -> bool:
    """All except the base begun just now, and ``kept``; also crashed writes."""
    return name not in kept and not _is_part(name, begin)


def _find_abandoned(tx: ReadTransaction) -> tuple[int, int]:
    superblock = json.loads(tx.get(keys.SUPERBLOCK) or b"{}")
    return superblock.get("restored_from", 0), superblock.get("restored_to", 0)


def _is_part(name: Name | None, begin: int) -> bool:
    return name is not None and name.kind == BASE and name.after == begin


def _read_slice(tx: ReadTransaction, start: bytes) -> list[tuple[bytes, bytes]]:
    return list(tx.range(start, _LAST, _SLICE))


def _encode(name: Name, store: str, writes: Writes) -> bytes:
    return Segment(name, store, time.time_ns(), journal.encode_changes(writes)).encode()


class BackupFiles:
    """Files on all data servers of a store, each on ``copies``. Used from one trio thread."""

    def __init__(self, servers: Servers, copies: int) -> None:
        self._servers = servers
        self._copies = copies

    def servers(self) -> frozenset[int]:
        """Ids of the servers that are to stay."""
        return frozenset(
            server.id for server in self._servers.capacity() if server.standing == ACTIVE
        )

    async def put(self, name: str, data: bytes) -> None:
        """Store a file durably on as many servers as wanted, at least one. Raises NoSpace,
        Unavailable."""
        stored, error = 0, None
        for server in self._preferred():
            try:
                await self._servers.run(server, put, server, name, data)
            except FsError as raised:
                error = raised
                continue
            stored += 1
            if stored == self._copies:
                return
        if not stored:
            raise error or Unavailable("there is no data server")
        if error is not None:
            _log.info("%s is on %d instead of %d servers: %s", name, stored, self._copies, error)

    def _preferred(self) -> list[DataServer]:
        """The servers, different failure domains first, in one order."""
        domains: dict[str, int] = {}
        ranked = []
        for candidate in self._servers.candidates():
            rank = domains[candidate.domain] = domains.get(candidate.domain, -1) + 1
            ranked.append((rank, candidate.id))
        return [self._servers[number] for _, number in sorted(ranked)]

    async def sizes(self) -> dict[str, int]:
        """The names of all files on servers that work, with their lengths."""
        found: dict[str, int] = {}
        for server in self._servers.capacity():
            try:
                found |= await self._servers.run(server, sizes, server)
            except FsError as error:
                _log.info("backups on %s are not looked at: %s", server.name, error)
        return found

    async def delete(self, is_useless: Callable[[str], bool]) -> None:
        """Remove the files with such names. What cannot be removed stays, and a later call will."""
        for server in self._servers.capacity():
            try:
                names = [
                    name
                    for name in await self._servers.run(server, sizes, server)
                    if is_useless(name)
                ]
                await self._servers.run(server, delete, server, names)
            except FsError as error:
                _log.info("older backups on %s stay for now: %s", server.name, error)


# --- on one server; these block, and run in its workers ---


def put(server: DataServer, name: str, data: bytes) -> None:
    """Store a file, durably on return. Raises NoSpace, Unavailable."""
    server.put_blob(f"{BACKUP}/{name}", data)


def sizes(server: DataServer) -> dict[str, int]:
    """The names of all files there, with their lengths."""
    return server.list_blobs(BACKUP)


def get(server: DataServer, name: str) -> bytes:
    """Raises Unavailable also if there is no such file."""
    data = server.get_blob(f"{BACKUP}/{name}")
    if data is None:
        raise Unavailable(f"{server.name}: {BACKUP}/{name} is missing")
    return data


def delete(server: DataServer, names: list[str]) -> None:
    """Remove files; those that are gone already count as removed."""
    for name in names:
        server.delete_blob(f"{BACKUP}/{name}")


# --- of any directory, also when no store is open ---


def put_in_directory(directory: str, name: str, data: bytes) -> None:
    """Store a file durably in ``directory``, made if missing. Raises NoSpace, Unavailable."""
    try:
        files.make_dirs(directory)
        put_file(os.path.join(directory, name), data)
    except OSError as error:
        raise from_oserror(error, directory) from error
