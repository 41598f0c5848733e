"""A small file that is written again and again, in place: two slots, of which the newer counts.

Format: two slots, at 0 and 65536, each an 8-digit hexadecimal CRC-32 of what follows up to the end
of the content, a space, the slot's generation and the content's length in bytes (16 and 8 digits,
hexadecimal, each with a space behind it), and the content; what stands behind that means nothing.
The slot with the larger generation counts, and the other one is written next: a torn write leaves
the older content, and a full disk is no obstacle. A slot that is not whole counts as empty.
"""

import fcntl
import os
import zlib
from contextlib import suppress

from aifs.core import files
from aifs.data.storage import ANYTHING

_SLOT_BYTES = 64 << 10
_HEAD_BYTES = 35


def read_slots(path: str) -> bytes | None:
    """The content that counts; None if there is none. Blocks. Raises OSError."""
    return _newest(files.read_file(path) or b"")[1]


def write_slots(path: str, content: bytes, durable: bool, expected: object) -> bool:
    """Replace the content, of up to 65,501 bytes; returns whether that was done. Blocks. Raises
    OSError.

    ``durable``: on return it is on stable storage. ``expected``: the content must be this (None:
    there is none), unless it is ANYTHING. Where the filesystem knows locks, of several processes
    one at a time compares and writes.
    """
    assert len(content) <= _SLOT_BYTES - _HEAD_BYTES
    fd = files.open_file(path, create=True)
    try:
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)  # until it is closed
        generation, before = _newest(files.read_at(fd, 2 * _SLOT_BYTES, 0))
        if expected is not ANYTHING and before != expected:
            return False
        slot = _encode(generation + 1, content)
        files.write_at(fd, slot, (generation + 1) % 2 * _SLOT_BYTES)
        if before is None:
            _give_to_owner_of(os.path.dirname(path), fd)
            # The other one has its space from now on, too.
            files.write_at(fd, slot, generation % 2 * _SLOT_BYTES)
        if durable:
            files.sync_file(fd)
    finally:
        files.close_file(fd)
    if durable:
        files.sync_dir(os.path.dirname(path))
    return True


def _give_to_owner_of(directory: str, fd: int) -> None:
    """If root has made the file, by fsck perhaps, in the store of another user, which has to read
    and write it.
    """
    status = os.stat(directory)
    if status.st_uid != os.geteuid():
        with suppress(OSError):
            files.set_owner(fd, status.st_uid, status.st_gid)


def _encode(generation: int, content: bytes) -> bytes:
    text = b"%016x %08x %s" % (generation, len(content), content)
    return b"%08x %s" % (zlib.crc32(text), text)


def _newest(file: bytes) -> tuple[int, bytes | None]:
    """Generation and content that count; of a file that has none, 0 and None."""
    slots = [file[start : start + _SLOT_BYTES] for start in (0, _SLOT_BYTES)]
    found = [decoded for slot in slots if (decoded := _decode(slot)) is not None]
    return max(found, default=(0, None), key=lambda each: each[0])


def _decode(slot: bytes) -> tuple[int, bytes] | None:
    try:
        check, generation, length = (
            int(number, 16) for number in slot[:_HEAD_BYTES].split(b" ")[:3]
        )
    except ValueError:
        return None
    end = _HEAD_BYTES + length
    if zlib.crc32(slot[9:end]) != check or end > len(slot):
        return None
    return generation, slot[_HEAD_BYTES:end]
