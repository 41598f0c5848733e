"""``aifs import`` and ``aifs export``: trees from buckets of object stores, and to them."""

import os
from dataclasses import asdict

import click

from aifs.cli.command import PATH, Pairs, Report, command
from aifs.cli.door import require_inside
from aifs.cli.output import count, duration, print_error, progress, rate, size

_FAILED_SHOWN = 20


@command(
    "export",
    short_help="Send a directory to a bucket, each file as an object.",
    sizes=True,
    examples="""
aifs export /mnt/store/run s3://bucket/run
aifs export /mnt/store/run s3://bucket/run --since 9000
aifs export /mnt/store/data gs://bucket/data --parallel 64 --json
""",
)
@click.argument("directory", type=PATH, metavar="DIR")
@click.argument("url", metavar="URL")
@click.option(
    "--since",
    type=click.IntRange(min=0),
    metavar="STEP",
    help="Leave out directories in DIR whose names end in this step, or in an earlier one.",
)
@click.option(
    "--parallel",
    type=click.IntRange(1, 256),
    default=16,
    show_default=True,
    metavar="N",
    help="Requests at a time; each may take 8 MiB of memory.",
)
def export_command(directory: str, url: str, since: int | None, parallel: int) -> Report:
    """Send all below the directory DIR, in an AIFS mount or elsewhere, to the bucket and prefix
    URL. Each file becomes an object under its own name, which all tools can read.

    A file is not sent again if its object has the same size and mtime (kept in the metadata of the
    object, as by rclone). So an export that failed, or was killed, goes on if it is called again,
    and a second one sends what has changed. Nothing is deleted in the bucket, except manifests.

    A published checkpoint (with a manifest, by `aifs checkpoint publish` or aifs.client) is there
    whole or not at all: its manifest is sent last, and if it is replaced, the old manifest is
    deleted first. Other files may be seen before all of DIR is there. A file that is changed
    meanwhile is an error; to export what jobs write to, export a snapshot of it.

    Left out, and counted: symlinks, special files, pending checkpoints, .snapshots. Empty
    directories, owners and modes are not kept. Exit code 1: not all was sent, as listed.
    """
    from aifs.transfer.bucket import Tree
    from aifs.transfer.exporting import export

    bucket = Tree(url)
    with progress("exporting") as show:
        sent = export(directory, bucket, parallel=parallel, since=since, show=show)
    _print_failed(sent.failed)
    facts: list[tuple[str, object]] = [
        ("sent", f"{count(sent.sent, 'file')}, {size(sent.sent_bytes)}"),
        ("took", f"{duration(sent.took_s)}, {rate(sent.sent_bytes / sent.took_s)}"),
        ("in the bucket", f"{size(sent.sent_bytes + sent.present_bytes)} of {size(sent.bytes)}"),
        ("checkpoints", f"{sent.checkpoints} whole"),
        ("left out", sent.left_out),
        ("failed", len(sent.failed)),
    ]
    return Report(asdict(sent), Pairs(facts), code=bool(sent.failed))


def _print_failed(failed: list[str]) -> None:
    for line in failed[:_FAILED_SHOWN]:
        print_error(line)
    if len(failed) > _FAILED_SHOWN:
        print_error(f"and {len(failed) - _FAILED_SHOWN} more; --json lists all")


@command(
    "import",
    short_help="Make files of the objects of a bucket, whose bytes stay there.",
    sizes=True,
    examples="""
aifs import s3://bucket/c4 /mnt/store/data/c4
aifs import s3://bucket/c4 /mnt/store/data/c4 --refresh
""",
)
@click.argument("url", metavar="URL")
@click.argument("directory", type=PATH, metavar="DIR")
@click.option(
    "--refresh", is_flag=True, help="Files whose objects have changed become what is there now."
)
def import_command(url: str, directory: str, refresh: bool) -> Report:
    """Make a file below DIR, a directory of an AIFS mount, for each object of the bucket and prefix
    URL. Names, sizes and times are those of the listing; no bytes are read.

    Bytes stay in the bucket. They are read when programs read them, by the daemon, with the region
    and the keys of its own environment, and kept in blocks in the burst tier. Each file is pinned
    to the content that the object has now (its ETag). If the object is replaced or deleted, reads
    of bytes that are not in blocks fail with EIO, and the log names the object. Files can be
    changed, renamed and removed; a file that is changed becomes one of AIFS, and the bucket stays
    as it is.

    Called again, it goes on where it was killed, and adds what is new. Files that are there stay;
    with --refresh those that are pinned to another content are replaced. Files whose objects are
    gone stay in any case. For root alone. Exit code 1: some objects have no file, as listed.
    """
    from aifs.transfer.importing import import_objects

    is_there = os.path.isdir(directory)
    require_inside(directory if is_there else os.path.dirname(os.path.abspath(directory)))
    with progress("importing", of="files") as show:
        told = import_objects(url, directory, refresh=refresh, show=show)
    _print_failed(told.failed)
    speed = f"{told.objects / told.took_s:,.0f} objects/s"
    facts: list[tuple[str, object]] = [
        ("objects", f"{told.objects:,}, {size(told.bytes)}"),
        ("made", told.made),
        ("there before", told.same),
        ("refreshed", told.refreshed),
        ("changed", f"{told.changed}; --refresh takes them over" if told.changed else 0),
        ("others' names", told.kept),
        ("failed", len(told.failed)),
        ("took", f"{duration(told.took_s)}, {speed}"),
    ]
    return Report(asdict(told), Pairs(facts), code=bool(told.failed))
