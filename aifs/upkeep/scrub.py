"""Scrub, in the background: all bytes on the data servers are read, verified, and repaired where
that can be done.

A *pass* walks all inodes, then all containers, in the order of their numbers. Where it has got to
is recorded now and then, so a restart goes on from about there; what it does twice does no harm.
Passes begin on a schedule, or when somebody asks.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import trio

from aifs.burst.transfer import Limiter, Mover
from aifs.core import faults
from aifs.core.config import Config
from aifs.core.errors import FsError, Invalid
from aifs.core.log import logger
from aifs.core.units import parse_size
from aifs.core.upkeep import NEVER_S, Upkeep, Work
from aifs.data.inspecting.inspection import STEP
from aifs.data.servers import Servers
from aifs.files.file_io import FileIO
from aifs.files.handles import Handles
from aifs.layout.placement import BURST_FIRST
from aifs.meta import keys, namespace, sharing
from aifs.meta.kv import Engine, ReadTransaction
from aifs.meta.records import decode_inode
from aifs.upkeep import scrub_state
from aifs.upkeep.evict import Evictor
from aifs.upkeep.from_copies import FromCopies
from aifs.upkeep.rebuild import Rebuild
from aifs.upkeep.scrub_copies import CopyScrubber
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
_SLICE = 256  # records that are looked at in one go
_BATCH = 256
_SAVE_S = 5.0
_ROUNDS = 3  # for what has to be put off
_PAUSE_S = 2.0
_PUT_OFF_MAX = 10_000
_PIECE_S = 0.25  # what the limit allows in this time is looked at together, if that is less
_BESIDE_WRITERS = 8 << 20  # bytes that are looked at together while somebody writes
_REST_S = 0.03  # for each window of so many bytes, while somebody writes
_IO_PRIORITY = "best-effort"


class Scrub:
    """``work`` does it; all else may be called at any time. Used from one trio thread."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        servers: Servers,
        io: FileIO,
        rebuild: Rebuild,
        from_copies: FromCopies,
        evictor: Evictor,
        handles: Handles,
        findings: Findings,
        upkeep: Upkeep,
    ) -> None:
        self._engine = engine
        self._handles = handles
        self._interval_s = config.scrub.interval_s
        self._bandwidth = config.scrub.bandwidth
        self._limiter = Limiter(config.scrub.bandwidth)
        self._throttled: set[trio.CancelScope] = set()
        """Those who wait for bandwidth, and look again when that changes."""
        movers = io.sets.movers(Mover(servers.budget, Limiter(0), _IO_PRIORITY))
        pace = self._throttle, self._piece
        give_way = upkeep.share.give_way
        self._scrubber = Scrubber(engine, servers, movers, *pace, give_way, rebuild.request)
        self._from_copies = from_copies
        self._copies = CopyScrubber(engine, movers, evictor, *pace, give_way)
        self._findings = findings
        self._upkeep = upkeep
        self.loaded = False
        """Whether what an earlier mount has left is known."""
        self._ended = trio.Event()
        """Set when the pass has ended, or stopped."""
        self._pass: trio.CancelScope | None = None
        """Of the pass that is under way; None: none is."""
        self._rate_from = (0.0, 0)
        """When its rate began to be measured, by time.monotonic(), and the bytes that had been read
        then.
        """
        self._ids = 1
        """How many ids there were when it began: what the cursor goes up to."""

    @property
    def state(self) -> ScrubState:
        return self._findings.state

    async def load(self, again: bool = False) -> None:
        """Go on from what is on record; ``again``: which another host has changed meanwhile.
        ``work`` begins with it; what is said before is that of a new store.
        """
        if again or not self.loaded:
            asked = self.state
            self._findings.begin(await scrub_state.load(self._engine))
            self.loaded = True
            self._limit()
            if asked.phase != DONE:
                self.start(asked.repair, asked.bandwidth)

    # --- orders ---

    def order(self, text: str) -> None:
        """What is set as the hint ``user.aifs.scrub``: ``stop``, or
        ``start[,no-repair][,bandwidth=SIZE]``. Raises Invalid."""
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
        """Begin a pass; one that is under way goes on, as asked for now. ``bandwidth``: bytes per
        second, None: as configured.
        """
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
            left_s = (
                self.state.begun_s + self._interval_s - time.time() if self._interval_s else NEVER_S
            )
            if left_s > 0:
                return left_s
            self.start()
        with trio.CancelScope() as self._pass:
            try:
                await self._run_pass()
            finally:
                stopped, self._pass = self._pass.cancel_called, None
        if self.state.phase == DONE and not stopped and not self.state.unverified:
            self.state.untold_before = []
        if stopped or self.state.phase == DONE:
            self.state.ended_s = time.time()
            await self._save()
            self._ended.set()
        return 0.0

    async def _run_pass(self) -> None:
        self._rate_from = (time.monotonic(), self.state.read_bytes)
        self._ids = max(1, await self._engine.view(ReadTransaction.counter, keys.COUNTER_IDS))
        state = self.state
        if state.phase == FILES:
            await self._walk(b"i", _find_files)
            state.phase, state.cursor = CONTAINERS, 0
        if state.phase == CONTAINERS:
            await self._walk(b"t", _find_containers)
            state.phase, state.cursor = PUT_OFF, 0
        for number in range(_ROUNDS):
            items = [(ino, oid) for ino, oid in state.put_off]
            state.put_off = []
            if items:
                await trio.sleep(_PAUSE_S * number)
                await self._scrub_all(items)
        state.unverified += len(state.put_off)
        state.put_off, state.phase = [], DONE
        unrepaired = f", {len(state.wrong)} ranges of files are not repaired" if state.wrong else ""
        _log.info(
            "scrub: %d files and containers, %d bytes: %d flaws, %d repaired, %d objects to be "
            "rebuilt, %d files restored from burst copies%s",
            state.objects,
            state.read_bytes,
            state.flaws,
            state.repaired,
            state.rebuilding,
            state.from_copies,
            unrepaired,
        )

    async def _walk(self, kind: bytes, find: Callable[..., tuple[list[Item], int]]) -> None:
        state, saved_s = self.state, time.monotonic()
        start = state.cursor
        while start >= 0:
            items, start = await self._engine.view(find, kind, start)
            await self._upkeep.share.give_way()
            for first in range(0, len(items), _BATCH):
                batch = items[first : first + _BATCH]
                await self._scrub_all(batch)
                state.cursor = (batch[-1][0] or batch[-1][1]) + 1
                if time.monotonic() - saved_s > _SAVE_S:
                    await self._save()
                    saved_s = time.monotonic()
            await trio.lowlevel.checkpoint()
        await self._save()

    async def _save(self) -> None:
        await scrub_state.save(self._engine, self.state)
        faults.reach(_RECORDED)

    async def _scrub_all(self, items: list[Item]) -> None:
        """An item is as of Scrubber, or (inode number, 0) of a file that has nothing but a burst
        copy to be verified."""
        right = await self._find_right(items)
        following = iter([item for item in items if item not in right])

        async def work() -> None:
            for item in following:
                await self._scrub(*item)
                await self._upkeep.share.give_way()

        async with trio.open_nursery() as nursery:
            for _ in range(min(_AT_ONCE, len(items))):
                nursery.start_soon(work)

    async def _find_right(self, items: list[Item]) -> set[Item]:
        """Those that need no more: nearly all, and they count as done."""
        state = self.state
        right = await self._scrubber.find_right([item for item in items if item[1]])
        right.update(item for item in items if not item[1])
        inos = [ino for ino, oid in items if ino and (ino, oid) in right]
        whole = {0, *await self._copies.find_right(inos)}
        right = {item for item in right if item[0] in whole}
        state.objects += len(right)
        verified = {oid for _, oid in right}
        state.untold_before = [oid for oid in state.untold_before if oid not in verified]
        return right

    async def _scrub(self, ino: int, oid: int) -> None:
        found, state = ScrubResult(), self.state
        try:
            is_done = not oid or await self._scrubber.scrub(ino, oid, found, state.repair)
            await self._use_copies(found, 0 if ino else oid)
            if oid in state.untold_before and is_done and not found.lost:
                state.untold_before.remove(
                    oid
                )  # or its copy could not be dropped if that is wrong now
            if ino and is_done:
                dropped = await self._copies.scrub(ino, found, state.repair)
                state.dropped_copies += dropped
        except FsError as error:
            _log.info("scrub: inode %d, object %d: %s", ino, oid, error)
            is_done = False
        state.add(found)
        state.add_untold(
            {
                lost.oid
                for lost in found.lost
                if lost.ino and min(lost.servers, default=0) < BURST_FIRST
            }
        )
        await scrub_state.note(self._engine, state, found.lost)
        if is_done:
            state.objects += 1
        elif len(state.put_off) < _PUT_OFF_MAX:
            state.put_off.append([ino, oid])
        else:
            state.unverified += 1

    async def _use_copies(self, found: ScrubResult, container: int) -> None:
        """Files that nothing tells, but that have a burst copy that is right, are made whole from
        that.
        """
        wrong = {lost.ino for lost in found.lost if lost.ino and lost.for_good}
        if not wrong:
            return
        restored = (
            await self._from_copies.restore_each(wrong, container) if self.state.repair else set()
        )
        self.state.from_copies += len(restored)
        left = set()
        for ino in wrong - restored:
            inode = await self._engine.view(namespace.find_inode, ino)
            if (
                inode is not None
                and inode.copy is not None
                and not self._from_copies.is_useless(inode)
            ):
                left.add(ino)
        found.lost = [
            _with_copy(lost) if lost.ino in left else lost
            for lost in found.lost
            if lost.ino not in restored
        ]

    def set_bandwidth(self, bandwidth: int) -> None:
        """Of scrubs that nobody has started with another one."""
        self._bandwidth = bandwidth
        self._limit()

    def _limit(self) -> None:
        asked = self.state.bandwidth
        self._limiter = Limiter(self._bandwidth if asked is None else asked)
        for scope in self._throttled:
            scope.cancel()  # whoever waited for the old one need not any more

    async def _throttle(self, count: int) -> None:
        """So many bytes have been read."""
        self.state.read_bytes += count
        with trio.CancelScope() as scope:
            self._throttled.add(scope)
            try:
                await self._limiter.take(count)
            finally:
                self._throttled.discard(scope)
        if self._handles.writers:
            await trio.sleep(_REST_S * count / STEP)

    def _piece(self) -> int:
        """How many bytes to look at together: so few that the limit is kept all the time."""
        piece = _BESIDE_WRITERS if self._handles.writers else PIECE
        rate = self._limiter.rate
        return max(min(piece, round(rate * _PIECE_S)), STEP) if rate else piece

    # --- what is said of it ---

    def status(self, wrong_bytes: int = 48 << 10) -> dict[str, Any]:
        """What ``aifs status`` shows. ``rate``: bytes per second of this pass; ``next_s``: when the
        next pass is due, since the epoch. ``share``: of the pass that is done, about. Of ``wrong``
        as many as take ``wrong_bytes`` as JSON; ``wrong_ranges`` says how many there are."""
        state = asdict(self.state)
        began_s, began = self._rate_from
        running = state["phase"] != DONE
        rate = (
            (state["read_bytes"] - began) / max(time.monotonic() - began_s, 1e-3)
            if running and began_s
            else 0
        )
        state["put_off"] = len(state["put_off"])
        del state["untold"], state["untold_before"]
        next_s = state["begun_s"] + self._interval_s if self._interval_s and not running else None
        state["wrong_ranges"], state["wrong"] = (
            len(state["wrong"]),
            _first(state["wrong"], wrong_bytes),
        )
        walked = min(1, state["cursor"] / self._ids)
        share = {FILES: 0.5 * walked, CONTAINERS: 0.5 + 0.5 * walked}.get(state["phase"], 1)
        return {
            "running": running,
            "share": share,
            **state,
            "bandwidth": self._limiter.rate,
            "rate": round(rate),
            "next_s": next_s,
        }


def _with_copy(lost: Lost) -> Lost:
    return lost._replace(reason=f"{lost.reason}, but for its burst copy", for_good=False)


def _first(entries: list[dict[str, Any]], size: int) -> list[dict[str, Any]]:
    """As many as fit: an extended attribute holds 64 KiB."""
    shown = []
    for entry in entries:
        size -= len(json.dumps(entry))
        if size < 0:
            break
        shown.append(entry)
    return shown


# --- transaction functions ------------------------------------------------------------------------


def _find_files(tx: ReadTransaction, kind: bytes, cursor: int) -> tuple[list[Item], int]:
    """Those of a slice of inodes that have something to be verified, and where the next slice
    starts; -1: there is none.
    """
    items, count, key = [], 0, b""
    for key, value in tx.range(keys.inode(cursor), keys.all_of(kind)[1], _SLICE):
        count += 1
        try:
            inode = decode_inode(keys.number(key), value)
        except FsError:
            continue  # fsck names it
        is_shared = inode.named and sharing.users(tx, inode.oid, 1) != [inode.ino]
        if inode.objects is not None and not is_shared:
            items.append((inode.named_by, inode.oid))
        has_own_item = inode.objects is not None and not inode.named  # which sees to its copy, too
        if inode.layout is not None and inode.copy is not None and not has_own_item:
            items.append((inode.ino, 0))
    return items, keys.number(key) + 1 if count == _SLICE else -1


def _find_containers(tx: ReadTransaction, kind: bytes, cursor: int) -> tuple[list[Item], int]:
    found = [
        (0, keys.number(key))
        for key, _ in tx.range(keys.container(cursor), keys.all_of(kind)[1], _SLICE)
    ]
    return found, found[-1][1] + 1 if len(found) == _SLICE else -1
