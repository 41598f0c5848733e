"""Getting the files of groups ready, as they are closed: synced, so that they are buffered, then
prepared, as long as there is room for leases; and giving them back to the usual drain.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import trio

from aifs.core.errors import FsError
from aifs.core.log import logger
from aifs.files.drain import Drain
from aifs.files.file_io import FileIO
from aifs.files.flips import Outcome
from aifs.files.writeback import WriteBack
from aifs.meta import groups
from aifs.meta.kv import Engine
from aifs.vfs.groups.group_drain import GroupDrain, Options, Prepared
from aifs.vfs.groups.state import File, FileState, Group
from aifs.vfs.publishing.barrier import sync_files

_log = logger(__name__)

AHEAD = 256
"""Files that are prepared before their group is complete; each holds a lease on its burst copy, and
descriptors.
"""

PREPARERS = 2
"""Files that are prepared at a time; each is hashed on several processors."""

_SYNCERS = 16
_TRIES = 7
_BACK_OFF_S, _BACK_OFF_FACTOR = 0.005, 4
"""The first is short: the kernel lets go of a writer's descriptor some time after the close is
answered.
"""


class Preparing:
    """The files of live groups until they are stored. ``run`` does the work; used from one trio
    thread.
    """

    def __init__(
        self,
        engine: Engine,
        io: FileIO,
        writeback: WriteBack,
        drain: Drain,
        group_drain: GroupDrain,
    ) -> None:
        self.group_of: dict[int, Group] = {}
        """By inode number: the live group that the file belongs to."""
        self._engine = engine
        self._io = io
        self._writeback = writeback
        self._drain = drain
        self._group_drain = group_drain
        self._unsynced: deque[tuple[Group, File]] = deque()
        self._waiting: deque[tuple[Group, File]] = deque()  # to be prepared
        self._wake = trio.Event()
        self._prepared: set[Prepared] = set()
        self._storing: set[Prepared] = set()
        """Some of these, which whoever stores them releases."""
        self._nursery: trio.Nursery | None = None

    def give_back(self, group: Group, files: Iterable[File]) -> None:
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
        self._wake.set()
        self._wake = trio.Event()

    def prepare_soon(self, group: Group, file: File) -> None:
        """Once it is synced, because nobody waits for the rest."""
        self._unsynced.append((group, file))
        self._kick()

    async def run(self) -> None:
        """Prepare what is closed, until cancelled. Then all leases are given up."""
        try:
            async with trio.open_nursery() as self._nursery:
                for _ in range(_SYNCERS):
                    self._nursery.start_soon(self._sync_some)
                for _ in range(PREPARERS):
                    self._nursery.start_soon(self._prepare_some)
        finally:
            self._nursery = None
            with trio.CancelScope(shield=True):
                for prepared in self._prepared - self._storing:
                    await self._release(prepared)
            for ino, group in self.group_of.items():
                file = group.files[ino]
                file.prepared = None
                if file.state in (FileState.PREPARING, FileState.PREPARED, FileState.STORING):
                    file.state = FileState.BUFFERED

    async def _sync_some(self) -> None:
        while True:
            if not self._unsynced:
                await self._wake.wait()
                continue
            group, file = self._unsynced.popleft()
            if not self._is_due(group, file):
                continue
            try:
                await self.sync(group, [file])
            except FsError as error:
                _log.info(
                    "inode %d of group %d is not synced yet: %s", file.ino, group.record.id, error
                )
                continue  # whoever completes the group meets the error
            self._waiting.append((group, file))
            self._kick()

    async def _prepare_some(self) -> None:
        while True:
            if not self._waiting or len(self._prepared) >= AHEAD:
                await self._wake.wait()
                continue
            group, file = self._waiting.popleft()
            if self._is_due(group, file):
                await self.prepare(group, file)

    def _is_due(self, group: Group, file: File) -> bool:
        """Who drains a group that is complete prepares what is left."""
        return (
            group.is_open and file.state is FileState.BUFFERED and group.files.get(file.ino) is file
        )

    async def sync(self, group: Group, files: Sequence[File]) -> None:
        """These are durable in the burst tier on return, and on record as they are, so that they
        count after a crash. Raises NoSpace, Unavailable."""
        closes = {file: file.closes for file in files}
        await sync_files(self._io, self._writeback, [file.ino for file in files])
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

    async def prepare(self, group: Group, file: File) -> None:
        if file.state is not FileState.BUFFERED:
            return
        closes, file.state = file.closes, FileState.PREPARING
        prepared = file.prepared = Prepared(file.ino, partial(self._changed, group, file))
        prepared.hurry = lambda: not group.is_open
        self._prepared.add(prepared)
        try:
            await self._group_drain.prepare(prepared, options_of(group), group.report)
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
        elif outcome is Outcome.GONE:
            self.has_gone(group, file)
        elif outcome is Outcome.OPEN:
            file.state = FileState.WRITING
        elif file.closes != closes and group.is_open:
            self.prepare_soon(group, file)
        else:
            self.failed(group, file, outcome)
            if group.is_open and file.state is FileState.BUFFERED:
                self._nursery.start_soon(self._prepare_later, group, file)
        group.wake()

    async def _prepare_later(self, group: Group, file: File) -> None:
        await trio.sleep(pause_s(file.tries))
        self.prepare_soon(group, file)

    def _changed(self, group: Group, file: File, prepared: Prepared) -> None:
        """Somebody is about to change a file that we hold the lease of."""
        if file.prepared is not prepared or file.state is not FileState.PREPARED:
            return  # who prepares or stores it sees
        file.state = FileState.WRITING
        self.forget(file, then=partial(self._look_again, group, file))

    def _look_again(self, group: Group, file: File) -> None:
        """Where nobody has opened it (a truncation, a new name), nobody is going to close it."""
        opened = self._io.open.get(file.ino)
        if file.state is FileState.WRITING and (opened is None or not opened.writers):
            file.state = FileState.BUFFERED
            self.prepare_soon(group, file)
            group.wake()

    def has_gone(self, group: Group, file: File) -> None:
        """It is not in the burst tier any more."""
        file.state = FileState.DURABLE
        self._drain.gone(file.ino)

    def failed(self, group: Group, file: File, outcome: Outcome | FsError | None) -> None:
        """It could be neither prepared nor stored: it is tried again some times, unless that is not
        for groups.
        """
        if isinstance(outcome, FsError):
            group.drain_error = str(outcome)
            self._drain.failed(file.ino, outcome)
        file.tries += 1
        if file.tries >= _TRIES or outcome is Outcome.UNFIT:
            self.give_back(group, [file])


def pause_s(tries: int) -> float:
    return _BACK_OFF_S * _BACK_OFF_FACTOR ** (tries - 1)


def options_of(group: Group) -> Options:
    return Options(group.record.options.chunk)
