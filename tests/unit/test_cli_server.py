"""``aifs server`` on stores that are not mounted, and what it prints."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from aifs.cli.main import main
from aifs.cli.server import describe_left
from aifs.core import config as configuration
from aifs.files.types import ROOT
from aifs.meta.keys import ROOT_INO
from aifs.vfs.lifecycle import open_filesystem
from aifs.vfs.recovery import Recovered

DATA = os.urandom(100_000)


@pytest.fixture
def source() -> Iterator[Path]:
    """Of a store with two protected files, and one on server 0 alone."""
    with tempfile.TemporaryDirectory(prefix="aifs-cli-", dir="/dev/shm") as parent:
        source = Path(parent, "store")
        source.mkdir()
        (source / "aifs.yaml").write_text(
            "layout: {unit: 4KiB, count: 1}\nburst: {directories: [burst]}\n"
            "meta: {backup_interval: 1s}\n"  # for what has moved away is deleted when one is made
        )
        assert main(["format", str(source)]) == 0
        trio.run(fill, source)
        yield source


async def fill(source: Path) -> None:
    async with open_filesystem(configuration.load(str(source), {})) as fs:
        for name, layout in (
            (b"a", b"replicas=2"),
            (b"b", b"replicas=2"),
            (b"plain", b"servers=0"),
        ):
            opened, inode = await fs.create(ROOT_INO, name, 0o644, os.O_RDWR, ROOT)
            await fs.setxattr(inode.ino, b"user.aifs.layout", layout)
            await fs.write(opened.handle, 0, DATA)
            await fs.release(opened.handle)
        await fs.wait_drained(ROOT_INO)


async def read(source: Path) -> list[bytes]:
    found = []
    async with open_filesystem(configuration.load(str(source), {})) as fs:
        for name in (b"a", b"b", b"plain"):
            opened = await fs.open((await fs.lookup(ROOT_INO, name)).ino, os.O_RDONLY)
            found.append(bytes(await fs.read(opened.handle, 0, 1 << 20)))
            await fs.release(opened.handle)
    return found


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main([str(argument) for argument in arguments])
    return code, *capsys.readouterr()


def refused(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 4) -> str:
    """The one line of the refusal."""
    found, out, error = run(capsys, *arguments)
    assert (found, out, error.count("\n")) == (code, "", 1)
    return error.removeprefix("aifs: ").rstrip()


def test_the_life_of_a_server(capsys: pytest.CaptureFixture[str], source: Path) -> None:
    new = source.parent / "new"
    code, out, _ = run(capsys, "server", "add", "--domain", "rack-b", source, new)
    assert (code, out) == (0, f"added {new} to the store, as data server 4\n")
    code, out, _ = run(capsys, "server", "ls", source)
    assert (
        code == 0
        and out.split("\n")[0].split()
        == "server standing state domain class used free left path last error".split()
    )
    assert [line.split()[:4] for line in out.splitlines()[5:7]] == [
        ["4", "active", "ok", "rack-b"],
        ["burst", "0", "active", "ok"],
    ]
    advice = "drain it first"
    assert refused(capsys, "server", "rm", source, 1) == f"data server 1 is in use: {advice}"
    code, out, _ = run(capsys, "server", "drain", source, 1)
    assert (code, out) == (
        0,
        f"data server 1 is empty; take it out with: aifs server rm {source} 1\n",
    )
    state = json.loads(run(capsys, "server", "ls", "--json", source)[1])
    assert (state["servers"][1]["standing"], state["servers"][1]["left"]) == (
        "draining",
        {"objects": 0, "bytes": 0},
    )
    assert run(capsys, "server", "drain", "--undo", source, 1)[1] == "data server 1 is used again\n"
    assert run(capsys, "server", "drain", source, 1)[0] == 0
    assert run(capsys, "server", "rm", source, 1)[:2] == (
        0,
        "data server 1 is removed from the store\n",
    )
    assert (
        refused(capsys, "server", "drain", source, 1) == "there is no data server 1 in this store"
    )
    newer = source.parent / "newer"
    code, out, _ = run(capsys, "server", "replace", source, 0, newer)
    assert (code, out) == (
        0,
        f"data server 5 has taken over; take the old one out with: aifs server rm {source} 0\n",
    )
    assert run(capsys, "server", "rm", source, 0)[0] == 0
    code, out, error = run(capsys, "config", "show", source, "--json")
    servers = json.loads(out)["servers"]
    assert servers["origin"] == "the store" and f"{source}/data/3" in servers["value"]
    assert f"{source}/data/0" not in servers["value"] and str(newer) in servers["value"]
    assert run(capsys, "meta", "ls", source)[::2] == (0, "")  # it asks those that there are
    assert trio.run(read, source) == [DATA] * 3
    assert run(capsys, "fsck", "--deep", source)[0] == 0


def test_a_server_that_is_gone(capsys: pytest.CaptureFixture[str], source: Path) -> None:
    shutil.rmtree(source / "data" / "0")
    shutil.rmtree(source / "burst")  # with the copies
    state = json.loads(run(capsys, "server", "ls", "--json", source)[1])
    assert [server["state"] for server in state["servers"]] == [
        "gone",
        "ok",
        "ok",
        "ok",
        "gone",
    ]
    remove = ("server", "rm", "--lost", source, 0)
    confirmation = "--force-lose-files 'lose the files of data server 0'"
    advice = f"put it back, or give them up with: {confirmation}"
    assert (
        refused_after_warnings(capsys, *remove)
        == f"1 file would be lost with data server 0; {advice}"
    )
    said = refused(capsys, *remove, "--force-lose-files", "yes", code=2)
    assert said == f"to confirm, give {confirmation}"
    said = refused_after_warnings(
        capsys, *remove, "--force-lose-files", "lose the files of data server 0"
    )
    assert (
        said
        == "1 file cannot be read without data server 0, which is lost: delete what is lost first; "
        "aifs fsck names it"
    )
    state = json.loads(run(capsys, "server", "ls", "--json", source)[1])
    assert state["servers"][0]["standing"] == "lost"


def refused_after_warnings(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The last line of a refusal; what is missing is said before it."""
    code, out, error = run(capsys, *arguments)
    assert (code, out) == (4, "")
    return error.splitlines()[-1].removeprefix("aifs: ")


@pytest.mark.parametrize(
    ("server", "text"),
    [
        ({"standing": "active", "left": None, "successor": None}, ""),
        ({"standing": "draining", "left": None, "successor": None}, "being counted"),
        (
            {"standing": "draining", "left": {"objects": 0, "bytes": 0}, "successor": None},
            "nothing",
        ),
        (
            {"standing": "lost", "left": {"objects": 2, "bytes": 3 << 20}, "successor": 7},
            "2 objects (3.00 MiB), to 7",
        ),
    ],
)
def test_what_is_left_in_words(server: dict, text: str) -> None:
    assert describe_left(server) == text


def test_nonsense_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert refused(capsys, "server", "ls", tmp_path / "none").startswith(
        f"{tmp_path}/none: there is no store"
    )
    assert "Invalid value for 'ID'" in refused(capsys, "server", "drain", tmp_path, "x", code=2)
    assert "Missing argument" in refused(capsys, "server", "replace", tmp_path, 1, code=2)


def test_a_removed_server_is_named_by_the_source_no_more(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    source = tmp_path / "store.yaml"
    paths = [str(tmp_path / f"data{number}") for number in range(3)]
    text = "meta: {directory: %s}\nlog: {file: %s}\nburst: {directories: []}\nservers: [%s]\n"
    source.write_text(text % (tmp_path / "meta", tmp_path / "log", ", ".join(paths)))
    assert run(capsys, "format", source)[0] == 0
    assert run(capsys, "server", "drain", source, 1)[0] == 0
    code, out, error = run(capsys, "server", "rm", source, 1)
    assert (code, out) == (0, "data server 1 is removed from the store\n")
    assert error == f"aifs: {source} names it no more\n"
    left = text % (tmp_path / "meta", tmp_path / "log", f"{paths[0]}, {paths[2]}")
    assert source.read_text() == left
    assert run(capsys, "fsck", source)[0] == 0


def test_a_new_store_says_that_no_scrub_has_been(
    capsys: pytest.CaptureFixture[str], source: Path
) -> None:
    code, out, _ = run(capsys, "scrub", "show", source)
    assert (
        code == 0 and out.split("\n")[0].split() == ["state", "none", "yet"] and "begun" not in out
    )


def test_what_a_kill_leaves_is_no_lost_file() -> None:
    """Burst copies are made ahead for new files."""
    assert str(Recovered(unknown_objects=63)) == "63 unused objects deleted"
