"""The check of containers' records: chunk lists against files, the table, and shared chunks."""

from array import array
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from aifs.check import repair
from aifs.check.findings import RECORDS, RECOVERY
from aifs.check.records import Records
from aifs.core.errors import FsError
from aifs.layout.interleaved import HEADER_BYTES, Extent, Location
from aifs.meta import chunks, keys, namespace, shared
from aifs.meta.chunks import Container
from aifs.meta.kv import ReadTransaction
from aifs.meta.records import Inode

DIGEST_BYTES = 32

_NONE = -1


class ContainerRecords:
    """Handlers are called for all interleaved files, then all ``t``, ``a``, ``y``, ``h`` and ``l``
    records; then ``conclude``, which reads ``h`` again. Memory: a few numbers for each container,
    and all shared chunks' (``_Shared``)."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._table: dict[int, Container] = {}
        """By id, the containers whose records can be read."""
        self._live: dict[int, int] = {}
        """By id, the bytes that lists and shared chunks name there, with headers."""
        self._undecoded: set[int] = set()
        """Ids of containers whose records cannot be read."""
        self._loose: set[int] = set()
        """Oids of lists that are no file's and are about to be dropped."""
        self._shared = _Shared(records, self._misplaced)
        self._walk = _Walk()
        self._complete = True
        """All chunk lists could be read, and are complete."""

    async def container(self, key: bytes, value: bytes) -> None:
        number = keys.number(key)
        where = f"container {number}"
        self._records.in_use(number)
        try:
            record = chunks.decode_container(value)
        except FsError as error:
            self._undecoded.add(number)
            self._records.problem("unreadable-record", where, str(error))
            return
        self._table[number] = record
        garbage = keys.garbage(number)
        if await self._records.get(garbage) is not None:
            detail = "the container would be deleted"
            self._records.drop("garbage-in-use", where, detail, garbage, RECOVERY)

    def open_mark(self, key: bytes) -> None:
        number = keys.number(key)
        if number not in self._table and number not in self._undecoded:
            detail = "mark of a container that does not exist"
            self._records.drop("stray-record", f"container {number}", detail, key, RECOVERY)

    def loose_list(self, oid: int) -> None:
        """No file has this list; its rest counts until it is dropped."""
        self._loose.add(oid)

    async def chunk_list(self, key: bytes, value: bytes, ino: int | None, certain: bool) -> None:
        """``ino``: the inode with this object id, or None; ``certain``: all inodes are readable."""
        oid, first = keys.chunk_list_parts(key)
        self._records.in_use(oid)
        user = None if ino is None else await self._records.view(_find, ino)
        if user is not None and (user.chunks is None or user.oid != oid):
            user = None
        if user is None and certain and oid not in self._loose:
            self._records.drop("stray-record", f"chunk list {oid}", "no file has it", key)
            return
        try:
            start, extents = chunks.decode_list(value)
        except FsError as error:
            self._complete = False
            if user is not None:
                self._walk_of(user).is_broken = True
            subject = f"chunk list {oid}" if user is None else user.ino
            detail = f"chunk list {oid} from chunk {first} on: {error}"
            self._records.problem("unreadable-record", subject, detail)
            return
        wrong = self._count(extents, first)
        if user is not None:
            self._judge(user, first, start, extents, wrong)

    def shared(self, key: bytes, value: bytes) -> None:
        place = self._shared.record(key, value)
        if place is not None:
            self._count_live(place)

    def _count(self, extents: list[Extent], first: int) -> str:
        """Count the bytes that extents name; returns the first one's fault, of lost bytes."""
        found = ""
        for number, (length, place, is_shared) in enumerate(extents, first):
            if place is None:
                continue
            if is_shared:
                wrong = self._shared.name(place.digest, length)
            else:
                self._count_live(place)
                wrong = self._misplaced(place)
            if wrong and not found:
                found = f"extent {number} {wrong}"
        return found

    def _count_live(self, place: Location) -> None:
        self._live[place.container] = (
            self._live.get(place.container, 0) + HEADER_BYTES + place.stored
        )

    def _misplaced(self, place: Location) -> str:
        record = self._table.get(place.container)
        if place.container in self._undecoded:
            return ""
        if record is None:
            return f"lies in container {place.container}, which there is not"
        if place.offset + HEADER_BYTES + place.stored > record.length:
            return f"ends behind the {record.length} bytes of container {place.container}"
        return ""

    def _judge(
        self, inode: Inode, first: int, start: int, extents: list[Extent], wrong: str
    ) -> None:
        """Lists come record by record: each goes on at the last one's end."""
        walk = self._walk_of(inode)
        if (first, start) != (walk.number, walk.offset) and not walk.is_broken:
            wrong = self._lacking(f"nothing in the list covers bytes {walk.offset} to {start}")
        walk.number = first + len(extents)
        walk.offset = start + sum(extent.length for extent in extents)
        walk.is_broken = False
        if wrong:
            self._lost(inode, first, wrong)

    def _walk_of(self, inode: Inode) -> "_Walk":
        if self._walk.inode is None or self._walk.inode.oid != inode.oid:
            self._end_walk()
            self._walk = _Walk(inode)
        return self._walk

    def _end_walk(self) -> None:
        inode, offset = self._walk.inode, self._walk.offset
        if inode is not None and offset != inode.size and not self._walk.is_broken:
            wrong = self._lacking(
                f"the list is of {offset} bytes, not of the {inode.size} of the file"
            )
            self._lost(inode, self._walk.number, wrong)
        self._walk = _Walk()

    async def file(self, inode: Inode) -> None:
        """An interleaved file."""
        if inode.size and await self._records.get(keys.chunk_list(inode.oid, 0)) is None:
            self._lost(inode, 0, self._lacking("the list has no records"))

    def _lacking(self, why: str) -> str:
        self._complete = False
        return why

    def _lost(self, inode: Inode, first: int, why: str) -> None:
        detail = f"inode {inode.ino}: extents from {first} on: {why}"
        self._records.problem("lost-chunk", inode.ino, detail)

    def may_hold_chunks(self, number: int) -> bool:
        """Whether a file may lie in this container, whatever the table says. All handlers were
        called."""
        return number in self._live or number in self._undecoded or not self._complete

    async def conclude(self) -> None:
        """Compare the live bytes of the lists with those of the table."""
        self._end_walk()
        complete = self._complete and not self._shared.hides_places
        for number, record in self._table.items():
            counted = self._live.get(number, 0)
            is_open = await self._records.get(keys.open_container(number)) is not None
            if counted != record.live or (not counted and not is_open):
                # Relative: recovery takes from both. Too small a count would cost bytes, when it
                # deletes files.
                adjust = partial(chunks.adjust_live, container=number, change=counted - record.live)
                fix = adjust if complete or counted > record.live else None
                stage = RECOVERY if counted > record.live else RECORDS
                detail = f"counts {record.live} bytes in use, chunk lists name {counted}"
                self._records.problem("wrong-live-bytes", f"container {number}", detail, fix, stage)
        references = partial(self._shared.references, complete=self._complete)
        await self._records.for_each(*keys.all_of(b"h"), references)


@dataclass(slots=True)
class _Walk:
    """How far a chunk list's records have been met. ``is_broken``: the last is unreadable, as
    reported."""

    inode: Inode | None = None
    number: int = 0
    offset: int = 0
    is_broken: bool = False


def _find(tx: ReadTransaction, ino: int) -> Inode | None:
    try:
        return namespace.find_inode(tx, ino)
    except FsError:
        return None


class _Shared:
    """The check of shared chunks: records against containers, references against extents. Called in
    order: ``record`` for all ``h`` records, ``name`` for all naming extents, ``references`` for all
    records.

    Memory: 52 bytes a shared chunk (digest, its beginning to find it, count, length): ten million,
    40 TB in chunks of 4 MiB, take 520 MB.
    """

    def __init__(self, records: Records, what_is_wrong: Callable[[Location], str]) -> None:
        """``what_is_wrong``: says why a chunk cannot lie in a place, or nothing."""
        self._records = records
        self._what_is_wrong = what_is_wrong
        # Rows in order of digests, as the records are.
        self._beginnings = array("Q")
        self._digests = bytearray()
        """By row, the digest, DIGEST_BYTES each."""
        self._lengths = array("I")
        """By row, the bytes of the chunk; 0 if its record cannot be read."""
        self._counts = array("Q")
        """By row, how many extents name it."""
        self._bad: dict[bytes, str] = {}  # digests of chunks that cannot be read, and why
        self._unreadable: dict[bytes, str] = {}
        """By digest, the faults of records that cannot be read."""
        self.hides_places = False
        """Whether extents name chunks in unknown places, by missing or wrong records."""

    def record(self, key: bytes, value: bytes) -> Location | None:
        """Returns the chunk's place, if it can be read."""
        digest = keys.shared_digest(key)
        self._beginnings.append(_beginning(digest))
        self._digests += digest
        self._lengths.append(0)
        self._counts.append(0)
        try:
            place = shared.decode_shared(digest, value).place
        except FsError as error:
            self._unreadable[digest] = str(error)
            self._bad[digest] = f"the record of {describe(digest)} is damaged"
            return None
        self._lengths[-1] = place.raw
        wrong = self._what_is_wrong(place)
        if wrong:
            self._bad[digest] = f"{describe(digest)} {wrong}"
        return place

    def name(self, digest: bytes, length: int) -> str:
        """An extent of ``length`` bytes names this chunk; returns why its bytes are missing, or
        ''."""
        row = self._find(digest)
        if row == _NONE:
            self.hides_places = True
            return f"{describe(digest)} is not in the store"
        self._counts[row] += 1
        if digest in self._bad:
            self.hides_places = True
            return self._bad[digest]
        if self._lengths[row] != length:
            return (
                f"{describe(digest)} has {self._lengths[row]} bytes, not the {length} of the file"
            )
        return ""

    def references(self, key: bytes, value: bytes, complete: bool) -> None:
        """``complete``: all lists were readable. Otherwise a high count may be right."""
        digest = keys.shared_digest(key)
        row = self._find(digest)
        if row == _NONE:
            return
        counted = self._counts[row]
        if digest in self._unreadable:
            forget = partial(repair.delete, key=key) if complete and not counted else None
            reason = self._unreadable[digest]
            self._records.problem("unreadable-record", describe(digest), reason, forget)
            return
        recorded = shared.decode_shared(digest, value).references
        if counted == recorded or (counted < recorded and not complete):
            return
        # Relative, as recovery takes references away. What counts too few it would delete too
        # early.
        fix = partial(repair.shift_references, digest=digest, change=counted - recorded)
        detail = f"counts {recorded} references, extents of files name it {counted} times"
        stage = RECOVERY if counted > recorded else RECORDS
        self._records.problem("wrong-references", describe(digest), detail, fix, stage)

    def _find(self, digest: bytes) -> int:
        beginning = _beginning(digest)
        row = bisect_left(self._beginnings, beginning)
        while row < len(self._beginnings) and self._beginnings[row] == beginning:
            if self._digests[DIGEST_BYTES * row : DIGEST_BYTES * (row + 1)] == digest:
                return row
            row += 1
        return _NONE


def describe(digest: bytes) -> str:
    """A shared chunk as text."""
    return f"shared chunk {digest.hex()[:16]}"


def _beginning(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big")
