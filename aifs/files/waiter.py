"""Waiting for files to be drained: until all of them are, whatever it takes, or until one of them
cannot be."""

import math

import trio

from aifs.core.errors import Busy, FsError

GRACE_S = 5.0
"""How long a file may be open for writing, or mapped, until ``strict`` waiting ends: a close(2) is
told to us late."""


class Waiter:
    """Somebody who waits for some files, by inode number.

    ``strict``: the wait ends with the error of a drain that fails, and with Busy where somebody may
    write to a file.
    """

    def __init__(self, inos: set[int], strict: bool) -> None:
        self._inos = inos
        self._strict = strict
        self._blocked: dict[int, float] = {}  # since when
        self._error: FsError | None = None
        self._event = trio.Event()

    async def wait(self) -> None:
        """Until all are drained, or gone."""
        while self._inos:
            ino, since = min(self._blocked.items(), key=lambda item: item[1], default=(0, math.inf))
            with trio.move_on_at(since + GRACE_S) as scope:
                await self._event.wait()
            if self._error is not None:
                raise self._error
            if scope.cancelled_caught:
                raise Busy(f"inode {ino} is open for writing, so it cannot be drained")
            self._event = trio.Event()

    def done(self, ino: int) -> None:
        self._blocked.pop(ino, None)
        self._inos.discard(ino)
        if not self._inos:
            self._event.set()

    def failed(self, ino: int, error: FsError) -> None:
        """A drain of the file has failed; it will be tried again."""
        if self._strict and ino in self._inos:
            self._error = error
            self._event.set()

    def blocked(self, ino: int) -> None:
        """The file cannot be drained before somebody closes it."""
        if self._strict and ino in self._inos and ino not in self._blocked:
            self._blocked[ino] = trio.current_time()
            self._event.set()
