"""The product of a change of form, as a plain value, and the code that makes it.

A ``Making`` has all to copy a file's bytes: their places and checksums, and the target, under an id
never used. It consists of numbers, bytes, tuples and layouts, for another process, which opens the
rest itself (``MakingTools``), without metadata. The target stays garbage on record until the flip
(files/transitions).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from aifs.burst.copy import BurstCopy
from aifs.burst.transfer import Mover
from aifs.data.checks import DIGEST_BYTES, DIGESTS_AT_ONCE, Untold
from aifs.data.containers.appending import Containers
from aifs.data.containers.chunked import ChunkedObjects, Load
from aifs.data.containers.files import ContainerEntry, ContainerFiles
from aifs.data.inspecting.column_source import ColumnSource, ContainerColumn
from aifs.data.objects.columns import Columns
from aifs.data.objects.holes import InObjects, Source
from aifs.data.objects.object_set import ObjectSet, Reading
from aifs.data.reading.buffers import BudgetedBuffers
from aifs.data.servers import Servers
from aifs.layout.interleaved import Extent
from aifs.layout.striped import Striped
from aifs.meta.records import Copy


class InChunks(NamedTuple):
    """The bytes of a file are in chunks, which have checksums of their own."""

    extents: tuple[Extent, ...] = ()
    """All of them, with the places of shared chunks."""
    containers: Containers = ()
    """The records of the containers that they name."""


class NewObjects(NamedTuple):
    """The bytes are to be in objects that do not exist yet."""

    ino: int
    oid: int
    layout: Striped


Origin = Copy | InObjects | InChunks
"""Where all bytes of a file are, which nobody changes. A Copy is a burst copy."""

Target = Copy | NewObjects | None
"""The target. A burst copy exists, and is empty. None: few bytes, which are returned."""


@dataclass(frozen=True, slots=True)
class Making:
    """Copy all ``size`` bytes of a file. Holes stay holes; so does each MiB of zeros."""

    origin: Origin
    """Where they are."""
    target: Target
    """Where they are to be, too."""
    size: int
    """In bytes."""
    sparse: bool = False
    """There are holes, which are to be found, and not read."""
    spare: int = 0
    """How many columns more than the bytes need must be durable; see ObjectSet.sync."""


@dataclass(frozen=True, slots=True)
class ColumnMaking:
    """Make a column's object whole on a server, from where it lies, or from other columns; also if
    it is there."""

    origin: InObjects
    """All columns, as they lie. With inode number 0, a container's, whose chunks have the
    checksums."""
    size: int
    """Of the file, or the container."""
    column: int
    """Which one."""
    server: int
    """Where it is to be."""
    live: tuple[tuple[int, int], ...] | None = None
    """Start and end of needed chunks of a container. None: unknown; lost bytes raise Untold."""


class Made(NamedTuple):
    """A target that has been made. Objects are durable, a burst copy is not synced."""

    blocks: int = 0
    """Of 512 bytes, that new objects take, as ObjectSet.blocks."""
    digests: bytes = b""
    """The checksum of each MiB in new objects; b"" of a file that is mostly holes."""
    unread: int = 0
    """Mask of the columns that could not be written, and that others stand in for."""
    data: bytes = b""
    """The bytes that were asked for themselves."""
    wrong: frozenset[int] = frozenset()
    """Columns that turned out to have wrong bytes when another one was made."""


def _ignore(layout: Striped, oid: int, ino: int, column: int) -> None:
    pass


def never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class MakingTools:
    """A process's tools for makings; all except ``servers`` and ``mover`` have other users."""

    servers: Servers
    mover: Mover
    """Its limits and its memory."""
    containers: ContainerFiles | None = None
    """The reader of containers that others use, too."""
    verify: bool = False
    """Whether programs that read get checked bytes alone, from caches of their own."""
    on_damage: Callable[[Striped, int, int, int], None] = _ignore
    """Called for missing or wrong columns with layout, oid, inode number and column. Does not
    block."""

    @contextmanager
    def opened(self, origin: InObjects | InChunks) -> Iterator[Source]:
        """Bytes on the capacity tier, to be read, and compared with their checksums."""
        if isinstance(origin, InChunks):
            with self.reading(origin.containers) as containers:
                yield ChunkedObjects(containers, _listed(origin), verify=True)
            return
        objects = ObjectSet(
            self.servers,
            origin.layout,
            origin.ino,
            origin.oid,
            background=self.mover.io_priority,
            reading=Reading(
                origin.unread,
                partial(self.on_damage, origin.layout),
                _loaded(origin.digests),
                self.verify,
            ),
        )
        with closing(objects):
            yield objects

    @property
    def buffers(self) -> BudgetedBuffers:
        """Memory for bytes that are moved."""
        return self.mover.buffers

    @contextmanager
    def reading(self, entries: Containers) -> Iterator[ContainerFiles]:
        """These containers, to be read."""
        if self.containers is not None:
            yield self.containers
            return
        table = dict(entries)

        async def find(container: int) -> ContainerEntry | None:
            return table.get(container)

        def on_damage(container: int, ino: int, column: int) -> None:
            self.on_damage(table[container].layout, container, ino, column)

        with closing(ContainerFiles(self.servers, find, on_damage)) as containers:
            try:
                yield containers
            finally:
                for container in table:  # others may append to it: nothing of it is kept
                    containers.moved(container)


async def carry_out(
    making: Making | ColumnMaking, tools: MakingTools, cancelled: Callable[[], bool] = never
) -> Made | None:
    """Make the target. None if ``cancelled`` was ever true, as asked between pieces: then, and
    after errors, part of the target may exist.

    Raises NoSpace, QuotaExceeded, Unavailable; Untold for bytes other than stored; TargetFails for
    an unwritable column.
    """
    if isinstance(making, ColumnMaking):
        return await _make_column(making, tools, cancelled)
    target = making.target
    if isinstance(target, NewObjects):
        return await _make_objects(making, target, tools, cancelled)
    if target is None:
        assert isinstance(making.origin, Copy)
        with closing(_opened_copy(tools, making.origin)) as copy:
            return Made(data=await tools.mover.read_whole(copy, making.size))
    assert isinstance(making.origin, InObjects | InChunks)
    with (
        closing(_opened_copy(tools, target)) as copy,
        tools.opened(making.origin) as source,
    ):
        done = await tools.mover.stage_in(source, making.size, copy, cancelled, making.sparse)
    return Made() if done else None


async def _make_objects(
    making: Making, target: NewObjects, tools: MakingTools, cancelled: Callable[[], bool]
) -> Made | None:
    ino, oid, layout = target
    origin, mover, servers = making.origin, tools.mover, tools.servers
    objects = ObjectSet(servers, layout, ino, oid, new=True, background=mover.io_priority)
    with closing(objects):
        if isinstance(origin, Copy):
            with closing(_opened_copy(tools, origin)) as copy:
                digests = await mover.drain_out(
                    copy, making.size, objects, cancelled, making.spare, making.sparse
                )
        else:
            workers = servers[layout.servers[0]].workers
            with tools.opened(origin) as source:
                digests = await mover.store_anew(
                    source, making.size, objects, workers, cancelled, making.spare, making.sparse
                )
        if digests is None:
            return None
        return Made(objects.blocks() or 0, digests, objects.unread)


async def _make_column(
    making: ColumnMaking, tools: MakingTools, cancelled: Callable[[], bool]
) -> Made | None:
    (ino, oid, layout, unread, digests), column = making.origin, making.column
    servers, mover, target = tools.servers, tools.mover, tools.servers[making.server]
    there, priority = layout.moved(column, making.server), mover.io_priority

    async def load_live() -> Sequence[tuple[int, int]]:
        if making.live is None:
            raise Untold(f"container {oid}: bytes are not what their checksums say")
        return making.live

    with (
        closing(Columns(servers, layout, ino, oid, background=priority)) as source,
        closing(Columns(servers, there, ino, oid, background=priority)) as sink,
    ):
        about = (servers, mover.buffers, source)
        reader: ColumnSource | ContainerColumn
        if ino:
            load = _loaded(digests)
            reader = ColumnSource(*about, making.size, column, unread, load, target)
        else:
            reader = ContainerColumn(*about, making.size, column, unread, load_live)
        # What is not written to a new object is a hole; containers have none.
        sparse = await mover.begin_column(sink, column) and ino != 0
        if isinstance(reader, ColumnSource) and not digests:
            await reader.skip_holes(sink)
        length = layout.object_length(column, making.size)
        done = await mover.make_column(reader, sink, column, length, cancelled, sparse)
        return Made(wrong=frozenset(reader.wrong)) if done else None


def _opened_copy(tools: MakingTools, place: Copy) -> BurstCopy:
    """Opened at first use."""
    return BurstCopy(tools.servers[place.server], place.id, tools.servers.buffers)


def _loaded(digests: bytes) -> Callable:
    """See LoadDigests."""
    step = DIGESTS_AT_ONCE

    async def load(number: int) -> tuple[int, bytes]:
        first = number - number % step
        return first, digests[first * DIGEST_BYTES : (first + step) * DIGEST_BYTES]

    return load


def _listed(origin: InChunks) -> Load:
    async def load(_: int) -> tuple[int, Sequence[Extent]]:
        return 0, origin.extents

    return load
