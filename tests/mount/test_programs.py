"""Programs that people run, on a mount: what they make is right, and right again after a
remount.
"""

import hashlib
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.mounts import Mounted

TIMEOUT_S = 120


def run(
    *command: str | Path, cwd: Path | None = None, check: bool = True, **environment: str
) -> str:
    """The program's output; a failure fails the test with all that the program said."""
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**os.environ, **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert not check or done.returncode == 0, (
        f"{command} ended with {done.returncode}:\n{done.stdout[-4000:]}"
    )
    return done.stdout


def need(program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")


def fingerprint(directory: Path) -> dict[str, tuple]:
    """Of everything below: mode, owner, mtime, links, and content, target or device."""
    found: dict[str, tuple] = {}
    for path in sorted(directory.rglob("*")):
        info = path.lstat()
        content: object = info.st_rdev
        if path.is_symlink():
            content = os.readlink(path)
        elif path.is_file():
            content = hashlib.blake2b(path.read_bytes()).hexdigest()
        xattrs = {
            name: os.getxattr(path, name, follow_symlinks=False)
            for name in os.listxattr(path, follow_symlinks=False)
        }
        links = info.st_nlink if not path.is_dir() else 0
        found[str(path.relative_to(directory))] = (
            info.st_mode,
            info.st_uid,
            info.st_gid,
            info.st_mtime_ns,
            links,
            content,
            xattrs,
        )
    return found


@pytest.fixture
def sources(scratch: Path) -> Path:
    """A tree on a local filesystem with a bit of everything."""
    tree = scratch / "sources"
    for number in range(5):
        (tree / f"dir{number}" / "below").mkdir(parents=True)
        for size in (0, 1, 2048, 2049, 70_000, 1_200_000):
            (tree / f"dir{number}" / f"{size} bytes").write_bytes(os.urandom(size))
    (tree / "dir0" / "name with \n newline and ä").write_text("x")
    os.link(tree / "dir0" / "1 bytes", tree / "dir1" / "hard link")
    os.symlink("../dir0/2048 bytes", tree / "dir1" / "symbolic link")
    os.symlink("nowhere", tree / "dangling")
    os.mkfifo(tree / "fifo")
    os.mknod(tree / "device", 0o020600, os.makedev(1, 3))
    with (tree / "sparse").open("wb") as stream:
        for place in (3 << 20, 40 << 20):
            stream.seek(place)
            stream.write(b"island")
        stream.truncate(64 << 20)
    os.setxattr(tree / "dir2", "user.note", b"of a directory")
    os.setxattr(tree / "dir2" / "1 bytes", "user.note", bytes(range(256)))
    os.setxattr(tree / "dir2" / "1 bytes", "trusted.note", b"only for root")
    os.chown(tree / "dir3", 1000, 2000)
    os.chmod(tree / "dir3" / "1 bytes", 0o6711)
    os.chmod(tree / "dir3", 0o3775)
    for path in tree.rglob("*"):
        os.utime(path, ns=(10**18, 10**18 + 123_456_789), follow_symlinks=False)
    return tree


@pytest.mark.sweep
def test_git(remounted: Mounted, on_remounted: Path, scratch: Path) -> None:
    need("git")
    options = {
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_CONFIG_SYSTEM": "/dev/null",
        "GIT_AUTHOR_NAME": "A",
        "GIT_AUTHOR_EMAIL": "a@example.org",
        "GIT_COMMITTER_NAME": "A",
        "GIT_COMMITTER_EMAIL": "a@example.org",
    }

    def git(*args: str | Path, cwd: Path) -> str:
        return run("git", *args, cwd=cwd, **options)

    work = on_remounted / "work"
    git("init", "-q", "-b", "main", work, cwd=on_remounted)
    for commit in range(5):
        for number in range(40):
            path = work / f"dir{number % 7}" / f"file{number}"
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"commit {commit}, file {number}\n" * (number + 1))
        git("add", ".", cwd=work)
        git("commit", "-q", "-m", f"commit {commit}", cwd=work)
    git("checkout", "-q", "-b", "side", "HEAD~2", cwd=work)
    (work / "side").write_text("side\n")
    git("add", "side", cwd=work)
    git("commit", "-q", "-m", "side", cwd=work)
    git("merge", "-q", "-m", "merge", "main", cwd=work)
    git("gc", "-q", "--aggressive", "--prune=now", cwd=work)
    git("clone", "-q", "--no-hardlinks", work, on_remounted / "clone", cwd=on_remounted)
    git("clone", "-q", work, on_remounted / "linked", cwd=on_remounted)
    git("clone", "-q", work, scratch / "outside", cwd=scratch)
    head = git("rev-parse", "HEAD", cwd=work)
    remounted.remount()
    for repository in (work, on_remounted / "clone", on_remounted / "linked", scratch / "outside"):
        git("fsck", "--full", "--strict", cwd=repository)
        assert git("rev-parse", "HEAD", cwd=repository) == head
        assert git("status", "--porcelain", cwd=repository) == ""


_INSERT_FOREVER = """
import sqlite3, sys
base = sqlite3.connect(sys.argv[1], isolation_level=None)
base.execute("pragma journal_mode = " + sys.argv[2])
base.execute("pragma synchronous = full")
for number in range(100_000):
    base.execute("begin")
    for part in range(10):
        base.execute("insert into t values (?, ?, ?)", (number, part, bytes([number % 256]) * 700))
    base.execute("commit")
    print(number, flush=True)
"""


@pytest.mark.sweep("journal")
@pytest.mark.parametrize("journal", ["wal", "delete", "truncate"])
def test_sqlite_survives_kill(remounted: Mounted, on_remounted: Path, journal: str) -> None:
    """A writer, and then the whole filesystem, is killed in mid-transaction; what was committed is
    there."""
    path = on_remounted / "base.sqlite"
    base = sqlite3.connect(path)
    base.execute(f"pragma journal_mode = {journal}")
    base.execute("create table t (number, part, bytes)")
    base.execute("create index i on t (number, part)")
    base.close()
    acknowledged = -1
    for kill_filesystem in (False, True):
        command = [sys.executable, "-c", _INSERT_FOREVER, str(path), journal]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            for _ in range(20):
                line = writer.stdout.readline()
            acknowledged = int(line)
            writer.kill()
        if kill_filesystem:
            remounted.kill()
            remounted.mount()
        base = sqlite3.connect(path)
        assert base.execute("pragma integrity_check").fetchall() == [("ok",)]
        counts = [
            count for (count,) in base.execute("select count(*) from t group by number").fetchall()
        ]
        assert len(counts) > acknowledged
        assert all(count % 10 == 0 for count in counts)
        base.execute("delete from t")
        base.commit()
        base.execute("vacuum")
        base.close()
    assert acknowledged >= 19


@pytest.mark.sweep
def test_sqlite_with_two_writers(on_mount: Path) -> None:
    path = on_mount / "base.sqlite"
    base = sqlite3.connect(path)
    base.execute("pragma journal_mode = wal")
    base.execute("create table t (who, number)")
    base.close()
    program = (
        "import sqlite3, sys\nbase = sqlite3.connect(sys.argv[1], timeout=60, "
        "isolation_level=None)\n"
        "for n in range(100): base.execute('insert into t values (?, ?)', (sys.argv[2], n))\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", program, str(path), who]) for who in "ab"]
    assert [writer.wait(TIMEOUT_S) for writer in writers] == [0, 0]
    base = sqlite3.connect(path)
    assert base.execute("select who, count(*), sum(number) from t group by who").fetchall() == [
        ("a", 100, 4950),
        ("b", 100, 4950),
    ]
    base.close()


@pytest.mark.sweep
def test_tar_round_trip(
    remounted: Mounted, on_remounted: Path, scratch: Path, sources: Path
) -> None:
    need("tar")
    options = ("--xattrs", "--xattrs-include=*", "--sparse", "--numeric-owner")
    run("tar", *options, "-cf", scratch / "first.tar", "-C", sources, ".")
    copy = on_remounted / "copy"
    copy.mkdir()
    run("tar", *options, "-xpf", scratch / "first.tar", "-C", copy)
    assert fingerprint(copy) == fingerprint(sources)
    assert (copy / "sparse").stat().st_blocks * 512 < 4 << 20
    remounted.remount()
    assert fingerprint(copy) == fingerprint(sources)
    run("tar", *options, "-cf", on_remounted / "second.tar", "-C", copy, ".")
    back = scratch / "back"
    back.mkdir()
    run("tar", *options, "-xpf", on_remounted / "second.tar", "-C", back)
    assert fingerprint(back) == fingerprint(sources)
    run("tar", *options, "--compare", "-f", on_remounted / "second.tar", "-C", sources)


def test_rsync_twice(remounted: Mounted, on_remounted: Path, sources: Path) -> None:
    """-A needs POSIX ACLs; where the filesystem has none rsync says so, and is run without it."""
    need("rsync")
    copy = on_remounted / "copy"
    command = [
        "rsync",
        "-aHAXS",
        "--checksum",
        "--modify-window=-1",
        "--itemize-changes",
        f"{sources}/",
        f"{copy}/",
    ]
    if "not supported" in run(*command, check=False):
        command[1] = "-aHXS"
    run(*command)
    assert fingerprint(copy) == fingerprint(sources)
    assert run(*command) == ""
    remounted.remount()
    assert run(*command) == ""
    (sources / "dir0" / "70000 bytes").write_bytes(os.urandom(70_000))
    (sources / "dir1" / "hard link").unlink()
    assert "dir0/70000 bytes" in run(*command, "--inplace", "--no-whole-file", "--delete", "--no-S")
    assert fingerprint(copy) == fingerprint(sources)


def test_cp_keeps_holes_and_attributes(on_mount: Path, sources: Path) -> None:
    copy, again = on_mount / "copy", on_mount / "again"
    run("cp", "-a", "--sparse=always", sources, copy)
    assert fingerprint(copy) == fingerprint(sources)
    assert (copy / "sparse").stat().st_blocks * 512 < 4 << 20
    run("cp", "-a", "--reflink=auto", "--sparse=always", copy, again)
    assert fingerprint(again) == fingerprint(sources)
    run("diff", "-r", "--no-dereference", "--exclude=fifo", "--exclude=device", copy, again)
    run("mv", again, on_mount / "moved")
    assert fingerprint(on_mount / "moved") == fingerprint(sources)
    run("rm", "-r", copy, on_mount / "moved")
    assert list(on_mount.iterdir()) == []


@pytest.mark.sweep
def test_find_and_du_agree(on_mount: Path, sources: Path) -> None:
    copy = on_mount / "copy"
    run("cp", "-a", sources, copy)
    for command in (
        ["find", ".", "-type", "d", "-printf", "%p %m %n %U %G\n"],
        ["find", ".", "!", "-type", "d", "-printf", "%p %y %s %m %n %t\n"],
        ["find", ".", "-size", "+1k", "-links", "1", "-newermt", "2001-01-01", "-type", "f"],
        ["du", "-b", "dir0/70000 bytes", "sparse"],
    ):
        found, expected = (sorted(run(*command, cwd=tree).splitlines()) for tree in (copy, sources))
        assert expected
        assert found == expected


_MAKEFILE = """
OBJECTS = $(patsubst %.c,%.o,$(wildcard *.c))
program: $(OBJECTS) libparts.a
\t$(CC) -o $@ main.o -L. -lparts
libparts.a: $(filter-out main.o,$(OBJECTS))
\tar rcs $@ $^
%.o: %.c parts.h
\t$(CC) -O0 -c -o $@ $<
clean:
\trm -f *.o *.a program
"""


@pytest.mark.sweep
def test_building_a_c_program(remounted: Mounted, on_remounted: Path) -> None:
    need("gcc")
    need("make")
    work = on_remounted / "work"
    work.mkdir()
    numbers = range(12)
    (work / "Makefile").write_text(_MAKEFILE)
    (work / "parts.h").write_text("".join(f"int part{number}(void);\n" for number in numbers))
    for number in numbers:
        (work / f"part{number}.c").write_text(
            f'#include "parts.h"\nint part{number}(void) {{ return {number}; }}\n'
        )
    calls = " + ".join(f"part{number}()" for number in numbers)
    (work / "main.c").write_text(
        f'#include <stdio.h>\n#include "parts.h"\nint main(void) {{ printf("%d\\n", {calls}); }}\n'
    )
    run("make", "-j2", cwd=work)
    assert run(work / "program") == f"{sum(numbers)}\n"
    assert "up to date" in run("make", cwd=work)
    (work / "part3.c").write_text('#include "parts.h"\nint part3(void) { return 1000; }\n')
    rebuilt = run("make", cwd=work)
    assert "part3.c" in rebuilt and "part4.c" not in rebuilt
    remounted.remount()
    assert run(work / "program") == f"{sum(numbers) - 3 + 1000}\n"
    assert "up to date" in run("make", cwd=work)
    run("make", "clean", cwd=work)


@pytest.mark.sweep
def test_pip_install_to_the_mount(remounted: Mounted, on_remounted: Path, scratch: Path) -> None:
    package = scratch / "package"
    (package / "tiny").mkdir(parents=True)
    (package / "tiny" / "__init__.py").write_text("WORD = 'installed'\n")
    (package / "setup.py").write_text(
        "from setuptools import setup\nsetup(name='tiny', version='1', packages=['tiny'])\n"
    )
    target = on_remounted / "site"
    options = ("--no-index", "--no-build-isolation", "--no-deps", "--disable-pip-version-check")
    run(
        sys.executable,
        "-m",
        "pip",
        "install",
        *options,
        "--target",
        target,
        package,
        TMPDIR=str(scratch),
    )
    remounted.remount()
    assert run(
        sys.executable, "-c", "import tiny; print(tiny.WORD, tiny.__file__)", PYTHONPATH=str(target)
    ) == (f"installed {target}/tiny/__init__.py\n")


@pytest.mark.sweep
@pytest.mark.parametrize("pip", [False, pytest.param(True, marks=pytest.mark.long)])
def test_python_venv(remounted: Mounted, on_remounted: Path, pip: bool) -> None:
    environment = on_remounted / "venv"
    run(sys.executable, "-m", "venv", *([] if pip else ["--without-pip"]), environment)
    python = environment / "bin" / "python"
    remounted.remount()
    assert run(python, "-c", "import sys; print(sys.prefix)") == f"{environment}\n"
    if pip:
        assert str(environment) in run(python, "-m", "pip", "--version")


_FIO = {
    "sequential": ["--rw=write", "--bs=1M", "--size=32M"],
    "random": ["--rw=randwrite", "--bs=4k", "--size=4M", "--randrepeat=1"],
    "mixed sizes": ["--rw=randwrite", "--bsrange=512-200k", "--bs_unaligned", "--size=8M"],
    "direct": ["--rw=randwrite", "--bs=16k", "--size=8M", "--direct=1"],
    "direct, in parallel": [
        "--rw=randwrite",
        "--bs=64k",
        "--size=16M",
        "--direct=1",
        "--ioengine=libaio",
        "--iodepth=16",
    ],
    "mapped": ["--rw=randwrite", "--bs=4k", "--size=4M", "--ioengine=mmap"],
    "several jobs on one file": [
        "--rw=randwrite",
        "--bs=64k",
        "--size=4M",
        "--numjobs=4",
        "--offset_increment=4M",
    ],
}


@pytest.mark.sweep
@pytest.mark.parametrize("kind", _FIO)
def test_fio_verifies(remounted: Mounted, on_remounted: Path, kind: str) -> None:
    need("fio")
    os.setxattr(on_remounted, "user.aifs.layout", b"unit=256KiB")
    job = [
        f"--name={kind}",
        f"--filename={on_remounted / 'file'}",
        "--verify=crc32c",
        "--verify_fatal=1",
        *_FIO[kind],
    ]
    job.append(f"--aux-path={remounted.source.parent}")  # fio keeps notes beside what it does
    run("fio", *job, "--end_fsync=1", "--do_verify=1")
    remounted.remount()
    if kind != "mixed sizes":  # what the random sizes were is not remembered
        run("fio", *job, "--verify_only=1")
    assert (on_remounted / "file").stat().st_size > 0


@pytest.mark.sweep
def test_text_tools_and_redirections(remounted: Mounted, on_remounted: Path) -> None:
    script = """
        set -e
        seq 1 20000 > numbers
        for i in 1 2 3; do echo line $i >> log; done
        test "$(cat log | wc -l)" = 3
        sort -rn numbers | head -1 | grep -qx 20000
        sed -i s/^1$/one/ numbers && head -1 numbers | grep -qx one
        gzip -k numbers && zcat numbers.gz | cmp - numbers
        split -b 10000 numbers part. && cat part.* | cmp - numbers
        dd if=numbers of=direct bs=4096 oflag=direct conv=fsync status=none && cmp numbers direct
        truncate -s 1G large && test "$(stat -c %s/%b large)" = 1073741824/0
        mkdir -p a/b/c && touch a/b/c/d && chmod -R go= a && chown -R 1:1 a && ls -lR a > listing
        ln numbers hard && ln -s numbers soft && cp -l numbers hard2
        test "$(stat -c %h numbers)" = 3
        find . -type f -newer log | sort > found
        install -m 640 numbers installed && test "$(stat -c %a installed)" = 640
        mktemp -p . > /dev/null
        flock log echo locked | grep -q locked
        rm -rf a part.* large
    """
    run("sh", "-c", script, cwd=on_remounted)
    digest = hashlib.blake2b((on_remounted / "numbers").read_bytes()).digest()
    remounted.remount()
    assert hashlib.blake2b((on_remounted / "hard2").read_bytes()).digest() == digest
