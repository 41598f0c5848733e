"""Rows of each format: what stands between a block's bytes and what a training loop gets.

One module per format, with the same name as in aifs.datasets.formats; each has one function

    open_file(file: DatasetFile, options: Mapping[str, Any]) -> FileRows

(``options``: what the user gave ``data.open`` for this format). Any thread calls these functions;
several at once, also for the same file. What they keep per file is bounded by its blocks, never by
its rows. Bytes that are not what the index says raise DatasetError with the file's name.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from aifs.datasets.index import RowBlock

if TYPE_CHECKING:
    import pyarrow


class DatasetFile(Protocol):
    """One open file of a dataset, as it was when it was indexed."""

    @property
    def path(self) -> str:
        """Where it is: to be named in errors, and for libraries that open files themselves."""
        ...

    @property
    def size(self) -> int: ...

    def read(self, offset: int, length: int) -> bytes:
        """All of these ``length`` bytes. Raises OSError ESTALE, with the file's name, if the file
        is not the one that was indexed any more. Blocks; holds no lock.
        """
        ...


class BlockRows(Protocol):
    """The rows of one block, in memory; not yet decoded where the format allows it."""

    def take(self, rows: Sequence[int]) -> list[Any]:
        """These rows, by their numbers in the block, in this order, as users get them."""
        ...

    def batch(self, first: int, rows: int) -> "pyarrow.RecordBatch":
        """``rows`` rows from ``first`` on, without decoding them to Python objects. All batches of
        a dataset have one schema.
        """
        ...


class FileRows(Protocol):
    """One file of a dataset, ready to give its blocks (its footer or header has been read)."""

    def open_block(self, number: int, block: RowBlock) -> BlockRows:
        """Read the block with this number within the file (from 0). Blocks."""
        ...
