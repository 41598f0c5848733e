"""Several hosts of one store in the test's process: each has a replica of the map, which is never
behind, and burst directories of its own; they call each other without a network.
"""

import os
import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import pytest
import trio

from aifs.core.config import Config
from aifs.core.errors import Unavailable
from aifs.core.upkeep import Role
from aifs.layout.placement import BURST_FIRST
from aifs.meta.kv import ReadTransaction, Result, Transaction
from aifs.meta.lmdb_engine import LmdbEngine
from aifs.meta.memtable import LeveledTransaction, LeveledView
from aifs.meta.servers import ServerRecord, get_server, put_server
from aifs.peers.transport import Answer, FilePart, Peer
from aifs.store import directories, ownership, store
from aifs.vfs import Filesystem, lifecycle, open_filesystem
from tests.support import modes, stores
from tests.support.engines import put_all


class _Transaction(LeveledTransaction):
    __slots__ = ("host",)


class _View(LeveledView):
    __slots__ = ("host",)


class Replica(LmdbEngine):
    """A host's replica of the map. What it changes is in all others before the call returns."""

    cluster: "Cluster"

    async def view(self, function: Callable[..., Result], *args: Any) -> Result:
        view = _View(self._memtable, self._frozen, self.database, self.seq)
        view.host = self.host
        return function(view, *args)

    async def transact(self, function: Callable[..., Result], *args: Any) -> Result:
        attempt = _Transaction(self._memtable, self._frozen, self.database, self.seq + 1)
        attempt.host = self.host
        result = function(attempt, *args)
        if attempt.writes:
            for engine in self.cluster.engines:
                await LmdbEngine.transact(engine, put_all, attempt.writes)
            for engine in self.cluster.engines:
                if engine is not self:
                    for follower in engine.followers:
                        follower(attempt.writes)
        return result

    followers: list[Callable[[Mapping[bytes, bytes | None]], None]]

    def follow(self, follower: Callable[[Mapping[bytes, bytes | None]], None]) -> None:
        self.followers.append(follower)


class Calls:
    """The peers of a host, without a network."""

    is_shared = True

    def __init__(self, cluster: "Cluster", name: str) -> None:
        self._cluster = cluster
        self._name = name
        self.services: dict[str, Any] = {}
        self.listeners: dict[str, Any] = {}

    def close(self) -> None:
        pass

    def hear(self, name: str, listener: Any) -> None:
        self.listeners[name] = listener

    def tell(self, host: str, name: str, arguments: Any = None, body: bytes = b"") -> None:
        if host not in self._cluster.silent and host in self._cluster.calls:
            self._cluster.calls[host].listeners[name](
                Peer("", self._name, self.session), arguments, body
            )

    def serve(self, name: str, service: Any) -> None:
        self.services[name] = service

    @property
    def session(self) -> int:
        return self._cluster.number(self._name)

    @property
    def sessions(self) -> dict[int, str]:
        return {self._cluster.number(name): name for name in self._cluster.calls}

    @property
    def connected(self) -> dict[str, int]:
        silent = self._cluster.silent
        there = set() if self._name in silent else self._cluster.calls.keys() - silent
        return {name: self._cluster.number(name) for name in there if name != self._name}

    async def call(
        self,
        host: str,
        name: str,
        arguments: Any = None,
        body: bytes = b"",
        *,
        session: int = 0,
        into: memoryview | None = None,
        timeout_s: float = 5.0,
    ) -> Answer:
        await trio.lowlevel.checkpoint()
        if host in self._cluster.silent or host not in self._cluster.calls:
            raise Unavailable(f"host {host} is not there")
        answer = await self._cluster.calls[host].services[name](
            Peer("", self._name, self.session), arguments, body
        )
        if isinstance(answer.body, FilePart):
            part = answer.body
            try:
                data = os.pread(part.fd, part.length, part.offset)
            finally:
                os.close(part.fd)
            assert into is not None and len(data) == part.length
            into[: len(data)] = data
            return Answer(answer.value, into[: len(data)])
        return answer


class Cluster:
    """A store in ``directory`` for hosts of these names; the first one that mounts it has the
    role."""

    def __init__(self, directory: Path, names: tuple[str, ...], settings: Mapping[str, Any]):
        self.directory = directory
        self.names = names
        self.engines: list[Replica] = []
        self.calls: dict[str, Calls] = {}
        self.silent: set[str] = set()
        """Hosts that do not answer."""
        self.roles: dict[str, Role] = {}
        self.bandwidths: dict[str, int] = {}
        """``host.bandwidth`` of hosts that are mounted from now on."""
        self.last = ""
        """The host that was unmounted last."""
        if not directory.exists():
            self._make(settings)

    def _make(self, settings: Mapping[str, Any]) -> None:
        modes.make_store(self.directory, settings)
        config = modes.config_of(self.directory)
        identity = directories.read_marker(config.meta.directory).store
        engine = LmdbEngine(config.meta.directory)

        def number(tx: Transaction) -> None:
            first = get_server(tx, BURST_FIRST)
            assert first is not None
            put_server(tx, BURST_FIRST, ServerRecord(first.path, host=1))
            for name in self.names[1:]:
                server = BURST_FIRST + self.number(name) - 1
                put_server(tx, server, ServerRecord(f"burst-{name}", host=self.number(name)))

        trio.run(engine.transact, number)
        engine.close()
        for name in self.names[1:]:
            burst = self.directory / f"burst-{name}"
            burst.mkdir()
            directories.mark(str(burst), identity, "burst", self.number(name) - 1)
            shutil.copytree(config.meta.directory, self.directory / f"meta-{name}")

    def number(self, name: str) -> int:
        return self.names.index(name) + 1

    def config(self, name: str) -> Config:
        config = modes.config_of(self.directory)
        own_host = {"name": name, "bandwidth": self.bandwidths.get(name, 0)}
        host, meta = config.host.model_copy(update=own_host), config.meta
        if name != self.names[0]:
            own = str(self.directory / f"meta-{name}")
            meta = meta.model_copy(update={"directory": own})
        return config.model_copy(update={"meta": meta, "host": host})

    @asynccontextmanager
    async def mounted(self, name: str) -> AsyncIterator[Filesystem]:
        """The filesystem of one host. Others may be mounted all the while."""
        engine: Replica | None = None

        def open_engine(*args: Any, **kwargs: Any) -> Replica:
            nonlocal engine
            engine = Replica(*args, **kwargs)
            engine.cluster, engine.host, engine.followers = self, self.number(name), []
            self.engines.append(engine)
            return engine

        async def open_store(*args: Any, **kwargs: Any) -> store.Store:
            with patch.object(store, "LmdbEngine", open_engine):
                opened = await real(*args, **kwargs)
            self.roles[name] = opened.role = Role(self._ask_live)
            opened.peers = self.calls[name] = Calls(self, name)  # type: ignore[assignment]
            self.tell()
            return opened

        real = lifecycle.open_store
        await self._bring_up(name)
        try:
            async with AsyncExitStack() as stack:
                with patch.object(lifecycle, "open_store", open_store):
                    fs = await stack.enter_async_context(open_filesystem(self.config(name)))
                yield fs
        finally:
            if engine is not None:
                self.engines.remove(engine)
            self.last = name
            self.calls.pop(name, None)
            self.roles.pop(name, None)
            self.tell()

    async def _bring_up(self, name: str) -> None:
        """The replica of a host that mounts is what others have made of the map meanwhile."""
        if not self.engines:
            return
        engine = LmdbEngine(self.config(name).meta.directory)
        old, new = [dict(await e.view(_read_all)) for e in (engine, self.engines[0])]
        await engine.transact(put_all, dict.fromkeys(old) | new)
        engine.close()

    def tell(self) -> None:
        """Sessions have begun or ended."""
        for place, role in enumerate(self.roles.values()):
            role.tell(place == 0, frozenset(map(self.number, self.roles)))

    async def _ask_live(self) -> frozenset[int]:
        return frozenset(map(self.number, self.roles))


def _read_all(tx: ReadTransaction) -> list[tuple[bytes, bytes]]:
    return list(tx.range(b"\0", b"\xff" * 16))


class _Nobodys(ownership.Ownership):
    """Sessions say who may use the store."""

    async def take(self, force: bool = False) -> None:
        pass

    async def run(self) -> None:
        await trio.sleep_forever()

    def give_back(self) -> None:
        pass


NAMES = ("north", "south")
LIMIT_S = 60


@asynccontextmanager
async def cluster_of(
    directory: Path,
    settings: Mapping[str, Any] = MappingProxyType({}),
    names: tuple[str, ...] = NAMES,
) -> AsyncIterator[Cluster]:
    """A new store for these hosts, none of them mounted. Afterwards fsck finds nothing in it, as
    the host sees it that was mounted last."""
    with patch.object(store, "Ownership", _Nobodys), trio.fail_after(LIMIT_S):
        cluster = await trio.to_thread.run_sync(
            Cluster, directory, names, {**modes.WAITING, **settings}
        )
        yield cluster
        await stores.require_sound(cluster.config(cluster.last))


@asynccontextmanager
async def two_hosts(
    directory: Path, settings: Mapping[str, Any] = MappingProxyType({})
) -> AsyncIterator[tuple[Filesystem, Filesystem, Cluster]]:
    """Both hosts of a new store, mounted, the first one with the role."""
    async with cluster_of(directory, settings) as cluster:
        async with cluster.mounted(NAMES[0]) as north, cluster.mounted(NAMES[1]) as south:
            yield north, south, cluster


@pytest.fixture
async def cluster(request: pytest.FixtureRequest, directory: Path) -> AsyncIterator[Cluster]:
    """The test's store, not mounted; a mark ``store`` has its settings."""
    async with cluster_of(directory, *stores.marked(request)[0]) as cluster:
        yield cluster


@pytest.fixture
async def north(cluster: Cluster) -> AsyncIterator[Filesystem]:
    """The first host of ``cluster``, which has the role."""
    async with cluster.mounted(NAMES[0]) as fs:
        yield fs


@pytest.fixture
async def south(cluster: Cluster, north: Filesystem) -> AsyncIterator[Filesystem]:
    """The second host of ``cluster``."""
    async with cluster.mounted(NAMES[1]) as fs:
        yield fs
