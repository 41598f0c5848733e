"""Clones on a real mount: what tools and torch see of them, who may, what is refused."""

import errno
import json
import os
import subprocess
from pathlib import Path

import pytest

from aifs.cli.clone import clone
from aifs.cli.main import main
from tests.support.mounts import Mounted, aifs
from tests.support.users import errno_of, in_process

MIB = 1 << 20


def make_tree(top: Path) -> None:
    (top / "below" / "deep").mkdir(parents=True)
    (top / "small").write_bytes(b"x" * 100)
    (top / "large").write_bytes(os.urandom(3 * MIB + 17))
    (top / "below" / "medium").write_bytes(os.urandom(100_000))
    (top / "below" / "link").symlink_to("../large")
    os.link(top / "large", top / "below" / "deep" / "second")
    os.mkfifo(top / "fifo")
    os.chmod(top / "small", 0o4711)
    os.utime(top / "small", ns=(10**18, 10**18))
    os.setxattr(top / "large", "user.x", b"y")


def same(one: Path, other: Path) -> None:
    """As tools see it."""
    done = subprocess.run(
        ["diff", "-r", "--no-dereference", "-x", "fifo", one, other],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    for path in one.rglob("*"):
        first, second = path.lstat(), (other / path.relative_to(one)).lstat()
        for name in ("st_mode", "st_nlink", "st_uid", "st_gid", "st_size", "st_mtime_ns"):
            assert getattr(first, name) == getattr(second, name), (path, name)


@pytest.mark.parametrize("drained", [True, False])
def test_a_tree_that_tools_see_twice_and_that_is_two(on_mount: Path, drained: bool) -> None:
    top, new = on_mount / "top", on_mount / "new"
    make_tree(top)
    if drained:
        aifs("drain", top)
    assert not new.exists()  # the kernel knows that
    aifs("clone", top, new)
    same(top, new)
    assert os.getxattr(new / "large", "user.x") == b"y"
    before = (top / "large").read_bytes()
    with open(new / "large", "r+b") as file:
        file.write(b"new")
    (new / "below" / "medium").unlink()
    with open(top / "small", "ab") as file:
        file.write(b"more")
    assert (top / "large").read_bytes() == before
    assert (new / "below" / "deep" / "second").read_bytes() == b"new" + before[3:]
    assert len((top / "below" / "medium").read_bytes()) == 100_000
    assert (new / "small").read_bytes() == b"x" * 100
    aifs("rm", "-r", top)
    assert (new / "large").read_bytes() == b"new" + before[3:]


def test_a_single_file(on_mount: Path) -> None:
    source = on_mount / "file"
    source.write_bytes(data := os.urandom(2 * MIB))
    aifs("clone", source, on_mount / "clone")
    assert (on_mount / "clone").read_bytes() == data
    os.symlink("file", on_mount / "link")
    aifs("clone", on_mount / "link", on_mount / "link2")
    assert os.readlink(on_mount / "link2") == "file"
    aifs("clone", on_mount, on_mount / "all")
    assert (on_mount / "all" / "clone").read_bytes() == data


def test_an_edited_checkpoint_loads_and_the_original_stays(on_mount: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (the demo extra)")
    step, edited = on_mount / "step-100", on_mount / "step-100-edited"
    step.mkdir()
    state = {f"layer{number}": torch.rand(100_000) for number in range(4)}
    torch.save(state, step / "model.pt")
    torch.save({"step": 100}, step / "extra.pt")
    aifs("clone", step, edited)
    with open(step / "model.pt", "rb") as original:  # mapped by a loader meanwhile
        loaded = torch.load(edited / "model.pt", mmap=True)
        assert all(torch.equal(state[name], loaded[name]) for name in state)
        torch.save({"layer0": state["layer0"] + 1}, edited / "model.pt")
        original.read(1)
    again = torch.load(step / "model.pt")
    assert all(torch.equal(state[name], again[name]) for name in state)
    assert torch.equal(torch.load(edited / "model.pt")["layer0"], state["layer0"] + 1)


def test_what_is_open_goes_on(on_mount: Path) -> None:
    """Readers and writers of the original, passed through, are not disturbed by a clone."""
    top = on_mount / "top"
    top.mkdir()
    (top / "read").write_bytes(data := os.urandom(MIB))
    with open(top / "read", "rb") as reader, open(top / "log", "wb", buffering=0) as log:
        reader.read(10)
        log.write(b"one")
        aifs("clone", top, on_mount / "new")
        log.write(b"two")
        assert reader.read() == data[10:]
    assert (on_mount / "new" / "log").read_bytes() == b"one"
    assert (top / "log").read_bytes() == b"onetwo"
    assert (on_mount / "new" / "read").read_bytes() == data


def test_cp_copies_unless_it_is_told_to_share(on_mount: Path) -> None:
    """The kernel has no FICLONE for FUSE."""
    source, target = on_mount / "file", on_mount / "copy"
    source.write_bytes(data := os.urandom(MIB))
    always = ["cp", "--reflink=always", source, target]
    done = subprocess.run(always, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Operation not supported" in done.stderr
    target.unlink(missing_ok=True)
    subprocess.run(["cp", "--reflink=auto", source, target], check=True)
    assert target.read_bytes() == data


def test_snapshots_by_command(on_mount: Path, scratch: Path) -> None:
    top, kept = on_mount / "top", on_mount / "top" / ".snapshots" / "before"
    make_tree(top)
    before = (top / "large").read_bytes()
    refused = aifs("snapshot", "make", scratch, "before", check=False)
    assert refused.returncode == 6 and not (scratch / ".snapshots").exists()
    assert "is not the name" in aifs("snapshot", "make", top, "a/b", check=False).stderr
    aifs("snapshot", "make", top, "before")
    (top / "large").write_bytes(b"risky")
    aifs("snapshot", "make", top, "after")
    assert (kept / "large").read_bytes() == before
    told = json.loads(aifs("snapshot", "ls", top, "--json").stdout)
    assert [each["name"] for each in told] == ["before", "after"]
    assert "before" in aifs("snapshot", "ls", top).stdout
    told = json.loads(aifs("info", "--tree", kept, "--json").stdout)
    assert "files" not in json.loads(aifs("info", kept, "--json").stdout), "it was not asked"
    assert told["files"] == 3 and told["unique_bytes"] + told["shared_bytes"] == told["bytes"]
    assert told["unique_bytes"] > 3 * MIB and told["shared_bytes"] >= 100_000
    assert f"shared_bytes     {told['shared_bytes']}\n" in aifs("info", "--tree", kept).stdout
    read_only = errno.EROFS
    assert errno_of((kept / "large").write_bytes, b"x") == read_only
    assert errno_of((kept / "small").unlink) == read_only
    assert errno_of((kept / "new").touch) == read_only
    assert errno_of(os.chmod, kept / "small", 0o600) == read_only
    assert errno_of(kept.rename, on_mount / "elsewhere") == read_only
    impostor = top / ".snapshots" / "impostor"
    impostor.mkdir()  # which anybody can who may write there
    told = json.loads(aifs("snapshot", "ls", top, "--json").stdout)
    assert [each["name"] for each in told] == ["before", "after"]
    assert "is no snapshot" in aifs("snapshot", "rm", top, "impostor", check=False).stderr
    impostor.rmdir()
    aifs("snapshot", "rm", top, "before", "after")
    assert os.listdir(top / ".snapshots") == []
    assert (top / "large").read_bytes() == b"risky"


def test_wrong_use_is_one_line(
    on_mount: Path, scratch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (on_mount / "file").write_bytes(b"x")
    (on_mount / "there").mkdir()
    cases = [
        ((on_mount / "missing", on_mount / "new"), "No such file"),
        ((on_mount / "file", on_mount / "there"), "File exists"),
        ((on_mount / "file", on_mount / "no" / "new"), "No such file"),
        ((on_mount / "file", scratch / "new"), "does not lie in the mount of"),
        ((scratch, on_mount / "new"), "does not lie in an AIFS mount"),
    ]
    for arguments, said in cases:
        assert main(["clone", *map(str, arguments)]) != 0
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1, error
    with open(on_mount / "file", "ab") as file:
        file.write(b"y" * 100_000)
        assert main(["clone", str(on_mount / "file"), str(on_mount / "new")]) == 1
        assert "cp copies" in capsys.readouterr().err


def test_other_users(shared: Mounted) -> None:
    top, theirs = shared.path / "top", shared.path / "theirs"
    top.mkdir()
    theirs.mkdir()
    os.chown(theirs, 1000, 1000)
    (top / "file").write_bytes(b"x" * 5000)
    assert in_process(lambda: errno_of(clone, str(top), str(theirs / "new")), 1000) == 0
    assert (theirs / "new" / "file").stat().st_uid == 1000
    denied = errno.EACCES
    assert in_process(lambda: errno_of(clone, str(top), str(shared.path / "new")), 1000) == denied
    (top / "secret").write_bytes(b"x")
    os.chmod(top / "secret", 0o600)
    assert in_process(lambda: errno_of(clone, str(top), str(theirs / "two")), 1000) == denied
    assert not (theirs / "two").exists()
