"""``aifs why``: what something that takes long waits for, and where its seconds went."""

import os
import time
from contextlib import suppress
from typing import Any

import click

from aifs.cli import hints
from aifs.cli.arguments import PATH
from aifs.cli.output import count, describe_error, print_error, print_json
from aifs.core.errors import MountError
from aifs.watch.usage import OWN, process

EPILOG = """
\b
Examples:
  aifs why /mnt/store/run/step-100
  aifs why 4711
  aifs why /mnt/store --json

\b
Causes:
  data server N          its disk or network
  burst directory N      the local disk
  room in the burst tier draining does not keep up, so new files wait
  drain                  until files are on the data servers
  mover                  a process that reads and writes data servers for the daemon
  journal                the metadata, until they are synced (of a cluster, its database)
  lock                   another program or drain has the file, or an flock or fcntl lock of it
  publish                of a group that is complete, which has begun already
  other rank             of a group, which has not committed
  host NAME              of a cluster
  memory                 for buffers, which others have (memory.budget)
  the daemon itself      its own work, and its queue

Requests that took less than 10 ms are not summed up. The mount remembers the others for ten
minutes, or the newest 8192 of them. What it passes through to the local disk does not come by; of a
process, what its threads wait for in the kernel is shown besides. Root, and who has mounted, are
told of all requests, others of their own.
"""

_ASK_S = 5.0
"""A name in a directory in which a request hangs cannot be looked up."""

_SHOWN_S = 0.005


@click.command("why", epilog=EPILOG, short_help="Show what a file or process waits for.")
@click.argument("what", metavar="PATH|PID")
@click.argument("mountpoint", type=PATH, required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON; its keys keep their meaning.")
def why_command(what: str, mountpoint: str | None, as_json: bool) -> int:
    """Show what requests about PATH, and all that lies below it, wait for now, and how those of the
    last minutes have spent their time; or those of the process PID, on the mount MOUNTPOINT or on
    all. Exit code 1 if there is no such process (any more).
    """
    if not what.isdigit() or os.path.exists(what):
        told = _of_path(PATH.convert(what, None, click.get_current_context()))
        print_json(told) if as_json else _print(told)
        return 0
    is_there = os.path.exists(f"/proc/{what}")
    if not is_there:
        print_error(f"there is no process {what}")
    mounts, threads = _of_process(int(what), mountpoint), _threads(int(what))
    if as_json:
        print_json({"mounts": mounts, "threads": threads})
        return 0 if is_there else 1
    for place, told in mounts.items():
        print(f"{place}:")
        _print(told)
    for thread in threads:
        print(f"thread {thread['thread']} waits in the kernel: {thread['in']}")
    return 0 if is_there else 1


def _of_path(path: str) -> dict[str, Any]:
    from aifs.cli.mounts import require_inside
    from aifs.core.limits import within
    from aifs.core.mountinfo import first_aifs

    def ask() -> dict[str, Any]:
        require_inside(path)
        return hints.read(path, hints.WHY) | {"undrained": _undrained(path)}

    try:
        return within(_ASK_S, ask)
    except TimeoutError:
        mount, _ = first_aifs(path)
        if mount is None:
            raise MountError(f"{path}: does not lie in an AIFS mount") from None
        print_error(f"{path} cannot be looked up now; this is of all of {mount.mountpoint}")
        return hints.read(mount.mountpoint, hints.WHY)


def _undrained(path: str) -> dict[str, Any]:
    with suppress(PermissionError):
        return hints.read(path, hints.DRAIN)
    return {}


def _of_process(pid: int, mountpoint: str | None) -> dict[str, Any]:
    from aifs.cli.mounts import mount_of
    from aifs.core.limits import within
    from aifs.core.mountinfo import FSTYPE, all_mounts

    name = f"{hints.WHY}.{pid}"
    if mountpoint is not None:
        place = mount_of(mountpoint)
        return {place: hints.read(place, name)}
    found = {}
    for mount in all_mounts():
        if mount.fstype == FSTYPE:
            try:
                found[mount.mountpoint] = within(_ASK_S, hints.read, mount.mountpoint, name)
            except OSError as error:
                print_error(f"{mount.mountpoint} does not tell: {describe_error(error)}")
    return found


def _threads(pid: int) -> list[dict[str, Any]]:
    """Those that wait for a disk or for FUSE, by what the kernel calls it; as far as it tells."""
    found = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/wchan") as file:
                where = file.read()
                with open(f"/proc/{pid}/task/{thread}/stat") as stat:
                    is_asleep = stat.read().rpartition(") ")[2][:1] == "D"
                if is_asleep or "fuse" in where or where == "request_wait_answer":
                    found.append({"thread": int(thread), "in": where})
    return found


def _print(told: dict[str, Any]) -> None:
    from aifs.cli.output import print_table

    if told["now"]:
        running = [
            (
                f"{one['seconds']:.1f} s",
                one["operation"],
                process(one) if one["operation"] != "drain" else "-",
                one["path"] or f"inode {one['inode'] or '-'} {one['name']}".rstrip(),
                ", for ".join(one["waits_for"]) or OWN,
            )
            for one in told["now"]
        ]
        print_table(("for", "request", "process", "path", "waits for"), running, right=("for",))
    else:
        print("nothing is being asked for now")
    if undrained := told.get("undrained"):
        _print_undrained(undrained)
    since = time.strftime("%H:%M:%S", time.localtime(told["since_s"]))
    least = f"{told['long_s'] * 1e3:g} ms"
    if not told["seconds"]:
        print(f"since {since} no request has taken {least}")
        return
    print(
        f"\nsince {since} {count(told['requests'], 'request')} of {least} or longer; with those ",
        end="",
    )
    print(f"above {told['seconds']:.2f} s:")
    spent = dict(told["waited_s"])
    spent[OWN] = max(0.0, told["seconds"] - sum(spent.values()))
    rows = [
        (f"{seconds:.2f} s", f"{seconds / told['seconds']:.0%}", cause)
        for cause, seconds in sorted(spent.items(), key=lambda item: -item[1])
        if seconds >= _SHOWN_S
    ]
    print_table(("time", "share", "waited for"), rows, right=("time", "share"))


def _print_undrained(told: dict[str, Any]) -> None:
    from aifs.core.units import describe_size

    if not told["files"]:
        return
    words = [
        f"{count(told['files'], 'file')} ({describe_size(told['bytes'])}) not on the data servers"
    ]
    if told["open_files"]:
        words.append(f"{told['open_files']} of them open for writing")
    if told["error"]:
        words.append(f"draining has to wait: {told['error']}")
    print("; ".join(words))
