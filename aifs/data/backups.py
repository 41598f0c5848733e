"""Backups of the metadata on data servers: blobs, whole or not there.

What the files hold is meta/backup.py's business. Errors are FsErrors.
"""

import os
from collections.abc import Callable

from aifs.core import files
from aifs.core.errors import FsError, Unavailable, from_oserror
from aifs.core.log import logger
from aifs.data.directory_storage import put_file
from aifs.data.server import DataServer
from aifs.data.servers import Servers
from aifs.data.storage import BACKUP
from aifs.layout.placement import ACTIVE

_log = logger(__name__)


class BackupFiles:
    """The files on all data servers of a store, each on ``copies`` of them. Used from one trio
    thread.
    """

    def __init__(self, servers: Servers, copies: int) -> None:
        self._servers = servers
        self._copies = copies

    def servers(self) -> frozenset[int]:
        """Ids of the servers that are to stay."""
        return frozenset(
            server.id for server in self._servers.capacity() if server.standing == ACTIVE
        )

    async def put(self, name: str, data: bytes) -> None:
        """Store a file on as many servers as wanted, durably on return; one must take it. Raises
        NoSpace, Unavailable.
        """
        stored, error = 0, None
        for server in self._preferred():
            try:
                await self._servers.run(server, put, server, name, data)
            except FsError as raised:
                error = raised
                continue
            stored += 1
            if stored == self._copies:
                return
        if not stored:
            raise error or Unavailable("there is no data server")
        if error is not None:
            _log.info("%s is on %d instead of %d servers: %s", name, stored, self._copies, error)

    def _preferred(self) -> list[DataServer]:
        """The servers, those first that stand for different failure domains, always in the same
        order.
        """
        domains: dict[str, int] = {}
        ranked = []
        for candidate in self._servers.candidates():
            rank = domains[candidate.domain] = domains.get(candidate.domain, -1) + 1
            ranked.append((rank, candidate.id))
        return [self._servers[number] for _, number in sorted(ranked)]

    async def sizes(self) -> dict[str, int]:
        """The names of all files on servers that work, with their lengths."""
        found: dict[str, int] = {}
        for server in self._servers.capacity():
            try:
                found |= await self._servers.run(server, sizes, server)
            except FsError as error:
                _log.info("backups on %s are not looked at: %s", server.name, error)
        return found

    async def delete(self, is_useless: Callable[[str], bool]) -> None:
        """Remove the files with such names. What cannot be removed stays, and a later call will."""
        for server in self._servers.capacity():
            try:
                names = [
                    name
                    for name in await self._servers.run(server, sizes, server)
                    if is_useless(name)
                ]
                await self._servers.run(server, delete, server, names)
            except FsError as error:
                _log.info("older backups on %s stay for now: %s", server.name, error)


# --- on one server; these block, and run in its workers ---


def put(server: DataServer, name: str, data: bytes) -> None:
    """Store a file, durably on return. Raises NoSpace, Unavailable."""
    server.put_blob(f"{BACKUP}/{name}", data)


def sizes(server: DataServer) -> dict[str, int]:
    """The names of all files there, with their lengths."""
    return server.list_blobs(BACKUP)


def get(server: DataServer, name: str) -> bytes:
    """Raises Unavailable also if there is no such file."""
    data = server.get_blob(f"{BACKUP}/{name}")
    if data is None:
        raise Unavailable(f"{server.name}: {BACKUP}/{name} is missing")
    return data


def delete(server: DataServer, names: list[str]) -> None:
    """Remove files; those that are gone already count as removed."""
    for name in names:
        server.delete_blob(f"{BACKUP}/{name}")


# --- of any directory, also when no store is open ---


def put_in_directory(directory: str, name: str, data: bytes) -> None:
    """Store a file in ``directory``, which is made if it is missing; durable on return. Raises
    NoSpace, Unavailable.
    """
    try:
        files.make_dirs(directory)
        put_file(os.path.join(directory, name), data)
    except OSError as error:
        raise from_oserror(error, directory) from error
