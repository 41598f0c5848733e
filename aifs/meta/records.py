"""Records of the metadata store: their Python form and their bytes.

All numbers are little-endian, but for the one of an entry.

inode
    u8 format=1 (of form 5: 2), u8 form, u8 policy length, u8 number of servers, u32 mode, u32 uid,
    u32 gid, u32 nlink, u32 rdev, u64 size, u64 blocks (of 512 bytes), i64 atime, i64 mtime, i64
    ctime (ns), u64 parent (0: a file that has or had several), u64 oid, u32 unit (of the layout, in
    bytes), i64 birth (ns), u32 flags, u32 project, u16 length of the access ACL, u16 length of the
    default ACL, then: policy, access ACL, default ACL (vfs/xattrs.py), [u8 replicas, u8 parity
    columns,] servers (u16 each, in the order of columns), burst copy (u16 server, u64 id), named
    (u64), inline bytes or pin to the end. form: 0 without a layout, 1 inline (the bytes are at the
    end; also symlink targets), 2 striped, 3 interleaved, 4 protected striped (which alone has what
    is in brackets), 5 imported (no servers; the pin is bucket, key and ETag, with zero bytes
    between); plus 128: there is a burst copy; plus 64: ``named`` is there, as clones share the
    bytes (meta/shared.py), or of a directory in its place ``shown`` (i64, ns). flags: 16 immutable,
    32 append only, 2^29 what is made in the directory belongs to its project (those of chattr(1));
    2 in the trash (meta/trash.py); 2^31 part of a snapshot, beside immutable
dentry
    u64 ino, u64 cookie, u8 type (mode >> 12)
entry
    u64 ino (big-endian, as it ends the key of the inode), u8 type, name
garbage
    u64 ino, u32 unit, u16 maker, servers (u16 each; what the columns are for is not recorded, since
    it does not matter any more)
burst copy
    u64 ino, u16 server, u8 flags (1 undrained: it holds the newest bytes, which lie nowhere else; 2
    durable: it has been synced since it was made; 4 mirrored; 8: it is a mirror), i64 since (ns,
    undrained since), [u16 server, u64 id of its mirror], [u64 id of the copy that it is a mirror
    of, u64 size, i64 mtime and i64 ctime (ns) that this one had] The parts in brackets where flags
    say so.
policy (what new files of a directory get)
    u32 unit, u8 count (0: all servers), [u8 kind, u8 compress (255: the store's default), u8 tier,
    u64 expected size, [u8 replicas, u8 data columns, u8 parity columns, u8 publish (16 is added
    for mirror=1),]] servers (u16 each; none: any) The parts in brackets are left out where all of
    them is the default: the outer one, which makes the length odd, and the inner one; where that is
    there, 128 is added to kind.
degraded
    u64 ino (0: a container), u32 mask of columns
"""

import stat
import struct
from dataclasses import dataclass, field, fields
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

from aifs.core.errors import NotPermitted, ReadOnly, Unavailable
from aifs.layout.hint import KINDS, MIRRORS_MAX, PUBLISHES, TIERS, Policy
from aifs.layout.imported import Imported, Pin
from aifs.layout.interleaved import Interleaved
from aifs.layout.kinds import chunks_of, objects_of
from aifs.layout.striped import Striped

FORMAT = 1
_FORMAT_IMPORTED = 2
"""Of inodes of form IMPORTED: earlier versions would take these for empty files."""
EMPTY, INLINE, STRIPED, INTERLEAVED, PROTECTED, IMPORTED = range(6)
_HAS_COPY, _IS_SHARED, _FORM = 128, 64, 63

IMMUTABLE, APPEND_ONLY, INHERITS_PROJECT, SNAPSHOT = 0x10, 0x20, 0x20000000, 0x80000000
_GUARDED = IMMUTABLE | APPEND_ONLY
TRASHED = 0x2

INODE = struct.Struct("<BBBBIIIIIQQqqqQQIqIIHH")
_PLACE = struct.Struct("<4xI8xI44xQ")  # of an inode: mode, nlink, parent
_OF_BYTES = struct.Struct("<QQqqq")  # of an inode: size, blocks, atime, mtime, ctime
_OF_BYTES_AT = 24
_BEHIND = _OF_BYTES_AT + _OF_BYTES.size
_CHARGE = struct.Struct("<4xI16xQ64xI")  # of an inode: mode, size, project
_CTIME = struct.Struct("<q")
_CTIME_AT = _BEHIND - _CTIME.size
_CHANGE = struct.Struct("<qq")
MTIME_AT = _BEHIND - _CHANGE.size
"""Where mtime and ctime lie in an inode's record."""
_ACL_LENGTHS = struct.Struct("<HH")
_ACL_LENGTHS_AT = INODE.size - _ACL_LENGTHS.size
_DENTRY = struct.Struct("<QQB")
_ENTRY = struct.Struct(">QB")
_GARBAGE = struct.Struct("<QIH")
_POLICY = struct.Struct("<IB")
_LONG_POLICY = struct.Struct("<IBBBBQ")
_COPY = struct.Struct("<HQ")
_NAMED = struct.Struct("<Q")
_SHOWN = struct.Struct("<q")
_BURST = struct.Struct("<QHBq")
_MIRROR_OF = struct.Struct("<QQqq")
_MIRRORED, _IS_MIRROR = 4, 8
_MIRROR_POLICY = 16
_COMPRESS_DEFAULT = 255
_HAS_REDUNDANCY = 128
_REDUNDANCY = struct.Struct("<BBBB")
_PROTECTION = struct.Struct("<BB")
_DEGRADED = struct.Struct("<QI")


class Copy(NamedTuple):
    """A file's copy in the burst tier: its device's number, and its id there."""

    server: int
    id: int


@dataclass(slots=True)
class Inode:
    """Attributes of an inode and where its bytes are.

    A regular file is *empty*, *inline* (``data``), *striped* or *interleaved* (``layout`` and
    ``oid``), or *in the burst tier* (``copy`` alone: then size, blocks and mtime are those of the
    copy while it is open or has a dirty mark). A ``copy`` beside one of the other forms is a clean
    and complete cache of it.
    """

    ino: int
    """Its number, which is never used again."""
    mode: int
    """Type and permission bits, as in st_mode."""
    uid: int
    """The owner."""
    gid: int
    """The group."""
    nlink: int
    """How many names it has."""
    rdev: int
    """Of a device node."""
    size: int
    """In bytes."""
    blocks: int
    """The space that it takes, in blocks of 512 bytes."""
    atime_ns: int
    """Of the last access, since the epoch."""
    mtime_ns: int
    """Of the last change of the bytes, or names in it."""
    ctime_ns: int
    """Of the last change of anything."""
    parent: int = 0
    """The directory of its name; 0: a file that has or had several names."""
    oid: int = 0
    """The number that names its objects, or its chunk list; 0: it never had any."""
    policy: Policy | None = None
    """For a directory, what new files and directories inherit; for a file, its layout when drained.
    None: the defaults."""
    layout: Striped | Interleaved | None = None
    """How its bytes lie on the data servers; None: they do not."""
    data: bytes | None = None
    """Of an inline file exactly ``size`` bytes, of a symlink its target; else None."""
    copy: Copy | None = None
    """Its copy in the burst tier; None: it has none."""
    birth_ns: int = 0
    """When it was made; 0 where that is not known."""
    flags: int = 0
    """IMMUTABLE, APPEND_ONLY, INHERITS_PROJECT, TRASHED and SNAPSHOT."""
    project: int = 0
    """Its project id, as of quotas; 0: none."""
    acl: bytes = b""
    """The access ACL; empty where the mode says it all."""
    default_acl: bytes = b""
    """Of a directory, the ACL that what is made in it gets; empty: none."""
    named: int = 0
    """The inode number in the names of objects, or a chunk list, that clones may share, and that
    never change in place. 0: the file's own."""
    shown_ns: int = 0
    """When a publish, or the first rename, showed the directory with its tree, in ns since the
    epoch. 0: made in its place."""
    seq: int = field(default=0, compare=False, repr=False)
    """Not on record: of the transaction or view that has read it."""
    stripped: bool = field(default=False, compare=False, repr=False)
    """Not on record: a write has taken setuid and setgid away; the record does not say so yet."""

    @classmethod
    def new(cls, ino: int, mode: int, uid: int, gid: int, now_ns: int, **fields: Any) -> "Inode":
        """One with one name, made now."""
        inode = cls(ino, mode, uid, gid, 1, 0, 0, 0, now_ns, now_ns, now_ns)
        for name, value in fields.items():
            setattr(inode, name, value)
        return inode

    def but(self, **changes: Any) -> "Inode":
        """A copy with other fields, five times as fast as dataclasses.replace."""
        other = Inode(*_fields_of(self))
        for name, value in changes.items():
            setattr(other, name, value)
        return other

    @property
    def objects(self) -> Striped | None:
        """How the object set that is the file's own is laid out; None: it has none."""
        return objects_of(self.layout)

    @property
    def read_as(self) -> Striped | None:
        """The layout by which it is read, unless it is cut into chunks."""
        return None if self.layout is None else self.layout.read_as

    @property
    def named_by(self) -> int:
        """The inode number in the names of its objects."""
        return self.named or self.ino

    @property
    def chunks(self) -> Interleaved | None:
        """How the file is cut into chunks in containers; None: it is not."""
        return chunks_of(self.layout)

    @property
    def space(self) -> int:
        """Bytes that a copy of it takes: its size, without holes."""
        return min(self.size, self.blocks * 512)

    @property
    def in_burst(self) -> bool:
        """Whether the newest bytes lie in the burst tier alone."""
        return self.copy is not None and self.layout is None and self.data is None

    @property
    def is_trashed(self) -> bool:
        """Whether it is in the trash: it can be found there alone, and keeps its ``nlink``."""
        return bool(self.flags & TRASHED)

    @property
    def links(self) -> int:
        """How many names lead to it, as st_nlink; with 0 nobody finds it."""
        return 0 if self.flags & TRASHED else self.nlink

    def require_unguarded(self) -> None:
        """Raises NotPermitted if immutable or append-only, ReadOnly in a snapshot: names and
        attributes stay."""
        if self.flags & SNAPSHOT:
            raise ReadOnly("it is part of a snapshot")
        if self.flags & _GUARDED:
            raise NotPermitted("it is immutable or append-only (chattr)")

    @property
    def is_privileged(self) -> bool:
        """Whether running the file gives its user's or group's rights."""
        return bool(self.mode & (stat.S_ISUID | stat.S_ISGID)) and self.is_file

    @property
    def unprivileged_mode(self) -> int:
        """The mode without setuid, and without setgid unless it marks mandatory locking."""
        if self.is_dir:
            return self.mode
        return self.mode & ~(stat.S_ISUID | (stat.S_ISGID if self.mode & stat.S_IXGRP else 0))

    @property
    def is_dir(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.mode)

    def encode(self) -> bytes:
        layout, data, copy = self.layout, self.data, self.copy
        policy = encode_policy(self.policy) if self.policy else b""
        unit, servers, count = 0, b"", 0
        if layout is None:
            form = EMPTY if data is None else INLINE
        elif isinstance(layout, Imported):
            form, data = IMPORTED, "\0".join(layout.source[:3]).encode()
        elif isinstance(layout, Striped):
            form = STRIPED
            unit = layout.unit
            servers = _pack_servers(layout.servers)
            count = len(layout.servers)
            if layout.is_protected:
                form, servers = (
                    PROTECTED,
                    _PROTECTION.pack(layout.replicas, layout.parity) + servers,
                )
        else:
            form, unit = INTERLEAVED, layout.chunk
        head = INODE.pack(
            FORMAT if form != IMPORTED else _FORMAT_IMPORTED,
            form
            | (copy is not None) * _HAS_COPY
            | (self.named != 0 or self.shown_ns != 0) * _IS_SHARED,
            len(policy),
            count,
            self.mode,
            self.uid,
            self.gid,
            self.nlink,
            self.rdev,
            self.size,
            self.blocks,
            self.atime_ns,
            self.mtime_ns,
            self.ctime_ns,
            self.parent,
            self.oid,
            unit,
            self.birth_ns,
            self.flags,
            self.project,
            len(self.acl),
            len(self.default_acl),
        )
        if self.acl or self.default_acl:
            policy += self.acl + self.default_acl
        if form == EMPTY and not policy and copy is None and not self.shown_ns:
            return head
        behind = b"" if copy is None else _COPY.pack(*copy)
        if self.named:
            behind += _NAMED.pack(self.named)
        elif self.shown_ns:
            behind += _SHOWN.pack(self.shown_ns)
        return b"".join((head, policy, servers, behind, data or b""))


_fields_of = attrgetter(*(field.name for field in fields(Inode)))


def decode_inode(ino: int, record: bytes) -> Inode:
    """Raises Unavailable for a record that is damaged or of another format."""
    try:
        (
            version,
            form,
            policy_length,
            count,
            mode,
            uid,
            gid,
            nlink,
            rdev,
            size,
            blocks,
            atime,
            mtime,
            ctime,
            parent,
            oid,
            unit,
            birth,
            flags,
            project,
            acl_length,
            default_length,
        ) = INODE.unpack_from(record)
        if version != FORMAT and (version, form & _FORM) != (_FORMAT_IMPORTED, IMPORTED):
            raise Unavailable(
                f"inode {ino} has a record of format {version}; this version reads format {FORMAT}"
            )
        inode = Inode(
            ino, mode, uid, gid, nlink, rdev, size, blocks, atime, mtime, ctime, parent, oid
        )
        inode.birth_ns, inode.flags, inode.project = birth, flags, project
        if form == EMPTY and not policy_length and not acl_length and not default_length:
            return inode
        offset = INODE.size
        if policy_length:
            inode.policy = decode_policy(record[offset : offset + policy_length])
            offset += policy_length
        if acl_length or default_length:
            end = offset + acl_length
            inode.acl, inode.default_acl = record[offset:end], record[end : end + default_length]
            offset = end + default_length
        base = form & _FORM
        if base == STRIPED:
            inode.layout = _striped(unit, record[offset : offset + 2 * count])
            offset += 2 * count
        elif base == PROTECTED:
            replicas, parity = _PROTECTION.unpack_from(record, offset)
            offset += _PROTECTION.size
            inode.layout = _striped(unit, record[offset : offset + 2 * count], replicas, parity)
            offset += 2 * count
        elif base == INTERLEAVED:
            inode.layout = Interleaved(unit)
        if form & _HAS_COPY:
            inode.copy = Copy._make(_COPY.unpack_from(record, offset))
            offset += _COPY.size
        if form & _IS_SHARED and inode.is_dir:
            (inode.shown_ns,) = _SHOWN.unpack_from(record, offset)
        elif form & _IS_SHARED:
            (inode.named,) = _NAMED.unpack_from(record, offset)
        if base == INLINE:
            inode.data = record[offset:]
        elif base == IMPORTED:
            bucket, key, etag = record[offset:].decode().split("\0")
            inode.layout = Imported(source=Pin(bucket, key, etag, size))
        return inode
    except (struct.error, ValueError):
        raise Unavailable(f"inode {ino} has a damaged record") from None


def has_copy(record: bytes) -> bool:
    """Whether an inode's record names a copy in the burst tier."""
    return len(record) > 1 and bool(record[1] & _HAS_COPY)


class InodePlace(NamedTuple):
    """Of an inode's record what tells where the inode is."""

    mode: int
    nlink: int
    parent: int
    """As ``Inode.parent``."""

    @property
    def is_dir(self) -> bool:
        return stat.S_ISDIR(self.mode)


def place_of(record: bytes) -> InodePlace:
    """Of an inode's record; of one that is cut off, of no directory."""
    return (
        InodePlace._make(_PLACE.unpack_from(record))
        if len(record) >= _PLACE.size
        else InodePlace(0, 0, 0)
    )


def charge_of(record: bytes) -> tuple[int, int]:
    """The project of an inode's record, and a regular file's size; none for a cut record."""
    if len(record) < INODE.size:
        return 0, 0
    mode, size, project = _CHARGE.unpack_from(record)
    return project, size if stat.S_ISREG(mode) else 0


def with_attributes(record: bytes, opened: Inode, size: int, blocks: int) -> bytes:
    """An inode's record with this size, and the times of ``opened``; the ctime does not go back.
    Nothing is decoded."""
    ctime_ns = max(opened.ctime_ns, _CTIME.unpack_from(record, _CTIME_AT)[0])
    of_bytes = _OF_BYTES.pack(size, blocks, opened.atime_ns, opened.mtime_ns, ctime_ns)
    return b"".join((record[:_OF_BYTES_AT], of_bytes, record[_BEHIND:]))


def encode_change(now: int) -> bytes:
    """The mtime and ctime of an inode that changes now (at MTIME_AT of its record)."""
    return _CHANGE.pack(now, now)


def with_data(record: bytes, data: bytes) -> bytes:
    """An empty or inline file's record with these bytes; callers record their number."""
    form = INLINE if data else EMPTY
    end = INODE.size + record[2] + sum(_ACL_LENGTHS.unpack_from(record, _ACL_LENGTHS_AT))
    return b"".join((record[:1], bytes((form,)), record[2:end], data))


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
    """Objects of ``oid`` (the key) to delete, once of inode ``ino``, on the layout's servers."""

    ino: int
    layout: Striped
    maker: int = 0
    """The host that may still be making them; 0: nobody, or the host of a store that has one."""

    def encode(self) -> bytes:
        head = _GARBAGE.pack(self.ino, self.layout.unit, self.maker)
        return head + _pack_servers(self.layout.servers)


def decode_garbage(record: bytes) -> Garbage:
    try:
        ino, unit, maker = _GARBAGE.unpack_from(record)
        layout = _striped(unit, record[_GARBAGE.size :])
        if not layout.servers:
            raise struct.error
        return Garbage(ino, layout, maker)
    except struct.error:
        raise Unavailable("a garbage record is damaged") from None


class MirrorOf(NamedTuple):
    """The burst copy that another one is a mirror of, as it was when that was made."""

    id: int
    size: int
    mtime_ns: int
    ctime_ns: int
    """Of the local file: nobody can set it, so whatever is written later has a later one."""


class BurstRecord(NamedTuple):
    """A copy's inode (the key has its id), burst device, and state after a crash."""

    ino: int
    """The inode that has it."""
    server: int
    """Which device."""
    undrained: bool
    """It holds the newest bytes, which no data server has."""
    durable: bool
    """It has been synced since it was made."""
    since_ns: int
    """Since when it is undrained."""
    mirror: Copy | None = None
    """Where another host has a copy of it, as it was at the last fsync."""
    of: MirrorOf | None = None
    """It is such a copy itself, and no copy that the inode has."""

    def encode(self) -> bytes:
        flags = self.undrained | self.durable << 1
        tail = b""
        if self.mirror is not None:
            flags, tail = flags | _MIRRORED, _COPY.pack(*self.mirror)
        if self.of is not None:
            flags, tail = flags | _IS_MIRROR, tail + _MIRROR_OF.pack(*self.of)
        return _BURST.pack(self.ino, self.server, flags, self.since_ns) + tail


def decode_burst(record: bytes) -> BurstRecord:
    try:
        ino, server, flags, since_ns = _BURST.unpack_from(record)
        mirror, of, end = None, None, _BURST.size
        if flags & _MIRRORED:
            mirror, end = Copy._make(_COPY.unpack_from(record, end)), end + _COPY.size
        if flags & _IS_MIRROR:
            of, end = MirrorOf._make(_MIRROR_OF.unpack_from(record, end)), end + _MIRROR_OF.size
        if len(record) != end:
            raise struct.error
        return BurstRecord(ino, server, bool(flags & 1), bool(flags & 2), since_ns, mirror, of)
    except struct.error:
        raise Unavailable("the record of a burst copy is damaged") from None


class Degraded(NamedTuple):
    """Columns (a mask) of an object set (the key has its oid, 0: a container's inode) not to read.

    No column: the file is plain although its policy asks for protection, or bytes of a protected
    set are being repaired in place.
    """

    ino: int
    unread: int

    def encode(self) -> bytes:
        return _DEGRADED.pack(*self)


def decode_degraded(record: bytes) -> Degraded:
    try:
        return Degraded._make(_DEGRADED.unpack(record))
    except struct.error:
        raise Unavailable("the record of a degraded file is damaged") from None


@lru_cache(maxsize=4096)
def encode_policy(policy: Policy) -> bytes:
    servers = _pack_servers(policy.servers)
    if policy == Policy(policy.unit, policy.count, policy.servers):
        return _POLICY.pack(policy.unit, policy.count) + servers
    kind, tier = KINDS.index(policy.kind), TIERS.index(policy.tier)
    compress = _COMPRESS_DEFAULT if policy.compress is None else policy.compress
    if policy.replicas or policy.data or policy.parity or policy.publish or policy.mirror:
        kind |= _HAS_REDUNDANCY
        publish = PUBLISHES.index(policy.publish) | policy.mirror * _MIRROR_POLICY
        servers = _REDUNDANCY.pack(policy.replicas, policy.data, policy.parity, publish) + servers
    return (
        _LONG_POLICY.pack(policy.unit, policy.count, kind, compress, tier, policy.expected)
        + servers
    )


@lru_cache(maxsize=4096)
def decode_policy(record: bytes) -> Policy:
    if len(record) % 2:
        unit, count = _POLICY.unpack_from(record)
        return Policy(unit, count, _unpack_servers(record[_POLICY.size :]))
    unit, count, kind, compress, tier, expected = _LONG_POLICY.unpack_from(record)
    replicas = data = parity = publish = 0
    end = _LONG_POLICY.size
    if kind & _HAS_REDUNDANCY:
        replicas, data, parity, publish = _REDUNDANCY.unpack_from(record, end)
        kind, end = kind & ~_HAS_REDUNDANCY, end + _REDUNDANCY.size
    mirror, publish = divmod(publish, _MIRROR_POLICY)
    if mirror > MIRRORS_MAX:
        raise struct.error
    if kind >= len(KINDS) or tier >= len(TIERS) or publish >= len(PUBLISHES):
        raise struct.error
    level = None if compress == _COMPRESS_DEFAULT else compress
    servers = _unpack_servers(record[end:])
    return Policy(
        unit,
        count,
        servers,
        KINDS[kind],
        level,
        TIERS[tier],
        expected,
        replicas,
        data,
        parity,
        PUBLISHES[publish],
        mirror,
    )


@lru_cache(maxsize=4096)
def _striped(unit: int, servers: bytes, replicas: int = 1, parity: int = 0) -> Striped:
    layout = Striped(unit, _unpack_servers(servers), replicas, parity)
    if layout.is_protected and (not replicas or layout.width < 1 or len(layout.servers) % replicas):
        raise struct.error
    return layout


def _pack_servers(servers: tuple[int, ...]) -> bytes:
    return struct.pack(f"<{len(servers)}H", *servers)


def _unpack_servers(record: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(record) // 2}H", record)
