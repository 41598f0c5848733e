"""Rows in columns of Arrow: shared by the formats that are read with pyarrow."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from aifs.core.errors import DatasetError

if TYPE_CHECKING:
    import pyarrow


@contextmanager
def naming(path: str, offset: int) -> Iterator[None]:
    """Errors of pyarrow, and of our parsers, say which file is damaged, and where."""
    import pyarrow

    try:
        yield
    except DatasetError as error:
        raise DatasetError(f"{path}: {error}") from error
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        if getattr(error, "errno", None):  # of the filesystem: not what the bytes say
            raise
        message = (str(error).splitlines() or [type(error).__name__])[0]
        if "decrypt" in message:
            raise DatasetError(f"{path}: a column is encrypted") from error
        raise DatasetError(f"{path}: damaged in the block at byte {offset}: {message}") from error


def require_distinct(
    fields: "Iterable[pyarrow.Field]", columns: Sequence[str] | None = None
) -> None:
    """Raises DatasetError if two columns, or fields of a struct, have one name, lost in a
    dictionary. ``columns``: these, and their fields, count."""
    import pyarrow

    if columns is not None:
        chosen = {*columns, *(name.partition(".")[0] for name in columns)}
        fields = [field for field in fields if field.name in chosen]
    names = set()
    for field in fields:
        if field.name in names:
            raise DatasetError(f"two columns have the name {field.name!r}")
        names.add(field.name)
        inner = fields_in(field.type)
        for group in [inner] if pyarrow.types.is_struct(field.type) else [[one] for one in inner]:
            require_distinct(group)


def fields_in(kind: "pyarrow.DataType") -> "list[pyarrow.Field]":
    """The fields of a nested type; of others none."""
    import pyarrow

    if isinstance(kind, pyarrow.BaseExtensionType):
        kind = kind.storage_type
    return [kind.field(number) for number in range(kind.num_fields)]


def takeable(batch: "pyarrow.RecordBatch") -> "pyarrow.RecordBatch":
    """The rows in types that pyarrow takes by number, unlike views and runs."""
    import pyarrow
    from pyarrow import compute

    for number, column in enumerate(batch.columns):
        whole = column
        if pyarrow.types.is_run_end_encoded(column.type):
            whole = compute.run_end_decode(column)
        plain = _without_views(whole.type)
        if plain != column.type:
            whole = whole if plain == whole.type else whole.cast(plain)
            batch = batch.set_column(number, batch.schema.field(number).with_type(plain), whole)
    return batch


def _without_views(kind: "pyarrow.DataType") -> "pyarrow.DataType":
    import pyarrow
    from pyarrow import types

    if types.is_string_view(kind):
        return pyarrow.large_string()
    if types.is_binary_view(kind):
        return pyarrow.large_binary()
    if types.is_struct(kind):
        return pyarrow.struct([_field_without_views(field) for field in fields_in(kind)])
    if types.is_map(kind):
        key, item = _field_without_views(kind.key_field), _field_without_views(kind.item_field)
        return pyarrow.map_(key, item, kind.keys_sorted)
    if types.is_fixed_size_list(kind):
        return pyarrow.list_(_field_without_views(kind.value_field), kind.list_size)
    if types.is_list(kind):
        return pyarrow.list_(_field_without_views(kind.value_field))
    if types.is_large_list(kind):
        return pyarrow.large_list(_field_without_views(kind.value_field))
    return kind


def _field_without_views(field: "pyarrow.Field") -> "pyarrow.Field":
    return field.with_type(_without_views(field.type))


def python_rows(batch: "pyarrow.RecordBatch", rows: Sequence[int]) -> list[dict[str, Any]]:
    """These rows of a batch, as dictionaries."""
    import pyarrow

    try:
        return batch.take(pyarrow.array(rows, pyarrow.int64())).to_pylist()
    except pyarrow.ArrowNotImplementedError:  # of runs in lists and structs
        return [batch.slice(row, 1).to_pylist()[0] for row in rows]


def joined(
    batches: "Sequence[pyarrow.RecordBatch]", rows: Sequence[int] | None = None
) -> "pyarrow.RecordBatch":
    """All their rows, or these, as one batch. Raises DatasetError for a column of 2 GiB or more
    that its type cannot hold, or a type that pyarrow cannot join."""
    import pyarrow

    try:
        batch = batches[0] if len(batches) == 1 else pyarrow.concat_batches(batches)
        return batch if rows is None else batch.take(pyarrow.array(rows, pyarrow.int64()))
    except (pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError) as error:
        raise DatasetError(f"rows cannot be joined to one batch: {error}") from error
