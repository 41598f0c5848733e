"""The check of the records of containers: chunk lists against files, and against the table of containers."""

from collections.abc import Callable, Collection
from functools import partial

from aifs.check import repair
from aifs.check.findings import RECORDS, RECOVERY, Fix, Subject
from aifs.core.errors import FsError
from aifs.layout.interleaved import HEADER_BYTES, Interleaved, Location
from aifs.meta import chunks, keys, namespace
from aifs.meta.chunks import CHUNKS_PER_RECORD, Container
from aifs.meta.degraded import find_degraded, put_degraded
from aifs.meta.kv import ReadTransaction
from aifs.meta.records import Inode

Report = Callable[[str, Subject, str, Fix | None, int], None]
"""Kind, subject, detail, what mends it, and when."""


class ContainerCheck:
    """Handlers are called for all interleaved files, then all ``t``, ``a`` and ``l`` records; then ``conclude``.

    Memory: a few numbers for each container.
    """

    def __init__(self, servers: Collection[int], report: Report, in_use: Callable[[int], None]) -> None:
        """``in_use``: told of all ids."""
        self._servers = servers
        self._report = report
        self._in_use = in_use
        self._table: dict[int, Container] = {}
        self._live: dict[int, int] = {}
        self._undecoded: set[int] = set()
        self._complete = True
        """All chunk lists could be read."""

    def container(self, tx: ReadTransaction, key: bytes, value: bytes) -> None:
        number = keys.number(key)
        where = f"container {number}"
        self._in_use(number)
        try:
            record = chunks.decode_container(value)
        except FsError as error:
            self._undecoded.add(number)
            self._report("unreadable-record", where, str(error), None, RECORDS)
            return
        self._table[number] = record
        self._judge_servers(tx, number, record)
        garbage = keys.garbage(number)
        if tx.get(garbage) is not None:
            fix = partial(repair.delete, key=garbage)
            self._report("garbage-in-use", where, "the container would be deleted", fix, RECOVERY)

    def _judge_servers(self, tx: ReadTransaction, number: int, record: Container) -> None:
        layout = record.layout
        unknown = [column for column, server in enumerate(layout.servers) if server not in self._servers]
        try:
            known = find_degraded(tx, number)
        except FsError:
            known = 0  # named where the records of degraded objects are looked at
        mask = sum(1 << column for column in unknown) & ~known
        if mask:
            numbers = ", ".join(str(layout.servers[column]) for column in unknown)
            fix = partial(put_degraded, oid=number, ino=0, mask=mask) if layout.survives(mask | known) else None
            self._report("unknown-server", f"container {number}", f"it lies on data server {numbers}", fix, RECORDS)

    def open_mark(self, tx: ReadTransaction, key: bytes, value: bytes) -> None:
        number = keys.number(key)
        if number not in self._table and number not in self._undecoded:
            fix = partial(repair.delete, key=key)
            detail = "mark of a container that does not exist"
            self._report("stray-record", f"container {number}", detail, fix, RECOVERY)

    def chunk_list(self, tx: ReadTransaction, key: bytes, value: bytes, ino: int | None, certain: bool) -> None:
        """``ino``: the inode with this object id, if there is one; ``certain``: none of them is unreadable."""
        oid, first = keys.chunk_list_parts(key)
        self._in_use(oid)
        inode = None if ino is None else _find(tx, ino)
        used = inode is not None and isinstance(inode.layout, Interleaved) and inode.oid == oid
        if not used and certain:
            fix = partial(repair.delete, key=key)
            self._report("stray-record", f"chunk list {oid}", "no file has it", fix, RECORDS)
            return
        try:
            places = chunks.decode_chunks(value)
        except FsError as error:
            self._complete = False
            subject = inode.ino if used else f"chunk list {oid}"
            detail = f"chunk list {oid} from chunk {first} on: {error}"
            self._report("unreadable-record", subject, detail, None, RECORDS)
            return
        for place in places:
            if place is not None:
                self._live[place.container] = self._live.get(place.container, 0) + HEADER_BYTES + place.stored
        if used:
            self._judge(inode, first, places)

    def _judge(self, inode: Inode, first: int, places: chunks.Chunks) -> None:
        if len(places) != _expected(inode, first):
            self._lost(inode, first, f"the list has {len(places)} of {_expected(inode, first)} chunks")
            return
        for index, place in enumerate(places, first):
            wrong = "" if place is None else self._what_is_wrong(place, index, inode)
            if wrong:
                self._lost(inode, first, wrong)
                return

    def _what_is_wrong(self, place: Location, index: int, inode: Inode) -> str:
        record = self._table.get(place.container)
        if place.container in self._undecoded:
            return ""
        if record is None:
            return f"chunk {index} lies in container {place.container}, which there is not"
        if place.offset + HEADER_BYTES + place.stored > record.length:
            return f"chunk {index} ends behind the {record.length} bytes of container {place.container}"
        if place.raw != inode.layout.length(index, inode.size):
            return f"chunk {index} has {place.raw} bytes, not the {inode.layout.length(index, inode.size)} of the file"
        return ""

    def file(self, tx: ReadTransaction, inode: Inode) -> None:
        """An interleaved file."""
        for first in range(0, inode.layout.count(inode.size), CHUNKS_PER_RECORD):
            if tx.get(keys.chunk_list(inode.oid, first)) is None:
                self._lost(inode, first, "the list has no record for them")

    def _lost(self, inode: Inode, first: int, why: str) -> None:
        last = first + max(_expected(inode, first), 1) - 1
        self._report("lost-chunk", inode.ino, f"inode {inode.ino}: chunks {first} to {last}: {why}", None, RECORDS)

    def may_hold_chunks(self, number: int) -> bool:
        """Whether some file may lie in this container, whatever the table says. All handlers have been called."""
        return number in self._live or number in self._undecoded or not self._complete

    def conclude(self, tx: ReadTransaction) -> None:
        """Compare what lists name with what the table counts."""
        for number, record in self._table.items():
            counted = self._live.get(number, 0)
            is_open = tx.get(keys.open_container(number)) is not None
            if counted != record.live or (not counted and not is_open):
                # Relative: recovery, which comes first, takes from both. Too small a count would cost bytes.
                adjust = partial(chunks.adjust_live, container=number, change=counted - record.live)
                fix = adjust if self._complete or counted > record.live else None
                detail = f"counts {record.live} bytes in use, chunk lists name {counted}"
                self._report("wrong-live-bytes", f"container {number}", detail, fix, RECORDS)


def _find(tx: ReadTransaction, ino: int) -> Inode | None:
    try:
        return namespace.find_inode(tx, ino)
    except FsError:
        return None


def _expected(inode: Inode, first: int) -> int:
    """How many chunks the record from ``first`` on must have."""
    return max(0, min(CHUNKS_PER_RECORD, inode.layout.count(inode.size) - first))
