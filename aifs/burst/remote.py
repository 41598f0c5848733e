"""Burst copies in directories of other hosts, the *homes* of their files: read over the network."""

from collections.abc import Awaitable, Callable, Sequence

import trio

from aifs.burst.copy import BurstCopy
from aifs.core.errors import Unavailable
from aifs.data.reading.buffers import BufferPool
from aifs.data.servers import Servers
from aifs.meta import hosts
from aifs.meta.kv import Engine, Result
from aifs.meta.records import Copy
from aifs.peers.peers import Peers

READ, GIVE_UP, SYNC = "burst.read", "burst.give_up", "burst.sync"
"""Services of a home: see files/home.py, and vfs/publishing/barrier.py."""

_AGAIN_S = 0.2
_GIVE_UP_S = 600.0


class Homes:
    """What this host asks of others about burst copies that lie there. Used from one trio
    thread.
    """

    def __init__(
        self, engine: Engine, servers: Servers, peers: Peers | None, wait_s: float
    ) -> None:
        """``peers``: None where the store has one host. ``wait_s``: how long a home that does not
        answer is waited for."""
        self._engine = engine
        self._servers = servers
        self._peers = peers
        self._wait_s = wait_s

    def of(self, server: int) -> int:
        """The host of a burst directory; 0: it is one of ours."""
        return self._servers.elsewhere.get(server, 0)

    def open(self, place: Copy, ino: int) -> "RemoteCopy":
        """Does no I/O."""
        return RemoteCopy(self, place, ino, self._servers.buffers)

    async def read(self, copy: "RemoteCopy", offset: int, memory: memoryview) -> int:
        """Fill ``memory`` from ``offset`` on; how many bytes there were. Raises Stale if the file
        has its bytes elsewhere by now, which is on record here then; Unavailable, which names the
        host and the file, if its home does not answer.
        """
        wanted = [*copy.place, copy.ino, offset, len(memory)]

        async def call(peers: Peers, name: str) -> int:
            answer = await peers.call(name, READ, wanted, into=memory)
            assert isinstance(answer.body, bytes | bytearray | memoryview)
            got = memoryview(answer.body)
            if got.obj is not memory.obj:
                memory[: len(got)] = got
            return len(got)

        return await self._ask(self.of(copy.server), copy.ino, call)

    async def give_up(self, host: int, ino: int) -> None:
        """A file that ``host`` changes, or keeps in its burst directory, is on the data servers on
        return, and nobody's; that is on record here.

        Raises Busy, which names the host, while it is open for writing there; Unavailable.
        """

        async def call(peers: Peers, name: str) -> None:
            await peers.call(name, GIVE_UP, [ino], timeout_s=_GIVE_UP_S)

        await self._ask(host, ino, call)

    async def sync(self, host: int, inos: Sequence[int]) -> None:
        """What ``host`` has not synced of these files, or below these directories, is durable on
        return; that is on record here. Raises Unavailable, what else a sync raises."""

        async def call(peers: Peers, name: str) -> None:
            await peers.call(name, SYNC, list(inos), timeout_s=_GIVE_UP_S)

        await self._ask(host, inos[0], call)

    async def _ask(
        self, host: int, ino: int, call: Callable[[Peers, str], Awaitable[Result]]
    ) -> Result:
        name = await self._engine.view(hosts.name_of, host)
        if self._peers is None:
            raise Unavailable(f"inode {ino}: its newest bytes are on host {name}")
        until_s = trio.current_time() + self._wait_s
        while True:
            try:
                return await call(self._peers, name)
            except Unavailable as error:
                if trio.current_time() >= until_s:
                    raise Unavailable(
                        f"inode {ino}: its newest bytes are on host {name}, which does not give "
                        f"them: {error}"
                    ) from error
            await trio.sleep(_AGAIN_S)


class RemoteCopy(BurstCopy):
    """Reads of a copy that lies on another host. What else a BurstCopy does is its home's business;
    only who changes a file asks for it, and the file is given up before."""

    def __init__(self, homes: Homes, place: Copy, ino: int, buffers: BufferPool) -> None:
        self._homes = homes
        self._place = place
        self.id = place.id
        self.ino = ino
        """Whose copy it is."""
        self._buffers = buffers
        self.lost = ""  # nothing is written from here

    @property
    def server(self) -> int:
        return self._place.server

    @property
    def place(self) -> Copy:
        return self._place

    @property
    def is_open(self) -> bool:
        return False

    async def read(self, offset: int, length: int) -> memoryview:
        """As BurstCopy.read. Raises Stale if the file has its bytes elsewhere by now."""
        buffer = self._buffers.take(length)
        return buffer[: await self._homes.read(self, offset, buffer)]

    async def data_range(self, offset: int, size: int) -> tuple[int, int]:
        """All is data, as far as is known here."""
        return offset, size

    def close(self, removed: bool = False) -> None:
        pass

    def close_idle(self) -> int:
        return 0
