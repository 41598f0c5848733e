"""How far an epoch is: rows that each of its shares has given. Arithmetic alone.

Reader q of P has each P-th share from q on. It goes on with the share that has given fewest rows,
the lowest number first, so what readers have given that began at a prefix of the global sequence,
and have given as many rows each, is a prefix again.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from aifs.core.errors import DatasetError
from aifs.datasets.sequence import Epoch, EpochOrder


def filled(counts: Sequence[int], limits: Sequence[int], more: int) -> list[int]:
    """``counts`` after ``more`` were given, one at a time, each by the share that has given fewest
    and is below its limit, the first of these."""
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
    """Where all readers of an epoch begin."""

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
