"""Quotas: a file or directory that is about to grow asks here first, and fails with EDQUOT.

The *room* of a quota is its rest on record, less growth of open files and grants under way. It is
read once a second while open files grow, and again before a refusal; grants are taken off in
between. So one host never grants more than there is. Hosts of a cluster learn of each other's
growth at the latest after a commit interval.

Writes past the daemon cannot be stopped. A file is opened so only while there is room for
PASSED_THROUGH bytes more, or its expected size, for each file open so. Its growth is counted when
the room is: other files are refused by it, and its own fsync if it has grown beyond.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import trio

from aifs.core.errors import FsError, QuotaExceeded
from aifs.files.open_inode import OpenInode
from aifs.layout.hint import DEFAULT_POLICY
from aifs.meta import quotas
from aifs.meta.kv import Engine
from aifs.meta.quotas import FIRST_PROJECT, UNLIMITED, Quota

PASSED_THROUGH = 16 << 30
"""Bytes that a file is supposed to grow by while it is passed through, if nothing is known."""

_LOOK_S = 1.0
_NEVER_S = -math.inf


@dataclass(slots=True, eq=False)
class QuotaRoom:
    """A quota, and what there is of it, that of quotas within it included."""

    quota: Quota
    used_bytes: int = 0
    used_inodes: int = 0
    is_old: bool = False
    """Another host has changed something since."""
    chain: Sequence["QuotaRoom"] = ()
    """It, and those in which it lies, the innermost first: all that count what it counts."""

    @property
    def bytes(self) -> int:
        """How many are left; less than none if there are more than it allows."""
        return self.quota.bytes_max - self.used_bytes

    @property
    def inodes(self) -> int:
        """The same of inodes."""
        return self.quota.inodes_max - self.used_inodes

    def lacks(self, grant: "Grant") -> bool:
        """Whether there is no room for that."""
        if grant.bytes and self.used_bytes + grant.bytes > self.quota.bytes_max:
            return True
        return grant.inodes > 0 and self.used_inodes + grant.inodes > self.quota.inodes_max

    def describe(self) -> str:
        """For messages."""
        quota, limits = self.quota, []
        if quota.bytes_max != UNLIMITED:
            limits.append(f"{self.used_bytes} of {quota.bytes_max} bytes")
        if quota.inodes_max != UNLIMITED:
            limits.append(f"{self.used_inodes} of {quota.inodes_max} files")
        return f"the quota of directory {quota.directory} is used up: {', '.join(limits)}"


class Quotas:
    """Used from one trio thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._rooms: dict[int, QuotaRoom] = {}
        """By project, as of the last look, and with what has been granted since."""
        self.are_set = False
        """There may be some."""
        self._looking = trio.Lock()
        """Held by the task that looks: an older state never replaces a newer one."""
        self._looked_s = _NEVER_S
        """When the last look was, by trio's clock."""
        self._growing: dict[OpenInode, int] = {}
        """Open files that may be larger than is on record, with their sizes when they got here."""
        self._under_way: set[Grant] = set()
        """What is granted, and may be neither on record nor in core yet."""
        self._meanwhile: set[Grant] = set()
        """While somebody looks, what has been so at any time since that began."""

    def noticed(self) -> None:
        """Another host has made, changed or removed one. Does not block."""
        self.are_set, self._looked_s = True, _NEVER_S

    def counted(self, project: int) -> None:
        """Another host has changed how much a project has. Does not block."""
        for room in self._chain(project):
            room.is_old = True

    async def look(self) -> dict[int, QuotaRoom]:
        """The quotas as they are now, by project; the caller changes nothing of them."""
        async with self._looking:
            self._meanwhile = set(self._under_way)
            files = {file.inode.ino: file for file in self._growing}
            found, sizes = await self._engine.view(quotas.read_counted, list(files))
            self._rooms = rooms = {p: QuotaRoom(counted.quota) for p, counted in found.items()}
            for room in rooms.values():
                room.chain = _chain_of(room, rooms)
            for project, counted in found.items():
                self._use(project, counted.bytes, counted.inodes)
            for ino, file in files.items():
                size = _size_of(file)
                growth = size - sizes.get(ino, size)
                self._use(file.inode.project, growth, 0)
                if not growth and not file.may_be_written:
                    self._growing.pop(file, None)
            for grant in self._meanwhile:  # perhaps twice, but not too little
                self._use(grant.project, grant.bytes, grant.inodes)
            self.are_set, self._looked_s = bool(rooms), trio.current_time()
            return rooms

    def _chain(self, project: int) -> Sequence[QuotaRoom]:
        room = self._rooms.get(project)
        return () if room is None else room.chain

    def _use(self, project: int, bytes_: int, inodes: int) -> None:
        for room in self._chain(project):
            room.used_bytes += bytes_
            room.used_inodes += inodes

    # --- growing ---

    def granted(self, project: int, bytes_: int, inodes: int = 0) -> "Grant":
        """A context manager: its project may grow by so much, which is on record, or in core, when
        the block ends. Raises QuotaExceeded, Unavailable. No growth is never refused."""
        return Grant(self, project, bytes_, inodes)

    def growing(self, file: OpenInode, end: int) -> "Grant":
        """As ``granted``, of an open file that may be written up to ``end`` within the block."""
        self.watch(file)
        return Grant(self, file.inode.project, end - file.inode.size, 0)

    async def begin(self, grant: "Grant") -> None:
        """For Grant alone."""
        if self._is_old(grant.project) or self._lacking(grant):
            await self.look()
            lacking = self._lacking(grant)
            if lacking is not None:
                raise QuotaExceeded(lacking.describe())
        for room in self._chain(grant.project):
            room.used_bytes += grant.bytes
            room.used_inodes += grant.inodes
        self._under_way.add(grant)
        if self._looking.locked():
            self._meanwhile.add(grant)

    def _is_old(self, project: int) -> bool:
        """Whether more may be used than when we looked, grants aside."""
        for room in self._chain(project):
            if room.is_old:
                return True
        if self._looked_s == _NEVER_S:
            return True
        return bool(self._growing) and trio.current_time() > self._looked_s + _LOOK_S

    def _lacking(self, grant: "Grant") -> QuotaRoom | None:
        """The innermost quota known to have no room for it."""
        for room in self._chain(grant.project):
            if room.lacks(grant):
                return room
        return None

    def end(self, grant: "Grant") -> None:
        """For Grant alone. Does not block."""
        self._under_way.discard(grant)

    # --- what is written past the daemon ---

    def watch(self, file: OpenInode) -> None:
        """The file may be larger than is on record from now on. Does not block."""
        if file.inode.project >= FIRST_PROJECT:
            self._growing.setdefault(file, _size_of(file))

    def may_pass_through(self, file: OpenInode) -> bool:
        """Whether there is room for writes past the daemon. Does not block."""
        chain = self._chain(file.inode.project)
        if not chain:
            return file.inode.project < FIRST_PROJECT or self._looked_s != _NEVER_S
        expected = (file.inode.policy or DEFAULT_POLICY).expected or PASSED_THROUGH
        others = [other for other in self._growing if other is not file and other.backing]
        passed = Counter(room for other in others for room in self._chain(other.inode.project))
        return all(room.bytes >= expected + passed[room] * PASSED_THROUGH for room in chain)

    async def require_within(self, file: OpenInode) -> None:
        """Raises QuotaExceeded if the file has grown past the daemon, and there is too much."""
        if file.backing and file in self._growing:
            await self.look()
            if _size_of(file) > self._growing.get(file, 0):
                for room in self._chain(file.inode.project):
                    if room.bytes < 0:
                        raise QuotaExceeded(room.describe())

    async def require_kept(self, project: int) -> None:
        """Raises QuotaExceeded if a quota of the project is exceeded, as by growth before it."""
        for room in await self.over(project):
            if room.bytes < 0 or room.inodes < 0:
                raise QuotaExceeded(room.describe())

    # --- what is told ---

    async def over(self, project: int) -> Sequence[QuotaRoom]:
        """All quotas that count what a project has, as they are now, the innermost first."""
        if project < FIRST_PROJECT:
            return ()
        await self.look()
        return self._chain(project)

    async def tightest(self, project: int) -> tuple[QuotaRoom | None, QuotaRoom | None]:
        """The quotas of a project with the least room for bytes, and for inodes; None: no limit."""
        rooms = await self.over(project)
        of_bytes = [room for room in rooms if room.quota.bytes_max != UNLIMITED]
        of_inodes = [room for room in rooms if room.quota.inodes_max != UNLIMITED]
        return (
            min(of_bytes, key=lambda room: room.bytes, default=None),
            min(of_inodes, key=lambda room: room.inodes, default=None),
        )


class Grant:
    """See ``Quotas.granted``. A class, because each new file and write in a quota uses it."""

    __slots__ = ("_quotas", "bytes", "inodes", "project")

    def __init__(self, quotas: Quotas, project: int, bytes_: int, inodes: int) -> None:
        self._quotas = quotas
        self.project = project
        self.bytes = max(0, bytes_)
        self.inodes = inodes

    async def __aenter__(self) -> None:
        if self.project >= FIRST_PROJECT and (self.bytes or self.inodes):
            await self._quotas.begin(self)

    async def __aexit__(self, *_: object) -> None:
        self._quotas.end(self)


def _chain_of(room: QuotaRoom, rooms: Mapping[int, QuotaRoom]) -> Sequence[QuotaRoom]:
    found, above = [room], rooms.get(room.quota.above)
    while above is not None and above not in found:  # if a record is wrong
        found.append(above)
        above = rooms.get(above.quota.above)
    return found


def _size_of(file: OpenInode) -> int:
    if file.backing and file.inode.in_burst and file.own_copy.is_open:
        with suppress(FsError):
            return file.own_copy.stat().st_size
    return file.inode.size
