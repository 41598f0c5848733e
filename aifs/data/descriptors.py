"""Descriptors for all users that keep objects open, within what the process may have.

Open objects stay open because they will be used again. Those that nobody uses just now are closed
when others need descriptors, first those that have not been used for longest.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

import trio

from aifs.core import files

_OTHERS = (
    256  # files made ahead, containers that are written, the database, the kernel's connection
)
_ROOM_S = 5.0  # what is in use so long cannot be closed
_LOOK_S = 0.01


class DescriptorUser(Protocol):
    """A user that keeps objects open."""

    used: bool
    """Set whenever they are used."""

    def close_idle(self) -> int:
        """Close descriptors, which are opened again when they are needed, unless a call uses them;
        how many. Does not block.
        """


class Descriptors:
    """Of all users in a mount, as many as they are. Used from one trio thread."""

    def __init__(self) -> None:
        most = files.descriptors_max()
        self._max = self._room_at = max((most - _OTHERS) // 2, most // 4)
        self._users: list[Callable[[], Iterable[DescriptorUser]]] = []

    def add_users(self, users: Callable[[], Iterable[DescriptorUser]]) -> None:
        """``users`` tells who may give up descriptors."""
        self._users.append(users)

    def remove_users(self, users: Callable[[], Iterable[DescriptorUser]]) -> None:
        """They use none any more."""
        self._users.remove(users)

    async def find_room(self) -> None:
        """Descriptors may be opened on return. So what is open and not used takes none from
        others, however much it is.
        """
        count = files.descriptors()
        if count <= self._max:
            self._room_at = self._max
        if count <= self._room_at:
            return
        if not self._make_room():
            return
        with trio.move_on_after(_ROOM_S):  # workers close them, which may have much to do
            while files.descriptors() > self._max * 3 // 2:
                await trio.sleep(_LOOK_S)

    def _make_room(self) -> bool:
        """Close descriptors until a quarter of what we allow ourselves is free, first those of
        users who have not used them since this was last called; whether there were any to close.
        """
        excess = files.descriptors() - self._max * 3 // 4
        closed = 0
        users = [user for each in self._users for user in each()]
        for user in sorted(users, key=lambda user: user.used):
            if closed >= excess:
                break
            closed += user.close_idle()
        for user in users:
            user.used = False
        # Where calls use them all, it is not tried again before there are some more, or there have
        # been fewer.
        self._room_at = max(self._max, files.descriptors() + self._max // 8)
        return closed > 0
