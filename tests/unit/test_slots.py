"""A small file that is written in place: a torn write leaves what was there before."""

import os
from pathlib import Path

import pytest

from aifs.data.directory_storage import read_slots, write_slots
from aifs.data.storage import ANYTHING


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


def write(path: Path, content: bytes) -> None:
    write_slots(str(path), content, True, ANYTHING)


def test_the_content_is_what_was_written_last(path: Path) -> None:
    assert read_slots(str(path)) is None
    for content in (b"first", b"", b"the third\nhas two lines", b"x" * 65501, b"short again"):
        write(path, content)
        assert read_slots(str(path)) == content


def test_both_slots_have_their_space_from_the_beginning(path: Path) -> None:
    """On a full disk no other could be had."""
    write(path, b"content")
    file = path.read_bytes()
    assert file[: 1 << 16].rstrip(b"\0") == file[1 << 16 :].rstrip(b"\0")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_file_that_root_makes_is_its_directorys_owners(path: Path) -> None:
    """Who may have root check the store, and mounts it then."""
    os.chown(path.parent, 12345, 12346)
    write(path, b"content")
    status = path.stat()
    assert (status.st_uid, status.st_gid) == (12345, 12346)


def test_a_torn_write_leaves_the_content_before(path: Path) -> None:
    for number in range(2):
        write(path, b"content %d" % number)
    before = path.read_bytes()
    write(path, b"content 2")
    after = path.read_bytes()
    assert len(before) == len(after)
    changed = [at for at in range(len(after)) if before[at] != after[at]]
    for end in range(changed[0], changed[-1]):
        path.write_bytes(after[:end] + before[end:])
        assert read_slots(str(path)) == b"content 1"
        path.write_bytes(after[:end] + bytes(100) + before[end + 100 :])
        assert read_slots(str(path)) == b"content 1"
