"""Extended attributes: those that are stored, ACLs, and hints (hints.py), which look like them."""

from aifs.core import clock
from aifs.core.errors import NoAttribute
from aifs.files import permissions
from aifs.files.file_io import FileIO
from aifs.files.types import ROOT, CallerLike
from aifs.files.virtual import FIRST as FIRST_VIRTUAL
from aifs.files.virtual import require_on_record
from aifs.meta import acl, xattrs
from aifs.meta.kv import Engine
from aifs.vfs import attribute_changes, hints
from aifs.vfs.attributes import Attributes
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
        return await self._engine.view(xattrs.get, ino, name)

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
            self._io.table.adopt(
                await self._engine.transact(xattrs.put, ino, name, value, flags, now)
            )
        await self._engine.shown()

    async def names(self, ino: int, caller: CallerLike = ROOT) -> list[bytes]:
        """listxattr(2); those of the trusted namespace are for root alone, as xattr(7) says."""
        inode = await self._attributes.getattr(ino)
        names = await self._engine.view(xattrs.names, ino)
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
            self._io.table.adopt(
                await self._engine.transact(xattrs.remove, ino, name, clock.kernel_ns())
            )
        await self._engine.shown()

    async def _put_acl(self, ino: int, name: bytes, value: bytes, caller: CallerLike) -> None:
        inode = await self._attributes.getattr(ino)
        member = permissions.is_member(inode.gid, caller)
        change = attribute_changes.AclChange(name, value, kill_setgid=not member)
        await self._attributes.change(ino, attribute_changes.apply_acl, change)
