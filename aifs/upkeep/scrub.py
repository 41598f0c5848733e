"""Scrub, in the background: all bytes on the data servers are read, verified, and repaired.

A *pass* walks all inodes, then all containers, by number. Its cursor is recorded now and then;
doing some twice does no harm. Passes begin on a schedule, or on request.
"""

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import trio

from aifs.burst.transfer import Limiter, Mover
from aifs.core import faults
from aifs.core.errors import FsError, Invalid
from aifs.core.log import logger
from aifs.core.tasks import run_each
from aifs.core.units import parse_size
from aifs.core.upkeep import Work
from aifs.data.inspecting.inspection import STEP
from aifs.files.file_io import FileIO
from aifs.files.handles import Handles
from aifs.files.services import Services
from aifs.meta import keys, namespace, shared
from aifs.meta.kv import ReadTransaction
from aifs.meta.records import decode_inode
from aifs.meta.slices import Walk, read_slice
from aifs.upkeep import scrub_state
from aifs.upkeep.evict import Evictor
from aifs.upkeep.from_copies import CopyScrubber, FromCopies
from aifs.upkeep.rebuild import Rebuild
from aifs.upkeep.scrub_state import (
    CONTAINERS,
    DONE,
    FILES,
    PUT_OFF,
    UNTOLD_MAX,
    Findings,
    ScrubState,
)
from aifs.upkeep.scrubbing import PIECE, Item, Lost, Scrubber, ScrubResult

_log = logger(__name__)

_RECORDED = faults.declare("vfs.scrub.recorded", "how far a scrub has got is recorded")

_AT_ONCE = 4  # object sets
_SLICE = 256  # records whose object sets are looked at together
_SAVE_S = 5.0
_ROUNDS = 3  # for object sets that have to be put off
_PAUSE_S = 2.0
_PUT_OFF_MAX = 10_000
_PIECE_S = 0.25  # the limit's bytes of this time are looked at together, if those are less
_BESIDE_WRITERS = 8 << 20  # bytes that are looked at together while somebody writes
_REST_S = 0.03  # for each window of so many bytes, while somebody writes
_IO_PRIORITY = "best-effort"


Batch = tuple[list[Item], int]
"""Object sets that are looked at together, and the number of the last record of their slice."""

Find = Callable[[ReadTransaction, bytes, bytes], tuple[list[Batch], bytes]]


class Scrub:
    """``work`` does it; all else may be called at any time. Used from one trio thread."""

    def __init__(
        self,
        services: Services,
        io: FileIO,
        rebuild: Rebuild,
        from_copies: FromCopies,
        evictor: Evictor,
        handles: Handles,
        findings: Findings,
    ) -> None:
        config, servers = services.config, services.servers
        self._engine = engine = services.engine
        self._handles = handles
        self._interval_s = config.scrub.interval_s
        self._bandwidth = config.scrub.bandwidth
        self._limiter = Limiter(config.scrub.bandwidth)
        self._throttled: set[trio.CancelScope] = set()
        """Tasks that wait for bandwidth, and look again when that changes."""
        movers = io.sets.movers(Mover(servers.budget, Limiter(0), _IO_PRIORITY))
        pace = self._throttle, self._piece
        self._upkeep = services.upkeep
        give_way = services.upkeep.share.give_way
        self._scrubber = Scrubber(engine, servers, movers, *pace, give_way, rebuild.request)
        self._from_copies = from_copies
        self._copies = CopyScrubber(engine, movers, evictor, *pace, give_way)
        self._findings = findings
        self.loaded = False
        """Whether the record of an earlier mount is known."""
        self._ended = trio.Event()
        """Set when the pass has ended, or stopped."""
        self._pass: trio.CancelScope | None = None
        """Of the pass that is under way; None: none is."""
        self._rate_from = (0.0, 0)
        """Start of its rate's measurement (time.monotonic()), and bytes read by then."""
        self._ids = 1
        """How many ids there were when it began: the end of the cursor's way."""

    @property
    def state(self) -> ScrubState:
        return self._findings.state

    async def load(self, again: bool = False) -> None:
        """Go on from the record; ``again``: another host has changed it. ``work`` begins with it;
        the state before is a new store's."""
        if again or not self.loaded:
            asked = self.state
            self._findings.begin(await scrub_state.load(self._engine))
            self.loaded = True
            self._limit()
            if asked.phase != DONE:
                self.start(asked.repair, asked.bandwidth)

    # --- orders ---

    def order(self, text: str) -> None:
        """Obey ``user.aifs.scrub``: ``stop``, or ``start[,no-repair][,bandwidth=SIZE]``. Raises
        Invalid."""
        verb, *options = text.split(",")
        if verb == "stop" and not options:
            self.stop()
            return
        if verb != "start":
            raise Invalid("it is start[,no-repair][,bandwidth=SIZE], or stop")
        repair, bandwidth = True, None
        for option in options:
            name, _, value = option.partition("=")
            if option == "no-repair":
                repair = False
            elif name == "bandwidth":
                try:
                    bandwidth = parse_size(value)
                except ValueError as error:
                    raise Invalid(f"bandwidth: {error}") from None
            else:
                raise Invalid(f"there is no option {option!r}")
        self.start(repair, bandwidth)

    def start(self, repair: bool = True, bandwidth: int | None = None) -> None:
        """Begin a pass, or go on with these options. ``bandwidth``: bytes per second, None:
        configured."""
        state = self.state
        if state.phase == DONE:
            untold = sorted(self._findings.wrong_objects())[-UNTOLD_MAX:]
            state = ScrubState(phase=FILES, begun_s=time.time(), untold_before=untold)
            self._findings.begin(state)
            self._from_copies.look_again()
        state.repair, state.bandwidth = repair, bandwidth
        self._limit()
        if self._ended.is_set():  # else somebody waits for it already
            self._ended = trio.Event()
        self._upkeep.wake(Work.SCRUB)

    def stop(self) -> None:
        """End the pass that is under way, if there is one. The next one begins from the start."""
        if self.state.phase != DONE:  # also of one whose work has not begun
            self.state.phase, self.state.ended_s = DONE, time.time()
        if self._pass is not None:
            self._pass.cancel()
        self._upkeep.wake(Work.SCRUB)

    async def wait(self) -> None:
        """No pass is under way on return."""
        while not self.loaded or self.state.phase != DONE or self._pass is not None:
            await self._ended.wait()
            await trio.lowlevel.checkpoint()

    # --- in the background ---

    async def work(self) -> float:
        """Scrub if that is due; in how many seconds it will be."""
        await self.load()
        if self.state.phase == DONE:
            self._ended.set()
            due_s = self.state.begun_s + self._interval_s if self._interval_s else math.inf
            if due_s > time.time():
                return due_s - time.time()
            self.start()
        with trio.CancelScope() as self._pass:
            try:
                await self._run_pass()
            finally:
                stopped, self._pass = self._pass.cancel_called, None
        if self.state.phase == DONE and not stopped and not self.state.counts["unverified"]:
            self.state.untold_before = []
        if stopped or self.state.phase == DONE:
            self.state.ended_s = time.time()
            await self._save()
            self._ended.set()
        return 0.0

    async def _run_pass(self) -> None:
        self._rate_from = (time.monotonic(), self.state.counts["read_bytes"])
        self._ids = max(1, await self._engine.view(ReadTransaction.counter, keys.COUNTER_IDS))
        state = self.state
        if state.phase == FILES:
            await self._walk(b"i", find_files, keys.inode)
            state.phase, state.cursor = CONTAINERS, 0
        if state.phase == CONTAINERS:
            await self._walk(b"t", find_containers, keys.container)
            state.phase, state.cursor = PUT_OFF, 0
        for number in range(_ROUNDS):
            items = [(ino, oid) for ino, oid in state.put_off]
            state.put_off = []
            if items:
                await trio.sleep(_PAUSE_S * number)
                await self._scrub_all(items)
        state.counts["unverified"] += len(state.put_off)
        state.put_off, state.phase = [], DONE
        _log.info(
            "scrub: %(objects)d files and containers, %(read_bytes)d bytes: %(flaws)d flaws, "
            "%(repaired)d repaired, %(rebuilding)d objects to be rebuilt, %(from_copies)d files "
            "restored from burst copies; %(wrong)d ranges of files are not repaired",
            state.counts | {"wrong": len(state.wrong)},
        )

    async def _walk(self, kind: bytes, find: Find, key_of: Callable[[int], bytes]) -> None:
        state, saved_s = self.state, time.monotonic()
        start, share = key_of(state.cursor), self._upkeep.share
        async for items, last in Walk(self._engine, kind, find, start=start, share=share):
            await self._scrub_all(items)
            state.cursor = last + 1
            if time.monotonic() - saved_s > _SAVE_S:
                await self._save()
                saved_s = time.monotonic()
        await self._save()

    async def _save(self) -> None:
        await scrub_state.save(self._engine, self.state)
        faults.reach(_RECORDED)

    async def _scrub_all(self, items: list[Item]) -> None:
        """Items are as of Scrubber, or (inode number, 0) of a file with only a burst copy to
        verify."""
        right = await self._find_right(items)
        await run_each(_AT_ONCE, (item for item in items if item not in right), self._scrub)

    async def _find_right(self, items: list[Item]) -> set[Item]:
        """Those that need no more, nearly all; they count as done."""
        state = self.state
        right = await self._scrubber.find_right([item for item in items if item[1]])
        right.update(item for item in items if not item[1])
        inos = [ino for ino, oid in items if ino and (ino, oid) in right]
        whole = {0, *await self._copies.find_right(inos)}
        right = {item for item in right if item[0] in whole}
        state.counts["objects"] += len(right)
        verified = {oid for _, oid in right}
        state.untold_before = [oid for oid in state.untold_before if oid not in verified]
        return right

    async def _scrub(self, item: Item) -> None:
        (ino, oid), found, state = item, ScrubResult(), self.state
        try:
            is_done = not oid or await self._scrubber.scrub(ino, oid, found, state.repair)
            await self._use_copies(found, 0 if ino else oid)
            if oid in state.untold_before and is_done and not found.lost:
                state.untold_before.remove(oid)  # else a wrong copy of it could not be dropped
            if ino and is_done:
                is_dropped = await self._copies.scrub(ino, found, state.repair)
                state.counts["dropped_copies"] += is_dropped
        except FsError as error:
            _log.info("scrub: inode %d, object %d: %s", ino, oid, error)
            is_done = False
        state.add(found)
        await scrub_state.note(self._engine, state, found.lost)
        if is_done:
            state.counts["objects"] += 1
        elif len(state.put_off) < _PUT_OFF_MAX:
            state.put_off.append([ino, oid])
        else:
            state.counts["unverified"] += 1
        await self._upkeep.share.give_way()

    async def _use_copies(self, found: ScrubResult, container: int) -> None:
        """Make files whole from right burst copies, if their bytes are lost."""
        wrong = {lost.ino for lost in found.lost if lost.ino and lost.for_good}
        if not wrong:
            return
        restored = set[int]()
        if self.state.repair:
            restored = await self._from_copies.restore_each(wrong, container)
        self.state.counts["from_copies"] += len(restored)
        left = {ino for ino in wrong - restored if await self._may_restore(ino)}
        found.lost = [
            _with_copy(lost) if lost.ino in left else lost
            for lost in found.lost
            if lost.ino not in restored
        ]

    async def _may_restore(self, ino: int) -> bool:
        inode = await self._engine.view(namespace.find_inode, ino)
        if inode is None or inode.copy is None:
            return False
        return not self._from_copies.is_useless(inode)

    def set_bandwidth(self, bandwidth: int) -> None:
        """The rate of scrubs that were started without another one."""
        self._bandwidth = bandwidth
        self._limit()

    def _limit(self) -> None:
        asked = self.state.bandwidth
        self._limiter = Limiter(self._bandwidth if asked is None else asked)
        for scope in self._throttled:
            scope.cancel()  # it waits for the new limit, if it has to

    async def _throttle(self, count: int) -> None:
        self.state.counts["read_bytes"] += count
        with trio.CancelScope() as scope:
            self._throttled.add(scope)
            try:
                await self._limiter.take(count)
            finally:
                self._throttled.discard(scope)
        if self._handles.writers:
            await trio.sleep(_REST_S * count / STEP)

    def _piece(self) -> int:
        """Bytes to look at together: so few that the limit always holds."""
        piece = _BESIDE_WRITERS if self._handles.writers else PIECE
        rate = self._limiter.rate
        return max(min(piece, round(rate * _PIECE_S)), STEP) if rate else piece

    # --- figures ---

    def status(self, wrong_bytes: int = 48 << 10) -> dict[str, Any]:
        """Figures for ``aifs status``. ``rate``: bytes per second of this pass; ``next_s``: the
        next pass, since the epoch; ``share``: of the pass. ``wrong`` is cut to ``wrong_bytes`` of
        JSON; ``wrong_ranges`` counts all."""
        state = asdict(self.state)
        counts, wrong = state.pop("counts"), state.pop("wrong")
        del state["untold"], state["untold_before"]
        began_s, began = self._rate_from
        running, rate = state["phase"] != DONE, 0.0
        if running and began_s:
            rate = (counts["read_bytes"] - began) / max(time.monotonic() - began_s, 1e-3)
        walked = min(1, state["cursor"] / self._ids)
        share = {FILES: 0.5 * walked, CONTAINERS: 0.5 + 0.5 * walked}.get(state["phase"], 1)
        is_due = self._interval_s and not running
        return {
            "running": running,
            "share": share,
            **state,
            **counts,
            "put_off": len(state["put_off"]),
            "wrong_ranges": len(wrong),
            "wrong": _first(wrong, wrong_bytes),
            "bandwidth": self._limiter.rate,
            "rate": round(rate),
            "next_s": state["begun_s"] + self._interval_s if is_due else None,
        }


def _with_copy(lost: Lost) -> Lost:
    return lost._replace(reason=f"{lost.reason}, but for its burst copy", for_good=False)


def _first(entries: list[dict[str, Any]], size: int) -> list[dict[str, Any]]:
    """As many as fit: an extended attribute has 64 KiB."""
    shown = []
    for entry in entries:
        size -= len(json.dumps(entry))
        if size < 0:
            break
        shown.append(entry)
    return shown


# --- transaction functions ------------------------------------------------------------------------


def find_files(tx: ReadTransaction, start: bytes, end: bytes) -> tuple[list[Batch], bytes]:
    """Files to verify in a slice of inodes, if any, and where the next slice starts."""
    items: list[Item] = []
    records, following = read_slice(tx, start, end, _SLICE)
    for key, value in records:
        try:
            inode = decode_inode(keys.number(key), value)
        except FsError:
            continue  # fsck names it
        is_shared = inode.named and shared.users(tx, inode.oid, 1) != [inode.ino]
        if inode.objects is not None and not is_shared:
            items.append((inode.named_by, inode.oid))
        has_own_item = inode.objects is not None and not inode.named  # its copy goes with that
        if inode.layout is not None and inode.copy is not None and not has_own_item:
            items.append((inode.ino, 0))
    # Not by its item: objects of clones may be named by a later inode.
    return [(items, keys.number(records[-1][0]))] if items else [], following


def find_containers(tx: ReadTransaction, start: bytes, end: bytes) -> tuple[list[Batch], bytes]:
    records, following = read_slice(tx, start, end, _SLICE)
    items = [(0, keys.number(key)) for key, _ in records]
    return [(items, items[-1][1])] if items else [], following
