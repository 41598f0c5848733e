"""The mounts of this process's namespace, by /proc/self/mountinfo: no mount is asked."""

import os
import re
import sys
from typing import NamedTuple

from aifs.core import libc

FSTYPE = "fuse.aifs"
_LINKS_MAX = 40  # as in the kernel


class Mount(NamedTuple):
    """A line of mountinfo."""

    device: int  # the number that stat reports of its files
    mountpoint: str  # absolute
    fstype: str  # such as fuse.aifs
    source: str  # as mount(8) was told
    root: str = "/"  # the path in the filesystem that is mounted there
    options: tuple[str, ...] = ()  # of this mount, such as ro


def all_mounts() -> list[Mount]:
    """The mounts of this process's namespace, oldest first."""
    with open("/proc/self/mountinfo", "rb") as file:
        return [parse_line(line) for line in file]


def mounted_at(path: str) -> Mount | None:
    """The mount that is on top at the absolute ``path``, or None."""
    return next((mount for mount in reversed(all_mounts()) if mount.mountpoint == path), None)


def stays_mounted(without: Mount) -> bool:
    """Whether its filesystem is mounted elsewhere, too: one of the two is a bind mount."""
    same = [mount for mount in all_mounts() if mount.device == without.device]
    return without.root != "/" or len(same) > 1


def mount_of(path: str) -> Mount | None:
    """The mount that ``path`` lies on, or None."""
    path, found = os.path.realpath(path), None
    for mount in all_mounts():
        is_above = os.path.commonpath([path, mount.mountpoint]) == mount.mountpoint
        # A later mount hides an earlier one.
        if is_above and (found is None or len(mount.mountpoint) >= len(found.mountpoint)):
            found = mount
    return found


def first_aifs(path: str) -> tuple[Mount | None, bool]:
    """The first AIFS mount on a path, and whether it ends at that mountpoint. Walks symlinks like
    the kernel, up to the mount, which is not asked."""
    mounts = {mount.mountpoint: mount for mount in all_mounts()}
    full = path if path.startswith("/") else os.path.join(os.getcwd(), path)  # which may be gone
    here, left, links = "/", full.split("/")[::-1], 0
    while left:
        name = left.pop()
        if name in ("", "."):
            continue
        here = os.path.dirname(here) if name == ".." else os.path.join(here, name)
        mount = mounts.get(here)
        if mount is not None and mount.fstype == FSTYPE:
            return mount, not any(left)
        if mount is None and os.path.islink(here) and links < _LINKS_MAX:
            links += 1
            left += os.readlink(here).split("/")[::-1]
            here = "/" if left[-1] == "" else os.path.dirname(here)
    return None, False


def parse_line(line: bytes) -> Mount:
    before, _, after = line.partition(b" - ")
    fields, (fstype, source, *_) = before.split(b" "), after.split(b" ")
    major, _, minor = fields[2].partition(b":")
    device = os.makedev(int(major), int(minor))
    place, root = _unescape(fields[4]), _unescape(fields[3])
    options = tuple(os.fsdecode(fields[5]).split(","))
    return Mount(device, place, os.fsdecode(fstype), _unescape(source), root, options)


def _unescape(field: bytes) -> str:
    return os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), field))


# --- kinds of filesystems -------------------------------------------------------------------------


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
    import ctypes  # which takes 5 ms

    result = ctypes.create_string_buffer(256)
    if number := libc.call("statfs", os.fsencode(path), result):
        raise OSError(number, os.strerror(number), path)
    return int.from_bytes(result.raw[: ctypes.sizeof(ctypes.c_long)], sys.byteorder) & 0xFFFFFFFF
