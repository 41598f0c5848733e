"""Striped files, told by their objects and labels alone; and burst copies, which hold what has not
been drained.
"""

from collections.abc import Collection, Iterable, Sequence
from math import lcm

from aifs.check.salvage.inventory import Part, Placed, Saved, place
from aifs.core.errors import FsError, Unavailable
from aifs.data.checking.checks import Part as Piece
from aifs.data.checking.checks import differ
from aifs.data.checking.digests import HASHED, digests_of
from aifs.data.checking.suspects import suspect_sets
from aifs.data.objects.object_label import Label, digest_of
from aifs.data.objects.protected import ProtectedObjects
from aifs.data.objects.striped import StripedObjects
from aifs.data.server import DataServer
from aifs.data.servers import Servers
from aifs.layout.interleaved import CHUNK_MAX, Extent
from aifs.layout.striped import Striped
from aifs.meta.records import Copy

_STEP = 4 << 20
_UNIT = 1 << 20  # of a file without a label, which has one object


class Incomplete(Exception):
    """Bytes of a file are not there, or nobody can tell which they are; why."""


def piece_together(servers: Servers, ino: int, oid: int, parts: list[Part]) -> Saved:
    """The file that has these objects. Raises Incomplete."""
    label = best_label(parts)
    if label is None:
        return _without_label(servers, ino, oid, parts)
    placed = place(parts, label.layout, servers)
    saved = Saved(
        ino,
        oid,
        label.size,
        label.mode,
        label.uid,
        label.gid,
        label.mtime_ns,
        label.path,
        placed.layout,
        root=label.digest,
    )
    if placed.layout.is_protected:
        _judge_protected(saved, placed)
    else:
        _judge_plain(servers, saved, placed)
    saved.blocks = sum(
        part.blocks for column, part in placed.parts.items() if column < placed.layout.width
    )
    return saved


def best_label(parts: Iterable[Part]) -> Label | None:
    """The one that was written last, as far as that can be told."""
    labels = [
        part.label for part in parts if part.label is not None and part.label.layout is not None
    ]
    return max(labels, key=lambda label: (label.mtime_ns, label.size, label.digest), default=None)


def _without_label(servers: Servers, ino: int, oid: int, parts: list[Part]) -> Saved:
    missing = any(server.absent for server in servers.capacity())
    if len(parts) > 1 or missing:
        raise Incomplete("its objects have no labels, so nobody knows in which order they belong")
    [part] = parts
    layout = Striped(_UNIT, (part.server,))
    note = "its object has no label: this is what it holds"
    return Saved(
        ino, oid, part.length, 0o100600, 0, 0, 0, b"", layout, blocks=part.blocks, note=note
    )


def _judge_protected(saved: Saved, placed: Placed) -> None:
    layout = placed.layout
    for column in range(len(layout.servers)):
        expected = layout.object_length(column, saved.size)
        part = placed.parts.get(column)
        if expected and (part is None or part.length < expected):
            saved.lost |= 1 << column
    if not layout.survives(saved.lost):
        count = saved.lost.bit_count()
        raise Incomplete(
            f"{count} of its {len(layout.servers)} columns are missing or short, which is too many"
        )


def _judge_plain(servers: Servers, saved: Saved, placed: Placed) -> None:
    """Such a file may have been changed in place since it was labelled: then its objects tell how
    long it is.
    """
    layout, parts = placed.layout, placed.parts
    told = max((layout.size_from(column, part.length) for column, part in parts.items()), default=0)
    lengths = {
        column: parts[column].length if column in parts else 0 for column in range(layout.width)
    }
    absent = {
        number
        for number in layout.servers
        if (found := servers.find(number)) is None or found.absent
    }
    exact = all(length == layout.object_length(column, told) for column, length in lengths.items())
    if told < saved.size and exact and not absent:
        saved.note = (
            f"its objects hold {told} bytes, and not {saved.size}: it was cut, or is damaged"
        )
        saved.size, saved.root = told, b""
        return
    for column, length in lengths.items():
        at_risk = layout.servers[column] in absent and layout.object_length(
            column, max(told, saved.size)
        )
        if length < layout.object_length(column, saved.size) or at_risk:
            what = "is short" if column in parts else "is missing"
            raise Incomplete(
                f"object {column} of {layout.width} (data server {layout.servers[column]}) {what}"
            )
    if told > saved.size:
        if saved.root:
            saved.note = "it has grown since it was labelled"
        saved.size, saved.root, saved.dirty = told, b"", not exact


# --- bytes ---


async def verify(servers: Servers, saved: Saved) -> None:
    """Compare the bytes of a striped file with the checksum in its label, if it has one; from then
    on it has ``digests``.

    Columns of a protected file without which they are right are ``lost``. Raises Incomplete if they
    cannot be read.
    """
    if not saved.root:
        return
    layout = saved.layout
    error = None
    for suspects in suspect_sets(layout, range(layout.width), saved.lost):
        lost = sum(1 << column for column in suspects)
        try:
            digests = await _read(servers, saved, lost)
        except Unavailable as raised:
            error = raised
            continue
        if digest_of(digests) == saved.root:
            saved.lost, saved.digests = lost, digests
            return
        error = None
    if error is not None:
        raise Incomplete(str(error))
    saved.note, saved.root = (
        "its bytes are not those that were labelled: it is damaged, or was changed since",
        b"",
    )


async def _read(servers: Servers, saved: Saved, lost: int) -> bytes:
    """The checksums of a file's MiBs."""
    layout, key = saved.layout, (saved.ino, saved.oid)
    if layout.is_protected:
        objects: ProtectedObjects | StripedObjects = ProtectedObjects(
            servers, layout, *key, lost=lost
        )
    else:
        objects = StripedObjects(servers, layout, *key)
    step = lcm(layout.row, HASHED) if layout.parity else _STEP
    present = [server.id for server in servers.capacity() if not server.absent]
    digests = []
    try:
        for offset in range(0, saved.size, step):
            part = memoryview(bytearray(min(step, saved.size - offset)))
            await objects.read_into(offset, part, saved.size)
            digests.append(await servers.run(servers.idlest(present), digests_of, part))
    finally:
        objects.close()
    return b"".join(digests)


# --- burst copies ---


async def undrained(
    servers: Servers, copies: dict[Copy, Part], drained: Collection[Saved], read: bool
) -> list[Saved]:
    """The burst copies that hold what lies nowhere else, as files; an ``ino`` of 0 is unknown.

    A copy that holds the bytes of a drained file becomes its cache; one that has its size and
    mtime, or is older, is left alone. ``read``: look at their bytes.
    """
    by_ino = {saved.ino: saved for saved in drained}
    by_size: dict[int, list[Saved]] = {}
    for saved in drained:
        by_size.setdefault(saved.size, []).append(saved)
    found: dict[int, Saved] = {}
    nameless = []
    for copy, part in copies.items():
        label = part.label
        if not part.length:
            continue  # made ahead, or of an empty file
        same = by_ino.get(label.ino) if label else None
        alike = by_size.get(part.length, []) if label is None else [same] if same else []
        cached = await _find_equal(servers, copy, part, alike) if read else None
        if cached is not None:
            cached.copy = cached.copy or copy
            continue
        if same is not None and same.mtime_ns >= part.mtime_ns:
            continue
        if label is None and any(saved.mtime_ns == part.mtime_ns for saved in alike):
            continue
        if label is None:
            where = b"/lost+found/copy-%x" % copy.id
            nameless.append(from_copy(Label(0, 0, None, mode=0o100600, path=where), copy, part))
        elif label.ino not in found or found[label.ino].mtime_ns < part.mtime_ns:
            found[label.ino] = from_copy(label, copy, part)
    return [*found.values(), *nameless]


def from_copy(label: Label, copy: Copy, part: Part) -> Saved:
    """The file of a burst copy."""
    return Saved(
        label.ino,
        0,
        part.length,
        label.mode,
        label.uid,
        label.gid,
        part.mtime_ns,
        label.path,
        blocks=part.blocks,
        copy=copy,
        dirty=True,
    )


async def _find_equal(servers: Servers, copy: Copy, part: Part, alike: list[Saved]) -> Saved | None:
    """One of these files that has the bytes of the copy, which are durable then; rather one without
    a copy.
    """
    known = [
        saved for saved in alike if saved.size == part.length and (saved.checksum or saved.extents)
    ]
    if not known:
        return None
    server = servers[copy.server]
    try:
        checksum = await servers.run(server, _checksum, server, copy.id, part.length)
        equal = [saved for saved in known if saved.checksum and saved.checksum == checksum]
        for saved in known:
            if saved.extents and await servers.run(server, _holds, server, copy.id, saved.extents):
                equal.append(saved)
    except FsError:
        return None
    return min(
        equal,
        key=lambda saved: (saved.copy is not None, saved.mtime_ns != part.mtime_ns),
        default=None,
    )


def _checksum(server: DataServer, copy_id: int, size: int) -> bytes:
    """Of a burst copy, which is synced, as of a file's checksums; b"" if it is missing. Blocks."""
    key = (0, copy_id)
    fd = server.open_object(key, create=False, write=False)
    if fd is None:
        return b""
    digests, buffer = [], memoryview(bytearray(min(_STEP, size)))
    try:
        for offset in range(0, size, _STEP):
            part = buffer[: size - offset]
            server.read(key, fd, part, offset)
            digests.append(digests_of(part))
        server.sync_object(key, fd)
    finally:
        server.close_object(fd)
    return digest_of(b"".join(digests))


def _holds(server: DataServer, copy_id: int, extents: Sequence[Extent]) -> bool:
    """Whether a burst copy has the bytes of these extents. Blocks."""
    key = (0, copy_id)
    fd = server.open_object(key, create=False, write=False)
    if fd is None:
        return False
    parts: list[Piece] = []
    start = 0
    for extent in extents:
        end = start + extent.length
        step = max(extent.length, 1) if extent.digest else CHUNK_MAX
        parts += [
            Piece(at, min(step, end - at), extent.digest or None) for at in range(start, end, step)
        ]
        start = end
    try:
        return not differ(server, key, fd, parts, memoryview(bytearray(CHUNK_MAX)))
    finally:
        server.close_object(fd)
