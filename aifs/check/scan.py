"""The check of the metadata alone: every record is read once and judged against the others.

It allows all that a crash leaves: dirty marks, orphans, garbage. It changes nothing; each problem
has its mending transaction function. Reads in batches, with other tasks between.
"""

import stat
from collections.abc import Iterable
from contextlib import suppress
from functools import partial

from aifs.check import repair
from aifs.check.containers import ContainerRecords
from aifs.check.copies import CopyCheck
from aifs.check.findings import RECOVERY, Fix, Progress, Subject
from aifs.check.names import NameCheck, QuotaCheck, TrashCheck
from aifs.check.records import KINDS, UNCHECKED, Judge, Records
from aifs.check.table import DIRECTORY, DOOMED, NONE, ORPHAN, OWN_OID, TRASHED, UNREADABLE
from aifs.core.errors import FsError
from aifs.layout.striped import Striped
from aifs.meta import keys, moves, namespace
from aifs.meta.chunks import decode_container
from aifs.meta.groups import GroupRecord
from aifs.meta.kv import Engine, ReadTransaction, Transaction
from aifs.meta.records import Degraded, Garbage, Inode, decode_inode
from aifs.store.ids import WINDOW

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
_COUNTERS = (
    keys.COUNTER_IDS,
    keys.COUNTER_INODES,
    keys.COUNTER_GUARDED,
    keys.COUNTER_TRASHED,
    keys.COUNTER_TRASHED_BYTES,
    keys.COUNTER_SERVERS,
    keys.COUNTER_BURST,
    keys.COUNTER_QUOTAS,
    keys.COUNTER_REPAIRS,
)


class MetadataScan:
    """Its ``records``, with problems and all inodes, are complete after ``run``."""

    def __init__(self, engine: Engine, servers: Iterable[int], progress: Progress) -> None:
        self.records = records = Records(engine, servers)
        self._progress = progress
        self._table = records.table
        self._names = NameCheck(records)
        self._copies = CopyCheck(records)
        self._trash = TrashCheck(records)
        self._containers = ContainerRecords(records)
        self._clones = _Clones(records)
        self._quotas = QuotaCheck(records)
        self._users: dict[int, int] = {}  # object id -> inode, where the two differ
        self._unprotected: set[int] = set()
        """Servers with unprotected bytes that are not marked so."""
        self._unreadable_inodes = 0
        """How many inodes except the root have records that cannot be read."""
        self._inodes = 0
        """How many inodes have records."""
        self._checked = 0
        """How many records have been looked at."""
        self._expected = 0
        """How many there are likely to be."""

    async def run(self) -> None:
        view, names, containers = self.records.view, self._names, self._containers
        self._expected = 3 * await view(_count_inodes)  # an inode, its name, its entry
        judges: dict[bytes, Judge] = {
            b"p": lambda key, _: self.records.hosts.add(keys.host_number(key)),
            b"i": self._inode,
            b"C": self._clones.record,
            b"b": self._copies.record,
            b"g": self._garbage,
            b"k": self._checksums,
            b"o": self._orphan,
            b"w": self._dirty,
            b"z": self._doomed,
            b"T": self._trash.entry,
            b"U": self._trash.turn,
            b"n": self._group,
            b"t": self._container,
            b"a": self._open_mark,
            b"y": self._loose_list,
            b"h": containers.shared,
            b"l": self._chunk_list,
            b"q": self._degraded,
            b"u": self._server_mark,
            b"Q": self._quotas.quota,
            b"P": self._quotas.use,
            b"d": names.dentry,
            b"e": names.entry,
        }
        following = {
            b"i": self._users_of_objects,
            b"P": self._conclude_all_but_names,
            b"d": names.resolve_dangling,
            b"e": names.conclude,
        }
        for kind in KINDS:
            further, then = judges.get(kind.letter), following.get(kind.letter)
            await self._each(kind.letter, partial(self.records.judge, kind, further=further))
            if then is not None:
                await then()
        await self._each(b"c", self._counter)
        await self._unknown_kinds()
        await self._counters()
        await self._trash.counters()
        for problem in self.records.problems:
            problem.where = await view(self._table.where, problem.subject)

    async def _each(self, kind: bytes, handle: Judge) -> None:
        await self.records.for_each(*keys.all_of(kind), handle, self._seen)

    def _seen(self, count: int) -> None:
        self._checked += count
        self._progress("metadata", self._checked, max(self._checked, self._expected))

    async def _conclude_all_but_names(self) -> None:
        self._clones.conclude()
        for number in sorted(self._unprotected & self.records.servers):
            fix = partial(repair.put, key=keys.unprotected(number), value=b"")
            detail = "unprotected bytes lie there, and nothing says so"
            self.records.problem("server-mark", f"data server {number}", detail, fix)
        await self._quotas.conclude()
        self._copies.conclude()
        await self._containers.conclude()
        self._inodes = len(self._table)  # the names may show directories that have none

    # --- inodes ---

    async def _inode(self, key: bytes, value: bytes) -> None:
        ino = keys.number(key)
        if not 0 < ino < _ID_MAX:
            self.records.unknown(key, value)
            return
        self.records.in_use(ino)
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
        row = self._table.add(ino, inode.mode >> 12, flags, inode.nlink, inode.parent)
        self.records.in_use(inode.oid)
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
                self._table.flags[row] |= OWN_OID
            elif inode.oid in self._users:
                self._share(inode.oid, ino, self._users[inode.oid])
            else:
                self._users[inode.oid] = ino
        elif len(inode.data or b"") != inode.size and not inode.in_burst:
            size = len(inode.data or b"")
            fix = partial(repair.change_inode, ino=ino, changes={"size": size})
            detail = f"inode {ino}: size {inode.size}, but it holds {size} bytes"
            self.records.problem("wrong-size", ino, detail, fix)
        if inode.objects is not None:
            await self._layout(ino, inode.oid, inode.objects)

    def _unreadable(self, ino: int, reason: str) -> None:
        # The root has nothing to lose except its attributes, and without it nothing can be reached.
        is_root = ino == keys.ROOT_INO
        self._table.add(ino, DIRECTORY if is_root else 0, UNREADABLE)
        fix = self._restore_root if is_root else None
        self._unreadable_inodes += not is_root
        self.records.problem("unreadable-record", ino, f"inode {ino}: {reason}", fix)

    def _restore_root(self, tx: Transaction) -> None:
        links = 2 + self._table.subdirs[self._table.find(keys.ROOT_INO)]
        repair.restore_directory(tx, keys.ROOT_INO, keys.ROOT_INO, links)

    def _share(self, oid: int, *inos: int) -> None:
        first, second = sorted(inos)
        named = self._clones.named.get(oid)
        fix = None if named is None else partial(repair.share, oid=oid, inos=inos, named=named)
        detail = f"inode {second}: has the object id {oid} of inode {first}"
        self.records.problem("shared-objects", second, detail, fix, RECOVERY)

    async def _users_of_objects(self) -> None:
        for oid, ino in self._users.items():
            row = self._table.find(oid)
            if row != NONE and self._table.flags[row] & OWN_OID:
                self._share(oid, ino, oid)

    def user(self, oid: int) -> int | None:
        """The inode whose objects, or list of chunks, have this id."""
        row = self._table.find(oid)
        return oid if row != NONE and self._table.flags[row] & OWN_OID else self._users.get(oid)

    def user_of_copy(self, copy_id: int) -> int | None:
        """The inode that has this burst copy."""
        return self._copies.user(copy_id)

    def may_hold_chunks(self, container: int) -> bool:
        """Whether some file may lie in this container, recorded or not."""
        return self._containers.may_hold_chunks(container)

    # --- records that belong to inodes ---

    async def _dirty(self, key: bytes, value: bytes) -> None:
        ino = keys.number(key)
        inode = await self.records.view(namespace.get_inode, ino)
        if inode.chunks is not None or inode.named:
            detail = f"inode {ino}: dirty mark of a file that never changes in place"
            self.records.drop("stray-record", ino, detail, key, RECOVERY)
        else:
            self.records.require_host(ino, f"inode {ino}: dirty mark", key, value)

    async def _orphan(self, key: bytes, value: bytes) -> None:
        ino, detail = keys.hold_parts(key)[0], ""
        if keys.is_hold(key):
            host = keys.hold_parts(key)[1]
            if host not in self.records.hosts or not host:
                detail = f"hold of host {host}, which is none"
            elif await self.records.get(keys.orphan(ino)) is None:
                detail = "hold of an inode that is no orphan"
        elif self.records.is_readable(ino):
            self._table.flags[self._table.find(ino)] |= ORPHAN
        else:
            detail = "orphan record of an inode that cannot be read"
        if detail:
            self.records.drop("stray-record", f"inode {ino}", detail, key, RECOVERY)

    def _doomed(self, key: bytes, record: object) -> None:
        self._table.flags[self._table.find(keys.number(key))] |= DOOMED

    async def _group(self, key: bytes, record: object) -> None:
        ino = int.from_bytes(key[1:9], "big")
        host, fix = None, partial(repair.delete, key=key)
        if isinstance(record, GroupRecord):
            host = record.host
            kept = record._replace(host=self.records.engine.host).encode()
            fix = partial(repair.put, key=key, value=kept)
        elif await self.records.get(keys.group(ino)) is None:
            number = keys.member_number(key)
            detail = f"inode {ino}: member {number} of a group, but the directory has none"
            self.records.drop("stray-record", ino, detail, key)
            return
        else:
            host = keys.part_host(key)
        if host is not None and host not in self.records.hosts:
            detail = f"inode {ino}: group of host {host}, which is none"
            self.records.problem("unknown-host", ino, detail, fix)

    async def _checksums(self, key: bytes, value: bytes) -> None:
        ino = self.user(keys.entry_numbers(key)[0])
        if ino is not None or not self._unreadable_inodes:
            await self._copies.checksums(ino, key, value)

    def _loose_list(self, key: bytes, value: bytes) -> None:
        oid = keys.number(key)
        self.records.in_use(oid)
        self.records.require_host(f"chunk list {oid}", "its maker", key, value, nobody=True)
        ino = self.user(oid)
        if ino is None:
            self._containers.loose_list(oid)
        else:
            detail = f"inode {ino}: its list of chunks would be dropped"
            self.records.drop("garbage-in-use", ino, detail, key, RECOVERY)

    async def _chunk_list(self, key: bytes, value: bytes) -> None:
        ino = self.user(keys.chunk_list_parts(key)[0])
        await self._containers.chunk_list(key, value, ino, certain=not self._unreadable_inodes)

    def _open_mark(self, key: bytes, value: bytes) -> None:
        where = f"container {keys.number(key)}"
        self.records.require_host(where, "the host that appends", key, value)
        self._containers.open_mark(key)

    async def _container(self, key: bytes, value: bytes) -> None:
        await self._containers.container(key, value)
        with suppress(FsError):
            await self._layout(0, keys.number(key), decode_container(value).layout)

    def _garbage(self, key: bytes, garbage: Garbage) -> None:
        oid = keys.number(key)
        where = f"garbage record {oid}"
        self.records.in_use(oid)
        if garbage.maker and garbage.maker not in self.records.hosts:
            detail = f"its maker is host {garbage.maker}, which is none"
            garbage = garbage._replace(maker=self.records.engine.host)
            fix: Fix = partial(repair.put, key=key, value=garbage.encode())
            self.records.problem("unknown-host", where, detail, fix, RECOVERY)
        user = self._copies.user(oid) if garbage.ino == 0 else self.user(oid)
        if user is not None and garbage.ino in (0, self._clones.named.get(oid, user)):
            subject = "burst copy" if garbage.ino == 0 else "objects"
            detail = f"inode {user}: its {subject} would be deleted"
            self.records.drop("garbage-in-use", user, detail, key, RECOVERY)
        unknown = sorted(set(garbage.layout.servers) - self.records.servers)
        if unknown:
            servers = self.records.servers
            known = tuple(server for server in garbage.layout.servers if server in servers)
            layout = type(garbage.layout)(garbage.layout.unit, known)
            kept = garbage._replace(layout=layout).encode()
            fix = partial(repair.put, key=key, value=kept)
            fix = fix if known else partial(repair.delete, key=key)
            detail = f"it names data server {unknown[0]}"
            self.records.problem("unknown-server", where, detail, fix, RECOVERY)

    # --- redundancy ---

    async def _layout(self, ino: int, oid: int, layout: Striped) -> None:
        if not layout.is_protected:
            self._unprotected.update(layout.servers)
        await self.records.require_servers(ino, oid, layout)

    async def _degraded(self, key: bytes, record: Degraded) -> None:
        oid = keys.number(key)
        ino, mask = record
        try:
            objects = await self.records.view(moves.find_objects, ino, oid)
        except FsError:
            return  # the record that it is about is named
        layout = None if objects is None else objects.layout
        if layout is None or mask >> len(layout.servers) or (mask and not layout.is_protected):
            detail = f"it is about objects of inode {ino} that there are not"
            self.records.drop("stray-record", f"degraded objects {oid}", detail, key, RECOVERY)
        elif not layout.survives(mask):
            subject: Subject = ino or f"container {oid}"
            columns = ", ".join(str(n) for n in range(mask.bit_length()) if mask >> n & 1)
            detail = f"columns {columns} are missing, more than its bytes survive"
            self.records.problem("missing-object", subject, detail)

    def _server_mark(self, key: bytes, value: bytes) -> None:
        number = keys.number(key)
        if number in self.records.servers:
            self._unprotected.discard(number)
        else:
            detail = "a mark of a server that there is not"
            self.records.drop("stray-record", f"data server {number}", detail, key)

    # --- the rest ---

    async def _unknown_kinds(self) -> None:
        start, letters = b"\0", sorted([*(kind.letter[0] for kind in KINDS), *UNCHECKED])
        for letter in letters:
            first, end = keys.all_of(bytes((letter,)))
            await self.records.for_each(start, first, self.records.unknown, self._seen)
            start = end
        await self.records.for_each(start, _LAST, self.records.unknown, self._seen)
        await self.records.for_each(b"S\0", b"T", self.records.unknown, self._seen)

    def _counter(self, key: bytes, value: bytes) -> None:
        if key not in _COUNTERS or len(value) > 8:
            self.records.unknown(key, value)

    async def _counters(self) -> None:
        ids = await self.records.view(ReadTransaction.counter, keys.COUNTER_IDS)
        highest = self.records.highest_id
        if ids <= highest:
            # Beyond the window too, so that recovery does not take what lies in it for leftovers.
            delta = highest + 1 + WINDOW - ids
            fix = partial(repair.shift_counter, key=keys.COUNTER_IDS, delta=delta)
            detail = f"{ids}, but {highest} is in use"
            self.records.problem("wrong-counter", "counter ids", detail, fix, RECOVERY)
        await self.records.require_counter(keys.COUNTER_INODES, self._inodes, "counter inodes")


class _Clones:
    """The check of clones: inodes that share bytes, and ``C`` records, the references. Called in
    order: ``inode`` for all that share, ``record`` for all, ``conclude``.

    An inode without record would lose its bytes with the last of the others; a record without inode
    would keep them. Both are mended before recovery, which deletes what has no reference.
    """

    def __init__(self, records: Records) -> None:
        self._records = records
        self.named: dict[int, int] = {}
        """By the id of shared bytes, the inode number that their objects are named by."""
        self._first: dict[int, Inode] = {}  # by id, the first file that was met
        self._unrecorded: set[tuple[int, int]] = set()  # id and inode, records not met yet

    def inode(self, inode: Inode) -> None:
        """A file that shares its bytes."""
        oid = inode.oid
        self._unrecorded.add((oid, inode.ino))
        first = self._first.setdefault(oid, inode)
        self.named.setdefault(oid, inode.named)
        form = first.named, first.layout, first.size
        if form != (inode.named, inode.layout, inode.size):
            detail = f"inode {inode.ino}: it shares the bytes {oid} of inode {first.ino}, "
            detail += "and is not like it"
            self._records.problem("shared-objects", inode.ino, detail, None, RECOVERY)

    def shares(self, oid: int, ino: int) -> bool:
        """Whether this inode says that it shares ``oid``. Before the records."""
        return (oid, ino) in self._unrecorded

    async def record(self, key: bytes, value: bytes) -> None:
        reference = oid, ino = keys.clone_parts(key)
        if reference in self._unrecorded:
            self._unrecorded.discard(reference)
            return
        is_readable = self._records.is_readable(ino)
        inode = await self._records.view(namespace.get_inode, ino) if is_readable else None
        if inode is not None and inode.oid == oid and inode.layout is not None:
            detail = f"inode {ino}: it would change the bytes {oid}, which others share"
            self._unreferenced(oid, ino, self.named.get(oid, ino), detail)
        else:
            detail = f"inode {ino} does not have them"
            self._records.drop("stray-record", f"shared bytes {oid}", detail, key, RECOVERY)

    def conclude(self) -> None:
        for oid, ino in sorted(self._unrecorded):
            detail = f"inode {ino}: nothing says that it shares the bytes {oid}"
            self._unreferenced(oid, ino, self.named[oid], detail)

    def _unreferenced(self, oid: int, ino: int, named: int, detail: str) -> None:
        fix = partial(repair.share, oid=oid, inos=[ino], named=named)
        self._records.problem("wrong-references", ino, detail, fix, RECOVERY)


def _nonsense(inode: Inode, record: bytes) -> str:
    """Why an inode record cannot be right, or ''."""
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


def _count_inodes(tx: ReadTransaction) -> int:
    return max(0, tx.counter(keys.COUNTER_INODES))
