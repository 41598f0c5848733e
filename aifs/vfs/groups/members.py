"""The files of groups: withheld from the usual drain as they are closed, and stored together when
their group has been committed. Whatever does not work out goes back to the usual drain.
"""

import trio

from aifs.burst.tier import BurstTier
from aifs.core import faults
from aifs.core.log import logger
from aifs.core.tasks import run_all
from aifs.files.drain import Drain
from aifs.files.file_io import FileIO
from aifs.files.flips import Outcome
from aifs.files.writeback import WriteBack
from aifs.meta.kv import Engine
from aifs.meta.records import Inode
from aifs.vfs.groups.group_drain import GroupDrain
from aifs.vfs.groups.preparing import AHEAD, PREPARERS, Preparing, options_of, pause_s
from aifs.vfs.groups.state import File, FileState, Group

_log = logger(__name__)

_STORED = faults.declare(
    "vfs.group.stored",
    "files of a group are on the capacity tier, the group is not on record as durable",
)

_FULL = 1.0  # pressure at which the burst tier admits no new files


class Members(Preparing):
    """The files of all live groups."""

    def __init__(
        self,
        engine: Engine,
        tier: BurstTier,
        io: FileIO,
        writeback: WriteBack,
        drain: Drain,
        group_drain: GroupDrain,
    ) -> None:
        super().__init__(engine, io, writeback, drain, group_drain)
        self.is_watched = False
        """Whether ``relieve`` is going to be called again: it has seen withheld files."""
        self._tier = tier

    # --- what happens to files; none of these blocks ---

    def closed(self, group: Group, inode: Inode) -> bool:
        """A file of the group, which is open, has been closed. Whether the usual drain must not
        have it.
        """
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
        """A file of a group that is complete has been closed. Whether the usual drain must not have
        it.
        """
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
        """Somebody has opened the file for writing. What is committed is not what it is going to
        be.
        """
        group = self.group_of.get(ino)
        if group is None:
            return
        group.opened(ino)
        file = group.files[ino]
        if not group.is_open and file.state not in (FileState.STORING, FileState.DURABLE):
            self._drop(group, file)
        group.wake()

    def _drop(self, group: Group, file: File) -> None:
        """It is no part of the group any more, and the usual drain's."""
        self.give_back(group, [file])
        group.remove(file.ino)
        if self.group_of.get(file.ino) is group:
            del self.group_of[file.ino]

    def moved(self, group: Group, ino: int) -> None:
        """A file of the group, which is open, has been closed elsewhere. It may belong to another
        group from now on.
        """
        del self.group_of[ino]
        self.forget(group.remove(ino))
        self._drain.give_back([ino])
        group.wake()

    def restore(self, group: Group, inode: Inode, since: float) -> None:
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

    def leave(self, group: Group) -> None:
        """The group has ended."""
        self.give_back(group, list(group.files.values()))
        for ino in group.files:
            if self.group_of.get(ino) is group:
                del self.group_of[ino]

    def settle(self, group: Group) -> None:
        """The group is complete: who is still writing to a file that does not count keeps it for
        later.
        """
        for file in list(group.files.values()):
            if not file.counted:
                self._drop(group, file)

    def committed_open(self, group: Group, inode: Inode) -> None:
        """A file counts as closed while its writer has it open; it is stored once that is over."""
        file = group.closed(inode.ino, inode.size, trio.current_time())
        self.group_of[inode.ino] = group
        file.state = FileState.WRITING
        self._drain.withhold(inode)

    def relieve(self, deadline_s: float) -> bool:
        """Leave files of open groups to the usual drain if the burst tier is short of room, or they
        have waited too long. Whether some are withheld still."""
        full, oldest, withheld = (
            self._tier.pressure >= _FULL,
            trio.current_time() - deadline_s,
            False,
        )
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

    # --- storing ---

    async def store(self, group: Group) -> None:
        """Returns when all files of a group that is complete are on the capacity tier, or left to
        the usual drain.
        """
        self._group_drain.hurry()
        while True:
            if not group.is_live:
                self.leave(group)
            busy = group.in_states(FileState.PREPARING, FileState.STORING)
            waiting = group.in_states(FileState.BUFFERED)
            ready = group.in_states(FileState.PREPARED)
            if waiting and len(ready) < AHEAD:
                await self._prepare_all(group, waiting[: AHEAD - len(ready)])
            elif busy:
                await group.event.wait()
            elif ready:
                await self._store(group, ready[:AHEAD])
            elif group.in_states(FileState.WRITING):
                await group.event.wait()
            else:
                return

    async def _prepare_all(self, group: Group, files: list[File]) -> None:
        tries = max(file.tries for file in files)
        if tries:
            await trio.sleep(pause_s(tries))
        following = iter(files)

        async def prepare_some() -> None:
            for file in following:
                await self.prepare(group, file)

        await run_all(*[prepare_some] * min(PREPARERS, len(files)))

    async def _store(self, group: Group, files: list[File]) -> None:
        before = {file.ino: file.closes for file in files}
        prepared = [file.prepared for file in files]
        for file in files:
            file.state, file.prepared = FileState.STORING, None
        self._storing.update(prepared)
        try:
            await self._group_drain.store(prepared, options_of(group), group.report)
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
                file.state = (
                    FileState.USUAL
                )  # this group was cancelled meanwhile, and the next one has it
                continue
            file.state = FileState.BUFFERED
            unchanged = file.closes == before[file.ino] and not self._is_written(file)
            if member.outcome is Outcome.DRAINED and file.closes == before[file.ino]:
                file.state = FileState.DURABLE
                self._drain.drained(file.ino, file.size)
            elif member.outcome is Outcome.GONE:
                self.has_gone(group, file)
            elif not unchanged:
                self._drop(group, file)
            else:
                self.failed(group, file, member.outcome)
        group.wake()

    def _is_written(self, file: File) -> bool:
        opened = self._io.open.get(file.ino)
        return opened is not None and opened.writers > 0
