"""What programs ask for by ioctl. The kernel has checked nothing: that the caller may is decided
here (rights.py), and that the mount can be written to.
"""

import os
from typing import NamedTuple

from aifs.core import ioctl
from aifs.core.ioctl import GROUP_STATES, Command
from aifs.files.types import ROOT, CallerLike
from aifs.meta import namespace
from aifs.meta.kv import Engine
from aifs.vfs import rights
from aifs.vfs.burst_hints import BurstHints
from aifs.vfs.epochs.epochs import Epochs
from aifs.vfs.groups.group_hints import SUMS, report_of
from aifs.vfs.groups.group_text import Wanted
from aifs.vfs.groups.protocol import Commit, Groups
from aifs.vfs.groups.table import GroupTable
from aifs.vfs.publishing.listed import path_below
from aifs.vfs.serve_options import ServeOptions


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


class Ioctls:
    """Group ids: 0 means the directory's present, or last, one. All raise AccessDenied and
    NotPermitted; what changes something raises ReadOnly, too.
    """

    def __init__(
        self,
        engine: Engine,
        burst: BurstHints,
        table: GroupTable,
        groups: Groups,
        epochs: Epochs,
        options: ServeOptions,
    ) -> None:
        self._engine = engine
        self._burst = burst
        self._table = table
        self._groups = groups
        self._epochs = epochs
        self._options = options

    async def wait_drained(
        self, ino: int, timeout_s: float | None = None, caller: CallerLike = ROOT
    ) -> None:
        """What is undrained now of a file, or below a directory, is on the capacity tier on return.
        Raises TimedOut."""
        await self._require_may(ioctl.AIFS_IOC_DRAIN, ino, caller)
        await self._burst.wait_drained(ino, timeout_s)

    async def begin_group(self, ino: int, wanted: Wanted, caller: CallerLike) -> int:
        """Its id. Raises as Groups.begin."""
        await self._require_may_change(ioctl.AIFS_IOC_GROUP_CREATE, ino, caller)
        return (await self._groups.begin(ino, wanted, caller)).record.id

    async def join_group(self, ino: int, group_id: int, rank: int, caller: CallerLike) -> None:
        """Raises as Groups.join."""
        await self._require_may_change(ioctl.AIFS_IOC_GROUP_JOIN, ino, caller)
        await self._groups.join(ino, group_id, rank, caller)

    async def commit_group(
        self, ino: int, group_id: int, rank: int, caller: CallerLike, file: bytes = b""
    ) -> None:
        """Raises as Groups.commit."""
        await self._require_may_change(ioctl.AIFS_IOC_GROUP_COMMIT, ino, caller)
        await self._groups.commit(ino, group_id, Commit(rank, sized=file))

    async def commit(
        self, ino: int, rank: int, listing: bytes, again: bool, caller: CallerLike
    ) -> None:
        """A rank commits its part of a pending directory. Raises as Groups.commit_pending."""
        self._options.require_writable()
        await self._require_may(ioctl.AIFS_IOC_COMMIT, ino, caller)
        listing = path_below(listing) if listing else b""
        await self._groups.commit_pending(ino, Commit(rank, None, listing, again))

    async def wait_group(
        self, ino: int, group_id: int, durable: bool, timeout_s: float | None
    ) -> None:
        """Raises as Groups.wait, and ReadOnly where nothing goes on in this mount."""
        group = await self._table.find(ino, group_id)
        if group.is_live:
            self._options.require_writable()
        await self._groups.wait(ino, group_id, durable, timeout_s)

    async def cancel_group(self, ino: int, group_id: int, reason: str, caller: CallerLike) -> None:
        """Raises as Groups.cancel."""
        await self._require_may_change(ioctl.AIFS_IOC_GROUP_CANCEL, ino, caller)
        await self._groups.cancel(ino, group_id, reason, caller)

    async def query_group(self, ino: int, group_id: int) -> GroupState:
        """Raises as GroupTable.find."""
        group = await self._table.find(ino, group_id)
        record, told = group.record, report_of(group)
        sums = {key: told.get(key, 0) for key in SUMS}
        sums["bytes"] = sums["bytes"] or sum(file.size for file in group.files.values())
        committed = len(group.committed) if record.options.explicit else group.closed_files
        return GroupState._make(
            (
                record.id,
                1 + GROUP_STATES.index(record.state),
                record.options.ranks,
                len(group.processes) + len(group.joined_elsewhere),
                committed,
                len(group.files),
                record.dead,
                *sums.values(),
                record.created_ns,
                record.buffered_ns,
                record.durable_ns,
            )
        )

    async def order(self, ino: int, text: bytes, caller: CallerLike) -> None:
        """Readers of a dataset say what they read. Raises as Epochs.order."""
        await self._require_may_change(ioctl.AIFS_IOC_ORDER, ino, caller)
        await self._epochs.order(ino, os.fsdecode(text), caller)

    async def _require_may(self, command: Command, ino: int, caller: CallerLike) -> None:
        rights.IOCTLS[command](await self._engine.view(namespace.get_inode, ino), caller)

    async def _require_may_change(self, command: Command, ino: int, caller: CallerLike) -> None:
        self._options.require_writable()
        rights.IOCTLS[command](await self._engine.view(namespace.get_directory, ino), caller)
