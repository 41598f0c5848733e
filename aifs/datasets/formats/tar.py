"""Tar archives as of WebDataset: a row is the successive members of one stem, ``{"__key__": stem,
extension: bytes, ...}``.

ustar, pax and GNU's long names; the index reads headers. Directories, links, devices, members
without extension and WebDataset's notes (``__name__``) belong to no row. ``decode=True``: json is
decoded, txt and text are ``str``, cls and id ``int``; the rest stays bytes. Arrow batches have
``__key__``, and ``members``, a map from extensions to bytes.
"""

import json
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from aifs.core.errors import DatasetError
from aifs.datasets.formats.columns import naming
from aifs.datasets.formats.reading import (
    DatasetFile,
    InMemory,
    OpenBlock,
    SmallReads,
    in_blocks,
    require_rows,
)
from aifs.datasets.formats.text import GZIP, ZSTD
from aifs.datasets.index import FileBytes, RowBlock
from aifs.datasets.order import ChosenBlocks, OrderSources, in_order
from aifs.datasets.virtual import Joined

if TYPE_CHECKING:
    import pyarrow

NAME = "tar"
SUFFIXES: tuple[str, ...] = (".tar",)

_BLOCK = 512
_END = bytes(_BLOCK)
_EXTENSION_MAX = 1 << 20
"""Of a long name, or of pax records: a longer one is an attack."""

_STEM = re.compile(rb"((?:.*/|)[^.]+)[.]([^/]*)", re.DOTALL)
_NOTE = re.compile(rb"__[^/]*__($|/)")
_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "json": json.loads,
    "txt": bytes.decode,
    "text": bytes.decode,
    "cls": int,
    "id": int,
}


class TarMember(NamedTuple):
    """A regular file in an archive."""

    name: bytes
    start: int
    """Of its first header."""

    offset: int
    """Of its bytes."""

    size: int

    @property
    def end(self) -> int:
        return self.offset + _padded(self.size)

    @property
    def stem(self) -> tuple[bytes, str] | None:
        """As ``stem_of``."""
        return stem_of(self.name)


def stem_of(name: bytes) -> tuple[bytes, str] | None:
    """A row's common stem, and the lower-case extension; None for a member of no row."""
    match = _STEM.fullmatch(name)
    if match is None or _NOTE.match(name):
        return None
    return match[1], match[2].decode(errors="surrogateescape").lower()


def blocks(file: FileBytes, options: Mapping[str, Any]) -> Iterator[RowBlock]:
    if file.size:
        yield from in_blocks(_rows(file))


def _rows(file: FileBytes) -> Iterator[tuple[int, int]]:
    stem: bytes | None = None
    extensions: set[str] = set()
    start = end = count = skipped = 0
    for member in members(SmallReads(file), file.size):
        if (found := member.stem) is None:
            skipped += 1
            continue
        if found[0] != stem:
            if count:
                yield start, end
            stem, start, extensions = found[0], member.start, set()
        if found[1] in extensions:
            raise DatasetError(f"the member at byte {member.start} is twice in its row")
        extensions.add(found[1])
        end = member.end
        count += 1
    if count:
        yield start, end
    elif skipped:
        raise DatasetError("no member has an extension, so none belongs to a row")


def members(
    window: SmallReads, size: int, start: int = 0, stop: int | None = None
) -> Iterator[TarMember]:
    """Regular files of an archive of ``size`` bytes, from the header at ``start`` to the end's
    mark, or ``stop``. GNU tar, tarfile and WebDataset allow a missing mark: a cut between members
    is unseen. Raises DatasetError without a header, or for a member beyond the archive."""
    at = start
    while at != stop:
        first, name, length = at, None, None
        while True:
            if at == size == first:
                return
            if at + _BLOCK > size:
                raise DatasetError(f"no header at byte {at}: the archive is torn")
            header = window.at(at, _BLOCK)
            if header == _END:
                if first != at:
                    raise DatasetError(f"the member at byte {first} has only an extended header")
                return
            kind, own_length = _checked(header, at)
            at += _BLOCK
            if kind not in b"LKxXg":
                break
            if own_length > _EXTENSION_MAX:
                raise DatasetError(f"an extended header of {own_length} bytes at byte {at}")
            data = window.at(at, own_length)
            if kind in b"L":
                name = data.split(b"\0", 1)[0]
            elif kind in b"xX":
                records = _pax(data, at)
                name = records.get(b"path", name)
                if b"size" in records:
                    length = _decimal(records[b"size"], at)
                if any(key.startswith(b"GNU.sparse.") for key in records):
                    raise DatasetError(f"a sparse member at byte {first} is not supported")
            at += _padded(own_length)
        if kind in b"S":
            raise DatasetError(f"a sparse member at byte {first} is not supported")
        if name is None:
            name = _name(header)
        if length is None:
            length = own_length
        if kind in b"123456":  # links, devices, directories, pipes: no bytes follow
            continue
        if at + _padded(length) > size:
            raise DatasetError(
                f"the member at byte {first} has {length} bytes, beyond the end: the archive is"
                " torn"
            )
        if not name.endswith(b"/") and kind in b"\x0007":
            yield TarMember(name, first, at, length)
        at += _padded(length)
        if stop is not None and at > stop:
            raise DatasetError(f"the member at byte {first} does not end at byte {stop}")


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def _checked(header: bytes, at: int) -> tuple[bytes, int]:
    """Type and size."""
    digits = header[148:156].strip(b"\0 ")
    others = sum(header) - sum(header[148:156]) + 8 * ord(" ")
    signed = others - 256 * sum(byte > 127 for byte in header[:148] + header[156:])
    if not re.fullmatch(rb"[0-7]{1,8}", digits) or int(digits, 8) not in (others, signed):
        compressed = header.startswith((GZIP, ZSTD, b"BZh", b"\xfd7zXZ"))
        why = ": it is compressed; unpack it" if compressed else ""
        raise DatasetError(f"no tar header at byte {at}{why}")
    field = header[124:136]
    if field[0] == 0x80:
        return header[156:157], int.from_bytes(field[1:], "big")
    digits = field.strip(b"\0 ")
    if not re.fullmatch(rb"[0-7]*", digits):
        raise DatasetError(f"the header at byte {at} has no size")
    return header[156:157], int(digits or b"0", 8)


def _name(header: bytes) -> bytes:
    name = header[:100].split(b"\0", 1)[0]
    prefix = header[345:500].split(b"\0", 1)[0]
    is_posix = header[257:263] == b"ustar\0"
    return prefix + b"/" + name if prefix and is_posix else name


def _pax(data: bytes, at: int) -> dict[bytes, bytes]:
    """Records ``LENGTH KEY=VALUE\\n``, where LENGTH counts all of the record."""
    records = {}
    position = 0
    while position < len(data) and data[position]:
        space = data.find(b" ", position, position + 12)
        length = _decimal(data[position:space], at) if space > 0 else 0
        end = position + length
        key, equals, value = data[space + 1 : end - 1].partition(b"=")
        if not space + 1 < end <= len(data) or data[end - 1 : end] != b"\n" or not equals:
            raise DatasetError(f"the extended header at byte {at} is torn")
        records[key] = value
        position = end
    return records


def _decimal(digits: bytes, at: int) -> int:
    if not re.fullmatch(rb"[0-9]{1,20}", digits):
        raise DatasetError(f"the extended header at byte {at} is torn")
    return int(digits)


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


def open_file(file: DatasetFile, options: Mapping[str, Any]) -> OpenBlock:
    decode = bool(options.get("decode"))
    return lambda number, block: _Block(
        file.path, block, file.read(block.offset, block.length), decode
    )


def order(blocks: ChosenBlocks, sources: OrderSources) -> Joined:
    """The members of the rows, then the end of an archive."""
    found = in_order(blocks)
    end = found.size + 2 * tarfile.BLOCKSIZE
    found.add(bytes(-(-end // tarfile.RECORDSIZE) * tarfile.RECORDSIZE - found.size))
    return found
