"""Rows of Arrow files and streams: dictionaries, by columns. Option ``columns``: these alone.

A batch is read in one piece, and not copied again; one of more than 64 MiB is mapped. (A mapped
file that shrinks ends the process by SIGBUS, so that smaller ones are read.)
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aifs.client.data.rows import DatasetFile
from aifs.client.data.rows.opened import (
    Clipped,
    fields_in,
    naming,
    python_rows,
    require_distinct,
    require_rows,
    takeable,
)
from aifs.core.errors import DatasetError
from aifs.datasets.formats import arrow
from aifs.datasets.formats.reading import ROW_BYTES_MAX, SmallReads
from aifs.datasets.index import RowBlock

if TYPE_CHECKING:
    import pyarrow

_MAPPED = 64 << 20


class _Block:
    def __init__(self, path: str, block: RowBlock, batch: "pyarrow.RecordBatch") -> None:
        require_rows(path, block.offset, batch.num_rows, block.rows)
        self._path = path
        self._offset = block.offset
        self._batch = batch

    def take(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        with naming(self._path, self._offset):
            return python_rows(self._batch, rows)

    def batch(self, first: int, rows: int) -> "pyarrow.RecordBatch":
        return self._batch.slice(first, rows)


class _File:
    def __init__(self, file: DatasetFile, columns: Sequence[str] | None) -> None:
        import pyarrow

        self._file = file
        self._columns = columns
        with naming(file.path, 0):
            span = arrow.schema_span(SmallReads(Clipped(file)))
            self._schema_message = file.read(span.offset, span.length)
            self._schema = pyarrow.ipc.read_schema(pyarrow.py_buffer(self._schema_message))
            for name in columns or ():
                if name not in self._schema.names:
                    raise DatasetError(f"no column {name!r}")
            require_distinct(self._schema, columns)
            # Only where there are dictionaries must the whole file be looked through for them.
            self._parts = (
                arrow.parts(Clipped(file))
                if any(_has_dictionary(field.type) for field in self._schema)
                else None
            )

    def open_block(self, number: int, block: RowBlock) -> _Block:
        import pyarrow

        with naming(self._file.path, block.offset):
            if self._parts is None:
                message = self._buffer(block)
                _require_fits([memoryview(message)])
                batch = pyarrow.ipc.read_record_batch(message, self._schema)
            else:
                dictionaries = [
                    self._file.read(*span)
                    for span in self._parts.dictionaries
                    if span.offset < block.offset or not self._parts.is_stream
                ]
                message = self._file.read(block.offset, block.length)
                _require_fits([*dictionaries, message])
                stream = b"".join([self._schema_message, *dictionaries, message])
                batch = pyarrow.ipc.open_stream(stream).read_next_batch()
            if self._columns is not None:
                batch = batch.select(list(self._columns))
            batch.validate(full=True)  # what points outside would end the process
            batch = takeable(batch)
        return _Block(self._file.path, block, batch)

    def _buffer(self, block: RowBlock) -> "pyarrow.Buffer":
        import pyarrow

        if block.length <= _MAPPED:
            return pyarrow.py_buffer(self._file.read(block.offset, block.length))
        self._file.read(block.offset, 1)  # is it the file that was indexed?
        with pyarrow.memory_map(self._file.path) as mapped:
            mapped.seek(block.offset)
            return mapped.read_buffer(block.length)


def _require_fits(messages: Sequence[bytes | memoryview]) -> None:
    """Raises DatasetError if compressed messages have more than 1 GiB."""
    for message in messages:
        decoded = arrow.decoded_bytes(message)
        if decoded > max(ROW_BYTES_MAX, len(message)):
            raise DatasetError(
                f"{decoded} bytes when decompressed; a record batch is held in memory, and has at"
                f" most {ROW_BYTES_MAX}"
            )


def _has_dictionary(kind: "pyarrow.DataType") -> bool:
    import pyarrow

    if isinstance(kind, pyarrow.BaseExtensionType):
        kind = kind.storage_type
    return pyarrow.types.is_dictionary(kind) or any(
        _has_dictionary(field.type) for field in fields_in(kind)
    )


def open_file(file: DatasetFile, options: Mapping[str, Any]) -> _File:
    return _File(file, options.get("columns"))
