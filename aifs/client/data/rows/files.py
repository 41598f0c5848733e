"""Rows of a directory of files: ``{"path": below the directory, "data": bytes}``, with ``"label"``
(the number of its sorted folder) where each class has a folder of its own.

Arrow batches have the columns ``path``, ``data`` and ``label`` (null: there are none).
"""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aifs.client.data.disk import changed
from aifs.client.data.rows import DatasetFile
from aifs.client.data.rows.opened import require_rows
from aifs.datasets.formats.files import SmallFile, entries
from aifs.datasets.index import RowBlock

if TYPE_CHECKING:
    import pyarrow


class _Block:
    def __init__(self, root: str, found: list[SmallFile]) -> None:
        self._found = found
        self._data = [_read(os.path.join(os.fsencode(root), each.path), each) for each in found]

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


def _read(path: bytes, file: SmallFile) -> bytes:
    """Raises OSError ESTALE if the file is not as long as the catalogue says."""
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

    def open_block(self, number: int, block: RowBlock) -> _Block:
        found = list(entries(self._file.read(block.offset, block.length)))
        require_rows(self._file.path, block.offset, len(found), block.rows)
        return _Block(self._file.path, found)


def open_file(file: DatasetFile, options: Mapping[str, Any]) -> _File:
    return _File(file)
