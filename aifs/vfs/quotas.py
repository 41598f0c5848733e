"""Quotas of directories: setting and removing them, and giving what lies below its project, in the
background, top down (meta/quotas.py). Each step is a transaction; after a crash the next mount
begins at the top again."""

from typing import Any

import trio

from aifs.core import faults
from aifs.core.errors import AccessDenied, Invalid
from aifs.core.texts import parse_pairs
from aifs.core.units import parse_count, parse_size
from aifs.core.upkeep import NEVER_S, Work
from aifs.files import rights
from aifs.files.asks import ANY, ROOT, Hint
from aifs.files.file_io import FileIO
from aifs.files.permissions import READ, may_find, require_may
from aifs.files.quotas import QuotaRoom
from aifs.files.services import Services
from aifs.files.types import CallerLike
from aifs.meta import keys, namespace, paths, quotas
from aifs.meta.kv import ReadTransaction, Transaction, grows
from aifs.meta.quotas import COMPLETE, REMOVED, UNLIMITED
from aifs.meta.records import Inode
from aifs.vfs.attributes import Attributes

NAMES = 64
"""Names that one transaction looks at."""

PAGE = 100
"""Quotas that are listed in one answer."""

_SPREAD = faults.declare(
    "vfs.quota.spread", "some of what lies in a directory has the project of a quota"
)
_KEYS = ("size", "files")
_EXAMPLE = "size=1TiB,files=1M"


class QuotaTrees:
    """Used from one trio thread. ``work`` is for the host that has the role."""

    def __init__(
        self,
        services: Services,
        io: FileIO,
        attributes: Attributes,
    ) -> None:
        self._engine = services.engine
        self._io = io
        self._attributes = attributes
        self._heirlooms = services.heirlooms
        self._rooms = services.quotas
        self._upkeep = services.upkeep
        self._working = trio.Lock()
        """Held by the task that gives projects in the order in which quotas were set."""

    # --- what is set ---

    async def set(self, ino: int, text: str) -> None:
        """Limit what lies below a directory by ``size=1TiB,files=1M``; ``none`` lifts one, others
        stay. New inodes count on return, existing ones in the background. Raises Invalid,
        NotADirectory, NotFound."""
        limits = _parse(text)
        self._changed(await self._engine.transact(_put, ino, limits))
        await self._rooms.look()
        await self._engine.shown()

    async def remove(self, ino: int) -> None:
        """Lift the quota of a directory. Raises NoAttribute if there is none."""
        self._changed(await self._engine.transact(_remove, ino))
        await self._rooms.look()
        await self._engine.shown()

    def follow(self) -> None:
        """Another host has changed a quota. Does not block."""
        self._rooms.noticed()
        self._upkeep.wake(Work.QUOTAS)

    def follow_count(self, key: bytes) -> None:
        """Another host has changed what is counted. Does not block."""
        self._rooms.counted(keys.use_project(key))

    def _changed(self, directory: Inode) -> None:
        self._heirlooms.changed(directory.ino)
        self._upkeep.wake(Work.QUOTAS)

    # --- in the background ---

    async def work(self) -> float:
        """Give inodes in quotas their projects, and take projects of removed ones away."""
        async with self._working:
            for project, quota in await self._engine.view(quotas.unfinished):
                await self._spread([quota.directory], project if quota.state == REMOVED else 0)
                await self._engine.transact(quotas.conclude, project, quota.state)
            await self._engine.transact(quotas.drop_unused)
        await self._rooms.look()
        return NEVER_S

    async def take_in(self, ino: int, directory: Inode) -> None:
        """Have a nameless inode count where the directory of its new name does, with all below."""
        done = await self._engine.transact(quotas.take_in, ino, directory)
        self._adopt(done.changed)
        await self._spread(done.directories)
        self._rooms.noticed()

    async def _spread(self, pending: list[int], of: int = 0) -> None:
        while pending:
            ino, done = pending.pop(), quotas.Spread()
            while not done.finished:
                done = await self._engine.transact(quotas.spread_slice, ino, done.after, NAMES, of)
                self._adopt(done.changed)
                pending += done.directories
                faults.reach(_SPREAD)
                await self._upkeep.share.give_way()

    def _adopt(self, changed: list[Inode]) -> None:
        for inode in changed:
            self._heirlooms.changed(inode.ino)
            file = self._io.table.adopt(inode)
            if file is not None:
                self._rooms.watch(file)

    # --- what is told ---

    async def tell(self, ino: int) -> dict[str, Any]:
        """The innermost quota of a file or directory, and those around it; or {}."""
        inode = await self._attributes.getattr(ino)
        found = [_told(room) for room in await self._rooms.over(inode.project)]
        return {**found[0], "within": found[1:]} if found else {}

    async def list_all(self, caller: CallerLike, after: int = 0) -> dict[str, Any]:
        """Up to PAGE quotas behind project ``after``, with paths: of directories that the caller
        may read and find. ``next``: of the next page; 0: none."""
        rooms = await self._rooms.look()
        projects = sorted(project for project in rooms if project > after)[:PAGE]
        told = []
        for project in projects:
            path = await self._engine.view(_path_for, rooms[project].quota.directory, caller)
            if path is not None:
                told.append({"path": path, **_told(rooms[project])})
        return {"quotas": told, "next": projects[-1] if len(projects) == PAGE else 0}

    HINTS = (
        Hint(
            "quota",
            ANY,
            "how much may lie below, and does (aifs quota): size=1TiB,files=1M",
            rights.reader,
            rights.root,
            get=lambda quotas, ask: quotas.tell(ask.ino),
            set=lambda quotas, ask: quotas.set(ask.ino, ask.text),
            remove=lambda quotas, ask: quotas.remove(ask.ino),
        ),
        Hint(
            "quotas[.N]",
            ROOT,
            "the quotas of directories that the caller may read, behind project N",
            rights.reader,
            get=lambda quotas, ask: quotas.list_all(ask.caller, ask.number or 0),
        ),
    )


def _parse(text: str) -> tuple[int | None, int | None]:
    """Raises Invalid."""
    found: dict[str, int | None] = dict.fromkeys(_KEYS)
    try:
        for key, value in parse_pairs("quota", text, _KEYS, _EXAMPLE):
            parse = parse_size if key == "size" else parse_count
            found[key] = UNLIMITED if value == "none" else min(parse(value), UNLIMITED)
    except ValueError as error:
        raise Invalid(f"quota: {error}") from None
    return found["size"], found["files"]


def _told(room: QuotaRoom) -> dict[str, Any]:
    quota = room.quota
    return {
        "directory": quota.directory,
        "state": "counted" if quota.state == COMPLETE else "counting",
        "bytes": None if quota.bytes_max == UNLIMITED else quota.bytes_max,
        "used_bytes": room.used_bytes,
        "files": None if quota.inodes_max == UNLIMITED else quota.inodes_max,
        "used_files": room.used_inodes,
    }


@grows
def _put(tx: Transaction, ino: int, limits: tuple[int | None, int | None]) -> Inode:
    return quotas.put(tx, namespace.get_directory(tx, ino), *limits)


def _remove(tx: Transaction, ino: int) -> Inode:
    return quotas.remove(tx, namespace.get_inode(tx, ino))


def _path_for(tx: ReadTransaction, ino: int, caller: CallerLike) -> str | None:
    """The path of a directory; None if the caller may not know it."""
    directory = namespace.find_inode(tx, ino)
    if directory is None or not may_find(tx, directory, keys.ROOT_INO, caller):
        return None
    try:
        require_may(directory, caller, READ)
    except AccessDenied:
        return None
    return paths.describe(tx, ino)
