"""The files that an epoch reads next, from when until when, for one host's readers. Pure.

Time counts *rows of a share*: all shares of an epoch are at about the same one. A reader announces
in a line of text (``Announced``).
"""

from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from aifs.core.errors import DatasetError, Invalid
from aifs.core.texts import parse_pairs
from aifs.core.units import format_size, parse_size
from aifs.datasets.index import Index
from aifs.datasets.sequence import Epoch, EpochOrder, shares_of

MOSTLY = 0.75
"""A file is worth having as a whole where so much of it is read."""

SHARES_MAX = 1 << 16

_EXAMPLE = "seed=7,epoch=1,world=8,ahead=16GiB"
_END = "end"


class Announced(NamedTuple):
    """Readers of an epoch, and how far they are: ``seed=7[,epoch=0][,world=1][,rank=0-3]
    [,shares=64][,window=16GiB][,ahead=16GiB][,done=0|end]``."""

    order: EpochOrder
    """Of blocks. Its groups do not count here."""
    world: int
    """The epoch's readers: ranks times workers. Reader q has each ``world``-th share from q on."""
    readers: range
    """Those that this is about."""
    row: int | None
    """Up to which row each of their shares has been read; None: they read no more."""
    ahead: int
    """Bytes that may be kept for them before they come to them; 0: as many as can be."""

    def text(self) -> str:
        """The line that ``parse`` reads."""
        order = self.order
        rank = f"{self.readers.start}-{self.readers.stop - 1}"
        done = _END if self.row is None else self.row * order.shares
        return (
            f"seed={order.seed},epoch={order.epoch},world={self.world},rank={rank},"
            f"shares={order.shares},window={format_size(order.window)},"
            f"ahead={format_size(self.ahead)},done={done}"
        )


def parse(text: str) -> Announced:
    """Raises Invalid, which names the fault."""
    said = {
        key: _PARSERS[key](key, value)
        for key, value in parse_pairs("order", text, _PARSERS, _EXAMPLE)
    }
    if "seed" not in said:
        raise Invalid(f"order: seed must be given, as in {_EXAMPLE!r}")
    world = said.get("world", 1)
    shares = said.get("shares") or shares_of(max(world, 1))
    if not 1 <= world <= shares <= SHARES_MAX or shares % world:
        raise Invalid(
            f"order: the shares, {shares}, are a multiple of the world, {world}, and at most "
            f"{SHARES_MAX}"
        )
    readers = said.get("rank", range(world))
    if readers.stop > world:
        raise Invalid(f"order: there is no rank {readers.stop - 1} in a world of {world}")
    try:
        order = EpochOrder(said["seed"], said.get("epoch", 0), shares, window=said.get("window", 0))
    except DatasetError as error:
        raise Invalid(f"order: {error}") from None
    done = said.get("done", 0)
    row = None if done == _END else done // shares
    return Announced(order, world, readers, row, said.get("ahead", 0))


def _number(key: str, value: str) -> int:
    if not (value.isascii() and value.isdigit() and len(value) < 20):
        raise Invalid(f"order: {key}={value} is not a number")
    return int(value)


def _size(key: str, value: str) -> int:
    try:
        return parse_size(value)
    except ValueError as error:
        raise Invalid(f"order: {key}: {error}") from None


def _ranks(key: str, value: str) -> range:
    first, _, last = value.partition("-")
    found = range(_number(key, first), _number(key, last or first) + 1)
    if not found:
        raise Invalid(f"order: {key}={value}: ranks are 3, or 0-3")
    return found


def _done(key: str, value: str) -> int | str:
    return value if value == _END else _number(key, value)


_PARSERS: dict[str, Any] = {
    "seed": _number,
    "epoch": _number,
    "world": _number,
    "rank": _ranks,
    "shares": _number,
    "window": _size,
    "ahead": _size,
    "done": _done,
}


def shares_read(world: int, readers: Collection[int], shares: int) -> list[int]:
    """The shares of these readers."""
    return sorted(share for reader in readers for share in range(reader, shares, world))


class FileNeed(NamedTuple):
    """A file of which some shares read most, by its number in the index."""

    file: int
    first: int
    """The row of a share for which it is needed first."""
    last: int
    """From this row on they need it no more."""


def files_needed(epoch: Epoch, window: int, shares: Collection[int], most: int) -> list[FileNeed]:
    """Files of a window that mostly these shares read, in order of need; none if those needed
    together exceed ``most`` bytes. Others' reads do not count: each host has whole files where few
    blocks make one."""
    index = epoch.index
    part = len(shares) / epoch.order.shares
    if part * _mean_bytes(index, epoch.windows[window]) > 2 * most:
        return []  # without looking at each block
    needs = [
        FileNeed(read.file, read.first, read.last)
        for read in epoch.files_read(window, shares)
        if read.bytes >= MOSTLY * index.bytes_of(read.file)
    ]
    needs.sort(key=lambda need: (need.first, need.file))
    return needs if peak_bytes(index, needs) <= most else []


def peak_bytes(index: Index, needs: Sequence[FileNeed]) -> int:
    """Of the files that are needed at the same time."""
    changes = [(need.first, index.sizes[need.file]) for need in needs]
    changes += [(need.last, -index.sizes[need.file]) for need in needs]
    return max(accumulate((size for _, size in sorted(changes)), initial=0))


def _mean_bytes(index: Index, files: Iterable[int]) -> float:
    """For files with blocks anywhere in a window: the first and last of n random places are (n - 1)
    / (n + 1) of it apart."""
    counts = ((index.sizes[file], len(index.blocks_of(file))) for file in files)
    return sum(size * (blocks - 1) / (blocks + 1) for size, blocks in counts if blocks)
