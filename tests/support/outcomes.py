"""Programs for a mount: rounds of operations of which each has one right outcome.

python -m tests.support.outcomes PROGRAM DIRECTORY FILE: rounds until FILE exists, one at least, in
a new directory; prints how many. Exit code 1 at the first outcome that is wrong, and at any error.
"""

import ctypes
import itertools
import mmap
import os
import random
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from aifs.client import checkpoint

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


_OPERATIONS = (
    _create_and_remove,
    _directories,
    _links,
    _append,
    _exchange,
    _map,
    _attributes,
    _replace,
)

Rounds = Iterator[None]


def _mixed(top: Path) -> Rounds:
    rng = random.Random(str(top))
    for number in itertools.count():
        for part in range(8):
            rng.choice(_OPERATIONS)(top / f"file{number}-{part}", rng)
        yield


def _run(*command: str | Path, cwd: Path | None = None) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=cwd).stdout


def _git(top: Path) -> Rounds:
    work, identity = top / "work", ("-c", "user.name=a", "-c", "user.email=a@b")
    _run("git", "init", "-q", work)
    for number in itertools.count():
        for file in range(8):
            (work / f"file{file}").write_text(f"round {number}\n" * (file + 1))
        _run("git", "add", ".", cwd=work)
        _run("git", *identity, "commit", "-q", "-m", str(number), cwd=work)
        _run("git", "clone", "-q", "--no-hardlinks", work, top / "clone")
        _run("git", "gc", "-q", cwd=work)
        for place in (work, top / "clone"):
            _run("git", "fsck", "--strict", "--no-progress", cwd=place)
            assert _run("git", "rev-list", "--count", "HEAD", cwd=place) == f"{number + 1}\n"
            assert _run("git", "status", "--porcelain", cwd=place) == ""
        shutil.rmtree(top / "clone")
        yield


def _sqlite(top: Path) -> Rounds:
    """Journals of both kinds."""
    for number in itertools.count():
        base = sqlite3.connect(top / f"base{number}", isolation_level=None)
        base.execute(f"pragma journal_mode = {('wal', 'delete')[number % 2]}")
        base.execute("create table account (number integer primary key, amount)")
        base.executemany("insert into account values (?, 100)", ((each,) for each in range(10)))
        base.execute("create table done (number)")
        for each in range(20):
            base.execute("begin immediate")
            base.execute("update account set amount = amount - 1 where number = ?", (each % 10,))
            base.execute("update account set amount = amount + 1 where number = ?", (each % 7,))
            base.execute("insert into done values (?)", (each,))
            base.execute("commit")
            assert base.execute("select sum(amount) from account").fetchone() == (1000,)
            assert base.execute("select count(*) from done").fetchone() == (each + 1,)
        assert base.execute("pragma integrity_check").fetchall() == [("ok",)]
        base.close()
        yield


def _torch(top: Path) -> Rounds:
    """A training loop whose checkpoints are published, and go when there are newer ones."""
    import torch

    model = torch.nn.Linear(600, 600)
    optimizer = torch.optim.Adam(model.parameters())
    for step in itertools.count(1):
        model(torch.randn(8, 600)).square().mean().backward()
        optimizer.step()
        with checkpoint(top / f"step-{step}", keep="last=3") as directory:
            torch.save(model.state_dict(), directory / "model.pt")
        found = torch.load(top / "latest" / "model.pt")
        for name, value in model.state_dict().items():
            assert torch.equal(found[name], value)
        yield


def _tar(top: Path) -> Rounds:
    tree, copy = top / "tree", top / "copy"
    for number in range(200):
        path = tree / f"dir{number % 10}" / f"file{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(number * 37))
    while True:
        copy.mkdir()
        _run("sh", "-c", f"tar -C {tree} -cf - . | tar -C {copy} -xf -")
        found = _run("find", copy, "-type", "f").splitlines()
        assert len(found) == len({*found}) == 200
        _run("diff", "-r", tree, copy)
        shutil.rmtree(copy)
        yield


def _fio(top: Path) -> Rounds:
    for number in itertools.count():
        engine = ("psync", "mmap")[number % 2]
        _run(
            *("fio", "--name=job", f"--directory={top}", "--rw=randwrite", "--bs=4k", "--size=4m"),
            *(
                "--verify=crc32c",
                "--verify_fatal=1",
                f"--ioengine={engine}",
                "--fsync=100",
                "--verify_state_save=0",
            ),
        )
        yield


def _mapped(top: Path) -> Rounds:
    """One mapping for all of the time, of a file that is closed."""
    size = 1 << 20
    fd = os.open(top / "mapped", os.O_CREAT | os.O_RDWR)
    os.ftruncate(fd, size)
    mapping = mmap.mmap(fd, size)
    os.close(fd)
    rng, wanted = random.Random(1), bytearray(size)
    for number in itertools.count():
        for _ in range(50):
            at = rng.randrange(size - 8)
            mapping[at : at + 8] = wanted[at : at + 8] = number.to_bytes(8, "big")
        assert (top / "mapped").read_bytes() == wanted
        if number % 10 == 0:
            mapping.flush()
        yield


PROGRAMS: dict[str, Callable[[Path], Rounds]] = {
    "mixed": _mixed,
    "git": _git,
    "sqlite": _sqlite,
    "torch": _torch,
    "tar": _tar,
    "fio": _fio,
    "mapped": _mapped,
}


def main(program: str, directory: str, until: str) -> None:
    top = Path(directory)
    top.mkdir()
    for count, _ in enumerate(PROGRAMS[program](top), 1):
        if os.path.exists(until):
            print(count)
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
