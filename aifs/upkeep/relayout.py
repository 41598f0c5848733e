"""Laying a striped file out anew: new objects, on other servers or with another redundancy, replace
the ones it has.

So a plain file gets the protection that its policy asks for (it was written in place, or stored
while there were too few servers), and a file leaves a server though it lies on all there are. As in
a drain, what is made is garbage on record until one transaction has the file consist of it; a file
that changes meanwhile stays as it is.
"""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from math import lcm
from typing import Protocol

from aifs.burst.transfer import Limiter
from aifs.core import faults
from aifs.core.tasks import run_all
from aifs.data.checking.checked_reads import LoadDigests
from aifs.data.checking.digests import HASHED, digests_of, join_digests
from aifs.data.objects.holes import pieces_with_data
from aifs.data.objects.object_set import ObjectSet
from aifs.data.servers import Servers
from aifs.files.collector import Collector
from aifs.files.file_io import FileIO
from aifs.files.open_inode import OpenInode
from aifs.layout.striped import Striped
from aifs.meta import forms, moves
from aifs.meta.kv import Engine
from aifs.meta.moves import SetRecord
from aifs.store.ids import IdAllocator

_COPIED = faults.declare(
    "vfs.relayout.copied", "new objects hold the bytes durably, they are on record as garbage"
)

_PIECE = 4 << 20
_PIECES_AT_ONCE = 2
_ZEROS = bytes(HASHED)


class Subject(Protocol):
    """See mending.FileSubject."""

    file: OpenInode
    load: LoadDigests

    def is_unchanged(self) -> bool: ...

    def alone(self) -> AbstractAsyncContextManager[None]: ...

    def adopt_objects(self, objects: SetRecord, unread: int, blocks: int) -> None: ...


class Relayout:
    """Used from one trio thread."""

    def __init__(
        self,
        engine: Engine,
        servers: Servers,
        io: FileIO,
        ids: IdAllocator,
        collector: Collector,
        limiter: Limiter,
        io_priority: str,
        spare: int,
    ) -> None:
        """``spare``: see ObjectSet.sync."""
        self.files = 0
        self._engine = engine
        self._servers = servers
        self._io = io
        self._ids = ids
        self._collector = collector
        self._limiter = limiter
        self._io_priority = io_priority
        self._spare = spare

    async def lay_out(
        self, subject: Subject, before: SetRecord, unread: int, layout: Striped
    ) -> bool:
        """Whether the file is laid out so on return; not if it was changed meanwhile.

        ``unread``: mask of columns that must not be read. Raises Unavailable if bytes of it cannot be
        told, or are not those that were stored; NoSpace.
        """
        after = SetRecord(before.ino, await self._ids.take(), layout, before.size)
        await self._engine.transact(forms.put_garbage, after.oid, after.ino, layout)
        new = ObjectSet(
            self._servers, layout, after.ino, after.oid, new=True, background=self._io_priority
        )
        recorded = False
        try:
            digests = await self._copy(subject, before, unread, new, layout)
            lacking = await new.sync(self._spare)
            faults.reach(_COPIED)
            async with subject.alone():
                if subject.is_unchanged():  # from here on nothing suspends
                    recorded = await self._flip(
                        subject, before, after, new.blocks() or 0, digests, lacking
                    )
        finally:
            new.close()
            if not recorded:
                self._collector.add_garbage(after.oid)
        self.files += recorded
        return recorded

    async def _flip(
        self,
        subject: Subject,
        before: SetRecord,
        after: SetRecord,
        blocks: int,
        digests: bytes,
        lacking: int,
    ) -> bool:
        due = (
            not after.layout.is_protected
            and self._io.capacity.redundancy(subject.file.inode).is_protected
        )
        garbage = await self._engine.transact(
            moves.put_relaid, before, after, blocks, digests, lacking, due
        )
        if garbage is None:
            return False
        subject.adopt_objects(after, lacking, blocks)
        for oid in garbage:
            self._collector.add_garbage(oid)
        return True

    async def _copy(
        self,
        subject: Subject,
        before: SetRecord,
        unread: int,
        new: ObjectSet,
        layout: Striped,
    ) -> bytes:
        """Copy all bytes; returns their checksums (see join_digests)."""
        ino, oid, old_layout, size = before
        old = ObjectSet(
            self._servers,
            old_layout,
            ino,
            oid,
            background=self._io_priority,
            unread=unread,
            on_damage=self._io.damage.report,
            digests=subject.load,
        )
        step = lcm(layout.row, HASHED) if layout.parity else _PIECE
        worker = self._servers[layout.servers[0]]
        offsets: Sequence[int] = range(0, size, step)
        if subject.file.inode.blocks * 512 < size:
            offsets = [offset async for offset in pieces_with_data(old, size, step)]
        following = iter(offsets)
        digests: dict[int, bytes] = {}
        stopped = False

        async def work() -> None:
            nonlocal stopped
            try:
                for offset in following:
                    if stopped or not subject.is_unchanged():
                        return
                    length = min(step, size - offset)
                    await self._limiter.take(length)
                    part = memoryview(bytearray(length))
                    await old.read_into(offset, part, size)
                    digests[offset] = await self._servers.run(worker, digests_of, part)
                    if _has_bytes(part):
                        await new.write(offset, part)
            except BaseException:
                stopped = True
                raise

        try:
            await run_all(*[work] * min(_PIECES_AT_ONCE, len(offsets)))
            await new.settle(size)
        finally:
            old.close()
        return join_digests(digests, size, step, layout.is_protected)


def _has_bytes(part: memoryview) -> bool:
    """Whether it is not all zeros: those stay a hole."""
    runs = (part[start : start + HASHED] for start in range(0, len(part), HASHED))
    return any(run[0] or run[-1] or bytes(run) != _ZEROS[: len(run)] for run in runs)
