"""An open dataset: rows by number, and blocks for readers. Any thread may use it; it can be
pickled.

Its index is ``.aifs-index`` in the dataset's directory (``.NAME.aifs-index`` beside a file), put
there by the first user who may. It is a cache: it counts only for exactly these files, sizes and
mtimes. Indexes of directories of files, whose places change, are made each time.
"""

import os
import threading
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from itertools import accumulate, chain
from typing import Any

from aifs.core import trees
from aifs.core.errors import DatasetError
from aifs.core.files import read_foreign
from aifs.datasets import index as record
from aifs.datasets.disk import DiskFile, IndexedDiskFile, version_of
from aifs.datasets.formats import files, records
from aifs.datasets.formats.known import FORMATS, format_of, format_of_bytes, is_of
from aifs.datasets.formats.reading import BlockRows, OpenBlock
from aifs.datasets.index import INDEX_NAME, Index, IndexedFile, RowBlock, Version, index_of

MADE_EACH_TIME = (files.NAME,)
"""Formats whose indexes are not kept."""

_OPEN_FILES = 256  # whose footers are held


class Dataset:
    """A dataset from ``data.open``. ``len``: its rows; ``dataset[row]``: one row, in the order of
    paths (slow: it reads a block)."""

    def __init__(self, path: str, index: Index, options: Mapping[str, Any]) -> None:
        self.path = path
        """Absolute."""
        self.index = index
        self._options = dict(options)
        self._lock = threading.Lock()
        self._opened: OrderedDict[int, OpenBlock] = OrderedDict()  # the last used last

    @property
    def format(self) -> str:
        return self.index.format

    @property
    def has_kept_index(self) -> bool:
        """Whether its index is kept in its directory, if the user may write there."""
        return self.format not in MADE_EACH_TIME and b"" not in self.index.paths

    def __len__(self) -> int:
        return self.index.total_rows

    def __getitem__(self, row: int) -> Any:
        """Raises IndexError, DatasetError; OSError, with ESTALE for a file that has changed."""
        if row < 0:
            row += len(self)
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        block = bisect_right(self._ends, row)
        first = self._ends[block] - self.index.rows[block]
        return self.open_block(block).take([row - first])[0]

    @cached_property
    def _ends(self) -> Sequence[int]:
        return array("q", accumulate(self.index.rows))

    def open_block(self, number: int) -> BlockRows:
        """Read the rows of block ``number``. Raises DatasetError with the file's name; OSError,
        ESTALE for a file that has changed since it was indexed."""
        file = self.index.file_of(number)
        block: RowBlock = self.index.block(number)
        return self._file(file)(number - self.index.first_blocks[file], block)

    def _file(self, number: int) -> OpenBlock:
        with self._lock:
            if number in self._opened:
                self._opened.move_to_end(number)
                return self._opened[number]
        opened = FORMATS[self.format].open_file(self._bytes_of(number), self._options)
        with self._lock:
            opened = self._opened.setdefault(number, opened)  # another thread may have been first
            while len(self._opened) > _OPEN_FILES:
                self._opened.popitem(last=False)
        return opened

    def let_go(self, numbers: Iterable[int]) -> None:
        """Close files, by number, that are not needed soon, once what was read is dropped."""
        with self._lock:
            for number in numbers:
                self._opened.pop(number, None)

    def _bytes_of(self, number: int) -> "_Catalogue | IndexedDiskFile":
        if self.index.catalogue:
            return _Catalogue(self.path, self.index.catalogue)
        name = self.index.paths[number]
        path = os.path.join(self.path, os.fsdecode(name)) if name else self.path
        return IndexedDiskFile(path, self.index.version(number))

    def __reduce__(self) -> tuple[Any, ...]:
        return Dataset, (self.path, self.index, self._options)


class _Catalogue:
    """The one "file" of a directory of files."""

    def __init__(self, root: str, catalogue: bytes | memoryview) -> None:
        self.path = root
        self._bytes = memoryview(catalogue)

    @property
    def size(self) -> int:
        return len(self._bytes)

    def read(self, offset: int, length: int) -> bytes:
        return bytes(self._bytes[offset : offset + length])


_INDEX_MAX = 1 << 32  # bytes

_THREADS = 16  # files that are indexed at a time: they wait for servers, more than for processors
_OPTIONS = {
    "parquet": ("columns",),
    "arrow": ("columns",),
    "jsonl": ("schema",),
    "tar": ("decode",),
    "records": ("record_bytes",),
}

PathLike = str | os.PathLike[str]


def open(
    path: PathLike,
    *,
    format: str | None = None,
    on_file: Callable[[int, int], None] = lambda done, total: None,
    **options: Any,
) -> Dataset:
    """The dataset ``path``: a directory of files of one format, or one such file, on a mount or in
    any other directory. Hidden files, and those of another format, do not belong to it.

    ``format``: parquet, arrow, jsonl, text, tar, megatron, records, files; None: by names, or by
    the first bytes of a single file. Options: ``columns`` (parquet, arrow: these alone are read),
    ``schema`` (jsonl: a pyarrow schema), ``decode`` (tar: json, txt, cls and id become objects),
    ``record_bytes`` (records: the size of a row).

    The first open reads the footers or headers of all files, lines as a whole, and keeps the index;
    ``on_file`` is called with the number of files that are done, and of all. Raises DatasetError
    with the name of the file that is torn, or of another format; OSError."""
    root = os.path.abspath(os.fspath(path))
    found: dict[bytes, os.DirEntry[bytes]] = {}
    if is_directory := os.path.isdir(root):
        found.update(chain.from_iterable(each for _, each in files.listed(os.fsencode(root))))
        format = format or _named(root, lambda: format_of(found))
    format = format or _format_of_file(root)
    _check(root, format, options)
    if format == files.NAME:
        return Dataset(root, _of_files(root, options), options)
    names = {name: version_of(entry.stat()) for name, entry in found.items() if is_of(format, name)}
    if not is_directory:
        names = {b"": version_of(os.stat(root))}
    cached = _cache_of(root) if format not in MADE_EACH_TIME else None
    index = _kept(cached, format, names, options) if cached else None
    if index is None:
        index = _made(root, format, names, options, on_file)
        if cached:
            with suppress(OSError):  # we may not write there, or it is full: it is made again
                trees.replace_file(cached, record.encode(index), durable=False)
    return Dataset(root, index, options)


def _check(root: str, format: str, options: Mapping[str, Any]) -> None:
    if format not in FORMATS:
        raise DatasetError(f"{root}: format {format!r} is unknown; there are {', '.join(FORMATS)}")
    known = _OPTIONS.get(format, ())
    for name in options:
        if name not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise DatasetError(f"{root}: format {format} has no option {name!r}; {has}")


def _format_of_file(path: str) -> str:
    """Raises DatasetError if neither name nor bytes tell."""
    name = os.fsencode(os.path.basename(path))
    for format, module in FORMATS.items():
        if module.SUFFIXES and is_of(format, name):
            return format
    found = format_of_bytes(DiskFile(path))
    if found is None:
        raise DatasetError(f"{path}: its format is not known; say format=")
    return found


def _cache_of(root: str) -> str:
    if os.path.isdir(root):
        return os.path.join(root, INDEX_NAME)
    above, name = os.path.split(root)
    return os.path.join(above, f".{name}{INDEX_NAME}")


def _kept(
    path: str, format: str, names: Mapping[bytes, Version], options: Mapping[str, Any]
) -> Index | None:
    """The kept index, if it is that of these files and options."""
    try:
        data = read_foreign(path, _INDEX_MAX)
        index = record.decode(data) if data is not None else None
    except (OSError, DatasetError, ValueError):
        return None
    if index is None or index.format != format or len(index.paths) != len(names):
        return None
    same = all(names.get(path) == index.version(number) for number, path in enumerate(index.paths))
    return index if same and _has_such_rows(index, options) else None


def _has_such_rows(index: Index, options: Mapping[str, Any]) -> bool:
    """Whether records have the user's size; files of other formats tell theirs."""
    if index.format != records.NAME:
        return True
    size = options.get("record_bytes", 0)
    return len(index.rows) > 0 and index.lengths[0] == index.rows[0] * size


def _made(
    root: str,
    format: str,
    names: Mapping[bytes, Version],
    options: Mapping[str, Any],
    on_file: Callable[[int, int], None],
) -> Index:
    def indexed(name: bytes) -> IndexedFile:
        path = os.path.join(root, os.fsdecode(name)) if name else root
        file = DiskFile(path)
        blocks = _named(path, lambda: list(FORMATS[format].blocks(file, options)))
        return IndexedFile(name, file.version, blocks)

    with ThreadPoolExecutor(min(_THREADS, len(names) or 1), "aifs-index") as pool:
        try:
            return index_of(format, _told(pool.map(indexed, names), len(names), on_file))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _told(
    files: Iterator[IndexedFile], total: int, on_file: Callable[[int, int], None]
) -> Iterator[IndexedFile]:
    for done, file in enumerate(files, 1):
        on_file(done, total)
        yield file


def _of_files(root: str, options: Mapping[str, Any]) -> Index:
    catalogue, blocks = _named(root, lambda: files.catalogue(root, options))
    version = Version(len(catalogue), 0)
    return index_of(files.NAME, [IndexedFile(b"", version, blocks)], catalogue)


def _named(path: str, work: Callable[[], Any]) -> Any:
    """Errors say which file they are about."""
    try:
        return work()
    except DatasetError as error:
        raise DatasetError(f"{path}: {error}") from error
