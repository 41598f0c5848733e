"""``aifs checkpoint``: the checkpoints of a directory, which are kept, and publishing one."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aifs.cli.command import (
    DURATION,
    PATH,
    SIZE,
    Column,
    Pairs,
    Report,
    Table,
    command,
    group,
    number,
)
from aifs.cli.door import walk
from aifs.cli.output import count, print_error, progress, size, when
from aifs.client.checkpoints import attributes
from aifs.core.errors import UserError

if TYPE_CHECKING:
    from aifs.client import Checkpoint
    from aifs.client.torch.gather_files import FileRange, LoadPlan


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
    before = {file: _place(file) for path in paths for file, _ in walk(os.path.realpath(path))}
    try:
        found = plan_load(paths, ranks or len(paths), hosts, together=together, sharded=sharded)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    places = {path: before.get(os.path.realpath(path)) or _place(path) for path in found.sizes}
    told = _facts(found, places)
    return Report(told, *_parts(found, told, places, tensors))


def _place(path: str) -> str:
    info = attributes.get_json(path, attributes.INFO)
    if not info:
        return OUTSIDE
    if copy := info.get("copy"):
        return f"host {copy['host']}" if "host" in copy else HERE
    if "parts" not in info:
        return RECORD
    return HERE if info["block_bytes"] >= info["size"] else SERVERS


def _by_place(ranges: Sequence["FileRange"], places: dict[str, str]) -> dict[str, int]:
    found = dict.fromkeys(_columns(places), 0)
    for path, begin, end in ranges:
        found[places[path]] += end - begin
    return found


def _columns(places: dict[str, str]) -> list[str]:
    return sorted(set(places.values()) | {SERVERS})


def _from_servers(found: "LoadPlan", places: dict[str, str]) -> tuple[int, int]:
    """Bytes if each is fetched once for all hosts, and if once for each host."""
    from aifs.client.torch.gather_files import distinct_bytes

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


_CHECKPOINTS = (
    Column("checkpoint", lambda one: one.path.name),
    Column("step", show=number),
    Column("published", "time", when),
    Column("size", "size", size),
    Column("files", show=number),
    Column("state"),
    Column("problem"),
)


@group(
    "checkpoint",
    short_help="Publish, list, verify and remove checkpoints, and say which are kept.",
)
def checkpoint_command() -> None:
    """Publish, show, verify and remove the checkpoints of a directory, in an AIFS or any other
    filesystem.
    """


checkpoint_command.add_command(plan_command)


@checkpoint_command.command("ls", examples="aifs checkpoint ls /mnt/store/run", sizes=True)
@click.argument("path", type=PATH)
@click.option(
    "--pending",
    is_flag=True,
    help="Also saves that have not ended, or are left of a save that did not end.",
)
def ls_command(path: str, pending: bool) -> Report:
    """List the checkpoints in the directory PATH, the newest last.

    A checkpoint is complete if all files that its manifest names are there with their sizes (verify
    reads them, too).
    """
    from aifs.client import list_checkpoints

    found = list_checkpoints(path, pending=pending)
    return Report([_describe(one) for one in found], Table(_CHECKPOINTS, found))


def _describe(one: "Checkpoint") -> dict[str, Any]:
    return {
        "path": str(one.path),
        "state": one.state,
        "step": one.step,
        "time": one.time,
        "bytes": one.size,
        "files": one.files,
        "problem": one.problem,
        "shown": one.shown,
    }


@checkpoint_command.command("latest", examples="aifs checkpoint latest /mnt/store/run")
@click.argument("path", type=PATH)
@click.option(
    "--any", "in_place", is_flag=True, help="Also one that is not known to be whole, if not empty."
)
def latest_command(path: str, in_place: bool) -> Report | int:
    """Print the path of the newest complete checkpoint in the directory PATH. Exit code 1 if there
    is none.

    Those count that were published or renamed into place in an AIFS, or else have all files of
    their manifests. If a directory of an AIFS has none, its program writes in place: this prints
    the one with the highest step that is not empty, and warns.
    """
    from aifs.client import list_checkpoints
    from aifs.client.checkpoints.attributes import is_aifs
    from aifs.client.checkpoints.catalog import NOT_SHOWN, newest_of

    found = list_checkpoints(path)
    newest = newest_of(found, in_place)
    if newest is None and is_aifs(path) and not any(one.shown for one in found):
        newest = newest_of(found, in_place=True)
        if newest is not None:
            print_error(f"{newest}: {NOT_SHOWN}")
    if newest is None:
        others = " (--any: also what may not be whole)" if newest_of(found, True) else ""
        print_error(f"{path}: there is no complete checkpoint here{others}")
        return 1
    return Report({"path": str(newest)}, str(newest))


@checkpoint_command.command(
    "verify", examples="aifs checkpoint verify /mnt/store/run/step-100", sizes=True
)
@click.argument("paths", nargs=-1, required=True, type=PATH, metavar="PATH...")
@click.option("--all", "all_below", is_flag=True, help="All checkpoints in the directories PATH.")
def verify_command(paths: tuple[str, ...], all_below: bool) -> Report:
    """Read the checkpoints PATH and compare them with their manifests.

    Every file that is missing, has another size or other bytes is named, with exit code 1.
    """
    from aifs.client import list_checkpoints

    wanted = [Path(path) for path in paths]
    unlisted = 0
    if all_below:
        found = [one for path in paths for one in list_checkpoints(path)]
        wanted = [one.path for one in found if one.state != "no manifest"]
        unlisted = len(found) - len(wanted)
    results = [_verify(path) for path in wanted]
    if unlisted:
        print_error(f"not verified, since they have no manifest: {unlisted}")
    told = [each for each, _ in results]
    is_whole = not any(each["problems"] for each in told)
    lines = [line for _, line in results if line]
    return Report(told, *lines, code=0 if is_whole else 1)


def _verify(path: Path) -> tuple[dict[str, Any], str]:
    """For JSON, and in words; problems are printed."""
    from aifs.client import verify
    from aifs.client.checkpoints.manifest import read

    try:
        listed = read(str(path))
    except UserError:
        listed = None  # verify says what is wrong with it
    done = 0
    with progress(f"verifying {path.name}") as show:

        def on_bytes(number: int) -> None:
            nonlocal done
            done += number
            show(done, listed.size if listed else done)

        problems = verify(path, on_bytes)
    for problem in problems:
        print_error(f"{path}: {problem}")
    told: dict[str, Any] = {"path": str(path), "problems": [str(problem) for problem in problems]}
    if problems:
        return told, ""
    assert listed is not None
    hashed = all(file.blake3 for file in listed.files.values())
    without = "" if hashed else "; they were saved without hashes"
    files = f"{count(len(listed.files), 'file')}, {size(listed.size)}"
    told |= {"files": len(listed.files), "bytes": listed.size, "hashed": hashed}
    return told, f"{path}: {files}, as they were saved{without}"


@checkpoint_command.command("rm", examples="aifs checkpoint rm /mnt/store/run/step-100")
@click.argument("paths", nargs=-1, required=True, type=PATH, metavar="PATH...")
@click.option("--yes", is_flag=True, help="Do not ask.")
def rm_command(paths: tuple[str, ...], yes: bool) -> None:
    """Remove the checkpoints PATH, each at one stroke, so that nobody finds half of one.

    In an AIFS this takes the same few milliseconds however large they are. Exit code 1 if it is not
    confirmed, as without a terminal and --yes.
    """
    from aifs.client import remove
    from aifs.client.checkpoints.catalog import is_checkpoint
    from aifs.client.checkpoints.manifest import CheckpointError

    for path in paths:
        if not is_checkpoint(path):
            raise CheckpointError(
                f"{path}: is no checkpoint; aifs rm -r, or rm -r, removes any directory"
            )
    if not yes:
        click.confirm(
            f"Remove {', '.join(os.path.basename(path.rstrip('/')) for path in paths)} for good?",
            abort=True,
        )
    for path in paths:
        remove(path)


@checkpoint_command.command(
    "keep", examples="aifs checkpoint keep /mnt/store/run --last 3 --every 1000"
)
@click.argument("path", type=PATH)
@click.option("--last", type=click.IntRange(min=1), metavar="N", help="The newest N.")
@click.option(
    "--every", type=click.IntRange(min=1), metavar="N", help="Those whose step is a multiple of N."
)
@click.option(
    "--age", type=DURATION, metavar="DURATION", help="Those that are younger, such as 7d."
)
@click.option(
    "--bytes",
    "bytes_max",
    type=SIZE,
    metavar="SIZE",
    help="Remove the oldest as long as there are more bytes than this.",
)
@click.option("--dry-run", is_flag=True, help="Only print what would be removed now.")
def keep_command(
    path: str,
    last: int | None,
    every: int | None,
    age: float | None,
    bytes_max: int | None,
    dry_run: bool,
) -> Report:
    """Say which checkpoints of the directory PATH remain; prints those that have to go.

    An AIFS keeps to this from now on, at once and after each publish; setfattr -x user.aifs.keep
    PATH ends that. Elsewhere it is done once. Each of --last, --every and --age keeps checkpoints.
    Counted and removed are only those that were published, or in an AIFS renamed into place. Never
    removed: the newest complete one, one that is in use, one that is damaged or pending. If steps
    and times of publishing disagree, nothing is removed.
    """
    from aifs.client import keep
    from aifs.core.retention import Keep, format_keep

    policy = format_keep(Keep(last or 0, every or 0, age or 0.0, bytes_max or 0))
    if not policy:
        raise click.UsageError("say what to keep: --last, --every, --age or --bytes")
    gone = [str(one) for one in keep(path, policy, dry_run=dry_run)]
    return Report({"keep": policy, "removed": gone}, *gone)


# --- publish --------------------------------------------------------------------------------------


@checkpoint_command.command(
    "publish",
    short_help="Make a directory appear under its final name, complete.",
    examples="aifs checkpoint publish /mnt/store/run/tmp /mnt/store/run/step-100 "
    "--latest latest\n"
    "aifs checkpoint publish tmp iter_0000100 --tracker latest_checkpointed_iteration.txt "
    "--step 100\n"
    "aifs checkpoint publish tmp step-100 --ranks 8",
    sizes=True,
)
@click.argument("tmp", type=PATH)
@click.argument("final", type=PATH)
@click.option(
    "--ranks",
    type=click.IntRange(min=1),
    metavar="N",
    help="Refuse unless ranks 0 to N-1 have committed.",
)
@click.option("--latest", metavar="NAME", help="A symlink beside FINAL that shall lead to it.")
@click.option("--tracker", metavar="NAME", help="A file beside FINAL that shall hold its step.")
@click.option(
    "--step", type=click.IntRange(min=0), help="The step; default: the number at the end of FINAL."
)
@click.option(
    "--replace",
    is_flag=True,
    help="Put it in the place of a FINAL that is there already, which is removed.",
)
@click.option(
    "--no-hash", is_flag=True, help="Do not read the files for the hashes of the manifest."
)
def publish_command(
    tmp: str,
    final: str,
    ranks: int | None,
    latest: str | None,
    tracker: str | None,
    step: int | None,
    replace: bool,
    no_hash: bool,
) -> Report:
    """Make the directory TMP appear as FINAL, with a manifest of its files.

    Everything below is durable before the name appears; the pointers change with it in an AIFS,
    right after it elsewhere. Nothing may write to TMP any more. Ranks commit by
    aifs.client.commit(TMP, RANK), or in an AIFS, where user.aifs.pending says how many there are,
    by: setfattr -n user.aifs.commit -v RANK TMP
    """
    from aifs.client import publish

    done = publish(
        tmp,
        final,
        step=step,
        ranks=ranks,
        latest=latest,
        tracker=tracker,
        replace=replace,
        hash=not no_hash,
    )
    return Report(
        {"path": final, "files": len(done.files), "bytes": done.size},
        f"published {final}: {count(len(done.files), 'file')}, {size(done.size)}",
    )
