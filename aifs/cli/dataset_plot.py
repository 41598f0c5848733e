"""The picture of ``aifs dataset show --plot``: files against positions of an epoch; on a mount also
which files are in the burst tier now, and how far the readers of the epoch are."""

import os
from typing import TYPE_CHECKING, Any

from aifs.cli import hints

if TYPE_CHECKING:
    from aifs.client.data import Dataset
    from aifs.datasets.sequence import EpochOrder

_READ, _THERE, _AT = "#0072B2", "#E69F00", "#D55E00"


def plot(dataset: "Dataset", seed: int | None, path: str) -> None:
    """A point for each piece of a block, in the order of ``seed``; None: in that of the epoch that
    is read now and has got furthest, if the mount tells of any, else of seed 0. Raises OSError."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    from aifs.datasets.arrays import ArrayArithmetic
    from aifs.datasets.sequence import Epoch

    followed = _followed(dataset, seed)
    order = _order(followed, seed)
    epoch = Epoch(dataset.index, order, ArrayArithmetic())
    positions, places = [], []
    for share in range(order.shares):
        row = 0
        for piece in epoch.pieces(share):
            positions.append(row * order.shares + share)
            places.append(dataset.index.file_of(piece.block))
            row += piece.rows
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(positions, places, linestyle="none", marker=".", markersize=3, color=_READ)
    if there := _in_burst_tier(dataset):
        label = f"in the burst tier: {len(there)} of {len(dataset.index.paths)} files"
        axes.barh(there, len(dataset), 1, color=_THERE, alpha=0.35, zorder=0, label=label)
    if followed is not None:
        axes.axvline(followed["done_rows"], color=_AT, label="its readers are here")
    if there or followed is not None:
        figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("row of the epoch")
    axes.set_ylabel("file, in the order of paths")
    axes.set_title(f"{dataset.path}: what epoch {order.epoch} of seed {order.seed} reads")
    figure.savefig(path)


def _followed(dataset: "Dataset", seed: int | None) -> dict[str, Any] | None:
    """The state of the epoch of this seed that is read on the mount; None: there is none."""
    try:
        told = hints.read(dataset.path, hints.ORDER)["epochs"]
    except OSError:  # there is no epoch, or no mount
        return None
    fitting = [one for one in told if seed in (None, one["seed"])]
    return max(fitting, key=lambda one: one["done_rows"], default=None)


def _order(followed: dict[str, Any] | None, seed: int | None) -> "EpochOrder":
    from aifs.datasets.sequence import EpochOrder

    if followed is None:
        return EpochOrder(seed or 0)
    told = {name: followed[name] for name in ("seed", "epoch", "shares", "window")}
    return EpochOrder(**told)


def _in_burst_tier(dataset: "Dataset") -> list[int]:
    """Numbers of the files that have a copy there."""
    found = []
    for number, name in enumerate(dataset.index.paths):
        path = os.path.join(dataset.path, os.fsdecode(name)) if name else dataset.path
        try:
            state = hints.read(path, hints.STATE)
        except OSError:  # no mount, or gone meanwhile
            continue
        found += [number] if state.get("copy") else []
    return found
