"""Random operation sequences that can be replayed and made smaller.

An operation is a tuple of plain values that means something in every state (it may fail there, of
course). So any subset of a failing sequence is a sequence too, and the shortest one that still
fails is found by leaving operations out.
"""

import random
from collections.abc import Callable

Op = tuple
Generator = Callable[[random.Random], Op]


class Weighted:
    """Chooses among named generators in proportion to their weights; begins with those of
    ``base``.
    """

    def __init__(self, base: "Weighted | None" = None) -> None:
        self._generators: dict[str, Generator] = dict(base._generators) if base else {}
        self._weights: list[int] = list(base._weights) if base else []

    def add(self, weight: int) -> Callable[[Generator], Generator]:
        """Register a generator under its function's name."""

        def register(generator: Generator) -> Generator:
            self._generators[generator.__name__] = generator
            self._weights.append(weight)
            return generator

        return register

    @property
    def kinds(self) -> list[str]:
        return list(self._generators)

    def sequence(self, seed: int, length: int) -> list[Op]:
        rng = random.Random(seed)
        names = rng.choices(self.kinds, self._weights, k=length)
        return [(name, *self._generators[name](rng)) for name in names]


def shrink(ops: list[Op], fails: Callable[[list[Op]], bool], attempts: int = 150) -> list[Op]:
    """A shorter sequence for which ``fails`` is still true; gives up after so many attempts."""
    chunk = max(1, len(ops) // 2)
    while True:
        start = 0
        while start < len(ops):
            candidate = ops[:start] + ops[start + chunk :]
            if attempts == 0:
                return ops
            attempts -= 1
            if candidate and fails(candidate):
                ops = candidate
            else:
                start += chunk
        if chunk == 1:
            return ops
        chunk = max(1, chunk // 2)


def listing(ops: list[Op]) -> str:
    """The sequence as Python source, to paste into a regression test."""
    return "[\n" + "".join(f"    {op!r},\n" for op in ops) + "]"


def payload(seed: int, length: int) -> bytes:
    """The bytes that a write operation of this seed writes: never zero, so that holes show."""
    block = bytes(byte or 1 for byte in random.Random(seed).randbytes(min(length, 977)))
    return (block * (length // 977 + 1))[:length]
