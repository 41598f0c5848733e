"""Where a file is cut into chunks: at the borders of its tensors, where its format shows them.
Pure.

Equal tensors are found in different files, at different offsets, only if they are cut alike: so a
tensor of at least ``SMALL`` bytes begins a chunk, and is cut every ``chunk`` bytes from there; what
lies between two such tensors (headers, padding, small tensors) is a range of its own that is cut in
the same way. Files of no known format are cut every ``chunk`` bytes.

Known formats: safetensors (8 bytes length, little-endian; so many bytes of JSON, in which each
tensor has "data_offsets": [begin, end], counted from the end of the JSON), and archives as
torch.save makes them: zip, entries stored and not compressed, of which those called
NAME/data/NUMBER hold the bytes of tensors (PKWARE APPNOTE 6.3.10: end of the central directory
4.3.16, its zip64 form 4.3.14 and 4.3.15, central and local headers 4.3.12 and 4.3.7, zip64 sizes
4.5.3).

Nothing that a file says is trusted: what does not fit together is cut as a file of no known format.
Only the choice of chunks depends on what is found here, never the bytes. Memory is bounded by
``_HEADER_MAX`` and ``_TENSORS_MAX``.
"""

import itertools
import re
import struct
from collections.abc import Callable, Iterator

SMALL = 64 << 10
"""Tensors of fewer bytes get no chunks of their own."""

_HEADER_MAX = 64 << 20  # of JSON, or of a central directory
_TENSORS_MAX = 1_000_000
_PIECE = 1 << 20  # of a header that is looked through at once, so that other threads get their turn

Read = Callable[[int, int], bytes]
"""``read(offset, length)``: bytes of the file, fewer at its end."""

Range = tuple[int, int]
"""Begin and end."""


def cut(read: Read, size: int, chunk: int) -> list[Range]:
    """Offset and length of each chunk of a file, in order and complete. Raises errors of
    ``read``."""
    cuts: list[Range] = []
    end = 0
    for begin, until in [*_tensors(read, size), (size, size)]:
        cuts += _every(end, begin, chunk)
        cuts += _every(begin, until, chunk)
        end = until
    return cuts


def _every(begin: int, end: int, chunk: int) -> Iterator[Range]:
    return ((offset, min(chunk, end - offset)) for offset in range(begin, end, chunk))


def _tensors(read: Read, size: int) -> list[Range]:
    """The large tensors, in order; none for an unknown or inconsistent format."""
    if size < SMALL:
        return []
    head = read(0, 9)
    try:
        if head[:4] == b"PK\3\4":
            found = _zip_entries(read, size)
        elif head[8:] == b"{":
            found = _safetensors(read, size, int.from_bytes(head[:8], "little"))
        else:
            return []
    except (_Odd, struct.error):
        return []
    found.sort()
    fits = all(before[1] <= after[0] for before, after in itertools.pairwise(found))
    return found if fits and (not found or found[-1][1] <= size) else []


class _Odd(Exception):
    """The file is not of the format that it seems to have."""


# --- safetensors ----------------------------------------------------------------------------------

_OFFSETS = re.compile(
    rb'"data_offsets"\s{0,8}:\s{0,8}\[\s{0,8}(\d{1,18})\s{0,8},\s{0,8}(\d{1,18})\s{0,8}\]'
)
_OFFSETS_MAX = 128  # bytes that such a match takes at most


def _safetensors(read: Read, size: int, length: int) -> list[Range]:
    """By searching the text: parsing a large JSON would hold up threads, and take memory."""
    if not 2 <= length <= min(_HEADER_MAX, size - 8):
        raise _Odd
    start, found, seen = 8 + length, [], 0
    at = 8
    while at < start:
        text = read(at, min(_PIECE, start - at))
        if len(text) < min(_PIECE, start - at):
            raise _Odd
        done = 0
        for match in _OFFSETS.finditer(text):
            begin, end = int(match[1]), int(match[2])
            done = match.end()
            seen += 1
            if end < begin or seen > _TENSORS_MAX:
                raise _Odd
            if end - begin >= SMALL:
                found.append((start + begin, start + end))
        # A match may be cut off by the end of the piece: look at that part again.
        at += len(text) if at + len(text) == start else max(done, len(text) - _OFFSETS_MAX)
    return found


# --- torch.save -----------------------------------------------------------------------------------

_END = struct.Struct("<4s4H2IH")
_END64_PLACE = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQ2H2I4Q")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_ALL_32, _ALL_16 = 0xFFFFFFFF, 0xFFFF
_STORED = 0
_ZIP64 = 1  # the extra field with sizes of 8 bytes

_IS_TENSOR = re.compile(rb"(?:[^/]{1,255}/)?data/\d{1,9}").fullmatch


def _zip_entries(read: Read, size: int) -> list[Range]:
    found: list[Range] = []
    for header, stored in _central_entries(read, size):
        local = read(header, _LOCAL.size)
        signature, *_, name_length, extra_length = _LOCAL.unpack(local)
        if signature != b"PK\3\4":
            raise _Odd
        begin = header + _LOCAL.size + name_length + extra_length
        found.append((begin, begin + stored))
    return found


def _central_entries(read: Read, size: int) -> Iterator[Range]:
    """Offset of the local header, and length, of each large tensor."""
    offset, length, count = _central_directory(read, size)
    if length > _HEADER_MAX or count > _TENSORS_MAX or offset + length > size:
        raise _Odd
    rest, at, end = b"", offset, offset + length
    while at < end or rest:
        text = rest + read(at, min(_PIECE, end - at))
        at += min(_PIECE, end - at)
        used = 0
        while len(text) - used >= _CENTRAL.size:
            (
                signature,
                _,
                _,
                _,
                method,
                _,
                _,
                _,
                stored,
                raw,
                name_length,
                extra_length,
                comment_length,
                _,
                _,
                _,
                header,
            ) = _CENTRAL.unpack_from(text, used)
            after = used + _CENTRAL.size + name_length + extra_length + comment_length
            if signature != b"PK\1\2":
                raise _Odd
            if after > len(text):
                break
            name_end = used + _CENTRAL.size + name_length
            if _IS_TENSOR(text[used + _CENTRAL.size : name_end]) and method == _STORED:
                extra = text[name_end : name_end + extra_length]
                raw, stored, header = _long_sizes(extra, raw, stored, header)
                if raw != stored:
                    raise _Odd
                if stored >= SMALL:
                    yield header, stored
            used = after
            count -= 1
            if count < 0:
                raise _Odd
        rest = text[used:]
        if at >= end and rest:
            raise _Odd
    if count:
        raise _Odd


def _long_sizes(extra: bytes, *sizes: int) -> list[int]:
    """Sizes beyond 32 bits, in order, from an extra field."""
    found = list(sizes)
    if _ALL_32 not in found:
        return found
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        at += 4
        if kind == _ZIP64:
            for place, value in enumerate(found):
                if value == _ALL_32:
                    (found[place],) = struct.unpack_from("<Q", extra, at)
                    at += 8
            return found
        at += length
    raise _Odd


def _central_directory(read: Read, size: int) -> tuple[int, int, int]:
    """Offset, length, and entries; torch.save leaves no comment at the end."""
    tail = read(max(0, size - _END.size - _END64_PLACE.size), _END.size + _END64_PLACE.size)
    end = tail[-_END.size :]
    signature, _, _, _, count, length, offset, _ = _END.unpack(end)
    if signature != b"PK\5\6":
        raise _Odd
    if count != _ALL_16 and _ALL_32 not in (length, offset):
        return offset, length, count
    signature, _, place, _ = _END64_PLACE.unpack(tail[: _END64_PLACE.size])
    if signature != b"PK\6\7" or place >= size:
        raise _Odd
    signature, *_, count, length, offset = _END64.unpack(read(place, _END64.size))
    if signature != b"PK\6\6":
        raise _Odd
    return offset, length, count
