"""Environments that are made once (aifs.client.startup, aifs env), in a plain directory."""

import base64
import errno
import hashlib
import json
import os
import py_compile
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from aifs.cli.main import main
from aifs.client import startup
from aifs.client.startup import relocate
from aifs.core import files, trees
from tests.support import forked
from tests.support.mounts import TIMEOUT_S

KEY = {"lock": "torch==2.2"}

gives_away = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")


def touch(path: str) -> None:
    Path(path, "done").write_text(path)


def below(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir() if entry.name != ".aifs-env")


def last_used(found: startup.MadeDirectory, seconds_ago: float) -> None:
    status = os.stat(found.fd)
    os.utime(found.fd, (status.st_atime, status.st_mtime - seconds_ago))


def test_an_environment_is_made_once(tmp_path: Path) -> None:
    calls = []
    with startup.environment(tmp_path, key=KEY, make=lambda path: calls.append(path)) as first:
        assert first.made and Path(first).is_dir() and first.record.key is not None
    with startup.environment(tmp_path, key=KEY, make=calls.append) as second:
        assert not second.made and second.path == first.path
    with startup.environment(tmp_path, key={**KEY, "gpu": "H800"}, make=calls.append) as other:
        assert other.made and other.path != first.path
    assert len(calls) == 2
    assert below(tmp_path) == sorted(os.path.basename(found.path) for found in (first, other))


def test_the_name_depends_on_the_key_alone() -> None:
    assert startup.name_of({"a": 1, "b": [2]}) == startup.name_of({"b": [2], "a": 1})
    assert startup.name_of({"a": 1}) != startup.name_of({"a": "1"})
    assert startup.name_of({"lock": "x"}) == "aa68b8c9e48a52959d085d8b865dc7ce"
    with pytest.raises(TypeError):
        startup.name_of({"a": b"bytes"})
    assert {"python", "machine", "libc", "gpu"} == startup.platform_key().keys()
    assert startup.platform_key()["python"] == sysconfig.get_config_var("SOABI")


def test_of_many_that_want_it_one_makes_it(tmp_path: Path) -> None:
    calls = []
    begun = threading.Barrier(8)

    def make(path: str) -> None:
        calls.append(path)
        touch(path)

    def ask(_: int) -> startup.MadeDirectory:
        begun.wait()
        return startup.environment(tmp_path, key=KEY, make=make)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(8)))
    assert len(calls) == 1 and sum(one.made for one in found) == 1
    assert len({one.path for one in found}) == 1
    for one in found:
        one.close()


def test_who_waits_for_one_that_fails_fails(tmp_path: Path) -> None:
    waits = threading.Event()

    def fail(path: str) -> None:
        touch(path)
        assert waits.wait(TIMEOUT_S)
        raise RuntimeError("no such package")

    def ask(make: Callable[[str], None]) -> startup.MadeDirectory:
        return startup.environment(tmp_path, key=KEY, make=make)

    with ThreadPoolExecutor(2) as pool:
        maker = pool.submit(ask, fail)
        waiter = pool.submit(ask, fail)
        while not somebody_waits_for(tmp_path / ".aifs-env"):
            time.sleep(0.01)
        waits.set()
        errors = {type(asked.exception(TIMEOUT_S)) for asked in (maker, waiter)}
    assert errors == {RuntimeError, startup.MakingFailed}
    assert below(tmp_path) == []
    assert ask(touch).made  # the next one tries again


def somebody_waits_for(directory: Path) -> bool:
    """Whether a thread waits for a lock of a file in the directory."""
    inodes = {entry.stat().st_ino for entry in directory.iterdir()} if directory.exists() else set()
    return any(
        f":{inode} " in line
        for line in Path("/proc/locks").read_text().splitlines()
        for inode in inodes
        if "->" in line
    )


def test_a_maker_that_dies_loses_its_lock(tmp_path: Path) -> None:
    script = (
        "import sys, time; from aifs.client import startup\n"
        "def make(path):\n"
        "    open(path + '/half', 'w').close(); print('making', flush=True); time.sleep(1000)\n"
        f"startup.environment({str(tmp_path)!r}, key={KEY!r}, make=make)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=forked.ROOT
    ) as maker:
        assert maker.stdout is not None and maker.stdout.readline() == b"making\n"
        (left,) = below(tmp_path)
        maker.kill()
    with startup.environment(tmp_path, key=KEY, make=touch) as found:
        assert found.made
    assert below(tmp_path) == [os.path.basename(found.path)] and left.startswith(".")


def test_files_say_the_path_that_they_have(tmp_path: Path) -> None:
    cache = tmp_path / "cached"
    made = tmp_path / ".0123456789"
    new = made.with_name("abcdefghijk")
    site = made / "lib/site-packages"
    (site / "one.dist-info").mkdir(parents=True)
    (made / "bin").mkdir()
    cache.write_text(f"prefix = {made}\n")
    os.link(cache, made / "linked")
    script = made / "bin/run"
    script.write_text(f"#!{made}/bin/python\n")
    script.chmod(0o755)
    (made / "binary").write_bytes(b"x" * (relocate.PIECE - 5) + bytes(made) + b"\0y")
    (made / "link").symlink_to(made / "bin/run")
    (made / "other").write_text("nothing")
    source = site / "one.py"
    source.write_text(f"PATH = '{made}'\n")
    os.utime(source, ns=(1, 10**18))
    py_compile.compile(str(source), doraise=True)
    record = site / "one.dist-info/RECORD"
    record.write_text("one.py,sha256=old,5\nother.py,sha256=kept,7\n../../bin/run,,\n")
    assert relocate.relocate(str(made), made.name, new.name) == 6
    made.rename(new)
    assert cache.read_text() == f"prefix = {made}\n"
    assert (new / "linked").read_text() == f"prefix = {new}\n"
    assert (new / "bin/run").read_text() == f"#!{new}/bin/python\n"
    assert os.access(new / "bin/run", os.X_OK)
    assert (new / "binary").read_bytes()[relocate.PIECE - 5 :] == bytes(new) + b"\0y"
    assert os.readlink(new / "link") == str(new / "bin/run")
    source = new / "lib/site-packages/one.py"
    assert source.stat().st_mtime_ns == 10**18
    digest = base64.urlsafe_b64encode(hashlib.sha256(source.read_bytes()).digest()).rstrip(b"=")
    assert (new / "lib/site-packages/one.dist-info/RECORD").read_text() == (
        f"one.py,sha256={digest.decode()},{source.stat().st_size}\n"
        "other.py,sha256=kept,7\n../../bin/run,,\n"
    )
    said = subprocess.run(
        [sys.executable, "-v", "-c", "import one; print(one.PATH)"],
        env={"PYTHONPATH": str(source.parent), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout == f"{new}\n" and "one.cpython" in said.stderr
    assert not [line for line in said.stderr.splitlines() if "stale" in line and "one" in line]


def test_what_nobody_uses_expires(tmp_path: Path) -> None:
    idle = startup.environment(tmp_path, key={"n": 1}, make=touch, expire_s=60)
    used = startup.environment(tmp_path, key={"n": 2}, make=touch, expire_s=60)
    kept = startup.environment(tmp_path, key={"n": 3}, make=touch)
    last_used(idle, 100)
    last_used(used, 100)
    last_used(kept, 10**6)
    kept.close()
    assert startup.expire(tmp_path) == []  # they are in use
    idle.close()
    assert startup.expire(tmp_path) == [os.path.basename(idle.path)]
    assert below(tmp_path) == sorted(os.path.basename(one.path) for one in (used, kept))
    with pytest.raises(startup.MakingFailed):
        startup.made_at(idle.path)
    with startup.made_at(used.path):  # which counts as a use
        used.close()
    assert startup.expire(tmp_path) == []


def test_a_new_one_makes_room(tmp_path: Path) -> None:
    with startup.environment(tmp_path, key={"n": 1}, make=touch, expire_s=60) as old:
        last_used(old, 100)
    with startup.environment(tmp_path, key={"n": 2}, make=touch) as new:
        assert below(tmp_path) == [os.path.basename(new.path)]


def test_a_record_that_is_torn_counts_as_empty(tmp_path: Path) -> None:
    with startup.environment(tmp_path, key=KEY, make=touch, expire_s=0) as found:
        name = os.path.basename(found.path)
        os.truncate(tmp_path / ".aifs-env" / name, 10)
    assert startup.expire(tmp_path) == []
    with startup.environment(tmp_path, key=KEY, make=touch) as again:
        assert not again.made and again.record == startup.MadeRecord()


@pytest.mark.sweep
@pytest.mark.parametrize("field", ["took_s", "expire_s", "bytes", "made_s", "attempt"])
@pytest.mark.parametrize("value", [float("nan"), 1e300, -1, 10**400])
def test_a_record_of_impossible_numbers_counts_as_empty(
    tmp_path: Path, field: str, value: float
) -> None:
    """Others may have written it: aifs env ls ended in a traceback."""
    with startup.environment(tmp_path, key=KEY, make=touch) as found:
        name = os.path.basename(found.path)
    record = tmp_path / ".aifs-env" / name
    record.write_text(json.dumps({**json.loads(record.read_text()), field: value}))
    assert startup.list_made(tmp_path)[name][0] == startup.MadeRecord()


def test_one_that_is_half_removed_is_removed_later(tmp_path: Path) -> None:
    with startup.environment(tmp_path, key=KEY, make=touch, expire_s=60) as found:
        record = tmp_path / ".aifs-env" / os.path.basename(found.path)
    hidden = "." + "0" * 31
    record.write_text(json.dumps({**json.loads(record.read_text()), "making": hidden}))
    os.rename(found.path, tmp_path / hidden)
    startup.expire(tmp_path)
    assert below(tmp_path) == [] and not record.exists()


@pytest.mark.parametrize("making", ["../victim", "/{tmp}/victim", ".", "", 7])
def test_a_record_of_somebody_else_removes_nothing_but_environments(
    tmp_path: Path, making: object
) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").touch()
    envs = tmp_path / "envs"
    if isinstance(making, str):
        making = making.replace("{tmp}", str(tmp_path))
    record = json.dumps({"making": making, "expire_s": 0, "attempt": 1})
    with startup.environment(envs, key=KEY, make=touch) as found:
        name = os.path.basename(found.path)
    shutil.rmtree(found.path)
    (envs / ".aifs-env" / name).write_text(record)
    startup.expire(envs)
    with startup.environment(envs, key=KEY, make=touch):
        pass
    (envs / "projects").mkdir()
    (envs / ".aifs-env" / "projects").write_text(record)
    os.utime(envs / ".aifs-env" / "projects", (0, 0))
    startup.expire(envs)
    assert (victim / "file").exists() and (envs / "projects").exists()


def test_no_symlink_of_somebody_else_is_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    with startup.environment(tmp_path, key=KEY, make=touch) as found:
        record = tmp_path / ".aifs-env" / os.path.basename(found.path)
    for target in (victim, tmp_path / "missing"):
        record.unlink()
        record.symlink_to(target)
        with pytest.raises(OSError, match="symbolic links") as refused:
            startup.environment(tmp_path, key=KEY, make=touch)
        assert refused.value.filename == str(record)
    record.unlink()
    os.mkfifo(record)
    with pytest.raises(OSError, match="not a regular file"):
        startup.environment(tmp_path, key=KEY, make=touch)
    assert victim.read_text() == "precious"
    record.unlink()
    elsewhere = tmp_path / "elsewhere"
    os.rename(found.path, elsewhere)
    os.symlink(elsewhere, found.path)
    with pytest.raises(startup.MakingFailed, match="no directory"):
        startup.environment(tmp_path, key=KEY, make=touch)
    assert (elsewhere / "done").exists()


def test_no_symlink_in_the_place_of_the_records_is_followed(tmp_path: Path) -> None:
    envs, victim = tmp_path / "envs", tmp_path / "victim"
    envs.mkdir()
    victim.mkdir()
    for target in (victim, tmp_path / "missing"):
        (envs / ".aifs-env").symlink_to(target)
        for use in (
            lambda: startup.environment(envs, key=KEY, make=touch),
            lambda: startup.made_at(envs / ("0" * 32)),
            lambda: startup.list_made(envs),
            lambda: startup.expire(envs),
        ):
            with pytest.raises(startup.MakingFailed, match=r"\.aifs-env: is no directory"):
                use()
        (envs / ".aifs-env").unlink()
    assert os.listdir(victim) == [] and below(envs) == []


def test_records_stay_where_they_are_when_a_symlink_takes_their_place(tmp_path: Path) -> None:
    victim, moved = tmp_path / "victim", tmp_path / "moved"
    victim.mkdir()

    def meddle(path: str) -> None:
        (tmp_path / ".aifs-env").rename(moved)
        (tmp_path / ".aifs-env").symlink_to(victim)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        startup.environment(tmp_path, key=KEY, make=meddle)
    assert os.listdir(victim) == os.listdir(moved) == []


@gives_away
def test_where_everybody_may_write_nobody_runs_what_others_made(tmp_path: Path) -> None:
    with startup.environment(tmp_path, key=KEY, make=touch) as found:
        os.chown(found.path, 65534, 65534)
    with startup.environment(tmp_path, key=KEY, make=touch) as again:
        assert not again.made  # only trusted users write there
    tmp_path.chmod(0o1777)
    for use in (
        lambda: startup.environment(tmp_path, key=KEY, make=touch),
        lambda: startup.made_at(found.path),
    ):
        with pytest.raises(startup.MakingFailed, match="made by user 65534"):
            use()
    os.chown(found.path, 0, 0)
    startup.environment(tmp_path, key=KEY, make=touch).close()


@gives_away
@pytest.mark.parametrize("field", ["making", "name"])
def test_a_record_removes_nothing_that_does_not_belong_to_its_owner(
    tmp_path: Path, field: str
) -> None:
    """Root removed what another user was just making, because a third one's record said so."""
    records = tmp_path / ".aifs-env"
    records.mkdir()
    theirs = tmp_path / ("." + "a" * 63 if field == "making" else "c" * 64)
    (theirs / "lib").mkdir(parents=True)
    os.chown(theirs, 65533, 65533)
    record = records / ("c" * 64)
    making = theirs.name if field == "making" else ""
    record.write_text(json.dumps({"making": making, "expire_s": 0, "attempt": 1}))
    os.utime(record, (0, 0))
    os.chown(record, 65534, 65534)
    assert startup.expire(tmp_path) == [] and (theirs / "lib").exists()
    os.chown(record, 65533, 65533)
    startup.expire(tmp_path)
    assert not theirs.exists()


def test_a_record_is_not_read_without_bound(tmp_path: Path) -> None:
    with startup.environment(tmp_path, key=KEY, make=touch) as found:
        name = os.path.basename(found.path)
    os.truncate(tmp_path / ".aifs-env" / name, 1 << 40)
    assert startup.list_made(tmp_path)[name][0] == startup.MadeRecord()


@gives_away
def test_where_everybody_may_write_records_of_others_are_not_used(tmp_path: Path) -> None:
    """Their owner may write anything into them, and give them other names."""
    tmp_path.chmod(0o1777)
    (tmp_path / ".aifs-env").mkdir()
    os.chown(tmp_path / ".aifs-env", 65534, 65534)
    with pytest.raises(startup.MakingFailed, match="made by user 65534"):
        startup.environment(tmp_path, key=KEY, make=touch)


def test_a_record_of_somebody_else_does_not_keep_one_from_being_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with startup.environment(tmp_path, key={"n": 1}, make=touch, expire_s=0) as old:
        theirs = os.path.basename(old.path)
    open_file = files.open_file

    def refuse(path: str, *, write: bool = True, foreign: bool = False) -> int:
        if write and path.endswith(theirs):
            raise PermissionError(errno.EACCES, "not yours", path)
        return open_file(path, write=write, foreign=foreign)

    monkeypatch.setattr(files, "open_file", refuse)
    with startup.environment(tmp_path, key={"n": 2}, make=touch) as found:
        assert found.made
    with startup.environment(tmp_path, key={"n": 1}, make=touch) as found:
        assert not found.made


def test_a_tree_is_removed_without_following_symlinks(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    (kept / "below").mkdir(parents=True)
    tree = tmp_path / "tree"
    (tree / "a" / "b").mkdir(parents=True)
    (tree / "a" / "b" / "file").touch()
    (tree / "a" / "link").symlink_to(kept)
    (tree / "link").symlink_to(tmp_path / "missing")
    trees.remove_tree(str(tree))
    trees.remove_tree(str(tree))  # it is gone
    (tmp_path / "link").symlink_to(kept)
    with pytest.raises(NotADirectoryError):
        trees.remove_tree(str(tmp_path / "link"))
    assert not tree.exists() and (kept / "below").exists()


def test_env_run_prints_the_path(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lock, envs = tmp_path / "lock.txt", str(tmp_path / "envs")
    lock.write_text("one==1")

    def run(*words: str) -> tuple[int, str, str]:
        code = main(["env", *words])
        return code, *capfd.readouterr()

    shell = ["--", "sh", "-c", 'echo making; mkdir "$AIFS_ENV/bin"']
    asked = ["run", "--dir", envs, "--key-from", str(lock), *shell]
    code, path, said = run(*asked)
    assert (code, said) == (0, "making\n") and Path(path.strip(), "bin").is_dir()
    assert run(*asked) == (0, path, "")
    lock.write_text("one==2")
    assert run(*asked)[1:] != (path, "")
    assert run("run", "--dir", envs, "--", "sh", "-c", "exit 7") == (
        7,
        "",
        "aifs: no environment was made: sh has ended with exit code 7\n",
    )
    assert run("run", "--dir", envs, "--", "no-such-program") == (
        2,
        "",
        "aifs: no-such-program: No such file or directory\n",
    )
    assert run("run", "--dir", envs, "--key-from", "gone.txt", "--", "true")[0] == 2
    code, listed, _ = run("ls", envs, "--json")
    assert code == 0 and len(json.loads(listed)) == 2
    assert len(run("ls", envs)[1].splitlines()) == 3
    assert run("expire", envs)[1] == "removed 0 environments\n"
    assert run("use", str(tmp_path), "--", "true")[0] == 10


def test_a_venv_that_cannot_be_made_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a traceback."""
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    assert main(["env", "run", "--dir", str(tmp_path), "--venv", "--", "true"]) == 1
    said = capfd.readouterr().err
    assert said == f"aifs: no environment was made: {sys.executable} has ended with exit code 1\n"


def test_a_command_uses_its_environment_until_it_ends(tmp_path: Path) -> None:
    def make(path: str) -> None:
        program = Path(path, "bin", "say")
        program.parent.mkdir()
        program.write_text('#!/bin/sh\necho "$AIFS_ENV"; read line\n')
        program.chmod(0o755)

    with startup.environment(tmp_path, key=KEY, make=make, expire_s=60) as found:
        last_used(found, 100)
    command = [sys.executable, "-m", "aifs.cli.main", "env", "use", found.path, "--", "say"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=forked.ROOT) as running:
        assert running.stdin is not None and running.stdout is not None
        assert running.stdout.readline().decode().strip() == found.path
        record = tmp_path / ".aifs-env" / os.path.basename(found.path)
        os.utime(record, (0, 0))
        assert startup.expire(tmp_path) == []
        running.stdin.close()
    assert running.returncode == 1  # read has met the end
    assert startup.expire(tmp_path) == [os.path.basename(found.path)]


def test_one_that_is_there_is_found_without_what_takes_long_to_import(tmp_path: Path) -> None:
    command = ["env", "run", "--dir", str(tmp_path), "--key", "x", "--", "true"]
    assert main(command) == 0
    slow = "ctypes dataclasses decimal logging multiprocessing rich subprocess sysconfig tempfile"
    script = f"""
import sys
from aifs.cli.main import main
assert main({command}) == 0
import aifs.cli.door  # as where the directory lies on a mount
print(*{set(slow.split())} & set(sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path = {sys.path}{script}"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines()[1:] == [""], "what it imports takes a time that ranks wait for"
