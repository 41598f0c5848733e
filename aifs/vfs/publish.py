"""The barrier before a rename: whatever becomes visible under a new name is durable first."""

import stat

from aifs.core.tasks import run_all
from aifs.meta import namespace
from aifs.meta.keys import ROOT_INO
from aifs.meta.kv import Engine, ReadTransaction
from aifs.meta.records import Dentry
from aifs.vfs.file_io import FileIO
from aifs.vfs.writeback import WriteBack

_DIRECTORY = stat.S_IFDIR >> 12


async def sync_below(engine: Engine, io: FileIO, writeback: WriteBack, dentry: Dentry) -> list[int]:
    """Sync every unsynced file that ``dentry`` names or that lies below it, and the journal.

    The cost is that of the unsynced bytes: files that are in order are not looked at. A file that has had several
    names counts as lying below every directory. Returns the inode numbers. Raises NoSpace, Unavailable.
    """
    top = dentry.ino
    if dentry.type != _DIRECTORY:
        file = io.open.get(top)
        if not (top in io.unsynced if file is None else file.dirty or file.unsaved):
            return []
        await writeback.sync_inode(top)
        return [top]
    unsynced = [ino for ino, file in io.open.items() if file.dirty or file.unsaved]
    unsynced += [ino for ino in io.unsynced if ino not in io.open]
    if not unsynced:
        return []
    below = await engine.view(_those_below, unsynced, top)
    await run_all(*(lambda ino=ino: writeback.sync_inode(ino) for ino in below))
    return below


def _those_below(tx: ReadTransaction, inos: list[int], top: int) -> list[int]:
    return [ino for ino in inos if is_below(tx, ino, top)]


def is_below(tx: ReadTransaction, ino: int, top: int) -> bool:
    """Whether ``ino`` is ``top`` or lies below it; a file that has had several names lies everywhere."""
    while ino != top:
        inode = None if ino == ROOT_INO else namespace.find_inode(tx, ino)
        if inode is None:
            return False
        ino = inode.parent
        if ino == namespace.SEVERAL:
            return True
    return True
