"""A directory's tree for virtual files: each name with its inode now, and where its bytes lie."""

import math
import stat
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple
from weakref import WeakSet

import trio

from aifs.core.errors import Invalid, NotFound, Unavailable
from aifs.files.file_io import FileIO
from aifs.meta import keys
from aifs.meta.chunks import decode_list, resolve
from aifs.meta.kv import Engine, ReadTransaction
from aifs.meta.listing import list_directory
from aifs.meta.records import Inode, decode_inode, place_of
from aifs.reads.virtual.sources import Counted, ReadRight, right_to

_ENTRY, _INODE = b"e"[0], b"i"[0]

MEMBERS_MAX = 1 << 20
"""Names of one virtual file: some 60 bytes and the path each, up to a KiB while it is made."""

TEXT_MAX = 256 << 20
"""Bytes of all paths, and symlinks' targets: long directory chains cost more than members."""

RIGHTS_MAX = 4096
"""Different rights (owner, mode, ACL) of its sources, all checked at an open."""

_SLICE = 64
"""Entries that are looked at before others get a turn: less than a millisecond."""

_NOBODY = ReadRight(b"", 0, 0, 0)
"""A right that root alone has."""


class SourceWatch:
    """Of some directories: their names, and the attributes of what these lead to."""

    __slots__ = ("__weakref__", "changed", "counted", "directories", "rights")

    def __init__(self, counted: Counted) -> None:
        self.counted = counted
        """Told how many names have been looked at."""
        self.directories: set[int] = set()
        """A directory is put here before it is looked at."""
        self.changed = False
        """Whether something may have changed since; it stays set."""
        self.rights: set[ReadRight] = set()
        """The rights to what has been recorded there since."""

    @property
    def memory(self) -> int:
        """About how many bytes are kept."""
        return 100 * len(self.directories)


class Watches:
    """All that is watched. As long as nothing ever was, transactions are not listened to."""

    def __init__(self, engine: Engine, io: FileIO) -> None:
        self._engine = engine
        self._io = io
        self._watches: WeakSet[SourceWatch] = WeakSet()
        self._listens = False

    def begin(self, counted: Counted) -> SourceWatch:
        if not self._listens:
            self._listens = True
            self._engine.listen(self._note)
        watch = SourceWatch(counted)
        self._watches.add(watch)
        return watch

    def is_whole(self, watch: SourceWatch) -> bool:
        """Whether nothing has changed. What programs write to past us is on record only later."""
        written = [
            file.inode.parent for file in self._io.table.open.values() if file.may_be_written
        ]
        self._tell(watch, written)
        return not watch.changed

    def _note(self, writes: Mapping[bytes, bytes | None], _: int) -> None:
        watching = list(self._watches)
        if not watching:
            return
        changed = set()
        for key, record in writes.items():
            if key[0] == _ENTRY:
                changed.add(keys.entry_numbers(key)[0])
            elif key[0] == _INODE and record is not None:
                parent = place_of(record).parent
                changed.add(parent)
                for watch in watching:
                    if parent in watch.directories or not parent:
                        is_full = len(watch.rights) >= RIGHTS_MAX
                        right = right_to(decode_inode(keys.number(key), record))
                        watch.rights.add(_NOBODY if is_full else right)
        for watch in watching:
            self._tell(watch, changed)

    def _tell(self, watch: SourceWatch, directories: Iterable[int]) -> None:
        """An inode with several names, 0, may be in any directory."""
        if any(ino in watch.directories or not ino for ino in directories):
            watch.changed = True


Place = tuple[float, int]
"""A file's container and offset; without, last, in the order of making."""

_FIRST: Place = (-1.0, 0)


class Found(NamedTuple):
    """A name below the directory."""

    path: bytes
    inode: Inode
    place: Place


class _Entry(NamedTuple):
    name: bytes
    inode: Inode
    cookie: int
    place: Place


async def walk(
    engine: Engine,
    io: FileIO,
    top: int,
    watch: SourceWatch,
    visit: Callable[[Found], bool],
    with_places: bool = False,
) -> set[ReadRight]:
    """Show all below ``top`` to ``visit``, which says whether it belongs; directories that do not
    are skipped. ``with_places``: look up places in containers. Returns the permissions on source
    files that readers need. Raises Invalid for too many names, long paths, different rights."""
    rights: set[ReadRight] = set()
    count = text = 0
    waiting = [(top, b"")]
    while waiting:
        ino, path = waiting.pop()
        watch.directories.add(ino)
        cookie = 0
        while entries := await _list(engine, ino, cookie, with_places):
            for name, recorded, cookie, place in entries:
                inode = io.inodes.current(recorded)
                count += 1
                text += len(path) + len(name) + (inode.size if stat.S_ISLNK(inode.mode) else 0)
                if not visit(Found(path + name, inode, place)):
                    continue
                if inode.is_dir:
                    waiting.append((inode.ino, path + name + b"/"))
                if inode.is_dir or inode.is_file:
                    rights.add(right_to(inode))
            for found, most, what in (
                (count, MEMBERS_MAX, "files"),
                (text, TEXT_MAX, "bytes of paths"),
                (len(rights), RIGHTS_MAX, "different owners, modes and ACLs"),
            ):
                if found > most:
                    raise Invalid(
                        f"more than {most:,} {what} are below the directory; ask for that of"
                        " directories below it"
                    )
            await watch.counted(count)
            await trio.lowlevel.checkpoint()
    return rights


async def _list(engine: Engine, ino: int, cookie: int, with_places: bool) -> Sequence[_Entry]:
    with suppress(NotFound):  # removed meanwhile
        return await engine.view(_read_slice, ino, cookie, with_places)
    return ()


def _read_slice(tx: ReadTransaction, ino: int, cookie: int, with_places: bool) -> list[_Entry]:
    listed = list(list_directory(tx, ino, cookie, _SLICE))
    inodes = [inode for _, inode, _ in listed]
    places = first_places(tx, inodes) if with_places else {}
    return [
        _Entry(name, inode, next_cookie, places.get(inode.ino) or _place_without(inode))
        for name, inode, next_cookie in listed
    ]


def _place_without(inode: Inode) -> Place:
    """Outside of containers; directories' contents follow, by name."""
    return _FIRST if inode.is_dir else (math.inf, inode.ino)


# Where the files of a directory lie, for many of them at once: ``user.aifs.places.N``.
#
# A program that reads a directory of small files in an order of its own does so at the containers'
# speed if its blocks are runs of files that lie beside each other. Sizes and times are in the
# answer, so that no stat(2) of each file is needed; names come from readdir(3), with the same inode
# numbers.
#
# Answer, little-endian: u64 cookie to go on with (the N of the next request; 0: there are no more),
# then for each regular file u64 inode, u64 size, i64 mtime (ns since the epoch), u64 container (0:
# it lies in none), u64 offset of its first byte there. A file without a name in the directory is
# not told; one that is stored in several containers is told by its first chunk.

NEXT = struct.Struct("<Q")
FILE = struct.Struct("<QQqQQ")

_FILES_MAX = 1600  # an extended attribute has up to 64 KiB


class _Placed(NamedTuple):
    inode: Inode
    container: int
    offset: int


async def tell(engine: Engine, io: FileIO, directory: int, cookie: int) -> bytes:
    """What ``user.aifs.places.COOKIE`` says; 0: from the start. Raises Unavailable."""
    told: list[bytes] = []
    while len(told) <= _FILES_MAX - _SLICE:
        following, found = await engine.view(_read, directory, cookie)
        for inode, container, offset in found:
            now = io.inodes.current(inode)
            told.append(FILE.pack(now.ino, now.size, now.mtime_ns, container, offset))
        cookie = following
        if not cookie:
            break
        await trio.lowlevel.checkpoint()
    return NEXT.pack(cookie) + b"".join(told)


def _read(tx: ReadTransaction, directory: int, cookie: int) -> tuple[int, list[_Placed]]:
    """The files among some entries, and the next cookie; 0: the end."""
    entries = list(list_directory(tx, directory, cookie, _SLICE))
    inodes = [inode for _, inode, _ in entries if inode.is_file]
    places = first_places(tx, inodes)
    found = [_Placed(inode, *places.get(inode.ino, (0, 0))) for inode in inodes]
    return entries[-1][2] if len(entries) == _SLICE else 0, found


def first_places(tx: ReadTransaction, inodes: Sequence[Inode]) -> dict[int, tuple[int, int]]:
    """Container and offset of each file's first chunk, by inode. Files with damaged lists have
    none: their readers get the error."""
    stored = [inode for inode in inodes if inode.chunks is not None]
    lists = tx.get_many([keys.chunk_list(inode.oid, 0) for inode in stored])
    places = {}
    for inode, record in zip(stored, lists, strict=True):
        with suppress(Unavailable):
            for extent in decode_list(record)[1]:
                if (place := resolve(tx, extent).place) is not None:
                    places[inode.ino] = place.container, place.offset
                    break
    return places
