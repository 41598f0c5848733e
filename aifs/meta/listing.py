"""Reading directories: entries and their inodes, in two reads of the store.

Records stay encoded: the bridge makes the reply from them (fuse/records.h reads keys and records of
entries, and heads of inodes, as laid out in meta/keys.py and meta/records.py).
"""

import struct
from collections.abc import AsyncIterator, Iterator

import trio

from aifs.core.errors import NotFound
from aifs.meta import keys
from aifs.meta.kv import Engine, ReadTransaction
from aifs.meta.records import Inode, decode_entry, decode_inode, encode_entry

_AT_ONCE = 64
"""Entries that are read in one view: about 0.3 ms."""


class Listing:
    """Entries of a directory by cookie: (name, Inode, cookie). A record may be replaced by the
    inode as it is in core."""

    __slots__ = ("entries", "inodes", "is_last", "seq", "unkept")

    def __init__(self, entries: list[tuple[bytes, bytes]], inodes: list[bytes], seq: int) -> None:
        self.entries = entries
        """Key and record of each entry."""
        self.inodes = inodes
        """The record of the inode of each."""
        self.seq = seq
        """Of the view that has read them."""
        self.is_last = False
        """The directory has no more entries behind these."""
        self.unkept: set[int] = set()
        """Places of the entries of which the kernel is to keep no attributes."""

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[tuple[bytes, Inode, int]]:
        for (key, entry), record in zip(self.entries, self.inodes, strict=True):
            ino, _, name = decode_entry(entry)
            inode = decode_inode(ino, record)
            inode.seq = self.seq
            yield name, inode, keys.entry_numbers(key)[1]

    @property
    def inos(self) -> tuple[int, ...]:
        """The inode numbers."""
        numbers = b"".join([entry[:8] for _, entry in self.entries])
        return struct.unpack(f">{len(self.entries)}Q", numbers)

    def put_dots(self, directory: Inode, place: int) -> None:
        """Put ``.`` and ``..``, from ``place`` on, in front, with cookies of their own: 0 and 1."""
        type_, parent = directory.mode >> 12, directory.parent or directory.ino
        dots = [
            (keys.entry(directory.ino, cookie), encode_entry(ino, type_, name))
            for cookie, (ino, name) in enumerate([(directory.ino, b"."), (parent, b"..")])
        ][place:]
        self.entries[:0] = dots
        self.inodes[:0] = [directory.encode()] * len(dots)
        self.unkept = {place + len(dots) for place in self.unkept}


def list_directory(tx: ReadTransaction, ino: int, cookie: int, limit: int) -> Listing:
    """Up to ``limit`` entries behind ``cookie`` (0: all). Raises NotFound for a dangling entry."""
    entries = list(tx.range(*keys.entries_after(ino, cookie), limit))
    records = tx.get_many([b"i" + entry[:8] for _, entry in entries])
    if None in records:
        child, _, name = decode_entry(entries[records.index(None)][1])
        raise NotFound(f"inode {child} does not exist, which an entry of directory {ino} leads to")
    return Listing(entries, records, tx.seq)  # type: ignore[arg-type]  # there is no None in it


async def entries_of(engine: Engine, directory: int) -> AsyncIterator[tuple[bytes, Inode]]:
    """Names and inodes in a directory, with other tasks between slices. Raises as
    ``list_directory``."""
    cookie = 0
    while entries := await engine.view(list_directory, directory, cookie, _AT_ONCE):
        for name, inode, cookie in entries:
            yield name, inode
        await trio.lowlevel.checkpoint()
