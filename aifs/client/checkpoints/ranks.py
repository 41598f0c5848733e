"""How the ranks of a job agree, through a directory, on one checkpoint: ``.NAME.ranks`` beside
``.NAME.pending``.

Needed for more than one rank alone. Rank 0 leads; each file has one writer and is replaced at once.

    attempt   rank 0: {"attempt": ID, "ranks": N, "failed": ""}; a new ID whenever rank 0 begins
    rank.R    rank R: {"attempt": ID, "state": STATE, "token": TOKEN, "plan": ID, "names": [...],
              "reason": ""}
    plan      rank 0: {"plan": ID, "tokens": [TOKEN, ...], "sizes": {name: bytes}}: the files that
              belong to it

States: *written*: R has left the body of its ``with``; *names* have changed since it came.
*committed*: its share of the plan is durable and hashed. *again*: R was started anew after it had
written, and waits until its mark is removed. *failed*: R gave up.

1. A rank comes, and notes which files are there: leftovers of a crashed attempt, work of faster
   ranks. If it finds its own mark, in the attempt that is the present one, it had died after
   that. Then it says *again*, and waits until rank 0 removes the mark, which it does not do while
   it publishes, so no rank writes into a directory that is being published; or begins anew.
2. It writes its files, says *written*, with the attempt that it finds. When the attempt changes,
   because rank 0 came later or has died and begins anew, it says so again: its files are still
   there.
3. When all have written in rank 0's attempt, rank 0 removes each file that no rank has changed
   (leftovers), and plans: for the marks with just these tokens, so no rank takes a plan of a
   crashed attempt for its own one. No rank writes any more, so files are shared out by size: each
   rank syncs and hashes its share, and commits.
4. When all have committed to that plan, rank 0 publishes and removes the directory. The others see
   that the attempt is gone and that the manifest under the final name has its ID.

A rank that fails says so, and all others fail when they see it; the last one removes everything. A
rank that dies says nothing: the others wait for it until their time is over, then name it.
"""

import errno
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from aifs.client.checkpoints import manifest
from aifs.client.checkpoints.attributes import delays
from aifs.client.checkpoints.hashing import list_files, sync_files
from aifs.client.checkpoints.manifest import CheckpointError
from aifs.client.checkpoints.publishing import (
    name_ranks,
    pending_path,
    withdraw_commits,
    write_commit,
)
from aifs.core import files, trees
from aifs.core.errors import TimeoutReached
from aifs.core.units import format_duration

_REMOVALS = 8

Stamps = dict[str, tuple[int, ...]]
"""Name of a file -> what changes when it is written."""


class RanksMissing(TimeoutReached, TimeoutError):
    """Other ranks did not do their part in time; the message names them."""


def stamps(directory: str) -> Stamps:
    """The files that are in the directory now, with their stamps. Raises OSError."""
    return {
        name: (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        for name, found in list_files(directory).items()
    }


def share(sizes: dict[str, int], ranks: int, rank: int) -> list[str]:
    """The files of ``rank``: the largest first, each to the rank with least; the same
    everywhere."""
    load = [(0, 0, number) for number in range(ranks)]  # bytes, files
    mine = []
    for name in sorted(sizes, key=lambda name: (-sizes[name], os.fsencode(name))):
        size, count, number = min(load)
        load[number] = (size + sizes[name], count + 1, number)
        if number == rank:
            mine.append(name)
    return mine


class Ranks:
    """One rank's part in one checkpoint; ``begin``, then ``gather``, or ``leave`` if it fails."""

    def __init__(self, target: str, ranks: int, rank: int, timeout_s: float, hash: bool) -> None:
        parent, name = os.path.split(target)
        self.target = target
        self.pending = str(pending_path(target))
        """The directory that ranks write to."""
        self.directory = os.path.join(parent, f".{name}.ranks")
        """Where they leave their marks."""
        self.ranks, self.rank = ranks, rank
        self.attempt = ""
        """The id of the attempt that this rank takes part in; '': of none yet."""
        self._token = ""
        """Of the mark that it has left last: a plan is for marks with just these tokens."""
        self._state = "written"  # what is waited for
        self._given_up = ""  # an attempt that had failed before this rank came
        self._hash = hash
        self._timeout_s = timeout_s
        self._marks: dict[int, tuple[tuple[int, int], dict[str, Any]]] = {}
        """By rank, the stamp of its mark when it was last read, and its content."""
        self._before: Stamps = {}
        """The files that were in ``pending`` when this rank came, with their stamps."""

    # --- the directory ----------------------------------------------------------------------------

    def _path(self, name: str) -> str:
        return os.path.join(self.directory, name)

    def _read(self, name: str) -> dict[str, Any]:
        """{} if it is not there."""
        data = manifest.read_document(self._path(name))
        return json.loads(data) if data else {}

    def _write(self, name: str, **value: Any) -> None:
        trees.replace_file(self._path(name), json.dumps(value).encode(), durable=False)

    def _remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            files.unlink(self._path(name))

    def _mark(
        self, state: str, plan: str = "", names: list[str] | None = None, reason: str = ""
    ) -> None:
        self._write(
            f"rank.{self.rank}",
            attempt=self.attempt,
            state=state,
            token=self._token,
            plan=plan,
            names=names or [],
            reason=reason,
        )

    def read_marks(self) -> dict[int, dict[str, Any]]:
        """The marks of all ranks except this one; only marks that have changed are read again."""
        found = {}
        for name in os.listdir(self.directory):
            kind, _, number = name.partition(".")
            if kind != "rank" or not number.isdecimal() or int(number) == self.rank:
                continue
            rank = int(number)
            with suppress(FileNotFoundError):
                status = os.stat(self._path(name))
                stamp = (status.st_ino, status.st_mtime_ns)
                old = self._marks.get(rank)
                found[rank] = old if old and old[0] == stamp else (stamp, self._read(name))
        self._marks = found
        return {rank: mark for rank, (_, mark) in found.items() if mark}

    def _poll(self, lack: Callable[[], str]) -> Iterator[None]:
        """Yields, ever slower. Raises RanksMissing, with the text of ``lack``, after the
        time-out."""
        end = time.monotonic() + self._timeout_s
        for _ in delays():
            yield
            if time.monotonic() > end:
                raise RanksMissing(
                    f"{self.target}: after {format_duration(self._timeout_s)}, {lack()}"
                )

    def _lacking(self) -> str:
        """Name the ranks that are not that far."""
        if not self.attempt:
            return "rank 0 had not begun"
        marks = self.read_marks() if os.path.isdir(self.directory) else {}
        states = ("committed", self._state)
        done = {
            rank
            for rank, mark in marks.items()
            if mark["attempt"] == self.attempt and mark["state"] in states
        }
        rest = sorted(set(range(1, self.ranks)) - done - {self.rank})
        return f"{name_ranks(rest or [0])} had not {self._state}"

    # --- every rank -------------------------------------------------------------------------------

    def begin(self) -> None:
        """Wait until this rank may write its files. Raises CheckpointError, RanksMissing,
        OSError."""
        trees.make_dir(self.directory)
        if self.rank == 0:
            self.attempt = os.urandom(16).hex()
            self._write("attempt", attempt=self.attempt, ranks=self.ranks, failed="")
            withdraw_commits(self.pending)
        else:
            found = self._read("attempt")
            self._given_up = found["attempt"] if found and found["failed"] else ""
            self._come_again()
        self._before = stamps(self.pending)

    def _come_again(self) -> None:
        mine = self._read(f"rank.{self.rank}")
        if not mine or self._read("attempt").get("attempt", mine["attempt"]) != mine["attempt"]:
            return
        self.attempt = mine["attempt"]
        is_stale = self._is_published()  # and is to be replaced now
        with suppress(FileNotFoundError):  # it is being removed: published this very moment
            self._mark("again")
        for _ in self._poll(lambda: "rank 0 has not taken notice that this rank was started anew"):
            is_heard = not self._read(f"rank.{self.rank}")
            if is_heard or self._read("attempt").get("attempt", self.attempt) != self.attempt:
                break
        if not is_stale and self._is_published():
            raise FileExistsError(
                errno.EEXIST, "it was published before this rank was started anew", self.target
            )
        trees.make_dir(self.pending)
        trees.make_dir(self.directory)

    def _is_published(self) -> bool:
        found = manifest.read(self.target)
        return found is not None and found.attempt == self.attempt != ""

    def _changed(self) -> list[str]:
        return [
            name for name, stamp in stamps(self.pending).items() if self._before.get(name) != stamp
        ]

    def leave(self, reason: str) -> None:
        """This rank gives up, and says so. The last one that does removes everything."""
        if not os.path.isdir(self.directory):
            return
        if self.rank == 0:
            if self._read("attempt").get("attempt", self.attempt) != self.attempt:
                return  # it is another process's now
            self._write(
                "attempt", attempt=self.attempt, ranks=self.ranks, failed=f"rank 0: {reason}"
            )
        self.attempt = self._read("attempt").get("attempt", "")
        if not self.attempt:  # no other rank will read it
            self._remove(f"rank.{self.rank}")
            with suppress(OSError):  # not empty: others are here
                files.remove_dir(self.directory)
                files.remove_dir(self.pending)
            return
        self._mark("failed", reason=reason)
        gone = [
            mark
            for mark in self.read_marks().values()
            if (mark["attempt"], mark["state"]) == (self.attempt, "failed")
        ]
        if len(gone) == self.ranks - 1:
            trees.remove_tree(self.pending)
            trees.remove_tree(self.directory)

    def _commit(self, sizes: dict[str, int]) -> None:
        mine = share(sizes, self.ranks, self.rank)
        write_commit(self.pending, self.rank, sync_files(self.pending, mine, self._hash))

    # --- rank 0 -----------------------------------------------------------------------------------

    def lead(self) -> None:
        """Returns when all have committed. Raises CheckpointError, RanksMissing, OSError."""
        names = set(self._changed())
        while True:
            marks = self._await_all("written")
            present = list_files(self.pending)
            wanted = names.union(*(mark["names"] for mark in marks.values()))
            for name in present.keys() - wanted:
                files.unlink(os.path.join(self.pending, name))
            plan = os.urandom(16).hex()
            sizes = {name: present[name].st_size for name in present.keys() & wanted}
            withdraw_commits(self.pending)
            tokens = [marks[rank]["token"] if rank else "" for rank in range(self.ranks)]
            self._write("plan", plan=plan, tokens=tokens, sizes=sizes)
            self._commit(sizes)
            if self._await_all("committed", plan):
                return

    def _await_all(self, state: str, plan: str = "") -> dict[int, dict[str, Any]]:
        """The others' marks in this state; {} if one has come again, so that the plan is void."""
        self._state = state
        for _ in self._poll(self._lacking):
            # Reading a file asks the mount, where listing may not: so it is seen, too, when the
            # daemon dies.
            if self._read("attempt").get("attempt") != self.attempt:
                raise CheckpointError(f"{self.target}: another process leads a save to this name")
            marks = {
                rank: mark
                for rank, mark in self.read_marks().items()
                if mark["attempt"] == self.attempt
            }
            again = [rank for rank, mark in marks.items() if mark["state"] == "again"]
            if again:
                self._remove("plan")
                for rank in again:
                    self._remove(f"rank.{rank}")
                if plan:
                    return {}
            for rank, mark in sorted(marks.items()):
                if mark["state"] == "failed":
                    raise CheckpointError(f"{self.target}: rank {rank}: {mark['reason']}")
            if (
                not again
                and len(marks) == self.ranks - 1
                and all(mark["plan"] == plan or state == "written" for mark in marks.values())
            ):
                return marks
        raise AssertionError

    def end(self) -> None:
        """It is published."""
        for _ in range(_REMOVALS):
            try:
                return trees.remove_tree(self.directory)
            except OSError as error:  # a rank that was started anew has just said so
                if error.errno != errno.ENOTEMPTY:
                    raise

    # --- the others -------------------------------------------------------------------------------

    def follow(self) -> None:
        """Returns when rank 0 has published. Raises CheckpointError, RanksMissing, OSError."""
        names = self._changed()
        committed = self.attempt = ""
        self._state = "written"
        for _ in self._poll(self._lacking):
            found = self._read("attempt")
            if not found:
                if self._is_published():
                    return
                if self.attempt:
                    raise CheckpointError(f"{self.target}: was given up")
                continue
            if found["attempt"] == self._given_up:
                continue
            if found["failed"]:
                raise CheckpointError(f"{self.target}: {found['failed']}")
            if found["attempt"] != self.attempt:
                if self._is_published():  # and rank 0 begins to save to this name once more
                    return
                if found["ranks"] != self.ranks:
                    raise CheckpointError(
                        f"{self.target}: rank 0 waits for {found['ranks']} ranks, "
                        f"rank {self.rank} for {self.ranks}"
                    )
                self.attempt = found["attempt"]
                self._token = os.urandom(16).hex()
                self._state = "written"
                self._mark("written", names=names)
            plan = self._read("plan")
            if plan and plan["plan"] != committed and plan["tokens"][self.rank] == self._token:
                try:
                    self._commit(plan["sizes"])
                except (CheckpointError, OSError):
                    if self._read("attempt") == found and self._read("plan") == plan:
                        raise
                    continue  # a rank has come again, and writes
                committed, self._state = plan["plan"], "committed"
                self._mark("committed", plan=committed, names=names)
            if not os.path.isdir(self.pending) and self._is_published():
                return
        raise AssertionError
