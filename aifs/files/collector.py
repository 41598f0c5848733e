"""Background removal of orphan inodes, and of objects that are garbage."""

import math
from collections.abc import Mapping, Set
from contextlib import suppress
from typing import NamedTuple

import trio

from aifs.burst.tier import BurstTier
from aifs.core import faults
from aifs.core.errors import Unavailable
from aifs.core.log import logger
from aifs.core.upkeep import NEVER_S, RETRY_S, Role, Upkeep, Work
from aifs.data.objects.object_set import delete_batch
from aifs.data.servers import Servers
from aifs.layout.placement import BURST_FIRST
from aifs.meta import chunks, keys, namespace
from aifs.meta.kv import Engine, ReadTransaction, Transaction
from aifs.meta.records import Garbage, decode_garbage
from aifs.store.backup import Backup

_log = logger(__name__)

_LINGER_S = 0.05  # what is deleted waits for more: many cost little more than one
_BATCH = 128
_ERASED_AT_ONCE = 32  # in one transaction, which takes half a millisecond
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


class DoomedObject(NamedTuple):
    """Garbage, and the states of the metadata whose backups may name it: ``since`` to ``until``."""

    oid: int
    since: int
    until: int


class Collector:
    """Takes orphans and garbage from the other modules and removes them in batches.

    Objects are deleted only after the transaction that made them garbage is durable (I5). If a
    server fails, the garbage record stays, and is tried again, at the latest by the next mount.
    Garbage that the newest backup of the metadata may need is *held* until there is a newer one
    (B4).

    Of several hosts one deletes an object (``is_ours``): its home a burst copy, its maker what was
    made in vain, the holder of the role all else, which it hears of by ``follow``.
    """

    def __init__(
        self,
        engine: Engine,
        servers: Servers,
        backup: Backup,
        tier: BurstTier | None,
        upkeep: Upkeep,
        role: Role,
    ) -> None:
        """``tier``: whose copies are collected; None where there are objects alone."""
        self._role = role
        self._engine = engine
        self._servers = servers
        self._backup = backup
        self._tier = tier
        self._upkeep = upkeep
        self._orphans: list[int] = []
        """Inodes without names that nobody has open, to be erased."""
        self._garbage: list[DoomedObject] = []
        """What is to be deleted now."""
        self._held: list[DoomedObject] = []
        """What may not be deleted before there is another backup."""
        self.retry: list[DoomedObject] = []
        """What could not be deleted."""
        self._failed = 0  # of the last batch
        self._retry_at_s = math.inf  # by trio's clock
        self._draining = trio.Lock()
        """Held by the task that deletes."""
        self._releasing = trio.Lock()
        """Held by the task that asks for backups."""

    def add_orphan(self, ino: int) -> None:
        """``ino`` has no name, no handle, and is unknown to the kernel."""
        self._orphans.append(ino)
        self._upkeep.at(Work.COLLECT, trio.current_time() + _LINGER_S)

    def add_garbage(self, oid: int) -> None:
        """Note that ``oid`` has, or is about to have, a garbage record, or is a loose list."""
        since, until = (0, None) if self._tier is None else self._tier.sole_span(oid)
        self._garbage.append(DoomedObject(oid, since, self._engine.seq if until is None else until))
        self._upkeep.at(Work.COLLECT, trio.current_time() + _LINGER_S)

    def follow(self, writes: Mapping[bytes, bytes | None]) -> None:
        """Another host has changed this: what is garbage by that, and ours. Does not block."""
        for key, value in writes.items():
            if value is None:
                continue
            if key[:1] == b"g":
                with suppress(Unavailable):  # fsck's to name
                    if self.is_ours(decode_garbage(value)):
                        self.add_garbage(keys.number(key))
            elif key[:1] == b"y" and self._is_from(keys.host_of(value)):
                self.add_garbage(keys.number(key))

    def is_ours(self, garbage: Garbage) -> bool:
        """Whether it is this host that deletes these objects."""
        first = garbage.layout.servers[0]
        if self._role.is_shared and first >= BURST_FIRST:
            return first in self._servers
        return self._is_from(garbage.maker)

    def _is_from(self, maker: int) -> bool:
        """Whether what that host may be making is ours; 0: nobody makes it."""
        return maker == self._engine.host or (self._role.held and not maker)

    @property
    def backlog(self) -> int:
        """Inodes and object sets that wait to be removed."""
        return self.due + len(self.retry)

    @property
    def due(self) -> int:
        """How many can be removed now, without those that failing servers keep."""
        return len(self._orphans) + len(self._garbage) + len(self._held)

    async def collect(self) -> float:
        """Remove what need not be held."""
        if trio.current_time() >= self._retry_at_s:
            self._garbage += self.retry
            self.retry, self._retry_at_s = [], math.inf
        await self._collect(_BATCH)
        if self._orphans or self._garbage:
            return _LINGER_S
        return NEVER_S

    async def release(self) -> float:
        """Have what is held collected when the newest backup does not need it any more."""
        await self._release(urgent=False)
        return NEVER_S

    async def drain(self, urgent: bool = False) -> None:
        """Remove all that is waiting; ``urgent``: without waiting for more. Raises NoSpace,
        Unavailable."""
        await self._collect()
        while self._held:
            await self._release(urgent)
            await self._collect()

    async def _collect(self, enough: int = 1) -> None:
        """Remove what need not be held; again if ``enough`` comes meanwhile."""
        async with self._draining:
            first = True
            while len(self._orphans) + len(self._garbage) >= (1 if first else enough):
                first = False
                shown = len(self._orphans)  # not those that come meanwhile
                if shown:
                    await self._engine.shown()  # a host that has one open has put its hold
                while shown and len(self._garbage) < _BATCH:
                    orphans = self._orphans[: min(shown, _ERASED_AT_ONCE)]
                    oids, damaged = await self._engine.transact(_erase, orphans)
                    del self._orphans[: len(orphans)]
                    shown -= len(orphans)
                    for ino, error in damaged:
                        _log.warning(
                            "deleted inode %d cannot be removed (fsck will name it): %s", ino, error
                        )
                    for oid in oids:
                        self.add_garbage(oid)
                    faults.reach(_ERASED)
                    await self._give_way()
                if self._garbage:
                    batch = self._garbage[:_BATCH]
                    await self._drop_lists(batch)
                    held = [d for d in batch if not self._backup.is_without(d.since, d.until)]
                    await self._delete(set(batch).difference(held))
                    del self._garbage[: len(batch)]
                    if held:
                        self._held += held
                        self._upkeep.wake(Work.RELEASE)
                    await self._give_way()

    async def _give_way(self) -> None:
        is_urgent = self._tier is not None and self._tier.is_pressed
        await self._upkeep.share.give_way(is_urgent)

    async def _release(self, urgent: bool) -> None:
        """Collect what is held, once no backup needs it; without a backup, try later."""
        async with self._releasing:
            count = len(self._held)
            if not count:
                return
            urgent |= self.due > _BACKLOG_MAX or self._tier is not None and self._tier.is_pressed
            covered = await self._backup.covered(max(d.until for d in self._held), urgent)
            released, self._held = self._held[:count], self._held[count:]
            if covered:
                self._garbage += released
                self._upkeep.wake(Work.COLLECT)
            else:
                self._put_off(released)

    def _put_off(self, doomed: list[DoomedObject]) -> None:
        """Try these again when something else is deleted, or after a while."""
        if doomed:
            self.retry += doomed
            self._retry_at_s = min(self._retry_at_s, trio.current_time() + RETRY_S)
            self._upkeep.at(Work.COLLECT, self._retry_at_s)

    async def _drop_lists(self, batch: list[DoomedObject]) -> None:
        makers = await self._engine.view(_find_loose, [doomed.oid for doomed in batch])
        for oid in (oid for oid, maker in makers.items() if self._is_from(maker)):
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
                for container in containers:
                    self.add_garbage(container)
                faults.reach(_DROPPED)
                await trio.lowlevel.checkpoint()

    async def _delete(self, batch: Set[DoomedObject]) -> None:
        found = await self._engine.view(_read_garbage, [doomed.oid for doomed in batch])
        garbage = {oid: (it.ino, it.layout) for oid, it in found.items() if self.is_ours(it)}
        if not garbage:
            return
        await self._engine.barrier()
        if any(layout.servers[0] < BURST_FIRST for _, layout in garbage.values()):
            # A host that has not heard of it yet would look there for bytes that are elsewhere.
            await self._engine.shown(of_all=True)
        await self._give_way()
        failed = await delete_batch(self._servers, garbage)
        if failed and len(failed) != self._failed:
            error = next(iter(failed.values()))
            _log.info("objects of %d deleted files stay for now: %s", len(failed), error)
        self._failed = len(failed)
        self._put_off([doomed for doomed in batch if doomed.oid in failed])
        faults.reach(_DELETED)
        await self._give_way()
        deleted = [oid for oid in garbage if oid not in failed]
        if self._tier is not None:
            self._tier.deleted(deleted)
        await self._engine.transact(_forget_garbage, deleted)


def _erase(tx: Transaction, inos: list[int]) -> tuple[list[int], list[tuple[int, Unavailable]]]:
    """Erase orphans. Returns the oids that are garbage now, and the inodes that stay, and why."""
    oids: list[int] = []
    damaged: list[tuple[int, Unavailable]] = []
    xattrs: dict[int, list[bytes]] = {}
    for ino in inos:
        try:
            xattrs[ino] = namespace.find_xattrs(tx, ino)
        except Unavailable as error:
            damaged.append((ino, error))
    for ino, found in xattrs.items():
        try:
            oids += namespace.remove_orphan(tx, ino, found)
        except Unavailable as error:
            damaged.append((ino, error))
    return oids, damaged


def _find_loose(tx: ReadTransaction, oids: list[int]) -> dict[int, int]:
    """The loose lists among these, and the host that may be making each."""
    records = {oid: tx.get(keys.loose(oid)) for oid in oids}
    return {oid: keys.host_of(record) for oid, record in records.items() if record is not None}


def _read_garbage(tx: ReadTransaction, oids: list[int]) -> dict[int, Garbage]:
    records = {oid: tx.get(keys.garbage(oid)) for oid in oids}
    return {oid: decode_garbage(record) for oid, record in records.items() if record is not None}


def _forget_garbage(tx: Transaction, oids: list[int]) -> None:
    for oid in oids:
        tx.delete(keys.garbage(oid))
