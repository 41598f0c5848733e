"""``aifs config``: the configuration that is in force, and changing it while a store is mounted."""

from contextlib import suppress

import click

from aifs.cli import hints
from aifs.cli.command import PATH, Column, CommandGroup, Report, Table
from aifs.cli.door import require_aifs
from aifs.core.errors import ConfigError, MountError

_EXAMPLES = """
aifs config /srv/store
aifs config /etc/aifs/cluster.yaml -o layout.unit=4MiB
aifs config /mnt/store
aifs config set /mnt/store burst.drain_bandwidth 200MiB
"""

_KEYS = (Column("key"), Column("value"), Column("from"))
_IN_FORCE = (
    *_KEYS,
    Column("can change", lambda row: "yes" if row["can_change"] else "when mounted again"),
)


class _ShowUnlessSet(CommandGroup):
    """``aifs config SOURCE`` is ``aifs config show SOURCE``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args.insert(0, "show")
        return super().parse_args(ctx, args)


@click.group(
    "config",
    cls=_ShowUnlessSet,
    short_help="Show every key: its value, and where that comes from; change some.",
)
def config_command() -> None:
    """Show the configuration of a SOURCE or a mount, and change it while it is mounted."""


@config_command.command("show", examples=_EXAMPLES)
@click.argument("place", type=PATH, metavar="SOURCE|MOUNTPOINT")
@click.option("-o", "options", multiple=True, metavar="KEY=VALUE,...", help="Keys, as for mount.")
def show_command(place: str, options: tuple[str, ...]) -> Report:
    """Show every configuration key for SOURCE, or of the mount at MOUNTPOINT as it is in force: its
    value, and where it came from.

    From default, SOURCE directory (implied by it), a file and line, -o, aifs config set, or the
    store, which knows the servers that were added, replaced and removed. The
    file config/default.yaml explains each key. Of a mount it is also shown which keys can change
    without mounting again.
    """
    from aifs.cli.server import recorded
    from aifs.core import config
    from aifs.fuse.options import parse

    mountpoint = None
    with suppress(MountError):
        mountpoint = require_aifs(place)
    if mountpoint is not None:
        if options:
            raise click.UsageError("-o is for a SOURCE; a mount has its options already")
        told = read_in_force(mountpoint)
        rows = [{"key": key, **one} for key, one in told.items()]
        return Report(told, Table(_IN_FORCE, rows))
    _, overrides = parse(options, config.known_keys(), privileged=False)
    settings = list(recorded(config.load(place, overrides)).settings())
    told = {key: {"value": value, "origin": origin} for key, value, origin in settings}
    rows = [{"key": key, "value": value, "from": origin} for key, value, origin in settings]
    return Report(told, Table(_KEYS, rows))


@config_command.command("set", examples=_EXAMPLES)
@click.argument("mountpoint", type=PATH)
@click.argument("key")
@click.argument("value")
def set_command(mountpoint: str, key: str, value: str) -> Report:
    """Have the mount at MOUNTPOINT use another VALUE for KEY, until it is mounted again: write it
    into the YAML of the store to keep it. For root, and for the user who has mounted.

    aifs config MOUNTPOINT shows which keys can change.
    """
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
    old = before[key]["value"]
    text = f"{key} is {now} until the next mount, and was {old}"
    return Report({"key": key, "value": now, "before": old}, text)


def read_in_force(mountpoint: str) -> dict[str, dict[str, str]]:
    """By key, the "value" that the mount has in force, its "from" and "can_change". Raises
    MountError."""
    try:
        return hints.read(mountpoint, hints.CONFIG)
    except PermissionError:
        raise MountError(
            f"{mountpoint}: only root and the user who has mounted may see its configuration"
        ) from None
