"""The files of groups: withheld from the usual drain when closed, synced (buffered), prepared while
there are leases, and stored together once committed. Failures go back to the usual drain."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import trio

from aifs.burst.tier import BurstTier
from aifs.core import faults
from aifs.core.errors import FsError
from aifs.core.log import logger
from aifs.core.tasks import run_all
from aifs.data.patience import giving_up
from aifs.files.drain import Drain
from aifs.files.draining import DrainOutcome
from aifs.files.file_io import FileIO
from aifs.files.writeback import WriteBack
from aifs.meta import groups
from aifs.meta.kv import Engine
from aifs.meta.records import Inode
from aifs.saves.group import DirectoryGroup, File, FileState
from aifs.saves.group_drain import GroupDrain, Prepared
from aifs.saves.sharing import Asked, Chunks

_log = logger(__name__)

_STORED = faults.declare(
    "vfs.group.stored",
    "files of a group are on the capacity tier, the group is not on record as durable",
)

_AHEAD = 256
"""Files prepared before their group is complete; each holds a lease and descriptors."""

_PREPARERS = 2
"""Files that are prepared at a time; each is hashed on several processors."""

_SYNCERS = 16
_TRIES = 7
_BACK_OFF_S, _BACK_OFF_FACTOR = 0.005, 4
"""The first is short: the kernel drops a writer's descriptor some time after the close."""

_FULL = 1.0  # pressure at which the burst tier admits no new files


class Members:
    """The files of all live groups until stored. ``run`` does the work; used from one trio
    thread."""

    def __init__(
        self,
        engine: Engine,
        tier: BurstTier,
        io: FileIO,
        writeback: WriteBack,
        drain: Drain,
        group_drain: GroupDrain,
    ) -> None:
        self.group_of: dict[int, DirectoryGroup] = {}
        """By inode number: the live group that the file belongs to."""
        self.is_watched = False
        """Whether ``relieve`` is going to be called again: it has seen withheld files."""
        self._engine = engine
        self._tier = tier
        self._io = io
        self._writeback = writeback
        self._drain = drain
        self._group_drain = group_drain
        self._unsynced: deque[tuple[DirectoryGroup, File]] = deque()
        """Files that have been closed and are to be made durable, in order."""
        self._waiting: deque[tuple[DirectoryGroup, File]] = deque()  # to be prepared
        self._syncers = self._preparers = 0  # workers that are at it
        self._prepared: set[Prepared] = set()
        """Those whose drain has begun."""
        self._storing: set[Prepared] = set()
        """Some of these, which the task that stores them releases."""
        self._nursery: trio.Nursery | None = None
        """Where work runs; None while ``run`` does not."""

    # --- what happens to files; none of these blocks ---

    def closed(self, group: DirectoryGroup, inode: Inode) -> bool:
        """A file of an open group was closed. Whether the usual drain must not have it."""
        file = group.closed(inode.ino, inode.size, trio.current_time())
        self.group_of[inode.ino] = group
        group.wake()
        if not inode.in_burst:
            file.state = FileState.DURABLE
            return False
        if file.state is FileState.DURABLE:
            file.state = FileState.BUFFERED
        if file.state is FileState.USUAL:
            return False
        if self._tier.pressure >= _FULL or not self._drain.withhold(inode):
            file.state = FileState.USUAL
            return False
        self.prepare_soon(group, file)
        return True

    def closed_late(self, inode: Inode) -> bool:
        """A file of a complete group was closed. Whether the usual drain must not have it."""
        group = self.group_of[inode.ino]
        file = group.files[inode.ino]
        file.closes += 1
        file.size = inode.size
        if file.state is FileState.WRITING:
            file.state = FileState.BUFFERED
        group.wake()
        return file.state not in (FileState.DURABLE, FileState.USUAL) and self._drain.withhold(
            inode
        )

    def opened(self, ino: int) -> None:
        """A file was opened for writing: its commit is void."""
        group = self.group_of.get(ino)
        if group is None:
            return
        group.opened(ino)
        file = group.files[ino]
        if not group.is_open and file.state not in (FileState.STORING, FileState.DURABLE):
            self._drop(group, file)
        group.wake()

    def _drop(self, group: DirectoryGroup, file: File) -> None:
        """Leave it to the usual drain."""
        self.give_back(group, [file])
        group.remove(file.ino)
        if self.group_of.get(file.ino) is group:
            del self.group_of[file.ino]

    def moved(self, group: DirectoryGroup, ino: int) -> None:
        """An open group's file was closed elsewhere, and may change groups."""
        del self.group_of[ino]
        self.forget(group.remove(ino))
        self._drain.give_back([ino])
        group.wake()

    def restore(self, group: DirectoryGroup, inode: Inode, since: float) -> None:
        """A file that an earlier mount has left; it is on the drain's list if it is undrained."""
        file = group.closed(inode.ino, inode.size, since)
        self.group_of[inode.ino] = group
        if not inode.in_burst:
            file.state = FileState.DURABLE
        elif self._drain.withhold(inode):
            self.prepare_soon(group, file)
        else:
            file.state = FileState.USUAL

    def gone(self, ino: int) -> None:
        """The file has lost its last name."""
        group = self.group_of.pop(ino, None)
        if group is not None:
            self.forget(group.remove(ino))
            group.wake()

    def leave(self, group: DirectoryGroup) -> None:
        """The group has ended."""
        self._group_drain.let_go(group.record.id)
        self.give_back(group, list(group.files.values()))
        for ino in group.files:
            if self.group_of.get(ino) is group:
                del self.group_of[ino]

    def settle(self, group: DirectoryGroup) -> None:
        """The group is complete: files still written to do not count, and are kept for later."""
        for file in list(group.files.values()):
            if not file.counted:
                self._drop(group, file)

    def committed_open(self, group: DirectoryGroup, inode: Inode) -> None:
        """A file counts as closed while its writer has it open; it is stored once that is over."""
        file = group.closed(inode.ino, inode.size, trio.current_time())
        self.group_of[inode.ino] = group
        file.state = FileState.WRITING
        self._drain.withhold(inode)

    def relieve(self, deadline_s: float) -> bool:
        """Leave open groups' files to the usual drain if the burst tier is short of room, or they
        have waited too long. Whether some are still withheld."""
        full = self._tier.pressure >= _FULL
        oldest = trio.current_time() - deadline_s
        withheld = False
        for group in {
            group.ino: group for group in self.group_of.values() if group.is_open
        }.values():
            if not full and group.since > oldest:
                withheld = True
                continue
            held = group.in_states(FileState.BUFFERED, FileState.PREPARING, FileState.PREPARED)
            old = held if full else [file for file in held if file.since < oldest]
            if old:
                _log.info(
                    "%d files of group %d are drained before it is complete",
                    len(old),
                    group.record.id,
                )
                self.give_back(group, old)
            withheld = withheld or len(old) < len(held)
        self.is_watched = withheld
        return withheld

    # --- getting them ready ---

    def give_back(self, group: DirectoryGroup, files: Iterable[File]) -> None:
        """Leave these to the usual drain; those that are being stored are left alone."""
        for file in files:
            if file.state in (FileState.STORING, FileState.DURABLE, FileState.USUAL):
                continue
            file.state = FileState.USUAL
            self.forget(file, then=partial(self._drain.give_back, [file.ino]))
        group.wake()

    def forget(self, file: File, then: Callable[[], None] = lambda: None) -> None:
        """Give up the lease and what is known of the file; ``then`` the rest."""
        prepared, file.prepared = file.prepared, None
        if prepared is None or self._nursery is None:
            then()
        else:
            self._nursery.start_soon(self._release, prepared, then)

    async def _release(self, prepared: Prepared, then: Callable[[], None] = lambda: None) -> None:
        with trio.CancelScope(shield=True):
            await self._group_drain.release(prepared)
            self._prepared.discard(prepared)
            self._kick()
            then()

    def _kick(self) -> None:
        """Start another worker, up to the limit."""
        if self._nursery is None:
            return  # ``run`` begins with it
        with giving_up():  # also where somebody's close is what begins it
            if self._unsynced and self._syncers < _SYNCERS:
                self._syncers += 1
                self._nursery.start_soon(self._sync_some)
            if self._may_prepare and self._preparers < _PREPARERS:
                self._preparers += 1
                self._nursery.start_soon(self._prepare_some)

    @property
    def _may_prepare(self) -> bool:
        return bool(self._waiting) and len(self._prepared) < _AHEAD

    def prepare_soon(self, group: DirectoryGroup, file: File) -> None:
        """Once it is synced, because nobody waits for the rest."""
        self._unsynced.append((group, file))
        self._kick()

    async def run(self) -> None:
        """Prepare what is closed, until cancelled. Then all leases are given up."""
        try:
            async with trio.open_nursery() as self._nursery:
                for _ in range(max(_SYNCERS, _PREPARERS)):
                    self._kick()
                await trio.sleep_forever()
        finally:
            self._nursery, self._syncers, self._preparers = None, 0, 0
            with trio.CancelScope(shield=True):
                for prepared in self._prepared - self._storing:
                    await self._release(prepared)
            for ino, group in self.group_of.items():
                file = group.files[ino]
                file.prepared = None
                if file.state in (FileState.PREPARING, FileState.PREPARED, FileState.STORING):
                    file.state = FileState.BUFFERED

    async def _sync_some(self) -> None:
        try:
            while self._unsynced:
                group, file = self._unsynced.popleft()
                if not self._is_due(group, file):
                    continue
                try:
                    await self.sync(group, [file])
                except FsError as error:
                    number = group.record.id
                    _log.info("inode %d of group %d is not synced yet: %s", file.ino, number, error)
                    continue  # the task that completes the group meets the error
                self._waiting.append((group, file))
                self._kick()
        finally:
            self._syncers -= 1

    async def _prepare_some(self) -> None:
        try:
            while self._may_prepare:
                group, file = self._waiting.popleft()
                if self._is_due(group, file):
                    await self.prepare(group, file)
        finally:
            self._preparers -= 1

    def _is_due(self, group: DirectoryGroup, file: File) -> bool:
        """The drain of a complete group prepares the rest."""
        return (
            group.is_open and file.state is FileState.BUFFERED and group.files.get(file.ino) is file
        )

    async def sync(self, group: DirectoryGroup, files: Sequence[File]) -> None:
        """Make these durable in the burst tier, and record them, so that they count after a crash.
        Raises NoSpace, Unavailable."""
        closes = {file: file.closes for file in files}
        await self._writeback.sync_files([file.ino for file in files])
        news = [
            file
            for file in files
            if file.recorded != closes[file] and file.state is not FileState.WRITING
        ]
        if news and not group.record.options.explicit:
            inos = [file.ino for file in news]
            await self._engine.transact(
                groups.put_closed, group.ino, group.record.id, inos, time.time_ns()
            )
            for file in news:
                file.recorded = closes[file]

    async def prepare(self, group: DirectoryGroup, file: File) -> None:
        if file.state is not FileState.BUFFERED:
            return
        closes, file.state = file.closes, FileState.PREPARING
        prepared = file.prepared = Prepared(
            file.ino, partial(self._changed, group, file), hurry=lambda: not group.is_open
        )
        self._prepared.add(prepared)
        try:
            await self._group_drain.prepare(prepared, group.record.options.chunk, group.report)
        finally:
            if file.prepared is prepared and file.state is FileState.PREPARING:
                file.state = FileState.BUFFERED
        if (
            prepared.outcome is None
            and file.prepared is prepared
            and file.state is FileState.BUFFERED
            and not prepared.cancelled
        ):
            file.state = FileState.PREPARED
            group.wake()
            return
        if file.prepared is prepared:
            file.prepared = None
        await self._release(prepared)
        outcome = prepared.outcome
        if file.state is not FileState.BUFFERED:
            pass
        elif outcome is DrainOutcome.GONE:
            self.has_gone(file)
        elif outcome is DrainOutcome.OPEN:
            file.state = FileState.WRITING
        elif file.closes != closes and group.is_open:
            self.prepare_soon(group, file)
        else:
            self.failed(group, file, outcome)
            is_asked = group.is_open and file.state is FileState.BUFFERED
            if is_asked and self._nursery is not None:
                self._nursery.start_soon(self._prepare_later, group, file)
        group.wake()

    async def _prepare_later(self, group: DirectoryGroup, file: File) -> None:
        await trio.sleep(_pause_s(file.tries))
        self.prepare_soon(group, file)

    def _changed(self, group: DirectoryGroup, file: File, prepared: Prepared) -> None:
        """A leased file is about to be changed."""
        if file.prepared is not prepared or file.state is not FileState.PREPARED:
            return  # the task that prepares or stores it sees that
        file.state = FileState.WRITING
        self.forget(file, then=partial(self._look_again, group, file))

    def _look_again(self, group: DirectoryGroup, file: File) -> None:
        """Look again at an unopened file (truncated, renamed), which nobody will close."""
        opened = self._io.table.open.get(file.ino)
        if file.state is FileState.WRITING and (opened is None or not opened.writers):
            file.state = FileState.BUFFERED
            self.prepare_soon(group, file)
            group.wake()

    def has_gone(self, file: File) -> None:
        """It is not in the burst tier any more."""
        file.state = FileState.DURABLE
        self._drain.gone(file.ino)

    def failed(
        self, group: DirectoryGroup, file: File, outcome: DrainOutcome | FsError | None
    ) -> None:
        """Preparing or storing failed: retry some times, unless it is not for groups."""
        if isinstance(outcome, FsError):
            group.drain_error = str(outcome)
            self._drain.failed(file.ino, outcome)
        file.tries += 1
        if file.tries >= _TRIES or outcome is DrainOutcome.UNFIT:
            self.give_back(group, [file])

    # --- storing ---

    async def store(self, group: DirectoryGroup) -> None:
        """Wait until a complete group's files are on the capacity tier, or the usual drain's."""
        self._group_drain.hurry()
        while True:
            if not group.is_live:
                self.leave(group)
            busy = group.in_states(FileState.PREPARING, FileState.STORING)
            waiting = group.in_states(FileState.BUFFERED)
            ready = group.in_states(FileState.PREPARED)
            if waiting and len(ready) < _AHEAD:
                await self._prepare_all(group, waiting[: _AHEAD - len(ready)])
            elif busy:
                await group.event.wait()
            elif ready:
                await self._store(group, ready[:_AHEAD])
            elif group.in_states(FileState.WRITING):
                await group.event.wait()
            else:
                return

    async def offer(self, group: DirectoryGroup) -> dict[Asked, Chunks]:
        """The hashed part of a complete group (see GroupDrain.offer), cut for very many files."""
        self._group_drain.hurry()
        while group.is_live:
            waiting = group.in_states(FileState.BUFFERED)
            room = _AHEAD - len(group.in_states(FileState.PREPARED))
            if waiting and room > 0:
                await self._prepare_all(group, waiting[:room])
            elif group.in_states(FileState.PREPARING):
                await group.event.wait()
            else:
                break
        return await self._group_drain.offer(self._ready(group), group.report)

    async def keep(
        self, group: DirectoryGroup, asked: Asked, wanted: Mapping[bytes, tuple[int, ...]]
    ) -> set[bytes]:
        """See GroupDrain.keep."""
        number, chunk = group.record.id, group.record.options.chunk
        try:
            return await self._group_drain.keep(
                number, self._ready(group), chunk, group.report, asked, wanted
            )
        finally:
            if not group.is_live:
                self._group_drain.let_go(number)

    def _ready(self, group: DirectoryGroup) -> list[Prepared]:
        files = group.in_states(FileState.PREPARED)
        return [file.prepared for file in files if file.prepared is not None]

    async def _prepare_all(self, group: DirectoryGroup, files: list[File]) -> None:
        tries = max(file.tries for file in files)
        if tries:
            await trio.sleep(_pause_s(tries))
        following = iter(files)

        async def prepare_some() -> None:
            for file in following:
                await self.prepare(group, file)

        await run_all(*[prepare_some] * min(_PREPARERS, len(files)))

    async def _store(self, group: DirectoryGroup, files: list[File]) -> None:
        before = {file.ino: file.closes for file in files}
        prepared = [file.prepared for file in files]
        for file in files:
            file.state, file.prepared = FileState.STORING, None
        self._storing.update(prepared)
        try:
            chunk = group.record.options.chunk
            await self._group_drain.store(prepared, chunk, group.report, group.kept)
        except BaseException:
            for file in files:
                file.state = FileState.BUFFERED
            raise
        finally:
            self._prepared.difference_update(prepared)
            self._storing.difference_update(prepared)
        faults.reach(_STORED)
        for file, member in zip(files, prepared, strict=True):
            if group.files.get(file.ino) is not file:
                continue  # unlinked meanwhile
            if self.group_of.get(file.ino, group) is not group:
                # This group was cancelled meanwhile, and the next one has it.
                file.state = FileState.USUAL
                continue
            file.state = FileState.BUFFERED
            unchanged = file.closes == before[file.ino] and not self._is_written(file)
            if member.outcome is DrainOutcome.DRAINED and file.closes == before[file.ino]:
                file.state = FileState.DURABLE
                self._drain.drained(file.ino, file.size)
            elif member.outcome is DrainOutcome.GONE:
                self.has_gone(file)
            elif not unchanged:
                self._drop(group, file)
            else:
                self.failed(group, file, member.outcome)
        group.wake()

    def _is_written(self, file: File) -> bool:
        opened = self._io.table.open.get(file.ino)
        return opened is not None and opened.writers > 0


def _pause_s(tries: int) -> float:
    return _BACK_OFF_S * _BACK_OFF_FACTOR ** (tries - 1)
