"""Thrift's compact protocol without schemas, so that tests can damage a Parquet footer in one place
(Apache Thrift, "Thrift Compact protocol encoding")."""

from collections.abc import Callable, Iterator, Mapping

TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, _MAP, STRUCT = range(1, 13)

Change = Callable[["StructReader", int], bytes]
"""Passes a value of this type, and returns its new bytes."""


class StructReader:
    """Bytes that hold sound structs."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        """Where the next value begins."""

    def fields(self) -> Iterator[tuple[int, int]]:
        """Id and type of each field of the struct that begins here. The caller passes a field's
        value before it asks for the next one."""
        id = 0
        while head := self.data[self.at]:
            self.at += 1
            id = id + (head >> 4) if head >> 4 else _signed(self._varint())
            yield id, head & 15
        self.at += 1

    def elements(self) -> tuple[int, int]:
        """The type of the elements of a list, and how many follow."""
        head = self.data[self.at]
        self.at += 1
        return head & 15, head >> 4 if head >> 4 < 15 else self._varint()

    def skip(self, kind: int) -> None:
        """Pass the value of a field of this type."""
        if kind in (I16, I32, I64):
            self._varint()
        elif kind == BINARY:
            self.at += self._varint()
        elif kind == STRUCT:
            for _, of in self.fields():
                self.skip(of)
        elif kind in (LIST, SET):
            of, count = self.elements()
            if of in (TRUE, FALSE, BYTE):
                self.at += count
            else:
                for _ in range(count):
                    self.skip(of)
        elif kind in (DOUBLE, BYTE):
            self.at += 8 if kind == DOUBLE else 1

    def rewrite(self, changes: Mapping[int, Change]) -> bytes:
        """The struct that begins here, with ``changes`` to the fields of these ids."""
        out = bytearray()
        last = 0
        for id, kind in self.fields():
            start = self.at
            if change := changes.get(id):
                value = change(self, kind)
            else:
                self.skip(kind)
                value = self.data[start : self.at]
            assert 0 < id - last < 16
            out.append((id - last) << 4 | kind)
            out += value
            last = id
        return bytes(out) + b"\0"

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self.data[self.at]
            self.at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value


def _signed(value: int) -> int:
    return (value >> 1) ^ -(value & 1)


def list_of(structs: list[bytes]) -> bytes:
    """A list of a few structs, as it is written."""
    assert len(structs) < 15
    return bytes([len(structs) << 4 | STRUCT]) + b"".join(structs)
