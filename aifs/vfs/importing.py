"""Files whose bytes stay in a bucket: the call ``import`` of the ioctl."""

import stat
from collections.abc import Sequence
from typing import NamedTuple

from aifs.core import clock
from aifs.core.errors import Invalid
from aifs.files import rights, virtual
from aifs.files.asks import DIRECTORY, Ask, Hint, HintCall
from aifs.files.services import Services
from aifs.files.types import SIZE_MAX
from aifs.layout.imported import Imported, Pin
from aifs.meta import keys, namespace
from aifs.meta.kv import ReadTransaction, Transaction, grows
from aifs.meta.records import Inode, decode_dentry

MADE, SAME, CHANGED, OTHER = "made", "same", "changed", "other"
"""The file is new; it is there; it is there, pinned to another content of the object, or with other
parameters of the bucket; another file, or a directory, has the name."""


class NewFile(NamedTuple):
    """A file to be made."""

    name: bytes
    mtime_ns: int
    """When the object was made, since the epoch."""
    pin: Pin


@grows
def _import_files(
    tx: Transaction, directory: int, entries: Sequence[NewFile], new: Sequence[Inode], umask: int
) -> list[str]:
    """Make the files whose names are free. Returns MADE, SAME, CHANGED or OTHER of each.

    ``new``: an inode for each entry, with its number, owner, mode and ctime. Raises as
    namespace.create, except Exists.
    """
    namespace.get_directory(tx, directory)
    return [
        _import_file(tx, directory, entry, inode, umask)
        for entry, inode in zip(entries, new, strict=True)
    ]


def _import_file(tx: Transaction, directory: int, entry: NewFile, new: Inode, umask: int) -> str:
    namespace.require_name(entry.name)
    record = tx.get(keys.dentry(directory, entry.name))
    if record is not None:
        return _state(tx, decode_dentry(record).ino, entry.pin)
    made = namespace.create(tx, directory, entry.name, new, umask)
    made.size, made.mtime_ns = entry.pin.size, entry.mtime_ns
    if entry.pin.size:
        made.layout, made.oid = Imported(source=entry.pin), made.ino
        made.blocks = -(-entry.pin.size // 512)
    namespace.put_inode(tx, made)
    return MADE


def _state(tx: ReadTransaction, ino: int, pin: Pin) -> str:
    found = namespace.find_inode(tx, ino)
    if found is None or not found.is_file or found.in_burst:
        return OTHER
    if not found.size and not pin.size:
        return SAME
    known = found.layout.pin if found.layout is not None else None
    if known is None or known.url != pin.url:
        return OTHER
    return SAME if known == pin else CHANGED


NAMES = 64
"""Names that one transaction makes: some milliseconds in which no request is answered."""


class Imports:
    """Used from one trio thread."""

    HINTS = (
        Hint(
            "import",
            DIRECTORY,
            "makes files whose bytes are objects of a bucket",
            call=HintCall(
                rights.root,  # the daemon reads any bucket with the rights of its host
                lambda imports, ask: imports.make(ask),
                {
                    "bucket": str,
                    "below": str,
                    "names": str,
                    "etags": str,
                    "sizes": list,
                    "mtimes": list,
                    "mode": int,
                },
                "Makes files in it, unless they are there: names and ETags, a line for each, sizes "
                "in bytes, mtimes in ns. Their bytes stay in the bucket (a URL), in the objects "
                "whose keys are below and the name; reading fails with EIO once these have other "
                "ETags. mode: permission bits (0644). Answers {states}, a line for each: made, "
                "same, changed (it is there with another ETag) or other (another file has the "
                "name). Durable with the next fsync.",
            ),
        ),
    )

    def __init__(self, services: Services) -> None:
        self._engine = services.engine
        self._ids = services.ids
        self._heirlooms = services.heirlooms
        self._kernel = services.kernel
        self._looked_up = services.looked_up
        self._quotas = services.quotas

    async def make(self, ask: Ask) -> dict[str, str]:
        """Raises Invalid, and as Names.create."""
        virtual.require_on_record(ask.ino)
        entries, mode = _entries(ask), ask.fields.get("mode", 0o644)
        states: list[str] = []
        for start in range(0, len(entries), NAMES):
            states += await self._make(ask, entries[start : start + NAMES], mode & 0o7777)
        made = [each.name for each, state in zip(entries, states, strict=True) if state == MADE]
        await self._kernel.look_up_anew((ask.ino, name) for name in made)
        await self._engine.shown()
        return {"states": "\n".join(states)}

    async def _make(self, ask: Ask, entries: list[NewFile], mode: int) -> list[str]:
        self._looked_up.changed_here(ask.ino)
        caller, now = ask.caller, clock.kernel_ns(is_new=True)
        new = [
            Inode.new(await self._ids.take(), stat.S_IFREG | mode, caller.uid, caller.gid, now)
            for _ in entries
        ]
        project = (await self._heirlooms.of(ask.ino)).project if self._quotas.are_set else 0
        size = sum(entry.pin.size for entry in entries)
        async with self._quotas.granted(project, size, inodes=len(entries)):
            return await self._engine.transact(_import_files, ask.ino, entries, new, caller.umask)


def _entries(ask: Ask) -> list[NewFile]:
    """Raises Invalid."""
    bucket, below = ask.need("bucket"), ask.fields.get("below", "")
    names, etags = ask.need("names").split("\n"), ask.need("etags").split("\n")
    sizes, mtimes = ask.need("sizes"), ask.need("mtimes")
    if not len(names) == len(etags) == len(sizes) == len(mtimes):
        raise Invalid("names, etags, sizes and mtimes are not of the same files")
    if not (bucket and all(etags)):
        raise Invalid("bucket, or an ETag, is empty")
    if max(sizes) > SIZE_MAX or max(mtimes) >= 1 << 63:
        raise Invalid("a size or a time is too large")
    try:
        "".join((bucket, below, *names, *etags)).encode()
    except UnicodeEncodeError:
        raise Invalid("a name is not UTF-8") from None
    return [
        NewFile(name.encode(), mtime, Pin(bucket, below + name, etag, size))
        for name, etag, size, mtime in zip(names, etags, sizes, mtimes, strict=True)
    ]
