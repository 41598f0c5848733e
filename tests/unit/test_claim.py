"""The file that says who has a store: of two claims the newer counts, and a torn write leaves the
one before.
"""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from aifs.data.claim import Claim, put_claim, read_claim

CLAIM = Claim(7, "token", "host", 1, "/mnt", "/meta", (1, 2, 3), "boot")


def put(directory: Path, claim: Claim) -> Claim | None:
    return put_claim(str(directory), claim, durable=True)


def read(directory: Path) -> Claim | None:
    return read_claim(str(directory))


def test_the_newest_claim_counts(tmp_path: Path) -> None:
    assert read(tmp_path) is None
    for renewals in range(5):
        claim = replace(CLAIM, renewals=renewals)
        assert put(tmp_path, claim) is None
        assert read(tmp_path) == claim


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
    tmp_path: Path, other: Claim, ends: bool
) -> None:
    put(tmp_path, other)
    assert put(tmp_path, CLAIM) == (other if ends else None)
    assert (read(tmp_path) == other) == (ends or other.epoch == CLAIM.epoch)


def test_a_renewal_that_comes_late_changes_nothing(tmp_path: Path) -> None:
    """It was under way when the store was given back."""
    given_back = replace(CLAIM, held=False, renewals=3)
    put(tmp_path, given_back)
    assert put(tmp_path, replace(CLAIM, renewals=2)) is None
    assert read(tmp_path) == given_back


def test_both_slots_have_their_space_from_the_beginning(tmp_path: Path) -> None:
    """On a full disk no other could be had."""
    put(tmp_path, CLAIM)
    content = (tmp_path / "owner").read_bytes()
    assert content[: 1 << 16].rstrip(b"\0") == content[1 << 16 :]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_claim_that_root_makes_is_its_directorys_owners(tmp_path: Path) -> None:
    """Who may have root check the store, and mounts it then."""
    os.chown(tmp_path, 12345, 12346)
    put(tmp_path, CLAIM)
    status = (tmp_path / "owner").stat()
    assert (status.st_uid, status.st_gid) == (12345, 12346)


def test_a_torn_write_leaves_the_claim_before(tmp_path: Path) -> None:
    file = tmp_path / "owner"
    claims = [replace(CLAIM, renewals=number) for number in range(3)]
    put(tmp_path, claims[0])
    put(tmp_path, claims[1])
    before = file.read_bytes()
    put(tmp_path, claims[2])
    after = file.read_bytes()
    assert len(before) == len(after)
    changed = [at for at in range(len(after)) if before[at] != after[at]]
    for end in range(changed[0], changed[-1]):
        file.write_bytes(after[:end] + before[end:])
        assert read(tmp_path) == claims[1]
        file.write_bytes(after[:end] + bytes(100) + before[end + 100 :])
        assert read(tmp_path) == claims[1]


def test_paths_may_be_long(tmp_path: Path) -> None:
    for renewals in range(3):
        put(tmp_path, replace(CLAIM, mountpoint="\udcff" * 4096, renewals=renewals))
        assert read(tmp_path).renewals == renewals
