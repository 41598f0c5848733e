"""``aifs config``: the configuration that is in force, and changing it while a store is mounted."""

import os

import click

from aifs.cli import door
from aifs.cli.command import PATH, Column, Report, Table, group
from aifs.cli.door import aifs_at, require_aifs
from aifs.core.errors import ConfigError, MountError

_EXAMPLES = """
aifs config show /srv/store
aifs config show /etc/aifs/cluster.yaml -o layout.unit=4MiB
aifs config show /mnt/store
aifs config set /mnt/store burst.drain_bandwidth 200MiB --save
aifs config set /srv/store layout.unit 4MiB
"""

_KEYS = (Column("key"), Column("value"), Column("from"))
_IN_FORCE = (
    *_KEYS,
    Column("can change", lambda row: "yes" if row["can_change"] else "when mounted again"),
)


@group(
    "config",
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
    told = _keys_of(place, options)
    rows = [{"key": key, "from": one.get("origin"), **one} for key, one in told.items()]
    in_force = any("can_change" in row for row in rows)
    return Report(told, Table(_IN_FORCE if in_force else _KEYS, rows))


def _keys_of(place: str, options: tuple[str, ...]) -> dict[str, dict[str, str]]:
    """By key, the value and its source: "from" of a mount, "origin" of a SOURCE."""
    from aifs.cli.server import recorded
    from aifs.core import config
    from aifs.fuse.options import parse

    if mountpoint := aifs_at(place):
        if options:
            raise click.UsageError("-o is for a SOURCE; a mount has its options already")
        return read_in_force(mountpoint)
    _, overrides = parse(options, config.known_keys(), privileged=False)
    settings = recorded(config.load(place, overrides)).settings()
    return {key: {"value": value, "origin": origin} for key, value, origin in settings}


def _known(told: dict[str, dict[str, str]], key: str) -> dict[str, str]:
    from aifs.core.config import suggestion

    if key not in told:
        raise ConfigError(f"{key}: unknown key{suggestion(key, [*told], 'key')}")
    return told[key]


@config_command.command(
    "get",
    short_help="Print the value of one key.",
    examples="aifs config get /mnt/store burst.high_water\naifs config get /srv/store layout.unit",
)
@click.argument("place", type=PATH, metavar="SOURCE|MOUNTPOINT")
@click.argument("key")
def get_command(place: str, key: str) -> Report:
    """Print the value that KEY has for SOURCE, or has in force in the mount at MOUNTPOINT."""
    found = _known(_keys_of(place, ()), key)
    return Report(found, found["value"])


@config_command.command(
    "check",
    short_help="Check a configuration before it is used.",
    examples="aifs config check /etc/aifs/cluster.yaml\n"
    "aifs config check /srv/store -o layout.unit=4MiB",
)
@click.argument("source", type=PATH)
@click.option("-o", "options", multiple=True, metavar="KEY=VALUE,...", help="Keys, as for mount.")
def check_command(source: str, options: tuple[str, ...]) -> Report:
    """Check the configuration of SOURCE: that each key is known, each value one that it can have,
    and that they fit together. The first fault is named with its file and line; the exit code is 3
    then. No store and no network is needed; `aifs doctor` looks at those, too.
    """
    from aifs.core import config
    from aifs.fuse.options import parse

    _, overrides = parse(options, config.known_keys(), privileged=False)
    loaded = config.load(source, overrides)
    return Report({"source": loaded.source}, f"{loaded.source}: no fault")


@config_command.command("set", examples=_EXAMPLES)
@click.argument("place", type=PATH, metavar="SOURCE|MOUNTPOINT")
@click.argument("key")
@click.argument("value")
@click.option("--save", is_flag=True, help="Of a mount: write it into the file of the store, too.")
def set_command(place: str, key: str, value: str, save: bool) -> Report:
    """Have the mount at MOUNTPOINT use another VALUE for KEY, until it is mounted again, or, with
    --save, from now on. For root, and for the user who has mounted.

    aifs config show MOUNTPOINT shows which keys can change. With a SOURCE, VALUE is written into
    its file (aifs.yaml in a directory) for the next mount. Comments in the file stay.
    """
    mountpoint = aifs_at(place)
    if not mountpoint and not os.path.isdir(place) and not os.path.isfile(place):
        mountpoint = require_aifs(place)
    if not mountpoint:
        file, now = _save(place, key, value)
        return Report({"key": key, "value": now, "file": file}, f"{file}: {key} is {now}")
    path = require_aifs(mountpoint)
    before = _known(read_in_force(path), key)
    try:
        door.put(path, "config", f"{key}={value}")
    except OSError as error:
        raise ConfigError(error.strerror or str(error)) from None
    now = read_in_force(path)[key]["value"]
    old = before["value"]
    until = " until the next mount"
    if save:
        file, _ = _save(door.read_status(path)["source"], key, now)
        until = f", also in {file}"
    text = f"{key} is {now}{until}, and was {old}"
    return Report({"key": key, "value": now, "before": old}, text)


def _save(source: str, key: str, value: str) -> tuple[str, str]:
    """Write a value into the file of SOURCE, after a check of all of it; the file, and the value
    as it is written."""
    from aifs.core import config, config_file

    if key in ("servers", "burst.directories"):
        raise ConfigError(f"{key}: the store knows these: aifs server add and rm change them")
    checked = config.load(source, {key: value})
    now = next(text for name, text, _ in checked.settings() if name == key)
    config_file.save(checked.file, {key: now})
    return checked.file, now


def read_in_force(mountpoint: str) -> dict[str, dict[str, str]]:
    """By key, the mount's "value", its "from" and "can_change". Raises MountError."""
    try:
        return door.read(mountpoint, "config")
    except PermissionError:
        raise MountError(
            f"{mountpoint}: only root and the user who has mounted may see its configuration"
        ) from None
