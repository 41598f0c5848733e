"""Many hosts of one store, on one machine: each is a real mount in a network namespace of its own.

The namespaces are linked to a bridge, at which PostgreSQL is reached. Data servers lie in one
directory that all hosts see; each has a replica, a burst directory and a log of its own. There are
no mount namespaces: each host mounts at a place of its own, where the test sees it.
"""

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import yaml

from tests.support.mounts import TIMEOUT_S, Mounted, aifs
from tests.support.postgres import Postgres, TestDatabase

PORT = 7947
LEASE_S = 10.0
SERVERS = 2

Both = tuple[Path, Path]
"""A directory, as either of two hosts has it."""


class Network:
    """A bridge of this machine, and network namespaces. Needs root."""

    def __init__(self) -> None:
        self._tag = f"aifs{os.getpid() % 100_000}"
        number = os.getpid() % (1 << 14)
        self._subnet = f"10.{190 + (number >> 8)}.{number & 255}"
        self._count = 0
        """Of namespaces."""
        self.address = f"{self._subnet}.1"
        """Of this machine, as the namespaces see it."""
        self._bridge = f"{self._tag}b"
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("address", "add", f"{self.address}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")

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
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", f"{self._tag}-{number}")  # and its link
        with suppress(subprocess.CalledProcessError):
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


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=TIMEOUT_S)


class Host(Mounted):
    """A host of the store and its mount. ``source`` is its own configuration file."""

    def __init__(
        self, name: str, directory: Path, namespace: Namespace, cluster: dict[str, object]
    ) -> None:
        self.name = name
        self.namespace = namespace
        self.path = directory / "mnt"
        self.source = directory / "host.yaml"
        self.log = directory / "log" / "aifs.log"
        self.options = ()
        self.expected = [r"session: .* is not in use: "]
        self.descriptors = 0
        self.module = "aifs.cli.main"
        self.inside = namespace.enter
        self.pid = 0
        self._ended = -1
        self.path.mkdir(parents=True)
        own = {
            "meta": {**_section(cluster, "meta"), "directory": str(directory / "replica")},
            "host": {"name": name, "listen": f"{namespace.address}:{PORT}"},
            "burst": {"directories": [str(directory / "burst")]},
            "log": {"file": str(self.log)},
        }
        self.source.write_text(yaml.safe_dump({**cluster, **own}))

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        """A command at that host."""
        return subprocess.run(
            [*self.inside, *map(str, command)],
            check=False,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )

    def print_log(self) -> None:
        if self.log.exists():
            print(f"--- the log of {self.name}\n{self.log.read_text()[-10_000:]}")

    def wait_for_log(self, pattern: str) -> None:
        """Until a line of its log matches. It is expected then."""
        self.expected.append(pattern)
        until(lambda: re.search(pattern, self.log.read_text()), f"{self.name} says {pattern!r}")


def _section(cluster: dict[str, object], name: str) -> dict[str, object]:
    section = cluster[name]
    assert isinstance(section, dict)
    return section


def until(condition: Callable[[], object], what: str) -> None:
    """Wait for what happens by itself."""
    end_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end_s, f"it does not happen that {what}"
        time.sleep(0.01)


class Cluster:
    """The hosts of a store. Iterable, in the order of their names: a, b, c, ..."""

    def __init__(
        self, directory: Path, network: Network, postgres: Postgres, database: TestDatabase
    ) -> None:
        self.postgres = postgres
        self.network = network
        self._directory = directory
        self._hosts: list[Host] = []
        self._settings: dict[str, object] = {
            "meta": {
                "engine": "postgresql",
                "url": database.url.replace("127.0.0.1", network.address),
                "secret": database.secret_file,
            },
            "servers": [str(directory / "data" / str(number)) for number in range(SERVERS)],
            "data": {"movers": 0},
        }

    def add(self, name: str = "") -> Host:
        """A host that is not mounted yet; the first one makes the store."""
        name = name or "abcdefgh"[len(self._hosts)]
        host = Host(name, self._directory / name, self.network.add(), self._settings)
        if not self._hosts:
            aifs("format", host.source, inside=host.inside)
        self._hosts.append(host)
        return host

    @contextmanager
    def another(self, name: str) -> Iterator[Host]:
        """One more host, not mounted yet, for what the others must not suffer. Afterwards it is
        unmounted, its log is checked, and it is none of the hosts any more."""
        host = self.add(name)
        try:
            yield host
            if host.is_mounted():
                host.unmount()
            host.check_log()
        except BaseException:
            host.print_log()
            raise
        finally:
            host.abandon()
            self._hosts.remove(host)

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def __getitem__(self, index: int) -> Host:
        return self._hosts[index]

    def live(self, host: Host) -> set[str]:
        """The hosts that have a session, as one of them says."""
        told = json.loads(os.getxattr(host.path, "user.aifs.hosts"))
        return {one["name"] for one in told["hosts"] if one["state"] == "live"}

    def finish(self) -> None:
        """Unmount all; the store has no fault, and the logs tell of none."""
        for host in self._hosts:
            if host.is_mounted():
                host.unmount()
        aifs("fsck", self._hosts[0].source, inside=self._hosts[0].inside)
        for host in self._hosts:
            host.check_log()

    def print_logs(self) -> None:
        for host in self._hosts:
            host.print_log()

    def abandon(self) -> None:
        for host in self._hosts:
            host.abandon()


@contextmanager
def network() -> Iterator[Network]:
    """Skips the test where namespaces cannot be made."""
    made = None
    try:
        try:
            made = Network()
        except (OSError, subprocess.CalledProcessError) as error:
            why = getattr(error, "stderr", b"") or str(error).encode()
            pytest.skip(f"no network namespaces can be made here: {why.decode().strip()}")
        yield made
    finally:
        if made is not None:
            made.close()


@contextmanager
def many_hosts(
    directory: Path, postgres: Postgres, count: int = 2, mounted: bool = True
) -> Iterator[Cluster]:
    """A new store of many hosts below ``directory``; at the end they are unmounted, and it is
    checked."""
    with network() as made, postgres.new_database() as database:
        cluster = Cluster(directory, made, postgres, database)
        try:
            for _ in range(count):
                cluster.add()
            for host in cluster if mounted else ():
                host.mount()
            yield cluster
            cluster.finish()
        except BaseException:
            cluster.print_logs()  # which pytest shows
            raise
        finally:
            cluster.abandon()
