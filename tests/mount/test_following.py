"""What another host changes shows in programs of this one: the kernel has forgotten the state
before when the other host is told so, whatever it had cached, and whatever waits."""

import errno
import os
import stat
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import caches
from tests.support.machine import RENAME_EXCHANGE, renameat2
from tests.support.shared_mount import SharedMount

pytestmark = pytest.mark.sweep

ROOT = 1
FILE, DIRECTORY, LINK = stat.S_IFREG | 0o644, stat.S_IFDIR | 0o755, stat.S_IFLNK | 0o777


@pytest.fixture
def mount(scratch: Path) -> Iterator[SharedMount]:
    """The kernel keeps the names that it has, whatever other tests do."""
    with caches.kept(), SharedMount(scratch) as mount:
        yield mount


def test_stat_open_and_listings(mount: SharedMount) -> None:
    path = mount.path
    for _ in range(2):  # what is not there is kept, too
        assert not (path / "file").exists() and os.listdir(path) == []
    ino = mount.make(ROOT, "file", FILE, "first")
    for _ in range(2):
        assert os.listdir(path) == ["file"]
        assert (path / "file").stat().st_ino == ino
        assert (path / "file").read_text() == "first"
    mount.change(ino, data="the second", size=10, mtime_ns=10**18)
    assert (path / "file").stat().st_size == 10
    assert (path / "file").read_text() == "the second"
    mount.change(ino, mode=stat.S_IFREG | 0o600, uid=7)
    assert (path / "file").stat().st_mode & 0o777 == 0o600
    assert (path / "file").stat().st_uid == 7
    mount.rename(ROOT, "file", ROOT, "moved")
    assert not (path / "file").exists() and os.listdir(path) == ["moved"]
    assert (path / "moved").stat().st_ino == ino
    mount.link(ino, ROOT, "second")
    assert sorted(os.listdir(path)) == ["moved", "second"]
    assert (path / "moved").stat().st_nlink == 2
    for name in ("moved", "second"):
        mount.unlink(ROOT, name)
    assert not (path / "moved").exists() and os.listdir(path) == []


def test_a_file_that_is_open_and_one_that_was(mount: SharedMount) -> None:
    path = mount.path / "file"
    ino = mount.make(ROOT, "file", FILE, "old")
    assert path.read_text() == "old"
    with path.open() as file:
        mount.change(ino, data="newer", size=5)
        assert path.read_text() == "newer"
        mount.unlink(ROOT, "file")
        assert not path.exists()
        assert os.fstat(file.fileno()).st_nlink == 0
        assert file.read() == "newer"


def test_symlinks_extended_attributes_and_acls(mount: SharedMount) -> None:
    path = mount.path
    mount.make(ROOT, "link", LINK, "one")
    assert os.readlink(path / "link") == "one"
    mount.make(ROOT, "next", LINK, "another")
    mount.unlink(ROOT, "link")
    mount.rename(ROOT, "next", ROOT, "link")
    assert os.readlink(path / "link") == "another"

    ino = mount.make(ROOT, "file", FILE, "x")
    assert os.listxattr(path / "file") == []
    mount.set_xattr(ino, "user.name", "value")
    assert os.getxattr(path / "file", "user.name") == b"value"
    mount.remove_xattr(ino, "user.name")
    assert os.listxattr(path / "file") == []

    with pytest.raises(OSError, match=os.strerror(errno.ENODATA)):
        os.getxattr(path / "file", "system.posix_acl_access")
    acl = struct.pack("<I", 2) + b"".join(
        struct.pack("<HHI", *entry)
        for entry in (
            (1, 6, 2**32 - 1),
            (2, 4, 7),
            (4, 4, 2**32 - 1),
            (16, 4, 2**32 - 1),
            (32, 0, 2**32 - 1),
        )
    )
    mount.change(ino, acl=acl.decode("latin-1"), mode=stat.S_IFREG | 0o640)
    assert os.getxattr(path / "file", "system.posix_acl_access") == acl
    mount.change(ino, acl="")
    with pytest.raises(OSError, match=os.strerror(errno.ENODATA)):
        os.getxattr(path / "file", "system.posix_acl_access")


def test_capabilities_count_from_the_first_write_on(mount: SharedMount) -> None:
    path, ino = mount.path / "file", mount.make(ROOT, "file", FILE, "x")
    with path.open("a") as file:
        print("y", file=file, flush=True)  # the kernel has asked, and was told that there are none
    mount.set_xattr(ino, "security.capability", "any")
    assert os.listxattr(path) == ["security.capability"]
    with path.open("a") as file:
        print("z", file=file)
    assert os.listxattr(path) == []


def test_a_directory_that_somebody_is_in(mount: SharedMount) -> None:
    path = mount.path
    top, other = mount.make(ROOT, "top", DIRECTORY), mount.make(ROOT, "other", DIRECTORY)
    mount.make(top, "file", FILE, "x")
    fd = os.open(path / "top", os.O_RDONLY)
    try:
        assert os.listdir(fd) == ["file"]
        mount.rename(ROOT, "top", other, "moved")
        assert os.stat("file", dir_fd=fd).st_size == 1
        assert os.path.samestat(os.stat(path / "other" / "moved"), os.fstat(fd))
        assert os.stat("..", dir_fd=fd).st_ino == other  # once somebody has been there
        mount.unlink(top, "file")
        mount.rmdir(other, "moved")
        assert os.fstat(fd).st_nlink == 0
        assert os.listdir(fd) == []
        with pytest.raises(FileNotFoundError):
            os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=fd)
    finally:
        os.close(fd)


def test_o_creat_of_a_name_that_the_kernel_believes_not_to_be_there(mount: SharedMount) -> None:
    path = mount.path / "file"
    assert not path.exists()
    mount.make_unheard(ROOT, "file")
    with pytest.raises(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    mount.unlink(ROOT, "file")
    assert not path.exists()
    mount.make_unheard(ROOT, "file")
    with open(path, "a+") as file:
        file.seek(0)
        assert file.read() == "unheard"


def test_programs_that_wait_for_the_other_host_do_not_keep_it_waiting(mount: SharedMount) -> None:
    """The kernel locks the directory while a rename in it waits. What the other host does there
    meanwhile is shown all the same."""
    path = mount.path
    ino = mount.make(ROOT, "theirs", FILE, "x")
    (path / "ours").touch()
    (path / "elsewhere").mkdir()
    inside = os.open(path / "elsewhere", os.O_RDONLY)
    assert (path / "theirs").exists() and not (path / "new").exists()
    mount.hold_back()
    thread = threading.Thread(target=os.rename, args=(path / "ours", path / "moved"))
    thread.start()
    try:
        mount.until_waiting()
        for number in range(40):  # more than there are threads that may wait in the kernel
            mount.rename(
                ROOT,
                "theirs" if number % 2 == 0 else "new",
                ROOT,
                "new" if number % 2 == 0 else "theirs",
            )
        mount.rename(ROOT, "theirs", ROOT, "new")
        # Other names stay: what is mounted there, and where programs are.
        assert os.readlink(f"/proc/self/fd/{inside}") == str(path / "elsewhere")
    finally:
        mount.let_go()
        thread.join()
        os.close(inside)
    assert not (path / "theirs").exists()
    assert (path / "new").stat().st_ino == ino
    assert sorted(os.listdir(path)) == ["elsewhere", "moved", "new"]


def test_a_directory_that_the_kernel_takes_for_another_one_stays(mount: SharedMount) -> None:
    """While this host removes a directory, or renames one onto it, another host gives the name to a
    second one. The kernel must not take the first one, which lives on elsewhere, for removed."""
    path = mount.path
    calls: dict[str, Callable[[], None]] = {
        "rmdir": lambda: os.rmdir(path / "d"),
        "rename": lambda: os.rename(path / "s", path / "d"),
    }
    for change, call in calls.items():
        for name in ("s", "d", "e"):
            (path / name).mkdir(exist_ok=True)
        fd = os.open(path / "d", os.O_RDONLY)  # the kernel keeps its inode
        try:
            moves = [["rename", ROOT, "d", ROOT, "moved"], ["rename", ROOT, "e", ROOT, "d"]]
            mount.before_next(change, *moves)
            call()
            assert os.path.samestat((path / "moved").stat(), os.fstat(fd))
            (path / "moved" / "file").touch()
            assert os.listdir(fd) == os.listdir(path / "moved") == ["file"]
        finally:
            os.close(fd)
        left = {"rmdir": ["moved", "s"], "rename": ["d", "moved"]}[change]
        assert sorted(os.listdir(path)) == left
        (path / "moved" / "file").unlink()
        (path / "moved").rmdir()


def test_of_two_hosts_that_give_a_file_the_same_new_name_one_succeeds(mount: SharedMount) -> None:
    """rename(2) succeeds in the kernel alone if both names lead to one inode there: the old name as
    it was, the new one as it is."""
    job, claimed, other = (mount.path / name for name in ("job", "claimed", "other"))
    ino = mount.make(ROOT, "job", FILE, "x")
    assert job.exists() and not claimed.exists()
    mount.before_shown("rename", ROOT, "job", ROOT, "claimed")
    try:
        with pytest.raises(FileNotFoundError):
            os.rename(job, claimed)
        assert claimed.stat().st_ino == ino
    finally:
        mount.show()
    assert not job.exists() and claimed.read_text() == "x"

    inos = [mount.make(ROOT, name, FILE, name) for name in ("job", "other")]
    assert [job.stat().st_ino, other.stat().st_ino] == inos
    mount.before_shown("rename", ROOT, "job", ROOT, "other", RENAME_EXCHANGE)
    try:
        renameat2(os.fsencode(job), os.fsencode(other), RENAME_EXCHANGE)  # back again
    finally:
        mount.show()
    assert [job.stat().st_ino, other.stat().st_ino] == inos
