"""Digests of chunks that may be equal: every byte is read once, and equal ones are hashed once, in
worker threads, anywhere (a plain value, see movers).

Chunks of one length are read side by side, part by part. Equal parts share one state of the hash;
where they differ, each goes on with a copy. So a digest is of the bytes read, whatever happens to
other files. Parts fit the processor's cache: an equal chunk costs little more than copying.

Bytes are read, not mapped: a failing device would end the process, and page faults cost as much as
copying. Zeros are recognised before hashing, holes not read. Parts are large because each read,
comparison and hash ends with a wait for the interpreter.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from blake3 import blake3

from aifs.burst.making import MakingTools
from aifs.core import files
from aifs.core.errors import FsError, Unavailable
from aifs.data.reading.buffers import is_equal
from aifs.data.server import DataServer
from aifs.data.servers import Servers
from aifs.data.workers import gather
from aifs.meta.records import Copy

ZEROS = b""
"""The digest of a chunk of zeros, here."""

TOGETHER = 16
"""Chunks that are read side by side, at most; each may need a buffer."""

_PART_MAX = 1 << 20
_MEMORY = 4 << 20  # of each thread, for the parts of all chunks of a column
_PAGE = 4096
_NOTHING = memoryview(bytearray(_PART_MAX))
_local = threading.local()


class CopyToHash(NamedTuple):
    """A burst copy that nobody writes to; ``sparse``: it may have holes."""

    place: Copy
    sparse: bool


class Hashing(NamedTuple):
    """Chunks that are to be hashed."""

    copies: Mapping[int, CopyToHash]
    """By number."""
    columns: Sequence[tuple[int, Sequence[tuple[int, int]]]]
    """The length of up to TOGETHER chunks; of each, its copy's number, and where it begins
    there."""


class HashSource(NamedTuple):
    """An open burst copy; ``sparse``: it may have holes. ``error``: why it could not be opened."""

    device: DataServer
    key: tuple[int, int]
    fd: int
    sparse: bool
    error: FsError | None = None

    def read(self, offset: int, part: memoryview) -> None:
        """Fill ``part``. Raises Unavailable."""
        count = self.device.giving.measure(
            len(part), self.device.read, self.key, self.fd, part, offset
        )
        if count < len(part):
            where = self.device.where(self.key)
            raise Unavailable(f"{self.device.name}: {where} ends before byte {offset + len(part)}")

    def is_hole(self, offset: int, length: int) -> bool:
        """Raises Unavailable, for any chunk of one that could not be opened."""
        if self.error is not None:
            raise self.error
        if not self.sparse:
            return False
        return not self.device.call("read", self.key, files.data_ranges, self.fd, offset, length)


Place = tuple[HashSource, int]
"""Where a chunk begins."""


class Digests(NamedTuple):
    """Of some chunks, in order; or the error of reading one. ``compared``: bytes without a hash."""

    digests: list[bytes | FsError]
    compared: int


async def hash_chunks(
    asked: Hashing, tools: MakingTools, cancelled: Callable[[], bool]
) -> Sequence[Digests] | None:
    """The BLAKE3-256 digests of each column's chunks; ZEROS for zeros. None if ``cancelled`` before
    it begins. Raises Unavailable for an unregistered device."""
    if cancelled():
        return None
    device = tools.servers[next(iter(asked.copies.values())).place.server]
    call = (tools.mover.io_priority, _digest_all, asked, tools.servers)
    return (await gather([(device.workers, files.at_priority, call)]))[0]


def _digest_all(asked: Hashing, servers: Servers) -> list[Digests]:
    with ExitStack() as stack:
        sources = {number: _open(copy, servers, stack) for number, copy in asked.copies.items()}
        return [
            digest(length, [(sources[number], offset) for number, offset in chunks])
            for length, chunks in asked.columns
        ]


def _open(copy: CopyToHash, servers: Servers, stack: ExitStack) -> HashSource:
    (server, copy_id), sparse = copy
    device, key = servers[server], (0, copy_id)
    try:
        fd = device.open_object(key, create=False, write=False)
    except FsError as error:
        return HashSource(device, key, -1, sparse, error)
    if fd is None:
        missing = Unavailable(f"{device.name}: {device.where(key)} is missing")
        return HashSource(device, key, -1, sparse, missing)
    stack.callback(device.storage.close, fd)
    return HashSource(device, key, fd, sparse)


def digest(length: int, places: Sequence[Place]) -> Digests:
    """Of one column."""
    found: list[bytes | FsError] = [ZEROS] * len(places)
    compared = 0
    size = min(_PART_MAX, _MEMORY // max(len(places), 1) // _PAGE * _PAGE)
    memory = _memory()
    # Which are equal so far: up to where, their numbers, and the state of their hash.
    alike: list[tuple[int, list[int], blake3 | None]] = [
        (0, _not_holes(length, places, found), None)
    ]
    while alike:
        at, numbers, state = alike.pop()
        if at == length:
            result = ZEROS if state is None else state.digest()
            for number in numbers:
                found[number] = result
            continue
        kinds: list[tuple[memoryview, list[int]]] = []
        for number in numbers:
            source, offset = places[number]
            part = memory[len(kinds) * size :][: min(size, length - at)]
            try:
                source.read(offset + at, part)
            except FsError as error:
                found[number] = error
                continue
            same = next((some for first, some in kinds if is_equal(first, part)), None)
            if same is None:
                kinds.append((part, [number]))
            else:
                same.append(number)
                compared += len(part)
        alike += [(at + len(part), some, _updated(state, at, part)) for part, some in kinds]
    return Digests(found, compared)


def _not_holes(length: int, places: Sequence[Place], found: list[bytes | FsError]) -> list[int]:
    numbers = []
    for number, (source, offset) in enumerate(places):
        try:
            if not source.is_hole(offset, length):
                numbers.append(number)
        except FsError as error:
            found[number] = error
    return numbers


def _memory() -> memoryview:
    if not hasattr(_local, "memory"):
        _local.memory = memoryview(bytearray(_MEMORY))
    return _local.memory


def _updated(state: blake3 | None, at: int, part: memoryview) -> blake3 | None:
    """None as long as all is zero."""
    if state is not None:
        state = state.copy()
    elif is_equal(part, _NOTHING[: len(part)]):
        return None
    else:
        state = blake3()
        for done in range(0, at, _PART_MAX):
            state.update(_NOTHING[: at - done])
    return state.update(part)
