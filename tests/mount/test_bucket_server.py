"""Stores whose data servers are buckets, of moto's S3."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from aifs.core.config import DIRECTORY_FILE
from tests.support.mounts import ROOT, Mounted, aifs, mounted_store
from tests.support.object_stores import KEYS, Proxy, make_bucket, moto

pytest.importorskip("obstore", reason="needs obstore: pip install '.[objects]'")

MIB = 1 << 20
LARGE = 9 * MIB + 5
"""More than a part of an upload."""


ASKED: list[str] = []
"""METHOD PATH of all requests of the test."""


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    ASKED.clear()
    with moto(ASKED) as found:
        for name, value in (KEYS | {"AWS_ENDPOINT_URL": found}).items():
            monkeypatch.setenv(name, value)
        make_bucket(found, "bucket")
        yield found


def keys(endpoint: str) -> list[str]:
    """Of all objects of the bucket."""
    with urllib.request.urlopen(f"{endpoint}/bucket?list-type=2") as answer:
        parts = answer.read().decode().split("<Key>")
    return [part.partition("</Key>")[0] for part in parts[1:]]


def write_settings(directory: Path, text: str) -> None:
    (directory / "store").mkdir(parents=True)
    (directory / "store" / DIRECTORY_FILE).write_text(text)


@pytest.fixture
def store(endpoint: str, tmp_path: Path) -> Iterator[Mounted]:
    write_settings(tmp_path, "servers: ['s3://bucket/some/prefix']\ndata: {movers: 1}\n")
    with mounted_store(tmp_path) as mounted:
        yield mounted


def test_files_are_written_drained_evicted_and_read_again(store: Mounted, endpoint: str) -> None:
    files = {"large": os.urandom(LARGE), "tiny": b"x"}
    files |= {f"small{number}": os.urandom(10_000) for number in range(5)}

    def check() -> None:
        assert sorted(os.listdir(store.path)) == sorted(files)
        for name, content in files.items():
            assert (store.path / name).read_bytes() == content, name

    def write(name: str, content: bytes) -> None:
        files[name] = content
        (store.path / name).write_bytes(content)

    for name, content in files.items():
        (store.path / name).write_bytes(content)
    for _ in range(2):
        aifs("drain", store.path)
        aifs("evict", store.path)
        assert sum("/objects/" in key for key in keys(endpoint)) >= 2
        check()
        with (store.path / "large").open("r+b") as file:
            file.seek(MIB)
            file.write(b"changed")
        files["large"] = files["large"][:MIB] + b"changed" + files["large"][MIB + 7 :]
        write("small0", os.urandom(20_000))
        (store.path / "small1").rename(store.path / "renamed")
        files["renamed"] = files.pop("small1")
        write("small1", b"y" * 5000)
        (store.path / "small2").unlink()
        del files["small2"]
        write("small2", b"z" * 70_000)
        check()
    checks = json.loads(aifs("doctor", store.path, "--json", check=False).stdout)
    [rights] = [each for each in checks if each["name"] == "bucket s3://bucket/some/prefix"]
    assert rights["ok"] and "read and deleted" in rights["why"]
    store.kill()
    store.mount()
    check()
    aifs("drain", store.path)
    store.remount()
    check()


def test_a_pack_of_small_files_takes_one_request(store: Mounted) -> None:
    content = os.urandom(10_000)
    for number in range(1500):
        (store.path / str(number)).write_bytes(content)
    aifs("drain", store.path)
    assert 1 <= sum("/objects/" in one and one[0] == "P" for one in ASKED) <= 3
    aifs("evict", store.path)
    assert all((store.path / name).read_bytes() == content for name in ("0", "700", "1499"))


def test_a_full_bucket_keeps_files_in_the_burst_tier(endpoint: str, tmp_path: Path) -> None:
    write_settings(tmp_path, "servers: ['s3://bucket/full?limit=3MiB']\ndata: {movers: 1}\n")
    with mounted_store(tmp_path) as store:
        store.expected.append("draining has to wait, the bytes stay in the burst tier")
        first, second = os.urandom(2 * MIB), os.urandom(2 * MIB)
        (store.path / "first").write_bytes(first)
        aifs("drain", store.path)
        (store.path / "second").write_bytes(second)
        status = os.statvfs(store.path)
        assert status.f_blocks * status.f_frsize == 3 * MIB
        command = [sys.executable, "-m", "aifs.cli.main", "drain", store.path]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as draining:
            assert "its limit of 3MiB is reached" in draining.stderr.readline()
            draining.terminate()
        assert (store.path / "second").read_bytes() == second


STEPS = [
    r"POST .*\?uploads",  # an upload begins
    r"PUT .*partNumber=",
    r"POST .*\?uploadId=",  # it is completed
    r"PUT .*objects/[0-9a-f]+\.0$",  # a pack
    r"POST .*\?delete",
]


@pytest.mark.sweep
def test_a_daemon_that_is_killed_at_any_request_loses_nothing(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the store has got it, and after."""
    target: list[str] = []

    def spoil(asked: str) -> str:
        if target and re.search(target[0], asked):
            os.kill(store.pid, signal.SIGKILL)
            return target.clear() or word
        return ""

    proxy = Proxy(endpoint, spoil)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    text = "data: {movers: 1}\nmeta: {backup_interval: 0}\n"  # then garbage goes at once
    write_settings(tmp_path, f"servers: ['s3://bucket/killed']\n{text}")
    files: dict[str, bytes] = {}
    with mounted_store(tmp_path) as store:
        for number, (step, word) in enumerate(product(STEPS, ("reset", "lost"))):
            for name, size in ((f"large{number % 3}", LARGE), (f"small{number}", 5000)):
                files[name] = os.urandom(size)
                (store.path / name).write_bytes(files[name])
            target.append(step)
            aifs("drain", store.path, check=False)
            store.wait_for_end()  # what was replaced is deleted after the drain has ended
            subprocess.run(["umount", "-l", store.path], check=True)
            store.mount()
            assert {name: (store.path / name).read_bytes() for name in files} == files, step
        aifs("drain", store.path)
        aifs("evict", store.path)
        assert {name: (store.path / name).read_bytes() for name in files} == files
    proxy.close()


def test_a_bucket_is_added_as_archive(endpoint: str, tmp_path: Path) -> None:
    write_settings(tmp_path, "data: {movers: 0}\n")
    with mounted_store(tmp_path) as store:
        content = os.urandom(LARGE)
        (store.path / "file").write_bytes(content)
        wrong = aifs("server", "add", "--burst", store.path, "s3://bucket/b", check=False)
        assert wrong.returncode and "must be on a disk of this machine" in wrong.stderr
        wrong = aifs("server", "add", store.path, "s3://missing/b", check=False)
        assert wrong.returncode and "there is no such bucket; create it" in wrong.stderr
        aifs("server", "add", "--class", "archive", store.path, "s3://bucket/archive")
        rows = json.loads(aifs("server", "ls", store.path, "--json").stdout)["servers"]
        assert [row["class"] for row in rows if row["path"] == "s3://bucket/archive"] == ["archive"]
        again = aifs("server", "add", store.path, "s3://bucket/archive", check=False)
        assert (
            again.returncode
            and "s3://bucket/archive: is s3://bucket/archive; each server" in again.stderr
        )
        assert (store.path / "file").read_bytes() == content


def test_a_store_is_formatted_only_where_nothing_else_lies(endpoint: str, tmp_path: Path) -> None:
    urllib.request.urlopen(
        urllib.request.Request(f"{endpoint}/bucket/theirs", b"x", method="PUT")
    ).close()
    for number, (address, text) in enumerate(
        {
            "s3://bucket": "s3://bucket/theirs: is not of this store; name an unused prefix",
            "s3://nowhere/x": "there is no such bucket; create it",
        }.items()
    ):
        write_settings(tmp_path / str(number), f"servers: ['{address}']\n")
        done = aifs("format", tmp_path / str(number) / "store", check=False)
        assert done.returncode and text in done.stderr, done.stderr
    write_settings(tmp_path / "good", "servers: ['s3://bucket/a', 's3://bucket/b']\n")
    aifs("format", tmp_path / "good" / "store")
    assert keys(endpoint) == ["a/.aifs", "b/.aifs", "theirs"]
    aifs("format", tmp_path / "good" / "store", "--force")
    write_settings(tmp_path / "other", "servers: ['s3://bucket/a']\n")
    done = aifs("format", tmp_path / "other" / "store", check=False)
    assert done.returncode and "s3://bucket/a: holds a store already" in done.stderr
