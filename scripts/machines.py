"""Several hosts on one machine, each in a network namespace of its own, and the database that they
share. What the demo, the benchmarks and the tests make their clusters of.

The namespaces are linked to a bridge, at which the database is reached. Data servers lie in one
directory that all hosts see; each has a replica, a burst directory and a log of its own. There are
no mount namespaces: each host mounts at a place of its own, where everybody sees it. Needs root,
and the commands ip and nsenter.
"""

import itertools
import json
import os
import select
import signal
import string
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parents[1]
AIFS = (sys.executable, "-m", "aifs.cli.main")
PEER_PORT, DATABASE_PORT = 7947, 5432
TIMEOUT_S = 120
"""For what must happen, on a machine with much else to do."""


class Failed(Exception):
    """A command, or a process that should live, has ended; with what it said."""


_networks = itertools.count()
"""Those of this process may be there at the same time."""


class Network:
    """A bridge of this machine, and network namespaces. Raises OSError, CalledProcessError."""

    def __init__(self) -> None:
        number = next(_networks)
        self._tag = f"aifs{os.getpid() % 100_000}{string.ascii_lowercase[number % 26]}"
        number = (os.getpid() + 5281 * number) % (1 << 14)
        self._subnet = f"10.{190 + (number >> 8)}.{number & 255}"
        self._count = 0
        """Of namespaces."""
        self.address = f"{self._subnet}.1"
        """Of this machine, as the namespaces see it."""
        self._bridge = f"{self._tag}b"
        try:
            # Without an address of its own it takes the lowest one of its ports, so another one
            # when a host is added: the hosts there are would talk to an address that is gone.
            own = f"02:aa:{number >> 8:02x}:{number & 255:02x}:00:01"
            _ip("link", "add", self._bridge, "address", own, "type", "bridge")
            _ip("address", "add", f"{self.address}/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
        except BaseException:
            self.close()
            raise

    def add(self) -> "Namespace":
        self._count += 1
        name, link = f"{self._tag}-{self._count}", f"{self._tag}h{self._count}"
        _ip("netns", "add", name)
        _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("link", "set", link, "master", self._bridge, "up")
        address = f"{self._subnet}.{1 + self._count}"
        inside = ("-n", name)
        _ip(*inside, "address", "add", f"{address}/24", "dev", "eth0")
        _ip(*inside, "link", "set", "eth0", "up")
        _ip(*inside, "link", "set", "lo", "up")
        return Namespace(name, link, address)

    def close(self) -> None:
        for number in range(1, self._count + 1):
            with suppress(OSError, subprocess.CalledProcessError):
                _ip("netns", "delete", f"{self._tag}-{number}")  # and its link
        with suppress(OSError, subprocess.CalledProcessError):
            _ip("link", "delete", self._bridge)


class Namespace:
    """Where a host is; ``enter`` is how a command gets there."""

    def __init__(self, name: str, link: str, address: str) -> None:
        self._link = link
        self.address = address
        self.enter = ("nsenter", f"--net=/run/netns/{name}")

    def cut(self) -> None:
        """Nothing that is sent from there or to there arrives."""
        _ip("link", "set", self._link, "down")

    def mend(self) -> None:
        _ip("link", "set", self._link, "up")

    def sent_bytes(self) -> int:
        """By all programs there, since it was made."""
        return self._counted("rx_bytes")  # by this end of the link

    def received_bytes(self) -> int:
        return self._counted("tx_bytes")

    def _counted(self, what: str) -> int:
        return int(Path(f"/sys/class/net/{self._link}/statistics/{what}").read_text())


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=TIMEOUT_S)


def host_file(name: str, directory: Path, namespace: Namespace, cluster: Mapping[str, Any]) -> str:
    """The configuration of a host: what ``cluster`` says for all, and what is its own, which lies
    below ``directory``."""
    own = {
        "meta": {**cluster["meta"], "directory": str(directory / "replica")},
        "host": {
            **cluster.get("host", {}),
            "name": name,
            "listen": f"{namespace.address}:{PEER_PORT}",
        },
        "burst": {**cluster.get("burst", {}), "directories": [str(directory / "burst")]},
        "log": {"file": str(directory / "log" / "aifs.log")},
    }
    return yaml.safe_dump({**cluster, **own})


class Database:
    """``aifs meta serve`` of ``directory``, which an ordinary user must get to. ``program``: what
    stands for the command ``aifs``."""

    def __init__(self, directory: Path, address: str, program: Sequence[str] = AIFS) -> None:
        self.said = ""
        """What it has printed last: for the configuration of hosts."""
        self._command = [*program, "meta", "serve", str(directory)]
        self._command += ["--listen", f"{address}:{DATABASE_PORT}"]
        self._log = directory.with_name(f"{directory.name}.log")
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> dict[str, Any]:
        """Returns when it serves; the section ``meta`` for hosts. Raises Failed."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=REPOSITORY,
                start_new_session=True,  # Ctrl-C is for us, who unmount all hosts first
            )
        assert self._process.stdout is not None
        lines = []
        while not lines or "secret:" not in lines[-1]:
            line = self._process.stdout.readline()
            if not line:
                raise Failed(f"the database does not start:\n{self._log.read_text()[-2000:]}")
            lines.append(line)
        self.said = "".join(lines)
        return yaml.safe_load(self.said)["meta"]

    def stop(self) -> None:
        """In order. Nothing if it does not run."""
        if self._process is None:
            return
        self._process.terminate()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process = None

    def processes(self) -> list[int]:
        """Of PostgreSQL, the first one first."""
        assert self._process is not None
        (first,) = _children(self._process.pid)
        return [first, *_children(first)]


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Host:
    """A host of the store. ``source`` is its own configuration file, ``path`` where it mounts.
    ``program``: what stands for the command ``aifs``."""

    def __init__(
        self,
        name: str,
        directory: Path,
        namespace: Namespace,
        cluster: Mapping[str, Any],
        program: Sequence[str] = AIFS,
    ) -> None:
        self.name = name
        self.namespace = namespace
        self.path = directory / "mnt"
        self.source = directory / "host.yaml"
        self.pid = 0
        """Of the daemon, as long as it lives."""
        self._program = program
        self.path.mkdir(parents=True)
        self.source.write_text(host_file(name, directory, namespace, cluster))

    def aifs(self, *words: object) -> str:
        """What a command says there. Raises Failed."""
        command = [*self.namespace.enter, *self._program, *map(str, words)]
        done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=REPOSITORY)
        if done.returncode:
            said = done.stderr.strip() or done.stdout.strip()
            raise Failed(f"{self.name}: aifs {' '.join(map(str, words))}: {said}")
        return done.stdout

    def mount(self) -> None:
        self.aifs("mount", self.source, self.path)
        self.pid = self.status()["pid"]

    def status(self) -> dict[str, Any]:
        return json.loads(os.getxattr(self.path, "user.aifs.status"))

    def unmount(self) -> None:
        self.aifs("umount", self.path)
        self.pid = 0

    def kill(self) -> None:
        """kill -9 of whatever it runs: its daemon, and commands. Its dead mount is removed."""
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if os.fsencode(self.source) in (process / "cmdline").read_bytes().split(b"\0"):
                    ended = os.pidfd_open(int(process.name))
                    signal.pidfd_send_signal(ended, signal.SIGKILL)
                    select.select([ended], [], [], TIMEOUT_S)
                    os.close(ended)
        self.pid = 0
        subprocess.run(["umount", "-l", self.path], check=False, capture_output=True)


class Cluster:
    """A new store and its hosts, which are not mounted yet. ``settings``: what the configuration
    of each host says besides."""

    def __init__(
        self,
        directory: Path,
        network: Network,
        database: Database,
        names: Sequence[str],
        settings: Mapping[str, Any],
        program: Sequence[str],
    ) -> None:
        self.database = database
        self.settings = {
            "meta": database.start(),
            "servers": [str(directory / "store" / "data" / str(number)) for number in range(4)],
            **settings,
        }
        self.hosts = [
            Host(name, directory / name, network.add(), self.settings, program) for name in names
        ]

    def live(self) -> set[str]:
        """The hosts that have a session, as the first one that is mounted knows."""
        first = next(host for host in self.hosts if host.pid)
        told = json.loads(os.getxattr(first.path, "user.aifs.hosts"))["hosts"]
        return {one["name"] for one in told if one["state"] == "live"}


@contextmanager
def cluster(
    directory: Path,
    names: Sequence[str],
    settings: Mapping[str, Any] = {},
    program: Sequence[str] = AIFS,
) -> Iterator[Cluster]:
    """Everything but what lies in ``directory`` is gone afterwards, whatever happens. Raises
    Failed; OSError, CalledProcessError where namespaces cannot be made."""
    directory.mkdir(exist_ok=True)
    os.chmod(directory, 0o711)  # PostgreSQL runs as an ordinary user
    with ExitStack() as stack:
        network = Network()
        stack.callback(network.close)
        database = Database(directory / "database", network.address, program)
        stack.callback(database.stop)
        made = Cluster(directory, network, database, names, settings, program)
        for host in made.hosts:
            stack.callback(host.kill)
        yield made


def until(condition: Any, what: str) -> None:
    """Wait for what happens by itself. Raises Failed."""
    end_s = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > end_s:
            raise Failed(f"it does not happen that {what}")
        time.sleep(0.01)


@dataclass
class Worked:
    """How often files were made, renamed and removed; how long an operation took at most; what
    went wrong."""

    rounds: int = 0
    longest_s: float = 0.0
    failed: list[OSError] = field(default_factory=list)


@contextmanager
def working(directory: Path, name: str) -> Iterator[Worked]:
    """Somebody makes, renames and removes files with names that begin with ``name`` meanwhile."""
    new, named = directory / f"{name}.new", directory / name
    told, ended = Worked(), threading.Event()
    operations = (lambda: new.write_bytes(b"x"), lambda: new.rename(named), named.unlink)

    def work() -> None:
        while not ended.is_set():
            for operation in operations:
                start_s = time.monotonic()
                try:
                    operation()
                except OSError as error:
                    told.failed.append(error)
                told.longest_s = max(told.longest_s, time.monotonic() - start_s)
            told.rounds += 1

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield told
    finally:
        ended.set()
        thread.join(TIMEOUT_S)
