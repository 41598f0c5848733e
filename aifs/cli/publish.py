"""``aifs publish``: give a directory that has been written its name, whole and durable, with a
manifest.
"""

import click

from aifs.cli.arguments import PATH

EPILOG = """
\b
Examples:
  aifs publish /mnt/store/run/tmp /mnt/store/run/step-100 --latest latest
  aifs publish tmp iter_0000100 --tracker latest_checkpointed_iteration.txt --step 100
  aifs publish tmp step-100 --ranks 8
"""


@click.command(
    "publish", epilog=EPILOG, short_help="Make a directory appear under its final name, complete."
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
) -> None:
    """Make the directory TMP appear as FINAL, with a manifest of its files.

    Everything below is durable before the name appears; the pointers change with it in an AIFS,
    right after it elsewhere. Nothing may write to TMP any more. Ranks commit by
    aifs.client.commit(TMP, RANK), or in an AIFS, where user.aifs.pending says how many there are,
    by: setfattr -n user.aifs.commit -v RANK TMP
    """
    from aifs.cli.output import count
    from aifs.client import publish
    from aifs.core.units import describe_size

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
    print(f"published {final}: {count(len(done.files), 'file')}, {describe_size(done.size)}")
