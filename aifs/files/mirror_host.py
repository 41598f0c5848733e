"""What this host does for files of others that are mirrored: it keeps mirrors, and becomes the home
when theirs has died (docs/design/homes.md).
"""

from contextlib import nullcontext
from typing import Any

import trio

from aifs.burst.copy import BurstCopy
from aifs.burst.mirrors import KEEP
from aifs.burst.remote import RemoteCopy
from aifs.burst.tier import BurstTier
from aifs.core import faults
from aifs.core.errors import NoSpace, Stale, Unavailable
from aifs.core.log import logger
from aifs.core.role import Role
from aifs.core.tasks import run_all
from aifs.files.drain import Drain, Undrained
from aifs.files.file_io import FileIO
from aifs.files.services import Services
from aifs.meta import mirrors
from aifs.meta.mirrors import Mirrored
from aifs.meta.records import Copy, MirrorOf
from aifs.peers.peers import Peers
from aifs.peers.transport import Answer, Body, Peer

_log = logger(__name__)

_PIECE = 4 << 20
_AT_ONCE = 4

_COPIED = faults.declare(
    "hosts.mirror.copied", "a mirror holds a burst copy's bytes, durably, and is not on record"
)
_KEPT = faults.declare("hosts.mirror.kept", "a mirror is on record, its home has not been told")
_TAKEN = faults.declare(
    "hosts.mirror.taken", "a mirror is the file, and what its dead home has is garbage"
)


class MirrorHost:
    """Answers Mirrors of other hosts. Used from one trio thread."""

    def __init__(
        self,
        services: Services,
        tier: BurstTier,
        io: FileIO,
        drain: Drain,
        role: Role,
        peers: Peers,
    ) -> None:
        self._engine = services.engine
        self._servers = services.servers
        self._tier = tier
        self._homes = io.homes
        self._collector = services.collector
        self._io = io
        self._drain = drain
        self._kernel = services.kernel
        self._role = role
        peers.serve(KEEP, self._keep)

    # --- keeping ---

    async def _keep(self, asker: Peer, arguments: Any, body: Body) -> Answer:
        """This host has a mirror of a burst copy on return, as [server, inode number, id, size,
        mtime and ctime in ns], durably and on record. Raises NoSpace; Stale, if it is not the file
        as far as this host has heard; Unavailable.
        """
        server, ino, *state = arguments
        of = MirrorOf._make(state)
        device = self._tier.admit("", of.size)
        if device is None:
            raise NoSpace("its burst tier has no room")
        home = Copy(server, of.id)
        copy = await self._tier.create(device)
        garbage: list[int] | None = None
        try:
            await self._fetch(self._homes.open(home, ino), copy, of.size)
            await copy.set_mtime(of.mtime_ns)
            await copy.sync()
            faults.reach(_COPIED)
            put = mirrors.put_mirror, ino, home, copy.place, of
            with trio.CancelScope(shield=True):
                garbage = await self._engine.transact(*put)
            if garbage is None:
                raise Stale(f"inode {ino} has its bytes elsewhere")
            for mirror in garbage:
                self._collector.add_garbage(mirror)
            self._tier.mirrors(copy.id, copy.server, of.size)
            faults.reach(_KEPT)
        finally:
            if garbage is None:
                self._tier.discard(copy)
            else:
                copy.close()
        await self._engine.barrier()
        return Answer()

    async def _fetch(self, source: RemoteCopy, copy: BurstCopy, size: int) -> None:
        offsets = iter(range(0, size, _PIECE))

        async def fetch_some() -> None:
            for offset in offsets:
                await copy.write(offset, await source.read(offset, min(_PIECE, size - offset)))

        await run_all(*[fetch_some] * min(_AT_ONCE, -(-size // _PIECE)))
        await copy.truncate(size)

    # --- when hosts die ---

    async def run(self) -> None:
        """Until cancelled: when sessions end, and to begin with, see to what they leave."""
        while True:
            live = self._role.live
            await self.look()
            while self._role.live == live:
                await self._role.change()

    async def look(self) -> None:
        """What this host has a mirror of, and whose home has no session any more, has its home here
        on return; and what has its home here and its mirror at such a host is going to be drained.
        """
        own = [server.id for server in self._servers.burst()]
        after: int | None = 0
        while after is not None:
            found, after = await self._engine.view(mirrors.find_mirrored, after, own)
            # Looked at before, so who has begun a session meanwhile has changed none of it.
            live = await self._role.ask_live() if found else frozenset()
            for mirrored in found:
                if mirrored.copy.server in own:
                    if self._homes.of(mirrored.mirror.server) not in live:
                        self._drain.request([mirrored.inode.ino])
                elif self._homes.of(mirrored.copy.server) not in live:
                    await self._take_over(mirrored)

    async def _take_over(self, mirrored: Mirrored) -> None:
        copy = self._tier.open(mirrored.mirror)
        try:
            await copy.ensure_open()
            is_whole = copy.stat().st_size == mirrored.of.size
        except Unavailable as error:
            _log.warning("inode %d: %s", mirrored.inode.ino, error)
            is_whole = False
        finally:
            copy.close()
        if not is_whole:
            return  # its home may come back
        inode = await self._engine.transact(mirrors.take_over, mirrored)
        if inode is None:
            return
        faults.reach(_TAKEN)
        ino, inode.seq = inode.ino, self._engine.seq
        _log.info("inode %d: its home is over; it is as of its last fsync from now on", ino)
        self._tier.dirty(mirrored.mirror.id, mirrored.mirror.server, inode.space)
        before = self._io.table.cached_size(ino)
        with nullcontext() if before is None else self._io.table.told.held(ino, before):
            self._io.inodes.follow(inode)
            await self._kernel.forget({}, [ino], [ino])
        self._drain.load([Undrained(ino, mirrored.since_ns, inode.size)])
