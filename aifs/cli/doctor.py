"""``aifs doctor``: what limits the speed of a mount, and what to change."""

import os
import stat
from typing import TYPE_CHECKING, Any

import click

from aifs.cli.arguments import PATH
from aifs.cli.output import count
from aifs.cli.status import refusal_of
from aifs.core.errors import MountError, StoreError

if TYPE_CHECKING:
    from aifs.core.config import Config

EPILOG = """
\b
Examples:
  aifs doctor
  aifs doctor /srv/store
  aifs doctor /mnt/store --json
"""


@click.command(
    "doctor", epilog=EPILOG, short_help="Tell what limits the speed of a mount, and what to change."
)
@click.argument("place", required=False, type=PATH, metavar="[MOUNTPOINT|SOURCE]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; its keys keep their meaning.")
def doctor_command(place: str | None, as_json: bool) -> int:
    """Check what a mount needs to run at full speed: on this machine, for the store SOURCE, or of
    the mount at MOUNTPOINT.

    Prints what is in use, what is not, why, and what to change. Exit code 0 if nothing limits the
    speed, else 1.
    """
    from aifs.cli.output import print_json, print_table

    checks = checks_of(place)
    if as_json:
        print_json(checks)
    else:
        rows = [(check["name"], _word(check), check["why"], check["fix"]) for check in checks]
        print_table(("check", "state", "why", "what to change"), rows)
    return 1 if any(_limits(check) for check in checks) else 0


def checks_of(place: str | None) -> list[dict[str, Any]]:
    """What is checked of a mount, a store, or this machine, and what came out."""
    from aifs.cli.cluster_checks import cluster_checks
    from aifs.cli.mounts import read_status
    from aifs.core import config
    from aifs.fuse.probe import probe

    mountpoint = _mountpoint(place)
    if mountpoint:
        status = read_status(mountpoint)
        loaded = config.load(status["source"], {})
        found = probe(loaded, mountpoint, status["bridge"])
        checks = [check._asdict() for check in found] + missing_checks(status["bridge"])
        checks += burst_checks(status["burst"]) + drain_checks(status["drain"])
    else:
        # Without a place the machine alone is looked at, with the default configuration.
        loaded = config.load(place or "/", {} if place else {"burst.directories": ""})
        fault = _fault_of_store(loaded) if place else ""
        if fault:
            loaded = config.load(place or "/", {"burst.directories": ""})
        checks = [check._asdict() for check in probe(loaded)]
        if fault:
            checks.insert(0, _check("store", fault, "see there"))
    if loaded.is_cluster:
        checks += [_check(*check) for check in cluster_checks(loaded)]
    return checks


def _fault_of_store(loaded: "Config") -> str:
    """Why there is no store, or the caller cannot see it; '' if it is there. Of a cluster its
    database says so (``cluster_checks``)."""
    from aifs.cli.output import describe_error
    from aifs.data.marker import read_marker
    from aifs.store.store import require_metadata

    if not loaded.is_cluster:
        try:
            require_metadata(loaded)
            read_marker(loaded.meta.directory)
        except (StoreError, OSError) as error:
            return describe_error(error)
    return ""


def missing_checks(bridge: dict[str, Any]) -> list[dict[str, Any]]:
    """Of ``bridge`` in the status of a mount: what it does without, why, and what to change."""
    return [
        {
            "name": each["what"],
            "ok": False,
            "in_use": False,
            "why": each["why"],
            "fix": f"{each['fix']}; mount again",
        }
        for each in bridge["missing"]
    ]


def burst_checks(burst: dict[str, Any]) -> list[dict[str, Any]]:
    """Of ``burst`` in the status of a mount: whether each device takes new files, and whether they
    have to wait.
    """
    checks = []
    for device in burst["devices"]:
        refuses = refusal_of(device)
        fix = (
            "aifs drain and aifs evict make room; see burst.high_water, burst.reserve, "
            "burst.capacity"
        )
        checks.append(
            _check(
                f"room in {device['path']}",
                refuses or "new files are admitted",
                fix if refuses else "",
            )
        )
    if not burst["devices"]:
        fix = "make a store with burst.directories on a local disk"
        checks.append(_check("burst tier", "the store has none", fix))
    if burst["pause_s"]:
        fix = "faster data servers, more burst.drain_workers, no burst.drain_bandwidth"
        checks.append(_check("draining", "new files have to wait for it", fix))
    return checks


def drain_checks(drain: dict[str, Any]) -> list[dict[str, Any]]:
    """Of ``drain`` in the status of a mount: files that cannot be drained."""
    if not drain["failing_files"]:
        return []
    fix = "put the data server right, or make room there; it is tried again and again"
    return [
        _check(f"draining of {count(drain['failing_files'], 'file')}", drain["last_error"], fix)
    ]


def _check(name: str, why: str, fix: str) -> dict[str, Any]:
    return {"name": name, "ok": not fix, "in_use": None, "why": why, "fix": fix}


def _mountpoint(place: str | None) -> str | None:
    from aifs.cli.mounts import require_aifs

    if place is None or not stat.S_ISDIR(os.stat(place).st_mode):
        return None
    try:
        return require_aifs(place)
    except MountError:
        return None


def _limits(check: dict[str, Any]) -> bool:
    return not check["ok"] or check["in_use"] is False


def _word(check: dict[str, Any]) -> str:
    if check["in_use"] is None:
        return "ok" if check["ok"] else "limits"
    return "in use" if check["in_use"] else "not in use"
