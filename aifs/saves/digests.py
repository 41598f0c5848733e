"""Digests of chunks that may be equal: every byte is read once, and what is equal is hashed once.
What to hash is a plain value, and carried out wherever there is room for it (see movers), in worker
threads.

Chunks of the same length are read side by side, a part of each at a time. As long as their parts
are equal, byte by byte, one state of the hash stands for all of them; where they part, each kind
goes on with a copy of it. So a digest is always that of the very bytes that were read of this
chunk, whatever happens to the files of the others meanwhile. The parts that are compared lie in the
processor's cache: a chunk that is equal to another one costs little more than the copying. Chunks
that differ cost what they would alone.

Bytes are read, not mapped: a failing device would end the process, and page faults cost as much as
copying does. A chunk of zeros alone is recognised on the way, before anything is hashed; holes are
not even read. Other threads run meanwhile, which is why the parts are large: each read, comparison
and hash ends with a wait for the interpreter, which other threads use.
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
    """The length of some chunks, up to TOGETHER; of each, the number of its copy, and where in that
    it begins."""


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
    """Of some chunks, in order; an error of one that cannot be read. ``compared``: bytes that
    needed no hash.
    """

    digests: list[bytes | FsError]
    compared: int


async def hash_chunks(
    asked: Hashing, tools: MakingTools, cancelled: Callable[[], bool]
) -> Sequence[Digests] | None:
    """The BLAKE3-256 digests of the chunks of each column. ZEROS of zeros. None if it has been
    ``cancelled`` before it begins; it is bounded by what is asked for. Raises Unavailable for a
    device that is not registered."""
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
    """This thread's."""
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
