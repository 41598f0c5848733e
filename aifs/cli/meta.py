"""``aifs meta``: backups of a store's metadata, moves to and from a database, a small cluster's
database."""

import os
import shlex
import signal
import socket
import sys
import time
from types import FrameType
from typing import TYPE_CHECKING

import click

from aifs.cli import door
from aifs.cli.command import PATH, Column, Report, Table, group, number
from aifs.cli.door import aifs_at, holder_of, is_dead, read_status, require_answer
from aifs.cli.output import duration, print_error, progress, size, when
from aifs.core.errors import MountError, StoreBusy, StoreError
from aifs.core.limits import within
from aifs.core.mountinfo import FSTYPE, all_mounts, mounted_at

if TYPE_CHECKING:
    from aifs.meta.embedded import EmbeddedDatabase

_PAUSE_S = 0.05
_ANSWER_S = 10.0

_STATES = (
    Column("generation", show=number),
    Column("sequence", "seq", number),
    Column("made", lambda one: when(one.created_ns / 1e9) if one.created_ns else "damaged"),
    Column("files", "segments", number),
    Column("size", "bytes", size),
)


@group("meta")
def meta_command() -> None:
    """Back up, restore, move and serve the metadata of stores.

    While a store is mounted backups are made by themselves, every meta.backup_interval, onto its
    data servers.
    """


@meta_command.command(
    "backup",
    examples="aifs meta backup /mnt/store\naifs meta backup /srv/store --to /backup/store-meta",
)
@click.argument("source", type=PATH, metavar="SOURCE|MNT")
@click.option(
    "--to", "directory", type=PATH, help="Write a whole copy into this directory instead."
)
def backup_command(source: str, directory: str | None) -> None:
    """Back up the metadata of the store SOURCE, mounted or not, or of the mount MNT, now. Returns
    when it is durable.
    """
    from aifs.core import config
    from aifs.store.restore import back_up

    directory = os.path.abspath(directory) if directory is not None else ""
    if mountpoint := aifs_at(source):
        _ask(mountpoint, directory)
        return
    loaded = config.load(source, {})
    try:
        back_up(loaded, directory)
    except StoreBusy as busy:
        _ask(holder_of(loaded, busy), directory)


def _ask(mountpoint: str, directory: str) -> None:
    """Have the mount make one, and wait for it."""
    require_answer(mountpoint)
    token = f"{os.getpid()}-{time.time_ns()}"
    door.put(mountpoint, "backup", f"{token}:{directory}")
    while (error := read_status(mountpoint)["backup"]["answers"].get(token)) is None:
        time.sleep(_PAUSE_S)
    if error:
        raise MountError(f"{mountpoint}: no backup was made: {error}")


@meta_command.command(
    "ls",
    examples="aifs meta ls /srv/store\naifs meta ls /srv/store --from /backup/store-meta",
    sizes=True,
)
@click.argument("source", type=PATH)
@click.option(
    "--from", "directory", type=PATH, help="Look into this directory instead of the data servers."
)
def ls_command(source: str, directory: str | None) -> Report:
    """Show which states of the metadata of the store SOURCE are backed up on its data servers, the
    newest first.
    """
    from dataclasses import asdict

    from aifs.cli.server import recorded
    from aifs.core import config
    from aifs.store.restore import answering, find, states

    loaded = answering(recorded(config.load(source, {})))
    found = list(states(find(loaded, directory or "")[1]))
    return Report([asdict(state) for state in found], Table(_STATES, found))


@meta_command.command(
    "restore",
    examples="aifs meta restore /srv/store\n"
    "aifs meta restore /srv/store --from /backup/store-meta\naifs fsck /srv/store",
)
@click.argument("source", type=PATH)
@click.option(
    "--from",
    "directory",
    type=PATH,
    help="Take the backup from this directory instead of the data servers.",
)
@click.option("--at", type=int, help="The newest state up to this sequence number (aifs meta ls).")
@click.option(
    "--force", is_flag=True, help="Also if another host is seen to use the store: it loses it."
)
def restore_command(source: str, directory: str | None, at: int | None, force: bool) -> Report:
    """Make the metadata directory of the store SOURCE anew from the newest backup that is whole.

    The directory must be empty or missing. A daemon that used the store with other metadata loses
    the right to it; the command looks for one first. Files are as they were when the backup was
    made; later writes, or their objects, stay on the servers, unknown: aifs fsck names them.
    """
    from aifs.core import config
    from aifs.store.restore import answering, find, restore

    loaded = answering(config.load(source, {}))
    _require_unmounted(find(loaded, "")[0])
    state = restore(loaded, directory or "", at, force)
    return Report(
        {"directory": loaded.meta.directory, "sequence": state.seq, "generation": state.generation},
        f"restored {loaded.meta.directory} to the state of {when(state.created_ns / 1e9)} "
        f"(sequence {state.seq}, generation {state.generation})",
        f"aifs fsck {source} names the files that are missing, and the objects that the metadata "
        "does not know of",
    )


def _require_unmounted(store: str) -> None:
    """Raises MountError if a daemon of this host serves the store: without its metadata directory
    it would go on, on the same data servers, unnoticed."""
    for mount in all_mounts():
        if mount.fstype != FSTYPE:
            continue
        try:
            served = within(_ANSWER_S, _store_of, mount.mountpoint)
        except (TimeoutError, MountError) as error:
            print_error(f"{mount.mountpoint}: nobody knows which store is mounted here: {error}")
            continue
        if served == store:
            raise MountError(
                f"{mount.mountpoint}: the store is mounted here; copy what you need, and unmount "
                "it first"
            )


def _store_of(mountpoint: str) -> str:
    """The uuid of the store mounted there; '' if its daemon is dead, or it was unmounted."""
    try:
        return read_status(mountpoint)["uuid"]
    except MountError:
        if is_dead(mountpoint) or mounted_at(mountpoint) is None:
            return ""
        raise


# --- copy -----------------------------------------------------------------------------------------


@meta_command.command(
    "copy",
    epilog="""
Both name the same data servers; the files on them stay where they are. If it is interrupted, the
same command goes on with it, or begins again; until then aifs says which of both is the store.

\b
Exit codes: 0; those of `aifs fsck`, which looks at the result; 4 or 5: nothing was changed.
""",
    examples="aifs umount --drain /mnt/store\n"
    "aifs meta copy /srv/store /etc/aifs/gpu-001.yaml\n"
    "aifs mount /etc/aifs/gpu-001.yaml /mnt/store",
    sizes=True,
)
@click.argument("old", type=PATH, metavar="FROM")
@click.argument("new", type=PATH, metavar="TO")
def copy_command(old: str, new: str) -> Report:
    """Move the metadata of the store with the SOURCE FROM to where the SOURCE TO has them: from a
    directory of one host into a database (meta.engine postgresql), so that many hosts can mount it,
    or back.

    Nobody has the store mounted, it was closed in order, and nothing is undrained. All records are
    copied, read again, and compared; then FROM is the store no more, and TO is checked by fsck.
    Copies in burst tiers are given up.
    """
    from aifs.check.fsck import check
    from aifs.cli.fsck import report_of
    from aifs.core import config
    from aifs.store.copying import copy_metadata

    source, target = config.load(old, {}), config.load(new, {})
    begin = time.monotonic()
    with progress("copying") as show:
        copied = copy_metadata(source, target, show)
    text = f"the store is {target.source} now, and {source.source} no more"
    if copied.records:
        text = (
            f"copied {copied.records} records ({size(copied.bytes)}) in "
            f"{duration(time.monotonic() - begin)}; read again, they have the same digest "
            f"({copied.digest[:16]})\n{text}"
        )
    else:
        print_error("the records had been copied before; what was left to do is done")
    return report_of(check(target, repair=False), text)


# --- serve ----------------------------------------------------------------------------------------

_UNIT = """\
# The database of an AIFS cluster, as `aifs meta serve --systemd` has printed it.

[Unit]
Description=AIFS metadata in {directory}
After=local-fs.target network-online.target
Wants=network-online.target

[Service]
ExecStart={command}
Restart=on-failure
TimeoutStartSec=10min
TimeoutStopSec=10min
KillMode=mixed
LimitNOFILE=infinity

[Install]
WantedBy=multi-user.target
"""

_YAML = """\
meta:
  engine: postgresql
  url: postgresql://{role}@{host}:{port}/{role}
  secret: {secret}
"""


@meta_command.command(
    "serve",
    examples="aifs meta serve /var/lib/aifs-meta --listen 10.0.0.1:5432\n"
    "aifs meta serve /var/lib/aifs-meta --systemd >/etc/systemd/system/aifs-meta.service",
    prints=False,
)
@click.argument("directory", type=PATH, metavar="DIR")
@click.option(
    "--listen",
    default="0.0.0.0:5432",
    show_default=True,
    metavar="ADDRESS:PORT",
    help="Where hosts reach it.",
)
@click.option(
    "--user",
    default="",
    help="The user that runs PostgreSQL, when root starts it. By default the owner of the "
    "database; a new one belongs to postgres or, where there is no such user, nobody.",
)
@click.option("--systemd", is_flag=True, help="Print a unit of systemd that does this, and end.")
def serve_command(directory: str, listen: str, user: str, systemd: bool) -> int:
    """Run PostgreSQL in DIR for the metadata of a small cluster, until SIGTERM or SIGINT.

    DIR is made if it is missing. It becomes the property of the ordinary user that PostgreSQL runs
    as, but for DIR/secret, the password, which only the user who has made it may read: copy that
    file to each host. Prints the lines for the hosts' YAML files, then PostgreSQL's log on stderr.
    Connections are not encrypted: use a network that you trust. DIR/data/postgresql.conf has the
    settings. For high availability use a replicated or managed PostgreSQL instead.
    """
    from aifs.core.kinds import split_endpoint
    from aifs.meta.embedded import (
        EmbeddedDatabase,
        choose_user,
        find_programs,
        require_free,
    )

    try:
        address, port = split_endpoint(listen)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--listen") from None
    if systemd:
        print(_unit(os.path.abspath(directory), listen, user), end="")
        return 0
    if not os.path.exists(directory):  # nothing is made of what cannot begin
        require_free(address, port)
    account = choose_user(directory, user)
    database = EmbeddedDatabase(directory, account, find_programs())
    try:
        process = database.start(address, port)

        def stop(number: int, frame: FrameType | None) -> None:
            process.send_signal(signal.SIGINT)  # PostgreSQL's word for: end all connections

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        _announce(database, address, port, account.pw_name if account else "")
        status = process.wait()
    finally:
        database.release()
    if status:
        raise StoreError(
            f"{directory}: PostgreSQL has ended with status {status} (its log says why)"
        )
    return 0


def _announce(database: "EmbeddedDatabase", address: str, port: int, user: str) -> None:
    from aifs.meta.embedded import ROLE

    who = f", as user {user}" if user else ""
    print(f"# PostgreSQL {database.version} serves {database.directory} at {address}:{port}{who}")
    print("# For the YAML file of each host, which has a copy of the secret (mode 600):")
    host = socket.gethostname() if address in ("0.0.0.0", "::") else address
    host = f"[{host}]" if ":" in host else host
    text = _YAML.format(role=ROLE, host=host, port=port, secret=database.secret_file)
    print(text, end="", flush=True)


def _unit(directory: str, listen: str, user: str) -> str:
    words = [os.path.realpath(sys.argv[0]), "meta", "serve", directory, "--listen", listen]
    words += ["--user", user] if user else []
    command = " ".join(_quoted(word) for word in words)
    return _UNIT.format(directory=directory.replace("%", "%%"), command=command)


def _quoted(word: str) -> str:
    """As systemd reads it."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return escaped if shlex.quote(word) == word else f'"{escaped}"'
