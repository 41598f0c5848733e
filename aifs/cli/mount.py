"""``aifs format`` and ``aifs mount``: make a store, and mount it; mount(8)'s protocol for helpers
(-sfnv, -o, -t after the paths), and the start of the daemon."""

import fcntl
import gc
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import click

from aifs.cli.command import MOUNTPOINT, PATH, Pairs, Report, command
from aifs.cli.output import describe_error, print_error
from aifs.core import log
from aifs.core.errors import AifsError, MountError, UserError

if TYPE_CHECKING:
    from aifs.fuse.options import MountOptions

_logger = logging.getLogger(__name__)


@command(
    "format",
    short_help="Make an empty store.",
    examples="aifs format /srv/store\n"
    "aifs format /srv/store -o servers=/mnt/a:/mnt/b -o layout.replicas=2\n"
    "aifs format /etc/aifs/cluster.yaml",
)
@click.argument("source", type=PATH)
@click.option(
    "-o",
    "options",
    multiple=True,
    metavar="KEY=VALUE,...",
    help="Keys of the configuration, which are written into SOURCE/aifs.yaml.",
)
@click.option(
    "--force", is_flag=True, help="Erase a store that is there already, with all files in it."
)
def format_command(source: str, options: tuple[str, ...], force: bool) -> Report:
    """Make an empty store in SOURCE, a directory or a YAML file.

    Makes the directories of the metadata, the data servers and the burst tier, and marks each as
    part of this store. Directories that are not empty are refused, as is a SOURCE that holds
    anything except its aifs.yaml. That file is made, with the keys that are given.
    """
    from aifs.core import config, config_file
    from aifs.fuse.options import parse
    from aifs.store.store import format_store

    _, overrides = parse(options, config.known_keys(), privileged=False)
    is_directory = config.is_directory_source(source)
    if overrides and not is_directory:
        raise click.UsageError(f"-o is for a directory as SOURCE; write the keys into {source}")
    loaded = config.load(source, overrides)
    made = {
        "uuid": format_store(loaded, force),
        "metadata": loaded.meta.directory,
        "servers": loaded.servers,
        "burst": loaded.burst.directories,
    }
    if is_directory:
        lists = {"servers": loaded.servers, "burst.directories": loaded.burst.directories}
        given = (one for one in loaded.settings() if one[0] in overrides)
        config_file.save(loaded.file, {key: lists.get(key, text) for key, text, _ in given})
    facts = [("uuid", made["uuid"]), ("metadata", loaded.meta.directory)]
    facts += [(f"server {number}", path) for number, path in enumerate(loaded.servers)]
    facts += [(f"burst {number}", path) for number, path in enumerate(loaded.burst.directories)]
    return Report(made, Pairs(facts))


_MOUNT_OPTIONS = """
\b
Mount options (-o, separated by commas, may be repeated; the last one wins):
  ro, rw                  read-only or not (rw)
  allow_other             let other users in (on when root mounts; noallow_other: off)
  nodev, nosuid, noexec   no devices, set-uid bits, programs (root starts from dev, suid, exec)
  sync                    write to stable storage before each write returns
  noatime, strictatime    never keep access times, or at each opening for reading (relatime)
  remount                 change ro, rw, access times, nodev, nosuid and noexec of a mount that is
                          there
  subdir=DIR              show this directory of the store at MOUNTPOINT, with ro, nosuid, nodev,
                          noexec, noatime or without; the store has to be mounted on this host
                          already, and that daemon serves it
  default_permissions     always on: the kernel checks permissions
  auto, noauto, user, nofail, _netdev, x-*, ...
                          for /etc/fstab: understood, nothing to do
  KEY=VALUE               any configuration key by its dotted path; aifs config show lists them.
                          Lists of directories are separated by colons.
"""


@command(
    "mount",
    epilog=_MOUNT_OPTIONS,
    examples="aifs mount /srv/store /mnt/store\n"
    "aifs mount /etc/aifs/cluster.yaml /mnt/store -o ro,nosuid\n"
    "aifs mount /srv/store /mnt/store -o layout.unit=4MiB -o log.level=debug\n"
    "aifs mount /srv/store /srv/team-a -o subdir=teams/a,ro",
)
@click.argument("source", type=PATH)
@click.argument("mountpoint", type=MOUNTPOINT)
@click.option("-o", "options", multiple=True, metavar="OPTION,...", help="Mount options and keys.")
@click.option(
    "--foreground",
    is_flag=True,
    help="Stay in the foreground and log to stderr; the mount ends with this process.",
)
@click.option(
    "--no-keeper",
    is_flag=True,
    help="The mount ends with its daemon, as with -o kernel.restarts=0.",
)
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
    no_keeper: bool,
    fake: bool,
    force: bool,
    sloppy: bool,
) -> None:
    """Mount the store SOURCE at the directory MOUNTPOINT.

    Returns when the mount serves. Where one host uses the store, a daemon that dies is followed by
    another one, and programs wait for it (kernel.restarts). A mount that a killed daemon left
    behind at MOUNTPOINT is cleaned up first; a daemon that has not answered there for 30 s is
    ended. A store has one owner. Where its metadata have been copied or restored to another place,
    the mount is refused while the old owner has not given the store back, with its host and the
    time when it was seen last; --force takes the store over after some seconds, and an old owner
    that is alive all the same notices it, and ends. The daemon logs to the file that the
    configuration key log.file names; SIGTERM and SIGINT unmount it cleanly, SIGUSR1 writes the
    stacks of all its threads and tasks to the log.
    """
    mount_options, overrides = _parse(options, sloppy)
    from aifs.cli.umount import register
    from aifs.core import config
    from aifs.store.store import find_metadata

    if mount_options.remount:
        if overrides:
            _require_in_force(mountpoint, source, overrides)
        if not fake:
            _remount(mountpoint, mount_options)
        return
    if no_keeper:
        overrides["kernel.restarts"] = "0"
    elif foreground:  # a supervisor of services starts another one
        overrides.setdefault("kernel.restarts", "0")
    loaded = config.load(source, overrides)
    find_metadata(loaded)
    path = _prepare(mountpoint)
    if mount_options.subdir:
        _bind(loaded.source, path, mount_options, [*overrides], fake)
        return
    if fake:
        return
    again = [sys.executable, "-m", "aifs.cli.main", "go-on", loaded.source, path]
    again += [word for option in options for word in ("-o", option)]
    again += [*["--foreground"] * foreground, *["--sloppy"] * sloppy]

    def work(on_ready: Callable[[], None]) -> None:
        from aifs.fuse.session import serve

        serve(loaded, path, mount_options, on_ready, force, again=again)

    if foreground:
        log.setup(None, loaded.log.level)
        work(lambda: None)
    else:
        run_in_background(work, loaded.log.file, loaded.log.level)
        register(loaded.source, path)
        _name_missing_servers(path)


@command("go-on", hidden=True)
@click.argument("source")
@click.argument("mountpoint")
@click.option("-o", "options", multiple=True)
@click.option("--foreground", is_flag=True)
@click.option("--sloppy", is_flag=True)
@click.option(
    "--descriptors", type=(int, int, int), help="Of the mount, of what is kept, of the pipe."
)
def go_on_command(
    source: str,
    mountpoint: str,
    options: tuple[str, ...],
    foreground: bool,
    sloppy: bool,
    descriptors: tuple[int, int, int] | None,
) -> None:
    """Go on with the mount of a daemon that dies, when the keeper says so: it starts this command.
    Without descriptors: check that this version could."""
    mount_options, overrides = _parse(options, sloppy)
    from aifs.core import config

    loaded = config.load(source, overrides)
    log.setup(None if foreground else loaded.log.file, loaded.log.level)
    os.umask(0o022)
    try:
        from aifs.fuse.kept import KeptMount, stand_by
        from aifs.fuse.session import serve

        if descriptors is None:
            return
        for fd in descriptors:
            os.set_inheritable(fd, False)
        device, table, turn = descriptors
        gc.freeze()
        if not stand_by(table, turn):
            return  # the keeper has ended
        os.close(turn)
        serve(loaded, mountpoint, mount_options, lambda: None, kept=KeptMount(table, device))
    except (AifsError, OSError, ImportError) as error:
        _logger.error("the daemon stops: %s", describe_error(error))
        raise
    except BaseException:
        _logger.critical("the daemon stops", exc_info=True)
        raise


def _bind(
    source: str, mountpoint: str, options: "MountOptions", keys: list[str], fake: bool
) -> None:
    """Mount a directory of the store's mount at ``mountpoint``, too. Raises MountError, OSError."""
    from aifs.cli.door import require_answer
    from aifs.core import beneath, binds
    from aifs.core.mountinfo import FSTYPE, all_mounts

    wanted = ["ro"] * options.read_only + options.fuse_options
    if wrong := [*keys, *(["sync"] if "sync" in wanted else [])]:
        raise MountError(f"-o {wrong[0]}: with subdir it is the other mount's to have")
    mounts = (mount for mount in all_mounts() if (mount.fstype, mount.root) == (FSTYPE, "/"))
    mount = next((mount for mount in mounts if mount.source == source), None)
    if mount is None:
        raise MountError(f"-o subdir: {source} is not mounted on this host; mount all of it first")
    require_answer(mount.mountpoint)
    top = beneath.open_directory(mount.mountpoint)
    try:
        directory = beneath.reach(options.subdir, top)
    finally:
        os.close(top)
    try:
        if not fake:
            binds.bind(directory, mountpoint, [it for it in wanted if it in binds.OPTIONS])
    finally:
        os.close(directory)


def _parse(options: Sequence[str], sloppy: bool) -> tuple["MountOptions", dict[str, str]]:
    """Options of a mount, and configuration keys among them. Called before the configuration is
    imported: a search of all installed packages for plugins would be 5 % of a start."""
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    from aifs.core import config
    from aifs.fuse.options import parse

    return parse(options, config.known_keys(), os.geteuid() == 0, sloppy)


def _require_in_force(mountpoint: str, source: str, overrides: dict[str, str]) -> None:
    """Raises MountError if the mount has another value of a key. mount(8) repeats fstab's keys at
    each remount."""
    from aifs.cli.config import read_in_force
    from aifs.cli.door import require_aifs
    from aifs.core import config

    in_force = read_in_force(require_aifs(mountpoint))
    for key, value, _ in config.load(source, overrides).settings():
        if key not in overrides:
            continue
        if key not in in_force:
            raise MountError(
                f"{mountpoint}: its daemon is of another version, which has no {key}; mount again"
            )
        if value != in_force[key]["value"]:
            raise MountError(
                f"{mountpoint}: a remount cannot change {key} from {in_force[key]['value']} to "
                f"{value}; mount again"
            )


def _remount(mountpoint: str, options: "MountOptions") -> None:
    """Give the mount ``options``: the kernel refuses what ``ro`` forbids, the daemon keeps access
    times and goes on in the background. A store opened read-only stays so. Raises MountError; then
    at most access times have changed."""
    from aifs.cli import door
    from aifs.cli.door import read_status, require_aifs

    path = require_aifs(mountpoint)
    if read_status(path)["read_only"] and not options.read_only:
        raise MountError(
            f"{mountpoint}: its store was opened read-only; unmount and mount it again"
        )
    if options.read_only:
        if not os.statvfs(path).f_flag & os.ST_RDONLY:
            door.put(path, "atime", "noatime")
        _change_flags(path, ["ro", *options.fuse_options])
    else:
        _change_flags(path, ["rw", *options.fuse_options])
        door.put(path, "atime", options.atime)


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
    """Print the servers that the mount does without."""
    from aifs.cli import door

    for server in door.read(mountpoint, "status")["servers"]:
        if server["state"] == "gone":
            print_error(f"warning: mounted without it: {server['last_error']}")


def _prepare(mountpoint: str) -> str:
    """The absolute path of a directory that can be mounted on. Raises MountError."""
    from aifs.cli.door import Stuck, is_dead, resolve
    from aifs.cli.umount import end, unmount
    from aifs.core.mountinfo import FSTYPE, mounted_at

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


# --- the daemon -----------------------------------------------------------------------------------
# It leaves its caller: double fork, a session of its own, no terminal. It reports through a pipe:
# its pid, then ``ready``, or ``error``, an exit code and one line. Until then, lines of libraries
# on stderr are kept for that line: libfuse says only there why it failed.


def run_in_background(
    work: Callable[[Callable[[], None]], None], log_file: str, log_level: str
) -> None:
    """Run ``work(on_ready)`` in a daemon that logs to ``log_file``; returns when it calls
    ``on_ready``. Raises the UserError of ``work`` before that. An interruption stops the daemon."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        # Above the standard descriptors, which may have been closed when we were started.
        _detach(work, fcntl.fcntl(write_end, fcntl.F_DUPFD_CLOEXEC, 3), log_file, log_level)
    os.close(write_end)
    os.waitpid(child, 0)
    with open(read_end, encoding="utf-8", errors="surrogateescape") as pipe:
        pid = pipe.readline()
        try:
            report = pipe.read()
        except KeyboardInterrupt:
            os.kill(int(pid), signal.SIGTERM)
            raise
    word, _, rest = report.partition(" ")
    if word == "ready":
        return
    if word != "error":
        raise MountError(f"the daemon died before the mount was ready; its log is {log_file}")
    code, _, message = rest.partition(" ")
    error = UserError(message)
    error.exit_code = int(code)
    raise error


def _detach(
    work: Callable[[Callable[[], None]], None], pipe: int, log_file: str, log_level: str
) -> None:
    """In the first child: leave the session, fork again, run ``work``. Never returns."""
    code = 1
    try:
        os.setsid()
        if os.fork() > 0:
            os._exit(0)
        code = _run_daemon(work, pipe, log_file, log_level)
    finally:
        logging.shutdown()
        os._exit(code)


def _run_daemon(
    work: Callable[[Callable[[], None]], None], pipe: int, log_file: str, log_level: str
) -> int:
    ready = False

    def on_ready() -> None:
        nonlocal ready
        ready = True
        os.dup2(1, 2)
        os.write(pipe, b"ready")
        os.close(pipe)

    os.write(pipe, f"{os.getpid()}\n".encode())
    early_stderr = _leave_terminal(pipe)
    try:
        log.setup(log_file, log_level)
        work(on_ready)
        return 0
    except (AifsError, OSError, ImportError) as error:
        message, code = describe_error(error), getattr(error, "exit_code", 1)
        if ready:
            _logger.error("the daemon stops: %s", message)
    except BaseException as error:  # a bug: its stack belongs in the log, one line to the user
        message, code = f"unexpected {type(error).__name__}: {error}; see {log_file}", 1
        _logger.critical("the daemon stops", exc_info=True)
    if not ready:
        said = " ".join(os.pread(early_stderr, 4096, 0).decode(errors="replace").split())
        reason = f" ({said})" if said else ""
        os.write(pipe, f"error {code} {message}{reason}".encode(errors="surrogateescape"))
    return code


def _leave_terminal(pipe: int) -> int:
    """Keep only ``pipe`` of the caller's files, and no directory; returns a file for stderr."""
    os.chdir("/")
    os.umask(0o022)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.closerange(3, pipe)
    os.closerange(pipe + 1, os.sysconf("SC_OPEN_MAX"))
    early_stderr = os.memfd_create("early-stderr")
    os.dup2(early_stderr, 2)
    return early_stderr
