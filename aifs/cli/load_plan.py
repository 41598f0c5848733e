"""``aifs checkpoint plan``: the bytes that the ranks of a job will read of a checkpoint."""

import os
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from aifs.cli.command import PATH, Column, Pairs, Report, Table, command, number
from aifs.cli.door import walk
from aifs.cli.output import size
from aifs.client.checkpoints import attributes

if TYPE_CHECKING:
    from aifs.client.torch.gather_plan import FileRange, LoadPlan

HERE, SERVERS, RECORD, OUTSIDE = "burst tier here", "data servers", "metadata", "not on AIFS"
"""Where bytes are, beside ``host NAME``."""

WAYS = {
    "read": "each rank reads by itself; its host fetches once what several read at the same time",
    "gather": "a rank of each host reads its part of each 64 MiB and passes it on; "
    "the others of its host share its memory",
}


@command(
    "plan",
    short_help="Show what each rank of a job will read.",
    examples="aifs checkpoint plan /mnt/store/run/step-100 --ranks 16 --hosts 2\n"
    "aifs checkpoint plan /mnt/store/run/step-200 --ranks 64 --sharded --tensors\n"
    "aifs checkpoint plan /mnt/store/model.pt --ranks 8 --hosts 8 --together --json",
    sizes=True,
)
@click.argument("paths", nargs=-1, required=True, type=PATH, metavar="PATH...")
@click.option(
    "--ranks", type=click.IntRange(min=1), metavar="N", help="Otherwise one for each PATH."
)
@click.option(
    "--hosts",
    type=click.IntRange(min=1),
    default=1,
    metavar="M",
    help="They have as many ranks each; otherwise one host has all.",
)
@click.option(
    "--together",
    is_flag=True,
    help="All ranks read one file together (gathered.read, group_getfile), not each by torch.load.",
)
@click.option(
    "--sharded",
    is_flag=True,
    help="Of torch.distributed.checkpoint each rank asks for its part of each tensor by the first "
    "dimension, as FSDP does; otherwise for all.",
)
@click.option("--tensors", is_flag=True, help="List the tensors, too, in the order of reading.")
def plan_command(
    paths: tuple[str, ...],
    ranks: int | None,
    hosts: int,
    together: bool,
    sharded: bool,
    tensors: bool,
) -> Report:
    """Show which bytes each rank will read of the checkpoint PATH (or of one file for each rank),
    where these are now, and in which order they are read.

    A directory of parallel_save is loaded by parallel_load, one of torch.distributed.checkpoint by
    AifsReader. Other files are loaded by torch.load, or mapped if they hold tensors alone (those of
    groups, safetensors): a directory with as many files as ranks has one for each, in the order of
    the numbers in their names. JSON has each range.

    A plan does not know: bytes in memory, which nobody is asked for; drains, stages and evictions
    until then; speeds, by which a job that has loaded before may choose another way; that ranks in
    containers of their own read all, where they cannot see the first rank of their host; which
    tensors the job asks for (all of them, here), and the used parts of a file that is mapped.
    torch.load passes over some bytes between tensors, and reads some twice.
    """
    from aifs.client.torch.load_plan import plan_load

    # First of all, because files that are looked into may be brought into the burst tier.
    before = {file: _place(file) for path in paths for file in walk(os.path.realpath(path))}
    try:
        found = plan_load(paths, ranks or len(paths), hosts, together=together, sharded=sharded)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    places = {path: before.get(os.path.realpath(path)) or _place(path) for path in found.sizes}
    told = _facts(found, places)
    return Report(told, *_parts(found, told, places, tensors))


def _place(path: str) -> str:
    """Where reads of a file find its bytes now."""
    info = attributes.get_json(path, attributes.INFO)
    if not info:
        return OUTSIDE
    if copy := info.get("copy"):
        return f"host {copy['host']}" if "host" in copy else HERE
    return SERVERS if "parts" in info else RECORD


def _by_place(ranges: Sequence["FileRange"], places: dict[str, str]) -> dict[str, int]:
    """Bytes in each place."""
    found = dict.fromkeys(_columns(places), 0)
    for path, begin, end in ranges:
        found[places[path]] += end - begin
    return found


def _columns(places: dict[str, str]) -> list[str]:
    return sorted(set(places.values()) | {SERVERS})


def _from_servers(found: "LoadPlan", places: dict[str, str]) -> tuple[int, int]:
    """Bytes if each is fetched once for all hosts, and if once for each host."""
    from aifs.client.torch.gather_plan import distinct_bytes

    by_host: dict[int, list[FileRange]] = {}
    for rank in found.ranks:
        there = [each for each in rank.ranges if places[each.path] == SERVERS]
        by_host.setdefault(rank.host, []).extend(there)
    once = distinct_bytes(each for ranges in by_host.values() for each in ranges)
    return once, sum(map(distinct_bytes, by_host.values()))


def _facts(found: "LoadPlan", places: dict[str, str]) -> dict[str, Any]:
    once, for_each_host = _from_servers(found, places)
    return {
        "loader": found.loader,
        "way": found.way,
        "server_bytes": once,
        "server_bytes_max": for_each_host,
        "files": [
            {"path": path, "bytes": size, "place": places[path]}
            for path, size in found.sizes.items()
        ],
        "ranks": [
            {
                "host": rank.host,
                "bytes": sum(_by_place(rank.ranges, places).values()),
                "places": _by_place(rank.ranges, places),
                "reads": [each._asdict() for each in rank.ranges],
            }
            for rank in found.ranks
        ],
        "tensors": [
            {"name": name, "ranges": [each._asdict() for each in ranges]}
            for name, ranges in found.tensors
        ],
    }


_FILES = (Column("bytes", show=size), Column("where", "place"), Column("file", "path"))
_TENSORS = (
    Column("bytes", lambda row: row[1].end - row[1].begin, size),
    Column("tensor", lambda row: row[0]),
    Column("where", lambda row: f"{row[1].path} at {row[1].begin}"),
)


def _bytes_in(place: str, row: tuple[int, dict[str, Any]]) -> int | None:
    return row[1]["places"][place] or None


def _parts(
    found: "LoadPlan", told: dict[str, Any], places: dict[str, str], tensors: bool
) -> list[Pairs | Table]:
    served = size(told["server_bytes"])
    if told["server_bytes_max"] > told["server_bytes"]:
        apart = size(told["server_bytes_max"])
        served += f"; {apart} if the hosts do not read at the same time"
    facts = [("loader", found.loader), ("way", WAYS[found.way]), ("from servers", served)]
    if not found.tensors:
        facts.append(("order", "not known: no tensors, or more than weights, are in the pickle"))
    ranks = [
        Column("rank", lambda row: row[0], number),
        Column("host", lambda row: row[1]["host"], number),
        Column("reads", lambda row: row[1]["bytes"], size),
    ]
    for place in _columns(places):
        ranks.append(Column(place, partial(_bytes_in, place), size))
    parts: list[Pairs | Table] = [Pairs(facts), Table(ranks, enumerate(told["ranks"]))]
    parts.append(Table(_FILES, told["files"]))
    if tensors:
        rows = [(name, each) for name, ranges in found.tensors for each in ranges]
        parts.append(Table(_TENSORS, rows))
    return parts
