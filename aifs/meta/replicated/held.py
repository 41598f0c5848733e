"""This host's delegated directories, in memory, and when to take more
(docs/design/replicated.md)."""

from collections.abc import Collection, Iterable

from aifs.meta.delegations import Covered, Delegate
from aifs.meta.memtable import Writes
from aifs.meta.recording import Recording
from aifs.meta.replicated.sessions import clock_s

GRANT_AFTER = 4
"""Changes of names by one host, without others between, that delegate a directory to it."""

MAX_DELEGATIONS = 256
"""That a host has; the oldest eighth is given up for another one."""

MAX_USES = 1024
"""Of so many directories it is kept in mind how often a host has used them."""

REST_S = 30.0
"""A directory that another host has needed is not delegated for so long."""


class Held:
    """Of one session. Does not suspend."""

    def __init__(self, delegate: Delegate) -> None:
        self.me = delegate.encode()
        """Of the record of a delegation that this session has."""
        self.keys: dict[bytes, float] = {}
        """The keys of these, the oldest first, and since when it has them, by ``clock_s``."""
        self._granted = 0
        """How many it has been given."""
        self._recalled = 0
        """How many of these other hosts have needed."""
        self._uses: dict[bytes, int] = {}
        """Of delegations that nobody has, how often this host alone has used the directory."""
        self._resting: dict[bytes, float] = {}
        """Until when directories are not delegated, by ``clock_s``."""

    def has_room(self, count: int) -> bool:
        """For so many more."""
        return len(self.keys) + count <= MAX_DELEGATIONS

    def grant(self, tx: Recording, covered: Covered, vacant: Collection[bytes]) -> None:
        """Delegate new directories, and ``vacant`` ones that this host uses alone, in the
        transaction. Removed ones are given up, and the oldest if too many."""
        more = {key for key in covered.made if key in vacant}
        more.update(key for key in vacant if key not in covered.ended and self._is_used(key))
        for key in covered.ended:
            if key in self.keys:
                tx.delete(key)
        for key in more:
            tx.put(key, self.me)
        surplus = len(self.keys) + len(more) - MAX_DELEGATIONS
        if surplus > 0:  # a transaction that gives up is not put ahead: so it gives up several
            surplus += MAX_DELEGATIONS >> 3
        for key in list(self.keys) if surplus > 0 else ():
            if surplus > 0 and key not in covered.delegations:
                tx.delete(key)
                surplus -= 1

    def _is_used(self, key: bytes) -> bool:
        """Whether this host alone has used the directory for some time."""
        if clock_s() < self._resting.get(key, 0.0):
            return False
        if len(self._uses) > MAX_USES:
            self._uses.clear()
        self._uses[key] = self._uses.get(key, 0) + 1
        return self._uses[key] >= GRANT_AFTER

    def note_own(self, writes: Writes) -> None:
        """This host has made these changes."""
        for key, value in writes.items():
            if key[:1] == b"D":
                self._uses.pop(key, None)
                if value == self.me:
                    self._granted += key not in self.keys
                    self.keys.setdefault(key, clock_s())
                else:
                    self.keys.pop(key, None)

    def note_others(self, writes: Writes) -> None:
        """Another host has made these changes."""
        if self._uses:
            for key in writes:
                if key[:1] == b"d":
                    self._uses.pop(b"D" + key[1:9], None)

    def recall(self, delegations: Collection[bytes]) -> None:
        """Another host needs these directories."""
        self._recalled += sum(key in self.keys for key in delegations)
        self.rest(delegations)

    def rest(self, delegations: Iterable[bytes]) -> None:
        """Several hosts need these directories."""
        now_s = clock_s()
        self._resting = {key: at_s for key, at_s in self._resting.items() if at_s > now_s}
        self._resting.update(dict.fromkeys(delegations, now_s + REST_S))

    def status(self) -> dict[str, int | float]:
        """The session's delegations and the oldest's age in seconds; all given, and recalled
        ones."""
        oldest_s = next(iter(self.keys.values()), None)
        return {
            "delegations": len(self.keys),
            "delegation_age_s": 0.0 if oldest_s is None else round(clock_s() - oldest_s, 3),
            "granted_delegations": self._granted,
            "recalled_delegations": self._recalled,
        }
