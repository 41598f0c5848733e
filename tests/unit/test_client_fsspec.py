"""aifs:// in any directory: what a transaction publishes, and what it refuses."""

import os
from pathlib import Path

import fsspec
import pytest

from aifs.client import latest, list_checkpoints, verify
from aifs.client.fsspec import AifsFileSystem


@pytest.fixture
def fs() -> AifsFileSystem:
    return fsspec.filesystem("aifs", skip_instance_cache=True)


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def test_urls_are_paths_of_the_host(tmp_path: Path):
    with fsspec.open(f"aifs://{tmp_path}/f", "w") as file:
        file.write("text")
    fs, path = fsspec.url_to_fs(f"aifs://{tmp_path}/f")
    assert isinstance(fs, AifsFileSystem)
    assert (path, fs.cat(path)) == (f"{tmp_path}/f", b"text")
    assert fs.unstrip_protocol(path) == f"aifs://{tmp_path}/f"


@pytest.mark.parametrize("url", ["aifs:///a/b", "aifs://a/b", "aifs:////a/b/"])
def test_what_follows_the_protocol_is_absolute(url: str):
    """datasets streams aifs:///a/b by the name of aifs://a/b, which was relative."""
    assert fsspec.url_to_fs(url)[1] == "/a/b"


def test_directories_on_the_way_are_made(fs: AifsFileSystem, tmp_path: Path):
    """As zarr and pandas expect it of a URL."""
    with fsspec.open(f"aifs://{tmp_path}/new/deep/f", "w") as file:
        file.write("text")
    fs.mv(f"{tmp_path}/new/deep/f", f"{tmp_path}/other/f")
    assert (tmp_path / "other/f").read_text() == "text"


def test_a_new_directory_appears_whole(fs: AifsFileSystem, tmp_path: Path):
    with fs.transaction:
        fs.makedirs(f"{tmp_path}/step-7/deep")
        fs.mkdir(f"{tmp_path}/empty")
        fs.pipe(f"{tmp_path}/step-7/a", b"first")
        with fs.open(f"{tmp_path}/step-7/deep/b", "w") as file:
            file.write("second")
        assert not fs.exists(f"{tmp_path}/step-7")
    assert names(tmp_path) == ["empty", "step-7"]
    assert (tmp_path / "step-7/deep/b").read_text() == "second"
    assert [one.step for one in list_checkpoints(tmp_path)] == [7]
    assert latest(tmp_path) == tmp_path / "step-7"
    assert verify(tmp_path / "step-7") == []


def test_directories_on_the_way_are_made_in_a_transaction(fs: AifsFileSystem, tmp_path: Path):
    with fs.transaction:
        fs.pipe(f"{tmp_path}/a/b/c", b"bytes")
        assert not (tmp_path / "a").exists()
    assert (tmp_path / "a/b/c").read_bytes() == b"bytes"


def test_a_file_of_an_old_directory_is_replaced_whole(fs: AifsFileSystem, tmp_path: Path):
    old = tmp_path / "f"
    old.write_bytes(b"old")
    old.chmod(0o640)
    (tmp_path / "link").symlink_to("f")
    with fs.transaction:
        fs.pipe(f"{tmp_path}/link", b"new")
        fs.pipe(f"{tmp_path}/g", b"more")
        assert old.read_bytes() == b"old"
        assert not (tmp_path / "g").exists()
    assert (old.read_bytes(), old.stat().st_mode & 0o777) == (b"new", 0o640)
    assert names(tmp_path) == ["f", "g", "link"]


def test_what_was_given_up_leaves_nothing(fs: AifsFileSystem, tmp_path: Path):
    (tmp_path / "f").write_bytes(b"old")

    def fail() -> None:
        with fs.transaction:
            fs.makedirs(f"{tmp_path}/step-7")
            fs.pipe(f"{tmp_path}/step-7/a", b"bytes")
            fs.pipe(f"{tmp_path}/f", b"new")
            raise KeyError("the program's own")

    with pytest.raises(KeyError):
        fail()
    assert names(tmp_path) == ["f"]
    assert (tmp_path / "f").read_bytes() == b"old"
    fs.pipe(f"{tmp_path}/f", b"later")  # no transaction is left open
    assert (tmp_path / "f").read_bytes() == b"later"


def test_a_file_that_is_still_open_is_not_committed(fs: AifsFileSystem, tmp_path: Path):
    def leave_open() -> None:
        with fs.transaction:
            fs.pipe(f"{tmp_path}/g", b"whole")
            fs.open(f"{tmp_path}/f", "wb").write(b"half")

    with pytest.raises(ValueError, match="still open"):
        leave_open()
    assert names(tmp_path) == []


def test_a_name_that_another_took_meanwhile_fails_the_whole(fs: AifsFileSystem, tmp_path: Path):
    def collide() -> None:
        with fs.transaction:
            fs.makedirs(f"{tmp_path}/step-7")
            fs.pipe(f"{tmp_path}/step-7/a", b"bytes")
            fs.pipe(f"{tmp_path}/f", b"bytes")
            (tmp_path / "step-7").mkdir()

    with pytest.raises(FileExistsError):
        collide()
    assert names(tmp_path) == ["step-7"]


@pytest.mark.parametrize(
    ("mode", "error"), [("ab", ValueError), ("r+b", ValueError), ("xb", FileExistsError)]
)
def test_a_transaction_changes_no_file_in_place(fs, tmp_path: Path, mode: str, error):
    (tmp_path / "f").write_bytes(b"old")
    with pytest.raises(error), fs.transaction:
        fs.open(f"{tmp_path}/f", mode)
    assert (tmp_path / "f").read_bytes() == b"old"
    assert names(tmp_path) == ["f"]


def test_a_directory_that_nobody_makes_is_missing(tmp_path: Path):
    fs = AifsFileSystem(auto_mkdir=False, skip_instance_cache=True)
    with pytest.raises(FileNotFoundError), fs.transaction:
        fs.open(f"{tmp_path}/none/f", "wb")
    assert names(tmp_path) == []
