"""``aifs import`` on a real mount: objects of a bucket are files, which follow it on demand."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from aifs.cli.main import main
from aifs.core import ioctl
from aifs.data.bucket import Bucket
from tests.support.object_stores import make_bucket, moto
from tests.support.users import errno_of, in_process

pytest.importorskip("obstore")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with moto() as endpoint:
        make_bucket(endpoint, "bucket")
        yield endpoint


@pytest.fixture
def url(endpoint: str, tmp_path: Path) -> str:
    """The daemon has another environment, so the URL says all."""
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text("aws_access_key_id = a\naws_secret_access_key = b\n")
    parameters = f"endpoint={endpoint}&region=us-east-1&secret={secret}"
    return f"s3://bucket/{tmp_path.name}?{parameters}"


def put(url: str, contents: dict[str, bytes]) -> None:
    bucket = Bucket(url)
    for key, data in contents.items():
        bucket.put(key, data)


def content_of(top: Path) -> dict[str, bytes]:
    paths = [path for path in top.rglob("*") if path.is_file()]
    paths = [path for path in paths if ".aifs-import-" not in str(path)]  # of one that was killed
    return {str(path.relative_to(top)): path.read_bytes() for path in paths}


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict:
    capsys.readouterr()
    code = main(["import", *map(str, arguments), "--json"])
    captured = capsys.readouterr()
    assert code in (0, 1), captured.err
    return json.loads(captured.out)


CONTENTS = {
    "a": b"1" * 3000,
    "b c/é": b"2",
    "b c/empty": b"",
    "b c/d/large": os.urandom(3 << 20),
    **{f"many/{number}": b"%d" % number for number in range(200)},
}


def test_a_bucket_is_a_tree(on_mount: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    put(url, CONTENTS)
    top = on_mount / "top"
    first = told(capsys, url, top)
    assert (first["objects"], first["made"]) == (len(CONTENTS), len(CONTENTS))
    assert content_of(top) == CONTENTS
    again = told(capsys, url, top)
    assert (again["made"], again["same"]) == (0, len(CONTENTS))
    (top / "a").write_bytes(b"ours")
    os.rename(top / "b c", top / "moved")
    assert (top / "moved/d/large").read_bytes() == CONTENTS["b c/d/large"]
    more = told(capsys, url, top)
    assert (more["made"], more["same"], more["kept"]) == (3, 200, 1)
    assert (top / "a").read_bytes() == b"ours"


def test_what_has_changed_is_taken_over_on_demand(
    on_mount: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    put(url, {"x/a": b"1", "x/b": b"2", "c": b"3"})
    told(capsys, url, on_mount)
    put(url, {"x/a": b"new", "c": b"other", "d": b"4"})
    seen = told(capsys, url, on_mount)
    assert (seen["changed"], seen["same"], seen["made"]) == (2, 1, 1)
    with open(on_mount / "x/b", "rb") as held:
        seen = told(capsys, url, on_mount, "--refresh")
        assert (seen["refreshed"], seen["same"]) == (2, 2)
        assert held.read() == b"2"
    expected = {"x/a": b"new", "x/b": b"2", "c": b"other", "d": b"4"}
    assert content_of(on_mount) == expected
    assert told(capsys, url, on_mount, "--refresh")["same"] == 4


def test_keys_that_are_no_paths_are_named(
    on_mount: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    put(url, {"a": b"1", "a/b": b"2", "n" * 256: b"3", ".aifs-data/x": b"4", "good": b"5"})
    seen = told(capsys, url, on_mount)
    assert seen["made"] == 2 and len(seen["failed"]) == 3
    assert content_of(on_mount) == {"a": b"1", "good": b"5"}


_KILLED = """
import os, signal, sys
from aifs.core import files
from aifs.transfer.importing import import_objects

class Killer:
    left = int(sys.argv[3])

    def before(self, op, path):
        self.left -= 1
        if self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def after(self, op, path, *args):
        pass

files.set_hook(Killer())
import_objects(sys.argv[1], sys.argv[2], refresh=True)
"""


def test_an_import_that_is_killed_goes_on(
    on_mount: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {f"{number % 3}/{number}": b"old" for number in range(9)}
    after = before | {f"{number}/{number}": b"new" for number in range(3)}
    put(url, before)
    told(capsys, url, on_mount)
    put(url, after)
    killed = 0
    for at in range(1, 14, 2):
        command = [sys.executable, "-c", _KILLED, url, str(on_mount), str(at)]
        done = subprocess.run(command, capture_output=True, check=False)
        assert done.returncode in (0, -9), done.stderr.decode()
        killed += done.returncode == -9
    assert killed >= 3
    told(capsys, url, on_mount, "--refresh")
    assert content_of(on_mount) == after


def test_wrong_input_is_one_line(
    on_mount: Path, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (
        (url, str(tmp_path)),
        (url, str(on_mount / "none/below")),
        ("s3://none?" + url.partition("?")[2], str(on_mount)),
        ("zz://bucket", str(on_mount)),
    ):
        assert main(["import", *arguments]) not in (0, None)
        text = capsys.readouterr().err
        assert text.startswith("aifs: ") and text.count("\n") == 1


def test_it_is_for_root(on_mount: Path, url: str) -> None:
    bucket = Bucket(url)
    bucket.put("a", b"1")
    os.chown(on_mount, 1000, 1000)
    (found,) = next(bucket.pages(""))

    def make() -> None:
        fields = {"names": found.key, "etags": found.etag, "sizes": [1], "mtimes": [1]}
        fd = os.open(on_mount, os.O_RDONLY)
        ioctl.call(fd, "import", str(on_mount), bucket=url, **fields)

    assert errno_of(in_process, make, uid=1000) == errno.EPERM
    assert not os.listdir(on_mount)
