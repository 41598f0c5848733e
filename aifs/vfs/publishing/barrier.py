"""The barrier before a rename: whatever becomes visible under a new name is durable first."""

import stat
from collections import ChainMap
from collections.abc import MutableMapping

import trio

from aifs.files.file_io import FileIO
from aifs.files.writeback import WriteBack
from aifs.meta import namespace
from aifs.meta.keys import ROOT_INO
from aifs.meta.kv import Engine, ReadTransaction
from aifs.meta.records import Dentry

_DIRECTORY = stat.S_IFDIR >> 12
_SLICE = 256  # files that are looked at in one go: about a millisecond


async def sync_below(
    engine: Engine, io: FileIO, writeback: WriteBack, dentry: Dentry
) -> dict[int, object | None]:
    """Sync the bytes of every unsynced file that ``dentry`` names or that lies below it: see
    WriteBack.sync_bytes.

    The cost is that of the unsynced bytes: files that are in order are not looked at. A file that
    has had several names counts as lying below every directory. Raises NoSpace, Unavailable.
    """
    if dentry.type != _DIRECTORY:
        return await writeback.sync_bytes([dentry.ino])
    unsynced = [ino for ino in io.open if io.is_unsynced(ino)]
    unsynced += [ino for ino in io.unsynced if ino not in io.open]
    return await writeback.sync_bytes(await _those_below(engine, unsynced, dentry.ino))


async def _those_below(engine: Engine, inos: list[int], top: int) -> list[int]:
    """Others run between slices of it. What moves below ``top`` meanwhile has been synced by its
    own rename."""
    known: dict[int, bool] = {}
    found: list[int] = []
    for start in range(0, len(inos), _SLICE):
        below, new = await engine.view(_filter_below, inos[start : start + _SLICE], top, known)
        found += below
        known |= new
        await trio.lowlevel.checkpoint()
    return found


def _filter_below(
    tx: ReadTransaction, inos: list[int], top: int, known: dict[int, bool]
) -> tuple[list[int], dict[int, bool]]:
    """Those that are, and what was found out about directories besides ``known``."""
    new: dict[int, bool] = {}
    both = ChainMap(new, known)
    return [ino for ino in inos if is_below(tx, ino, top, both)], new


def is_below(
    tx: ReadTransaction, ino: int, top: int, known: MutableMapping[int, bool] | None = None
) -> bool:
    """Whether ``ino`` is ``top`` or lies below it; a file that has had several names lies
    everywhere.

    ``known``: what has been found out about directories, kept between calls.
    """
    if known is None:
        known = {}
    passed: list[int] = []
    while True:
        if ino == top or ino in known:
            answer = ino == top or known[ino]
            break
        inode = None if ino == ROOT_INO else namespace.find_inode(tx, ino)
        if inode is None or (
            inode.is_dir and not inode.nlink
        ):  # removed, perhaps with all that lies below
            answer = False
            break
        if inode.is_dir:
            passed.append(ino)
        ino = inode.parent
        if ino == namespace.SEVERAL:
            return True
    known.update((directory, answer) for directory in passed)
    return answer
