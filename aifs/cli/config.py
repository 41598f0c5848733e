"""``aifs config``: the configuration that is in force."""

import click

from aifs.cli.arguments import PATH

EPILOG = """
\b
Examples:
  aifs config /srv/store
  aifs config /etc/aifs/cluster.yaml -o layout.unit=4MiB
"""


@click.command(
    "config", epilog=EPILOG, short_help="Show every key: its value, and where that comes from."
)
@click.argument("source", type=PATH)
@click.option("-o", "options", multiple=True, metavar="KEY=VALUE,...", help="Keys, as for mount.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def config_command(source: str, options: tuple[str, ...], as_json: bool) -> None:
    """Show every configuration key for SOURCE: its value, and where it came from.

    From default, SOURCE directory (implied by it), a file and line, or -o. The file
    config/default.yaml explains each key.
    """
    from aifs.cli.output import print_json, print_table
    from aifs.core import config
    from aifs.fuse.options import parse

    _, overrides = parse(options, config.known_keys(), privileged=False)
    settings = list(config.load(source, overrides).settings())
    if as_json:
        print_json({key: {"value": value, "origin": origin} for key, value, origin in settings})
    else:
        print_table(("key", "value", "from"), settings)
