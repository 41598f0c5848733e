"""Files that ranks save together, on a mount: the contract of ``Group``, and what only a mount
has.
"""

import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aifs.client import Group, GroupError, InvalidGroup, coordination, group_putfile, putfile
from aifs.client.mounted_group import MountedGroup
from aifs.core import ioctl
from tests.support.group_ranks import (
    GLOO_WORLD,
    PHASES,
    WAIT_S,
    WORLD,
    GroupContract,
    Rank,
    await_closed,
    bring_to,
    check_files,
    content,
    join,
    open_below,
    outcomes,
    save,
    save_by_torch,
    save_in_phases,
    start,
)
from tests.support.mounts import Mounted, mounted_store


@pytest.fixture(scope="module")
def mount() -> Iterator[Mounted]:
    """One mount for all of the contract."""
    with (
        tempfile.TemporaryDirectory(prefix="aifs-grouped-") as scratch,
        mounted_store(Path(scratch)) as store,
    ):
        yield store
        await_closed(store.path)


@pytest.mark.sweep
class TestMount(GroupContract):
    @pytest.fixture
    def place(self, mount: Mounted, request: pytest.FixtureRequest) -> Path:
        directory = mount.path / request.node.name
        directory.mkdir()
        return directory


@pytest.mark.sweep
def test_another_number_of_ranks(mount: Mounted) -> None:
    group = Group("step", 0, WORLD, directory=mount.path / "other")
    try:
        with pytest.raises(ValueError, match=f"other: group step: .*ranks={WORLD}"):
            Group("step", 3, WORLD + 1, directory=mount.path / "other")
    finally:
        group.cancel()


def test_a_mount_is_free_when_a_failed_group_has_closed_its_directory(
    mount: Mounted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Callers hear of the failure before; ``await_closed`` waits for the directory itself, too."""
    may_close, close = threading.Event(), MountedGroup.close

    def close_late(self: MountedGroup) -> None:
        may_close.wait(WAIT_S)
        close(self)

    monkeypatch.setattr(MountedGroup, "close", close_late)
    group = Group("step", 0, WORLD, directory=mount.path / "late")
    group.cancel()
    assert group.durable.done()
    assert [*open_below(mount.path / "late")] == [group.directory]
    may_close.set()
    await_closed(mount.path / "late")
    assert not any(open_below(mount.path / "late"))


def test_what_a_killed_job_had_committed_is_not_taken_for_the_next_ones(
    mount: Mounted, tmp_path: Path
) -> None:
    """One of its ranks had committed before the others came."""
    pytest.importorskip("torch", reason="torch is not installed (the demo extra)")
    place = mount.path / "again"
    place.mkdir()

    def commit(rank: int, process: Rank) -> None:
        group = Group("step", rank, GLOO_WORLD, directory=place / "new", publish="final")
        group_putfile(f"{rank}.safetensors", b"of the killed job", group).buffered.result(WAIT_S)

    assert outcomes(start([3], commit)) == [None]
    assert json.loads(os.getxattr(place / "new", "user.aifs.group"))["state"] == "open"
    ranks = start(range(GLOO_WORLD), save_by_torch, place, str(tmp_path / "store"))
    assert outcomes(ranks) == ["saved"] * GLOO_WORLD


@pytest.fixture
def left(mount: Mounted, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory where a job was killed when one rank had committed and the others had not
    come."""
    for name in coordination.JOB_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    place = mount.path / request.node.name
    place.mkdir()
    (old,) = start([1], save_in_phases, place, {})
    bring_to(old, "committed")
    old.kill()
    old.end()
    end = time.monotonic() + WAIT_S
    while json.loads(os.getxattr(place / "new", "user.aifs.group"))["members"][1]["pid"]:
        assert time.monotonic() < end
    return place


def test_nobody_guesses_whose_commits_these_are(
    left: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordination, "REFUSED_AFTER_S", 0.0)
    with pytest.raises(
        InvalidGroup, match=f"setfattr -x user.aifs.group {left}/new; .* job="
    ) as caught:
        join(0, left)
    assert caught.value.rank == 0
    os.removexattr(left / "new", "user.aifs.group")
    assert outcomes(start(range(WORLD), save, left, {})) == ["saved"] * WORLD


@pytest.mark.sweep
def test_a_rank_that_had_committed_itself_begins_anew(left: Path) -> None:
    again = start([1], save_in_phases, left, {})
    bring_to(again[0], "joined")
    again += start([0, 2, 3], save, left, {})
    again[0].run_on()
    assert outcomes(again) == ["saved"] * WORLD
    check_files(left / "new")


@pytest.mark.sweep
@pytest.mark.parametrize("when", ["is_deserted", "_give_up_left_over", "_wait_until"])
def test_who_comes_before_a_rank_that_had_committed_goes_on_with_it(
    left: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """That one comes, and begins anew, just before this one looks whether it has to."""
    here, rest, look = os.getpid(), [], getattr(MountedGroup, when)

    def look_late(self: MountedGroup, *args: Any) -> Any:
        if os.getpid() == here and not rest:
            rest.extend(start([1], save_in_phases, left, {}))
            bring_to(rest[0], "joined")
        return look(self, *args)

    monkeypatch.setattr(MountedGroup, when, look_late)
    saved = group_putfile("rank0", content(0), join(0, left))
    rest[0].run_on()
    assert outcomes([rest[0], *start([2, 3], save, left, {})]) == ["saved"] * (WORLD - 1)
    saved.durable.result(WAIT_S)
    check_files(left / "new")


@pytest.mark.sweep
def test_who_has_found_a_group_that_is_then_begun_anew_joins_the_new_one(
    left: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = MountedGroup.is_deserted

    def cancelled_meanwhile(self: MountedGroup, number: int) -> bool:
        monkeypatch.setattr(MountedGroup, "is_deserted", look)
        self._cancel(number, "rank 1 begins anew")
        return False

    monkeypatch.setattr(MountedGroup, "is_deserted", cancelled_meanwhile)
    saved = group_putfile("rank0", content(0), join(0, left))
    assert outcomes(start(range(1, WORLD), save, left, {})) == ["saved"] * (WORLD - 1)
    saved.durable.result(WAIT_S)


@pytest.mark.sweep
def test_what_an_earlier_run_of_the_launcher_has_left_does_not_count(
    left: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with join(0, left, files_per_rank=None) as group:
        told = json.loads(os.getxattr(left / "new", "user.aifs.group"))
        assert told["job"] == "1" and told["missing"] == list(range(WORLD))
        rest = start(range(1, WORLD), save, left, {})
        group_putfile("rank0", content(0), group)
        group.commit()
    assert outcomes(rest) == ["saved"] * (WORLD - 1)


@pytest.mark.sweep
def test_ranks_that_have_said_whose_they_are_may_be_gone(left: Path) -> None:
    """They need not wait for those that come later."""
    os.removexattr(left / "new", "user.aifs.group")

    def commit(rank: int, process: Rank) -> None:
        group = join(rank, left, job="17")
        group_putfile(f"rank{rank}", content(rank), group).buffered.result(WAIT_S)

    for rank in range(1, WORLD):
        assert outcomes(start([rank], commit)) == [None]
    assert outcomes(start([0], save, left, {"job": "17"})) == ["saved"]
    check_files(left / "new")


def test_a_mount_of_another_version(mount: Mounted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ioctl, "VERSION", ioctl.VERSION + 1)
    with pytest.raises(
        GroupError, match="mounted by another version of AIFS .*; unmount, and mount anew"
    ):
        join(0, mount.path)


@pytest.mark.sweep
def test_what_is_durable_is_on_the_servers_once(mount: Mounted) -> None:
    place = mount.path / "once"
    place.mkdir()
    assert outcomes(start(range(WORLD), save, place, {})) == ["saved"] * WORLD
    told = json.loads(os.getxattr(place / "new", "user.aifs.group"))
    assert (told["state"], told["bytes"]) == ("durable", WORLD * len(content(0)))
    for rank in range(WORLD):
        assert (
            json.loads(os.getxattr(place / "new" / f"rank{rank}", "user.aifs.state"))["bytes"][
                "dirty"
            ]
            == 0
        )
    saved = putfile(place / "alone", content(0))
    saved.durable.result(WAIT_S)
    assert json.loads(os.getxattr(place / "alone", "user.aifs.state"))["bytes"]["dirty"] == 0


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("options", "burst"),
    [
        pytest.param(("kernel.bridge=off",), True, id="no-bridge"),
        pytest.param((), False, id="no-burst", marks=pytest.mark.long),
    ],
)
def test_other_mounts(
    mount_store: Callable[..., Mounted], options: tuple[str, ...], burst: bool
) -> None:
    """Without the bridge a death is noticed by nobody; all else is the same."""
    store, contract = mount_store(*options, burst=burst), GroupContract()
    for number, test in enumerate(
        [
            lambda place: contract.test_all_ranks_save(place, "final"),
            contract.test_a_directory_serves_group_after_group,
            contract.test_a_rank_that_never_comes_is_named,
            contract.test_what_one_rank_meets_all_hear,
            contract.test_the_final_name_is_taken,
        ]
    ):
        place = store.path / str(number)
        place.mkdir()
        test(place)
        await_closed(place)


@pytest.mark.sweep
@pytest.mark.parametrize("options", [(), ("kernel.bridge=off",)], ids=["bridge", "no-bridge"])
def test_a_rank_that_gives_up_says_why_however_soon_it_hears_of_the_end(
    mount_store: Callable[..., Mounted], options: tuple[str, ...]
) -> None:
    group = Group("step", 0, WORLD, directory=mount_store(*options).path / "new")
    fail = group.coordinator.fail

    def fail_and_wait(reason: str) -> None:
        fail(reason)
        group.durable.exception(WAIT_S)  # who watches the group has heard of it

    group.coordinator.fail = fail_and_wait
    group.cancel("has no time")
    with pytest.raises(GroupError, match="rank 0: has no time"):
        group.durable.result()
    await_closed(Path(group.directory))


@pytest.mark.sweep
@pytest.mark.parametrize(
    "phase",
    [
        pytest.param(one, marks=() if one in ("joined", "written") else pytest.mark.long)
        for one in PHASES
    ],
)
def test_the_daemon_is_killed(mounted: Mounted, phase: str) -> None:
    """No rank is told what is not so, and the job can be run again."""
    place = mounted.path
    ranks = start(range(WORLD), save_in_phases, place, {"publish": "final"})
    for process in ranks:
        bring_to(process, phase)
    mounted.kill()
    mounted.mount()
    for process in ranks:
        process.run_on()
    told = outcomes(ranks)
    if "saved" in told or (place / "final").exists():
        check_files(place / "final")
    else:
        assert all(isinstance(one, tuple) for one in told)
        assert outcomes(start(range(WORLD), save, place, {"publish": "final"})) == ["saved"] * WORLD
    check_files(place / "final")


@pytest.mark.sweep
def test_the_daemon_is_killed_when_one_rank_has_committed(
    mounted: Mounted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All save once more, in any order."""
    monkeypatch.setattr(coordination, "REFUSED_AFTER_S", WAIT_S)
    place = mounted.path
    ranks = start(range(WORLD), save_in_phases, place, {})
    for process in ranks:
        bring_to(process, "committed" if process.rank == 2 else "joined")
    mounted.kill()
    mounted.mount()
    for process in ranks:
        process.run_on()
    assert all(isinstance(one, tuple) for one in outcomes(ranks))
    again = start([0, 1, 3], save, place, {})
    assert outcomes([*again, *start([2], save, place, {})]) == ["saved"] * WORLD
    check_files(place / "new")
