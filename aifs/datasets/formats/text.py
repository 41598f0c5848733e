"""Lines of text: each line is a row."""

from collections.abc import Iterator, Mapping
from typing import Any

from aifs.datasets.formats.lines import line_blocks
from aifs.datasets.index import FileBytes, RowBlock

NAME = "text"
SUFFIXES: tuple[str, ...] = (".txt", ".text", ".txt.gz", ".txt.zst")


def blocks(file: FileBytes, options: Mapping[str, Any]) -> Iterator[RowBlock]:
    return line_blocks(file, skip_blank=False)
