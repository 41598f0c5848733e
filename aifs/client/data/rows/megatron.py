"""Documents of Megatron's .bin: each is a numpy array of tokens (Arrow: a column ``tokens`` of
lists).
"""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aifs.client.data.rows import DatasetFile
from aifs.client.data.rows.opened import Clipped, naming
from aifs.core.errors import DatasetError
from aifs.datasets.disk import IndexedDiskFile, version_of
from aifs.datasets.formats.megatron import Documents
from aifs.datasets.index import RowBlock

if TYPE_CHECKING:
    import numpy
    import pyarrow


class _Block:
    def __init__(self, tokens: "numpy.ndarray", bounds: "numpy.ndarray") -> None:
        """``bounds``: where each document begins, in tokens; and the end."""
        self._tokens = tokens
        self._bounds = bounds

    def take(self, rows: Sequence[int]) -> list["numpy.ndarray"]:
        # Copies: a row that somebody keeps must not keep its block.
        bounds = self._bounds
        return [self._tokens[bounds[row] : bounds[row + 1]].copy() for row in rows]

    def batch(self, first: int, rows: int) -> "pyarrow.RecordBatch":
        import pyarrow

        offsets = pyarrow.array(self._bounds[first : first + rows + 1], pyarrow.int64())
        lists = pyarrow.LargeListArray.from_arrays(offsets, pyarrow.array(self._tokens))
        return pyarrow.record_batch([lists], names=["tokens"])


class _File:
    """The .idx is read where it is needed, never mapped: one that shrinks would end the process."""

    def __init__(self, file: DatasetFile) -> None:
        self._file = file
        path = os.path.splitext(file.path)[0] + ".idx"
        self._idx = Clipped(IndexedDiskFile(path, version_of(os.stat(path))))
        with naming(file.path, 0):
            self._documents = Documents(self._idx, file.size)

    def open_block(self, number: int, block: RowBlock) -> _Block:
        import numpy

        documents, size = self._documents, self._documents.itemsize
        with naming(self._file.path, block.offset):
            first = documents.at(block.offset)
            sequences = self._numbers("<i8", documents.bounds_at, first, block.rows + 1)
            low, high = int(sequences[0]), int(sequences[-1])
            if not 0 <= low <= high <= documents.sequences:
                raise DatasetError(f"document {first} has sequences {low} to {high} in its .idx")
            starts = self._numbers("<i8", documents.pointers_at, low, high - low)
            pointers = numpy.append(starts, block.offset + block.length)
            lengths = self._numbers("<i4", documents.lengths_at, low, high - low).astype("i8")
            follow = numpy.array_equal(pointers[:-1] + lengths * size, pointers[1:])
            if (
                (numpy.diff(sequences) < 0).any()
                or pointers[0] != block.offset
                or (lengths < 0).any()
                or not follow
            ):
                raise DatasetError(
                    f"the sequences of the block at byte {block.offset} do not follow one another"
                    " in its .idx"
                )
        data = self._file.read(block.offset, block.length)
        bounds = (pointers[sequences - low] - block.offset) // size
        return _Block(numpy.frombuffer(data, numpy.dtype(documents.dtype)), bounds)

    def _numbers(self, kind: str, at: int, first: int, count: int) -> "numpy.ndarray":
        """``count`` numbers of the list that begins at byte ``at``, from its ``first`` on."""
        import numpy

        each = numpy.dtype(kind).itemsize
        found = numpy.frombuffer(self._idx.read(at + each * first, each * count), kind)
        if len(found) != count:
            raise DatasetError("its .idx ends too early: make the dataset's index again")
        return found


def open_file(file: DatasetFile, options: Mapping[str, Any]) -> _File:
    return _File(file)
