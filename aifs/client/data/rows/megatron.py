"""Documents of Megatron's .bin: each is a numpy array of tokens (Arrow: a column ``tokens`` of
lists).
"""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aifs.client.data.rows import DatasetFile
from aifs.client.data.rows.opened import naming
from aifs.core.errors import DatasetError
from aifs.datasets.formats.megatron import Documents
from aifs.datasets.formats.reading import InMemory
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
    def __init__(self, file: DatasetFile) -> None:
        import numpy

        self._file = file
        self._idx_path = os.path.splitext(file.path)[0] + ".idx"
        idx = numpy.memmap(self._idx_path, numpy.uint8, "r")
        with naming(file.path, 0):
            self._documents = documents = Documents(InMemory(idx.data), file.size)
        sequences = documents.sequences
        self._lengths = numpy.frombuffer(idx, "<i4", sequences, documents.lengths_at)
        self._pointers = numpy.frombuffer(idx, "<i8", sequences, documents.pointers_at)
        self._firsts = numpy.frombuffer(idx, "<i8", documents.count + 1, documents.bounds_at)

    def open_block(self, number: int, block: RowBlock) -> _Block:
        import numpy

        documents, size = self._documents, self._documents.itemsize
        end = block.offset + block.length
        with naming(self._file.path, block.offset):
            first = documents.at(block.offset)
            sequences = self._firsts[first : first + block.rows + 1]
            low, high = int(sequences[0]), int(sequences[-1])
            pointers = numpy.append(self._pointers[low:high], end)
            lengths = self._lengths[low:high].astype("i8") * size
            follow = numpy.array_equal(pointers[:-1] + lengths, pointers[1:])
            if (
                len(sequences) != block.rows + 1
                or (numpy.diff(sequences) < 0).any()
                or pointers[0] != block.offset
                or (lengths < 0).any()
                or not follow
            ):
                raise DatasetError(
                    f"the sequences of the block at byte {block.offset} do not follow one another"
                    f" in {self._idx_path}"
                )
        data = self._file.read(block.offset, block.length)
        bounds = (pointers[sequences - low] - block.offset) // size
        return _Block(numpy.frombuffer(data, numpy.dtype(documents.dtype)), bounds)


def open_file(file: DatasetFile, options: Mapping[str, Any]) -> _File:
    return _File(file)
