"""Circles of those who wait for locks of fcntl(2), over all hosts.

A wait in a circle never ends by itself. So one that lasts is looked at: the owner of the lock that
it waits for, the lock that this owner waits for, and so on, from host to host.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from typing import NamedTuple

import trio

from aifs.files.lock_homes import FCNTL, LockHomes
from aifs.files.lock_table import LockOwner

_SUSPECT_S = 0.02  # a wait that takes longer may be one in a circle
_SUSPECT_AGAIN_S = 1.0
_LOOK_S = 2.0  # how long a look for a circle may take
_CIRCLE_MAX = 256  # of owners that are looked at for one


class _Waiting:
    """A program that waits for an fcntl(2) lock."""

    def __init__(self, ino: int, owner: LockOwner) -> None:
        self.ino = ino
        self.owner = owner
        self.scope = trio.CancelScope()
        """Ends the wait, which would never end by itself."""
        self.look_s = trio.current_time() + _SUSPECT_S
        """When it is looked whether it is in a circle."""


class _Edge(NamedTuple):
    """Somebody waits for a lock that ``blocker`` holds."""

    ino: int
    session: int
    """The owners that wait, each with its ticket."""
    ticket: int
    blocker: LockOwner


class Circles:
    """The waits of this host's programs, and whether they are in circles."""

    def __init__(self, homes: LockHomes) -> None:
        self._homes = homes
        self._waiting: dict[int, _Waiting] = {}
        """By ticket."""
        self._changed = trio.Event()
        """Set when one more waits."""

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @contextmanager
    def watched(self, ino: int, owner: LockOwner, ticket: int) -> Iterator[None]:
        """Wait in it for a lock: it is left, as if that had returned, when the wait is in a
        circle."""
        waiting = self._waiting[ticket] = _Waiting(ino, owner)
        self._changed.set()
        try:
            with waiting.scope:
                yield
        finally:
            del self._waiting[ticket]

    # --- what hosts ask of each other ---

    async def waits(self, session: int, number: int) -> list[tuple[int, int]]:
        """The inodes and tickets that one of our owners waits with."""
        return [
            (waiting.ino, ticket)
            for ticket, waiting in self._waiting.items()
            if waiting.owner.number == number
        ]

    async def blockers(self, session: int, ino: int, of: int, ticket: int) -> list[LockOwner]:
        """The owners of the locks that a ticket of the session ``of`` waits for."""
        inode = self._homes.known(ino)
        return inode.tables[FCNTL].blockers(of, ticket) if inode and inode.is_home else []

    # --- looking for them ---

    async def run(self) -> None:
        """End waits that never end by themselves, until cancelled."""
        while True:
            self._changed = trio.Event()
            with trio.move_on_at(min((one.look_s for one in self._waiting.values()), default=inf)):
                await self._changed.wait()
            for ticket, waiting in list(self._waiting.items()):
                if waiting.look_s <= trio.current_time():
                    waiting.look_s = trio.current_time() + _SUSPECT_AGAIN_S
                    with trio.move_on_after(_LOOK_S):
                        if await self._is_in_circle(ticket, waiting):
                            waiting.scope.cancel()

    async def _is_in_circle(self, ticket: int, waiting: _Waiting) -> bool:
        """Whether all in a circle wait for the next one at one moment. Each has been seen to wait
        before any of them is seen to do so again, with the same ticket: so all did in between."""
        start = waiting.owner
        seen: dict[LockOwner, list[_Edge]] = {start: []}
        for owner in (queue := [start]):
            waits = [(waiting.ino, ticket)] if owner == start else await self._waits_of(owner)
            for ino, number in waits:
                for blocker in await self._blockers_of(ino, owner.session, number):
                    path = [*seen[owner], _Edge(ino, owner.session, number, blocker)]
                    if blocker == start:
                        return await self._still_waits(path)
                    if blocker not in seen and len(seen) < _CIRCLE_MAX:
                        seen[blocker] = path
                        queue.append(blocker)
        return False

    async def _still_waits(self, path: list[_Edge]) -> bool:
        for edge in path:
            if edge.blocker not in await self._blockers_of(edge.ino, edge.session, edge.ticket):
                return False
        return True

    async def _waits_of(self, owner: LockOwner) -> list[tuple[int, int]]:
        return await self._homes.ask(owner.session, ["waits", owner.number]) or []

    async def _blockers_of(self, ino: int, session: int, ticket: int) -> list[LockOwner]:
        home = await self._homes.recorded(ino)
        if not home:
            return []  # who waited there has been told so, and asks anew
        found = await self._homes.ask(home, ["blockers", ino, session, ticket]) or []
        return [LockOwner(*owner) for owner in found]
