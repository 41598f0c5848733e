"""Byte ranges of files: fallocate, SEEK_DATA, copy_file_range."""

import os

import trio

from aifs.burst.remote import Operation
from aifs.core.errors import FileTooLarge, Invalid, NoSuchAddress, NotSupported, Unavailable
from aifs.files.file_io import FileIO
from aifs.files.open_inode import OpenInode
from aifs.files.types import SIZE_MAX

KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE = 0x01, 0x02, 0x10  # FALLOC_FL_* of linux/falloc.h
_MODES = {0, KEEP_SIZE, PUNCH_HOLE | KEEP_SIZE, ZERO_RANGE, ZERO_RANGE | KEEP_SIZE}

_PIECE = 4 << 20

WHOLE = SIZE_MAX
"""As a length: up to the end of the file."""


async def fallocate(io: FileIO, file: OpenInode, mode: int, offset: int, length: int) -> None:
    """fallocate(2) with the modes above. Only the burst tier reserves space; data servers free that
    of holes and zeros. Raises NotSupported, NoSpace, Invalid, FileTooLarge."""
    if mode not in _MODES:
        raise NotSupported("fallocate: this mode is not supported")
    if offset < 0 or length <= 0:
        raise Invalid("fallocate: an empty range")
    end = offset + length
    if end > SIZE_MAX:
        raise FileTooLarge()
    while await io.by_home.take_from_home(file):
        if await io.by_home.at_home(file, Operation.ALLOCATE, mode, offset, length):
            return
    if file.inode.in_burst:
        async with io.growing(file, 0 if mode & KEEP_SIZE else end):
            await _allocate_in_burst(io, file, mode, offset, length)
        return
    size = file.inode.size
    if not (mode & (PUNCH_HOLE | ZERO_RANGE) or io.is_inline(file, end)):
        raise NotSupported("fallocate: data servers cannot reserve space")
    if end > size and not mode & KEEP_SIZE:  # first, as that may be refused
        await io.truncate(file, end)
    if mode & (PUNCH_HOLE | ZERO_RANGE) and offset < size:
        await _punch(io, file, offset, min(end, size))


async def _allocate_in_burst(
    io: FileIO, file: OpenInode, mode: int, offset: int, length: int
) -> None:
    await file.gate.enter_alone()
    try:
        file.cancel_lease()
        file.changes += 1
        await io.burst.enter(file, offset + length)
        copy = file.own_copy
        await copy.ensure_open()
        try:
            await copy.allocate(mode, offset, length)
        except NotSupported:
            if not mode & ZERO_RANGE:
                raise
            # tmpfs can do the same in two steps.
            await copy.allocate(PUNCH_HOLE | KEEP_SIZE, offset, length)
            await copy.allocate(mode & KEEP_SIZE, offset, length)
        io.burst.changed(file)
    finally:
        file.gate.leave_alone()


async def _punch(io: FileIO, file: OpenInode, offset: int, end: int) -> None:
    if not await io.enter_to_change(file, end):
        await fallocate(io, file, PUNCH_HOLE | KEEP_SIZE, offset, end - offset)
        return
    try:
        if file.inode.in_burst:
            await file.own_copy.ensure_open()
            await file.own_copy.allocate(PUNCH_HOLE | KEEP_SIZE, offset, end - offset)
            io.burst.changed(file)
            return
        if file.inode.layout is not None:
            await io.capacity.punch(file, offset, end - offset)
            return
    except NotSupported:
        pass
    finally:
        file.gate.leave_shared()
    await _write_zeros(io, file, offset, end)


async def _write_zeros(io: FileIO, file: OpenInode, offset: int, end: int) -> None:
    """Where there is data."""
    while offset < end:
        offset, stop = await file.data_range(offset, end, strict=False)
        length = min(_PIECE, stop - offset)
        if length:
            await io.write(file, offset, bytes(length))
        offset += length
        await trio.lowlevel.checkpoint()  # there may be much of it, and the caller may be cancelled


def _tells_holes(file: OpenInode) -> bool:
    """Not while the daemon writes to the file (the kernel keeps back writes of a mapping), nor
    where another host has it."""
    return not file.home and (bool(file.backing) or not file.writers)


async def seek(io: FileIO, file: OpenInode, offset: int, whence: int) -> int:
    """The next data or hole from ``offset`` on. If servers fail to tell, all is data."""
    if whence not in (os.SEEK_DATA, os.SEEK_HOLE):
        raise Invalid("lseek: neither SEEK_DATA nor SEEK_HOLE")
    if file.is_joined:
        await io.by_home.look_at_home(file)
    told = _tells_holes(file)
    if told and file.inode.in_burst:
        return await file.own_copy.seek(offset, whence)
    size = io.inodes.attributes(file).size
    if not 0 <= offset < size:
        raise NoSuchAddress()
    if not told or file.inode.layout is None:
        return offset if whence == os.SEEK_DATA else size
    await file.gate.enter_shared()
    try:
        return await _seek_objects(file, offset, whence)
    finally:
        file.gate.leave_shared()


async def _seek_objects(file: OpenInode, offset: int, whence: int) -> int:
    start, size = offset, file.inode.size
    while start < size and file.objects is not None:  # else it has another form since
        try:
            found, end = await file.data_range(start, size, strict=not file.marked)
        except Unavailable:
            break
        if whence == os.SEEK_DATA:
            if found >= size:
                raise NoSuchAddress()
            return found
        if found > start:
            return start
        start = end
    return offset if whence == os.SEEK_DATA else size


async def copy(
    io: FileIO, source: OpenInode, offset_in: int, target: OpenInode, offset_out: int, length: int
) -> int:
    """Copy up to ``length`` bytes, by the kernel if both are in the burst tier. Returns how
    many."""
    for file in (source, target):
        if file.is_joined:
            await io.by_home.look_at_home(file)
    length = min(length, io.inodes.attributes(source).size - offset_in, SIZE_MAX - offset_out)
    if length <= 0:
        return 0
    if source is target and offset_in < offset_out + length and offset_out < offset_in + length:
        raise Invalid("copy_file_range: the ranges overlap")
    start, end = offset_in, offset_in + length
    if _tells_holes(source):
        start, end = await source.data_range(start, end, strict=not source.marked)
    if start > offset_in:
        await _write_hole(io, target, offset_out, start - offset_in)
        return start - offset_in
    length = end - start
    in_burst = source.inode.in_burst and target.inode.in_burst and not source.home
    if in_burst:
        async with io.growing(target, offset_out + length):
            done = await _copy_in_burst(io, source, offset_in, target, offset_out, length)
        if done:
            return done
    data = await io.read_to_copy(source, offset_in, min(length, _PIECE))
    await io.write(target, offset_out, data)
    return len(data)


async def _copy_in_burst(
    io: FileIO, source: OpenInode, offset_in: int, target: OpenInode, offset_out: int, length: int
) -> int:
    """How many bytes the kernel has copied; 0: it cannot."""
    if not await io.enter_to_change(target, offset_out + length):
        return 0
    try:
        sender, receiver = source.own_copy, target.own_copy
        await receiver.ensure_open()
        done = await receiver.copy_range(sender, offset_in, offset_out, length)
    finally:
        target.gate.leave_shared()
    if done:
        io.burst.changed(target)
    return done


async def _write_hole(io: FileIO, target: OpenInode, offset: int, length: int) -> None:
    size = io.inodes.attributes(target).size
    if offset < size:
        await _punch(io, target, offset, min(offset + length, size))
    if offset + length > size:
        await io.truncate(target, offset + length)
