"""Rows of a directory of files: ``{"path": below the directory, "data": bytes}``, with ``"label"``
(the number of its sorted folder) where each class has a folder of its own.

On a mount a block is one read of a virtual file, which has all files one after another, and which
the daemon reads as containers hold them. Where there is none, or it cannot be read, each file is
opened by itself.

Arrow batches have the columns ``path``, ``data`` and ``label`` (null: there are none).
"""

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from aifs.client.data.rows import DatasetFile
from aifs.client.data.rows.opened import require_rows
from aifs.core.names import VIRTUAL
from aifs.datasets.disk import DiskFile, changed
from aifs.datasets.formats.files import SmallFile, entries, joined_name
from aifs.datasets.index import RowBlock

if TYPE_CHECKING:
    import pyarrow


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
    """What files below a directory hold. Raises OSError, with ESTALE if one is not as long as its
    catalogue says."""
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
        except OSError:  # links to files, which it does not have; or somebody may not read all
            return None
        file.expect_random()
        return file


def open_file(file: DatasetFile, options: Mapping[str, Any]) -> _File:
    return _File(file)
