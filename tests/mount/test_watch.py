"""Metrics of a real mount: programs do something, and it shows."""

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.mounts import Mounted

MAX_BYTES = 60 << 10


def get(place: Path, path: str) -> str:
    """What the mount answers at its socket."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(str(place))
        asking.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        asking.shutdown(socket.SHUT_WR)
        with asking.makefile("rb") as answer:
            head, _, body = answer.read().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), body
    return body.decode()


def test_what_programs_do_is_counted(scratch: Path, mount_store: Callable[..., Mounted]) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    place = scratch / "socket"
    mount = mount_store(f"metrics.listen={place}")

    def read() -> dict[tuple[str, ...], float]:
        text = get(place, "/metrics")
        assert len(text) < MAX_BYTES
        families = parser.text_string_to_metric_families(text)
        found = [sample for family in families for sample in family.samples]
        return {(one.name, *one.labels.values()): one.value for one in found}

    before = read()
    (mount.path / "directory").mkdir()
    for number in range(9):
        (mount.path / "directory" / str(number)).write_bytes(b"x" * 5000)
    with pytest.raises(OSError):
        (mount.path / "directory").rmdir()
    after = read()
    count = "aifs_request_duration_seconds_count"
    assert after[count, "create"] - before.get((count, "create"), 0) == 9
    assert after["aifs_request_errors_total", "rmdir", "ENOTEMPTY"] == 1
    assert after["aifs_burst_dirty_bytes", "0"] >= 9 * 5000
    assert after["aifs_drain_queue_files",] >= 9
    status = json.loads(get(place, "/status.json"))
    assert status["requests"]["create"]["count"] == 9 and status["pid"] == mount.pid
    assert get(place, "/healthz") == "ok\n"
    assert (
        json.loads(os.getxattr(mount.path, "user.aifs.status"))["requests"]["mkdir"]["count"] == 1
    )


def test_a_mount_that_was_killed_leaves_no_place_taken(
    scratch: Path, mount_store: Callable[..., Mounted]
) -> None:
    place = scratch / "socket"
    mount = mount_store(f"metrics.listen={place}")
    mount.kill()
    assert place.exists()
    mount.mount()
    assert get(place, "/healthz") == "ok\n"
    mount.unmount()
    assert not place.exists()
    mount.mount()
