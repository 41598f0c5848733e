"""``aifs server``: the data servers of a store."""

import os
import socket

import click

from aifs.cli import hints
from aifs.cli.arguments import PATH
from aifs.core.errors import StoreBusy, StoreError


@click.group("server")
def server_group() -> None:
    """Add data servers and burst directories to a store."""


_EXAMPLES = """\b
Examples:
  aifs server add /srv/store /mnt/disk5/aifs
  aifs server add --burst /srv/store /nvme1/aifs-burst"""


@server_group.command("add", epilog=_EXAMPLES)
@click.option("--burst", is_flag=True, help="Add it to the burst tier: a directory on local NVMe.")
@click.argument("source", type=PATH)
@click.argument("directory", type=PATH)
def add_command(burst: bool, source: str, directory: str) -> None:
    """Make the empty DIRECTORY a data server of the store SOURCE, mounted or not. New files use it.

    The store remembers its servers; a YAML file need not list those that were added.
    """
    from aifs.core import config
    from aifs.vfs.owner import read_owner
    from aifs.vfs.store import add_server

    loaded = config.load(source, {})
    directory = os.path.abspath(directory)
    try:
        add_server(loaded, directory, "burst" if burst else "data")
    except StoreBusy:
        owner = read_owner(loaded.meta.directory)
        if owner is None or not owner.mountpoint or owner.host != socket.gethostname():
            raise
        try:
            hints.put(owner.mountpoint, hints.BURST_ADD if burst else hints.SERVER_ADD, directory)
        except OSError as error:
            raise StoreError(
                f"{directory}: refused by the mount at {owner.mountpoint}: {error.strerror}; "
                f"its log {loaded.log.file} says why"
            ) from None
        print(f"added {directory} to the mounted store")
    else:
        print(f"added {directory} to the store")
