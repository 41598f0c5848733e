"""``aifs upgrade``: another version of AIFS goes on with a mount."""

import os
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

import click

from aifs.cli import door
from aifs.cli.command import MOUNTPOINT, PATH, Report, command
from aifs.core.errors import MountError, TimeoutReached

_TIMEOUT_S = 90.0
"""The keeper gives a new version 30 s until it stands by, and 30 s more until it serves."""

_PAUSE_S = 0.05


@command(
    "upgrade",
    short_help="Go on with a mount by another version of AIFS.",
    examples="aifs upgrade /mnt/store\naifs upgrade /mnt/store --python /opt/aifs-0.3/bin/python",
)
@click.argument("mountpoint", type=MOUNTPOINT)
@click.option(
    "--python", type=PATH, help="The interpreter with the new version; without it that of aifs."
)
def upgrade_command(mountpoint: str, python: str | None) -> Report:
    """Replace the daemon of MOUNTPOINT by one of another version, or start it anew. Programs wait
    for a moment, and see no error; their files stay open.

    The mount outlives its daemons (kernel.restarts). The new version starts and reads the
    configuration while the old one serves. Where it cannot, or does not serve within 30 s, the old
    one goes on, and the exit code is 6.
    """
    path = door.require_aifs(mountpoint)
    status = door.read_status(path)
    before = _kept(path, status)
    program = os.path.abspath(python or sys.executable)
    _require_works(path, program, status["source"])
    _order(status["pid"], program)
    now, deadline_s = before, time.monotonic() + _TIMEOUT_S
    while now["finished"] <= before["orders"]:
        if time.monotonic() > deadline_s:
            raise TimeoutReached(f"{mountpoint}: {program} has not gone on with it yet")
        time.sleep(_PAUSE_S)
        with suppress(MountError):  # between two daemons
            now = _kept(path, door.read_status(path))
    if now["is_refused"]:
        raise MountError(
            f"{mountpoint}: {program} did not go on with it, so {now['program']} has; its log "
            "says why (aifs config get log.file)"
        )
    told = {"version": now["version"], "program": now["program"], "before": before["version"]}
    return Report(told, f"{mountpoint}: version {now['version']} (before: {before['version']})")


def _order(pid: int, program: str) -> None:
    from aifs.fuse import kept

    try:
        kept.order(pid, os.fsencode(program))
    except (FileNotFoundError, PermissionError):
        raise MountError(
            f"its daemon (pid {pid}) is out of reach: run this as its user, on the host that has "
            "mounted it, and in no container"
        ) from None


def _kept(path: str, status: dict[str, Any]) -> dict[str, Any]:
    """The report of the keeper. Raises MountError if there is none."""
    kept = status.get("keeper")
    if not kept:
        raise MountError(
            f"{path}: this mount ends with its daemon (--no-keeper, --foreground, "
            "kernel.restarts 0, or host.restarts, or kernel.bridge off)"
        )
    return kept


def _require_works(path: str, program: str, source: str) -> None:
    """Raises MountError unless this interpreter has an AIFS that can mount, and that reads the
    store's configuration."""
    check = [program, "-m", "aifs.cli.main", "go-on", source, path]
    try:
        done = subprocess.run(check, capture_output=True, text=True)
    except OSError as error:
        raise MountError(f"{program}: {error.strerror}") from None
    if done.returncode:
        reason = done.stderr.strip().splitlines()
        raise MountError(f"{program}: {reason[-1] if reason else f'exit {done.returncode}'}")
