"""What looking at a mount costs: requests that are counted, with a reader of /metrics each second,
against a daemon that counts nothing; and one reading of /metrics. And what quotas cost: files that
are made in a directory that has one, against another one of the same mount."""

import http.client
import os
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from report import Row, rate
from systems import HERE, Aifs

RATIO = 0.99
QUOTA_RATIO = 0.97
SCRAPE_S, SCRAPE_BYTES = 5e-3, 60 << 10
MEMORY_BYTES = 20 << 20
EACH_S = 1.0
SCRAPES = 50
STATS = 5
"""How often the files are looked at: that takes far less time than to create them."""


class _Local(http.client.HTTPConnection):
    """HTTP by a socket of this machine."""

    def __init__(self, place: Path) -> None:
        super().__init__("localhost")
        self._place = place

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(self._place))


def _scrape(place: Path) -> int:
    """Bytes of the metrics."""
    connection = _Local(place)
    connection.request("GET", "/metrics")
    length = len(connection.getresponse().read())
    connection.close()
    return length


@contextmanager
def _scraped(place: Path) -> Iterator[None]:
    ended = threading.Event()

    def scrape() -> None:
        while not ended.wait(EACH_S):
            _scrape(place)

    scraper = threading.Thread(target=scrape)
    scraper.start()
    try:
        yield
    finally:
        ended.set()
        scraper.join()


def operations_rows(base: Path, files: int, rounds: int) -> list[Row]:
    place = base / "metrics.sock"
    rates: dict[tuple[str, str], list[float]] = {}
    took_s: list[float] = []
    with (
        Aifs("uncounted", base, (HERE / "uncounted.py",)) as plain,
        Aifs("counted", base, ("-m", "aifs.cli.main"), f"metrics.listen={place}") as watched,
        _scraped(place),
    ):
        for number in range(2 * rounds):
            systems = (plain, watched) if number % 2 else (watched, plain)
            for system in systems:
                for work in ("create", *["stat"] * STATS):
                    found = files / system.run(work, f"round{number}", count=files)
                    rates.setdefault((system.name, work), []).append(found)
        for _ in range(SCRAPES):
            begin_s = time.perf_counter()
            length = _scrape(place)
            took_s.append(time.perf_counter() - begin_s)
        memory = [system.status()["process"]["resident_bytes"] for system in (plain, watched)]
    rows = []
    for work in ("create", "stat"):
        # The best of all rounds: other load makes every one slower, and by more than is looked for.
        counted, uncounted = max(rates["counted", work]), max(rates["uncounted", work])
        ratio = counted / uncounted
        rows.append(
            Row(
                f"{work}, metrics on",
                f"not counted {rate(uncounted, 'files/s')}",
                None,
                None,
                None,
                rate(counted, "files/s"),
                f"{ratio:.3f} of not counted >= {RATIO}",
                ratio >= RATIO,
            )
        )
    scrape_s = statistics.median(took_s)
    said = f"{scrape_s * 1e3:.2f} ms, {length / 1024:.0f} KiB"
    target = f"<= {SCRAPE_S * 1e3:.0f} ms, {SCRAPE_BYTES >> 10} KiB"
    passed = scrape_s <= SCRAPE_S and length <= SCRAPE_BYTES
    rows.append(Row("read /metrics", "", None, None, None, said, target, passed))
    more = memory[1] - memory[0]
    said, target = f"{more / (1 << 20):.1f} MiB more", f"<= {MEMORY_BYTES >> 20} MiB"
    without = f"{memory[0] / (1 << 20):.0f} MiB"
    passed = more <= MEMORY_BYTES
    rows.append(Row("memory", without, None, None, None, said, target, passed))
    return [*rows, _quota_row(base, files, rounds)]


def _quota_row(base: Path, files: int, rounds: int) -> Row:
    rates: dict[str, list[float]] = {"quota": [], "none": []}
    with Aifs("quotas", base) as system:
        (system.path / "quota").mkdir()
        (system.path / "none").mkdir()
        limits = b"size=1TiB,files=1G"
        os.setxattr(system.path / "quota", "user.aifs.quota", limits)
        for number in range(2 * rounds):
            for directory in sorted(rates, reverse=number % 2 == 0):
                took_s = system.run("create", f"{directory}/round{number}", count=files)
                rates[directory].append(files / took_s)
                system.remove(f"{directory}/round{number}")
    counted, plain = max(rates["quota"]), max(rates["none"])
    return Row(
        "create, quota on",
        f"without {rate(plain, 'files/s')}",
        None,
        None,
        None,
        rate(counted, "files/s"),
        f"{counted / plain:.3f} of without >= {QUOTA_RATIO}",
        counted / plain >= QUOTA_RATIO,
    )
