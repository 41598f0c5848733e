"""Many small files at once, none of which is brought into core.

Opening a small file costs the daemon several times what its bytes cost. Here many unchanged files
are read: one look at all records; one request for neighbours in a container; one call for each
object or burst copy. ``FileIO.read`` has the rest: files that are open, marked, changed,
compressed, on several servers, or unreadable; and objects with several hosts, which may change them
in place.

Versions are never mixed. Bytes in records and containers do not change in place. Objects and copies
change under a dirty mark alone (I3): so their records are looked at again after reading.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from aifs.burst.tier import BurstTier
from aifs.core.errors import FsError
from aifs.core.tasks import run_all
from aifs.data.chunk_codec import PLAIN
from aifs.data.containers.files import STRIPE_BLOCK, ContainerFiles
from aifs.data.objects.cached_reads import runs_of
from aifs.data.server import DataServer
from aifs.data.servers import Servers
from aifs.data.storage import Key
from aifs.data.workers import gather
from aifs.files.open_table import OpenTable
from aifs.layout.interleaved import CHUNK, HEADER_BYTES, Extent
from aifs.layout.striped import Striped
from aifs.meta import keys
from aifs.meta.chunks import decode_list
from aifs.meta.kv import Engine, ReadTransaction
from aifs.meta.records import Inode, decode_inode

SMALL = CHUNK
"""Larger files are better read one by one: a read in order has the next bytes read ahead."""

_GAP = 64 << 10
"""Bytes between two chunks of a container that are read, too, rather than asking twice."""


class Source(NamedTuple):
    """A file on record, and what tells that its bytes are still the same."""

    ino: int
    size: int
    mtime_ns: int
    name: bytes
    """For messages."""


class SettledPart(NamedTuple):
    """What somebody wants to read of a file: the bytes from ``offset`` on that fill ``target``."""

    source: Source
    offset: int
    target: memoryview


class _Stored(NamedTuple):
    """A file without a dirty mark, as it is on record."""

    record: bytes
    inode: Inode
    extents: Sequence[Extent]
    """The first ones of a file in containers."""


class _Span(NamedTuple):
    """Bytes of a container that ``part`` is to be filled with."""

    container: int
    start: int
    end: int
    part: SettledPart


class _Call(NamedTuple):
    """The same of an object, or of a burst copy."""

    server: DataServer
    key: Key
    offset: int
    part: SettledPart
    record: bytes
    """Of the file, before they are read."""


class SettledReads:
    """Used from one trio thread."""

    def __init__(
        self,
        engine: Engine,
        servers: Servers,
        tier: BurstTier,
        containers: ContainerFiles,
        table: OpenTable,
        verify: bool,
    ) -> None:
        """``verify``: bytes of data servers have to be checked, which is not done here."""
        self._engine = engine
        self._servers = servers
        self._tier = tier
        self._containers = containers
        self._table = table
        self._verify = verify

    async def read(self, parts: Sequence[SettledPart]) -> list[SettledPart]:
        """Fill targets of readable parts; returns the others, whose targets hold anything.
        Cancellable."""
        await self._servers.descriptors.find_room()
        try:
            stored = await self._engine.view(_look, [part.source.ino for part in parts])
        except FsError:  # one of the records is damaged: readers of the others need not know
            return list(parts)
        others: list[SettledPart] = []
        spans: list[_Span] = []
        calls: list[_Call] = []
        for part, found in zip(parts, stored, strict=True):
            if found is None or not self._is_as_wanted(part.source, found.inode):
                others.append(part)
            elif found.inode.data is not None:
                part.target[:] = found.inode.data[part.offset : part.offset + len(part.target)]
            else:
                step = self._plan(part, found)
                if isinstance(step, _Span):
                    spans.append(step)
                elif isinstance(step, _Call):
                    calls.append(step)
                else:
                    others.append(part)
        reads = [partial(self._read_run, run, others) for run in _runs_of(spans)]
        if calls:
            reads.append(partial(self._read_files, calls, others))
        await run_all(*reads)
        return others

    # --- what is to be read ---

    def _is_as_wanted(self, source: Source, inode: Inode) -> bool:
        return (
            inode.is_file
            and inode.nlink > 0
            and (inode.size, inode.mtime_ns) == (source.size, source.mtime_ns)
            and not inode.in_burst
            and not self._table.is_open(source.ino)
        )

    def _plan(self, part: SettledPart, found: _Stored) -> _Span | _Call | None:
        """The read or call that fills the part; None if there is none."""
        inode, copy = found.inode, found.inode.copy
        if copy is not None and copy.server not in self._servers.elsewhere:
            self._tier.touch(copy.id)
            return self._call(part, found, copy.server, (0, copy.id), part.offset)
        if self._verify:
            return None
        if inode.chunks is not None:
            return _span_of(part, found.extents)
        if inode.objects is None:
            return None
        return self._call_of_object(part, found, inode.objects)

    def _call_of_object(self, part: SettledPart, found: _Stored, layout: Striped) -> _Call | None:
        runs = runs_of(layout, part.offset, part.target)
        if self._engine.host or layout.is_protected or len(runs) > 1:
            return None
        index, offset, _ = runs[0]
        key = (found.inode.named_by, found.inode.oid)
        return self._call(part, found, layout.servers[index], key, offset)

    def _call(
        self, part: SettledPart, found: _Stored, number: int, key: Key, offset: int
    ) -> _Call | None:
        server = self._servers.find(number)
        return None if server is None else _Call(server, key, offset, part, found.record)

    # --- reading it ---

    async def _read_run(self, run: "_Run", others: list[SettledPart]) -> None:
        try:
            data = await self._containers.view(run.container, run.start, run.end - run.start)
        except FsError:  # it has moved; or a reader of it alone gets the error
            others.extend(span.part for span in run.spans)
            return
        for span in run.spans:
            span.part.target[:] = data[span.start - run.start : span.end - run.start]

    async def _read_files(self, calls: list[_Call], others: list[SettledPart]) -> None:
        near = [call for call in calls if call.server.may_inline]
        far = [call for call in calls if not call.server.may_inline]
        filled = [_fill(call) for call in near]
        if far:
            waited_for = [(call.server.workers, _fill, (call,)) for call in far]
            filled += await gather(waited_for, abandonable=True)
        calls = near + far
        now = await self._engine.view(_unmarked, [call.part.source.ino for call in calls])
        for call, is_filled, record in zip(calls, filled, now, strict=True):
            if not is_filled or record != call.record:
                others.append(call.part)


def _look(tx: ReadTransaction, inos: Sequence[int]) -> list[_Stored | None]:
    """Each file, None if marked or gone. Raises Unavailable."""
    inodes = {
        place: (record, decode_inode(inos[place], record))
        for place, record in enumerate(_unmarked(tx, inos))
        if record is not None
    }
    in_chunks = [place for place, (_, inode) in inodes.items() if inode.chunks is not None]
    lists = tx.get_many([keys.chunk_list(inodes[place][1].oid, 0) for place in in_chunks])
    extents = {
        place: decode_list(record)[1]
        for place, record in zip(in_chunks, lists, strict=True)
        if record is not None
    }
    return [
        _Stored(*inodes[place], extents.get(place, ())) if place in inodes else None
        for place in range(len(inos))
    ]


def _unmarked(tx: ReadTransaction, inos: Sequence[int]) -> list[bytes | None]:
    """Each inode's record, None if marked."""
    wanted = [keys.inode(ino) for ino in inos] + [keys.dirty(ino) for ino in inos]
    found = tx.get_many(wanted)
    marks = found[len(inos) :]
    return [
        record if mark is None else None
        for record, mark in zip(found[: len(inos)], marks, strict=True)
    ]


def _span_of(part: SettledPart, extents: Sequence[Extent]) -> _Span | None:
    """The part's place, if in one chunk of the file's own, as it is."""
    extent = extents[0] if len(extents) == 1 else Extent(0)
    place = extent.place
    if place is None or extent.shared or place.codec != PLAIN or place.raw != part.source.size:
        return None
    start = place.offset + HEADER_BYTES + part.offset
    return _Span(place.container, start, start + len(part.target), part)


class _Run(NamedTuple):
    """What one request reads of a container, and whose bytes that are."""

    container: int
    start: int
    end: int
    spans: list[_Span]


def _runs_of(spans: list[_Span]) -> list[_Run]:
    """Neighbours are read together, as far as the cache has them in one piece."""
    runs: list[_Run] = []
    for span in sorted(spans, key=_place_of):
        last = runs[-1] if runs else None
        if (
            last is not None
            and last.container == span.container
            and span.start - last.end <= _GAP
            and (span.end - 1) // STRIPE_BLOCK == last.start // STRIPE_BLOCK
        ):
            last.spans.append(span)
            runs[-1] = last._replace(end=max(last.end, span.end))
        else:
            runs.append(_Run(span.container, span.start, span.end, [span]))
    return runs


def _place_of(span: _Span) -> tuple[int, int]:
    return span.container, span.start


def _fill(call: _Call) -> bool:
    """Whether all was there. Blocks, unless ``may_inline``."""
    target = call.part.target
    try:
        return call.server.read_object(call.key, target, call.offset) == len(target)
    except FsError:
        return False  # a reader of it alone gets the error
