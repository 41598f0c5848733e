"""The erasure code of coded files: Reed-Solomon over GF(2^8), systematic, with a Cauchy matrix
(isa_l_rs_cauchy).

Byte i of a parity unit depends on bytes i of the data units alone, so any range of a row can be
encoded or told apart from the rest. Where ISA-L can be called directly that is done (see isal);
else it goes by way of liberasurecode, with the same result, in slices that stay in the processor's
cache. That library puts a header before each fragment, which depends on its number and length only;
it is not stored, and put back for decoding. Its calls hold Python's lock, a few microseconds each.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Protocol

from pyeclib.ec_iface import ECDriver

from aifs.data.objects import isal
from aifs.layout.striped import Striped

_TYPE = "isa_l_rs_cauchy"
_SLICE = 16 << 10
_SMALLEST = 512
_HEADER = 80


class Code(Protocol):
    """``data`` units give ``parity`` more; any ``data`` of them all give the others. Used from any
    thread.
    """

    def encode(self, units: Sequence[memoryview], parity: Sequence[memoryview]) -> None:
        """Fill the ``parity`` units, which are as long as the first of ``units``; the others may be
        shorter, and count as if zeros followed."""

    def reconstruct(self, units: Mapping[int, memoryview], wanted: int, target: memoryview) -> None:
        """Fill ``target`` with unit ``wanted``; ``units`` are ``data`` others by number, ascending,
        none longer, those that are shorter count as if zeros followed."""


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
    return isal.Matrix(data, parity) if isal.is_available() else Fragments(data, parity)


def encode_rows(layout: Striped, spans: Iterable[tuple[int, memoryview, list[memoryview]]]) -> None:
    """Encode whole rows (the last may be the end of the file): of each span the bytes of the file,
    and memory for their parity.
    """
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
    """Few different ones, which the library takes without padding."""
    return min(max(1 << (length - 1).bit_length(), _SMALLEST), _SLICE)
