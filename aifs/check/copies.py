"""The check of burst copies and checksums against inodes. Part of the metadata scan.

Copies' records, for mounts, follow inodes. A mirror's record and its copy's name each other. A file
without right checksums loses all of them.
"""

from functools import partial

from aifs.burst.transfer import HASHED
from aifs.check import repair
from aifs.check.findings import RECORDS, RECOVERY, SILENT
from aifs.check.records import Records
from aifs.core.errors import FsError
from aifs.layout.placement import BURST_FIRST
from aifs.meta import keys, namespace
from aifs.meta.keys import DIGEST_BYTES, DIGESTS_PER_RECORD
from aifs.meta.kv import ReadTransaction
from aifs.meta.records import BurstRecord, Inode, decode_burst

_NOBODY = BurstRecord(0, BURST_FIRST, False, False, 0)


class CopyCheck:
    """Called in order: ``inode`` for all readable, ``record`` for all, ``conclude``; after the
    inodes, ``checksums``."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._users: dict[int, int] = {}  # id of a copy -> inode
        self._unrecorded: set[int] = set()  # ids of copies whose records have not been met
        self._stale: set[int] = set()  # object ids whose checksums are named already

    # --- burst copies ---

    def user(self, copy_id: int) -> int | None:
        """The inode that has this copy."""
        return self._users.get(copy_id)

    def inode(self, inode: Inode) -> None:
        ino, copy = inode.ino, inode.copy
        if copy is None:
            return
        self._records.in_use(copy.id)
        if copy.server not in self._records.servers or copy.server < BURST_FIRST:
            drop = None if inode.in_burst else partial(repair.forget_copy, ino=ino)
            detail = (
                f"inode {ino}: its burst copy is on burst directory {copy.server - BURST_FIRST}"
            )
            self._records.problem("unknown-server", ino, detail, drop, RECOVERY)
        if copy.id in self._users:
            first, second = sorted((ino, self._users[copy.id]))
            detail = f"inode {second}: has the burst copy {copy.id} of inode {first}"
            self._records.problem("shared-objects", second, detail)
            return
        self._users[copy.id] = ino
        self._unrecorded.add(copy.id)

    async def record(self, key: bytes, value: bytes) -> None:
        copy_id = keys.number(key)
        where = f"record of burst copy {copy_id}"
        self._records.in_use(copy_id)
        self._unrecorded.discard(copy_id)
        ino = self._users.get(copy_id)
        try:
            record = decode_burst(value)
            if record.encode() != value:
                raise ValueError("the record of a burst copy has unknown flags")
        except (FsError, ValueError) as error:
            await self._unreadable(copy_id, ino, str(error))
            return
        if record.of is not None:
            home = await self._records.view(_find_record, record.of.id)
            if home is None or home.mirror != (record.server, copy_id):
                detail = f"the burst copy {record.of.id} does not have this mirror"
                self._records.drop("stray-record", where, detail, key)
            return
        if record.mirror is not None:
            mirror = await self._records.view(_find_record, record.mirror.id)
            if mirror is None or mirror.of is None or mirror.of.id != copy_id:
                detail = f"inode {record.ino}: its burst copy {copy_id} has no such mirror"
                self._rewrite("copy-record", record.ino, detail)
        if ino is not None:
            inode = await self._records.view(namespace.get_inode, ino)
            told = (record.ino, record.server, record.undrained)
            if told != (ino, inode.copy.server, inode.in_burst):
                detail = f"inode {ino}: the record of its burst copy {copy_id} says something else"
                self._rewrite("copy-record", ino, detail)
        elif not self._records.is_unreadable(record.ino):
            detail = f"inode {record.ino} does not have this copy"
            self._records.drop("stray-record", where, detail, key)

    async def _unreadable(self, copy_id: int, ino: int | None, reason: str) -> None:
        if ino is not None:
            self._rewrite("unreadable-record", ino, f"inode {ino}: {reason}")
            return
        # Until recovery is over, some record has to be there, or it would take the copy for a
        # leftover.
        key, where = keys.burst_copy(copy_id), f"record of burst copy {copy_id}"
        keep = partial(repair.put, key=key, value=_NOBODY.encode())
        self._records.problem("unreadable-record", where, reason, keep, RECOVERY)
        self._records.drop(SILENT, where, "", key)

    def _rewrite(self, kind: str, ino: int, detail: str) -> None:
        self._records.problem(kind, ino, detail, partial(repair.record_copy, ino=ino), RECOVERY)

    def conclude(self) -> None:
        for copy_id in sorted(self._unrecorded):
            ino = self._users[copy_id]
            self._rewrite(
                "copy-record", ino, f"inode {ino}: its burst copy {copy_id} has no record"
            )

    # --- checksums ---

    async def checksums(self, ino: int | None, key: bytes, value: bytes) -> None:
        """``ino``: the striped file whose objects have the oid, if there is one."""
        oid, first = keys.entry_numbers(key)
        if oid in self._stale:
            return
        reason = await self._records.view(_nonsense, ino, oid, first, value)
        if reason:
            self._stale.add(oid)
            self._records.in_use(oid)
            subject = f"checksums of objects {oid}" if ino is None else ino
            # Recovery would take the dirty mark away, and then nobody could tell.
            is_dirty = ino is not None and await self._records.get(keys.dirty(ino)) is not None
            fix = partial(namespace.drop_checksums, oid=oid)
            stage = RECOVERY if is_dirty else RECORDS
            self._records.problem("stray-record", subject, reason, fix, stage)


def _find_record(tx: ReadTransaction, copy_id: int) -> BurstRecord | None:
    """None also for an unreadable one, which is named itself."""
    try:
        return decode_burst(tx.get(keys.burst_copy(copy_id)) or b"")
    except FsError:
        return None


def _nonsense(tx: ReadTransaction, ino: int | None, oid: int, first: int, value: bytes) -> str:
    """Why these checksums cannot be right, or ''."""
    inode = None if ino is None else namespace.find_inode(tx, ino)
    if inode is None or inode.objects is None:
        return "checksums of objects that no file has"
    if tx.get(keys.dirty(inode.ino)) is not None:
        return f"inode {ino}: checksums of a file that was being changed"
    count = -(-inode.size // HASHED)
    following = first + DIGESTS_PER_RECORD
    whole = (
        first % DIGESTS_PER_RECORD == 0
        and first < count
        and len(value) == DIGEST_BYTES * min(DIGESTS_PER_RECORD, count - first)
        and (first == 0 or tx.get(keys.checksums(oid, first - DIGESTS_PER_RECORD)) is not None)
        and (following >= count or tx.get(keys.checksums(oid, following)) is not None)
    )
    return "" if whole else f"inode {ino}: does not have a checksum for each MiB"
