"""A store on a bucket, beside obstore alone, which moves the same bytes by as many requests at
once. The bucket is moto's, in a process of its own: ratios count, not rates.
"""

import json
import os
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from report import Row, rate
from systems import REPOSITORY

KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
SMALL = 10 << 10
"""Bytes of each small file."""

_ALONE = """
import sys, time
import obstore
from obstore.store import S3Store
from aifs.data.bucket import PART, PARTS_AT_ONCE

what, path = sys.argv[1:]
store = S3Store("bucket", prefix="alone", client_options={"allow_http": True})
began = time.monotonic()
if what == "put":
    with open(path, "rb") as file:
        obstore.put(store, "file", file, chunk_size=PART, max_concurrency=PARTS_AT_ONCE)
else:
    for chunk in obstore.get(store, "file").stream(min_chunk_size=PART):
        pass
print(time.monotonic() - began)
"""


def object_rows(base: Path, mib: int, files: int, rounds: int) -> list[Row]:
    """``mib``: of the large file. ``files``: small ones."""
    source = base / "source"
    source.write_bytes(os.urandom(mib << 20))
    found: dict[str, list[float]] = {}
    with _served(base) as asked, _mounted(base) as mount:
        for round_ in range(rounds):
            for name, value in _round(mount, source, files, round_, asked).items():
                found.setdefault(name, []).append(value)
    middle = {name: statistics.median(values) for name, values in found.items()}

    def compared(work: str, alone: str, target: float) -> Row:
        ratio = middle[alone] / middle[work]
        told = rate(mib / middle[alone], "MiB/s"), rate(mib / middle[work], "MiB/s")
        passed = ratio >= target
        return Row(f"{work} / obstore", told[0], None, ratio, None, told[1], f">= {target}", passed)

    def stated(work: str, limit: float, unit: str) -> Row:
        value = middle[work]
        passed = value <= limit
        told = f"{value:,.0f} {unit}"
        return Row(work, "", None, None, None, told, f"<= {limit:,.0f}", passed)

    return [
        compared("drain", "put", 0.9),
        compared("first read", "get", 0.9),
        stated("requests that write, per GiB", 200, "requests"),
        stated("requests that read, per GiB", 1100, "requests"),
        stated("requests that write, of small files", 5, "requests"),
        stated("requests that read, of small files", 200, "requests"),
        stated("memory of all movers", 200, "MiB"),
    ]


def _round(mount: Path, source: Path, files: int, number: int, asked: "Asked") -> dict[str, float]:
    gib = source.stat().st_size / (1 << 30)
    found = {"put": _alone("put", source), "get": _alone("get", source)}
    target = mount / f"large{number}"
    target.write_bytes(source.read_bytes())
    asked.take()
    found["drain"] = _timed(lambda: _aifs("drain", mount))
    found["memory of all movers"] = _movers_mib(mount)
    found["requests that write, per GiB"] = asked.take("PUT|POST") / gib
    _aifs("evict", mount)
    asked.take()
    found["first read"] = _timed(lambda: _read(target))
    found["requests that read, per GiB"] = asked.take("GET") / gib
    below = mount / f"small{number}"
    below.mkdir()
    for each in range(files):
        (below / f"{each:05}").write_bytes(os.urandom(SMALL))
    _aifs("drain", mount)
    found["requests that write, of small files"] = asked.take("PUT|POST")
    _aifs("evict", mount)
    asked.take()
    for path in sorted(below.iterdir()):
        path.read_bytes()
    found["requests that read, of small files"] = asked.take("GET")
    return found


def _read(path: Path) -> None:
    with open(path, "rb", buffering=0) as file:
        while file.read(1 << 20):
            pass


def _timed(work: Callable[[], object]) -> float:
    began_s = time.monotonic()
    work()
    return time.monotonic() - began_s


def _aifs(*words: object) -> None:
    command = [sys.executable, "-m", "aifs.cli.main", *map(str, words)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=REPOSITORY)


def _alone(what: str, source: Path) -> float:
    command = [sys.executable, "-c", _ALONE, what, str(source)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=REPOSITORY)
    return float(done.stdout)


def _movers_mib(mount: Path) -> float:
    """The most that the processes that move bytes have had in memory."""
    daemon = json.loads(os.getxattr(mount, "user.aifs.status"))["pid"]
    total = 0
    for path in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):
            text = path.read_text()
            if re.search(rf"^PPid:\t{daemon}$", text, re.M) and (
                b"aifs.burst.child" in (path.parent / "cmdline").read_bytes()
            ):
                total += int(re.findall(r"VmHWM:\s+(\d+)", text)[0])
    return total / 1024


class Asked:
    """The requests of objects that a store was asked, by the log of moto."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._at = 0

    def take(self, methods: str = "") -> int:
        """How many with these methods, since this was last asked."""
        text = self._log.read_bytes()[self._at :]
        self._at += len(text)
        asked = rf"(?:{methods or 'GET'}) /bucket/store/objects/"
        return len(re.findall(asked.encode(), text))


@contextmanager
def _served(base: Path) -> Iterator[Asked]:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    os.environ.update(KEYS | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"})
    with open(base / "moto.log", "wb") as log:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        while server.poll() is None:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
        make = f"http://127.0.0.1:{port}/bucket"
        subprocess.run(["curl", "-sf", "-X", "PUT", make], check=True, stdout=subprocess.DEVNULL)
        yield Asked(base / "moto.log")
    finally:
        server.terminate()
        server.wait()


@contextmanager
def _mounted(base: Path) -> Iterator[Path]:
    store, mount = base / "objects", base / "objects-mount"
    store.mkdir()
    mount.mkdir()
    (store / "aifs.yaml").write_text("servers: ['s3://bucket/store']\n")
    _aifs("format", store)
    _aifs("mount", store, mount, "-o", "burst.drain_delay=1h")
    try:
        yield mount
    finally:
        _aifs("umount", mount)
