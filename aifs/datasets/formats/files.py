"""A directory of files: each file is a row, ``{"path": below the directory, "data": bytes}``, with
``"label"`` (the number of its sorted folder) where each class has its own folder. Arrow batches
have the columns ``path``, ``data`` and ``label`` (null: there are none).

The one "file" of the dataset is its *catalogue*: of each file its path below the directory, a zero
byte, where it begins if all are one after another, its size, the number of its label (-1: it has
none), a zero byte. Blocks are runs of it. On a mount of AIFS files are in the order of their inode
numbers: that in which they were made, and drained, so the files of a block lie together in few
containers; unlike their places, which draining and compaction change, it is the same for all ranks,
and when a job goes on. Elsewhere they are in the order of their paths.

On a mount a block is one read of a virtual file, which has all files one after another, and which
the daemon reads as containers hold them. Where there is none, or it cannot be read, each file is
opened by itself."""

import hashlib
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from aifs.core.errors import DatasetError
from aifs.core.names import VIRTUAL
from aifs.datasets.disk import DiskFile, changed
from aifs.datasets.formats.reading import DatasetFile, require_rows, row_bytes_checked
from aifs.datasets.index import BLOCK_BYTES, BLOCK_ROWS, RowBlock

if TYPE_CHECKING:
    import pyarrow

NAME = "files"
SUFFIXES: tuple[str, ...] = ()

_PLACES = "user.aifs.places"
_NEXT = struct.Struct("<Q")
_PLACED = struct.Struct("<QQqQQ")
"""The value of the attribute (aifs/reads/virtual/walking.py): the next N; of each file its inode,
size, mtime, container, and offset there."""


class SmallFile(NamedTuple):
    """A row of a catalogue."""

    path: bytes
    start: int
    """Where it begins if all files are one after another."""
    size: int
    label: int


def catalogue(root: str, options: Mapping[str, Any]) -> tuple[bytes, list[RowBlock]]:
    """Regular files below ``root``, without hidden ones, and their blocks."""
    return catalogue_of(_found(os.fsencode(root)))


def catalogue_of(found: Iterable[tuple[int, bytes, int]]) -> tuple[bytes, list[RowBlock]]:
    """The same of files of which each has an inode number (0: it does not count), a path, a size.

    Labels are the numbers of the sorted folders, if all files are in one of several folders.
    """
    in_order = sorted(found)
    labels = _labels([path for _, path, _ in in_order])
    parts: list[bytes] = []
    blocks: list[RowBlock] = []
    start = end = rows = room = total = 0
    for _, path, size in in_order:
        row_bytes_checked(end, size)
        if rows and (rows == BLOCK_ROWS or size > room):
            blocks.append(RowBlock(start, end - start, rows))
            start, rows = end, 0
        if not rows:
            room = BLOCK_BYTES
        label = labels.get(path.split(b"/", 1)[0], -1)
        parts.append(b"%s\0%d %d %d\0" % (path, total, size, label))
        end += len(parts[-1])
        total += size
        room -= size
        rows += 1
    if rows:
        blocks.append(RowBlock(start, end - start, rows))
    return b"".join(parts), blocks


def is_hidden(path: bytes) -> bool:
    """Whether a file of this path does not belong to a dataset: some part of the path begins with a
    dot or an underscore."""
    return path.startswith((b".", b"_")) or b"/." in path or b"/_" in path


def joined_name(catalogue: bytes | memoryview) -> bytes:
    """The name, below ``.aifs-data`` of the directory, of the virtual file that holds the files of
    just this catalogue one after another."""
    return b"files=%s.bin" % hashlib.blake2b(catalogue, digest_size=16).hexdigest().encode()


def entries(part: bytes) -> Iterator[SmallFile]:
    """The rows of a run of a catalogue. Raises DatasetError if it is none."""
    fields = bytes(part).split(b"\0")
    if len(fields) % 2 != 1 or fields[-1]:
        raise DatasetError("a torn catalogue of files")
    for path, numbers in zip(fields[0:-1:2], fields[1::2], strict=True):
        try:
            start, size, label = map(int, numbers.split(b" "))
        except ValueError as error:
            raise DatasetError("a torn catalogue of files") from error
        yield SmallFile(path, start, size, label)


def _found(root: bytes) -> Iterator[tuple[int, bytes, int]]:
    """Of each file its inode number (0: this is no mount of AIFS), its path, its size."""
    for directory, entries in listed(root):
        sizes = _sizes(directory)
        for path, entry in entries:
            number = 0 if sizes is None else entry.inode()
            if sizes and number in sizes:
                yield number, path, sizes[number]
            else:
                yield number, path, entry.stat().st_size


def listed(root: bytes) -> Iterator[tuple[bytes, list[tuple[bytes, os.DirEntry[bytes]]]]]:
    """Each directory of a dataset with its regular files, and links to such or to nothing, by their
    paths below ``root``. Links to directories are followed, except to one that they lie in."""
    waiting = [(b"", frozenset[tuple[int, int]]())]
    while waiting:
        below, above = waiting.pop()
        directory = os.path.join(root, below) if below else root
        status = os.stat(directory)
        itself = (status.st_dev, status.st_ino)
        if itself in above:
            continue
        found = []
        with os.scandir(directory) as listing:
            for entry in listing:
                path = below + entry.name
                if is_hidden(entry.name):
                    continue
                if entry.is_dir():
                    waiting.append((path + b"/", above | {itself}))
                elif entry.is_file() or entry.is_symlink():
                    found.append((path, entry))
        yield directory, found


def _sizes(directory: bytes) -> dict[int, int] | None:
    """Of files in containers their sizes, by inode number, many at a time; None elsewhere than on a
    mount."""
    sizes = {}
    following = 0
    while True:
        try:
            told = os.getxattr(directory, f"{_PLACES}.{following}")
        except OSError:
            return None
        for inode, size, *_ in _PLACED.iter_unpack(told[_NEXT.size :]):
            sizes[inode] = size
        (following,) = _NEXT.unpack_from(told)
        if not following:
            return sizes


def _labels(paths: list[bytes]) -> dict[bytes, int]:
    folders = {path.split(b"/", 1)[0] for path in paths if b"/" in path}
    if len(folders) < 2 or not all(b"/" in path for path in paths):
        return {}
    return {folder: number for number, folder in enumerate(sorted(folders))}


class _Block:
    def __init__(self, found: list[SmallFile], data: list[bytes]) -> None:
        self._found = found
        self._data = data

    def take(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        return [self._row(row) for row in rows]

    def _row(self, number: int) -> dict[str, Any]:
        file = self._found[number]
        row: dict[str, Any] = {"path": os.fsdecode(file.path), "data": self._data[number]}
        if file.label >= 0:
            row["label"] = file.label
        return row

    def batch(self, first: int, rows: int) -> "pyarrow.RecordBatch":
        import pyarrow

        chosen = self._found[first : first + rows]
        labels = [file.label if file.label >= 0 else None for file in chosen]
        columns = [
            pyarrow.array([file.path.decode(errors="replace") for file in chosen]),
            pyarrow.array(self._data[first : first + rows], pyarrow.large_binary()),
            pyarrow.array(labels, pyarrow.int64()),
        ]
        return pyarrow.record_batch(columns, names=["path", "data", "label"])


def read_each(root: bytes, found: list[SmallFile]) -> list[bytes]:
    """The contents of files below a directory. Raises OSError, with ESTALE if one is not as long as
    its catalogue says."""
    return [_read(os.path.join(root, each.path), each) for each in found]


def _read(path: bytes, file: SmallFile) -> bytes:
    with open(path, "rb", buffering=0) as source:
        data = bytearray()
        # One byte more would show that it has grown.
        while len(data) <= file.size and (part := source.read(file.size + 1 - len(data))):
            data += part
    if len(data) != file.size:
        raise changed(path)
    return bytes(data)


class _File:
    def __init__(self, file: DatasetFile) -> None:
        self._file = file
        self._root = os.fsencode(file.path)

    def open_block(self, number: int, block: RowBlock) -> _Block:
        found = list(entries(self._file.read(block.offset, block.length)))
        require_rows(self._file.path, block.offset, len(found), block.rows)
        return _Block(found, self._read_joined(found) or read_each(self._root, found))

    def _read_joined(self, found: list[SmallFile]) -> list[bytes]:
        """All of a block by one read; nothing if that cannot be had: one of the files has changed,
        or the daemon has been started again."""
        if self._joined is None:
            return []
        start, end = found[0].start, found[-1].start + found[-1].size
        try:
            data = self._joined.read(start, end - start)
        except OSError:
            return []
        if len(data) != end - start:
            return []
        return [data[each.start - start : each.start - start + each.size] for each in found]

    @cached_property
    def _joined(self) -> DiskFile | None:
        directory = os.path.join(self._root, VIRTUAL)
        if not os.path.isdir(directory):
            return None
        name = joined_name(self._file.read(0, self._file.size))
        try:
            file = DiskFile(os.fsdecode(os.path.join(directory, name)))
        except OSError:  # links to files, which it does not have; or the user may not read all
            return None
        file.expect_random()
        return file


def open_file(file: DatasetFile, options: Mapping[str, Any]) -> _File:
    return _File(file)
