"""The commands of the burst tier on real mounts."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.mounts import ROOT, TIMEOUT_S, Mounted, aifs, aifs_on_terminal

WAITING = "burst.drain_delay=1h"
SIZE = 3 << 20


def make(directory: Path, count: int) -> None:
    directory.mkdir()
    for number in range(count):
        (directory / str(number)).write_bytes(b"%d" % number * SIZE)


def state(path: Path) -> dict:
    return json.loads(os.getxattr(path, "user.aifs.state"))


def test_files_go_down_and_up_again(mount_store: Callable[..., Mounted]) -> None:
    own = "layout.kind=striped", "layout.pack_below=0"
    store = mount_store(WAITING, "data.movers=1", "burst.blocks=always", *own)
    tree = store.path / "tree"
    make(tree, 4)
    (store.path / "beside").write_bytes(b"x" * SIZE)
    assert state(tree)["bytes"]["dirty"] == 4 * SIZE
    assert json.loads(aifs("info", tree / "0", "--json").stdout)["form"] == "burst"
    assert aifs("drain", tree).stdout.startswith("drained 4 files (12.0 MiB), ")
    assert state(tree)["files"]["cached"] == 4
    assert state(store.path / "beside")["state"] == "dirty"
    assert "copy   " in aifs("info", tree / "0").stdout
    assert aifs("evict", tree).stdout == "evicted 4 files, 12.0 MiB\n"
    assert state(tree)["files"]["clean"] == 4
    assert aifs("warm", tree, "--limit", "8MiB").stdout.startswith("staged 2 files, 6.00 MiB; ")
    assert re.search(
        r"^ +2 +6.00 MiB +2 +6.00 MiB +6.00 MiB ",
        aifs("warm", "--check", tree).stdout,
        re.MULTILINE,
    )
    assert (tree / "3").read_bytes() == b"3" * SIZE
    assert aifs("pin", tree).stdout == "pinned; staged 4 files, 12.0 MiB; there already: 0\n"
    done = aifs("evict", tree, check=False)
    assert (done.returncode, done.stdout) == (1, "evicted 0 files, 0 B\n")
    assert done.stderr == "aifs: 4 files not evicted: pinned; aifs unpin lets go\n"
    aifs("unpin", tree)
    assert re.match("evicted 4 files, [0-9.]+ MiB\n", aifs("evict", tree).stdout)
    assert state(tree)["files"]["clean"] == 4
    assert [(tree / str(number)).read_bytes() for number in range(4)] == [
        b"%d" % number * SIZE for number in range(4)
    ]


@pytest.mark.sweep
def test_umount_says_what_stays_undrained(mount_store: Callable[..., Mounted]) -> None:
    store = mount_store(WAITING)
    make(store.path / "tree", 2)
    said = aifs_on_terminal("umount", store.path)
    assert said == "in the burst tier alone until the next mount drains it: 2 files (6.00 MiB)\n"
    store.wait_for_end()
    store.mount()
    assert aifs("umount", store.path).stdout == ""  # scripts compare what umount(8) prints
    store.wait_for_end()
    store.mount()
    aifs("drain", store.path)
    make(store.path / "more", 2)
    assert aifs("umount", store.path, "--drain").stdout == ""
    store.wait_for_end()
    store.mount()
    status = json.loads(aifs("status", store.path, "--json").stdout)
    assert (status["drain"]["files"], status["drain"]["drained_files"]) == (0, 0)
    assert state(store.path)["files"]["cached"] == 4
    assert (store.path / "more/1").read_bytes() == b"1" * SIZE


@pytest.mark.sweep
def test_what_is_still_open_is_waited_for_until_the_time_out_or_an_interrupt(
    on_mount: Path,
) -> None:
    path = on_mount / "file"
    with open(path, "wb") as file:
        file.write(b"x" * SIZE)
        file.flush()
        done = aifs("drain", path, "--timeout", "300ms", check=False)
        assert done.returncode == 7
        assert done.stderr.startswith(
            "aifs: not drained after 300ms: 1 file (3.00 MiB, 1 open for writing); "
        )
        command = [sys.executable, "-m", "aifs.cli.main", "drain", path]
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as waiting:
            while not is_asleep(waiting.pid):
                pass
            waiting.send_signal(signal.SIGINT)
            _, said = waiting.communicate(timeout=TIMEOUT_S)
        assert waiting.returncode == 130
        assert (
            said.strip()
            == "aifs: draining goes on in the background; left: 1 file (3.00 MiB, 1 open for "
            "writing)"
        )
    assert aifs("drain", path).returncode == 0
    assert state(path)["state"] == "cached"


def is_asleep(pid: int) -> bool:
    """Whether the process waits in a pause of its own."""
    return "nanosleep" in Path(f"/proc/{pid}/wchan").read_text()


@pytest.mark.sweep
def test_status_shows_the_burst_tier_and_the_drain(mount_store: Callable[..., Mounted]) -> None:
    store = mount_store(WAITING)
    make(store.path / "tree", 2)
    shown = aifs("status", store.path).stdout
    assert re.search(
        r"^drain +2 files \(6.00 MiB\) undrained for up to [\d.]+ m?s; 0 active",
        shown,
        re.MULTILINE,
    )
    assert re.search(r"^throttle +none$", shown, re.MULTILINE)
    assert re.search(
        rf"^ +0 +ok +6.00 MiB +0 B .*{re.escape(str(store.source))}/burst +are admitted",
        shown,
        re.MULTILINE,
    )
    aifs("drain", store.path)
    shown = aifs("status", store.path).stdout
    assert re.search(r"^drain +all is on the capacity tier; 2 files drained", shown, re.MULTILINE)


@pytest.mark.sweep
def test_doctor_tells_what_a_mount_does_without(mount_store: Callable[..., Mounted]) -> None:
    store = mount_store("kernel.bridge=off")
    done = aifs("doctor", store.path, "--json", check=False)
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert done.returncode == 1
    assert checks["bridge"]["in_use"] is False
    assert any(check["fix"] for check in checks.values() if check["in_use"] is False)
    assert checks[f"room in {store.source}/burst"]["ok"]
    assert aifs("drain", store.path).stdout == "nothing was undrained\n"
