"""``aifs dataset``: the facts of a dataset, whether it is whole, and how fast it is read here."""

import os
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from aifs.cli import door
from aifs.cli.command import PATH, Column, Pairs, Report, Table, group, number
from aifs.cli.output import count, describe_error, duration, print_error, progress, size
from aifs.core.errors import DatasetError

if TYPE_CHECKING:
    from aifs.client.data import Dataset
    from aifs.datasets.sequence import EpochOrder

_SHUFFLES = {"none": "in file order", "blocks": "shuffled (blocks)", "rows": "row by row, random"}
_THREADS = 8
_ERRORS = 10  # that are printed
_COLUMNAR = ("parquet", "arrow")
_AT_ONCE = 1000  # rows that are decoded before others are let go of


@group("dataset", short_help="Datasets: what they are, whether they are whole, how fast.")
def dataset_command() -> None:
    """Datasets that aifs.client.data reads: directories of Parquet, Arrow, JSON lines, text, tar,
    Megatron, fixed-size records, or of files; on a mount or anywhere."""


def _dataset_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--columns", help="Of Parquet and Arrow: these alone, separated by commas."),
        click.option("--record-bytes", type=click.IntRange(1), help="Of records: a row's size."),
        click.option("--format", help="Parquet, text, ... in small letters; or it is found out."),
        click.argument("path", type=PATH),
    ):
        command = option(command)
    return command


@dataset_command.command(
    "index",
    short_help="Make the index of a dataset.",
    examples="aifs dataset index /mnt/store/c4",
)
@_dataset_options
def index_command(path: str, **options: Any) -> Report:
    """Read the footers or headers of all files of the dataset PATH, unless it has an index that is
    right, and keep them beside the files: jobs start in less than a second then."""
    dataset, seconds = _opened(path, options)
    files, rows = len(dataset.index.paths), len(dataset)
    return Report(
        {"files": files, "rows": rows, "seconds": round(seconds, 3)},
        f"{count(files, 'file')}, {count(rows, 'row')}: {duration(seconds)}",
    )


@dataset_command.command(
    "show",
    short_help="Show what a dataset consists of.",
    examples="aifs dataset show /mnt/store/c4\naifs dataset show /mnt/store/c4 --plot order.svg",
    sizes=True,
)
@_dataset_options
@click.option("--plot", type=PATH, help="Draw which file an epoch reads when (svg, png, pdf).")
@click.option("--seed", type=int, help="Draw this order, not that of an epoch that is read now.")
def show_command(path: str, plot: str | None, seed: int | None, **options: Any) -> Report:
    """Show the format, files, blocks, rows and bytes of the dataset PATH, and how long it took to
    index or to find that the index is right. On a mount --plot also draws which files are in the
    burst tier, and how far an epoch's readers are."""
    dataset, seconds = _opened(path, options)
    index = dataset.index
    # Of a directory of files the one "file" is a list of them, each of which is a row.
    bytes_ = sum(index.sizes) if not index.catalogue else None
    told = {
        "format": dataset.format,
        "files": len(index.paths) if not index.catalogue else len(dataset),
        "blocks": len(index.rows),
        "rows": len(dataset),
        "bytes": bytes_,
        "seconds": round(seconds, 3),
    }
    if plot is not None:
        _plot(dataset, seed, plot)
    shown = {"bytes": "-" if bytes_ is None else size(bytes_), "seconds": f"{seconds:.3f}"}
    return Report(told, Pairs((told | shown).items()))


@dataset_command.command(
    "verify",
    short_help="Read and decode every row of a dataset.",
    examples="aifs dataset verify /mnt/store/c4",
)
@_dataset_options
def verify_command(path: str, **options: Any) -> Report:
    """Read and decode all rows of the dataset PATH, and check that an epoch gives each of them
    once, and that Parquet and Arrow files have the same columns. Damage is named by file and
    place; the exit code is 9 then."""
    dataset, _ = _opened(path, options)
    _check_order(dataset)
    damaged = list(_damaged(dataset))
    for error in damaged[:_ERRORS]:
        print_error(error)
    if damaged:
        raise DatasetError(
            f"{path}: {count(len(damaged), 'block')} of {len(dataset.index.rows)} cannot be read,"
            " or not with the others"
        )
    rows, blocks = len(dataset), len(dataset.index.rows)
    text = f"{count(rows, 'row')} in {count(blocks, 'block')}: all right"
    return Report({"rows": rows, "blocks": blocks}, text)


@dataset_command.command(
    "bench",
    short_help="Measure how fast a dataset is read in different orders.",
    examples="aifs dataset bench /mnt/store/c4 --seconds 30",
)
@_dataset_options
@click.option("--seconds", type=click.FloatRange(0.01), default=5.0, help="For each order.  [5]")
def bench_command(path: str, seconds: float, **options: Any) -> Report:
    """Read the dataset PATH in file order, shuffled by blocks, and by single rows anywhere, by one
    process, for some seconds each. Pages in the page cache are read from there: the first order may
    be the slowest."""
    dataset, _ = _opened(path, options)
    bytes_per_row = sum(dataset.index.lengths) / max(len(dataset), 1)
    rates = {shuffle: _rate(dataset, shuffle, seconds) for shuffle in _SHUFFLES}
    plain = rates["none"] or 1.0
    columns = (
        Column("order", lambda row: _SHUFFLES[row[0]]),
        Column("rows/s", lambda row: f"{row[1]:,.0f}", number),
        # Of a directory of files these would be the bytes of their list.
        Column("MB/s", lambda row: f"{row[1] * bytes_per_row / 1e6:,.1f}", number)
        if not dataset.index.catalogue
        else Column("MB/s", lambda row: "-", number),
        Column("ratio", lambda row: f"{row[1] / plain:.2f}", number),
    )
    told = {name: {"rows_per_s": rate} for name, rate in rates.items()}
    return Report(told, Table(columns, rates.items()))


def _opened(path: str, options: dict[str, Any]) -> "tuple[Dataset, float]":
    """And the seconds that it took."""
    from aifs.client import data

    given = {name: value for name, value in options.items() if value is not None}
    if "columns" in given:
        given["columns"] = given["columns"].split(",")
    begun = time.monotonic()
    with progress("indexing", of="files") as show:
        dataset = data.open(path, on_file=show, **given)
    return dataset, time.monotonic() - begun


def _check_order(dataset: "Dataset") -> None:
    """Check that an epoch reads each row once. Raises DatasetError."""
    from aifs.datasets.arrays import ArrayArithmetic
    from aifs.datasets.sequence import Epoch, EpochOrder

    epoch = Epoch(dataset.index, EpochOrder(seed=1), ArrayArithmetic())
    ends = [0] * len(dataset.index.rows)
    pieces = sorted(piece for share in range(64) for piece in epoch.pieces(share))
    for piece in pieces:
        if piece.first != ends[piece.block]:
            raise DatasetError(
                f"{dataset.path}: the order gives a row of block {piece.block} twice"
            )
        ends[piece.block] += piece.rows
    if ends != list(dataset.index.rows):
        raise DatasetError(f"{dataset.path}: the order leaves rows out")


def _damaged(dataset: "Dataset") -> Iterator[str]:
    """The fault of each block that is not right."""
    from concurrent.futures import ThreadPoolExecutor

    index = dataset.index

    def decode(block: int) -> tuple[str, str]:
        """Its fault, and its columns."""
        try:
            rows, opened = index.rows[block], dataset.open_block(block)
            for first in range(0, rows, _AT_ONCE):
                opened.take(range(first, min(first + _AT_ONCE, rows)))
            if dataset.format not in _COLUMNAR:
                return "", ""
            return "", ", ".join(f"{each.name} {each.type}" for each in opened.batch(0, 1).schema)
        except (DatasetError, OSError) as error:
            return describe_error(error), ""

    expected = ""
    with ThreadPoolExecutor(_THREADS) as pool, progress("reading") as show:
        done, total = 0, sum(index.lengths)
        for block, (error, columns) in enumerate(pool.map(decode, range(len(index.rows)))):
            done += index.lengths[block]
            show(done, total)
            expected = expected or columns
            if columns and columns != expected:
                name = os.path.join(dataset.path, os.fsdecode(index.paths[index.file_of(block)]))
                error = f"{name}: its columns are {columns}, those of files before {expected}"
            if error:
                yield error


def _rate(dataset: "Dataset", shuffle: str, seconds: float) -> float:
    """Rows per second."""
    from aifs.client import data

    given = 0
    begun = time.monotonic()
    buffer = 64 if shuffle == "rows" else data.BUFFER  # each of these rows costs a block
    with data.reader(dataset, shuffle=shuffle, buffer=buffer) as rows:
        while time.monotonic() - begun < seconds and (some := sum(1 for _ in islice(rows, 64))):
            given += some
    return given / (time.monotonic() - begun)


# --- the picture ----------------------------------------------------------------------------------

_READ, _THERE, _AT = "#0072B2", "#E69F00", "#D55E00"


def _plot(dataset: "Dataset", seed: int | None, path: str) -> None:
    """A point for each piece of a block, in the order of ``seed``; None: of the most advanced epoch
    now read, else of seed 0. Raises OSError."""
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
    axes.set_title(f"{dataset.path}: reads of epoch {order.epoch}, seed {order.seed}")
    figure.savefig(path)


def _followed(dataset: "Dataset", seed: int | None) -> dict[str, Any] | None:
    """The state of the epoch of this seed that is read on the mount, or None."""
    try:
        told = door.read(dataset.path, "order")["epochs"]
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
    for index, name in enumerate(dataset.index.paths):
        path = os.path.join(dataset.path, os.fsdecode(name)) if name else dataset.path
        try:
            state = door.read(path, "state")
        except OSError:  # no mount, or gone meanwhile
            continue
        found += [index] if state.get("copy") else []
    return found
