"""The mounts of this process's namespace, as /proc/self/mountinfo tells them: no mount is asked anything."""

import os
import re
from typing import NamedTuple


class Mount(NamedTuple):
    """A line of mountinfo; ``device`` is the number that stat gives for its files."""

    device: int
    mountpoint: str
    fstype: str
    source: str


def all_mounts() -> list[Mount]:
    """The mounts of this process's namespace, oldest first."""
    with open("/proc/self/mountinfo", "rb") as file:
        return [_parse_line(line) for line in file]


def mounted_at(path: str) -> Mount | None:
    """The mount that is on top at the absolute ``path``, or None."""
    return next((mount for mount in reversed(all_mounts()) if mount.mountpoint == path), None)


def _parse_line(line: bytes) -> Mount:
    before, _, after = line.partition(b" - ")
    fields, (fstype, source, *_) = before.split(b" "), after.split(b" ")
    major, _, minor = fields[2].partition(b":")
    device = os.makedev(int(major), int(minor))
    return Mount(device, _unescape(fields[4]), os.fsdecode(fstype), _unescape(source))


def _unescape(field: bytes) -> str:
    return os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), field))
