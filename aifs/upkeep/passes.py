"""A pass over the object sets of a store in use: the shared part. It walks records
(meta.slices.Walk), and a judge deals with due object sets. The rest waits for the next pass; only a
scrub's is on record."""

from dataclasses import dataclass, field
from typing import NamedTuple

from aifs.core.log import logger
from aifs.meta import paths
from aifs.meta.kv import Engine

_log = logger(__name__)

_FAILED_MAX = 1000


class Failed(NamedTuple):
    """An object set for which something cannot be done."""

    ino: int
    oid: int
    path: str
    reason: str


@dataclass(slots=True)
class Results:
    """Results of one pass, or of one round of it."""

    problem: str = ""
    """What failing means, for the log."""
    done: int = 0
    """How many were dealt with."""
    busy: int = 0
    """How many have to wait."""
    failing: int = 0
    """How many could not be dealt with."""
    failed: list[Failed] = field(default_factory=list)
    """Those, at most _FAILED_MAX."""
    is_logged: bool = False
    """The log says already that some cannot: later failures would say much the same."""

    def following(self) -> "Results":
        """Empty ones, for the next pass."""
        return Results(self.problem, is_logged=self.failing > 0)

    async def fail(self, engine: Engine, ino: int, oid: int, reason: str) -> None:
        if not self.is_logged:
            _log.info("%s: %s", self.problem, reason)
        self.is_logged = True
        self.failing += 1
        if len(self.failed) < _FAILED_MAX:
            path = await engine.view(paths.describe, ino) if ino else f"container {oid}"
            self.failed.append(Failed(ino, oid, path, reason))
