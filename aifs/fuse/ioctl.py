"""The ioctls of AIFS: numbers and arguments. Pure.

Each command is defined once, by its direction, its number and the struct of its argument; the
number that programs pass is computed as <linux/ioctl.h> does. Integers are in the machine's byte order. A command
on any file or directory of the mount means that file, or the tree below that directory.
"""

import struct
from dataclasses import dataclass
from typing import Any

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

    def unpack(self, data: bytes) -> tuple[Any, ...]:
        """The fields of an argument. Raises Invalid if it has another size."""
        if len(data) != self.argument.size:
            raise Invalid(f"{self.name}: {len(data)} bytes, not {self.argument.size}")
        return self.argument.unpack(data)


AIFS_IOC_VERSION = Command("AIFS_IOC_VERSION", _READ, 0, struct.Struct("=I"))
"""u32: VERSION."""

AIFS_IOC_DRAIN = Command("AIFS_IOC_DRAIN", _WRITE, 1, struct.Struct("=IIQ"))
"""u32 flags (0), u32 reserved (0), u64 timeout_ms (0: none). Returns when the bytes of the file, or of all files
below the directory, that have been acknowledged are on the capacity tier; ETIMEDOUT if that takes longer."""

AIFS_IOC_REMOVE_TREE = Command("AIFS_IOC_REMOVE_TREE", _WRITE, 2, struct.Struct("=II256s"))
"""u32 flags (0), u32 reserved (0), char name[256] (ends with a zero byte): on a directory, removes that directory in it with
all that lies below. Returns at once; space comes back in the background. ENOTDIR, ENOENT, EACCES, EPERM as rmdir(2); EPERM
also if the caller does not own the directory that is to go."""

REPLACE, EXCLUSIVE = 1, 2

AIFS_IOC_PUBLISH = Command("AIFS_IOC_PUBLISH", _WRITE, 3, struct.Struct("=IIQ256s256s256s64s256s"))
"""u32 flags (REPLACE: a tree that has the final name goes to the trash; EXCLUSIVE: nothing may have it), u32 length of the
content, u64 inode number of the directory that the final name is in, then names, each ending with a zero byte, empty for none:
char final[256], latest[256] (a symlink to final), tracker[256] (a file), then char content[64] (of the tracker file), char
manifest[256] (a file that has to be in the directory). On a directory: shows it under its final name, with the pointers
beside it, all at once; durable on return. EBUSY: members or files are missing; EEXIST, ENOTEMPTY: the name is taken."""

AGAIN = 1

AIFS_IOC_COMMIT = Command("AIFS_IOC_COMMIT", _WRITE, 4, struct.Struct("=II256s"))
"""u32 rank, u32 flags (AGAIN: it may have committed before), char list[256] (ends with a zero byte; path of a file below that
says what the rank has written, or empty). On a pending directory: all that is unsynced below is durable on return, and the rank
has committed. Unlike setxattr(2) it leaves the directory unlocked meanwhile. EINVAL: not pending, no such rank, or it has."""

COMMANDS = {
    command.request: command
    for command in (AIFS_IOC_VERSION, AIFS_IOC_DRAIN, AIFS_IOC_REMOVE_TREE, AIFS_IOC_PUBLISH, AIFS_IOC_COMMIT)
}


def text(field: bytes) -> bytes:
    """A name in a field of fixed length. Raises Invalid if it does not end in a zero byte."""
    name, end, _ = field.partition(b"\0")
    if not end:
        raise Invalid("a name does not end in a zero byte")
    return name
