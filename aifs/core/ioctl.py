"""The ioctls of AIFS: numbers and arguments, for the daemon, the client and C programs. Pure.

Each command is defined once, by its direction, its number and the fields of its argument; the
number that programs pass is computed as <linux/ioctl.h> does, and ``c_header`` writes the same for
C (fuse/aifs_ioctl.h). Integers are in the machine's byte order. A command on any file or directory
of the mount means that file, or the tree below that directory.
"""

import re
import struct
import textwrap
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from aifs.core.errors import Invalid

TYPE = 0xAF
"""The type byte of all our commands (``_IOC_TYPE``); the bridge answers any other with ENOTTY."""

VERSION = 2
"""What AIFS_IOC_VERSION reads. Raised when a command changes; new commands alone do not change it.
"""

_NUMBER_BITS, _TYPE_BITS, _SIZE_BITS = 8, 8, 14
_WRITE, _READ = 1, 2  # as the caller sees it: it writes an argument, it reads one

_FIELD = re.compile(r"(u32|i32|u64|char) (\w+)(?:\[(\d+)\])?")
_CODES = {"u32": "I", "i32": "i", "u64": "Q", "char": "s"}
_C_TYPES = {"u32": "__u32", "i32": "__s32", "u64": "__u64", "char": "char"}


@dataclass(frozen=True)
class Command:
    """One ioctl. ``direction``: _WRITE, _READ or both; ``fields``: those of its argument, as in
    ``u32 rank, char list[256]``, naturally aligned; ``meaning``: what it does, for people."""

    name: str
    direction: int
    number: int
    fields: str
    meaning: str

    @cached_property
    def argument(self) -> struct.Struct:
        """What the caller passes or gets."""
        return struct.Struct(
            "=" + "".join(count + _CODES[kind] for kind, _, count in _FIELD.findall(self.fields))
        )

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

    def c_definition(self) -> str:
        """The struct of the argument, and the number."""
        words = textwrap.wrap(self.meaning, 110, break_long_words=False)
        lines = ["/*", *(f" * {line}" for line in words), " */"]
        struct_name = self.name.lower().replace("_ioc_", "_")
        lines.append(f"struct {struct_name} {{")
        for kind, name, count in _FIELD.findall(self.fields):
            lines.append(f"\t{_C_TYPES[kind]} {name}{f'[{count}]' if count else ''};")
        macro = {_WRITE: "_IOW", _READ: "_IOR", _WRITE | _READ: "_IOWR"}[self.direction]
        lines += [
            "};",
            f"#define {self.name} {macro}(AIFS_IOC_TYPE, {self.number}, struct {struct_name})",
        ]
        return "\n".join(lines)


AIFS_IOC_VERSION = Command(
    "AIFS_IOC_VERSION", _READ, 0, "u32 version", "Reads AIFS_IOC_VERSION_NUMBER of the daemon."
)

AIFS_IOC_DRAIN = Command(
    "AIFS_IOC_DRAIN",
    _WRITE,
    1,
    "u32 flags, u32 reserved, u64 timeout_ms",
    "flags and reserved: 0; timeout_ms 0: none. Returns when the bytes of the file, or of all "
    "files below the directory, that have been acknowledged are on the capacity tier; ETIMEDOUT if "
    "that takes longer. EACCES, EPERM: it is for who may write to it.",
)

AIFS_IOC_REMOVE_TREE = Command(
    "AIFS_IOC_REMOVE_TREE",
    _WRITE,
    2,
    "u32 flags, u32 reserved, char name[256]",
    "flags and reserved: 0; name ends with a zero byte. On a directory: removes that directory in "
    "it with all that lies below. Returns at once; space comes back in the background. ENOTDIR, "
    "ENOENT, EACCES, EPERM as rmdir(2); EPERM also if the caller does not own the directory that "
    "is to go.",
)

REPLACE, EXCLUSIVE = 1, 2

AIFS_IOC_PUBLISH = Command(
    "AIFS_IOC_PUBLISH",
    _WRITE,
    3,
    "u32 flags, u32 content_length, u64 parent, char final[256], char latest[256], char "
    "tracker[256], char content[64], char manifest[256]",
    "On a directory: shows it under its final name, with the pointers beside it, all at once; "
    "durable on return. flags: AIFS_REPLACE (a tree that has the final name is removed), "
    "AIFS_EXCLUSIVE (nothing may have it). parent: inode number of the directory that the final "
    "name is in. Names end with a zero byte, empty for none: latest (a symlink to final), tracker "
    "(a file with the content), manifest (a file that has to be in the directory). EBUSY: members "
    "or files are missing; EEXIST, ENOTEMPTY: the name is taken.",
)

AGAIN = 1

AIFS_IOC_COMMIT = Command(
    "AIFS_IOC_COMMIT",
    _WRITE,
    4,
    "u32 rank, u32 flags, char list[256]",
    "On a pending directory: all that is unsynced below is durable on return, and the rank has "
    "committed. flags: AIFS_AGAIN (it may have committed before); list: path of a file below that "
    "says what the rank has written, ending with a zero byte, or empty. Unlike setxattr(2) it "
    "leaves the directory unlocked meanwhile. EINVAL: not pending, no such rank, or it has "
    "committed.",
)

GROUP_EXPLICIT, GROUP_PENDING, GROUP_SAME_SIZE, GROUP_ANEW = 1, 2, 4, 8

AIFS_IOC_GROUP_CREATE = Command(
    "AIFS_IOC_GROUP_CREATE",
    _WRITE | _READ,
    5,
    "u32 ranks, u32 flags, u64 chunk, u64 timeout_ms, u64 grace_ms, u64 id, char name[64], char "
    "publish[256], char job[64]",
    "On a directory: begins a group there, as user.aifs.group does; the same once more, while it "
    "is open, finds it. flags: AIFS_GROUP_EXPLICIT (each rank commits), AIFS_GROUP_SAME_SIZE (of "
    "all files), AIFS_GROUP_PENDING (the directory gets no other name until all have committed; "
    "with AIFS_GROUP_EXPLICIT), AIFS_GROUP_ANEW (with that: what an earlier attempt has left "
    "there does not count); chunk: bytes, 0 for the usual; timeout_ms: until all have committed, "
    "0 for the usual; grace_ms: how long a dead rank may stay away; job: whose ranks these are, "
    "what another one has left is given up. id is filled in. Strings end with a zero byte. "
    "EINVAL: another group is open, or a job whose ranks live is writing; EBUSY: it is not "
    "durable yet.",
)

AIFS_IOC_GROUP_JOIN = Command(
    "AIFS_IOC_GROUP_JOIN",
    _WRITE,
    6,
    "u32 rank, u32 flags, u64 id",
    "The calling process is this rank from now on: if it ends before the rank has committed, the "
    "group fails, at once or when its grace is over. flags: 0; id: 0 for the directory's group. "
    "EINVAL: no such rank, a process that lives is it already, or the group commits by closing; "
    "EOPNOTSUPP: the daemon cannot see the process.",
)

AIFS_IOC_GROUP_COMMIT = Command(
    "AIFS_IOC_GROUP_COMMIT",
    _WRITE,
    7,
    "u32 rank, u32 flags, u64 id, char file[256]",
    "All that is unsynced below the directory is durable in the burst tier on return, and the rank "
    "has committed. flags: 0; id: 0 for the directory's group; file: path of a file below that the "
    "rank has written, ending with a zero byte, or empty; its size is compared if all files have "
    "to have one. EINVAL: no such rank, it has committed, the group commits by closing, or the "
    "file has another size than that of the first rank to commit.",
)

GROUP_WAIT_BUFFERED, GROUP_WAIT_DURABLE = 1, 2

AIFS_IOC_GROUP_WAIT = Command(
    "AIFS_IOC_GROUP_WAIT",
    _WRITE,
    8,
    "u32 what, u32 flags, u64 id, u64 timeout_ms",
    "Returns when all ranks have committed and their bytes are durable in the burst tier "
    "(AIFS_GROUP_WAIT_BUFFERED) or on the capacity tier (AIFS_GROUP_WAIT_DURABLE). flags: 0; id: 0 "
    "for the directory's group; timeout_ms 0: none. EINVAL: files have sizes that differ; "
    "EOWNERDEAD: a rank died; ECANCELED; ETIME: the group's own time was over; ETIMEDOUT: "
    "timeout_ms were.",
)

AIFS_IOC_GROUP_CANCEL = Command(
    "AIFS_IOC_GROUP_CANCEL",
    _WRITE,
    9,
    "u32 flags, u32 reserved, u64 id, char reason[128]",
    "Ends the group; its files are drained as usual. flags and reserved: 0; id: 0 for the "
    "directory's group; reason: what others are told, ending with a zero byte, or empty.",
)

GROUP_STATES = ("open", "committed", "draining", "durable", "failed", "cancelled", "expired")
"""Of a group; in ``AIFS_IOC_GROUP_QUERY`` they are numbered from 1."""

AIFS_IOC_GROUP_QUERY = Command(
    "AIFS_IOC_GROUP_QUERY",
    _WRITE | _READ,
    10,
    "u64 id, u32 state, u32 ranks, u32 joined, u32 committed, u32 files, i32 dead, u64 bytes, u64 "
    "zero_bytes, u64 duplicate_bytes, u64 found_bytes, u64 distinct_bytes, u64 stored_bytes, u64 "
    "created_ns, u64 buffered_ns, u64 durable_ns",
    "Reads what getfattr -n user.aifs.group says in words. id: 0 for the directory's group, is "
    "filled in; state: one of AIFS_GROUP_...; joined, committed: how many ranks; dead: a rank, or "
    "-1; times: since the epoch, 0 if not yet.",
)

AIFS_IOC_ORDER = Command(
    "AIFS_IOC_ORDER",
    _WRITE,
    11,
    "u32 flags, u32 reserved, char order[248]",
    "On the directory of a dataset that the caller may list, whoever may write there: an epoch is "
    "read in this order, and what comes next is brought into the burst tier. order: what "
    "user.aifs.order is set to, as 'seed=7,epoch=1,world=8,rank=3,done=1000', ending with a zero "
    "byte. To be said again within a minute, with how far it is. flags and reserved: 0. EINVAL: no "
    "order, or no index of a dataset there; EBUSY: too many epochs are read; EOPNOTSUPP: there is "
    "no burst tier.",
)

SNAPSHOT = 1

AIFS_IOC_CLONE = Command(
    "AIFS_IOC_CLONE",
    _WRITE,
    12,
    "u32 flags, u32 reserved, u64 parent, char name[256], char clone[256]",
    "On a directory: makes a clone of what has the name in it (. is the directory itself), with "
    "all that lies below, under the name clone in the directory parent, by inode number. It "
    "appears when it is complete, and is durable on return; no bytes are copied but of files that "
    "are open for writing. flags: AIFS_SNAPSHOT (of a directory: it stays as it is, and can only "
    "be removed as a whole); reserved: 0; names end with a zero byte. EACCES: not all may be read, "
    "or no name made there; EEXIST; EBUSY: a single file is open for writing.",
)

AIFS_IOC_RESTORE = Command(
    "AIFS_IOC_RESTORE",
    _WRITE | _READ,
    13,
    "u64 id, u64 parent, char name[256], char path[4096]",
    "On a directory: restores from the trash what is the caller's: what had this path from there, "
    "the last of several that had; or, if id is not 0, the inode with that number. It goes to "
    "the directory with the inode number parent (0: where it lay, or the nearest directory above "
    "that is still there), under this name (empty: its own). Strings end with a zero byte. id and "
    "parent are filled in. Durable on return. ENOENT: there is none; EEXIST: the name is taken; "
    "EBUSY: programs are in a directory that rmdir(2) has removed; EACCES.",
)

EMPTIED_AT_ONCE = 256

AIFS_IOC_EMPTY_TRASH = Command(
    "AIFS_IOC_EMPTY_TRASH",
    _WRITE,
    14,
    f"u32 count, u32 flags, u64 ids[{EMPTIED_AT_ONCE}]",
    "Has inodes that are in the trash, and the caller's, go for good: so many of these; or, with a "
    "count of 0, all. flags: 0. ENOENT: one of them is not there.",
)

COMMANDS = {
    command.request: command
    for command in (
        AIFS_IOC_VERSION,
        AIFS_IOC_DRAIN,
        AIFS_IOC_REMOVE_TREE,
        AIFS_IOC_PUBLISH,
        AIFS_IOC_COMMIT,
        AIFS_IOC_GROUP_CREATE,
        AIFS_IOC_GROUP_JOIN,
        AIFS_IOC_GROUP_COMMIT,
        AIFS_IOC_GROUP_WAIT,
        AIFS_IOC_GROUP_CANCEL,
        AIFS_IOC_GROUP_QUERY,
        AIFS_IOC_ORDER,
        AIFS_IOC_CLONE,
        AIFS_IOC_RESTORE,
        AIFS_IOC_EMPTY_TRASH,
    )
}

_CONSTANTS = {
    "AIFS_IOC_TYPE": TYPE,
    "AIFS_IOC_VERSION_NUMBER": VERSION,
    "AIFS_REPLACE": REPLACE,
    "AIFS_EXCLUSIVE": EXCLUSIVE,
    "AIFS_AGAIN": AGAIN,
    "AIFS_SNAPSHOT": SNAPSHOT,
    "AIFS_GROUP_EXPLICIT": GROUP_EXPLICIT,
    "AIFS_GROUP_PENDING": GROUP_PENDING,
    "AIFS_GROUP_SAME_SIZE": GROUP_SAME_SIZE,
    "AIFS_GROUP_ANEW": GROUP_ANEW,
    "AIFS_GROUP_WAIT_BUFFERED": GROUP_WAIT_BUFFERED,
    "AIFS_GROUP_WAIT_DURABLE": GROUP_WAIT_DURABLE,
    **{f"AIFS_GROUP_{state.upper()}": number for number, state in enumerate(GROUP_STATES, 1)},
}


def text(field: bytes) -> bytes:
    """A name in a field of fixed length. Raises Invalid if it does not end in a zero byte."""
    name, end, _ = field.partition(b"\0")
    if not end:
        raise Invalid("a name does not end in a zero byte")
    return name


def c_header() -> str:
    """The same as a C header."""
    parts = [
        "/* The ioctls of AIFS. Generated by scripts/ioctl-header from aifs/core/ioctl.py. */",
        (
            "#ifndef AIFS_IOCTL_H\n#define AIFS_IOCTL_H\n\n#include <linux/ioctl.h>\n#include "
            "<linux/types.h>"
        ),
        "\n".join(f"#define {name} {value:#x}" for name, value in _CONSTANTS.items()),
        *(command.c_definition() for command in COMMANDS.values()),
        "#endif",
    ]
    return "\n\n".join(parts) + "\n"
