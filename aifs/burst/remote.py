"""Files whose *home* is another host: their burst copies are read over the network, and files open
for writing there are changed by way of it."""

import enum
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import trio

from aifs.burst.copy import BurstCopy
from aifs.core.errors import Stale, Unavailable
from aifs.core.log import logger
from aifs.core.waiting import HOST, waits_for
from aifs.data.reading.buffers import BufferPool
from aifs.data.servers import Servers
from aifs.meta import hosts, namespace, paths
from aifs.meta.kv import Engine, ReadTransaction, Result
from aifs.meta.records import Copy
from aifs.peers.peers import Peers
from aifs.peers.transport import Answer, Body, Overloaded

READ, GIVE_UP, CARRY_OUT, SYNC = "burst.read", "burst.give_up", "burst.carry_out", "burst.sync"
DROP = "burst.drop"
EVICT, SHOW = "burst.evict", "burst.show"
REQUEST_DRAIN, DRAIN = "burst.request_drain", "burst.drain"
"""Services of a home: see files/home.py, saves/ready.py, vfs/burst_hints.py. Requests are
pushed."""


class Operation(str, enum.Enum):
    """Operations of a home on a file for a joined host, and their arguments."""

    READ = "read"
    """Offset and length; answered with the bytes."""
    WRITE = "write"
    """Offset; with the bytes."""
    APPEND = "append"
    """None; with the bytes, which are at the end of the file, in one piece."""
    TRUNCATE = "truncate"
    """Size."""
    ALLOCATE = "allocate"
    """Mode, offset and length of fallocate(2)."""
    SET_MTIME = "set_mtime"
    """Nanoseconds."""
    SYNC = "sync"
    """None: fsync(2)."""
    SHOW = "show"
    """None: its attributes are on record on return."""
    LOOK = "look"
    """None: its attributes are answered, as they are with all others."""
    LEAVE = "leave"
    """The number of the other host's last join: it writes to it no more."""


_log = logger(__name__)

_AGAIN_S = 0.2
_NAMED_MAX = 100
"""So many files of a host that cannot be asked are named in the log."""
_DRAINED_AT_ONCE = 1000  # the numbers of so many files fit into a request
_CALL_S = 600.0
"""How long a home that lives may take."""


class Homes:
    """Requests to other hosts about burst copies that lie there. Used from one trio thread."""

    def __init__(self, engine: Engine, servers: Servers, peers: Peers, wait_s: float) -> None:
        """``wait_s``: how long a home that does not answer is waited for."""
        self._engine = engine
        self._servers = servers
        self._peers = peers
        self._wait_s = wait_s
        self._away: dict[str, _Away] = {}
        """Hosts that could not be asked, by name, until they answer."""

    def of(self, server: int) -> int:
        """The host of a burst directory; 0: it is one of ours."""
        return self._servers.elsewhere.get(server, 0)

    def open(self, place: Copy, ino: int) -> "RemoteCopy":
        """Does no I/O."""
        return RemoteCopy(self, place, ino, self._servers.buffers)

    async def read(self, copy: "RemoteCopy", offset: int, memory: memoryview) -> int:
        """Fill ``memory`` from ``offset`` on; returns the bytes read. Raises Stale if the bytes are
        elsewhere now, on record here; Unavailable, naming host and file, if its home does not
        answer."""
        wanted = [*copy.place, copy.ino, offset, len(memory)]

        async def call(name: str) -> int:
            answer = await self._peers.call(name, READ, wanted, into=memory)
            assert isinstance(answer.body, bytes | bytearray | memoryview)
            got = memoryview(answer.body)
            if got.obj is not memory.obj:
                memory[: len(got)] = got
            return len(got)

        return await self._ask(self.of(copy.server), copy.ino, call, place=copy.place)

    async def give_up(
        self, host: int, ino: int, is_emptied: bool, place: Copy | None, waits: bool = True
    ) -> int:
        """Ask ``host`` to give up a file that it changes, or keeps in its burst directory.

        Returns 0 if the file is on the data servers, and no host's, on record here. Otherwise this
        host has joined its writers there: the ascending number to ``leave`` by.

        ``is_emptied``: its bytes are not needed. ``place``: its copy there, if known; None: it is
        changed in place. ``waits``: for an unreachable host. Raises Stale if the host is not its
        home any more; Unavailable, which names it.
        """

        async def call(name: str) -> int:
            asked = [ino, is_emptied]
            number: int = (await self._peers.call(name, GIVE_UP, asked, timeout_s=_CALL_S)).value
            return number

        return await self._ask(host, ino, call, waits=waits, place=place)

    async def drop(self, host: int, ino: int) -> bool:
        """Have ``host`` drop a clean copy, unless its programs use it. Whether none is left, on
        record here. Raises Unavailable."""

        async def call(name: str) -> bool:
            dropped: bool = (await self._peers.call(name, DROP, ino)).value
            return dropped

        return await self._ask(host, ino, call, waits=False)

    async def evict(self, host: int, ino: int) -> None:
        """Have ``host`` evict a clean copy, on record here on return. Raises Busy if it stays,
        Unavailable."""

        async def call(name: str) -> None:
            await self._peers.call(name, EVICT, ino)

        await self._ask(host, ino, call, waits=False)

    async def show(self, host: int, ino: int) -> None:
        """Have all writes of ``host``'s programs to the file on record here. Raises Unavailable."""

        async def call(name: str) -> None:
            await self._peers.call(name, SHOW, ino)

        await self._ask(host, ino, call, waits=False)

    async def name_of(self, host: int) -> str:
        return await self._engine.view(hosts.name_of, host)

    async def request_drain(self, host: int, inos: Sequence[int]) -> None:
        """Have a reachable ``host`` drain these files of its burst tier first."""
        name = await self.name_of(host)
        for first in range(0, len(inos), _DRAINED_AT_ONCE):
            self._peers.tell(name, REQUEST_DRAIN, list(inos[first : first + _DRAINED_AT_ONCE]))

    async def drain(self, host: int, inos: Sequence[int], strict: bool) -> None:
        """``request_drain``, and wait until each is on the capacity tier, or gone. Raises
        Unavailable; ``strict``: see Drain.wait, Busy for one open for writing there."""
        for first in range(0, len(inos), _DRAINED_AT_ONCE):
            asked = [inos[first : first + _DRAINED_AT_ONCE], strict]

            async def call(name: str, asked: list[Any] = asked) -> None:
                await self._peers.call(name, DRAIN, asked, timeout_s=math.inf)

            await self._ask(host, inos[first], call)

    async def carry_out(
        self,
        host: int,
        ino: int,
        operation: Operation,
        args: tuple[Any, ...],
        body: Body,
        place: Copy | None,
    ) -> Answer:
        """Have ``host`` do this with a file: returns bytes, and then size, blocks, mtime and ctime.
        ``place``: see ``give_up``.

        Raises Stale if this host has not joined there, or is forgotten: nothing was done;
        Unavailable, naming the host, without an answer: it may have been done, not twice if that
        matters; and errors of the operation.
        """

        async def call(name: str) -> Answer:
            asked = [ino, operation, *args]
            return await self._peers.call(name, CARRY_OUT, asked, body, timeout_s=_CALL_S)

        is_repeated, waits = operation != Operation.APPEND, operation != Operation.SHOW
        return await self._ask(host, ino, call, is_repeated, waits, place)

    async def leave(self, host: int, ino: int, number: int) -> None:
        """End this host's join of this ``number``; no effect after a later join. Raises Stale,
        Unavailable."""

        async def call(name: str) -> None:
            await self._peers.call(name, CARRY_OUT, [ino, Operation.LEAVE, number])

        await self._ask(host, ino, call, waits=False)

    async def sync(self, host: int, inos: Sequence[int]) -> None:
        """Have ``host`` sync these files, or all below these directories: durable, and on record
        here. Raises Unavailable, and errors of a sync."""

        async def call(name: str) -> None:
            await self._peers.call(name, SYNC, list(inos), timeout_s=_CALL_S)

        await self._ask(host, inos[0], call)

    async def _ask(
        self,
        host: int,
        ino: int,
        call: Callable[[str], Awaitable[Result]],
        is_repeated: bool = True,
        waits: bool = True,
        place: Copy | None = None,
    ) -> Result:
        """``is_repeated``: also if it may be done. ``waits``: for an unreachable host. ``place``:
        raises Stale without an answer if the file has another copy by now: its mirror's host is its
        home."""
        name = await self.name_of(host)
        now = trio.current_time()
        # A caller that has waited in vain does not wait again at once: the kernel asks once more
        # for a page that it has not got from its read-ahead.
        away = self._away.get(name)
        is_waited_for = waits
        waits = waits and (away is None or now >= away.until_s)
        until_s = now + self._wait_s if waits else now
        with waits_for(f"{HOST} {name}"):
            while True:
                is_asked = name in self._peers.connected
                try:
                    if not is_asked:
                        raise Unavailable(f"host {name} is not connected")
                    answer = await call(name)
                    self._away.pop(name, None)
                    return answer
                except Overloaded:
                    pass
                except Unavailable as error:
                    if place is not None and await self._engine.view(_find_copy, ino) != place:
                        raise Stale(f"inode {ino} has another home") from None
                    is_over = trio.current_time() >= until_s
                    if is_over or (is_asked and not is_repeated):
                        fault = (
                            f"inode {ino}: its newest bytes are on host {name}, which cannot be "
                            f"asked: {error}"
                        )
                        if is_over and is_waited_for:
                            await self._note_away(name, ino, waits, fault)
                        raise Unavailable(fault) from error
                await trio.sleep(_AGAIN_S)

    async def _note_away(self, name: str, ino: int, waited: bool, fault: str) -> None:
        """Name the file in the log: a program hears EIO alone. ``waited``: until now."""
        away = self._away.setdefault(name, _Away())
        if waited:
            away.until_s = trio.current_time() + self._wait_s
        if ino not in away.named and len(away.named) < _NAMED_MAX:
            away.named.add(ino)
            path = await self._engine.view(paths.describe, ino)
            _log.warning("%s: %s", path, fault)


class _Away:
    """A host that cannot be asked."""

    __slots__ = ("named", "until_s")

    def __init__(self) -> None:
        self.until_s = 0.0
        """Until then it is not waited for."""
        self.named: set[int] = set()
        """Files that the log has named."""


def _find_copy(tx: ReadTransaction, ino: int) -> Copy | None:
    inode = namespace.find_inode(tx, ino)
    return None if inode is None else inode.copy


class RemoteCopy(BurstCopy):
    """Reads of a copy on another host. A BurstCopy's other methods are its home's: files are given
    up before they are changed here."""

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
