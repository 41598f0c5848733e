"""Which files belong to groups: closing one below an open group's directory adds it, opening it for
writing, or removing it, takes it out."""

import time
from contextlib import suppress

from aifs.core.errors import Busy, FsError, Invalid, NoAttribute
from aifs.core.log import logger
from aifs.files.drain import Drain
from aifs.files.file_io import FileIO
from aifs.files.writeback import WriteBack
from aifs.meta import groups
from aifs.meta.kv import Engine
from aifs.meta.records import Inode
from aifs.saves.course import Course
from aifs.saves.group import DirectoryGroup
from aifs.saves.members import Members
from aifs.saves.parts import Parts
from aifs.saves.table import GroupTable

_log = logger(__name__)


class Closing:
    """Used from one trio thread."""

    def __init__(
        self,
        engine: Engine,
        io: FileIO,
        writeback: WriteBack,
        drain: Drain,
        table: GroupTable,
        members: Members,
        parts: Parts,
        course: Course,
    ) -> None:
        self._engine = engine
        self._io = io
        self._writeback = writeback
        self._drain = drain
        self._table = table
        self._members = members
        self._parts = parts
        self._course = course
        self._closing: dict[int, object] = {}
        """By inode number: the last close that is under way."""

    async def find_above(self, ino: int) -> DirectoryGroup:
        """The group of the nearest directory above ``ino``, or of itself. Raises NoAttribute."""
        group = self._members.group_of.get(ino)
        if group is not None:
            return group
        top = await self._engine.view(groups.directory_with_group, ino)
        if top is None:
            raise NoAttribute()
        return await self._table.find(top)

    async def closed(self, inode: Inode) -> bool:
        """The last writer has closed this file. Whether the usual drain must not have it."""
        group = self._members.group_of.get(inode.ino)
        top = None
        if (group is None or group.is_open) and self._table.open:
            this = self._closing[inode.ino] = object()
            try:
                top = await self._engine.view(groups.directory_of, inode.ino, self._table.open)
                if top is not None:
                    await self._take_part(top)
            finally:
                is_last = self._closing.get(inode.ino) is this
                if is_last:
                    del self._closing[inode.ino]
            if not is_last:
                return True  # the later close sees to it
            group = self._members.group_of.get(inode.ino)
        if group is not None and not group.is_open:
            return self._members.closed_late(inode)
        opened = self._io.table.open.get(inode.ino)
        if (opened is not None and opened.writers) or not inode.nlink:
            return False
        if group is not None and group.ino != top:
            self._members.moved(group, inode.ino)
        group = None if top is None else self._table.by_directory.get(top)
        if group is None or not group.is_open or not group.own_part.has_files:
            return False
        withheld = self._members.closed(group, inode)
        if withheld and not self._members.is_watched:
            self._table.look()
        self._course.complete(group)
        return withheld

    async def _take_part(self, top: int) -> None:
        """Note that a file of this host may belong to the directory's group."""
        group = self._table.by_directory.get(top)
        if group is not None and group.is_open:
            try:
                await self._parts.take(group, has_files=True)
            except FsError as error:
                _log.info("group %d: a file is drained as usual: %s", group.record.id, error)

    async def commit_file(self, inode: Inode) -> None:
        """Count a file as closed, though the caller has it open; durable in the burst tier on
        return. Raises NoAttribute, Busy for other writers, Invalid if the group's ranks commit."""
        group = await self.find_above(inode.ino)
        if group.record.options.explicit:
            raise Invalid("the group's ranks commit, on its directory; files do not")
        group.require_open()
        self._require_one_writer(inode.ino)
        await self._writeback.sync_inode(inode.ino)
        group.require_open()
        if self._require_one_writer(inode.ino):
            self._members.committed_open(group, inode)
        elif not self._members.closed(group, inode) and inode.in_burst:
            self._drain.closed(inode)
        self._course.complete(group)

    def _require_one_writer(self, ino: int) -> bool:
        """Whether a file is open for writing. Raises Busy if more than once."""
        opened = self._io.table.open.get(ino)
        if opened is not None and opened.writers > 1:
            raise Busy("others have the file open for writing")
        return opened is not None and opened.writers == 1

    def opened(self, ino: int) -> None:
        """Somebody has opened it for writing."""
        group = self._members.group_of.get(ino)
        self._members.opened(ino)
        if self._table.host:
            group = group or next((one for one in self._table.live if ino in one.elsewhere), None)
            if group is not None and not group.record.options.explicit:
                group.elsewhere.pop(ino, None)
                self._course.start(self._reopened, group, ino, time.time_ns())

    async def _reopened(self, group: DirectoryGroup, ino: int, opened_ns: int) -> None:
        """A closed file is being written here: it counts no more."""
        with suppress(FsError):  # then it counts as it was closed
            await self._engine.transact(
                groups.remove_closed, group.ino, group.record.id, ino, opened_ns
            )

    def gone(self, ino: int) -> None:
        """An inode has lost its last name."""
        self._members.gone(ino)
        group = self._table.by_directory.get(ino)
        if group is not None and not group.shares:
            self._table.drop(group, "its directory was removed")
        elif group is not None and group.is_live:
            self._course.start(self._course.cancel, group, "its directory was removed")
