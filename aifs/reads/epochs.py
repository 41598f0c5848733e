"""All epochs read here, and the work for them. Readers repeat what they read, by ``order``, a call
or attribute (words: datasets/ahead.py); one silent for EXPIRES_S has ended.

A file is brought by reading it into blocks (``Stager.warm``); which, and when, is decided here.
Nobody is worse off than without:

- the reader may read each of them, by its mode and those of the directories above, at that time;
- blocks take what nothing else takes, and give way before a writer waits;
- what is kept for readers that have not come to it is bounded: all epochs together have three
  quarters of the room of blocks, each an equal part of it, and no more than it asks for. Blocks
  that an epoch has used up give way first.
"""

import heapq
from array import array
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any, NamedTuple

import trio

from aifs.burst.tier import BurstTier
from aifs.core.errors import (
    Busy,
    DatasetError,
    FsError,
    Invalid,
    NotADirectory,
    NotFound,
    NotSupported,
    Stale,
)
from aifs.core.log import logger
from aifs.core.upkeep import NEVER_S, Work
from aifs.datasets.ahead import Announced, FileNeed, files_needed, parse, shares_read
from aifs.datasets.index import INDEX_NAME, Index, Version, decode
from aifs.datasets.sequence import Epoch, EpochOrder, arithmetic_for
from aifs.files import rights
from aifs.files.asks import DIRECTORY, Hint, HintCall
from aifs.files.file_io import FileIO
from aifs.files.permissions import READ, SEARCH, asker_of, require_may
from aifs.files.services import Services
from aifs.files.stage import find_in_blocks
from aifs.files.types import CallerLike
from aifs.meta import namespace
from aifs.meta.askers import Asker
from aifs.meta.kv import Engine, ReadTransaction
from aifs.meta.records import Inode

_log = logger(__name__)


INDEX_MAX = 64 << 20
"""Bytes of an index that is followed: of some 2.5 million blocks."""

_AT_ONCE = 64
"""Files that are looked up in one view."""


_JOIN_S = 0.1
"""How long to wait for others that begin the same epoch, before a plan is made for all."""


class _Heard(NamedTuple):
    """What a reader has said last: how far it was, and when, by trio's clock."""

    row: int
    time_s: float


class FollowedEpoch:
    """Used from one trio thread, by one task at a time but where said."""

    def __init__(self, directory: int, asker: Asker, said: Announced) -> None:
        """``asker`` is the reading user; with these rights all is looked up."""
        self.asker = asker
        self.error = ""
        """Why not all is read ahead; '' as long as all is well."""
        self.is_loaded = False
        """Whether it has been tried."""
        self.ready_s = 0.0
        """From then on, by trio's clock, readers that begin at the same time have said so."""
        self._directory = directory
        self._order = said.order
        self._world = said.world
        self._wanted = said.ahead
        self._readers: dict[int, _Heard] = {}
        """Those of this host, by number."""
        self._epoch: Epoch | None = None
        """None: its index is not known."""
        self._inos = array("Q")
        """By number of the file; 0: it cannot be read ahead."""
        self._ends: list[int] = []
        """Of each window the bytes of all files until its end."""
        self._planned = 0
        """The next window to be planned,"""
        self._planned_for: Sequence[int] = ()
        """for these readers."""
        self._needs: deque[FileNeed] = deque()
        """Of the windows that have been planned, what is not brought yet, in order."""
        self._kept: dict[int, int] = {}
        """Files kept for readers that have not come to their ends, or on their way: bytes by
        number."""
        self._lasts: list[tuple[int, int]] = []
        """Of all these, until which row they are needed, and which it is: a heap."""
        self._firsts: dict[int, int] = {}
        """Of those that are on their way, from which row on they are needed."""
        self.there: set[int] = set()
        """Inode numbers of those that are there."""
        self.kept_bytes = 0
        """Of all files that are kept."""

    # --- readers ---

    def hear(self, said: Announced, now_s: float) -> None:
        """Readers say how far they are, or that they read no more. Does not block; at any time."""
        for reader in said.readers:
            if said.row is None:
                self._readers.pop(reader, None)
            else:
                before = self._readers.get(reader)
                if before is not None and said.row < before.row:
                    self._planned_for = ()  # it has begun anew: what was past is needed again
                if before is None:
                    self.ready_s = now_s + _JOIN_S
                self._readers[reader] = _Heard(said.row, now_s)
                self._wanted = said.ahead

    def forget_readers(self, before_s: float) -> None:
        """Those that have said nothing since then read no more. Does not block; at any time."""
        for reader in [it for it, heard in self._readers.items() if heard.time_s < before_s]:
            del self._readers[reader]

    def due_s(self, now_s: float, expires_s: float) -> float:
        """When to look at it again if nothing is heard of it until then."""
        if now_s < self.ready_s:
            return self.ready_s
        heard_s = [heard.time_s for heard in self._readers.values()]
        return min(heard_s) + expires_s if heard_s else now_s

    @property
    def is_read(self) -> bool:
        return bool(self._readers)

    @property
    def row(self) -> int:
        """Up to here all readers have read their shares."""
        return min((heard.row for heard in self._readers.values()), default=0)

    @property
    def is_late(self) -> bool:
        """Whether readers have come to a file that is not there yet."""
        firsts = list(self._firsts.values())
        if self._needs:
            firsts.append(self._needs[0].first)
        return any(first <= self.row for first in firsts)

    # --- what it is made of ---

    async def load(self, engine: Engine, io: FileIO) -> None:
        """Learn what the dataset is made of. Raises FsError; Invalid for what is no index."""
        self.is_loaded = True
        inode = await engine.view(_find_readable, self._directory, INDEX_NAME.encode(), self.asker)
        if inode.size > INDEX_MAX:
            raise Invalid(f"the index of the dataset has more than {INDEX_MAX} bytes")
        data = await io.read_whole(inode.ino)
        try:
            index = await trio.to_thread.run_sync(decode, data)
        except DatasetError as error:
            raise Invalid(str(error)) from None
        epoch = await trio.to_thread.run_sync(_epoch_of, index, self._order)
        await self._look_up(engine, io, epoch)
        sizes = [sum(index.sizes[file] for file in window) for window in epoch.windows]
        self._ends = list(accumulate(sizes))
        self._epoch = epoch
        self._plan_anew()

    async def _look_up(self, engine: Engine, io: FileIO, epoch: Epoch) -> None:
        paths = epoch.index.paths
        for first in range(0, len(paths), _AT_ONCE):
            some = paths[first : first + _AT_ONCE]
            for inode in await engine.view(_find_all, self._directory, some, self.asker):
                file = len(self._inos)
                self._inos.append(0 if inode is None else inode.ino)
                if inode is None:
                    self._note(f"{paths[file]!r} is not there, or the reader may not read it")
                    continue
                try:
                    self._require_same(epoch, file, io.inodes.current(inode))
                except Stale as error:
                    self._inos[file] = 0
                    self._note(str(error))
            await trio.lowlevel.checkpoint()

    def _note(self, error: str) -> None:
        self.error = self.error or error

    def _require_same(self, epoch: Epoch, file: int, inode: Inode) -> None:
        """Raises Stale for another file than indexed."""
        if Version(inode.size, inode.mtime_ns) != epoch.index.version(file):
            name = epoch.index.paths[file].decode("utf-8", "backslashreplace")
            raise Stale(f"{name} has changed since the dataset was indexed")

    # --- what is next ---

    def _plan_anew(self) -> None:
        epoch = self._epoch
        assert epoch is not None  # it is loaded
        self._planned_for = tuple(sorted(self._readers))
        self._planned = epoch.window_of(self.row) if len(epoch.windows) else 0
        self._needs.clear()

    def room(self, limit: int) -> int:
        """Of ``limit`` bytes that it may have kept for it, how many it has kept."""
        return min(self._wanted or limit, limit)

    async def take(self, limit: int) -> FileNeed | None:
        """The next file to bring, kept from now on: ``limit`` bytes at most together. None: none
        for now."""
        epoch, most = self._epoch, self.room(limit)
        if epoch is None or not self._readers:
            return None
        if self._planned_for != tuple(sorted(self._readers)):
            self._plan_anew()
        while True:
            while self._needs and self._is_settled(epoch, self._needs[0], most):
                self._needs.popleft()
            if self._needs:
                break
            if not self._may_plan(epoch, most):
                return None
            shares = shares_read(self._world, self._planned_for, self._order.shares)
            number, self._planned = self._planned, self._planned + 1
            readers = self._planned_for
            found = await trio.to_thread.run_sync(files_needed, epoch, number, shares, most)
            if readers == self._planned_for:
                self._needs.extend(found)
        size = epoch.index.sizes[self._needs[0].file]
        if self.kept_bytes + size > most:
            return None
        need = self._needs.popleft()
        self._kept[need.file] = size
        self.kept_bytes += size
        self._firsts[need.file] = need.first
        heapq.heappush(self._lasts, (need.last, need.file))
        return need

    def _is_settled(self, epoch: Epoch, need: FileNeed, most: int) -> bool:
        """Whether nothing has to be done, or can be. A half read file would be fetched twice."""
        is_past = need.first + need.last <= 2 * self.row or need.file in self._kept
        return is_past or not self._inos[need.file] or epoch.index.sizes[need.file] > most

    def _may_plan(self, epoch: Epoch, most: int) -> bool:
        """Whether another window is near enough, so that files not worth keeping are not planned
        early."""
        if self._planned >= len(epoch.windows):
            return False
        now = epoch.window_of(self.row)
        return self._planned <= now + 1 or self._ends[self._planned - 1] - self._ends[now] < most

    # --- what becomes of it ---

    async def find(self, engine: Engine, io: FileIO, need: FileNeed) -> Inode:
        """The file as it is now. Raises FsError; Stale, AccessDenied if it is none to be read."""
        assert self._epoch is not None  # it has given the need
        inode = await engine.view(namespace.get_inode, self._inos[need.file])
        require_may(inode, self.asker, READ)
        inode = io.inodes.current(inode)
        self._require_same(self._epoch, need.file, inode)
        return inode

    # Meanwhile its readers may have come past it: then nothing is known of it any more.

    def settle(self, need: FileNeed, is_there: bool) -> None:
        """It is there, or is left out. Does not block; at any time."""
        self._firsts.pop(need.file, None)
        if need.file not in self._kept:
            return
        if is_there:
            self.there.add(self._inos[need.file])
        else:
            self.kept_bytes -= self._kept[need.file]
            self._kept[need.file] = 0

    def leave_out(self, need: FileNeed, error: str) -> None:
        """It cannot be read ahead. Does not block; at any time."""
        self._note(error)
        self.settle(need, False)

    def pop_used(self) -> list[int]:
        """Inodes of files that all readers have passed since the last call. Does not block."""
        found = []
        while self._lasts and self._lasts[0][0] <= self.row:
            file = heapq.heappop(self._lasts)[1]
            self.kept_bytes -= self._kept.pop(file)
            if (ino := self._inos[file]) in self.there:
                self.there.remove(ino)
                found.append(ino)
        return found

    def tell(self, limit: int) -> dict[str, Any]:
        """For the hint."""
        epoch, order = self._epoch, self._order
        return {
            "seed": order.seed,
            "epoch": order.epoch,
            "shares": order.shares,
            "window": order.window,
            "readers": sorted(self._readers),
            "world": self._world,
            "done_rows": self.row * order.shares,
            "rows": 0 if epoch is None else epoch.total_rows,
            "kept_files": len(self.there),
            "kept_bytes": self.kept_bytes,
            "limit_bytes": self.room(limit),
            "waiting": self.is_late,
        }


def _epoch_of(index: Index, order: EpochOrder) -> Epoch:
    return Epoch(index, order, arithmetic_for(index))


def _find_readable(tx: ReadTransaction, directory: int, path: bytes, asker: Asker) -> Inode:
    """A file below a directory. Raises NotFound, AccessDenied, Invalid for no file."""
    inode = namespace.get_directory(tx, directory)
    for name in path.split(b"/"):
        require_may(inode, asker, SEARCH)
        inode = namespace.get_inode(tx, namespace.get_dentry(tx, inode.ino, name).ino)
    require_may(inode, asker, READ)
    if not inode.is_file:
        raise Invalid("no regular file")
    return inode


def _find_all(
    tx: ReadTransaction, directory: int, paths: Sequence[bytes], asker: Asker
) -> list[Inode | None]:
    """None: it is missing, or unreadable."""
    found: list[Inode | None] = []
    for path in paths:
        try:
            found.append(_find_readable(tx, directory, path, asker))
        except FsError:
            found.append(None)
    return found


EXPIRES_S = 60.0

WORKERS = 4
"""Files that are brought at a time."""

_EPOCHS_MAX, _OF_USER_MAX = 16, 4
"""How many are followed; and of one user who is not root. Each may keep an index in memory."""

_Key = tuple[int, int, EpochOrder, int]
"""Directory, user, order, world."""


class Epochs:
    """Used from one trio thread."""

    def __init__(
        self,
        services: Services,
        io: FileIO,
        tier: BurstTier,
    ) -> None:
        self._engine = services.engine
        self._io = io
        self._tier = tier
        self._upkeep = services.upkeep
        self._options = services.options
        self._epochs: dict[_Key, FollowedEpoch] = {}
        """The user that has had a file brought last is the last."""
        self._choosing = trio.Lock()
        """Held by the task that looks what is next."""
        self._files = 0
        """How many have been brought since the mount."""

    # --- what is said ---

    async def order(self, ino: int, text: str, caller: CallerLike) -> None:
        """Readers of a directory's dataset say what they read; '': this user's have ended. Raises
        Invalid, NotADirectory, NotSupported, ReadOnly; Busy for too many epochs."""
        self._options.require_writable()
        inode = await self._engine.view(namespace.get_inode, ino)
        if not inode.is_dir:
            raise NotADirectory()
        if not text:
            for key in [key for key in self._epochs if key[:2] == (ino, caller.uid)]:
                del self._epochs[key]
            return
        said = parse(text)
        if not self._tier.has_devices:
            raise NotSupported("the store has no burst tier")
        await self._engine.view(_require_index, ino)
        key = (ino, caller.uid, said.order, said.world)
        epoch = self._epochs.get(key)  # after all waiting: others begin the same one
        if epoch is None:
            if said.row is None:
                return
            self._require_few(caller.uid)
            epoch = self._epochs[key] = FollowedEpoch(ino, asker_of(caller), said)
        epoch.hear(said, trio.current_time())
        self._upkeep.at(Work.AHEAD, epoch.ready_s)

    HINTS = (
        Hint(
            "order",
            DIRECTORY,
            "epochs of the dataset in it that are read, and what is there ahead of the readers",
            rights.lister,
            rights.lister,  # the kernel asks for write permission before setxattr(2) besides
            get=lambda epochs, ask: epochs.tell(ask.ino, ask.caller),
            set=lambda epochs, ask: epochs.order(ask.ino, ask.text, ask.caller),
            call=HintCall(
                rights.lister,
                lambda epochs, ask: epochs.order(ask.ino, ask.fields.get("order", ""), ask.caller),
                {"order": str},
                "An epoch of the dataset in the directory is read in this order, and what comes "
                "next is brought into the burst tier. order: as the attribute is set, "
                "'seed=7,epoch=1,world=8,rank=3,done=1000'. To be said again within a minute, with "
                "how far it is. EINVAL: no order, or no index of a dataset there; EBUSY: too many "
                "epochs are read; EOPNOTSUPP: there is no burst tier.",
            ),
        ),
    )

    def _require_few(self, uid: int) -> None:
        theirs = sum(key[1] == uid for key in self._epochs)
        if len(self._epochs) >= _EPOCHS_MAX or (uid and theirs >= _OF_USER_MAX):
            raise Busy("too many epochs are read already; those that nobody reads end in a minute")

    def tell(self, ino: int, caller: CallerLike) -> dict[str, Any]:
        """The epochs of a directory's dataset, or {}; file names to their users alone."""
        limit = self._limit()
        found = []
        for (directory, uid, *_), epoch in self._epochs.items():
            if directory == ino:
                told = epoch.tell(limit)
                if caller.uid in (0, uid):
                    told["error"] = epoch.error
                found.append(told)
        return {"epochs": found} if found else {}

    def status(self) -> dict[str, Any]:
        """The status. ``waiting``: epochs whose readers have come to missing files."""
        epochs = self._epochs.values()
        return {
            "epochs": len(epochs),
            "kept_files": sum(len(epoch.there) for epoch in epochs),
            "kept_bytes": sum(epoch.kept_bytes for epoch in epochs),
            "brought_files": self._files,
            "waiting": sum(epoch.is_late for epoch in epochs),
        }

    def _limit(self) -> int:
        return self._tier.blocks.room * 3 // 4 // max(1, len(self._epochs))

    # --- in the background ---

    async def work(self) -> float:
        """Bring files as long as there are any; see Upkeep."""
        while (found := await self._next()) is not None:
            await self._bring(*found)
        now_s = trio.current_time()
        due_s = [epoch.due_s(now_s, EXPIRES_S) for epoch in self._epochs.values()]
        return max(0.0, min(due_s, default=NEVER_S) - now_s)

    async def _next(self) -> tuple[FollowedEpoch, FileNeed] | None:
        async with self._choosing:
            for key, epoch in list(self._epochs.items()):
                now_s = trio.current_time()
                epoch.forget_readers(before_s=now_s - EXPIRES_S)
                if self._epochs.get(key) is not epoch:
                    continue  # it has ended meanwhile
                if not epoch.is_read:
                    del self._epochs[key]
                    continue
                if now_s < epoch.ready_s:
                    continue
                if not epoch.is_loaded:
                    await self._load(epoch)
                await self._let_go(epoch)
                need = await epoch.take(self._limit())
                if need is not None:
                    if self._epochs.pop(key, None) is not None:
                        self._epochs[key] = epoch
                    return epoch, need
        return None

    async def _load(self, epoch: FollowedEpoch) -> None:
        try:
            await epoch.load(self._engine, self._io)
        except FsError as error:
            epoch.error = str(error)
            _log.info("an epoch is not read ahead: %s", error)

    async def _let_go(self, epoch: FollowedEpoch) -> None:
        for ino in epoch.pop_used():
            if any(ino in each.there for each in self._epochs.values()):
                continue
            with suppress(NotFound):
                inode = await self._engine.view(namespace.get_inode, ino)
                if inode.read_as is not None:  # of a container neighbours may be needed
                    self._tier.blocks.want(inode.oid, 0, inode.size, False)

    async def _bring(self, epoch: FollowedEpoch, need: FileNeed) -> None:
        try:
            inode = await epoch.find(self._engine, self._io, need)
        except FsError as error:
            epoch.leave_out(need, str(error))
            return
        if inode.copy is not None or inode.layout is None:
            epoch.settle(need, inode.copy is not None)
            return
        self._upkeep.wake(Work.AHEAD)  # others may bring what comes after it
        blocks = self._tier.blocks
        was_there = (await self._engine.view(find_in_blocks, inode, blocks)).is_whole
        is_there = await self._io.stager.warm(inode.ino)
        self._files += is_there and not was_there
        if is_there:
            epoch.settle(need, True)
        else:
            epoch.leave_out(need, f"inode {inode.ino} has no room in blocks, or can be in none")


def _require_index(tx: ReadTransaction, directory: int) -> None:
    try:
        namespace.get_dentry(tx, directory, INDEX_NAME.encode())
    except NotFound:
        raise Invalid(
            "the directory has no index of a dataset; `aifs dataset index DIR` makes one"
        ) from None
