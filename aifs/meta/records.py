"""Records of the metadata store: their Python form and their bytes, format 1.

All numbers are little-endian.

inode
    u8 format=1, u8 form, u8 policy length, u8 number of servers, u32 mode, u32 uid, u32 gid, u32 nlink, u32 rdev,
    u64 size, u64 blocks (of 512 bytes), i64 atime, i64 mtime, i64 ctime (ns),
    u64 parent (0: a file that has or had several), u64 oid, u32 unit (0 unless striped), then: policy, servers (u16 each, stripe order), inline bytes to the end
    form: 0 empty or not a file, 1 inline (the bytes are at the end; also symlink targets), 2 striped
dentry
    u64 ino, u64 cookie, u8 type (mode >> 12)
entry
    u64 ino, u8 type, name
garbage
    u64 ino, u32 unit, servers (u16 each)
policy (what new files of a directory get)
    u32 unit, u8 count (0: all servers), servers (u16 each; none: any)
"""

import stat
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from aifs.core.errors import Unavailable
from aifs.layout.hint import Policy
from aifs.layout.striped import Striped

FORMAT = 1
EMPTY, INLINE, STRIPED = 0, 1, 2

_INODE = struct.Struct("<BBBBIIIIIQQqqqQQI")
_DENTRY = struct.Struct("<QQB")
_ENTRY = struct.Struct("<QB")
_GARBAGE = struct.Struct("<QI")
_POLICY = struct.Struct("<IB")


@dataclass(slots=True)
class Inode:
    """Attributes of an inode and where its bytes are.

    A regular file is *empty* (no ``layout``, no ``data``), *inline* (``data`` holds exactly ``size`` bytes) or *striped*
    (``layout`` and ``oid``). ``data`` of a symlink is its target. ``policy`` is, for a directory, what its new files
    and directories inherit, and for a file what it will be laid out by once it has objects.
    """

    ino: int
    mode: int
    uid: int
    gid: int
    nlink: int
    rdev: int
    size: int
    blocks: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    parent: int = 0
    oid: int = 0
    policy: Policy | None = None
    layout: Striped | None = None
    data: bytes | None = None

    @property
    def is_dir(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.mode)

    def encode(self) -> bytes:
        layout, data = self.layout, self.data
        policy = encode_policy(self.policy) if self.policy else b""
        if layout is None:
            form, unit, servers, count = (EMPTY if data is None else INLINE), 0, b"", 0
        else:
            form, unit, servers, count = STRIPED, layout.unit, _pack_servers(layout.servers), len(layout.servers)
        head = _INODE.pack(
            FORMAT, form, len(policy), count, self.mode, self.uid, self.gid, self.nlink, self.rdev,
            self.size, self.blocks, self.atime_ns, self.mtime_ns, self.ctime_ns, self.parent, self.oid, unit,
        )  # fmt: skip
        if form == EMPTY and not policy:
            return head
        return b"".join((head, policy, servers, data or b""))


def decode_inode(ino: int, record: bytes) -> Inode:
    """Raises Unavailable for a record that is damaged or of another format."""
    try:
        (version, form, policy_length, count, mode, uid, gid, nlink, rdev,
         size, blocks, atime, mtime, ctime, parent, oid, unit) = _INODE.unpack_from(record)  # fmt: skip
        if version != FORMAT:
            raise Unavailable(f"inode {ino} has a record of format {version}; this version reads format {FORMAT}")
        inode = Inode(ino, mode, uid, gid, nlink, rdev, size, blocks, atime, mtime, ctime, parent, oid)
        if form == EMPTY and not policy_length:
            return inode
        offset = _INODE.size
        if policy_length:
            inode.policy = decode_policy(record[offset : offset + policy_length])
            offset += policy_length
        if form == STRIPED:
            inode.layout = _layout(unit, record[offset : offset + 2 * count])
        elif form == INLINE:
            inode.data = record[offset:]
        return inode
    except struct.error:
        raise Unavailable(f"inode {ino} has a damaged record") from None


class Dentry(NamedTuple):
    """A name's target: inode number, cookie, and the type bits of its mode (stat.S_IFMT >> 12)."""

    ino: int
    cookie: int
    type: int

    def encode(self) -> bytes:
        return _DENTRY.pack(*self)


def decode_dentry(record: bytes) -> Dentry:
    """Raises Unavailable for a damaged record, as the decoders below do."""
    try:
        return Dentry._make(_DENTRY.unpack(record))
    except struct.error:
        raise Unavailable("a dentry's record is damaged") from None


def encode_entry(ino: int, type_: int, name: bytes) -> bytes:
    return _ENTRY.pack(ino, type_) + name


def decode_entry(record: bytes) -> tuple[int, int, bytes]:
    """Inode number, type and name."""
    try:
        ino, type_ = _ENTRY.unpack_from(record)
    except struct.error:
        raise Unavailable("a directory entry's record is damaged") from None
    return ino, type_, record[_ENTRY.size :]


class Garbage(NamedTuple):
    """Objects to delete: those of ``oid`` (the key), once of inode ``ino``, on the layout's servers."""

    ino: int
    layout: Striped

    def encode(self) -> bytes:
        return _GARBAGE.pack(self.ino, self.layout.unit) + _pack_servers(self.layout.servers)


def decode_garbage(record: bytes) -> Garbage:
    try:
        ino, unit = _GARBAGE.unpack_from(record)
        return Garbage(ino, _layout(unit, record[_GARBAGE.size :]))
    except struct.error:
        raise Unavailable("a garbage record is damaged") from None


@lru_cache(maxsize=4096)
def encode_policy(policy: Policy) -> bytes:
    return _POLICY.pack(policy.unit, policy.count) + _pack_servers(policy.servers)


@lru_cache(maxsize=4096)
def decode_policy(record: bytes) -> Policy:
    unit, count = _POLICY.unpack_from(record)
    return Policy(unit, count, _unpack_servers(record[_POLICY.size :]))


@lru_cache(maxsize=4096)
def _layout(unit: int, servers: bytes) -> Striped:
    return Striped(unit, _unpack_servers(servers))


def _pack_servers(servers: tuple[int, ...]) -> bytes:
    return struct.pack(f"<{len(servers)}H", *servers)


def _unpack_servers(record: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(record) // 2}H", record)
