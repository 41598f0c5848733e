"""Histories that hosts of one namespace could have made, drawn without any: what the search of
``histories`` must explain."""

import errno
import math
import random
from collections.abc import Generator

from tests.support import histories
from tests.support.histories import CHANGES, SHOWN, UNKNOWN, Event, Name, State

_Steps = Generator[None, None, int]


class OneNamespace:
    """Each operation happens at a moment between its call and its return, and looks see any of the
    states that they may."""

    def __init__(self, hosts: int, has_kernel: bool, seed: int) -> None:
        """``has_kernel``: as of ``require_explained``."""
        self.events: list[Event] = []
        self._has_kernel = has_kernel
        self._chance = random.Random(seed)
        self._states = [State({}, frozenset())]
        self._directories: list[int] = []
        self._shown = [0] * hosts
        """The oldest state that a host may still see."""
        self._own: list[list[tuple[int, Event]]] = [[] for _ in range(hosts)]
        """What a host has changed, and the states that it made."""
        self._moment = 0
        self._is_over = False

    def play(self, steps: int, dies: bool = False) -> None:
        """One process at each host. ``dies``: host 0 does, in the middle."""
        running = {host: self._process(host) for host in range(len(self._own))}
        for step in range(steps):
            if dies and step == steps // 2:
                running.pop(0).close()
            next(running[self._chance.choice([*running])])
        self._is_over = True
        for process in running.values():
            for _ in process:
                pass

    def _now(self) -> int:
        self._moment += 1
        return self._moment

    def _process(self, host: int) -> Generator[None, None, None]:
        while not self._is_over:
            kind, args = histories.draw(self._chance, self._directories[-3:])
            if kind == "replace":
                temporary: Name = args[0][0], b"t%d" % host
                if (yield from self._change(host, "create", temporary)) > 0:
                    yield from self._change(host, "rename", temporary, args[0])
            elif kind == "link":
                if (ino := (yield from self._look(host, "open", args[0]))) > 0:
                    yield from self._change(host, "link", ino, args[1])
            elif kind in CHANGES:
                yield from self._change(host, kind, *args)
            else:
                yield from self._look(host, kind, *args)

    def _known(self, event: Event) -> int:
        """The oldest state that the event may see."""
        known = self._shown[event.host]
        for place, change in self._own[event.host]:
            if not self._has_kernel or not set(change.args).isdisjoint(event.args):
                known = max(known, place)
        return known

    def _change(self, host: int, kind: str, *args: object) -> _Steps:
        event = Event(host, kind, args, UNKNOWN, self._now(), math.inf)
        self.events.append(event)
        known = self._known(event)
        yield
        place, result = None, 0
        before = self._states[-1]
        if not (kind == "rename" and self._is_one_file(known, args)):
            if errors := before.errors(kind, event.args):
                result = -self._chance.choice(sorted(errors))
            else:
                if kind in ("create", "mkdir"):
                    result = event.made = 100 + len(self._states)
                if kind == "mkdir":
                    self._directories.append(result)
                self._states.append(before.after(event))
                place = len(self._states) - 1
        yield
        event.result, event.end = result, self._now()
        if place is not None:
            self._own[host].append((place, event))
            if kind in SHOWN and self._states[place] is not before:
                self._shown = [max(shown, place) for shown in self._shown]
        return result

    def _is_one_file(self, known: int, names: tuple[object, ...]) -> bool:
        """Whether the kernel takes two names for links of one file, and has nothing to rename."""
        if not self._has_kernel:
            return False
        first, second = (self._any(known).names.get(name) for name in names)  # type: ignore[call-overload]
        return first is not None and first == second and first not in self._directories

    def _any(self, known: int) -> State:
        return self._chance.choice(self._states[known:])

    def _look(self, host: int, kind: str, *args: object) -> _Steps:
        event = Event(host, kind, args, -errno.ENOENT, self._now(), math.inf)
        known = self._known(event)
        yield
        yield
        found = self._any(known).names.get(event.args[0])
        if kind == "list":
            if self._any(known).is_there(event.args[0]):
                event.result = self._listing(known, event.args[0])
        elif found is not None:
            links = 0 if found in self._directories else self._any(known).links(found)
            event.result = (found, links) if kind == "lookup" else found
        event.end = self._now()
        self.events.append(event)
        return event.result if isinstance(event.result, int) else 0

    def _listing(self, known: int, directory: int) -> set[bytes]:
        """All names that stayed, and some that did not."""
        seen = [
            {name for parent, name in state.names if parent == directory}
            for state in self._states[known:]
        ]
        stayed = set.intersection(*seen)
        fleeting = sorted(set.union(*seen) - stayed)
        return stayed | {name for name in fleeting if self._chance.random() < 0.5}
