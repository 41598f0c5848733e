"""Ways to configure a store, for suites that are to hold in all of them.

The burst tier is off, on, or tiny, so that admission, draining, eviction and staging happen all the
time; bytes are passed through to it or go by way of the daemon; drained files are striped or
interleaved, plain, replicated or coded.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from aifs.core.config import DIRECTORY_FILE, Config, load
from aifs.store.store import format_store

OFF = {"burst.directories": ""}
ON = {"burst.drain_delay": "0s", "burst.throttle_max": "0s"}
TINY = ON | {
    "burst.capacity": "256KiB",
    "burst.high_water": "0.5",
    "burst.low_water": "0.2",
    "burst.reserve": "0",
    "burst.stage_for_write": "16KiB",
}
WAITING = ON | {"burst.drain_delay": "1h"}
"""Nothing is drained but what is asked for."""

BY_DAEMON = {"burst.passthrough": "false"}
STRIPED = {"layout.kind": "striped", "layout.pack_below": "0", "layout.stripe_above": "0"}
"""Small files get objects of their own, too, on all servers."""

INTERLEAVED = {"layout.kind": "interleaved", "layout.compact_above": "0.05"}
REPLICAS = {"layout.replicas": "2"}
CODED = {"layout.ec": "2+1"}

CONTAINER_SIZE = 64 << 10
"""Far below what may be configured, so that containers are filled, and compacted, by tests too."""


def make_store(
    directory: Path, settings: Mapping[str, object], servers: int | Sequence[str] = 0
) -> None:
    """An empty store in the missing ``directory``, which keeps its settings in itself, with so many
    data servers (0: as many as by default), or with those of these addresses."""
    directory.mkdir()
    if isinstance(servers, int):
        servers = [f"data/{number}" for number in range(servers)]
    tree: dict = {"servers": list(servers)} if servers else {}
    for key, value in ({"meta.backup_interval": "0", "data.movers": "0"} | dict(settings)).items():
        section, _, name = key.partition(".")
        tree.setdefault(section, {})[name] = value if value or key != "burst.directories" else []
    (directory / DIRECTORY_FILE).write_text(yaml.safe_dump(tree))
    format_store(config_of(directory), force=False)


def config_of(directory: Path) -> Config:
    """The configuration of a SOURCE directory, with small containers."""
    config = load(str(directory), {})
    layout = config.layout.model_copy(update={"container_size": CONTAINER_SIZE})
    return config.model_copy(update={"layout": layout})
