"""A piece of an object as the read cache holds it, and where such pieces come from."""

from collections.abc import Awaitable, Callable, Hashable
from typing import Protocol

import trio

from aifs.core.waiting import waits_for

BLOCK = 1 << 20
BLOCK_MAX = 4 << 20


class BlockSource(Protocol):
    """An object, as the cache knows it."""

    name: Hashable
    """The key by which it is invalidated: the same for all sources of an object."""
    cause: str
    """Of waits for it (core/waiting.py)."""
    block: int
    """Bytes that are fetched by one request, at most BLOCK_MAX: the same for all sources of an
    object.
    """

    @property
    def busy(self) -> bool:
        """Whether reading ahead would be in the way of others."""

    def start(
        self, tell: Callable[[int | BaseException], None], buffer: memoryview, offset: int
    ) -> None:
        """Begin to fill ``buffer``; ``tell``, on the trio thread, how many bytes there were, or the
        error.
        """


Fill = Callable[[memoryview, int], Awaitable[int]]
"""Fills the beginning of memory with what is at an offset; how many bytes there were."""


class FilledSource:
    """Bytes that cannot be had by one request: they have to be put together, unpacked, or compared
    with checksums. ``fill`` runs in a task of its own, in the foreground whoever asks.

    ``in_use`` is told +1 when that begins and -1 when it has ended.
    """

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
        """The bytes that the object has of this block, read-only: shorter than a block where it
        ends. Raises the load's error.

        Does not suspend if the block is loaded.
        """
        if self.loading:
            if self._ready is None:
                self._ready = trio.Event()
            with waits_for(self.cause):
                await self._ready.wait()
        if self.error is not None:
            raise self.error.with_traceback(None)
        assert self.view is not None
        return self.view
