"""What an installation adds to a directory is captured, and put there again (aifs env run
--capture), in plain directories."""

import errno
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from aifs.cli.main import main
from aifs.client import startup
from aifs.client.startup import captured
from tests.support.data_servers import hooked
from tests.support.mounts import ROOT, TIMEOUT_S

KEY = {"lock": "a==1"}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return target(tmp_path / "site")


def target(path: Path) -> Path:
    """As an image has it: two packages."""
    for name in ("old", "kept"):
        (path / name).mkdir(parents=True)
        (path / name / "__init__.py").write_text(f"name = {name!r}\n")
    (path / "kept" / "link").symlink_to("__init__.py")
    (path / "config").write_text("before")
    return path


def install(path: Path) -> None:
    """Adds, changes, replaces and removes."""
    new = path / "new"
    new.mkdir(mode=0o750)
    (new / "module.py").write_text("answer = 42\n")
    (path / "bin").mkdir()
    (path / "bin" / "tool").write_text(f"#!{path}/bin/python\n")
    (path / "bin" / "tool").chmod(0o755)
    (path / "kept" / "link").unlink()
    (path / "kept" / "link").symlink_to("../new/module.py")
    (path / "config").write_text("after, and longer")
    for file in (path / "old").iterdir():
        file.unlink()
    (path / "old").rmdir()


def tree(path: Path) -> dict[str, object]:
    def told(one: Path) -> object:
        status = one.lstat()
        if one.is_symlink():
            return os.readlink(one)
        return status.st_mode, one.is_file() and (one.read_bytes(), status.st_mtime_ns)

    return {str(one.relative_to(path)): told(one) for one in path.rglob("*")}


def ask(envs: Path, path: Path, work: Callable[[Path], object] = install) -> startup.MadeDirectory:
    with startup.capture(envs, key=KEY, target=path, install=lambda: work(path)) as found:
        return found


def never(path: Path) -> None:
    raise AssertionError("it is there already")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_copy_does_not_run_with_the_rights_of_whoever_copies(tmp_path: Path, site: Path) -> None:
    """Owners are not kept, so a program that is set-user-ID to another user must not become one
    that is set-user-ID to root."""

    def install_program(path: Path) -> None:
        for name, uid in (("theirs", 1000), ("own", 0)):
            (path / name).write_text("#!/bin/sh\n")
            os.chown(path / name, uid, 0)
            (path / name).chmod(0o4755)

    with startup.capture(
        tmp_path / "envs", key=KEY, target=site, install=lambda: install_program(site)
    ) as found:
        kept = Path(found.path, "files")
        assert (kept / "theirs").stat().st_mode & 0o7777 == 0o755
        assert (kept / "own").stat().st_mode & 0o7777 == 0o4755


def test_what_was_installed_is_put_there_again(tmp_path: Path, site: Path) -> None:
    assert ask(tmp_path / "envs", site).made
    wanted = tree(site)
    subprocess.run(["mv", site, tmp_path / "done"], check=True)
    again = target(site)
    assert not ask(tmp_path / "envs", again, never).made
    assert tree(again).keys() == wanted.keys()
    for path in ("new", "new/module.py", "bin/tool", "config", "kept/link"):
        assert tree(again)[path] == wanted[path]
    linked = tmp_path / "envs" / ask(tmp_path / "envs", again, never).path / "files/new/module.py"
    assert os.path.samefile(again / "new/module.py", linked)
    assert not os.path.samefile(tmp_path / "done/new/module.py", linked)  # what was captured


def test_it_may_be_repeated_and_mends_what_was_left(tmp_path: Path, site: Path) -> None:
    ask(tmp_path / "envs", site)
    wanted = tree(site)
    (site / "new" / "module.py").unlink()
    (site / "new" / "module.py").mkdir()
    (site / "bin" / "tool").unlink()
    (site / "old").mkdir()
    (site / "config").unlink()
    (site / "config").symlink_to("/etc/passwd")
    ask(tmp_path / "envs", site, never)
    assert tree(site) == wanted
    assert Path("/etc/passwd").read_bytes() != b"after, and longer"


def test_no_symlink_that_somebody_has_put_there_meanwhile_is_followed(
    tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root wrote wherever the owner of a directory of the target let it lead to."""
    ask(tmp_path / "envs", site)
    again, victim = target(tmp_path / "again"), tmp_path / "victim"
    victim.mkdir()

    def plant(to: str, *rest: object) -> None:
        (again / "new").rmdir()
        (again / "new").symlink_to(victim)

    monkeypatch.setattr(captured, "_remove_temporary", plant)  # the directories are there
    with pytest.raises(NotADirectoryError):
        ask(tmp_path / "envs", again, never)
    assert not os.listdir(victim)


def test_on_another_filesystem_it_is_copied(
    tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(tmp_path / "envs", site)
    wanted = tree(site)

    def link(*words: object, **fields: object) -> None:
        raise OSError(errno.EXDEV, "another filesystem")

    (site / "new" / "module.py").unlink()
    monkeypatch.setattr(os, "link", link)
    ask(tmp_path / "envs", site, never)
    assert tree(site) == wanted and os.lstat(site / "new" / "module.py").st_nlink == 1


def conda(path: Path) -> None:
    """A tree as conda makes one: its path stands in text and binary files."""
    (path / "conda-meta").mkdir()
    (path / "conda-meta" / "lib.json").write_text(f'{{"prefix": "{path}", "other": "{path}-2"}}')
    (path / "lib").mkdir()
    (path / "lib" / "lib.so").write_bytes(
        b"\x7fELF\0" + os.fsencode(f"{path}/lib:{path}/lib64") + b"\0\0end\0"
    )
    (path / "lib" / "module.pyc").write_bytes(b"\0\0" + os.fsencode(path) + b"\0")
    (path / "lib" / "here").symlink_to(f"{path}/lib")


def test_what_is_moved_says_its_new_path(tmp_path: Path) -> None:
    first, second = tmp_path / "long-name", tmp_path / "name"
    ask(tmp_path / "envs", first, conda)
    ask(tmp_path / "envs", second, never)
    told = (second / "conda-meta" / "lib.json").read_text()
    assert told == f'{{"prefix": "{second}", "other": "{first}-2"}}'  # which is another path
    before, after = ((path / "lib" / "lib.so").read_bytes() for path in (first, second))
    assert len(before) == len(after) and after.endswith(b"\0\0end\0")
    assert after.split(b"\0")[1] == os.fsencode(f"{second}/lib:{second}/lib64")
    assert not (second / "lib" / "module.pyc").exists()  # Python compiles it anew
    assert os.readlink(second / "lib" / "here") == f"{second}/lib"
    ask(tmp_path / "envs", second, never)
    assert (second / "lib" / "lib.so").read_bytes() == after


def test_a_binary_without_room_for_its_path_is_refused_by_name(tmp_path: Path) -> None:
    first, second = tmp_path / "name", tmp_path / "longer-name"
    ask(tmp_path / "envs", first, conda)
    with pytest.raises(startup.MakingFailed, match=r"no room for a longer one: lib/lib\.so; "):
        ask(tmp_path / "envs", second, never)
    assert os.listdir(second) == [".aifs-capture"]


def test_who_dies_while_installing_has_captured_nothing(tmp_path: Path, site: Path) -> None:
    """The next one knows what was there before that one, too."""
    script = (
        "import os, signal, sys; from pathlib import Path; from aifs.client import startup\n"
        "site = Path(sys.argv[1])\n"
        "def install():\n"
        "    (site / 'half').write_text('x')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        f"startup.capture(sys.argv[2], key={KEY!r}, target=site, install=install)\n"
    )
    command = [sys.executable, "-c", script, str(site), str(tmp_path / "envs")]
    died = subprocess.run(command, cwd=ROOT, timeout=TIMEOUT_S, check=False)
    assert died.returncode == -signal.SIGKILL and (site / "half").exists()
    assert ask(tmp_path / "envs", site).made
    again = target(tmp_path / "again")
    ask(tmp_path / "envs", again, never)
    assert (again / "half").read_text() == "x" and not (again / "old").exists()
    assert not list(tmp_path.glob("*/.aifs-capture"))


def test_what_fails_is_not_captured(tmp_path: Path, site: Path) -> None:
    def fail(path: Path) -> None:
        (path / "half").write_text("x")
        raise RuntimeError("no space")

    with pytest.raises(RuntimeError):
        ask(tmp_path / "envs", site, fail)
    assert ask(tmp_path / "envs", site, lambda path: (path / "whole").touch()).made
    again = tmp_path / "again"
    ask(tmp_path / "envs", again, never)
    assert sorted(os.listdir(again)) == ["half", "whole"]


def test_what_is_no_file_is_refused_by_name(tmp_path: Path, site: Path) -> None:
    with pytest.raises(startup.MakingFailed, match=r"/pipe: is no file, directory or symlink"):
        ask(tmp_path / "envs", site, lambda path: os.mkfifo(path / "pipe"))


@pytest.mark.sweep
@pytest.mark.parametrize("told", ["", "[]", "{}", '{"target": "/a", "removed": ["../x"]}'])
def test_an_account_of_somebody_else_leads_nowhere(tmp_path: Path, site: Path, told: str) -> None:
    made = ask(tmp_path / "envs", site)
    Path(made.path, "captured.json").write_text(told)
    (tmp_path / "x").touch()
    with pytest.raises(startup.MakingFailed, match="is no account of what was captured"):
        ask(tmp_path / "envs", site, never)
    assert (tmp_path / "x").exists()


def test_the_command(tmp_path: Path, site: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def run(path: Path, *words: str) -> int:
        options = ["--dir", str(tmp_path / "envs"), "--key", "1", "--capture", str(path)]
        return main(["env", "run", *options, *words])

    command = ("--", "sh", "-c", 'touch "$AIFS_ENV/one"')
    assert run(site, *command) == 0
    again = target(tmp_path / "again")
    assert run(again, *command) == 0 and (again / "one").exists()
    first, second = capfd.readouterr().out.splitlines()
    assert first == second
    assert run(site, "--venv", *command) == 2
    assert run(site, "--key", "2", "--", "sh", "-c", "exit 7") == 7


def at(which: int, op: str, action: Callable[[], object]) -> AbstractContextManager[None]:
    """The ``which``-th of the operations ``op`` on files (of all, if that is empty) ends in
    ``action``."""
    numbers = itertools.count(1)

    def before(done: str, path: str) -> None:
        if op in ("", done) and next(numbers) == which:
            action()

    return hooked(before)


def fill_disk() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def nothing(path: Path) -> None:
    """What is installed is there already."""


@pytest.mark.sweep
@pytest.mark.parametrize(("op", "which"), [("copy_range", 2), ("write_at", 3), ("sync_file", 4)])
def test_a_full_disk_captures_nothing(tmp_path: Path, site: Path, op: str, which: int) -> None:
    envs, again = tmp_path / "envs", target(tmp_path / "again")
    with at(which, op, fill_disk), pytest.raises(OSError, match="No space left"):
        ask(envs, site)
    assert startup.list_made(envs) == {}
    assert [name for name in os.listdir(envs) if name != ".aifs-env"] == []
    assert ask(envs, site, nothing).made
    ask(envs, again, never)
    assert tree(again).keys() == tree(site).keys()


@pytest.mark.sweep
@pytest.mark.parametrize(("op", "which"), [("link", 2), ("write_at", 1), ("make_dir", 4)])
def test_what_a_full_disk_has_put_there_by_half_is_mended(
    tmp_path: Path, site: Path, op: str, which: int
) -> None:
    envs, again = tmp_path / "envs", target(tmp_path / "again")
    ask(envs, site)
    with at(which, op, fill_disk), pytest.raises(OSError, match="No space left"):
        ask(envs, again, never)
    assert tree(again).keys() != tree(site).keys()
    ask(envs, again, never)
    assert tree(again).keys() == tree(site).keys()


def killed(point: int, envs: Path, path: Path, work: str, op: str = "") -> None:
    """Asks for it, and dies at its ``point``-th operation, or its ``point``-th ``op``."""
    script = (
        "import os, signal, sys; from pathlib import Path\n"
        "from tests.unit.test_captured import ask, at, install, never\n"
        f"with at({point}, {op!r}, lambda: os.kill(os.getpid(), signal.SIGKILL)):\n"
        f"    ask(Path(sys.argv[1]), Path(sys.argv[2]), {work})\n"
    )
    command = [sys.executable, "-c", script, str(envs), str(path)]
    died = subprocess.run(command, cwd=ROOT, timeout=TIMEOUT_S, check=False, capture_output=True)
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert list(path.glob(".aifs-capture"))


@pytest.mark.sweep
@pytest.mark.parametrize("point", [20, 45, 66, 74])
def test_a_capture_that_is_killed_is_made_anew(tmp_path: Path, site: Path, point: int) -> None:
    """While it copies, writes what it has captured, syncs, and publishes."""
    envs, again = tmp_path / "envs", target(tmp_path / "again")
    killed(point, envs, site, "install")
    ask(envs, site, nothing)
    ask(envs, again, never)
    assert tree(again).keys() == tree(site).keys()
    assert len(startup.list_made(envs)) == 1 == len(os.listdir(envs)) - 1


@pytest.mark.sweep
def test_what_was_killed_while_it_put_files_there_leaves_none_of_its_own(
    tmp_path: Path, site: Path
) -> None:
    """A file that had not got its name yet stayed for good."""
    envs, again = tmp_path / "envs", target(tmp_path / "again")
    ask(envs, site)
    killed(1, envs, again, "never", op="rename")
    assert list(again.glob("**/.*.tmp"))
    (again / ".mine.01234567.tmp").touch()
    ask(envs, again, never)
    assert tree(again).keys() == {*tree(site).keys(), ".mine.01234567.tmp"}
