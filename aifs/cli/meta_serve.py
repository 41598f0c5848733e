"""``aifs meta serve``: the database of a small cluster."""

import os
import shlex
import signal
import socket
import sys
from types import FrameType
from typing import TYPE_CHECKING

import click

from aifs.cli.arguments import PATH

if TYPE_CHECKING:
    from aifs.meta.embedded import EmbeddedDatabase

_EPILOG = """\b
Examples:
  aifs meta serve /var/lib/aifs-meta --listen 10.0.0.1:5432
  aifs meta serve /var/lib/aifs-meta --systemd >/etc/systemd/system/aifs-meta.service"""

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


@click.command("serve", epilog=_EPILOG)
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
    help="Who runs PostgreSQL, when root starts it. By default whom the database belongs to; a new "
    "one goes to postgres or, where there is no such user, nobody.",
)
@click.option("--systemd", is_flag=True, help="Print a unit of systemd that does this, and end.")
def serve_command(directory: str, listen: str, user: str, systemd: bool) -> int:
    """Run PostgreSQL in DIR for the metadata of a small cluster, until SIGTERM or SIGINT.

    DIR is made if it is missing. It becomes the property of the ordinary user that PostgreSQL runs
    as, but for DIR/secret, the password, which only who has made it may read: copy that file to
    each host. Prints what belongs into the hosts' YAML files, then PostgreSQL's log on stderr.
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
        from aifs.core.errors import StoreError

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
