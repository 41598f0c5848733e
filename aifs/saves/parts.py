"""The parts that hosts have of a group, on record; the host that sees to it has each store its
part.

A host takes part from the first close of a file, or join of a rank, there. The transaction that
commits the group knows all parts: none begins later.
"""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import trio

from aifs.core.errors import FsError, Unavailable
from aifs.core.log import logger
from aifs.core.tasks import run_all
from aifs.core.upkeep import Role
from aifs.data.servers import Servers
from aifs.meta import groups, hosts
from aifs.meta.groups import GroupPart
from aifs.meta.kv import Engine
from aifs.meta.records import Inode
from aifs.peers.peers import Peers
from aifs.peers.transport import Answer
from aifs.saves.group import DirectoryGroup, File
from aifs.saves.ready import Barrier

_log = logger(__name__)

STORE, FILES = "group.store", "group.files"
"""Services of a host that has a part: see PartHost."""

_STORE_S = math.inf  # as long as it takes: a connection to a dead host ends
_FILES_S = 5.0
_AGAIN_S = 0.5


class Parts:
    """Those of all groups. Used from one trio thread."""

    def __init__(
        self, engine: Engine, barrier: Barrier, role: Role, servers: Servers, peers: Peers
    ) -> None:
        self._engine = engine
        self._barrier = barrier
        self._role = role
        self._servers = servers
        self._peers = peers

    # --- hosts that take part ---

    async def take(
        self, group: DirectoryGroup, ranks: frozenset[int] = frozenset(), has_files: bool = False
    ) -> bool:
        """Add to this host's part of the group. False: all have committed, or it has ended. Raises
        Invalid if a rank lives on another host."""
        own = group.own_part
        part = GroupPart(tuple(sorted(ranks.union(own.ranks))), has_files or own.has_files)
        return part == own or await self._put(group, part)

    async def left(self, group: DirectoryGroup, rank: int) -> None:
        """The process that has joined as this rank, here, has ended."""
        own = group.own_part
        if rank in own.ranks and rank not in group.processes:
            ranks = tuple(other for other in own.ranks if other != rank)
            await self._put(group, own._replace(ranks=ranks))

    async def _put(self, group: DirectoryGroup, part: GroupPart) -> bool:
        if not group.host:
            return True  # no other host has to know
        group_id = group.record.id
        if not await self._engine.transact(groups.put_part, group.ino, group_id, part):
            return False
        group.parts[group.host] = part
        return True

    async def load(self, group: DirectoryGroup) -> None:
        """What is on record, after a mount; our ranks have to join again."""
        group.parts = await self._engine.view(groups.parts, group.ino)
        if group.own_part.ranks:
            await self._put(group, group.own_part._replace(ranks=()))

    def is_elsewhere(self, inode: Inode) -> bool:
        """Whether a file is in the burst tier of another host."""
        return inode.copy is not None and inode.copy.server in self._servers.elsewhere

    async def live(self) -> frozenset[int]:
        """The hosts that have a session. Raises Unavailable."""
        return await self._role.ask_live()

    # --- what the host that sees to a group asks of the others ---

    async def files(self, group: DirectoryGroup) -> dict[int, File]:
        """Files that others have closed, by inode. Silent hosts are asked while they have a
        session. Raises Unavailable."""
        found: dict[int, File] = {}

        async def ask(host: int) -> None:
            while group.is_open:
                try:
                    answer = await self.call(group, host, FILES, _FILES_S)
                except Unavailable:
                    if host not in await self._role.ask_live():
                        raise
                    await trio.sleep(_AGAIN_S)
                    continue
                assert not isinstance(answer.body, str)
                for ino, size in json.loads(bytes(answer.body)):
                    found[ino] = File(ino, size, 0.0)
                return

        await run_all(*(lambda host=host: ask(host) for host in group.others))
        return found

    async def store(
        self, group: DirectoryGroup, kept: Mapping[int, Collection[bytes]]
    ) -> list[str]:
        """Have other hosts store, or drain, their parts of a committed group; returns names of
        those that died before. ``kept``: by host, needed chunks that others have just stored."""
        lost: list[str] = []

        async def ask(host: int) -> None:
            while True:
                try:
                    known = b"".join(kept.get(host, ()))
                    answer = await self.call(group, host, STORE, _STORE_S, body=known)
                    group.report.add(answer.value)
                    return
                except FsError as error:
                    name = await self._engine.view(hosts.name_of, host)
                    _log.info("group %d: host %s: %s", group.record.id, name, error)
                    # It stores by itself what nobody asks it for.
                    if not await self._barrier.undrained_below(group.ino, host):
                        return
                    if host not in await self._role.ask_live():
                        lost.append(name)
                        return
                await trio.sleep(_AGAIN_S)

        await run_all(*(lambda host=host: ask(host) for host in group.others))
        return sorted(lost)

    async def call(
        self,
        group: DirectoryGroup,
        host: int,
        service: str,
        timeout_s: float,
        said: Sequence[Any] = (),
        body: bytes = b"",
    ) -> Answer:
        """What a host answers of its part of a group. Raises Unavailable, what the service does."""
        name = await self._engine.view(hosts.name_of, host)
        asked = [group.ino, group.record.id, *said]
        return await self._peers.call(name, service, asked, body, timeout_s=timeout_s)

    def hears(self, name: str) -> bool:
        """Whether there is a connection to a host of this name."""
        return name in self._peers.connected
