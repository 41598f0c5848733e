"""aifs meta on a real store: backups of a mount, by itself and on demand; the metadata directory is
lost and comes back.
"""

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from tests.support.mounts import Mounted, aifs


@pytest.mark.sweep
def test_a_lost_metadata_directory_comes_back(mounted: Mounted, tmp_path: Path) -> None:
    content = os.urandom(3 << 20)
    (mounted.path / "file").write_bytes(content)
    (mounted.path / "directory").mkdir()
    aifs("drain", mounted.path)
    aifs("meta", "backup", mounted.path)
    status = json.loads(os.getxattr(mounted.path, "user.aifs.status"))["backup"]
    assert status["sequence"] and not status["last_error"]
    (mounted.path / "later").write_bytes(b"later")
    aifs("meta", "backup", mounted.source, "--to", tmp_path / "copy")
    assert list((tmp_path / "copy").iterdir())
    mounted.kill()
    meta = mounted.source / "meta"
    refused = aifs("meta", "restore", mounted.source, check=False)
    assert refused.returncode == 4 and "is not empty" in refused.stderr
    shutil.move(meta, tmp_path / "meta")
    assert len(json.loads(aifs("meta", "ls", mounted.source, "--json").stdout)) == 1
    aifs("meta", "ls", mounted.source, "--from", tmp_path / "copy")
    assert "restored" in aifs("meta", "restore", mounted.source).stdout
    mounted.mount()
    assert sorted(os.listdir(mounted.path)) == ["directory", "file"]
    assert (mounted.path / "file").read_bytes() == content
    mounted.kill()
    shutil.rmtree(meta)
    aifs("meta", "restore", mounted.source, "--from", tmp_path / "copy")
    mounted.mount()
    assert (mounted.path / "file").read_bytes() == content and (
        mounted.path / "later"
    ).read_bytes() == b"later"
    mounted.unmount()
    states = json.loads(aifs("meta", "ls", mounted.source, "--json").stdout)
    assert [state["generation"] for state in states] == [1, 2], "closing makes a backup, too"
    # What the first restored mount did not know of (the file "later", copies made ahead) has been
    # kept, and is moved aside.
    assert aifs("fsck", "--repair", mounted.source, check=False).returncode == 1


def test_nothing_is_restored_under_a_daemon_that_goes_on(mounted: Mounted, tmp_path: Path) -> None:
    """It does not notice that its metadata directory is gone; a second one would write to the same
    servers."""
    (mounted.path / "file").write_bytes(b"here")
    aifs("meta", "backup", mounted.path)
    meta = mounted.source / "meta"
    # If a commit falls into this moment.
    mounted.expected.append("takes no changes .*the journal keeps them")
    shutil.move(meta, tmp_path / "meta")
    refused = aifs("meta", "restore", mounted.source, check=False)
    assert refused.returncode and "is mounted here" in refused.stderr and not meta.exists()
    shutil.move(tmp_path / "meta", meta)
    mounted.unmount()


@pytest.mark.sweep
def test_a_mount_of_a_broken_database_says_what_to_do(mounted: Mounted) -> None:
    (mounted.path / "file").write_bytes(b"here")
    mounted.unmount()
    data = (mounted.source / "meta" / "data.mdb").read_bytes()
    pages = {found.start() // 4096 for found in re.finditer(b"cinodes", data)}
    with (mounted.source / "meta" / "data.mdb").open("r+b") as file:
        for page in pages:
            file.seek(page * 4096)
            file.write(bytes(4096))
    refused = aifs("mount", mounted.source, mounted.path, check=False)
    assert refused.returncode == 4 and "Traceback" not in refused.stderr
    command = refused.stderr.partition("last backup: ")[2].strip()
    move, _, restore = command.partition(" && aifs ")
    shutil.move(*move.split()[1:])
    aifs(*restore.split())
    mounted.mount()
    assert (mounted.path / "file").read_bytes() == b"here"
