"""The erasure code of coded files: Reed-Solomon over GF(2^8), systematic, Cauchy matrix
(isa_l_rs_cauchy).

Byte i of a parity unit depends on bytes i of the data units alone, so any range of a row can be
coded apart. ISA-L, which comes with pyeclib, is called directly if possible: without copies or
Python's lock. Else liberasurecode does it, in slices that fit the processor's cache, holding the
lock for some us. Its fragment headers depend on number and length alone; they are not stored.
"""

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from importlib import metadata
from typing import Protocol

from pyeclib.ec_iface import ECDriver

from aifs.layout.striped import Striped

_TYPE = "isa_l_rs_cauchy"
_SLICE = 16 << 10
_SMALLEST = 512
_HEADER = 80


class Code(Protocol):
    """``data`` units give ``parity`` more; any ``data`` give the others. Used from any thread."""

    def encode(self, units: Sequence[memoryview], parity: Sequence[memoryview]) -> None:
        """Fill the ``parity`` units, as long as the first of ``units``; shorter ones count as
        zero-filled."""

    def reconstruct(self, units: Mapping[int, memoryview], wanted: int, target: memoryview) -> None:
        """Fill ``target`` with unit ``wanted`` from ``data`` others by ascending number, none
        longer; shorter ones count as zero-filled."""


class Fragments:
    """A Code by way of liberasurecode."""

    def __init__(self, data: int, parity: int) -> None:
        self._data = data
        self.driver = ECDriver(k=data, m=parity, ec_type=_TYPE)

    def encode(self, units: Sequence[memoryview], parity: Sequence[memoryview]) -> None:
        """See Code."""
        length = len(units[0])
        step = _step(length)
        for start in range(0, length, step):
            pieces = [unit[start : start + step] for unit in units]
            data = (
                b"".join(pieces)
                if len(pieces[-1]) == step
                else b"".join(bytes(p).ljust(step, b"\0") for p in pieces)
            )
            fragments = self.driver.encode(data)
            end = min(start + step, length)
            for number, target in enumerate(parity):
                target[start:end] = memoryview(fragments[self._data + number])[
                    _HEADER : _HEADER + end - start
                ]

    def reconstruct(self, units: Mapping[int, memoryview], wanted: int, target: memoryview) -> None:
        """See Code."""
        length = len(target)
        step = _step(length)
        headers = _headers(self, step)
        for start in range(0, length, step):
            fragments = [
                headers[number] + bytes(unit[start : start + step]).ljust(step, b"\0")
                for number, unit in units.items()
            ]
            [fragment] = self.driver.reconstruct(fragments, [wanted])
            end = min(start + step, length)
            target[start:end] = memoryview(fragment)[_HEADER : _HEADER + end - start]

    def headers(self, length: int) -> list[bytes]:
        """The headers of fragments of ``length`` bytes."""
        return [fragment[:_HEADER] for fragment in self.driver.encode(bytes(length * self._data))]


@lru_cache(maxsize=64)
def code_of(data: int, parity: int) -> Code:
    return Matrix(data, parity) if is_available() else Fragments(data, parity)


def encode_rows(layout: Striped, spans: Iterable[tuple[int, memoryview, list[memoryview]]]) -> None:
    """Encode whole rows (the last may be the file's end): spans of bytes, and memory for parity."""
    row, unit = layout.row, layout.unit
    code = code_of(layout.width, layout.parity)
    for _, memory, parity in spans:
        for number, start in enumerate(range(0, len(memory), row)):
            units = [memory[at : at + unit] for at in range(start, start + row, unit)]
            at = number * unit
            code.encode(units, [target[at : at + len(units[0])] for target in parity])


@lru_cache(maxsize=1024)
def _headers(code: Fragments, length: int) -> list[bytes]:
    return code.headers(length)


def _step(length: int) -> int:
    return min(max(1 << (length - 1).bit_length(), _SMALLEST), _SLICE)


_SONAME = "libisal.so.2"
_TABLE_BYTES = 32  # of one coefficient


@lru_cache
def _library() -> ctypes.CDLL | None:
    """The system's library, else pyeclib's."""
    brought = (
        file.locate() for file in metadata.files("pyeclib") or () if file.name.startswith("libisal")
    )
    for path in (_SONAME, *map(str, brought)):
        try:
            library = ctypes.CDLL(path)
            library.gf_mul.restype = ctypes.c_ubyte
            library.ec_encode_data.restype = library.ec_init_tables.restype = None
            library.gf_gen_cauchy1_matrix.restype = None
        except (OSError, AttributeError):
            continue  # not there, or not what we take it for
        return library
    return None


def is_available() -> bool:
    return _library() is not None


def _isal() -> ctypes.CDLL:
    library = _library()
    assert library is not None  # or nobody would have made a Matrix
    return library


class Matrix:
    """The systematic Cauchy code of ``data`` and ``parity`` units. Used from any thread."""

    def __init__(self, data: int, parity: int) -> None:
        self._data = data
        self._rows = (ctypes.c_ubyte * ((data + parity) * data))()
        _isal().gf_gen_cauchy1_matrix(self._rows, data + parity, data)
        self._encoding = _tables(bytes(self._rows)[data * data :], data)
        self._decoding = lru_cache(maxsize=1024)(self._find_decoding)

    def encode(self, units: Sequence[memoryview], parity: Sequence[memoryview]) -> None:
        """See Code."""
        self._run(self._encoding, units, parity)

    def reconstruct(self, units: Mapping[int, memoryview], wanted: int, target: memoryview) -> None:
        """See Code."""
        self._run(self._decoding(tuple(units), wanted), list(units.values()), [target])

    def _find_decoding(self, known: tuple[int, ...], wanted: int) -> ctypes.Array:
        size = self._data
        rows = bytes(self._rows)
        square = (ctypes.c_ubyte * (size * size))(
            *b"".join(rows[n * size : (n + 1) * size] for n in known)
        )
        inverse = (ctypes.c_ubyte * (size * size))()
        if _isal().gf_invert_matrix(square, inverse, size):
            raise AssertionError("a square part of a Cauchy code's matrix is always regular")
        row = bytearray(size)
        for place in range(size):
            for inner in range(size):
                row[place] ^= _isal().gf_mul(
                    rows[wanted * size + inner], inverse[inner * size + place]
                )
        return _tables(bytes(row), size)

    def _run(
        self, tables: ctypes.Array, units: Sequence[memoryview], targets: Sequence[memoryview]
    ) -> None:
        length = len(targets[0])
        held = [_whole(unit, length) for unit in units]
        sources = (ctypes.c_void_p * len(held))(*map(_address, held))
        results = (ctypes.c_void_p * len(targets))(*map(_address, targets))
        _isal().ec_encode_data(length, len(held), len(targets), tables, sources, results)


def _tables(coefficients: bytes, columns: int) -> ctypes.Array:
    rows = len(coefficients) // columns
    tables = (ctypes.c_ubyte * (_TABLE_BYTES * len(coefficients)))()
    _isal().ec_init_tables(columns, rows, coefficients, tables)
    return tables


def _whole(unit: memoryview, length: int) -> memoryview:
    """A writable view, which shows its address, zero-filled to ``length``."""
    if len(unit) == length and not unit.readonly:
        return unit
    whole = bytearray(length)
    whole[: len(unit)] = unit
    return memoryview(whole)


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(view))
