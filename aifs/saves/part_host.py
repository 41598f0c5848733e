"""What this host has of groups that are committed gets to the data servers: when the host asks that
sees to the group, or by itself when that one does not.
"""

import json
from typing import Any

import trio

from aifs.data.patience import giving_up
from aifs.files.drain import Drain
from aifs.meta import hosts
from aifs.meta.kv import Engine
from aifs.peers.peers import Peers
from aifs.peers.transport import Answer, Body, Peer
from aifs.saves.group import DirectoryGroup, FileState
from aifs.saves.joint import (
    KEEP,
    OFFER,
    HostOffer,
    Joint,
    decode_digests,
    decode_wanted,
    encode_digests,
)
from aifs.saves.members import Members
from aifs.saves.parts import FILES, STORE, Parts
from aifs.saves.table import GroupTable

_ASKED_S = 10.0
"""How long a host waits to be asked for its part of a group that is committed: as a lease lasts."""


class PartHost:
    """Used from one trio thread."""

    def __init__(
        self,
        engine: Engine,
        table: GroupTable,
        members: Members,
        drain: Drain,
        parts: Parts,
        joint: Joint,
        peers: Peers | None,
    ) -> None:
        """``peers``: None where the store has one host; then nobody asks."""
        self._engine = engine
        self._table = table
        self._members = members
        self._drain = drain
        self._parts = parts
        self._joint = joint
        if peers is not None:
            peers.serve(STORE, self._serve_store)
            peers.serve(FILES, self._serve_files)
            peers.serve(OFFER, self._serve_offer)
            peers.serve(KEEP, self._serve_keep)

    async def store(self, group: DirectoryGroup) -> None:
        """What this host has of a group that is committed is on the data servers on return."""
        await self._members.store(group)
        usual = [file.ino for file in group.in_states(FileState.USUAL)]
        await self._drain.wait(usual)

    async def store_unasked(self, group: DirectoryGroup) -> None:
        """The host that sees to a group that is committed may hang, or be cut off: the files here
        do not wait for it longer than a lease lasts."""
        while group.is_live and not group.is_of(self._engine.host):
            group.asked = trio.Event()
            with trio.move_on_after(_ASKED_S):
                await group.asked.wait()
            name = await self._engine.view(hosts.name_of, group.record.host)
            if not group.asked.is_set() and not self._parts.hears(name):
                await self._members.store(group)

    # --- what the host that sees to a group asks for ---

    async def _serve_store(self, asker: Peer, arguments: Any, body: Body) -> Answer:
        """What is here of a group, given as [directory, id], is on the data servers on return."""
        group = self._find_asked(arguments)
        if group is None:
            return Answer({})
        group.kept = decode_digests(body)
        with giving_up():
            await self.store(group)
        return Answer(group.report.to_json())

    async def _serve_offer(self, asker: Peer, arguments: Any, body: Body) -> Answer:
        """What is here of a group, given as [directory, id]: see HostOffer.encode."""
        group = self._find_asked(arguments)
        with giving_up():
            offer = HostOffer((), {}, 0) if group is None else await self._joint.offer(group)
        return offer.encode()

    async def _serve_keep(self, asker: Peer, arguments: Any, body: Body) -> Answer:
        """Chunks of a group, given as [directory, id, ...] and by ``encode_wanted``, are stored for
        all; the digests of those that are."""
        group = self._find_asked(arguments[:2])
        kept: set[bytes] = set()
        if group is not None:
            with giving_up():
                kept = await self._joint.keep(group, *decode_wanted(arguments[2:], body))
        return Answer(None, encode_digests(kept))

    async def _serve_files(self, asker: Peer, arguments: Any, body: Body) -> Answer:
        """The files of a group, given as [directory, id], that were closed here, in the body: JSON,
        [inode number, size] of each."""
        ino, group_id = arguments
        group = self._table.by_directory.get(ino)
        known = group is not None and group.record.id == group_id
        files = [file for file in group.files.values() if file.counted] if known and group else []
        return Answer(None, json.dumps([[file.ino, file.size] for file in files]).encode())

    def _find_asked(self, arguments: Any) -> DirectoryGroup | None:
        """A group that is live, given as [directory, id], of which another host asks."""
        ino, group_id = arguments
        group = self._table.by_directory.get(ino)
        if group is None or group.record.id != group_id or not group.is_live:
            return None
        group.asked.set()
        return group
