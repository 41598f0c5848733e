"""A transaction that remembers reads and writes, for engines that refuse it after conflicts."""

from collections.abc import Collection
from typing import Any

from aifs.meta.kv import patched
from aifs.meta.memtable import LeveledTransaction, Run

_MISSING: Any = object()

Patches = list[tuple[int, bytes]]
"""Offsets and bytes, in their order."""


class Recording(LeveledTransaction):
    """``writes``: the map's changes. Several functions may run with it as one transaction: ``mark``
    and ``undo`` take the last one's writes back."""

    __slots__ = ("_before", "host", "loose", "ranges", "reads", "relative")

    def __init__(self, *levels: Any, host: int = 0) -> None:
        super().__init__(*levels)
        self.host = host
        self.reads: set[bytes] = set()
        """Keys that were read."""
        self.loose: set[bytes] = set()
        """Keys that were read loosely, or patched."""
        self.ranges: list[list[bytes]] = []
        """[start, end) of what was read in order, as far as it was."""
        self.relative: dict[bytes, int | Patches] = {}
        """Additions and patches to keys that were not put before; also in ``writes``."""
        self._before: dict[bytes, tuple[Any, int | Patches | None]] = {}
        """The values that ``writes`` and ``relative`` had of the keys written since the mark."""

    def mark(self) -> None:
        """``undo`` goes back to what is here now."""
        self._before = {}

    @property
    def changed(self) -> Collection[bytes]:
        """The keys that have been written since ``mark``."""
        return self._before

    def undo(self) -> None:
        """Take back what has been written since ``mark``. What was read stays."""
        for key, (value, relative) in self._before.items():
            if value is _MISSING:
                self.writes.pop(key, None)
            else:
                self.writes[key] = value
            self.relative.pop(key, None)
            if relative is not None:
                self.relative[key] = relative
        self._before = {}

    def get(self, key: bytes) -> bytes | None:
        if key not in self.writes or key in self.relative:
            self.reads.add(key)
        return super().get(key)

    def get_loosely(self, key: bytes) -> bytes | None:
        if key not in self.writes or key in self.relative:
            self.loose.add(key)
        return super().get(key)

    def get_many(self, keys: Any) -> list[bytes | None]:
        return [self.get(key) for key in keys]

    def put(self, key: bytes, value: bytes) -> None:
        self._keep(key)
        super().put(key, value)
        self.relative.pop(key, None)

    def delete(self, key: bytes) -> None:
        self._keep(key)
        super().delete(key)
        self.relative.pop(key, None)

    def add(self, key: bytes, delta: int) -> None:
        before = self.relative.get(key, None if key in self.writes else 0)
        self._keep(key)
        if isinstance(before, int):
            value = int.from_bytes(super().get(key) or b"", "little", signed=True) + delta
            self.writes[key] = value.to_bytes(8, "little", signed=True)
            self.relative[key] = before + delta
        else:
            super().add(key, delta)
            self.relative.pop(key, None)

    def patch(self, key: bytes, offset: int, part: bytes) -> None:
        before = self.relative.get(key, None if key in self.writes else [])
        self._keep(key)
        if isinstance(before, list):
            self.writes[key] = patched(self.get_loosely(key), offset, part)
            others = [one for one in before if one[0] != offset or len(one[1]) != len(part)]
            self.relative[key] = [*others, (offset, part)]
        else:
            super().patch(key, offset, part)
            self.relative.pop(key, None)

    def _keep(self, key: bytes) -> None:
        if key not in self._before:
            self._before[key] = self.writes.get(key, _MISSING), self.relative.get(key)

    def _run(self, start: bytes, end: bytes) -> Run:
        read = [start, start]
        self.ranges.append(read)
        for item in super()._run(start, end):
            read[1] = item[0] + b"\0"
            yield item
        read[1] = end
