"""A program for a mount: operations of which each has one right outcome, again and again.

python -m tests.support.outcomes MOUNTPOINT SEED FILE: until FILE exists; exit code 1 at the first
outcome that is wrong, and at any error.
"""

import ctypes
import itertools
import mmap
import os
import random
import sys
from pathlib import Path

_EXCHANGE, _HERE = 2, -100


def exchange(a: Path, b: Path) -> None:
    """renameat2(2) with RENAME_EXCHANGE."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_HERE, os.fsencode(a), _HERE, os.fsencode(b), _EXCHANGE):
        raise OSError(ctypes.get_errno(), "renameat2")


def _create_and_remove(path: Path, rng: random.Random) -> None:
    data, other = os.urandom(rng.randrange(1, 70_000)), path.with_suffix(".other")
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR)
    assert os.write(fd, data) == len(data)
    os.rename(path, other)
    assert not path.exists()
    other.unlink()
    assert os.fstat(fd).st_nlink == 0
    assert os.pread(fd, 1 << 20, 0) == data
    os.close(fd)


def _directories(path: Path, rng: random.Random) -> None:
    path.mkdir()
    (path / "below").mkdir()
    assert path.stat().st_nlink == 3
    (path / "below").rmdir()
    assert path.stat().st_nlink == 2
    path.rmdir()


def _links(path: Path, rng: random.Random) -> None:
    path.write_bytes(b"linked")
    names = [path.with_suffix(f".{number}") for number in range(3)]
    for count, name in enumerate(names, 2):
        os.link(path, name)
        assert path.stat().st_nlink == count
    for count, name in zip((3, 2, 1), names, strict=True):
        name.unlink()
        assert path.stat().st_nlink == count
    path.unlink()


def _append(path: Path, rng: random.Random) -> None:
    fd, wanted = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND), b""
    for _ in range(6):
        part = os.urandom(rng.randrange(1, 5000))
        assert os.write(fd, part) == len(part)
        wanted += part
        if rng.random() < 0.3:
            os.fsync(fd)
    os.close(fd)
    assert path.read_bytes() == wanted
    path.unlink()


def _exchange(path: Path, rng: random.Random) -> None:
    other = path.with_suffix(".other")
    path.write_bytes(b"A")
    other.write_bytes(b"B")
    exchange(path, other)
    assert (path.read_bytes(), other.read_bytes()) == (b"B", b"A")
    path.unlink()
    other.unlink()


def _map(path: Path, rng: random.Random) -> None:
    size = 4096 * rng.randrange(1, 40)
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR)
    os.ftruncate(fd, size)
    with mmap.mmap(fd, size) as mapping:
        os.close(fd)
        mapping[10:20] = b"0123456789"
        assert path.read_bytes()[10:20] == b"0123456789"
        mapping[size - 2 :] = b"zz"
        mapping.flush()
    found = path.read_bytes()
    assert found[-2:] == b"zz" and len(found) == size
    os.truncate(path, 15)
    assert path.read_bytes()[10:] == b"01234"
    path.unlink()


def _attributes(path: Path, rng: random.Random) -> None:
    path.write_bytes(b"x" * 100)
    os.setxattr(path, "user.a", b"1")
    assert os.getxattr(path, "user.a") == b"1"
    os.removexattr(path, "user.a")
    assert os.listxattr(path) == []
    path.chmod(0o640)
    os.utime(path, ns=(5, 7))
    found = path.stat()
    assert found.st_mode & 0o777 == 0o640 and found.st_mtime_ns == 7
    path.unlink()


def _replace(path: Path, rng: random.Random) -> None:
    kept, data = path.with_name(f"kept{rng.randrange(30)}"), os.urandom(8000)
    path.write_bytes(data)
    os.rename(path, kept)
    assert kept.read_bytes() == data and not path.exists()
    assert kept.name in os.listdir(path.parent)


_PROGRAMS = (
    _create_and_remove,
    _directories,
    _links,
    _append,
    _exchange,
    _map,
    _attributes,
    _replace,
)


def main(mountpoint: str, seed: str, until: str) -> None:
    rng, top = random.Random(seed), Path(mountpoint, f"program{seed}")
    top.mkdir()
    for number in itertools.count():
        if os.path.exists(until):
            return
        rng.choice(_PROGRAMS)(top / f"file{number}", rng)


if __name__ == "__main__":
    main(*sys.argv[1:])
