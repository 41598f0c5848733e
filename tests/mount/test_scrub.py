"""``aifs scrub`` on a real mount, and on a store that is not mounted."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.mounts import Mounted, aifs
from tests.support.spoil import flip

SIZE = 3 << 20


def make(store: Mounted, name: str, layout: str) -> tuple[Path, list[str]]:
    """A drained file without a copy, and its objects."""
    directory = store.path / name
    directory.mkdir()
    os.setxattr(directory, "user.aifs.layout", layout.encode())
    file = directory / "file"
    file.write_bytes(os.urandom(SIZE))
    aifs("drain", directory)
    aifs("evict", directory)
    return file, [part["path"] for part in json.loads(aifs("info", file, "--json").stdout)["parts"]]


def test_flips_are_repaired_or_named(mount_store: Callable[..., Mounted]) -> None:
    store = mount_store("burst.drain_delay=1h,data.movers=1")
    store.expected.append(
        "scrub: /plain/file: bytes 1048576 to 2097151, on data servers .*: the bytes do not have"
    )
    mirror, objects = make(store, "mirror", "count=1,replicas=2")
    content = mirror.read_bytes()
    flip(objects[0], 5)
    flip(objects[1], 2 << 20)
    found = json.loads(aifs("scrub", "start", store.path, "--wait", "--json").stdout)
    assert (found["flaws"], found["repaired"], found["wrong"], found["running"]) == (
        2,
        2,
        [],
        False,
    )
    assert [Path(path).read_bytes() for path in objects] == [content] * 2

    _, objects = make(store, "plain", "count=1,unit=1MiB")
    flip(objects[0], 1 << 20)
    done = aifs("scrub", "start", store.path, "--wait", check=False)
    assert done.returncode == 1
    assert "/plain/file  1048576-2097151" in done.stdout
    assert "1 range of files wrong" in aifs("status", store.path).stdout
    store.unmount()
    assert aifs("scrub", "show", store.source, check=False).returncode == 1
    assert (
        json.loads(aifs("scrub", "start", store.source, "--json", check=False).stdout)[
            "wrong_ranges"
        ]
        == 1
    )
    flip(objects[0], 1 << 20)
    assert "0: 0 repaired" in aifs("scrub", "start", store.source).stdout


@pytest.mark.sweep
def test_a_scrub_in_the_background_can_be_stopped(mount_store: Callable[..., Mounted]) -> None:
    store = mount_store("burst.drain_delay=1h")
    make(store, "some", "count=2")
    make(store, "more", "count=2")
    assert (
        "goes on in the background" in aifs("scrub", "start", store.path, "--bandwidth", "1").stdout
    )
    assert json.loads(aifs("scrub", "show", store.path, "--json").stdout)["running"]
    assert "not running" in aifs("scrub", "stop", store.path, "--wait").stdout
    assert aifs("scrub", "start", store.path, "--wait", "--bandwidth", "0").returncode == 0
