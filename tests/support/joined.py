"""Hosts of a store in the test's process, with a real database, real connections between them, and
replicas of their own: all but the kernel.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import MappingProxyType

import trio
import yaml

from aifs.core.config import Config, load
from aifs.store.store import format_store
from aifs.vfs import Filesystem, open_filesystem
from tests.support import modes, stores
from tests.support.postgres import TestDatabase, free_port

LIMIT_S = 300


class Joined:
    """A new store in ``directory`` and a database, which hosts join."""

    def __init__(
        self,
        directory: Path,
        database: TestDatabase,
        settings: Mapping[str, object] = MappingProxyType({}),
        servers: int = 2,
    ) -> None:
        self._directory = directory
        tree: dict[str, dict[str, object]] = {}
        for key, value in (modes.ON | {"meta.backup_interval": "0"} | dict(settings)).items():
            section, _, name = key.partition(".")
            tree.setdefault(section, {})[name] = value
        self._settings = tree
        self._database = database
        self._servers = [str(directory / "data" / str(number)) for number in range(servers)]
        self._is_made = False

    def config(self, name: str) -> Config:
        place = self._directory / name
        source = place / "host.yaml"
        if not source.exists():
            place.mkdir(parents=True)
            database, tree = self._database, self._settings
            meta = {"engine": "postgresql", "url": database.url, "secret": database.secret_file}
            own = {
                "meta": {**tree.get("meta", {}), **meta, "directory": str(place / "replica")},
                "host": {"name": name, "listen": f"127.0.0.1:{free_port()}"},
                "burst": {**tree.get("burst", {}), "directories": [str(place / "burst")]},
                "data": {**tree.get("data", {}), "movers": 0},
                "servers": self._servers,
            }
            others = {key: value for key, value in tree.items() if key not in own}
            source.write_text(yaml.safe_dump({**own, **others}))
        config = load(str(source), {})
        layout = config.layout.model_copy(update={"container_size": modes.CONTAINER_SIZE})
        return config.model_copy(update={"layout": layout})

    @asynccontextmanager
    async def mounted(self, name: str) -> AsyncIterator[Filesystem]:
        """The filesystem of a host. The first one makes the store."""
        config = self.config(name)
        if not self._is_made:
            self._is_made = True
            await trio.to_thread.run_sync(format_store, config, False)
        async with open_filesystem(config) as fs:
            yield fs


@asynccontextmanager
async def joined(
    directory: Path,
    database: TestDatabase,
    count: int = 2,
    settings: Mapping[str, object] = MappingProxyType({}),
) -> AsyncIterator[list[Filesystem]]:
    """So many hosts of a new store; afterwards fsck finds nothing."""
    store = Joined(directory, database, settings)
    names = "abcdefgh"[:count]
    with trio.fail_after(LIMIT_S):
        async with AsyncExitStack() as stack:
            yield [await stack.enter_async_context(store.mounted(name)) for name in names]
        await stores.require_sound(store.config("a"))
