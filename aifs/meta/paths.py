"""Names for people: the path of an inode, found from below, as far as that is cheap."""

from collections import ChainMap
from collections.abc import MutableMapping

import trio

from aifs.core.errors import Unavailable
from aifs.meta import keys, namespace
from aifs.meta.keys import ROOT_INO
from aifs.meta.kv import Engine, ReadTransaction
from aifs.meta.records import decode_entry

_LISTED_MAX = (
    4096  # entries of a directory that are looked through for a name that is not the inode's first
)


def find_path(tx: ReadTransaction, ino: int) -> bytes | None:
    """A path from the root, as b"/a/b"; None for a file with several names or none, a name to be
    sought in a large directory, or a damaged record."""
    parts: list[bytes] = []
    passed = set[int]()
    try:
        while ino != keys.ROOT_INO:
            if ino in passed:
                return None  # directories that lie in each other
            passed.add(ino)
            inode = namespace.find_inode(tx, ino)
            if inode is None or not inode.parent:
                return None
            name = find_name(tx, inode.parent, ino)
            if name is None:
                return None
            parts.append(name)
            ino = inode.parent
    except Unavailable:
        return None
    return b"/" + b"/".join(reversed(parts))


def describe(tx: ReadTransaction, ino: int) -> str:
    """The path as text (surrogates for bytes that are none), or which inode it is."""
    path = find_path(tx, ino)
    return f"inode {ino}" if path is None else path.decode("utf-8", "surrogateescape")


def find_name(tx: ReadTransaction, parent: int, ino: int) -> bytes | None:
    """The name of an inode in this directory, which is its ``parent``; None as above."""
    first = tx.get(keys.entry(parent, ino))  # the first name of an inode has its number as cookie
    if first is not None and decode_entry(first)[0] == ino:
        return decode_entry(first)[2]
    for _, value in tx.range(*keys.entries_after(parent, 0), limit=_LISTED_MAX):
        child, _, name = decode_entry(value)
        if child == ino:
            return name
    return None


SLICE = 256
"""Files that are looked at in one transaction: about a millisecond."""


async def those_below(engine: Engine, inos: list[int], top: int) -> list[int]:
    """Those of ``inos`` that are ``top`` or below it. Other tasks run between slices; a file that
    moves below it meanwhile is synced by its rename."""
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
    """Whether ``ino`` is ``top`` or below it; files that have had several names are everywhere.
    ``known``: results for directories, kept between calls."""
    if known is None:
        known = {}
    passed: list[int] = []
    while True:
        if ino == top or ino in known:
            answer = ino == top or known[ino]
            break
        inode = None if ino == ROOT_INO else namespace.find_inode(tx, ino)
        if inode is None or (inode.is_dir and not inode.nlink):
            # Removed, perhaps with all that lies below.
            answer = False
            break
        if inode.is_dir:
            passed.append(ino)
        ino = inode.parent
        if ino == namespace.SEVERAL:
            return True
    known.update((directory, answer) for directory in passed)
    return answer
