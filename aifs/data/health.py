"""Whether a data server works, and what its errors mean to callers."""

import logging
import threading
import time
from collections.abc import Callable, Iterable

from aifs.core.errors import FsError, StoreError, Unavailable, from_oserror

_log = logging.getLogger(__name__)

LOG_INTERVAL_S = 60.0
RETRY_S = 30.0

_PROVEN = frozenset(
    (
        "claim",
        "open",
        "probe",
        "reach",
        "read",
        "remove",
        "stat",
        "statvfs",
        "sync",
        "truncate",
        "write",
    )
)
"""Kinds of operation that a probe does, too."""


class ObjectFails(Unavailable):
    """This one object fails, though its server works, as a probe has shown."""


class Health:
    """State of a data server: 'failing' from an error until that kind of operation succeeds. Errors
    of single objects do not count. Used from any thread. At most one change a minute is logged."""

    def __init__(self, name: str, tell: Callable[[], None] = lambda: None) -> None:
        """``tell`` is called, in any thread, when it begins to fail, and when it works again."""
        self.last_error = ""
        """The message of the last operation that failed; '' if none has."""
        self.failing: set[str] = set()
        """Kinds of operation that failed when they were last tried."""
        self.noted = 0
        """How often something has failed."""
        self._hanging: set[str] = set()
        """Kinds of operation that have not been answered in time."""
        self._name = name
        self._tell = tell
        self._retry_s = time.monotonic()
        """When what fails is tried again, by time.monotonic()."""
        self._log_again_s = time.monotonic()
        """When a change of state is logged again, by the same clock."""
        self._lock = threading.Lock()
        """Held while the state changes."""

    @property
    def state(self) -> str:
        """'ok' or 'failing'."""
        return "failing" if self.failing or self._hanging else "ok"

    @property
    def usable(self) -> bool:
        """Whether new work should go to the server: not while it fails, except as a test."""
        return not self._hanging and (not self.failing or time.monotonic() >= self._retry_s)

    def failed(
        self,
        op: str,
        error: OSError | StoreError,
        where: str,
        works: Callable[[], bool] | None = None,
    ) -> FsError:
        """Note a failure; returns the error to raise. ``works`` tests the server: the failure may
        belong to one object."""
        answer: FsError
        if isinstance(error, StoreError):
            answer = Unavailable(str(error))
            if isinstance(error.__cause__, OSError):  # the marker may be right, but cannot be read
                answer = from_oserror(error.__cause__, f"{self._name}: {op} {where}")
        else:
            answer = from_oserror(error, f"{self._name}: {op} {where}")
        if not isinstance(answer, Unavailable):
            return answer  # full, over quota or a want of ours: it is not broken
        if works is not None and works():
            return ObjectFails(str(answer))
        with self._lock:
            self._note(op, answer)
        return answer

    def told(self, ops: Iterable[str], error: str) -> None:
        """Operations of these kinds have failed in another process of ours."""
        with self._lock:
            for op in ops:
                self._note(op, error)

    def hangs(self, op: str, detail: str) -> str:
        """A call does not end: the server is unusable until ``answers``. Returns the message."""
        with self._lock:
            self._hanging.add(op)
            self._note(op, f"{self._name}: {detail}")
            return self.last_error

    def answers(self) -> None:
        """All calls have ended."""
        with self._lock:
            hanging, self._hanging = self._hanging, set()
        for op in hanging:
            self.succeeded(op)

    def _note(self, op: str, answer: FsError | str) -> None:
        now = time.monotonic()
        first = not self.failing
        self.failing.add(op)
        self.noted += 1
        self.last_error = str(answer)
        self._retry_s = now + RETRY_S
        if first:
            self._tell()
        if first and now >= self._log_again_s:
            self._log_again_s = now + LOG_INTERVAL_S
            _log.warning("%s is failing: %s", self._name, answer)

    def works(self) -> None:
        """A probe has done what its operations need."""
        for op in _PROVEN & self.failing:
            self.succeeded(op)

    def succeeded(self, op: str) -> None:
        """Called while something fails, after each success."""
        with self._lock:
            if op in self.failing and op not in self._hanging:
                self.failing.remove(op)
                if not self.failing:
                    self._tell()
                    _log.info("%s works again", self._name)
