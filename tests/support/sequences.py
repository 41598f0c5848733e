"""Random operation sequences that can be replayed and made smaller.

An operation is a tuple of plain values that means something in every state (it may fail there, of
course). So any subset of a failing sequence is a sequence too, and the shortest one that still
fails is found by leaving operations out.
"""

import random
from collections.abc import Callable
from typing import Any

Op = tuple
Draw = Callable[[random.Random], Any]


def one_of(*values: Any) -> Draw:
    """Draws one of *values*. Those that are drawn themselves are drawn before."""
    return lambda rng: rng.choice([_drawn(value, rng) for value in values])


def below(end: int) -> Draw:
    return lambda rng: rng.randrange(end)


def between(first: int, last: int) -> Draw:
    return lambda rng: rng.randint(first, last)


def chance(of: float) -> Draw:
    """Draws True that often."""
    return lambda rng: rng.random() < of


def _drawn(value: Any, rng: random.Random) -> Any:
    return value(rng) if callable(value) else value


class Weighted:
    """A table of operations, which are drawn in proportion to their weights; it begins with the
    rows of *base*."""

    def __init__(self, base: "Weighted | None" = None) -> None:
        self._draws: dict[str, Draw] = dict(base._draws) if base else {}
        self._weights: list[int] = list(base._weights) if base else []

    def add(self, kind: str, weight: int, *arguments: Any, draw: Draw | None = None) -> None:
        """Add a row. A function among *arguments* draws one, any other value is one; or *draw*
        draws them all together."""
        self._draws[kind] = draw or (lambda rng: tuple(_drawn(each, rng) for each in arguments))
        self._weights.append(weight)

    @property
    def kinds(self) -> list[str]:
        return list(self._draws)

    def sequence(self, seed: int, length: int) -> list[Op]:
        rng = random.Random(seed)
        names = rng.choices(self.kinds, self._weights, k=length)
        return [(name, *self._draws[name](rng)) for name in names]


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
