"""What lies below a directory, as virtual files are made of it: each name with its inode as it is
now, and where its bytes lie."""

import math
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import trio

from aifs.core.errors import Invalid, NotFound
from aifs.files.file_io import FileIO
from aifs.meta.kv import Engine, ReadTransaction
from aifs.meta.listing import list_directory
from aifs.meta.records import Inode
from aifs.reads.places import first_places
from aifs.reads.virtual.sources import ReadRight, right_to
from aifs.reads.virtual.watching import SourceWatch

MEMBERS_MAX = 1 << 20
"""Names that one virtual file is made of: some 60 bytes and the path are kept of each, and up to a
KiB while it is made."""

TEXT_MAX = 256 << 20
"""Bytes of their paths, and of targets of symlinks, altogether: a chain of directories with long
names would cost much more than its members."""

RIGHTS_MAX = 4096
"""Different ones (owner, mode, ACL) of what one is made of: a caller that opens it is checked
against each.
"""

_SLICE = 64
"""Entries that are looked at before others get a turn: less than a millisecond."""

Place = tuple[float, int]
"""Where the bytes of a file lie: container and offset; what lies in none comes last, in the order
in which it was made."""

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
    """Show all that lies below ``top`` to ``visit``, which says whether it belongs to the virtual
    file; what is in a directory that does not is not looked at. ``with_places``: where files lie in
    containers is looked up, too; else all are shown as if they lay in none. Returns the rights that
    who reads the virtual file needs to what belongs to it. Raises Invalid for too many names, too
    long paths, too many different rights."""
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
    """Of what lies in no container. What lies in directories follows these; they are by name among
    themselves."""
    return _FIRST if inode.is_dir else (math.inf, inode.ino)
