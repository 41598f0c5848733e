"""``aifs checkpoints``: what checkpoints there are, whether they are whole, and which are kept."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aifs.cli.arguments import DURATION, PATH, SIZE
from aifs.cli.load_plan import load_command

if TYPE_CHECKING:
    from aifs.client import Checkpoint


@click.group(
    "checkpoints", short_help="List, verify and remove checkpoints, and say which are kept."
)
def checkpoints_group() -> None:
    """Show, verify and remove the checkpoints of a directory, in an AIFS or any other
    filesystem.
    """


checkpoints_group.add_command(load_command)


@checkpoints_group.command("ls", epilog="\b\nExample:\n  aifs checkpoints ls /mnt/store/run")
@click.argument("path", type=PATH)
@click.option(
    "--pending",
    is_flag=True,
    help="Also what is being saved, or is left of a save that did not end.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON; its keys keep their meaning.")
def ls_command(path: str, pending: bool, as_json: bool) -> None:
    """List the checkpoints in the directory PATH, the newest last.

    A checkpoint is complete if all files that its manifest names are there with their sizes (verify
    reads them, too).
    """
    from aifs.cli.output import describe_time, print_json, print_table
    from aifs.client import list_checkpoints
    from aifs.core.units import describe_size

    found = list_checkpoints(path, pending=pending)
    if as_json:
        print_json([_describe(one) for one in found])
        return
    rows = [
        (
            one.path.name,
            "" if one.step is None else one.step,
            describe_time(one.time),
            describe_size(one.size),
            one.files,
            one.state,
            one.problem,
        )
        for one in found
    ]
    columns = ("checkpoint", "step", "published", "size", "files", "state", "problem")
    print_table(columns, rows, right=("step", "size", "files"))


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


@checkpoints_group.command(
    "latest", epilog="\b\nExample:\n  aifs checkpoints latest /mnt/store/run"
)
@click.argument("path", type=PATH)
@click.option(
    "--any", "in_place", is_flag=True, help="Also one that is not known to be whole, if not empty."
)
def latest_command(path: str, in_place: bool) -> int:
    """Print the path of the newest complete checkpoint in the directory PATH. Exit code 1 if there
    is none.

    Those count that were published or renamed into place in an AIFS, or else have all files of
    their manifests. If a directory of an AIFS has none, its program writes in place: this prints
    the one with the highest step that is not empty, and warns.
    """
    from aifs.cli.output import print_error
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
    print(newest)
    return 0


@checkpoints_group.command(
    "verify", epilog="\b\nExample:\n  aifs checkpoints verify /mnt/store/run/step-100"
)
@click.argument("paths", nargs=-1, required=True, type=PATH, metavar="PATH...")
@click.option("--all", "all_below", is_flag=True, help="All checkpoints in the directories PATH.")
def verify_command(paths: tuple[str, ...], all_below: bool) -> int:
    """Read the checkpoints PATH and compare them with their manifests.

    Every file that is missing, has another size or other bytes is named, with exit code 1.
    """
    from aifs.cli.output import print_error
    from aifs.client import list_checkpoints

    wanted = [Path(path) for path in paths]
    unlisted = 0
    if all_below:
        found = [one for path in paths for one in list_checkpoints(path)]
        wanted = [one.path for one in found if one.state != "no manifest"]
        unlisted = len(found) - len(wanted)
    failed = [path for path in wanted if not _verify(path)]
    if unlisted:
        print_error(f"not verified, since they have no manifest: {unlisted}")
    return 1 if failed else 0


def _verify(path: Path) -> bool:
    from aifs.cli.output import count, print_error
    from aifs.cli.progress import progress
    from aifs.client import verify
    from aifs.client.checkpoints.manifest import read
    from aifs.core.errors import UserError
    from aifs.core.units import describe_size

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
    if problems:
        return False
    assert listed is not None
    what = (
        ""
        if all(file.blake3 for file in listed.files.values())
        else "; they were saved without hashes"
    )
    print(
        f"{path}: {count(len(listed.files), 'file')}, {describe_size(listed.size)}, as they were "
        f"saved{what}"
    )
    return True


@checkpoints_group.command(
    "rm", epilog="\b\nExample:\n  aifs checkpoints rm /mnt/store/run/step-100"
)
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


@checkpoints_group.command(
    "keep", epilog="\b\nExample:\n  aifs checkpoints keep /mnt/store/run --last 3 --every 1000"
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
    "size",
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
    size: int | None,
    dry_run: bool,
) -> None:
    """Say which checkpoints of the directory PATH remain; prints those that have to go.

    An AIFS keeps to this from now on, at once and after each publish; setfattr -x user.aifs.keep
    PATH ends that. Elsewhere it is done once. What one of --last, --every and --age keeps stays.
    Counted and removed are only those that were published, or in an AIFS renamed into place. Never
    removed: the newest complete one, one that is in use, one that is damaged or pending. If steps
    and times of publishing disagree, nothing is removed.
    """
    from aifs.client import keep
    from aifs.core.retention import Keep, format_keep

    policy = format_keep(Keep(last or 0, every or 0, age or 0.0, size or 0))
    if not policy:
        raise click.UsageError("say what to keep: --last, --every, --age or --bytes")
    for one in keep(path, policy, dry_run=dry_run):
        print(one)
