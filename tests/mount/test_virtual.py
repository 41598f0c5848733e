"""Virtual files on a mount: a directory as one archive, and names that nobody sees."""

import errno
import mmap
import os
import random
import stat
import subprocess
import tarfile
from functools import partial
from pathlib import Path

import pytest

from tests.support.mounts import aifs
from tests.support.users import errno_of, in_process

EROFS = errno.EROFS
ALICE = 1000


@pytest.fixture
def tree(here: Path) -> Path:
    """A directory with files of all sizes, and others below it."""
    rng = random.Random(5)
    for directory in ("", "cat", "dog/deep"):
        (here / directory).mkdir(parents=True, exist_ok=True)
        for number, size in enumerate([0, 1, 511, 512, 100_000, 300_000]):
            (here / directory / f"{number}.bin").write_bytes(rng.randbytes(size))
    (here / "cat" / "link").symlink_to("0.bin")
    (here / ("n" * 120)).write_bytes(b"long")
    return here


def archive_of(directory: Path) -> Path:
    return directory / ".aifs-data" / "files.tar"


@pytest.mark.sweep
def test_it_is_what_lies_below(tree: Path) -> None:
    archive = archive_of(tree)
    before = archive.stat()
    with tarfile.open(archive) as tar:
        members = {member.name: member for member in tar}
        for path in tree.rglob("*"):
            member = members.pop(str(path.relative_to(tree)))
            assert member.mode == stat.S_IMODE(path.lstat().st_mode)
            if member.isreg():
                file = tar.extractfile(member)
                assert file is not None and file.read() == path.read_bytes()
    assert not members
    subprocess.run(["tar", "-df", archive], cwd=tree, check=True)
    aifs("drain", tree)
    subprocess.run(["tar", "-df", archive], cwd=tree, check=True)
    # The bytes have moved, and nothing has changed.
    after = archive.stat()
    assert (after.st_ino, after.st_size) == (before.st_ino, before.st_size)
    assert archive.read_bytes() == archive.read_bytes()


def test_any_range_at_any_time(tree: Path) -> None:
    archive = archive_of(tree)
    whole = archive.read_bytes()
    assert len(whole) == archive.stat().st_size
    rng = random.Random(1)
    with open(archive, "rb") as one, open(archive, "rb") as other:
        mapped = mmap.mmap(one.fileno(), 0, prot=mmap.PROT_READ)
        for _ in range(50):
            offset, length = rng.randrange(len(whole)), rng.randrange(1, 200_000)
            expected = whole[offset : offset + length]
            assert os.pread(one.fileno(), length, offset) == expected
            assert os.pread(other.fileno(), length, offset) == expected
            assert mapped[offset : offset + length] == expected
        assert os.lseek(one.fileno(), 5, os.SEEK_HOLE) == len(whole)
        assert os.lseek(one.fileno(), 5, os.SEEK_DATA) == 5
        os.fsync(one.fileno())
        mapped.close()
    subprocess.run(["cp", archive, tree / "copied"], check=True)
    assert (tree / "copied").read_bytes() == whole
    assert archive.stat().st_size > len(whole)  # it is in it


def test_nobody_sees_it(tree: Path) -> None:
    assert archive_of(tree).exists()
    assert ".aifs-data" not in os.listdir(tree) and os.listdir(tree / ".aifs-data") == []
    found = subprocess.run(["find", tree], check=True, capture_output=True, text=True).stdout
    assert ".aifs-data" not in found
    assert tree.stat().st_nlink == 2 + 2
    assert not (tree / ".aifs-data" / "nothing").exists()
    archive_of(tree / "cat").stat()
    subprocess.run(["rm", "-r", tree / "cat"], check=True)
    assert not (tree / "cat").exists() and not archive_of(tree / "cat").exists()
    fresh = tree / "fresh"
    fresh.mkdir()
    (fresh / "one").touch()  # of such a directory the bridge knows all names
    assert archive_of(fresh).stat().st_size == tarfile.RECORDSIZE


def test_it_cannot_be_changed(tree: Path) -> None:
    archive, directory, other = archive_of(tree), tree / ".aifs-data", tree / "0.bin"
    archive.stat()
    inside = directory / "new"
    attempts = {
        "write": lambda: os.open(archive, os.O_WRONLY),
        "truncate": lambda: os.truncate(archive, 0),
        "create": lambda: os.open(inside, os.O_CREAT | os.O_WRONLY),
        "mkdir": lambda: inside.mkdir(),
        "mknod": lambda: os.mkfifo(inside),
        "symlink": lambda: inside.symlink_to("x"),
        "link into": lambda: os.link(other, inside),
        "link": lambda: os.link(archive, tree / "linked"),
        "unlink": lambda: archive.unlink(),
        "rmdir": lambda: directory.rmdir(),
        "rename it": lambda: directory.rename(tree / "seen"),
        "rename from it": lambda: archive.rename(tree / "seen"),
        "rename over it": lambda: (tree / "dog").rename(directory),
        "rename into": lambda: other.rename(inside),
        "chmod": lambda: archive.chmod(0o600),
        "utime": lambda: os.utime(directory),
        "setxattr": lambda: os.setxattr(archive, "user.a", b"b"),
        "hint": lambda: os.setxattr(directory, "user.aifs.tier", b"capacity"),
    }
    assert {what: errno_of(attempt) for what, attempt in attempts.items()} == dict.fromkeys(
        attempts, EROFS
    )
    assert errno_of(lambda: directory.mkdir()) == errno.EEXIST
    assert os.listxattr(archive) == []
    assert errno_of(lambda: os.getxattr(archive, "user.aifs.info")) == errno.ENODATA


@pytest.mark.sweep
def test_who_changes_a_source_is_noticed(tree: Path) -> None:
    archive = archive_of(tree)
    before = archive.stat()
    whole = archive.read_bytes()
    source = tree / "dog" / "deep" / "5.bin"
    with open(archive, "rb") as opened:
        source.write_bytes(bytes(300_000))
        after = archive.stat()
        assert after.st_ino != before.st_ino
        # What the kernel has kept is what it was; what it asks for is not told.
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with pytest.raises(OSError) as caught:
            opened.read()
        assert caught.value.errno == errno.ESTALE
    renewed = archive.read_bytes()
    assert renewed != whole and len(renewed) == len(whole)
    (tree / "0.bin").unlink()
    assert archive.stat().st_ino != after.st_ino
    with tarfile.open(archive) as tar:
        assert "0.bin" not in tar.getnames()
    with open(source, "r+b") as writing:  # what is on record only later
        writing.write(b"changed")
        writing.flush()
        with tarfile.open(archive) as tar:
            file = tar.extractfile("dog/deep/5.bin")
            assert file is not None and file.read(7) == b"changed"


@pytest.mark.sweep
def test_it_gives_nobody_more_rights(tree: Path) -> None:
    archive = archive_of(tree)
    assert in_process(lambda: errno_of(archive.read_bytes), ALICE) == 0
    secret = tree / "cat" / "3.bin"
    secret.chmod(0o600)
    assert in_process(lambda: errno_of(archive.read_bytes), ALICE) == errno.EACCES
    assert archive.read_bytes()
    secret.chmod(0o644)
    assert in_process(lambda: errno_of(archive.read_bytes), ALICE) == 0
    (tree / "dog").chmod(0o711)
    assert in_process(lambda: errno_of(archive.read_bytes), ALICE) == errno.EACCES
    assert in_process(lambda: errno_of(archive_of(tree / "cat").read_bytes), ALICE) == 0


@pytest.mark.sweep
@pytest.mark.parametrize("what", ["cat/3.bin", "dog", "."], ids=["file", "below", "top"])
def test_a_descriptor_from_before_gives_no_rights(tree: Path, what: str) -> None:
    """O_PATH finds the file by its name, and is no open: that may come after a chmod."""
    archive, locked = archive_of(tree), tree / what
    found = os.open(archive, os.O_PATH)
    opened = partial(errno_of, os.open, f"/proc/self/fd/{found}", os.O_RDONLY)
    assert in_process(opened, ALICE) == 0
    before = stat.S_IMODE(locked.stat().st_mode)
    locked.chmod(before & 0o700)
    assert in_process(opened, ALICE) in (errno.EACCES, errno.ESTALE)
    os.close(found)
    locked.chmod(before)
    assert in_process(lambda: errno_of(archive.read_bytes), ALICE) == 0


def test_nothing_gets_the_name(here: Path) -> None:
    assert errno_of(lambda: os.open(here / ".aifs-data", os.O_CREAT | os.O_WRONLY)) == errno.EISDIR
    assert os.listdir(here) == []
