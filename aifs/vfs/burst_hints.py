"""Hints of the burst tier: where the bytes of a file or a tree are, and to drain, stage, evict.

Setting a hint returns at once, because the kernel holds the inode's lock meanwhile. ``state`` and
``drain`` report progress, and the call ``drain`` waits.
"""

import math
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, NamedTuple

import trio

from aifs.burst.remote import EVICT
from aifs.burst.tier import BurstTier
from aifs.core.errors import (
    Busy,
    Invalid,
    NotFound,
    NotPermitted,
    NotSupported,
    TimedOut,
    Unavailable,
)
from aifs.data.reading.blocks import Blocks, NoBlocks
from aifs.files import rights
from aifs.files.asks import BOTH, FILE, Ask, Hint, HintCall, bare
from aifs.files.damage import Needs
from aifs.files.drain import Drain
from aifs.files.file_io import FileIO
from aifs.files.open_inode import OpenInode
from aifs.files.services import Services
from aifs.files.stage import InBlocks, find_in_blocks, is_pinned, parts_kept
from aifs.files.types import CallerLike
from aifs.files.views import reaches
from aifs.meta import forms, keys, shared
from aifs.meta.kv import ReadTransaction
from aifs.meta.listing import list_directory
from aifs.meta.namespace import find_inode
from aifs.meta.records import Inode, decode_burst
from aifs.peers.transport import Answer, Body, Peer
from aifs.upkeep.evict import Evictor
from aifs.vfs.attributes import Attributes

STATES = ("dirty", "draining", "clean", "cached")
"""Of a file: its newest bytes are in the burst tier alone; they are being drained; the data servers
have them; they need no data server (except the end of a container still appended to). A directory
has the first of these among its files."""

_STAYS = {
    "dirty": "its newest bytes are in the burst tier alone; drain it first",
    "pinned": "it is pinned to the burst tier; unpin it first",
    "open": "programs have it open or mapped, or did a moment ago",
    "needed": "bytes of it are missing on the data servers, or these do not answer: the copy may "
    "be the only one",
}
"""Why a copy is not given up."""

_FILES_ALONE = "only regular files can be moved between the tiers"

_DROPPED = 256
"""Files in one transaction."""

_ENTRIES = 64  # looked at in one go: about 0.3 ms


class Place(NamedTuple):
    """An inode as in core, its directory cookie, since when it is undrained (0: it is drained), and
    its bytes in blocks here."""

    inode: Inode
    cookie: int
    since_ns: int
    in_blocks: InBlocks


def state_of(inode: Inode, file: OpenInode | None, is_in_blocks: bool = False) -> str:
    """One of STATES, for a regular file; ``file``: its in-core state, if it has one."""
    if inode.in_burst:
        return "draining" if file is not None and file.lease is not None else "dirty"
    is_far = inode.copy is None and inode.layout is not None and not is_in_blocks
    return "clean" if is_far else "cached"


class BurstHints:
    """Where the bytes of files and trees are, and requests that change it."""

    def __init__(
        self,
        services: Services,
        tier: BurstTier,
        io: FileIO,
        drain: Drain,
        needs: Needs,
        evictor: Evictor,
        attributes: Attributes,
    ) -> None:
        self._engine = services.engine
        self._tier = tier
        self._io = io
        self._drain = drain
        self._stager = io.stager
        self._needs = needs
        self._evictor = evictor
        self._attributes = attributes
        self._homes = io.homes
        self._without_blocks = "off" if services.config.burst.blocks == "off" else "near"
        services.peers.serve(EVICT, self._serve_evict)

    # --- where the bytes are ---

    async def state(self, ino: int) -> dict[str, Any]:
        """``state``, ``since_s`` (epoch: undrained since; null), ``bytes`` and ``files`` by state,
        and ``block_bytes`` in blocks here; for a file also whether it has a burst copy, needs
        neither data servers nor blocks (``local``), is open, pinned, being staged, or needed (see
        Evictor). Files with several names below a directory count once."""
        inode = await self._attributes.getattr(ino)
        files, sizes, since_ns, block_bytes = Counter[str](), Counter[str](), 0, 0
        async for place in self._files_below(inode, self._tier.blocks):
            file = self._io.table.open.get(place.inode.ino)
            name = state_of(place.inode, file, place.in_blocks.is_whole)
            files[name] += 1
            sizes[name] += place.inode.size
            block_bytes += place.in_blocks.here
            if place.since_ns:
                since_ns = min(since_ns or place.since_ns, place.since_ns)
        answer: dict[str, Any] = {
            "state": next((name for name in STATES if files[name]), "clean"),
            "since_s": since_ns / 1e9 if since_ns else None,
            "bytes": {name: sizes[name] for name in STATES},
            "files": {name: files[name] for name in STATES},
            "block_bytes": block_bytes,
        }
        if inode.is_file:
            answer["copy"] = inode.copy is not None
            answer["local"] = inode.copy is not None or inode.layout is None
            answer["open"] = ino in self._io.table.programs_have_open()
            answer["pinned"] = is_pinned(inode)
            answer["needed"] = inode.copy is not None and self._needs.is_needed(inode.copy.id)
            answer["staging"] = self._stager.is_staging(ino)
        return answer

    async def sharing(self, ino: int) -> dict[str, int]:
        """Bytes of a file, or of files below a directory, by sharing: removal would free
        ``unique_bytes``, not ``shared_bytes``, which clones elsewhere have. Bytes shared within a
        tree count once. Of a directory also ``files``, and ``bytes`` as ls(1) adds them up."""
        inode = await self._attributes.getattr(ino)
        files = size = unique = common = 0
        elsewhere: dict[int, int] = {}  # oid -> how many of its users we have not met
        async for place in self._files_below(inode, NoBlocks()):
            found, space = place.inode, place.inode.space
            files, size = files + 1, size + found.size
            if not found.named:
                unique += space
                continue
            if found.oid not in elsewhere:
                users = await self._engine.view(shared.users, found.oid)
                elsewhere[found.oid], common = len(users), common + space
            elsewhere[found.oid] -= 1
            if not elsewhere[found.oid]:
                del elsewhere[found.oid]
                unique, common = unique + space, common - space
        told = {"unique_bytes": unique, "shared_bytes": common}
        return {"files": files, "bytes": size} | told if inode.is_dir else told

    async def _files_below(self, top: Inode, blocks: Blocks) -> AsyncIterator[Place]:
        """The regular files of a tree, or the file, with their bytes in these blocks. Other tasks
        run between slices."""
        if top.is_file:
            yield self._current(await self._engine.view(_place, top, 0, blocks))
            return
        several: set[int] = set()
        directories = [top.ino]
        while directories:
            directory, cookie = directories.pop(), 0
            while places := await self._engine.view(_list, directory, blocks, cookie):
                for place in places:
                    inode, cookie = place.inode, place.cookie
                    if inode.is_dir:
                        directories.append(inode.ino)
                    elif inode.is_file and inode.ino not in several:
                        if inode.nlink > 1:
                            several.add(inode.ino)
                        yield self._current(place)
                await trio.lowlevel.checkpoint()

    def _current(self, place: Place) -> Place:
        file = self._io.table.open.get(place.inode.ino)
        return place if file is None else place._replace(inode=self._io.inodes.attributes(file))

    # --- drain ---

    async def progress(self, ino: int, caller: CallerLike) -> dict[str, Any]:
        """Undrained files of ``ino`` or below: files, bytes, files open for writing (their drain
        waits), and the oldest one's time (epoch, ns; null): requests need not wait for younger
        ones. ``error``: why draining has to wait anywhere. ``hosts``: bytes by other hosts.
        ``again_files``: drained lately and changed since; the first is drained in ``again_in_s``
        (null)."""
        undrained = await self._drain.undrained_below(await self._attributes.getattr(ino))
        due_in = self._drain.due_in()
        again = [due_in[file.ino] for file in undrained if file.ino in due_in]
        elsewhere = Counter[int]()
        for file in undrained:
            elsewhere[file.home] += file.size if file.home else 0
        told = {
            "hosts": {await self._homes.name_of(it): elsewhere[it] for it in elsewhere if it},
            "files": len(undrained),
            "bytes": sum(file.size for file in undrained),
            "open_files": sum(file.writers > 0 for file in undrained),
            "oldest_since_ns": min((file.since_ns for file in undrained), default=None),
            "error": self._drain.obstacle,
            "again_files": len(again),
            "again_in_s": round(min(again), 3) if again else None,
        }
        return rights.without_reason(told, caller)

    async def request_drain(self, ino: int) -> None:
        """Drain the undrained files of ``ino`` or below ahead of all else."""
        await self._drain.request_below(await self._attributes.getattr(ino))

    async def wait_drained(self, ino: int, timeout_s: float | None = None) -> None:
        """Wait until the undrained files of ``ino`` or below are on the capacity tier, or gone.
        Raises TimedOut. Ending the wait does not end the drain."""
        with trio.move_on_after(math.inf if timeout_s is None else timeout_s) as scope:
            await self._drain.wait_below(await self._attributes.getattr(ino), strict=False)
        if scope.cancelled_caught:
            raise TimedOut(f"inode {ino}: not all is drained after {timeout_s} s")

    # --- stage and evict ---

    async def stage(self, ino: int) -> None:
        """Bring a file into the burst tier in the background. Raises Invalid, NotSupported."""
        inode = await self._file(ino)
        if inode.copy is None and inode.layout is not None:
            if not self._tier.has_devices:
                raise NotSupported("the store has no burst tier")
            self._stager.request(inode)

    async def stage_all(self, ask: Ask) -> dict[str, Any]:
        """See the call. Raises Invalid, NotSupported."""
        limit, there = ask.fields.get("limit", math.inf), 0
        chosen, kept = list[Inode](), Counter[str]()
        inos = dict.fromkeys(ask.fields.get("inos") or [ask.ino])
        for place in await self._files([*inos]):
            inode = place.inode
            if _is_there(place):
                there += 1
            elif why := await self._engine.view(self._why_not, inode, ask.caller):
                kept[why] += 1
            elif inode.size > limit:
                kept["limit"] += 1
            else:
                limit -= inode.size
                chosen.append(inode)
        await self._stager.bring_all(chosen)
        files = sizes = 0
        for place in await self._files([inode.ino for inode in chosen]):
            if _is_there(place):
                files, sizes = files + 1, sizes + place.inode.size
            else:
                kept["room"] += 1
        return {"files": files, "bytes": sizes, "there": there, "kept": kept}

    async def _files(self, inos: Sequence[int]) -> list[Place]:
        """Those that are still there. Raises Invalid."""
        found = list[Place]()
        for first in range(0, len(inos), _ENTRIES):
            some = inos[first : first + _ENTRIES]
            found += map(self._current, await self._engine.view(_find, some, self._tier.blocks))
            await trio.lowlevel.checkpoint()
        if not all(place.inode.is_file for place in found):
            raise Invalid(_FILES_ALONE)
        return found

    def _why_not(self, tx: ReadTransaction, inode: Inode, caller: CallerLike) -> str:
        """Why a file is not staged, see the call; '': it is tried. Raises NotSupported."""
        if not self._tier.has_devices:
            raise NotSupported("the store has no burst tier; burst.directories names its places")
        try:
            rights.owner(inode, caller)
            if not reaches(tx, inode, caller):
                return "owner"
            if is_pinned(inode):
                return ""
            if inode.policy is not None and inode.policy.tier == "capacity":
                return "capacity"
            return "" if parts_kept(tx, inode, self._tier.blocks) else self._without_blocks
        except NotPermitted:
            return "owner"
        except Unavailable:  # told in the log when it is tried
            return ""

    async def evict(self, ino: int) -> None:
        """Give up a file's clean copy on any host. Raises Invalid; Busy if dirty, pinned, open or
        needed; Unavailable if its host cannot be asked."""
        inode = await self._file(ino)
        home = 0 if inode.in_burst or inode.copy is None else self._homes.of(inode.copy.server)
        await (self._homes.evict(home, ino) if home else self._evict(inode))

    async def _serve_evict(self, asker: Peer, ino: Any, body: Body) -> Answer:
        """Give up the clean copy here, and on record there. Raises Busy as ``evict``."""
        await self._evict(await self._file(ino))
        await self._engine.shown()
        return Answer()

    async def _evict(self, inode: Inode) -> None:
        if reason := (await self._drop([inode])).get(inode.ino):
            raise Busy(_STAYS[reason])

    async def evict_all(self, ask: Ask) -> dict[str, Any]:
        """See the call. Raises Unavailable if another host cannot be asked."""
        gone, sizes, kept = 0, 0, Counter[str]()
        some = list[Place]()

        async def drop(places: Sequence[Place]) -> None:
            nonlocal gone, sizes
            reasons = await self._drop([place.inode for place in places])
            kept.update(reasons.values())
            done = [place for place in places if place.inode.ino not in reasons]
            gone += len(done)
            sizes += sum(_bytes_here(place) for place in done)

        for ino in ask.fields.get("inos") or [ask.ino]:
            try:
                top = await self._attributes.getattr(ino)
            except NotFound:
                continue
            if not await self._engine.view(reaches, top, ask.caller):
                kept["owner"] += 1
                continue
            async for place in self._files_below(top, self._tier.blocks):
                inode = place.inode
                if inode.copy is None and not _bytes_here(place):
                    continue
                home = (
                    0 if inode.in_burst or inode.copy is None else self._homes.of(inode.copy.server)
                )
                try:
                    rights.owner(inode, ask.caller)
                    if home:
                        await self._homes.evict(home, inode.ino)
                        gone, sizes = gone + 1, sizes + inode.size
                    else:
                        some.append(place)
                except NotPermitted:
                    kept["owner"] += 1
                except Busy:
                    kept["open"] += 1
                except NotFound:
                    pass
                if len(some) == _DROPPED:
                    await drop(some)
                    some = []
        await drop(some)
        return {"files": gone, "bytes": sizes, "kept": kept}

    async def _drop(self, inodes: Iterable[Inode]) -> dict[int, str]:
        """Give up files' clean copies and blocks here; returns a key of _STAYS, by inode number,
        for those that keep theirs."""
        stays, copies = dict[int, str](), dict[int, int]()
        for inode in inodes:
            if inode.in_burst:
                stays[inode.ino] = "dirty"
                continue
            self._io.table.recall(inode.ino)  # it is not lent any more, if it is not open
            if await self._tier.blocks.is_used(inode.oid):
                stays[inode.ino] = "open"
                continue
            self._tier.blocks.end(inode.oid)
            if inode.copy is not None and is_pinned(inode):
                stays[inode.ino] = "pinned"
            elif inode.copy is not None:
                copies[inode.copy.id] = inode.ino
        gone = await self._evictor.evict_copies(copies) if copies else ()
        there = await self._engine.view(forms.find_copy_owners, copies.keys() - set(gone))
        for copy_id, ino in there.items():
            stays[ino] = "needed" if self._needs.is_needed(copy_id) else "open"
        return stays

    async def _file(self, ino: int) -> Inode:
        inode = await self._attributes.getattr(ino)
        if not inode.is_file:
            raise Invalid(_FILES_ALONE)
        return inode

    HINTS = (
        Hint(
            "state",
            BOTH,
            "where the bytes are: dirty, draining, clean, cached",
            rights.reader,
            get=lambda burst, ask: burst.state(ask.ino),
        ),
        Hint(
            "sharing",
            BOTH,
            "bytes that nobody else has, and others; of a directory: aifs info --tree",
            rights.reader,
            get=lambda burst, ask: burst.sharing(ask.ino),
            is_costly=True,
        ),
        Hint(
            "drain",
            BOTH,
            "what is not on the data servers; set it to '' to drain that first",
            rights.reader,
            rights.writer,
            get=lambda burst, ask: burst.progress(ask.ino, ask.caller),
            set=bare(lambda burst, ask: burst.request_drain(ask.ino)),
            call=HintCall(
                rights.writer,
                lambda burst, ask: burst.wait_drained(ask.ino, ask.timeout_s()),
                {"timeout_ms": int},
                "Returns when the bytes of the file, or of all files below the directory, that "
                "have been acknowledged are on the capacity tier. timeout_ms 0: none. ETIMEDOUT.",
                where=BOTH,
                changes=False,
            ),
        ),
        Hint(
            "stage",
            FILE,
            "set it to '' to bring the file into the burst tier",
            change=rights.owner,
            set=bare(lambda burst, ask: burst.stage(ask.ino)),
            call=HintCall(
                rights.anybody,  # except for files that are not the caller's
                lambda burst, ask: burst.stage_all(ask),
                {"inos": list, "limit": int},
                "Brings the files with these inode numbers into the burst tier, of together limit "
                "bytes at most, and returns when that is done; without inos, that which it is "
                "called on. Answers {files, bytes, there, kept}: those that it has brought, how "
                "many were there, and how many are not by reason: owner (it is not the caller's), "
                "near (its data servers are as near, so there are no blocks), off (burst.blocks), "
                "capacity (user.aifs.tier), limit, room (no room, changed meanwhile, written to in "
                "place, or not told by the data servers). EOPNOTSUPP: no burst tier.",
                where=BOTH,
            ),
        ),
        Hint(
            "evict",
            FILE,
            "set it to '' to give up the copy in the burst tier",
            change=rights.owner,
            set=bare(lambda burst, ask: burst.evict(ask.ino)),
            call=HintCall(
                rights.anybody,  # except for files that are not the caller's
                lambda burst, ask: burst.evict_all(ask),
                {"inos": list},
                "Gives up the clean copies, and the blocks of their own, of the files with these "
                "inode numbers, and of all files below such directories; without any, of that "
                "which it is called on. Answers {files, bytes, kept}: those that have given up "
                "theirs, and how many keep theirs by reason: dirty, open, pinned, needed (the data "
                "servers do not have all of it now), owner (it is not the caller's).",
                where=BOTH,
            ),
        ),
    )


def _list(tx: ReadTransaction, directory: int, blocks: Blocks, cookie: int) -> list[Place]:
    entries = list_directory(tx, directory, cookie, _ENTRIES)
    return [_place(tx, inode, place, blocks) for _, inode, place in entries]


def _find(tx: ReadTransaction, inos: Sequence[int], blocks: Blocks) -> list[Place]:
    found = (find_inode(tx, ino) for ino in inos)
    return [_place(tx, inode, 0, blocks) for inode in found if inode is not None]


def _place(tx: ReadTransaction, inode: Inode, cookie: int, blocks: Blocks) -> Place:
    copy = inode.copy if inode.in_burst else None
    record = None if copy is None else tx.get(keys.burst_copy(copy.id))
    since_ns = 0 if record is None else decode_burst(record).since_ns
    return Place(inode, cookie, since_ns, find_in_blocks(tx, inode, blocks))


def _bytes_here(place: Place) -> int:
    """Bytes of a clean file that go if the burst tier gives it up."""
    inode = place.inode
    own = place.in_blocks.here if inode.read_as is not None else 0
    return own + (inode.size if inode.copy is not None else 0)


def _is_there(place: Place) -> bool:
    """Whether a file's bytes are in the burst tier as its policy wants."""
    inode = place.inode
    if inode.copy is not None or inode.layout is None or not inode.size:
        return True
    return place.in_blocks.is_whole and not is_pinned(inode)
