"""What this host does for others with files that have their newest bytes here: it reads them, and
gives them up.
"""

from typing import Any

import trio

from aifs.burst.remote import GIVE_UP, READ
from aifs.burst.tier import BurstTier
from aifs.core.errors import Busy, Stale
from aifs.data.server import DataServer, MissingObject
from aifs.data.servers import Servers
from aifs.files.drain import Drain
from aifs.files.file_io import FileIO
from aifs.files.writeback import WriteBack
from aifs.meta import hosts, namespace
from aifs.meta.kv import Engine, ReadTransaction
from aifs.meta.records import Copy
from aifs.peers.peers import Peers
from aifs.peers.transport import Answer, Body, FilePart, Peer

_CLOSING_S = 0.1
"""How long a file that is open for writing is waited for: close(2) returns before we hear of it."""

_LOOK_S = 0.002


class Home:
    """Answers Homes of other hosts. Used from one trio thread."""

    def __init__(
        self,
        engine: Engine,
        servers: Servers,
        tier: BurstTier,
        io: FileIO,
        writeback: WriteBack,
        drain: Drain,
        peers: Peers,
    ) -> None:
        self._engine = engine
        self._servers = servers
        self._tier = tier
        self._io = io
        self._writeback = writeback
        self._drain = drain
        peers.serve(READ, self._read)
        peers.serve(GIVE_UP, self._give_up)

    async def _read(self, asker: Peer, arguments: Any, body: Body) -> Answer:
        """Bytes of a burst copy, as [server, id, inode number, offset, length], fewer at its end.
        Raises Stale, once it is on record there, if it is not the file any more.
        """
        server, copy_id, ino, offset, length = arguments
        place = Copy(server, copy_id)
        if not await self._engine.view(_has_copy, ino, place):
            await self._engine.shown()
            raise Stale(f"inode {ino} has its bytes elsewhere")
        device = self._servers[server]
        fd, size = await self._servers.run(device, _open, device, copy_id)
        return Answer(None, FilePart(fd, offset, max(0, min(length, size - offset))))

    async def _give_up(self, asker: Peer, arguments: Any, body: Body) -> Answer:
        """A file, as [inode number], is on the data servers, and nobody's, which is on record
        there, when this returns. Raises Busy while it is open for writing here.
        """
        (ino,) = arguments
        with trio.move_on_after(_CLOSING_S):
            while self._is_written(ino):
                await trio.sleep(_LOOK_S)
        if self._is_written(ino):
            name = await self._engine.view(hosts.name_of, self._engine.host)
            raise Busy(f"inode {ino} is open for writing on host {name}")
        self._drain.request([ino])
        await self._drain.wait([ino], strict=True)
        await self._writeback.sync_files([ino])
        await self._engine.shown()
        return Answer()

    def _is_written(self, ino: int) -> bool:
        file = self._io.open.get(ino)
        return file is not None and file.may_be_written


def _has_copy(tx: ReadTransaction, ino: int, place: Copy) -> bool:
    inode = namespace.find_inode(tx, ino)
    return inode is not None and inode.copy == place


def _open(device: DataServer, copy_id: int) -> tuple[int, int]:
    """A descriptor of a copy, the caller's, and its size. Raises Unavailable."""
    key = (0, copy_id)
    fd = device.open_object(key, create=False, write=False)
    if fd is None:
        raise MissingObject(f"{device.name}: {device.where(key)} is missing")
    return fd, device.stat(key, fd).length
