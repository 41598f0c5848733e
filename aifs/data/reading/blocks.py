"""Clean blocks that are kept nearer than the data servers, as the reads of object sets see them."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from aifs.core.errors import Busy
from aifs.layout.striped import Striped


class Blocks(Protocol):
    """Blocks of *sources*, which are object sets and containers, by id and at their own offsets."""

    block: int
    """Bytes of a block."""
    corrections: int
    """Counts the calls of ``correct``: what was being read meanwhile must not be kept."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is here."""

    @property
    def segment(self) -> int:
        """Bytes of a segment: what goes at once, if it was not read for long."""

    def serves(self, layout: Striped) -> bool:
        """Whether blocks of what lies there come sooner from here. Does not block."""

    def takes(self, source: int) -> bool:
        """Whether blocks of it may be here, or are wanted. Does not block."""

    def held(self, source: int, offset: int, length: int) -> int:
        """How many bytes of a range of it are here, from its start on. Does not block."""

    def read_now(self, source: int, offset: int, buffer: memoryview, size: int) -> bool:
        """Fill ``buffer``, if all of it is here, without waiting; ``size``: the source's. Does not
        block."""

    async def read(self, source: int, offset: int, buffer: memoryview, size: int) -> bool:
        """The same, also where it has to be waited for. Cancellable."""

    def fill(self, source: int, offset: int, data: memoryview, end: int) -> None:
        """Keep the whole blocks among these bytes, and the source's last; bytes from ``end`` on may
        change. Does not block."""

    async def filled(self) -> None:
        """What was to be kept until now is here on return, unless there is no room."""

    def want(self, source: int, offset: int, length: int, is_wanted: bool) -> None:
        """A range is read soon, and stays before unused ones; or is not needed soon. Does not
        block."""

    @property
    def room(self) -> int:
        """Bytes that blocks may take here."""

    def file_of(self, source: int, offset: int, length: int) -> tuple[Any, int] | None:
        """Burst directory and descriptor, not the caller's, of the file with this checked range at
        the same offset; None: not here, or not open. Valid until ``tell`` calls. Does not block."""

    def tell(self, leaving: Callable[[int], None]) -> None:
        """Call ``leaving`` before blocks of a source change or go."""

    def place_of(self, source: int, size: int) -> int | None:
        """The burst directory with all ``size`` bytes of a source in one file, checked, so that
        programs may read it; or None. Does not block."""

    async def backing(self, source: int, size: int) -> int | None:
        """A descriptor of that file for reading, the caller's; None if it is not as it should be.
        Raises Unavailable."""

    def lend(self, source: int, is_lent: bool) -> None:
        """Whether programs have it; it stays meanwhile. Also for other ids. Does not block."""

    def is_lent(self, source: int) -> bool:
        """Whether programs are given it, and it has not ended since. Does not block."""

    async def is_used(self, source: int) -> bool:
        """Whether programs use it by themselves: have it open, or mapped. Raises Unavailable."""

    async def give(self, source: int, copy_id: int) -> Any:
        """Make its file a burst copy; returns the directory. Raises Busy if it has ended,
        Unavailable."""

    def ask(self, read: Callable[[], Iterable[tuple[int, int]]]) -> None:
        """Call ``read`` now and then: sources read from ``file_of`` since the last call, each with
        a mask: bit ``n mod 64`` for segment ``n``."""

    def bytes_in(self, source: int, offset: int, length: int) -> int:
        """How many bytes of a range of a source are here; 0 of other ids. Does not block."""

    def bytes_on(self, server: int) -> int:
        """That blocks take on a burst directory."""

    def give_room(self, server: int, limit: int) -> None:
        """Blocks may take so many bytes there from now on. Does not block."""

    async def leave(self, server: int) -> None:
        """Keep nothing there any more."""

    def end(self, source: int) -> bool:
        """Its bytes may change, or are nobody's any more; whether any were here. Also for other
        ids. Does not block."""

    def finding(self) -> AbstractContextManager[None]:
        """A finding, or repair, is recorded in the block, with ``correct``: no map is written
        meanwhile that has the record and the blocks."""

    def correct(self, source: int) -> bool:
        """``end`` for bytes found wrong at their place, and no longer read there."""


class NoBlocks:
    """Where none are kept. See Blocks."""

    block = segment = 1
    room = 0
    is_empty = True
    corrections = 0

    def serves(self, layout: Striped) -> bool:
        return False

    def takes(self, source: int) -> bool:
        return False

    def held(self, source: int, offset: int, length: int) -> int:
        return 0

    def read_now(self, source: int, offset: int, buffer: memoryview, size: int) -> bool:
        return False

    async def read(self, source: int, offset: int, buffer: memoryview, size: int) -> bool:
        return False

    def fill(self, source: int, offset: int, data: memoryview, end: int) -> None:
        pass

    async def filled(self) -> None:
        pass

    def want(self, source: int, offset: int, length: int, is_wanted: bool) -> None:
        pass

    def file_of(self, source: int, offset: int, length: int) -> None:
        return None

    def tell(self, leaving: Callable[[int], None]) -> None:
        pass

    def place_of(self, source: int, size: int) -> None:
        return None

    async def backing(self, source: int, size: int) -> None:
        return None

    def lend(self, source: int, is_lent: bool) -> None:
        pass

    def is_lent(self, source: int) -> bool:
        return False

    async def is_used(self, source: int) -> bool:
        return False

    async def give(self, source: int, copy_id: int) -> Any:
        raise Busy(f"there are no blocks of the objects {source}")

    def ask(self, read: Callable[[], Iterable[tuple[int, int]]]) -> None:
        pass

    def bytes_in(self, source: int, offset: int, length: int) -> int:
        return 0

    def bytes_on(self, server: int) -> int:
        return 0

    def give_room(self, server: int, limit: int) -> None:
        pass

    async def leave(self, server: int) -> None:
        pass

    def end(self, source: int) -> bool:
        return False

    def finding(self) -> AbstractContextManager[None]:
        return nullcontext()

    def correct(self, source: int) -> bool:
        return False
