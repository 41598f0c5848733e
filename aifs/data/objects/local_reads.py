"""Reads of an object set by this host's blocks of it: the topmost stage.

Blocks hold bytes as the stages below return them: recovered, checked, shared. A read with all
blocks here asks no server. Others are widened to whole blocks, kept in the background: so
neighbours in a container come along.
"""

from aifs.core.errors import Unavailable
from aifs.data.objects.cached_reads import CachedReads, Stage
from aifs.data.servers import Servers


class LocalReads:
    """Of one object set. See Stage."""

    def __init__(
        self,
        servers: Servers,
        source: int,
        below: Stage,
        cached: CachedReads | None,
    ) -> None:
        """``cached``: the stage below, if it is that, and its bytes need not be recovered."""
        self._blocks = servers.blocks
        self._source = source
        self._below = below
        self._cached = cached
        self._buffers = servers.buffers
        self.read_past, self.find = below.read_past, below.find
        self.forget, self.end = below.forget, below.end
        self.fixed: int | None = None
        """A container's bytes that never change: whole blocks, or all; None: all of a settled
        file."""

    async def read(self, offset: int, length: int, size: int, strict: bool = True) -> memoryview:
        """See Stage."""
        blocks, source, below = self._blocks, self._source, self._below
        if not strict:
            return await below.read(offset, length, size, strict)
        end, start, stop = self._end(size), offset, offset + length
        if held := blocks.held(source, offset, length):
            buffer = self._buffers.take(length)
            if await blocks.read(source, offset, buffer[:held], end):
                if held < length:
                    buffer[held:] = await self.read(offset + held, length - held, size)
                return buffer
            del buffer
        cached = None if self.fixed is None else self._cached  # of a container
        if cached is not None:
            await cached.open()  # page caches suit small reads
        if not blocks.takes(source):
            return await below.read(offset, length, size)
        if stop <= end:
            block = blocks.block
            start, stop = start - start % block, min(-(-stop // block) * block, end)
        corrections = blocks.corrections
        try:
            data = await below.read(start, stop - start, size, strict)
        except Unavailable:
            if stop - start == length:
                raise
            return await below.read(offset, length, size)  # what lies beside it is away
        if blocks.corrections != corrections:
            return data[offset - start :][:length]
        around = None if cached is None else cached.loaded(start)
        if around is not None:  # a stripe, with what lies beside it
            blocks.fill(source, *around, end)
        else:
            blocks.fill(source, start, data, end)
        return data[offset - start :][:length]

    def read_now(self, offset: int, buffer: memoryview, size: int) -> bool:
        """See Stage. ``read`` brings the bytes that are not in blocks, and keeps them."""
        if not self._blocks.takes(self._source):
            return self._below.read_now(offset, buffer, size)
        return self._blocks.read_now(self._source, offset, buffer, self._end(size))

    def _end(self, size: int) -> int:
        return size if self.fixed is None else self.fixed
