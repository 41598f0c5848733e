"""``order/seed=7,epoch=0,rank=0-of-8.tar``: an epoch's order as a file (aifs/datasets/order.py), of
a directory's dataset.

The index of ``aifs dataset index`` says where blocks lie; headers and footers are read, no rows.
Directories of small files, and fixed-size records, need no index.
"""

import os
from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate, pairwise

import trio

from aifs.core.errors import DatasetError, Invalid
from aifs.datasets.archive import Archive
from aifs.datasets.formats import files, megatron, records, tar
from aifs.datasets.formats.known import is_of, order_bytes
from aifs.datasets.formats.reading import in_blocks
from aifs.datasets.index import (
    INDEX_NAME,
    FileBytes,
    Index,
    IndexedFile,
    Version,
    decode,
    index_of,
)
from aifs.datasets.order import OrderName, chosen_of
from aifs.datasets.virtual import VirtualBytes
from aifs.files.file_io import FileIO
from aifs.files.settled import Source
from aifs.meta import namespace
from aifs.meta.askers import Asker
from aifs.meta.kv import Engine
from aifs.reads.virtual.sources import VirtualContent, read_source, require_all, right_to
from aifs.reads.virtual.trees import member_of, source_of
from aifs.reads.virtual.walking import Found, SourceWatch, walk

FILES_MAX = 1 << 17
"""Of a dataset that has an index: some 300 bytes are kept of each."""

INDEX_BYTES_MAX = 64 << 20
"""It is held in memory while an order is made."""

_SOURCE_BYTES = 250
"""That are kept of a file of a dataset, with its name."""

_MAKE_ONE = "run `aifs dataset index` on the directory"

_Made = tuple[VirtualBytes, Callable[[int], Source], int]
"""The bytes, the source of a number, and how many bytes are kept."""


class OrderFiles:
    """Makes order files, one at a time: it takes a processor."""

    def __init__(self, engine: Engine, io: FileIO) -> None:
        self._engine = engine
        self._io = io
        self._turn = trio.CapacityLimiter(1)

    async def make(
        self,
        name: OrderName,
        asker: Asker,
        top: int,
        watch: SourceWatch,
        known: VirtualContent | None,
    ) -> VirtualContent:
        """The content of the order file ``name`` of directory ``top``; ``known`` if unchanged.
        Raises NotFound; AccessDenied, without details, for unreadable sources; Invalid without such
        a file; errors of ``walk``."""
        directory = await self._engine.view(namespace.get_directory, top)
        found: dict[bytes, Found] = {}

        def visit(each: Found) -> bool:
            if each.inode.is_dir:
                return not each.path.rpartition(b"/")[2].startswith(b".")
            if not each.inode.is_file or not _may_belong(name, each.path):
                return False
            found[each.path] = each
            return True

        rights = await walk(self._engine, self._io, top, watch, visit)
        rights.add(right_to(directory))
        require_all(rights, asker)
        inodes = [each.inode for each in found.values()]
        newest_ns = max((inode.mtime_ns for inode in inodes), default=directory.mtime_ns)
        versions = ((inode.ino, inode.size, inode.mtime_ns) for inode in inodes)
        fingerprint = hash((name, *found, *versions))
        if known is not None and known.fingerprint == fingerprint:
            made: _Made = known.bytes, known.source, known.memory
        else:
            made = await self._made(name, found)
        return VirtualContent(*made, frozenset(rights), newest_ns, fingerprint)

    async def _made(self, name: OrderName, found: dict[bytes, Found]) -> _Made:
        kept = found.pop(INDEX_NAME.encode(), None)
        try:
            if name.format == tar.NAME and not any(is_of(tar.NAME, path) for path in found):
                return await self._run(_of_small_files, name, found)
            if len(found) > FILES_MAX:
                raise DatasetError(f"{len(found):,} files are more than {FILES_MAX:,}")
            record = b""
            if name.format != records.NAME:
                if kept is None:
                    raise DatasetError(f"the dataset has no index: {_MAKE_ONE}")
                if kept.inode.size > INDEX_BYTES_MAX:
                    raise DatasetError(f"its index is larger than {INDEX_BYTES_MAX:,} bytes")
                record = await self._io.read_whole(kept.inode.ino)
            return await self._run(_of_dataset, self._io, name, found, record)
        except DatasetError as error:
            raise Invalid(str(error)) from None

    async def _run(self, make: Callable[..., _Made], *arguments: object) -> _Made:
        return await trio.to_thread.run_sync(make, *arguments, limiter=self._turn)


def _may_belong(name: OrderName, path: bytes) -> bool:
    """Whether a file of this name is looked at."""
    if name.format == records.NAME:
        return is_of(records.NAME, path)
    if path == INDEX_NAME.encode():
        return True
    if name.format == megatron.NAME and path.endswith(b".idx"):
        return is_of(files.NAME, path)
    # Without any archive it is the files that are put into one.
    return is_of(files.NAME if name.format == tar.NAME else name.format, path)


class _Sources:
    """See OrderSources. In a thread of trio's."""

    def __init__(self, io: FileIO, index: Index, found: Mapping[bytes, Found]) -> None:
        self.index = index
        self._io = io
        self.all = [_source(found[path]) for path in index.paths]
        self._beside: dict[int, int] = {}  # of a file the number of what belongs to it
        for file, path in enumerate(index.paths):
            if other := found.get(os.path.splitext(path)[0] + b".idx"):
                self._beside[file] = len(self.all)
                self.all.append(_source(other))

    def open(self, source: int) -> FileBytes:
        return _SourceBytes(self._io, self.all[source])

    def beside(self, file: int) -> int:
        if file not in self._beside:
            raise DatasetError("its .idx is missing")
        return self._beside[file]


class _SourceBytes:
    """A ``FileBytes``, read by the filesystem's own means from a thread of trio's."""

    def __init__(self, io: FileIO, source: Source) -> None:
        self._io = io
        self._source = source

    @property
    def size(self) -> int:
        return self._source.size

    def read(self, offset: int, length: int) -> bytes:
        length = min(length, self.size - offset)
        if length <= 0:
            return b""
        return bytes(trio.from_thread.run(read_source, self._io, self._source, offset, length))

    def beside(self, suffix: str) -> FileBytes:
        raise FileNotFoundError(suffix)


def _of_dataset(io: FileIO, name: OrderName, found: Mapping[bytes, Found], record: bytes) -> _Made:
    here = {path: each for path, each in found.items() if is_of(name.format, path)}
    if name.format == records.NAME:
        index = _of_records(here, name.record_bytes)
    else:
        index = decode(record)
        _require_same(index, name.format, here)
    sources = _Sources(io, index, found)
    joined = order_bytes(index, name, sources)
    kept = sum(_SOURCE_BYTES + len(source.name) for source in sources.all)
    return joined, sources.all.__getitem__, joined.memory + kept


def _of_records(found: Mapping[bytes, Found], record_bytes: int) -> Index:
    def indexed(path: bytes, each: Found) -> IndexedFile:
        try:
            blocks = list(records.blocks_of(each.inode.size, record_bytes))
        except DatasetError as error:
            raise DatasetError(f"{os.fsdecode(path)}: {error}") from error
        return IndexedFile(path, _version(each), blocks)

    return index_of(records.NAME, (indexed(path, each) for path, each in found.items()))


def _require_same(index: Index, format: str, found: Mapping[bytes, Found]) -> None:
    """Raises DatasetError for an index of other files."""
    if index.format != format:
        raise DatasetError(f"the dataset's index is of format {index.format}, not {format}")
    for number, path in enumerate(index.paths):
        if path not in found or _version(found[path]) != index.version(number):
            raise DatasetError(
                f"{os.fsdecode(path)} is not as the dataset's index has it: {_MAKE_ONE} again"
            )
    if len(index.paths) != len(found):
        new = min(found.keys() - set(index.paths))
        raise DatasetError(f"{os.fsdecode(new)} is not in the dataset's index: {_MAKE_ONE} again")


def _of_small_files(name: OrderName, found: Mapping[bytes, Found]) -> _Made:
    """An archive of a directory's files, a row a stem, in the order in which they were made, as
    containers mostly hold them: places change, and all ranks need one order."""
    rows: dict[bytes, list[Found]] = {}
    for each in sorted(found.values(), key=lambda one: (one.inode.ino, one.path)):
        stem = tar.stem_of(each.path)
        rows.setdefault(each.path if stem is None else stem[0], []).append(each)
    sizes = (sum(each.inode.size for each in row) for row in rows.values())
    blocks = list(in_blocks(pairwise(accumulate(sizes, initial=0))))
    version = Version(sum(each.inode.size for each in found.values()), 0)
    index = index_of(files.NAME, [IndexedFile(b"", version, blocks)])
    firsts = list(accumulate(index.rows, initial=0))
    in_order = list(rows.values())
    archive = Archive()
    for number in chosen_of(index, name).numbers:
        for row in in_order[firsts[number] : firsts[number + 1]]:
            for each in row:
                archive.add(member_of(each))
    return archive, partial(source_of, archive), archive.memory


def _version(found: Found) -> Version:
    return Version(found.inode.size, found.inode.mtime_ns)


def _source(found: Found) -> Source:
    return Source(found.inode.ino, found.inode.size, found.inode.mtime_ns, found.path)
