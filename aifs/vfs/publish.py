"""The barrier before a rename: whatever becomes visible under a new name is durable first."""

from aifs.core.tasks import run_all
from aifs.meta import namespace
from aifs.meta.keys import ROOT_INO
from aifs.meta.kv import Engine, ReadTransaction
from aifs.vfs.file_io import FileIO
from aifs.vfs.writeback import WriteBack


async def sync_below(engine: Engine, io: FileIO, writeback: WriteBack, top: int) -> None:
    """Sync every unsynced file that is ``top`` or lies below it, and the journal.

    The cost is that of the unsynced bytes: files that are in order are not looked at. A file that has had several
    names counts as lying everywhere. Raises NoSpace, Unavailable.
    """
    unsynced = [ino for ino, file in io.open.items() if file.dirty or file.unsaved]
    unsynced += [ino for ino in io.unsynced if ino not in io.open]
    if unsynced:
        below = await engine.view(_those_below, unsynced, top)
        await run_all(*(lambda ino=ino: writeback.sync_inode(ino) for ino in below))


def _those_below(tx: ReadTransaction, inos: list[int], top: int) -> list[int]:
    return [ino for ino in inos if _is_below(tx, ino, top)]


def _is_below(tx: ReadTransaction, ino: int, top: int) -> bool:
    while ino != top:
        inode = None if ino == ROOT_INO else namespace.find_inode(tx, ino)
        if inode is None:
            return False
        ino = inode.parent
        if ino == namespace.SEVERAL:
            return True
    return True
