"""``aifs export``: which objects a tree becomes, in which order, and what is not sent again."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aifs import client
from aifs.cli import main
from aifs.core.manifest import NAME
from aifs.transfer import exporting
from aifs.transfer.bucket import Tree
from aifs.transfer.exporting import Sent, export

pytest.importorskip("obstore")


class Bucket(Tree):
    """Notes what is put and deleted."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.done: list[str] = []

    def put_file(self, path: str, data: bytes, mtime: str) -> None:
        super().put_file(path, data, mtime)
        self.done.append(path)

    def put_parts(self, path: str, *args: Any) -> None:
        super().put_parts(path, *args)
        self.done.append(path)

    def put(self, key: str, *args: Any, **named: Any) -> str | None:
        self.done.append(key)
        return super().put(key, *args, **named)

    def delete(self, keys: Any) -> None:
        super().delete(keys)
        self.done += [f"-{key}" for key in keys]

    def content(self) -> dict[str, bytes]:
        return {one.key: self.get(one.key)[0] for page in self.pages("") for one in page}  # type: ignore[index]


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket(f"memory://{tmp_path.name}")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    top = tmp_path / "tree"
    (top / "a" / "b").mkdir(parents=True)
    for number, name in enumerate(("x", "a/y", "a/b/z #1%20.bin", "a/é", "a/.hidden")):
        (top / name).write_bytes(bytes(range(50)) * number)
    return top


def content_of(top: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(top)): path.read_bytes() for path in top.rglob("*") if path.is_file()
    }


def save(run: Path, step: int, content: bytes = b"weights", **options: Any) -> Path:
    with client.checkpoint(run / f"step-{step}", **options) as tmp:
        (tmp / "sub").mkdir()
        for name in ("a.pt", "sub/b.pt"):
            (tmp / name).write_bytes(content)
    return run / f"step-{step}"


def failed(sent: Sent) -> str:
    return "; ".join(sorted(sent.failed))


def test_each_file_is_an_object_of_its_name(tree: Path, bucket: Bucket) -> None:
    sent = export(str(tree), bucket)
    assert not sent.failed and bucket.content() == content_of(tree)
    assert (sent.files, sent.sent, sent.bytes) == (5, 5, sent.sent_bytes)


def test_a_large_file_goes_by_parts(
    tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "PART", 1000)
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "large").write_bytes(os.urandom(10_500))
    (tmp_path / "tree" / "whole").write_bytes(os.urandom(1000))
    shown: list[tuple[int, int]] = []
    sent = export(str(tmp_path / "tree"), bucket, show=lambda *both: shown.append(both))
    assert not sent.failed and bucket.content() == content_of(tmp_path / "tree")
    assert max(shown) == (11_500, 11_500) and len(shown) == 12


def test_what_is_there_is_not_sent_again(tree: Path, bucket: Bucket) -> None:
    export(str(tree), bucket)
    bucket.done.clear()
    again = export(str(tree), bucket)
    assert not bucket.done and again.present_bytes == again.bytes
    os.utime(tree / "x", ns=(1, 1))
    (tree / "a/y").write_bytes(b"longer than before" * 100)
    (tree / "new").write_bytes(b"")
    export(str(tree), bucket)
    assert sorted(bucket.done) == ["a/y", "new", "x"]
    assert bucket.content() == content_of(tree)


def test_what_is_no_file_is_left_out(tree: Path, bucket: Bucket) -> None:
    os.symlink("x", tree / "link")
    os.mkfifo(tree / "fifo")
    for name in (".snapshots/one", ".step-3.pending"):
        (tree / name).mkdir(parents=True)
        (tree / name / "file").write_bytes(b"1")
    sent = export(str(tree), bucket)
    assert sent.left_out == 4 and sent.files == 5 and not sent.failed


def test_names_that_are_no_keys_are_named(tree: Path, bucket: Bucket) -> None:
    (tree / "tab\t").write_bytes(b"1")
    (tree / os.fsdecode(b"\xff")).write_bytes(b"1")
    sent = export(str(tree), bucket)
    assert "tab\t: its name cannot be the key of an object" in failed(sent)
    assert "its name is not UTF-8" in failed(sent)
    assert len(sent.failed) == 2 and sent.sent == 5


def test_a_file_that_changes_meanwhile_is_an_error(
    tree: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = bucket.put_file

    def change(path: str, data: bytes, mtime: str) -> None:
        put(path, data, mtime)
        if path == "x":
            (tree / "x").write_bytes(b"changed")

    monkeypatch.setattr(bucket, "put_file", change)
    assert failed(export(str(tree), bucket)) == (
        "x: was changed while it was sent; export it again"
    )
    monkeypatch.setattr(bucket, "put_file", put)
    assert not export(str(tree), bucket).failed and bucket.content() == content_of(tree)


def test_an_error_of_one_file_ends_no_other(
    tree: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = bucket.put_file

    def fail(path: str, data: bytes, mtime: str) -> None:
        if path == "a/y":
            raise OSError(5, "the store failed", path)
        put(path, data, mtime)

    monkeypatch.setattr(bucket, "put_file", fail)
    assert failed(export(str(tree), bucket)) == "a/y: the store failed"
    assert bucket.content().keys() == content_of(tree).keys() - {"a/y"}


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    run.mkdir()
    for step in (100, 200):
        save(run, step, b"%d" % step, tracker="tracker")
    return run


def test_the_manifest_is_last_and_the_tracker_behind_it(run: Path, bucket: Bucket) -> None:
    sent = export(str(run), bucket)
    assert sent.checkpoints == 2 and not sent.failed
    for step in (100, 200):
        of_step = [path for path in bucket.done if path.startswith(f"step-{step}/")]
        assert of_step[-1] == f"step-{step}/{NAME}" and len(of_step) == 3
    assert bucket.done[-1] == "tracker" and bucket.content() == content_of(run)
    bucket.done.clear()
    assert export(str(run), bucket).checkpoints == 2 and not bucket.done


def test_a_checkpoint_itself_can_be_exported(run: Path, bucket: Bucket) -> None:
    assert export(str(run / "step-100"), bucket).checkpoints == 1
    assert bucket.content() == content_of(run / "step-100")


def test_the_manifest_of_a_replaced_checkpoint_goes_first(run: Path, bucket: Bucket) -> None:
    export(str(run), bucket)
    save(run, 200, b"other", replace=True)
    bucket.done.clear()
    assert export(str(run), bucket).checkpoints == 2
    below = "step-200/"
    assert bucket.done[0] == f"-{below}{NAME}" and bucket.done[-1] == f"{below}{NAME}"
    assert sorted(bucket.done[1:-1]) == [f"{below}a.pt", f"{below}sub/b.pt"]
    assert bucket.content() == content_of(run)


def _missing(one: Path) -> None:
    (one / "a.pt").unlink()


def _cut(one: Path) -> None:
    (one / "a.pt").write_bytes(b"")


def _unreadable(one: Path) -> None:
    (one / NAME).write_bytes(b"{}")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_missing, "the checkpoint has no a.pt, which its manifest lists"),
        (_cut, "a.pt: has 0 bytes, its manifest says 3"),
        (_unreadable, "its manifest cannot be read"),
    ],
)
def test_a_damaged_checkpoint_gets_no_manifest(
    run: Path, bucket: Bucket, damage: Any, reason: str
) -> None:
    damage(run / "step-100")
    sent = export(str(run), bucket)
    assert reason in failed(sent) and sent.checkpoints == 1
    assert f"step-100/{NAME}" not in bucket.content()
    assert f"step-200/{NAME}" in bucket.content()


def test_a_checkpoint_replaced_meanwhile_gets_no_manifest(
    run: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = bucket.put_file

    def replace(path: str, data: bytes, mtime: str) -> None:
        put(path, data, mtime)
        if path == "step-200/a.pt":
            save(run, 200, b"200", replace=True)

    monkeypatch.setattr(bucket, "put_file", replace)
    sent = export(str(run), bucket, parallel=1)
    assert "step-200/.aifs-manifest.json" in failed(sent) and sent.checkpoints == 1
    assert f"step-200/{NAME}" not in bucket.content()
    monkeypatch.setattr(bucket, "put_file", put)
    assert export(str(run), bucket).checkpoints == 2
    assert bucket.content() == content_of(run)


def test_since_sends_what_is_newer(run: Path, bucket: Bucket) -> None:
    sent = export(str(run), bucket, since=100)
    assert sent.checkpoints == 1 and sent.left_out == 2  # step-100, and the link to the latest
    assert {path.partition("/")[0] for path in bucket.content()} == {"step-200", "tracker"}


# --- the command ----------------------------------------------------------------------------------


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main.main(["export", *arguments])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("COLUMNS", "200")
    yield


def test_the_command_says_what_was_sent(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"memory://{tmp_path.name}"
    code, text = told(capsys, str(tree), url)
    assert code == 0 and "5 files, 500 B" in text
    code, text = told(capsys, str(tree), url, "--json")
    assert code == 0 and '"sent": 0' in text and '"present_bytes": 500' in text
    (tree / "tab\t").write_bytes(b"1")
    code, text = told(capsys, str(tree), url)
    assert code == 1 and "aifs: tab\t: its name cannot be the key of an object" in text


def test_wrong_input_is_one_line(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = told(capsys, str(tree), "zz://bucket")
    assert code and text.startswith("aifs: zz://bucket") and text.count("\n") == 1
    code, text = told(capsys, str(tmp_path / "none"), "memory://x")
    assert code == 1 and "No such file or directory" in text and text.count("\n") == 1
