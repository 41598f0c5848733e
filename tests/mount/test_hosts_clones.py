"""Clones in a store that two hosts share, as real mounts: one clones what the other is writing."""

import os
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
