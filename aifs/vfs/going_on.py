"""Going on with the mount of a daemon that has died: programs have their files open still, and the
kernel knows inodes that have no name any more (docs/design/outlive.md).
"""

import os

from aifs.core.errors import FsError
from aifs.core.log import logger
from aifs.files.open_inode import OpenInode
from aifs.meta import namespace
from aifs.vfs.filesystem import Filesystem
from aifs.vfs.recovery import StillOpen

_log = logger(__name__)


async def go_on(fs: Filesystem, still: StillOpen) -> None:
    """Bring into core what programs have open, before any request is read and any background work
    begins. A file that cannot be brought there is logged, and its users get EBADF.
    """
    kept, handles = fs.kernel.kept, fs.handles
    handles.take_over(kept.backings)
    writing: dict[int, OpenInode] = {}
    used = set[int]()
    for one in list(kept.handles):
        try:
            file = await fs.io.inodes.acquire(one.ino)
        except FsError as error:
            _log.warning("inode %d, which programs have open, is lost to them: %s", one.ino, error)
            kept.set_opens(one.handle, 0)
            continue
        handles.take_over_handle(file, one)
        used.add(one.backing)
        if one.flags & os.O_ACCMODE != os.O_RDONLY:
            writing[one.ino] = file
    remote = [file for file in writing.values() if file.home]
    for file in writing.values():
        if not file.home:
            await _write_on(fs, file)
    for backing in kept.backings.keys() - used:
        handles.give_back(backing)
    fs.names.keep(still.orphans)
    table, gone = fs.io.table, set(still.orphans)
    for ino in still.dirty:
        if ino not in table.open and ino not in gone:
            await _close_again(fs, ino)
    fs.io.inodes.wake()
    await fs.store.engine.tell_again()
    await fs.home.go_on()
    for file in remote:  # now, as other hosts may do the same, and wait for this one
        await _write_on(fs, file)
        file.unsynced_there = object()
    await fs.locks.restate()


def set_again(fs: Filesystem) -> None:
    """What programs have set until the mount ends. The kernel is there; no request is read yet."""
    fs.settings.set_again()
    fs.files.set_again()
    fs.starts.go_on()


async def _write_on(fs: Filesystem, file: OpenInode) -> None:
    """Programs have the file open for writing."""
    try:
        await fs.io.begin_writing(file)
    except FsError as error:
        _log.warning("inode %d cannot be written on: %s", file.inode.ino, error)
        return
    file.opening -= 1
    fs.ranks.closing.opened(file.inode.ino)


async def _close_again(fs: Filesystem, ino: int) -> None:
    """Programs had closed the file, and it has its dirty mark: they may have it mapped."""
    inode = await fs.store.engine.view(namespace.find_inode, ino)
    table = fs.io.table
    table.unsynced[ino] = None
    table.mapped.add(ino)
    objects = None if inode is None or inode.in_burst else inode.objects
    if objects is not None and len(objects.servers) == 1:
        fs.io.capacity.perhaps_mapped.setdefault(ino, 0)
