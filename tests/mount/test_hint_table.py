"""``aifs hints`` on a mount."""

import json
import os

from aifs.vfs import rights
from tests.support.mounts import Mounted, aifs

ELSEWHERE = {b"user.aifs.info", b"user.aifs.group.ID", b"user.aifs.places.N"}
"""``aifs info``, ``aifs group show``; for the client alone."""


def test_each_hint_that_says_something_of_a_directory_is_there(mounted: Mounted):
    ofany = {
        name
        for name, right in rights.HINTS.items()
        if right.read in (rights.reader, rights.lister, rights.anybody)
    }
    lines = aifs("hints", mounted.path).stdout.splitlines()
    assert {os.fsencode(line.split()[0]) for line in lines[1:]} == ofany - ELSEWHERE


def test_values_are_those_of_now(mounted: Mounted):
    directory = mounted.path / "models"
    directory.mkdir()
    os.setxattr(directory, "user.aifs.layout", b"ec=2+1")
    os.setxattr(directory, "user.aifs.tier", b"pinned")
    (directory / "sub").mkdir()
    told = json.loads(aifs("hints", directory / "sub", "--json").stdout)
    assert (told["layout"], told["tier"], told["mirror"]) == ("count=0,ec=2+1", "pinned", "0")
    assert told["state"]["state"] == "clean"
    assert "keep" not in told
    (line,) = [x for x in aifs("hints", directory).stdout.splitlines() if "aifs.tier" in x]
    assert line.split()[1] == "pinned"


def test_elsewhere_there_are_none(mounted: Mounted):
    said = aifs("hints", "/proc", check=False)
    assert said.returncode == 6
    assert said.stderr.startswith("aifs: /proc: ")
