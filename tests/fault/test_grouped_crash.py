"""SIGKILL of one rank of a grouped write in a plain directory, at every operation on files that it
does.

The other rank hears of it, or saves with it if it had committed; nothing partial is visible; the
next attempt succeeds.
"""

from pathlib import Path

import pytest

from aifs.client import Group, group_putfile
from aifs.core import files
from tests.fault.test_client_crash import OPERATIONS_MAX, Killer
from tests.support.group_ranks import WAIT_S, Rank, outcomes, start

UNHEARD_S = (
    3.0  # until the other gives up; one that died before it was heard of is missed only then
)
NAMES = {"rank0", "rank1", ".aifs-manifest.json"}


def save(
    rank: int, process: Rank, place: Path, timeout_s: float, victim: int = -1, at: int = 0
) -> str:
    if rank == victim:
        files.set_hook(Killer(at))
    group = Group("step", rank, 2, directory=place / "new", publish="final", timeout_s=timeout_s)
    group_putfile(f"rank{rank}", b"content" * 1000, group).durable.result(WAIT_S)
    files.set_hook(None)
    return "saved"


@pytest.mark.parametrize("stride", [11, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_is_killed(tmp_path: Path, victim: int, stride: int) -> None:
    for at in range(victim, OPERATIONS_MAX, stride):
        place = tmp_path / str(at)
        place.mkdir()
        both = outcomes(start([0, 1], save, place, UNHEARD_S, victim, at))
        said = both[1 - victim]
        assert ((place / "final").exists()) == (said == "saved"), (at, said)
        if said != "saved":
            assert said[0] == "GroupExpired" or (said[0] == "RankDied" and said[2] == victim)
            assert outcomes(start([1, 0], save, place, WAIT_S)) == ["saved"] * 2
            assert {entry.name for entry in place.iterdir()} == {"final"}
        assert {entry.name for entry in (place / "final").iterdir()} == NAMES
        assert all(
            (place / "final" / f"rank{rank}").read_bytes() == b"content" * 1000 for rank in range(2)
        )
        if both[victim] == "saved":
            return
    raise AssertionError(f"more than {OPERATIONS_MAX} operations")
