"""Two daemons, one with a copy of the other's metadata directory: the data servers have one
owner.
"""

import os
import shutil
from pathlib import Path

import pytest

from tests.support.mounts import Mounted, aifs

pytestmark = pytest.mark.sweep


def test_a_copy_of_the_metadata_is_not_mounted_beside_its_owner(
    mounted: Mounted, tmp_path: Path
) -> None:
    """By force it is; then the first mount ends, and its metadata are of no use any more."""
    content = os.urandom(3 << 20)
    (mounted.path / "file").write_bytes(content)
    aifs("drain", mounted.path)
    copy, other = tmp_path / "meta", tmp_path / "mnt"
    other.mkdir()
    shutil.copytree(mounted.source / "meta", copy)
    elsewhere = ("-o", f"meta.directory={copy}", mounted.source, other)
    refused = aifs("mount", *elsewhere, check=False)
    assert refused.returncode == 5
    said = refused.stderr
    assert f"pid {mounted.pid} on host {os.uname().nodename}, mounted at {mounted.path}" in said
    assert "renewed last at" in said and "--force" in said and len(said.splitlines()) == 1
    assert (mounted.path / "file").read_bytes() == content

    mounted.expected += ["taken over", "the daemon stops", "is missing", "failing"]
    with open(mounted.path / "file", "rb"):  # somebody who uses it does not keep it
        aifs("mount", "--force", *elsewhere)
        mounted.wait_for_end()  # it noticed before the other one began
    assert not mounted.is_mounted()
    try:
        assert (other / "file").read_bytes() == content
        (other / "new").write_bytes(content)
    finally:
        aifs("umount", other)
    refused = aifs("mount", mounted.source, mounted.path, check=False)
    assert refused.returncode == 4 and "are older than those in" in refused.stderr
    shutil.rmtree(mounted.source / "meta")
    shutil.copytree(copy, mounted.source / "meta")  # moved, in order
    mounted.mount()
    assert sorted(os.listdir(mounted.path)) == ["file", "new"]
