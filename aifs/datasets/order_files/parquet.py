"""Parquet: the row groups as they are, and a footer that has them in their new order and places.

Files have one schema. Left out of the footer is what may be missing and lies outside of row groups:
page indexes and Bloom filters. Fields are numbered as in parquet.thrift (Apache Parquet).
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from aifs.core.errors import DatasetError
from aifs.datasets.formats.parquet import MAGIC, footer
from aifs.datasets.order_files import thrift
from aifs.datasets.order_files.chosen import ChosenBlocks, OrderSources
from aifs.datasets.order_files.thrift import Field, Struct, value_of
from aifs.datasets.virtual import Joined, SourceRange

FOOTERS_MAX = 32 << 20
"""Bytes of the footers of all files of an order: each MiB takes 0.3 to 0.9 s."""

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


def joined(blocks: ChosenBlocks, sources: OrderSources) -> Joined:
    """As the package has it."""
    found = Joined()
    found.add(MAGIC)
    starts = []
    for place in range(len(blocks)):
        block = blocks.block(place)
        starts.append(found.size)
        found.add(SourceRange(blocks.file(place), block.offset, block.length))
    end = _footer(blocks, starts, sources)
    found.add(end + len(end).to_bytes(4, "little") + MAGIC)
    return found


def _footer(blocks: ChosenBlocks, starts: list[int], sources: OrderSources) -> bytes:
    """Of blocks that begin at ``starts``."""
    by_file: dict[int, list[int]] = {}
    for place in range(len(blocks)):
        by_file.setdefault(blocks.file(place), []).append(place)
    groups: list[Struct] = [[] for _ in starts]
    whole: Struct | None = None
    footers = _footers(blocks, by_file or range(min(1, len(blocks.index.paths))), sources)
    for file, data in footers.items():
        with blocks.naming(file), _checking_types():
            meta = thrift.decode(data)
            whole = _checked(meta, whole or meta)
            theirs = [one for one in value_of(meta, _GROUPS).values if value_of(one, _GROUP_ROWS)]
            for place in by_file.get(file, ()):
                number = blocks.numbers[place] - blocks.index.first_blocks[file]
                block = blocks.block(place)
                if number >= len(theirs) or value_of(theirs[number], _GROUP_ROWS) != block.rows:
                    raise DatasetError("its row groups are not those of the index: make that again")
                groups[place] = _moved(theirs[number], starts[place] - block.offset)
    if whole is None:
        raise DatasetError("a dataset without files")
    with _checking_types():
        return thrift.encode(_with_groups(whole, groups))


def _footers(blocks: ChosenBlocks, files: Iterable[int], sources: OrderSources) -> dict[int, bytes]:
    """Of these files: all of them before one is decoded, which takes far longer."""
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


@contextmanager
def _checking_types() -> Iterator[None]:
    """Damaged metadata may have a number where a list is to be, or one of too many bits."""
    try:
        yield
    except (AttributeError, TypeError, ValueError) as error:
        raise DatasetError("damaged metadata: a field of another type") from error


def _checked(meta: Struct, first: Struct) -> Struct:
    """``first``, the metadata of the first file, if ``meta`` fit it."""
    if any(value_of(meta, field) is not None for field in _ENCRYPTED):
        raise DatasetError("it is encrypted")
    if value_of(meta, _GROUPS) is None or value_of(meta, _SCHEMA) != value_of(first, _SCHEMA):
        raise DatasetError("its schema is not that of the other files")
    return first


def _moved(group: Struct, by: int) -> Struct:
    """A row group whose bytes lie ``by`` further on."""
    return [
        Field(id, kind, _shifted_columns(value, by) if id == _CHUNKS else value)
        for id, kind, value in group
        if id not in (_GROUP_OFFSET, _ORDINAL)
    ]


def _shifted_columns(chunks: thrift.List, by: int) -> thrift.List:
    return thrift.List(chunks.type, [_moved_chunk(chunk, by) for chunk in chunks.values])


def _moved_chunk(chunk: Struct, by: int) -> Struct:
    if any(field.id in (_PATH, *_CHUNK_ENCRYPTED) for field in chunk):
        raise DatasetError("columns are encrypted, or lie in other files")
    moved = []
    for id, kind, value in chunk:
        if id == _CHUNK_OFFSET:
            value = max(0, value + by) if value else 0
        elif id == _COLUMN:
            value = [
                Field(part, of, number + by if part in _PAGE_OFFSETS and number else number)
                for part, of, number in value
                if part not in _BLOOM_FILTER
            ]
        if id not in _PAGE_INDEXES:
            moved.append(Field(id, kind, value))
    return moved


def _with_groups(meta: Struct, groups: list[Struct]) -> Struct:
    rows = sum(value_of(group, _GROUP_ROWS) for group in groups)
    new = {_ROWS: rows, _GROUPS: thrift.List(thrift.STRUCT, groups)}
    return [Field(id, kind, new.get(id, value)) for id, kind, value in meta]
