"""Parquet: the row groups as they are, and a footer that has them in their new order and places.

Files have one schema. Left out of the footer is what may be missing and lies outside of row groups:
page indexes and Bloom filters. Fields are numbered as in parquet.thrift (Apache Parquet).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, NoReturn

from aifs.core.errors import DatasetError
from aifs.datasets.formats.parquet import MAGIC, footer
from aifs.datasets.order_files import thrift
from aifs.datasets.order_files.chosen import ChosenBlocks, OrderSources
from aifs.datasets.order_files.thrift import Change, StructReader
from aifs.datasets.virtual import Joined, SourceRange

FOOTERS_MAX = 32 << 20
"""Bytes of the footers of all files of an order."""

FIELDS_MAX = 12 << 20
"""Fields in them, each of which takes up to a microsecond: as many as that many bytes of footers
have that somebody's programs have written."""

# Of FileMetaData.
_SCHEMA, _ROWS, _GROUPS = 2, 3, 4
_ENCRYPTED = (8, 9)
# Of RowGroup.
_CHUNKS, _GROUP_ROWS, _GROUP_OFFSET, _ORDINAL = 1, 3, 5, 7
# Of ColumnChunk.
_PATH, _CHUNK_OFFSET, _COLUMN = 1, 2, 3
_PAGE_INDEXES, _CHUNK_ENCRYPTED = (4, 5, 6, 7), (8, 9)
# Of ColumnMetaData.
_PAGE_OFFSETS = (9, 10, 11)
_BLOOM_FILTER = (14, 15)

_NOT_OF_INDEX = "its row groups are not those of the index: make that again"


class MovedGroup(NamedTuple):
    """A row group of a file."""

    place: int
    """In the order."""
    rows: int
    by: int
    """How much further on its bytes lie."""


class FileFooter(NamedTuple):
    """The metadata of a file."""

    name: str
    data: bytes
    groups: Mapping[int, MovedGroup]
    """Those that the order has, by their numbers among those with rows."""


def joined(blocks: ChosenBlocks, sources: OrderSources) -> Joined:
    """As the package has it."""
    found = Joined()
    found.add(MAGIC)
    moved: dict[int, dict[int, MovedGroup]] = {}
    for place in range(len(blocks)):
        file, block = blocks.file(place), blocks.block(place)
        number = blocks.numbers[place] - blocks.index.first_blocks[file]
        by = found.size - block.offset
        moved.setdefault(file, {})[number] = MovedGroup(place, block.rows, by)
        found.add(SourceRange(file, block.offset, block.length))
    files = moved or range(min(1, len(blocks.index.paths)))
    footers = [
        FileFooter(blocks.name(file), data, moved.get(file, {}))
        for file, data in _footers(blocks, files, sources).items()
    ]
    end = sources.apart(footer_of, footers)
    found.add(end + len(end).to_bytes(4, "little") + MAGIC)
    return found


def _footers(blocks: ChosenBlocks, files: Iterable[int], sources: OrderSources) -> dict[int, bytes]:
    """Of these files: all of them before one is looked into, which takes far longer."""
    footers = {}
    left = FOOTERS_MAX
    for file in files:
        with blocks.naming(file):
            data = footer(sources.open(file))[:-8]
            left -= len(data)
            if left < 0:
                raise DatasetError(
                    f"more than {FOOTERS_MAX} bytes of footers, with those of others"
                )
        footers[file] = data
    return footers


def footer_of(files: Sequence[FileFooter]) -> bytes:
    """The metadata of the row groups of these files in their order. Raises DatasetError."""
    if not files:
        raise DatasetError("a dataset without files")
    groups: dict[int, bytes] = {}
    left = FIELDS_MAX
    schema = None
    for file in files:
        with _naming(file):
            reader = StructReader(file.data, left)
            of_file = _take_groups(reader, file.groups, groups)
            left = reader.left
            if schema not in (None, of_file):
                raise DatasetError("its schema is not that of the other files")
            schema = of_file
    in_order = thrift.list_of([groups[place] for place in sorted(groups)])
    rows = sum(group.rows for file in files for group in file.groups.values())
    with _naming(files[0]):
        changes = {_ROWS: _to(thrift.encoded(rows)), _GROUPS: _to(in_order)}
        return StructReader(files[0].data, FIELDS_MAX).rewrite(changes)


@contextmanager
def _naming(file: FileFooter) -> Iterator[None]:
    """What is wrong inside is said to be wrong with this file."""
    try:
        yield
    except DatasetError as error:
        raise DatasetError(f"{file.name}: {error}") from error
    except IndexError:
        raise DatasetError(f"{file.name}: damaged metadata: they end too early") from None


def _take_groups(
    reader: StructReader, wanted: Mapping[int, MovedGroup], groups: dict[int, bytes]
) -> bytes:
    """Put the row groups that are ``wanted`` into ``groups``, by their places; the schema."""
    schema = b""
    found = False
    for id, kind in reader.fields():
        start = reader.at
        if id in _ENCRYPTED:
            raise DatasetError("it is encrypted")
        if id != _GROUPS:
            reader.skip(kind)
            if id == _SCHEMA:
                schema = reader.data[start : reader.at]
            continue
        of, count = reader.elements(kind)
        if of != thrift.STRUCT or found:
            raise DatasetError("damaged metadata: no list of row groups")
        found = True
        number = 0
        for _ in range(count):
            group = wanted.get(number)
            rows, data = _moved(reader, None if group is None else group.by)
            if group is not None and rows:
                if rows != group.rows:
                    raise DatasetError(_NOT_OF_INDEX)
                groups[group.place] = data
            number += rows != 0
        if any(group.place not in groups for group in wanted.values()):
            raise DatasetError(_NOT_OF_INDEX)
    if not found:
        raise DatasetError("damaged metadata: no list of row groups")
    return schema


def _moved(reader: StructReader, by: int | None) -> tuple[int, bytes]:
    """The rows of the row group that begins here, and what says where it lies if its bytes lie
    ``by`` further on; None: nobody asks for that."""
    rows = 0

    def note_rows(reader: StructReader, kind: int) -> bytes:
        nonlocal rows
        rows = reader.number(kind)
        return thrift.encoded(rows)

    changes: dict[int, Change] = {_GROUP_ROWS: note_rows, _GROUP_OFFSET: None, _ORDINAL: None}
    if by is not None:
        chunk = _changes_of_chunk(by)
        changes[_CHUNKS] = lambda reader, kind: reader.rewrite_all(kind, chunk)
    data = reader.rewrite(changes)
    return rows, data


def _changes_of_chunk(by: int) -> dict[int, Change]:
    column: dict[int, Change] = {
        **dict.fromkeys(_PAGE_OFFSETS, _plus(by)),
        **dict.fromkeys(_BLOOM_FILTER),
    }

    def of_column(reader: StructReader, kind: int) -> bytes:
        if kind != thrift.STRUCT:
            raise DatasetError("damaged metadata: a column of another type")
        return reader.rewrite(column)

    return {
        **dict.fromkeys(_PAGE_INDEXES),
        **dict.fromkeys((_PATH, *_CHUNK_ENCRYPTED), _refuse),
        _CHUNK_OFFSET: _plus(by),
        _COLUMN: of_column,
    }


def _plus(by: int) -> Callable[[StructReader, int], bytes]:
    def plus(reader: StructReader, kind: int) -> bytes:
        number = reader.number(kind)
        return thrift.encoded(max(0, number + by) if number else 0)

    return plus


def _to(value: bytes) -> Callable[[StructReader, int], bytes]:
    def to(reader: StructReader, kind: int) -> bytes:
        reader.skip(kind)
        return value

    return to


def _refuse(reader: StructReader, kind: int) -> NoReturn:
    raise DatasetError("columns are encrypted, or lie in other files")
