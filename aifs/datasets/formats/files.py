"""A directory of files: each is a row, ``{"path": below the directory, "data": bytes}``, with
``"label"`` (number of its sorted folder) if each class has a folder. Arrow batches have columns
``path``, ``data`` and ``label`` (null: none).

The dataset's one "file" is its *catalogue*: of each file path, a zero byte, where it begins if all
are in a row, size, label's number (-1: none), a zero byte. Blocks are runs of it. On a mount of
AIFS files go by inode number, as made and drained, so a block's files are in few containers; unlike
places, this order is stable, for all ranks. Elsewhere they go by path.

On a mount a block is one read of a virtual file of all files in a row, read as containers hold
them. Where that fails each file is opened.
"""

import hashlib
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from aifs.core.errors import DatasetError
from aifs.core.names import VIRTUAL
from aifs.datasets.disk import DiskFile, changed
from aifs.datasets.formats.reading import DatasetFile, OpenBlock, require_rows, row_bytes_checked
from aifs.datasets.index import BLOCK_BYTES, BLOCK_ROWS, RowBlock

if TYPE_CHECKING:
    import pyarrow

NAME = "files"
SUFFIXES: tuple[str, ...] = ()

_PLACES = "user.aifs.places"
_NEXT = struct.Struct("<Q")
_PLACED = struct.Struct("<QQqQQ")
"""The attribute's value (aifs/reads/virtual/walking.py): the next N; of each file inode, size,
mtime, container, offset."""


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
    """Catalogue and blocks of files by inode number (0: does not count), path, size. Labels number
    the sorted folders, if all files are in one of several."""
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
    """Whether a path has a part that begins with a dot or an underscore, so no dataset has it."""
    return path.startswith((b".", b"_")) or b"/." in path or b"/_" in path


def joined_name(catalogue: bytes | memoryview) -> bytes:
    """The virtual file below ``.aifs-data`` with this catalogue's files in a row."""
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
    """Of each file inode number (0: no mount of AIFS), path, size."""
    for directory, entries in listed(root):
        sizes = _sizes(directory)
        for path, entry in entries:
            number = 0 if sizes is None else entry.inode()
            if sizes and number in sizes:
                yield number, path, sizes[number]
            else:
                yield number, path, entry.stat().st_size


def listed(root: bytes) -> Iterator[tuple[bytes, list[tuple[bytes, os.DirEntry[bytes]]]]]:
    """Each directory with its regular files, and links to files or nothing, by path below ``root``.
    Follows links to directories, except to one above."""
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
    """Sizes of files in containers by inode number, many at a time; None outside a mount."""
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
    """The files' contents. Raises OSError (ESTALE) for another length than the catalogue's."""
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
        """A block by one read; nothing if a file has changed, or the daemon was restarted."""
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


def open_file(file: DatasetFile, options: Mapping[str, Any]) -> OpenBlock:
    return _File(file).open_block
