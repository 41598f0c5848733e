"""Before a name shows: all below is durable on all hosts, where the new directory wants it, and its
group lets it."""

import stat
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import trio

from aifs.burst.remote import SYNC, Homes
from aifs.core.errors import Busy, Unavailable
from aifs.core.tasks import run_all
from aifs.core.upkeep import Role
from aifs.core.waiting import HOST, waits_for
from aifs.data.patience import giving_up
from aifs.files.drain import Drain
from aifs.files.file_io import FileIO
from aifs.files.services import Services
from aifs.files.writeback import WriteBack
from aifs.layout.hint import DEFAULT_POLICY
from aifs.meta import groups, hosts, keys, namespace, paths
from aifs.meta.kv import Engine, ReadTransaction
from aifs.meta.records import Dentry, decode_burst
from aifs.meta.slices import read_slice
from aifs.peers.transport import Answer, Body, Peer
from aifs.saves.listed import find_unequal, first_wrong
from aifs.saves.table import GroupTable

_DIRECTORY = stat.S_IFDIR >> 12  # the type of a directory, in a dentry
_AGAIN_S = 0.2
_DEATH_S = 30.0
"""Longest session of a silent host: a dead one's ends with its lease (10 s), after another host's
look; else it is cut off from this host alone."""


class OwnBarrier:
    """Syncs what lies below a name, where the store has one host. Used from one trio thread."""

    def __init__(self, services: Services, io: FileIO, writeback: WriteBack) -> None:
        self._engine = services.engine
        self._table = io.table
        self._writeback = writeback

    async def sync_below(self, dentry: Dentry, strict: bool = False) -> dict[int, object | None]:
        """Sync all unsynced files at or below ``dentry``; returns this host's as
        WriteBack.sync_bytes does, their marks still on record.

        Files in order are not looked at. A file that has had several names counts below every
        directory. ``strict``: about other hosts. Raises NoSpace, Unavailable.
        """
        if dentry.type != _DIRECTORY:
            return await self._writeback.sync_bytes([dentry.ino])
        table = self._table
        unsynced = [ino for ino in table.open if table.is_unsynced(ino)]
        unsynced += [ino for ino in table.unsynced if ino not in table.open]
        return await self._writeback.sync_bytes(
            await paths.those_below(self._engine, unsynced, dentry.ino)
        )

    async def sync_files(self, inos: Sequence[int]) -> None:
        """These files are durable on return, and their marks are gone. Raises as ``sync_below``."""
        await self._writeback.sync_files(inos)

    async def forget_marks(self, synced: dict[int, object | None]) -> None:
        """Files that ``sync_below`` has synced have no marks any more."""
        await self._table.forget_marks(synced)

    async def undrained_below(self, top: int, host: int) -> list[int]:
        """Files below a directory with newest bytes in another host's burst tier."""
        return []


class SharedBarrier:
    """Syncs here and on hosts that are homes of files there. Used from one trio thread."""

    def __init__(self, here: OwnBarrier, services: Services, homes: Homes, role: Role) -> None:
        self._here = here
        self._engine = services.engine
        self._servers = services.servers
        self._homes = homes
        self._role = role
        services.peers.serve(SYNC, self._serve)

    async def sync_below(self, dentry: Dentry, strict: bool = False) -> dict[int, object | None]:
        """``OwnBarrier.sync_below`` on all hosts. A dead host's undrained files are passed over,
        unless ``strict``: Unavailable."""
        synced = await self._here.sync_below(dentry)
        await self._sync_elsewhere(dentry, strict)
        if strict:
            await self._require_homes(dentry)
        return synced

    async def sync_files(self, inos: Sequence[int]) -> None:
        """As ``OwnBarrier.sync_files``, on all hosts."""
        await self._here.sync_files(inos)
        marked: dict[int, list[int]] = {}
        for ino, host in (await self._engine.view(_homes_of, inos)).items():
            marked.setdefault(host, []).append(ino)
        await self._ask(marked, strict=True)

    async def _sync_elsewhere(self, dentry: Dentry, strict: bool) -> None:
        if dentry.type != _DIRECTORY:
            found = await self._engine.view(_homes_of, [dentry.ino])
        else:
            found = await self._below(dentry.ino, b"w", _marked_elsewhere)
        await self._ask({host: [dentry.ino] for host in found.values()}, strict)

    async def _ask(self, inos: dict[int, list[int]], strict: bool) -> None:
        live = await self._live(inos)

        async def ask(host: int) -> None:
            if not strict and host not in live:
                return
            until_s = trio.current_time() + _DEATH_S
            while True:
                try:
                    return await self._homes.sync(host, inos[host])
                except Unavailable:
                    if strict:
                        raise
                    if host not in await self._role.ask_live():
                        return
                    if trio.current_time() >= until_s:
                        raise
                    with waits_for(HOST, "that has files below the directory"):
                        await trio.sleep(_AGAIN_S)

        await run_all(*(lambda host=host: ask(host) for host in inos))

    async def _require_homes(self, dentry: Dentry) -> None:
        """Raises Unavailable if the newest bytes of a file below are on a dead host."""
        elsewhere = self._servers.elsewhere
        live = await self._live(elsewhere.values())
        away = {number for number, host in elsewhere.items() if host not in live}
        if dentry.type != _DIRECTORY or not away:
            return
        found = await self._below(dentry.ino, b"b", _undrained_on, away)
        for ino, server in found.items():
            name = await self._engine.view(hosts.name_of, self._servers.elsewhere[server])
            path = await self._engine.view(paths.describe, ino)
            raise Unavailable(f"{path}: its newest bytes are on host {name}, which has gone")

    async def _live(self, wanted: Iterable[int]) -> frozenset[int]:
        """Hosts with a session, for these; a new one may be unknown yet. Raises Unavailable."""
        live = self._role.live
        return live if live.issuperset(wanted) else await self._role.ask_live()

    async def undrained_below(self, top: int, host: int) -> list[int]:
        """See OwnBarrier."""
        servers = {number for number, its in self._servers.elsewhere.items() if its == host}
        return list(await self._below(top, b"b", _undrained_on, servers))

    async def _below(
        self, top: int, kind: bytes, choose: Callable[..., dict[int, int]], *args: Any
    ) -> dict[int, int]:
        """Finds of ``choose`` in a kind's records, by inode number, of files below a directory.
        Other tasks run between slices."""
        start, end = keys.all_of(kind)
        known: dict[int, bool] = {}
        found: dict[int, int] = {}
        while start:
            some, start = await self._engine.view(_slice, start, end, choose, *args)
            if some:
                found_below, new = await self._engine.view(
                    paths.filter_below, list(some), top, known
                )
                found |= {ino: some[ino] for ino in found_below}
                known |= new
            await trio.lowlevel.checkpoint()
        return found

    async def _serve(self, asker: Peer, arguments: Any, body: Body) -> Answer:
        """Make files, or all below directories, by inode numbers, durable if their newest bytes are
        here, and show their records."""
        with giving_up():
            for ino in arguments:
                inode = await self._engine.view(namespace.find_inode, ino)
                if inode is not None:
                    synced = await self._here.sync_below(Dentry(ino, 0, inode.mode >> 12))
                    await self._here.forget_marks(synced)
        await self._engine.shown()
        return Answer()


Barrier = OwnBarrier | SharedBarrier
"""The latter where the store has several hosts."""


def _homes_of(tx: ReadTransaction, inos: Iterable[int]) -> dict[int, int]:
    """By inode number, other hosts that change these files, or have not synced them."""
    found = {ino: tx.get(keys.dirty(ino)) for ino in inos}
    homes = {ino: keys.host_of(mark) for ino, mark in found.items() if mark is not None}
    return {ino: host for ino, host in homes.items() if host not in (0, tx.host)}


def _slice(
    tx: ReadTransaction,
    start: bytes,
    end: bytes,
    choose: Callable[..., dict[int, int]],
    *args: Any,
) -> tuple[dict[int, int], bytes]:
    records, following = read_slice(tx, start, end, paths.SLICE)
    return choose(tx, records, *args), following


def _marked_elsewhere(tx: ReadTransaction, records: list[tuple[bytes, bytes]]) -> dict[int, int]:
    return {
        keys.number(key): keys.host_of(value)
        for key, value in records
        if keys.host_of(value) not in (0, tx.host)
    }


def _undrained_on(
    tx: ReadTransaction, records: list[tuple[bytes, bytes]], servers: set[int]
) -> dict[int, int]:
    copies = [decode_burst(value) for _, value in records]
    return {copy.ino: copy.server for copy in copies if copy.undrained and copy.server in servers}


class Naming:
    """Conditions for new names of directories pending for their group. Used from one trio
    thread."""

    def __init__(self, engine: Engine, io: FileIO, table: GroupTable) -> None:
        self._engine = engine
        self._io = io
        self._table = table

    async def require_complete(self, ino: int) -> None:
        """Check early that a directory's group lets it have a name; the transaction decides. Raises
        Busy."""
        group = self._table.by_directory.get(ino)
        if group is not None and group.record.seals:
            await self._engine.view(groups.require_complete, ino, group.record)

    async def check_files(self, ino: int) -> None:
        """Check that the ranks' committed files are there, in their sizes, and of one size if they
        must. Raises Busy, naming the first that is not."""
        group = self._table.by_directory.get(ino)
        if group is None or not group.record.seals:
            return
        for rank in await self._engine.view(groups.committed, ino):
            member = await self._engine.view(groups.get_member, ino, rank)
            files = () if member is None else member.files
            wrong = await first_wrong(self._engine, self._io, ino, files)
            if wrong:
                raise Busy(f"rank {rank}: {wrong}")
        unequal = await find_unequal(self._engine, group) if group.is_open else ""
        if unequal:
            raise Busy(unequal)

    @asynccontextmanager
    async def naming(self, *inos: int) -> AsyncIterator[None]:
        """What is done inside gives these directories new names, in a transaction."""
        async with self._table.recording:
            yield
            sealed = [g for g in map(self._table.by_directory.get, inos) if g and g.record.seals]
            for group in sealed:
                group.record = group.record._replace(pending=None)
                if not group.shares:
                    group.record = group.record._replace(state="committed")
                    del self._table.by_directory[group.ino]
                    group.wake()
            if sealed:
                self._table.look()


class Readiness:
    """Used from one trio thread."""

    def __init__(
        self, services: Services, io: FileIO, barrier: Barrier, naming: Naming, drain: Drain
    ) -> None:
        self._engine = services.engine
        self._heirlooms = services.heirlooms
        self._io = io
        self._barrier = barrier
        self.naming = naming
        self._drain = drain

    async def make_durable(
        self, dentry: Dentry, new_parent: int, strict: bool = False
    ) -> dict[int, object | None]:
        """Make all at ``dentry`` ready to show in ``new_parent``; returns files synced here for
        OpenTable.forgetting. ``strict``: see SharedBarrier.sync_below."""
        is_directory = dentry.type == _DIRECTORY
        if is_directory:
            await self.naming.require_complete(dentry.ino)
        synced = await self._barrier.sync_below(dentry, strict)
        policy = (await self._heirlooms.of(new_parent)).policy or DEFAULT_POLICY
        lacking = self._io.mirrors.lacking and await self._io.mirrors.find_lacking()
        if policy.publish == "capacity" or lacking:  # a file without a mirror has to be elsewhere
            inode = await self._engine.view(namespace.get_inode, dentry.ino)
            await self._drain.wait_below(self._io.inodes.current(inode), strict=True)
        if is_directory:
            await self.naming.check_files(dentry.ino)
        return synced
