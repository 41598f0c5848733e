"""``aifs mount``: mount a store. Also the protocol of mount(8) helpers (-sfnv, -o, -t after the
paths).
"""

import os
import subprocess
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from aifs.cli.arguments import MOUNTPOINT, PATH
from aifs.core.errors import MountError

if TYPE_CHECKING:
    from aifs.fuse.options import MountOptions

EPILOG = """
\b
Mount options (-o, separated by commas, may be repeated; the last one wins):
  ro, rw                  read-only or not (rw)
  allow_other             let other users in (on when root mounts; noallow_other: off)
  nodev, nosuid, noexec   no device nodes, set-uid bits, programs (root starts from dev, suid, exec)
  sync                    write to stable storage before each write returns
  noatime, strictatime    never keep access times, or at each opening for reading (relatime)
  remount                 change ro, rw, the access times, nodev, nosuid and noexec of a mount that
                          is there
  default_permissions     always on: the kernel checks permissions
  auto, noauto, user, nofail, _netdev, x-*, ...
                          for /etc/fstab: understood, nothing to do
  KEY=VALUE               any configuration key by its dotted path; aifs config lists them. Lists of
                          directories are separated by colons.

\b
Examples:
  aifs mount /srv/store /mnt/store
  aifs mount /etc/aifs/cluster.yaml /mnt/store -o ro,nosuid
  aifs mount /srv/store /mnt/store -o layout.unit=4MiB -o log.level=debug
"""


@click.command("mount", epilog=EPILOG)
@click.argument("source", type=PATH)
@click.argument("mountpoint", type=MOUNTPOINT)
@click.option("-o", "options", multiple=True, metavar="OPTION,...", help="Mount options and keys.")
@click.option("--foreground", is_flag=True, help="Stay in the foreground and log to stderr.")
@click.option(
    "-f", "--fake", is_flag=True, help="Check everything that can be checked without mounting."
)
@click.option(
    "--force",
    is_flag=True,
    help="Take the store over from a host that is known to be dead.",
)
@click.option("-s", "--sloppy", is_flag=True, help="Ignore unknown mount options.")
@click.option("-n", is_flag=True, hidden=True, expose_value=False)
@click.option("-v", is_flag=True, hidden=True, expose_value=False)
@click.option("-t", hidden=True, expose_value=False)
def mount_command(
    source: str,
    mountpoint: str,
    options: tuple[str, ...],
    foreground: bool,
    fake: bool,
    force: bool,
    sloppy: bool,
) -> None:
    """Mount the store SOURCE at the directory MOUNTPOINT.

    Returns when the mount serves. A mount that a killed daemon left behind at MOUNTPOINT is cleaned
    up first; a daemon that has not answered there for 30 s is ended. A store has one owner. Where
    its metadata have been copied or restored to another place, the mount is refused while the old
    owner has not given the store back, with its host and the time when it was seen last; --force
    takes the store over after some seconds, and an old owner that is alive all the same notices it,
    and ends. The daemon logs to the file that the configuration key log.file names; SIGTERM and
    SIGINT unmount it cleanly, SIGUSR1 writes the stacks of all its threads and tasks to the log.
    """
    from aifs.cli.daemon import run_in_background
    from aifs.cli.mounts import register
    from aifs.core import config, log
    from aifs.fuse.options import parse
    from aifs.store.store import find_metadata

    mount_options, overrides = parse(options, config.known_keys(), os.geteuid() == 0, sloppy)
    if mount_options.remount:
        if overrides:
            _require_in_force(mountpoint, source, overrides)
        if not fake:
            _remount(mountpoint, mount_options)
        return
    loaded = config.load(source, overrides)
    find_metadata(loaded)
    path = _prepare(mountpoint)
    if fake:
        return

    def work(on_ready: Callable[[], None]) -> None:
        from aifs.fuse.session import serve

        serve(loaded, path, mount_options, on_ready, force)

    if foreground:
        log.setup(None, loaded.log.level)
        work(lambda: None)
    else:
        run_in_background(work, loaded.log.file, loaded.log.level)
        register(loaded.source, path)
        _name_missing_servers(path)


def _require_in_force(mountpoint: str, source: str, overrides: dict[str, str]) -> None:
    """Raises MountError if a key has another value in the mount. mount(8) repeats those of fstab at
    each remount.
    """
    from aifs.cli.config import read_in_force
    from aifs.cli.mounts import require_aifs
    from aifs.core import config

    in_force = read_in_force(require_aifs(mountpoint))
    for key, value, _ in config.load(source, overrides).settings():
        if key in overrides and value != in_force[key]["value"]:
            raise MountError(
                f"{mountpoint}: a remount cannot change {key} from {in_force[key]['value']} to "
                f"{value}; mount again"
            )


def _remount(mountpoint: str, options: "MountOptions") -> None:
    """Give the mount ``options``: the kernel refuses what ``ro`` forbids, the daemon keeps access
    times.

    The daemon's background work goes on under ``ro``. A mount whose daemon has opened the store
    read-only cannot become writable. Raises MountError; then nothing has changed, or access times
    alone.
    """
    from aifs.cli import hints
    from aifs.cli.mounts import read_status, require_aifs

    path = require_aifs(mountpoint)
    if read_status(path)["read_only"] and not options.read_only:
        raise MountError(
            f"{mountpoint}: its store was opened read-only; unmount and mount it again"
        )
    if options.read_only:
        if not os.statvfs(path).f_flag & os.ST_RDONLY:
            hints.put(path, hints.ATIME, "noatime")
        _change_flags(path, ["ro", *options.fuse_options])
    else:
        _change_flags(path, ["rw", *options.fuse_options])
        hints.put(path, hints.ATIME, options.atime)


def _change_flags(path: str, flags: list[str]) -> None:
    command = [
        "mount",
        "--internal-only",
        "-o",
        ",".join(["remount", "atime", "relatime", *flags]),
        path,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise MountError(done.stderr.strip())


def _name_missing_servers(mountpoint: str) -> None:
    """Whoever mounts should not have to look into the log for what the mount does without."""
    from aifs.cli import hints
    from aifs.cli.output import print_error

    for server in hints.read(mountpoint, hints.STATUS)["servers"]:
        if server["state"] == "gone":
            print_error(f"warning: mounted without it: {server['last_error']}")


def _prepare(mountpoint: str) -> str:
    """The absolute path of a directory that can be mounted on. Raises MountError."""
    from aifs.cli.answers import Stuck, is_dead
    from aifs.cli.mounts import FSTYPE, end, mounted_at, resolve, unmount
    from aifs.cli.output import print_error

    path = resolve(mountpoint)
    while (mount := mounted_at(path)) is not None and mount.fstype == FSTYPE:
        try:
            if not is_dead(path):
                raise MountError(f"{mountpoint}: an AIFS is mounted here already")
            unmount(path, lazy=True)
        except Stuck as error:
            print_error(f"warning: {error}")
            end(mount)
    if not os.path.isdir(path):
        what = (
            "is not a directory"
            if os.path.lexists(path)
            else "there is no such directory; make it first"
        )
        raise MountError(f"{mountpoint}: {what}")
    return path
