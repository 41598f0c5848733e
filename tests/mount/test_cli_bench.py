"""``aifs bench``: what it prints, and that it leaves nothing behind."""

import json
import os
from pathlib import Path

import pytest

from tests.support.mounts import aifs

SMALL = ("--size", "1MiB", "--files", "3")


@pytest.mark.sweep
def test_a_mount_beside_a_plain_directory(on_mount: Path, scratch: Path):
    plain = scratch / "plain"
    plain.mkdir()
    rows = json.loads(aifs("bench", on_mount, "--against", plain, *SMALL, "--json").stdout)
    assert len(rows) == 8
    for row in rows:
        assert row["rate"] > 0 and row["plain"] > 0
        assert abs(row["ratio"] - row["rate"] / row["plain"]) < 1e-9
        assert row["limited_by"] in ("", "this process", "the daemon", "the storage", "AIFS")
        assert row["limited_by"] != "the storage" or row["ratio"] > 0.5
    assert os.listdir(on_mount) == os.listdir(plain) == []


def test_any_directory_alone(tmp_path: Path):
    head, *lines = aifs("bench", tmp_path, *SMALL).stdout.splitlines()
    assert (len(lines), "ratio" in head) == (8, False)
    assert os.listdir(tmp_path) == []


def test_a_directory_that_is_not_there_is_one_line(tmp_path: Path):
    said = aifs("bench", tmp_path / "none", check=False)
    assert (said.returncode, said.stderr.count("\n")) == (1, 1)
    assert str(tmp_path / "none") in said.stderr
