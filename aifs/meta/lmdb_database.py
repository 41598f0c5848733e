"""The LMDB environment of the durable engine. The only module that knows of LMDB.

LMDB runs without its lock file, as the store has one owner. It then keeps the pages of the newest snapshot,
and of no older one, from being reused: so the read transaction is renewed before every write transaction.
All methods but ``commit`` and ``reserve`` are for the scheduler thread; those are for a worker, one at a time.
"""

import os
import struct

import lmdb

from aifs.core import faults, files
from aifs.core.errors import StoreError
from aifs.meta.memtable import Run

DatabaseError = lmdb.Error
MapFull = lmdb.MapFullError

RESIDENT_BYTES = 64 << 20
"""File pages mapped into this process above which LMDB's map is dropped and made anew."""

INITIAL_MAP_BYTES = 256 << 20

_PAGE_BYTES = os.sysconf("SC_PAGESIZE")
_APPLIED = b"applied_seq"
_SEQ = struct.Struct("<Q")

BEFORE_COMMIT = faults.declare("meta.commit.before", "an LMDB transaction is filled, not committed")
AFTER_LMDB = faults.declare(
    "meta.commit.after_lmdb", "an LMDB transaction is committed, nothing cut"
)


class Database:
    """The LMDB environment, and the one read transaction through which everybody reads it.

    Made if the directory holds none. Opening blocks; raises StoreError.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._path = os.path.join(directory, "data.mdb")
        size = os.path.getsize(self._path) if os.path.exists(self._path) else 0
        self._map_bytes = max(INITIAL_MAP_BYTES, 2 * size)
        self._writer: lmdb.Transaction | None = None
        try:
            self._open()
        except DatabaseError as error:
            what = f"cannot open the metadata database: {error}"
            raise StoreError(
                f"{directory}: {what}; if it is damaged: aifs meta restore, once it is moved away"
            ) from error

    def _open(self) -> None:
        self._env = lmdb.open(
            self._directory,
            map_size=self._map_bytes,
            max_dbs=2,
            mode=0o600,
            lock=False,
            max_spare_txns=2,
        )
        try:
            self._extend(self._used_bytes())
            self._records = self._env.open_db(b"records")
            self._own = self._env.open_db(b"engine")
            self._begin()
        except BaseException:
            self._env.close()
            raise
        self._statm = open("/proc/self/statm", "rb", buffering=0)  # kept: descriptors may run out

    def _used_bytes(self) -> int:
        return (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]

    def reserve(self, length: int) -> bool:
        """Hold disk space for the next ``length`` bytes that LMDB will grow by; whether there is as much. Blocks.

        LMDB writes into it without needing the disk to have room, as nobody else can take it meanwhile.
        """
        used = self._used_bytes()
        if os.path.getsize(self._path) - used >= length:
            return True
        fd = files.open_file(self._path)
        try:
            files.allocate(fd, 2 * length, used)
        except OSError:
            return False
        finally:
            files.close_file(fd)
        return True

    def _extend(self, needed: int) -> None:
        """Make the file as long as LMDB thinks that it is.

        It may rightly be shorter: LMDB does not write pages that were taken and freed in one transaction. But where
        it was cut by accident, LMDB shall find empty pages and say so, where reading beyond the end means SIGBUS.
        """
        if os.path.getsize(self._path) < needed:
            fd = files.open_file(self._path)
            try:
                files.truncate(fd, needed)
            finally:
                files.close_file(fd)

    def _begin(self) -> None:
        self._snapshot = self._env.begin(db=self._records)
        self.get = self._snapshot.get  # bound once, not once per read

    def reopen(self) -> None:
        """Begin anew from what is on disk, which is whole. Raises DatabaseError."""
        self.close()
        self._open()

    def applied(self) -> int | None:
        """Sequence number of the last transaction that is in LMDB; None in a new database."""
        value = self._snapshot.get(_APPLIED, db=self._own)
        return None if value is None else _SEQ.unpack(value)[0]

    def run(self, start: bytes, end: bytes) -> Run:
        with self._snapshot.cursor() as cursor:
            if cursor.set_range(start):
                for pair in cursor.iternext():
                    if pair[0] >= end:
                        return
                    yield pair

    def renew(self) -> None:
        """See what has been committed."""
        self._snapshot.abort()
        self._begin()

    def grow(self) -> None:
        """Twice the room. No write transaction and no range may be open, here and in ``trim``."""
        self._map_bytes *= 2
        self._remap()

    def trim(self) -> None:
        """``renew``, and drop mapped pages from our resident memory if they are many."""
        resident = int(os.pread(self._statm.fileno(), 256, 0).split()[2]) * _PAGE_BYTES
        if resident > RESIDENT_BYTES:
            self._remap()
        else:
            self.renew()

    def _remap(self) -> None:
        self._snapshot.abort()
        self._env.set_mapsize(self._map_bytes)
        self._begin()

    # One write transaction at a time: ``begin``, then ``fill`` as often as needed, then ``commit`` or ``roll_back``.
    # Each but the last may raise MapFull, after which ``roll_back`` and ``grow`` make room, or another DatabaseError.

    def begin(self) -> None:
        self.trim()
        self._writer = self._env.begin(write=True, db=self._records)

    def fill(self, changes: list[tuple[bytes, bytes | None]]) -> None:
        """Make changes, which nobody sees yet; a value of None deletes."""
        with self._writer.cursor() as cursor:
            cursor.putmulti([change for change in changes if change[1] is not None])
        for key, value in changes:
            if value is None:
                self._writer.delete(key)

    def commit(self, applied: int | None) -> None:
        """The changes are on stable storage on return, with the ``applied`` sequence number. Blocks, in any thread."""
        if applied is not None:
            self._writer.put(_APPLIED, _SEQ.pack(applied), db=self._own)
        faults.reach(BEFORE_COMMIT)
        self._writer.commit()
        self._writer = None
        faults.reach(AFTER_LMDB)

    def roll_back(self) -> None:
        """Forget what has not been committed, if anything has not."""
        if self._writer is not None:
            self._writer.abort()
            self._writer = None

    def close(self) -> None:
        self.roll_back()
        self._snapshot.abort()
        self._env.close()
        self._statm.close()
