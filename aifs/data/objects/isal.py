"""Arithmetic of erasure codes by Intel's ISA-L, called directly: without copies, and other threads
run meanwhile.

The library comes with pyeclib, which has it from the same source but copies all that passes
through. Functions are those of ISA-L's ``erasure_code.h``.
"""

import ctypes
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import metadata

_SONAME = "libisal.so.2"
_TABLE_BYTES = 32  # of one coefficient


@lru_cache
def _library() -> ctypes.CDLL | None:
    """The system's, else the one that pyeclib brings along."""
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
    """A writable view, which alone tells its address, with zeros up to ``length``."""
    if len(unit) == length and not unit.readonly:
        return unit
    whole = bytearray(length)
    whole[: len(unit)] = unit
    return memoryview(whole)


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(view))
