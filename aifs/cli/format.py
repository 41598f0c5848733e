"""``aifs format``: make an empty store."""

import click

from aifs.cli.arguments import PATH

EPILOG = """
\b
Examples:
  aifs format /srv/store
  aifs format /etc/aifs/cluster.yaml
"""


@click.command("format", epilog=EPILOG)
@click.argument("source", type=PATH)
@click.option(
    "--force", is_flag=True, help="Erase a store that is there already, with all files in it."
)
def format_command(source: str, force: bool) -> None:
    """Make an empty store in SOURCE, a directory or a YAML file.

    Makes the directories of the metadata, the data servers and the burst tier, and marks each as
    part of this store. Directories that are not empty are refused, as is a SOURCE that holds
    anything but its aifs.yaml.
    """
    from aifs.cli.output import print_facts
    from aifs.core import config
    from aifs.store.store import format_store

    loaded = config.load(source, {})
    uuid = format_store(loaded, force)
    servers = [(f"server {number}", path) for number, path in enumerate(loaded.servers)]
    burst = [(f"burst {number}", path) for number, path in enumerate(loaded.burst.directories)]
    print_facts([("uuid", uuid), ("metadata", loaded.meta.directory), *servers, *burst])
