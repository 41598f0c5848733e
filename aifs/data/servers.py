"""The data servers of a store."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from aifs.core.errors import FsError, StoreError, Unavailable
from aifs.data.buffers import BufferPool
from aifs.data.server import DataServer, Space
from aifs.data.workers import Completions, Workers, gather


class Servers:
    """The registered data servers by id. Used from one trio thread.

    Each server has worker threads of its own, so that one that hangs cannot hold up what lies on others.
    Together they are about ``threads``, but no server has less than two.
    """

    def __init__(self, table: Mapping[int, str], store: str, threads: int = 16) -> None:
        """``table``: id to absolute path; ``store``: uuid. Does no I/O: call ``check_identity`` next."""
        self.buffers = BufferPool()
        self._store = store
        self._completions = Completions()
        self._limit = max(2, -(-threads // max(len(table), 1)))
        self._read_only = False
        self._servers = {number: self._new(number, table[number]) for number in sorted(table)}

    def _new(self, number: int, path: str) -> DataServer:
        workers = Workers(f"aifs-data-{number}", self._limit, self._completions)
        return DataServer(number, path, self._store, workers)

    def __getitem__(self, number: int) -> DataServer:
        try:
            return self._servers[number]
        except KeyError:
            raise Unavailable(f"data server {number} is not registered in this store") from None

    def __iter__(self) -> Iterator[int]:
        return iter(self._servers)

    def __len__(self) -> int:
        return len(self._servers)

    def values(self) -> Iterable[DataServer]:
        return self._servers.values()

    def usable(self) -> tuple[int, ...]:
        """Ids of the servers that new files should use, ascending: those that do not fail, or all if all do."""
        usable = tuple(number for number, server in self._servers.items() if server.health.usable)
        return usable or tuple(self._servers)

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
                        f"data server {server.id}: {server.path} is the directory of data server {other.id} "
                        f"({other.path}) too; each needs its own"
                    )
            server.identify(read_only)

    def add(self, number: int, path: str) -> DataServer:
        """Register a directory that carries its marker; new files may use it. Blocks. Raises StoreError."""
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

    async def spaces(self) -> dict[int, Space | None]:
        """The space of each server's filesystem; None where it cannot be told."""
        servers = self._servers
        calls = [(s.workers, _space_or_none, (s,)) for s in servers.values()]
        return dict(zip(servers, await gather(calls), strict=True))

    async def statfs(self) -> Space:
        """The space of all servers that work, each filesystem counted once."""
        spaces = await self.spaces()
        by_device = {self[number].device: space for number, space in spaces.items() if space is not None}
        return Space(*(sum(getattr(space, field) for space in by_device.values()) for field in Space._fields))

    async def status(self) -> list[dict[str, Any]]:
        """What ``aifs status`` shows: id, path, state, used_bytes, free_bytes (None: unknown), last_error."""
        return [_status(self[number], space) for number, space in (await self.spaces()).items()]

    def close(self) -> None:
        """End the worker threads, when what they have been given is done. Blocks."""
        for server in self._servers.values():
            server.workers.close()


def _status(server: DataServer, space: Space | None) -> dict[str, Any]:
    return {
        "id": server.id,
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
