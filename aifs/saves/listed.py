"""Files that a rank's commit or a manifest lists: whether they are there, in their sizes."""

import os
from collections.abc import Sequence

import trio

from aifs.core.errors import Invalid, NotADirectory, NotFound
from aifs.files.file_io import FileIO
from aifs.meta import namespace
from aifs.meta.groups import ANY_SIZE
from aifs.meta.kv import Engine, ReadTransaction
from aifs.meta.records import Inode

_SLICE = 64  # files that are looked up in one go: about 0.3 ms
_PATH_MAX = 4095


async def first_wrong(
    engine: Engine, io: FileIO, ino: int, files: Sequence[tuple[bytes, int]]
) -> str:
    """Which of ``files``, (path below the directory ``ino``, bytes), is missing or has another
    size; ''.
    """
    for path, size, inode in await look_up(engine, io, ino, files):
        if inode is None:
            return f"{os.fsdecode(path)!r} is missing"
        if size != ANY_SIZE and inode.size != size:
            return f"{os.fsdecode(path)!r} has {inode.size} bytes, not {size}"
    return ""


async def look_up(
    engine: Engine, io: FileIO, ino: int, files: Sequence[tuple[bytes, int]]
) -> list[tuple[bytes, int, Inode | None]]:
    """``files`` with the inodes of those that are regular files, as they are now. Others run
    between slices."""
    found = []
    for start in range(0, len(files), _SLICE):
        for path, size, inode in await engine.view(_find_files, ino, files[start : start + _SLICE]):
            file = io.table.open.get(inode.ino) if inode is not None else None
            found.append((path, size, inode if file is None else io.inodes.attributes(file)))
        await trio.lowlevel.checkpoint()
    return found


def _find_files(
    tx: ReadTransaction, ino: int, files: Sequence[tuple[bytes, int]]
) -> list[tuple[bytes, int, Inode | None]]:
    return [(path, size, find_file(tx, ino, path)) for path, size in files]


def find_file(tx: ReadTransaction, ino: int, path: bytes) -> Inode | None:
    """The regular file at ``path`` below a directory, as it is on record."""
    try:
        for name in path.split(b"/"):
            inode = namespace.lookup(tx, ino, name)
            ino = inode.ino
    except (NotFound, NotADirectory):
        return None
    return inode if inode.is_file else None


def path_below(path: bytes) -> bytes:
    """The same path, if it leads below the directory that it starts from. Raises Invalid."""
    if (
        len(path) > _PATH_MAX
        or b"\0" in path
        or any(name in (b"", b".", b"..") for name in path.split(b"/"))
    ):
        raise Invalid(f"commit: {path!r} is not the path of a file below the directory")
    return path
