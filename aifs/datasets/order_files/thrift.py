"""Thrift's compact protocol without schemas: what a Parquet footer is written in (Apache Thrift,
"Thrift Compact protocol encoding"). Structs are gone over once, and what is not to be changed is
copied as the bytes that it is: nothing is made of it. A footer may be anybody's, and a byte of it
would become a hundred.
"""

from collections.abc import Callable, Iterator, Mapping

from aifs.core.errors import DatasetError

TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, _MAP, STRUCT = range(1, 13)

_DEPTH_MAX = 32
_VARINT_MAX = 10  # bytes of 64 bits
_END = 1 << 63

Change = Callable[["StructReader", int], bytes] | None
"""The new bytes of a value, which is passed, of this type; None: the field is left out."""


class StructReader:
    """Bytes that hold structs, of ``fields_max`` fields and elements of lists altogether."""

    def __init__(self, data: bytes, fields_max: int) -> None:
        self.data = data
        self.at = 0
        """Where the next value begins."""
        self.left = fields_max
        """Fields and elements that may be passed yet."""

    def fields(self) -> Iterator[tuple[int, int]]:
        """Id and type of each field of the struct that begins here. The caller passes a field's
        value before it asks for the next one. Raises DatasetError, IndexError where they end too
        early; so do the other ones."""
        data = self.data
        id = 0
        while head := data[self.at]:
            self.at += 1
            self._count(1)
            id = id + (head >> 4) if head >> 4 else self._number()
            yield id, head & 15
        self.at += 1

    def number(self, kind: int) -> int:
        if kind not in (I16, I32, I64):
            raise _other_type(kind)
        return self._number()

    def elements(self, kind: int) -> tuple[int, int]:
        """The type of the elements of a list, and how many follow."""
        if kind not in (LIST, SET):
            raise _other_type(kind)
        head = self.data[self.at]
        self.at += 1
        count = head >> 4 if head >> 4 < 15 else self._varint()
        if count > len(self.data) - self.at:
            raise DatasetError("damaged metadata: a list is longer than they are")
        self._count(count)
        return head & 15, count

    def skip(self, kind: int, depth: int = 0) -> None:
        """Pass the value of a field of this type."""
        if depth > _DEPTH_MAX:
            raise DatasetError("damaged metadata: they are nested without an end")
        if kind in (I16, I32, I64):
            self._varint()
        elif kind == BINARY:
            self._pass(self._varint())
        elif kind == STRUCT:
            for _, of in self.fields():
                self.skip(of, depth + 1)
        elif kind in (LIST, SET):
            of, count = self.elements(kind)
            if of in (TRUE, FALSE, BYTE):
                self._pass(count)
            else:
                for _ in range(count):
                    self.skip(of, depth + 1)
        elif kind == DOUBLE:
            self._pass(8)
        elif kind == BYTE:
            self._pass(1)
        elif kind not in (TRUE, FALSE):
            raise _other_type(kind)

    def rewrite(self, changes: Mapping[int, Change]) -> bytes:
        """The struct that begins here, with ``changes`` to the fields of these ids."""
        out = bytearray()
        last = 0
        for id, kind in self.fields():
            start = self.at
            if id not in changes:
                self.skip(kind)
                value = self.data[start : self.at]
            elif (change := changes[id]) is None:
                self.skip(kind)
                continue
            else:
                value = change(self, kind)
            if 0 < id - last < 16:
                out.append((id - last) << 4 | kind)
            else:
                out.append(kind)
                out += encoded(id)
            out += value
            last = id
        out.append(0)
        return bytes(out)

    def rewrite_all(self, kind: int, changes: Mapping[int, Change]) -> bytes:
        """As ``rewrite``, of a list of structs."""
        of, count = self.elements(kind)
        if of != STRUCT:
            raise _other_type(of)
        return list_of([self.rewrite(changes) for _ in range(count)])

    def _count(self, passed: int) -> None:
        self.left -= passed
        if self.left < 0:
            raise DatasetError("the metadata of these files have too many fields")

    def _pass(self, length: int) -> None:
        self.at += length
        if self.at > len(self.data):
            raise IndexError

    def _number(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 7 * _VARINT_MAX, 7):
            byte = self.data[self.at]
            self.at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise DatasetError("damaged metadata: a number without an end")


def encoded(number: int) -> bytes:
    """A number, as it is written. Raises DatasetError if it has more than 64 bits."""
    if not -_END <= number < _END:
        raise DatasetError("damaged metadata: a number of more than 64 bits")
    return _varint_of((number << 1) ^ (number >> 63))


def list_of(structs: list[bytes]) -> bytes:
    """A list of structs, as it is written."""
    count = len(structs)
    head = bytes([count << 4 | STRUCT]) if count < 15 else bytes([15 << 4 | STRUCT])
    return head + (_varint_of(count) if count >= 15 else b"") + b"".join(structs)


def _varint_of(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _other_type(kind: int) -> DatasetError:
    return DatasetError(f"damaged metadata: a field of another type ({kind})")
