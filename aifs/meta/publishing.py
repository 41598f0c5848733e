"""Pending directories and publishing as transaction functions (see kv.py): which members have
committed, and the one transaction that shows a tree under its final name together with the pointers
to it.

    p ino        u8 format=2, u32 ranks, i64 step (-1: unknown), i64 created (ns), asker, job to the end; format 1: no asker
    p ino rank   u8 format=1, i64 committed (ns), then for each file that has to be there: u64 size (2^64-1:
                 any), u16 length of its path, path below the directory
    r ino        u8 format=1, asker, what is kept, as text (core/retention.py)
    asker        u32 uid, u16 count of groups, for each u32 gid

All little-endian; ``rank`` in the key is 4 bytes, big-endian.
"""

import struct
from typing import NamedTuple

from aifs.core.errors import (
    Busy,
    Exists,
    Invalid,
    NoAttribute,
    NotADirectory,
    NotFound,
    Unavailable,
)
from aifs.meta import keys, namespace, trash
from aifs.meta.kv import ReadTransaction, Transaction, grows
from aifs.meta.records import Inode, decode_entry

FORMAT = 2
RANKS_MAX = 1 << 13
_MEMBER_FORMAT = _KEPT_FORMAT = 1
ANY_SIZE = (1 << 64) - 1

_PENDING = struct.Struct("<BIqq")
_ASKER = struct.Struct("<IH")
_GROUPS_MAX = 1024  # of an asker's groups, the first
_MEMBER = struct.Struct("<Bq")
_FILE = struct.Struct("<QH")
_NO_STEP = -1
_NAMED_MAX = 8  # ranks that a message names


# --- records --------------------------------------------------------------------------------------


class Asker(NamedTuple):
    """Who has asked for something that the daemon does later, with this one's rights. It stands for
    a caller (files/types.py) whose process may have ended."""

    uid: int
    gids: tuple[int, ...]
    pid: int = 0
    umask: int = 0

    @property
    def gid(self) -> int:
        return self.gids[0]

    def encode(self) -> bytes:
        gids = self.gids[:_GROUPS_MAX]
        return struct.pack(f"<IH{len(gids)}I", self.uid, len(gids), *gids)


def _decode_asker(record: bytes, offset: int) -> tuple[Asker, int]:
    """The asker, and where it ends. Raises struct.error."""
    uid, count = _ASKER.unpack_from(record, offset)
    gids = struct.unpack_from(f"<{count}I", record, offset + _ASKER.size)
    return Asker(uid, gids or (uid,)), offset + _ASKER.size + 4 * count


class Pending(NamedTuple):
    """A directory that is to be published when all of ``ranks`` members have committed. Times in ns
    since the epoch. ``asker``: who has marked it; None: nobody knows, so nobody's rights are enough
    to remove it."""

    ranks: int
    step: int | None
    created_ns: int
    job: bytes = b""
    asker: Asker | None = None

    def encode(self) -> bytes:
        step = _NO_STEP if self.step is None else self.step
        version, asker = (1, b"") if self.asker is None else (FORMAT, self.asker.encode())
        return _PENDING.pack(version, self.ranks, step, self.created_ns) + asker + self.job


def decode_pending(record: bytes) -> Pending:
    """Raises Unavailable for a damaged record."""
    try:
        version, ranks, step, created_ns = _PENDING.unpack_from(record)
        asker, end = (
            _decode_asker(record, _PENDING.size) if version == FORMAT else (None, _PENDING.size)
        )
    except struct.error:
        raise Unavailable("the record of a pending directory is damaged") from None
    if version not in (1, FORMAT) or not 0 < ranks <= RANKS_MAX:
        raise Unavailable("the record of a pending directory is damaged, or of a later version")
    return Pending(ranks, None if step == _NO_STEP else step, created_ns, record[end:], asker)


class Kept(NamedTuple):
    """Which checkpoints of a directory are kept, as text, and who has said so."""

    policy: str
    asker: Asker

    def encode(self) -> bytes:
        return bytes((_KEPT_FORMAT,)) + self.asker.encode() + self.policy.encode()


def decode_kept(record: bytes) -> Kept:
    """Raises Unavailable for a damaged record."""
    try:
        if record[:1] == bytes((_KEPT_FORMAT,)):
            asker, start = _decode_asker(record, 1)
            return Kept(record[start:].decode(), asker)
    except (struct.error, UnicodeDecodeError):
        pass
    raise Unavailable("the record of which checkpoints are kept is damaged")


class Member(NamedTuple):
    """A rank's commit: when (ns), and the files that have to be there, as (path below the
    directory, size or ANY_SIZE)."""

    committed_ns: int
    files: tuple[tuple[bytes, int], ...] = ()

    def encode(self) -> bytes:
        files = b"".join(_FILE.pack(size, len(path)) + path for path, size in self.files)
        return _MEMBER.pack(_MEMBER_FORMAT, self.committed_ns) + files


def decode_member(record: bytes) -> Member:
    """Raises Unavailable for a damaged record."""
    try:
        version, committed_ns = _MEMBER.unpack_from(record)
        files, offset = [], _MEMBER.size
        while offset < len(record):
            size, length = _FILE.unpack_from(record, offset)
            offset += _FILE.size + length
            files.append((record[offset - length : offset], size))
    except struct.error:
        raise Unavailable("the record of a member is damaged") from None
    if version != _MEMBER_FORMAT or offset != len(record):
        raise Unavailable("the record of a member is damaged, or of a later version")
    return Member(committed_ns, tuple(files))


# --- pending directories --------------------------------------------------------------------------


def find_pending(tx: ReadTransaction, ino: int) -> Pending | None:
    record = tx.get(keys.pending(ino))
    return None if record is None else decode_pending(record)


def get_pending(tx: ReadTransaction, ino: int) -> Pending:
    """Raises Invalid if the directory is not pending (any more)."""
    pending = find_pending(tx, ino)
    if pending is None:
        raise Invalid(
            "the directory is not pending: it has not been marked, or is published already"
        )
    return pending


def committed(tx: ReadTransaction, ino: int) -> list[int]:
    """The ranks that have committed, ascending."""
    return [keys.pending_rank(key) for key, _ in tx.range(*keys.members(ino))]


def get_member(tx: ReadTransaction, ino: int, rank: int) -> Member | None:
    record = tx.get(keys.member(ino, rank))
    return None if record is None else decode_member(record)


def missing(ranks: int, committed_ranks: list[int]) -> list[int]:
    return sorted(set(range(ranks)).difference(committed_ranks))


@grows
def mark(tx: Transaction, ino: int, pending: Pending) -> None:
    """Mark a directory as pending. To mark it the same way again changes nothing, but for a mark of
    unknown origin. Raises Invalid, NotFound, NotADirectory."""
    namespace.get_directory(tx, ino)
    if ino == keys.ROOT_INO:
        raise Invalid("the root cannot be published")
    there = find_pending(tx, ino)
    if there is None or there._replace(created_ns=0) == pending._replace(created_ns=0, asker=None):
        tx.put(keys.pending(ino), pending.encode())
    elif there._replace(created_ns=0, asker=None) != pending._replace(created_ns=0, asker=None):
        raise Invalid(
            f"the directory is pending already, with {there.ranks} ranks and step {there.step}"
        )


def abandon(tx: Transaction, ino: int) -> None:
    """Take the mark and all commits away; the files stay. Raises NoAttribute if there is no
    mark.
    """
    if tx.get(keys.pending(ino)) is None:
        raise NoAttribute()
    namespace.drop_pending(tx, ino)


@grows
def commit(tx: Transaction, ino: int, rank: int, member: Member, again: bool) -> None:
    """Record a rank's commit. Raises Invalid: not pending, no such rank, or it has committed and
    this is not ``again``."""
    pending = get_pending(tx, ino)
    if not 0 <= rank < pending.ranks:
        raise Invalid(f"there is no rank {rank}: they are 0 to {pending.ranks - 1}")
    if tx.get(keys.member(ino, rank)) is not None and not again:
        raise Invalid(f"rank {rank} has committed already")
    tx.put(keys.member(ino, rank), member.encode())


def conclude(tx: Transaction, ino: int) -> None:
    """The directory gets its final name in this transaction, so it is pending no more. Raises Busy
    if members are missing."""
    pending = find_pending(tx, ino)
    if pending is not None:
        require_complete(tx, ino, pending)
        namespace.drop_pending(tx, ino)


def require_complete(tx: ReadTransaction, ino: int, pending: Pending) -> None:
    """Raises Busy, which names the ranks, if some have not committed."""
    lacking = missing(pending.ranks, committed(tx, ino))
    if lacking:
        names = ", ".join(map(str, lacking[:_NAMED_MAX])) + (
            "" if len(lacking) <= _NAMED_MAX else ", ..."
        )
        raise Busy(f"{len(lacking)} of {pending.ranks} ranks have not committed: {names}")


# --- publishing -----------------------------------------------------------------------------------


def rename(
    tx: Transaction,
    parent: int,
    name: bytes,
    new_parent: int,
    new_name: bytes,
    flags: int,
    cookies: tuple[int, int],
    now: int,
) -> tuple[Inode, Inode | None]:
    """namespace.rename, which also publishes a pending directory that it moves. Raises Busy if
    members are missing."""
    inode, other = namespace.rename(tx, parent, name, new_parent, new_name, flags, cookies, now)
    if inode.is_dir:
        conclude(tx, inode.ino)
    if flags & namespace.RENAME_EXCHANGE and other is not None and other.is_dir:
        conclude(tx, other.ino)
    return inode, other


class Publication(NamedTuple):
    """What is to be shown: the directory ``ino`` as ``name`` in the directory ``parent``, and
    pointers beside it.

    ``replace``: a tree that has the name goes to the trash; ``exclusive``: nothing may have it;
    with neither an empty directory may, as in rename(2). ``latest``: name of a symlink to ``name``;
    ``tracker``: name of a file with ``content``; ``manifest``: name of a file that has to be in the
    directory. b"": none.
    """

    ino: int
    parent: int
    name: bytes
    replace: bool = False
    exclusive: bool = False
    latest: bytes = b""
    tracker: bytes = b""
    content: bytes = b""
    manifest: bytes = b""

    def check(self) -> None:
        """Raises Invalid for names that cannot be."""
        pointers = [name for name in (self.latest, self.tracker) if name]
        names = [self.name, *pointers, *([self.manifest] if self.manifest else [])]
        for name in names:
            if (
                name in (b"", b".", b"..")
                or b"/" in name
                or b"\0" in name
                or len(name) > namespace.NAME_MAX
            ):
                raise Invalid(f"publish: {name!r} cannot be the name of a file")
        if len({self.name, *pointers}) != 1 + len(pointers):
            raise Invalid("publish: the final name and those of the pointers must differ")
        if self.replace and self.exclusive:
            raise Invalid(
                "publish: to replace what is there, and to refuse if something is, exclude each other"
            )
        if self.content and not self.tracker:
            raise Invalid("publish: there is content for a tracker file, but no name")


class Published(NamedTuple):
    """What a publication has changed: the directory as it is now, its name before, files that have
    lost a name, and the tree that is in the trash."""

    inode: Inode
    old_parent: int
    old_name: bytes
    unlinked: list[Inode]
    doomed: Inode | None


def name_of(tx: ReadTransaction, directory: Inode) -> bytes:
    """The name of a directory in its parent. Costs a read where it has its first name, else a
    listing. Raises NotFound."""
    if directory.nlink and directory.ino != keys.ROOT_INO:
        first = tx.get(keys.entry(directory.parent, directory.ino))
        if first is not None:
            return decode_entry(first)[2]
        for _, value in tx.range(*keys.entries_after(directory.parent, 0)):
            ino, _, name = decode_entry(value)
            if ino == directory.ino:
                return name
    raise NotFound("the directory has no name")


@grows
def publish(
    tx: Transaction,
    what: Publication,
    owner: tuple[int, int],
    ids: tuple[int, int, int, int],
    now: int,
) -> Published:
    """Show ``what``, all at once. ``owner``: uid and gid of what is made; ``ids``: fresh numbers.

    Raises Busy (members are missing), Exists, NotEmpty, NotADirectory, NotFound (directory, parent
    or manifest), Invalid.
    """
    inode = namespace.get_directory(tx, what.ino)
    old_name, old_parent = name_of(tx, inode), inode.parent
    if what.manifest and not namespace.lookup(tx, inode.ino, what.manifest).is_file:
        raise Invalid(f"publish: {what.manifest!r} is not a regular file")
    doomed, unlinked = None, []
    there = find(tx, what.parent, what.name)
    if there is not None and there.ino != inode.ino:
        if what.exclusive:
            raise Exists()
        if not there.is_dir:
            raise NotADirectory()
        if what.replace:
            doomed = trash.doom(tx, what.parent, what.name, now, owner[0])
    inode, replaced = namespace.rename(
        tx, old_parent, old_name, what.parent, what.name, 0, (ids[0], ids[1]), now
    )
    if replaced is not None:
        unlinked.append(replaced)
    conclude(tx, inode.ino)
    uid, gid = owner
    if what.latest:
        link = Inode(
            ids[2], _SYMLINK, uid, gid, 1, 0, len(what.name), 0, now, now, now, data=what.name
        )
        unlinked += _put_pointer(tx, what.parent, what.latest, link, now)
    if what.tracker:
        size = len(what.content)
        file = Inode(
            ids[3],
            _FILE_MODE,
            uid,
            gid,
            1,
            0,
            size,
            bool(size),
            now,
            now,
            now,
            data=what.content or None,
        )
        unlinked += _put_pointer(tx, what.parent, what.tracker, file, now)
    return Published(inode, old_parent, old_name, unlinked, doomed)


_SYMLINK = 0o120777
_FILE_MODE = 0o100644


def _put_pointer(tx: Transaction, parent: int, name: bytes, new: Inode, now: int) -> list[Inode]:
    """Make ``new`` under ``name``; what had the name has lost it. Raises IsADirectory."""
    unlinked = [] if find(tx, parent, name) is None else [namespace.unlink(tx, parent, name, now)]
    namespace.create(tx, parent, name, new)
    return unlinked


def find(tx: ReadTransaction, parent: int, name: bytes) -> Inode | None:
    """The inode that the name leads to, or None. Raises NotADirectory, NotFound for a missing
    directory.
    """
    try:
        return namespace.lookup(tx, parent, name)
    except NotFound:
        namespace.get_directory(tx, parent)
        return None
