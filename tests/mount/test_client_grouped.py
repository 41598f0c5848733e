"""Files that ranks save together, on a mount: the contract of ``Group``, and what only a mount has."""

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aifs.client import Group, group_putfile, putfile
from tests.support.group_ranks import (
    GLOO_WORLD,
    PHASES,
    WAIT_S,
    WORLD,
    GroupContract,
    Rank,
    bring_to,
    check_files,
    content,
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


class TestMount(GroupContract):
    @pytest.fixture
    def place(self, mount: Mounted, request: pytest.FixtureRequest) -> Path:
        directory = mount.path / request.node.name
        directory.mkdir()
        return directory


def test_another_number_of_ranks(mount: Mounted) -> None:
    group = Group("step", 0, WORLD, directory=mount.path / "other")
    try:
        with pytest.raises(ValueError, match=f"other: group step: .*ranks={WORLD}"):
            Group("step", 3, WORLD + 1, directory=mount.path / "other")
    finally:
        group.cancel()
    while any(open_below(mount.path)):
        pass


def test_what_a_killed_job_had_committed_is_not_taken_for_the_next_ones(mount: Mounted, tmp_path: Path) -> None:
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


def test_what_is_durable_is_on_the_servers_once(mount: Mounted) -> None:
    place = mount.path / "once"
    place.mkdir()
    assert outcomes(start(range(WORLD), save, place, {})) == ["saved"] * WORLD
    told = json.loads(os.getxattr(place / "new", "user.aifs.group"))
    assert (told["state"], told["bytes"]) == ("durable", WORLD * len(content(0)))
    for rank in range(WORLD):
        assert (
            json.loads(os.getxattr(place / "new" / f"rank{rank}", "user.aifs.state"))["bytes"]["dirty"] == 0
        )
    saved = putfile(place / "alone", content(0))
    saved.durable.result(WAIT_S)
    assert json.loads(os.getxattr(place / "alone", "user.aifs.state"))["bytes"]["dirty"] == 0


@pytest.mark.parametrize(
    ("options", "burst"),
    [
        pytest.param(("kernel.bridge=off",), True, id="no-bridge"),
        pytest.param((), False, id="no-burst", marks=pytest.mark.long),
    ],
)
def test_other_mounts(mount_store: Callable[..., Mounted], options: tuple[str, ...], burst: bool) -> None:
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


@pytest.mark.parametrize(
    "phase",
    [pytest.param(one, marks=() if one in ("joined", "written") else pytest.mark.long) for one in PHASES],
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
