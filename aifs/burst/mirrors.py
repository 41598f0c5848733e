"""Mirrors: copies that other hosts keep of burst copies of this one (docs/design/homes.md)."""

import time
from collections.abc import Collection, Mapping
from functools import partial

import trio

from aifs.burst.copy import BurstCopy
from aifs.core.errors import FsError, Stale
from aifs.core.log import logger
from aifs.core.tasks import run_all
from aifs.layout.hint import DEFAULT_POLICY
from aifs.layout.placement import weight
from aifs.meta import forms, mirrors, namespace
from aifs.meta.kv import Engine, ReadTransaction
from aifs.meta.records import Copy, Inode, MirrorOf
from aifs.peers.peers import CALL_S, Peers

KEEP = "burst.keep"
"""Service of a host that keeps mirrors: see files/home.py."""

_log = logger(__name__)

_KEEP_S = 600.0
_PRUNE_AT = 1000  # inode numbers

_TICK_S = 0.01
"""The step of the clock of file times, at most: writes within one have the same ctime."""


class Mirrors:
    """Those of the files that have their home here. Used from one trio thread."""

    def __init__(self, engine: Engine, peers: Peers) -> None:
        self._engine = engine
        self._peers = peers
        self.lacking: set[int] = set()
        """Inodes of files that no other host has taken a mirror of, when they were synced last."""
        self._prune_at = _PRUNE_AT
        """How many of these there are when it is looked which are drained by now."""
        self._has_said = False

    def wants(self, inode: Inode) -> bool:
        """Whether the file is to have a mirror while it is undrained."""
        policy = inode.policy or DEFAULT_POLICY
        return policy.mirror > 0 and inode.in_burst

    async def keep(self, inode: Inode, copy: BurstCopy) -> None:
        """Give a synced copy a durable mirror of all earlier writes, unless the file has left it;
        without a host for it, it is in ``lacking``, logged once. Raises Unavailable if the copy
        fails."""
        if not self.wants(inode):
            return
        await copy.ensure_open()
        rest_s = _TICK_S - (time.time_ns() - copy.stat().st_ctime_ns) / 1e9
        if 0 < rest_s <= _TICK_S:
            await trio.sleep(rest_s)  # what is written from now on shows
        state = copy.stat()
        now = MirrorOf(copy.id, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
        names, connected = self._peers.sessions, self._peers.connected
        own = names[self._peers.session]
        there = sorted(
            set(names.values()) - {own},
            key=lambda name: (name in connected, weight(name, inode.ino)),
            reverse=True,
        )
        found = await self._engine.view(mirrors.find_mirror, copy.id)
        if found is not None and found[1] == now and inode.ino not in self.lacking:
            return
        why = "no other host has the store mounted"
        for name in there:
            try:
                if await self._is_kept(name, inode.ino, copy.place, now):
                    self.lacking.discard(inode.ino)
                return
            except FsError as error:
                why = f"host {name}: {error}"
        self.lacking.add(inode.ino)
        if len(self.lacking) >= self._prune_at:
            self._prune_at = max(_PRUNE_AT, 2 * len(await self.find_lacking()))
        if not self._has_said:
            self._has_said = True
            _log.warning("inode %d has no mirror until it is drained: %s", inode.ino, why)

    async def keep_closed(self, copies: Mapping[int, BurstCopy]) -> None:
        """As ``keep``, of closed files, by their inode numbers."""
        await run_all(*(partial(self._keep_closed, ino, copies[ino]) for ino in copies))

    async def _keep_closed(self, ino: int, copy: BurstCopy) -> None:
        inode = await self._engine.view(namespace.find_inode, ino)
        if inode is not None and inode.copy == copy.place:  # else it has been drained meanwhile
            await self.keep(inode, copy)

    async def find_lacking(self) -> Collection[int]:
        """Those of ``lacking`` that are not drained yet; others are not in it any more."""
        known = frozenset(self.lacking)
        self.lacking -= known - (await self._engine.view(forms.find_burst_files, known)).keys()
        return self.lacking

    async def _is_kept(self, name: str, ino: int, place: Copy, now: MirrorOf) -> bool:
        """Whether a host has a mirror now; False: it is not the file any more."""
        is_late = False
        while True:
            # A host that cannot be reached may be there for the others, for as long as it lives.
            timeout_s = _KEEP_S if name in self._peers.connected else CALL_S
            try:
                asked = [place.server, ino, *now]
                await self._peers.call(name, KEEP, asked, timeout_s=timeout_s)
                return True
            except Stale:
                if not await self._engine.view(_has_copy, ino, place):
                    return False
                if is_late:
                    raise
            is_late = True  # its replica is behind ours
            await self._engine.shown()


class NoMirrors(Mirrors):
    """Where the store has one host: no other could take one."""

    def wants(self, inode: Inode) -> bool:
        return False

    async def keep_closed(self, copies: Mapping[int, BurstCopy]) -> None:
        pass


def _has_copy(tx: ReadTransaction, ino: int, place: Copy) -> bool:
    inode = namespace.find_inode(tx, ino)
    return inode is not None and inode.in_burst and inode.copy == place
