"""What a file that changes once a second costs: bytes that drains write to the data servers while a
program appends a line to a log, or commits a small transaction, and opens the file anew each
time."""

import os
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from report import Row
from systems import Aifs

SECONDS = 60
LOG_MB, DATABASE_MB = 40, 200
LOG_TARGET_MB, DATABASE_TARGET_MB = 120, 400


def changing_rows(base: Path, seconds: int = SECONDS) -> list[Row]:
    rows = []
    with Aifs("changing", base) as aifs:
        for number in range(3):  # so that processes run, and a rate is known
            _make_log(aifs.path / f"before-{number}", DATABASE_MB * 10**6)
            aifs.rest()
        for name, size, target, make, change in (
            ("append to a log", LOG_MB, LOG_TARGET_MB, _make_log, _append),
            ("commit in SQLite", DATABASE_MB, DATABASE_TARGET_MB, _make_database, _commit),
        ):
            path = aifs.path / f"file-{size}"
            make(path, size * 10**6)
            aifs.rest()
            written = _written(aifs, path, seconds, change) / 1e6
            rows.append(
                Row(
                    f"{name} of {size} MB, once a second for {seconds} s",
                    f"{size} MB are written in one drain",
                    None,
                    None,
                    None,
                    f"{written:,.0f} MB written",
                    f"<= {target} MB",
                    written <= target,
                )
            )
    return rows


def _written(aifs: Aifs, path: Path, seconds: int, change: Callable[[Path], None]) -> int:
    """Bytes that drains write meanwhile."""
    before, begin = aifs.status()["movers"]["moved_bytes"], time.monotonic()
    for number in range(seconds):
        time.sleep(max(0.0, begin + number - time.monotonic()))
        change(path)
    time.sleep(max(0.0, begin + seconds - time.monotonic()))
    return aifs.status()["movers"]["moved_bytes"] - before


def _make_log(path: Path, size: int) -> None:
    path.write_bytes(os.urandom(size))


def _append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"one more line\n")


def _make_database(path: Path, size: int) -> None:
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE rows (number INTEGER PRIMARY KEY, value BLOB)")
        rows = ((os.urandom(4000),) for _ in range(size // 4096))
        database.executemany("INSERT INTO rows (value) VALUES (?)", rows)


def _commit(path: Path) -> None:
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("INSERT INTO rows (value) VALUES (?)", (os.urandom(4000),))
