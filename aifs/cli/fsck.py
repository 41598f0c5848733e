"""``aifs fsck``: check a store that is not mounted, and mend it."""

from contextlib import nullcontext
from typing import TYPE_CHECKING

import click

from aifs.cli.arguments import PATH
from aifs.core.errors import AifsError

if TYPE_CHECKING:
    from aifs.check.findings import FsckReport

EXIT_CORRECTED = 1
EXIT_UNCORRECTED = 4
EXIT_CANNOT_CHECK = 8

EPILOG = """
\b
Exit codes, as fsck(8):
  0  nothing wrong
  1  something was wrong, and all of it was repaired
  2  wrong usage of the command line
  4  something is wrong and was not repaired
  8  the store could not be checked (wrong configuration, in use, damaged beyond reading)

\b
Examples:
  aifs fsck /srv/store
  aifs fsck /srv/store --repair
  aifs fsck /srv/store --deep
"""


@click.command("fsck", epilog=EPILOG)
@click.argument("source", type=PATH)
@click.option("--repair", is_flag=True, help="Mend what can be mended without guessing.")
@click.option("--deep", is_flag=True, help="Also read all bytes that have checksums, and compare.")
@click.option(
    "--force", is_flag=True, help="Take the store over from a host that is known to be dead."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON; its keys keep their meaning.")
def fsck_command(source: str, repair: bool, deep: bool, force: bool, as_json: bool) -> int:
    """Check the store SOURCE, which must not be mounted. Changes nothing without --repair."""
    from rich.console import Console

    from aifs.check.fsck import check
    from aifs.cli.output import describe_error, print_error, print_json
    from aifs.core import config

    console = Console(stderr=True)
    try:
        with console.status("checking") if console.is_terminal else nullcontext():
            report = check(config.load(source, {}), repair, deep=deep, force=force)
    except (AifsError, OSError) as error:
        print_error(describe_error(error))
        return EXIT_CANNOT_CHECK
    if as_json:
        findings = [
            {
                "kind": item.kind,
                "where": item.where,
                "detail": item.detail,
                "repaired": item.repaired,
            }
            for item in report.findings
        ]
        print_json({"findings": findings, "counts": report.counts})
        return exit_code(report)
    return print_report(report)


def print_report(report: "FsckReport") -> int:
    """For people; the exit code."""
    from aifs.cli.output import print_table

    if report.findings:
        rows = [
            (item.kind, "repaired" if item.repaired else "left", item.where, item.detail)
            for item in report.findings
        ]
        print_table(("finding", "state", "where", "detail"), rows)
    counts = ", ".join(f"{number} {name}" for name, number in report.counts.items())
    print(f"{len(report.findings)} findings; checked {counts}")
    return exit_code(report)


def exit_code(report: "FsckReport") -> int:
    if not report.findings:
        return 0
    return EXIT_CORRECTED if all(item.repaired for item in report.findings) else EXIT_UNCORRECTED
