"""What a container that has a part of a mount, by a bind mount, reaches of it: nothing else, by
name, number, hint, call or handle.
"""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from aifs.core import mountinfo
from tests.support.mounts import Mounted, aifs, call
from tests.support.users import errno_of

REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS}

INSIDE = """
import json, os, sys
from aifs.core import ioctl
sys.path.insert(0, os.getcwd())
from tests.support.users import in_process
while line := sys.stdin.readline():
    path, call, fields, attribute, uid = json.loads(line)
    def attempt():
        if attribute:
            os.setxattr(path, f"user.aifs.{call}", attribute.encode())
            return {}
        fd = os.open(path, os.O_RDONLY)
        return ioctl.call(fd, call, **fields)
    try:
        told = [0, in_process(attempt, uid)]
    except OSError as error:
        told = [error.errno, str(error)]
    print(json.dumps(told), flush=True)
"""


class Container:
    """A process in a mount namespace of its own, in which a part of the mount is at ``path``, and
    the rest is not there."""

    def __init__(self, mount: Path, parts: dict[str, str], place: Path) -> None:
        """``parts``: path below the mount to options."""
        lines = []
        self.paths = {}
        for number, (part, options) in enumerate(parts.items()):
            target = place / str(number)
            target.mkdir()
            self.paths[part] = target
            lines += [f"mount --bind {mount / part} {target}"]
            lines += [f"mount -o remount,bind,{options} {target}"] if options else []
        lines += [f"umount -l {mount}", 'exec "$@"']
        words = ["unshare", "--mount", "--propagation", "private", "sh", "-euc", "\n".join(lines)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [*words, "sh", sys.executable, "-c", INSIDE], stdin=pipe, stdout=pipe, text=True
        )

    def call(
        self, path: Path, hint: str, uid: int = 0, attribute: str = "", **fields: object
    ) -> dict:
        """What a user's call, or setting of the attribute, returns. Raises OSError."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps([str(path), hint, fields, attribute, uid]) + "\n")
        self.process.stdin.flush()
        number, told = json.loads(self.process.stdout.readline())
        if number:
            raise OSError(number, told)
        return told

    def end(self) -> None:
        self.process.communicate()
        assert self.process.returncode == 0


@pytest.fixture
def teams(on_mount: Path) -> Path:
    """Two directories of two teams, below a directory that only root may search."""
    on_mount.chmod(0o700)
    for name in ("a", "b", "data"):
        (on_mount / name / "sub").mkdir(parents=True)
        (on_mount / name / "sub/file").write_text(name)
        for path in (on_mount / name, on_mount / name / "sub"):
            os.chown(path, 1000, 1000)
    return on_mount


@contextmanager
def container(teams: Path, parts: dict[str, str], place: Path) -> Iterator[Container]:
    top = mountinfo.mount_of(str(teams))
    assert top is not None
    below = teams.relative_to(top.mountpoint)
    made = Container(Path(top.mountpoint), {f"{below}/{it}": parts[it] for it in parts}, place)
    made.paths = {it: made.paths[f"{below}/{it}"] for it in parts}
    try:
        yield made
    finally:
        made.end()


@pytest.fixture
def inside(teams: Path, scratch: Path) -> Iterator[Container]:
    scratch.chmod(0o755)
    with container(teams, {"a": "", "data": "ro"}, scratch) as made:
        yield made


@pytest.mark.parametrize("uid", [0, 1000])
def test_calls_name_no_directory_outside(teams: Path, inside: Container, uid: int) -> None:
    a, outside = inside.paths["a"], os.stat(teams / "b").st_ino
    (teams / "b").chmod(0o777)

    def refused(path: Path, hint: str, **fields: object) -> None:
        assert errno_of(inside.call, path, hint, uid, **fields) in REFUSED, (hint, fields)

    refused(a, "clone", name="sub", parent=outside, clone="leaked")
    for final in ("../../b/leaked", "/leaked", f"/{teams.name}/b/leaked"):
        refused(a / "sub", "publish-as", final=final)
        refused(a / "sub", "publish-as", attribute=f'{{"final": "{final}"}}')
    refused(a / "sub", "publish-as", final="leaked", parent=outside)
    refused(a, "publish-as", final="../data/leaked")
    assert os.listdir(teams / "b") == ["sub"]


@pytest.mark.parametrize("uid", [0, 1000])
def test_within_its_part_a_container_may_do_all(teams: Path, inside: Container, uid: int) -> None:
    """Also where the directories above, which are not its own, are closed to it."""
    a = inside.paths["a"]
    number = os.stat(teams / "a").st_ino
    inside.call(a / "sub", "clone", uid, name="file", parent=number, clone="copy")
    assert (teams / "a/copy").read_text() == "a"
    inside.call(a / "sub", "publish-as", uid, final="shown")
    assert (teams / "a/shown/file").read_text() == "a"
    inside.call(a, "remove", uid, name="shown")
    assert os.listdir(teams / "a") == ["copy"]


def test_calls_do_not_pass_a_read_only_mount(teams: Path, inside: Container) -> None:
    data = inside.paths["data"]
    for hint, fields in (
        ("remove", {"name": "sub"}),
        ("clone", {"name": "sub", "clone": "other"}),
        ("trash.empty", {}),
    ):
        assert errno_of(inside.call, data, hint, **fields) == errno.EROFS, hint
    assert errno_of(inside.call, data / "sub", "publish-as", final="x") == errno.EROFS
    assert errno_of(inside.call, data, "tier", attribute="burst") == errno.EROFS
    assert os.listdir(teams / "data") == ["sub"]
    number = os.stat(teams / "data").st_ino
    a = inside.paths["a"]
    assert errno_of(inside.call, a, "clone", name="sub", parent=number, clone="x") == errno.EROFS


def test_what_is_for_root_is_for_root_of_the_host(teams: Path, inside: Container) -> None:
    a = inside.paths["a"]
    assert errno_of(inside.call, a, "quota", attribute="size=1GiB") == errno.EPERM
    assert errno_of(inside.call, a, "import", bucket="memory://", names="", etags="") == errno.EPERM
    os.setxattr(teams / "a", "user.aifs.quota", b"size=1GiB")


def test_the_trash_of_others_stays_theirs(teams: Path, inside: Container) -> None:
    os.setxattr(teams, "user.aifs.trash", b"1d")
    numbers = {}
    for name in "ab":
        numbers[name] = os.stat(teams / name / "sub/file").st_ino
        (teams / name / "sub/file").unlink()
    a = inside.paths["a"]
    assert errno_of(inside.call, a, "restore", id=numbers["b"], name="leaked") == errno.ENOENT
    assert errno_of(inside.call, a, "trash.empty", ids=[numbers["b"]]) == errno.ENOENT
    inside.call(a, "restore", id=numbers["a"])
    (teams / "a/sub/file").unlink()
    inside.call(a, "trash.empty")
    assert errno_of(call, teams, "restore", id=numbers["a"]) == errno.ENOENT
    call(teams, "restore", id=numbers["b"])
    assert (teams / "b/sub/file").read_text() == "b"


def test_copies_of_others_files_stay_where_they_are(teams: Path, inside: Container) -> None:
    (teams / "b/large").write_bytes(bytes(1 << 20))
    number = os.stat(teams / "b/large").st_ino
    call(teams / "b", "drain")
    assert inside.call(inside.paths["a"], "evict", inos=[number])["kept"] == {"owner": 1}
    call(teams / "b", "evict")
    assert inside.call(inside.paths["a"], "stage", inos=[number])["kept"] == {"owner": 1}


def test_a_handle_needs_a_capability_that_containers_lack(teams: Path) -> None:
    """CAP_DAC_READ_SEARCH: with it, open_by_handle_at(2) finds any file of a mount."""
    attempt = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
handle, mount = ctypes.create_string_buffer(136), ctypes.c_int()
ctypes.c_uint.from_buffer(handle).value = 128
path = os.fsencode(sys.argv[1])
assert libc.name_to_handle_at(-100, path, handle, ctypes.byref(mount), 0) == 0
top = os.open(os.path.dirname(path), os.O_RDONLY)
fd = libc.open_by_handle_at(top, handle, os.O_RDONLY)
print(ctypes.get_errno() if fd < 0 else 0)
"""
    command = [sys.executable, "-c", attempt, teams / "b/sub/file"]
    without = ["setpriv", "--bounding-set=-dac_read_search", "--inh-caps=-dac_read_search"]
    for words, expected in (([], 0), (without, errno.EPERM)):
        done = subprocess.run([*words, *command], check=True, capture_output=True, text=True)
        assert int(done.stdout) == expected


# --- aifs mount -o subdir=DIR ---------------------------------------------------------------------


def test_a_directory_of_the_store_is_mounted_elsewhere(
    shared: Mounted, teams: Path, scratch: Path
) -> None:
    """Read-only beside a writer, writable, or all of it."""
    below = f"subdir={teams.relative_to(shared.path)}/a"
    view, whole = scratch / "view", scratch / "whole"
    view.mkdir()
    whole.mkdir()
    aifs("mount", shared.source, view, "-o", f"{below},ro,noexec")
    try:
        (teams / "a/new").write_text("new")
        assert (view / "new").read_text() == "new"
        assert errno_of(os.unlink, view / "new") == errno.EROFS
        assert os.statvfs(view).f_flag & (os.ST_RDONLY | os.ST_NOEXEC) == 9
        assert os.listdir(view / "../view") == os.listdir(view)
        refused = aifs("mount", shared.source, view, "-o", below, check=False)
        assert refused.returncode and "is mounted here already" in refused.stderr
        aifs("mount", shared.source, whole, "-o", "subdir=/,ro")
        status = json.loads(aifs("status", whole, "--json").stdout)
        assert status["mountpoint"] == str(shared.path)
        aifs("umount", whole)
    finally:
        aifs("umount", view)
    aifs("mount", shared.source, view, "-o", below)
    (view / "new").unlink()
    subprocess.run(["umount", view], check=True)
    assert shared.is_alive() and not os.path.exists(teams / "a/new")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("subdir=../x", "leads above the directory"),
        ("subdir=none", "No such file"),
        ("subdir=/,layout.unit=4KiB", "-o layout.unit: with subdir it is the other mount's"),
        ("subdir=/,sync", "-o sync: with subdir"),
    ],
)
def test_wrong_directories(shared: Mounted, scratch: Path, options: str, said: str) -> None:
    done = aifs("mount", shared.source, scratch, "-o", options, check=False)
    assert done.returncode and said in done.stderr and not os.path.ismount(scratch)


def test_a_symlink_leads_nowhere(shared: Mounted, on_mount: Path, scratch: Path) -> None:
    (on_mount / "link").symlink_to("/etc")
    subdir = f"subdir={on_mount.relative_to(shared.path)}/link"
    done = aifs("mount", shared.source, scratch, "-o", subdir, check=False)
    assert done.returncode == 1 and "Not a directory" in done.stderr


def test_the_store_has_to_be_mounted(scratch: Path) -> None:
    aifs("format", scratch / "store")
    (scratch / "mnt").mkdir()
    done = aifs("mount", scratch / "store", scratch / "mnt", "-o", "subdir=/", check=False)
    assert done.returncode == 6 and "is not mounted on this host" in done.stderr
