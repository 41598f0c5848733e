"""``aifs config``: the configuration that is in force, and changing it while a store is mounted."""

from contextlib import suppress

import click

from aifs.cli import hints
from aifs.cli.arguments import PATH
from aifs.core.errors import ConfigError, MountError

EPILOG = """
\b
Examples:
  aifs config /srv/store
  aifs config /etc/aifs/cluster.yaml -o layout.unit=4MiB
  aifs config /mnt/store
  aifs config set /mnt/store burst.drain_bandwidth 200MiB
"""


class _ShowUnlessSet(click.Group):
    """``aifs config SOURCE`` is ``aifs config show SOURCE``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args.insert(0, "show")
        return super().parse_args(ctx, args)


@click.group(
    "config",
    cls=_ShowUnlessSet,
    epilog=EPILOG,
    short_help="Show every key: its value, and where that comes from; change some.",
)
def config_group() -> None:
    """Show the configuration of a SOURCE or a mount, and change it while it is mounted."""


@config_group.command("show", epilog=EPILOG)
@click.argument("place", type=PATH, metavar="SOURCE|MOUNTPOINT")
@click.option("-o", "options", multiple=True, metavar="KEY=VALUE,...", help="Keys, as for mount.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show_command(place: str, options: tuple[str, ...], as_json: bool) -> None:
    """Show every configuration key for SOURCE, or of the mount at MOUNTPOINT as it is in force: its
    value, and where it came from.

    From default, SOURCE directory (implied by it), a file and line, -o, aifs config set, or the
    store, which knows the servers that were added, replaced and removed. The
    file config/default.yaml explains each key. Of a mount it is also shown which keys can change
    without mounting again.
    """
    from aifs.cli.mounts import require_aifs
    from aifs.cli.output import print_json, print_table
    from aifs.cli.server_orders import recorded
    from aifs.core import config
    from aifs.fuse.options import parse

    mountpoint = None
    with suppress(MountError):
        mountpoint = require_aifs(place)
    if mountpoint is not None:
        if options:
            raise click.UsageError("-o is for a SOURCE; a mount has its options already")
        told = read_in_force(mountpoint)
        if as_json:
            print_json(told)
            return
        rows = [
            (key, one["value"], one["from"], "yes" if one["can_change"] else "when mounted again")
            for key, one in told.items()
        ]
        print_table(("key", "value", "from", "can change"), rows)
        return
    _, overrides = parse(options, config.known_keys(), privileged=False)
    settings = list(recorded(config.load(place, overrides)).settings())
    if as_json:
        print_json({key: {"value": value, "origin": origin} for key, value, origin in settings})
    else:
        print_table(("key", "value", "from"), settings)


@config_group.command("set", epilog=EPILOG)
@click.argument("mountpoint", type=PATH)
@click.argument("key")
@click.argument("value")
def set_command(mountpoint: str, key: str, value: str) -> None:
    """Have the mount at MOUNTPOINT use another VALUE for KEY, until it is mounted again: write it
    into the YAML of the store to keep it. For root, and for who has mounted.

    aifs config MOUNTPOINT shows which keys can change.
    """
    from aifs.cli.mounts import require_aifs
    from aifs.core.config import suggestion

    path = require_aifs(mountpoint)
    before = read_in_force(path)
    if key not in before:
        raise ConfigError(f"{key}: unknown key{suggestion(key, [*before], 'key')}")
    try:
        hints.put(path, hints.CONFIG, f"{key}={value}")
    except OSError as error:
        raise ConfigError(error.strerror or str(error)) from None
    now = read_in_force(path)[key]["value"]
    print(f"{key} is {now} until the next mount, and was {before[key]['value']}")


def read_in_force(mountpoint: str) -> dict[str, dict[str, str]]:
    """By key, what the mount has in force: its "value", "from" and "can_change". Raises
    MountError."""
    try:
        return hints.read(mountpoint, hints.CONFIG)
    except PermissionError:
        raise MountError(
            f"{mountpoint}: only root and who has mounted may see its configuration"
        ) from None
