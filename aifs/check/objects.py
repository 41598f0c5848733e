"""The check of the data servers: every object against its inode, every file for missing objects.

Runs after recovery, on inodes as they are then. A file with a dirty mark may differ (I3 of
docs/design/metadata.md), and objects may be longer than needed (I4). Blocking calls run in workers.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import NamedTuple

from aifs.check import repair
from aifs.check.findings import Fix, Problem, Progress
from aifs.check.records import Records
from aifs.check.scan import MetadataScan
from aifs.check.table import NONE, UNREADABLE
from aifs.core.errors import FsError
from aifs.data.server import DataServer
from aifs.data.storage import ASIDE, ForeignFile, Key, StoredObject
from aifs.layout.interleaved import HEADER_BYTES, Location
from aifs.layout.placement import LOST
from aifs.layout.striped import Striped
from aifs.meta import chunks, keys, shared
from aifs.meta.chunks import Container
from aifs.meta.degraded import put_unread
from aifs.meta.kv import ReadTransaction
from aifs.meta.records import Copy, Inode, decode_burst, decode_garbage, decode_inode
from aifs.meta.server_uses import User, users_of
from aifs.store.store import Store

_BATCH = 2048


class Lack(NamedTuple):
    """A column of a protected file that is missing or too short."""

    column: int
    kind: str
    what: str
    length: int


class ObjectCheck:
    """Used once: ``run``, then perhaps ``move_orphans_aside``."""

    def __init__(self, store: Store, scan: MetadataScan, progress: Progress) -> None:
        self._records = scan.records
        self._view = scan.records.view
        self._servers = store.servers
        self._scan = scan
        self._table = scan.records.table
        self._containers = _ContainerObjects(store, scan.records)
        self._progress = progress
        self._orphans: list[tuple[DataServer, Problem, Key]] = []
        """Objects that nothing refers to: server, problem, and (inode, oid)."""
        self._lacks: dict[int, list[Lack]] = {}  # of protected files, by inode
        self._expected = 0
        """How many objects there have to be."""
        self.problems: list[Problem] = []
        """The findings; complete when ``run`` returns."""
        self.counts = dict.fromkeys(("inodes", "directories", "files", "objects", "bytes"), 0)
        """Counts of all that was looked at, by kind; complete when ``run`` returns."""

    async def run(self) -> None:
        await self._records.for_each(*keys.all_of(b"i"), self._expect)
        await self._containers.expect()
        listed: set[int] = set()
        for server in list(self._servers.values()):
            if server.standing == LOST:
                continue  # whatever lay there, nobody looks for it there any more
            try:
                await self._check_server(server)
                listed.add(server.id)
            except FsError as error:
                self.problems.append(
                    Problem("unlistable-server", server.address, str(error), where=server.address)
                )
        for row, missing in enumerate(self._table.objects):
            if missing:
                await self._find_missing(self._table.ino[row])
        for ino, lacks in self._lacks.items():
            await self._judge(ino, lacks)
        await self._containers.conclude(listed)
        for problem in self._containers.problems:
            if isinstance(problem.subject, int):
                problem.where = await self._view(self._table.path, problem.subject)
        self.problems += self._containers.problems

    # --- objects that must be there ---

    async def _expect(self, key: bytes, value: bytes) -> None:
        if len(key) != len(keys.inode(0)):
            return  # named as damaged already
        ino = keys.number(key)
        row = self._table.find(ino)
        if row == NONE or self._table.flags[row] & UNREADABLE:
            return  # named as damaged already; or it is lost+found, just made
        self.counts["inodes"] += 1
        inode = decode_inode(ino, value)
        self.counts["directories"] += inode.is_dir
        self.counts["files"] += inode.is_file
        count = int(inode.copy is not None)
        if inode.objects is not None and await self._view(_first_user, inode) == ino:
            known = await self._records.unread(inode.oid)
            count += len(list(expected_columns(inode.objects, inode.size, known)))
        self._table.objects[row] = count
        self._expected += count

    # --- objects that are there ---

    async def _check_server(self, server: DataServer) -> None:
        listing = server.list_objects()
        while batch := await self._servers.run(server, _take, listing):
            await self._match(server, batch)
            self._progress(
                "objects", self.counts["objects"], max(self._expected, self.counts["objects"])
            )

    async def _match(self, server: DataServer, batch: Iterable[StoredObject | ForeignFile]) -> None:
        for found in batch:
            if isinstance(found, StoredObject):
                self.counts["objects"] += 1
                self.counts["bytes"] += found.allocated
                await self._match_object(server, found)
            else:
                detail = f"{server.name}: not of this store; left as it is"
                self.problems.append(
                    Problem("foreign-file", found.where, detail, where=found.where)
                )

    async def _match_object(self, server: DataServer, found: StoredObject) -> None:
        if found.ino == 0 and server.role == "burst":
            if await self._match_copy(server, found):
                return
        elif found.ino == 0:
            if self._containers.matches(server, found) or self._scan.may_hold_chunks(found.oid):
                return
        elif await self._match_stripes(server, found):
            return
        if (
            not await self._view(_is_garbage, found)
            and await self._records.get(keys.stray(found.oid, server.id)) is None
        ):
            whose = f", once of inode {found.ino}" if found.ino else ""
            detail = f"{server.name}: {found.length} bytes{whose}"
            problem = Problem("orphan-object", found.where, detail, where=found.where)
            self.problems.append(problem)
            self._orphans.append((server, problem, (found.ino, found.oid)))

    async def _match_stripes(self, server: DataServer, found: StoredObject) -> bool:
        """Whether it is, or may be, an object of a striped file."""
        ino = next(iter(await self._view(shared.users, found.oid, 1)), found.ino)
        row = self._table.find(ino)
        if row == NONE or self._table.flags[row] & UNREADABLE:
            return row != NONE
        inode = await self._view(_read_inode, ino)
        if inode is None or (inode.oid, inode.named_by) != (found.oid, found.ino):
            return False
        layout = inode.objects
        if layout is None or server.id not in layout.servers:
            return False
        column = layout.servers.index(server.id)
        expected = layout.object_length(column, inode.size)
        if await self._records.unread(inode.oid) >> column & 1:
            return True
        if expected:
            self._table.objects[row] -= 1
        if found.length < expected and not await self._view(_is_dirty, inode.ino):
            what = f"has {found.length} of {expected} bytes"
            await self._lacking(inode, server, Lack(column, "short-object", what, found.length))
        return True

    async def _match_copy(self, server: DataServer, found: StoredObject) -> bool:
        """Whether it is, or may be, a file's burst copy, or mirror."""
        if await self._view(_is_mirror, found.oid, server.id):
            return True
        ino = self._scan.user_of_copy(found.oid)
        row = self._table.find(await self._view(_recorded_user, found.oid) if ino is None else ino)
        if ino is None or self._table.flags[row] & UNREADABLE:
            return row != NONE and bool(self._table.flags[row] & UNREADABLE)
        inode = await self._view(_read_inode, ino)
        if inode is None or inode.copy != Copy(server.id, found.oid):
            return False
        self._table.objects[row] -= 1
        if found.length == inode.size or await self._view(_is_dirty, ino):
            return True
        what = f"has {found.length} of {inode.size} bytes"
        if not inode.in_burst:
            await self._of_file(
                "bad-cache", inode, server, what, partial(repair.drop_copy, ino=ino)
            )
        elif found.length < inode.size:
            await self._lost(
                "short-object", inode, server, what, f"bytes {found.length} to {inode.size - 1}"
            )
        else:
            fix = partial(repair.change_inode, ino=ino, changes={"size": found.length})
            await self._of_file("wrong-size", inode, server, what, fix)
        return True

    async def _find_missing(self, ino: int) -> None:
        """Look at each object of a file that listings did not show."""
        inode, dirty = await self._view(lambda tx: (_read_inode(tx, ino), _is_dirty(tx, ino)))
        if inode is None or dirty:
            return
        if inode.objects is not None and await self._view(_first_user, inode) == ino:
            known = await self._records.unread(inode.oid)
            for column, number in expected_columns(inode.objects, inode.size, known):
                if await self._is_missing(number, inode.named_by, inode.oid):
                    lack = Lack(column, "missing-object", "is missing", 0)
                    await self._lacking(inode, self._servers[number], lack)
        if inode.copy is None:
            return
        server = self._servers.find(inode.copy.server)
        is_away = server is not None and bool(server.absent) and inode.in_burst
        if is_away or await self._is_missing(inode.copy.server, 0, inode.copy.id):
            assert server is not None
            if inode.in_burst and inode.size:
                lost = f"bytes 0 to {inode.size - 1}"
                await self._lost("missing-object", inode, server, "is missing", lost)
            else:
                forget = partial(repair.forget_copy, ino=ino)
                await self._of_file("bad-cache", inode, server, "is missing", forget)

    async def _is_missing(self, number: int, ino: int, oid: int) -> bool:
        if number not in self._servers:
            return False  # named already
        server = self._servers[number]
        try:
            found = await self._servers.run(server, server.list_range, oid, oid + 1)
        except FsError:
            return False  # the server cannot be listed either
        return (ino, oid) not in found

    # --- findings ---

    async def _lacking(self, inode: Inode, server: DataServer, lack: Lack) -> None:
        """A column is missing or short; for a protected file the others decide."""
        layout = inode.objects
        assert layout is not None
        if layout.is_protected:
            self._lacks.setdefault(inode.ino, []).append(lack)
        else:
            lost = lost_bytes(layout, lack.column, lack.length, inode.size)
            await self._lost(lack.kind, inode, server, lack.what, lost)

    async def _judge(self, ino: int, lacks: list[Lack]) -> None:
        inode = await self._view(_read_inode, ino)
        assert inode is not None and inode.objects is not None
        servers = [self._servers[number] for number in inode.objects.servers]
        known = await self._records.unread(inode.oid)
        for lack, kind, detail, fix in judge(inode, known, lacks):
            await self._of_file(kind, inode, servers[lack.column], detail, fix)

    async def _lost(
        self, kind: str, inode: Inode, server: DataServer, what: str, lost: str
    ) -> None:
        await self._of_file(kind, inode, server, what + f"; lost: {lost}")

    async def _of_file(
        self,
        kind: str,
        inode: Inode,
        server: DataServer,
        what: str,
        fix: Fix | None = None,
    ) -> None:
        key, inos = (inode.named_by, inode.oid), [inode.ino]
        if server.role == "burst":
            assert inode.copy is not None
            key = 0, inode.copy.id
        elif inode.named:
            inos = await self._view(shared.users, inode.oid)
        detail = f"{server.name}: {server.where(key)} {what}"
        for ino in inos:
            where = await self._view(self._table.path, ino)
            self.problems.append(Problem(kind, ino, detail, fix, where=where))

    # --- repair ---

    async def move_orphans_aside(self) -> None:
        """Move orphan objects to lost+found, durably. Immovable ones stay."""
        for server in {server.id: server for server, _, _ in self._orphans}.values():
            problems = [problem for owner, problem, _ in self._orphans if owner is server]
            orphans = [key for owner, _, key in self._orphans if owner is server]
            try:
                await self._servers.run(server, server.set_aside, orphans)
            except FsError as error:
                for problem in problems:
                    problem.detail += f"; cannot be moved: {error}"
            else:
                for problem in problems:
                    problem.detail += f"; moved to {server.address}/{ASIDE}"
                    problem.repaired = True


class _ContainerObjects:
    """Reads the table as it is when ``expect`` is called, which is after recovery and repairs."""

    def __init__(self, store: Store, records: Records) -> None:
        self._servers = store.servers
        self._records = records
        self._table: dict[int, _Expected] = {}
        self._ends: dict[int, _Cut] = {}
        self.problems: list[Problem] = []

    async def expect(self) -> None:
        """Read the table; before the servers are listed."""
        await self._records.for_each(*keys.all_of(b"t"), self._remember)

    async def _remember(self, key: bytes, value: bytes) -> None:
        number = keys.number(key)
        if len(key) != len(keys.container(0)):
            return  # named by the check of the records
        try:
            record = chunks.decode_container(value)
        except FsError:
            return  # as well
        self._table[number] = _Expected(record, await self._records.unread(number))

    def matches(self, server: DataServer, found: StoredObject) -> bool:
        """Whether an object with inode number 0 is a container's; takes note of its length."""
        expected = self._table.get(found.oid)
        if found.ino or expected is None or server.id not in expected.record.layout.servers:
            return False
        expected.lengths[expected.record.layout.servers.index(server.id)] = found.length
        return True

    async def conclude(self, listed: Collection[int]) -> None:
        """Name missing and short columns on the servers ``listed``, and files with lost bytes."""
        for number, expected in self._table.items():
            self._judge(number, expected, listed)
        if not self._ends:
            return
        lost: dict[int, list[User]] = {}
        for user in await users_of(self._records.engine, self._ends, self._is_cut):
            lost.setdefault(user.ino, []).append(user)
        for ino, users in lost.items():
            first, *others = sorted(users, key=lambda user: user.first)
            chunks_ = f"bytes {first.first} to {first.last}"
            if others:
                chunks_ += f", and {len(others)} more chunks up to byte {others[-1].last},"
            detail = f"inode {ino}: {chunks_} lay in {self._ends[first.container].path}"
            self.problems.append(Problem("lost-chunk", ino, detail))

    def _judge(self, number: int, expected: "_Expected", listed: Collection[int]) -> None:
        wrong: list[tuple[str, int, str]] = []
        for column, name in enumerate(expected.record.layout.servers):
            needed = expected.needed(column)
            length = expected.lengths.get(column)
            if length is None and needed and name in listed:
                expected.lengths[column] = 0
                wrong.append(("missing-container", column, "is missing"))
            elif length is not None and length < needed:
                wrong.append(("short-container", column, f"has {length} of {needed} bytes"))
        if not wrong:
            return
        readable = expected.readable()
        for kind, column, detail in wrong:
            server = self._servers[expected.record.layout.servers[column]]
            path, fix = server.where((0, number)), None
            if readable == expected.record.length:
                kind, fix = "degraded", partial(put_unread, oid=number, ino=0, mask=1 << column)
            else:
                self._ends[number] = _Cut(readable, path)
            self.problems.append(Problem(kind, path, f"{server.name}: {detail}", fix, where=path))

    def _is_cut(self, place: Location) -> bool:
        cut = self._ends.get(place.container)
        return cut is not None and place.offset + HEADER_BYTES + place.stored > cut.length


class _Expected:
    """A container. ``unread``: mask of unread columns; ``lengths``: of present objects, by
    column."""

    def __init__(self, record: Container, unread: int) -> None:
        self.record = record
        self.unread = unread
        self.lengths: dict[int, int] = {}

    def needed(self, column: int, size: int | None = None) -> int:
        """How long a column must be for the first ``size`` bytes to be read from it."""
        if self.unread >> column & 1:
            return 0
        return self.record.layout.object_length(
            column, self.record.length if size is None else size
        )

    def readable(self) -> int:
        """How many first bytes the present objects tell; unlisted columns count as whole."""

        def is_lost(size: int) -> bool:
            missing = self.unread
            for column, length in self.lengths.items():
                missing |= (length < self.needed(column, size)) << column
            return not self.record.layout.survives(missing)

        return bisect_left(range(self.record.length + 1), True, lo=1, key=is_lost) - 1


class _Cut(NamedTuple):
    """A container of which only the first ``length`` bytes are left."""

    length: int
    path: str


def expected_columns(layout: Striped, size: int, unread: int) -> Iterator[tuple[int, int]]:
    """Column and server of each object that a striped file must have."""
    for column, number in enumerate(layout.servers):
        if layout.object_length(column, size) and not unread >> column & 1:
            yield column, number


def lost_bytes(layout: Striped, column: int, length: int, size: int) -> str:
    """Bytes lost if a data column's object ends after ``length`` bytes, as text."""
    expected = layout.object_length(column, size)
    first, last = layout.file_offset(column, length), layout.file_offset(column, expected - 1)
    if last - first == expected - length - 1:
        return f"bytes {first} to {last}"
    return f"{expected - length} bytes between {first} and {last}"


def judge(
    inode: Inode, unread: int, lacks: list[Lack]
) -> Iterator[tuple[Lack, str, str, Fix | None]]:
    """The meaning of each lack for a protected file: kind of finding, detail, repair."""
    layout = inode.objects
    assert layout is not None
    mask = sum(1 << lack.column for lack in lacks)
    for lack in sorted(lacks):
        if layout.survives(unread | mask):
            fix = partial(put_unread, oid=inode.oid, ino=inode.ino, mask=1 << lack.column)
            yield lack, "degraded", lack.what, fix
        elif layout.data_column(lack.column) is None:
            yield lack, lack.kind, f"{lack.what}; it was parity", None
        else:
            bytes_ = lost_bytes(layout, lack.column, lack.length, inode.size)
            yield lack, lack.kind, f"{lack.what}; lost: {bytes_}", None


def _read_inode(tx: ReadTransaction, ino: int) -> Inode | None:
    record = tx.get(keys.inode(ino))
    return None if record is None else decode_inode(ino, record)


def _first_user(tx: ReadTransaction, inode: Inode) -> int:
    """The file that stands for those that share its objects, mostly itself."""
    return next(iter(shared.users(tx, inode.oid, 1)), inode.ino) if inode.named else inode.ino


def _recorded_user(tx: ReadTransaction, copy_id: int) -> int:
    """The inode of a burst copy by the copy's record; 0 for none readable."""
    try:
        return decode_burst(tx.get(keys.burst_copy(copy_id)) or b"").ino
    except FsError:
        return 0


def _is_mirror(tx: ReadTransaction, copy_id: int, server: int) -> bool:
    """Whether a copy is on record as a mirror there."""
    try:
        record = decode_burst(tx.get(keys.burst_copy(copy_id)) or b"")
    except FsError:
        return False
    return record.of is not None and record.server == server


def _is_dirty(tx: ReadTransaction, ino: int) -> bool:
    return tx.get(keys.dirty(ino)) is not None


def _is_garbage(tx: ReadTransaction, found: StoredObject) -> bool:
    record = tx.get(keys.garbage(found.oid))
    try:
        return record is not None and decode_garbage(record).ino == found.ino
    except FsError:
        return False


# --- in worker threads ---


def _take(listing: Iterable[StoredObject | ForeignFile]) -> list[StoredObject | ForeignFile]:
    return list(islice(listing, _BATCH))
