"""Lines of JSON: each line that is not blank is a row."""

from collections.abc import Iterator, Mapping
from typing import Any

from aifs.core.errors import DatasetError
from aifs.datasets.formats.lines import BOM, is_compressed, line_blocks
from aifs.datasets.index import FileBytes, RowBlock

NAME = "jsonl"
SUFFIXES: tuple[str, ...] = (
    *(".jsonl", ".jsonl.gz", ".jsonl.zst"),
    *(".ndjson", ".ndjson.gz", ".ndjson.zst"),
    *(".json.gz", ".json.zst"),
)


def blocks(file: FileBytes, options: Mapping[str, Any]) -> Iterator[RowBlock]:
    head = file.read(0, 4096)
    first = head.removeprefix(BOM).lstrip()[:1]
    if first not in b'{["-0123456789tfnNI' and not is_compressed(head):
        raise DatasetError("no JSON at its beginning")
    return line_blocks(file, skip_blank=True)
