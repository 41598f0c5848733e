"""Adding, draining, replacing and removing servers while the store is in use.

Orders return once on record; work goes on in the background, over restarts: ``rebuild`` moves
columns off data servers, this part empties burst directories. A removal first looks through the
store; ``describe`` shows its outcome.

Nothing available is given up: a replaced server that is there is drained; an absent one counts as
lost only if it holds no unprotected bytes, or a user says that these may be lost.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import trio

from aifs.burst.tier import BurstTier
from aifs.core.errors import Busy, FsError, Invalid, StoreError, Unavailable
from aifs.core.log import logger
from aifs.core.units import describe_size
from aifs.core.upkeep import NEVER_S, Work
from aifs.data.server import DataServer, name_of, role_of
from aifs.data.servers import Servers
from aifs.data.workers import gather
from aifs.files.drain import Drain
from aifs.files.file_io import FileIO
from aifs.files.services import Services
from aifs.layout.placement import ACTIVE, BURST_FIRST, DRAINING, LOST
from aifs.meta import keys, server_uses
from aifs.meta import servers as records
from aifs.meta.kv import Engine
from aifs.meta.server_uses import Copies, Uses, total
from aifs.store.backup import Backup
from aifs.store.store import Store
from aifs.upkeep.evict import Evictor
from aifs.upkeep.from_copies import FromCopies
from aifs.upkeep.rebuild import Rebuild

_log = logger(__name__)

WATCHERS = 1 << 10
"""Concurrent looks at data servers: each waits for hung ones, no two for the same."""

_PAUSE_S = 1.0
_REACH_S = 5.0
_FAILED_SHOWN = 10


class Removal(NamedTuple):
    """Why a removal is refused ('' if done), and whether the reason passes."""

    reason: str = ""
    passing: bool = False


class ServerAdmin:
    """Used from one trio thread; ``watch`` and ``work`` are its background work."""

    def __init__(
        self,
        services: Services,
        tier: BurstTier,
        io: FileIO,
        drain: Drain,
        backup: Backup,
        evictor: Evictor,
        rebuild: Rebuild,
        from_copies: FromCopies,
    ) -> None:
        self._engine = services.engine
        self._servers = services.servers
        self._table = services.table
        self._tier = tier
        self._drain = drain
        self._evictor = evictor
        self._rebuild = rebuild
        self._io = io
        self._collector = services.collector
        self._backup = backup
        self._from_copies = from_copies
        self._upkeep = services.upkeep
        self._changes = services.servers.changes  # as the rebuild knows them
        self._removals: dict[int, tuple[bool, bool]] = {}  # asked for; ``lost``, ``lose_files``
        self._outcomes: dict[int, Removal] = {}
        self._copies: dict[int, int] = {}
        self._refused = ""

    # --- orders ---

    async def add(self, path: str, role: str, domain: str, storage_class: str = "") -> int:
        """A new server, which new files use, or those that have aged; its id. Raises Invalid."""
        return await self._told(self._add(path, role, domain, storage_class))

    async def drain(self, server_id: int, undo: bool = False) -> None:
        """Drain a server: no new objects, and its objects move; ``undo``: use it again. Raises
        Invalid."""
        await self._told(self._set_draining(server_id, undo))

    async def replace(self, server_id: int, path: str) -> int:
        """A new data server, which takes over from another one; its id. Raises Invalid."""
        return await self._told(self._replace(server_id, path))

    async def remove(self, server_id: int, lost: bool = False, lose_files: bool = False) -> None:
        """Take an empty server out of the store; ``describe`` shows the outcome. Raises Invalid,
        Busy. ``lost``: it is gone for good, protected files are rebuilt. Refused if files would be
        lost, unless ``lose_files``."""
        await self._told(self._ask_to_remove(server_id, lost, lose_files))

    async def _told(self, order: Any) -> Any:
        """Keep refusals for ``describe``: a program gets only an errno."""
        self._refused = ""
        try:
            return await order
        except (FsError, StoreError) as error:
            self._refused = str(error)
            raise Invalid(str(error)) if isinstance(error, StoreError) else error from None

    async def _add(self, path: str, role: str, domain: str, storage_class: str) -> int:
        server_id = await self._table.add(path, role, domain, storage_class)
        _log.info("%s is added: %s", name_of(server_id), path)
        self._rebuild.look()
        return server_id

    async def _set_draining(self, server_id: int, undo: bool) -> None:
        record = await self._table.find(server_id)
        if record.state == LOST:
            raise Invalid(f"{name_of(server_id)} is lost, and is not used any more")
        if not undo:
            self._require_another(server_id)
        await self._change(server_id, ACTIVE if undo else DRAINING)

    async def _replace(self, server_id: int, path: str) -> int:
        record = await self._table.find(server_id)
        if server_id >= BURST_FIRST:
            raise Invalid(
                "a burst directory is not replaced: add the new one, drain and remove the old one"
            )
        if record.successor is not None:
            raise Invalid(
                f"{name_of(server_id)} is being replaced by data server {record.successor} already"
            )
        server = self._servers[server_id]
        state = record.state if record.state == LOST else DRAINING
        if state == DRAINING and not await self._is_there(server):
            if await self._is_dispensable(server_id):
                state = LOST
            else:
                _log.warning(
                    "%s is replaced, but unprotected files have bytes there, which wait until it "
                    "is back",
                    server.name,
                )
        new = await self._table.replace(server_id, path, state)
        _log.info("%s is %s, data server %d takes over", server.name, state, new)
        self._rebuild.look()
        return new

    async def _is_there(self, server: DataServer) -> bool:
        """Whether it can be reached now; a slow answer counts as yes."""
        with trio.move_on_after(0 if server.absent else _REACH_S):
            try:
                await gather([(server.workers, server.reach, ())], abandonable=True)
            except Unavailable:
                return False
        return not server.absent

    async def _answers(self, server: DataServer) -> bool:
        return not server.hangs and await self._is_there(server) and server.state in ("ok", "back")

    async def _is_dispensable(self, server_id: int) -> bool:
        if server_id not in await self._engine.view(records.find_unprotected):
            return True
        # The mark outlives the last such file.
        _, files = await count_uses(self._engine, self._servers, server_id)
        return not files

    async def _ask_to_remove(self, server_id: int, lost: bool, lose_files: bool) -> None:
        record = await self._table.find(server_id)
        if lost and server_id >= BURST_FIRST:
            raise Invalid(
                "a burst directory that is gone is taken out of the store like any other one"
            )
        if lost and record.state != LOST:
            if await self._answers(self._servers[server_id]):
                raise Busy(
                    f"{name_of(server_id)} is there: drain it instead, so that nothing is lost"
                )
            self._require_another(server_id)
        elif record.state == ACTIVE:
            raise Busy(f"{name_of(server_id)} is in use: drain it first")
        self._outcomes.pop(server_id, None)
        self._removals[server_id] = (lost, lose_files)
        self._upkeep.wake(Work.SERVERS)

    def _require_another(self, server_id: int) -> None:
        active = (s for s in self._servers.capacity() if s.standing == ACTIVE and not s.absent)
        if server_id < BURST_FIRST and {s.id for s in active} <= {server_id}:
            raise Invalid(f"there is no other data server in use than {server_id}: add one first")

    async def _change(self, server_id: int, state: str) -> None:
        await self._table.change(server_id, state)
        _log.info("%s is %s", name_of(server_id), "in use again" if state == ACTIVE else state)
        self._rebuild.look()
        self._upkeep.wake(Work.SERVERS)

    # --- in the background ---

    async def watch(self) -> float:
        """Look at the data servers, hung ones apart from others."""
        again_s = self._servers.watch_again_s(is_busy=not self._io.inodes.is_resting)
        self._upkeep.at(Work.WATCH_SERVERS, trio.current_time() + again_s)
        await self._servers.watch()
        if self._servers.changes != self._changes:
            self._changes = self._servers.changes
            self._rebuild.look()
        return self._servers.watch_again_s(is_busy=not self._io.inodes.is_resting)

    async def work(self) -> float:
        """Carry out removals, and empty burst directories; returns seconds to the next look."""
        while self._removals:
            server_id, asked = next(iter(self._removals.items()))
            outcome = await self._remove(server_id, *asked)
            # Another removal of it may have been asked for meanwhile.
            if not outcome.reason or self._removals[server_id] == asked:
                self._outcomes[server_id] = outcome
                del self._removals[server_id]
        return _PAUSE_S if await self._empty_burst() else NEVER_S

    async def clean_up(self) -> None:
        """Delete objects that wait for it, which are on record until then. Raises NoSpace or
        Unavailable if the metadata cannot be changed."""
        await self._collector.drain(urgent=True)
        await self._rebuild.strays.sweep(urgent=True)

    async def _remove(self, server_id: int, lost: bool, lose_files: bool) -> Removal:
        try:
            if server_id >= BURST_FIRST:
                return await self._remove_burst(server_id)
            return await self._remove_data(server_id, lost, lose_files)
        except Busy as error:
            server = self._servers.find(server_id)
            if server is not None and server.is_gone:
                return Removal(f"{error}; it is gone: if that is for good, remove it with --lost")
            return Removal(str(error), passing=True)
        except (FsError, StoreError) as error:
            return Removal(str(error))

    async def _remove_data(self, server_id: int, lost: bool, lose_files: bool) -> Removal:
        name = name_of(server_id)
        is_lost = (await self._table.find(server_id)).state == LOST
        uses, files = await count_uses(self._engine, self._servers, server_id)
        if files and (lost or is_lost):
            await self._from_copies.rescue({server_id})
            uses, files = await count_uses(self._engine, self._servers, server_id)
        if lost and not is_lost:
            if files and not lose_files:
                return Removal(f"{_count(files, 'file')} would be lost with {name}")
            await self._change(server_id, LOST)
            is_lost = True
        if files and is_lost:
            lost_files = f"{_count(files, 'file')} cannot be read without {name}"
            hint = "delete what is lost first; aifs fsck names it"
            return Removal(f"{lost_files}, which is lost: {hint}")
        if uses.unreadable:
            unreadable = f"{_count(uses.unreadable, 'record')} cannot be read"
            return Removal(f"{unreadable}, and may refer to {name}: run aifs fsck first")
        if uses.objects:
            self._rebuild.look()
            verb = "rebuilt" if is_lost else "moved"
            objects = f"{_count(uses.objects, 'object')} ({describe_size(uses.length)})"
            return Removal(f"{objects} of {name} have to be {verb} first", passing=True)
        try:
            await self._backup.leave_servers()
        except FsError as error:
            reason = f"{name} may have the only backup of the metadata, and no other can be made"
            return Removal(f"{reason}: {error}", passing=True)
        await self.clean_up()
        if not is_lost:
            # Objects that were begun before the server was drained may have been made meanwhile.
            await self._table.require_settled(server_id)
            if (await count_uses(self._engine, self._servers, server_id))[0].objects:
                return Removal(f"objects have just been made on {name}", passing=True)
        await self._table.remove(server_id)
        self._forget(server_id)
        return Removal()

    async def _remove_burst(self, server_id: int) -> Removal:
        if self._tier.is_entered(server_id):
            return Removal(f"files are being made on {name_of(server_id)} just now", passing=True)
        copies = await find_copies(self._engine, server_id)
        count = len(copies.clean) + len(copies.dirty)
        if count:
            reason = f"{_count(count, 'file')} have copies on {name_of(server_id)} still"
            return Removal(reason, passing=True)
        await self._tier.remove(server_id)
        await self._table.remove(server_id)
        self._forget(server_id)
        return Removal()

    def _forget(self, server_id: int) -> None:
        self._copies.pop(server_id, None)
        _log.info("%s is removed", name_of(server_id))
        self._rebuild.look()

    async def _empty_burst(self) -> bool:
        """Drain and evict files on burst directories to be left; whether that takes longer."""
        for device in self._servers.burst():
            if device.standing == DRAINING and not device.absent and not self._servers.read_only:
                copies = await find_copies(self._engine, device.id)
                self._drain.request(copies.dirty)
                for ino in await self._evictor.give_up(copies.clean):
                    await self._from_copies.restore(ino)
                self._copies[device.id] = len(copies.dirty) + len(copies.clean)
            else:
                self._copies.pop(device.id, None)
        return any(self._copies.values())

    # --- figures ---

    async def describe(self) -> dict[str, Any]:
        """For ``aifs server``: servers, what is left on those to be left (null: unknown yet),
        speed, immovable objects; outcomes of removals (null while they run); why the last order was
        refused."""
        status = self._rebuild.status()
        outcomes = self._outcomes | dict.fromkeys(self._removals)
        return {
            "servers": _rows(self._servers, self._left),
            "bytes_per_s": status["rate"],
            "estimate_s": status["estimate_s"],
            "failing": status["failing_objects"],
            "failed": status["failed"][:_FAILED_SHOWN],
            "removals": [
                {
                    "role": role_of(server),
                    "id": server % BURST_FIRST,
                    "outcome": outcome and outcome._asdict(),
                }
                for server, outcome in outcomes.items()
            ],
            "refused": self._refused,
        }

    def _left(self, server: DataServer) -> dict[str, int] | None:
        left = self._rebuild.left(server.id)
        if server.role == "burst":
            copies = self._copies.get(server.id)
            left = None if copies is None else (copies, self._tier.used(server.id))
        return None if left is None else {"objects": left[0], "bytes": left[1]}


async def describe_idle(store: Store) -> dict[str, Any]:
    """The same of a store that is open, but not served: nothing moves there."""
    left = {}
    for server in store.servers.values():
        if server.standing != ACTIVE and server.role == "data":
            uses, _ = await count_uses(store.engine, store.servers, server.id)
            left[server.id] = {"objects": uses.objects, "bytes": uses.length}
    figures: dict[str, Any] = {
        "bytes_per_s": 0,
        "estimate_s": None,
        "failing": 0,
        "failed": [],
        "removals": [],
    }
    rows = _rows(store.servers, lambda server: left.get(server.id))
    return {"servers": rows, **figures, "refused": ""}


def _rows(
    servers: Servers, left: Callable[[DataServer], dict[str, int] | None]
) -> list[dict[str, Any]]:
    rows = servers.rows()
    for server, row in zip(servers.values(), rows, strict=True):
        row["successor"] = servers.prefer.get(server.id)
        row["left"] = None if server.standing == ACTIVE else left(server)
    return rows


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


async def count_uses(engine: Engine, servers: Servers, server: int) -> tuple[Uses, int]:
    """Columns on a data server, and how many files need it, given all lost ones."""
    gone = frozenset(
        {server, *(other.id for other in servers.capacity() if other.standing == LOST)}
    )
    files = await _collect(engine, b"i", server_uses.scan_files, server, gone)
    containers = await _collect(engine, b"t", server_uses.scan_containers, server, gone)
    lost = len(total(files).lost)
    if ids := frozenset(total(containers).lost):
        lost += len(set().union(*await _collect(engine, b"l", server_uses.scan_chunk_lists, ids)))
    return total([*files, *containers]), lost


async def find_copies(engine: Engine, device: int) -> Copies:
    """The burst copies that lie on a burst directory."""
    parts = await _collect(engine, b"b", server_uses.scan_copies, device)
    return Copies(*(tuple(item for part in parts for item in part[place]) for place in range(2)))


async def _collect(
    engine: Engine, kind: bytes, scan: Callable[..., tuple[Any, bytes]], *args: Any
) -> list[Any]:
    found = []
    start, end = keys.all_of(kind)
    while start:
        part, start = await engine.view(scan, start, end, *args)
        if part and any(part):
            found.append(part)
        await trio.lowlevel.checkpoint()
    return found
