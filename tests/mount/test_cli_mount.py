"""The commands on real mounts: daemons that detach, dead mounts, refusals, exit codes."""

import json
import mmap
import os
import re
import select
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.support.mounts import ROOT, TIMEOUT_S, Mounted, aifs

MOUNT_PY = [sys.executable, str(ROOT / "mount.py")]


class Place(Mounted):
    """A store and a directory to mount it on, by commands: the test ends the daemons."""

    @property
    def directory(self) -> Path:
        return self.source.parent

    def mount(self, *arguments: str | Path) -> None:
        aifs("mount", self.source, self.path, *arguments)

    def status(self) -> dict:
        return json.loads(aifs("status", self.path, "--json").stdout)

    def kill(self) -> None:
        """kill -9 of the daemon; its mount stays behind."""
        self.adopt()
        self.kill_only()

    def mounts(self) -> list[list[str]]:
        """The lines of /proc/mounts for this place: source, mountpoint, type, options."""
        lines = Path("/proc/self/mounts").read_text().splitlines()
        return [line.split() for line in lines if line.split()[1] == str(self.path)]


def wait_for_end(descriptor: int) -> None:
    """Wait for the end of the process behind a pidfd, and close it."""
    ended = select.select([descriptor], [], [], TIMEOUT_S)[0]
    os.close(descriptor)
    assert ended


def refused(*arguments: str | Path) -> tuple[int, str]:
    """Exit code and message of a command that must fail with one line."""
    done = aifs(*arguments, check=False)
    assert done.stdout == ""
    assert done.stderr.startswith("aifs: ") and done.stderr.count("\n") == 1, done.stderr
    return done.returncode, done.stderr.removeprefix("aifs: ").rstrip("\n")


@contextmanager
def placed(directory: Path) -> Iterator[Place]:
    """A store, not mounted. Afterwards it is sound, its log is clean, and no mount or daemon is
    left."""
    made = Place(directory)
    try:
        yield made
        if made.mounts():
            aifs("umount", made.path)
        made.finish()
    finally:
        while made.mounts():
            subprocess.run(["umount", "-i", "-l", made.path], check=True)
        assert not daemons_of(made.source)


@pytest.fixture
def place(scratch: Path) -> Iterator[Place]:
    """A store of the test's own."""
    with placed(scratch) as made:
        yield made


@pytest.fixture(scope="module")
def served() -> Iterator[Place]:
    """A mount that each test leaves as it was."""
    with TemporaryDirectory(prefix="aifs-served-") as scratch, placed(Path(scratch)) as made:
        made.mount()
        yield made


def daemons_of(source: Path) -> list[str]:
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                command = Path(entry.path, "cmdline").read_bytes().split(b"\0")
            except OSError:  # it ended meanwhile
                continue
            if os.fsencode(source) in command and b"go-on" not in command:  # one that stands by
                found.append(entry.name)
    return found


# --- mount ----------------------------------------------------------------------------------------


def test_a_mount_serves_when_the_command_returns(place: Place) -> None:
    place.mount()
    (place.path / "file").write_bytes(b"x" * (3 << 20))
    status = place.status()
    assert status["mountpoint"] == str(place.path)
    assert status["source"] == str(place.source)
    assert status["uptime_s"] >= 0
    assert [server["id"] for server in status["servers"]] == [0, 1, 2, 3]
    for server in status["servers"]:
        assert server["path"] == f"{place.source}/data/{server['id']}"
        assert server["state"] == "ok"
        assert server["free_bytes"] > 0 and server["used_bytes"] > 0
    aifs("umount", place.path)
    assert place.mounts() == []
    assert daemons_of(place.source) == []
    place.mount()
    assert (place.path / "file").read_bytes() == b"x" * (3 << 20)


@pytest.mark.sweep
def test_the_daemon_has_left_its_caller(served: Place) -> None:
    pid = served.status()["pid"]
    process = Path(f"/proc/{pid}")
    assert os.getsid(pid) != os.getsid(0)
    assert os.readlink(process / "cwd") == "/"
    assert [os.readlink(process / "fd" / str(number)) for number in range(3)] == ["/dev/null"] * 3


def test_root_shares_the_mount_and_keeps_devices_and_suid(served: Place) -> None:
    source, _, fstype, options = served.mounts()[0][:4]
    assert (source, fstype) == (str(served.source), "fuse.aifs")
    assert {"rw", "allow_other", "default_permissions"} <= set(options.split(","))
    assert not {"nodev", "nosuid", "noexec"} & set(options.split(","))


@pytest.mark.sweep
def test_options_reach_the_kernel(place: Place) -> None:
    place.mount(
        *("-o", "ro,nodev", "-o", "nosuid,noexec,noatime,_netdev,noallow_other"),
        *("-o", "kernel.read_ahead=2MiB"),
    )
    device = place.path.stat().st_dev
    limit = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
    assert limit.read_text() == "2048\n"
    options = set(place.mounts()[0][3].split(","))
    assert {"ro", "nodev", "nosuid", "noexec", "noatime"} <= options
    assert "allow_other" not in options
    with pytest.raises(OSError, match="Read-only"):
        (place.path / "file").touch()


@pytest.mark.sweep
def test_a_remount_changes_options(place: Place) -> None:
    place.mount()
    file = place.path / "file"
    file.write_bytes(b"content")

    def remount(options: str) -> set[str]:
        aifs("mount", place.source, place.path, "-o", f"remount,{options}")
        return set(place.mounts()[0][3].split(","))

    def moves_atime() -> bool:
        before = file.stat().st_atime_ns
        file.read_bytes()
        return file.stat().st_atime_ns > before

    assert moves_atime() and not moves_atime()  # relatime
    held = file.open("rb")
    assert "ro" in remount("ro")
    with pytest.raises(OSError, match="Read-only"):
        file.write_bytes(b"other")
    assert {"rw", "noatime", "nosuid"} <= remount("rw,noatime,nosuid")
    file.write_bytes(b"more")
    assert not moves_atime()
    assert not {"noatime", "ro"} & remount("strictatime")
    assert moves_atime() and moves_atime()
    assert held.read() == b"more"
    held.close()
    aifs("umount", place.path)
    place.mount("-o", "layout.unit=128KiB")
    assert "ro" in remount("ro,layout.unit=131072,layout.count=0")  # as fstab repeats them
    for options, said in (
        (
            "remount,layout.unit=64KiB",
            "a remount cannot change layout.unit from 128KiB to 64KiB; mount again",
        ),
        ("remount,rw", "its store was opened read-only; unmount and mount it again"),
    ):
        done = aifs("mount", place.source, place.path, "-o", options, check=False)
        assert (done.returncode, done.stderr) == (6, f"aifs: {place.path}: {said}\n")
        aifs("umount", place.path)
        place.mount("-o", "ro")


@pytest.mark.sweep
def test_keys_reach_the_filesystem(place: Place) -> None:
    place.mount("-o", "layout.unit=64KiB,burst.capacity=64MiB,log.level=debug")
    (place.path / "file").write_bytes(bytes(1 << 20))
    aifs("drain", place.path / "file")
    info = json.loads(aifs("info", place.path / "file", "--json").stdout)
    assert info["layout"]["unit"] == 64 << 10


def test_a_yaml_source_is_mounted(place: Place) -> None:
    source = place.directory / "cluster.yaml"
    source.write_text("meta: {directory: m}\nservers: [s0, s1]\nlayout: {unit: 64KiB}\n")
    aifs("format", source)
    aifs("mount", source, place.path)
    (place.path / "file").write_bytes(bytes(200 << 10))
    info = json.loads(aifs("info", place.path / "file", "--json").stdout)
    assert sorted(part["path"].split("/objects")[0] for part in info["parts"]) == [
        f"{place.directory}/s0",
        f"{place.directory}/s1",
    ]
    assert sum(part["bytes"] for part in info["parts"]) == 200 << 10
    aifs("umount", place.path)
    assert "serving" in (place.directory / "m.log").read_text()


@pytest.mark.sweep
def test_a_dead_mount_is_taken_away_by_the_next_and_by_umount(place: Place) -> None:
    place.mount("--no-keeper")
    (place.path / "file").write_text("kept")
    place.kill()
    code, said = refused("status", place.path)
    assert code == 6 and "the daemon of this mount is gone" in said
    place.mount("--no-keeper")
    assert (place.path / "file").read_text() == "kept"
    assert len(place.mounts()) == 1
    (place.path / "file").write_text("more")
    place.kill()
    place.mount("--no-keeper")
    assert (place.path / "file").read_text() == "more"
    place.kill()
    aifs("umount", place.path)
    assert place.mounts() == []


def test_a_second_mount_is_refused_with_its_owner_named(served: Place) -> None:
    other = served.directory / "other"
    other.mkdir()
    assert refused("mount", served.source, served.path) == (
        6,
        f"{served.path}: an AIFS is mounted here already",
    )
    code, said = refused("mount", served.source, other)
    assert code == 5
    assert (
        f"pid {served.status()['pid']} on host {socket.gethostname()}, mounted at {served.path}"
        in said
    )
    assert not os.path.ismount(other)


@pytest.mark.sweep
def test_what_cannot_be_mounted_on_is_refused(place: Place) -> None:
    file = place.directory / "file"
    file.touch()
    assert refused("mount", place.source, file) == (6, f"{file}: is not a directory")
    missing = place.directory / "missing"
    assert refused("mount", place.source, missing) == (
        6,
        f"{missing}: there is no such directory; make it first",
    )
    code, said = refused("mount", place.source, place.path, "-o", "ro,nosiud")
    assert (code, said) == (3, "unknown option 'nosiud'; the nearest valid one is nosuid")


@pytest.mark.sweep
def test_a_server_that_nothing_needs_is_done_without_and_named(place: Place) -> None:
    server = place.source / "data" / "2"
    server.rename(place.source / "moved")
    place.expected.append("does without a data server")
    done = aifs("mount", place.source, place.path)
    assert (
        done.stderr.startswith("aifs: warning: mounted without it: data server 2: ")
        and str(server) in done.stderr
    )
    aifs("umount", place.path)
    (place.source / "moved").rename(server)


@pytest.mark.sweep
def test_a_daemon_that_cannot_start_says_why(place: Place) -> None:
    aifs("mount", "-o", "layout.stripe_above=0", place.source, place.path)
    (place.path / "file").write_bytes(bytes(9 << 20))
    aifs("umount", "--drain", place.path)
    server = place.source / "data" / "2"
    server.rename(place.source / "moved")
    for foreground in ([], ["--foreground"]):
        done = aifs("mount", place.source, place.path, *foreground, check=False)
        assert done.returncode == 4
        assert f"{server}: " in done.stderr.splitlines()[-1]
    assert place.mounts() == []
    (place.source / "moved").rename(server)


@pytest.mark.sweep
def test_a_mount_that_the_kernel_refuses_says_why(place: Place) -> None:
    command = (
        f'mount --bind /dev/null /dev/fuse && exec {sys.executable} -m aifs.cli.main mount "$@"'
    )
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command, "sh", place.source, place.path],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 6
    assert re.fullmatch(rf"aifs: cannot mount on {place.path}: .*Invalid argument.*\n", done.stderr)


@pytest.mark.sweep
def test_a_fake_mount_checks_only(place: Place) -> None:
    place.mount("-f", "-v", "-n", "-t", "fuse.aifs")
    assert place.mounts() == []


@pytest.mark.sweep
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_unmounts_in_order_and_keeps_pages_that_mmap_left_dirty(
    place: Place, number: int
) -> None:
    place.mount()
    path = place.path / "mapped"
    path.write_bytes(bytes(1 << 20))
    with path.open("r+b") as file:
        pages = mmap.mmap(file.fileno(), 0)
    place.adopt()
    with pages:
        pages[4096:4101] = b"dirty"
        place.signal(number)
        place.wait_for_end()
    assert place.mounts() == []
    place.mount()
    assert path.read_bytes()[4096:4101] == b"dirty"


@pytest.mark.sweep
def test_the_log_is_for_its_owner_and_the_group_that_he_lets(place: Place) -> None:
    """It tells names below directories that others may not search."""
    for left, mode in ((None, 0o600), (0o644, 0o640), (0o600, 0o600)):
        if left is not None:
            place.log.chmod(left)
        place.mount()
        assert stat.S_IMODE(place.log.stat().st_mode) == mode
        aifs("umount", place.path)


@pytest.mark.sweep
def test_sigusr1_writes_stacks_to_the_log(place: Place) -> None:
    place.mount("-o", "log.level=error")
    os.kill(place.status()["pid"], signal.SIGUSR1)
    aifs("umount", place.path)
    log = place.log.read_text()
    assert "stacks of all threads and tasks" in log
    assert "thread MainThread" in log and "task <init>" in log and "aifs.fuse.session" in log


@pytest.mark.sweep
def test_mount_py_is_the_same_command(place: Place) -> None:
    command = [*MOUNT_PY, place.source, place.path, "-o", "nosuid"]
    subprocess.run(command, check=True, cwd="/", capture_output=True, timeout=TIMEOUT_S)
    assert "nosuid" in place.mounts()[0][3]


# --- umount, info, server -------------------------------------------------------------------------


def test_umount_of_a_busy_mount_names_who_uses_it(served: Place) -> None:
    with open(served.path / "file", "w"):
        code, said = refused("umount", served.path)
    assert code == 6
    assert said.startswith(f"{served.path}: is in use by ") and f"(pid {os.getpid()})" in said


@pytest.mark.sweep
def test_a_lazy_umount_does_not_wait(place: Place) -> None:
    place.mount()
    daemon = os.pidfd_open(place.status()["pid"])
    with open(place.path / "file", "w") as file:
        aifs("umount", "--lazy", place.path)
        assert place.mounts() == []
        file.write("kept")
    wait_for_end(daemon)
    place.mount()
    assert (place.path / "file").read_text() == "kept"


@pytest.mark.sweep
def test_umount_says_if_the_store_could_not_be_closed_in_order(place: Place) -> None:
    place.mount()
    os.setxattr(place.path, "user.aifs.tier", b"capacity")
    (place.path / "file").write_bytes(bytes(8 << 20))
    aifs("umount", place.path)
    place.mount()
    server = place.source / "data" / "1"
    away = server.rename(server.with_suffix(".away"))
    with suppress(OSError):  # what matters is that the server keeps it from being finished
        os.truncate(place.path / "file", 100)
    code, said = refused("umount", place.path)
    assert (
        code == 6 and said.startswith(f"{place.path}: unmounted, but ") and str(place.log) in said
    )
    assert place.mounts() == []
    assert "ERROR aifs.cli.mount: the daemon stops: data server 1" in place.log.read_text()
    place.log.unlink()
    away.rename(server)
    place.mount()
    aifs("umount", place.path)
    aifs("fsck", place.source)


@pytest.mark.sweep
def test_info_tells_the_type_of_everything(served: Place) -> None:
    (served.path / "tiny").write_text("x")
    (served.path / "big").write_bytes(bytes(2 << 20))
    (served.path / "link").symlink_to("big")
    os.mkfifo(served.path / "fifo")
    os.mknod(served.path / "null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    types = {}
    for name in ("tiny", "big", "link", "fifo", "null", "."):
        info = json.loads(aifs("info", served.path / name, "--json").stdout)
        assert info["inode"] == os.lstat(served.path / name).st_ino
        types[name] = info["type"]
        shown = dict(
            line.split(maxsplit=1)
            for line in aifs("info", served.path / name).stdout.splitlines()
            if line
        )
        assert shown["type"] == info["type"]
    assert types == {
        "tiny": "file",
        "big": "file",
        "link": "symlink",
        "fifo": "fifo",
        "null": "character device",
        ".": "directory",
    }


def test_status_is_shown_as_a_table(served: Place) -> None:
    shown = aifs("status", served.path).stdout
    for server in served.status()["servers"]:
        assert re.search(
            rf"^ *{server['id']} +(active +)?ok .*{re.escape(server['path'])}", shown, re.MULTILINE
        )


@pytest.mark.sweep
def test_a_server_is_added_while_mounted(place: Place) -> None:
    disk = place.directory / "disk"
    disk.mkdir()
    place.mount("-o", "layout.stripe_above=0")
    assert (
        aifs("server", "add", place.source, disk).stdout
        == f"added {disk} to the store, as data server 4\n"
    )
    assert [server["path"] for server in place.status()["servers"]][4:] == [str(disk)]
    (place.path / "file").write_bytes(bytes(6 << 20))
    aifs("drain", place.path / "file")
    assert len(json.loads(aifs("info", place.path / "file", "--json").stdout)["parts"]) == 5
    full = place.directory / "full"
    (full / "x").mkdir(parents=True)
    code, said = refused("server", "add", place.source, full)
    assert code == 4 and said.startswith(
        f"refused by the mount at {place.path}: {full}: holds 'x', which is not a store's"
    )


def test_fsck_of_a_mounted_store_is_refused(served: Place) -> None:
    code, said = refused("fsck", served.source)
    assert code == 8 and "in use by pid" in said
