"""A directory of files: each file is a row, with a label where each class has a folder of its own.

What stands for the one "file" of the dataset is its *catalogue*: of each file its path below the
directory, a zero byte, where it begins if all are one after another, its size, the number of its
label (-1: it has none), a zero byte. Blocks are runs of it. On a mount of AIFS files are in the
order of their inode numbers: that in which they were made, and drained, so the files of a block lie
together in few containers; unlike their places, which draining and compaction change, it is the
same for all ranks, and when a job goes on. Elsewhere they are in the order of their paths.
"""

import hashlib
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from aifs.core.errors import DatasetError
from aifs.datasets.formats.reading import row_bytes_checked
from aifs.datasets.index import BLOCK_BYTES, BLOCK_ROWS, RowBlock

NAME = "files"
SUFFIXES: tuple[str, ...] = ()

_PLACES = "user.aifs.places"
_NEXT = struct.Struct("<Q")
_PLACED = struct.Struct("<QQqQQ")
"""What the attribute tells (aifs/vfs/places.py): the next N; of each file its inode, size, mtime,
container, and offset there."""


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
    """What the virtual file is called, below ``.aifs-data`` of the directory, that holds the files
    of just this catalogue one after another."""
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
