"""Users other than root: what they may do, and may not, is what a local filesystem lets them do.

Each case runs on the mount and on a plain directory; where the two agree with the table,
permissions are right.
"""

import errno
import json
import os
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aifs.cli import door, trash  # noqa: F401 - a child of another user cannot import
from aifs.cli.output import describe_error
from aifs.client import checkpoint
from aifs.core import ioctl
from tests.support.mounts import Mounted
from tests.support.users import errno_of, in_process

ALICE, BOB, NOBODY = 1000, 1001, 65534
TEAM = 4242

EACCES, EPERM = errno.EACCES, errno.EPERM


@pytest.fixture(params=["mount", "plain"])
def here(module_mount: Mounted, request: pytest.FixtureRequest) -> Iterator[Path]:
    """An empty directory, on the mount or on the filesystem below it, that everybody may write
    to."""
    parent = module_mount.path if request.param == "mount" else module_mount.path.parent
    with tempfile.TemporaryDirectory(dir=parent) as directory:
        os.chmod(directory, 0o777)
        yield Path(directory)


def owned(path: Path, uid: int, gid: int, mode: int) -> Path:
    """The path, made if it is missing, with this owner and mode."""
    if not path.exists():
        path.write_bytes(b"content")
    os.chown(path, uid, gid)
    path.chmod(mode)
    return path


def attempt(uid: int, action: Callable[[], object], groups: tuple[int, ...] = ()) -> int:
    """The errno that the action fails with when that user does it; 0 if it succeeds."""
    return in_process(lambda: errno_of(action), uid, groups=groups)


@pytest.mark.parametrize(
    ("mode", "uid", "groups", "may"),
    [
        (0o600, ALICE, (), "rw"),
        (0o600, BOB, (), ""),
        (0o640, BOB, (TEAM,), "r"),
        (0o640, BOB, (), ""),
        (0o660, BOB, (TEAM,), "rw"),
        (0o604, BOB, (), "r"),
        (0o606, BOB, (), "rw"),
        (0o604, BOB, (TEAM,), ""),
        (0o066, ALICE, (), ""),
        (0o700, ALICE, (), "rwx"),
        (0o711, BOB, (), "x"),
        (0o200, ALICE, (), "w"),
        (0o000, 0, (), "rw"),
        (0o001, 0, (), "rwx"),
    ],
)
def test_modes_of_files(here: Path, mode: int, uid: int, groups: tuple[int, ...], may: str) -> None:
    path = owned(here / "file", ALICE, TEAM, mode)
    expected = {letter: 0 if letter in may else EACCES for letter in "rwx"}
    found = {
        "r": attempt(uid, lambda: os.open(path, os.O_RDONLY), groups),
        "w": attempt(uid, lambda: os.open(path, os.O_WRONLY), groups),
        "x": 0
        if in_process(lambda: os.access(path, os.X_OK, effective_ids=True), uid, groups=groups)
        else EACCES,
    }
    assert found == expected
    assert attempt(uid, lambda: os.truncate(path, 1), groups) == expected["w"]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("mode", "list_it", "pass_through", "change_it"),
    [
        (0o700, EACCES, EACCES, EACCES),
        (0o704, 0, EACCES, EACCES),
        (0o701, EACCES, 0, EACCES),
        (0o705, 0, 0, EACCES),
        (0o703, EACCES, 0, 0),
        (0o702, EACCES, EACCES, EACCES),
        (0o777, 0, 0, 0),
    ],
)
def test_modes_of_directories(
    here: Path, mode: int, list_it: int, pass_through: int, change_it: int
) -> None:
    directory = here / "dir"
    directory.mkdir()
    owned(directory / "file", BOB, BOB, 0o644)
    owned(directory, ALICE, ALICE, mode)
    assert attempt(BOB, lambda: os.listdir(directory)) == list_it
    assert attempt(BOB, lambda: os.stat(directory / "file")) == pass_through
    assert attempt(BOB, lambda: os.mkdir(directory / "new")) == change_it
    assert attempt(BOB, lambda: os.link(directory / "file", directory / "link")) == change_it
    assert attempt(BOB, lambda: os.rename(directory / "file", directory / "moved")) == change_it
    if change_it == 0:
        assert attempt(BOB, lambda: os.unlink(directory / "moved")) == 0


@pytest.mark.sweep
def test_sticky_directories(here: Path) -> None:
    directory = here / "dir"
    directory.mkdir()
    owned(directory, ALICE, ALICE, 0o1777)
    for name, uid in (("alice", ALICE), ("bob", BOB), ("nobody", NOBODY)):
        owned(directory / name, uid, uid, 0o666)
    assert attempt(BOB, lambda: os.unlink(directory / "nobody")) == EPERM
    assert attempt(BOB, lambda: os.rename(directory / "nobody", directory / "x")) == EPERM
    assert attempt(BOB, lambda: os.rename(directory / "bob", directory / "nobody")) == EPERM
    assert attempt(BOB, lambda: os.rename(directory / "bob", directory / "mine")) == 0
    assert attempt(ALICE, lambda: os.unlink(directory / "nobody")) == 0  # hers is the directory
    assert attempt(BOB, lambda: os.unlink(directory / "mine")) == 0
    assert attempt(0, lambda: os.unlink(directory / "alice")) == 0
    (directory / "sub").mkdir()
    owned(directory / "sub", NOBODY, NOBODY, 0o777)
    assert attempt(BOB, lambda: os.rmdir(directory / "sub")) == EPERM
    assert attempt(NOBODY, lambda: os.rmdir(directory / "sub")) == 0


@pytest.mark.sweep
def test_chmod_is_for_the_owner(here: Path) -> None:
    path = owned(here / "file", ALICE, ALICE, 0o666)
    assert attempt(BOB, lambda: os.chmod(path, 0o777)) == EPERM
    assert attempt(ALICE, lambda: os.chmod(path, 0o600)) == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert attempt(0, lambda: os.chmod(path, 0o640)) == 0


def test_chmod_drops_setgid_for_a_foreign_group(here: Path) -> None:
    path = owned(here / "file", ALICE, TEAM, 0o600)
    assert attempt(ALICE, lambda: os.chmod(path, 0o2750)) == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o750
    assert attempt(ALICE, lambda: os.chmod(path, 0o2750), groups=(TEAM,)) == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o2750


@pytest.mark.sweep
def test_chown_is_for_root_and_groups_for_members(here: Path) -> None:
    path = owned(here / "file", ALICE, ALICE, 0o666)
    assert attempt(ALICE, lambda: os.chown(path, BOB, -1)) == EPERM
    assert attempt(ALICE, lambda: os.chown(path, -1, TEAM)) == EPERM
    assert attempt(BOB, lambda: os.chown(path, -1, BOB)) == EPERM
    assert attempt(ALICE, lambda: os.chown(path, ALICE, ALICE)) == 0
    assert attempt(ALICE, lambda: os.chown(path, -1, TEAM), groups=(TEAM,)) == 0
    assert (path.stat().st_uid, path.stat().st_gid) == (ALICE, TEAM)
    path.chmod(0o6777)
    assert attempt(ALICE, lambda: os.chown(path, -1, ALICE)) == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o777


@pytest.mark.sweep
def test_times_are_for_the_owner_or_a_writer(here: Path) -> None:
    path = owned(here / "file", ALICE, ALICE, 0o644)
    assert attempt(BOB, lambda: os.utime(path, ns=(1, 1))) == EPERM
    assert attempt(BOB, lambda: os.utime(path)) == EACCES
    assert attempt(ALICE, lambda: os.utime(path, ns=(1, 1))) == 0
    assert path.stat().st_mtime_ns == 1
    path.chmod(0o646)
    assert attempt(BOB, lambda: os.utime(path)) == 0
    assert attempt(BOB, lambda: os.utime(path, ns=(1, 1))) == EPERM
    assert path.stat().st_mtime_ns > 1


def test_new_files_belong_to_their_maker(here: Path) -> None:
    in_process(
        lambda: ((here / "file").touch(), (here / "dir").mkdir(), os.symlink("x", here / "link")),
        ALICE,
        gid=TEAM,
    )
    infos = [os.lstat(here / name) for name in ("file", "dir", "link")]
    assert {(info.st_uid, info.st_gid) for info in infos} == {(ALICE, TEAM)}


@pytest.mark.sweep
def test_extended_attributes_of_others(here: Path) -> None:
    path = owned(here / "file", ALICE, ALICE, 0o644)
    assert attempt(ALICE, lambda: os.setxattr(path, "user.a", b"1")) == 0
    assert attempt(BOB, lambda: os.setxattr(path, "user.a", b"2")) == EACCES
    assert attempt(BOB, lambda: os.getxattr(path, "user.a")) == 0
    assert attempt(BOB, lambda: os.removexattr(path, "user.a")) == EACCES
    path.chmod(0o600)
    assert attempt(BOB, lambda: os.getxattr(path, "user.a")) == EACCES
    os.setxattr(path, "trusted.a", b"secret")
    assert attempt(ALICE, lambda: os.setxattr(path, "trusted.a", b"1")) == EPERM
    assert attempt(ALICE, lambda: os.getxattr(path, "trusted.a")) == errno.ENODATA
    assert in_process(lambda: os.listxattr(path), ALICE) == ["user.a"]
    assert attempt(ALICE, lambda: os.removexattr(path, "trusted.a")) == EPERM
    assert attempt(ALICE, lambda: os.setxattr(path, "security.a", b"1")) == EPERM
    assert os.getxattr(path, "trusted.a") == b"secret"
    sticky = here / "sticky"
    sticky.mkdir()
    owned(sticky, ALICE, ALICE, 0o1777)
    assert attempt(BOB, lambda: os.setxattr(sticky, "user.a", b"1")) == EPERM


@pytest.mark.sweep
def test_device_nodes_are_for_root(here: Path) -> None:
    assert (
        attempt(ALICE, lambda: os.mknod(here / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3)))
        == EPERM
    )
    assert attempt(ALICE, lambda: os.mkfifo(here / "fifo")) == 0
    assert attempt(0, lambda: os.mknod(here / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))) == 0


def test_an_open_descriptor_keeps_its_rights(here: Path) -> None:
    path = owned(here / "file", ALICE, ALICE, 0o666)
    fd = os.open(path, os.O_RDWR)
    path.chmod(0o000)
    assert in_process(lambda: os.pwrite(fd, b"inherited", 0), BOB) == 9
    os.close(fd)
    assert attempt(BOB, lambda: os.open(path, os.O_RDONLY)) == EACCES
    assert path.read_bytes() == b"inherited"


@pytest.mark.sweep
def test_cached_permissions_are_not_stale(here: Path) -> None:
    """The kernel keeps attributes for long: a change by one user must reach all others at once."""
    path = owned(here / "file", ALICE, ALICE, 0o644)
    for _ in range(3):
        assert attempt(BOB, lambda: os.open(path, os.O_RDONLY)) == 0
        assert attempt(ALICE, lambda: os.chmod(path, 0o600)) == 0
        assert attempt(BOB, lambda: os.open(path, os.O_RDONLY)) == EACCES
        assert attempt(ALICE, lambda: os.chmod(path, 0o644)) == 0


def mounted_only(here: Path, module_mount: Mounted) -> None:
    if not here.is_relative_to(module_mount.path):
        pytest.skip("of a mount alone")


@pytest.mark.sweep
def test_hints_that_decide_about_the_files_of_others_are_for_the_owner(
    here: Path, module_mount: Mounted
) -> None:
    """Who may write to a directory could have it removed by marking it, and have others' files
    stored without copies."""
    mounted_only(here, module_mount)
    shared = here / "shared"
    shared.mkdir()
    owned(shared / "precious", BOB, BOB, 0o600)
    owned(shared, 0, 0, 0o777)
    values = {"pending": "ranks=1", "layout": "replicas=1", "tier": "capacity", "keep": "last=1"}
    for name, value in values.items():
        hint = f"user.aifs.{name}"
        assert attempt(ALICE, lambda: os.setxattr(shared, hint, value.encode())) == EPERM
        assert attempt(ALICE, lambda: os.removexattr(shared, hint)) == EPERM
        os.chown(shared, ALICE, ALICE)
        assert attempt(ALICE, lambda: os.setxattr(shared, hint, value.encode())) == 0
        os.chown(shared, 0, 0)
    assert attempt(ALICE, lambda: os.removexattr(shared, "user.aifs.pending")) == EPERM
    owned(shared, 0, 0, 0o755)
    for name in ("drain", "group", "commit"):
        assert attempt(ALICE, lambda: os.setxattr(shared, f"user.aifs.{name}", b"")) == EACCES
    assert attempt(ALICE, lambda: os.getxattr(shared, "user.aifs.state")) == 0
    owned(shared, 0, 0, 0o711)
    assert attempt(ALICE, lambda: os.getxattr(shared, "user.aifs.state")) == EACCES


@pytest.mark.sweep
def test_a_refusal_says_why_to_who_asked(here: Path, module_mount: Mounted) -> None:
    mounted_only(here, module_mount)
    shared = here / "shared"
    shared.mkdir()
    owned(shared, ALICE, ALICE, 0o777)
    assert attempt(ALICE, lambda: door.put(str(shared), "tier", "fast")) == errno.EINVAL
    told = in_process(lambda: door.read(str(shared), "refused"), ALICE)
    assert told["request"] == "user.aifs.tier" and "'fast' is unknown" in told["reason"]
    assert attempt(BOB, lambda: door.read(str(shared), "refused")) == errno.ENODATA

    def message(act: Callable[[], object]) -> str:
        try:
            act()
        except OSError as error:
            return describe_error(error)
        return ""

    def of_bob(act: Callable[[], object]) -> str:
        return in_process(lambda: message(act), BOB)

    assert of_bob(lambda: door.put(str(shared), "tier", "burst")) == (
        f"{shared}: only its owner and root may do this"
    )
    # The kernel refuses by itself: what was said before does not count.
    owned(shared, ALICE, ALICE, 0o755)
    assert of_bob(lambda: door.put(str(shared), "drain")) == f"{shared}: Permission denied"
    (shared / "tree").mkdir()
    owned(shared / "tree", ALICE, ALICE, 0o755)
    owned(shared, ALICE, ALICE, 0o777)
    assert of_bob(lambda: trash.remove_path(str(shared / "tree"), True, [])) == (
        f"{shared / 'tree'}: only its owner and root may do this"
    )


@pytest.mark.sweep
def test_ioctls_are_for_who_may_write(here: Path, module_mount: Mounted) -> None:
    mounted_only(here, module_mount)

    def drain() -> None:
        fd = os.open(here, os.O_RDONLY)
        ioctl.call(fd, "drain")

    if attempt(0, drain) in (errno.ENOTTY, errno.ENOSYS):
        pytest.skip("of a mount with the bridge alone")
    assert attempt(ALICE, drain) == 0
    here.chmod(0o1777)
    assert attempt(ALICE, drain) == EPERM
    here.chmod(0o755)
    assert attempt(ALICE, drain) == EACCES


def test_adding_a_server_is_for_root(module_mount: Mounted, tmp_path: Path) -> None:
    target = tmp_path / "server"
    module_mount.path.chmod(0o777)
    try:
        name = "user.aifs.server-add"
        found = attempt(ALICE, lambda: os.setxattr(module_mount.path, name, bytes(target)))
    finally:
        module_mount.path.chmod(0o755)
    assert found in (EPERM, EACCES)
    assert not target.exists()


def test_setuid_programs(here: Path) -> None:
    program = here / "id"
    program.write_bytes(Path("/usr/bin/id").read_bytes())
    owned(program, ALICE, ALICE, 0o4755)

    def run() -> str:
        return subprocess.run(
            [program, "-u"], check=True, capture_output=True, text=True
        ).stdout.strip()

    assert in_process(run, BOB) == str(ALICE)


def test_a_save_that_a_crash_has_left_is_done_again_by_another_of_the_team(
    here: Path, module_mount: Mounted
) -> None:
    mounted_only(here, module_mount)
    team, unfinished = here / "team", []
    team.mkdir()
    os.chown(team, 0, TEAM)
    team.chmod(0o2775)

    def begin() -> None:
        os.umask(0o002)
        saving = checkpoint(team / "step-1")
        unfinished.append(saving)  # else it ends in order
        (saving.__enter__() / "state").write_bytes(b"half of")

    def save() -> None:
        os.umask(0o002)
        with checkpoint(team / "step-1") as tmp:
            (tmp / "state").write_bytes(b"all")

    assert attempt(ALICE, begin, (TEAM,)) == 0
    assert json.loads(os.getxattr(team / ".step-1.pending", "user.aifs.pending"))["ranks"] == 1
    assert attempt(BOB, save) == EACCES, "who may not write to it"
    assert attempt(BOB, save, (TEAM,)) == 0
    assert (team / "step-1" / "state").read_bytes() == b"all"
