"""Arrow's stream of record batches, of files and streams that have one schema and no dictionaries:
these would have to come first, and files may number the same values differently."""

from aifs.core.errors import DatasetError
from aifs.datasets.formats.arrow import has_dictionaries, schema_span
from aifs.datasets.formats.reading import SmallReads
from aifs.datasets.index import FileBytes
from aifs.datasets.order_files.chosen import ChosenBlocks, OrderSources
from aifs.datasets.virtual import Joined, SourceRange

_SCHEMA_MAX = 16 << 20
"""Bytes: it is held in memory."""

_END = b"\xff\xff\xff\xff\0\0\0\0"


def joined(blocks: ChosenBlocks, sources: OrderSources) -> Joined:
    """As the package has it. Of a rank without blocks it is the schema of the first file alone."""
    found = Joined()
    index = blocks.index
    schema = b""
    for file in blocks.files() or range(min(1, len(index.paths))):
        with blocks.naming(file):
            message = _schema(sources.open(file))
            if schema and message != schema:
                raise DatasetError("its schema is not that of the other files")
            if not schema and has_dictionaries(message):
                raise DatasetError("columns with dictionaries cannot be put into another order")
            schema = message
    found.add(schema)
    for place in range(len(blocks)):
        block = blocks.block(place)
        found.add(SourceRange(blocks.file(place), block.offset, block.length))
    found.add(_END)
    return found


def _schema(file: FileBytes) -> bytes:
    window = SmallReads(file)
    return window.at(*schema_span(window, _SCHEMA_MAX))
