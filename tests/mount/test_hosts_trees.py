"""Clones and the trash of a store that two hosts share, as real mounts: one host clones what the
other is writing, and restores what the other has removed.
"""

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.support.hosts import Both, until
from tests.support.mounts import aifs

MIB = 1 << 20


@pytest.mark.sweep
def test_one_host_clones_what_the_other_one_writes(both: Both) -> None:
    for number, (one, other) in enumerate((both, both[::-1])):
        tree = other / f"run{number}"
        tree.mkdir()
        data = {f"shard{count}": os.urandom(2 * MIB + count) for count in range(4)}
        for name, content in data.items():
            (tree / name).write_bytes(content)
        with open(tree / "log", "wb", buffering=0) as log:
            log.write(b"so far")
            until((one / tree.name / "log").exists, "what is made is seen")
            aifs("clone", one / tree.name, one / f"clone{number}")
            aifs("snapshot", "make", one / tree.name, "before")
            log.write(b", so good")
        for name, content in data.items():
            (tree / name).write_bytes(b"other " + content)
        kept = Path(tree.name, ".snapshots", "before")
        for host in both:
            for copy in (host / f"clone{number}", host / kept):
                found = {path.name: path.read_bytes() for path in copy.iterdir()}
                assert found == data | {"log": b"so far"}
            assert (host / tree.name / "log").read_bytes() == b"so far, so good"
            assert (host / tree.name / "shard0").read_bytes() == b"other " + data["shard0"]
        (one / f"clone{number}" / "shard0").write_bytes(b"changed")
        assert (other / f"clone{number}" / "shard0").read_bytes() == b"changed"
        assert (other / kept / "shard0").read_bytes() == data["shard0"]
        aifs("rm", "-r", other / f"clone{number}")
        aifs("snapshot", "rm", one / tree.name, "before")


def kept(path: Path) -> list[str]:
    told = json.loads(aifs("trash", "ls", "--json", "--all", path).stdout)
    return sorted(os.path.relpath(one["path"], path) for one in told)


@pytest.mark.sweep
def test_what_one_host_removes_another_restores(both: Both) -> None:
    here, there = both
    os.setxattr(here, "user.aifs.trash", b"7d")
    assert os.getxattr(there, "user.aifs.trash") == b"7d"
    for number, (one, other) in enumerate((both, both[::-1])):
        tree = one / f"tree{number}"
        (tree / "below").mkdir(parents=True)
        (tree / "below" / "file").write_bytes(b"content" * 1000)
        until((other / tree.name / "below" / "file").exists, "what is made is seen")
        shutil.rmtree(tree)
        assert not (other / tree.name).exists()
        names = [tree.name, f"{tree.name}/below", f"{tree.name}/below/file"]
        assert kept(other) == kept(one) == names
        aifs("trash", "restore", other / tree.name)
        assert os.listdir(one / tree.name / "below") == ["file"]
        assert (one / tree.name / "below" / "file").read_bytes() == b"content" * 1000
        assert tree.stat().st_nlink == 3
        aifs("rm", "-r", tree)
        assert not (other / tree.name).exists() and kept(other) == [tree.name]
        aifs("trash", "restore", other / tree.name)
        assert (tree / "below" / "file").exists()
        aifs("rm", "-r", tree)
        aifs("trash", "rm", other / tree.name)
        assert kept(one) == []
    assert not os.listdir(here) and not os.listdir(there)


def test_a_file_that_another_host_has_open_goes_on(both: Both) -> None:
    here, there = both
    os.setxattr(here, "user.aifs.trash", b"7d")
    (here / "file").write_bytes(b"content")
    until((there / "file").exists, "what is made is seen")
    with open(there / "file", "rb") as file:
        (here / "file").unlink()
        assert os.fstat(file.fileno()).st_nlink == 0
        aifs("trash", "rm", here)
        assert file.read() == b"content"
