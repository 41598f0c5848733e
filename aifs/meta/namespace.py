"""Namespace operations as transaction functions (see kv.py): names, links, attributes; no bytes.

Functions take the transaction first and raise FsError subclasses. Fresh numbers (inodes, cookies)
are arguments, because functions may run twice. ``now`` is ns since the epoch. The kernel checks
permissions (``default_permissions``); link counts, setgid inheritance and times are ours.
"""

import stat
from collections.abc import Collection
from functools import lru_cache

from aifs.core.errors import (
    CrossDevice,
    Exists,
    Invalid,
    IsADirectory,
    NameTooLong,
    NotADirectory,
    NotEmpty,
    NotFound,
    NotPermitted,
    ReadOnly,
    TooManyLinks,
)
from aifs.core.names import NAME_MAX, VIRTUAL, is_name
from aifs.layout.striped import Striped
from aifs.meta import acl, chunks, keys, quotas, shared, trash
from aifs.meta.degraded import drop_degraded
from aifs.meta.kv import ReadTransaction, Transaction, answers, grows
from aifs.meta.records import (
    IMMUTABLE,
    INHERITS_PROJECT,
    MTIME_AT,
    BurstRecord,
    Copy,
    Dentry,
    Garbage,
    Inode,
    decode_burst,
    decode_dentry,
    decode_inode,
    encode_change,
    encode_entry,
)
from aifs.meta.trash import Remover

SYMLINK_MAX = 4095
LINK_MAX = 2**31 - 1

SEVERAL = 0
"""``parent`` of a file that has or had several names, in unknown directories."""

RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2


# --- reading --------------------------------------------------------------------------------------


def get_inode(tx: ReadTransaction, ino: int) -> Inode:
    """Raises NotFound."""
    record = tx.get(keys.inode(ino))
    if record is None:
        raise NotFound(f"inode {ino} does not exist")
    inode = decode_inode(ino, record)
    inode.seq = tx.seq
    return inode


def find_inode(tx: ReadTransaction, ino: int) -> Inode | None:
    """The inode, or None if there is none."""
    record = tx.get(keys.inode(ino))
    if record is None:
        return None
    inode = decode_inode(ino, record)
    inode.seq = tx.seq
    return inode


def put_inode(tx: Transaction, inode: Inode) -> None:
    """Record an inode that this transaction has read, or makes; callers that take its project away
    count that (``quotas.replace``)."""
    key, record = keys.inode(inode.ino), inode.encode()
    if inode.project:
        quotas.count(tx, tx.get_loosely(key), record)
    tx.put(key, record)


def put_bytes(tx: Transaction, opened: Inode) -> Inode:
    """Record where the bytes of an open inode are, and what else core knows better; names, owner,
    mode, flags and policy stay the record's. Returns the recorded inode. Raises NotFound."""
    inode = get_inode(tx, opened.ino)
    take_bytes(inode, opened)
    put_inode(tx, inode)
    return inode


def take_bytes(inode: Inode, opened: Inode) -> None:
    """``inode`` has its bytes where ``opened`` has them, and all that follows from it."""
    inode.oid, inode.layout, inode.named = opened.oid, opened.layout, opened.named
    inode.data, inode.copy = opened.data, opened.copy
    take_attributes(inode, opened)


def has_form_of(inode: Inode, opened: Inode) -> bool:
    """Whether ``inode`` has its newest bytes where ``opened`` has them, and the same inline; if
    not, another host has moved or changed them."""
    one, other = (each.copy if each.in_burst else None for each in (inode, opened))
    has_bytes = (inode.data or None) == (opened.data or None)
    is_shared = inode.named != 0, opened.named != 0
    where = (inode.oid, inode.layout, one) == (opened.oid, opened.layout, other)
    return has_bytes and where and is_shared[0] == is_shared[1]


def take_attributes(inode: Inode, opened: Inode) -> None:
    """``inode`` has the attributes that follow from the bytes as ``opened`` has them."""
    if not has_form_of(inode, opened):
        inode.atime_ns = max(inode.atime_ns, opened.atime_ns)
        return
    inode.size, inode.blocks = opened.size, opened.blocks
    inode.atime_ns, inode.mtime_ns = opened.atime_ns, opened.mtime_ns
    inode.ctime_ns = max(inode.ctime_ns, opened.ctime_ns)
    if opened.stripped:
        inode.mode = inode.unprivileged_mode


def require_name(name: bytes) -> None:
    """Raises NameTooLong, ReadOnly (virtual) or Invalid unless a file may have this name."""
    if len(name) > NAME_MAX:
        raise NameTooLong()
    if name == VIRTUAL:
        raise ReadOnly("it is virtual")
    if not is_name(name):
        raise Invalid(f"{name!r} cannot be the name of a file")


def lookup(tx: ReadTransaction, parent: int, name: bytes) -> Inode:
    """The inode of ``name``. Raises NotFound, NotADirectory, NameTooLong. Also of ``.``, any linked
    inode itself, and of ``..``: the kernel asks so for file handles."""
    if name in (b".", b".."):
        inode = get_inode(tx, parent)
        if inode.links == 0:
            raise NotFound()
        return inode if name == b"." else get_directory(tx, inode.parent)
    return get_inode(tx, get_dentry(tx, parent, name).ino)


def find_records(tx: ReadTransaction, parent: int, name: bytes) -> tuple[int, bytes] | None:
    """The inode that ``name`` leads to, and its record. None if one of the two is missing."""
    dentry = tx.get(keys.dentry(parent, name)) if len(name) <= NAME_MAX else None
    ino = 0 if dentry is None else decode_dentry(dentry).ino
    record = tx.get(keys.inode(ino)) if ino else None
    return None if record is None else (ino, record)


def get_dentry(tx: ReadTransaction, parent: int, name: bytes) -> Dentry:
    if len(name) > NAME_MAX:
        raise NameTooLong()
    record = tx.get(keys.dentry(parent, name))
    if record is None:
        get_directory(tx, parent)
        raise NotFound()
    return decode_dentry(record)


def get_directory(tx: ReadTransaction, ino: int) -> Inode:
    """Raises NotFound (also for a directory that was removed but is still open), NotADirectory."""
    return _require_directory(get_inode(tx, ino))


def get_inode_loosely(tx: ReadTransaction, ino: int) -> Inode:
    """As ``get_inode``, for callers that do not use its times (see ``touch``)."""
    record = tx.get_loosely(keys.inode(ino))
    if record is None:
        raise NotFound(f"inode {ino} does not exist")
    return decode_inode(ino, record)


def get_directory_loosely(tx: ReadTransaction, ino: int) -> Inode:
    """As ``get_directory``, for callers that do not use its times, or put new ones (``touch``)."""
    return _require_directory(get_inode_loosely(tx, ino))


def _require_directory(inode: Inode) -> Inode:
    if not inode.is_dir:
        raise NotADirectory()
    if inode.links == 0:
        raise NotFound("the directory has been removed")
    return inode


# --- making names ---------------------------------------------------------------------------------


@answers
@grows
def create(tx: Transaction, parent: int, name: bytes, inode: Inode, umask: int = 0) -> Inode:
    """Give the new ``inode`` its first name, with its number as cookie; returns the recorded inode.

    Group and, for directories, setgid bit come from a setgid parent (inode(7)), the layout policy
    from any parent, the ACL from the parent's default ACL, or else ``umask`` counts. With a
    ``copy`` it starts in the burst tier. Raises Exists, NotFound, NotADirectory, NameTooLong,
    TooManyLinks.
    """
    directory = require_free(tx, parent, name)
    new = _make(tx, directory, inode, umask, 2 if stat.S_ISDIR(inode.mode) else 1)
    put_name(tx, parent, name, new, new.ino)
    touch(tx, directory, new.ctime_ns, links=1 if new.is_dir else 0)
    return new


@grows
def create_nameless(tx: Transaction, parent: int, inode: Inode, umask: int = 0) -> Inode:
    """A file inheriting from ``parent``, an orphan until ``link`` names it (O_TMPFILE)."""
    directory = get_directory_loosely(tx, parent)
    _require_not_immutable(directory)
    new = _make(tx, directory, inode, umask, 0)
    _put_orphan(tx, new.ino)
    return new


def _make(tx: Transaction, directory: Inode, inode: Inode, umask: int, links: int) -> Inode:
    gid, mode, access_acl, default_acl = inode.gid, inode.mode, b"", b""
    if not stat.S_ISLNK(mode):
        if directory.default_acl:
            mode, access_acl = acl.inherited(directory.default_acl, mode)
            default_acl = directory.default_acl if stat.S_ISDIR(mode) else b""
        else:
            mode &= ~umask
    if directory.mode & stat.S_ISGID:
        gid = directory.gid
        if stat.S_ISDIR(mode):
            mode |= stat.S_ISGID
    new = Inode(
        inode.ino,
        mode,
        inode.uid,
        gid,
        links,
        inode.rdev,
        inode.size,
        0,
        inode.ctime_ns,
        inode.ctime_ns,
        inode.ctime_ns,
        directory.ino,
        0,
        directory.policy,
        None,
        inode.data,
        inode.copy,
        inode.ctime_ns,
        directory.flags & INHERITS_PROJECT if stat.S_ISDIR(mode) else 0,
        quotas.inherited(directory),
        access_acl,
        default_acl,
        seq=tx.seq,
    )
    tx.put(keys.inode(new.ino), new.encode())
    if new.project:
        quotas.add(tx, new.project, new.size if new.is_file else 0, 1)
    if new.copy is not None:
        put_undrained(tx, new, durable=False, now=new.ctime_ns)
    tx.add(keys.COUNTER_INODES, 1)
    return new


@answers
@grows
def link(
    tx: Transaction,
    ino: int,
    parent: int,
    name: bytes,
    cookie: int,
    now: int,
    nameless: bool = False,
) -> Inode:
    """Give a file another name; ``nameless``: the first, after ``create_nameless``. Raises
    NotPermitted for a directory, NotFound for an unlinked file, and as create."""
    directory = require_free(tx, parent, name)
    inode = get_inode(tx, ino)
    if inode.is_dir:
        raise NotPermitted("a directory cannot have two names")
    inode.require_unguarded()
    require_same_project(tx, directory, inode)
    if inode.links == 0:
        if not nameless or inode.is_trashed:
            raise NotFound()
        tx.delete(keys.orphan(ino))
        if tx.host:
            tx.delete(keys.hold(ino, tx.host))
    if inode.nlink >= LINK_MAX:
        raise TooManyLinks()
    inode.parent = SEVERAL if inode.nlink else parent
    inode.nlink += 1
    inode.ctime_ns = now
    put_inode(tx, inode)
    put_name(tx, parent, name, inode, cookie)
    touch(tx, directory, now)
    return inode


# --- removing names -------------------------------------------------------------------------------


@answers
def unlink(tx: Transaction, parent: int, name: bytes, now: int, by: Remover | None = None) -> Inode:
    """Remove a name of no directory; the last one goes to its trash, or leaves an orphan. Returns
    the inode."""
    dentry = get_dentry(tx, parent, name)
    inode = get_inode(tx, dentry.ino)
    if inode.is_dir:
        raise IsADirectory()
    directory = get_directory_loosely(tx, parent)
    require_removable(directory, inode)
    remove_name(tx, parent, name, dentry)
    touch(tx, directory, now)
    return _lose_name(tx, inode, parent, name, now, by)


@answers
def rmdir(tx: Transaction, parent: int, name: bytes, now: int, by: Remover | None = None) -> Inode:
    """As ``unlink``, of an empty directory. Raises NotADirectory, NotEmpty, NotFound."""
    dentry = get_dentry(tx, parent, name)
    inode = get_inode(tx, dentry.ino)
    directory = get_directory_loosely(tx, parent)
    require_removable(directory, inode)
    _require_empty(tx, inode)
    remove_name(tx, parent, name, dentry)
    touch(tx, directory, now, links=-1)
    return _lose_name(tx, inode, parent, name, now, by)


def remove_orphan(tx: Transaction, ino: int, xattrs: Collection[bytes]) -> list[int]:
    """Erase an inode without names unless another host holds it; returns ids of garbage. [] also if
    it is no orphan. ``xattrs``: of ``find_xattrs``."""
    if tx.get(keys.orphan(ino)) is None:
        return []
    if tx.host:
        tx.delete(keys.hold(ino, tx.host))
        if any(True for _ in tx.range(*keys.holds(ino), 1)):
            return []
    inode = find_inode(tx, ino)
    tx.delete(keys.orphan(ino))
    if inode is None or inode.nlink:
        return []
    return erase(tx, inode, xattrs)


def _put_orphan(tx: Transaction, ino: int) -> None:
    tx.put(keys.orphan(ino), b"")
    if tx.host:
        tx.put(keys.hold(ino, tx.host), b"")


@grows
def put_holds(tx: Transaction, inos: Collection[int]) -> list[int]:
    """Hold the orphans among these open inodes until ``remove_orphan``; returns them."""
    held = [ino for ino in inos if tx.get(keys.orphan(ino)) is not None]
    for ino in held:
        tx.put(keys.hold(ino, tx.host), b"")
    return held


def is_held(tx: ReadTransaction, ino: int) -> bool:
    """Whether this host holds an orphan (``put_holds``). The one host of a store holds all."""
    return not tx.host or tx.get(keys.hold(ino, tx.host)) is not None


def find_xattrs(tx: ReadTransaction, ino: int) -> list[bytes]:
    """Keys of an inode's extended attributes. Callers that erase many ask for all first: a range
    costs the more, the more the transaction has changed."""
    return [key for key, _ in tx.range(*keys.xattrs(ino))]


def erase(tx: Transaction, inode: Inode, xattrs: Collection[bytes]) -> list[int]:
    """Erase an unreferenced inode with these extended attributes; returns ids of garbage."""
    ino = inode.ino
    if inode.project:
        quotas.count(tx, tx.get(keys.inode(ino)), None)
        quotas.drop(tx, inode)
    tx.delete(keys.inode(ino))
    tx.add(keys.COUNTER_INODES, -1)
    for key in xattrs:
        tx.delete(key)
    garbage = discard_layout(tx, inode)
    if inode.copy is not None:
        garbage.append(discard_copy(tx, inode.copy))
    tx.delete(keys.dirty(ino))
    if inode.is_dir:
        drop_group(tx, ino)
        tx.delete(keys.retention(ino))
        tx.delete(keys.age_rule(ino))
        tx.delete(keys.trash_rule(ino))
    return garbage


def drop_group(tx: Transaction, ino: int) -> None:
    """The directory has no group any more (meta/groups.py)."""
    for key in [key for key, _ in tx.range(keys.group(ino), keys.group_parts(ino)[1])]:
        tx.delete(key)


# --- what holds a file's bytes --------------------------------------------------------------------
# The inode's own record is the caller's to write.


def put_undrained(tx: Transaction, inode: Inode, durable: bool, now: int) -> None:
    """Have the burst copy hold the newest bytes, changing without notice (dirty mark)."""
    assert inode.copy is not None
    put_copy(tx, inode.ino, inode.copy, undrained=True, durable=durable, now=now)
    put_mark(tx, inode.ino)


def put_mark(tx: Transaction, ino: int) -> None:
    """This host changes the file from now on."""
    tx.put(keys.dirty(ino), keys.host_value(tx.host))


def put_copy(
    tx: Transaction,
    ino: int,
    copy: Copy,
    undrained: bool,
    durable: bool,
    now: int,
    mirror: Copy | None = None,
) -> None:
    """Record that the inode has this burst copy. ``mirror``: its own, if it has one."""
    record = BurstRecord(ino, copy.server, undrained, durable, now, mirror)
    tx.put(keys.burst_copy(copy.id), record.encode())


def discard_layout(tx: Transaction, inode: Inode) -> list[int]:
    """Make objects or chunks of ``inode`` garbage, unless clones have them; returns ids to
    delete."""
    if inode.layout is None or (inode.named and shared.leave(tx, inode.oid, inode.ino)):
        return []
    if inode.objects is not None:
        tx.put(keys.garbage(inode.oid), Garbage(inode.named_by, inode.objects).encode())
        drop_checksums(tx, inode.oid)
        drop_degraded(tx, inode.oid)
        return [inode.oid]
    if inode.chunks is None:
        return []  # the bucket of an imported file keeps it
    return chunks.drop_chunks(tx, inode.oid)


def discard_copy(tx: Transaction, copy: Copy) -> int:
    """Make a burst copy, and its mirror (its host's to delete), garbage; returns its id."""
    if tx.host:
        drop_mirror(tx, copy.id)
    tx.delete(keys.burst_copy(copy.id))
    tx.put(keys.garbage(copy.id), _garbage_on(copy.server))
    return copy.id


def drop_mirror(tx: Transaction, copy_id: int) -> list[int]:
    """Make a burst copy's mirror garbage; returns its id. Callers put or delete the copy's
    record."""
    record = tx.get(keys.burst_copy(copy_id))
    mirror = None if record is None else decode_burst(record).mirror
    if mirror is None:
        return []
    tx.delete(keys.burst_copy(mirror.id))
    tx.put(keys.garbage(mirror.id), _garbage_on(mirror.server))
    return [mirror.id]


@lru_cache(maxsize=256)
def _garbage_on(server: int) -> bytes:
    return Garbage(0, Striped(1, (server,))).encode()


def put_checksums(tx: Transaction, oid: int, digests: bytes) -> None:
    """Those of all MiB of the file that has these objects; none of one that is mostly holes."""
    step = keys.DIGESTS_PER_RECORD * keys.DIGEST_BYTES
    for start in range(0, len(digests), step):
        tx.put(keys.checksums(oid, start // keys.DIGEST_BYTES), digests[start : start + step])


def drop_checksums(tx: Transaction, oid: int) -> bool:
    """The objects of ``oid`` are about to change, or to go. Whether there were any."""
    found = [key for key, _ in tx.range(*keys.all_checksums(oid))]
    for key in found:
        tx.delete(key)
    return bool(found)


# --- rename ---------------------------------------------------------------------------------------


class Overtaken(Exception):
    """A premise of the caller has changed: where a name leads, or a directory's group."""


Name = tuple[int, bytes]
"""A directory, and a name in it."""


def rename(
    tx: Transaction,
    old: Name,
    new: Name,
    flags: int,
    cookies: tuple[int, int],
    now: int,
    expected: Collection[int],
    by: Remover | None = None,
) -> tuple[Inode, Inode | None]:
    """rename(2) with RENAME_NOREPLACE and RENAME_EXCHANGE, of the ``expected`` inode numbers: else
    it raises Overtaken.

    Returns the moved inode, and the target's inode before, which has the old name (EXCHANGE), or
    has lost this one (as ``unlink``). None: there was none, or both names lead to one file (no
    change).
    """
    (parent, name), (new_parent, new_name) = old, new
    if flags & ~(RENAME_NOREPLACE | RENAME_EXCHANGE) or flags == RENAME_NOREPLACE | RENAME_EXCHANGE:
        raise Invalid("unknown or contradicting rename flags")
    dentry = get_dentry(tx, parent, name)
    if dentry.ino not in expected:
        raise Overtaken()
    inode = get_inode(tx, dentry.ino)
    target_directory = get_directory_loosely(tx, new_parent)
    target = _target_of_rename(tx, new_parent, new_name, flags)
    if target is not None:
        if flags & RENAME_EXCHANGE and target.ino not in expected:
            raise Overtaken()
        if target.ino == dentry.ino:
            return inode, None
    other = get_inode(tx, target.ino) if target is not None else None
    same = parent == new_parent
    source_directory = target_directory if same else get_directory_loosely(tx, parent)
    require_removable(source_directory, inode)
    if not same:  # a file of another name may count elsewhere: within a directory nothing moves
        require_same_project(tx, target_directory, inode)
    if other is not None:
        require_removable(target_directory, other)
        if flags & RENAME_EXCHANGE and not same:
            require_same_project(tx, source_directory, other)
    _require_not_immutable(target_directory)
    if inode.is_dir:
        require_not_below(tx, inode.ino, new_parent)
    if flags & RENAME_EXCHANGE:
        assert other is not None and target is not None
        if other.is_dir:
            require_not_below(tx, other.ino, parent)
    elif other is not None:
        if inode.is_dir:
            _require_empty(tx, other)
        elif other.is_dir:
            raise IsADirectory()

    remove_name(tx, parent, name, dentry)
    links = {parent: 0, new_parent: 0}
    links[parent] -= inode.is_dir
    links[new_parent] += inode.is_dir
    if target is not None:
        assert other is not None
        remove_name(tx, new_parent, new_name, target)
        links[new_parent] -= other.is_dir
        if flags & RENAME_EXCHANGE:
            links[parent] += other.is_dir
            _move(tx, other, parent, name, cookies[1], now)
        else:
            other = _lose_name(tx, other, new_parent, new_name, now, by)
    _move(tx, inode, new_parent, new_name, cookies[0], now)
    for directory in (source_directory, target_directory)[: len(links)]:
        touch(tx, directory, now, links=links[directory.ino])
    return inode, other


def _target_of_rename(tx: Transaction, parent: int, name: bytes, flags: int) -> Dentry | None:
    if len(name) > NAME_MAX:
        raise NameTooLong()
    record = tx.get(keys.dentry(parent, name))
    if record is None:
        if flags & RENAME_EXCHANGE:
            raise NotFound()
        return None
    if flags & RENAME_NOREPLACE:
        raise Exists()
    return decode_dentry(record)


def require_not_below(tx: Transaction, ino: int, directory: int) -> None:
    """Raises Invalid if ``directory`` is ``ino`` or lies below it: a loop would be cut off."""
    while directory != keys.ROOT_INO:
        if directory == ino:
            raise Invalid("a directory cannot move below itself")
        directory = get_inode_loosely(tx, directory).parent
    if ino == keys.ROOT_INO:
        raise Invalid("the root cannot move")


def _move(tx: Transaction, inode: Inode, parent: int, name: bytes, cookie: int, now: int) -> None:
    put_name(tx, parent, name, inode, cookie)
    inode.ctime_ns = now
    if inode.is_dir:
        inode.shown_ns = inode.shown_ns or now
    inode.parent = parent if inode.is_dir or inode.nlink == 1 else SEVERAL
    put_inode(tx, inode)


# --- the steps that these share -------------------------------------------------------------------


def require_free(tx: Transaction, parent: int, name: bytes) -> Inode:
    """The directory, if it can take the new name. Raises as ``create``."""
    if len(name) > NAME_MAX:
        raise NameTooLong()
    directory = get_directory_loosely(tx, parent)
    if tx.get(keys.dentry(parent, name)) is not None:
        raise Exists()
    _require_not_immutable(directory)
    return directory


def require_removable(directory: Inode, inode: Inode) -> None:
    """Raises NotPermitted if a name of ``inode`` in ``directory`` must stay, for every caller."""
    directory.require_unguarded()
    inode.require_unguarded()


def _require_not_immutable(directory: Inode) -> None:
    if directory.flags & IMMUTABLE:
        directory.require_unguarded()


def require_same_project(tx: ReadTransaction, directory: Inode, inode: Inode) -> None:
    """Raises CrossDevice for a move between projects, or out of a quota. A quota's directory moves
    where the same one counts it."""
    project = quotas.inherited(directory)
    if project == inode.project:
        return
    own = quotas.find_own(tx, inode)
    if own is not None and own.above == (project if project >= quotas.FIRST_PROJECT else 0):
        return
    if directory.flags & INHERITS_PROJECT:
        raise CrossDevice("the directory belongs to another project, which its files inherit")
    if inode.project >= quotas.FIRST_PROJECT:
        raise CrossDevice("it counts in a quota, in which the directory does not lie")


def _require_empty(tx: Transaction, inode: Inode) -> None:
    if not inode.is_dir:
        raise NotADirectory()
    for _ in tx.range(*keys.entries_after(inode.ino, 0), limit=1):
        raise NotEmpty()


def put_name(tx: Transaction, parent: int, name: bytes, inode: Inode, cookie: int) -> None:
    """Put a new name, a dentry and its place in the listing. Raises as ``require_name``."""
    require_name(name)
    type_ = inode.mode >> 12
    tx.put(keys.dentry(parent, name), Dentry(inode.ino, cookie, type_).encode())
    tx.put(keys.entry(parent, cookie), encode_entry(inode.ino, type_, name))


def remove_name(tx: Transaction, parent: int, name: bytes, dentry: Dentry) -> None:
    """The reverse."""
    tx.delete(keys.dentry(parent, name))
    tx.delete(keys.entry(parent, dentry.cookie))


def touch(tx: Transaction, directory: Inode, now: int, links: int = 0) -> None:
    """Record changed contents of a directory. Without ``links`` only times change, by a patch: so
    hosts may make and remove names in it at the same time."""
    if links:
        directory.nlink += links
        directory.mtime_ns = directory.ctime_ns = now
        put_inode(tx, directory)
    else:
        tx.patch(keys.inode(directory.ino), MTIME_AT, encode_change(now))


def _lose_name(
    tx: Transaction, inode: Inode, parent: int, name: bytes, now: int, by: Remover | None
) -> Inode:
    """Take a name from a file or empty directory; the last one goes to its trash."""
    is_last = inode.is_dir or inode.nlink == 1
    if is_last and by and trash.put(tx, inode, parent, name, now, by, is_dead=inode.is_dir):
        put_inode(tx, inode)
        return inode
    return drop_link(tx, inode, now)


def drop_link(tx: Transaction, inode: Inode, now: int) -> Inode:
    """The inode has lost a name; without any it is an orphan."""
    inode.nlink = 0 if inode.is_dir else inode.nlink - 1
    inode.ctime_ns = now
    if inode.nlink == 0:
        _put_orphan(tx, inode.ino)
    put_inode(tx, inode)
    return inode
