"""Operations on byte ranges of files that are neither reads nor writes: fallocate, SEEK_DATA, copy_file_range."""

import os
import time

from aifs.core.errors import FileTooLarge, Invalid, NoSuchAddress, NotSupported
from aifs.data.containers.chunked import ChunkedObjects
from aifs.layout.interleaved import Interleaved
from aifs.vfs.io.file_io import FileIO
from aifs.vfs.io.open_inode import OpenInode
from aifs.vfs.types import SIZE_MAX

KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE = 0x01, 0x02, 0x10  # FALLOC_FL_* of linux/falloc.h
_MODES = {0, KEEP_SIZE, PUNCH_HOLE | KEEP_SIZE, ZERO_RANGE, ZERO_RANGE | KEEP_SIZE}

_PIECE = 4 << 20


async def fallocate(io: FileIO, file: OpenInode, mode: int, offset: int, length: int) -> None:
    """fallocate(2) with the modes above. In the burst tier space is reserved; data servers only take note of sizes."""
    if mode not in _MODES:
        raise NotSupported("fallocate: this mode is not supported")
    if offset < 0 or length <= 0:
        raise Invalid("fallocate: an empty range")
    end = offset + length
    if end > SIZE_MAX:
        raise FileTooLarge()
    if file.inode.in_burst:
        await _allocate_in_burst(io, file, mode, offset, length)
        return
    if mode & (PUNCH_HOLE | ZERO_RANGE):
        await _write_zeros(io, file, offset, min(end, file.inode.size))
    if end > file.inode.size and not mode & KEEP_SIZE:
        await io.truncate(file, end)


async def _allocate_in_burst(
    io: FileIO, file: OpenInode, mode: int, offset: int, length: int
) -> None:
    await file.gate.enter_alone()
    try:
        file.cancel_drain()
        file.changes += 1
        await io.burst.enter(file, offset + length)
        await file.copy.ensure_open()
        try:
            await file.copy.allocate(mode, offset, length)
        except NotSupported:
            if not mode & ZERO_RANGE:
                raise
            await file.copy.allocate(
                PUNCH_HOLE | KEEP_SIZE, offset, length
            )  # tmpfs can do the same in two steps
            await file.copy.allocate(mode & KEEP_SIZE, offset, length)
        file.changed(time.time_ns())
        io.burst.look(file)
    finally:
        file.gate.leave_alone()


async def _write_zeros(io: FileIO, file: OpenInode, offset: int, end: int) -> None:
    while offset < end:
        length = min(_PIECE, end - offset)
        await io.write(file, offset, bytes(length))
        offset += length


async def seek(io: FileIO, file: OpenInode, offset: int, whence: int) -> int:
    """The next data or hole from ``offset`` on. Of what is not in the burst tier, only interleaved files tell their holes; and
    none does while somebody may write to it by way of the daemon: the kernel keeps back what a mapping has written."""
    if whence not in (os.SEEK_DATA, os.SEEK_HOLE):
        raise Invalid("lseek: neither SEEK_DATA nor SEEK_HOLE")
    told = file.backing or not file.writers
    if told and file.inode.in_burst:
        return await file.copy.seek(offset, whence)
    size = io.attributes(file).size
    if not 0 <= offset < size:
        raise NoSuchAddress()
    if told and isinstance(file.inode.layout, Interleaved):
        return await _seek_chunks(io, file, offset, whence)
    return offset if whence == os.SEEK_DATA else size


async def _seek_chunks(io: FileIO, file: OpenInode, offset: int, whence: int) -> int:
    await file.gate.enter_shared()
    try:
        size = file.inode.size
        if isinstance(file.objects, ChunkedObjects):
            found = await file.objects.following(offset, size, whence == os.SEEK_HOLE)
            if found >= size and whence == os.SEEK_DATA:
                raise NoSuchAddress()
            return found
    finally:
        file.gate.leave_shared()
    return offset if whence == os.SEEK_DATA else size  # it has another form since


async def copy(
    io: FileIO, source: OpenInode, offset_in: int, target: OpenInode, offset_out: int, length: int
) -> int:
    """Copy up to ``length`` bytes, in the kernel where both files are in the burst tier. Returns how many."""
    length = min(length, io.attributes(source).size - offset_in, SIZE_MAX - offset_out)
    if length <= 0:
        return 0
    if source is target and offset_in < offset_out + length and offset_out < offset_in + length:
        raise Invalid("copy_file_range: the ranges overlap")
    if source.inode.in_burst and target.inode.in_burst:
        await io.enter_to_change(target, offset_out + length)
        try:
            await target.copy.ensure_open()
            done = await target.copy.copy_range(source.copy, offset_in, offset_out, length)
        finally:
            target.gate.leave_shared()
        if done:
            target.changed(time.time_ns())
            io.burst.look(target)
            return done
    length = min(length, _PIECE)
    data = await io.read(source, offset_in, length)
    await io.write(target, offset_out, data)
    return len(data)
