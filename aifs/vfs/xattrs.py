"""Extended attributes: those that are stored, ACLs, and hints (hints.py), which look like them."""

from aifs.core import clock
from aifs.core.errors import (
    ArgumentTooBig,
    Exists,
    Invalid,
    NoAttribute,
    NoSpace,
    NotSupported,
    ResultTooLarge,
)
from aifs.files import permissions
from aifs.files.file_io import FileIO
from aifs.files.types import ROOT, CallerLike
from aifs.files.virtual import FIRST as FIRST_VIRTUAL
from aifs.files.virtual import require_on_record
from aifs.meta import acl, keys
from aifs.meta.kv import Engine, ReadTransaction, Transaction, answers, grows
from aifs.meta.namespace import get_inode, put_inode
from aifs.meta.records import Inode
from aifs.vfs import hints
from aifs.vfs.attributes import AclChange, Attributes, apply_acl
from aifs.vfs.hints import Hints

_ACLS = (acl.ACCESS, acl.DEFAULT)


class ExtendedAttributes:
    """The operations on extended attributes."""

    def __init__(self, engine: Engine, io: FileIO, attributes: Attributes, hints: Hints) -> None:
        self._engine = engine
        self._io = io
        self._attributes = attributes
        self._hints = hints

    async def get(self, ino: int, name: bytes, caller: CallerLike = ROOT) -> bytes:
        """getxattr(2). Raises NoAttribute, and errors of hints. Virtual files have none: their
        directory tells why they were refused."""
        if ino >= FIRST_VIRTUAL:
            raise NoAttribute()
        if name.startswith(hints.PREFIX):
            return await self._hints.get(ino, name, caller)
        if name in _ACLS:
            inode = await self._attributes.getattr(ino)
            value = inode.acl if name == acl.ACCESS else inode.default_acl
            if not value:
                raise NoAttribute()
            return value
        return await self._engine.view(get, ino, name)

    async def put(
        self, ino: int, name: bytes, value: bytes, flags: int = 0, caller: CallerLike = ROOT
    ) -> None:
        """setxattr(2). Raises ReadOnly for what is virtual."""
        require_on_record(ino)
        if name.startswith(hints.PREFIX):
            await self._hints.put(ino, name, value, caller)
        elif name in _ACLS:
            await self._put_acl(ino, name, value, caller)
        else:
            now = clock.kernel_ns()
            self._io.table.adopt(await self._engine.transact(put, ino, name, value, flags, now))
        await self._engine.shown()

    async def names(self, ino: int, caller: CallerLike = ROOT) -> list[bytes]:
        """listxattr(2); those of the trusted namespace are for root alone, as xattr(7) says."""
        inode = await self._attributes.getattr(ino)
        names = await self._engine.view(names_of, ino)
        names += [acl.ACCESS] * bool(inode.acl) + [acl.DEFAULT] * bool(inode.default_acl)
        return (
            names
            if caller.uid == 0
            else [name for name in names if not name.startswith(b"trusted.")]
        )

    async def remove(self, ino: int, name: bytes, caller: CallerLike = ROOT) -> None:
        """removexattr(2). Raises NoAttribute, ReadOnly for what is virtual."""
        require_on_record(ino)
        if name.startswith(hints.PREFIX):
            await self._hints.remove(ino, name, caller)
        elif name in _ACLS:
            await self._put_acl(ino, name, b"", caller)
        else:
            self._io.table.adopt(await self._engine.transact(remove, ino, name, clock.kernel_ns()))
        await self._engine.shown()

    async def _put_acl(self, ino: int, name: bytes, value: bytes, caller: CallerLike) -> None:
        inode = await self._attributes.getattr(ino)
        member = permissions.is_member(inode.gid, caller)
        change = AclChange(name, value, kill_setgid=not member)
        await self._attributes.change(ino, apply_acl, change)


# --- those on record, as transaction functions (see kv.py) ----------------------------------------


NAME_MAX = 255
VALUE_MAX = 64 * 1024
LIST_MAX = 64 * 1024  # what listxattr(2) can return

XATTR_CREATE = 1
XATTR_REPLACE = 2

NAMESPACES = (b"user.", b"trusted.", b"security.")


def get(tx: ReadTransaction, ino: int, name: bytes) -> bytes:
    """Raises NoAttribute, NotSupported, ResultTooLarge."""
    _check_name(name)
    value = tx.get(keys.xattr(ino, name))
    if value is None:
        raise NoAttribute()
    return value


def names_of(tx: ReadTransaction, ino: int) -> list[bytes]:
    return [keys.xattr_parts(key)[1] for key, _ in tx.range(*keys.xattrs(ino))]


@answers
@grows
def put(tx: Transaction, ino: int, name: bytes, value: bytes, flags: int, now: int) -> Inode:
    """setxattr(2); returns the inode. Raises Exists or NoAttribute by ``flags``, ArgumentTooBig,
    NoSpace (too many names), NotSupported."""
    _check_name(name)
    get_inode(tx, ino).require_unguarded()
    if len(value) > VALUE_MAX:
        raise ArgumentTooBig()
    key = keys.xattr(ino, name)
    present = tx.get(key) is not None
    if flags & ~(XATTR_CREATE | XATTR_REPLACE):
        raise Invalid()
    if flags & XATTR_CREATE and present:
        raise Exists()
    if flags & XATTR_REPLACE and not present:
        raise NoAttribute()
    if not present and sum(len(n) + 1 for n in names_of(tx, ino)) + len(name) + 1 > LIST_MAX:
        raise NoSpace("too many extended attributes on one inode")
    tx.put(key, value)
    return _touch(tx, ino, now)


@answers
def remove(tx: Transaction, ino: int, name: bytes, now: int) -> Inode:
    """removexattr(2); returns the inode as it is now. Raises as get."""
    get_inode(tx, ino).require_unguarded()
    get(tx, ino, name)
    tx.delete(keys.xattr(ino, name))
    return _touch(tx, ino, now)


def _check_name(name: bytes) -> None:
    if not name.startswith(NAMESPACES):
        raise NotSupported()
    if len(name) > NAME_MAX:
        raise ResultTooLarge("name of an extended attribute is too long")


def _touch(tx: Transaction, ino: int, now: int) -> Inode:
    inode = get_inode(tx, ino)
    inode.ctime_ns = now
    put_inode(tx, inode)
    return inode
