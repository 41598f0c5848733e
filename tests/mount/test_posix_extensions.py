"""What Linux offers beyond POSIX, on a mount with the bridge: the same calls must have the same outcome on ext4."""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from aifs.fuse import extension
from tests.support.machine import link_open
from tests.support.mounts import Mounted, mounted_store
from tests.support.users import errno_of, in_process

pytestmark = pytest.mark.skipif(extension is None, reason="the bridge has not been built")

USER = 1000

Outcome = TypeVar("Outcome")
Alike = Callable[[Callable[[], Outcome]], Outcome]


@pytest.fixture(scope="module")
def module_mount(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounted]:
    directory = tmp_path_factory.mktemp("extensions")
    for above in (directory, *directory.parents[:2]):
        above.chmod(0o755)
    with mounted_store(directory, ("allow_other",)) as mounted:
        yield mounted


@pytest.fixture
def alike(here: Path, tmp_path: Path) -> Alike:
    """A function that calls a scenario in an empty directory of the local filesystem and in one of the mount, for all
    users to write to; the outcome, which must be the same."""

    def run(scenario: Callable[[], Any]) -> Any:
        outcomes = []
        for directory in (tmp_path / "reference", here / "found"):
            directory.mkdir()
            directory.chmod(0o777)
            os.chdir(directory)
            outcomes.append(scenario())
        os.chdir(here)
        expected, found = outcomes
        assert found == expected
        return found

    for above in (tmp_path, *tmp_path.parents[:2]):
        above.chmod(0o755)
    return run


# --- files without a name -------------------------------------------------------------------------


def nameless(directory: str = ".", flags: int = os.O_RDWR, mode: int = 0o640) -> int:
    return os.open(directory, flags | os.O_TMPFILE, mode)


def test_a_nameless_file_is_one_that_no_directory_shows(alike: Alike) -> None:
    def scenario() -> Any:
        fd = nameless()
        written = os.write(fd, b"x" * 100_000)
        read = os.pread(fd, 200_000, 0)
        info = os.fstat(fd)
        os.close(fd)
        return written, read, info.st_mode, info.st_nlink, info.st_size, os.listdir()

    assert alike(scenario)[3:] == (0, 100_000, [])


@pytest.mark.parametrize("size", [0, 100, 100_000])
def test_a_nameless_file_gets_a_name(alike: Alike, size: int) -> None:
    def scenario() -> Any:
        fd = nameless()
        os.write(fd, b"y" * size)
        link_open(fd, "name")
        os.write(fd, b"more")
        counts = [os.fstat(fd).st_nlink]
        os.link("name", "other")
        counts.append(os.stat("name").st_nlink)
        os.close(fd)
        refused = errno_of(lambda: link_open(os.open("name", os.O_RDONLY), "name"))
        return counts, refused, Path("other").read_bytes() == b"y" * size + b"more"

    assert alike(scenario) == ([1, 2], errno.EEXIST, True)


def test_a_nameless_file_gets_its_name_when_it_is_closed_but_not_forgotten(alike: Alike) -> None:
    def scenario() -> Any:
        fd = nameless()
        os.write(fd, b"z" * 100_000)
        path = os.open(f"/proc/self/fd/{fd}", os.O_PATH)
        os.close(fd)
        link_open(path, "name")
        os.close(path)
        return Path("name").read_bytes() == b"z" * 100_000

    assert alike(scenario)


def test_nameless_files_that_must_not_or_cannot_get_a_name(alike: Alike) -> None:
    def scenario() -> Any:
        exclusive = nameless(flags=os.O_RDWR | os.O_EXCL)
        gone = os.open("gone", os.O_CREAT | os.O_RDWR)
        os.unlink("gone")
        return (
            errno_of(lambda: link_open(exclusive, "name")),
            errno_of(lambda: link_open(gone, "name")),
            errno_of(lambda: nameless("missing")),
            errno_of(lambda: nameless(flags=os.O_RDONLY)),
        )

    assert alike(scenario) == (errno.ENOENT, errno.ENOENT, errno.ENOENT, errno.EINVAL)


def test_nameless_files_inherit_the_group_and_the_umask(alike: Alike) -> None:
    def scenario() -> Any:
        os.mkdir("shared")
        os.chown("shared", 0, 1234)
        os.chmod("shared", 0o2777)

        def make() -> tuple[int, ...]:
            os.umask(0o027)
            info = os.fstat(nameless("shared", mode=0o666))
            return info.st_mode, info.st_uid, info.st_gid

        return in_process(make, USER)

    assert alike(scenario)[1:] == (USER, 1234)


def test_a_crash_leaves_no_nameless_file(mount_store: Callable[..., Mounted]) -> None:
    store = mount_store()
    inodes = os.statvfs(store.path)
    kept, lost = nameless(str(store.path)), nameless(str(store.path))
    for fd in (kept, lost):
        os.write(fd, b"x" * 100_000)
    link_open(kept, str(store.path / "kept"))
    store.kill()
    for fd in (kept, lost):
        os.close(fd)
    store.mount()
    assert os.listdir(store.path) == ["kept"]
    assert (store.path / "kept").read_bytes() == b"x" * 100_000
    store.remount()  # which waits for what is left to remove
    now = os.statvfs(store.path)
    assert now.f_files - now.f_ffree == inodes.f_files - inodes.f_ffree + 1
