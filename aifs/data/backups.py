"""Backups of the metadata on data servers: small files in one directory of the server, whole or not
there.

What the files hold is meta/backup.py's business. Errors are FsErrors.
"""

import errno
import os
from collections.abc import Callable
from contextlib import suppress

from aifs.core import files
from aifs.core.errors import FsError, Unavailable, from_oserror
from aifs.core.log import logger
from aifs.data.naming import BACKUP
from aifs.data.server import DataServer
from aifs.data.servers import Servers
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
    server.reach()
    server.call("write", _path(server, name), _put, server.path, name, data)


def _put(root: str, name: str, data: bytes) -> None:
    directory = os.path.join(root, BACKUP)
    if not os.path.isdir(directory):
        files.make_dir(directory)
        files.sync_dir(root)
    _replace(os.path.join(directory, name), data)


def _replace(path: str, data: bytes) -> None:
    """Where there is no room for it, or it is not what is read back, nothing is left: the next one
    will have another name.
    """
    try:
        files.replace_file(path, data)
        if files.read_file(path, anew=True) != data:
            raise OSError(errno.EIO, "what is read back is not what was written")
    except OSError:
        for name in (f"{path}.new", path):
            with suppress(OSError):
                files.unlink(name)
        raise


def sizes(server: DataServer) -> dict[str, int]:
    """The names of all files there, with their lengths."""
    server.reach()
    return server.call("list", _path(server, ""), list_directory, os.path.join(server.path, BACKUP))


def get(server: DataServer, name: str) -> bytes:
    """Raises Unavailable also if there is no such file."""
    server.reach()
    return server.call("read", _path(server, name), read, _path(server, name))


def delete(server: DataServer, names: list[str]) -> None:
    """Remove files; those that are gone already count as removed."""
    server.reach()
    for name in names:
        server.call("delete", _path(server, name), _delete, _path(server, name))


def _delete(path: str) -> None:
    try:
        files.unlink(path)
    except FileNotFoundError:
        pass


def _path(server: DataServer, name: str) -> str:
    return os.path.join(server.path, BACKUP, name)


# --- of any directory, also when no store is open ---


def list_directory(directory: str) -> dict[str, int]:
    """The files in ``directory``, which may be missing, with their lengths. Raises OSError."""
    try:
        with os.scandir(directory) as entries:
            return {
                entry.name: entry.stat().st_size
                for entry in entries
                if entry.is_file(follow_symlinks=False)
            }
    except FileNotFoundError:
        return {}


def read(path: str) -> bytes:
    """Raises OSError; Unavailable if the file is missing."""
    data = files.read_file(path)
    if data is None:
        raise Unavailable(f"{path}: is missing")
    return data


def put_in_directory(directory: str, name: str, data: bytes) -> None:
    """Store a file in ``directory``, which is made if it is missing; durable on return. Raises
    NoSpace, Unavailable.
    """
    try:
        files.make_dirs(directory)
        _replace(os.path.join(directory, name), data)
    except OSError as error:
        raise from_oserror(error, directory) from error
