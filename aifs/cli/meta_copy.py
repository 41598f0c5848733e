"""``aifs meta copy``: move the metadata of a store from one host into a database, or back."""

import time

import click

from aifs.cli.arguments import PATH

EPILOG = """
\b
Both name the same data servers; the files on them stay where they are. What is interrupted is gone
on with, or begun again, by the same command; until then aifs says which of both is the store.

\b
Examples:
  aifs umount --drain /mnt/store
  aifs meta copy /srv/store /etc/aifs/gpu-001.yaml
  aifs mount /etc/aifs/gpu-001.yaml /mnt/store

\b
Exit codes: 0; those of `aifs fsck`, which looks at the result; 4 or 5: nothing was changed.
"""


@click.command("copy", epilog=EPILOG)
@click.argument("old", type=PATH, metavar="FROM")
@click.argument("new", type=PATH, metavar="TO")
def copy_command(old: str, new: str) -> int:
    """Move the metadata of the store with the SOURCE FROM to where the SOURCE TO has them: from a
    directory of one host into a database (meta.engine postgresql), so that many hosts can mount it,
    or back.

    Nobody has the store mounted, it was closed in order, and nothing is undrained. All records are
    copied, read again, and compared; then FROM is the store no more, and TO is checked by fsck.
    What is cached in burst tiers is given up.
    """
    from aifs.check.fsck import check
    from aifs.cli.fsck import print_report
    from aifs.cli.output import print_error
    from aifs.cli.progress import progress
    from aifs.core import config
    from aifs.core.units import describe_size
    from aifs.store.copying import copy_metadata

    source, target = config.load(old, {}), config.load(new, {})
    begin = time.monotonic()
    with progress("copying") as show:
        copied = copy_metadata(source, target, show)
    if copied.records:
        print(
            f"copied {copied.records} records ({describe_size(copied.bytes)}) in "
            f"{time.monotonic() - begin:.1f} s; read again, they have the same digest "
            f"({copied.digest[:16]})"
        )
    else:
        print_error("the records had been copied before; what was left to do is done")
    print(f"the store is {target.source} now, and {source.source} no more")
    return print_report(check(target, repair=False))
