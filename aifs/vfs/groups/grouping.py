"""Groups as programs reach them by ioctl: the kernel has not checked that the caller may."""

from typing import NamedTuple

from aifs.core import ioctl
from aifs.core.ioctl import GROUP_STATES, Command
from aifs.files.types import CallerLike
from aifs.meta import namespace, publishing
from aifs.vfs import rights
from aifs.vfs.groups.group_hints import SUMS, report_of
from aifs.vfs.groups.group_text import Wanted
from aifs.vfs.groups.protocol import Commit
from aifs.vfs.publishing.listed import path_below
from aifs.vfs.publishing.publish import Publishing


class GroupState(NamedTuple):
    """The fields of AIFS_IOC_GROUP_QUERY."""

    id: int
    state: int
    ranks: int
    joined: int
    committed: int
    files: int
    dead: int
    bytes: int
    zero_bytes: int
    duplicate_bytes: int
    found_bytes: int
    distinct_bytes: int
    stored_bytes: int
    created_ns: int
    buffered_ns: int
    durable_ns: int


class Grouping(Publishing):
    """The part of ``Filesystem`` that has to do with groups. Group ids: 0 means the directory's
    present, or last, one.
    """

    async def begin_group(self, ino: int, wanted: Wanted, caller: CallerLike) -> int:
        """Its id. Raises as Groups.begin, AccessDenied, ReadOnly."""
        await self._require_may_change(ioctl.AIFS_IOC_GROUP_CREATE, ino, caller)
        return (await self.groups.begin(ino, wanted, caller)).record.id

    async def join_group(self, ino: int, group_id: int, rank: int, caller: CallerLike) -> None:
        await self._require_may_change(ioctl.AIFS_IOC_GROUP_JOIN, ino, caller)
        await self.groups.join(ino, group_id, rank, caller)

    async def commit_group(
        self, ino: int, group_id: int, rank: int, caller: CallerLike, file: bytes = b""
    ) -> None:
        await self._require_may_change(ioctl.AIFS_IOC_GROUP_COMMIT, ino, caller)
        await self.groups.commit(ino, group_id, Commit(rank, sized=file))

    async def commit(
        self, ino: int, rank: int, listing: bytes, again: bool, caller: CallerLike
    ) -> None:
        """A rank commits its part of a pending directory (Groups.commit_pending). The kernel has
        not checked that it may write there."""
        self.require_writable()
        await self.require_may(ioctl.AIFS_IOC_COMMIT, ino, caller)
        listing = path_below(listing) if listing else b""
        await self.groups.commit_pending(ino, Commit(rank, None, listing, again))

    async def wait_group(
        self, ino: int, group_id: int, durable: bool, timeout_s: float | None
    ) -> None:
        """Raises as Groups.wait, ReadOnly: nothing goes on in this mount."""
        group = await self.groups.find(ino, group_id)
        if group.is_live:
            self.require_writable()
        await self.groups.wait(ino, group_id, durable, timeout_s)

    async def cancel_group(self, ino: int, group_id: int, reason: str, caller: CallerLike) -> None:
        await self._require_may_change(ioctl.AIFS_IOC_GROUP_CANCEL, ino, caller)
        await self.groups.cancel(ino, group_id, reason, caller)

    async def query_group(self, ino: int, group_id: int) -> GroupState:
        group = await self.groups.find(ino, group_id)
        record, told = group.record, report_of(group)
        sums = {key: told.get(key, 0) for key in SUMS}
        sums["bytes"] = sums["bytes"] or sum(file.size for file in group.files.values())
        committed = len(group.committed) if record.options.explicit else group.counted
        return GroupState(
            record.id,
            1 + GROUP_STATES.index(record.state),
            record.options.ranks,
            len(group.processes),
            committed,
            len(group.files),
            record.dead,
            *sums.values(),
            record.created_ns,
            record.buffered_ns,
            record.durable_ns,
        )

    async def _require_may_change(self, command: Command, ino: int, caller: CallerLike) -> None:
        self.require_writable()
        rights.IOCTLS[command](await self._engine.view(namespace.get_directory, ino), caller)

    async def publish_group(self, ino: int, name: bytes, caller: CallerLike) -> None:
        """Show the directory of a complete group under its final name."""
        parent = (await self._engine.view(namespace.get_directory, ino)).parent
        await self.publish(publishing.Publication(ino, parent, name), caller)
