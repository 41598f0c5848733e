"""Which formats there are, which one a directory's files have, and the order files of each."""

from collections.abc import Iterable
from functools import cache
from types import ModuleType

from aifs.core.errors import DatasetError
from aifs.datasets.formats import arrow, files, jsonl, megatron, parquet, records, tar, text
from aifs.datasets.formats.text import BOM, is_compressed
from aifs.datasets.index import FileBytes, Index
from aifs.datasets.order import OrderName, OrderSources, chosen_of
from aifs.datasets.virtual import Joined

FORMATS: dict[str, ModuleType] = {
    module.NAME: module for module in (parquet, arrow, tar, megatron, jsonl, text, records, files)
}
"""By name; in the order in which they are looked for."""


def is_of(format: str, name: bytes) -> bool:
    """Whether a dataset of this format has this file name. Hidden files, and directories, are
    out."""
    suffixes = _suffixes(format)
    return not files.is_hidden(name) and (not suffixes or name.lower().endswith(suffixes))


@cache
def _suffixes(format: str) -> tuple[bytes, ...]:
    return tuple(suffix.encode() for suffix in FORMATS[format].SUFFIXES)


def format_of(names: Iterable[bytes]) -> str:
    """A directory's format by file names: the first that any has, so notes (README.txt, state.json)
    do no harm; else "files". A ``.bin`` needs an ``.idx``. Raises DatasetError without files."""
    all_names = {name for name in names if is_of("files", name)}
    for format, module in FORMATS.items():
        found = [name for name in all_names if module.SUFFIXES and is_of(format, name)]
        if format == megatron.NAME:
            found = [name for name in found if name[: -len(b".bin")] + b".idx" in all_names]
        # One text among pictures is a note.
        if found and (format != text.NAME or 2 * len(found) >= len(all_names)):
            return format
    if not all_names:
        raise DatasetError("no files")
    return files.NAME


def format_of_bytes(file: FileBytes) -> str | None:
    """The format of one file, as its first bytes tell; None if they do not."""
    head = file.read(0, 512)
    if head.startswith(b"PAR1"):
        return parquet.NAME
    if head.startswith((arrow.MAGIC, arrow.CONTINUED)):
        return arrow.NAME
    if head[257:262] == b"ustar":
        return tar.NAME
    if head.removeprefix(BOM).lstrip()[:1] == b"{":
        return jsonl.NAME
    if head and not is_compressed(head) and b"\0" not in head:
        return text.NAME
    return None


def order_bytes(index: Index, name: OrderName, sources: OrderSources) -> Joined:
    """The content of the order file ``name`` of a dataset. Blocks: reads headers. Raises
    DatasetError, with the reason, if the dataset cannot have one."""
    blocks = chosen_of(index, name)
    if name.suffix == b".idx":
        return megatron.order_idx(blocks, sources)
    return FORMATS[name.format].order(blocks, sources)
