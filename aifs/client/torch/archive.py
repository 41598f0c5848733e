"""The file that ``torch.save`` writes, byte by byte: a zip archive, nothing compressed.

    NAME/data.pkl               the pickle, in which storages are numbers
    NAME/.format_version        1
    NAME/.storage_alignment     64
    NAME/byteorder              little
    NAME/data/0, NAME/data/1    the storages' bytes
    NAME/version                3
    NAME/.data/serialization_id 40 digits: a hash over the names, one over the CRC-32s

The data of each record begin at a multiple of the alignment, which a field ``FB`` of the local
header fills up to; CRC-32 and size follow the data. Offsets and sizes from 2**32 - 1 on take zip64
fields, and zip64 end records are always there. Source: PKWARE APPNOTE 6.3.10, and what torch 2.13
writes. Needs no torch.
"""

import struct
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

try:
    from isal.isal_zlib import crc32  # several times as fast
except ImportError:
    from zlib import crc32

_VERSION = b"3\n"
_MAX32, _MAX16 = 0xFFFFFFFF, 0xFFFF
_UTF8, _DESCRIPTOR = 0x0800, 0x0008
_SMALL = 1 << 18  # bytes whose CRC takes less time than to hand them to another thread

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR64 = struct.Struct("<4sIQI")
_END = struct.Struct("<4s4H2IH")

Chunks = Iterable[memoryview]
"""The bytes of a record, in order. Each is used before the next one is asked for."""


class Sink(Protocol):
    """Where an archive goes."""

    def write(self, data: bytes | memoryview) -> None:
        """Append. The memory may change once this has returned. Raises OSError."""

    def skip(self, size: int) -> bool:
        """Whether none of the next ``size`` bytes are wanted; then they are passed over."""


@dataclass(frozen=True)
class Image:
    """The content of an archive, except the storages' bytes."""

    name: str
    """Of the folder in it."""
    pickle: bytes
    """The pickled state, with references to the storages."""
    sizes: tuple[int, ...]
    """Bytes of each storage, in order."""
    names_hash: str
    """The first 20 digits of the serialization id."""
    alignment: int = 64
    """Storages begin at multiples of so many bytes."""
    byteorder: str = "little"
    """'little' or 'big'."""
    crc: bool = True
    """Whether CRC-32s are taken; else they are 0."""

    def records(self, storages: Iterable[Chunks]) -> Iterator[tuple[str, int, Chunks]]:
        """Name, bytes and content of each record, but the id."""
        small = [
            ("data.pkl", self.pickle),
            (".format_version", b"1"),
            (".storage_alignment", b"%d" % self.alignment),
            ("byteorder", self.byteorder.encode()),
        ]
        for name, data in small:
            yield name, len(data), [memoryview(data)]
        for index, (size, chunks) in enumerate(zip(self.sizes, storages, strict=True)):
            yield f"data/{index}", size, chunks
        yield "version", len(_VERSION), [memoryview(_VERSION)]


def record_names(storages: int) -> list[str]:
    """Names in an archive with so many storages, in their order, except the id."""
    return [name for name, _, _ in Image("", b"", (0,) * storages, "").records([()] * storages)]


def write_archive(image: Image, storages: Iterable[Chunks], sink: Sink) -> int:
    """Write it to ``sink``; returns its length. ``storages``: in the order of ``image.sizes``. Each
    byte is read once or twice, copied only by the sink. Raises OSError."""
    with ThreadPoolExecutor(1, "aifs-crc") as pool:
        writer = _Writer(image, sink, pool)
        for name, size, chunks in image.records(storages):
            writer.add(name, size, chunks)
        identity = f"{image.names_hash}{writer.crcs_hash:020}".encode()
        writer.add(".data/serialization_id", len(identity), [memoryview(identity)])
        writer.finish()
        return writer.position


def length_of(image: Image) -> int:
    """Of the archive, in bytes."""
    return write_archive(image, [()] * len(image.sizes), _Nowhere())


class _Nowhere:
    def write(self, data: bytes | memoryview) -> None:
        pass

    def skip(self, size: int) -> bool:
        return True


class _Writer:
    def __init__(self, image: Image, sink: Sink, pool: ThreadPoolExecutor) -> None:
        self.position = self.crcs_hash = 0
        self._image, self._sink, self._pool = image, sink, pool
        self._central: list[bytes] = []

    def _write(self, data: bytes) -> None:
        self._sink.write(data)
        self.position += len(data)

    def add(self, name: str, size: int, chunks: Chunks) -> None:
        path = f"{self._image.name}/{name}".encode()
        flags = _UTF8 | (_DESCRIPTOR if size else 0)
        start, extra = self.position, _zip64(size, 0, self.position)  # 0: it follows the data
        filled = start + _LOCAL.size + len(path) + len(extra) + 4
        padding = -filled % self._image.alignment
        fill = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        fields = (b"PK\3\4", 0, flags, 0, 0, 0, 0, 0, 0, len(path), len(extra) + len(fill))
        self._write(_LOCAL.pack(*fields) + path + extra + fill)
        crc = 0 if self._sink.skip(size) else self._write_data(size, chunks)
        self.position += size
        if size:
            sizes = struct.pack("<2Q" if extra else "<2I", size, size)
            self._write(struct.pack("<4sI", b"PK\7\x08", crc) + sizes)
            self.crcs_hash = _hash_combine(self.crcs_hash, crc)
        short = min(size, _MAX32)
        listed = (
            b"PK\1\2",
            0,
            0,
            flags,
            0,
            0,
            0,
            crc,
            short,
            short,
            len(path),
            len(extra),
            0,
            0,
            0,
            0,
            min(start, _MAX32),
        )
        self._central.append(_CENTRAL.pack(*listed) + path + _zip64(size, size, start))

    def _write_data(self, size: int, chunks: Chunks) -> int:
        crc = written = 0
        for chunk in chunks:
            written += len(chunk)
            if not self._image.crc:
                self._sink.write(chunk)
            elif len(chunk) <= _SMALL:
                crc = crc32(chunk, crc)
                self._sink.write(chunk)
            else:
                coming = self._pool.submit(crc32, chunk, crc)
                try:
                    self._sink.write(chunk)
                finally:  # the memory may be gone when this has returned
                    crc = coming.result()
        assert written == size
        return crc

    def finish(self) -> None:
        start, central = self.position, b"".join(self._central)
        self._write(central)
        count, end = len(self._central), self.position
        tail: list[tuple[struct.Struct, tuple[Any, ...]]] = [
            (_END64, (b"PK\6\6", 44, 0x031E, 45, 0, 0, count, count, len(central), start)),
            (_LOCATOR64, (b"PK\6\7", 0, end, 1)),
            (
                _END,
                (
                    b"PK\5\6",
                    0,
                    0,
                    min(count, _MAX16),
                    min(count, _MAX16),
                    min(len(central), _MAX32),
                    min(start, _MAX32),
                    0,
                ),
            ),
        ]
        self._write(b"".join(layout.pack(*fields) for layout, fields in tail))


def _zip64(size: int, stored: int, offset: int) -> bytes:
    """The extra field for larger numbers. ``stored``: the size in the archive."""
    values = [size, stored] if size >= _MAX32 else []
    values += [offset] if offset >= _MAX32 else []
    return struct.pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values) if values else b""


def _hash_combine(seed: int, value: int) -> int:
    """As c10 does, in 64 bits."""
    return (seed ^ (value + 0x9E3779B9 + (seed << 6) + (seed >> 2))) & 0xFFFFFFFFFFFFFFFF
