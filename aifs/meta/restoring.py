"""The trash (meta/trash.py) as transaction functions (see kv.py): find, restore, empty."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from aifs.core.errors import NotFound, Unavailable
from aifs.meta import dooming, keys, namespace, paths, trash
from aifs.meta.kv import ReadTransaction, Transaction, answers, grows
from aifs.meta.records import TRASHED, Inode, decode_dentry
from aifs.meta.trash import UNKNOWN, Entry, decode_entry, decode_turn

# --- finding --------------------------------------------------------------------------------------


def find_entry(tx: ReadTransaction, key: bytes) -> Entry | None:
    """The entry with this key, if it is there."""
    record = tx.get(key)
    return None if record is None else decode_entry(key, record)


def entry_of(tx: ReadTransaction, ino: int) -> Entry:
    """That of an inode. Raises NotFound."""
    inode = namespace.find_inode(tx, ino)
    entry = None if inode is None else find_entry(tx, keys.trashed(inode.parent, ino))
    if inode is None or entry is None or not inode.is_trashed:
        raise NotFound(f"{ino} is not in the trash")
    return entry


def look_up(
    tx: ReadTransaction,
    directory: int,
    path: Sequence[bytes],
    is_wanted: Callable[[Entry], bool],
) -> Entry:
    """The last wanted entry with this path below a directory, by way of directories there or in the
    trash. Raises NotFound. Looks through all entries on the way."""
    for name in path[:-1]:
        record = tx.get(keys.dentry(directory, name))
        found = _newest(tx, directory, name) if record is None else decode_dentry(record)
        directory = found.ino
    return _newest(tx, directory, path[-1], is_wanted)


def _newest(
    tx: ReadTransaction,
    directory: int,
    name: bytes,
    is_wanted: Callable[[Entry], bool] = lambda entry: True,
) -> Entry:
    same = (
        entry for entry in removed_from(tx, directory) if entry.name == name and is_wanted(entry)
    )
    newest = max(same, key=lambda entry: entry.since_ns, default=None)
    if newest is None:
        raise NotFound()
    return newest


def removed_from(
    tx: ReadTransaction, directory: int, after: int = 0, limit: int = 0
) -> list[Entry]:
    """Entries of a directory, up to ``limit`` (0: all), by inode number behind ``after``, without
    damaged ones, which fsck names."""
    found = []
    for key, record in tx.range(*keys.trashed_after(directory, after), limit):
        with suppress(Unavailable):
            found.append(decode_entry(key, record))
    return found


class Turns(NamedTuple):
    """Entries in the order in which they go."""

    entries: list[tuple[Entry, Inode]]
    """With their inodes."""
    end: bytes
    """Key of the turn behind them; b"" if there are no more."""


def read_turns(tx: ReadTransaction, start: bytes, end: bytes, limit: int) -> Turns:
    """Those of up to ``limit`` turns from ``start`` on. Damaged ones are fsck's to name."""
    found, last, count = [], b"", 0
    for last, record in tx.range(start, end, limit):
        count += 1
        with suppress(Unavailable):
            entry = find_entry(tx, decode_turn(last, record))
            inode = entry and namespace.find_inode(tx, entry.ino)
            if entry and inode:
                found.append((entry, inode))
    return Turns(found, last + b"\0" if count == limit else b"")


def way_up(tx: ReadTransaction, directory: int) -> list[tuple[Inode, bytes]]:
    """Directories from one up to below the root, also trashed ones, with names (b"" if unknown).
    Ends early where one is gone for good."""
    found = []
    while directory != keys.ROOT_INO:
        inode = namespace.find_inode(tx, directory)
        if inode is None or not inode.is_dir or not (inode.nlink and inode.parent):
            break
        if inode.is_trashed:
            entry = find_entry(tx, keys.trashed(inode.parent, directory))
            name = b"" if entry is None else entry.name
        else:
            name = paths.find_name(tx, inode.parent, directory) or b""
        found.append((inode, name))
        directory = inode.parent
    return found


def home_of(tx: ReadTransaction, entry: Entry) -> Inode:
    """The directory for an entry's return: its own, or the nearest left above. Raises NotFound."""
    way = way_up(tx, entry.parent)
    top = way[-1][0] if way else None
    if (entry.parent if top is None else top.parent) != keys.ROOT_INO:
        raise NotFound("the directory that it lay in is gone for good: say where to put it (--to)")
    home = namespace.get_inode(tx, keys.ROOT_INO)
    for inode, _ in reversed(way):
        if inode.is_trashed:
            break
        home = inode
    return home


# --- giving back names ----------------------------------------------------------------------------


@grows
def restore(
    tx: Transaction, entry: Entry, parent: int, name: bytes, cookie: int, now: int
) -> Inode:
    """Give an entry of the trash a name; returns the inode. Raises NotFound (left the trash, or the
    directory is gone), Exists, NotADirectory, NameTooLong, NotPermitted, CrossDevice (a project),
    Invalid (below itself)."""
    inode, _ = _take_out(tx, entry)
    directory = namespace.require_free(tx, parent, name)
    namespace.require_same_project(tx, directory, inode)
    if inode.is_dir:
        namespace.require_not_below(tx, inode.ino, parent)
    inode.parent, inode.ctime_ns = parent, now
    namespace.put_inode(tx, inode)
    namespace.put_name(tx, parent, name, inode, cookie)
    namespace.touch(tx, directory, now, links=1 if inode.is_dir else 0)
    return inode


@grows
def gather(tx: Transaction, top: Entry, entries: Iterable[Entry], now: int) -> list[Inode]:
    """Put entries of the trashed directory ``top`` back into it, to share its fate; returns inodes
    with names again. Entries that left the trash, or whose names are taken, stay. Raises NotFound
    if ``top`` has left the trash."""
    directory, whole = _take_out(tx, top)
    gathered, sizes = [], [whole.size]
    for entry in entries:
        if tx.get(keys.dentry(top.ino, entry.name)) is not None:
            continue
        with suppress(NotFound):
            inode, taken = _take_out(tx, entry)
            namespace.put_inode(tx, inode)
            # Its number is the place of its first name: nobody else's, there or anywhere.
            namespace.put_name(tx, top.ino, entry.name, inode, inode.ino)
            directory.nlink += inode.is_dir
            gathered.append(inode)
            sizes.append(taken.size)
    directory.flags |= TRASHED
    directory.mtime_ns = directory.ctime_ns = now
    namespace.put_inode(tx, directory)
    trash.add(tx, whole._replace(size=UNKNOWN if UNKNOWN in sizes else sum(sizes)))
    return gathered


def _take_out(tx: Transaction, entry: Entry) -> tuple[Inode, Entry]:
    """Take an entry's inode out of the trash; the caller records it. Returns the entry, too. Raises
    NotFound, also if it was removed anew, with the same key."""
    now_there, inode = find_entry(tx, entry.key), namespace.find_inode(tx, entry.ino)
    is_same = now_there is not None and now_there.since_ns == entry.since_ns
    if now_there is None or not is_same or inode is None or not inode.is_trashed:
        raise NotFound("it is not in the trash any more")
    trash.drop(tx, now_there)
    inode.flags &= ~TRASHED
    return inode, now_there


# --- emptying -------------------------------------------------------------------------------------


class Emptied(NamedTuple):
    """What has gone for good."""

    files: list[Inode]
    """They are orphans now."""
    directories: list[Inode]
    """They are doomed now, with all that lies below."""
    size: int
    """What all of it takes, as far as is known."""


@answers
def empty(tx: Transaction, entries: Iterable[Entry], now: int) -> Emptied:
    """Have these entries go for good. Those that are not in the trash any more count as gone."""
    done, size = Emptied([], [], 0), 0
    for entry in entries:
        with suppress(NotFound):
            inode, taken = _take_out(tx, entry)
            size += max(taken.size, 0)
            if inode.is_dir:
                done.directories.append(dooming.put_doomed(tx, inode, now, entry.uid))
            else:
                done.files.append(namespace.drop_link(tx, inode, now))
    return done._replace(size=size)


def put_size(tx: Transaction, entry: Entry, size: int) -> None:
    """All that lies below an entry takes so much, unless it has changed meanwhile."""
    if find_entry(tx, entry.key) == entry:
        trash.drop(tx, entry)
        trash.add(tx, entry._replace(size=size))
