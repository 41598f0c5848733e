"""Whether clean burst copies of files have the bytes of which the data servers have the checksums.

The checksums are looked up here, for some MiB of a file at a time; the bytes are read and compared
wherever there is room for it (see movers), with no other knowledge.
"""

from collections.abc import Awaitable, Callable, Sequence
from enum import Enum, auto
from typing import NamedTuple

from aifs.burst.making import MakingTools, never
from aifs.burst.movers import Movers
from aifs.core import files
from aifs.core.errors import FsError
from aifs.data.checking.checks import CheckedPart, differ
from aifs.data.checking.digests import DIGEST_BYTES, HASHED
from aifs.data.server import DataServer
from aifs.meta import chunks, forms
from aifs.meta.kv import Engine, ReadTransaction
from aifs.meta.records import Copy, Inode

COPIES_PIECE = 64 << 20
"""Bytes of copies that are compared together, at most."""

LISTED = 4 << 20
"""Bytes of a file whose checksums are looked up in one go."""

_ALIGNED = 256 << 10  # memory is taken in multiples of this


class Judgement(Enum):
    """On a clean burst copy: its bytes have the checksums; they do not; there are no checksums of
    all of them, but it is as long as the file; it cannot be read now."""

    RIGHT = auto()
    WRONG = auto()
    UNTOLD = auto()
    UNREADABLE = auto()


class CopyRange(NamedTuple):
    """A part of a clean burst copy, to be compared."""

    place: Copy
    size: int
    """Of the whole file."""
    parts: Sequence[CheckedPart]


async def compare(
    copies: Sequence[CopyRange], tools: MakingTools, cancelled: Callable[[], bool] = never
) -> Sequence[Judgement] | None:
    """Whether each copy has its file's length, and bytes with these checksums; UNTOLD is never
    returned. None if ``cancelled`` has become true meanwhile."""
    found = []
    for asked in copies:
        if cancelled():
            return None
        device = tools.servers.find(asked.place.server)
        if device is None:
            found.append(Judgement.UNREADABLE)
            continue
        length = max((part.length for part in asked.parts), default=0)
        memory = await tools.buffers.take(max(-(-length // _ALIGNED), 1) * _ALIGNED)
        try:
            found.append(await tools.servers.run(device, _compare, device, asked, memory))
        except FsError:
            found.append(Judgement.UNREADABLE)  # which says nothing of its bytes
    return found


def _compare(device: DataServer, asked: CopyRange, memory: memoryview) -> Judgement:
    """Blocks. Raises FsError where the copy cannot be opened."""
    key = 0, asked.place.id
    fd = device.open_object(key, False, False)
    if fd is None:
        return Judgement.WRONG
    try:
        if device.stat(key, fd).length != asked.size:
            return Judgement.WRONG
        is_wrong = differ(device, key, fd, asked.parts, memory)
        return Judgement.WRONG if is_wrong else Judgement.RIGHT
    finally:
        files.close_file(fd)


async def judge_copy(
    engine: Engine,
    movers: Movers,
    inode: Inode,
    throttle: Callable[[int], Awaitable[None]] | None = None,
    piece: int = COPIES_PIECE,
) -> Judgement:
    """Compare the clean burst copy of a file with the file's checksums. A missing one is wrong.
    ``piece``: how many bytes together; ``throttle`` is awaited with those of each piece."""
    assert inode.copy is not None
    at, is_told = 0, True
    while is_told:
        parts, start = list[CheckedPart](), at
        while at < min(start + piece, inode.size) and is_told:
            try:
                listed = await engine.view(find_parts, inode, at)
            except FsError:
                listed = ()  # fsck names the damaged list, and the copy may be all that is whole
            is_told = bool(listed)
            parts += listed
            # A chunk may reach beyond what was looked up.
            at = listed[-1].start + listed[-1].length if listed else at
        answers = await movers.carry_out(compare, [CopyRange(inode.copy, inode.size, parts)])
        assert answers is not None  # nothing cancels it
        if answers[0] is not Judgement.RIGHT:
            return answers[0]
        if throttle is not None and at > start:
            await throttle(at - start)
        if at >= inode.size:
            return Judgement.RIGHT
    return Judgement.UNTOLD


# --- transaction functions ------------------------------------------------------------------------


def find_parts(tx: ReadTransaction, inode: Inode, start: int) -> Sequence[CheckedPart]:
    """The checksums of a file for some MiB from ``start`` on; none if nobody has them."""
    end = min(start + LISTED, inode.size)
    if inode.chunks is not None:
        return _extents(tx, inode, inode.chunks.chunk, start, end)
    number = start // HASHED
    first, digests = forms.get_checksums(tx, inode.oid, number)
    # The record has all of the piece: its length is a multiple of that.
    digests = digests[(number - first) * DIGEST_BYTES :]
    return [
        CheckedPart(offset, min(HASHED, inode.size - offset), digests[place : place + DIGEST_BYTES])
        for offset, place in zip(
            range(start, end, HASHED), range(0, len(digests), DIGEST_BYTES), strict=False
        )
    ]


def _extents(
    tx: ReadTransaction, inode: Inode, chunk: int, start: int, end: int
) -> Sequence[CheckedPart]:
    """Of the chunks that begin in this range, and of the zeros in it."""
    parts: list[CheckedPart] = []
    at = start
    while at < end:
        offset, found = chunks.get_extents(tx, inode.oid, chunk, at)
        for length, place, _ in found:
            at = offset + length
            if place is not None and length and start <= offset < end:
                parts.append(CheckedPart(offset, length, place.digest))
            elif place is None and (first := max(offset, start)) < (stop := min(at, end)):
                parts.append(CheckedPart(first, stop - first, None))
            offset = at
    return parts
