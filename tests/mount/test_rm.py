"""aifs rm on a real mount: the name goes at once, also from the kernel's cache; who may; what is
refused.
"""

import errno
import json
import os
import stat
import time
from pathlib import Path

import pytest

from aifs.cli.main import main
from aifs.cli.trash import remove_tree
from tests.support.mounts import TIMEOUT_S, Mounted, aifs
from tests.support.users import errno_of, in_process


def make_tree(top: Path, directories: int, files: int) -> None:
    for number in range(directories):
        directory = top / f"d{number}"
        directory.mkdir(parents=True)
        for other in range(files):
            (directory / f"f{other}").write_bytes(b"x" * 5000 if other % 2 else b"")


def doomed(mount: Path) -> dict[str, int]:
    return json.loads(os.getxattr(mount, "user.aifs.status"))["doomed"]


def used_inodes(mount: Path) -> int:
    """f_files itself changes with what others do to the local filesystem below."""
    found = os.statvfs(mount)
    return found.f_files - found.f_ffree


def wait_until_empty(mount: Path) -> None:
    end = time.monotonic() + TIMEOUT_S
    while doomed(mount)["directories"]:
        assert time.monotonic() < end, doomed(mount)


@pytest.mark.sweep
@pytest.mark.parametrize("options", [(), ("kernel.bridge=off",)], ids=["ioctl", "xattr"])
def test_trees_and_files_go(mount_store, options: tuple[str, ...]) -> None:
    mounted = mount_store(*options)
    top, other = mounted.path / "top", mounted.path / "file"
    make_tree(top, 20, 20)
    other.write_bytes(b"x")
    before = used_inodes(mounted.path)
    # The kernel knows it all.
    assert len(os.listdir(mounted.path)) == 2 and len(list(top.rglob("*"))) == 420
    with open(top / "d3" / "f1", "r+b") as file:
        inside = os.open(top / "d4", os.O_RDONLY | os.O_DIRECTORY)
        aifs("rm", "-r", top, other)
        assert (
            not top.exists() and not (top / "d3" / "f1").exists() and os.listdir(mounted.path) == []
        )
        top.mkdir()  # the name is free
        top.rmdir()
        wait_until_empty(mounted.path)
        with pytest.raises(FileNotFoundError):
            os.open("new", os.O_CREAT | os.O_WRONLY, 0o644, dir_fd=inside)
        os.close(inside)
        file.seek(5000)
        file.write(b"goes on")
        file.flush()
        os.fsync(file.fileno())
        assert os.pread(file.fileno(), 10, 4997) == b"xxxgoes on"
    while used_inodes(mounted.path) > before - 420:  # until the last of them have been erased
        pass


@pytest.mark.sweep
def test_a_name_is_free_as_soon_as_the_command_returns(here: Path) -> None:
    name = here / "name"
    for _ in range(20):
        (name / "below").mkdir(parents=True)
        assert name.stat().st_nlink == 3
        assert _removed(name) == (errno.ENOENT, 0)
        name.unlink()


def _removed(name: Path) -> tuple[int, int]:
    """Removes a tree; the errors of looking for it and of making a file of its name, asked for at
    once."""
    assert main(["rm", "-r", str(name)]) == 0
    return errno_of(os.lstat, name), errno_of(os.close, os.open(name, os.O_CREAT | os.O_WRONLY))


def test_a_link_that_remains_counts_right_at_once(on_mount: Path) -> None:
    tree, other, held = (
        on_mount / "tree",
        on_mount / "other",
        on_mount / "tree" / "held",
    )
    tree.mkdir()
    (tree / "one").write_bytes(b"x")
    os.link(tree / "one", other)
    with held.open("wb") as file:
        assert other.stat().st_nlink == 2 and os.fstat(file.fileno()).st_nlink == 1
        aifs("rm", "-r", tree)
        end = time.monotonic() + TIMEOUT_S
        while other.stat().st_nlink == 2 or os.fstat(file.fileno()).st_nlink:
            assert time.monotonic() < end


def test_what_is_refused(shared: Mounted, on_mount: Path, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    tree, file = on_mount / "tree", on_mount / "file"
    make_tree(tree, 1, 1)
    file.touch()
    for arguments, reason in (
        ((tree,), "is a directory"),
        (("-r", tmp_path / "plain"), "does not lie in an AIFS mount"),
        (("-r", shared.path), "is a mount"),
        (("-r", f"{tree}/d0/.."), "by its parent and its name"),
        (("-r", on_mount / "missing", file), "No such file"),
    ):
        done = aifs("rm", *arguments, check=False)
        assert done.returncode == 1 and reason in done.stderr and done.stderr.count("\n") == 1, (
            done.stderr
        )
    assert tree.is_dir() and (tmp_path / "plain").is_dir() and not file.exists()


ALICE, BOB, TEAM = 1000, 1001, 4242


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("parent", "owner", "caller", "groups", "answer"),
    [
        ((0o777, 0), ALICE, ALICE, (), 0),
        (
            (0o777, 0),
            ALICE,
            BOB,
            (),
            errno.EPERM,
        ),  # it may hold what rmdir(2) would not let Bob remove
        ((0o755, 0), ALICE, ALICE, (), errno.EACCES),
        ((0o700, ALICE), BOB, ALICE, (), errno.EPERM),
        ((0o1777, 0), ALICE, ALICE, (), 0),
        ((0o1777, 0), ALICE, BOB, (), errno.EPERM),
        ((0o773, 0), ALICE, ALICE, (), 0),
        ((0o775, 0), ALICE, ALICE, (TEAM,), 0),
        ((0o757, 0), ALICE, ALICE, (TEAM,), errno.EACCES),
    ],
)
def test_users_remove_their_own(
    module_mount: Mounted,
    tmp_path: Path,
    parent: tuple[int, int],
    owner: int,
    caller: int,
    groups: tuple[int, ...],
    answer: int,
) -> None:
    here = module_mount.path / tmp_path.name
    (here / "tree").mkdir(parents=True)
    (here / "tree" / "of-root").touch()
    os.chown(here, parent[1], TEAM)
    here.chmod(parent[0])
    os.chown(here / "tree", owner, owner)
    if parent[0] & stat.S_ISVTX and "kernel.bridge=off" in module_mount.options:
        # In sticky directories the kernel lets nobody but the owner set extended attributes.
        answer = errno.EPERM
    assert (
        in_process(lambda: errno_of(remove_tree, str(here), "tree"), caller, groups=groups)
        == answer
    )
    assert (here / "tree").exists() == bool(answer)
