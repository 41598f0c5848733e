"""Background removal of what nobody can reach any more: orphan inodes, and the objects left as
garbage.
"""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

import trio

from aifs.core import faults
from aifs.core.errors import FsError, Unavailable
from aifs.core.log import logger
from aifs.data.objects.striped import delete_batch
from aifs.data.servers import Servers
from aifs.meta import chunks, keys, namespace
from aifs.meta.kv import Engine, ReadTransaction, Transaction
from aifs.meta.records import Garbage, decode_garbage

_log = logger(__name__)

_BATCH = 256
_ERASED_AT_ONCE = 32  # in one transaction, whose own changes slow down its range reads
_RETRY_S = 10.0
_BACKLOG_MAX = 1024  # from here on deletions do not wait for others to share a backup with

_ERASED = faults.declare(
    "vfs.collect.erased", "orphans are erased, their objects are on record as garbage"
)
_DROPPED = faults.declare(
    "vfs.collect.dropped", "a part of a loose chunk list is dropped, the rest is on record"
)
_DELETED = faults.declare(
    "vfs.collect.deleted", "objects are deleted, their garbage records are not"
)


class _Doomed(NamedTuple):
    """Garbage, and the number of a transaction that has made it so, or of a later one."""

    oid: int
    seq: int


class Collector:
    """Takes orphans and garbage from the other modules and removes them in batches.

    Objects are deleted only after the transaction that made them garbage is durable (I5). What
    cannot be deleted (a failing server) keeps its garbage record and is tried again, at the latest
    by the next mount. What the newest backup of the metadata may refer to waits for a newer one
    (``covered``).
    """

    def __init__(self, engine: Engine, servers: Servers) -> None:
        self._engine = engine
        self._servers = servers
        self._orphans: list[int] = []
        self._garbage: list[_Doomed] = []
        self._retry: list[_Doomed] = []
        self._failed = 0  # of the last batch
        self._work = trio.Event()
        self._draining = trio.Lock()
        self.on_deleted: Callable[[list[int]], None] = lambda oids: None
        """Called with the ids of objects and burst copies whose space is free again."""
        self.covered: Callable[[int, bool], Awaitable[bool]] = _always
        """Waits until what the transactions up to a number have given up may be deleted, soon if
        the second argument says so; whether it may."""

    def add_orphan(self, ino: int) -> None:
        """``ino`` has no name, no handle, and is unknown to the kernel."""
        self._orphans.append(ino)
        self._work.set()

    def add_garbage(self, oid: int) -> None:
        """There is, or is about to be, a garbage record for ``oid``, or it is a loose chunk
        list.
        """
        self._garbage.append(_Doomed(oid, self._engine.seq))
        self._work.set()

    @property
    def backlog(self) -> int:
        """Inodes and object sets that wait to be removed."""
        return self.due + len(self._retry)

    @property
    def due(self) -> int:
        """Those of them that can be removed now, as far as is known: not what a failing server
        keeps from being.
        """
        return len(self._orphans) + len(self._garbage)

    async def run(self) -> None:
        """Collect until cancelled."""
        retry_at = trio.current_time() + _RETRY_S
        while True:
            with trio.move_on_at(retry_at if self._retry else float("inf")):
                await self._work.wait()
            self._work = trio.Event()
            if (
                trio.current_time() >= retry_at
            ):  # not whenever something else is deleted: there may be many
                retry_at = trio.current_time() + _RETRY_S
                self._garbage += self._retry
                self._retry = []
            try:
                await self.drain()
            except FsError as error:
                _log.warning("removing deleted files has to wait: %s", error)
                await trio.sleep(_RETRY_S)
                self._work.set()

    async def drain(self, urgent: bool = False) -> None:
        """Remove all that is waiting; ``urgent``: others that may come soon are not waited for.
        Raises NoSpace or Unavailable if the metadata store cannot be changed.
        """
        async with self._draining:
            while self._orphans or self._garbage:
                while self._orphans and len(self._garbage) < _BATCH:
                    batch = self._orphans[:_ERASED_AT_ONCE]
                    oids = await self._engine.transact(_erase, batch)
                    self._garbage += [_Doomed(oid, self._engine.seq) for oid in oids]
                    del self._orphans[: len(batch)]
                    faults.reach(_ERASED)
                    await trio.lowlevel.checkpoint()
                if self._garbage:
                    batch = self._garbage[:_BATCH]
                    await self._drop_lists(batch)
                    await self._delete(batch, urgent or self.due > _BACKLOG_MAX)
                    del self._garbage[: len(batch)]

    async def _drop_lists(self, batch: list[_Doomed]) -> None:
        for oid in await self._engine.view(_find_loose, [doomed.oid for doomed in batch]):
            is_all = False
            while not is_all:
                try:
                    containers, is_all = await self._engine.transact(chunks.drop_some, oid)
                except Unavailable as error:
                    _log.warning(
                        "a deleted file's list of chunks cannot be dropped (fsck will name it): %s",
                        error,
                    )
                    break
                self._garbage += [_Doomed(container, self._engine.seq) for container in containers]
                faults.reach(_DROPPED)
                await trio.lowlevel.checkpoint()

    async def _delete(self, batch: list[_Doomed], urgent: bool) -> None:
        if not await self.covered(max(doomed.seq for doomed in batch), urgent):
            self._retry += batch
            return
        garbage = await self._engine.view(_read_garbage, [doomed.oid for doomed in batch])
        if not garbage:
            return
        await self._engine.barrier()
        failed = await delete_batch(self._servers, garbage)
        if failed and len(failed) != self._failed:
            error = next(iter(failed.values()))
            _log.info("objects of %d deleted files stay for now: %s", len(failed), error)
        self._failed = len(failed)
        self._retry += [doomed for doomed in batch if doomed.oid in failed]
        faults.reach(_DELETED)
        deleted = [oid for oid in garbage if oid not in failed]
        self.on_deleted(deleted)
        await self._engine.transact(_forget_garbage, deleted)


def _erase(tx: Transaction, inos: list[int]) -> list[int]:
    """Erase orphans; returns the oids whose objects are garbage now."""
    oids: list[int] = []
    for ino in inos:
        try:
            oids += namespace.remove_orphan(tx, ino)
        except Unavailable as error:
            _log.warning("deleted inode %d cannot be removed (fsck will name it): %s", ino, error)
    return oids


def _find_loose(tx: ReadTransaction, oids: list[int]) -> list[int]:
    return [oid for oid in oids if tx.get(keys.loose(oid)) is not None]


def _read_garbage(tx: ReadTransaction, oids: list[int]) -> dict[int, Garbage]:
    records = {oid: tx.get(keys.garbage(oid)) for oid in oids}
    return {oid: decode_garbage(record) for oid, record in records.items() if record is not None}


def _forget_garbage(tx: Transaction, oids: list[int]) -> None:
    for oid in oids:
        tx.delete(keys.garbage(oid))


async def _always(seq: int, urgent: bool) -> bool:
    return True
