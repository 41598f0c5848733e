"""Lines of JSON: each line that is not blank is a row, decoded by json.loads. Arrow batches: with
``schema`` (a pyarrow.Schema) its columns, without other fields; else one column ``json`` of
lines."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aifs.core.errors import DatasetError
from aifs.datasets.formats.columns import joined, naming, require_distinct, takeable
from aifs.datasets.formats.reading import DatasetFile, OpenBlock, require_rows
from aifs.datasets.formats.text import BLANK, BOM, is_compressed, line_blocks, lines_of
from aifs.datasets.formats.text import order as order
from aifs.datasets.index import FileBytes, RowBlock

if TYPE_CHECKING:
    import pyarrow

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


class _Lines:
    def __init__(
        self, path: str, block: RowBlock, lines: list[bytes], schema: "pyarrow.Schema | None"
    ) -> None:
        require_rows(path, block.offset, len(lines), block.rows)
        self._path = path
        self._block = block
        self._lines = lines
        self._schema = schema

    def take(self, rows: Sequence[int]) -> list[Any]:
        return [self._decoded(row) for row in rows]

    def _decoded(self, row: int) -> Any:
        try:
            return json.loads(self._lines[row])
        except (ValueError, RecursionError) as error:
            raise DatasetError(
                f"{self._path}: row {row} of the block at byte {self._block.offset} is no JSON:"
                f" {error}"
            ) from error

    def batch(self, first: int, rows: int) -> "pyarrow.RecordBatch":
        import pyarrow
        from pyarrow import json as arrow_json

        lines = self._lines[first : first + rows]
        with naming(self._path, self._block.offset):
            if self._schema is None:
                texts = pyarrow.array(lines, pyarrow.large_binary()).cast(pyarrow.large_string())
                return pyarrow.record_batch([texts], names=["json"])
            data = pyarrow.BufferReader(b"\n".join(lines) + b"\n")
            options = arrow_json.ParseOptions(
                explicit_schema=self._schema, unexpected_field_behavior="ignore"
            )
            reading = arrow_json.ReadOptions(use_threads=False, block_size=max(1, data.size()))
            table = arrow_json.read_json(data, reading, options).select(self._schema.names)
            # Of two objects in a line Arrow makes two rows, as it does of a list of objects.
            require_rows(self._path, self._block.offset, table.num_rows, rows)
            return joined([takeable(batch) for batch in table.to_batches()])


def open_file(file: DatasetFile, options: Mapping[str, Any]) -> OpenBlock:
    schema = options.get("schema")
    with naming(file.path, 0):
        require_distinct(schema or ())

    def open_block(number: int, block: RowBlock) -> _Lines:
        lines = [line for line in lines_of(file, block) if line.strip(BLANK)]
        return _Lines(file.path, block, lines, schema)

    return open_block
