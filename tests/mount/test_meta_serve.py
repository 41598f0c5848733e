"""aifs meta serve: the database of a small cluster, as a process of its own."""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest
import yaml

from tests.support.mounts import aifs
from tests.support.postgres import free_port


class Served:
    """A running ``aifs meta serve``, and what it has printed."""

    def __init__(self, directory: Path, port: int, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "aifs.cli.main", "meta", "serve", directory]
            + ["--listen", f"127.0.0.1:{port}", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.says = [self.process.stdout.readline() for _ in range(6)]
        self.meta = (yaml.safe_load("".join(self.says)) or {}).get("meta", {})

    def end(self, number: int) -> tuple[int, str]:
        """Exit status, and its log."""
        self.process.send_signal(number)
        log = self.process.communicate()[1]  # which ends when PostgreSQL does, too
        return self.process.returncode, log

    def connect(self, password: str = "") -> "psycopg.Connection[tuple[object, ...]]":
        password = password or Path(self.meta["secret"]).read_text().strip()
        return psycopg.connect(self.meta["url"], password=password, autocommit=True)


@pytest.fixture
def place() -> Iterator[Path]:
    """Where there is no database yet; an ordinary user gets there."""
    with tempfile.TemporaryDirectory(prefix="aifs-serve-") as directory:
        os.chmod(directory, 0o711)
        yield Path(directory) / "database"


@pytest.fixture
def serve(place: Path) -> Iterator[Callable[..., Served]]:
    with ExitStack() as stack:

        def start(*options: str) -> Served:
            served = Served(place, free_port(), *options)
            stack.callback(served.process.communicate)
            stack.callback(served.process.kill)
            return served

        yield start


def refused(directory: Path, *options: str, code: int = 4) -> str:
    done = aifs("meta", "serve", directory, *options, check=False)
    assert done.returncode == code and done.stdout == "", done
    line = done.stderr.splitlines()[-1]
    assert line.startswith("aifs: ")
    return line


@pytest.mark.sweep
def test_a_database_is_served_and_found_again(serve: Callable[..., Served], place: Path) -> None:
    served = serve()
    assert f"serves {place} at 127.0.0.1:" in served.says[0], served.end(signal.SIGKILL)
    secret = Path(served.meta["secret"])
    assert secret == place / "secret" and secret.stat().st_mode & 0o777 == 0o600
    assert secret.stat().st_uid == os.geteuid() and len(secret.read_text()) > 40
    with served.connect() as connection:
        connection.execute("CREATE TABLE kept (number int)")
        connection.execute("INSERT INTO kept VALUES (7)")
        said = dict(connection.execute("SELECT name, setting FROM pg_settings").fetchall())
        assert said["synchronous_commit"] == said["fsync"] == said["full_page_writes"] == "on"
        assert said["password_encryption"] == "scram-sha-256"
        assert not connection.info.parameter_status("is_superuser") == "on"
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        served.connect("wrong")
    assert not list(place.rglob(".s.PGSQL*")), "nobody gets in without the password"
    assert serves_as(place) != 0, "PostgreSQL never runs as root"
    assert f"pid {served.process.pid} serves it already" in refused(
        place, "--listen", f"127.0.0.1:{free_port()}", code=5
    )
    connection = served.connect()  # who is connected does not hold it up
    status, log = served.end(signal.SIGTERM)
    connection.close()
    assert status == 0 and "database system is shut down" in log

    again = serve()
    assert Path(again.meta["secret"]).read_text() == secret.read_text()
    with again.connect() as connection:
        assert connection.execute("SELECT * FROM kept").fetchall() == [(7,)]
    assert again.end(signal.SIGINT)[0] == 0


def test_nothing_is_made_for_a_port_that_is_taken(place: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert "Address already in use" in refused(place, "--listen", f"127.0.0.1:{port}")
    assert not place.exists()


def serves_as(place: Path) -> int:
    pid = int((place / "data" / "postmaster.pid").read_text().split()[0])
    return os.stat(f"/proc/{pid}").st_uid


@pytest.mark.sweep
@pytest.mark.parametrize("whom", ["aifs", "postgres"])
def test_after_a_kill_nothing_is_lost_and_nobody_is_left(
    serve: Callable[..., Served], place: Path, whom: str
) -> None:
    served = serve()
    connection = served.connect()
    connection.execute("CREATE TABLE kept (number int)")
    connection.execute("INSERT INTO kept VALUES (7)")
    if whom == "aifs":
        served.end(signal.SIGKILL)  # PostgreSQL ends with it
    else:
        os.kill(int((place / "data" / "postmaster.pid").read_text().split()[0]), signal.SIGKILL)
        assert served.process.wait() == 4
        _, log = served.process.communicate()
        assert re.search("PostgreSQL has ended with status -9", log)
    connection.close()
    with serve().connect() as connection:
        assert connection.execute("SELECT * FROM kept").fetchall() == [(7,)]


@pytest.mark.sweep
def test_one_who_died_while_it_was_made_leaves_nothing(
    serve: Callable[..., Served], place: Path
) -> None:
    making = subprocess.Popen(
        [sys.executable, "-m", "aifs.cli.main", "meta", "serve", place]
        + ["--listen", f"127.0.0.1:{free_port()}"]
    )
    while not (place / "data.new").exists():
        assert making.poll() is None
        time.sleep(0.001)
    making.kill()
    making.wait()
    served = serve()
    with served.connect() as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)
    assert served.end(signal.SIGTERM)[0] == 0


@pytest.mark.sweep
def test_wrong_input_is_one_line_and_changes_nothing(
    serve: Callable[..., Served], place: Path
) -> None:
    place.mkdir()
    (place / "letter").write_text("dear")
    assert "holds 'letter', which is not of a database" in refused(place)
    assert os.listdir(place) == ["letter"]
    (place / "letter").unlink()
    assert "ADDRESS" not in os.listdir(place)
    assert "is not an address and a port" in refused(place, "--listen", "here", code=2)
    assert "there is no such user" in refused(place, "--user", "no-such-user")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        where = f"127.0.0.1:{other.getsockname()[1]}"
        assert "Address already in use" in refused(place, "--listen", where)
    (place / "data" / "PG_VERSION").write_text("9\n")
    assert "was made by PostgreSQL 9, and installed is" in refused(place)
    (place / "data" / "PG_VERSION").write_text("elephant\n")
    assert "holds no database of PostgreSQL" in refused(place)


@pytest.mark.sweep
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run it as somebody else")
def test_root_says_who_runs_it(serve: Callable[..., Served], place: Path) -> None:
    served = serve("--user", "nobody")
    assert served.says[0].rstrip().endswith("as user nobody")
    assert place.owner() == (place / "data").owner() == "nobody"
    served.end(signal.SIGTERM)
    served = serve()  # whom it belongs to
    assert served.says[0].rstrip().endswith("as user nobody")
    served.end(signal.SIGTERM)
    assert "PostgreSQL does not run as root" in refused(place, "--user", "root")


def test_a_unit_for_systemd_is_printed(place: Path) -> None:
    printed = aifs("meta", "serve", f"{place} 100%", "--systemd", "--listen", "[::]:5555").stdout
    assert re.search(r'^ExecStart=\S+ meta serve ".*/database 100%%" --listen', printed, re.M)
    assert "Restart=on-failure" in printed and not place.exists()
