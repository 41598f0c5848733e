"""SIGKILL of an export, at many of its operations on files, against a store that speaks S3.

A manifest in the bucket has all that it lists, at any time, and a second export ends what the first
one began.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from aifs import client
from aifs.core.manifest import NAME
from aifs.transfer.bucket import Tree
from aifs.transfer.exporting import export
from tests.support.object_stores import KEYS, make_bucket, moto

pytest.importorskip("obstore")

_KILLED = """
import os, signal, sys
from aifs.core import files
from aifs.transfer.bucket import Tree
from aifs.transfer.exporting import export

class Killer:
    left = int(sys.argv[3])

    def before(self, op, path):
        self.left -= op in ("open_file", "read_at")
        if self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def after(self, op, path, *args):
        pass

files.set_hook(Killer())
export(sys.argv[1], Tree(sys.argv[2]), parallel=4)
"""


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with moto() as endpoint:
        for name, value in KEYS.items():
            monkeypatch.setenv(name, value)
        make_bucket(endpoint, "bucket")
        yield f"s3://bucket/run?endpoint={endpoint}"


def content(bucket: Tree) -> dict[str, bytes]:
    found = {one.key: bucket.get(one.key) for page in bucket.pages("") for one in page}
    return {key: answer[0] for key, answer in found.items() if answer is not None}


def test_an_export_that_is_killed_goes_on(tmp_path: Path, url: str) -> None:
    run, bucket = tmp_path / "run", Tree(url)
    for step in range(3):
        with client.checkpoint(run / f"step-{step}") as tmp:
            for number in range(3):
                (tmp / f"{number}.pt").write_bytes(os.urandom(1000))
    (run / "large").write_bytes(os.urandom(17 << 20))
    killed = 0
    for at in range(0, 40, 5):
        command = [sys.executable, "-c", _KILLED, str(run), url, str(at)]
        done = subprocess.run(command, capture_output=True, check=False)
        assert done.returncode in (0, -9), done.stderr.decode()
        killed += done.returncode == -9
        found = content(bucket)
        for step in range(3):
            if manifest := found.get(f"step-{step}/{NAME}"):
                for name in json.loads(manifest)["files"]:
                    path = f"step-{step}/{name}"
                    assert found[path] == (run / path).read_bytes()
        if done.returncode == 0:
            break
    assert killed >= 3
    assert not export(str(run), bucket).failed
    expected = {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*.*")}
    expected["large"] = (run / "large").read_bytes()
    assert content(bucket) == {
        path: data for path, data in expected.items() if not path.endswith("latest")
    }
