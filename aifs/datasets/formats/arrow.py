"""Arrow's IPC file and stream: a record batch is a block; rows are dictionaries by columns. Option
``columns``: these alone.

For the index only metadata are read: flatbuffers messages, of which this module knows the fields
that say where record batches and dictionaries lie, and their rows (Arrow columnar format,
"Serialization and Interprocess Communication"). A batch is read in one piece, uncopied; mapped
above 64 MiB. (A mapped file that shrinks ends the process by SIGBUS.)
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from aifs.core.errors import DatasetError
from aifs.datasets.formats.columns import fields_in, naming, python_rows, require_distinct, takeable
from aifs.datasets.formats.reading import (
    ROW_BYTES_MAX,
    Clipped,
    DatasetFile,
    OpenBlock,
    SmallReads,
    require_rows,
)
from aifs.datasets.index import FileBytes, RowBlock

if TYPE_CHECKING:
    import pyarrow

NAME = "arrow"
SUFFIXES: tuple[str, ...] = (".arrow", ".arrows", ".feather", ".ipc")

MAGIC = b"ARROW1"
CONTINUED = b"\xff\xff\xff\xff"

_METADATA_MAX = 256 << 20
_MAPPED = 64 << 20
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3


class Span(NamedTuple):
    """A message with its body."""

    offset: int
    length: int


class ArrowParts(NamedTuple):
    """Where the parts of a file or a stream lie."""

    is_stream: bool
    schema: Span
    dictionaries: list[Span]
    batches: list[RowBlock]
    """Also those without rows."""


class _Table:
    """A table of a flatbuffer."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data = data
        self._at = at
        self._fields = at - _unpack("<i", data, at)  # the vtable
        self._length = _unpack("<H", data, self._fields)

    @classmethod
    def root(cls, data: bytes) -> "_Table":
        return cls(data, _unpack("<I", data, 0))

    def number(self, field: int, kind: str) -> int:
        at = self._place(field)
        return _unpack(kind, self._data, at) if at else 0

    def table(self, field: int) -> "_Table":
        return _Table(self._data, self._target(field))

    def has(self, field: int) -> bool:
        return self._place(field) != 0

    def structs(self, field: int, kind: struct.Struct) -> Iterator[tuple[int, ...]]:
        """Of a vector of structs."""
        if not self._place(field):
            return
        at = self._target(field)
        count = _unpack("<I", self._data, at)
        if count * kind.size > len(self._data) - at - 4:
            raise DatasetError("damaged metadata: a list is longer than they are")
        yield from kind.iter_unpack(self._data[at + 4 : at + 4 + count * kind.size])

    def _target(self, field: int) -> int:
        at = self._place(field)
        if not at:
            raise DatasetError("damaged metadata: a field is missing")
        return at + _unpack("<I", self._data, at)

    def _place(self, field: int) -> int:
        slot = 4 + 2 * field
        offset = _unpack("<H", self._data, self._fields + slot) if slot < self._length else 0
        return self._at + offset if offset else 0


def _unpack(kind: str, data: bytes | memoryview, at: int) -> int:
    if not 0 <= at <= len(data) - struct.calcsize(kind):
        raise DatasetError("damaged metadata: an offset points outside")
    return struct.unpack_from(kind, data, at)[0]


class _Message(NamedTuple):
    kind: int
    rows: int
    """Of a record batch."""

    end: int
    """Of the message and its body."""


def blocks(file: FileBytes, options: Mapping[str, Any]) -> Iterator[RowBlock]:
    if file.size:
        yield from (batch for batch in parts(file).batches if batch.rows)


def parts(file: FileBytes) -> ArrowParts:
    """Raises DatasetError if this is neither a file nor a stream, or not all of one."""
    window = SmallReads(file)
    if file.read(0, len(MAGIC)) == MAGIC:
        return _of_file(window)
    return _of_stream(window)


def schema_span(window: SmallReads) -> Span:
    """Where the schema lies. Raises DatasetError if this is neither a file nor a stream."""
    at = 8 if window.at(0, len(MAGIC)) == MAGIC else 0
    message = _message(window, at)
    if message is None or message.kind != _SCHEMA:
        raise DatasetError(f"neither an Arrow file nor a stream: no schema at byte {at}")
    return Span(at, message.end - at)


def decoded_bytes(message: bytes | memoryview) -> int:
    """The decompressed bytes of a record batch, or dictionary, from a message with body. Raises
    DatasetError."""
    start = 8 if bytes(message[:4]) == CONTINUED else 4
    length = _unpack("<i", message, start - 4)
    header = _Table.root(bytes(message[start : start + length]))
    is_dictionary = header.number(1, "<B") == _DICTIONARY
    batch = header.table(2).table(1) if is_dictionary else header.table(2)
    buffers = list(batch.structs(2, struct.Struct("<qq")))
    if not batch.has(3):
        return sum(size for _, size in buffers)
    body = start + length
    told = (_unpack("<q", message, body + offset) for offset, size in buffers if size)
    return sum(max(0, size) for size in told)  # -1: one that is not compressed


def _of_stream(window: SmallReads) -> ArrowParts:
    schema: Span | None = None
    dictionaries, batches = [], []
    at = 0
    # A stream may end without the mark of its end, but not within a message.
    while at < window.size and (message := _message(window, at)):
        if schema is None and message.kind != _SCHEMA:
            raise DatasetError("neither an Arrow file nor a stream: no schema at byte 0")
        if message.kind == _SCHEMA:
            if schema is not None:
                raise DatasetError(f"a second schema at byte {at}")
            schema = Span(at, message.end - at)
        elif message.kind == _DICTIONARY:
            dictionaries.append(Span(at, message.end - at))
        elif message.kind == _BATCH:
            batches.append(RowBlock(at, message.end - at, message.rows))
        else:
            raise DatasetError(f"a message of unknown kind {message.kind} at byte {at}")
        at = message.end
    if schema is None:
        raise DatasetError("a stream without a schema")
    return ArrowParts(True, schema, dictionaries, batches)


def _of_file(window: SmallReads) -> ArrowParts:
    size = window.size
    if size < 8 + 10 or window.at(size - len(MAGIC), len(MAGIC)) != MAGIC:
        raise DatasetError("an Arrow file without its end: it is torn")
    length = int.from_bytes(window.at(size - 10, 4), "little", signed=True)
    if not 0 < length <= min(size - 18, _METADATA_MAX):
        raise DatasetError(f"a footer of {length} bytes in a file of {size}: it is damaged")
    footer = _Table.root(window.at(size - 10 - length, length))
    kind = struct.Struct("<qi4xq")
    dictionaries = [_block_of(window, _DICTIONARY, block) for block in footer.structs(2, kind)]
    batches = [_block_of(window, _BATCH, block) for block in footer.structs(3, kind)]
    return ArrowParts(
        False,
        schema_span(window),
        [Span(each.offset, each.length) for each in dictionaries],
        batches,
    )


def _block_of(window: SmallReads, kind: int, block: tuple[int, ...]) -> RowBlock:
    """A message that a footer points to."""
    offset, metadata_length, body_length = block
    message = _message(window, offset)
    if message is None or message.kind != kind:
        raise DatasetError(f"the footer points to byte {offset}, where nothing of its kind is")
    if message.end != offset + metadata_length + body_length:
        raise DatasetError(f"the footer and the message at byte {offset} differ in its length")
    return RowBlock(offset, message.end - offset, message.rows)


def _message(window: SmallReads, at: int) -> _Message | None:
    """None at the mark of the end."""
    prefix = window.at(at, 4)
    start = at
    if prefix == CONTINUED:
        at += 4
        prefix = window.at(at, 4)
    at += 4
    length = int.from_bytes(prefix, "little", signed=True)
    if length == 0:
        return None
    if not 0 < length <= min(window.size - at, _METADATA_MAX):
        raise DatasetError(
            f"no message at byte {start}, or a torn one: metadata of {length} bytes in a file of"
            f" {window.size}"
        )
    table = _Table.root(window.at(at, length))
    body_length = table.number(3, "<q")
    end = at + length + body_length
    if body_length < 0 or end > window.size:
        raise DatasetError(f"the message at byte {start} ends at byte {end}: the file is torn")
    kind = table.number(1, "<B")
    rows = table.table(2).number(0, "<q") if kind == _BATCH else 0
    if rows < 0:
        raise DatasetError(f"the message at byte {start} has {rows} rows")
    return _Message(kind, rows, end)


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
            span = schema_span(SmallReads(Clipped(file)))
            self._schema_message = file.read(span.offset, span.length)
            self._schema = pyarrow.ipc.read_schema(pyarrow.py_buffer(self._schema_message))
            for name in columns or ():
                if name not in self._schema.names:
                    raise DatasetError(f"no column {name!r}")
            require_distinct(self._schema, columns)
            # Only where there are dictionaries must the whole file be looked through for them.
            self._parts = (
                parts(Clipped(file))
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
    """Raises DatasetError for compressed messages of more than 1 GiB."""
    for message in messages:
        decoded = decoded_bytes(message)
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


def open_file(file: DatasetFile, options: Mapping[str, Any]) -> OpenBlock:
    return _File(file, options.get("columns")).open_block
