"""A reader: the rows of an epoch, in the order of docs/guide/datasets.md, for one of many
processes.

A few threads fetch each share's next group ahead. In memory are two groups (twice the shuffle
buffer at most) and a block of each share, and a block a thread; nothing per row of the dataset.
"""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from aifs.client.data.dataset import Dataset
from aifs.core import files, ioctl
from aifs.core.errors import DatasetError
from aifs.datasets.ahead import Announced
from aifs.datasets.arrays import ArrayArithmetic, all_permuted
from aifs.datasets.formats.columns import joined
from aifs.datasets.formats.reading import BlockRows
from aifs.datasets.sequence import Epoch, EpochOrder, Piece, ShuffleGroup, shares_of

if TYPE_CHECKING:
    import pyarrow


def filled(counts: Sequence[int], limits: Sequence[int], more: int) -> list[int]:
    """``counts`` after ``more``, each given by the first of the shares below their limits that have
    given fewest."""
    low, high = min(counts, default=0), max(limits, default=0)
    while low < high:  # the highest level to which all can be brought
        level = (low + high + 1) // 2
        needed = sum(max(0, min(level, limit) - count) for count, limit in zip(counts, limits))
        low, high = (level, high) if needed <= more else (low, level - 1)
    found = [max(count, min(low, limit)) for count, limit in zip(counts, limits)]
    more -= sum(found) - sum(counts)
    for number, (count, limit) in enumerate(zip(found, limits)):
        if more and count == low and count < limit:
            found[number] += 1
            more -= 1
    return found


class Progress:
    """Where all readers of an epoch begin: rows that each of its shares has given.

    Reader q of P has each P-th share from q on, and goes on with the share that has given fewest,
    the lowest first. So readers that began at a prefix of the global sequence, and have given as
    many rows each, make a prefix again.
    """

    def __init__(self, epoch: Epoch, readers: int, counts: Sequence[int]) -> None:
        """Raises DatasetError if the shares cannot be divided among so many readers."""
        shares = epoch.order.shares
        if shares % readers:
            raise DatasetError(
                f"{shares} shares cannot be divided among {readers} readers (world x workers):"
                f" say shares={-(-shares // readers) * readers}, for a new epoch"
            )
        self._epoch = epoch
        self._readers = readers
        self.counts = list(counts)
        """Of each share the rows that were given before."""
        self.limits = [epoch.rows_of(share) for share in range(shares)]
        """Of each share all its rows."""

    def shares_of(self, reader: int) -> range:
        return range(reader, len(self.counts), self._readers)

    def left(self, reader: int) -> int:
        """Rows that this reader has to give."""
        shares = self.shares_of(reader)
        return sum(self.limits[share] - self.counts[share] for share in shares)

    def after(self, given: Sequence[int]) -> list[int]:
        """Rows of each share when reader q has given ``given[q]`` rows."""
        found = list(self.counts)
        for reader, rows in enumerate(given):
            mine = slice(reader, None, self._readers)
            found[mine] = filled(self.counts[mine], self.limits[mine], rows)
        return found


def state_of(epoch: Epoch, counts: Sequence[int]) -> dict[str, Any]:
    """The state of an epoch; it has ``counts`` where they are no prefix of the sequence."""
    done = sum(counts)
    told = {"done": done} | ({} if epoch.counts(done) == list(counts) else {"counts": list(counts)})
    return epoch.order.state() | told


def order_in(state: Mapping[str, Any]) -> EpochOrder:
    """Raises DatasetError if this is no state."""
    try:
        fields = {name: state[name] for name in EpochOrder.__dataclass_fields__}
    except (KeyError, TypeError) as error:
        raise DatasetError(f"this is no state of a reader: {error}") from None
    return EpochOrder(**fields)


def counts_in(state: Mapping[str, Any], epoch: Epoch) -> list[int]:
    """Raises DatasetError if the state is not one of this dataset."""
    try:
        counts = list(state.get("counts") or epoch.counts(state["done"]))
        fits = len(counts) == epoch.order.shares and all(
            0 <= count <= epoch.rows_of(share) for share, count in enumerate(counts)
        )
    except (KeyError, TypeError) as error:
        raise DatasetError(f"this is no state of a reader: {error}") from None
    if not fits or sum(counts) != state["done"]:
        raise DatasetError(
            f"the state is of another dataset: {state['done']} rows were handed out in"
            f" {epoch.order.shares} shares, where {epoch.total_rows} rows are"
        )
    return counts


BUFFER = 10_000
"""Rows that are shuffled in memory, of all readers together."""

_THREADS = 8

Transform = Callable[[Any], Any]


def order_of(
    readers: int,
    *,
    seed: int = 0,
    epoch: int = 0,
    buffer: int = BUFFER,
    shares: int | None = None,
    shuffle: str = "blocks",
    window: int = 0,
) -> EpochOrder:
    """The order of an epoch for so many readers. Raises DatasetError."""
    shares = shares_of(readers) if shares is None else shares
    group = max(1, buffer // max(shares, 1))
    return EpochOrder(seed, epoch, shares, group, window, shuffle)


def reader(
    dataset: Dataset,
    *,
    rank: int = 0,
    world: int = 1,
    worker: int = 0,
    workers: int = 1,
    state: Mapping[str, Any] | None = None,
    drop_last: bool = False,
    transform: Transform | None = None,
    **order: Any,
) -> "Reader":
    """The rows of one epoch that worker ``worker`` of ``workers`` of rank ``rank`` of ``world``
    hands out.

    ``seed``, ``epoch``: the order depends on them; ``shuffle``: blocks, window, none, rows;
    ``buffer``: rows that are shuffled in memory, of all readers together (10,000); ``shares``:
    worlds and workers that divide this number give the same global sequence (by default the lowest
    multiple of the readers that is at least 64); ``window``: bytes of files that are shuffled with
    each other, 0 for all. ``state``: go on where a reader was; then the order is that of the state.
    ``drop_last``: all readers give as many rows, and the rest is left out. ``transform``: is called
    with each row, here; its results are handed out.

    Raises DatasetError; ValueError for a rank or worker that is not there."""
    if not (0 <= rank < world and 0 <= worker < workers):
        raise ValueError(f"rank {rank} of {world}, worker {worker} of {workers}: count from 0")
    if state is not None and order:
        raise ValueError(f"the state tells the order: {', '.join(order)} cannot be given with it")
    chosen = order_of(world * workers, **order) if state is None else order_in(state)
    epoch = Epoch(dataset.index, chosen, ArrayArithmetic())
    counts = [0] * chosen.shares if state is None else counts_in(state, epoch)
    progress = Progress(epoch, world * workers, counts)
    return Reader(dataset, epoch, progress, rank + world * worker, drop_last, transform)


class Reader:
    """An iterator over rows; ``len``: those at the start. Closed by ``close``, as a context
    manager, or with the last reference; one thread may use it.

    Raises DatasetError with the file's name for damaged bytes; OSError, ESTALE for a file changed
    since it was indexed. After an error the failed row is tried again.
    """

    def __init__(
        self,
        dataset: Dataset,
        epoch: Epoch,
        progress: Progress,
        number: int,
        drop_last: bool,
        transform: Transform | None,
    ) -> None:
        readers = range(progress.shares_of(0).step)
        left = [progress.left(one) for one in readers]
        self._epoch = epoch
        self._progress = progress
        self._shares = progress.shares_of(number)  # ours
        self._rows = min(left) if drop_last else left[number]  # that we have to give
        self._transform = transform
        self._given = 0  # rows, since we began
        self._batches = 0  # the same of batches; one of the two stays 0
        self._ended = False  # whether StopIteration has been raised
        self._groups = _Groups(dataset, epoch, len(self._shares))
        self._announcer = Announcer(dataset, epoch, len(left), number)
        # Of each of our shares the rows that it has given in the whole epoch.
        self._counts = {share: progress.counts[share] for share in self._shares}
        # Of each of our shares the next rows, as far as they have been fetched.
        self._waiting: dict[int, deque[Any]] = {share: deque() for share in self._shares}
        # The shares that give the next rows, before any gives two.
        self._following = self._turns()
        self._tell()

    def __len__(self) -> int:
        return self._rows

    def __iter__(self) -> "Reader":
        return self

    def __next__(self) -> Any:
        if self._batches:
            raise ValueError("this reader gives batches: make another one for rows")
        if self._given == self._rows:
            self._end()
            raise StopIteration
        if not self._given:
            self._groups.begin(_ROWS, self._counts)
        share = self._following[0]
        row = self._next_of(share)
        if self._transform is not None:
            row = self._transform(row)
        self._waiting[share].popleft()
        self._counts[share] += 1
        self._given += 1
        self._following.popleft()
        if not self._following:
            self._following = self._turns()
        return row

    def batches(self) -> Iterator["pyarrow.RecordBatch"]:
        """The rows as Arrow batches, one a group of a share (``buffer / shares`` rows), undecoded.
        Shares take turns, so the order differs from single rows; without ``transform`` and
        ``drop_last``."""
        if self._given:
            raise ValueError("this reader gives rows: make another one for batches")
        if not self._batches:
            self._groups.begin(_BATCHES, self._counts)
        while True:
            share = min(
                (share for share in self._shares if self._counts[share] < self._limit(share)),
                key=lambda one: (self._counts[one], one),
                default=None,
            )
            if share is None:
                self._end()
                return
            self._tell()
            batch: pyarrow.RecordBatch = self._groups.take(_BATCHES, share, self._counts[share])
            self._counts[share] += batch.num_rows
            self._batches += 1
            yield batch

    def state(self) -> dict[str, Any]:
        """Where the epoch is: a few integers, the same for all readers with as many rows. A reader
        with this state, for any world and workers that divide its shares, gives exactly the rows
        that follow. After the iteration the epoch is over. Raises ValueError between batches, which
        other readers may have had of other sizes."""
        if self._ended:
            return state_of(self._epoch, self._progress.limits)
        if self._batches:
            raise ValueError("a reader of batches has a state only where the epoch ends")
        readers = self._shares.step
        return state_of(self._epoch, self._progress.after([self._given] * readers))

    state_dict = state

    def close(self) -> None:
        """End its threads, and release its rows; its state remains."""
        self._announcer.end(self._row())
        self._groups.close()

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tell(self) -> None:
        """Tell mount and dataset how far we are."""
        self._announcer.tell(self._row())

    def _row(self) -> int:
        """The row of any share up to which all is done."""
        open_ones = [n for share, n in self._counts.items() if n < self._limit(share)]
        return min(open_ones, default=max(self._counts.values()))

    def _limit(self, share: int) -> int:
        return self._progress.limits[share]

    def _turns(self) -> deque[int]:
        """The shares that have given fewest rows, in order."""
        open_ones = [share for share in self._shares if self._counts[share] < self._limit(share)]
        least = min((self._counts[share] for share in open_ones), default=0)
        return deque(share for share in open_ones if self._counts[share] == least)

    def _next_of(self, share: int) -> Any:
        waiting = self._waiting[share]
        if not waiting:
            self._tell()
            waiting.extend(self._groups.take(_ROWS, share, self._counts[share]))
        return waiting[0]

    def _end(self) -> None:
        self._ended = True
        self.close()


class _Fetch(NamedTuple):
    """How rows are read: ``_ROWS`` or ``_BATCHES``."""

    of_share: Callable[[Epoch, "_Blocks", int, int], Any]
    """The rows of a share from one on to the end of its group."""
    of_piece: Callable[["_Blocks", Piece, list[int]], Any]
    """Rows of the block of a piece, by their numbers in it, which rise."""
    whole: Callable[[list[Any]], Any]
    """The results of such pieces, one after the other."""
    some: Callable[[Any, list[int]], Any]
    """Of a whole the rows with these numbers, in this order."""


class _Groups:
    """Fetches groups, each share's next one ahead. Its threads end with the last reference."""

    def __init__(self, dataset: Dataset, epoch: Epoch, shares: int) -> None:
        self._epoch = epoch
        self._blocks = _Blocks(dataset, shares + _THREADS)
        self._pool = ThreadPoolExecutor(min(_THREADS, shares), "aifs-data")
        self._ahead: dict[int, tuple[int, Future[Any]]] = {}  # share -> its row, its group
        self._begun: dict[int, int] = {}  # share -> its first row
        self._dealt: dict[int, _Dealt] = {}  # by number; of orders that deal rows out

    def begin(self, fetch: _Fetch, counts: Mapping[int, int]) -> None:
        """All shares at the same time, each from the row that it has got to."""
        self._begun = dict(counts)
        for share, row in counts.items():
            self._fetch(fetch, share, row)

    def take(self, fetch: _Fetch, share: int, row: int) -> Any:
        """Rows of the share from ``row`` to the end of its group."""
        if self._epoch.deals:
            return self._take_dealt(fetch, share, row)
        if self._ahead.get(share, (-1,))[0] != row:
            self._fetch(fetch, share, row)
        found = self._ahead.pop(share)[1].result()
        self._fetch(fetch, share, row + len(found))
        return found

    def _take_dealt(self, fetch: _Fetch, share: int, row: int) -> Any:
        self._fetch(fetch, share, row)
        number, skipped = divmod(row, self._epoch.order.group)
        dealt = self._dealt.pop(number)  # not kept if this fails
        found = dealt.take(share)[skipped:]
        if dealt.left:
            self._dealt[number] = dealt
        self._fetch(fetch, share, row + len(found))
        return found

    def _fetch(self, fetch: _Fetch, share: int, row: int) -> None:
        if row >= self._epoch.rows_of(share):
            return
        if self._epoch.deals:
            number = row // self._epoch.order.group
            if number not in self._dealt:
                end = (number + 1) * self._epoch.order.group
                shares = [share for share, first in self._begun.items() if first < end]
                group = self._epoch.group(share, row)
                self._dealt[number] = _Dealt(fetch, self._pool, self._blocks, group, shares)
        else:
            coming = self._pool.submit(fetch.of_share, self._epoch, self._blocks, share, row)
            self._ahead[share] = row, coming

    def close(self) -> None:
        self._ahead.clear()
        self._dealt.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._blocks.clear()


def _rows_of(epoch: Epoch, blocks: "_Blocks", share: int, row: int) -> list[Any]:
    group = epoch.group(share, row)
    found: list[Any] = [None] * (group.first + group.rows - row)
    places = _places(group)[row - group.first :]
    for piece, wanted, numbers in _by_piece(group, places):
        for number, value in zip(numbers, blocks.get(piece.block).take(wanted)):
            found[number] = value
    blocks.read_to_the_end(group)
    return found


def _by_piece(
    group: ShuffleGroup, places: list[int]
) -> Iterator[tuple[Piece, list[int], list[int]]]:
    """For each piece with rows at ``places``: their numbers in its block, and the places'
    numbers."""
    in_order = sorted(range(len(places)), key=places.__getitem__)
    at = begin = 0
    for piece in group.pieces:
        end, first = begin + piece.rows, at
        while at < len(in_order) and places[in_order[at]] < end:
            at += 1
        if at > first:
            numbers = in_order[first:at]
            yield piece, [piece.first + places[number] - begin for number in numbers], numbers
        begin = end


def _places(group: ShuffleGroup) -> list[int]:
    return _all_places(group)[group.start :: group.step][: group.rows]


def _all_places(group: ShuffleGroup) -> list[int]:
    if group.key is None:
        return [*range(group.size)]
    return all_permuted(group.size, group.key).tolist()


def _batch_of(epoch: Epoch, blocks: "_Blocks", share: int, row: int) -> "pyarrow.RecordBatch":
    group = epoch.group(share, row)
    parts = [blocks.get(piece.block).batch(piece.first, piece.rows) for piece in group.pieces]
    blocks.read_to_the_end(group)
    return joined(parts, _places(group)[row - group.first :])


_ROWS = _Fetch(
    _rows_of,
    lambda blocks, piece, rows: blocks.get(piece.block).take(rows),
    lambda pieces: [*chain.from_iterable(pieces)],
    lambda whole, rows: [whole[row] for row in rows],
)
_BATCHES = _Fetch(
    _batch_of,
    lambda blocks, piece, rows: joined(
        [blocks.get(piece.block).batch(piece.first, piece.rows)],
        [row - piece.first for row in rows],
    ),
    joined,
    lambda whole, rows: joined([whole], rows),
)


class _Dealt:
    """A group dealt out to all shares. A reader's shares are fetched together, each piece once."""

    def __init__(
        self,
        fetch: _Fetch,
        pool: ThreadPoolExecutor,
        blocks: "_Blocks",
        group: ShuffleGroup,
        shares: list[int],
    ) -> None:
        self._fetch = fetch
        places = _all_places(group)
        self.left = {share: of for share in shares if (of := places[share :: group.step])}
        """Of each share that has not taken its rows their places among the rows of all pieces."""
        wanted = [*chain.from_iterable(self.left.values())]
        self._numbers: dict[int, int] = {}  # place -> row of the whole
        self._pieces = []
        for piece, rows, numbers in _by_piece(group, wanted):
            self._pieces.append(pool.submit(fetch.of_piece, blocks, piece, rows))
            for number in numbers:
                self._numbers[wanted[number]] = len(self._numbers)

    def take(self, share: int) -> Any:
        """The rows of a share. Raises what reading one of the pieces did."""
        whole = self._whole
        return self._fetch.some(whole, [self._numbers[each] for each in self.left.pop(share)])

    @cached_property
    def _whole(self) -> Any:
        found = [piece.result() for piece in self._pieces]
        self._pieces.clear()
        return self._fetch.whole(found)


class _Blocks:
    """The last blocks that were asked for, each read once by whichever thread comes first."""

    def __init__(self, dataset: Dataset, most: int) -> None:
        self._dataset = dataset
        self._most = most
        self._lock = threading.Lock()
        self._held: OrderedDict[int, Future[BlockRows]] = OrderedDict()

    def read_to_the_end(self, group: ShuffleGroup) -> None:
        """Go on to the end, where the share's next group begins: otherwise finished blocks would
        push out those that other shares read."""
        with self._lock:
            for piece in group.pieces[:-1]:
                if piece.block != group.pieces[-1].block:
                    self._held.pop(piece.block, None)

    def get(self, number: int) -> BlockRows:
        with self._lock:
            held = self._held.get(number)
            is_ours = held is None
            if held is None:
                held = self._held[number] = Future()
            self._held.move_to_end(number)
            while len(self._held) > self._most:
                self._held.popitem(last=False)
        if is_ours:
            try:
                held.set_result(self._dataset.open_block(number))
            except BaseException as error:
                with self._lock:
                    self._held.pop(number, None)
                held.set_exception(error)
        return held.result()

    def clear(self) -> None:
        with self._lock:
            self._held.clear()


EVERY_S = 0.25
"""Seconds between announcements. The mount forgets a reader after a minute without one."""


class Announcer:
    """Announces a reader's epoch, order and progress to the mount, so that files are in the burst
    tier in time. Does nothing elsewhere, or if refused. Ends with the last reference; one
    thread."""

    def __init__(self, dataset: Dataset, epoch: Epoch, readers: int, number: int) -> None:
        """Reader ``number`` of so many. Tells nothing yet."""
        self._dataset = dataset
        self._epoch = epoch
        self._window = 0  # which is read
        self._told = Announced(epoch.order, readers, range(number, number + 1), 0, 0)
        self._due_s = 0.0  # by time.monotonic(), when to tell next
        self._fd = -1  # of the directory; -1: the mount takes no announcements
        # What has an index in its directory, and can be known a while ahead.
        if epoch.order.shuffle == "blocks" and dataset.has_kept_index:
            with suppress(OSError):
                self._fd = files.open_file(dataset.path, write=False)

    def tell(self, row: int) -> None:
        """So many rows of each share are handed out. Closes files of past windows, which could not
        make room for others. Mostly costs little."""
        window = self._epoch.window_of(row)
        if window > self._window:
            for number in range(self._window, window):
                self._dataset.let_go(self._epoch.windows[number])
            self._window = window
            self._due_s = 0.0
        if time.monotonic() >= self._due_s:
            self._tell(row)

    def end(self, row: int) -> None:
        """So many have been, and no more will be."""
        self._tell(row)
        self._tell(None)
        self._close()

    def _tell(self, row: int | None) -> None:
        self._due_s = time.monotonic() + EVERY_S
        if self._fd == -1:
            return
        try:
            ioctl.call(self._fd, "order", order=self._told._replace(row=row).text())
        except InterruptedError:
            pass  # the next time will do
        except OSError:  # no mount of AIFS, one without a burst tier, or with too many readers
            self._close()

    def _close(self) -> None:
        if self._fd != -1:
            files.close_file(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self._close()
