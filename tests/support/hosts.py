"""Many hosts of one store, on one machine: each is a real mount in a network namespace of its own
(scripts/machines.py).
"""

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import pytest
import yaml

from scripts.machines import Namespace, Network, host_file
from tests.support.mounts import TIMEOUT_S, Mounted, aifs
from tests.support.postgres import Postgres, TestDatabase

LEASE_S = 10.0
SERVERS = 2

Settings = Mapping[str, Mapping[str, object]]
Both = tuple[Path, Path]
"""A directory, as either of two hosts has it."""


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
        self.expected = [
            r"session: .* is not in use: ",
            # A busy machine, or a test that stops the database.
            r"does not answer since|lease of this host is without doubt again",
            # The test has ended, or cut off, the other host.
            r"its newest bytes are on host .*, which cannot be asked",
        ]
        self.descriptors = 0
        self.module = "aifs.cli.main"
        self.inside = namespace.enter
        self.pid = 0
        self._ended = -1
        self.path.mkdir(parents=True)
        self.source.write_text(host_file(name, directory, namespace, cluster))

    def configure(self, section: str, name: str, value: object) -> None:
        """Before it mounts."""
        tree = yaml.safe_load(self.source.read_text())
        tree.setdefault(section, {})[name] = value
        self.source.write_text(yaml.safe_dump(tree))

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


def until(condition: Callable[[], object], what: str) -> None:
    """Wait for what happens by itself."""
    end_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end_s, f"it does not happen that {what}"
        time.sleep(0.01)


class Cluster:
    """The hosts of a store. Iterable, in the order of their names: a, b, c, ..."""

    def __init__(
        self,
        directory: Path,
        network: Network,
        postgres: Postgres,
        database: TestDatabase,
        settings: Settings = MappingProxyType({}),
    ) -> None:
        """``settings``: of the hosts' configuration, by section. ``at`` in ``servers`` of these:
        addresses, with ``{}`` for that of this machine in the network."""
        addresses = settings.get("servers", {}).get("at", [])
        self.postgres = postgres
        self.network = network
        self._directory = directory
        self._hosts: list[Host] = []
        meta = {
            "engine": "postgresql",
            "url": database.url.replace("127.0.0.1", network.address),
            "secret": database.secret_file,
        }
        self._settings: dict[str, object] = {
            **settings,
            "meta": {**settings.get("meta", {}), **meta},
            "servers": [address.format(network.address) for address in addresses]
            or [str(directory / "data" / str(number)) for number in range(SERVERS)],
            "data": {"movers": 0, **settings.get("data", {})},
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

    @property
    def paths(self) -> list[Path]:
        """Where they are mounted."""
        return [host.path for host in self._hosts]

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
    directory: Path,
    postgres: Postgres,
    count: int = 2,
    mounted: bool = True,
    settings: Settings = MappingProxyType({}),
) -> Iterator[Cluster]:
    """A new store of many hosts below ``directory``; at the end they are unmounted, and it is
    checked."""
    with network() as made, postgres.new_database() as database:
        cluster = Cluster(directory, made, postgres, database, settings)
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


def require_same(places: Sequence[Path]) -> None:
    """A directory is the same on all hosts, at the latest when what they do there is shown."""
    for number, place in enumerate(places):
        (place / f"of {number}").write_bytes(b"")
        (place / f"of {number}").unlink()
    trees = [_tree(place) for place in places]
    assert all(found == trees[0] for found in trees)


def _tree(root: Path) -> dict[str, object]:
    return {
        os.path.relpath(os.path.join(path, name), root): (
            os.lstat(os.path.join(path, name)).st_ino,
            os.lstat(os.path.join(path, name)).st_nlink,
        )
        for path, directories, names in os.walk(root)
        for name in directories + names
    }
