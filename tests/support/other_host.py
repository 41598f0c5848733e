"""Another host of a store, for tests in process: the test itself.

``SharedEngine`` is the engine of a host that shares its store. What the other host does is a
transaction function that ``elsewhere`` runs: it is in the replica at once, and the follower is
told, as an engine does with the feed. ``OtherHost`` has the operations that tests need.
"""

import time
from collections.abc import Callable
from typing import Any

import trio

from aifs.files.types import ROOT, Caller
from aifs.meta import dooming, namespace
from aifs.meta.kv import Follower, Result, Transaction
from aifs.meta.lmdb_engine import LmdbEngine
from aifs.meta.memtable import LeveledTransaction, LeveledView
from aifs.meta.records import Inode
from aifs.vfs import Filesystem, xattrs
from tests.support.engines import put_all


class _View(LeveledView):
    host = 1


class _Transaction(LeveledTransaction):
    host = 1


class SharedEngine(LmdbEngine):
    """``waits_for_hosts``: what this host changes is shown when the test says so (``let_go``)."""

    host = 1

    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self.follower: Follower | None = None
        """Who is told of what the other host does."""
        self.told_seq = 0
        """Of the last change set that it was told of."""
        self.shown_seq = 0
        """As ``note_shown`` was told last."""
        self._noted = trio.Event()
        self._gate: trio.Event | None = None
        self.waiting = 0
        """How many wait until what they have changed is shown."""

    # --- what the filesystem calls ---

    async def view(self, function: Callable[..., Result], *args: Any) -> Result:
        return function(_View(*self.begin(), self.seq), *args)

    async def transact(self, function: Callable[..., Result], *args: Any) -> Result:
        attempt = _Transaction(*self.begin(), self.seq + 1)
        result = function(attempt, *args)
        if attempt.writes:
            self.apply(attempt.writes)
        return result

    def follow(self, follower: Follower) -> None:
        assert self.follower is None
        self.follower = follower

    def note_shown(self, seq: int) -> None:
        assert self.shown_seq < seq <= self.seq
        self.shown_seq = seq
        self._noted.set()
        self._noted = trio.Event()

    async def shown(self, of_all: bool = False) -> None:
        if self._gate is not None:
            self.waiting += 1
            try:
                await self._gate.wait()
            finally:
                self.waiting -= 1

    # --- what the test calls ---

    async def elsewhere(self, function: Callable[..., Result], *args: Any) -> Result:
        """The other host runs a transaction function; this one has applied it on return, and its
        follower was told."""
        attempt = LeveledTransaction(*self.begin(), self.seq + 1)
        result = function(attempt, *args)
        writes = dict(attempt.writes)
        if not writes:
            return result
        self.apply(writes)
        if self.follower is not None:
            self.told_seq = self.seq
            self.follower(writes)
        return result

    async def until_shown(self) -> None:
        """All that the other host has done is shown on this one."""
        seq = self.told_seq
        while self.shown_seq < seq:
            await self._noted.wait()

    def hold_back(self) -> None:
        """From now on the other host shows nothing."""
        self._gate = trio.Event()

    def let_go(self) -> None:
        """It does."""
        assert self._gate is not None
        self._gate.set()
        self._gate = None


class OtherHost:
    """What the other host of ``fs`` does. Each method returns when that is shown here."""

    def __init__(self, fs: Filesystem) -> None:
        self._fs = fs
        engine = fs.store.engine
        assert isinstance(engine, SharedEngine)
        self.engine = engine

    async def run(self, function: Callable[..., Result], *args: Any) -> Result:
        result = await self.engine.elsewhere(function, *args)
        await self.engine.until_shown()
        return result

    async def put(self, key: bytes, record: bytes | None) -> None:
        """A record is this; None: it is erased."""
        await self.run(put_all, {key: record})

    async def make(
        self,
        parent: int,
        name: bytes,
        mode: int,
        data: bytes | None = None,
        caller: Caller = ROOT,
    ) -> Inode:
        """A new inode of any type; a file, or a symlink, has ``data``."""
        now, ino = time.time_ns(), await self._fs.ids.take()
        new = Inode(ino, mode, caller.uid, caller.gid, 1, 0, len(data or b""), 0, now, now, now)
        new.data = data
        return await self.run(namespace.create, parent, name, new, caller.umask)

    async def unlink(self, parent: int, name: bytes) -> Inode:
        return await self.run(namespace.unlink, parent, name, time.time_ns())

    async def rmdir(self, parent: int, name: bytes) -> Inode:
        return await self.run(namespace.rmdir, parent, name, time.time_ns())

    async def remove_tree(self, parent: int, name: bytes) -> Inode:
        return await self.run(dooming.doom, parent, name, time.time_ns(), 0)

    async def link(self, ino: int, parent: int, name: bytes) -> Inode:
        cookie = await self._fs.ids.take()
        return await self.run(namespace.link, ino, parent, name, cookie, time.time_ns())

    async def rename(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int = 0
    ) -> None:
        cookies = (await self._fs.ids.take(), await self._fs.ids.take())
        names = [(parent, name)] + [(new_parent, new_name)] * bool(flags)
        view = self._fs.store.engine.view
        moved = [(await view(namespace.get_dentry, *each)).ino for each in names]
        old, new = (parent, name), (new_parent, new_name)
        await self.run(namespace.rename, old, new, flags, cookies, time.time_ns(), moved)

    async def change(self, ino: int, **fields: Any) -> None:
        """These fields of an inode have other values."""
        await self.run(_change, ino, fields)

    async def set_xattr(self, ino: int, name: bytes, value: bytes) -> None:
        await self.run(xattrs.put, ino, name, value, 0, time.time_ns())

    async def remove_xattr(self, ino: int, name: bytes) -> None:
        await self.run(xattrs.remove, ino, name, time.time_ns())


def _change(tx: Transaction, ino: int, fields: dict[str, Any]) -> None:
    namespace.put_inode(tx, namespace.get_inode(tx, ino).but(**fields))
