"""The trash of hosts that share a store, as real mounts: what one removes another restores."""

import json
import os
import shutil
from pathlib import Path

from tests.support.hosts import Both, until
from tests.support.mounts import aifs


def kept(path: Path) -> list[str]:
    told = json.loads(aifs("trash", "ls", "--json", "--all", path).stdout)
    return sorted(os.path.relpath(one["path"], path) for one in told)


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
