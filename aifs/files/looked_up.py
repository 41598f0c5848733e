"""Names as the kernel has looked them up, where hosts share a store. Touches the records.

The kernel marks a directory as removed, for good (S_DEAD), when rmdir(2), or a rename(2) onto its
name, succeeds. If another host has just given the name to a second directory, the first one may
live on elsewhere, and would look empty here. So directories are removed and moved only if the
kernel has looked up the same.

Likewise, rename(2) succeeds without a request if both names lead to one inode for the kernel. If
another host has just moved it, the kernel must not learn the new name while it may know the old.
"""

import time
from array import array
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

from aifs.core.errors import FsError, NameTooLong, Stale
from aifs.core.names import NAME_MAX
from aifs.files.kernel import Kernel
from aifs.meta import keys
from aifs.meta.kv import Engine, ReadTransaction, Result, Transaction, answers
from aifs.meta.namespace import Name
from aifs.meta.records import decode_dentry

_KEPT_S = 10.0
"""More than the kernel keeps a name (4.5 s) before it looks it up anew."""

_SHARED_S = 600.0
"""How long a directory in which several hosts have changed names is taken for one where they do."""

_DIRECTORIES_MAX = 4096
"""The directories that were changed last, of which that is known."""

_CALL_S = 1.0
"""More than the kernel needs to look up all names of a call, and to repeat it."""

_KEPT, _KEPT_THREADS = b"stale", 32
"""The note for the next daemon: the threads that repeat their calls."""

_REPEAT_S = 0.02
"""For so long a thread is taken to repeat its call, which a second ESTALE would end."""


class LookedUp:
    """Names of the last seconds that other hosts have changed since the kernel looked them up."""

    def __init__(self, engine: Engine, kernel: Kernel) -> None:
        self._engine = engine
        self._kernel = kernel
        self._changed: dict[Name, float] = {}
        """When, on the monotonic clock; the oldest first."""
        self._unshown: dict[Name, int] = {}
        """Last change set of names whose inodes the kernel may know by older, unforgotten names."""
        self._shown: dict[Name, float] = {}
        """When others were, as in ``_changed``."""
        self._refused: dict[tuple[Name, int], float] = {}
        """When lookups of names by threads were answered with ESTALE, as in ``_changed``."""
        until = time.monotonic() + _CALL_S
        self._repeating = dict.fromkeys(array("q", kernel.kept.notes.get(_KEPT, b"")), until)
        """When any lookup by a thread was; those of a daemon before: until they have repeated
        it."""
        self._elsewhere: dict[int, float] = {}
        """Directories in which other hosts have changed names, as in ``_changed``."""
        self._here: dict[int, float] = {}
        """Those in which this host has."""

    def changed(self, name: Name, ino: int, seq: int) -> None:
        """Another host has changed the name, in this change set: now to *ino* (0: nothing)."""
        _note(self._changed, name, _KEPT_S)
        if ino and self._kernel.may_know(ino):
            self._unshown[name] = seq
        self._note_change(self._elsewhere, name[0])

    def changed_here(self, *directories: int) -> None:
        """A request of this host changes names in them."""
        for directory in directories:
            self._note_change(self._here, directory)

    def _note_change(self, times: dict[int, float], directory: int) -> None:
        was_shared = self.is_shared(directory)
        _note(times, directory, _SHARED_S)
        if len(times) > _DIRECTORIES_MAX:
            del times[next(iter(times))]
        if not was_shared and self.is_shared(directory):
            self._kernel.keep_no_names(directory)

    def is_shared(self, directory: int) -> bool:
        """Whether several hosts change names in it. The kernel keeps none of these: it could not
        forget them while it holds the directory's lock for a request that waits for other hosts."""
        here, elsewhere = self._here.get(directory), self._elsewhere.get(directory)
        if here is None or elsewhere is None:
            return False
        return min(here, elsewhere) > time.monotonic() - _SHARED_S

    def shown(self, name: Name, seq: int) -> None:
        """The kernel has forgotten what the name led to before this change set."""
        if self._unshown.get(name) == seq:
            del self._unshown[name]
            _note(self._shown, name, _CALL_S)

    def require_shown(self, name: Name, thread: int) -> None:
        """Raise Stale, once, if the kernel may know the name's inode by an older name that led
        there when this call began: it repeats the call of this thread, and looks all names up anew.

        Waiting would not help: rename(2) holds the locks that forgetting needs.
        """
        if not (self._unshown or self._shown):
            return
        now = time.monotonic()
        since, began = now - _CALL_S, now - _REPEAT_S
        is_new = name in self._unshown or self._shown.get(name, since) > since
        was_refused = self._refused.get((name, thread), since) > since
        if is_new and not was_refused and self._repeating.get(thread, began) <= began:
            _note(self._refused, (name, thread), _CALL_S)
            _note(self._repeating, thread, _REPEAT_S)
            if self._kernel.kept.is_on:
                threads = array("q", [*self._repeating][-_KEPT_THREADS:])
                self._kernel.kept.note(_KEPT, threads.tobytes())
            raise Stale("another host has changed the name just before")

    def asked(self, name: Name) -> None:
        """The kernel looks it up. What changes from now on it may not know."""
        self._changed.pop(name, None)

    async def of(self, *names: Name) -> Mapping[Name, int]:
        """The inodes that the kernel knows by these names (0: none); {}: not needed. Callers'
        requests hold their directories' locks, so it learns nothing meanwhile. Raises Stale if it
        may know another state."""
        found = await self._engine.view(_find, names)
        if not self._changed.keys().isdisjoint(names):
            raise Stale("another host has changed the name just before")
        return found

    def outdated(self, error: FsError, why: str) -> FsError:
        """Stale, so that the kernel looks up anew the name by which a request failed."""
        return Stale(why)


class LookedUpAlone(LookedUp):
    """Where the store has one host: the kernel hears of every change, because it asks for it."""

    def changed_here(self, *directories: int) -> None:
        pass

    async def of(self, *names: Name) -> Mapping[Name, int]:
        return {}

    def outdated(self, error: FsError, why: str) -> FsError:
        return error


def _note(times: dict[Any, float], key: Hashable, kept_s: float) -> None:
    now = time.monotonic()
    times.pop(key, None)
    times[key] = now
    while times[oldest := next(iter(times))] < now - kept_s:
        del times[oldest]


@answers
def if_looked_up(
    tx: Transaction, names: Mapping[Name, int], function: Callable[..., Result], *args: Any
) -> Result:
    """Run the function if the names lead to these inodes (RMDIR, RENAME). Raises Stale."""
    if _find(tx, names) != names:
        raise Stale("another host has changed the name just before")
    return function(tx, *args)


def _find(tx: ReadTransaction, names: Iterable[Name]) -> dict[Name, int]:
    found = {}
    for parent, name in names:
        if len(name) > NAME_MAX:
            raise NameTooLong()
        record = tx.get(keys.dentry(parent, name))
        found[parent, name] = 0 if record is None else decode_dentry(record).ino
    return found
