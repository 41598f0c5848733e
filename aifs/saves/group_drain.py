"""Draining the members of a group together: equal bytes are stored once.

A written member is *prepared*: leased, cut (layout/borders.py), and hashed, while others are still
written. The complete group is stored (storing.py): new chunks, by a plan; then files are flipped,
some at a time. Digests count under the lease they were made under, so bytes have not changed.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import trio

from aifs.burst.copy import BurstCopy
from aifs.core import files
from aifs.data.workers import gather
from aifs.files.draining import Drainer, DrainOutcome, errors_of
from aifs.files.services import Services
from aifs.layout import borders
from aifs.saves.group import GroupReport
from aifs.saves.hashing import Hasher, Prepared
from aifs.saves.sharing import Asked, Chunks, Cut
from aifs.saves.storing import MemberKind, Storing

__all__ = ["DrainOutcome", "GroupDrain", "GroupReport", "Prepared"]

# Of one member: a file that would have more is sparse, or can wait for the usual drain.
_CHUNKS_MAX = 1 << 20


class GroupDrain:
    """All groups of one mount, in one trio thread; prepares many at a time, stores one at a
    time."""

    def __init__(self, services: Services, drainer: Drainer) -> None:
        config = services.config
        self._io_priority = config.burst.ioprio
        self._drainer = drainer
        lanes = min(len(os.sched_getaffinity(0)), max(config.data.threads // 2, 1))
        self._hasher = Hasher(lanes, drainer.movers)
        self._collector = services.collector
        self._kept: dict[int, list[int]] = {}
        """By id of a group: the lists of what is kept of it for other hosts."""
        self._keeping: list[int] | None = None
        """Those that are being added to."""
        self.storing = Storing(services, drainer)
        self._one_group = trio.Lock()
        """Held while a group is stored."""
        self._stored_files = 0
        """How many files have been stored since the mount."""
        self._stored_bytes = 0
        """What their new chunks take."""
        self._saved_bytes = 0
        """What they did not take, as others have the same bytes."""

    # --- one member ---

    async def prepare(self, member: Prepared, chunk: int, report: GroupReport) -> None:
        """Lease, cut and hash a file that nobody writes to any more.

        Without outcome on return it can be stored; else, or cancelled, it is released. For a member
        in a hurry ``store`` hashes all together. ``chunk``: bytes of the largest chunks.
        """
        done = False
        async with member.busy:
            try:
                await self._drainer.begin(member)
                if member.outcome is None:
                    with errors_of(member):
                        await self._cut(member, chunk)
                        if member.outcome is None:
                            await self._hash([member], report, waited_for=False)
                if member.cancelled or member.unwanted:
                    member.outcome = DrainOutcome.CHANGED
                done = member.outcome is None
            finally:
                if not done:
                    await self._release(member)

    async def release(self, member: Prepared) -> None:
        """Give up lease, digests and file; it has an outcome on return. May be repeated, and ends
        preparation soon; not while it is stored."""
        member.unwanted = True
        with trio.CancelScope(shield=True):
            async with member.busy:
                await self._release(member)

    async def _release(self, member: Prepared) -> None:
        member.on_cancel = None
        member.cut, member.hashed = Cut((), ()), {}
        with trio.CancelScope(shield=True):
            await self._drainer.end(member)

    async def _cut(self, member: Prepared, chunk: int) -> None:
        member.level = self._drainer.level_of(member)
        if self._drainer.is_tiny(member):
            return
        if member.size > _CHUNKS_MAX * chunk:
            member.outcome = DrainOutcome.UNFIT
            return
        ranges = await self._work(
            member.copy, borders.cut, partial(_read, member.copy), member.size, chunk
        )
        member.cut = Cut(ranges, ())
        if len(ranges) > _CHUNKS_MAX:
            member.outcome = DrainOutcome.UNFIT

    async def _hash(
        self,
        members: Sequence[Prepared],
        report: GroupReport,
        waited_for: bool,
    ) -> None:
        """See Hasher."""
        await self._hasher.hash(members, report, waited_for)
        for member in members:
            if not member.is_hashed and len(member.hashed) == len(member.cut.ranges):
                member.cut = member.cut._replace(
                    digests=await self._work(member.copy, _in_order, member.hashed)
                )

    def hurry(self) -> None:
        """Members are in a hurry: ``store`` makes the rest of their digests."""
        self._hasher.hurry()

    async def _work(self, copy: BurstCopy, function: Any, *args: Any) -> Any:
        return (
            await gather(
                [(copy.device.workers, files.at_priority, (self._io_priority, function, *args))]
            )
        )[0]

    # --- all members ---

    async def offer(self, members: Sequence[Prepared], report: GroupReport) -> dict[Asked, Chunks]:
        """By what is asked for: the distinct chunks of these; tiny files have none."""
        unhashed = [m for m in members if m.outcome is None and not m.is_hashed]
        if unhashed:
            await self._hash(unhashed, report, waited_for=True)
        found: dict[Asked, Chunks] = {}
        for asked, some in self._kinds(members).items():
            chunks = found[asked] = {}
            for member in some:
                device = member.copy.server
                for (_, length), digest in zip(member.cut.ranges, member.cut.digests, strict=True):
                    if not digest:
                        continue
                    devices = chunks.get(digest, (length, ()))[1]
                    if device not in devices:
                        chunks[digest] = length, tuple(sorted((*devices, device)))
                await trio.lowlevel.checkpoint()
        return found

    async def keep(
        self,
        group_id: int,
        members: Sequence[Prepared],
        chunk: int,
        report: GroupReport,
        asked: Asked,
        wanted: Mapping[bytes, tuple[int, ...]],
    ) -> set[bytes]:
        """Store chunks of like members for all that have them, until ``let_go``: see
        Storing.keep."""
        lists = self._kept.setdefault(group_id, [])
        async with self._one_group:
            some = self._kinds(members).get(asked)
            if not some or self._kept.get(group_id) is not lists:  # it was let go meanwhile
                return set()
            kind = MemberKind(asked, some, chunk, report)
            self._keeping = lists
            try:
                return await self.storing.keep(kind, wanted, lists)
            finally:
                self._keeping = None
                if self._kept.get(group_id) is not lists:  # as above
                    self._give_up(lists)

    def let_go(self, group_id: int) -> None:
        """What is kept of a group is kept no more."""
        lists = self._kept.pop(group_id, [])
        if lists is not self._keeping:  # else the task that adds to them gives them up
            self._give_up(lists)

    def _give_up(self, lists: list[int]) -> None:
        while lists:
            self._collector.add_garbage(lists.pop())

    def _kinds(self, members: Sequence[Prepared]) -> dict[Asked, list[Prepared]]:
        """Storable members, without tiny ones, by what they ask for."""
        kinds: dict[Asked, list[Prepared]] = {}
        for member in members:
            if member.outcome is None and member.is_hashed and not self._drainer.is_tiny(member):
                kinds.setdefault(Asked(*self._drainer.place_of(member)), []).append(member)
        return kinds

    async def store(
        self,
        members: Sequence[Prepared],
        chunk: int,
        report: GroupReport,
        kept: Collection[bytes] = (),
    ) -> None:
        """Bring a complete group's members to the capacity tier; each has its outcome, and is
        released.

        Unstorable or changed ones stay in the burst tier. Cancelled, unflipped ones stay as they
        were. ``kept``: see MemberKind.
        """
        try:
            unhashed = [m for m in members if m.outcome is None and not m.is_hashed]
            if unhashed:
                await self._hash(unhashed, report, waited_for=True)
            for member in members:
                if member.cancelled:
                    member.outcome = member.outcome or DrainOutcome.CHANGED
            alive = [member for member in members if member.outcome is None]
            before = replace(report)
            report.bytes += sum(member.size for member in alive)
            await self._store_tiny(list(filter(self._drainer.is_tiny, alive)), report)
            kinds = self._kinds(alive)
            async with self._one_group:
                # The safest first: others can lean on their chunks.
                for asked in sorted(kinds, key=lambda asked: -asked.redundancy.tolerates):
                    kind = MemberKind(asked, kinds[asked], chunk, report, kept)
                    await self.storing.store(kind)
            drained = [member for member in members if member.outcome is DrainOutcome.DRAINED]
            self._stored_files += len(drained)
            self._stored_bytes += report.stored_bytes - before.stored_bytes
            if drained:
                self._saved_bytes += report.saved_bytes - before.saved_bytes
            else:
                report.take_amounts(before)
        finally:
            for member in members:
                await self._release(member)

    async def _store_tiny(self, members: list[Prepared], report: GroupReport) -> None:
        for member in members:
            with errors_of(member):
                await self._drainer.take_bytes(member)
                report.inline_bytes += member.size
        await self._drainer.flip([member for member in members if member.outcome is None])

    def status(self) -> dict[str, Any]:
        """The status since the mount. ``saved_bytes``: zeros, duplicates, and stored before."""
        return {
            "stored_files": self._stored_files,
            "stored_bytes": self._stored_bytes,
            "saved_bytes": self._saved_bytes,
            "hashed_bytes": self._hasher.hashed_bytes,
        }


def _in_order(digests: dict[int, bytes]) -> list[bytes]:
    return [digests[number] for number in range(len(digests))]


def _read(copy: BurstCopy, offset: int, length: int) -> bytes:
    """In a worker thread. Raises Unavailable."""
    data = memoryview(bytearray(length))
    return bytes(data[: copy.device.read((0, copy.id), copy.fd, data, offset)])
