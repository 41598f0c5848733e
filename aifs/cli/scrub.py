"""``aifs scrub``: verify all bytes on the data servers, and repair what can be repaired."""

import json
import time
from collections.abc import Sequence
from typing import Any

import click

from aifs.cli import hints
from aifs.cli.arguments import PATH, SIZE
from aifs.cli.output import count, describe_time
from aifs.core.errors import MountError
from aifs.core.units import describe_size

EPILOG = """
\b
Exit codes: 0 if all is in order, or repaired; 1 if files are wrong still, which are named.

\b
Examples:
  aifs scrub /mnt/store --wait
  aifs scrub /mnt/store --bandwidth 1GiB
  aifs scrub /mnt/store --status
  aifs scrub /mnt/store --stop
  aifs scrub /srv/store --no-repair --json
"""

_PAUSE_S = 0.2


@click.command("scrub", epilog=EPILOG, short_help="Read all bytes, and repair what is wrong.")
@click.argument("place", type=PATH)
@click.option("--wait", is_flag=True, help="Wait until it is done, with a progress bar.")
@click.option(
    "--status",
    "only_status",
    is_flag=True,
    help="Show what the scrub that runs, or the last one, has found.",
)
@click.option("--stop", is_flag=True, help="End the scrub that runs.")
@click.option(
    "--repair/--no-repair", default=True, help="Repair what can be repaired; the default."
)
@click.option(
    "--bandwidth",
    type=SIZE,
    help="Bytes per second that it reads at most, 0: any number; else scrub.bandwidth.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON; its keys keep their meaning.")
def scrub_command(
    place: str,
    wait: bool,
    only_status: bool,
    stop: bool,
    repair: bool,
    bandwidth: int | None,
    as_json: bool,
) -> int:
    """Read all bytes on the data servers, copies and parity included, compare them with their
    checksums, repair what other objects tell, and name the files that are lost.

    PLACE is a mountpoint, where it goes on in the background, or a SOURCE that is not mounted,
    where the command does it. A mount scrubs by itself every scrub.interval. A scrub that is
    interrupted goes on with the next mount.
    """
    import trio

    order = (
        "start"
        + ("" if repair else ",no-repair")
        + ("" if bandwidth is None else f",bandwidth={bandwidth}")
    )
    if only_status or stop:
        order = "stop" if stop else ""
    status = trio.run(_run, place, order, wait)
    if as_json:
        from aifs.cli.output import print_json

        print_json(status)
    elif order and status["running"]:
        print(
            f"the scrub goes on in the background; aifs scrub --status {place} says how far it is"
        )
    else:
        _print(status)
    return 1 if status["wrong_ranges"] and not status["running"] else 0


async def _run(place: str, order: str, wait: bool) -> dict[str, Any]:
    from aifs.cli.server_orders import OpenDoor, opened

    async with opened(place) as door:
        if isinstance(door, OpenDoor):
            return await _by_ourselves(door.fs, order)
        return _at_mount(door.where, order, wait)


def _at_mount(mountpoint: str, order: str, wait: bool) -> dict[str, Any]:
    try:
        if order:
            hints.put(mountpoint, hints.SCRUB, order)
        status = hints.read(mountpoint, hints.SCRUB)
        if wait and status["running"]:
            from aifs.cli.progress import progress

            with progress("scrubbing") as show:
                while status["running"]:
                    _show(show, status)
                    time.sleep(_PAUSE_S)
                    status = hints.read(mountpoint, hints.SCRUB)
    except PermissionError:
        raise MountError(f"{mountpoint}: only root may scrub a mount") from None
    return status


async def _by_ourselves(fs: Any, order: str) -> dict[str, Any]:
    import trio

    from aifs.cli.progress import progress
    from aifs.files.types import ROOT
    from aifs.meta.keys import ROOT_INO

    await fs.scrub.load()
    if order:
        await fs.setxattr(ROOT_INO, hints.SCRUB.encode(), order.encode(), caller=ROOT)
    if order.startswith("start"):
        with progress("scrubbing") as show:
            while fs.scrub.status()["running"] or not fs.rebuild.idle:
                _show(show, fs.scrub.status())
                with trio.move_on_after(_PAUSE_S):
                    await fs.scrub.wait()
                    await trio.sleep(_PAUSE_S / 10)
    return json.loads(await fs.getxattr(ROOT_INO, hints.SCRUB.encode()))


def _show(show: Any, status: dict[str, Any]) -> None:
    done = status["read_bytes"]
    show(done, max(done, int(done / status["share"])) if status["share"] else done)


def summary(status: dict[str, Any]) -> str:
    """One line for ``aifs status``."""
    if not status["running"] and not status["ended_s"]:
        return "none yet"
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(status["begun_s"]))
    verified = (
        f"{count(status['objects'], 'file or container')} verified"
        if status["objects"]
        else "nothing verified yet"
    )
    parts = [f"{'runs since' if status['running'] else 'last one of'} {when}: {verified}"]
    parts += (
        [f"{count(status['flaws'], 'flaw')}, {status['repaired']} repaired"]
        if status["flaws"]
        else []
    )
    parts += (
        [f"{count(status['wrong_ranges'], 'range')} of files wrong; aifs scrub --status names them"]
        if status["wrong_ranges"]
        else []
    )
    return ", ".join(parts)


def _print(status: dict[str, Any]) -> None:
    from aifs.cli.output import print_facts, print_table

    print_facts(facts(status))
    if status["wrong"]:
        print()
        print_table(("file", "bytes", "servers", "why"), rows(status["wrong"]))
        if status["wrong_ranges"] > len(status["wrong"]):
            print(
                f"and {status['wrong_ranges'] - len(status['wrong'])} more, which the mount's log "
                "names"
            )


def facts(status: dict[str, Any]) -> list[tuple[str, object]]:
    """Names and values."""
    if not status["running"] and not status["ended_s"]:
        return [("state", "none yet"), *_next(status)]
    begun = describe_time(status["begun_s"])
    found = [
        (
            "state",
            f"running, {status['share']:.0%}, {describe_size(status['rate'])}/s"
            if status["running"]
            else "not running",
        ),
        ("begun", begun),
        (
            "verified",
            f"{status['objects']} files and containers, {describe_size(status['read_bytes'])} read",
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
    return [("next", describe_time(status["next_s"]))] if status["next_s"] else []


def rows(wrong: Sequence[dict[str, Any]]) -> list[tuple[object, ...]]:
    """Of a table of files."""
    return [
        (
            ", ".join(item["paths"]),
            f"{item['start']}-{item['end'] - 1}",
            ", ".join(map(str, item["servers"])),
            item["reason"],
        )
        for item in wrong
    ]
