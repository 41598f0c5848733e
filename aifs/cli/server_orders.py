"""How ``aifs server`` reaches a store: by the mount that has it, or by opening it for as long as
the command runs.

Both ways the filesystem is told by extended attributes of its root (vfs/server_hints.py),
and asked in the same way.
"""

import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Protocol

from aifs.cli import hints
from aifs.core.config import Config
from aifs.core.errors import AifsError, FsError, MountError, StoreBusy, StoreError


class Door(Protocol):
    """The way to an open store."""

    where: str

    @property
    def source(self) -> str:
        """What the store was, or would be, mounted from."""

    async def order(self, name: str, **fields: Any) -> None:
        """Raises StoreError that says why the order is refused."""

    async def state(self) -> dict[str, Any]:
        """What ``user.aifs.servers`` says."""


class MountDoor:
    """By the mount at ``where``."""

    def __init__(self, where: str) -> None:
        self.where = where

    @property
    def source(self) -> str:
        """What the store was mounted from."""
        from aifs.cli.mounts import read_status

        return read_status(self.where)["source"]

    async def order(self, name: str, **fields: Any) -> None:
        try:
            hints.put(self.where, name, json.dumps(fields))
        except PermissionError:
            raise StoreError(f"{self.where}: only root may change the servers of a mount") from None
        except OSError as error:
            reason = (await self.state())["refused"] or error.strerror
            raise StoreError(f"refused by the mount at {self.where}: {reason}") from None

    async def state(self) -> dict[str, Any]:
        try:
            return hints.read(self.where, hints.SERVERS)
        except OSError as error:
            raise MountError(
                f"{self.where}: the mount does not tell its servers: {error.strerror}"
            ) from None


class OpenDoor:
    """By the filesystem that this process has open."""

    def __init__(self, fs: Any, where: str) -> None:
        self.fs = fs
        self.where = self.source = where

    async def order(self, name: str, **fields: Any) -> None:
        from aifs.files.types import ROOT
        from aifs.meta.keys import ROOT_INO

        try:
            await self.fs.setxattr(
                ROOT_INO, name.encode(), os.fsencode(json.dumps(fields)), caller=ROOT
            )
        except FsError as error:
            raise StoreError(str(error)) from None

    async def state(self) -> dict[str, Any]:
        from aifs.meta.keys import ROOT_INO

        return json.loads(await self.fs.getxattr(ROOT_INO, hints.SERVERS.encode()))


@asynccontextmanager
async def opened(place: str, adding: str = "") -> AsyncIterator[Door]:
    """The door to ``place``, a mountpoint or a SOURCE, mounted or not.

    ``adding``: a directory that the configuration may name already. A store that is not mounted is
    opened as by a mount, also if servers are missing. Raises StoreError, StoreBusy, ConfigError.
    """
    from aifs.vfs import open_filesystem

    mountpoint = _mountpoint(place)
    async with AsyncExitStack() as stack:
        if not mountpoint:
            config = _tolerant(place)
            try:
                fs = await stack.enter_async_context(open_filesystem(config, adding=adding))
            except StoreBusy as busy:
                mountpoint = _mount_of(config, busy)
        yield MountDoor(mountpoint) if mountpoint else OpenDoor(fs, place)


async def look(place: str) -> dict[str, Any]:
    """The state of ``place``, a mountpoint or a SOURCE; a store that is not mounted is only looked
    at.

    Raises as ``opened``.
    """
    from aifs.store.store import open_store
    from aifs.upkeep.server_admin import describe_idle

    mountpoint = _mountpoint(place)
    if not mountpoint:
        config = _tolerant(place)
        try:
            store = await open_store(config)
        except StoreBusy as busy:
            mountpoint = _mount_of(config, busy)
        else:
            try:
                return await describe_idle(store)
            finally:
                store.close()
    return await MountDoor(mountpoint).state()


def recorded(config: Config) -> Config:
    """The same with the servers that its store has by now; as it is if there is no store, or that
    cannot be seen."""
    import trio

    if config.is_cluster or not os.path.isdir(config.meta.directory):
        return config
    try:
        rows = trio.run(look, config.source)["servers"]
    except (AifsError, OSError):
        return config
    return config.with_servers(rows) if all(row["path"] for row in rows) else config


def _mountpoint(place: str) -> str:
    """``place``, absolute, if an AIFS is mounted there, else ''."""
    from aifs.cli.mounts import FSTYPE, mounted_at

    absolute = os.path.realpath(place)
    mount = mounted_at(absolute)
    return absolute if mount is not None and mount.fstype == FSTYPE else ""


def _mount_of(config: Config, busy: StoreBusy) -> str:
    """Where the store that is in use is mounted on this host. Raises ``busy`` if nowhere."""
    from aifs.cli.answers import require_answer
    from aifs.store.owner import read_owner

    owner = read_owner(config.meta.directory)
    if owner is None or owner.closed or not owner.mountpoint or owner.host != socket.gethostname():
        raise busy
    require_answer(owner.mountpoint)
    return owner.mountpoint


def _tolerant(place: str) -> Config:
    from aifs.core import config

    return config.load(place, {"data.missing": "allow"})
