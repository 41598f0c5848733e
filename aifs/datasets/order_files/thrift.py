"""Thrift's compact protocol without schemas: what a Parquet footer is written in (Apache Thrift,
"Thrift Compact protocol encoding"). A struct is a list of its fields, each with the type that it
was written with, so what is not understood is written again as it was.
"""

from typing import Any, NamedTuple

from aifs.core.errors import DatasetError

TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, _MAP, STRUCT = range(1, 13)

_DEPTH_MAX = 32
_VARINT_MAX = 10  # bytes of 64 bits


class Field(NamedTuple):
    """Of a struct."""

    id: int
    type: int
    value: Any
    """An int; bytes (also of DOUBLE); a ``List``; of STRUCT a list of fields."""


class List(NamedTuple):
    """Of LIST and SET."""

    type: int
    """Of the elements."""
    values: list[Any]


Struct = list[Field]


def value_of(struct: Struct, id: int, default: Any = None) -> Any:
    """Of the field with this id."""
    return next((field.value for field in struct if field.id == id), default)


def decode(data: bytes) -> Struct:
    """The struct at the beginning of ``data``. Raises DatasetError."""
    try:
        return _Decoder(data).struct(0)
    except IndexError:
        raise DatasetError("damaged metadata: they end too early") from None


class _Decoder:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def struct(self, depth: int) -> Struct:
        fields = []
        id = 0
        while head := self._byte():
            kind = head & 15
            id = id + (head >> 4) if head >> 4 else _signed(self._varint())
            value = kind if kind in (TRUE, FALSE) else self._value(kind, depth)
            fields.append(Field(id, kind, value))
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if depth > _DEPTH_MAX:
            raise DatasetError("damaged metadata: they are nested without an end")
        if kind in (I16, I32, I64):
            return _signed(self._varint())
        if kind == BINARY:
            return self._bytes(self._varint())
        if kind == STRUCT:
            return self.struct(depth + 1)
        if kind in (LIST, SET):
            head = self._byte()
            count = head >> 4 if head >> 4 < 15 else self._varint()
            if count > len(self._data) - self._at:
                raise DatasetError("damaged metadata: a list is longer than they are")
            return List(head & 15, [self._value(head & 15, depth + 1) for _ in range(count)])
        if kind == DOUBLE:
            return self._bytes(8)
        if kind in (TRUE, FALSE, BYTE):  # in a list
            return self._byte()
        raise DatasetError(f"damaged metadata: type {kind}")

    def _byte(self) -> int:
        byte = self._data[self._at]
        self._at += 1
        return byte

    def _bytes(self, length: int) -> bytes:
        found = self._data[self._at : self._at + length]
        if len(found) != length:
            raise IndexError
        self._at += length
        return found

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 7 * _VARINT_MAX, 7):
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise DatasetError("damaged metadata: a number without an end")


def encode(struct: Struct) -> bytes:
    """The bytes of a struct, as ``decode`` takes them."""
    out = bytearray()
    _put_struct(out, struct)
    return bytes(out)


def _put_struct(out: bytearray, struct: Struct) -> None:
    last = 0
    for id, kind, value in struct:
        if 0 < id - last < 16:
            out.append((id - last) << 4 | kind)
        else:
            out.append(kind)
            _put_number(out, id)
        if kind not in (TRUE, FALSE):
            _put(out, kind, value)
        last = id
    out.append(0)


def _put(out: bytearray, kind: int, value: Any) -> None:
    if kind in (I16, I32, I64):
        _put_number(out, value)
    elif kind == BINARY:
        _put_varint(out, len(value))
        out += value
    elif kind == STRUCT:
        _put_struct(out, value)
    elif kind in (LIST, SET):
        if len(value.values) < 15:
            out.append(len(value.values) << 4 | value.type)
        else:
            out.append(15 << 4 | value.type)
            _put_varint(out, len(value.values))
        for one in value.values:
            _put(out, value.type, one)
    elif kind == DOUBLE:
        out += value
    else:
        out.append(value)


def _put_number(out: bytearray, value: int) -> None:
    _put_varint(out, (value << 1) ^ (value >> 63))


def _put_varint(out: bytearray, value: int) -> None:
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)


def _signed(value: int) -> int:
    return (value >> 1) ^ -(value & 1)
