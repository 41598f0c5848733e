"""Which inodes lie below a directory, found from each of them upwards."""

from collections import ChainMap
from collections.abc import MutableMapping

import trio

from aifs.meta import namespace
from aifs.meta.keys import ROOT_INO
from aifs.meta.kv import Engine, ReadTransaction

SLICE = 256
"""Files that are looked at in one transaction: about a millisecond."""


async def those_below(engine: Engine, inos: list[int], top: int) -> list[int]:
    """Those of ``inos`` that are ``top`` or lie below it. Other tasks run between slices; a file
    that moves below ``top`` meanwhile has been synced by its own rename."""
    known: dict[int, bool] = {}
    found: list[int] = []
    for start in range(0, len(inos), SLICE):
        below, new = await engine.view(filter_below, inos[start : start + SLICE], top, known)
        found += below
        known |= new
        await trio.lowlevel.checkpoint()
    return found


def filter_below(
    tx: ReadTransaction, inos: list[int], top: int, known: dict[int, bool]
) -> tuple[list[int], dict[int, bool]]:
    """Those that are ``top`` or lie below it, and the answers for directories not in ``known``."""
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
