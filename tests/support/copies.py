"""Burst copies without a burst tier: files on a data server, under ids that nobody else uses; or
open files, for those who outlive the servers.
"""

import os
from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

from aifs.data.servers import Servers

_ids = count(1 << 40)

DESCRIPTORS = 0x8000
"""The burst directory of WithDescriptors."""


class Copies:
    """Gone with ``close``."""

    def __init__(self, servers: Servers) -> None:
        self._device = servers[next(iter(servers))]
        self._made: list[int] = []

    def __call__(self, content: bytes) -> tuple[int, int]:
        """A copy with this content, where each page of zeros is a hole; its place."""
        number = next(_ids)
        self._made.append(number)
        os.close(self._device.create_object((0, number)))
        with open(self.path(number), "r+b") as file:
            for start in range(0, len(content), 4096):
                if (page := content[start : start + 4096]).strip(b"\0"):
                    file.seek(start)
                    file.write(page)
            file.truncate(len(content))
        return self._device.id, number

    def path(self, number: int) -> str:
        return self._device.where((0, number))

    def close(self) -> None:
        for number in self._made:
            self._device.remove_object((0, number))
        self._made.clear()


class WithDescriptors:
    """Servers, and a burst directory whose copies are open files: their ids are descriptors of this
    process."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers

    def __getitem__(self, number: int) -> Any:
        if number != DESCRIPTORS:
            return self._servers[number]
        return SimpleNamespace(open_object=_reopen, storage=SimpleNamespace(close=os.close))

    def __iter__(self) -> Iterator[int]:
        return iter(self._servers)

    def __len__(self) -> int:
        return len(self._servers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._servers, name)


def _reopen(key: tuple[int, int], create: bool, write: bool) -> int:
    return os.open(f"/proc/self/fd/{key[1]}", os.O_RDONLY)
