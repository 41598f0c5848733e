"""`aifs debug` and `aifs config set` on a real mount: what is told, and what must not be."""

import json
import os
import signal
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from aifs.cli import config, debug, door
from aifs.cli.main import main
from tests.support.mounts import Mounted, aifs
from tests.support.users import in_process

NOBODY = 65534
SECRET, CONTENT = "planted-secret-4711", b"planted-content-0815 " * 1000


def members(bundle: Path) -> dict[str, bytes]:
    with tarfile.open(bundle) as archive:
        found = {}
        for member in archive.getmembers():
            file = archive.extractfile(member)
            assert file is not None and member.mode == 0o600
            found[member.name.partition("/")[2]] = file.read()
        return found


def test_a_bundle_has_all_but_secrets_and_contents(
    scratch: Path, mount_store: Callable[..., Mounted]
) -> None:
    secret = scratch / "secret"
    secret.write_text(f"{SECRET}\n")
    secret.chmod(0o600)
    mount = mount_store(f"metrics.listen={scratch / 'socket'}", f"metrics.secret={secret}")
    (mount.path / "file").write_bytes(CONTENT)
    (mount.path / "small").write_bytes(CONTENT[:20])
    os.setxattr(mount.path / "file", "user.note", CONTENT[:40])
    aifs("drain", mount.path)
    (mount.path / "file").read_bytes()
    bundle = scratch / "bundle.tar.gz"
    told = json.loads(aifs("debug", mount.path, "--output", bundle, "--json").stdout)
    assert told["file"] == str(bundle) and told["missing"] == {}
    assert bundle.stat().st_mode & 0o777 == 0o600
    found = members(bundle)
    assert sorted(found) == told["members"]
    for name, data in found.items():
        assert SECRET.encode() not in data and CONTENT[:20] not in data, name
    assert json.loads(found["status.json"])["pid"] == mount.pid
    config = json.loads(found["config.json"])
    assert config["metrics.secret"] == {"value": str(secret), "from": "-o", "can_change": False}
    assert b"stacks of all threads and tasks" in found["log.txt"]
    assert b"aifs_uptime_seconds" in found["metrics.txt"]
    assert os.fsencode(mount.path) in found["mountinfo.txt"]
    assert json.loads(found["about.json"])["packages"]["trio"]
    assert json.loads(found["doctor.json"])
    assert aifs("debug", mount.path, "--output", bundle, check=False).returncode == 1


def test_a_daemon_that_is_stuck_is_looked_at_from_outside(
    remounted: Mounted, scratch: Path
) -> None:
    bundle = scratch / "bundle.tar.gz"
    remounted.signal(signal.SIGSTOP)
    try:
        done = aifs("debug", remounted.path, "--output", bundle)
    finally:
        remounted.signal(signal.SIGCONT)
    assert "without status.json: " in done.stdout
    found = members(bundle)
    assert "status.json" in json.loads(found["missing.json"])
    assert b"wchan" in found["threads.txt"] and b"serving" in found["log.txt"]


def test_some_keys_change_while_it_is_mounted(
    remounted: Mounted, capfd: pytest.CaptureFixture[str]
) -> None:
    def told(key: str) -> dict:
        return json.loads(aifs("config", "show", remounted.path, "--json").stdout)[key]

    before = told("burst.drain_bandwidth")
    assert before == {"value": "0", "from": "default", "can_change": True}
    done = aifs("config", "set", remounted.path, "burst.drain_bandwidth", "7MiB")
    assert done.stdout == "burst.drain_bandwidth is 7MiB until the next mount, and was 0\n"
    assert told("burst.drain_bandwidth") == before | {"value": "7MiB", "from": "aifs config set"}
    status = json.loads(aifs("status", remounted.path, "--json").stdout)
    assert status["drain"]["bandwidth"] == 7 << 20
    for key, value, said in (
        ("burst.drain_bandwidth", "lots", "'lots' is not a size"),
        ("layout.unit", "1MiB", "read when the store is mounted: mount again with -o layout.unit"),
        ("layout.unti", "1MiB", "the nearest valid key is layout.unit"),
    ):
        done = aifs("config", "set", remounted.path, key, value, check=False)
        assert done.returncode == 3 and said in done.stderr
    remounted.remount()
    assert told("burst.drain_bandwidth") == before
    aifs("config", "set", remounted.path, "log.level", "debug")


@pytest.mark.sweep
def test_others_are_told_nothing(shared: Mounted, capfd: pytest.CaptureFixture[str]) -> None:
    assert config and debug and door  # nobody could import them
    path = str(shared.path)
    for words in (
        ["debug", path],
        ["config", "show", path, "--json"],
        ["config", "set", path, "log.level", "debug"],
    ):
        assert in_process(lambda words=words: main(words), uid=NOBODY) == 6
        assert "only root and the user who has mounted" in capfd.readouterr().err
    name = "user.aifs.config"
    assert in_process(lambda: _errno(path, name), uid=NOBODY)


def _errno(path: str, name: str) -> bool:
    try:
        os.setxattr(path, name, b"log.level=debug")
    except PermissionError:
        return True
    return False
