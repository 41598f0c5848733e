"""Files listed by a rank's commit or a manifest: presence, sizes, equal sizes in a group; and of a
manifest, for retention, its step, and whether all is there. A manifest (core/manifest.py) damaged
here is *damaged* for client/checkpoints/catalog.py, too."""

import json
import os
from collections.abc import Sequence
from typing import NamedTuple

import trio

from aifs.core import manifest
from aifs.core.errors import Invalid, NotADirectory, NotFound
from aifs.files.file_io import FileIO
from aifs.meta import namespace, paths
from aifs.meta.groups import ANY_SIZE
from aifs.meta.kv import Engine, ReadTransaction
from aifs.meta.records import Inode
from aifs.saves.group import DirectoryGroup, File

_SLICE = 64  # files that are looked up in one go: about 0.3 ms
_PATH_MAX = 4095
_DESCRIBED_AT_ONCE = 256  # files of a group
_RESERVED = (".aifs-", "..aifs-")  # names of what ranks tell each other in a checkpoint's directory
_MANIFEST_MAX = 4 << 20  # about 30,000 files

MANIFEST = manifest.NAME.encode()
NO_PART = tuple(each.encode() for each in manifest.RESERVED)
"""What names begin with that are no part of a checkpoint."""


async def first_wrong(
    engine: Engine, io: FileIO, ino: int, files: Sequence[tuple[bytes, int]]
) -> str:
    """The first of ``files``, (path below ``ino``, bytes), missing or of another size; ''."""
    for path, size, inode in await look_up(engine, io, ino, files):
        if inode is None:
            return f"{os.fsdecode(path)!r} is missing"
        if size != ANY_SIZE and inode.size != size:
            return f"{os.fsdecode(path)!r} has {inode.size} bytes, not {size}"
    return ""


async def look_up(
    engine: Engine, io: FileIO, ino: int, files: Sequence[tuple[bytes, int]]
) -> list[tuple[bytes, int, Inode | None]]:
    """``files`` with inodes of regular files, as they are now. Other tasks run between slices."""
    found = []
    for start in range(0, len(files), _SLICE):
        for path, size, inode in await engine.view(_find_files, ino, files[start : start + _SLICE]):
            found.append((path, size, inode and io.inodes.current(inode)))
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


async def find_unequal(engine: Engine, group: DirectoryGroup) -> str:
    """Which file has another size than the first one, in words; '' if none has."""
    while group.differs:
        files, closes = group.closed_now, group.closes
        whose, size = next(((f"rank {rank}", size) for rank, size in group.sizes.items()), ("", 0))
        first: File | None = None  # whose size counts, and may change meanwhile
        for start in range(0, len(files), _DESCRIBED_AT_ONCE):
            some = files[start : start + _DESCRIBED_AT_ONCE]
            for file, path in await engine.view(paths_of, some):
                if path.rpartition("/")[2].startswith(_RESERVED):
                    continue
                if not whose:
                    whose, first = path, file
                size = size if first is None else first.size
                if file.size != size:
                    return f"{path} has {file.size} bytes, not the {size} of {whose}"
            await trio.lowlevel.checkpoint()
        if group.closes == closes:
            break
    return ""


def paths_of(tx: ReadTransaction, files: Sequence[File]) -> list[tuple[File, str]]:
    return [
        (file, paths.describe(tx, file.ino).encode(errors="replace").decode()) for file in files
    ]


class Listed(NamedTuple):
    """``complete``: it lists files, and every one is there with its size."""

    step: int | None
    complete: bool


async def read_manifest(engine: Engine, io: FileIO, directory: int) -> Listed | None:
    """None without a manifest, or for a large one. Other tasks run meanwhile. Raises
    Unavailable."""
    try:
        inode = await engine.view(namespace.lookup, directory, MANIFEST)
        if not inode.is_file:
            return Listed(None, False)
        if inode.size > _MANIFEST_MAX:
            return None
        data = await io.read_whole(inode.ino)
    except (NotFound, NotADirectory):
        return None
    try:
        step, files = await io.waited_for.call(_parse, data)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, Invalid):
        return Listed(None, False)
    return Listed(step, bool(files) and not await first_wrong(engine, io, directory, files))


def _parse(data: bytes) -> tuple[int | None, list[tuple[bytes, int]]]:
    value = json.loads(data)
    step = value["step"]
    if step is not None and type(step) is not int:
        raise ValueError("the step is no number")
    files = [(path_below(os.fsencode(path)), size) for path, (size, _) in value["files"].items()]
    if not all(type(size) is int for _, size in files):
        raise ValueError("a size is none")
    return step, files
