"""A training job of four ranks that saves at each step, while ranks and the daemon are killed: it
always goes on from the newest published checkpoint, bit by bit what an undisturbed run has at that
step. Skipped where torch is not installed."""

import errno
import multiprocessing
import os
import random
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import blake3
import pytest

from aifs import client
from tests.support.mounts import TIMEOUT_S, Mounted

pytestmark = pytest.mark.sweep

torch = pytest.importorskip("torch", reason="torch is not installed (the demo extra)")

RANKS = 4
FORK = multiprocessing.get_context("fork")


class Replica:
    """One rank's model and optimizer. What it holds after a step depends on the rank and the step
    alone."""

    def __init__(self, rank: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(rank)
        self.rank, self.step = rank, 0
        self.model = torch.nn.Sequential(
            torch.nn.Linear(64, 48), torch.nn.ReLU(), torch.nn.Linear(48, 8)
        )
        self.optimizer = torch.optim.Adam(self.model.parameters())

    def train(self) -> None:
        self.step += 1
        batch = torch.randn(
            16, 64, generator=torch.Generator().manual_seed(self.step * RANKS + self.rank)
        )
        self.optimizer.zero_grad()
        self.model(batch).square().mean().backward()
        self.optimizer.step()

    def save(self, path: Path) -> None:
        state = {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        torch.save(state, path)

    def load(self, path: Path) -> None:
        state = torch.load(path)
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def digest(self) -> str:
        tensors = [*self.model.state_dict().values()]
        for state in self.optimizer.state_dict()["state"].values():
            tensors += state.values()
        return blake3.blake3(
            b"".join(bytes(tensor.flatten().view(torch.uint8).tolist()) for tensor in tensors)
        ).hexdigest()


def rank_main(run: Path, rank: int, goal: int, say: Any) -> None:
    """Resume, then train and save until ``goal``; says (rank, step, digest) of what it resumes
    with, then of each saved step."""
    try:
        replica = Replica(rank)
        newest = client.latest(run)
        if newest is not None:
            replica.load(newest / f"shard-{rank}.pt")
        say.put(("resumed", rank, replica.step, replica.digest()))
        while replica.step < goal:
            replica.train()
            with (
                suppress(
                    FileExistsError
                ),  # it was about to be published when this rank was started anew
                client.checkpoint(
                    run / f"step-{replica.step}",
                    ranks=RANKS,
                    rank=rank,
                    tracker="tracker",
                    keep="last=3",
                    timeout_s=TIMEOUT_S,
                ) as tmp,
            ):
                replica.save(tmp / f"shard-{rank}.pt")
            say.put(("saved", rank, replica.step, ""))
    except BaseException as error:
        if getattr(error, "errno", None) in (
            errno.ENOTCONN,
            errno.ECONNABORTED,
        ):
            # The daemon is gone.
            os._exit(1)
        sys.excepthook(*sys.exc_info())
        os._exit(2)
    os._exit(0)


class Job:
    """The ranks, each a process, and what they have said."""

    def __init__(self, run: Path, goal: int) -> None:
        self.run, self.goal = run, goal
        self.processes: dict[int, Any] = {}
        self.saved = 0
        self._pipes: dict[int, Any] = {}
        self._expected = [expected(rank, goal) for rank in range(RANKS)]

    def start(self, *ranks: int) -> None:
        """Start ranks; all resume with the newest published checkpoint, which is at least the
        newest that was told."""
        newest = client.latest(self.run)
        published = 0 if newest is None else int(newest.name.removeprefix("step-"))
        assert published >= self.saved
        if newest is not None:
            assert client.verify(newest) == []
        for rank in ranks:
            reader, writer = FORK.Pipe(duplex=False)
            process = FORK.Process(
                target=rank_main, args=(self.run, rank, self.goal, Sender(writer))
            )
            process.start()
            writer.close()
            self.processes[rank], self._pipes[rank] = process, reader
        for rank in ranks:
            kind, _, step, digest = self._pipes[rank].recv()
            assert kind == "resumed" and digest == self._expected[rank][step]
            assert step == published if len(ranks) == RANKS else step >= published

    def listen(self) -> None:
        """Take in what the ranks have said so far."""
        for pipe in self._pipes.values():
            try:
                while pipe.poll():
                    _, _, step, _ = pipe.recv()
                    self.saved = max(self.saved, step)
            except EOFError:
                continue

    def await_moment(self, rng: random.Random) -> None:
        """Until some moment of some save: one of its files shows, or it has ended before we have
        seen it."""
        step, rank = self.saved + rng.randint(1, 3), rng.randrange(RANKS)
        name = rng.choice(
            (
                f".step-{step}.pending",
                f".step-{step}.pending/shard-{rank}.pt",
                f".step-{step}.ranks/rank.{rank}",
                f".step-{step}.ranks/plan",
                f".step-{step}.pending/.aifs-commit.{rank}.json",
                f"step-{step}",
            )
        )
        while self.saved < min(step, self.goal) and not (self.run / name).exists():
            self.listen()
            ended = {
                rank: process.exitcode
                for rank, process in self.processes.items()
                if process.exitcode is not None
            }
            assert not any(ended.values()), f"ranks have failed: {ended}"

    def kill(self, *ranks: int) -> None:
        for rank in ranks:
            self.processes[rank].kill()
        self.join(*ranks)

    def join(self, *ranks: int) -> list[int]:
        codes = []
        for rank in ranks:
            process = self.processes.pop(rank)
            process.join(TIMEOUT_S)
            codes.append(process.exitcode)
            self.listen()
            self._pipes.pop(rank).close()
            process.close()
        return codes


class Sender:
    """The writing end of a pipe, with the name that a queue has for it."""

    def __init__(self, pipe: Any) -> None:
        self.put = pipe.send


def expected(rank: int, goal: int) -> list[str]:
    """The digest after each step of a run that nobody disturbs."""
    replica = Replica(rank)
    digests = [replica.digest()]
    for _ in range(goal):
        replica.train()
        digests.append(replica.digest())
    return digests


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def train_and_kill(store: Mounted, rounds: int, seed: int) -> None:
    rng = random.Random(seed)
    run = store.path / "run"
    job = Job(run, goal=4 * rounds + 4)
    run.mkdir()
    everyone = range(RANKS)
    try:
        job.start(*everyone)
        for round_ in range(rounds):
            job.await_moment(rng)
            victim = ("one rank", "the daemon", "all ranks")[round_ % 3]
            if victim == "the daemon":
                store.kill_only()
                assert set(job.join(*everyone)) == {1}
                store.mount()
                job.start(*everyone)
            elif victim == "all ranks":
                job.kill(*everyone)
                job.start(*everyone)
            else:
                rank = rng.randrange(RANKS)
                job.kill(rank)
                job.start(rank)
        assert job.join(*everyone) == [0] * RANKS
    finally:
        job.kill(*job.processes)
    assert job.saved == job.goal
    assert os.readlink(run / "latest") == f"step-{job.goal}" and (
        run / "tracker"
    ).read_text() == str(job.goal)
    assert client.verify(run / "latest") == []


@pytest.mark.usefixtures("threads")
def test_a_training_job_resumes_from_the_newest_checkpoint(mounted: Mounted) -> None:
    train_and_kill(mounted, rounds=4, seed=1)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.usefixtures("threads")
def test_a_training_job_that_is_killed_all_the_time(mounted: Mounted, seed: int) -> None:
    train_and_kill(mounted, rounds=60, seed=seed)
