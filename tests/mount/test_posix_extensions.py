"""What Linux offers beyond POSIX, on a mount with the bridge: the same calls must have the same
outcome on ext4.
"""

import errno
import fcntl
import mmap
import os
import stat
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import pytest

from aifs.fuse import extension
from aifs.meta import acl
from aifs.meta.acl import AclEntry
from tests.support.machine import RENAME_EXCHANGE, link_open, renameat2
from tests.support.mounts import Mounted, aifs, mounted_store
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
    """A function that calls a scenario in an empty directory of the local filesystem and in one of
    the mount, for all users to write to; the outcome, which must be the same."""

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


# --- access control lists -------------------------------------------------------------------------


def shell(command: str) -> str:
    """What a shell command prints, errors included."""
    done = subprocess.run(
        command,
        shell=True,
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return done.stdout


def acl_of(*paths: str) -> str:
    return shell(f"getfacl -n {' '.join(paths)}; stat -c '%A %n' {' '.join(paths)}")


def outcome(function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except OSError as error:
        return errno.errorcode[error.errno]


def reads(path: str) -> str:
    return Path(path).read_text()


@pytest.mark.sweep
def test_an_acl_decides_who_may(alike: Alike) -> None:
    def rights() -> list[Any]:
        may_write = outcome(os.open, "file", os.O_WRONLY) != "EACCES"
        return [outcome(reads, "file"), may_write, os.access("file", os.R_OK)]

    def scenario() -> Any:
        Path("file").write_text("content")
        os.chmod("file", 0o640)
        said = [shell(f"setfacl -m u:{USER}:rw,u:1001:r,g:1002:r file"), acl_of("file")]
        for change in ("true", "chmod 600 file", "chmod 660 file", f"setfacl -x u:{USER} file"):
            said.append(shell(change))
            for uid in (USER, 1001, 1002, 1003):
                said += in_process(rights, uid)
            said.append(acl_of("file"))
        said.append(shell("setfacl -b file"))
        return *said, acl_of("file"), os.listxattr("file")

    said = alike(scenario)
    assert "user:1000:rw-" in said[1] and said[3] == "content" and said[4] and said[9] == "content"
    assert said[-1] == []


@pytest.mark.sweep
def test_a_default_acl_is_inherited(alike: Alike) -> None:
    def make() -> None:
        for umask in (0o000, 0o027, 0o077):
            os.umask(umask)
            os.close(os.open(f"top/file{umask}", os.O_CREAT | os.O_WRONLY, 0o666))
            os.mkdir(f"top/dir{umask}", 0o777)
            os.mknod(f"top/fifo{umask}", stat.S_IFIFO | 0o664)
            os.symlink("nowhere", f"top/link{umask}")
            fd = nameless("top", mode=0o660)
            link_open(fd, f"top/dir{umask}/named")
            os.close(fd)
            os.mkdir(f"top/dir{umask}/below")

    def scenario() -> Any:
        os.mkdir("top")
        os.chmod("top", 0o2777)
        said = [
            shell(f"setfacl -d -m u::rwx,g::r-x,o::r,u:{USER}:rwx,g:1002:rx top"),
            acl_of("top"),
        ]
        in_process(make, 1001)
        os.symlink("nowhere", "top/link")
        found = sorted(str(path) for path in Path("top").rglob("*") if not path.is_symlink())
        said.append(acl_of(*found))
        said.append(shell("setfacl -k top"))
        os.umask(0o022)
        os.mkdir("top/plain", 0o777)
        return (
            *said,
            acl_of("top", "top/plain"),
            os.stat("top/link0", follow_symlinks=False).st_mode,
        )

    assert f"user:{USER}:rwx" in alike(scenario)[2]


def test_a_default_acl_of_modes_alone_takes_the_place_of_the_umask(alike: Alike) -> None:
    def scenario() -> Any:
        os.mkdir("top")
        said = shell("setfacl -d -m u::rwx,g::rwx,o::- top")
        os.umask(0o077)
        Path("top/file").touch()
        os.mkdir("top/dir")
        os.umask(0o022)
        return said, acl_of("top/file", "top/dir"), os.listxattr("top/file")

    assert "-rw-rw----" in alike(scenario)[1]


@pytest.mark.sweep
def test_setfacl_of_who_is_not_of_the_group_takes_setgid_away(alike: Alike) -> None:
    def scenario() -> Any:
        modes = []
        for groups in ((), (1234,)):
            Path("file").touch()
            os.chown("file", USER, 1234)
            os.chmod("file", 0o2755)
            said = in_process(lambda: shell("setfacl -m u:1001:rx file"), USER, groups=groups)
            modes.append((said, oct(os.stat("file").st_mode)))
            os.unlink("file")
        return modes

    assert alike(scenario) == [("", "0o100755"), ("", "0o102755")]


def test_what_cannot_be_set_as_an_acl(alike: Alike) -> None:
    def scenario() -> Any:
        Path("file").touch()
        os.mkdir("dir")
        os.symlink("file", "link")
        name = acl.ACCESS.decode()
        many = [AclEntry(acl.USER_OBJ, 7, 2**32 - 1)]
        many += [AclEntry(acl.USER, 7, uid) for uid in range(480)]
        many += [AclEntry(tag, 7, 2**32 - 1) for tag in (acl.GROUP_OBJ, acl.MASK, acl.OTHER)]
        os.setxattr("dir", name, acl.encode(many))
        return (
            errno_of(os.setxattr, "file", name, b"nonsense"),
            errno_of(os.setxattr, "file", acl.DEFAULT.decode(), acl.encode(many[:1] + many[-3:])),
            errno_of(lambda: os.setxattr("link", name, acl.encode(many), follow_symlinks=False)),
            in_process(lambda: outcome(os.setxattr, "file", name, acl.encode(many)), USER),
            os.getxattr("dir", name) == acl.encode(many),
            os.listxattr("dir"),
            errno_of(os.getxattr, "file", name),
            outcome(os.removexattr, "file", name),
        )

    alike(scenario)


@pytest.mark.sweep
def test_acls_of_a_store_are_kept_by_a_remount(mount_store: Callable[..., Mounted]) -> None:
    store = mount_store("allow_other")
    store.path.parent.parent.chmod(0o755)
    file, plain = store.path / "file", store.path / "plain"
    for path in (file, plain):
        path.write_text("content")
        path.chmod(0o600)
    os.setxattr(store.path, acl.DEFAULT, acl.encode(ACL))
    os.setxattr(file, acl.ACCESS, acl.encode(ACL))
    before = file.stat().st_mode
    for options in ((), ("kernel.bridge=off",)):
        store.unmount()
        store.options = ("allow_other", *options)
        store.mount()
        assert in_process(lambda: outcome(reads, file), USER) == "content"
        assert in_process(lambda: outcome(reads, plain), USER) == "EACCES"
        assert in_process(lambda: outcome(reads, file), 1001) == "EACCES"
        assert os.getxattr(file, acl.ACCESS) == acl.encode(ACL)
        assert os.getxattr(store.path, acl.DEFAULT) == acl.encode(ACL)
        assert file.stat().st_mode == before
        (store.path / f"new{len(options)}").touch()
        assert acl.ACCESS.decode() in os.listxattr(store.path / f"new{len(options)}")


ACL = [
    AclEntry(acl.USER_OBJ, 6, 2**32 - 1),
    AclEntry(acl.USER, 6, USER),
    AclEntry(acl.GROUP_OBJ, 0, 2**32 - 1),
    AclEntry(acl.MASK, 6, 2**32 - 1),
    AclEntry(acl.OTHER, 0, 2**32 - 1),
]


# --- when a file was born -------------------------------------------------------------------------


def test_birth_times(alike: Alike, module_mount: Mounted) -> None:
    def scenario() -> Any:
        before = int(time.time())
        Path("file").write_text("content")
        os.mkdir("dir", 0o700)
        os.mknod("device", stat.S_IFCHR | 0o640, os.makedev(300, 70000))
        os.symlink("target", "link")
        names = ("file", "dir", "device", "link")
        born = {name: shell(f"stat -c '%W %w' {name}") for name in names}
        assert all(before <= int(said.split()[0]) <= time.time() for said in born.values())
        os.utime("file", ns=(1, 2_000_000_003))
        os.chown("file", USER, 4_000_000_000)
        os.rename("file", "moved")
        Path("moved").write_text("more content")
        os.utime("moved", ns=(-(10**9) - 1, 4_000_000_000_000_000_005))
        said = [
            shell("stat -c '%a %F %s %h %u %g %t:%T' moved device link"),
            shell("stat -c '%x %y' moved"),
        ]
        for name in names:
            now = "moved" if name == "file" else name
            assert shell(f"stat -c '%W %w' {now}") == born[name]
            assert int(shell(f"stat -c '%i' {now}")) == os.lstat(now).st_ino
        assert shell("stat -c %b,%z moved dir") == shell("stat -c %b,%z moved dir")
        return said

    alike(scenario)


@pytest.mark.sweep
def test_birth_times_outlive_the_mount(remounted: Mounted, on_remounted: Path) -> None:
    (on_remounted / "file").touch()
    born = shell(f"stat -c %w {remounted.path} {on_remounted} {on_remounted}/file")
    remounted.remount()
    again = shell(f"stat -c %w {remounted.path} {on_remounted} {on_remounted}/file")
    assert again == born and "-\n" not in born


# --- immutable, append-only, projects -------------------------------------------------------------


def changes_of(path: str, other: str) -> dict[str, Callable[[], object]]:
    """What may not be done to an immutable file."""

    def open_as(flags: int) -> Callable[[], object]:
        return lambda: os.close(os.open(path, flags))

    return {
        "write": open_as(os.O_WRONLY),
        "read and write": open_as(os.O_RDWR),
        "append": open_as(os.O_WRONLY | os.O_APPEND),
        "cut when opened": open_as(os.O_WRONLY | os.O_APPEND | os.O_TRUNC),
        "create again": open_as(os.O_WRONLY | os.O_CREAT),
        "truncate": lambda: os.truncate(path, 0),
        "chmod": lambda: os.chmod(path, 0o600),
        "chown": lambda: os.chown(path, 5, 5),
        "utime": lambda: os.utime(path, ns=(1, 1)),
        "setxattr": lambda: os.setxattr(path, "user.new", b"x"),
        "removexattr": lambda: os.removexattr(path, "user.old"),
        "setfacl": lambda: os.setxattr(path, acl.ACCESS, acl.encode(ACL)),
        "link": lambda: os.link(path, "new link"),
        "rename": lambda: os.rename(path, "renamed"),
        "replace": lambda: os.rename(other, path),
        "exchange": lambda: renameat2(other.encode(), path.encode(), RENAME_EXCHANGE),
        "unlink": lambda: os.unlink(path),
        "read": lambda: Path(path).read_bytes(),
        "stat": lambda: os.stat(path).st_size,
    }


@pytest.mark.sweep
@pytest.mark.parametrize("flag", ["i", "a"])
def test_what_may_be_done_to_a_guarded_file(alike: Alike, flag: str) -> None:
    def scenario() -> Any:
        said = []
        for name in changes_of("", ""):
            Path("file").write_text("content")
            Path("other").write_text("other")
            os.setxattr("file", "user.old", b"x")
            assert shell(f"chattr +{flag} file") == ""
            said.append((name, outcome(changes_of("file", "other")[name])))
            assert (
                shell(f"chattr -{flag} file renamed 2>/dev/null; rm -f file other *link renamed")
                == ""
            )
        return said

    found = dict(alike(scenario))
    assert found["unlink"] == found["chmod"] == found["write"] == "EPERM"
    assert found["append"] == ("EPERM" if flag == "i" else None) and found["read"] == b"content"


def test_an_append_only_file_grows_and_nothing_else(alike: Alike) -> None:
    def scenario() -> Any:
        Path("log").write_text("first\n")
        assert shell("chattr +a log; echo second >> log") == ""
        fd = os.open("log", os.O_WRONLY | os.O_APPEND)
        said = [os.write(fd, b"third\n"), outcome(os.ftruncate, fd, 0)]
        os.close(fd)
        said += [Path("log").read_text(), outcome(os.truncate, "log", 100)]
        assert shell("chattr -a log") == ""
        return said

    assert alike(scenario)[2] == "first\nsecond\nthird\n"


@pytest.mark.parametrize("has_readers", [False, True])
def test_append_only_holds_also_for_who_takes_o_append_back(here: Path, has_readers: bool) -> None:
    """``has_readers``: since before it became append-only, so that the file is passed through."""
    content = b"first" * 4000
    Path("log").write_bytes(content)
    Path("source").write_bytes(b"forged")
    with ExitStack() as stack:
        if has_readers:
            reader = stack.enter_context(open("log", "rb", buffering=0))
        assert shell("chattr +a log") == ""
        fd = os.open("log", os.O_WRONLY | os.O_APPEND)
        fcntl.fcntl(fd, fcntl.F_SETFL, 0)
        source = stack.enter_context(open("source", "rb")).fileno()
        assert errno_of(os.pwrite, fd, b"x", 0) == errno.EPERM
        assert errno_of(os.copy_file_range, source, fd, 6, 0, 0) == errno.EPERM
        assert os.pwrite(fd, b"second", len(content)) == 6
        os.close(fd)
        content += b"second"
        if has_readers:
            assert reader.readall() == content
            assert errno_of(os.open, "log", os.O_RDWR | os.O_APPEND) == errno.EBUSY
    fd = os.open("log", os.O_RDWR | os.O_APPEND)
    assert errno_of(mmap.mmap, fd, 5) == errno.ENODEV
    with mmap.mmap(fd, 5, mmap.MAP_PRIVATE) as private:
        assert private[:] == b"first"
    content += b"third"
    assert os.write(fd, b"third") == 5 and os.pread(fd, 1 << 20, 0) == content
    assert Path("log").read_bytes() == content
    os.close(fd)
    assert shell("chattr -a log") == "" and Path("log").read_bytes() == content


@pytest.mark.parametrize("flag", ["i", "a"])
def test_what_may_be_done_in_a_guarded_directory(alike: Alike, flag: str) -> None:
    def scenario() -> Any:
        os.makedirs("dir/below")
        Path("dir/file").write_text("content")
        Path("outside").touch()
        assert shell(f"chattr +{flag} dir") == ""
        said = [
            outcome(lambda: Path("dir/new").touch()),
            outcome(os.mkdir, "dir/new dir"),
            outcome(os.symlink, "x", "dir/new link"),
            outcome(os.link, "outside", "dir/other"),
            outcome(os.unlink, "dir/file"),
            outcome(os.rmdir, "dir/below"),
            outcome(os.rename, "dir/file", "taken"),
            outcome(os.rename, "dir/file", "dir/renamed"),
            outcome(os.rename, "outside", "dir/brought"),
            outcome(lambda: os.close(nameless("dir"))),
            outcome(lambda: Path("dir/file").write_text("changed")),
            outcome(os.rmdir, "dir"),
            outcome(os.rename, "dir", "moved"),
            outcome(os.chmod, "dir", 0o700),
            sorted(os.listdir("dir")),
        ]
        assert shell(f"chattr -{flag} dir") == ""
        return said

    assert ("new" in alike(scenario)[-1]) == (flag == "a")


def test_who_may_guard(alike: Alike) -> None:
    def scenario() -> Any:
        Path("file").touch()
        os.chown("file", USER, USER)
        said = in_process(lambda: shell("chattr +i file"), USER)
        return said, shell("lsattr file").split()[0][4]

    alike(scenario)


def shell_ioctl(path: str, request: int, argument: bytes) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        return fcntl.ioctl(fd, request, argument)
    finally:
        os.close(fd)


FSGETXATTR, FSSETXATTR, FSXATTR = 0x801C581F, 0x401C5820, struct.Struct("=5I8x")


def project_of(path: str) -> tuple[int, int]:
    flags, _, _, project, _ = FSXATTR.unpack(shell_ioctl(path, FSGETXATTR, bytes(28)))
    return flags, project


def test_projects_are_inherited(here: Path) -> None:
    """Not beside ext4, which needs to have been made for it."""
    os.makedirs("dir/before")
    shell_ioctl("dir", FSSETXATTR, FSXATTR.pack(0x200, 0, 0, 7, 0))
    assert project_of("dir") == (0x200, 7) and project_of("dir/before") == (0, 0)
    assert "P" in shell("lsattr -d dir").split()[0]
    os.mkdir("dir/below")
    Path("dir/below/file").touch()
    assert project_of("dir/below") == (0x200, 7) and project_of("dir/below/file") == (0, 7)
    Path("outside").touch()
    assert errno_of(os.link, "outside", "dir/link") == errno.EXDEV
    assert errno_of(os.rename, "outside", "dir/moved") == errno.EXDEV
    os.rename("dir/below/file", "dir/file")
    for names in ((b"dir/file", b"outside"), (b"outside", b"dir/file")):
        assert errno_of(renameat2, *names, RENAME_EXCHANGE) == errno.EXDEV
    os.rename("dir/file", "taken")
    assert project_of("taken") == (0, 7)


@pytest.mark.sweep
def test_no_tree_is_removed_with_an_immutable_file_in_it(
    remounted: Mounted, on_remounted: Path
) -> None:
    top = on_remounted / "top"
    (top / "below").mkdir(parents=True)
    (top / "below" / "file").touch()
    assert shell(f"chattr +i {top}/below/file") == ""
    remounted.remount()
    assert errno_of(os.setxattr, on_remounted, "user.aifs.remove", b"top") == errno.EPERM
    assert errno_of(os.unlink, top / "below" / "file") == errno.EPERM
    assert shell(f"chattr -i {top}/below/file") == ""
    aifs("rm", "-r", top)
    assert not top.exists()


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


@pytest.mark.sweep
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
