"""The read cache, in memory: each piece is fetched once however many read it, ahead if that pays.

A *block* is an aligned part of an object, or of a file that is assembled or checked; or a whole
chunk of a container, unpacked and checked (the kernel's page cache does not know that files share
it). It is *loading* or *loaded*; loads belong to no task, so readers may be cancelled. Its memory
counts in the budget until its last view has gone.

No reader sees stale or torn bytes. A writer calls ``invalidate`` before the first byte of an object
changes, and nobody loads it until the last one has changed. A load under way then goes only to
those who waited already, whose reads overlap the change.

A read never waits for memory of other reads, which may wait for it: a small part of the budget is
the cache's own, handed to readers and not kept. Loads that read by this cache (``start_whole``) use
none of that.

Loaded blocks are in two queues: read-ahead ones that nobody has read, oldest first, and others, in
order of first reading. Memory is taken from the latter first. How many of them stay: ``Keeping``.

A late block may be asked of another source, too (*hedged*): once, for all tasks.
"""

from collections.abc import Awaitable, Callable, Hashable, Mapping
from typing import Any, Protocol

import trio

from aifs.core.budget import Budget
from aifs.core.waiting import waits_for
from aifs.data.reading.buffers import BudgetedBuffers
from aifs.data.reading.patterns import WINDOW_MAX

BLOCK = 1 << 20
BLOCK_MAX = 4 << 20


class BlockSource(Protocol):
    """An object, as the cache knows it."""

    name: Hashable
    """The key by which it is invalidated: the same for all sources of an object."""
    cause: str
    """Of waits for it (core/waiting.py)."""
    block: int
    """Bytes of one request, at most BLOCK_MAX: the same for all sources of an object."""

    @property
    def busy(self) -> bool:
        """Whether reading ahead would be in the way of others."""

    def start(
        self, tell: Callable[[int | BaseException], None], buffer: memoryview, offset: int
    ) -> None:
        """Begin to fill ``buffer``; ``tell`` gets, on the trio thread, the bytes or the error."""


Fill = Callable[[memoryview, int], Awaitable[int]]
"""Fills the beginning of memory with what is at an offset; how many bytes there were."""


class FilledSource:
    """Bytes to be assembled, unpacked, or checked. ``fill`` runs in a task, as foreground work;
    ``in_use`` is called with +1 before and -1 after."""

    cause = "data servers"

    def __init__(
        self,
        name: Hashable,
        block: int,
        fill: Fill,
        in_use: Callable[[int], None] = lambda change: None,
    ) -> None:
        self.name = name
        self.block = block
        self._fill = fill
        self._in_use = in_use

    @property
    def busy(self) -> bool:
        return False

    def start(
        self, tell: Callable[[int | BaseException], None], buffer: memoryview, offset: int
    ) -> None:
        self._in_use(1)
        trio.lowlevel.spawn_system_task(self._load, tell, buffer, offset)

    async def _load(
        self, tell: Callable[[int | BaseException], None], buffer: memoryview, offset: int
    ) -> None:
        result: int | BaseException
        try:
            result = await self._fill(buffer, offset)
        except Exception as error:  # noqa: BLE001 (raised again where the bytes are waited for)
            result = error
        finally:
            self._in_use(-1)
        tell(result)


class Block:
    """A piece of an object. A reference to it keeps its memory."""

    __slots__ = (
        "_ready",
        "age",
        "ahead",
        "answered",
        "cause",
        "error",
        "hedged",
        "index",
        "kept",
        "name",
        "read_at",
        "size",
        "view",
    )

    def __init__(
        self, source: BlockSource, index: int, size: int, kept: bool, ahead: bool, age: int
    ) -> None:
        self.name = source.name
        self.cause = source.cause
        self.index = index
        self.size = size
        self.kept = kept
        self.ahead = ahead
        self.age = age  # what had been fetched when its load began
        self.read_at = age  # and when it was first read
        self.answered = False  # by its own source
        self.hedged = False  # whether another source has been asked, too
        self.view: memoryview | None = None
        self.error: BaseException | None = None
        self._ready: trio.Event | None = None

    @property
    def loading(self) -> bool:
        return self.view is None and self.error is None

    def loaded(self, view: memoryview | None, error: BaseException | None) -> None:
        self.view, self.error = view, error
        if self._ready is not None:
            self._ready.set()

    async def bytes(self) -> memoryview:
        """The block's bytes, read-only, shorter at the object's end. Raises the load's error. Does
        not suspend if loaded."""
        if self.loading:
            if self._ready is None:
                self._ready = trio.Event()
            with waits_for(self.cause):
                await self._ready.wait()
        if self.error is not None:
            raise self.error.with_traceback(None)
        assert self.view is not None
        return self.view


_FLOOR = 16 << 20
_NOTHING: Mapping[int, Block] = {}
_SMALLEST = 64 << 10  # buffers come in sizes 4 times larger than the one before
_FOLLOWED_SHARE, _SHARE = 2, 8


class Keeping:
    """How much is kept for readers that follow the first one without a page cache.

    First read goes first. Without followers, an eighth of the budget is kept. After a second read
    of a piece half way out, or dropped lately, half is kept, until the whole budget has been
    fetched without another. So readers of the same bytes this far apart fetch them once.

    ``fetched``: bytes fetched so far, as in the budget: the clock of all this.
    """

    __slots__ = ("_followed_at", "_total", "fetched")

    def __init__(self, total: int) -> None:
        """``total``: bytes of the budget."""
        self.fetched = 0
        self._total = total
        self._followed_at = -total  # when somebody last read what others had read long before

    @property
    def limit(self) -> int:
        """Bytes that may be kept now."""
        is_followed = self.fetched - self._followed_at < self._total
        return self._total // (_FOLLOWED_SHARE if is_followed else _SHARE)

    def read_again(self, first_at: int) -> None:
        """Somebody reads what is kept, and was first read when ``first_at`` had been fetched."""
        if self.fetched - first_at > self._total // _SHARE // 2:
            self.follow()

    def follow(self) -> None:
        """Somebody reads what others have read long before."""
        self._followed_at = self.fetched

    def is_long_ago(self, first_at: int) -> bool:
        """Whether a follower so far behind would not be helped."""
        return self.fetched - first_at > self._total // _FOLLOWED_SHARE


class ReadCache:
    """All blocks of a mount, in one trio thread. Does not block; only ``fetch`` and ``settle``
    suspend."""

    def __init__(self, budget: Budget) -> None:
        """``budget``: unused as yet, of at least 4 times BLOCK_MAX."""
        floor = max(BLOCK_MAX, min(_FLOOR, budget.total // 4))
        if not budget.try_reserve(floor):
            raise ValueError(f"a budget of {budget.total} bytes is too small")
        self._budget = budget
        self._buffers = BudgetedBuffers(budget)
        self._floor = BudgetedBuffers(Budget(floor))
        self._objects: dict[Hashable, dict[int, Block]] = {}
        """By name of the object and number, all blocks that are loaded or loading."""
        self._used: dict[Block, None] = {}
        """Loaded blocks that somebody has read, the least recently used first."""
        self._ahead: dict[Block, None] = {}
        """Loaded blocks that nobody has read, oldest first."""
        self._loads = 0
        """How many are under way."""
        self._idle: trio.Event | None = None
        """Set when none is; None: nobody waits for that."""
        self._used_bytes = 0
        """Of ``_used``."""
        self._gone: dict[
            tuple[Hashable, int], int
        ] = {}  # what was dropped because enough was kept, oldest first: age
        self._ahead_bytes = 0  # with those that are loading
        self._hits = 0
        """Reads of blocks that were there."""
        self._misses = 0
        """Reads of blocks that were not."""
        self._joined = 0
        """Reads that waited for a load that was under way."""
        self._hedged_bytes = 0
        """Of blocks that were asked of another source, too."""
        self._fetched_ahead = 0
        """Bytes that were fetched before anybody asked."""
        self._ahead_used = 0
        """Bytes of these that were read."""
        self._ahead_unused = 0
        """Bytes of these that were dropped before."""
        self._fetched_bytes = 0
        """All that was fetched."""
        self._keeping = Keeping(budget.total)
        budget.add_cache(self._give_back)

    @property
    def empty(self) -> bool:
        """Whether nothing is loaded or loading: as long as page caches have what is read."""
        return not self._objects

    @property
    def window_max(self) -> int:
        """How far one stream of a reader may be read ahead."""
        return min(WINDOW_MAX, self._budget.total // 8)

    # --- reading ---

    def find(self, name: Hashable, index: int, needed: int) -> Block | None:
        """Block ``index`` of an object if loading, or loaded with ``needed`` bytes."""
        block = self._objects.get(name, _NOTHING).get(index)
        if block is None:
            return None
        if block.view is not None and len(block.view) < needed:
            self._drop(block)  # the object has grown
            return None
        if block.ahead:
            self._take_up(block)
        if block.loading:
            self._joined += 1
        else:
            self._hits += 1
            self._keeping.read_again(block.read_at)
        return block

    def peek(self, name: Hashable, index: int) -> Block | None:
        """Block ``index`` of an object if it is loading or loaded; nobody reads it now."""
        return self._objects.get(name, _NOTHING).get(index)

    def start(self, source: BlockSource, index: int, end: int) -> Block | None:
        """Begin to load a block, not found before, of an object of ``end`` bytes; None without
        memory."""
        return self._start(source, index, _size(source, index, end))

    def _start(self, source: BlockSource, index: int, size: int) -> Block | None:
        memory = self._memory(size)
        return None if memory is None else self._load(source, index, memory)

    def start_whole(self, source: BlockSource, index: int, size: int) -> Block:
        """``start`` for all ``size`` bytes of a block that may load by this cache. Without memory
        it is not kept."""
        block = self._start(source, index, _rounded(size))
        return block or self._load(source, index, memoryview(bytearray(size)), kept=False)

    def read_ahead(self, source: BlockSource, index: int, end: int) -> bool:
        """Load block ``index`` ahead. False: server or memory is needed otherwise."""
        if index in self._objects.get(source.name, ()):
            return True
        size = _size(source, index, end)
        if source.busy or self._budget.short or not self._may_read_ahead(size):
            return False
        memory = self._memory(size)
        if memory is None:
            return False
        self._load(source, index, memory, ahead=True)
        return True

    def hedge(self, block: Block, source: BlockSource) -> bool:
        """Load a loading block from another source, too, once: the first result counts.

        The other source's errors do not count; its own do at once, so waits for one another, in a
        circle, end with the servers' answers. False: no memory.
        """
        if block.loading and not block.hedged:
            memory = self._memory(block.size)
            if memory is None:
                return False
            block.hedged = True
            self._hedged_bytes += block.size
            self._request(block, source, memory)
        return True

    async def fetch(self, source: BlockSource, offset: int, length: int, end: int) -> memoryview:
        """Bytes of an unchanging object of ``end`` bytes, read-only; fewer only at its end.

        A range in one block is not copied. May wait until others drop views: keep none while
        fetching. Raises the server's errors.
        """
        length = min(length, end - offset)
        if length <= 0:
            return memoryview(b"")
        first, last = offset // source.block, (offset + length - 1) // source.block
        if first == last:
            begin = offset - first * source.block
            return (await self._bytes(source, first, begin + length, end))[begin : begin + length]
        target = memoryview(bytearray(length))
        return target[: await self.fetch_into(source, offset, target, end)].toreadonly()

    async def fetch_into(
        self, source: BlockSource, offset: int, target: memoryview, end: int
    ) -> int:
        """The same, into memory of the caller's. How many bytes there were."""
        stop = min(offset + len(target), end)
        numbers = range(offset // source.block, -(-stop // source.block))
        for index in numbers:  # all requests at once, as far as memory allows
            if index not in self._objects.get(source.name, ()):
                self.start(source, index, end)
        done = 0
        for index in numbers:
            start = index * source.block
            needed = min(source.block, stop - start)
            part = (await self._bytes(source, index, needed, end))[offset + done - start : needed]
            # Copied at once: a task that waits for memory may hold none.
            target[done : done + len(part)] = part
            done += len(part)
            is_end = offset + done < start + needed
            del part
            if is_end:
                break
        return done

    async def _bytes(self, source: BlockSource, index: int, needed: int, end: int) -> memoryview:
        block = self.find(source.name, index, needed) or self.start(source, index, end)
        if block is None:
            memory = await self._floor.take(_size(source, index, end))
            block = self.find(source.name, index, needed) or self._load(
                source, index, memory, kept=False
            )
            del memory
        return await block.bytes()

    # --- loads ---

    def _load(
        self,
        source: BlockSource,
        index: int,
        memory: memoryview,
        kept: bool = True,
        ahead: bool = False,
    ) -> Block:
        block = Block(source, index, len(memory), kept, ahead, self._keeping.fetched)
        self._objects.setdefault(block.name, {})[index] = block
        if (block.name, index) in self._gone:
            del self._gone[block.name, index]
            self._keeping.follow()
        if ahead:
            self._ahead_bytes += block.size
            self._fetched_ahead += block.size
        else:
            self._misses += 1
        self._request(block, source, memory)
        return block

    def _request(self, block: Block, source: BlockSource, memory: memoryview) -> None:
        is_own, held = not block.hedged, [memory]

        def ended(result: int | BaseException) -> None:
            # The block's own view is what counts from here on.
            self._ended(block, held.pop(), result, is_own)

        self._loads += 1
        source.start(ended, memory, block.index * source.block)

    def _ended(
        self, block: Block, memory: memoryview, result: int | BaseException, is_own: bool
    ) -> None:
        self._loads -= 1
        block.answered = block.answered or is_own
        error = result if isinstance(result, BaseException) else None
        view = None
        if not isinstance(result, BaseException):
            self._fetched_bytes += result
            self._keeping.fetched += block.size
            view = memory[:result].toreadonly()
        if block.loading and (is_own or error is None):
            if self._objects.get(block.name, {}).get(block.index) is block:
                self._take_in(block, error is not None)
            block.loaded(view, error)
        if not self._loads and self._idle is not None:
            self._idle.set()

    def _take_in(self, block: Block, failed: bool) -> None:
        if failed or not block.kept or self._budget.short:
            self._drop(block)
        elif block.ahead:
            self._ahead[block] = None
        else:
            self._keep(block)

    async def settle(self) -> None:
        """Wait until no load is under way."""
        while self._loads:
            if self._idle is None or self._idle.is_set():
                self._idle = trio.Event()
            await self._idle.wait()

    def invalidate(self, name: Hashable) -> None:
        """Forget all blocks of an object, also loading ones. Readers' views stay."""
        for block in list(self._objects.get(name, {}).values()):
            self._drop(block)

    def invalidate_id(self, oid: int) -> None:
        """``invalidate`` for all objects of a set or container, whose names end with its id."""
        for name in [name for name in self._objects if isinstance(name, tuple) and name[-1] == oid]:
            self.invalidate(name)

    # --- memory ---

    def _drop(self, block: Block) -> None:
        blocks = self._objects[block.name]
        del blocks[block.index]
        if not blocks:
            del self._objects[block.name]
        if block in self._used:
            del self._used[block]
            self._used_bytes -= block.size
        if block.ahead:
            self._ahead.pop(block, None)
            self._ahead_bytes -= block.size
            self._ahead_unused += block.size
            block.ahead = False

    def _take_up(self, block: Block) -> None:
        block.ahead = False
        self._ahead_bytes -= block.size
        self._ahead_used += block.size
        if block in self._ahead:
            del self._ahead[block]
            self._keep(block)

    def _keep(self, block: Block) -> None:
        """Note a read: the kernel has it now, so little is kept without followers."""
        block.read_at = self._keeping.fetched
        self._used[block] = None
        self._used_bytes += block.size
        limit = self._keeping.limit
        while self._used_bytes > limit and len(self._used) > 1:
            oldest = next(iter(self._used))
            self._drop(oldest)
            self._gone[oldest.name, oldest.index] = oldest.read_at
        while self._gone and self._keeping.is_long_ago(self._gone[first := next(iter(self._gone))]):
            del self._gone[first]

    def _memory(self, size: int) -> memoryview | None:
        if self._budget.short:
            return None
        if size > self._budget.free + self._buffers.free_bytes:
            self._evict(size)  # and take the buffer over, rather than have the budget free it
        return self._buffers.try_take(size)

    def _evict(self, size: int) -> None:
        """Drop loaded blocks of ``size`` bytes, if there are as many."""
        dropped = 0
        while (
            dropped < size and (victim := next(iter(self._used or self._ahead), None)) is not None
        ):
            dropped += victim.size
            self._drop(victim)

    def _give_back(self, size: int) -> None:
        self._evict(size)
        self._buffers.give_back(size)

    def _may_read_ahead(self, size: int) -> bool:
        """Half of the memory at most, and none from read-ahead blocks with a future."""
        while self._ahead and self._is_forgotten(oldest := next(iter(self._ahead))):
            self._drop(oldest)
        spare = self._budget.free + self._buffers.free_bytes + self._used_bytes
        return size <= spare and self._ahead_bytes + size <= self._budget.total // 2

    def _is_forgotten(self, block: Block) -> bool:
        return self._keeping.fetched - block.age > self._budget.total

    # --- status ---

    def status(self) -> dict[str, Any]:
        """Counters since the mount. ``joined``: reads that waited for a load under way;
        ``hedged_bytes``: of blocks asked of another source, too."""
        return {
            "hits": self._hits,
            "misses": self._misses,
            "joined": self._joined,
            "fetched_bytes": self._fetched_bytes,
            "hedged_bytes": self._hedged_bytes,
            "read_ahead_bytes": self._fetched_ahead,
            "read_ahead_used_bytes": self._ahead_used,
            "read_ahead_unused_bytes": self._ahead_unused,
            "cached_bytes": self._used_bytes + sum(block.size for block in self._ahead),
        }


def _size(source: BlockSource, index: int, end: int) -> int:
    """The buffer for a block, no larger than needed, in few sizes."""
    size = _rounded(min(source.block, end - index * source.block))
    return min(size, source.block) if source.block >= _SMALLEST else source.block


def _rounded(needed: int) -> int:
    size = _SMALLEST
    while size < needed:
        size *= 4
    return size
