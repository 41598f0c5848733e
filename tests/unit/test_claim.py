"""Who has a store: of two claims the newer counts."""

from dataclasses import replace
from pathlib import Path

import pytest

from aifs.data.claim import Claim, put_claim, read_claim
from aifs.data.directory_storage import DirectoryStorage
from tests.support.data_servers import make_server

CLAIM = Claim(7, "token", "host", 1, "/mnt", "/meta", (1, 2, 3), "boot")


def put(storage: DirectoryStorage, claim: Claim) -> Claim | None:
    return put_claim(storage, claim, durable=True)


@pytest.fixture
def storage(tmp_path: Path) -> DirectoryStorage:
    return DirectoryStorage(make_server(tmp_path / "server", 0))


def test_the_newest_claim_counts(storage: DirectoryStorage) -> None:
    assert read_claim(storage) is None
    for renewals in range(5):
        claim = replace(CLAIM, renewals=renewals)
        assert put(storage, claim) is None
        assert read_claim(storage) == claim


@pytest.mark.parametrize(
    ("other", "ends"),
    [
        (replace(CLAIM, epoch=8, token="other"), True),
        (replace(CLAIM, token="other"), True),
        (replace(CLAIM, epoch=6, token="other", renewals=9), False),
        (replace(CLAIM, renewals=9), False),
    ],
)
def test_a_claim_is_ended_by_one_of_a_later_epoch_or_a_rival(
    storage: DirectoryStorage, other: Claim, ends: bool
) -> None:
    put(storage, other)
    assert put(storage, CLAIM) == (other if ends else None)
    assert (read_claim(storage) == other) == (ends or other.epoch == CLAIM.epoch)


def test_a_renewal_that_comes_late_changes_nothing(storage: DirectoryStorage) -> None:
    """It was under way when the store was given back."""
    given_back = replace(CLAIM, held=False, renewals=3)
    put(storage, given_back)
    assert put(storage, replace(CLAIM, renewals=2)) is None
    assert read_claim(storage) == given_back


def test_paths_may_be_long(storage: DirectoryStorage) -> None:
    for renewals in range(3):
        put(storage, replace(CLAIM, mountpoint="\udcff" * 4096, renewals=renewals))
        assert read_claim(storage).renewals == renewals
