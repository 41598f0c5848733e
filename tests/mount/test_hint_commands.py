"""``aifs hint ls`` on a mount."""

import json
import os
from pathlib import Path

from aifs.files.asks import ROOT
from aifs.vfs import hints
from tests.support.mounts import Mounted, aifs

ELSEWHERE = {"info", "hints", "places", "why"}
"""``aifs info``; this very table; for the client alone; ``aifs why``."""


def test_each_hint_that_says_something_of_a_directory_is_there(shared: Mounted):
    of_any = {hint.stem for hint in hints.rows() if hint.get and hint.where != ROOT}
    lines = aifs("hint", "ls", shared.path).stdout.splitlines()
    names = {line.split()[0].removeprefix("user.aifs.") for line in lines[1:]}
    assert names == of_any - ELSEWHERE


def test_values_are_those_of_now(on_mount: Path):
    directory = on_mount / "models"
    directory.mkdir()
    os.setxattr(directory, "user.aifs.layout", b"ec=2+1")
    os.setxattr(directory, "user.aifs.tier", b"pinned")
    (directory / "sub").mkdir()
    told = json.loads(aifs("hint", "ls", directory / "sub", "--json").stdout)
    assert (told["layout"], told["tier"], told["mirror"]) == ("count=0,ec=2+1", "pinned", "0")
    assert told["state"]["state"] == "clean"
    assert "keep" not in told
    (line,) = [x for x in aifs("hint", "ls", directory).stdout.splitlines() if "aifs.tier" in x]
    assert line.split()[1] == "pinned"


def test_elsewhere_there_are_none():
    said = aifs("hint", "ls", "/proc", check=False)
    assert said.returncode == 6
    assert said.stderr.startswith("aifs: /proc: ")


def test_a_layout_is_set_shown_and_taken_back(on_mount: Path):
    directory = on_mount / "models"
    directory.mkdir()
    assert aifs("layout", "show", directory).stdout == "count=0\n"
    said = aifs("layout", "set", directory, "ec=2+1").stdout
    assert said == f"{directory}: count=0,ec=2+1, and was count=0\n"
    assert os.getxattr(directory, "user.aifs.layout") == b"count=0,ec=2+1"
    assert "Any 1 of its servers may be lost" in aifs("layout", "explain", directory).stdout
    wrong = aifs("layout", "set", directory, "ec=8+4", check=False)
    assert wrong.returncode == 1 and "data servers are needed" in wrong.stderr
    for _ in range(2):
        aifs("layout", "rm", directory)
    assert json.loads(aifs("layout", "show", directory, "--json").stdout) == {"layout": "count=0"}


def test_hints_are_set_shown_and_taken_back(on_mount: Path):
    directory = on_mount / "run"
    directory.mkdir()
    aifs("hint", "set", directory, "tier=pinned", "keep=last=3,every=10")
    assert aifs("hint", "show", directory, "tier").stdout == "pinned\n"
    assert aifs("hint", "show", directory, "keep").stdout == "last=3,every=10\n"
    assert json.loads(aifs("hint", "show", directory, "state", "--json").stdout)["state"] == "clean"
    aifs("hint", "rm", directory, "keep")
    assert aifs("hint", "show", directory, "keep", check=False).returncode == 1
    wrong = aifs("hint", "set", directory, "tier", check=False)
    assert (wrong.returncode, wrong.stderr) == (2, "aifs: tier is not KEY=VALUE\n")


def test_one_key_of_the_configuration(shared: Mounted):
    assert aifs("config", "get", shared.path, "data.movers").stdout.strip().isdigit()
    of_source = json.loads(aifs("config", "get", shared.source, "layout.unit", "--json").stdout)
    assert of_source.keys() == {"value", "origin"}
    assert "data.movers" in aifs("config", "get", shared.path, "data.mover", check=False).stderr


def test_a_value_is_kept_in_the_file(scratch: Path) -> None:
    """From the beginning, of a mount, and of a store that is not mounted."""
    source, path = scratch / "store", scratch / "mnt"
    path.mkdir()
    places = f"servers={scratch}/a:{scratch}/b"
    aifs("format", source, "-o", f"{places},layout.unit=1MiB", "-o", "data.movers=0")

    def value(key: str, place: Path = source) -> str:
        return aifs("config", "get", place, key).stdout.strip()

    file = source / "aifs.yaml"
    assert file.read_text().startswith("# The configuration of this store")
    assert value("servers") == f"{scratch}/a:{scratch}/b" and value("layout.unit") == "1MiB"
    aifs("mount", source, path)
    aifs("config", "set", path, "burst.drain_bandwidth", "7MiB", "--save")
    aifs("server", "add", path, scratch / "c", "--class", "cold")
    assert f"{{class: cold, path: {scratch}/c}}" in file.read_text()
    aifs("server", "drain", path, "0", "--wait")
    assert f"{file} names it no more" in aifs("server", "rm", path, "0").stderr
    aifs("umount", path)
    aifs("config", "set", source, "layout.unit", "2MiB")
    wrong = aifs("config", "set", source, "layout.unit", "5", check=False)
    assert wrong.returncode == 3 and "a multiple of 4096" in wrong.stderr
    assert aifs("config", "set", source, "servers", "/x", check=False).returncode == 3
    aifs("mount", source, path)
    assert value("burst.drain_bandwidth", path) == "7MiB" and value("layout.unit", path) == "2MiB"
    assert value("servers", path) == f"{scratch}/b:{scratch}/c (class cold)"
    aifs("umount", path)
    assert "not used" not in aifs("meta", "ls", source).stderr
    aifs("fsck", source)
