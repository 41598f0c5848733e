"""Reused read buffers: a fresh megabyte costs about as much in page faults as reading it."""

import ctypes
import mmap
import sys
import weakref
from collections import deque
from collections.abc import Sequence

from aifs.core.budget import Budget

BUFFER_SIZE = 1 << 20
POOLED_MIN = 64 << 10  # below that an ordinary bytearray is as cheap

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class BufferPool:
    """Page-aligned buffers as memoryviews; free again when no view, or slice, is left. At most
    ``limit`` are kept; while all are in use, ``take`` makes ordinary memory."""

    def __init__(self, limit: int = 32) -> None:
        self._limit = limit
        self._buffers: list[mmap.mmap] = []

    def take(self, length: int) -> memoryview:
        """A writable view of ``length`` bytes of undefined content."""
        if not POOLED_MIN <= length <= BUFFER_SIZE:
            return memoryview(bytearray(length))
        # First fit: the buffer used last is still in the processor's cache.
        for buffer in self._buffers:
            if sys.getrefcount(buffer) == 3:
                # The list's, the loop's, the argument's; each view adds one.
                return memoryview(buffer)[:length]
        if len(self._buffers) < self._limit:
            buffer = mmap.mmap(-1, BUFFER_SIZE)
            self._buffers.append(buffer)
            return memoryview(buffer)[:length]
        return memoryview(bytearray(length))


class BudgetedBuffers:
    """Page-aligned buffers that count in a budget until no view is left. They are not given back by
    callers, but kept for reuse, and released if the budget needs them. Used from one trio thread;
    views may die in any."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._dead: deque[mmap.mmap] = deque()  # appended by finalizers
        self._free: dict[int, list[mmap.mmap]] = {}  # by size
        budget.add_cache(self.give_back)

    @property
    def free_bytes(self) -> int:
        """Bytes that ``give_back`` could release."""
        self._bury()
        return sum(size * len(buffers) for size, buffers in self._free.items())

    def try_take(self, size: int) -> memoryview | None:
        """A writable view of ``size`` undefined bytes; None if memory is short."""
        if self._budget.short:
            return None
        self._bury()
        if free := self._free.get(size):
            return self._lend(free.pop())
        return self._lend(mmap.mmap(-1, size)) if self._budget.try_reserve(size) else None

    async def take(self, size: int) -> memoryview:
        """``try_take``, waiting for memory. Raises OverBudget if there will never be enough."""
        view = self.try_take(size)
        if view is None:
            await self._budget.acquire(size)
            view = self._lend(mmap.mmap(-1, size))
        return view

    def give_back(self, size: int) -> None:
        """Release at least ``size`` bytes of free buffers to the budget, or all there are."""
        self._bury()
        released = 0
        for length, buffers in self._free.items():
            while buffers and released < size:
                buffers.pop()
                self._budget.release(length)
                released += length

    def _lend(self, buffer: mmap.mmap) -> memoryview:
        # Views of a buffer keep the object alive that they were made of. So each time it is lent
        # that is a fresh one, whose death says that the last view has gone.
        lent = (ctypes.c_ubyte * len(buffer)).from_buffer(buffer)
        weakref.finalize(lent, _died, weakref.ref(self), buffer).atexit = False
        return memoryview(lent).cast("B")

    def died(self, buffer: mmap.mmap) -> None:
        """No view of it is left. Called by its finalizer, in any thread."""
        self._dead.append(buffer)
        self._budget.retry()

    def _bury(self) -> None:
        while self._dead:
            buffer = self._dead.popleft()
            self._free.setdefault(len(buffer), []).append(buffer)


def _died(lender: weakref.ref[BudgetedBuffers], buffer: mmap.mmap) -> None:
    """The last view has gone. The weak reference keeps a lender from living in its cache's
    views."""
    if (buffers := lender()) is not None:
        buffers.died(buffer)


def scatter(source: memoryview, parts: Sequence[memoryview]) -> None:
    """Copy ``source`` to ``parts``, one after the other; together they are as long."""
    start = 0
    for part in parts:
        part[:] = source[start : start + len(part)]
        start += len(part)


def is_equal(first: memoryview, second: memoryview) -> bool:
    """Whether two writable views of one length are equal; faster than comparing memoryviews, and
    other threads run meanwhile."""
    return not first or not _memcmp(_address(first), _address(second), len(first))


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
