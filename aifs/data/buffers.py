"""Reused read buffers. A fresh megabyte costs a page fault per 4 KiB, about as much as reading into it."""

import mmap
import sys

BUFFER_SIZE = 1 << 20
POOLED_MIN = 64 << 10  # below that an ordinary bytearray is as cheap


class BufferPool:
    """Page-aligned buffers, handed out as memoryviews; one is free again when no view of it is left.

    So nobody gives a buffer back: whoever holds the view, or a slice of it, holds the buffer. At most ``limit``
    buffers are kept; while all are in use, ``take`` makes ordinary memory.
    """

    def __init__(self, limit: int = 32) -> None:
        self._limit = limit
        self._buffers: list[mmap.mmap] = []

    def take(self, length: int) -> memoryview:
        """A writable view of ``length`` bytes of undefined content."""
        if not POOLED_MIN <= length <= BUFFER_SIZE:
            return memoryview(bytearray(length))
        # First fit: the buffer used last is still in the processor's cache.
        for buffer in self._buffers:
            if sys.getrefcount(buffer) == 3:  # the list's, the loop's, the argument's; each view adds one
                return memoryview(buffer)[:length]
        if len(self._buffers) < self._limit:
            buffer = mmap.mmap(-1, BUFFER_SIZE)
            self._buffers.append(buffer)
            return memoryview(buffer)[:length]
        return memoryview(bytearray(length))
