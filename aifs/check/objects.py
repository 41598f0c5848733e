"""The check of the data servers: every object against the inode it names, every file for objects that lack.

Runs after recovery, and reads inodes as they are then. A file with a dirty mark may differ (I3 of
docs/metadata.md), and objects may be longer than the file calls for (I4). What blocks runs in the servers'
workers.
"""

import os
from collections.abc import Iterable
from itertools import islice

from aifs.check.findings import Problem, Progress
from aifs.check.scan import BATCH, for_each
from aifs.check.table import NONE, UNREADABLE, InodeTable
from aifs.core import files
from aifs.core.errors import FsError, from_oserror
from aifs.data.naming import ForeignFile, StoredObject
from aifs.data.server import DataServer
from aifs.layout.striped import Striped
from aifs.meta import keys
from aifs.meta.kv import ReadTransaction
from aifs.meta.records import Inode, decode_garbage, decode_inode
from aifs.vfs.store import Store

ASIDE = "lost+found"
"""Directory of a server for objects that belong to no file. Some filesystems have one of this name, too."""


class ObjectCheck:
    """``problems`` and ``counts`` are complete when ``run`` returns."""

    def __init__(self, store: Store, table: InodeTable, progress: Progress) -> None:
        self._engine = store.engine
        self._servers = store.servers
        self._table = table
        self._progress = progress
        self._orphans: list[tuple[DataServer, Problem]] = []
        self._expected = 0
        self.problems: list[Problem] = []
        self.counts = dict.fromkeys(("inodes", "directories", "files", "objects", "bytes"), 0)

    async def run(self) -> None:
        await for_each(self._engine, *keys.all_of(b"i"), self._expect, lambda count: None)
        for server in list(self._servers.values()):
            try:
                await self._check_server(server)
            except FsError as error:
                self.problems.append(Problem("unlistable-server", server.path, str(error), where=server.path))
        for row, missing in enumerate(self._table.objects):
            if missing:
                await self._find_missing(self._table.ino[row])

    # --- what must be there ---

    def _expect(self, tx: ReadTransaction, key: bytes, value: bytes) -> None:
        ino = keys.number(key)
        row = self._table.find(ino)
        if len(key) != len(keys.inode(ino)) or row == NONE or self._table.flags[row] & UNREADABLE:
            return  # named as damaged already; or it is lost+found, just made
        self.counts["inodes"] += 1
        inode = decode_inode(ino, value)
        self.counts["directories"] += inode.is_dir
        self.counts["files"] += inode.is_file
        layout = inode.layout
        if layout is not None:
            count = sum(1 for index in range(len(layout.servers)) if layout.object_length(index, inode.size))
            self._table.objects[row] = count
            self._expected += count

    # --- what is there ---

    async def _check_server(self, server: DataServer) -> None:
        listing = server.list_objects()
        while batch := await self._servers.run(server, _take, listing):
            await self._engine.view(self._match, server, batch)
            self._progress("objects", self.counts["objects"], max(self._expected, self.counts["objects"]))

    def _match(
        self, tx: ReadTransaction, server: DataServer, batch: Iterable[StoredObject | ForeignFile]
    ) -> None:
        for found in batch:
            if isinstance(found, StoredObject):
                self.counts["objects"] += 1
                self.counts["bytes"] += found.allocated
                self._match_object(tx, server, found)
            elif found.path != os.path.join(server.path, ASIDE):
                detail = f"data server {server.id}: not of this store; left as it is"
                self.problems.append(Problem("foreign-file", found.path, detail, where=found.path))

    def _match_object(self, tx: ReadTransaction, server: DataServer, found: StoredObject) -> None:
        row = self._table.find(found.ino)
        if row != NONE and self._table.flags[row] & UNREADABLE:
            return  # it may be his
        inode = _read_inode(tx, found.ino) if row != NONE else None
        layout = inode.layout if inode is not None and inode.oid == found.oid else None
        if layout is None or server.id not in layout.servers:
            if not _is_garbage(tx, found):
                detail = f"data server {server.id}: {found.length} bytes, once of inode {found.ino}"
                problem = Problem("orphan-object", found.path, detail, where=found.path)
                self.problems.append(problem)
                self._orphans.append((server, problem))
            return
        index = layout.servers.index(server.id)
        expected = layout.object_length(index, inode.size)
        if expected:
            self._table.objects[row] -= 1
        if found.length < expected and not _is_dirty(tx, inode.ino):
            self._lost(
                "short-object",
                tx,
                inode,
                index,
                found.length,
                server,
                f"has {found.length} of {expected} bytes",
            )

    async def _find_missing(self, ino: int) -> None:
        """Look at each object of a file of which the listings did not show all."""
        inode, dirty = await self._engine.view(lambda tx: (_read_inode(tx, ino), _is_dirty(tx, ino)))
        if dirty:
            return
        for index, number in enumerate(inode.layout.servers):
            if number not in self._servers or not inode.layout.object_length(index, inode.size):
                continue
            server = self._servers[number]
            try:
                exists = await self._servers.run(server, _exists, server.object_path(ino, inode.oid))
            except FsError:
                continue  # the server cannot be listed either
            if not exists:
                await self._engine.view(
                    lambda tx, index=index, server=server: self._lost(
                        "missing-object", tx, inode, index, 0, server, "is missing"
                    )
                )

    def _lost(
        self,
        kind: str,
        tx: ReadTransaction,
        inode: Inode,
        index: int,
        length: int,
        server: DataServer,
        what: str,
    ) -> None:
        object_path = server.object_path(inode.ino, inode.oid)
        lost = lost_bytes(inode.layout, index, length, inode.size)
        self.problems.append(
            Problem(
                kind,
                inode.ino,
                f"data server {server.id}: {object_path} {what}; lost: {lost}",
                where=self._table.path(tx, inode.ino),
            )
        )

    # --- repair ---

    async def move_orphans_aside(self) -> None:
        """Move orphan objects to their server's lost+found, durably on return. What cannot be moved stays."""
        for server in {server.id: server for server, _ in self._orphans}.values():
            problems = [problem for owner, problem in self._orphans if owner is server]
            try:
                await self._servers.run(
                    server, _move_aside, server.path, [problem.where for problem in problems]
                )
            except FsError as error:
                for problem in problems:
                    problem.detail += f"; cannot be moved: {error}"
            else:
                for problem in problems:
                    problem.detail += f"; moved to {os.path.join(server.path, ASIDE)}"
                    problem.repaired = True


def lost_bytes(layout: Striped, index: int, length: int, size: int) -> str:
    """The bytes of a file that are lost when object ``index`` of it ends after ``length`` bytes, as text."""
    unit, count = layout.unit, len(layout.servers)
    expected = layout.object_length(index, size)

    def in_file(offset: int) -> int:
        row, within = divmod(offset, unit)
        return (row * count + index) * unit + within

    first, last = in_file(length), in_file(expected - 1)
    if last - first == expected - length - 1:
        return f"bytes {first} to {last}"
    return f"{expected - length} bytes between {first} and {last}"


def _read_inode(tx: ReadTransaction, ino: int) -> Inode | None:
    record = tx.get(keys.inode(ino))
    return None if record is None else decode_inode(ino, record)


def _is_dirty(tx: ReadTransaction, ino: int) -> bool:
    return tx.get(keys.dirty(ino)) is not None


def _is_garbage(tx: ReadTransaction, found: StoredObject) -> bool:
    """Whether the object waits for deletion (the collector could not remove it yet)."""
    record = tx.get(keys.garbage(found.oid))
    try:
        return record is not None and decode_garbage(record).ino == found.ino
    except FsError:
        return False


# --- in worker threads ---


def _take(listing: Iterable[StoredObject | ForeignFile]) -> list[StoredObject | ForeignFile]:
    return list(islice(listing, BATCH))


def _exists(path: str) -> bool:
    try:
        os.stat(path)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise from_oserror(error, path) from error
    return True


def _move_aside(root: str, paths: list[str]) -> None:
    aside = os.path.join(root, ASIDE)
    try:
        files.make_dirs(aside)
        for path in paths:
            target, suffix = os.path.join(aside, os.path.basename(path)), 0
            while os.path.lexists(target):
                suffix += 1
                target = os.path.join(aside, f"{os.path.basename(path)}.{suffix}")
            files.rename(path, target)
        for directory in sorted({root, aside, *map(os.path.dirname, paths)}):
            files.sync_dir(directory)
    except OSError as error:
        raise from_oserror(error, aside) from error
