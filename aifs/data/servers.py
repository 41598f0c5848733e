"""The data servers and burst directories of a store."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from aifs.core.budget import Budget
from aifs.core.errors import FsError, StoreError, Unavailable
from aifs.data.buffers import BufferPool
from aifs.data.read_cache import ReadCache
from aifs.data.server import DataServer, Space
from aifs.data.workers import Completions, Workers, gather
from aifs.layout.placement import BURST_FIRST

BUDGET = 512 << 20


class Servers:
    """The registered data servers, and from id BURST_FIRST on the burst directories. Used from one trio thread.

    Files are striped over the data servers alone (``capacity``), which also make up the space that users see;
    everything else here means both kinds. Each has worker threads of its own, so that one that hangs cannot hold up
    what lies on others. Those of the data servers are together about ``threads``, but none has less than two.
    """

    def __init__(
        self, table: Mapping[int, str], store: str, threads: int = 16, budget: Budget | None = None
    ) -> None:
        """``table``: id to absolute path; ``store``: uuid. Does no I/O: call ``check_identity`` next."""
        self.buffers = BufferPool()
        self.budget = budget or Budget(BUDGET)
        self.cache = ReadCache(self.budget)
        self._store = store
        self._completions = Completions()
        self._threads = threads
        self._limit = max(2, -(-threads // max(sum(number < BURST_FIRST for number in table), 1)))
        self._read_only = False
        self._servers = {number: self._new(number, table[number]) for number in sorted(table)}

    def _new(self, number: int, path: str) -> DataServer:
        name, limit = f"aifs-data-{number}", self._limit
        if number >= BURST_FIRST:
            name, limit = f"aifs-burst-{number - BURST_FIRST}", self._threads
        return DataServer(number, path, self._store, Workers(name, limit, self._completions))

    def __getitem__(self, number: int) -> DataServer:
        try:
            return self._servers[number]
        except KeyError:
            kind = "data server" if number < BURST_FIRST else "burst directory"
            number %= BURST_FIRST
            raise Unavailable(f"{kind} {number} is not registered in this store") from None

    def __iter__(self) -> Iterator[int]:
        return iter(self._servers)

    def __len__(self) -> int:
        return len(self._servers)

    def values(self) -> Iterable[DataServer]:
        return self._servers.values()

    def capacity(self) -> tuple[DataServer, ...]:
        """The data servers, by ascending id."""
        return tuple(server for server in self._servers.values() if server.role == "data")

    def burst(self) -> tuple[DataServer, ...]:
        """The burst directories, by ascending id."""
        return tuple(server for server in self._servers.values() if server.role == "burst")

    def usable(self) -> tuple[int, ...]:
        """Ids of the data servers that new files should use, ascending: those that do not fail, or all if all do."""
        usable = tuple(server.id for server in self.capacity() if server.health.usable)
        return usable or tuple(server.id for server in self.capacity())

    def drop(self, number: int) -> None:
        """Do without this one, which has not been used."""
        del self._servers[number]

    def check_identity(self, read_only: bool = False) -> None:
        """Each directory is there, carries the right marker, is writable, and is used once.

        Blocks. Raises StoreError, which names the directory, what is wrong and what to do.
        """
        self._read_only = read_only
        seen: dict[tuple[int, int], DataServer] = {}
        for server in self._servers.values():
            if os.path.isdir(server.path):
                status = os.stat(server.path)
                other = seen.setdefault((status.st_dev, status.st_ino), server)
                if other is not server:
                    raise StoreError(
                        f"{server.name}: {server.path} is the directory of {other.name} "
                        f"({other.path}) too; each needs its own"
                    )
            server.identify(read_only)

    def add(self, number: int, path: str) -> DataServer:
        """Take in a directory that carries its marker; new files may use it. Blocks. Raises StoreError."""
        server = self._new(number, path)
        server.identify(self._read_only)
        self._servers = dict(sorted((self._servers | {number: server}).items()))
        return server

    # --- calls ---

    async def run(self, server: DataServer, function: Callable[..., Any], *args: Any) -> Any:
        """``function(*args)`` in a worker thread of ``server``. Not cancellable."""
        return (await gather([(server.workers, function, args)]))[0]

    async def sync_all(self) -> None:
        """All that was written before is durable on return, on the servers that work.

        Raises Unavailable or NoSpace, after all servers have been tried, if one has failed.
        """
        await gather([(s.workers, s.sync_all, ()) for s in self._servers.values()])

    async def spaces(self, servers: Sequence[DataServer]) -> list[Space | None]:
        """The space of each server's filesystem; None where it cannot be told."""
        return await gather([(server.workers, _space_or_none, (server,)) for server in servers])

    async def statfs(self) -> Space:
        """The space of all data servers that work, each filesystem counted once."""
        servers = self.capacity()
        spaces = await self.spaces(servers)
        by_device = {server.device: space for server, space in zip(servers, spaces, strict=True) if space is not None}
        return Space(*(sum(getattr(space, field) for space in by_device.values()) for field in Space._fields))

    async def status(self) -> list[dict[str, Any]]:
        """For ``aifs status``: role, id in it, path, state, used_bytes, free_bytes (None: unknown), last_error."""
        servers = tuple(self._servers.values())
        return [_status(*pair) for pair in zip(servers, await self.spaces(servers), strict=True)]

    def close(self) -> None:
        """End the worker threads, when what they have been given is done. Blocks."""
        for server in self._servers.values():
            server.workers.close()


def _status(server: DataServer, space: Space | None) -> dict[str, Any]:
    return {
        "role": server.role,
        "id": server.number,
        "path": server.path,
        "state": server.state,
        "used_bytes": space.total - space.free if space else None,
        "free_bytes": space.available if space else None,
        "last_error": server.last_error,
    }


def _space_or_none(server: DataServer) -> Space | None:
    try:
        return server.space()
    except FsError:
        return None
