"""Columns that are missing, wrong, or on the move, as transaction functions (see kv.py).

``q oid``, *degraded*: these columns must not be read, a rebuild is due; ``m oid server``, *stray*:
an object may lie there unnamed by its layout (keys.py). A column moves in one transaction,
``flip``; the steps around it: ``upkeep/moves``.

An *object set* is (ino, oid): the objects of a file, or with inode number 0 those of a container.
``ino`` is in the objects' names: several files may share them (meta/shared.py).
"""

from collections.abc import Callable, Iterable, Set
from contextlib import suppress
from typing import NamedTuple

from aifs.core.errors import Unavailable
from aifs.layout.striped import Striped
from aifs.meta import chunks, keys, namespace, shared
from aifs.meta.degraded import drop_degraded, find_unread, put_unread
from aifs.meta.kv import ReadTransaction, Transaction, grows
from aifs.meta.records import Degraded, Inode, decode_degraded, decode_inode
from aifs.meta.servers import mark_unprotected
from aifs.meta.slices import read_slice

_INO_BYTES = 8


class SetRecord(NamedTuple):
    """The inode number that names objects (0: a container's), their id, layout, and bytes."""

    ino: int
    oid: int
    layout: Striped
    size: int


def find_objects(tx: ReadTransaction, ino: int, oid: int) -> SetRecord | None:
    """The record of these objects, or None. Raises Unavailable for a damaged record."""
    if ino == 0:
        container = chunks.find_container(tx, oid)
        return None if container is None else SetRecord(0, oid, container.layout, container.length)
    inode = _find_user(tx, ino, oid)
    if inode is None or inode.objects is None:
        return None
    return SetRecord(inode.named_by, oid, inode.objects, inode.size)


def _find_user(tx: ReadTransaction, ino: int, oid: int) -> Inode | None:
    inode = namespace.find_inode(tx, ino)
    if inode is not None and inode.oid == oid and inode.objects is not None:
        return inode
    shared_by = shared.users(tx, oid, 1)
    return namespace.find_inode(tx, shared_by[0]) if shared_by else None


def find_user(tx: ReadTransaction, ino: int, oid: int) -> int:
    """A file with these objects: the one that names them, unless only others have them."""
    inode = _find_user(tx, ino, oid)
    return ino if inode is None else inode.ino


def is_changing(tx: ReadTransaction, ino: int, oid: int) -> bool:
    """Whether the objects may be changed in place: by a dirty mark, or in an open container."""
    if ino == 0:
        return tx.get(keys.open_container(oid)) is not None
    return tx.get(keys.dirty(ino)) is not None and not shared.users(tx, oid, 1)


# --- degraded -------------------------------------------------------------------------------------


@grows
def put_damaged(tx: Transaction, oid: int, ino: int, mask: int) -> int:
    """Record wrong columns (a mask). Returns all that must not be read; 0, with nothing recorded,
    if it is no news, or old, or too few columns would be left."""
    objects, known = find_objects(tx, ino, oid), find_unread(tx, oid)
    if objects is None or not mask & ~known or mask >> len(objects.layout.servers):
        return 0
    if not objects.layout.survives(mask | known):
        return 0
    tx.add(keys.COUNTER_REPAIRS, 1)
    put_unread(tx, oid, objects.ino, mask)
    return mask | known


@grows
def begin_repair(tx: Transaction, oid: int, ino: int) -> bool:
    """Before wrong bytes are repaired in place; False: the objects are nobody's. Until
    ``note_repair`` the record says that something is due, so if this host dies the rebuild calls
    that."""
    objects = find_objects(tx, ino, oid)
    if objects is None:
        return False
    tx.add(keys.COUNTER_REPAIRS, 1)
    put_unread(tx, oid, objects.ino, 0)
    return True


# --- strays ---------------------------------------------------------------------------------------


class Stray(NamedTuple):
    """An object that may lie on a server that its layout does not name."""

    ino: int
    oid: int
    server: int


@grows
def put_stray(tx: Transaction, stray: Stray) -> bool:
    """Record an object on a server unnamed by the layout, before it is made; False if one is
    recorded."""
    key = keys.stray(stray.oid, stray.server)
    if tx.get(key) is not None:
        return False
    tx.put(key, stray.ino.to_bytes(_INO_BYTES, "little"))
    return True


def put_left_behind(tx: Transaction, stray: Stray) -> bool:
    """Whether an object perhaps made where the layout named the server is a stray, now on record:
    the objects are not the file's any more, or that one lies elsewhere."""
    objects = find_objects(tx, stray.ino, stray.oid)
    if objects is not None and stray.server in objects.layout.servers:
        return False
    tx.put(keys.stray(stray.oid, stray.server), stray.ino.to_bytes(_INO_BYTES, "little"))
    return True


def forget_strays(tx: Transaction, strays: Iterable[Stray]) -> None:
    """They have been deleted, durably, or their server has gone for good."""
    for stray in strays:
        tx.delete(keys.stray(stray.oid, stray.server))


def decode_stray(key: bytes, value: bytes) -> Stray:
    """Raises Unavailable for a damaged record."""
    if len(value) != _INO_BYTES:
        raise Unavailable("the record of a stray object is damaged")
    return Stray(int.from_bytes(value, "little"), *keys.stray_parts(key))


def load_strays(tx: ReadTransaction) -> list[Stray]:
    """All of them. Those that are damaged are left out: fsck names them."""
    found = tx.range(*keys.all_of(b"m"))
    return [decode_stray(key, value) for key, value in found if len(value) == _INO_BYTES]


# --- the flip -------------------------------------------------------------------------------------


def flip(
    tx: Transaction, before: SetRecord, column: int, server: int, unread: int | None = None
) -> SetRecord | None:
    """Have ``column``, whole and durable on ``server``, lie and be read there from now on; an
    object on another old server becomes a stray.

    None, with nothing changed, if the objects are not as ``before``, may be changed now, or are
    degraded otherwise than by ``unread``: the column may be made of one known to be wrong now.
    """
    ino, oid, layout, _ = before
    if find_objects(tx, ino, oid) != before or is_changing(tx, ino, oid):
        return None
    if unread is not None and find_unread(tx, oid) != unread:
        return None
    old = layout.servers[column]
    after = before._replace(layout=layout.moved(column, server))
    if server != old:
        if not layout.is_protected:
            mark_unprotected(tx, (server,))
        tx.delete(keys.stray(oid, server))
        tx.put(keys.stray(oid, old), ino.to_bytes(_INO_BYTES, "little"))
        _put_layout(tx, after)
    left = find_unread(tx, oid) & ~(1 << column)
    if left:
        tx.put(keys.degraded(oid), Degraded(ino, left).encode())
    else:
        drop_degraded(tx, oid)
    return after


def _put_layout(tx: Transaction, objects: SetRecord) -> None:
    if objects.ino:
        for ino in shared.users(tx, objects.oid) or [objects.ino]:
            inode = namespace.get_inode(tx, ino)
            namespace.put_inode(tx, inode.but(layout=objects.layout))
    else:
        record = chunks.find_container(tx, objects.oid)
        assert record is not None
        tx.put(keys.container(objects.oid), record._replace(layout=objects.layout).encode())


# --- what is due ----------------------------------------------------------------------------------


class Due(NamedTuple):
    """Columns to be made anew or to move, and their bytes. None: the file is to be protected."""

    ino: int
    oid: int
    columns: tuple[tuple[int, int], ...]
    """The server and the length of each."""
    length: int


def due_columns(layout: Striped, unread: int, staying: Set[int]) -> tuple[int, ...]:
    """Columns that must not be read, then those on servers where none may stay."""
    numbers = range(len(layout.servers))
    wrong = tuple(number for number in numbers if unread >> number & 1)
    return wrong + tuple(
        n for n in numbers if layout.servers[n] not in staying and not unread >> n & 1
    )


def scan_degraded(
    tx: ReadTransaction, start: bytes, end: bytes, limit: int
) -> tuple[list[Due], bytes]:
    """Work due in a slice of the ``q`` records, and where the next slice starts (empty: nowhere).
    Void records come with ``length`` 0 and no columns."""

    def judge(key: bytes, value: bytes) -> Due:
        oid, (ino, unread) = keys.number(key), decode_degraded(value)
        objects = find_objects(tx, ino, oid)
        if objects is None:
            return Due(ino, oid, (), 0)
        return _due(objects, due_columns(objects.layout, unread, frozenset(objects.layout.servers)))

    return _scan(tx, start, end, limit, judge)


def scan_files(
    tx: ReadTransaction,
    start: bytes,
    end: bytes,
    limit: int,
    staying: Set[int],
    waiting: Set[int] = frozenset(),
) -> tuple[list[Due], bytes]:
    """``scan_degraded`` for inodes: striped files with columns where none may stay. Unprotected
    ones wait for the servers ``waiting``."""
    plain = staying | waiting

    def judge(key: bytes, value: bytes) -> Due | None:
        inode = decode_inode(keys.number(key), value)
        layout = inode.objects
        if layout is None:
            return None
        allowed = staying if layout.is_protected else plain
        if allowed >= set(layout.servers):
            return None
        objects = SetRecord(inode.named_by, inode.oid, layout, inode.size)
        return _due(objects, due_columns(layout, 0, allowed))

    return _scan(tx, start, end, limit, judge)


def scan_containers(
    tx: ReadTransaction,
    start: bytes,
    end: bytes,
    limit: int,
    staying: Set[int],
    waiting: Set[int] = frozenset(),
) -> tuple[list[Due], bytes]:
    """The same of a slice of the table of containers."""
    plain = staying | waiting

    def judge(key: bytes, value: bytes) -> Due | None:
        record = chunks.decode_container(value)
        allowed = staying if record.layout.is_protected else plain
        if allowed >= set(record.layout.servers):
            return None
        objects = SetRecord(0, keys.number(key), record.layout, record.length)
        return _due(objects, due_columns(record.layout, 0, allowed))

    return _scan(tx, start, end, limit, judge)


def _scan(
    tx: ReadTransaction,
    start: bytes,
    end: bytes,
    limit: int,
    judge: Callable[[bytes, bytes], Due | None],
) -> tuple[list[Due], bytes]:
    found = []
    records, following = read_slice(tx, start, end, limit)
    for key, value in records:
        with suppress(Unavailable):  # damaged: fsck names it
            due = judge(key, value)
            if due is not None:
                found.append(due)
    return found, following


def _due(objects: SetRecord, columns: tuple[int, ...]) -> Due:
    layout, size = objects.layout, objects.size
    found = tuple((layout.servers[c], layout.object_length(c, size)) for c in columns)
    length = sum(length for _, length in found) if found else size
    return Due(objects.ino, objects.oid, found, length)
