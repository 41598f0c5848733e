"""Lines: ``str``, without the end of the line (Arrow: one column ``text``)."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aifs.client.data.rows import DatasetFile
from aifs.client.data.rows.opened import naming, require_rows
from aifs.datasets.formats.lines import decompressed, is_compressed
from aifs.datasets.formats.reading import InMemory
from aifs.datasets.index import RowBlock

if TYPE_CHECKING:
    import pyarrow


def lines_of(file: DatasetFile, block: RowBlock) -> list[bytes]:
    """All lines of a block, without their ends."""
    data = file.read(block.offset, block.length)
    if is_compressed(data) and block.length == file.size:
        with naming(file.path, block.offset):
            data = b"".join(decompressed(InMemory(data)))
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return [line.removesuffix(b"\r") for line in lines]


class _Lines:
    def __init__(self, path: str, block: RowBlock, lines: list[bytes]) -> None:
        require_rows(path, block.offset, len(lines), block.rows)
        self._path = path
        self._offset = block.offset
        self._lines = lines

    def take(self, rows: Sequence[int]) -> list[str]:
        with naming(self._path, self._offset):
            return [self._lines[row].decode() for row in rows]

    def batch(self, first: int, rows: int) -> "pyarrow.RecordBatch":
        import pyarrow

        lines = pyarrow.array(self._lines[first : first + rows], pyarrow.large_binary())
        with naming(self._path, self._offset):
            return pyarrow.record_batch([lines.cast(pyarrow.large_string())], names=["text"])


class _File:
    def __init__(self, file: DatasetFile) -> None:
        self._file = file

    def open_block(self, number: int, block: RowBlock) -> _Lines:
        return _Lines(self._file.path, block, lines_of(self._file, block))


def open_file(file: DatasetFile, options: Mapping[str, Any]) -> _File:
    return _File(file)
