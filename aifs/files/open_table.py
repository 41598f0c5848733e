"""Inodes in core: open ones, and files closed with a dirty mark; and the sizes shown to the kernel
of files that grow without its knowing (by another host, or past its page cache).

The kernel fills the page that holds a file's end with zeros. If it learns a larger size while it
keeps that page, programs read zeros in place of bytes. So replies have the old size until it
has dropped its pages.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager

import trio

from aifs.core.waiting import LOCK, waits_for
from aifs.files.collector import Collector
from aifs.files.handles import Handles
from aifs.files.kernel import Kernel
from aifs.files.open_inode import LostBytes, OpenInode
from aifs.meta import forms
from aifs.meta.kv import Engine
from aifs.meta.records import Inode


class Hold:
    """``size``: the largest told until it is let go. ``is_listed``: the kernel may keep it
    meanwhile."""

    __slots__ = ("free", "ino", "is_listed", "size")

    def __init__(self, ino: int, size: int) -> None:
        self.ino, self.size, self.is_listed = ino, size, False
        self.free = trio.Event()


class ToldSizes:
    """Used from one trio thread."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._held: dict[int, list[Hold]] = {}
        """By inode number, files of which the kernel may keep the page with a former end."""

    def hold(self, ino: int, size: int) -> Hold:
        """From now on the kernel is told this size of a file at most, until ``let_go``."""
        hold = Hold(ino, size)
        self._held.setdefault(ino, []).append(hold)
        self.lower(ino, size)
        return hold

    def lower(self, ino: int, size: int) -> None:
        """A file has had this size meanwhile; nothing if it is not held."""
        for hold in self._held.get(ino, ()):
            hold.size = min(hold.size, size)

    def let_go(self, hold: Hold) -> None:
        """The kernel has dropped the pages from before."""
        self._held[hold.ino].remove(hold)
        if not self._held[hold.ino]:
            del self._held[hold.ino]
        hold.free.set()
        if hold.is_listed:
            self._kernel.drop_attributes_soon([hold.ino])

    @contextmanager
    def held(self, ino: int, size: int) -> Iterator[None]:
        """Let a file of this size grow within the block; then the kernel has no old pages."""
        hold = self.hold(ino, size)
        try:
            yield
        finally:
            self.let_go(hold)

    def drop_pages_soon(self, ino: int, size: int) -> None:
        """A file of this size has grown. The request that is being answered may hold pages."""
        hold = self.hold(ino, size)
        self._kernel.drop_pages_soon(ino, lambda: self.let_go(hold))

    @property
    def inos(self) -> Set[int]:
        """The files of which the kernel is told a size from before."""
        return self._held.keys()

    def size(self, inode: Inode, is_listed: bool = False) -> int:
        """The size for the kernel now. It must not keep a size that is not the inode's, unless it
        ``is_listed`` with others."""
        holds = self._held.get(inode.ino)
        if holds is None:
            return inode.size
        told = min(hold.size for hold in holds)
        if inode.size <= told:
            self.lower(inode.ino, inode.size)
            return inode.size
        for hold in holds:
            hold.is_listed |= is_listed
        return told

    async def settled(self, ino: int) -> None:
        """Wait until the kernel may have the current size, not later growth. Never awaited by a
        request that may hold pages, or the lock of a directory."""
        for hold in tuple(self._held.get(ino, ())):
            await hold.free.wait()


class OpenTable:
    """Used from one trio thread."""

    def __init__(self, engine: Engine, handles: Handles, collector: Collector) -> None:
        self._engine = engine
        self.handles = handles
        self._collector = collector
        self.open: dict[int, OpenInode] = {}
        """By inode number, the files that are open."""
        self.claims: dict[int, Opening] = {}
        """By inode number, those whose in-core state is being made."""
        self.forgotten: set[int] = set()
        """Inodes that nobody can find any more, and that are open though they are not in core."""
        self.orphans: set[int] = set()
        """Inodes without names that the kernel may know; forgotten once it does not."""
        self.overtaken: dict[int, object] = {}
        """Files, maybe open here, that another host changed: tasks that need their bytes call
        ``ByHome.follow_bytes`` first. With a token of the last time."""
        self.stale: dict[int, int] = {}
        """Files changed by other hosts, until the kernel has no old pages: opening one drops them.
        With the ``seq`` of the last change."""
        self.told = ToldSizes(handles.kernel)
        """The sizes that the kernel is told."""
        self.lost: dict[int, LostBytes] = {}
        """By inode number, what closed files have lost."""
        self.unsynced: dict[int, object | None] = {}
        """Files closed with a dirty mark: a token of that close; None if the objects are not
        settled, or may be mapped."""
        self.mapped: set[int] = set()
        """Those of them that programs may have mapped for writing."""

    # --- inodes in core, or on their way there ---

    def is_open(self, ino: int) -> bool:
        """Whether it is in core, or is being opened."""
        return ino in self.open or ino in self.claims

    def recall(self, ino: int) -> bool:
        """As ``is_open``, also of an inode that is lent. If it is not open, it is lent no more."""
        return self.is_open(ino) or self.handles.recall(ino)

    def opening(self, *inos: int, lent: bool = False) -> "_Claims":
        """Claim those inodes that are not open, nor being opened: requests to open one wait until
        this ends. ``lent``: also lent ones, which stay so; else they are taken back."""
        return _Claims(self, inos, lent)

    def begin_opening(self, ino: int) -> None:
        """``opening`` of one inode that is not open, nor being opened, and not lent or stays
        lent."""
        self.claims[ino] = Opening()

    def end_opening(self, ino: int) -> None:
        """Its end."""
        claim, file = self.claims.pop(ino), self.open.get(ino)
        if claim.stored is not None and file is not None:
            file.adopt(claim.stored)
        if claim.forgotten:
            self.forget(ino)
        claim.end()

    def adopt(self, stored: Inode) -> OpenInode | None:
        """Take a transaction's record of an inode over; the open inode, if there is one."""
        file = self.open.get(stored.ino)
        if file is not None:
            file.adopt(stored)
        elif stored.ino in self.claims:
            claim = self.claims[stored.ino]
            if claim.stored is None or claim.stored.seq < stored.seq:
                claim.stored = stored
        return file

    def forget(self, ino: int) -> None:
        """Nobody can find this inode any more: it is removed when it is closed."""
        file = self.open.get(ino)
        if file is not None:
            file.forgotten = True
        elif ino in self.claims:
            self.claims[ino].forgotten = True
        elif self.handles.recall(ino):
            self.forgotten.add(ino)
        else:
            self.lost.pop(ino, None)
            self._collector.add_orphan(ino)

    def close_unseen(self, ino: int) -> None:
        """A handle of an inode that is lent is closed, which cannot be brought into core."""
        if not self.handles.close_unseen(ino) and ino in self.forgotten:
            self.forgotten.discard(ino)
            self._collector.add_orphan(ino)

    def recall_all(self) -> None:
        """What is lent was lent by rules that have changed."""
        self.handles.recall_all()

    def programs_have_open(self) -> list[int]:
        """The numbers of the inodes that programs have open. Takes some milliseconds."""
        return [ino for ino, file in self.open.items() if file.users] + self.handles.lent_open()

    def changes_unseen(self, ino: int) -> bool:
        """Whether a file may change unseen by the kernel, which keeps no attributes then: by way of
        its home, or by a mapping."""
        file = self.open.get(ino)
        return (file is not None and file.is_joined) or self.is_mapped(ino)

    def is_mapped(self, ino: int) -> bool:
        """Whether programs may write to a local file by a mapping, also after they closed it."""
        file = self.open.get(ino)
        is_open_so = file is not None and file.is_mapped
        return is_open_so or ino in self.mapped

    # --- what other hosts have changed ---

    def cached_size(self, ino: int) -> int | None:
        """The size of an open file whose pages the kernel may keep; or None."""
        file = self.open.get(ino)
        if file is None:
            return self.handles.lent_size(ino)
        return file.inode.size if file.cached else None

    def overtake(self, ino: int) -> None:
        """Another host has begun to change a file, or has ended. Does not block."""
        self.take_places(ino)
        if self.is_open(ino):
            self.overtaken[ino] = object()
        file = self.open.get(ino)
        if file is not None:
            file.changes += 1  # what is being made of the bytes here must not count

    def take_places(self, ino: int) -> None:
        """After a change by another host: reads come to us until core has looked. Does not
        block."""
        self.handles.places.take(ino)
        file = self.open.get(ino)
        if file is not None:
            file.placed = None  # nor are any given that are being looked for

    def users_of(self, oid: int, ino: int) -> list[OpenInode]:
        """The open files that have the objects ``oid``, which are named by ``ino``."""
        file = self.open.get(ino)
        if file is not None and file.inode.oid == oid and not file.inode.named:
            return [file]
        return [file for file in self.open.values() if file.inode.oid == oid]

    def overtake_objects(self, oid: int, but: OpenInode | None = None) -> None:
        """Have all open files with the objects ``oid``, except ``but``, look again: they lie, or
        are read, in another way, as another host or a file that shares them has recorded. Does not
        block."""
        for ino in [ino for ino, file in self.open.items() if file.inode.oid == oid]:
            if self.open[ino] is not but:
                self.overtake(ino)

    # --- dirty marks of closed files, and what these have lost ---

    def proof_of_rest(self, ino: int) -> object | None:
        """The token of a closed file with a dirty mark that was not mapped for writing; it holds
        while in ``unsynced``, and the file is closed."""
        return None if self.is_open(ino) else self.unsynced.get(ino)

    def is_unsynced(self, ino: int) -> bool:
        """Whether a regular file may have bytes or attributes that are not on stable storage."""
        file = self.open.get(ino)
        return ino in self.unsynced if file is None else file.marked or file.unsaved

    def note_lost(self, ino: int, lost: LostBytes) -> None:
        """Bytes of a file could not be made durable, which was not open when that was tried."""
        file = self.open.get(ino)
        if file is not None:
            file.lost = lost
        elif ino in self.unsynced:
            self.unsynced[ino], self.lost[ino] = None, lost

    def has_lost(self, ino: int) -> bool:
        """Whether bytes of a closed file are lost: another sync changes nothing."""
        return ino in self.lost

    async def forget_marks(self, synced: Mapping[int, object | None]) -> None:
        """Remove the dirty marks of closed files; see ``forgetting``."""
        with self.forgetting(synced) as inos:
            if inos:
                await self._engine.transact(forms.remove_marks, inos)

    @contextmanager
    def forgetting(self, synced: Mapping[int, object | None]) -> Iterator[Collection[int]]:
        """Yield which of these synced files nobody has opened since, given their tokens of before;
        a transaction within the block removes their dirty marks. It must not wait for openers."""
        quiet = [
            ino
            for ino, token in synced.items()
            if token is not None and self.unsynced.get(ino) is token
        ]
        with self.opening(*quiet, lent=True) as inos:
            yield inos
            for ino in inos:
                self.unsynced.pop(ino, None)


class _Claims:
    """A context manager: of some inodes those that could be claimed."""

    __slots__ = ("_inos", "_lent", "_table")

    def __init__(self, table: OpenTable, inos: Iterable[int], lent: bool) -> None:
        self._table, self._inos, self._lent = table, inos, lent

    def __enter__(self) -> Collection[int]:
        is_open = self._table.is_open if self._lent else self._table.recall
        self._inos = {ino for ino in self._inos if not is_open(ino)}
        for ino in self._inos:
            self._table.begin_opening(ino)
        return self._inos

    def __exit__(self, *_: object) -> None:
        for ino in self._inos:
            self._table.end_opening(ino)


class Opening:
    """A claim on an inode that is not open. ``stored``: its newest record meanwhile; ``forgotten``:
    see OpenInode."""

    __slots__ = ("_ended", "forgotten", "stored")

    def __init__(self) -> None:
        self.stored: Inode | None = None
        self.forgotten = False
        self._ended: trio.Event | None = None  # made by a task that waits, because few do

    async def wait(self) -> None:
        """Wait for its end."""
        if self._ended is None:
            self._ended = trio.Event()
        with waits_for(LOCK):
            await self._ended.wait()

    def end(self) -> None:
        if self._ended is not None:
            self._ended.set()
