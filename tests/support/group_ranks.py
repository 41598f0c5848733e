"""Ranks of grouped writes as processes, and what must hold of them on any mount: the contract of
``Group``."""

import multiprocessing
import os
import re
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from aifs.client import Group, GroupError, InvalidGroup, coordination, group_getfile, group_putfile
from aifs.core import files

WAIT_S = 60.0
SOON_S = 1.5  # a time-out that is meant to be reached
WORLD = 4
GLOO_WORLD = 8

_FORK = multiprocessing.get_context("fork")
_running: "set[Rank]" = set()

Body = Callable[..., Any]


class Rank:
    """A process that runs ``body(rank, self)``. ``outcome()``, to be asked for when it waits
    nowhere: what it returned, or the exception that it raised as (name of its class, message); None
    if it was killed."""

    def __init__(self, rank: int, body: Body, *args: Any) -> None:
        self.rank = rank
        self._here, there = _FORK.Pipe()
        self._process = _FORK.Process(target=self._main, args=(there, body, args))
        self._process.start()
        _running.add(self)
        there.close()

    def _main(self, pipe: Any, body: Body, args: tuple[Any, ...]) -> None:
        self._here.close()
        self._here = pipe
        try:
            said = ("returned", body(self.rank, self, *args))
        except BaseException as error:
            traceback.print_exc()
            said = ("raised", (type(error).__name__, str(error), getattr(error, "rank", None)))
        pipe.send(said)
        os._exit(0)

    def reach(self, phase: str) -> None:
        """In the process: say how far it is, and go on when it is told to."""
        self.tell(phase)
        self._here.recv()

    def tell(self, phase: str) -> None:
        """In the process: say how far it is."""
        self._here.send(("reached", phase))

    def await_phase(self, phase: str) -> None:
        said = self._receive()
        assert said == ("reached", phase), said

    def go_on(self) -> None:
        self._here.send(None)

    def kill(self, wait: bool = True) -> None:
        self._process.kill()
        if wait:
            self._process.join()

    def outcome(self) -> Any:
        said = self._receive()
        while said[0] == "reached":
            said = self._receive()
        self.end()
        return said[1]

    def run_on(self) -> None:
        """Let it go on from here through all phases that are left."""
        with suppress(BrokenPipeError, ConnectionResetError):
            for _ in PHASES:
                self.go_on()

    def _receive(self) -> Any:
        try:
            if not self._here.poll(WAIT_S):
                self.kill()
                raise AssertionError(f"rank {self.rank} hangs")
            return self._here.recv()
        except EOFError:
            return ("killed", None)

    def end(self) -> None:
        self._process.join(WAIT_S)
        self._process.kill()
        self._process.join()
        self._here.close()
        _running.discard(self)


def start(ranks: Sequence[int], body: Body, *args: Any) -> list[Rank]:
    return [Rank(rank, body, *args) for rank in ranks]


def outcomes(ranks: Sequence[Rank]) -> list[Any]:
    return [rank.outcome() for rank in ranks]


def content(rank: int) -> bytes:
    return bytes([rank + 1]) * 300_000 + b"the same in all ranks" * 20_000


def join(rank: int, place: Path, **options: Any) -> Group:
    return Group(
        "step", rank, WORLD, **{"directory": place / "new", "timeout_s": WAIT_S, **options}
    )


def save(rank: int, process: Rank, place: Path, options: dict[str, Any]) -> str:
    group = join(rank, place, **options)
    saved = group_putfile(f"rank{rank}", content(rank), group)
    saved.buffered.result(WAIT_S)
    process.tell("buffered")
    saved.durable.result(WAIT_S)
    assert bytes(group_getfile(f"rank{rank}", group).to_buffer()) == content(rank)
    return "saved"


class _Writing:
    """A hook that calls back before the first write to a new file of that name."""

    def __init__(self, name: str, function: Callable[[], None]) -> None:
        self._name, self._function, self._is_open = name, function, False

    def before(self, op: str, path: str) -> None:
        if op == "write_at" and self._is_open:
            self._is_open = False
            self._function()

    def after(self, op: str, path: str, *args: object) -> None:
        if op == "open_file" and os.path.basename(path).startswith(f".{self._name}."):
            self._is_open = True


def save_in_phases(rank: int, process: Rank, place: Path, options: dict[str, Any]) -> str:
    """Waits before it joins, when it has joined, while it writes, before and after it commits."""
    process.reach("came")
    group = join(rank, place, files_per_rank=None, **options)
    process.reach("joined")
    files.set_hook(_Writing(f"rank{rank}", lambda: process.reach("writes")))
    saved = group_putfile(f"rank{rank}", content(rank), group)
    saved.buffered.result(WAIT_S)
    files.set_hook(None)
    process.reach("written")
    group.commit().buffered.result(WAIT_S)
    process.reach("committed")
    saved.durable.result(WAIT_S)
    return "saved"


PHASES = ["came", "joined", "writes", "written", "committed"]


def bring_to(process: Rank, phase: str) -> None:
    for passed in PHASES[: PHASES.index(phase)]:
        process.await_phase(passed)
        process.go_on()
    process.await_phase(phase)


def await_buffered(ranks: Sequence[Rank]) -> None:
    """Until they, which run ``save``, have committed."""
    for process in ranks:
        process.await_phase("buffered")


def check_files(directory: Path) -> None:
    """All ranks' files are there, whole, and nothing else but a manifest."""
    names = {entry.name for entry in directory.iterdir()} - {".aifs-manifest.json"}
    assert names == {f"rank{rank}" for rank in range(WORLD)}
    for rank in range(WORLD):
        assert (directory / f"rank{rank}").read_bytes() == content(rank)


def open_below(directory: Path) -> Iterator[str]:
    """What this process has open of the directory: itself, and what lies below."""
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            path = os.readlink(f"/proc/self/fd/{number}")
            if path == str(directory) or path.startswith(f"{directory}/"):
                yield path


def await_closed(directory: Path) -> None:
    """Wait until this process has nothing open there. A group that fails is closed a little after
    its outcome is known, and until then umount(8) finds its mount busy."""
    end = time.monotonic() + WAIT_S
    while any(open_below(directory)):
        assert time.monotonic() < end


def save_by_torch(rank: int, process: Rank, place: Path, store: str) -> str:
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=GLOO_WORLD)
    mine = {
        "weight": torch.full((300, 200), rank, dtype=torch.bfloat16),
        "shared": torch.arange(100_000),
    }
    with Group.from_torch(name="step", directory=place / "new", publish="final") as group:
        group_putfile(f"{rank}.safetensors", mine, group, {"rank": str(rank)})
    found = group_getfile(f"{rank}.safetensors", group)
    assert found.metadata == {"rank": str(rank)}
    assert all(torch.equal(tensor, mine[name]) for name, tensor in found.to_tensors().items())
    first = group_getfile("0.safetensors", group, together=True)
    assert first.to_tensor("weight").count_nonzero() == 0 and first.metadata == {"rank": "0"}
    with pytest.raises(GroupError, match="rank 5 could not join: InvalidGroup: dedup='1KiB'"):
        Group.from_torch(name="bad", directory=place / "bad", dedup="1KiB" if rank == 5 else "4MiB")
    dist.destroy_process_group()
    return "saved"


class GroupContract:
    """What holds on any mount; subclasses have a fixture ``place``, an empty directory."""

    @pytest.fixture(autouse=True)
    def nothing_is_left(self, place: Path) -> Iterator[None]:
        yield
        for process in list(_running):
            process.kill()
            process.end()
        await_closed(place)

    publishes = pytest.mark.parametrize("publish", [None, "final"])

    @publishes
    def test_all_ranks_save(self, place: Path, publish: str | None) -> None:
        ranks = start(range(WORLD), save, place, {"publish": publish})
        assert outcomes(ranks) == ["saved"] * WORLD
        check_files(place / (publish or "new"))
        wanted = {"final", "latest"} if publish else {"new"}
        assert {entry.name for entry in place.iterdir()} == wanted

    def test_a_directory_serves_group_after_group(self, place: Path) -> None:
        for _ in range(3):
            assert outcomes(start(range(WORLD), save, place, {})) == ["saved"] * WORLD
        check_files(place / "new")

    def test_nothing_is_durable_or_visible_before_the_last_has_committed(self, place: Path) -> None:
        ranks = start(range(1, WORLD), save, place, {"publish": "final"})
        group = join(0, place, publish="final", files_per_rank=None)
        first = group_putfile("rank0", content(0)[:1000], group)
        first.buffered.result(WAIT_S)
        await_buffered(ranks)
        assert not group.durable.done() and not (place / "final").exists()
        group_putfile("rank0", content(0), group).buffered.result(WAIT_S)
        assert not group.durable.done() and not (place / "final").exists()
        group.commit()
        group.durable.result(WAIT_S)
        assert outcomes(ranks) == ["saved"] * (WORLD - 1)
        check_files(place / "final")
        with pytest.raises(GroupError, match="rank 0 has committed already"):
            group.commit()
        with pytest.raises(GroupError, match="rank 0 has committed already"):
            group_putfile("more", b"", group)

    @pytest.mark.sweep("victim")
    @pytest.mark.parametrize("phase", PHASES[1:-1])
    @pytest.mark.parametrize("victim", [0, 3])
    def test_a_rank_that_dies_is_named_at_once(self, place: Path, phase: str, victim: int) -> None:
        options = {"publish": "final"}
        (dying,) = start([victim], save_in_phases, place, options)
        bring_to(dying, "came")
        rest = start([rank for rank in range(WORLD) if rank != victim], save, place, options)
        dying.go_on()
        dying.await_phase("joined")
        await_buffered(rest)
        for passed in PHASES[2 : PHASES.index(phase) + 1]:
            dying.go_on()
            dying.await_phase(passed)
        dying.kill()
        for name, message, rank in outcomes(rest):
            assert (name, rank) == ("RankDied", victim)
            assert f"rank {victim} ended before it committed" in message
        dying.end()
        assert not (place / "final").exists()
        assert outcomes(start(range(WORLD), save, place, options)) == ["saved"] * WORLD
        check_files(place / "final")

    def test_a_rank_that_dies_after_its_commit_is_not_missed(self, place: Path) -> None:
        leader, dying = start([0, 2], save_in_phases, place, {"publish": "final"})
        bring_to(leader, "committed")
        bring_to(dying, "committed")
        dying.kill()
        dying.end()
        leader.go_on()
        assert (
            outcomes([leader, *start([1, 3], save, place, {"publish": "final"})]) == ["saved"] * 3
        )
        check_files(place / "final")

    def test_a_rank_that_never_comes_is_named(self, place: Path) -> None:
        ranks = start([0, 1, 3], save, place, {"publish": "final", "timeout_s": SOON_S})
        for name, message, _ in outcomes(ranks):
            assert name == "GroupExpired"
            assert "2" in message
        assert not (place / "final").exists()

    def test_a_rank_may_come_again(self, place: Path) -> None:
        options = {"publish": "final", "grace_s": WAIT_S}
        (dying,) = start([3], save_in_phases, place, options)
        bring_to(dying, "came")
        rest = start(range(WORLD - 1), save, place, options)
        dying.go_on()
        dying.await_phase("joined")
        dying.go_on()
        dying.await_phase("writes")
        dying.kill()
        dying.end()
        assert outcomes([*rest, *start([3], save, place, options)]) == ["saved"] * WORLD
        check_files(place / "final")

    @pytest.mark.sweep("committed")
    @pytest.mark.parametrize("committed", [[], [0, 1], [1, 2, 3]])
    def test_a_job_that_was_killed_is_run_again(self, place: Path, committed: list[int]) -> None:
        """Whatever it has left: its ranks begin anew, in any order."""
        ranks = start(range(WORLD), save_in_phases, place, {"publish": "final"})
        for process in ranks:
            bring_to(process, "joined")
        for process in ranks:
            if process.rank in committed:
                for phase in PHASES[2:]:
                    process.go_on()
                    process.await_phase(phase)
        for process in ranks:
            process.kill(wait=False)
        for process in ranks:
            process.kill()
            process.end()
        again = start([3, 2], save, place, {"publish": "final"})
        again += start([1, 0], save, place, {"publish": "final"})
        assert outcomes(again) == ["saved"] * WORLD
        check_files(place / "final")

    def test_what_one_rank_meets_all_hear(self, place: Path) -> None:
        rest = start([0, 1, 3], save, place, {"publish": "final"})
        group = join(2, place, publish="final", files_per_rank=2)
        await_buffered(rest)
        (place / "new" / "taken").mkdir()
        failed = group_putfile("taken", b"content", group)
        with pytest.raises(IsADirectoryError):
            failed.buffered.result(WAIT_S)
        with pytest.raises(GroupError, match="rank 2: IsADirectoryError"):
            failed.durable.result(WAIT_S)
        with pytest.raises(GroupError, match="rank 2: IsADirectoryError"):
            group_putfile("more", b"content", group)
        for name, message, _ in outcomes(rest):
            assert name == "GroupError", message
        assert not (place / "final").exists()

    def test_a_block_that_raises_cancels(self, place: Path) -> None:
        rest = start([0, 1, 3], save, place, {})
        with pytest.raises(ZeroDivisionError), join(2, place):
            await_buffered(rest)
            raise ZeroDivisionError
        assert [outcome[0] for outcome in outcomes(rest)] == ["GroupError"] * 3

    @pytest.mark.parametrize("phase", ["joined", "committed"])
    def test_a_rank_twice(self, place: Path, phase: str) -> None:
        (process,) = start([0], save_in_phases, place, {})
        bring_to(process, phase)
        with pytest.raises(
            ValueError,
            match=r"step: rank 0 has (been joined by .*process.* is alive|committed already)",
        ):
            join(0, place)
        process.kill()
        process.end()

    def test_a_rank_twice_in_one_process(self, place: Path) -> None:
        first = join(0, place)
        with pytest.raises(ValueError, match="step: rank 0 has been joined by .*process"):
            join(0, place)
        first.cancel()
        join(0, place).cancel()

    def test_the_final_name_is_taken(self, place: Path) -> None:
        (place / "final").mkdir()
        with pytest.raises(FileExistsError, match="final"):
            join(0, place, publish="final")
        (place / "final").rmdir()
        rest = start(range(1, WORLD), save, place, {"publish": "final"})
        group = join(0, place, publish="final")
        await_buffered(rest)
        (place / "final").mkdir()
        (place / "final" / "precious").touch()
        with pytest.raises(FileExistsError, match="final"):
            group_putfile("rank0", content(0), group).durable.result(WAIT_S)
        assert [outcome[0] for outcome in outcomes(rest)] == ["FileExistsError"] * (WORLD - 1)
        assert (place / "final" / "precious").exists() and (place / "new" / "rank0").exists()

    def test_all_files_have_one_size(self, place: Path) -> None:
        options = {"publish": "final", "same_size": True}
        rest = start([0, 1, 3], save, place, options)
        group = join(2, place, **options)
        await_buffered(rest)
        saved = group_putfile("rank2", content(2)[1:], group)
        size = len(content(2))
        wrong = f"rank 2: .*rank2 has {size - 1} bytes, not the {size} of rank [013]"
        with pytest.raises(InvalidGroup, match=wrong):
            saved.buffered.result(WAIT_S)
        with pytest.raises(InvalidGroup, match=wrong):
            saved.durable.result(WAIT_S)
        for name, message, _ in outcomes(rest):
            assert name in ("GroupError", "InvalidGroup") and re.search(wrong, message)
        assert not (place / "final").exists() and (place / "new" / "rank0").read_bytes() == content(
            0
        )
        await_closed(place)
        assert outcomes(start(range(WORLD), save, place, options)) == ["saved"] * WORLD
        check_files(place / "final")

    def test_the_files_of_a_rank_have_one_size(self, place: Path) -> None:
        rest = start([0, 1, 3], save, place, {"same_size": True})
        group = join(2, place, same_size=True, files_per_rank=2)
        await_buffered(rest)
        group_putfile("a", b"aa", group)
        with pytest.raises(InvalidGroup, match="rank 2: b has 1 bytes, not the 2 of a"):
            group_putfile("b", b"b", group).buffered.result(WAIT_S)
        for name, message, _ in outcomes(rest):
            assert name == "GroupError" and "rank 2: b has 1 bytes" in message

    def test_what_another_run_has_left_is_not_taken_for_ours(self, place: Path) -> None:
        """It was killed when one of its ranks had committed and the others had not come."""
        (old,) = start([0], save_in_phases, place, {"publish": "final", "job": "run-1"})
        bring_to(old, "committed")
        (place / "new" / "rank0").write_bytes(b"of the first run")
        old.kill()
        old.end()
        options = {"publish": "final", "job": "run-2"}
        again = start([1, 2, 3], save_in_phases, place, options)
        for process in again:
            process.await_phase("came")
            process.go_on()
        again += start([0], save_in_phases, place, options)
        for process in again:
            process.run_on()
        assert outcomes(again) == ["saved"] * WORLD
        check_files(place / "final")

    def test_ranks_of_two_jobs_are_no_group(
        self, place: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(coordination, "REFUSED_AFTER_S", 0.0)
        first = join(0, place, job="first")
        with pytest.raises(InvalidGroup, match="job '?second'?.* job '?first'?"):
            join(1, place, job="second").durable.result(WAIT_S)
        assert not first.durable.done()
        first.cancel()

    def test_a_rank_that_knows_no_job_takes_part(self, place: Path) -> None:
        ranks = start([0], save_in_phases, place, {"job": "one"})
        bring_to(ranks[0], "joined")
        ranks += start(range(1, WORLD), save, place, {"job": ""})
        ranks[0].run_on()
        assert outcomes(ranks) == ["saved"] * WORLD

    def test_ranks_that_say_whose_they_are_may_come_one_after_the_other(self, place: Path) -> None:
        def commit(rank: int, process: Rank, job: str) -> None:
            group_putfile(f"rank{rank}", content(rank), join(rank, place, job=job)).buffered.result(
                WAIT_S
            )

        for job in ("first", "first", "second"):
            for rank in range(WORLD - 1):
                assert outcomes(start([rank], commit, job)) == [None]
            assert outcomes(start([WORLD - 1], save, place, {"job": job})) == ["saved"]

    def test_a_process_saves_again_and_again(self, place: Path) -> None:
        """It waits for no more than the buffer."""
        for number in range(4):
            group = Group("step", 0, 1, directory=place / "new")
            saved = group_putfile("rank0", bytes([number]), group)
            saved.buffered.result(WAIT_S)
        saved.durable.result(WAIT_S)
        assert (place / "new" / "rank0").read_bytes() == b"\3"
        await_closed(place)

    def test_the_ranks_of_torch(self, place: Path) -> None:
        pytest.importorskip("torch", reason="torch is not installed (the demo extra)")
        with tempfile.TemporaryDirectory() as scratch:
            ranks = start(range(GLOO_WORLD), save_by_torch, place, f"{scratch}/store")
            assert outcomes(ranks) == ["saved"] * GLOO_WORLD
        assert len(list((place / "final").glob("*.safetensors"))) == GLOO_WORLD
