"""A real PostgreSQL for tests: a running one per process of pytest, a new database for each test.

It is the embedded one of the product, in memory and without syncs: kill -9 loses nothing of it, a
power cut all. Two versions: ``wheel``, the newest of the Python package, and ``system``, that of
the distribution, where it is installed.
"""

import os
import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from aifs.core.secret import read_secret
from aifs.meta.embedded import ROLE, EmbeddedDatabase, choose_user, find_programs
from aifs.meta.replicated.blocking import BlockingDatabase, make

BOTH = pytest.mark.parametrize("a_postgres", ["wheel", "system"], indirect=True)
"""A test marked so runs on PostgreSQL in two versions."""

_FAST = (
    "fsync=off",
    "full_page_writes=off",
    "shared_buffers=32MB",
    "max_connections=100",
    "autovacuum=off",  # one that is under way would keep a database from being dropped
    "min_wal_size=2MB",
    "max_wal_size=64MB",
)


@dataclass(frozen=True)
class TestDatabase:
    """An empty database of a test's own."""

    __test__ = False

    name: str
    url: str
    """As a configuration names it: without the password."""
    secret_file: str

    @property
    def conninfo(self) -> str:
        """With the password, for psycopg."""
        head, _, tail = self.url.partition("@")
        return f"{head}:{read_secret(self.secret_file)}@{tail}"

    def make_store(self) -> None:
        """A store with an empty map. Raises StoreError if there is one."""
        with (
            BlockingDatabase(self.url, self.secret_file) as database,
            database.transaction() as cursor,
        ):
            make(cursor, self.url, erase=False)


class Postgres:
    """A running PostgreSQL, made below ``place``. Everything blocks."""

    def __init__(self, place: Path, version: int, programs: str) -> None:
        self.version = version
        self.port = free_port()
        self._programs = {version: programs}
        self._directory = str(place / "database")
        self._log = (place / "log").open("ab")
        self._count = 0
        """Of databases that have been made."""
        self._embedded: EmbeddedDatabase | None = None
        self.start()

    @property
    def is_running(self) -> bool:
        process = self._embedded.process if self._embedded is not None else None
        return process is not None and process.poll() is None

    @property
    def pid(self) -> int:
        """Of the first of its processes, which starts all others."""
        assert self._embedded is not None and self._embedded.process is not None
        return self._embedded.process.pid

    def start(self) -> None:
        """Run it, at the port that it had, when all processes of one that was killed are gone."""
        options = ("--no-sync", "--wal-segsize=1")
        user = choose_user(self._directory)
        self._embedded = EmbeddedDatabase(self._directory, user, self._programs, options)
        self._embedded.start("0.0.0.0", self.port, _FAST, self._log)

    def stop(self) -> None:
        """In order: connections are ended, all is written. Nothing if it does not run."""
        self._end(signal.SIGINT)

    def kill(self) -> None:
        """kill -9. The next start recovers."""
        self._end(signal.SIGKILL)

    def restart(self, kill: bool = False) -> None:
        self._end(signal.SIGKILL if kill else signal.SIGINT)
        self.start()

    def pause(self) -> None:
        """No process of it does anything until ``go_on``: connections hang."""
        self._signal_all(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal_all(signal.SIGCONT)

    def _signal_all(self, number: int) -> None:
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        for pid in (self.pid, *map(int, children)):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _end(self, number: int) -> None:
        if self._embedded is None:
            return
        process = self._embedded.process
        if process is not None:
            process.send_signal(number)
            process.wait()
        self._embedded.release()
        self._embedded = None

    def close(self) -> None:
        self.stop()
        self._log.close()

    @contextmanager
    def new_database(self) -> Iterator[TestDatabase]:
        """An empty database, gone afterwards. It runs before and after."""
        self._count += 1
        name = f"test{self._count}"
        url = f"postgresql://{ROLE}@127.0.0.1:{self.port}"
        secret_file = os.path.join(self._directory, "secret")
        database = TestDatabase(name, f"{url}/{name}", secret_file)
        whole = TestDatabase(ROLE, f"{url}/{ROLE}", secret_file)
        _run(whole, f"CREATE DATABASE {name}")
        try:
            yield database
        finally:
            if not self.is_running:
                self._end(signal.SIGKILL)
                self.start()
            _run(whole, f"DROP DATABASE {name} WITH (FORCE)")


def _run(database: TestDatabase, statement: str) -> None:
    import psycopg

    with psycopg.connect(database.conninfo, autocommit=True) as connection:
        connection.execute(statement.encode())


def free_port() -> int:
    """One of this machine that nobody listens on now."""
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return trial.getsockname()[1]


@cache
def _programs() -> dict[str, tuple[int, str]]:
    """By kind, version and directory."""
    installed = find_programs()
    found = {
        "wheel" if "pgserver" in directory else "system": (version, directory)
        for version, directory in sorted(installed.items())
    }
    return found


class Servers:
    """Those of one process of pytest, started when they are first asked for."""

    def __init__(self) -> None:
        self._running: dict[str, Postgres] = {}
        self._places: list[tempfile.TemporaryDirectory[str]] = []

    def get(self, kind: str) -> Postgres:
        """Skips the test where there is none of the kind."""
        if kind not in self._running:
            if kind not in _programs():
                pytest.skip(f"no PostgreSQL of the {kind} is installed")
            version, programs = _programs()[kind]
            place = tempfile.TemporaryDirectory(prefix="aifs-postgres-", dir="/dev/shm")
            self._places.append(place)
            os.chmod(place.name, 0o711)  # it runs as an ordinary user
            self._running[kind] = Postgres(Path(place.name), version, programs)
        return self._running[kind]

    def close(self) -> None:
        for postgres in self._running.values():
            postgres.close()
        for place in self._places:
            place.cleanup()
