"""The check of the metadata alone: every record is read once and judged against the others.

It allows what a crashed store may hold: dirty marks, orphans, garbage. It changes nothing; each
problem carries the transaction function that mends it. Reads the engine in batches, with other
tasks in between.
"""

import stat
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from functools import partial

from aifs.check import repair
from aifs.check.clones import CloneCheck
from aifs.check.columns import ColumnRecords
from aifs.check.containers import ContainerRecords
from aifs.check.copies import CopyCheck
from aifs.check.findings import (
    RECORDS,
    RECOVERY,
    Fix,
    Problem,
    Progress,
    Subject,
    printable,
    read_record,
)
from aifs.check.marks import MarkCheck
from aifs.check.names import NameCheck
from aifs.check.quotas import QuotaCheck
from aifs.check.table import (
    DIRECTORY,
    DOOMED,
    NONE,
    ORPHAN,
    OWN_OID,
    TRASHED,
    UNREADABLE,
    InodeTable,
)
from aifs.check.trash import TrashCheck
from aifs.core.errors import FsError
from aifs.meta import keys, namespace
from aifs.meta.chunks import decode_container
from aifs.meta.delegations import DELEGATE_BYTES
from aifs.meta.dooming import Doomed, decode_doomed
from aifs.meta.hosts import HostRecord, decode_host
from aifs.meta.kv import Engine, ReadTransaction, Transaction
from aifs.meta.records import Inode, decode_garbage, decode_inode
from aifs.meta.slices import read_slice
from aifs.store.ids import WINDOW, decode_windows

_ID_MAX = 1 << 62
_LAST = b"\xff" * 512
_TYPES = (
    stat.S_IFREG,
    stat.S_IFDIR,
    stat.S_IFLNK,
    stat.S_IFIFO,
    stat.S_IFSOCK,
    stat.S_IFBLK,
    stat.S_IFCHR,
)
_KEY_LENGTHS = {
    b"C": 17,
    b"D": 9,
    b"L": 9,
    b"R": 9,
    b"T": 17,
    b"U": 17,
    b"Q": 9,
    b"P": 10,
    b"a": 9,
    b"b": 9,
    b"e": 17,
    b"f": 9,
    b"g": 9,
    b"h": 33,
    b"i": 9,
    b"k": 17,
    b"l": 17,
    b"m": 11,
    b"p": 3,
    b"q": 9,
    b"r": 9,
    b"s": 3,
    b"t": 9,
    b"u": 3,
    b"v": 3,
    b"w": 9,
    b"y": 9,
    b"z": 9,
}
_COUNTERS = (
    keys.COUNTER_IDS,
    keys.COUNTER_INODES,
    keys.COUNTER_GUARDED,
    keys.COUNTER_TRASHED,
    keys.COUNTER_TRASHED_BYTES,
    keys.COUNTER_SERVERS,
    keys.COUNTER_BURST,
    keys.COUNTER_QUOTAS,
)

Handler = Callable[[bytes, bytes], Awaitable[None]]


async def for_each(
    engine: Engine, start: bytes, end: bytes, handle: Handler, seen: Callable[[int], None]
) -> None:
    """Call ``handle`` for each record with start <= key < end, and ``seen`` with the length of each
    batch.

    A handler takes note of what it finds, so it does not run in a view, which may be run again.
    What else it has to read, it reads in views of its own: nobody else changes the store.
    """
    while start:
        records, start = await engine.view(read_slice, start, end)
        for key, value in records:
            await handle(key, value)
        seen(len(records))


class MetadataScan:
    """``problems`` and the ``table`` of all inodes are complete when ``run`` returns."""

    def __init__(self, engine: Engine, servers: Iterable[int], progress: Progress) -> None:
        self._engine = engine
        self._view = view = engine.view
        self._servers = frozenset(servers)
        """The numbers of the store's servers, burst directories among them."""
        self._hosts = {engine.host}
        """The numbers of the hosts that may have left something; {0} where the store has one."""
        self._progress = progress
        self.table = InodeTable()
        self.problems: list[Problem] = []
        """What has been found; complete when ``run`` returns."""
        self._names = NameCheck(view, self.table, self.problems, self._in_use)
        self._copies = CopyCheck(view, self.table, self.problems, self._servers, self._in_use)
        self._columns = ColumnRecords(view, self._servers, self._problem)
        self._marks = MarkCheck(view, self.table, self._problem, self._hosts, engine.host)
        self._trash = TrashCheck(view, self.table, self._problem)
        self._containers = ContainerRecords(view, self._servers, self._problem, self._in_use)
        self._clones = CloneCheck(view, self._problem, self._is_readable)
        self._quotas = QuotaCheck(view, self._problem)
        self._users: dict[int, int] = {}  # object id -> inode, where the two differ
        self._unreadable_inodes = 0
        """How many inodes but the root's have records that cannot be read."""
        self._highest_id = 0
        """The largest id that is in use."""
        self._checked = 0
        """How many records have been looked at."""
        self._expected = 0
        """How many there are likely to be."""

    async def run(self) -> None:
        self._expected = 3 * await self._engine.view(_count_inodes)  # an inode, its name, its entry
        names = self._names
        await self._each(b"p", self._host)
        await self._each(b"i", self._inode)
        await self._users_of_objects()
        for kind, handle in (
            (b"C", self._clones.record),
            (b"b", self._copies.record),
            (b"g", self._garbage),
            (b"k", self._checksums),
            (b"o", self._orphan),
            (b"w", self._dirty),
            (b"z", self._doomed),
            (b"R", self._trash.rule),
            (b"T", self._trash.entry),
            (b"U", self._trash.turn),
            (b"n", self._marks.group),
            (b"r", self._marks.policy),
            (b"f", self._marks.age_rule),
            (b"x", self._xattr),
            (b"t", self._container),
            (b"a", self._open_mark),
            (b"y", self._loose_list),
            (b"h", self._containers.shared),
            (b"l", self._chunk_list),
            (b"q", self._columns.degraded),
            (b"m", self._columns.stray),
            (b"u", self._columns.mark),
            (b"v", self._windows),
            (b"Q", self._quotas.quota),
            (b"P", self._quotas.use),
        ):
            await self._each(kind, handle)
        self._clones.conclude()
        self._columns.conclude()
        await self._quotas.conclude()
        self._copies.conclude()
        await self._containers.conclude()
        await for_each(
            self._engine, *keys.all_of(b"h"), self._containers.references, lambda count: None
        )
        inodes = len(self.table)
        await self._each(b"d", names.dentry)
        await names.resolve_dangling()
        await self._each(b"e", names.entry)
        await names.conclude()
        await self._each(b"D", self._delegation)
        await self._each(b"L", self._lock_home)
        await self._each(b"s", _skip)  # read when the store was opened
        await self._each(b"c", self._counter)
        await self._unknown_kinds()
        await self._counters(inodes)
        await self._trash.counters()
        await self._locate()

    async def _each(self, kind: bytes, handle: Handler) -> None:
        length = _KEY_LENGTHS.get(kind)

        async def checked(key: bytes, value: bytes) -> None:
            if length and len(key) != length and kind in b"CDLPQRTUabgmopquvwyz":
                # Recovery would trip over it, and it holds nothing that could be lost.
                self._stray(f"record {key.hex()}", "its key is not that of a record", key, RECOVERY)
            elif (length and len(key) != length) or len(key) < 9 and kind in b"dx":
                await self._unknown(key, value)
            else:
                await handle(key, value)

        await for_each(self._engine, *keys.all_of(kind), checked, self._seen)

    def _seen(self, count: int) -> None:
        self._checked += count
        self._progress("metadata", self._checked, max(self._checked, self._expected))

    def _problem(
        self, kind: str, subject: Subject, detail: str, fix: Fix | None = None, stage: int = RECORDS
    ) -> None:
        self.problems.append(Problem(kind, subject, detail, fix, stage))

    def _in_use(self, number: int) -> None:
        if number < _ID_MAX:  # else the record is damaged
            self._highest_id = max(self._highest_id, number)

    # --- inodes ---

    async def _inode(self, key: bytes, value: bytes) -> None:
        ino = keys.number(key)
        if not 0 < ino < _ID_MAX:
            await self._unknown(key, value)
            return
        self._in_use(ino)
        self._quotas.inode(value)
        try:
            inode = decode_inode(ino, value)
            nonsense = _nonsense(inode, value)
        except FsError as error:
            nonsense = str(error)
        if nonsense:
            self._unreadable(ino, nonsense)
            return
        flags = TRASHED if inode.is_trashed else 0
        row = self.table.add(ino, inode.mode >> 12, flags, inode.nlink, inode.parent)
        self._in_use(inode.oid)
        self._copies.inode(inode)
        if inode.chunks is not None:
            await self._containers.file(inode)
        if inode.named:
            self._clones.inode(inode)
            other = self._users.setdefault(inode.oid, ino)
            if not self._clones.shares(inode.oid, other):
                self._share(inode.oid, ino, other)
        elif inode.layout is not None:
            if inode.oid == ino:
                self.table.flags[row] |= OWN_OID
            elif inode.oid in self._users:
                self._share(inode.oid, ino, self._users[inode.oid])
            else:
                self._users[inode.oid] = ino
        elif len(inode.data or b"") != inode.size and not inode.in_burst:
            size = len(inode.data or b"")
            self._problem(
                "wrong-size",
                ino,
                f"inode {ino}: size {inode.size}, but it holds {size} bytes",
                partial(repair.change_inode, ino=ino, changes={"size": size}),
            )
        if inode.objects is not None:
            await self._columns.layout(ino, inode.oid, inode.objects)

    def _unreadable(self, ino: int, reason: str) -> None:
        # The root has nothing to lose but its attributes, and without it nothing can be reached.
        is_root = ino == keys.ROOT_INO
        self.table.add(ino, DIRECTORY if is_root else 0, UNREADABLE)
        fix = self._restore_root if is_root else None
        self._unreadable_inodes += not is_root
        self._problem("unreadable-record", ino, f"inode {ino}: {reason}", fix)

    def _restore_root(self, tx: Transaction) -> None:
        links = 2 + self.table.subdirs[self.table.find(keys.ROOT_INO)]
        repair.restore_directory(tx, keys.ROOT_INO, keys.ROOT_INO, links)

    def _share(self, oid: int, *inos: int) -> None:
        first, second = sorted(inos)
        named = self._clones.named.get(oid)
        fix = None if named is None else partial(repair.share, oid=oid, inos=inos, named=named)
        detail = f"inode {second}: has the object id {oid} of inode {first}"
        self._problem("shared-objects", second, detail, fix, RECOVERY)

    async def _users_of_objects(self) -> None:
        for oid, ino in self._users.items():
            row = self.table.find(oid)
            if row != NONE and self.table.flags[row] & OWN_OID:
                self._share(oid, ino, oid)

    def user(self, oid: int) -> int | None:
        """The inode whose objects, or list of chunks, have this id."""
        row = self.table.find(oid)
        return oid if row != NONE and self.table.flags[row] & OWN_OID else self._users.get(oid)

    def user_of_copy(self, copy_id: int) -> int | None:
        """The inode that has this burst copy."""
        return self._copies.user(copy_id)

    def may_hold_chunks(self, container: int) -> bool:
        """Whether some file may lie in this container, recorded or not."""
        return self._containers.may_hold_chunks(container)

    # --- what belongs to inodes ---

    def _stray(self, subject: Subject, detail: str, key: bytes, stage: int = RECORDS) -> None:
        self._problem("stray-record", subject, detail, partial(repair.delete, key=key), stage)

    def _is_readable(self, ino: int) -> bool:
        row = self.table.find(ino)
        return row != NONE and not self.table.flags[row] & UNREADABLE

    async def _dirty(self, key: bytes, value: bytes) -> None:
        ino = keys.number(key)
        if not self._is_readable(ino):
            self._stray(f"inode {ino}", "dirty mark of an inode that cannot be read", key, RECOVERY)
        elif _is_written_once(await self._view(namespace.get_inode, ino)):
            self._stray(
                ino, f"inode {ino}: dirty mark of a file that never changes in place", key, RECOVERY
            )
        else:
            self._require_host(ino, f"inode {ino}: dirty mark", key, value)

    async def _orphan(self, key: bytes, value: bytes) -> None:
        ino = keys.hold_parts(key)[0]
        if len(key) not in (9, 11):
            self._stray(f"record {key.hex()}", "its key is not that of a record", key, RECOVERY)
        elif keys.is_hold(key):
            host = keys.hold_parts(key)[1]
            if host not in self._hosts or not host:
                self._stray(f"inode {ino}", f"hold of host {host}, which is none", key, RECOVERY)
            elif await self._view(read_record, keys.orphan(ino)) is None:
                self._stray(f"inode {ino}", "hold of an inode that is no orphan", key, RECOVERY)
        elif self._is_readable(ino):
            self.table.flags[self.table.find(ino)] |= ORPHAN
        else:
            self._stray(
                f"inode {ino}", "orphan record of an inode that cannot be read", key, RECOVERY
            )

    async def _doomed(self, key: bytes, value: bytes) -> None:
        ino = keys.number(key)
        if not self._is_readable(ino):
            self._stray(
                f"inode {ino}",
                "record of the doomed, of an inode that cannot be read",
                key,
                RECOVERY,
            )
            return
        self.table.flags[self.table.find(ino)] |= DOOMED
        try:
            decode_doomed(value)
        except FsError as error:
            # It has no name: that it is doomed is what can be told.
            fix = partial(repair.put, key=key, value=Doomed(ino, 0, 0).encode())
            self._problem("unreadable-record", ino, str(error), fix, RECOVERY)

    async def _xattr(self, key: bytes, value: bytes) -> None:
        ino, name = keys.xattr_parts(key)
        if self.table.find(ino) == NONE:
            self._stray(
                f"inode {ino}",
                f"extended attribute {printable(name)} of an inode that does not exist",
                key,
            )

    async def _checksums(self, key: bytes, value: bytes) -> None:
        ino = self.user(keys.entry_numbers(key)[0])
        if ino is not None or not self._unreadable_inodes:
            await self._copies.checksums(ino, key, value)

    async def _loose_list(self, key: bytes, value: bytes) -> None:
        oid = keys.number(key)
        self._in_use(oid)
        self._require_host(f"chunk list {oid}", "its maker", key, value, nobody=True)
        ino = self.user(oid)
        if ino is None:
            self._containers.loose_list(oid)
        else:
            detail = f"inode {ino}: its list of chunks would be dropped"
            self._problem("garbage-in-use", ino, detail, partial(repair.delete, key=key), RECOVERY)

    async def _chunk_list(self, key: bytes, value: bytes) -> None:
        ino = self.user(keys.chunk_list_parts(key)[0])
        await self._containers.chunk_list(key, value, ino, certain=not self._unreadable_inodes)

    async def _open_mark(self, key: bytes, value: bytes) -> None:
        self._require_host(f"container {keys.number(key)}", "who appends", key, value)
        await self._containers.open_mark(key, value)

    async def _container(self, key: bytes, value: bytes) -> None:
        await self._containers.container(key, value)
        with suppress(FsError):
            await self._columns.layout(0, keys.number(key), decode_container(value).layout)

    async def _garbage(self, key: bytes, value: bytes) -> None:
        oid = keys.number(key)
        where = f"garbage record {oid}"
        forget = partial(repair.delete, key=key)
        try:
            garbage = decode_garbage(value)
        except FsError as error:
            self._problem("unreadable-record", where, str(error), forget, RECOVERY)
            return
        self._in_use(oid)
        if garbage.maker and garbage.maker not in self._hosts:
            detail = f"its maker is host {garbage.maker}, which is none"
            garbage = garbage._replace(maker=self._engine.host)
            fix: Fix = partial(repair.put, key=key, value=garbage.encode())
            self._problem("unknown-host", where, detail, fix, RECOVERY)
        user = self._copies.user(oid) if garbage.ino == 0 else self.user(oid)
        if user is not None and garbage.ino in (0, self._clones.named.get(oid, user)):
            what = "burst copy" if garbage.ino == 0 else "objects"
            detail = f"inode {user}: its {what} would be deleted"
            self._problem("garbage-in-use", user, detail, forget, RECOVERY)
        unknown = sorted(set(garbage.layout.servers) - self._servers)
        if unknown:
            known = tuple(server for server in garbage.layout.servers if server in self._servers)
            layout = type(garbage.layout)(garbage.layout.unit, known)
            kept = garbage._replace(layout=layout).encode()
            fix = partial(repair.put, key=key, value=kept) if known else forget
            self._problem(
                "unknown-server", where, f"it names data server {unknown[0]}", fix, RECOVERY
            )

    async def _windows(self, key: bytes, value: bytes) -> None:
        try:
            decode_windows(value)
        except FsError as error:
            forget = partial(repair.delete, key=key)
            self._problem("unreadable-record", "windows of ids", str(error), forget, RECOVERY)

    # --- hosts ---

    async def _host(self, key: bytes, value: bytes) -> None:
        number = keys.host_number(key)
        self._hosts.add(number)
        try:
            decode_host(value)
        except FsError as error:
            # Its name comes with its next mount.
            unclean = HostRecord(f"number {number}", clean=False).encode()
            fix = partial(repair.put, key=key, value=unclean)
            self._problem("unreadable-record", f"host {number}", str(error), fix, RECOVERY)

    def _require_host(
        self, subject: Subject, what: str, key: bytes, value: bytes, nobody: bool = False
    ) -> None:
        """A record whose value is a host, or ``nobody``: what is left to one that there is not
        would stay for ever. This one sees to it instead."""
        host = keys.host_of(value)
        if host not in self._hosts and not (nobody and not host):
            detail = f"{what}: host {host}, which is none"
            fix = partial(repair.put, key=key, value=keys.host_value(self._engine.host))
            self._problem("unknown-host", subject, detail, fix, RECOVERY)

    # --- the rest ---

    async def _unknown(self, key: bytes, value: bytes) -> None:
        self._problem("unknown-record", f"record {key.hex()}", f"{len(value)} bytes; left as it is")

    async def _unknown_kinds(self) -> None:
        start = b"\0"
        for letter in b"CDLPQRSTUabcdefghijklmnopqrstuvwxyz":
            first, end = keys.all_of(bytes((letter,)))
            await for_each(self._engine, start, first, self._unknown, self._seen)
            start = end
        await for_each(self._engine, start, _LAST, self._unknown, self._seen)
        await for_each(self._engine, b"S\0", b"T", self._unknown, self._seen)

    async def _delegation(self, key: bytes, value: bytes) -> None:
        if len(value) != DELEGATE_BYTES:
            self._stray(f"record {key.hex()}", "it names no session", key)

    async def _lock_home(self, key: bytes, value: bytes) -> None:
        if len(value) != 8:
            self._stray(f"record {key.hex()}", "it names no session", key)

    async def _counter(self, key: bytes, value: bytes) -> None:
        if key not in _COUNTERS or len(value) > 8:
            await self._unknown(key, value)

    async def _counters(self, inodes: int) -> None:
        ids = await self._view(ReadTransaction.counter, keys.COUNTER_IDS)
        if ids <= self._highest_id:
            # Beyond the window too, so that recovery does not take for leftovers what lies in it.
            delta = self._highest_id + 1 + WINDOW - ids
            fix = partial(repair.shift_counter, key=keys.COUNTER_IDS, delta=delta)
            detail = f"{ids}, but {self._highest_id} is in use"
            self._problem("wrong-counter", "counter ids", detail, fix, RECOVERY)
        counted = await self._view(ReadTransaction.counter, keys.COUNTER_INODES)
        if counted != inodes:
            fix = partial(repair.shift_counter, key=keys.COUNTER_INODES, delta=inodes - counted)
            self._problem(
                "wrong-counter", "counter inodes", f"{counted}, but there are {inodes}", fix
            )

    async def _locate(self) -> None:
        for problem in self.problems:
            problem.where = await self._view(self.table.where, problem.subject)


def _nonsense(inode: Inode, record: bytes) -> str:
    """What an inode record says that cannot be, or nothing."""
    layout = inode.layout
    if inode.named and layout is None:
        return "shares bytes, and has none"
    if inode.encode() != record:
        return "the record has a wrong length, or unknown values"
    if inode.mode & ~0o7777 not in _TYPES:
        return f"there is no file type {inode.mode >> 12}"
    if inode.ino == keys.ROOT_INO and not inode.is_dir:
        return "the root is not a directory"
    if (layout is not None or inode.copy is not None) and not inode.is_file:
        return "has objects, but is not a regular file"
    if layout is not None and not layout.is_possible:
        return "has an impossible layout"
    if inode.data is not None and not (inode.is_file or stat.S_ISLNK(inode.mode)):
        return "holds bytes, but is neither a regular file nor a symlink"
    for number in (inode.oid, inode.copy.id if inode.copy else 0):
        if number >= _ID_MAX:
            return f"has an impossible object id {number}"
    return ""


def _is_written_once(inode: Inode) -> bool:
    return inode.chunks is not None or inode.named != 0


async def _skip(key: bytes, value: bytes) -> None:
    pass


def _count_inodes(tx: ReadTransaction) -> int:
    return max(0, tx.counter(keys.COUNTER_INODES))
