"""The kind of a directory's filesystem. Blocks; raises OSError. Apart from `mountinfo`, for
commands that ranks wait for: ctypes takes 5 ms to import."""

import ctypes
import os
import sys

from aifs.core import libc

# f_type in statfs(2): tmpfs, ramfs; and NFS, SMB (3 kinds), FUSE, Ceph, 9P, AFS, Lustre, GPFS,
# BeeGFS.
_MEMORY_FILESYSTEMS = (0x01021994, 0x858458F6)
_NETWORK_FILESYSTEMS = (
    0x6969,
    0x517B,
    0xFF534D42,
    0xFE534D42,
    0x65735546,
    0x00C36400,
    0x01021997,
    0x5346414F,
    0x0BD00BD0,
    0x47504653,
    0x19830326,
)


def is_in_memory(path: str) -> bool:
    """Whether ``path``'s filesystem never waits for a device: calls take microseconds."""
    return _filesystem_of(path) in _MEMORY_FILESYSTEMS


def is_local(path: str) -> bool:
    """Whether ``path`` lies on a filesystem of this machine: nobody else changes files there."""
    return _filesystem_of(path) not in _NETWORK_FILESYSTEMS


def _filesystem_of(path: str) -> int:
    result = ctypes.create_string_buffer(256)
    if number := libc.call("statfs", os.fsencode(path), result):
        raise OSError(number, os.strerror(number), path)
    return int.from_bytes(result.raw[: ctypes.sizeof(ctypes.c_long)], sys.byteorder) & 0xFFFFFFFF
