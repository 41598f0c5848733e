"""Rows of a tar archive: ``{"__key__": stem, extension: bytes, ...}``, as WebDataset has them.

With the option ``decode=True``: json is decoded, txt and text are ``str``, cls and id are ``int``;
images and all else stay bytes. Arrow batches have two columns: ``__key__``, and ``members``, a map
from extensions to bytes.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aifs.client.data.rows import DatasetFile
from aifs.client.data.rows.opened import naming, require_rows
from aifs.core.errors import DatasetError
from aifs.datasets.formats.reading import InMemory, SmallReads
from aifs.datasets.formats.tar import TarMember, members
from aifs.datasets.index import RowBlock

if TYPE_CHECKING:
    import pyarrow

_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "json": json.loads,
    "txt": bytes.decode,
    "text": bytes.decode,
    "cls": int,
    "id": int,
}


class _Block:
    def __init__(self, path: str, block: RowBlock, data: bytes, decode: bool) -> None:
        self._path = path
        self._data = data
        self._decode = decode
        self._rows: list[tuple[bytes, dict[str, TarMember]]] = []
        with naming(path, block.offset):
            for member in members(SmallReads(InMemory(data)), len(data), stop=len(data)):
                if found := member.stem:
                    stem, extension = found
                    if not self._rows or self._rows[-1][0] != stem:
                        self._rows.append((stem, {}))
                    self._rows[-1][1][extension] = member
        require_rows(path, block.offset, len(self._rows), block.rows)

    def take(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        return [self._row(row) for row in rows]

    def _row(self, number: int) -> dict[str, Any]:
        stem, parts = self._rows[number]
        row: dict[str, Any] = {"__key__": stem.decode(errors="surrogateescape")}
        for extension, member in parts.items():
            data = self._bytes(member)
            decoder = _DECODERS.get(extension.rpartition(".")[2]) if self._decode else None
            try:
                row[extension] = decoder(data) if decoder else data
            except (ValueError, RecursionError) as error:
                raise DatasetError(
                    f"{self._path}: {row['__key__']}.{extension} cannot be decoded: {error}"
                ) from error
        return row

    def batch(self, first: int, rows: int) -> "pyarrow.RecordBatch":
        import pyarrow

        chosen = self._rows[first : first + rows]
        keys = [stem.decode(errors="replace") for stem, _ in chosen]
        parts = [
            [(extension, self._bytes(member)) for extension, member in parts.items()]
            for _, parts in chosen
        ]
        kind = pyarrow.map_(pyarrow.string(), pyarrow.large_binary())
        columns = [pyarrow.array(keys, pyarrow.string()), pyarrow.array(parts, kind)]
        return pyarrow.record_batch(columns, names=["__key__", "members"])

    def _bytes(self, member: TarMember) -> bytes:
        return self._data[member.offset : member.offset + member.size]


class _File:
    def __init__(self, file: DatasetFile, decode: bool) -> None:
        self._file = file
        self._decode = decode

    def open_block(self, number: int, block: RowBlock) -> _Block:
        data = self._file.read(block.offset, block.length)
        return _Block(self._file.path, block, data, self._decode)


def open_file(file: DatasetFile, options: Mapping[str, Any]) -> _File:
    return _File(file, bool(options.get("decode")))
