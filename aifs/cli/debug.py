"""``aifs debug``: all that somebody needs who is to find out what is wrong with a mount, in one
file."""

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
from glob import glob
from typing import Any

import click

from aifs.cli import hints
from aifs.cli.arguments import MOUNTPOINT, PATH
from aifs.core.errors import MountError, UserError

EPILOG = """
\b
Examples:
  aifs debug /mnt/store
  aifs debug /mnt/store --output /tmp/store.tar.gz --json

\b
It holds:
  about.json          versions, kernel, processors, memory
  status.json         as aifs status --json; servers.json as aifs server status --json
  config.json         every key that is in force, and where it comes from
  metrics.txt         as Prometheus reads them
  why.json            what requests wait for, as aifs why --json
  doctor.json         as aifs doctor --json
  mountinfo.txt       all mounts of this machine; mount options of the daemon
  threads.txt         where the daemon's threads wait in the kernel
  log.txt             the last MiB of its log, with the stacks of its tasks
  missing.json        what could not be had, and why

The log and the stacks name files, hosts and users. There is nothing of what is in files, nor the
text of any secret. For root, and for who has mounted.
"""

_LOG_BYTES = 1 << 20
_ANSWER_S = 8.0
_STACKS_S = 3.0
_LOOK_S = 0.05


@click.command("debug", epilog=EPILOG, short_help="Collect what is needed to find a fault.")
@click.argument("mountpoint", type=MOUNTPOINT)
@click.option(
    "--output", type=PATH, metavar="FILE", help="A .tar.gz that is not there; else by the time."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON: the file, what is in it.")
def debug_command(mountpoint: str, output: str | None, as_json: bool) -> None:
    """Write a file with the state of the mount at MOUNTPOINT, also if its daemon does not answer,
    for who is to find out what is wrong with it.
    """
    from aifs.cli.mounts import daemon_of, mount_of
    from aifs.cli.output import describe_error, print_json
    from aifs.core.mountinfo import mounted_at

    path = mount_of(mountpoint)
    mount = mounted_at(path)
    assert mount is not None
    if os.geteuid() not in (0, _mounter(path)):
        raise MountError(f"{path}: only root and who has mounted may see all of it")
    pid = daemon_of(mount)
    asked: dict[str, Callable[[], str]] = {
        "status.json": lambda: _hint(path, hints.STATUS),
        "servers.json": lambda: _hint(path, hints.SERVERS),
        "config.json": lambda: _hint(path, hints.CONFIG),
        "why.json": lambda: _hint(path, hints.WHY),
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
    if as_json:
        print_json({"file": file_name, "members": sorted(told), "missing": missing})
        return
    print(file_name)
    for name, reason in missing.items():
        print(f"without {name}: {reason}")


def _mounter(path: str) -> int:
    """Who has mounted: FUSE says so in the options of the mount."""
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
    from aifs.core.limits import within

    return _json(within(_ANSWER_S, hints.read, mountpoint, name))


def _about() -> dict[str, Any]:
    packages = ("aifs", "pyfuse3", "trio", "lmdb", "pydantic", "h11", "zstandard", "psycopg")
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
    from aifs.core.limits import within
    from aifs.watch.metrics import expose

    return expose(within(_ANSWER_S, hints.read, mountpoint, hints.STATUS))


def _doctor(mountpoint: str) -> str:
    from aifs.cli.doctor import checks_of
    from aifs.core.limits import within

    return _json(within(_ANSWER_S, checks_of, mountpoint))


def _threads(pid: int | None) -> str:
    """Where each thread of the daemon waits in the kernel, as far as it may be seen."""
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
    """The end of the log, with the stacks that the daemon is asked for, if it answers."""
    from aifs.core import config

    try:
        known = json.loads(_hint(mountpoint, hints.CONFIG))
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
