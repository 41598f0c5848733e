"""Formats whose rows stand for themselves, so that blocks follow one another as they are: tar,
lines (text, jsonl), records of a fixed size, tokens (Megatron's .bin).
"""

import tarfile

from aifs.core.errors import DatasetError
from aifs.datasets.formats.lines import is_compressed
from aifs.datasets.index import FileBytes
from aifs.datasets.order_files.chosen import ChosenBlocks, OrderSources
from aifs.datasets.virtual import Joined, SourceRange


def joined(blocks: ChosenBlocks, sources: OrderSources) -> Joined:
    """As the package has it."""
    found = Joined()
    has_lines = blocks.index.format in ("text", "jsonl")
    torn = set()
    for file in blocks.files() if has_lines else ():
        with blocks.naming(file):
            if _lacks_newline(sources.open(file)):
                torn.add(file)
    for place in range(len(blocks)):
        file, block = blocks.file(place), blocks.block(place)
        found.add(SourceRange(file, block.offset, block.length))
        if file in torn and block.offset + block.length == blocks.index.sizes[file]:
            found.add(b"\n")
    if blocks.index.format == "tar":
        end = found.size + 2 * tarfile.BLOCKSIZE
        found.add(bytes(-(-end // tarfile.RECORDSIZE) * tarfile.RECORDSIZE - found.size))
    return found


def _lacks_newline(file: FileBytes) -> bool:
    """Whether the last line does not end. Raises DatasetError for compressed lines."""
    if is_compressed(file.read(0, 4)):
        raise DatasetError("compressed lines cannot be put into another order; decompress them")
    return file.read(file.size - 1, 1) != b"\n"
