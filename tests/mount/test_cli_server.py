"""``aifs server`` on a mount: programs go on reading and writing while servers come and go."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.hosts import until
from tests.support.mounts import Mounted, aifs

DATA = os.urandom(3 << 20)


def test_servers_come_and_go_below_a_mount(
    mount_store: Callable[..., Mounted], scratch: Path
) -> None:
    store = mount_store(
        "layout.unit=64KiB", "layout.count=2", "burst.drain_delay=0s", "meta.backup_interval=0"
    )
    path = store.path
    (path / "plain").write_bytes(DATA)
    (path / "safe").mkdir()
    os.setxattr(path / "safe", "user.aifs.layout", b"ec=2+1")
    (path / "safe" / "file").write_bytes(DATA)
    aifs("drain", path)
    new = scratch / "new"
    assert (
        aifs("server", "add", "--domain", "rack-b", path, new).stdout
        == f"added {new} to the store, as data server 4\n"
    )
    refusal = aifs("server", "rm", store.source, 0, check=False)
    assert refusal.returncode == 4
    assert (
        refusal.stderr
        == f"aifs: refused by the mount at {path}: data server 0 is in use: drain it first\n"
    )
    with open(path / "plain", "rb") as reader:
        assert reader.read(1000) == DATA[:1000]
        done = aifs("server", "drain", path, 0, "--wait", "--timeout", "30s").stdout
        assert done == f"data server 0 is empty; take it out with: aifs server rm {path} 0\n"
        assert not list((store.source / "data" / "0").glob("objects/*/*/*"))
        assert reader.read() == DATA[1000:]
    removed = aifs("server", "rm", path, 0, "--wait", "--timeout", "50s").stdout
    assert removed == "data server 0 is removed from the store\n"
    status = json.loads(aifs("server", "ls", path, "--json").stdout)
    assert [(server["role"], server["id"]) for server in status["servers"]] == [
        ("data", 1),
        ("data", 2),
        ("data", 3),
        ("data", 4),
        ("burst", 0),
    ]
    assert "rack-b" in aifs("server", "ls", store.source).stdout
    for place in (path, store.source):
        servers = json.loads(aifs("config", "show", place, "--json").stdout)["servers"]["value"]
        assert str(new) in servers and f"{store.source}/data/0" not in servers
    assert aifs("meta", "ls", store.source).stderr == ""
    assert json.loads(aifs("status", path / "plain", "--json").stdout)["mountpoint"] == str(path)
    store.remount()
    assert (path / "plain").read_bytes() == (path / "safe" / "file").read_bytes() == DATA


def aging_of(path: Path) -> dict:
    return json.loads(aifs("status", path, "--json").stdout)["aging"]


@pytest.mark.sweep
def test_old_files_move_to_a_server_with_a_class(
    mount_store: Callable[..., Mounted], scratch: Path
) -> None:
    store = mount_store("layout.pack_below=0", "burst.drain_delay=0s")
    path = store.path
    aifs("server", "add", "--class", "cold", path, scratch / "cold")
    (path / "old").write_bytes(DATA)
    (path / "young").write_bytes(DATA)
    aifs("drain", path)
    objects = [*(scratch / "cold").glob("objects/*/*/*")]
    assert not objects, "new files go elsewhere"
    os.utime(path / "old", (1, 1))
    refused = aifs("server", "add", "--class", "Co/ld", path, scratch / "other", check=False)
    assert refused.returncode and "is no class" in refused.stderr
    subprocess.run(["setfattr", "-n", "user.aifs.age", "-v", "30d:cold", path], check=True)
    with open(path / "old", "rb") as reader:
        until(lambda: aging_of(path)["files"] == 1, "the old file moves")
        assert reader.read() == DATA
    [part] = json.loads(aifs("info", path / "old", "--json").stdout)["parts"]
    assert part["path"].startswith(str(scratch / "cold"))
    words = b"the same words\n" * (1 << 17)
    (path / "words").write_bytes(words)
    aifs("drain", path)
    os.utime(path / "words", (1, 1))
    rule = "30d:cold,compress=zstd"
    subprocess.run(["setfattr", "-n", "user.aifs.age", "-v", rule, path], check=True)
    with open(path / "words", "rb") as reader:
        until(lambda: aging_of(path)["compressed_files"] >= 1, "it is compressed")
        assert reader.read() == words
    said = aifs("info", path / "words").stdout
    assert "interleaved" in said and "compression" in said
    assert "moved since the mount" in aifs("status", path).stdout
    store.remount()
    assert (path / "words").read_bytes() == words
    assert (path / "old").read_bytes() == (path / "young").read_bytes() == DATA
    assert "cold" in aifs("server", "ls", path).stdout
    assert "30d:cold,compress=zstd:3" in aifs("hint", "ls", path).stdout
