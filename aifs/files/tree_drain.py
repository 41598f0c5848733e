"""Draining a file, or all files below a directory, on whichever hosts their newest bytes are."""

from functools import partial
from typing import NamedTuple

import trio

from aifs.core.tasks import run_all
from aifs.files.drain import Drain
from aifs.files.file_io import FileIO
from aifs.files.services import Services
from aifs.meta import keys, namespace
from aifs.meta.below import is_below
from aifs.meta.kv import ReadTransaction
from aifs.meta.records import Inode, decode_burst
from aifs.meta.slices import read_slice

_RECORDS = 64  # looked at in one transaction: about 0.3 ms
_REQUESTED_AT_ONCE = 100


class Undrained(NamedTuple):
    ino: int
    since_ns: int
    size: int
    writers: int
    home: int
    """The host in whose burst tier it is; 0: this one."""


class TreeDrain:
    """Used from one trio thread."""

    def __init__(
        self,
        services: Services,
        io: FileIO,
        drain: Drain,
    ) -> None:
        self._engine = services.engine
        self._io = io
        self._drain = drain
        self._homes = io.homes

    async def undrained_below(self, top: Inode) -> list[Undrained]:
        """Files with names whose newest bytes are in the burst tier alone: ``top``, as it is now,
        or all below the directory.

        The cost is that of all files that have burst copies, not of the tree.
        """
        if not top.is_dir:
            if not top.in_burst or not top.nlink:
                return []
            return [self._undrained(top, await self._engine.view(_since_ns, top))]
        found: list[Undrained] = []
        start, end = keys.all_of(b"b")
        while start:
            some, start = await self._engine.view(_read_undrained, start, end, top.ino)
            for inode, since_ns in some:
                file = self._io.table.open.get(inode.ino)
                current = inode if file is None else self._io.inodes.attributes(file)
                found.append(self._undrained(current, since_ns))
            await trio.lowlevel.checkpoint()
        return found

    def _undrained(self, inode: Inode, since_ns: int) -> Undrained:
        file = self._io.table.open.get(inode.ino)
        assert inode.copy is not None  # it is the file
        home, writers = self._homes.of(inode.copy.server), 0 if file is None else file.writers
        return Undrained(inode.ino, since_ns, inode.size, writers, home)

    async def request(self, top: Inode) -> dict[int, list[int]]:
        """Drain what is undrained of ``top`` or below ahead of all else. Returns the inode numbers
        by the host in whose burst tier they are; 0: this one."""
        found: dict[int, list[int]] = {0: []}
        for file in await self.undrained_below(top):
            found.setdefault(file.home, []).append(file.ino)
        for host, inos in found.items():
            if host:
                await self._homes.request_drain(host, inos)
                continue
            for first in range(0, len(inos), _REQUESTED_AT_ONCE):
                self._drain.request(inos[first : first + _REQUESTED_AT_ONCE])
                await trio.lowlevel.checkpoint()
        return found

    async def wait(self, top: Inode, strict: bool) -> None:
        """What is undrained now of ``top`` or below is on the capacity tier, or gone, on return.
        ``strict``: raises what a drain fails with, and Busy where a file stays open for writing.

        Ending the wait does not end the drain.
        """

        async def wait(host: int, inos: list[int]) -> None:
            if host:
                await self._homes.drain(host, inos, strict)
            else:
                await self._drain.wait(inos, strict)

        found = await self.request(top)
        await run_all(*(partial(wait, host, inos) for host, inos in found.items()))


def _since_ns(tx: ReadTransaction, inode: Inode) -> int:
    """Since when a file in the burst tier is undrained; 0: it is not on record."""
    assert inode.copy is not None
    record = tx.get(keys.burst_copy(inode.copy.id))
    return 0 if record is None else decode_burst(record).since_ns


def _read_undrained(
    tx: ReadTransaction, start: bytes, end: bytes, top: int
) -> tuple[list[tuple[Inode, int]], bytes]:
    """The undrained files in one slice of the burst records, each with since when it is, and where
    the next slice starts (b"": nowhere)."""
    records, following = read_slice(tx, start, end, _RECORDS)
    found = []
    known: dict[int, bool] = {}
    for key, value in records:
        record = decode_burst(value)
        if not record.undrained:
            continue
        inode = namespace.find_inode(tx, record.ino)
        if inode is None or not inode.nlink or not inode.in_burst or inode.copy is None:
            continue
        if inode.copy.id == keys.number(key) and is_below(tx, inode.ino, top, known):
            found.append((inode, record.since_ns))
    return found, following
