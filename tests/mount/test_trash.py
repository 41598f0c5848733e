"""The trash on a real mount, with the tools that people use."""

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from aifs.core import ioctl
from aifs.core.config import DIRECTORY_FILE
from tests.support.mounts import Mounted, aifs, mounted_store
from tests.support.users import errno_of, in_process

ALICE, BOB = 1000, 2000


@pytest.fixture(scope="module")
def kept_mount(module_mount: Mounted) -> Iterator[Mounted]:
    os.setxattr(module_mount.path, "user.aifs.trash", b"7d")
    yield module_mount
    os.removexattr(module_mount.path, "user.aifs.trash")  # tests of other files use it, too


def ls(path: Path, *options: str) -> list[dict]:
    return json.loads(aifs("trash", "ls", "--json", *options, path).stdout)


def paths(path: Path, *options: str) -> list[str]:
    return [os.path.relpath(one["path"], path) for one in ls(path, *options)]


@pytest.fixture
def bridged(kept_mount: Mounted) -> Mounted:
    if "kernel.bridge=off" in kept_mount.options:
        pytest.skip("restoring needs the bridge, which is off")
    return kept_mount


def test_what_shell_tools_remove_comes_back(bridged: Mounted, here: Path) -> None:
    (here / "d" / "below").mkdir(parents=True)
    for number in range(20):
        (here / "d" / f"f{number}").write_text(f"{number}")
        (here / "d" / "below" / f"g{number}").write_text(f"{number}")
    (here / "note").write_text("one")
    subprocess.run(["sh", "-c", "echo two > note2; mv note2 note; rm -r d"], check=True)
    assert sorted(os.listdir(here)) == ["note"] and errno_of(os.stat, here / "d") == errno.ENOENT
    assert paths(here) == ["note", "d"] and len(paths(here, "--all")) == 43
    (size,) = [one["bytes"] for one in ls(here) if one["type"] == "directory"]
    assert size == 60
    assert aifs("trash", "restore", here / "d").stdout == f"restored {here}/d\n"
    assert sorted(os.listdir(here / "d")) == sorted(["below", *(f"f{n}" for n in range(20))])
    assert (here / "d" / "below" / "g7").read_text() == "7"
    assert os.stat(here / "d").st_nlink == 3
    taken = aifs("trash", "restore", here / "note", check=False)
    assert taken.returncode == 1 and "--to" in taken.stderr
    aifs("trash", "restore", here / "note", "--to", here / "old")
    assert ((here / "old").read_text(), (here / "note").read_text()) == ("one", "two\n")
    aifs("rm", "-r", here / "d")
    assert not (here / "d").exists() and paths(here, "--all") == ["d"]
    os.rename(here / "old", here / "d")  # the kernel knows another inode by that name
    aifs("trash", "restore", here / "d", "--to", here / "again")
    shutil.rmtree(here / "again")
    assert aifs("trash", "rm", here / "again").stdout == "42 emptied\n"
    assert paths(here, "--all") == []


def test_who_restores_out_of_a_quota_is_told_what_to_do(bridged: Mounted, here: Path) -> None:
    team = here / "team"
    team.mkdir()
    aifs("quota", "set", team, "--files", "10")
    (team / "note").write_text("precious")
    (team / "note").unlink()
    said = aifs("trash", "restore", team / "note", "--to", here, check=False)
    assert said.returncode == 1 and "counts in a quota" in said.stderr
    assert "restore it without --to, then mv copies it" in said.stderr
    elsewhere = aifs("trash", "restore", team / "note", "--to", "/", check=False)
    assert elsewhere.returncode == 1 and "/: does not lie in the mount of" in elsewhere.stderr
    aifs("trash", "restore", team / "note")
    assert (team / "note").read_text() == "precious"


def test_where_nothing_is_kept_nothing_can_be_restored(bridged: Mounted, here: Path) -> None:
    os.setxattr(here, "user.aifs.trash", b"off")
    (here / "f").touch()
    os.unlink(here / "f")
    assert paths(here) == []
    said = aifs("trash", "restore", here / "f", here / "g", check=False)
    assert said.returncode == 1 and said.stderr.count("nothing in the trash was called") == 2
    assert aifs("trash", "ls", "/proc", check=False).returncode == 6


def test_programs_in_a_removed_directory_and_open_files(bridged: Mounted, here: Path) -> None:
    (here / "d").mkdir()
    (here / "f").write_text("before")
    with open(here / "f", "r+") as file:
        os.unlink(here / "f")
        assert os.fstat(file.fileno()).st_nlink == 0
        file.write("AFTER!")
        file.flush()
        aifs("trash", "restore", here / "f")
        assert os.fstat(file.fileno()).st_nlink == 1
    assert (here / "f").read_text() == "AFTER!"
    inside = os.open(here / "d", os.O_RDONLY | os.O_DIRECTORY)
    os.rmdir(here / "d")
    busy = aifs("trash", "restore", here / "d", check=False)
    assert busy.returncode == 1 and "a program has the removed directory open" in busy.stderr
    os.close(inside)
    aifs("trash", "restore", here / "d")
    (here / "d" / "new").touch()
    assert os.listdir(here / "d") == ["new"]


@pytest.mark.sweep
def test_users_have_what_was_theirs(bridged: Mounted, here: Path) -> None:
    here.chmod(0o1777)
    private = here / "private"
    private.mkdir(0o700)
    os.chown(private, BOB, BOB)

    def make_and_remove(name: Path) -> None:
        name.write_text("x")
        name.unlink()

    in_process(lambda: make_and_remove(here / "of-alice"), ALICE)
    in_process(lambda: make_and_remove(private / "of-bob"), BOB)

    def seen() -> set[str]:
        told = json.loads(os.getxattr(bridged.path, "user.aifs.trashed"))
        assert told["next"] is None
        return {one["name"] for one in told["entries"] if here.name in str(one["path"])}

    assert in_process(seen, ALICE) == {"of-alice"}
    assert in_process(seen, BOB) == {"of-bob"}
    assert set(paths(here)) == {"of-alice", "private/of-bob"}

    def restore() -> None:
        ioctl.call(os.open(here, os.O_RDONLY), "restore", path="private/of-bob")

    assert in_process(lambda: errno_of(restore), ALICE) == errno.ENOENT
    assert in_process(lambda: errno_of(restore), BOB) == 0
    assert (private / "of-bob").exists()


def test_without_the_bridge_names_are_kept_as_well(kept_mount: Mounted, here: Path) -> None:
    (here / "f").write_text("x")
    os.unlink(here / "f")
    assert paths(here) == ["f"]
    if "kernel.bridge=off" in kept_mount.options:
        said = aifs("trash", "restore", here / "f", check=False)
        assert said.returncode == 1 and "without its bridge" in said.stderr


@pytest.mark.sweep
def test_status_and_df_count_what_is_in_it(bridged: Mounted, here: Path) -> None:
    before = json.loads(aifs("status", bridged.path, "--json").stdout)["trash"]
    (here / "f").write_bytes(bytes(5000))
    used = os.statvfs(bridged.path)
    os.unlink(here / "f")
    after = json.loads(aifs("status", bridged.path, "--json").stdout)["trash"]
    assert after["entries"] == before["entries"] + 1 and after["bytes"] == before["bytes"] + 5000
    now = os.statvfs(bridged.path)
    assert now.f_files - now.f_ffree == used.f_files - used.f_ffree
    lines = aifs("status", bridged.path).stdout.splitlines()
    assert any(line.startswith("trash ") and " entr" in line for line in lines)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 128 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128m", "tmpfs", path], check=True)
    yield path
    subprocess.run(["umount", "-l", path], check=True)


@pytest.mark.sweep("burst")
@pytest.mark.parametrize("burst", [True, False], ids=["burst", "no burst"])
@pytest.mark.sweep
def test_writers_go_on_as_the_trash_gives_way(small: Path, tmp_path: Path, burst: bool) -> None:
    """Twice as much is written, and nearly all of it removed, as the data servers hold."""
    source = tmp_path / "store"
    source.mkdir()
    settings = {
        "servers": [str(small / "0"), str(small / "1")],
        "data": {"movers": 0},
        "burst": {"directories": ["burst"] if burst else [], "drain_delay": "0s"},
    }
    (source / DIRECTORY_FILE).write_text(json.dumps(settings))
    with mounted_store(tmp_path, ["trash.keep=7d"]) as mounted:
        mounted.expected += ["the trash gives way", "draining has to wait"]
        data = os.urandom(1 << 20)
        for number in range(256):
            path = mounted.path / f"f{number}"
            path.write_bytes(data)
            if number % 64:
                path.unlink()
        aifs("drain", mounted.path, "--timeout", "60s")
        assert {path.read_bytes() for path in mounted.path.iterdir()} == {data}
        trash = json.loads(aifs("status", mounted.path, "--json").stdout)["trash"]
        assert trash["given_entries"] > 0
        assert "gone before their time" in aifs("status", mounted.path).stdout
        names = paths(mounted.path)
        assert names == sorted(names, key=lambda name: int(name[1:]))  # the oldest have gone
        assert os.path.basename(names[-1]) == "f255"
