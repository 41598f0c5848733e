"""Opens for reading of packed files that are not in core: they are lent to the bridge with the
places of their bytes, many at a time, so most files of a dataset are opened without the daemon.

One look at the records serves the opened file and those with the next numbers, which were made one
after the other and lie side by side in containers. They are claimed meanwhile, so none changes;
afterwards the rules of lent inodes hold (``Handles``).
"""

from collections import deque
from collections.abc import Collection, Sequence
from typing import NamedTuple

from aifs.core.errors import FsError
from aifs.files.capacity_io import CapacityIO
from aifs.files.open_table import OpenTable
from aifs.layout.interleaved import Extent
from aifs.meta import keys
from aifs.meta.chunks import decode_list
from aifs.meta.kv import Engine, ReadTransaction
from aifs.meta.records import APPEND_ONLY, Inode, decode_dentry, decode_inode

_AHEAD = 32
"""Files that are lent at once."""

_STREAMS = 16
"""How many programs that open files in order are followed."""

_LENT_AHEAD_MAX = 8192
"""While no more inodes are lent, files are lent ahead though nobody opens them in order."""

_TRIES = 16
"""After so many files that could not be lent, one in so many is tried."""


class _Stored(NamedTuple):
    """A file in containers without a dirty mark, as it is on record."""

    record: bytes
    inode: Inode
    extents: Sequence[Extent]
    """The first ones."""


class LentOpens:
    """Used from one trio thread."""

    def __init__(self, engine: Engine, table: OpenTable, capacity: CapacityIO) -> None:
        self._engine = engine
        self._table = table
        self._capacity = capacity
        self._handles = table.handles
        self._places = table.handles.places
        self._following = deque[int](maxlen=_STREAMS)
        """Numbers behind the last ones of files that were lent together."""
        self._found = (0, b"", 0)
        """What was looked up last: directory, name and inode."""
        self._failed = 0
        """Files that could not be lent since one could."""

    def found(self, parent: int, name: bytes, ino: int) -> None:
        """A program has looked this name up. Does not block."""
        self._found = parent, name, ino

    async def open(self, ino: int, flags: int, uid: int) -> bool:
        """Open a file for reading that is not in core. Whether it was lent, with one more handle.
        Raises Unavailable for a damaged record."""
        if not self._places.is_on or self._table.is_open(ino) or self._handles.is_lent(ino):
            return False
        if self._failed >= _TRIES and self._failed % _TRIES:
            self._failed += 1
            return False
        if not await self._engine.view(_settled, [ino]):
            return False
        count = self._count(ino)
        inos = await self._engine.view(_inodes_from, ino, count)
        inos = [each for each in inos if each == ino or self._may_be_lent(each)]
        with self._table.opening(*inos, lent=True) as claimed:
            await self._lend(sorted(claimed))
            is_lent = self._handles.is_lent(ino)
        parent, name, found = self._found
        is_next = is_lent and found == ino and count > 1
        if is_next and self._handles.notes_entries(parent):
            self._handles.note_entries(await self._engine.view(_entries_from, parent, name))
        self._failed = 0 if is_lent else self._failed + 1
        return is_lent and self._handles.open_lent(ino, flags, uid)

    def _count(self, ino: int) -> int:
        in_order = next((start for start in self._following if 0 <= ino - start <= _AHEAD), None)
        if in_order is not None:
            self._following.remove(in_order)
        is_worth_it = in_order is not None or self._handles.lent_count < _LENT_AHEAD_MAX
        return _AHEAD if is_worth_it else 1

    def _may_be_lent(self, ino: int) -> bool:
        table = self._table
        known: Sequence[Collection[int]] = (
            table.lost,
            table.unsynced,
            table.mapped,
            table.forgotten,
            table.orphans,
            table.stale,
            self._capacity.perhaps_mapped,
        )
        return not any(ino in each for each in known) and not self._handles.is_lent(ino)

    async def _lend(self, inos: Sequence[int]) -> None:
        if not inos:
            return
        self._following.append(inos[-1] + 1)
        try:
            for stored in await self._engine.view(_settled, inos):
                await self._places.open_containers(stored.extents)
            # Once more: names and modes may have changed meanwhile.
            for record, inode, extents in await self._engine.view(_settled, inos):
                is_put = self._may_be_lent(inode.ino) and self._places.put_chunks(
                    inode.ino, inode.size, extents
                )
                if is_put:
                    self._handles.lend_unseen(inode, record)
        except FsError:
            return  # a program that opens them in another way is told


def _inodes_from(tx: ReadTransaction, ino: int, count: int) -> list[int]:
    end = keys.inode(ino + 4 * _AHEAD)
    return [keys.number(key) for key, _ in tx.range(keys.inode(ino), end, count)]


def _entries_from(tx: ReadTransaction, parent: int, name: bytes) -> list[tuple[bytes, bytes]]:
    """The entries of a directory behind this name; none if it is doomed."""
    record = tx.get(keys.dentry(parent, name))
    if record is None or tx.get(keys.doomed(parent)) is not None:
        return []
    return list(tx.range(*keys.entries_after(parent, decode_dentry(record).cookie), _AHEAD))


def _settled(tx: ReadTransaction, inos: Sequence[int]) -> list[_Stored]:
    """The packed files without dirty mark among these. Raises Unavailable for a damaged record."""
    wanted = [keys.inode(ino) for ino in inos] + [keys.dirty(ino) for ino in inos]
    found = tx.get_many(wanted)
    inodes = [
        (record, decode_inode(ino, record))
        for ino, record, mark in zip(inos, found, found[len(inos) :], strict=False)
        if record is not None and mark is None
    ]
    packed = [(record, inode) for record, inode in inodes if _is_packed(inode)]
    lists = tx.get_many([keys.chunk_list(inode.oid, 0) for _, inode in packed])
    return [
        _Stored(record, inode, decode_list(extents)[1])
        for (record, inode), extents in zip(packed, lists, strict=True)
        if extents is not None
    ]


def _is_packed(inode: Inode) -> bool:
    is_plain = inode.is_file and not inode.is_privileged and not inode.flags & APPEND_ONLY
    return is_plain and inode.nlink > 0 and inode.chunks is not None and inode.copy is None
