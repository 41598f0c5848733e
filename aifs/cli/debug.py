"""``aifs why`` and ``aifs debug``: the causes of waiting, and a mount's state in one file."""

import importlib.metadata
import io
import json
import os
import platform
import signal
import sys
import tarfile
import time
from collections.abc import Callable
from contextlib import suppress
from glob import glob
from typing import Any

import click

from aifs.cli import door
from aifs.cli.command import MOUNTPOINT, PATH, Column, Report, Table, command, number
from aifs.cli.door import daemon_of, mount_of, require_inside
from aifs.cli.output import count, describe_error, duration, print_error, size
from aifs.core.errors import MountError, UserError
from aifs.core.limits import within
from aifs.core.mountinfo import FSTYPE, all_mounts, first_aifs, mounted_at
from aifs.watch.usage import OWN, process

_ASK_S = 5.0
"""A name in a directory in which a request hangs cannot be looked up."""

_SHOWN_S = 0.005


_RUNNING = (
    Column("for", "seconds", duration),
    Column("request", "operation"),
    Column("process", lambda one: process(one) if one["operation"] != "drain" else "-"),
    Column(
        "path", lambda one: one["path"] or f"inode {one['inode'] or '-'} {one['name']}".rstrip()
    ),
    Column("waits for", lambda one: ", for ".join(one["waits_for"]) or OWN),
)
_SPENT = (
    Column("time", "seconds", duration),
    Column("share", show=number),
    Column("waited for", "cause"),
)


@command(
    "why",
    short_help="Show the causes that a file or process waits for.",
    examples="aifs why /mnt/store/run/step-100\naifs why 4711\naifs why /mnt/store --json",
    epilog="""
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
minutes, or the newest 8192 of them. Requests that it passes through to the local disk do not come
by; of a process, the kernel functions that its threads wait in are shown besides. Root, and the
user who has mounted, see all requests, others their own.
""",
    sizes=True,
)
@click.argument("what", metavar="PATH|PID")
@click.argument("mountpoint", type=PATH, required=False)
def why_command(what: str, mountpoint: str | None) -> Report:
    """Show what requests about PATH, and all that lies below it, wait for now, and how those of the
    last minutes have spent their time; or those of the process PID, on the mount MOUNTPOINT or on
    all. Exit code 1 if there is no such process (any more).
    """
    if not what.isdigit() or os.path.exists(what):
        told = _of_path(PATH.convert(what, None, click.get_current_context()))
        return Report(told, *_parts(told))
    is_there = os.path.exists(f"/proc/{what}")
    if not is_there:
        print_error(f"there is no process {what}")
    mounts, threads = _of_process(int(what), mountpoint), _waiting_threads(int(what))
    parts = list[Table | str]()
    for place, told in mounts.items():
        parts += [f"{place}:", *_parts(told)]
    parts += [f"thread {one['thread']} waits in the kernel: {one['in']}" for one in threads]
    return Report({"mounts": mounts, "threads": threads}, *parts, code=0 if is_there else 1)


def _of_path(path: str) -> dict[str, Any]:
    def ask() -> dict[str, Any]:
        require_inside(path)
        return door.read(path, "why") | {"undrained": _undrained(path)}

    try:
        return within(_ASK_S, ask)
    except TimeoutError:
        mount, _ = first_aifs(path)
        if mount is None:
            raise MountError(f"{path}: does not lie in an AIFS mount") from None
        print_error(f"{path} cannot be looked up now; this is of all of {mount.mountpoint}")
        return door.read(mount.mountpoint, "why")


def _undrained(path: str) -> dict[str, Any]:
    with suppress(PermissionError):
        return door.read(path, "drain")
    return {}


def _of_process(pid: int, mountpoint: str | None) -> dict[str, Any]:
    name = f"why.{pid}"
    if mountpoint is not None:
        place = mount_of(mountpoint)
        return {place: door.read(place, name)}
    found = {}
    for mount in all_mounts():
        if mount.fstype == FSTYPE:
            try:
                found[mount.mountpoint] = within(_ASK_S, door.read, mount.mountpoint, name)
            except OSError as error:
                print_error(f"{mount.mountpoint} does not tell: {describe_error(error)}")
    return found


def _waiting_threads(pid: int) -> list[dict[str, Any]]:
    """The threads that wait for a disk or for FUSE, and the visible functions of the kernel."""
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


def _parts(told: dict[str, Any]) -> list[Table | str]:
    parts: list[Table | str] = ["nothing is being asked for now"]
    if told["now"]:
        parts = [Table(_RUNNING, told["now"])]
    if (undrained := told.get("undrained")) and undrained["files"]:
        parts.append(_undrained_in_words(undrained))
    since = time.strftime("%H:%M:%S", time.localtime(told["since_s"]))
    least, whole = duration(told["long_s"]), told["seconds"]
    if not whole:
        return [*parts, f"since {since} no request has taken {least}"]
    requests = count(told["requests"], "request")
    spent = dict(told["waited_s"])
    spent[OWN] = max(0.0, whole - sum(spent.values()))
    rows = [
        {"seconds": seconds, "share": f"{seconds / whole:.0%}", "cause": cause}
        for cause, seconds in sorted(spent.items(), key=lambda item: -item[1])
        if seconds >= _SHOWN_S
    ]
    head = f"\nsince {since} {requests} of {least} or longer; with those above {duration(whole)}:"
    return [*parts, head, Table(_SPENT, rows)]


def _undrained_in_words(told: dict[str, Any]) -> str:
    words = [f"{count(told['files'], 'file')} ({size(told['bytes'])}) not on the data servers"]
    if told["open_files"]:
        words.append(f"{told['open_files']} of them open for writing")
    if told["again_files"]:
        words.append(
            f"{told['again_files']} of them drained not long ago, so again in "
            f"{duration(told['again_in_s'])}; aifs drain does not wait"
        )
    if told["error"]:
        words.append(f"draining has to wait: {told['error']}")
    return "; ".join(words)


# --- debug ----------------------------------------------------------------------------------------

_LOG_BYTES = 1 << 20
_ANSWER_S = 8.0
_STACKS_S = 3.0
_LOOK_S = 0.05


@command(
    "debug",
    short_help="Collect the facts that are needed to find a fault.",
    examples="aifs debug /mnt/store\naifs debug /mnt/store --output /tmp/store.tar.gz --json",
    epilog="""
\b
It holds:
  about.json          versions, kernel, processors, memory
  status.json         as aifs status --json; servers.json as aifs server ls --json
  config.json         every key that is in force, and where it comes from
  metrics.txt         as Prometheus reads them
  why.json            the causes that requests wait for, as aifs why --json
  doctor.json         as aifs doctor --json
  mountinfo.txt       all mounts of this machine; mount options of the daemon
  threads.txt         where the daemon's threads wait in the kernel
  log.txt             the last MiB of its log, with the stacks of its tasks
  missing.json        the parts that could not be had, and why

The log and the stacks name files, hosts and users. It has no contents of files, nor the text of
any secret. For root, and for the user who has mounted.
""",
)
@click.argument("mountpoint", type=MOUNTPOINT)
@click.option(
    "--output", type=PATH, metavar="FILE", help="A .tar.gz that is not there; else by the time."
)
def debug_command(mountpoint: str, output: str | None) -> Report:
    """Write a file with the state of the mount at MOUNTPOINT, also if its daemon does not answer,
    for somebody who has to find out what is wrong with it.
    """
    path = mount_of(mountpoint)
    mount = mounted_at(path)
    assert mount is not None
    if os.geteuid() not in (0, _mounter(path)):
        raise MountError(f"{path}: only root and the user who has mounted may see all of it")
    pid = daemon_of(mount)
    asked: dict[str, Callable[[], str]] = {
        "status.json": lambda: _hint(path, "status"),
        "servers.json": lambda: _hint(path, "servers"),
        "config.json": lambda: _hint(path, "config"),
        "why.json": lambda: _hint(path, "why"),
        "metrics.txt": lambda: _metrics(path),
        "doctor.json": lambda: _doctor(path),
    }
    seen: dict[str, Callable[[], str]] = {
        "about.json": lambda: _json(_about()),
        "mountinfo.txt": lambda: _read("/proc/self/mountinfo"),
        "threads.txt": lambda: _threads(pid),
        "log.txt": lambda: _log(path, mount.source, pid),
    }
    told: dict[str, str] = {}
    missing: dict[str, str] = {}
    stuck = ""
    for name, part in (asked | seen).items():
        try:
            if name in asked and stuck:
                raise ValueError(stuck)
            told[name] = part()
        except (OSError, ValueError, KeyError, UserError) as error:
            missing[name] = describe_error(error)
            if isinstance(error, TimeoutError):  # what is asked next would take as long
                stuck = missing[name]
    told["missing.json"] = _json(missing)
    file_name = output or time.strftime(f"aifs-debug-{platform.node()}-%Y%m%d-%H%M%S.tar.gz")
    _write(file_name, told)
    without = [f"without {name}: {reason}" for name, reason in missing.items()]
    return Report(
        {"file": file_name, "members": sorted(told), "missing": missing}, file_name, *without
    )


def _mounter(path: str) -> int:
    """The user who has mounted, by FUSE's mount options."""
    for line in _read("/proc/self/mountinfo").splitlines():
        if f" {path} " in line and "user_id=" in line:
            return int(line.partition("user_id=")[2].partition(",")[0])
    return 0


def _json(value: Any) -> str:
    return json.dumps(value, indent=2)


def _read(path: str) -> str:
    with open(path, errors="replace") as file:
        return file.read()


def _hint(mountpoint: str, name: str) -> str:
    return _json(within(_ANSWER_S, door.read, mountpoint, name))


def _about() -> dict[str, Any]:
    packages = ("aifs-fuse", "pyfuse3", "trio", "lmdb", "pydantic", "h11", "zstandard", "psycopg")
    versions = {}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = ""
    return {
        "at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": platform.uname()._asdict(),
        "system": platform.freedesktop_os_release().get("PRETTY_NAME", ""),
        "processors": os.cpu_count(),
        "load": os.getloadavg(),
        "memory": dict(
            line.split(":", 1) for line in _read("/proc/meminfo").replace(" ", "").splitlines()
        ),
        "python": sys.version,
        "packages": versions,
    }


def _metrics(mountpoint: str) -> str:
    from aifs.watch.figures import expose

    return expose(within(_ANSWER_S, door.read, mountpoint, "status"))


def _doctor(mountpoint: str) -> str:
    from aifs.cli.doctor import checks_of

    return _json(within(_ANSWER_S, checks_of, mountpoint))


def _threads(pid: int | None) -> str:
    """Where each thread of the daemon waits in the kernel, if visible."""
    lines = []
    for task in sorted(glob(f"/proc/{pid}/task/*")):
        for name in ("comm", "wchan", "stack"):
            try:
                lines.append(f"{task[6:]} {name}: {_read(f'{task}/{name}').strip()}")
            except OSError as error:
                lines.append(f"{task[6:]} {name}: {error.strerror}")
    if not lines:
        raise ValueError("the daemon's process is not to be seen from here")
    return "\n".join(lines)


def _log(mountpoint: str, source: str, pid: int | None) -> str:
    """The end of the log, with the stacks that the daemon writes, if it answers."""
    from aifs.core import config

    try:
        known = json.loads(_hint(mountpoint, "config"))
        file_name = known["log.file"]["value"]
    except OSError:  # it does not answer: perhaps it was mounted without another name for it
        file_name = config.load(source, {}).log.file
    before = os.stat(file_name).st_size
    if pid is not None:
        os.kill(pid, signal.SIGUSR1)
        until_s = time.monotonic() + _STACKS_S
        while os.stat(file_name).st_size == before and time.monotonic() < until_s:
            time.sleep(_LOOK_S)
    with open(file_name, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_BYTES))
        return file.read().decode(errors="replace")


def _write(file_name: str, told: dict[str, str]) -> None:
    """Only its owner may read it."""
    stem = os.path.basename(file_name).removesuffix(".tar.gz")
    before = os.umask(0o077)
    try:
        with tarfile.open(file_name, "x:gz") as bundle:
            for name, text in told.items():
                data = text.encode("utf-8", "surrogateescape")
                member = tarfile.TarInfo(f"{stem}/{name}")
                member.size, member.mode, member.mtime = len(data), 0o600, int(time.time())
                bundle.addfile(member, io.BytesIO(data))
    finally:
        os.umask(before)
