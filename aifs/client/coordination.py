"""How the ranks of a grouped write agree, and how that fails. On a mount the daemon knows
(``mounted_group``); elsewhere each rank is a group (``LoneRank``)."""

import hashlib
import os
import re
import threading
from dataclasses import dataclass
from typing import Protocol

from aifs.client.checkpoints.manifest import CheckpointError
from aifs.client.checkpoints.publishing import name_ranks
from aifs.client.checkpoints.ranks import RanksMissing
from aifs.core.units import format_duration


class GroupError(CheckpointError):
    """A grouped write has failed for all ranks; nothing was published. ``rank``: at fault, or
    None."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class RankDied(GroupError):
    """The process of a rank has ended before the rank had committed."""


class GroupExpired(GroupError, RanksMissing):
    """Ranks have not committed in time; the message names them."""


class InvalidGroup(GroupError, ValueError):
    """A request contradicts the group: another number of ranks, a rank twice, a second commit."""


REFUSED_AFTER_S = 10.0
"""How long a rank that finds an earlier run's files waits for its peers' new group."""


JOB_NAME = re.compile(r"[!-+\--~]{0,63}")  # printable, no comma

JOB_VARIABLES = (
    "SLURM_JOB_ID",
    "SLURM_RESTART_COUNT",
    "TORCHELASTIC_RUN_ID",
    "PMIX_NAMESPACE",
    "SLURM_STEP_ID",
    "TORCHELASTIC_RESTART_COUNT",
)
"""Variables by which launchers tell jobs and runs apart. Hosts may count the last two each for
itself; the ranks of a mount are on one host."""


@dataclass(frozen=True)
class RankOptions:
    """One rank's view of a group."""

    name: str
    """The group's name for people; the same in all ranks."""
    rank: int
    """This one's number, from 0 on."""
    world: int
    """How many ranks there are."""
    directory: str
    """Where the files go: an absolute path."""
    chunk: int
    """Bytes that are deduplicated at a time."""
    timeout_s: float
    """Until all ranks have committed."""
    grace_s: float
    """How long a rank that died may stay away."""
    publish: str
    """The name that the directory gets, beside itself, when all ranks have committed, or ''."""
    same_size: bool
    """All files must have one size."""
    job: str
    """An id that the ranks of this job have, and of no other one, or ''."""
    is_said: bool
    """Whether the ranks gave ``job``, the same in no other run; else the environment did."""

    def __str__(self) -> str:
        return f"{self.directory}: group {self.name}"


class Coordinator(Protocol):
    """One rank's part in a group. Construction makes this process the rank, or raises InvalidGroup,
    OSError; it waits for no rank. Every function may block; ``watch`` runs in another thread."""

    def commit(self, file: str, size: int) -> None:
        """Commit this rank's durable files. ``file``: one of them, and its size, if all must have
        one; else ''. Raises GroupError, OSError; InvalidGroup if the size is not that of the first
        rank's, which fails the group for all."""

    def fail(self, reason: str) -> None:
        """This rank gives up, and so the group fails. Nothing, if it has an outcome already."""

    def watch(self) -> None:
        """Wait until all have committed, all is durable, and published if wanted. Raises
        GroupError, FileExistsError if the final name is taken, OSError. Called once."""

    def close(self) -> None:
        """After ``watch``; nothing else is called afterwards."""


class LoneRank:
    """A ``Coordinator`` outside AIFS: it hears of no other rank, so its own commit is the end."""

    def __init__(self, options: RankOptions) -> None:
        self._options = options
        self._failure: GroupError | None = None
        self._has_ended = threading.Event()

    def commit(self, file: str, size: int) -> None:
        self._has_ended.set()

    def fail(self, reason: str) -> None:
        if not self._has_ended.is_set():
            rank = self._options.rank
            self._failure = GroupError(f"{self._options}: rank {rank}: {reason}", rank)
            self._has_ended.set()

    def watch(self) -> None:
        options = self._options
        if not self._has_ended.wait(options.timeout_s):
            waited, missing = format_duration(options.timeout_s), name_missing([options.rank])
            raise GroupExpired(f"{options}: after {waited}, {missing}", options.rank)
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        pass


def name_missing(missing: list[int]) -> str:
    """``rank 3 has not committed``, ``ranks 0, 2 have not committed``."""
    return f"{name_ranks(missing)} {'has' if len(missing) == 1 else 'have'} not committed"


def job_of_environment() -> str:
    """The same in all ranks of a job on this host; different in other jobs and runs, if the
    launcher tells these apart; '' if unknown."""
    job = "/".join(value for value in map(os.environ.get, JOB_VARIABLES) if value)
    return (
        job
        if JOB_NAME.fullmatch(job)
        else hashlib.blake2b(os.fsencode(job), digest_size=16).hexdigest()
    )
