"""An open dataset: rows by number, and blocks for readers. Any thread may use it, and it can be
pickled.
"""

import os
import threading
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

from aifs.datasets.disk import IndexedDiskFile
from aifs.datasets.formats import files
from aifs.datasets.formats.known import FORMATS
from aifs.datasets.formats.reading import BlockRows, FileRows
from aifs.datasets.index import Index, RowBlock

MADE_EACH_TIME = (files.NAME,)
"""Formats whose indexes are not kept."""

_OPEN_FILES = 256  # whose footers are held


class Dataset:
    """A dataset that ``data.open`` has found. ``len``: its rows; ``dataset[row]``: one row, in the
    order of paths (slow: a block is read for it)."""

    def __init__(self, path: str, index: Index, options: Mapping[str, Any]) -> None:
        self.path = path
        """Absolute."""
        self.index = index
        self._options = dict(options)
        self._lock = threading.Lock()
        self._opened: OrderedDict[int, FileRows] = OrderedDict()  # the last used last

    @property
    def format(self) -> str:
        return self.index.format

    @property
    def has_kept_index(self) -> bool:
        """Whether its index is kept in its directory, if the user may write there."""
        return self.format not in MADE_EACH_TIME and b"" not in self.index.paths

    def __len__(self) -> int:
        return self.index.total_rows

    def __getitem__(self, row: int) -> Any:
        """Raises IndexError, DatasetError; OSError, with ESTALE for a file that has changed."""
        if row < 0:
            row += len(self)
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        block = bisect_right(self._ends, row)
        first = self._ends[block] - self.index.rows[block]
        return self.open_block(block).take([row - first])[0]

    @cached_property
    def _ends(self) -> Sequence[int]:
        """Of each block the number of rows until its end."""
        return array("q", accumulate(self.index.rows))

    def open_block(self, number: int) -> BlockRows:
        """The rows of block ``number`` of the index, which is read now. Raises DatasetError with
        the file's name; OSError, with ESTALE for a file that is not the one that was indexed."""
        file = self.index.file_of(number)
        block: RowBlock = self.index.block(number)
        return self._file(file).open_block(number - self.index.first_blocks[file], block)

    def _file(self, number: int) -> FileRows:
        with self._lock:
            if number in self._opened:
                self._opened.move_to_end(number)
                return self._opened[number]
        opened = FORMATS[self.format].open_file(self._bytes_of(number), self._options)
        with self._lock:
            opened = self._opened.setdefault(number, opened)  # another thread may have been first
            while len(self._opened) > _OPEN_FILES:
                self._opened.popitem(last=False)
        return opened

    def let_go(self, numbers: Iterable[int]) -> None:
        """Nobody here needs these files soon, by their numbers: they are closed, once what was read
        of them is let go of."""
        with self._lock:
            for number in numbers:
                self._opened.pop(number, None)

    def _bytes_of(self, number: int) -> "_Catalogue | IndexedDiskFile":
        if self.index.catalogue:
            return _Catalogue(self.path, self.index.catalogue)
        name = self.index.paths[number]
        path = os.path.join(self.path, os.fsdecode(name)) if name else self.path
        return IndexedDiskFile(path, self.index.version(number))

    def __reduce__(self) -> tuple[Any, ...]:
        return Dataset, (self.path, self.index, self._options)


class _Catalogue:
    """The one "file" of a directory of files."""

    def __init__(self, root: str, catalogue: bytes | memoryview) -> None:
        self.path = root
        self._bytes = memoryview(catalogue)

    @property
    def size(self) -> int:
        return len(self._bytes)

    def read(self, offset: int, length: int) -> bytes:
        return bytes(self._bytes[offset : offset + length])
