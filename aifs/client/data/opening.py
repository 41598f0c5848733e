"""``data.open``: a directory, or a file, as a dataset; its index is made or found.

The index is kept as ``.aifs-index`` in the dataset's directory (of a dataset that is one file:
``.NAME.aifs-index`` beside it), where the first user who may write there puts it. It is a cache: it
counts only if it names exactly the files that are there, with their sizes and mtimes, and losing it
costs the time to make it. Indexes of directories of files, whose places change, are made each
time."""

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from typing import Any

from aifs.client.data.dataset import MADE_EACH_TIME, Dataset
from aifs.core import trees
from aifs.core.errors import DatasetError
from aifs.core.files import read_foreign
from aifs.datasets import index as record
from aifs.datasets.disk import DiskFile, version_of
from aifs.datasets.formats import files, records
from aifs.datasets.formats.known import FORMATS, format_of, format_of_bytes, is_of
from aifs.datasets.index import INDEX_NAME, Index, IndexedFile, Version, index_of

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
    """The index that was kept, if it is that of these files, read in this way."""
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
    """Whether records are as large as the user says: of other formats the files tell it."""
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
