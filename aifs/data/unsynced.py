"""Book-keeping of what has changed since it was last synced."""

import threading
from collections.abc import Hashable
from itertools import count
from typing import Generic, TypeVar

Thing = TypeVar("Thing", bound=Hashable)


class Unsynced(Generic[Thing]):
    """Keys of things (objects, directories) that are not durable yet. Used from any thread.

    A sync takes the generation of a thing first, syncs it, and then says that this generation is
    done: a change meanwhile is not forgotten, and whoever else asks for a sync meanwhile does not
    return before it is done.
    """

    __slots__ = ("_generations", "_lock", "_marks")

    def __init__(self) -> None:
        self._marks: dict[Thing, int] = {}
        self._generations = count()
        self._lock = threading.Lock()

    def mark(self, *things: Thing) -> None:
        """They have changed: called after the change, also after one that failed half-way."""
        with self._lock:
            for thing in things:
                self._marks[thing] = next(self._generations)

    def get(self, thing: Thing) -> int | None:
        """The generation of an unsynced thing."""
        return self._marks.get(thing)

    def snapshot(self) -> dict[Thing, int]:
        """All that is unsynced now, with generations."""
        with self._lock:
            return dict(self._marks)

    def done(self, thing: Thing, generation: int) -> None:
        """``thing`` has been synced since it had ``generation``."""
        with self._lock:
            if self._marks.get(thing) == generation:
                del self._marks[thing]
