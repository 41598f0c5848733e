"""The last refused request of each user on each inode, and why; in memory."""

import errno
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aifs.core.errors import Busy, FsError, Invalid
from aifs.core.log import logger
from aifs.files import rights
from aifs.files.asks import ANY, Hint
from aifs.files.types import CallerLike

_log = logger(__name__)

_USERS_MAX = 256
_INODES_MAX = 64  # of each user
_REASON_MAX = 1024
_LOGGED, _LOGGED_S = 60, 60.0
"""Lines of the log that a user can cause in so many seconds."""


class Refusals:
    """The newest of ``_USERS_MAX`` users, on ``_INODES_MAX`` inodes each, so users do not
    compete."""

    def __init__(self) -> None:
        self._of: dict[int, dict[int, dict[str, Any]]] = {}
        self._logged: dict[int, tuple[float, int]] = {}
        """By user: since when lines of the log are counted, and their number."""

    @contextmanager
    def noted(self, ino: int, caller: CallerLike, request: str) -> Iterator[None]:
        """Keep the reason of a refusal inside for ``caller``; log that of a wrong request."""
        try:
            yield
        except FsError as error:
            if isinstance(error, Invalid | Busy) and self._may_log(caller.uid):
                reason = str(error)[:_REASON_MAX]
                _log.info("%s of inode %d is refused: %s", request, ino, reason)
            theirs = self._of.pop(caller.uid, {})
            theirs.pop(ino, None)
            theirs[ino] = {
                "request": request,
                "errno": error.errno,
                "reason": str(error)[:_REASON_MAX],
                "at_s": time.time(),
            }
            self._of[caller.uid] = theirs  # the newest is the last
            _cut(theirs, _INODES_MAX)
            _cut(self._of, _USERS_MAX)
            raise

    def _may_log(self, uid: int) -> bool:
        now_s = time.monotonic()
        began_s, lines = self._logged.pop(uid, (now_s, 0))
        if now_s - began_s >= _LOGGED_S:
            began_s, lines = now_s, 0
        self._logged[uid] = began_s, lines + 1
        _cut(self._logged, _USERS_MAX)
        return lines < _LOGGED

    def find(self, ino: int, caller: CallerLike) -> dict[str, Any] | None:
        """The last refused request of ``caller`` on this inode (core/ioctl.py); None: none
        known."""
        return self._of.get(caller.uid, {}).get(ino)

    HINTS = (
        Hint(
            "refused",
            ANY,
            "the last request here that you were refused, and why",
            rights.anybody,
            get=lambda refusals, ask: refusals.find(ask.ino, ask.caller),
        ),
    )

    def last(self, ino: int, since_s: float) -> str:
        """Why the last request about this inode since then was wrong, of any user; ''."""
        found = [
            theirs[ino]
            for theirs in self._of.values()
            if ino in theirs and theirs[ino]["errno"] in (errno.EINVAL, errno.EBUSY)
        ]
        newest = max(found, key=lambda one: one["at_s"], default=None)
        return newest["reason"] if newest is not None and newest["at_s"] >= since_s else ""


def _cut(entries: dict[int, Any], most: int) -> None:
    while len(entries) > most:
        del entries[next(iter(entries))]
