"""Storing chunks of a group's like members (redundancy, servers), and flipping the files.

An appended chunk is right if its file's lease held until the end. Otherwise its files wait for
another round.
"""

from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import trio

from aifs.core import faults
from aifs.core.errors import FsError, NoSpace, Stale
from aifs.core.log import logger
from aifs.core.tasks import run_all
from aifs.data.containers.pieces import HashedPiece, Piece
from aifs.data.containers.writer import Stored
from aifs.data.workers import gather
from aifs.files.draining import Drainer, DrainOutcome
from aifs.files.services import Services
from aifs.layout.interleaved import HEADER_BYTES, Extent, Interleaved, Location, named
from aifs.layout.striped import Striped
from aifs.meta import chunks, shared
from aifs.saves import planner, sharing
from aifs.saves.group import GroupReport
from aifs.saves.hashing import Prepared
from aifs.saves.lookups import Bandwidths, look_up
from aifs.saves.sharing import Asked, Assigned, Holder, Need

_log = logger(__name__)

_APPENDED = faults.declare(
    "vfs.group.appended",
    "chunks of a group are durable in containers, no file names them",
)
_REPLACED = faults.declare(
    "vfs.group.replaced",
    "a bad shared chunk has been replaced by a good one, for all files that name it",
)
_KEPT = faults.declare(
    "vfs.group.kept", "chunks of a group are in the store for other hosts, no file names them"
)
_FLIPPED = faults.declare(
    "vfs.group.flipped", "some files of a group are on the capacity tier, others not yet"
)

_BATCH = 1 << 30  # new bytes that are made to count together
_BATCH_CHUNKS = 2048  # some 15 us of the trio thread each, in one transaction
_ROUNDS_MAX = 4
_REPLACED_AT_ONCE = 256


class _Work:
    """One round's appends. Keys are digests of shared chunks, or (inode number, number of the
    extent).

    ``senders``: whose burst copies have the shared ones. ``right``: verified ones.
    """

    def __init__(self, slots: Sequence[Striped]) -> None:
        self.pieces: list[list[tuple[Any, Piece]]] = [[] for _ in slots]
        self.senders: dict[bytes, Prepared] = {}
        self.right: set[bytes] = set()
        self.places: dict[Any, Location] = {}
        self.lost: dict[int, int] = {}


@dataclass
class MemberKind:
    """Like members of a group, and their chunks. Work on each chunk is in a worker thread, one call
    at a time."""

    asked: Asked
    members: Sequence[Prepared]
    """A Holder names one by its number in this order."""
    chunk: int
    """Bytes of the largest chunks."""
    report: GroupReport
    kept: Collection[bytes] = ()
    """Digests of chunks that hosts have just stored for all of the group."""
    needs: dict[bytes, Need] = field(default_factory=dict)
    """The distinct chunks."""
    known: set[bytes] = field(default_factory=set)
    """Those in the store that are good enough."""
    own: set[bytes] = field(default_factory=set)
    """Those in the store where we may not lean on them."""
    slots: tuple[Striped, ...] = ()
    """What containers for them are laid out like."""
    assigned: dict[bytes, Assigned] = field(default_factory=dict)
    """The plan for those that are new."""

    def fail(self, members: Sequence[Prepared], error: FsError) -> None:
        """These have not been stored, unless they have an outcome already."""
        for member in members:
            member.fail(error)

    def holding(self) -> set[int]:
        """The numbers of members whose bytes can still be had."""
        return {
            n for n, member in enumerate(self.members) if member.outcome is None and member.holds()
        }

    def ask(
        self, new: Any, devices: Any, sources: Any, servers: Any
    ) -> tuple[dict[bytes, Assigned], float, float]:
        """The plan for what is new, how long it takes, and how long any would."""
        question = sharing.ask(new, devices, sources, self.slots, servers)
        plan = planner.plan(question.pattern)
        return sharing.answer(question, plan, sources), plan.time_s, plan.lower_bound_s

    def batches(self) -> list[list[Prepared]]:
        """The members, as many at a time as are stored in one round."""
        return list(self._batched())

    def _batched(self) -> Iterator[list[Prepared]]:
        batch: list[Prepared] = []
        seen: set[bytes] = set()
        size = count = 0
        for member in self.members:
            if batch and (size >= _BATCH or count + len(member.cut.digests) > _BATCH_CHUNKS):
                yield batch
                batch, size, count = [], 0, 0
            batch.append(member)
            count += len(member.cut.digests)
            for digest in set(member.cut.digests) - seen - self.known:
                if digest:
                    size += self.needs[digest].length
                    seen.add(digest)
        yield batch

    def add(self, work: _Work, digest: bytes, holding: set[int]) -> None:
        """Have a shared chunk stored, from the holder on the planned device, or any other one."""
        need, assigned = self.needs[digest], self.assigned.get(digest, Assigned(0, -1))
        holders = [holder for holder in need.holders if holder.member in holding]
        if holders:
            members = self.members
            holder: Holder = next(
                (h for h in holders if members[h.member].copy.server == assigned.device), holders[0]
            )
            sender = work.senders[digest] = members[holder.member]
            piece = HashedPiece(
                sender.copy.place, sender.ino, holder.offset, need.length, digest, sender.level
            )
            work.pieces[assigned.slot].append((digest, piece))

    def add_all(self, work: _Work, member: Prepared, holding: set[int]) -> None:
        """What is stored for a member, and its extents, as far as they are known."""
        for digest in dict.fromkeys(member.cut.digests):
            if (
                digest
                and digest not in self.known
                and digest not in self.own
                and digest not in work.senders
            ):
                self.add(work, digest, holding)
        found = member.extents = []
        for index, ((offset, length), digest) in enumerate(
            zip(member.cut.ranges, member.cut.digests, strict=True)
        ):
            is_own = digest in self.own
            if is_own and digest:
                slot = (
                    self.assigned[digest].slot
                    if digest in self.assigned
                    else index % len(self.slots)
                )
                piece = HashedPiece(
                    member.copy.place,
                    member.ino,
                    offset,
                    length,
                    digest,
                    member.level,
                    member.oid,
                    index,
                )
                work.pieces[slot].append(((member.ino, index), piece))
            found.append(
                named(length, digest)._replace(shared=not is_own) if digest else Extent(length)
            )

    def finish(self, work: _Work, member: Prepared) -> None:
        """The places of what has been appended for a member."""
        found = list(member.extents)
        for index, extent in enumerate(found):
            if extent.place is not None:
                place = work.places.get(extent.digest if extent.shared else (member.ino, index))
                if place is not None:
                    found[index] = extent._replace(place=place)
        member.extents, member.layout = found, Interleaved(self.chunk)

    def count(self, drained: list[Prepared], work: _Work) -> None:
        """These have been flipped: what they have is in the store, and counts in the report."""
        for member in drained:
            self.known.update(member.cut.digests)
        counted = {d for member in drained for d in member.cut.digests} & work.senders.keys()
        self.count_stored(work, counted, {member.ino for member in drained})

    def count_stored(
        self, work: _Work, shared: Collection[bytes], inos: Collection[int] = ()
    ) -> None:
        """Count these shared chunks, and these files' own, in the report."""
        for slot, some in zip(self.slots, work.pieces, strict=True):
            size = sum(
                HEADER_BYTES + work.places[key].stored
                for key, _ in some
                if (key in shared if isinstance(key, bytes) else key[0] in inos)
            )
            self.report.stored_bytes += size
            for server in slot.servers:
                part = size // sharing.data_columns(slot)
                self.report.servers[server] = self.report.servers.get(server, 0) + part


class Storing:
    """Stores members of groups, one kind at a time. There is one for each mount."""

    def __init__(self, services: Services, drainer: Drainer) -> None:
        self._engine = services.engine
        self._servers = services.servers
        self._ids = services.ids
        self._collector = services.collector
        self._containers = drainer.containers
        self._drainer = drainer
        self.bandwidths = Bandwidths(services.config, services.servers)

    async def store(self, kind: MemberKind) -> None:
        """Each member has its outcome on return."""
        try:
            await self._prepare(kind)
        except FsError as error:
            kind.fail(kind.members, error)
            return
        for batch in await _work(kind.members[0], kind.batches):
            await self._store(kind, batch)

    async def _prepare(self, kind: MemberKind) -> None:
        cuts = [member.cut for member in kind.members]
        kind.needs, amounts = await _work(kind.members[0], sharing.distinct, cuts)
        looked_up = await look_up(
            self._engine, self._servers.budget, self._containers, kind.asked, kind.needs, kind.kept
        )
        kind.known, kind.own = looked_up.known, looked_up.own
        found = sum(kind.needs[digest].length for digest in kind.known)
        ours = sum(kind.needs[digest].length for digest in kind.known.intersection(kind.kept))
        report = kind.report
        report.verified_chunks += looked_up.verified
        report.zero_bytes += amounts.zero
        report.duplicate_bytes += amounts.duplicate + ours
        report.found_bytes += found - ours
        report.distinct_bytes += amounts.distinct - found
        new = {digest: need for digest, need in kind.needs.items() if digest not in kind.known}
        report.chunks += len(new)
        kind.slots = self._containers.slots(kind.asked.redundancy, kind.asked.servers)
        if new:
            await self._plan(kind, new)
        await self._replace(kind, looked_up.bad)

    async def _replace(self, kind: MemberKind, digests: list[bytes]) -> None:
        """Store these anew for all files, while a member has their bytes. Raises NoSpace,
        Unavailable."""
        while digests:
            work, holding = _Work(kind.slots), kind.holding()
            for digest in digests[:_REPLACED_AT_ONCE]:
                kind.add(work, digest, holding)
            async with self._appended(kind, work):
                places = [work.places[digest] for digest in work.right]
                for garbage in await self._engine.transact(
                    chunks.replace_shared, places, work.lost
                ):
                    self._collector.add_garbage(garbage)
                faults.reach(_REPLACED)
            kind.known.update(place.digest for place in places)
            again = work.senders.keys() - work.right
            digests = [*again, *digests[_REPLACED_AT_ONCE:]]
            kind.report.replaced_chunks += len(places)

    async def _plan(self, kind: MemberKind, new: dict[bytes, Need]) -> None:
        """Choose a slot for each new chunk. Raises NoSpace."""
        begin = trio.current_time()
        report = kind.report
        devices = [member.copy.server for member in kind.members]
        sources, free = self.bandwidths.of_burst(set(devices)), self.bandwidths.free()
        rates = self.bandwidths.of_servers()
        try:
            known = {number: (rate, free[number]) for number, rate in rates.items()}
            found = await _work(kind.members[0], kind.ask, new, devices, sources, known)
        except NoSpace:  # free space is known as last seen, and what is short of it will say so
            known = {number: (rate, None) for number, rate in rates.items()}
            found = await _work(kind.members[0], kind.ask, new, devices, sources, known)
        kind.assigned, report.planned_s, report.lower_bound_s = found
        report.plan_s += trio.current_time() - begin

    async def assign(
        self,
        asked: Asked,
        needs: Mapping[bytes, Need],
        devices: Sequence[int],
        sources: Mapping[int, int],
        links: Mapping[int, tuple[int, int]],
    ) -> tuple[tuple[Striped, ...], dict[bytes, Assigned]]:
        """The plan for several hosts' chunks: slots, and by chunk its slot and device. See
        sharing.ask. Raises NoSpace, NotSupported, Unavailable."""
        slots = self._containers.slots(asked.redundancy, asked.servers)
        free = self.bandwidths.free()
        rates = self.bandwidths.of_servers()
        known = {number: (rate, free[number]) for number, rate in rates.items()}

        def ask() -> dict[bytes, Assigned]:
            question = sharing.ask(needs, devices, sources, slots, known, links)
            return sharing.answer(question, planner.plan(question.pattern), sources)

        workers = self._servers[slots[0].servers[0]].workers
        return slots, (await gather([(workers, ask, ())]))[0]

    # --- for other hosts ---

    async def keep(
        self, kind: MemberKind, wanted: Mapping[bytes, tuple[int, ...]], lists: list[int]
    ) -> set[bytes]:
        """Store these chunks in containers on the named servers; returns those in the store. Lists
        of no file name them, added to ``lists`` before they are made, for the collector."""
        kept: set[bytes] = set()
        cuts = [member.cut for member in kind.members]
        kind.needs, _ = await _work(kind.members[0], sharing.distinct, cuts)
        try:
            kind.slots = self._containers.slots(kind.asked.redundancy, kind.asked.servers)
            number = {slot.servers: index for index, slot in enumerate(kind.slots)}
            found = {digest: servers for digest, servers in wanted.items() if digest in kind.needs}
            kind.assigned = {d: Assigned(number.get(s, 0), -1) for d, s in found.items()}
            for batch in _batches(list(found), kind.needs):
                lists.append(await self._ids.take())
                kept |= await self._keep(kind, batch, lists[-1])
        except FsError as error:
            _log.info("chunks of a group are not kept for other hosts: %s", error)
        return kept

    async def _keep(self, kind: MemberKind, digests: list[bytes], oid: int) -> set[bytes]:
        work, holding = _Work(kind.slots), kind.holding()
        for digest in digests:
            kind.add(work, digest, holding)
        async with self._appended(kind, work):
            extents_found = [
                named(kind.needs[digest].length, digest)._replace(place=work.places[digest])
                for digest in work.right
            ]
            await self._containers.list_extents(oid, extents_found, work.right, work.lost)
        faults.reach(_KEPT)
        report = kind.report
        report.distinct_bytes += (size := sum(kind.needs[d].length for d in work.right))
        report.duplicate_bytes -= size  # each member that has it counts it as one
        report.chunks += len(work.right)
        kind.count_stored(work, work.right)
        return work.right

    # --- storing ---

    async def _store(self, kind: MemberKind, batch: list[Prepared]) -> None:
        failure: FsError = Stale("its chunks change faster than they can be stored")
        for _ in range(_ROUNDS_MAX):
            for member in batch:
                if member.outcome is None and not member.holds():
                    member.outcome = DrainOutcome.CHANGED
            alive = [member for member in batch if member.outcome is None]
            if not alive:
                return
            holding = kind.holding()
            try:
                await self._store_round(kind, alive)
            except FsError as error:
                failure = error
                if holding <= kind.holding():
                    break
                # One that has been cut or deleted meanwhile may have spoilt it for the others.
        kind.fail(batch, failure)

    async def _store_round(self, kind: MemberKind, alive: list[Prepared]) -> None:
        """Store these members' needs, and flip those still right. Raises NoSpace, Unavailable."""
        work, holding = _Work(kind.slots), kind.holding()
        for member in alive:
            self._drainer.drop_made(member)  # the list of the last round
            member.oid = await self._ids.take()
            await _work(member, kind.add_all, work, member, holding)
        async with self._appended(kind, work):
            for member in alive:
                await _work(member, kind.finish, work, member)
            faults.reach(_APPENDED)
            await self._flip(kind, alive, work)

    @asynccontextmanager
    async def _appended(self, kind: MemberKind, work: _Work) -> AsyncIterator[None]:
        """What is to be appended is durable within the block, which records it. After failures it
        counts as dead: else its bytes would be unknown, in a full container for ever."""
        async with AsyncExitStack() as stack:
            try:
                await self._append(kind, work, stack)
                yield
            except FsError:
                with suppress(FsError):
                    await self._engine.transact(
                        chunks.put_dead, list(work.places.values()), work.lost
                    )
                raise

    async def _append(self, kind: MemberKind, work: _Work, stack: AsyncExitStack) -> None:
        """Append to all slots at a time; pinned until ``stack`` ends."""

        async def append(number: int) -> None:
            stored = [piece for _, piece in work.pieces[number]]
            appended: Stored = await stack.enter_async_context(
                self._containers.append_pieces(stored, (kind.slots[number],), self._drainer.movers)
            )
            work.places |= zip(
                (key for key, _ in work.pieces[number]), appended.places, strict=True
            )
            work.lost |= appended.lost

        begin = trio.current_time()
        await run_all(*(partial(append, number) for number, some in enumerate(work.pieces) if some))
        holding = {sender for sender in set(work.senders.values()) if sender.holds()}
        work.right = {digest for digest, sender in work.senders.items() if sender in holding}
        kind.report.store_s += trio.current_time() - begin

    async def _flip(self, kind: MemberKind, alive: list[Prepared], work: _Work) -> None:
        new = work.right
        lost = work.senders.keys() - new
        ready = [member for member in alive if lost.isdisjoint(member.cut.digests)]
        while ready:
            try:
                for member in ready:
                    await self._drainer.list_extents(member, new, work.lost)
                await self._drainer.flip(ready, work.lost, new)
                break
            except Stale:
                leaned = {
                    d
                    for m in ready
                    for d in m.cut.digests
                    if d and d not in new and d not in kind.own
                }
                gone = leaned - (await self._engine.view(shared.find_all_shared, leaned)).keys()
                if not gone:
                    raise
                kind.known -= gone
                ready = [member for member in ready if gone.isdisjoint(member.cut.digests)]
        drained = [member for member in ready if member.outcome is DrainOutcome.DRAINED]
        if drained:
            faults.reach(_FLIPPED)
            await _work(drained[0], kind.count, drained, work)


def _batches(digests: list[bytes], needs: Mapping[bytes, Need]) -> Iterator[list[bytes]]:
    """Batches made to count together."""
    batch: list[bytes] = []
    size = 0
    for digest in digests:
        batch.append(digest)
        size += needs[digest].length
        if size >= _BATCH or len(batch) >= _BATCH_CHUNKS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


async def _work(member: Prepared, function: Callable[..., Any], *args: Any) -> Any:
    return (await gather([(member.copy.device.workers, function, args)]))[0]
