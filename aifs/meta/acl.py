"""POSIX ACLs (acl(5)), as the kernel has them in extended attributes and we in the records of
inodes.

Little-endian: u32 version=2, then for each entry u16 tag, u16 permissions, u32 user or group (none:
all ones), in the order of the tags below. An ACL that says no more than a mode is not kept. The
kernel checks what a file's ACL allows; we see to what is made of a directory's default ACL, and to
chmod(2).
"""

import stat
import struct
from collections.abc import Container
from typing import NamedTuple

from aifs.core.errors import Invalid

ACCESS = b"system.posix_acl_access"
DEFAULT = b"system.posix_acl_default"

USER_OBJ, USER, GROUP_OBJ, GROUP, MASK, OTHER = 0x01, 0x02, 0x04, 0x08, 0x10, 0x20
ENTRIES_MAX = 511
"""Bytes that the kernel's page for a FUSE filesystem's ACL holds."""

_VERSION = 2
_HEAD = struct.Struct("<I")
_ENTRY = struct.Struct("<HHI")
_OF_MODE = {USER_OBJ: 6, GROUP_OBJ: 3, OTHER: 0}
_SINGLE = (USER_OBJ, GROUP_OBJ, MASK, OTHER)


class AclEntry(NamedTuple):
    """Permissions of a user, a group, or all of a kind: a sum of 4 read, 2 write, 1 execute."""

    tag: int
    permissions: int
    id: int


def decode(value: bytes) -> list[AclEntry]:
    """Raises Invalid for what is no ACL."""
    try:
        (version,) = _HEAD.unpack_from(value)
        entries = [AclEntry._make(fields) for fields in _ENTRY.iter_unpack(value[_HEAD.size :])]
    except struct.error:
        raise Invalid("an ACL of a wrong length") from None
    tags = [entry.tag for entry in entries]
    if (
        version != _VERSION
        or len(entries) > ENTRIES_MAX
        or tags != sorted(tags)
        or any(tags.count(tag) > 1 for tag in _SINGLE)
        or not {USER_OBJ, GROUP_OBJ, OTHER} <= set(tags) <= {*_SINGLE, USER, GROUP}
        or ({USER, GROUP} & set(tags) and MASK not in tags)
        or any(entry.permissions > 7 for entry in entries)
    ):
        raise Invalid("not an ACL of this version")
    return entries


def encode(entries: list[AclEntry]) -> bytes:
    return _HEAD.pack(_VERSION) + b"".join(_ENTRY.pack(*entry) for entry in entries)


def mode_of(entries: list[AclEntry]) -> int:
    """The nine bits of a mode that say the same, as far as they can."""
    tags = {entry.tag: entry.permissions for entry in entries}
    group = tags.get(MASK, tags[GROUP_OBJ])
    return tags[USER_OBJ] << 6 | group << 3 | tags[OTHER]


def applied(value: bytes, mode: int) -> tuple[int, bytes]:
    """Mode and ACL after setting the access ACL ``value``: empty if the mode says it all."""
    entries = decode(value)
    mode = mode & ~0o777 | mode_of(entries)
    return mode, value if len(entries) > len(_OF_MODE) else b""


def after_chmod(value: bytes, mode: int) -> bytes:
    """The access ACL after chmod(2): the group's bits of ``mode`` become its mask."""
    group = _group_tag(entries := decode(value))
    bits = {USER_OBJ: mode >> 6 & 7, group: mode >> 3 & 7, OTHER: mode & 7}
    return encode([entry._replace(permissions=bits.get(entry.tag, entry[1])) for entry in entries])


def inherited(default: bytes, mode: int) -> tuple[int, bytes]:
    """Mode and access ACL of a new ``mode`` in a directory of this default ACL, without umask."""
    group = _group_tag(entries := decode(default))
    shift = {USER_OBJ: 6, group: 3, OTHER: 0}
    masked = [
        entry._replace(permissions=entry.permissions & mode >> shift[entry.tag] & 7)
        if entry.tag in shift
        else entry
        for entry in entries
    ]
    return applied(encode(masked), mode)


def _group_tag(entries: list[AclEntry]) -> int:
    """The tag of the entry that the group's bits of a mode show."""
    return MASK if any(entry.tag == MASK for entry in entries) else GROUP_OBJ


def granted(
    value: bytes, mode: int, owner: int, group: int, uid: int, groups: Container[int], wanted: int
) -> bool:
    """Whether acl(5) gives ``uid``, member of ``groups``, all of ``wanted`` on this mode and
    ACL."""
    if uid == owner:
        return mode >> 6 & wanted == wanted
    if not value or not mode & stat.S_IRWXG:
        return mode >> (3 if group in groups else 0) & wanted == wanted
    entries, is_member = decode(value), False
    mask = mode >> 3
    for tag, permissions, id_ in entries:
        if tag == USER and id_ == uid:
            return permissions & mask & wanted == wanted
        if (tag == GROUP_OBJ and group in groups) or (tag == GROUP and id_ in groups):
            is_member = True
            if permissions & mask & wanted == wanted:
                return True
    return not is_member and mode & wanted == wanted
