"""How the ranks of a grouped write agree where there is no AIFS: through the directory
``.aifs-group.NAME``.

It is in the group's directory, or beside it if that is to be published, as
``.aifs-group.NAME.DIRECTORY``.

    rank.R        what rank R says (``rank_files``): {"attempt", "world", "host", "job", "state", "reason"}; committed,
                  with same_size: "file", "size" (of one of its files), "when"
    outcome.ID    how the attempt ID, which begins with what stands for the job, if there is one, has ended:
                  {"kind", "reason", "rank"}; appears once, and never changes
    deciding      locked by who decides

States: *joined*, *committed* (all files of the rank have their names, and are durable), *failed*,
*invalid* (it is of another group).

1. Rank 0 leads: its file names a new attempt. The others, if they are of the same job, or know of
   none, adopt it if rank 0 lives (on another host: if it has no outcome), or has committed and no
   other run has this job's name, and say so in their files. When rank 0 has died and comes again,
   or what they found was of a crashed job, there is another attempt, and they adopt that: what they
   have written and committed still counts.
2. Everybody watches all files, and decides when it sees that all have committed, one has failed,
   one's process has ended before it had committed (on this host), or the time is over. The first
   decision is the outcome, for all. The last one to commit decides before its commit returns, as
   its process may end then.
3. Who decides that all have committed publishes first, under the lock; if it dies, the next one
   goes on.
4. A rank that has seen the outcome removes its file; the last one also the rest. What a killed rank
   leaves is reused by the next group of that name.

A rank on another host is known to be dead only by the time-out, and so is one that dies before it
has heard of rank 0. The same name must not be used twice at a time.
"""

import hashlib
import json
import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from aifs.client import coordination, locks, rank_files
from aifs.client.coordination import (
    GroupError,
    GroupExpired,
    InvalidGroup,
    Options,
    RankDied,
    name_missing,
)
from aifs.client.publishing import publish
from aifs.client.rank_files import RankFile, RankIsTaken
from aifs.core import files, trees
from aifs.core.units import format_duration

_DELAY_MIN_S, _DELAY_MAX_S = 0.0005, 0.05
_PROMPT = 16  # ranks; of more each looks less often, as all look at all
_PATIENCE_S = 0.5  # a process that ends waits no longer for rank 0
_JOINED, _COMMITTED, _FAILED = "joined", "committed", "failed"
_COMPLETE, _DEAD, _EXPIRED, _INVALID, _TAKEN = "complete", "dead", "expired", "invalid", "taken"

Marks = dict[int, dict[str, Any]]
"""What each rank says."""


class PlainGroup:
    """A ``Coordinator``."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._ours = (
            hashlib.blake2b(options.job.encode(), digest_size=8).hexdigest() if options.job else ""
        )
        self._target = os.path.join(os.path.dirname(options.directory), options.publish)
        self._directory = os.stat(options.directory)
        parent, base = os.path.split(options.directory)
        self._place = (
            os.path.join(parent, f".aifs-group.{options.name}.{base}")
            if options.publish
            else os.path.join(options.directory, f".aifs-group.{options.name}")
        )
        self._host = files.boot_id()
        self._changing = threading.Lock()  # of the state and the file
        self._has_attempt = threading.Event()
        self._state, self._reason = _JOINED, ""
        self._committed: dict[str, Any] = {}
        self._dead_since: dict[int, float] = {}
        self._marks: dict[int, tuple[tuple[int, ...], dict[str, Any]]] = {}
        self._end = time.monotonic() + options.timeout_s
        self._file = self._join(self._path(f"rank.{options.rank}"))
        self._before = self._outcomes()
        self._attempt = self._ours + os.urandom(8).hex() if options.rank == 0 else ""
        self.identity = ""
        if self._attempt:
            self._say()

    def _join(self, path: str) -> RankFile:
        """Waits for a group of this process that has failed, and writes its last file."""
        for is_late in self._poll():
            is_ending = rank_files.is_ending(path)  # asked first: it may end meanwhile
            try:
                return RankFile(path)
            except RankIsTaken:
                if is_late or not is_ending:
                    rank = self._options.rank
                    why = f"rank {rank} has been joined by another process, which is alive"
                    if rank_files.is_own(path):
                        why = f"rank {rank} has been joined by this process, in a group that is not complete "
                        why += "yet; wait for that one, or cancel it"
                    raise InvalidGroup(f"{self._options}: {why}", rank) from None
        raise AssertionError

    def _path(self, name: str) -> str:
        return os.path.join(self._place, name)

    def _outcomes(self) -> set[str]:
        """The attempts that have ended."""
        names = os.listdir(self._place)
        return {name.removeprefix("outcome.") for name in names if name.startswith("outcome.")}

    def _say(self) -> None:
        self._file.say(
            attempt=self._attempt,
            world=self._options.world,
            host=self._host,
            job=self._options.job,
            state=self._state,
            reason=self._reason,
            **self._committed,
        )
        self.identity = self._attempt  # now that others may know of this rank
        self._has_attempt.set()

    def _change(self, state: str, reason: str = "") -> None:
        with self._changing:
            self._state, self._reason = state, reason
            if self._attempt:
                self._say()

    # --- what the rank does -----------------------------------------------------------------------

    def commit(self, file: str, size: int) -> None:
        """Waits, too, until it is known to which attempt. The last one decides here: its process
        may end when this returns."""
        if file:
            self._committed = {"file": file, "size": size, "when": time.time()}
        self._change(_COMMITTED)
        while not self._has_attempt.wait(_PATIENCE_S) and threading.main_thread().is_alive():
            pass
        if not self._attempt:
            return
        committed = self._committed_ranks(self._read_marks())
        judged = _unequal(committed)
        if not judged and len(committed) == self._options.world:
            judged = _outcome(_COMPLETE)
        if judged:
            outcome = next(filter(None, (self._decide(judged) for _ in self._poll())))
            self._file.is_ending = True
            if outcome["kind"] == _INVALID and outcome["rank"] == self._options.rank:
                raise self._failure(outcome)

    def _committed_ranks(self, marks: Marks) -> Marks:
        """What those ranks say that have committed to this attempt."""
        wanted = self._attempt, _COMMITTED
        return {
            rank: mark for rank, mark in marks.items() if (mark["attempt"], mark["state"]) == wanted
        }

    def fail(self, reason: str) -> None:
        self._file.is_ending = True
        self._change(_FAILED, reason)

    def watch(self) -> None:
        try:
            outcome = self._await_outcome()
        finally:
            self._file.is_ending = True
            self._has_attempt.set()
        if outcome["kind"] != _COMPLETE:
            raise self._failure(outcome)

    def _failure(self, outcome: dict[str, Any]) -> Exception:
        kind, reason, rank = outcome["kind"], outcome["reason"], outcome["rank"]
        if kind == _TAKEN:
            return FileExistsError(reason)
        kinds = {_DEAD: RankDied, _EXPIRED: GroupExpired, _INVALID: InvalidGroup}
        return kinds.get(kind, GroupError)(f"{self._options}: {reason}", rank)

    # --- watching ---------------------------------------------------------------------------------

    def _poll(self) -> Iterator[bool]:
        """Again and again, ever slower; says whether the time is over."""
        delay, longest = _DELAY_MIN_S, _DELAY_MAX_S * max(1.0, self._options.world / _PROMPT)
        while True:
            yield time.monotonic() > self._end
            time.sleep(delay)
            delay = min(delay * 1.5, longest)

    def _await_outcome(self) -> dict[str, Any]:
        refused_at = math.inf
        for is_late in self._poll():
            marks = self._read_marks()
            self._adopt(marks)
            if not self._attempt:
                now, other = time.monotonic(), self._other_job(marks)
                refused_at = (
                    min(refused_at, now + coordination.REFUSED_AFTER_S) if other else math.inf
                )
                if now > refused_at and marks[0]["host"] == self._host:  # else it may have died
                    return _outcome(_INVALID, other, self._options.rank)
                if is_late:
                    why = (
                        f"rank 0 has not begun, or had ended before rank {self._options.rank} came"
                    )
                    return _outcome(
                        _EXPIRED,
                        f"after {format_duration(self._options.timeout_s)}, {other or why}",
                        0,
                    )
                continue
            judged = self._judge(marks, is_late)
            found = self._decide(judged) if judged else self._read_outcome()
            if found:
                return found
        raise AssertionError

    def _read_marks(self) -> Marks:
        """Only what has changed is read again."""
        found = {}
        for rank in range(self._options.world):
            path = self._path(f"rank.{rank}")
            with suppress(FileNotFoundError):
                status = os.stat(path)
                stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
                old = self._marks.get(rank)
                found[rank] = old if old and old[0] == stamp else (stamp, rank_files.read(path))
        self._marks = found
        return {rank: mark for rank, (_, mark) in found.items() if mark}

    def _adopt(self, marks: Marks) -> None:
        """Find out which attempt this is, and take part in it."""
        attempt = self._attempt if self._options.rank == 0 else self._present_attempt(marks)
        if attempt in ("", self._attempt):
            return
        with self._changing:
            self._attempt = attempt
            if 0 in marks and marks[0]["world"] != self._options.world:
                self._state = _INVALID
                self._reason = (
                    f"rank {self._options.rank} is of a group of {self._options.world} ranks, "
                    f"rank 0 of one of {marks[0]['world']}"
                )
            self._say()

    def _present_attempt(self, marks: Marks) -> str:
        """Rank 0's, if it goes on; for a rank that is in none yet also one that has ended since it
        came. A rank stays in one that has ended: rank 0's next one is another group."""
        ended = self._outcomes()
        found = ""
        if self._attempt in ended:
            return self._attempt
        if 0 in marks and marks[0]["attempt"] not in ended and self._leads(marks[0]):
            found = marks[0]["attempt"]
        elif not self._attempt:
            found = min(
                (one for one in ended - self._before if one.startswith(self._ours)), default=""
            )
        return found if found.startswith(self._ours) else ""

    def _other_job(self, marks: Marks) -> str:
        """What is wrong if rank 0 lives, and is of another job, or is about to begin where that
        was; ''.
        """
        mark = marks.get(0, {"attempt": self._ours})
        if mark["attempt"].startswith(self._ours) or not self._lives(0, mark):
            return ""
        return (
            f"rank {self._options.rank} is of job {self._options.job!r}, rank 0 of job {mark.get('job')!r}; "
            f"if they are one, give all ranks the same name, job=..."
        )

    def _leads(self, mark: dict[str, Any]) -> bool:
        """Whether rank 0 lives, or has committed, and no other run can have left that."""
        is_ours = self._options.is_said and mark["attempt"].startswith(self._ours)
        return is_ours and mark["state"] == _COMMITTED or self._lives(0, mark)

    def _lives(self, rank: int, mark: dict[str, Any]) -> bool:
        return mark["host"] != self._host or locks.is_locked(self._path(f"rank.{rank}"))

    def _judge(self, marks: Marks, is_late: bool) -> dict[str, Any] | None:
        """How this attempt ends, if it does now."""
        present = {rank: mark for rank, mark in marks.items() if mark["attempt"] == self._attempt}
        for rank, mark in sorted(present.items()):
            if mark["state"] == _FAILED:
                return _outcome(_FAILED, f"rank {rank}: {mark['reason']}", rank)
            if mark["state"] == _INVALID:
                return _outcome(_INVALID, mark["reason"], rank)
        committed = self._committed_ranks(present)
        unequal = _unequal(committed)
        if unequal:
            return unequal
        missing = [rank for rank in range(self._options.world) if rank not in committed]
        if not missing:
            return _outcome(_COMPLETE)
        for rank in missing:
            if rank in present and self._is_dead(rank, present[rank]):
                return _outcome(_DEAD, f"rank {rank} ended before it committed", rank)
        if is_late:
            lacking = name_missing(missing)
            return _outcome(
                _EXPIRED, f"after {format_duration(self._options.timeout_s)}, {lacking}", missing[0]
            )
        return None

    def _is_dead(self, rank: int, mark: dict[str, Any]) -> bool:
        """Whether its process has ended, and its grace is over."""
        if self._lives(rank, mark) or rank_files.read(self._path(f"rank.{rank}")) != mark:
            self._dead_since.pop(rank, None)
            return False
        since = self._dead_since.setdefault(rank, time.monotonic())
        return time.monotonic() - since >= self._options.grace_s

    # --- the outcome ------------------------------------------------------------------------------

    def _read_outcome(self) -> dict[str, Any]:
        data = files.read_file(self._path(f"outcome.{self._attempt}"))
        return json.loads(data) if data else {}

    def _decide(self, judged: dict[str, Any]) -> dict[str, Any]:
        """The outcome: this one, or what another rank has decided before; {} if another one is
        deciding.
        """
        try:
            lock = RankFile(self._path("deciding"))
        except RankIsTaken:
            return {}
        try:
            found = self._read_outcome()
            if found:
                return found
            if judged["kind"] == _COMPLETE and self._options.publish:
                judged = self._publish(judged)
            path = self._path(f"outcome.{self._attempt}")
            temporary = trees.beside(path)
            trees.replace_file(temporary, json.dumps(judged).encode(), durable=False)
            try:
                trees.rename_new(temporary, path)  # once, even where there are no locks
            except FileExistsError:
                files.unlink(temporary)
            return self._read_outcome()
        finally:
            lock.let_go()

    def _publish(self, judged: dict[str, Any]) -> dict[str, Any]:
        try:
            if not self._is_published():
                publish(self._options.directory, self._target, ranks=None, latest=None, hash=False)
        except FileExistsError:
            return _outcome(
                _TAKEN,
                f"{self._target}: is there already, so {self._options.directory} stays as it is",
            )
        except Exception as error:
            return _outcome(_FAILED, f"cannot be published as {self._options.publish}: {error}")
        return judged

    def _is_published(self) -> bool:
        """By a rank that died before it could say so."""
        try:
            return os.path.samestat(os.stat(self._target), self._directory)
        except FileNotFoundError:
            return False

    def close(self) -> None:
        self._file.remove()
        with suppress(OSError):  # the next group of this name is here
            names = os.listdir(self._place)
            if not any(name.startswith("rank.") for name in names):
                for name in names:
                    files.unlink(self._path(name))
                files.remove_dir(self._place)


def _unequal(committed: Marks) -> dict[str, Any]:
    """The outcome, if a rank has named a file that has another size than that of the first rank;
    else {}.
    """
    sized = sorted((mark["when"], rank) for rank, mark in committed.items() if "file" in mark)
    for _, rank in sized[1:]:
        mark, first = committed[rank], sized[0][1]
        if mark["size"] != committed[first]["size"]:
            what = f"{mark['file']} has {mark['size']} bytes, not the {committed[first]['size']} of rank {first}"
            return _outcome(_INVALID, f"rank {rank}: {what}", rank)
    return {}


def _outcome(kind: str, reason: str = "", rank: int | None = None) -> dict[str, Any]:
    return {"kind": kind, "reason": reason, "rank": rank}
