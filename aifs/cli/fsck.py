"""``aifs fsck`` and ``aifs scrub``: check and mend an unmounted store; verify and repair all bytes
on the data servers."""

import json
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import click

from aifs.cli import door
from aifs.cli.command import PATH, SIZE, Column, Pairs, Report, Table, command, group
from aifs.cli.output import describe_error, print_error, progress, rate, size, when
from aifs.core.errors import AifsError, MountError

if TYPE_CHECKING:
    from aifs.check.findings import FsckReport

EXIT_CORRECTED = 1
EXIT_UNCORRECTED = 4
EXIT_CANNOT_CHECK = 8

_FINDINGS = (
    Column("finding", "kind"),
    Column("state", lambda item: "repaired" if item.repaired else "left"),
    Column("where"),
    Column("detail"),
)


@command(
    "fsck",
    short_help="Check a store that is not mounted, and mend it.",
    epilog="""
\b
Exit codes, as fsck(8):
  0  nothing wrong
  1  something was wrong, and all of it was repaired
  2  wrong usage of the command line
  4  something is wrong and was not repaired
  8  the store could not be checked (wrong configuration, in use, damaged beyond reading)
""",
    examples="aifs fsck /srv/store\naifs fsck /srv/store --repair\naifs fsck /srv/store --deep",
)
@click.argument("source", type=PATH)
@click.option("--repair", is_flag=True, help="Mend what can be mended without guessing.")
@click.option("--deep", is_flag=True, help="Also read all bytes that have checksums, and compare.")
@click.option(
    "--force", is_flag=True, help="Take the store over from a host that is known to be dead."
)
def fsck_command(source: str, repair: bool, deep: bool, force: bool) -> Report | int:
    """Check the store SOURCE, which must not be mounted. Changes nothing without --repair."""
    from rich.console import Console

    from aifs.check.fsck import check
    from aifs.core import config

    console = Console(stderr=True)
    try:
        with console.status("checking") if console.is_terminal else nullcontext():
            report = check(config.load(source, {}), repair, deep=deep, force=force)
    except (AifsError, OSError) as error:
        print_error(describe_error(error))
        return EXIT_CANNOT_CHECK
    return report_of(report)


def report_of(report: "FsckReport", *above: str) -> Report:
    """The findings, with the exit code of fsck(8)."""
    code = 0
    if report.findings:
        mended = all(item.repaired for item in report.findings)
        code = EXIT_CORRECTED if mended else EXIT_UNCORRECTED
    counts = ", ".join(f"{number} {name}" for name, number in report.counts.items())
    names = ("kind", "where", "detail", "repaired")
    findings = [{name: getattr(item, name) for name in names} for item in report.findings]
    return Report(
        {"findings": findings, "counts": report.counts},
        *above,
        *([Table(_FINDINGS, report.findings)] if findings else []),
        f"{len(findings)} findings; checked {counts}",
        code=code,
    )


# --- scrub ----------------------------------------------------------------------------------------

_PAUSE_S = 0.2
_WAIT = click.option("--wait", is_flag=True, help="Wait until it is done, with a progress bar.")

_WRONG = (
    Column("file", lambda item: ", ".join(item["paths"])),
    Column("bytes", lambda item: f"{item['start']}-{item['end'] - 1}"),
    Column("servers", lambda item: ", ".join(map(str, item["servers"]))),
    Column("why", "reason"),
)


@group("scrub", short_help="Read all bytes, and repair what is wrong.")
def scrub_command() -> None:
    """Read all bytes on the data servers, copies and parity included, compare them with their
    checksums, repair those that other objects have, and name the files that are lost.

    PLACE is a mountpoint, where it goes on in the background, or a SOURCE that is not mounted,
    where the command does it. A mount scrubs by itself every scrub.interval. A scrub that is
    interrupted goes on with the next mount.

    Exit codes: 0 if all is in order, or repaired; 1 if files are wrong still, which are named.
    """


@scrub_command.command(
    "start",
    examples="aifs scrub start /mnt/store --wait\naifs scrub start /mnt/store --bandwidth 1GiB\n"
    "aifs scrub start /srv/store --no-repair --json",
    sizes=True,
)
@click.argument("place", type=PATH)
@_WAIT
@click.option(
    "--repair/--no-repair", default=True, help="Repair what can be repaired; the default."
)
@click.option(
    "--bandwidth",
    type=SIZE,
    help="Bytes per second that it reads at most, 0: any number; else scrub.bandwidth.",
)
def start_command(place: str, wait: bool, repair: bool, bandwidth: int | None) -> Report:
    """Begin a scrub of PLACE."""
    order = "start" if repair else "start,no-repair"
    return _report_of(place, order if bandwidth is None else f"{order},bandwidth={bandwidth}", wait)


@scrub_command.command(
    "show",
    short_help="Show the findings of the scrub that runs, or of the last one.",
    examples="aifs scrub show /mnt/store",
    sizes=True,
)
@click.argument("place", type=PATH)
def show_command(place: str) -> Report:
    """Show the findings of the scrub of PLACE that runs, or of the last one."""
    return _report_of(place, "", wait=False)


@scrub_command.command(
    "stop",
    examples="aifs scrub stop /mnt/store",
    sizes=True,
)
@click.argument("place", type=PATH)
@_WAIT
def stop_command(place: str, wait: bool) -> Report:
    """End the scrub of PLACE that runs."""
    return _report_of(place, "stop", wait)


def _report_of(place: str, order: str, wait: bool) -> Report:
    """Give an order, '' for none, and return the state of the scrub."""
    import trio

    status = trio.run(_run, place, order, wait)
    parts: list[Pairs | Table | str] = [
        f"the scrub goes on in the background; aifs scrub show {place} says how far it is"
    ]
    if not (order and status["running"]):
        parts = [Pairs(facts(status))]
        if status["wrong"]:
            parts.append(Table(_WRONG, status["wrong"]))
        if more := status["wrong_ranges"] - len(status["wrong"]):
            parts.append(f"and {more} more, which the mount's log names")
    is_wrong = status["wrong_ranges"] and not status["running"]
    return Report(status, *parts, code=1 if is_wrong else 0)


async def _run(place: str, order: str, wait: bool) -> dict[str, Any]:
    from aifs.cli.server import OpenDoor, opened

    async with opened(place) as door:
        if isinstance(door, OpenDoor):
            return await _by_ourselves(door.fs, order)
        return _at_mount(door.where, order, wait)


def _at_mount(mountpoint: str, order: str, wait: bool) -> dict[str, Any]:
    try:
        if order:
            door.put(mountpoint, "scrub", order)
        status = door.read(mountpoint, "scrub")
        if wait and status["running"]:
            with progress("scrubbing") as show:
                while status["running"]:
                    _show(show, status)
                    time.sleep(_PAUSE_S)
                    status = door.read(mountpoint, "scrub")
    except PermissionError:
        raise MountError(f"{mountpoint}: only root may scrub a mount") from None
    return status


async def _by_ourselves(fs: Any, order: str) -> dict[str, Any]:
    import trio

    from aifs.files.types import ROOT
    from aifs.meta.keys import ROOT_INO

    await fs.scrub.load()
    if order:
        await fs.setxattr(ROOT_INO, b"user.aifs.scrub", order.encode(), caller=ROOT)
    if order.startswith("start"):
        with progress("scrubbing") as show:
            while fs.scrub.status()["running"] or not fs.rebuild.idle:
                _show(show, fs.scrub.status())
                with trio.move_on_after(_PAUSE_S):
                    await fs.scrub.wait()
                    await trio.sleep(_PAUSE_S / 10)
    return json.loads(await fs.getxattr(ROOT_INO, b"user.aifs.scrub"))


def _show(show: Any, status: dict[str, Any]) -> None:
    done = status["read_bytes"]
    show(done, max(done, int(done / status["share"])) if status["share"] else done)


def facts(status: dict[str, Any]) -> list[tuple[str, object]]:
    """Names and values."""
    if not status["running"] and not status["ended_s"]:
        return [("state", "none yet"), *_next(status)]
    begun = when(status["begun_s"])
    found = [
        (
            "state",
            f"running, {status['share']:.0%}, {rate(status['rate'])}"
            if status["running"]
            else "not running",
        ),
        ("begun", begun),
        (
            "verified",
            f"{status['objects']} files and containers, {size(status['read_bytes'])} read",
        ),
        (
            "flaws",
            (
                f"{status['flaws']}: {status['repaired']} repaired, {status['rebuilding']} objects "
                "handed to the rebuild"
            ),
        ),
    ]
    if status["put_off"] or status["unverified"]:
        found.append(
            (
                "not verified",
                (
                    f"{status['put_off'] + status['unverified']}: being changed, or a server does "
                    "not answer"
                ),
            )
        )
    copies = (
        [f"{status['from_copies']} files restored from theirs"] if status["from_copies"] else []
    )
    copies += [f"{status['dropped_copies']} wrong ones dropped"] if status["dropped_copies"] else []
    if copies:
        found.append(("burst copies", ", ".join(copies)))
    return found + _next(status)


def _next(status: dict[str, Any]) -> list[tuple[str, object]]:
    return [("next", when(status["next_s"]))] if status["next_s"] else []
