"""Datasets for torch: an iterable dataset that knows rank and worker, and a loader with a state.

A map-style dataset is ``data.open``'s own result: it has ``len`` and rows by number.
"""

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed
import torch.utils.data

from aifs.client.data.dataset import Dataset
from aifs.client.data.reader import (
    Progress,
    Reader,
    Transform,
    counts_in,
    filled,
    order_in,
    order_of,
    reader,
    state_of,
)
from aifs.datasets.arrays import ArrayArithmetic
from aifs.datasets.sequence import Epoch, EpochOrder


class TorchRows(torch.utils.data.IterableDataset):
    """Rows of one epoch, for ``torch.utils.data.DataLoader``: each worker of each rank gives its
    own (docs/guide/datasets.md).

    ``rank``, ``world``: by default torch.distributed's, else RANK and WORLD_SIZE, else one process.
    Other arguments: as ``data.reader``; ``transform`` runs in workers. ``set_epoch`` counts for the
    next iteration, also in persistent workers.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        rank: int | None = None,
        world: int | None = None,
        transform: Transform | None = None,
        drop_last: bool = False,
        workers: int = 1,
        state: Mapping[str, Any] | None = None,
        **order: Any,
    ) -> None:
        """``workers``: of each rank, which the number of shares has to be divided by."""
        here, of = _place()
        self.dataset = dataset
        self.rank = here if rank is None else rank
        self.world = of if world is None else world
        self._drop_last = drop_last
        self._transform = transform
        self._begun = dict(state) if state is not None else None
        readers = self.world * max(workers, 1)
        chosen = order_in(self._begun) if self._begun else order_of(readers, **order)
        self._order = chosen.state()
        # Workers that persist are told of it by memory that they share with us.
        self._epoch = torch.tensor(chosen.epoch).share_memory_()

    @property
    def epoch(self) -> int:
        """The one that the next iteration gives."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        self._epoch.fill_(epoch)

    def order(self) -> EpochOrder:
        """Of the next iteration."""
        return EpochOrder(**(self._order | {"epoch": self.epoch}))

    def state(self) -> dict[str, Any]:
        """Where the next iteration begins."""
        if self._begun is not None and self._begun["epoch"] == self.epoch:
            return self._begun
        return self.order().state() | {"done": 0}

    def __iter__(self) -> Reader:
        info = torch.utils.data.get_worker_info()
        return reader(
            self.dataset,
            rank=self.rank,
            world=self.world,
            worker=info.id if info else 0,
            workers=info.num_workers if info else 1,
            state=self.state(),
            drop_last=self._drop_last,
            transform=self._transform,
        )


class Loader:
    """A ``torch.utils.data.DataLoader`` of a dataset, whose state can be saved with a checkpoint.

    An iteration is an epoch, or the rest of an interrupted one. ``state_dict`` is the end of the
    batches handed out, whatever workers have fetched, the same on all ranks with as many. A Loader
    with it, for any world and workers that divide its shares, gives exactly the rows that follow.

    ``drop_last``: all ranks give as many batches of ``batch_size`` rows. ``order``: arguments of
    ``data.reader``; ``loader``: of DataLoader (``collate_fn``, ``persistent_workers``, ...).
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        *,
        num_workers: int = 0,
        rank: int | None = None,
        world: int | None = None,
        transform: Transform | None = None,
        drop_last: bool = False,
        order: Mapping[str, Any] | None = None,
        **loader: Any,
    ) -> None:
        self._dataset = dataset
        self._batch_size = batch_size
        self._workers = max(num_workers, 1)
        self._drop_last = drop_last
        self._rows_of: dict[str, Any] = {
            "rank": rank,
            "world": world,
            "transform": transform,
            "drop_last": drop_last,
            "workers": self._workers,
        }
        self._rows = TorchRows(dataset, **self._rows_of, **(order or {}))
        self._options = loader | {
            "batch_size": batch_size,
            "num_workers": num_workers,
            "drop_last": drop_last,
        }
        self._loader: torch.utils.data.DataLoader | None = None
        self._batches = 0  # of the epoch, since where it began

    def __len__(self) -> int:
        """Batches of this rank that the next iteration gives."""
        return sum(self._of_workers(self._rows.rank, self._progress()))

    def __iter__(self) -> Iterator[Any]:
        if self._batches:  # the iteration before was left in the middle
            self.load_state_dict(self.state_dict())
        if self._loader is None:
            self._loader = torch.utils.data.DataLoader(self._rows, **self._options)
        for batch in self._loader:
            self._batches += 1
            yield batch
        self._rows.set_epoch(self._rows.epoch + 1)
        self._batches = 0

    def state_dict(self) -> dict[str, Any]:
        """Where the batches that were handed out end: a few integers, or one for each share."""
        epoch, progress = self._epoch(), self._progress()
        given = []
        for worker in range(self._workers):
            for rank in range(self._rows.world):
                batches = self._of_workers(rank, progress)
                had = filled([0] * self._workers, batches, min(self._batches, sum(batches)))
                number = rank + self._rows.world * worker
                given.append(min(had[worker] * self._batch_size, progress.left(number)))
        return state_of(epoch, progress.after(given))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration goes on there. Raises DatasetError for a state of another dataset."""
        rows = TorchRows(self._dataset, **self._rows_of, state=state)
        counts_in(state, Epoch(self._dataset.index, rows.order()))
        self._rows, self._loader, self._batches = rows, None, 0

    def _epoch(self) -> Epoch:
        return Epoch(self._dataset.index, self._rows.order(), ArrayArithmetic())

    def _progress(self) -> Progress:
        epoch = self._epoch()
        counts = counts_in(self._rows.state(), epoch)
        return Progress(epoch, self._rows.world * self._workers, counts)

    def _of_workers(self, rank: int, progress: Progress) -> list[int]:
        """Batches of each worker of the rank: one each in turn, without exhausted workers."""
        readers = [rank + self._rows.world * worker for worker in range(self._workers)]
        if self._drop_last:
            least = min(progress.left(one) for one in range(self._rows.world * self._workers))
            return [least // self._batch_size] * self._workers
        return [-(-progress.left(one) // self._batch_size) for one in readers]


def _place() -> tuple[int, int]:
    """Our rank, and their number."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
