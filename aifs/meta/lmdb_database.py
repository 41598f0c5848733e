"""The LMDB environment of the durable engine. The only module that knows of LMDB, but for the pages
of its file (lmdb_pages).

On disk, in LMDB's own format, are two named databases. All values end with a *check value*, 4
bytes: the CRC-32 (the one of zlib, little-endian) of the key and of the value before it. So a value
that is not what was stored is told when it is read.

    records       the records (meta/keys.py)
    engine        applied: u64, little-endian, number of the last transaction that is here as a
                  whole

LMDB runs without its lock file, as the store has one owner. It then keeps the pages of the newest
snapshot, and of no older one, from being reused: so the read transaction is renewed before every
write transaction. All methods but ``commit`` and ``reserve`` are for the scheduler thread; those
are for a worker, one at a time.
"""

import logging
import os
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from zlib import crc32

import lmdb

from aifs.core import faults, files
from aifs.core.errors import StoreError, Unavailable
from aifs.meta import keys, lmdb_pages
from aifs.meta.kv import DamagedRecord
from aifs.meta.memtable import Run

log = logging.getLogger(__name__)

DatabaseError = lmdb.Error
_BROKEN = (lmdb.CorruptedError, lmdb.InvalidError, lmdb.PageNotFoundError)
MapFull = lmdb.MapFullError

RESIDENT_BYTES = 64 << 20
"""File pages mapped into this process above which LMDB's map is dropped and made anew."""

INITIAL_MAP_BYTES = 256 << 20

FIRST_PAGES = 4096
"""That are looked at before a database is used: some 20 ms."""

CHECK_PAGES = 128
"""That are looked at at a time later: less than a millisecond, if they are in memory."""

UNCHECKED = "unchecked"

_PAGE_BYTES = os.sysconf("SC_PAGESIZE")
_APPLIED = b"applied"
_SEQ = struct.Struct("<Q")
_CHECK = struct.Struct("<I")
_CHECK_BYTES = _CHECK.size
_WHOLE = 0x2144DF1C
"""The CRC-32 of anything that its own CRC-32 stands behind."""

BEFORE_COMMIT = faults.declare("meta.commit.before", "an LMDB transaction is filled, not committed")
AFTER_LMDB = faults.declare(
    "meta.commit.after_lmdb", "an LMDB transaction is committed, nothing cut"
)


class BrokenDatabase(StoreError):
    """LMDB's file is not whole. The message does not say what to do, which depends on the store."""


def with_check_value(key: bytes, value: bytes) -> bytes:
    return value + _CHECK.pack(crc32(value, crc32(key)))


class Database:
    """The LMDB environment, and the one read transaction for all reads; made if missing. Opening
    blocks; raises StoreError, BrokenDatabase.

    Its pages are checked without LMDB, which ends the process at some damaged ones: the first
    ``FIRST_PAGES`` on opening, the others by ``check_more``. A file ``unchecked`` stands beside it
    until then: if the process dies before, the next opening checks all, as always with
    ``thorough``, which also checks their contents.

    For a damaged record, ``get`` raises DamagedRecord, and ``run`` has the error in place of the
    value; the log names it, once.
    """

    def __init__(self, directory: str, thorough: bool = True) -> None:
        self._directory = directory
        self.damaged_as: bytes | None = None
        """The value of damaged records, after all have been named; None: they are not read."""
        self._named: set[bytes] = set()
        """Keys of damaged records that the log has named."""
        self._path = os.path.join(directory, "data.mdb")
        """Of LMDB's data file."""
        size = os.path.getsize(self._path) if os.path.exists(self._path) else 0
        self._map_bytes = max(INITIAL_MAP_BYTES, 2 * size)
        """How much of the address space it is mapped to: what the file may grow to."""
        self._writer: lmdb.Transaction | None = None
        """The write transaction that is open; None: none is."""
        self._unchecked = os.path.join(directory, UNCHECKED)
        """Path of the file that says that not all pages have been looked at."""
        self._check: lmdb_pages.PageCheck | None = None  # while not all pages have been looked at
        try:
            try:
                if size:
                    self._check_first(thorough)
                self._open()
            except BaseException:
                self._stop_checking()
                raise
        except _BROKEN as error:
            raise self._broken(error) from error
        except (DatabaseError, OSError) as error:
            raise StoreError(
                f"{self._path}: the metadata database cannot be opened: {error}"
            ) from error

    def _check_first(self, thorough: bool) -> None:
        self._check = lmdb_pages.PageCheck(self._path, thorough)
        all_now = thorough or os.path.exists(self._unchecked)
        if not self.check_more(None if all_now else FIRST_PAGES):
            try:
                files.close_file(files.open_file(self._unchecked, create=True))
            except OSError:  # the filesystem is full, or broken: the store can be read all the same
                self.check_more(None)

    @property
    def is_checked(self) -> bool:
        return self._check is None

    def check_more(self, pages: int | None) -> bool:
        """Check so many more pages, or all; whether all are done. Blocks, in any thread, while no
        transaction is being committed. Raises BrokenDatabase, OSError."""
        if self._check is not None:
            try:
                if not self._check.look(pages):
                    return False
            except lmdb_pages.BrokenPage as error:
                raise self._broken(error) from error
            self._stop_checking()
            with suppress(FileNotFoundError):
                files.unlink(self._unchecked)
        return True

    def _stop_checking(self) -> None:
        if self._check is not None:
            self._check.close()
            self._check = None

    def _broken(self, error: Exception) -> BrokenDatabase:
        return BrokenDatabase(f"{self._path}: the metadata database is broken: {error}")

    def _open(self, create: bool = True) -> None:
        self._env = lmdb.open(
            self._directory,
            create=create,
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

    def usage(self) -> tuple[int, int]:
        """Bytes of the file that LMDB has ever used, and bytes in use in the newest snapshot. LMDB
        reuses the others before it grows, except those of the last two transactions."""
        self.renew()
        tables = [
            self._snapshot.stat(table) for table in (self._env.open_db(), self._records, self._own)
        ]
        pages = sum(
            table["branch_pages"] + table["leaf_pages"] + table["overflow_pages"]
            for table in tables
        )
        used, page_bytes = self._used_bytes(), tables[0]["psize"]
        live = (2 + pages) * page_bytes
        # The list of free pages needs less than 16 bytes for each.
        return used, live + (used - live >> 8)

    def reserve(self, length: int, used: int, live: int) -> bool:
        """Hold disk space for LMDB's next ``length`` bytes, which nobody else can take; whether
        there is as much. Blocks. ``used`` and ``live``: its present ``usage``."""
        now = os.stat(self._path)
        if now.st_size - used >= length or now.st_blocks * 512 - live >= length:
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
        """Make the file as long as LMDB thinks: it does not write pages taken and freed in one
        transaction. In a file cut by accident LMDB then finds empty pages, and no SIGBUS."""
        if os.path.getsize(self._path) < needed:
            fd = files.open_file(self._path)
            try:
                files.truncate(fd, needed)
            finally:
                files.close_file(fd)

    def _begin(self) -> None:
        self._snapshot = self._env.begin(db=self._records)
        self.get = partial(self._checked, self._snapshot.get)  # looked up once, not once per read

    def _checked(self, get: Callable[[bytes], bytes | None], key: bytes) -> bytes | None:
        try:
            stored = get(key)
        except DatabaseError as error:
            raise Unavailable(f"metadata record {keys.describe(key)}: {error}") from error
        if stored is None or crc32(stored, crc32(key)) == _WHOLE:
            return stored and stored[:-_CHECK_BYTES]
        if self.damaged_as is None:
            raise self._damaged(key)
        return self.damaged_as

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values that ``get`` returns for each key, in a third of the time."""
        with self._snapshot.cursor() as cursor:
            found = cursor.getmulti(keys)
        if len(found) == len(keys) and all(
            [crc32(stored, crc32(key)) == _WHOLE for key, stored in found]
        ):
            return [stored[:-_CHECK_BYTES] for _, stored in found]
        return [self.get(key) for key in keys]

    def _damaged(self, key: bytes) -> DamagedRecord:
        what = f"metadata record {keys.describe(key)} is damaged: its check value is wrong"
        if key not in self._named:
            self._named.add(key)
            log.error("%s: %s; aifs fsck tells what it belongs to", self._path, what)
        return DamagedRecord(key, what)

    def reopen(self) -> None:
        """Begin anew from the disk, which is whole. Raises DatabaseError; OSError if the file
        cannot be opened, found out first because LMDB opens a file only once a process: then reads
        go on."""
        files.close_file(files.open_file(self._path))
        self._close()
        self._open(create=False)  # a directory that has been taken away is not made anew

    def applied(self) -> int | None:
        """Sequence number of the last transaction that is in LMDB; None in a new database."""
        stored = self._snapshot.get(_APPLIED, db=self._own)
        if stored is None:
            return None
        if crc32(stored, crc32(_APPLIED)) != _WHOLE:
            raise BrokenDatabase(f"{self._path}: the number of its last transaction is damaged")
        return _SEQ.unpack_from(stored)[0]

    def run(self, start: bytes, end: bytes) -> Run:
        with self._snapshot.cursor() as cursor:
            if cursor.set_range(start):
                for key, stored in cursor.iternext():
                    if key >= end:
                        return
                    if crc32(stored, crc32(key)) == _WHOLE:
                        yield key, stored[:-_CHECK_BYTES]
                    elif self.damaged_as is None:
                        yield key, self._damaged(key)
                    else:
                        yield key, self.damaged_as

    def renew(self) -> None:
        """See what has been committed."""
        self._snapshot.abort()
        self._begin()

    def grow(self) -> None:
        """Twice the room. No write transaction and no range may be open, here and in ``trim``."""
        self._map_bytes *= 2
        self.remap()

    def trim(self) -> None:
        """``renew``, and drop mapped pages from our resident memory if they are many."""
        resident = int(os.pread(self._statm.fileno(), 256, 0).split()[2]) * _PAGE_BYTES
        if resident > RESIDENT_BYTES:
            self.remap()
        else:
            self.renew()

    def remap(self) -> None:
        """Map the file anew, which drops its pages from our memory. No range may be open."""
        self._snapshot.abort()
        self._env.set_mapsize(self._map_bytes)
        self._begin()

    # One write transaction at a time: ``begin``, then ``fill`` as often as needed, then ``commit``
    # or ``roll_back``. Each but the last may raise MapFull, after which ``roll_back`` and ``grow``
    # make room, or another DatabaseError.

    def begin(self) -> None:
        self.trim()
        self._writer = self._env.begin(write=True, db=self._records)

    def fill(self, changes: list[tuple[bytes, bytes | None]]) -> None:
        """Make changes, which nobody sees yet; a value of None deletes."""
        assert self._writer is not None
        with self._writer.cursor() as cursor:
            cursor.putmulti(
                [(key, with_check_value(key, value)) for key, value in changes if value is not None]
            )
        for key, value in changes:
            if value is None:
                self._writer.delete(key)

    def commit(self, applied: int | None) -> None:
        """Bring changes, with the number ``applied``, to stable storage. Blocks, in any thread."""
        assert self._writer is not None
        if applied is not None:
            value = with_check_value(_APPLIED, _SEQ.pack(applied))
            self._writer.put(_APPLIED, value, db=self._own)
        faults.reach(BEFORE_COMMIT)
        self._writer.commit()
        self._writer = None
        faults.reach(AFTER_LMDB)

    def roll_back(self) -> None:
        """Forget what has not been committed, if anything has not."""
        if self._writer is not None:
            self._writer.abort()
            self._writer = None

    def close(self, orderly: bool) -> None:
        """``orderly``: so it has not been a page that ended the process."""
        if self._check is not None:
            self._stop_checking()
            if orderly:
                files.unlink(self._unchecked)
        self._close()

    def _close(self) -> None:
        self.roll_back()
        self._snapshot.abort()
        self._env.close()
        self._statm.close()
