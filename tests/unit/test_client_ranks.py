"""Several ranks, here threads, save one checkpoint in a plain directory: who waits for whom, and
what is in it at the end."""

import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aifs.client import CheckpointError, RanksMissing, checkpoint, list_checkpoints, verify
from aifs.client.checkpoints.manifest import read
from aifs.client.checkpoints.ranks import share

WAIT_S = 60.0


class Job:
    """A job of ``ranks`` threads that save to ``target``."""

    def __init__(self, target: Path, ranks: int) -> None:
        self.target, self.ranks = target, ranks
        self.pool = ThreadPoolExecutor(2 * ranks)

    def start(self, rank: int, body: Callable[[Path], None], **options: Any) -> Future[None]:
        def run() -> None:
            with checkpoint(
                self.target, ranks=self.ranks, rank=rank, **{"timeout_s": WAIT_S, **options}
            ) as tmp:
                body(tmp)

        return self.pool.submit(run)

    def writes(self, rank: int, content: str = "") -> Callable[[Path], None]:
        return lambda tmp: (
            (tmp / f"shard-{rank}").write_text(content or f"content of {rank}") and None
        )

    def finish(self, begun: list[Future[None]], content: str = "content of {}") -> None:
        """All of them return, and what they have saved is there."""
        for one in begun:
            one.result(WAIT_S)
        self.check(content)

    def all(self) -> list[Future[None]]:
        return [self.start(rank, self.writes(rank)) for rank in range(self.ranks)]

    def check(self, content: str = "content of {}") -> None:
        names = {f"shard-{rank}" for rank in range(self.ranks)}
        assert {path.name for path in self.target.iterdir()} == names | {".aifs-manifest.json"}
        for rank in range(self.ranks):
            assert (self.target / f"shard-{rank}").read_text() == content.format(rank)
        assert verify(self.target) == []
        listed = read(str(self.target))
        assert listed is not None and listed.ranks == self.ranks and listed.files.keys() == names
        assert {path.name for path in self.target.parent.iterdir()} == {self.target.name, "latest"}


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path / "run" / "step-7", 4)


@given(
    st.dictionaries(st.text(max_size=4), st.integers(0, 1 << 40), max_size=30), st.integers(1, 9)
)
def test_each_file_falls_to_one_rank_and_none_has_too_much(
    sizes: dict[str, int], ranks: int
) -> None:
    shares = [share(sizes, ranks, rank) for rank in range(ranks)]
    assert sorted(name for mine in shares for name in mine) == sorted(sizes)
    loads = [sum(sizes[name] for name in mine) for mine in shares]
    assert max(loads) <= sum(sizes.values()) / ranks + max(sizes.values(), default=0)


def test_all_return_when_it_is_there(job: Job) -> None:
    job.finish(job.all())


@pytest.mark.sweep
@pytest.mark.parametrize("late", range(4))
def test_nobody_returns_before_the_last_has_written(job: Job, late: int) -> None:
    """Nor is anything visible; whether rank 0 or another one comes last."""
    done = [job.start(rank, job.writes(rank)) for rank in range(job.ranks) if rank != late]
    while len(list(job.target.parent.glob(".step-7.pending/shard-*"))) < job.ranks - 1:
        pass
    assert not job.target.exists() and not any(one.done() for one in done)
    done.append(job.start(late, job.writes(late)))
    job.finish(done)


def _crashed(job: Job, state: str, committed: bool = False) -> None:
    """What a job leaves that was killed: all its ranks but 3 had written."""
    pending, ranks = job.target.parent / ".step-7.pending", job.target.parent / ".step-7.ranks"
    pending.mkdir(parents=True)
    ranks.mkdir()
    (ranks / "attempt").write_text(json.dumps({"attempt": "old", "ranks": 4, "failed": ""}))
    tokens = ["", "t1", "t2", "t3"]
    for rank in range(4):
        (pending / f"shard-{rank}").write_text("old")
        (pending / f"old-shard-{rank}").write_text("old")
        if committed:
            (pending / f".aifs-commit.{rank}.json").write_text(
                json.dumps({"rank": rank, "files": {"gone": [1, ""]}})
            )
        if 0 < rank < 3:
            mark = {"attempt": "old", "state": state, "token": tokens[rank]}
            mark |= {"plan": "p", "names": ["gone"], "reason": ""}
            (ranks / f"rank.{rank}").write_text(json.dumps(mark))
    (ranks / "plan").write_text(json.dumps({"plan": "p", "tokens": tokens, "sizes": {"gone": 1}}))
    (pending / ".aifs-manifest.json").write_text("torn")


@pytest.mark.parametrize("state", ["written", "committed", "again", "failed"])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0)])
def test_what_a_crashed_job_has_left_does_not_get_in(
    job: Job, state: str, order: tuple[int, ...]
) -> None:
    _crashed(job, state, committed=state == "committed")
    job.finish([job.start(rank, job.writes(rank)) for rank in order])


def test_one_rank_alone_begins_from_nothing(job: Job) -> None:
    _crashed(job, "written")
    with checkpoint(job.target) as tmp:
        assert list(tmp.iterdir()) == []
        (tmp / "file").touch()
    assert {path.name for path in job.target.iterdir()} == {"file", ".aifs-manifest.json"}


class Dies(BaseException):
    """Ends a thread as SIGKILL ends a process: the client must not notice."""


def _die_after_writing(job: Job, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank ``rank`` writes, says so, and is gone."""
    from aifs.client.checkpoints import ranks

    group = ranks.Ranks(str(job.target), job.ranks, rank, WAIT_S, True)
    os.makedirs(group.pending, exist_ok=True)
    group.begin()
    (Path(group.pending) / f"shard-{rank}").write_text("torn")
    with monkeypatch.context() as patch:
        patch.setattr(ranks.Ranks, "_commit", lambda *_: _raise(Dies()))
        patch.setattr(ranks.time, "sleep", lambda _: _raise(Dies()))
        with pytest.raises(Dies):
            group.follow() if rank else group.lead()


def _raise(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_that_died_may_come_again(
    job: Job, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _die_after_writing(job, rank, monkeypatch)
    order = [number for number in range(job.ranks) if number != rank]
    done = [job.start(number, job.writes(number)) for number in order]
    done.append(job.start(rank, job.writes(rank)))
    job.finish(done)


def test_rank_0_may_come_again_while_the_others_wait(job: Job) -> None:
    done = [job.start(rank, job.writes(rank)) for rank in (1, 2, 3)]
    while len(list(job.target.parent.glob(".step-7.pending/shard-*"))) < 3:
        pass
    _die_after_writing_alone(job)
    done.append(job.start(0, job.writes(0)))
    job.finish(done)


def _die_after_writing_alone(job: Job) -> None:
    """Rank 0 comes, so that the others answer to its attempt, and is gone."""
    from aifs.client.checkpoints.ranks import Ranks

    group = Ranks(str(job.target), job.ranks, 0, WAIT_S, True)
    group.begin()
    (Path(group.pending) / "shard-0").write_text("torn")
    while len(group.read_marks()) < 3:
        pass


def test_a_rank_that_comes_again_after_the_publish_is_told(job: Job) -> None:
    job.finish(job.all())
    with pytest.raises(FileExistsError):
        job.start(2, job.writes(2)).result(WAIT_S)
    job.check()


@pytest.mark.parametrize("bad", range(4))
def test_an_error_in_one_rank_ends_the_save_for_all(job: Job, bad: int) -> None:
    entered = threading.Barrier(job.ranks)

    def body(rank: int) -> Callable[[Path], None]:
        def run(tmp: Path) -> None:
            entered.wait(WAIT_S)
            if rank == bad:
                raise ValueError("no\nmemory")
            job.writes(rank)(tmp)

        return run

    done = [job.start(rank, body(rank)) for rank in range(job.ranks)]
    for rank, one in enumerate(done):
        with pytest.raises(ValueError if rank == bad else CheckpointError) as caught:
            one.result(WAIT_S)
        if rank != bad:
            assert "ValueError: no memory" in str(caught.value) and "\n" not in str(caught.value)
    assert list(job.target.parent.iterdir()) == []  # the last one has removed everything


def test_dead_ranks_are_named(job: Job) -> None:
    mark = job.target.parent / ".step-7.ranks/rank.2"

    def write_last(tmp: Path) -> None:
        job.writes(0)(tmp)
        while not mark.exists():
            pass

    done = [job.start(0, write_last, timeout_s=0.5), job.start(2, job.writes(2))]
    said = []
    for one in done:
        with pytest.raises((RanksMissing, CheckpointError)) as caught:
            one.result(WAIT_S)
        said.append(str(caught.value))
    assert any("after 500ms, ranks 1, 3 had not written" in line for line in said)
    assert not job.target.exists()
    assert [one.state for one in list_checkpoints(job.target.parent, pending=True)] == ["pending"]
    with pytest.raises(TimeoutError, match="after 100ms, rank 0 had not begun"):
        job.start(1, job.writes(1), timeout_s=0.1).result(WAIT_S)
    job.finish(job.all())


def test_another_leader_is_noticed(job: Job) -> None:
    """Of another host, which the lock does not keep away."""
    done = job.start(0, job.writes(0))
    attempt = job.target.parent / ".step-7.ranks/attempt"
    while not attempt.exists():
        pass
    written = attempt.with_name("written")
    written.write_text(json.dumps({"attempt": "other", "ranks": 4, "failed": ""}))
    written.rename(attempt)  # as leaders do: half of one says nothing of a leader
    with pytest.raises(CheckpointError, match="another process leads"):
        done.result(WAIT_S)
    assert json.loads(attempt.read_text())["attempt"] == "other"


def test_ranks_that_disagree_on_their_number_are_told(job: Job) -> None:
    done = job.start(0, job.writes(0))
    with pytest.raises(CheckpointError, match="rank 0 waits for 4 ranks, rank 1 for 3"):
        Job(job.target, 3).start(1, job.writes(1)).result(WAIT_S)
    with pytest.raises(CheckpointError):
        done.result(WAIT_S)


def test_a_replacement_by_many_ranks(job: Job) -> None:
    for content in ("one", "two"):
        done = [
            job.start(rank, job.writes(rank, content), replace=True) for rank in range(job.ranks)
        ]
        job.finish(done, content)
