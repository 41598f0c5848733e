"""How many bytes lie below a directory."""

import trio

from aifs.meta.kv import Engine
from aifs.meta.listing import list_directory

_ENTRIES = 64  # that are read in one view


async def tree_size(engine: Engine, top: int) -> int:
    """The sizes of all files below, of one with several names for each of them. Others run between
    slices."""
    total, directories = 0, [top]
    while directories:
        directory, cookie = directories.pop(), 0
        while entries := await engine.view(list_directory, directory, cookie, _ENTRIES):
            for _, inode, cookie in entries:
                if inode.is_dir:
                    directories.append(inode.ino)
                total += inode.size
            await trio.lowlevel.checkpoint()
    return total
