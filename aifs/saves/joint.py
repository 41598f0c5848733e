"""Chunks of several hosts of a group are stored once, by a plan.

Each host *offers* digests, not bytes. What several have, and the store has not, is planned by the
bandwidths of all burst devices and links; each host *keeps* its part: it appends chunks, and lists
them for no file (chunks.put_loose), garbage after the group or the host. So hosts find these chunks
in the store, and store their files as if alone. After failures a host stores what it does not find.
"""

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import trio

from aifs.core.errors import FsError
from aifs.core.log import logger
from aifs.core.tasks import run_all
from aifs.data.patience import giving_up
from aifs.files.drain import Drain
from aifs.layout.redundancy import Redundancy
from aifs.meta import hosts, shared
from aifs.meta.kv import Engine
from aifs.peers.peers import Peers
from aifs.peers.transport import Answer, Body, Peer
from aifs.saves.group import DirectoryGroup, FileState
from aifs.saves.members import Members
from aifs.saves.parts import FILES, STORE, Parts
from aifs.saves.sharing import Asked, Chunks, Holder, Need
from aifs.saves.storing import Storing
from aifs.saves.table import GroupTable

_log = logger(__name__)

OFFER, KEEP = "group.offer", "group.keep"
"""Services of a host that has a part: see PartHost."""

_CHUNK = struct.Struct("<32sI")  # digest, length
_ASSIGNED = struct.Struct("<32sH")  # digest, number of the slot
_DIGEST_BYTES = 32
_OFFERED_MAX = 300_000
"""Chunks of a host: what it has beyond these it stores by itself."""

_AT_ONCE = 512  # digests that are looked up before other tasks get their turn
_WORK_S = 600.0

_ASKED_S = 10.0
"""How long a host waits to be asked for its part of a group that is committed: as a lease lasts."""


class Offer(NamedTuple):
    """The distinct chunks that a host has of members that ask for the same."""

    asked: Asked
    chunks: Chunks


class HostOffer(NamedTuple):
    """What a host has of a group."""

    offers: Sequence[Offer]
    rates: Mapping[int, int]
    """Bytes per second that its burst devices give."""
    link: int
    """That it can send to data servers. 0: nobody knows."""

    def encode(self) -> Answer:
        """As the answer of ``OFFER``. Value: rates, link, and by kind servers, redundancy, and sets
        of devices with numbers of chunks; body: these, in order."""
        body, kinds, left = bytearray(), [], _OFFERED_MAX
        for asked, chunks in self.offers:
            classes: dict[tuple[int, ...], list[bytes]] = {}
            for digest, (length, devices) in list(chunks.items())[:left]:
                classes.setdefault(devices, []).append(_CHUNK.pack(digest, length))
            left -= sum(map(len, classes.values()))
            for found in classes.values():
                body += b"".join(found)
            counts = [[list(devices), len(found)] for devices, found in classes.items()]
            kinds.append([list(asked.servers), list(asked.redundancy), counts])
        return Answer([list(self.rates.items()), self.link, kinds], bytes(body))


def decode_offer(answer: Answer) -> HostOffer:
    rates, link, kinds = answer.value
    chunks = _CHUNK.iter_unpack(_bytes(answer.body))
    offers = []
    for servers, redundancy, counts in kinds:
        found = {}
        for devices, count in counts:
            for _, (digest, length) in zip(range(count), chunks, strict=False):
                found[digest] = length, tuple(devices)
        offers.append(Offer(Asked(tuple(servers), Redundancy(*redundancy)), found))
    return HostOffer(offers, dict(map(tuple, rates)), link)


def encode_wanted(asked: Asked, wanted: Mapping[bytes, tuple[int, ...]]) -> tuple[list[Any], bytes]:
    """What is asked of ``KEEP``: the servers of the slot of each chunk."""
    slots = list(dict.fromkeys(wanted.values()))
    number = {slot: index for index, slot in enumerate(slots)}
    body = b"".join(_ASSIGNED.pack(digest, number[slot]) for digest, slot in wanted.items())
    return [list(asked.servers), list(asked.redundancy), list(map(list, slots))], body


def decode_wanted(said: Sequence[Any], body: Body) -> tuple[Asked, dict[bytes, tuple[int, ...]]]:
    servers, redundancy, slots = said
    wanted = {digest: tuple(slots[number]) for digest, number in _ASSIGNED.iter_unpack(bytes(body))}
    return Asked(tuple(servers), Redundancy(*redundancy)), wanted


def encode_digests(digests: Iterable[bytes]) -> bytes:
    return b"".join(digests)


def decode_digests(body: Body) -> set[bytes]:
    found = bytes(body)
    return {found[at : at + _DIGEST_BYTES] for at in range(0, len(found), _DIGEST_BYTES)}


def _bytes(body: Any) -> bytes:
    return bytes(body)


class Joint:
    """Used from one trio thread, by the host that sees to a group."""

    def __init__(
        self, engine: Engine, parts: Parts, members: Members, storing: Storing, link: int
    ) -> None:
        """``link``: see HostOffer; of this host."""
        self._engine = engine
        self._parts = parts
        self._members = members
        self._storing = storing
        self._link = link

    # --- what each host does ---

    async def offer(self, group: DirectoryGroup) -> HostOffer:
        """What is here of a group that is committed, hashed."""
        found = await self._members.offer(group)
        offers = [Offer(asked, chunks) for asked, chunks in found.items()]
        devices = {
            device for offer in offers for _, some in offer.chunks.values() for device in some
        }
        return HostOffer(offers, self._storing.bandwidths.of_burst(devices), self._link)

    # --- what the host does that sees to the group ---

    async def spread(self, group: DirectoryGroup) -> dict[int, set[bytes]]:
        """Store what several hosts have, as far as possible; returns these chunks by host. Does not
        raise FsError."""
        offered: dict[int, HostOffer] = {}

        async def ask(host: int) -> None:
            try:
                if host == group.host:
                    offered[host] = await self.offer(group)
                else:
                    answer = await self._parts.call(group, host, OFFER, _WORK_S)
                    offered[host] = decode_offer(answer)
            except FsError as error:
                _log.info("group %d: host %d offers nothing: %s", group.record.id, host, error)

        hosts = [group.host, *group.others]
        await run_all(*(partial(ask, host) for host in hosts))
        asked = {offer.asked for its in offered.values() for offer in its.offers}
        kept: set[bytes] = set()
        # The safest first: others can lean on their chunks.
        for kind in sorted(asked, key=lambda kind: -kind.redundancy.tolerates):
            try:
                kept |= await self._spread_kind(group, kind, offered, kept)
            except FsError as error:  # no room, or no servers: each host finds that by itself
                _log.info("group %d: nothing is shared: %s", group.record.id, error)
        return {
            host: {d for offer in its.offers for d in offer.chunks if d in kept}
            for host, its in offered.items()
        }

    async def _spread_kind(
        self,
        group: DirectoryGroup,
        asked: Asked,
        offered: Mapping[int, HostOffer],
        known: set[bytes],
    ) -> set[bytes]:
        """Raises NoSpace, NotSupported, Unavailable."""
        chunks = {
            host: offer.chunks
            for host, its in offered.items()
            for offer in its.offers
            if offer.asked == asked
        }
        new = await self._new({digest for its in chunks.values() for digest in its} - known)
        kept: set[bytes] = set()
        while True:
            count: dict[bytes, int] = {}
            for its in chunks.values():
                for digest in its.keys() & new:
                    count[digest] = count.get(digest, 0) + 1
            shared_by_some = {digest for digest, hosts in count.items() if hosts > 1} - kept
            if not shared_by_some:
                return kept
            wanted = await self._plan(asked, new - kept, shared_by_some, chunks, offered)
            failed = set[int]()

            async def ask(host: int, part: Mapping[bytes, tuple[int, ...]]) -> None:
                done = await self._keep_there(group, host, asked, part)
                kept.update(done)
                if len(done) < len(part):
                    failed.add(host)

            await run_all(*(partial(ask, host, part) for host, part in wanted.items()))
            if not failed:
                return kept
            # What these have not stored is planned again among those who have the same bytes.
            chunks = {host: its for host, its in chunks.items() if host not in failed}

    async def _new(self, digests: set[bytes]) -> set[bytes]:
        """Digests that the store does not have; hosts check those leant on."""
        order = sorted(digests)
        for start in range(0, len(order), _AT_ONCE):
            some = order[start : start + _AT_ONCE]
            digests -= (await self._engine.view(shared.find_all_shared, some)).keys()
            await trio.lowlevel.checkpoint()
        return digests

    async def _plan(
        self,
        asked: Asked,
        new: set[bytes],
        wanted: set[bytes],
        chunks: Mapping[int, Chunks],
        offered: Mapping[int, HostOffer],
    ) -> dict[int, dict[bytes, tuple[int, ...]]]:
        """By host, where it stores what is ``wanted`` of it, given loads of hosts' own chunks."""
        host_of = {device: host for host in chunks for device in offered[host].rates}
        devices = sorted(host_of)
        place = {device: number for number, device in enumerate(devices)}
        needs: dict[bytes, Need] = {}
        for its in chunks.values():
            for digest in its.keys() & new:
                length, holders = its[digest]
                need = needs.setdefault(digest, Need(length))
                need.holders += [Holder(place[device], 0) for device in holders]
        rates = {device: offered[host].rates[device] for device, host in host_of.items()}
        links = {
            device: (host, offered[host].link)
            for device, host in host_of.items()
            if offered[host].link
        }
        slots, assigned = await self._storing.assign(asked, needs, devices, rates, links)
        found: dict[int, dict[bytes, tuple[int, ...]]] = {}
        for digest in wanted:
            slot, device = assigned[digest]
            found.setdefault(host_of[device], {})[digest] = slots[slot].servers
        return found

    async def _keep_there(
        self,
        group: DirectoryGroup,
        host: int,
        asked: Asked,
        wanted: Mapping[bytes, tuple[int, ...]],
    ) -> set[bytes]:
        try:
            if host == group.host:
                return await self._members.keep(group, asked, wanted)
            said, body = encode_wanted(asked, wanted)
            answer = await self._parts.call(group, host, KEEP, _WORK_S, said, body)
            return decode_digests(_bytes(answer.body))
        except FsError as error:
            _log.info("group %d: host %d keeps nothing: %s", group.record.id, host, error)
            return set()


class PartHost:
    """Brings this host's part of committed groups to the data servers: when the host that sees to
    the group asks, or by itself. Used from one trio thread."""

    def __init__(
        self,
        engine: Engine,
        table: GroupTable,
        members: Members,
        drain: Drain,
        parts: Parts,
        joint: Joint,
        peers: Peers,
    ) -> None:
        self._engine = engine
        self._table = table
        self._members = members
        self._drain = drain
        self._parts = parts
        self._joint = joint
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
        """Store without the host that sees to the committed group after a lease's time: it may
        hang."""
        while group.is_live and not group.is_ours:
            group.asked = trio.Event()
            with trio.move_on_after(_ASKED_S):
                await group.asked.wait()
            name = await self._engine.view(hosts.name_of, group.record.host)
            if not group.asked.is_set() and not self._parts.hears(name):
                await self._members.store(group)

    # --- what the host that sees to a group asks for ---

    async def _serve_store(self, asker: Peer, arguments: Any, body: Body) -> Answer:
        """Bring what is here of a group [directory, id] to the data servers."""
        group = self._find_asked(arguments)
        if group is None:
            return Answer({})
        group.kept = decode_digests(body)
        with giving_up():
            await self.store(group)
        return Answer(group.report.to_json())

    async def _serve_offer(self, asker: Peer, arguments: Any, body: Body) -> Answer:
        """What is here of a group [directory, id]: see HostOffer.encode."""
        group = self._find_asked(arguments)
        with giving_up():
            offer = HostOffer((), {}, 0) if group is None else await self._joint.offer(group)
        return offer.encode()

    async def _serve_keep(self, asker: Peer, arguments: Any, body: Body) -> Answer:
        """Store chunks of a group [directory, id, ...], by ``encode_wanted``, for all; returns
        digests."""
        group = self._find_asked(arguments[:2])
        kept: set[bytes] = set()
        if group is not None:
            with giving_up():
                kept = await self._members.keep(group, *decode_wanted(arguments[2:], body))
        return Answer(None, encode_digests(kept))

    async def _serve_files(self, asker: Peer, arguments: Any, body: Body) -> Answer:
        """Files of a group [directory, id] closed here, in the body: JSON, [inode number, size]
        each."""
        ino, group_id = arguments
        group = self._table.by_directory.get(ino)
        known = group is not None and group.record.id == group_id
        files = [file for file in group.files.values() if file.counted] if known and group else []
        return Answer(None, json.dumps([[file.ino, file.size] for file in files]).encode())

    def _find_asked(self, arguments: Any) -> DirectoryGroup | None:
        """The live group [directory, id] that a host asks for."""
        ino, group_id = arguments
        group = self._table.by_directory.get(ino)
        if group is None or group.record.id != group_id or not group.is_live:
            return None
        group.asked.set()
        return group
