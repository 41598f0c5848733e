"""Metrics of a real mount: programs do something, and it shows."""

import html
import itertools
import json
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.browser import NEEDED, browse
from tests.support.mounts import Mounted
from tests.support.postgres import free_port

MAX_BYTES = 60 << 10
PICTURE = os.environ.get("AIFS_PICTURE_OF_PAGE")
"""Where the picture of the page goes that the README shows; made anew by the test."""
ASKED_MS = 6000  # of the page's own time, in which it asks once a second
LOOKS_MAX = 5
"""That time runs faster than ours, so programs may have done nothing in the last second of it."""


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


@pytest.mark.sweep
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
    with pytest.raises(OSError):
        os.setxattr(mount.path, "user.aifs.keep", b"nonsense")
    after = read()
    count = "aifs_request_duration_seconds_count"
    assert after[count, "create"] - before.get((count, "create"), 0) == 9
    assert ("aifs_request_errors_total", "rmdir", "ENOTEMPTY") not in after
    assert after["aifs_request_errors_total", "setxattr", "EINVAL"] == 1
    assert after["aifs_burst_dirty_bytes", "0"] >= 9 * 5000
    assert after["aifs_drain_queue_files",] >= 9
    grown = "aifs_burst_grown_bytes_total"
    assert after[grown,] - before[grown,] >= 9 * 5000
    assert (
        after["aifs_journal_transactions_total",] - before["aifs_journal_transactions_total",] >= 10
    )
    os.sync()
    (mount.path / "directory").rename(mount.path / "published")  # a barrier
    published = read()
    for name in ("aifs_journal_syncs_total", "aifs_journal_bytes_total"):
        assert published[name,] > before[name,]
    waits = "aifs_wait_duration_seconds_count"
    assert published[waits, "burst directory 0"] > before.get((waits, "burst directory 0"), 0)
    status = json.loads(get(place, "/status.json"))
    assert status["requests"]["create"]["count"] == 9 and status["pid"] == mount.pid
    assert get(place, "/healthz") == "ok\n"
    assert (
        json.loads(os.getxattr(mount.path, "user.aifs.status"))["requests"]["mkdir"]["count"] == 1
    )


@pytest.mark.sweep
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


def look_at(address: str, scratch: Path) -> str:
    """The page as a browser has it after a while, as text; a fault of its script fails the test."""
    seen = browse(address, scratch, f"virtual-time-budget={ASKED_MS}", "dump-dom").stdout
    assert "data-error" not in seen.partition("<main>")[0], seen
    body = seen.partition("<script>")[0].partition("</style>")[2]
    return html.unescape(re.sub(r"<[^>]*>", " ", body))


def picture(address: str, scratch: Path) -> Path:
    """The page as a browser shows it after a while."""
    file = PICTURE if PICTURE else scratch / "page.png"
    options = (f"virtual-time-budget={ASKED_MS}", "window-size=1280,1500", f"screenshot={file}")
    browse(address, scratch, *options)
    return Path(file)


@contextmanager
def working(does: Callable[[int], object]) -> Iterator[None]:
    """Meanwhile something is done again and again; it is told how often before."""
    ended = threading.Event()

    def work() -> None:
        for number in itertools.takewhile(lambda _: not ended.is_set(), itertools.count()):
            does(number)

    worker = threading.Thread(target=work)
    worker.start()
    try:
        yield
    finally:
        ended.set()
        worker.join()


@NEEDED
def test_the_page_shows_what_programs_do(
    scratch: Path, mount_store: Callable[..., Mounted]
) -> None:
    port = free_port()
    mount = mount_store(f"metrics.listen=127.0.0.1:{port}")

    def work(number: int) -> None:
        with open(mount.path / "<b>x", "wb") as file:
            file.write(bytes(100_000))
            if number % 32 == 0:
                os.fsync(file.fileno())
        if number % 32 == 0:
            (mount.path / "<b>x").rename(mount.path / f"<b>{number % 1024}")
        else:
            (mount.path / "<b>x").unlink()

    with working(work):
        seen = look_at(f"http://127.0.0.1:{port}/#who=user", scratch)
        drawn = picture(f"http://127.0.0.1:{port}/", scratch).read_bytes()
    assert "all is well" in seen and f"AIFS {mount.path}" in seen
    rate = re.search(r"create\s+([0-9.,]+)\s+[0-9.]+ [mµ]?s", seen)
    assert rate and float(rate[1].replace(",", "")) > 0, seen
    assert drawn.startswith(b"\x89PNG") and len(drawn) > 20_000  # more than an empty page
    assert "What requests, drains and publishes wait for" in seen
    assert "only root and the user that has mounted see who uses the mount" in seen
    assert "the last 3 minutes" in seen  # a chart was drawn, so the page has asked more than once


@NEEDED
def test_the_page_shows_who_uses_the_mount(
    scratch: Path, mount_store: Callable[..., Mounted]
) -> None:
    port = free_port()
    secret = scratch / "secret"
    secret.write_text("a secret\n")
    secret.chmod(0o600)
    mount = mount_store(f"metrics.listen=127.0.0.1:{port}", f"metrics.secret={secret}")
    file = mount.path / "job" / "<i>files" / "x"
    file.parent.mkdir(parents=True)

    def work(_: int) -> None:
        file.touch()
        file.unlink()

    page = f"http://127.0.0.1:{port}/#token=a%20secret"
    comm = Path("/proc/self/comm").read_text().strip()
    with working(work):
        for by, name in (("process", f"{os.getpid()} {comm}"), ("path", "/job/<i>files")):
            line = re.escape(name) + r"\s+[0-9.,]+\s+[0-9–]+\s+[0-9]+ %\s+[0-9.]+ [mµ]?s"
            for _ in range(LOOKS_MAX):
                seen = look_at(f"{page}&who={by}", scratch)
                if re.search(line, seen):
                    break
            else:
                pytest.fail(seen)
            assert "Traced while this is open" in seen


def test_a_mount_is_traced_while_somebody_asks(
    scratch: Path, mount_store: Callable[..., Mounted]
) -> None:
    place = scratch / "socket"
    mount = mount_store(f"metrics.listen={place}")
    begun = json.loads(get(place, "/top.json?by=path"))
    (mount.path / "job").mkdir()
    (mount.path / "job" / "x").write_bytes(b"x")
    told = json.loads(get(place, f"/top.json?by=path&since={begun['next']}"))
    assert "/job" in {one["path"] for one in told["path"]}


@NEEDED
def test_the_page_says_what_is_wrong(scratch: Path, mount_store: Callable[..., Mounted]) -> None:
    port = free_port()
    secret = scratch / "secret"
    secret.write_text("a b&c\n")
    secret.chmod(0o600)
    mount = mount_store(f"metrics.listen=127.0.0.1:{port}", f"metrics.secret={secret}")
    mount.expected.append("data server 3 .* is failing")
    gone = mount.source / "data" / "3"
    gone.rename(scratch / "gone")
    assert "has a secret" in look_at(f"http://127.0.0.1:{port}/", scratch)
    seen = look_at(f"http://127.0.0.1:{port}/#token=a%20b%26c", scratch)
    (scratch / "gone").rename(gone)
    assert f"data server 3 ({gone}) is" in seen
