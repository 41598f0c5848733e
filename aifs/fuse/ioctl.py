"""The ioctls of AIFS: numbers and arguments. Pure.

Each command is defined once, by its direction, its number and the struct of its argument; the
number that programs pass is computed as <linux/ioctl.h> does. Integers are in the machine's byte order. A command
on any file or directory of the mount means that file, or the tree below that directory.
"""

import struct
from dataclasses import dataclass

from aifs.core.errors import Invalid

TYPE = 0xAF
"""The type byte of all our commands (``_IOC_TYPE``); the bridge answers any other with ENOTTY."""

VERSION = 1
"""What AIFS_IOC_VERSION reads. Raised when a command changes; new commands alone do not change it."""

_NUMBER_BITS, _TYPE_BITS, _SIZE_BITS = 8, 8, 14
_WRITE, _READ = 1, 2  # as the caller sees it: it writes an argument, it reads one


@dataclass(frozen=True)
class Command:
    """One ioctl. ``argument`` is what the caller passes or gets, ``direction`` _WRITE or _READ."""

    name: str
    direction: int
    number: int
    argument: struct.Struct

    @property
    def request(self) -> int:
        """The number that ioctl(2) takes."""
        size_shift = _NUMBER_BITS + _TYPE_BITS
        direction = self.direction << size_shift + _SIZE_BITS
        return direction | self.argument.size << size_shift | TYPE << _NUMBER_BITS | self.number

    def unpack(self, data: bytes) -> tuple[int, ...]:
        """The fields of an argument. Raises Invalid if it has another size."""
        if len(data) != self.argument.size:
            raise Invalid(f"{self.name}: {len(data)} bytes, not {self.argument.size}")
        return self.argument.unpack(data)


AIFS_IOC_VERSION = Command("AIFS_IOC_VERSION", _READ, 0, struct.Struct("=I"))
"""u32: VERSION."""

AIFS_IOC_DRAIN = Command("AIFS_IOC_DRAIN", _WRITE, 1, struct.Struct("=IIQ"))
"""u32 flags (0), u32 reserved (0), u64 timeout_ms (0: none). Returns when the bytes of the file, or of all files
below the directory, that have been acknowledged are on the capacity tier; ETIMEDOUT if that takes longer."""

COMMANDS = {command.request: command for command in (AIFS_IOC_VERSION, AIFS_IOC_DRAIN)}
