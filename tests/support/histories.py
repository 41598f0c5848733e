"""Histories of operations that several hosts have done at once, and whether one namespace explains
them.

What is demanded (docs/design/replicated.md): all changes that succeeded happened one after the
other, each between its call and its return, on what those before it had made. What only looks (a
lookup, a listing, a refusal) may have looked at any state from the newest one that it must know of
to the newest one that it may know of. It must know of what its own host has done before, and of all
up to a change that was shown before it began: ``rename``, ``unlink`` and ``rmdir`` are shown when
they return, creates are not.

``require_explained`` looks for such an order (Wing and Gong's search: a change may be next if it
began before all that is left has ended).
"""

import errno
import math
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from aifs.core.errors import FsError

ROOT = 1
Name = tuple[int, bytes]
"""A name in a directory, which its inode number stands for."""

SHOWN = {"rename", "unlink", "rmdir"}
"""Changes that all hosts see when they have returned."""

_MAKES = {"create", "mkdir"}
CHANGES = {"link", *_MAKES, *SHOWN}
BUDGET = 200_000
"""Changes that are tried before the search is given up."""

_AT_ONCE = 100
"""More changes than a host does at once."""

UNKNOWN = "unknown"
"""The result of a change whose host died meanwhile: it was done, or is done later, or never."""

_FOUND = -1
"""Stands for any inode number of which its maker has never heard. Each of those is another number
below, while it is searched."""

_REFUSALS = {errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY, errno.EISDIR, errno.ENOTDIR, errno.ESTALE}


@dataclass(slots=True)
class Event:
    """One operation. Times are of any one clock.

    ``args``: of ``lookup``, ``open``, ``unlink``, ``rmdir``, ``create`` and ``mkdir`` a Name; of
    ``list`` a directory; of ``link`` an inode number and a Name; of ``rename`` two Names.
    ``result``: an errno (negative); UNKNOWN; else of ``create`` and ``mkdir`` the new inode number,
    of ``open`` that of the file, of ``lookup`` a pair, inode number and number of links (0: of a
    directory), of ``list`` a set of names.
    """

    host: int
    kind: str
    args: tuple[Any, ...]
    result: Any
    begin: float
    end: float
    missing: list[Any] = field(default_factory=list)
    """Of a look, while it is searched: what no state has explained so far."""
    made: int = 0
    """Of ``create`` and ``mkdir``, while it is searched: the inode number; < 0: nobody knows it."""

    @property
    def is_change(self) -> bool:
        return self.kind in CHANGES and not (isinstance(self.result, int) and self.result < 0)


class State(NamedTuple):
    names: dict[Name, int]
    directories: frozenset[int]

    def is_there(self, directory: int) -> bool:
        return directory == ROOT or directory in self.names.values()

    def links(self, ino: int) -> int:
        return sum(_is_same(other, ino) for other in self.names.values())

    def is_empty(self, directory: int) -> bool:
        return all(parent != directory for parent, _ in self.names)

    def errors(self, kind: str, args: tuple[Any, ...]) -> set[int]:
        """Why a change would be refused; empty: it is done."""
        if kind == "link":
            ino, new = args
            return self._new(new) | (set() if self.links(ino) else {errno.ENOENT})
        if kind in _MAKES:
            return self._new(args[0])
        if kind == "rename":
            return self._rename(*args)
        found = self.names.get(args[0])
        if found is None:
            return {errno.ENOENT}
        if kind == "unlink":
            return {errno.EISDIR} if found in self.directories else set()
        if found not in self.directories:
            return {errno.ENOTDIR}
        return set() if self.is_empty(found) else {errno.ENOTEMPTY}

    def _new(self, name: Name) -> set[int]:
        if not self.is_there(name[0]):
            return {errno.ENOENT}
        return {errno.EEXIST} if name in self.names else set()

    def _rename(self, old: Name, new: Name) -> set[int]:
        moved, replaced = self.names.get(old), self.names.get(new)
        if moved is None or not self.is_there(new[0]):
            return {errno.ENOENT}
        if replaced is None or replaced == moved:
            return set()
        if moved in self.directories:
            if replaced not in self.directories:
                return {errno.ENOTDIR}
            return set() if self.is_empty(replaced) else {errno.ENOTEMPTY}
        return {errno.EISDIR} if replaced in self.directories else set()

    def after(self, event: Event) -> "State":
        """What a change makes of it. It itself, if that is nothing."""
        if event.kind == "rename" and len({self.names.get(name) for name in event.args}) == 1:
            return self
        names, directories = dict(self.names), self.directories
        if event.kind in _MAKES:
            names[event.args[0]] = event.made
            if event.kind == "mkdir":
                directories |= {event.made}
        elif event.kind == "link":
            linked, name = event.args
            names[name] = next(ino for ino in names.values() if _is_same(ino, linked))
        elif event.kind == "rename":
            old, new = event.args
            names[new] = names.pop(old)
        else:
            del names[event.args[0]]
        return State(names, directories)


def _questions(event: Event) -> list[Any]:
    """What states must explain of a look: each part may be explained by another state, as the
    kernel has each name and each attribute by itself."""
    if isinstance(event.result, int) and event.result < 0:
        return [-event.result]
    if event.kind == "lookup":
        return ["ino", "links"]
    if event.kind == "list":
        return ["seen", "unseen"]
    return ["ino"]


def _explained(event: Event, part: Any, states: Sequence[State]) -> bool:
    if event.kind == "list":
        return _listed(event, part, states)
    for state in states:
        if isinstance(part, int):
            if event.kind in CHANGES:
                if part in state.errors(event.kind, event.args):
                    return True
            elif part == errno.ENOENT and event.args[0] not in state.names:
                return True
        elif part == "links":
            if event.result[1] in (0, state.links(event.result[0])):
                return True
        else:
            if _is_same(state.names.get(event.args[0]), _found(event)):
                return True
    return False


def _listed(event: Event, part: Any, states: Sequence[State]) -> bool:
    """A listing has each name that stays all the while, and none that never was."""
    directory, found = event.args[0], event.result
    if isinstance(part, int):
        return part == errno.ENOENT and any(not state.is_there(directory) for state in states)
    listings = [{name for parent, name in state.names if parent == directory} for state in states]
    if part == "seen":
        return found <= set.union(*listings)
    return found >= set.intersection(*listings)


def _found(event: Event) -> int:
    """The inode number that a look found, or why it found none."""
    return event.result[0] if isinstance(event.result, tuple) else event.result


def _is_same(ino: int | None, found: int) -> bool:
    return ino == found or (found == _FOUND and ino is not None and ino < 0)


class Unexplained(AssertionError):
    pass


class _Frame(NamedTuple):
    """A state of the search."""

    possible: list[tuple[int, State]]
    """Changes that may be next, with what they make, and have not been tried."""
    undo: list[tuple[int, list[Any]]]
    """What looks were explained here."""


class _Search:
    def __init__(self, events: Sequence[Event], has_kernel: bool = False) -> None:
        self.has_kernel = has_kernel
        self.events = [replace(event) for event in sorted(events, key=lambda event: event.begin)]
        self.done = bytearray(len(events))
        self.first = 0
        """All before are done."""
        self.states = [State({}, frozenset())]
        self.changes: list[int] = []
        """The change that made each state but the first."""

    def window(self) -> list[int]:
        """What may be next: it began before all that is left has ended."""
        while self.first < len(self.done) and self.done[self.first]:
            self.first += 1
        found, end = [], math.inf
        for index in range(self.first, len(self.events)):
            event = self.events[index]
            if event.begin >= end:
                break
            if not self.done[index]:
                end = min(end, event.end)
                found.append(index)
        return [index for index in found if self.events[index].begin < end]

    def known(self, event: Event) -> int:
        """The oldest state that a look may have looked at."""
        place = len(self.changes)
        while place and not self._must_know(place, event):
            place -= 1
        if self.has_kernel:  # which learns of a change of this host when that returns
            for earlier in range(place - 1, max(0, place - _AT_ONCE), -1):
                change = self.events[self.changes[earlier - 1]]
                if change.host == event.host and change.end >= event.begin:
                    place = earlier - 1
        return place

    def _must_know(self, place: int, event: Event) -> bool:
        """Whether who looks must know of a change, and of all before it."""
        change = self.events[self.changes[place - 1]]
        if change.end >= event.begin or self._is_idle(place):
            return False  # what changes nothing is not shown
        if change.host != event.host:
            return change.kind in SHOWN
        # What is before it, of other hosts, the kernel of this one may not have heard of.
        return not self.has_kernel or not set(change.args).isdisjoint(event.args)

    def look(self, indices: Sequence[int]) -> Iterator[tuple[int, list[Any]]]:
        """Explain what is to be explained of looks; what was missing of those where that is less
        now."""
        for index in indices:
            event = self.events[index]
            states = self.states[self.known(event) :]
            missing = [part for part in event.missing if not _explained(event, part, states)]
            if len(missing) < len(event.missing):
                yield index, event.missing
                event.missing = missing
                self.done[index] = not missing

    def possible(self, indices: Sequence[int]) -> list[tuple[int, State]]:
        found = [(index, after) for index in indices for after in self._after(self.events[index])]
        return sorted(found, key=lambda one: self.events[one[0]].end)

    def _after(self, event: Event) -> list[State]:
        """What a change may make of the state that there is now; none: it is refused."""
        state = self.states[-1]
        found = [] if state.errors(event.kind, event.args) else [state.after(event)]
        if self.has_kernel and event.kind == "rename" and event.result == 0 and state not in found:
            states = self.states[self.known(event) :]
            old, new = ({one.names.get(name) for one in states} for name in event.args)
            if (old & new) - {None}:
                found.append(state)
        return found

    def run(self) -> None:
        """Depth first; where there is no way on, the last change is another one."""
        made = {one.result for one in self.events if one.is_change and one.kind in _MAKES}
        for number, event in enumerate(self.events, 2):
            self._prepare(event, made, -number)
        stack: list[_Frame] = []
        tried = deepest = 0
        seen: set[Any] = set()
        """From where there is no way on, or it is being looked for."""
        told = ""
        while True:
            undo: list[tuple[int, list[Any]]] = []
            while True:  # what is explained lets others begin
                window = self.window()
                looked = list(self.look([i for i in window if not self.events[i].is_change]))
                undo += looked
                if not any(self.done[index] for index, _ in looked):
                    break
            if all(
                self.done[index] or self.events[index].result == UNKNOWN
                for index in range(self.first, len(self.events))
            ):
                return
            if len(self.changes) >= deepest:
                deepest = len(self.changes)
                told = _told(
                    [self.events[index] for index in self.changes[-8:]],
                    self.states[-1],
                    [self.events[index] for index in window],
                )
            key = self._key(window)
            possible = []
            if key not in seen:
                seen.add(key)
                possible = self.possible([i for i in window if self.events[i].is_change])
            stack.append(_Frame(possible, undo))
            while not stack[-1].possible:
                self._take_back(stack.pop().undo)
                if not stack:
                    raise Unexplained(told)
                self._undo()
            tried += 1
            if tried > BUDGET:
                raise Unexplained(f"given up after {tried} changes: {told}")
            index, after = stack[-1].possible.pop(0)
            self.states.append(after)
            self.changes.append(index)
            self.done[index] = True

    @staticmethod
    def _prepare(event: Event, made: set[Any], unheard: int) -> None:
        """``made``: inode numbers that their makers have heard of. ``unheard``: stands for what
        this event makes, if its maker has not."""
        event.missing = [] if event.is_change else _questions(event)
        if event.kind in _MAKES:
            event.made = event.result
        if event.result == UNKNOWN:
            event.end, event.made = math.inf, unheard
        if event.kind == "link" and event.args[0] not in made:
            event.args = (_FOUND, event.args[1])
        elif event.kind == "open" and event.result not in made and event.result > 0:
            event.result = _FOUND
        elif event.kind == "lookup" and isinstance(event.result, tuple):
            if event.result[0] not in made:
                event.result = _FOUND, 0

    def _key(self, window: Sequence[int]) -> Any:
        """All that decides how it can go on: what is left, and the states that looks, and kernels
        that take two names for one file, may have looked at."""
        looks = [index for index in window if not self.events[index].is_change]
        # Those that have not begun begin later.
        looking = window if self.has_kernel else looks
        begin = min((self.events[index].begin for index in looking), default=self._now(window))
        base, hosts = len(self.changes), set()
        while base:  # of two that others were shown at least one counts, whoever looks
            change = self.events[self.changes[base - 1]]
            if change.end < begin and change.kind in SHOWN and not self._is_idle(base):
                hosts.add(change.host)
                if len(hosts) > 1 or not self.has_kernel:
                    break
            base -= 1
        if self.has_kernel:
            for place in range(base - 1, max(0, base - _AT_ONCE), -1):
                if self.events[self.changes[place - 1]].end >= begin:
                    base = place - 1
        last = self.done.rfind(1) + 1
        return (
            self.first,
            bytes(self.done[self.first : last]),
            tuple(tuple(self.events[index].missing) for index in looks),
            frozenset(self.states[base].names.items()),
            tuple(
                (self.changes[place - 1], self._is_idle(place))
                for place in range(base + 1, len(self.states))
            ),
        )

    def _is_idle(self, place: int) -> bool:
        """Whether the change that made this state has changed nothing."""
        return self.states[place] is self.states[place - 1]

    def _now(self, window: Sequence[int]) -> float:
        """What has not begun begins after that."""
        return min(self.events[index].end for index in window)

    def _undo(self) -> None:
        self.states.pop()
        index = self.changes.pop()
        self.done[index] = False
        self.first = min(self.first, index)

    def _take_back(self, looked: list[tuple[int, list[Any]]]) -> None:
        for index, missing in reversed(looked):
            self.events[index].missing = missing
            self.done[index] = False
            self.first = min(self.first, index)


def _told(before: list[Event], state: State, stuck: list[Event]) -> str:
    lines = ["no order of the changes explains what was seen. Up to here there is one:"]
    lines += [f"    {_line(event)}" for event in before]
    lines += [f"which makes {state.names}", "and of these one must be next:"]
    lines += [f"    {_line(event)} {event.missing or ''}" for event in stuck]
    return "\n".join(lines)


def _line(event: Event) -> str:
    result = event.result
    if isinstance(result, int) and result < 0:
        result = errno.errorcode[-result]
    return (
        f"host {event.host} {event.kind}{event.args!r} -> {result} "
        f"[{event.begin:.6f}, {event.end:.6f}]"
    )


def require_explained(events: Sequence[Event], has_kernel: bool = False) -> None:
    """``has_kernel``: it knows each name by itself, so that a host may have heard of one and not of
    another one before that is shown; a rename between names that it takes for links of one file
    does nothing; and it refuses links to a file of which it has seen the last name go that it knew
    of. ESTALE, for directories that other hosts change all the time, needs no explanation. Raises
    Unexplained, which tells where the search got stuck."""
    events = [one for one in events if one.result != -errno.ESTALE]
    if has_kernel:
        gone = -errno.ENOENT
        events = [one for one in events if (one.kind, one.result) != ("link", gone)]
    _Search(events, has_kernel).run()


# --- drawing what to do ---------------------------------------------------------------------------

FILES = [b"f0", b"f1", b"f2"]
DIRECTORIES = [b"d0", b"d1"]
_WEIGHTS = dict(create=3, replace=4, link=2, unlink=3, rename=4, mkdir=2, rmdir=2)
_WEIGHTS |= dict(lookup=5, open=4, list=2)


def draw(chance: random.Random, directories: Sequence[int]) -> tuple[str, tuple[Any, ...]]:
    """An operation: as of an Event, or ``replace`` and a Name: a new file is renamed to it."""
    kind = chance.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
    parent = chance.choice([ROOT, *directories])
    name = (parent, chance.choice(FILES))
    directory = (ROOT, chance.choice(DIRECTORIES))
    if kind == "list":
        return kind, (parent,)
    if kind in ("mkdir", "rmdir"):
        return kind, (directory,)
    if kind == "rename":
        if chance.random() < 0.2:
            return kind, (directory, (ROOT, chance.choice(DIRECTORIES)))
        return kind, (name, (chance.choice([ROOT, *directories]), chance.choice(FILES)))
    if kind in ("lookup", "unlink") and chance.random() < 0.2:
        return kind, (directory,)
    if kind == "link":
        return kind, (name, (chance.choice([ROOT, *directories]), chance.choice(FILES)))
    return kind, (name,)


class HostDied(Exception):
    pass


class History:
    """What hosts do, as they have done it."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.contents: dict[int, bytes] = {}
        """Of files, by inode number; the others are empty."""
        self.dead: set[int] = set()
        """Hosts of which nothing is demanded any more: an operation that fails there may have been
        done."""
        self._makers: dict[int, Event] = {}
        """Of directories: who has made one of such a mode last."""
        self._made: set[int] = set()
        """Directories whose makers are known."""

    def count(self, host: int) -> int:
        """The operations of a host."""
        return sum(event.host == host for event in self.events)

    @contextmanager
    def doing(self, host: int, kind: str, *args: Any) -> Iterator[Event]:
        """The block does an operation, and puts its result; a refusal is one, too, and is raised.
        Raises HostDied."""
        event = Event(host, kind, args, UNKNOWN, time.monotonic(), math.inf)
        if kind in CHANGES:
            self.events.append(event)  # also if it is never heard what became of it
        try:
            yield event
        except (FsError, OSError) as error:
            if error.errno not in _REFUSALS:
                if host in self.dead:
                    raise HostDied from error
                raise AssertionError(f"{_line(event)}: {error!r}") from error
            event.result = -error.errno
            raise
        finally:
            if event.result != UNKNOWN:
                event.end = time.monotonic()
                if kind not in CHANGES:
                    self.events.append(event)

    def make_directory(self, event: Event, mode: int) -> None:
        """The event is about to. ``mode``: no other directory of its time has it."""
        self._makers[mode] = event

    def find_directory(self, ino: int, mode: int) -> None:
        """Its maker may have been too late to look, as another host had moved it by then."""
        maker = self._makers.get(mode)
        if ino not in self._made and maker is not None:
            self._made.add(ino)
            if maker.result == UNKNOWN:
                maker.result = ino
