"""The files that ranks read together, as if they were one, and recent speeds."""

import io
import os
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from aifs.client.checkpoints.manifest import CheckpointError
from aifs.core import files

READ, GATHER, CHAIN = "read", "gather", "chain"
"""Each host reads all; each reads a part and passes it on; one reads all, passed along a chain."""

PIECE = 64 << 20
"""Bytes that are on their way at a time."""

Range = tuple[int, int]
"""Begin and end."""


class Speeds(NamedTuple):
    """Bytes per second that a host reads, and passes on; None: unknown."""

    storage: float | None = None
    network: float | None = None


class SharedRead(NamedTuple):
    """The ranks that take part in reading."""

    way: str
    ring: list[int]
    """One rank of each host, in the order in which they pass bytes on."""

    def reads_of(self, rank: int, todo: Sequence[Range]) -> list[Range]:
        """The ranges of ``todo`` that ``rank`` reads, in order. Ranks outside the ring map their
        host's memory, or read all if they cannot."""
        if self.way == READ:
            return list(todo)
        if rank not in self.ring:
            return []
        index = self.ring.index(rank)
        if self.way == CHAIN:
            return [] if index else list(todo)
        return [parts_of(piece, len(self.ring))[index] for piece in todo]


def plan(size: int, hosts: Sequence[Hashable], speeds: Sequence[Speeds]) -> SharedRead:
    """Of ``size`` bytes for ranks on ``hosts``, which have read so fast before."""
    leaders = [rank for rank, host in enumerate(hosts) if hosts.index(host) == rank]
    way, first = choose(size, [speeds[rank] for rank in leaders])
    return SharedRead(way, leaders[first:] + leaders[:first])


def choose(size: int, speeds: Sequence[Speeds]) -> tuple[str, int]:
    """The fastest way for ``size`` bytes by the hosts' speeds, and the host that begins a chain.

    A ring takes as long as its slowest link, or slowest host's part; a chain as its slowest link,
    or first host's reading. With unknown speeds, hosts share the reading.
    """
    count = len(speeds)
    if count == 1 or not size:
        return READ, 0
    storage = [one.storage for one in speeds if one.storage is not None]
    network = [one.network for one in speeds if one.network is not None]
    if len(storage) < count or len(network) < count:
        return GATHER, 0
    fastest, slowest, link = max(storage), min(storage), min(network)
    times = {
        GATHER: max(size / count / slowest, size * (count - 1) / count / link),
        CHAIN: max(size / fastest, size / link) + (count - 1) * min(PIECE, size) / link,
        READ: size / slowest,
    }
    return min(times, key=lambda way: times[way]), storage.index(fastest)


def split(length: int, count: int) -> list[Range]:
    """Begin and end of each of ``count`` parts, whose sizes differ by at most one byte."""
    return [(index * length // count, (index + 1) * length // count) for index in range(count)]


def parts_of(piece: Range, count: int) -> list[Range]:
    """A piece, cut into as many parts."""
    begin, end = piece
    return [(begin + first, begin + last) for first, last in split(end - begin, count)]


def pieces(size: int, order: Sequence[Range], piece: int) -> Iterator[Range]:
    """Ranges of at most ``piece`` that cover each byte once: ``order`` first, then the rest."""
    done: list[Range] = []  # ascending, apart from each other
    for begin, end in (*order, (0, size)):
        rest = list(_without(max(begin, 0), min(end, size), done))
        for first, last in rest:
            yield from ((start, min(start + piece, last)) for start in range(first, last, piece))
        done = merged(done + rest)


def _without(begin: int, end: int, done: Sequence[Range]) -> Iterator[Range]:
    """The parts of a range outside ``done``."""
    for first, last in done:
        if begin < min(first, end):
            yield begin, min(first, end)
        begin = max(begin, last)
    if begin < end:
        yield begin, end


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Their union: ascending ranges, apart from each other."""
    found: list[Range] = []
    for begin, end in sorted(ranges):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


# --- what ranks read of a checkpoint ---


PARALLEL = "parallel_load"
TOGETHER = "gathered.read"
WHOLE = "torch.load"
MAPPED = "load_safetensors"
DISTRIBUTED = "AifsReader"
"""Loaders: of parts; of one file by all ranks; of a file, or one a rank; mapped; of
torch.distributed.checkpoint."""

METADATA = ".metadata"
"""A file of each checkpoint of torch.distributed."""


class FileRange(NamedTuple):
    """A range of a file."""

    path: str
    begin: int
    end: int


class TensorPlace(NamedTuple):
    """A tensor of the checkpoint, and where it lies."""

    name: str
    """That of the state, nested names joined by dots."""
    ranges: list[FileRange]


class RankReads(NamedTuple):
    """The ranges that one rank reads."""

    host: int
    """From 0 on."""
    ranges: list[FileRange]
    """In the order in which they are read."""


class LoadPlan(NamedTuple):
    """The ranges that all ranks of one world read."""

    loader: str
    """The function that reads it: one of those above."""
    way: str
    """Each rank reads by itself, or hosts share the reading, as ``plan`` decides."""
    sizes: dict[str, int]
    """Of the files, by their paths."""
    ranks: list[RankReads]
    tensors: list[TensorPlace]
    """In reading order; none if only ``torch.load(weights_only=False)`` would tell them."""


def distinct_bytes(ranges: Iterable[FileRange]) -> int:
    """Bytes that are in any of them, each counted once."""
    by_path: dict[str, list[Range]] = {}
    for path, begin, end in ranges:
        by_path.setdefault(path, []).append((begin, end))
    return sum(end - begin for found in by_path.values() for begin, end in merged(found))


_WORTH_MEASURING = 1 << 20

measured: dict[str, float] = {}
"""Bytes per second, as they were lately: of 'storage', and of the 'network'."""


class FoundFiles(NamedTuple):
    """Files that a rank has found. ``identity``: a digest that tells equal names and sizes
    apart."""

    paths: Sequence[str]
    identity: str = ""

    @property
    def names(self) -> list[str]:
        return [os.path.basename(path) for path in self.paths]


class Files:
    """A context manager. Used from one thread at a time, except ``close``."""

    def __init__(self, paths: Sequence[str]) -> None:
        """Raises OSError."""
        self._paths = paths
        self._number = self._fd = -1  # the one that is open
        self._closed = False
        self.sizes: list[int] = []
        """Of the files, in bytes."""
        try:
            for number in range(len(paths)):
                self.sizes.append(os.fstat(self._open(number)).st_size)
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        return sum(self.sizes)

    def fill(self, content: memoryview, begin: int, end: int) -> None:
        """Read a range to its place in memory for all. Raises as ``read_into``."""
        begin_s = time.monotonic()
        self.read_into(content[begin:end], begin)
        measure("storage", (begin, end), begin_s)

    def read_into(self, target: memoryview, begin: int) -> None:
        """Fill ``target`` from ``begin`` on. Raises CheckpointError for a shorter file, OSError."""
        done = 0
        for number, (first, last) in self.places(begin, begin + len(target)):
            part = target[done : done + last - first]
            if files.read_into(self._open(number), part, first) < len(part):
                raise CheckpointError(f"{self._paths[number]}: was cut while it was read")
            done += len(part)

    def places(self, begin: int, end: int) -> Iterator[tuple[int, Range]]:
        """Where a range lies: the numbers of the files, and the range in each."""
        start = 0
        for number, size in enumerate(self.sizes):
            first, last = max(begin, start), min(end, start + size)
            if first < last:
                yield number, (first - start, last - start)
            start += size

    def _open(self, number: int) -> int:
        if number != self._number:
            self._close()
            self._fd, self._number = files.open_file(self._paths[number], write=False), number
            if self._closed:
                self._close()
        return self._fd

    def _close(self) -> None:
        fd, self._number, self._fd = self._fd, -1, -1
        if fd >= 0:
            files.close_file(fd)

    def close(self) -> None:
        """Reads in progress fail."""
        self._closed = True
        self._close()

    def __enter__(self) -> "Files":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class AsFile(io.RawIOBase):
    """Bytes as a file for torch to read."""

    def __init__(self, size: int, read_into: Callable[[memoryview, int], object]) -> None:
        """``read_into``: fills memory with the bytes from an offset on."""
        self._size, self._read_into, self._position = size, read_into, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        count = min(len(target), max(self._size - self._position, 0))
        self._read_into(target[:count], self._position)
        self._position += count
        return count

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position


def measure(what: str, moved: Range, begin_s: float) -> None:
    """Bytes have been moved since."""
    seconds = time.monotonic() - begin_s
    if moved[1] - moved[0] >= _WORTH_MEASURING and seconds > 0:
        rate = (moved[1] - moved[0]) / seconds
        measured[what] = (measured.get(what, rate) + rate) / 2


def known_speeds() -> Speeds:
    return Speeds(measured.get("storage"), measured.get("network"))
