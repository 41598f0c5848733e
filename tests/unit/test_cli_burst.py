"""The commands of the burst tier in process, on a mount that is played: what they ask of it, print,
and exit with.
"""

import errno
import json
import math
import os
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest
import yaml

from aifs.cli import door, output, tiers, umount
from aifs.cli.doctor import burst_checks, drain_checks
from aifs.cli.main import main
from aifs.cli.status import SHOWS
from aifs.watch import figures

MIB = 1 << 20


class Played:
    """A directory of plain files whose hints are answered here. Each pause of a command is a step
    of the background work."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.states: dict[str, str] = {}
        self.pinned: set[str] = set()
        self.opened: set[str] = set()
        self.needed: set[str] = set()
        self.staging: list[str] = []
        self.tiers: dict[str, str] = {}
        self.foreign: set[str] = set()
        self.room = 1 << 40
        self.draining = False
        self.has_bridge = True
        self.error = ""
        self.since_ns = 1
        self.near: set[str] = set()
        self.calls: list[int] = []  # files in each
        self.inos: dict[str, set[int]] = {}  # of a path and of those above
        self.own_blocks = Counter[str]()  # by path, bytes that go with the file
        self.blocks = Counter[str]()  # bytes that lie in blocks of others

    def file(self, name: str, state: str, mib: int = 1) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            file.truncate(mib * MIB)
        self.states[str(path)] = state
        self.inos[str(path)] = {it.stat().st_ino for it in (path, *path.parents)}
        return path

    def read(self, path: str, name: str, follow: bool = True) -> dict:
        files = [item for item in self.states if item == path or item.startswith(f"{path}/")]
        if name == "drain":
            dirty = [item for item in files if self.states[item] == "dirty"]
            return {
                "files": len(dirty),
                "bytes": sum(map(os.path.getsize, dirty)),
                "open_files": sum(item in self.opened for item in dirty),
                "oldest_since_ns": self.since_ns if dirty else None,
                "error": self.error,
                "hosts": {},
                "again_files": 0,
                "again_in_s": None,
            }
        assert name == "state"
        sizes, counts = (
            dict.fromkeys(("dirty", "draining", "clean", "cached"), 0) for _ in range(2)
        )
        for item in files:
            counts[self.states[item]] += 1
            sizes[self.states[item]] += os.path.getsize(item)
        state = next((s for s in counts if counts[s]), "clean")
        return {
            "state": state,
            "bytes": sizes,
            "files": counts,
            "block_bytes": sum(self.own_blocks[item] + self.blocks[item] for item in files),
            "copy": state != "clean",
            "local": state != "clean" and not self.blocks[path],
            "open": path in self.opened,
            "pinned": path in self.pinned,
            "staging": path in self.staging,
            "needed": path in self.needed,
        }

    def put(self, path: str, name: str, value: str = "") -> None:
        state = self.states.get(path)
        if name == "drain":
            self.draining = True
        elif name == "tier":
            self.tiers[os.path.relpath(path, self.root)] = value
        elif path in self.foreign:
            raise PermissionError(errno.EPERM, "owner", path)
        elif name == "stage":
            self.staging.append(path)
        elif name == "evict":
            if why := self.why_kept(path):
                raise OSError(errno.EBUSY, why, path)
            self.states[path] = "clean"
            del self.own_blocks[path]
        if state is None and name == "stage":
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)

    def why_kept(self, path: str) -> str:
        if self.states[path] == "dirty":
            return "dirty"
        whys = {"pinned": self.pinned, "open": self.opened, "needed": self.needed}
        return next((why for why, paths in whys.items() if path in paths), "")

    def call(self, batch: door.Batch, name: str, limit: int = 1 << 60) -> dict:
        if not self.has_bridge:
            raise OSError(errno.ENOTTY, "Inappropriate ioctl for device", batch.path)
        self.calls.append(len(batch.inos))
        kept, moved, there = Counter[str](), list[int](), 0
        for path, state in list(self.states.items()):
            if self.inos[path].isdisjoint(batch.inos):
                continue
            size = os.path.getsize(path)
            if name == "evict":
                here = size * (state != "clean") + self.own_blocks.pop(path, 0)
                if why := self.why_kept(path):
                    kept[why] += 1
                elif here:
                    self.states[path] = "clean"
                    moved.append(here)
            elif state != "clean" and not self.blocks[path]:
                there += 1
            elif path in self.foreign | self.near:
                kept["near" if path in self.near else "owner"] += 1
            elif size > limit:
                kept["limit"] += 1
            elif size > self.room:
                kept["room"] += 1
            else:
                limit -= size
                moved.append(size)
                self.bring(path)
        told = {"files": len(moved), "bytes": sum(moved), "kept": kept}
        return told | ({"there": there} if name == "stage" else {})

    def bring(self, path: str) -> None:
        self.room -= os.path.getsize(path)
        self.states[path] = "cached"
        del self.blocks[path]

    def step(self, seconds: float) -> None:
        for path in self.staging[:1]:
            self.staging.remove(path)
            if os.path.getsize(path) <= self.room:
                self.bring(path)
        waiting = [
            path
            for path, state in self.states.items()
            if state == "dirty" and path not in self.opened
        ]
        for path in waiting[:1] if self.draining else []:
            self.states[path] = "cached"


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Played:
    played = Played(tmp_path)
    monkeypatch.setattr(door, "read", played.read)
    monkeypatch.setattr(door, "put", played.put)
    monkeypatch.setattr(door.Batch, "call", lambda *args, **fields: played.call(*args, **fields))
    monkeypatch.setattr(door, "require_inside", os.stat)
    monkeypatch.setattr(time, "sleep", played.step)
    return played


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_a_mount_that_cannot_tell_what_is_undrained_is_unmounted_all_the_same(monkeypatch) -> None:
    def fail(path: str, name: str) -> dict:
        raise OSError(errno.EIO, "Input/output error", path)

    monkeypatch.setattr(door, "read", fail)
    assert umount.find_undrained("/mnt/s").files == 0


def test_a_dead_daemon_is_named() -> None:
    said = output.describe_error(
        OSError(errno.ENOTCONN, "Transport endpoint is not connected", "/mnt/s/x")
    )
    assert said == "/mnt/s/x: the daemon of this mount is gone; mount the store here again"


# --- drain ----------------------------------------------------------------------------------------


def test_drain_waits_until_all_is_drained(capsys, mount: Played) -> None:
    for number in range(3):
        mount.file(f"tree/{number}", "dirty", number + 1)
    mount.file("beside", "dirty")
    code, out, err = run(capsys, "drain", mount.root / "tree")
    assert (code, err) == (0, "")
    assert out.startswith("drained 3 files (6.00 MiB), ")
    assert set(mount.states.values()) == {"cached", "dirty"}
    assert run(capsys, "drain", mount.root / "tree") == (0, "nothing was undrained\n", "")


def test_what_is_drained_as_soon_as_it_is_asked_for_counts(capsys, mount: Played, monkeypatch):
    path = mount.file("file", "dirty")
    put = mount.put

    def put_and_drain(*arguments) -> None:
        put(*arguments)
        mount.states[str(path)] = "cached"

    monkeypatch.setattr(door, "put", put_and_drain)
    assert run(capsys, "drain", path)[1].startswith("drained 1 file (1.00 MiB), ")


def test_drain_gives_up_after_the_timeout(capsys, mount: Played) -> None:
    path = mount.file("open", "dirty", 5)
    mount.opened.add(str(path))
    code, out, err = run(capsys, "drain", path, "--timeout", "10ms")
    assert (code, out) == (7, "")
    assert err == (
        "aifs: not drained after 10ms: 1 file (5.00 MiB, 1 open for writing); draining goes on, "
        "and aifs status shows what holds it up\n"
    )


def test_drain_does_not_wait_for_what_is_written_meanwhile(capsys, mount: Played) -> None:
    path = mount.file("new", "dirty")
    mount.opened.add(str(path))
    mount.since_ns = time.time_ns() + 10**12
    assert run(capsys, "drain", path)[1] == "nothing was undrained\n"


def test_an_interrupted_drain_says_that_it_goes_on(capsys, mount: Played, monkeypatch) -> None:
    path = mount.file("file", "dirty")
    monkeypatch.setattr(time, "sleep", lambda seconds: (_ for _ in ()).throw(KeyboardInterrupt))
    code, out, err = run(capsys, "drain", path)
    assert (code, out) == (130, "")
    assert err.rstrip("\n") == "aifs: draining goes on in the background; left: 1 file (1.00 MiB)"


@pytest.mark.parametrize("timeout", ["5 minutes", "-1s", "x"])
def test_a_wrong_duration_is_refused(capsys, timeout: str) -> None:
    code, _, err = run(capsys, "drain", "/x", "--timeout", timeout)
    assert code == 2 and "is not a duration" in err and err.count("\n") == 1


def test_drain_says_once_that_a_server_fails(capsys, mount: Played) -> None:
    for name in "abc":
        mount.file(f"tree/{name}", "dirty")
    mount.error = "data server 2: Input/output error"
    code, _, err = run(capsys, "drain", mount.root)
    assert (code, err) == (
        0,
        "aifs: draining is tried again and again: data server 2: Input/output error\n",
    )


# --- warm -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_bridge", [True, False])
def test_warm_stages_many_in_a_call(
    capsys, mount: Played, has_bridge: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "_SOON_S", math.inf)
    monkeypatch.setattr(output, "NOTICE_S", math.inf)
    mount.has_bridge = has_bridge
    for number in range(100):
        mount.file(f"tree/{number % 3}/{number}", "clean" if number % 5 else "cached")
    mount.file("tree/dirty", "dirty")
    (mount.root / "tree/link").symlink_to("dirty")
    assert run(capsys, "warm", mount.root / "tree") == (
        0,
        "staged 80 files, 80.0 MiB; there already: 21\n",
        "",
    )
    assert len(mount.calls) < 100
    assert mount.read(str(mount.root), "state")["files"]["clean"] == 0


@pytest.mark.parametrize("has_bridge", [True, False])
def test_warm_keeps_to_its_limit(capsys, mount: Played, has_bridge: bool) -> None:
    mount.has_bridge = has_bridge
    for number in range(5):
        mount.file(f"tree/{number}", "clean", 3)
    code, out, err = run(capsys, "warm", mount.root / "tree", "--limit", "10MiB")
    assert (code, err) == (0, "")
    assert out == "staged 3 files, 9.00 MiB; there already: 0\nleft out by the limit: 2 files\n"


def test_warm_has_nothing_to_do_where_the_servers_are_as_near(capsys, mount: Played) -> None:
    for name in ("tree/a", "tree/b"):
        mount.near.add(str(mount.file(name, "clean")))
    assert run(capsys, "warm", mount.root / "tree") == (
        0,
        "staged 0 files, 0 B; there already: 0\n"
        "on data servers that are as near as the burst tier, and need no staging: 2 files\n",
        "",
    )


@pytest.mark.parametrize("has_bridge", [True, False])
def test_warm_says_what_was_refused(capsys, mount: Played, has_bridge: bool) -> None:
    mount.has_bridge = has_bridge
    mount.foreign.add(str(mount.file("tree/a", "clean")))
    mount.file("tree/b", "clean")
    mount.file("tree/c", "clean", 9)
    mount.room = 2 * MIB
    code, out, err = run(capsys, "warm", mount.root / "tree")
    assert (code, out) == (1, "staged 1 file, 1.00 MiB; there already: 0\n")
    assert sorted(err.splitlines()) == [
        "aifs: 1 file not staged: no room in the burst tier, changed meanwhile, written to in "
        "place, or not told by the data servers",
        "aifs: 1 file not staged: only the owner and root may",
    ]


def test_warm_says_what_is_evicted_again(capsys, mount: Played, monkeypatch) -> None:
    """A burst tier that is too small for all makes room for the last ones."""
    files = [str(mount.file(f"tree/{number}", "clean")) for number in range(4)]

    def call(batch: door.Batch, name: str, **fields: int) -> dict:
        if "limit" in fields:
            mount.states.update(dict.fromkeys(files[:2], "clean"))
        return mount.call(batch, name, **fields)

    monkeypatch.setattr(door.Batch, "call", call)
    code, out, err = run(capsys, "warm", mount.root / "tree")
    assert (code, out) == (1, "staged 4 files, 4.00 MiB; there already: 0\n")
    assert err == "aifs: 2 files not staged: evicted again: the burst tier has no room for all\n"


@pytest.mark.parametrize("has_bridge", [True, False])
def test_warm_passes_over_what_is_removed_meanwhile(
    capsys, mount: Played, has_bridge: bool
) -> None:
    mount.has_bridge = has_bridge
    path = mount.file("tree/a", "clean")
    mount.states.clear()
    assert run(capsys, "warm", path) == (0, "staged 0 files, 0 B; there already: 0\n", "")


def test_warm_check_only_counts(capsys, mount: Played) -> None:
    mount.file("tree/a", "clean", 3)
    mount.file("tree/b", "cached")
    mount.file("tree/c", "dirty")
    code, out, _ = run(capsys, "warm", "--check", mount.root / "tree", mount.root / "tree/a")
    assert code == 0 and not mount.calls
    assert [line.split() for line in out.splitlines()[1:]] == [
        ["2", "2.00", "MiB", "1", "3.00", "MiB", "0", "B", f"{mount.root}/tree"],
        ["0", "0", "B", "1", "3.00", "MiB", "0", "B", f"{mount.root}/tree/a"],
    ]
    _, out, _ = run(capsys, "warm", "--check", "--json", mount.root / "tree")
    assert json.loads(out)[f"{mount.root}/tree"]["bytes"]["clean"] == 3 * MIB


# --- evict, pin -----------------------------------------------------------------------------------


@pytest.mark.parametrize("has_bridge", [True, False])
def test_evict_counts_blocks(capsys, mount: Played, has_bridge: bool) -> None:
    mount.has_bridge = has_bridge
    both, own, shared = (
        mount.file(f"tree/{name}", state)
        for name, state in (("both", "cached"), ("own", "clean"), ("shared", "clean"))
    )
    mount.own_blocks.update({str(both): MIB // 2, str(own): MIB})
    mount.blocks[str(shared)] = MIB
    code, out, _ = run(capsys, "warm", "--check", "--json", mount.root / "tree")
    assert next(iter(json.loads(out).values()))["block_bytes"] == 5 * MIB // 2
    code, out, err = run(capsys, "evict", mount.root / "tree")
    assert (code, out, err) == (0, "evicted 2 files, 2.50 MiB\n", "")
    assert run(capsys, "evict", mount.root / "tree")[1] == "evicted 0 files, 0 B\n"


@pytest.mark.parametrize("has_bridge", [True, False])
def test_evict_says_what_stays_and_why(capsys, mount: Played, has_bridge: bool) -> None:
    mount.has_bridge = has_bridge
    mount.file("tree/cached", "cached", 2)
    mount.file("tree/clean", "clean")
    mount.file("tree/dirty", "dirty")
    mount.pinned.add(str(mount.file("tree/pinned", "cached")))
    mount.opened.add(str(mount.file("tree/open", "cached")))
    mount.needed.add(str(mount.file("tree/needed", "cached")))
    code, out, err = run(capsys, "evict", mount.root / "tree")
    assert (code, out) == (1, "evicted 1 file, 2.00 MiB\n")
    assert sorted(err.splitlines()) == [
        "aifs: 1 file not evicted: data servers that have its bytes are lost, fail or have wrong "
        "ones: the copy may be all there is",
        "aifs: 1 file not evicted: open",
        "aifs: 1 file not evicted: pinned; aifs unpin lets go",
        (
            "aifs: 1 file not evicted: the newest bytes are in the burst tier alone; aifs drain "
            "moves them"
        ),
    ]
    assert run(capsys, "evict", mount.root / "tree/cached") == (0, "evicted 0 files, 0 B\n", "")


def test_evict_waits_a_moment_for_a_close(capsys, mount: Played, monkeypatch) -> None:
    """close(2) has returned, and the mount hears of it later."""
    mount.opened.add(str(mount.file("tree/closing", "cached", 2)))
    mount.file("tree/cached", "cached", 1)
    monkeypatch.setattr(time, "sleep", lambda _: mount.opened.clear())
    done = run(capsys, "evict", mount.root / "tree")
    assert done == (0, "evicted 2 files, 3.00 MiB\n", "")


def test_pin_sets_the_tier_of_all_and_stages(capsys, mount: Played, monkeypatch) -> None:
    mount.file("tree/deep/a", "clean")
    mount.file("tree/b", "cached")
    mount.blocks[str(mount.file("tree/c", "cached"))] = MIB

    def getxattr(path: str, name: str) -> bytes:
        assert name == "user.aifs.tier"
        return mount.tiers.get(os.path.relpath(path, mount.root), "default").encode()

    monkeypatch.setattr(os, "getxattr", getxattr)
    code, out, _ = run(capsys, "pin", mount.root / "tree")
    assert (code, out) == (0, "pinned; staged 2 files, 2.00 MiB; there already: 1\n")
    names = "tree", "tree/b", "tree/c", "tree/deep", "tree/deep/a"
    assert mount.tiers == dict.fromkeys(names, "pinned")
    assert run(capsys, "unpin", mount.root / "tree") == (0, "", "")
    assert set(mount.tiers.values()) == {"default"}


def test_what_is_no_file_is_refused(capsys, mount: Played) -> None:
    os.mkfifo(mount.root / "fifo")
    for command in ("drain", "warm", "evict", "pin", "unpin"):
        code, out, err = run(capsys, command, mount.root / "fifo")
        assert (code, out) == (6, "")
        assert err == f"aifs: {mount.root}/fifo: is neither a file nor a directory\n"


# --- progress, doctor, status ---------------------------------------------------------------------


def test_progress_elsewhere_than_on_a_terminal_is_a_line_now_and_then(capsys, monkeypatch) -> None:
    monkeypatch.setattr(output, "NOTICE_S", 0.0)
    with output.progress("draining") as show:
        show(MIB, 4 * MIB)
    assert capsys.readouterr().err == "aifs: draining: 1.00 MiB of 4.00 MiB\n"


def test_doctor_looks_at_this_machine(capsys, tmp_path: Path) -> None:
    code, out, _ = run(capsys, "doctor", "--json")
    checks = json.loads(out)
    assert code == any(not check["ok"] for check in checks)
    assert {"bridge", "kernel"} <= {check["name"] for check in checks}
    assert all(bool(check["fix"]) != check["ok"] for check in checks)
    code, out, _ = run(capsys, "doctor", "--json", tmp_path)
    first, *checks = json.loads(out)
    assert (code, first["name"]) == (1, "store")
    assert first["why"] == f"{tmp_path}: there is no store; make one with: aifs format {tmp_path}"
    assert not any("burst" in check["name"] for check in checks)
    assert os.listdir(tmp_path) == []
    assert run(capsys, "format", tmp_path)[0] == 0
    code, out, _ = run(capsys, "doctor", tmp_path)
    assert f"burst directory {tmp_path}/burst" in out and "there is no store" not in out
    code, _, err = run(capsys, "doctor", tmp_path / "missing")
    assert (code, err) == (1, f"aifs: {tmp_path}/missing: No such file or directory\n")


def test_doctor_advises_nobody_to_format_a_store_that_is_there(capsys, tmp_path: Path) -> None:
    """It did where the marker of the metadata was damaged, or they were lost alone."""
    run(capsys, "format", tmp_path)
    (tmp_path / "meta" / ".aifs").write_text("damaged")
    first, *_ = json.loads(run(capsys, "doctor", "--json", tmp_path)[1])
    assert "meta/.aifs: damaged marker" in first["why"] and "format" not in str(first)
    shutil.rmtree(tmp_path / "meta")
    first, *_ = json.loads(run(capsys, "doctor", "--json", tmp_path)[1])
    assert f"If it is lost: aifs meta restore {tmp_path}" in first["why"]


def burst_status(**changes: object) -> dict:
    devices = [{"id": 0, "path": "/b", "refuses": ""}]
    none = {"throttled_writers": 0, "pause_s": 0.0}
    return none | {"devices": devices, "drain_bytes_per_s": 5 * MIB} | changes


def test_doctor_names_a_burst_tier_that_slows_down() -> None:
    assert [check["ok"] for check in burst_checks(burst_status())] == [True]
    full = {"id": 0, "path": "/b", "refuses": "above the high mark"}
    checks = burst_checks(burst_status(devices=[full], pause_s=0.1))
    assert [(check["name"], check["why"]) for check in checks] == [
        ("room in /b", "above the high mark"),
        ("draining", "new files have to wait for it"),
    ]
    assert not any(check["ok"] for check in checks) and all(check["fix"] for check in checks)
    assert [check["why"] for check in burst_checks(burst_status(devices=[]))] == [
        "the store has none"
    ]


def test_doctor_names_what_keeps_files_from_being_drained() -> None:
    assert drain_checks(drain_status()) == []
    [check] = drain_checks(drain_status(failing_files=2, last_error="data server 0 is full"))
    assert (
        check["name"] == "draining of 2 files"
        and check["why"] == "data server 0 is full"
        and check["fix"]
    )


def test_what_is_left_is_said_in_a_line() -> None:
    assert str(tiers.Left(1, 5, 0)) == "1 file (5 B)"
    assert str(tiers.Left(2, 2048, 1)) == "2 files (2.00 KiB, 1 open for writing)"


def drain_status(**changes: object) -> dict:
    none = dict.fromkeys(("files", "bytes", "oldest_age_s", "late"), 0)
    none |= dict.fromkeys(("active_files", "held_files", "withheld_files", "failing_files"), 0)
    return none | {"drained_files": 7, "last_error": ""} | changes


STATUS = """
bridge: {in_use: true, passthrough: false, requests: {"3": 9, "14": 5}, answered: {"3": 8}}
background: {share: 0.031, seconds: 12.34}
memory: {total_bytes: 4194304, used_bytes: 1048576, peak_bytes: 1048576, waiting: 0, waits: 0}
cache: {cached_bytes: 0, hits: 1, misses: 2, read_ahead_bytes: 3}
scrub: {begun_s: 1.7e+9, ended_s: 0, running: false}  # a store made then
groups: {open: 1, committed: 0, durable: 2, stored_bytes: 1048576, saved_bytes: 3145728}
doomed: {trees: 1, directories: 3, removed_inodes: 7}
backup: {interval_s: 300.0, sequence: 77, time_s: null, base_bytes: 1048576, increment_bytes: 0,
  changed_bytes: 0, waiting_deletions: 1, last_error: told to}
"""


def test_status_says_why_new_files_wait() -> None:
    status = yaml.safe_load(STATUS) | {
        "burst": burst_status(throttled_writers=2, pause_s=0.05),
        "drain": drain_status(),
    }
    lines = dict(figures.describe(status, SHOWS))
    assert lines["drain"] == "all is on the capacity tier; 7 files drained since the mount"
    assert lines["bridge"] == "in use, without passthrough; it answered 8 of 14 requests itself"
    assert lines["groups"] == "1 open, 0 being drained, 2 durable; 1.00 MiB stored, 3.00 MiB saved"
    assert lines["throttle"] == "a new file waits 50 ms, 2 do now; draining does not keep up"
    assert lines["removing"] == "1 tree being taken apart, 3 directories left as far as is known"
    assert lines["backup"] == (
        "of an earlier mount, sequence 77, 1.00 MiB and 0 B of changes; deletions wait for the "
        "next one; failing: told to"
    )
    assert lines["memory"] == "1.00 MiB of 4.00 MiB, peak 1.00 MiB, 0 waiting"
    assert "movers" not in lines  # an older daemon says nothing of them
    movers = {"limit": 2, "running": 1, "busy": 1, "jobs": 4, "moved_bytes": MIB, "restarts": 3}
    assert dict(figures.describe(status | {"movers": movers}, SHOWS))["movers"] == (
        "1 of 2 running, 1 busy; 1.00 MiB moved since the mount; 3 died"
    )
    one = dict.fromkeys(("active_files", "held_files", "failing_files"), 1)
    late = {"oldest_age_s": 400.2, "late": True, "last_error": "data server 2: no space"}
    status["drain"] = drain_status(files=3, bytes=3 * MIB, **one, **late)
    assert dict(figures.describe(status, SHOWS))["drain"] == (
        "3 files (3.00 MiB) undrained for up to 400 s; 1 active, 5.00 MiB/s; 1 open for writing; "
        "beyond burst.drain_deadline; 1 to be tried again after: data server 2: no space"
    )
