"""One group: its members, those that are missing, its state and its status. Pure: callers give
times in seconds of one clock (states: docs/design/commit.md)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

import trio

from aifs.core.errors import FsError, GroupCancelled, GroupTimeout, Invalid, MemberDied, Unavailable
from aifs.meta.groups import LIVE, GroupPart, GroupRecord, Pending, lacking_text

_AMOUNTS = (
    "bytes",
    "zero_bytes",
    "duplicate_bytes",
    "found_bytes",
    "distinct_bytes",
    "inline_bytes",
    "chunks",
)


@dataclass
class GroupReport:
    """Filled in while a group is stored."""

    bytes: int = 0
    """Of all members."""
    zero_bytes: int = 0
    """Those of them that are zeros."""
    duplicate_bytes: int = 0
    """In chunks that the group has more than once, but for the first."""
    found_bytes: int = 0
    """In chunks that the store had."""
    distinct_bytes: int = 0
    """In new chunks."""
    inline_bytes: int = 0
    """In the inodes of tiny files."""
    stored_bytes: int = 0
    """Bytes of the new chunks, compressed, each counted once."""
    hashed_bytes: int = 0
    """Those that were hashed."""
    compared_bytes: int = 0
    """Those that were equal to these, byte by byte."""
    chunks: int = 0
    """New ones."""
    verified_chunks: int = 0
    """Read back before more files lean on them."""
    replaced_chunks: int = 0
    """Bad or not protected enough, and stored anew for all."""
    hash_s: float = 0.0
    """How long hashing took."""
    plan_s: float = 0.0
    """How long planning took."""
    store_s: float = 0.0
    """How long storing took."""
    planned_s: float = 0.0
    """How long storing takes by the plan."""
    lower_bound_s: float = 0.0
    """How long it takes at least, by any plan."""
    servers: dict[int, int] = field(default_factory=dict)
    """By data server, the bytes that it got, redundancy included."""

    @property
    def saved_bytes(self) -> int:
        """Bytes that need not be stored: zeros, duplicates, and those that the store has."""
        return self.zero_bytes + self.duplicate_bytes + self.found_bytes

    def take_amounts(self, other: "GroupReport") -> None:
        """Take over ``other``'s amounts to store: a try that stored nothing is counted again."""
        for name in _AMOUNTS:
            setattr(self, name, getattr(other, name))

    def add(self, told: Mapping[str, Any]) -> None:
        """Add another host's report, as of ``to_json``. Amounts add up; times are parallel."""
        for name, value in told.items():
            if name == "servers":
                for server, size in value.items():
                    self.servers[int(server)] = self.servers.get(int(server), 0) + size
            elif name.endswith("_s"):
                setattr(self, name, max(getattr(self, name), value))
            else:
                setattr(self, name, getattr(self, name) + value)

    def to_json(self) -> dict[str, Any]:
        """As in ``user.aifs.group``."""
        found = asdict(self)
        return {
            key: round(value, 6) if isinstance(value, float) else value
            for key, value in found.items()
        }


_NAMED_MAX = 8  # ranks that a message names


class FileState(Enum):
    WRITING = "writing"  # somebody may change it
    BUFFERED = "buffered"  # closed
    PREPARING = "preparing"
    PREPARED = "prepared"  # its chunks are known
    STORING = "storing"
    DURABLE = "durable"  # on the capacity tier
    USUAL = "usual"  # left to the usual drain


@dataclass(slots=True, eq=False)
class File:
    """A file of a group."""

    ino: int
    """Its inode number."""
    size: int
    """In bytes, when it was last closed."""
    since: float
    """When it was closed for the first time."""
    state: FileState = FileState.BUFFERED
    """How far it has come."""
    counted: bool = True
    """Whether it counts as a part of the group, as it is now."""
    closes: int = 0
    """How often it was closed."""
    recorded: int = -1
    """Which of its closes is on record."""
    tries: int = 0
    """How often it could not be stored."""
    prepared: Any = None
    """What the drain knows of it."""


class DirectoryGroup:
    """A directory's group: it stores what its ranks write as one (``shares``), keeps the directory
    pending until all have committed (``pending``), or both."""

    def __init__(
        self, ino: int, record: GroupRecord, report: Any, now: float, now_ns: int, host: int = 0
    ) -> None:
        self.ino = ino
        self.host = host
        """The number of this host; 0 where the store has one."""
        self.record = record
        """What is on record of it, or about to be."""
        self.report = report
        """What its drain says."""
        self.committed: set[int] = set()
        """Ranks that have committed."""
        self.committing: set[int] = set()
        """Ranks whose commit is under way."""
        self.processes: dict[int, int] = {}
        """By rank: the process that lives and has joined as that rank."""
        self.markers: set[int] = set()
        """Processes that live, and have asked for the directory to be pending."""
        self.away: dict[int, float] = {}
        """By rank: since when its process has ended."""
        self.files: dict[int, File] = {}
        """By inode number."""
        self.elsewhere: dict[int, File] = {}
        """Those that count as closed on other hosts, of a group that commits by closing."""
        self.parts: dict[int, GroupPart] = {}
        """By host, what is on record of these, ours among them; none where the store has one."""
        self.closes = 0
        """How often files have been closed."""
        self.counted = 0
        """How many files count as closed."""
        self.since = math.inf
        """When the first one was closed."""
        self.drain_error = ""
        """What its drain has met last."""
        self.asked = trio.Event()
        """Set when the host that sees to it has asked for what is here to be stored."""
        self.kept: set[bytes] = set()
        """Digests of chunks that hosts have just stored for all of it."""
        self.settling = False
        """Whether its end after the last commit has begun."""
        self.sizes: dict[int, int] = {}
        """Of files of committed ranks, the first one first, if all must have one size."""
        self.publish_failure: FsError | None = None
        """What the publish at its end has failed with, in this mount."""
        self.event = trio.Event()
        """Set and replaced whenever something has changed that somebody may wait for."""
        self._now, self._now_ns = now, now_ns  # the same moment, of the clock and since the epoch

    def wake(self) -> None:
        self.event.set()
        self.event = trio.Event()

    @property
    def state(self) -> str:
        return self.record.state

    @property
    def is_live(self) -> bool:
        return self.record.state in LIVE

    @property
    def is_open(self) -> bool:
        return self.record.state == "open"

    @property
    def shares(self) -> bool:
        """Whether its files are stored together; else they are no members."""
        return self.record.options.shares

    @property
    def pending(self) -> Pending | None:
        return self.record.pending

    @property
    def is_ours(self) -> bool:
        """Whether this host sees to it; elsewhere it is only known, and its ranks may commit."""
        return self.record.host == self.host

    @property
    def own_part(self) -> GroupPart:
        """This host's part: what is on record of it, or all files where the store has one host."""
        return self.parts.get(self.host, GroupPart(has_files=not self.host))

    @property
    def others(self) -> list[int]:
        """The other hosts that have files of it."""
        return [host for host, part in self.parts.items() if part.has_files and host != self.host]

    @property
    def is_held(self) -> bool:
        """Whether somebody has to see to it still: it is live, or its directory is pending."""
        return self.is_live or self.pending is not None

    @property
    def is_settled(self) -> bool:
        """Whether nothing happens to it before the drain: it is published, if wanted before."""
        return self.record.state not in ("open", "committed")

    # --- who has committed ---

    @property
    def is_complete(self) -> bool:
        ranks = self.record.options.ranks
        if self.record.options.explicit:
            return len(self.committed) == ranks
        return self.closed_files >= ranks

    @property
    def closed_files(self) -> int:
        """How many files count as closed, on all hosts."""
        return self.counted + len(self.elsewhere)

    @property
    def recorded_state(self) -> str:
        """As ``state``, of its record."""
        return "committed" if self.record.state == "draining" else self.record.state

    @property
    def is_buffered(self) -> bool:
        """Whether all have committed, all is in the burst tier, and published if that is wanted."""
        return self.is_settled or (not self.shares and self.is_complete)

    def missing(self) -> list[int]:
        """The ranks that have not committed; none if the group commits by closing."""
        options = self.record.options
        return sorted(set(range(options.ranks)) - self.committed) if options.explicit else []

    def lacking(self) -> str:
        """What is missing, in words."""
        options = self.record.options
        if not options.explicit:
            lacking = options.ranks - self.closed_files
            return f"{lacking} of {options.ranks} files have not been closed"
        return lacking_text(self.missing(), options.ranks)

    def require_open(self) -> None:
        """Raises what it has ended with; Invalid if it is complete."""
        self.require_success()
        if not self.is_open:
            raise Invalid("all ranks of the group have committed already")

    def require_success(self) -> None:
        """Raises MemberDied, Invalid (sizes differ), GroupCancelled, GroupTimeout or Unavailable if
        it has failed."""
        record = self.record
        if record.state == "failed":
            raise (MemberDied if record.dead >= 0 else Invalid if record.unequal else Unavailable)(
                record.error
            )
        if record.state == "cancelled":
            raise GroupCancelled(record.error)
        if record.state == "expired":
            raise GroupTimeout(record.error)

    def require_rank(self, rank: int) -> None:
        """Raises Invalid unless ``rank`` may join or commit now, and the group's error."""
        self.require_success()
        self.require_may_commit(rank, again=False)

    def require_may_commit(self, rank: int, again: bool) -> None:
        """Raises Invalid: no such rank, committed and not ``again``, or ended and not pending."""
        options = self.record.options
        if not options.explicit:
            raise Invalid(
                "the group commits by closing files; for ranks that commit ask for commit=explicit"
            )
        if not 0 <= rank < options.ranks:
            raise Invalid(f"there is no rank {rank}: they are 0 to {options.ranks - 1}")
        if rank in self.committed | self.committing and not again:
            raise Invalid(f"rank {rank} has committed already")
        if self.pending is None:
            self.require_open()

    def require_free(self, rank: int) -> None:
        """Raises Invalid if a process that lives is this rank, here."""
        if rank in self.processes:
            raise Invalid(
                f"rank {rank} has been joined by process {self.processes[rank]}, which is alive"
            )

    def require_left_to(self, job: bytes) -> None:
        """Raises Invalid if somebody of the group, which is of another job, lives."""
        living = self.processes.keys() | self.committing | self.joined_elsewhere
        if living:
            present = self.record.options.job
            ranks = ", ".join(map(str, sorted(living)[:_NAMED_MAX]))
            whose = f"job {present.decode()}" if present else "another job"
            raise Invalid(
                f"job {job.decode()} cannot begin: {whose} is writing here, and its ranks {ranks} "
                "live; wait for its group, or cancel it; if they are one job, all its ranks have "
                "to name the same one"
            )

    @property
    def joined_elsewhere(self) -> set[int]:
        """Ranks of which processes live on other hosts, as far as is known."""
        ranks = {rank for part in self.parts.values() for rank in part.ranks}
        return ranks - self.processes.keys()

    def join(self, rank: int, process: int) -> None:
        """``process`` is this rank from now on. Raises Invalid."""
        self.require_rank(rank)
        self.require_free(rank)
        self.processes[rank] = process
        self.away.pop(rank, None)

    def left(self, rank: int | None, process: int, now: float) -> None:
        """The process, which has joined as this rank, or has marked the directory, has ended."""
        if rank is None:
            self.markers.discard(process)
            return
        if self.processes.get(rank) == process:
            del self.processes[rank]
            if rank not in self.committed:
                self.away[rank] = now

    def commit(self, rank: int) -> None:
        """The rank has committed, which is on record."""
        self.committed.add(rank)
        self.away.pop(rank, None)

    # --- time ---

    def deadline(self) -> float:
        """When ``overdue`` has something to say, unless something else happens before."""
        if not self.is_open or self.settling:
            return math.inf
        grace_s = self.record.options.grace_ms / 1e3
        dying = (
            since + grace_s for rank, since in self.away.items() if rank not in self.committing
        )
        timeout_s = self.record.options.timeout_ms / 1e3
        age_s = (self._now_ns - self.record.created_ns) / 1e9
        expires_at = self._now + timeout_s - age_s if timeout_s else math.inf
        return min(expires_at, *dying, math.inf)

    def overdue(self, now: float) -> GroupRecord | None:
        """What is to be recorded if a rank is dead, or the group's time is over."""
        if self.deadline() > now:
            return None
        grace_s = self.record.options.grace_ms / 1e3
        for rank, since in sorted(self.away.items()):
            if since + grace_s <= now and rank not in self.committing:
                return self.record._replace(
                    state="failed", dead=rank, error=f"rank {rank} ended before it committed"
                )
        timeout_s = self.record.options.timeout_ms / 1e3
        return self.record._replace(
            state="expired", error=f"after {timeout_s:g} s, {self.lacking()}"
        )

    # --- files ---

    def closed(self, ino: int, size: int, now: float) -> File:
        """Nobody has this file open for writing (any more)."""
        self.elsewhere.pop(ino, None)  # it may have been closed there before
        file = self.files.get(ino)
        if file is None:
            file = self.files[ino] = File(ino, size, now, counted=False)
            self.since = min(self.since, now)
        self.closes += 1
        self.counted += not file.counted
        file.size, file.counted, file.closes, file.tries = size, True, file.closes + 1, 0
        if file.state is FileState.WRITING:
            file.state = FileState.BUFFERED
        return file

    def opened(self, ino: int) -> None:
        """Somebody has opened it for writing."""
        file = self.files.get(ino)
        if file is not None and self.is_open:
            self.counted -= file.counted
            file.counted = False
            if file.state is not FileState.USUAL:
                file.state = FileState.WRITING

    def remove(self, ino: int) -> File:
        """It is no part of the group any more."""
        file = self.files.pop(ino)
        self.counted -= file.counted
        return file

    @property
    def closed_now(self) -> list[File]:
        """The files that count, on all hosts as far as is known."""
        return [*(file for file in self.files.values() if file.counted), *self.elsewhere.values()]

    @property
    def differs(self) -> bool:
        """Whether files that count have not all one size, though they must."""
        if not self.record.options.same_size:
            return False
        sizes = {file.size for file in self.closed_now}
        return len(sizes.union(list(self.sizes.values())[:1])) > 1

    def in_states(self, *states: FileState) -> list[File]:
        return [file for file in self.files.values() if file.state in states]


def describe_ranks(
    group: DirectoryGroup, most: int, hosts: Mapping[int, str]
) -> list[dict[str, Any]]:
    """The ranks, for people and programs; of more than ``most``, only so many uncommitted ones.
    ``hosts``: names, if there are several."""
    record = group.record
    if not record.options.explicit:
        return []
    ranks: Sequence[int] = range(record.options.ranks)
    if len(ranks) > most:
        ranks = group.missing()[:most]
    is_over = not group.is_live and record.dead < 0 and record.buffered_ns > 0

    def state(rank: int) -> str:
        if rank in group.committed or is_over:
            return "committed"
        if rank == record.dead:
            return "dead"
        if rank in group.processes or rank in group.joined_elsewhere:
            return "joined"
        return "away" if rank in group.away else "missing"

    lives = {rank: hosts.get(host) for host, part in group.parts.items() for rank in part.ranks}
    return [
        {
            "rank": rank,
            "state": state(rank),
            "pid": group.processes.get(rank),
            **({"host": lives.get(rank)} if hosts else {}),
        }
        for rank in ranks
    ]
