"""The object set of one striped file: reads and writes of ranges, exact lengths, durability.

Without protection a failing column is an error; with it, bytes are written when enough columns have
them, and read when enough tell them. A read goes through up to five stages of one signature
(``cached_reads.Stage``).

Writes to memory filesystems run on the trio thread, cheaper than a hand-off to a worker; all other
calls in workers, for all columns at once. So do cuts and removals even in memory, because freeing a
large file takes long.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from aifs.core.errors import FsError
from aifs.data.checks import HASHED
from aifs.data.objects.cached_reads import (
    CachedReads,
    Fetching,
    LocalReads,
    Stage,
    object_name,
    runs_of,
)
from aifs.data.objects.checked_reads import CheckedReads, LoadDigests
from aifs.data.objects.coding import encode_rows
from aifs.data.objects.columns import Columns, Known, columns_of
from aifs.data.objects.recovery import Recovery
from aifs.data.objects.together import Sharing, TogetherReads
from aifs.data.reading.read_cache import BLOCK, BLOCK_MAX
from aifs.data.server import DataServer
from aifs.data.servers import Servers
from aifs.data.workers import Call, outcomes
from aifs.layout.placement import LOST
from aifs.layout.striped import Striped

Ranges = Sequence[tuple[int, int]]
"""Start and end of each."""

OnDamage = Callable[[int, int, int], None]
"""Called with oid, ino and a column whose object is missing, short or wrong. Does not block."""

Work = tuple[int, Callable[..., Any], tuple]
"""A column, and what to call with which arguments in a worker of its server."""


class Bytes(Protocol):
    """Reads a file's bytes on the capacity tier, in each layout."""

    async def read(self, offset: int, length: int, size: int, strict: bool = True) -> memoryview:
        """Exactly ``length`` bytes of a file that has ``size``; bytes in no object are zeros.

        ``strict``: the file is settled: no bytes may be missing, and bytes from servers are cached
        and read ahead. Raises Unavailable, naming server and object. The memory is reused once no
        view is left. Cancellable.
        """

    async def read_into(self, offset: int, buffer: memoryview, size: int) -> None:
        """As a strict ``read``, but into ``buffer``, and past the caches of striped files."""

    async def data_range(self, offset: int, size: int, strict: bool = True) -> tuple[int, int]:
        """Start and end of the first part from ``offset`` on that may be no hole; both ``size`` if
        none. ``strict``: see ``read``. Raises Unavailable."""

    async def backing(self, size: int) -> int | None:
        """The descriptor, not the caller's, of a local file with all ``size`` bytes, if there is
        one."""

    def blocks(self) -> int | None:
        """Blocks of 512 bytes, once and without parity, as du(1) shows unprotected files; None if
        not known. Does not block."""

    async def sync(self, spare: int = 0, all_objects: bool = False) -> int:
        """All that has changed is durable on return; see ObjectSet."""

    def close_idle(self) -> int:
        """Close descriptors until needed again, unless in use; how many. Does not block."""

    def close(self) -> None:
        """Close descriptors once unused. Nothing is synced. Does not block."""


def _ignore(oid: int, ino: int, column: int) -> None:
    pass


class Reading(NamedTuple):
    """How an object set is read."""

    unread: int = 0
    """Mask of columns not to read."""
    on_damage: OnDamage = _ignore
    """Called once for each missing, short or wrong protected column."""
    digests: LoadDigests | None = None
    """Reads past the caches are compared with these checksums."""
    verify: bool = True
    """With ``digests``: so are all other reads."""
    shared: Sharing | None = None
    """Other hosts may read the file."""
    near: bool = False
    """Reads through caches are kept in Blocks."""
    fetching: Fetching = Fetching()


_OF_BUCKETS = Fetching(BLOCK_MAX, whole_from=BLOCK)
"""A request there costs more than bytes do."""


class ObjectSet:
    """All use of one file's objects by one user goes through one of these at a time. See Bytes.

    ``read`` and ``sync`` may overlap with everything, ``write`` with writes, ``settle`` and
    ``trim`` with neither ``write`` nor each other. Calls in worker threads are not cancellable,
    except ``read``. A protected set is written once, into a new oid.
    """

    def __init__(
        self,
        servers: Servers,
        layout: Striped,
        ino: int,
        oid: int,
        *,
        new: bool = False,
        background: str = "",
        reading: Reading = Reading(),
    ) -> None:
        """Does no I/O. ``new``: no object of this oid was ever made, which spares asking.
        ``background``: an I/O priority (core.files), for all calls, in workers."""
        unread, on_damage, digests, verify, shared, near, fetching = reading
        if ino and not layout.is_protected and not servers.append(layout.servers):
            fetching = _OF_BUCKETS
        self._servers = servers
        self._layout = layout
        self._key = (ino, oid)
        """(inode, oid)."""
        self._on_damage = on_damage
        """See Reading."""
        self._columns = columns = Columns(
            servers, layout, ino, oid, new=new, background=background, on_short=self._short
        )
        self._cached = CachedReads(servers, columns, fetching)
        top: Stage = self._cached
        self._recovery = None
        """How a protected set is read; None: it is not protected."""
        if layout.is_protected:
            top = self._recovery = Recovery(servers, columns, self._cached, unread)
        past = top
        self._checked = None
        """The stage that compares checksums, or None."""
        load = digests or (shared and shared.load)
        if load is not None:
            checked = CheckedReads(servers, columns, top, load, on_damage, unread)
            if digests is not None:
                past = self._checked = checked
                top = checked if verify else top
            if shared is not None:
                top = TogetherReads(servers, columns, top, checked, shared.join)
        self._local = None
        """The stage that keeps blocks near; None: none are."""
        if near and servers.blocks.serves(layout):
            cached = self._cached if top is self._cached else None
            top = self._local = LocalReads(servers, oid, top, cached)
        self._top = top
        """The stage by which the file is read."""
        self._verify = verify and digests is not None
        """Whether what is read through the caches is compared with checksums, too."""
        # As the stages have them: each read would pay for a function in between.
        self.read, self.read_now, self.read_into = top.read, top.read_now, past.read_past
        self._known = [Known(0 if new else None) for _ in layout.servers]
        """By column, what is known of its object."""
        self._inherited = not new  # objects may hold what an earlier user wrote and did not sync
        self._failed = 0
        """Mask of columns that could not be written."""
        self._error: FsError | None = None
        """The error of the first of them; None: none has failed."""

    @property
    def is_protected(self) -> bool:
        """Whether bytes survive the loss of a column."""
        return self._layout.is_protected

    @property
    def row(self) -> int:
        """The size whose multiples ``write`` takes."""
        return self._layout.row if self._layout.parity else 1

    @property
    def unread(self) -> int:
        """The mask of unwritable columns of a protected set, not to be read."""
        return self._failed

    @property
    def lost(self) -> str:
        """Why synced bytes are not durable; '' if none are known lost, and for protected sets."""
        return "" if self.is_protected else self._columns.lost

    # --- reading ---

    @property
    def is_kept_near(self) -> bool:
        """Whether blocks of it are kept nearer than the servers (Blocks), or are going to be."""
        return self._local is not None and self._servers.blocks.takes(self._key[1])

    async def fill(self, offset: int, buffer: memoryview, size: int) -> None:
        """A strict ``read``, into the caller's memory, not compared with checksums."""
        if self._local is not None or self._recovery is not None:
            buffer[:] = await self._top.read(offset, len(buffer), size)
            return
        data = await self._cached.read(offset, len(buffer), size, into=buffer)
        if data is not buffer:
            buffer[:] = data

    async def open(self) -> bool:
        """Open an unprotected set's descriptors, to read page caches; whether there were none. Near
        blocks come first. Raises Unavailable."""
        if self._recovery is not None or self._local is not None:
            return False
        return await self._cached.open()

    def fixed(self, length: int) -> None:
        """The first bytes of a set that grows never change. Does not block."""
        if self._local is not None:
            self._local.fixed = length

    async def is_right(self, offset: int, part: memoryview) -> bool:
        """Whether a MiB of the file, or its last bytes, match any checksum."""
        return self._checked is None or await self._checked.is_right(offset, part)

    async def backing(self, size: int) -> int | None:
        """See Bytes: the first object, if unprotected, on a local server, and without checks."""
        storage = self._columns.server(0).storage
        if self._recovery is not None or self._verify:
            return None
        if not (storage.is_local and storage.descriptor):
            return None
        fd = (await self._run([(0, self._columns.descriptor_now, (0,))], inline=False))[0]
        server = self._columns.server(0)
        is_all = fd is not None and server.stat(self._key, fd).length == size
        return fd if is_all else None

    async def data_range(self, offset: int, size: int, strict: bool = True) -> tuple[int, int]:
        """See Bytes. What has checksums may be no hole, even where it seems to be one."""
        if strict and self._checked is not None and offset < size:
            if await self._checked.covers(offset):
                return offset, size
        unread = 0 if self._recovery is None else self._recovery.unread
        return await self._columns.data_range(offset, size, strict, unread)

    async def local_files(self, size: int) -> list[tuple[DataServer, int]]:
        """Server and descriptor, not the caller's (-1: no object), of each data column of a settled
        set. None at all if readers must check bytes, one is missing, or a server is not at hand.
        Valid until something is awaited. Raises Unavailable."""
        columns, layout = self._columns, self._layout
        is_partial = self._recovery is not None and self._recovery.unread
        if self._verify or is_partial:
            return []
        needed = [c for c in range(layout.width) if layout.object_length(c, size)]
        if not all(columns.server(c).is_at_hand for c in needed):
            return []
        if closed := [c for c in needed if not columns.is_open(c)]:
            calls = [(c, columns.descriptor_now, (c,)) for c in closed]
            await columns.attempt(calls, abandonable=True, inline=True)  # errors: not open
        if not all(map(columns.is_open, needed)):
            return []
        found = [columns.opened(c) for c in range(layout.width)]
        return [(columns.server(c), -1 if fd is None else fd) for c, fd in enumerate(found)]

    def _short(self, column: int) -> None:
        recovery = self._recovery
        if recovery is not None and not recovery.unread >> column & 1:
            recovery.unread |= 1 << column
            ino, oid = self._key
            self._on_damage(oid, ino, column)

    def forget(self) -> None:
        """The objects are about to change."""
        (self._checked or self._top).forget()

    # --- writing ---

    async def write(
        self, offset: int, data: bytes | memoryview, ranges: Ranges | None = None
    ) -> None:
        """Write all of ``data`` to the servers' page caches, making objects as needed. A coded file
        is written by whole ``row``s (the last may be the file's end).

        ``ranges``, if given, are all that are no holes. Failing columns of a protected set are left
        out from then on. Raises NoSpace, QuotaExceeded, Unavailable if too many fail: any part may
        have been written.
        """
        self.forget()
        memory = memoryview(data)
        if ranges is None and self._write_here(offset, memory):
            return
        spans = ((offset, offset + len(memory)),) if ranges is None else ranges
        calls = [
            (column, self._columns.write_now, (column, object_offset, parts))
            for start, end in spans
            for index, object_offset, parts in runs_of(
                self._layout, start, memory[start - offset : end - offset]
            )
            for column in self._layout.copies(index)
        ]
        if self._layout.parity:
            await self._write_coded(calls, self._parity_of(offset, memory, spans))
        else:
            await self._write(calls)

    def _write_here(self, offset: int, data: memoryview) -> bool:
        """Write at once if the data go into one object, and no worker is needed; whether that was
        so."""
        if self._layout.is_protected or len(data) > self._layout.unit:
            return False
        (column, at, parts), *others = runs_of(self._layout, offset, data)
        if others or not self._columns.needs_no_worker(column):
            return False
        known = self._known[column]
        try:
            self._columns.write_now(column, at, parts)
        except BaseException:
            known.length = None
            raise
        known.written(at, len(data))
        return True

    async def _write(self, calls: Sequence[Work], others: Sequence[Work] = ()) -> None:
        columns = {column for column, _, _ in calls}
        try:
            await self._run([*calls, *others])
        except BaseException:
            for column in columns:
                self._known[column].length = None
            raise
        for column, _, (_, offset, parts) in calls:
            self._known[column].written(offset, sum(map(len, parts)))
        for column in columns_of(self._failed):
            self._known[column].length = None

    async def _write_coded(
        self,
        calls: list[Work],
        spans: list[tuple[int, memoryview, list[memoryview]]],
    ) -> None:
        """Write data, and parity of ``spans``, encoded meanwhile by a worker."""
        width, count = self._layout.width, len(self._layout.servers)
        registered = [c for c in range(count) if self._servers.find(self._layout.servers[c])]
        encode = (self._layout, spans)
        while True:
            column = next(c for c in registered if not self._failed >> c & 1)
            await self._write(calls, [(column, encode_rows, encode)])
            if not self._failed >> column & 1:
                break
            calls = []  # nobody has encoded it, or nobody knows that
        await self._write(
            [
                (column, self._columns.write_now, (column, object_offset, [parity[number]]))
                for object_offset, _, parity in spans
                for number, column in enumerate(range(width, count))
            ]
        )

    def _parity_of(
        self, offset: int, memory: memoryview, ranges: Ranges
    ) -> list[tuple[int, memoryview, list[memoryview]]]:
        """Rows to encode: offset in parity objects, bytes, and memory for parity."""
        row, unit = self._layout.row, self._layout.unit
        spans: list[list[int]] = []
        for start, end in ranges:
            first, last = start // row * row, min(-(-end // row) * row, offset + len(memory))
            if spans and first <= spans[-1][1]:
                spans[-1][1] = max(last, spans[-1][1])
            else:
                spans.append([first, last])
        take = self._servers.buffers.take
        return [
            (
                first // row * unit,
                memory[first - offset : last - offset],
                [
                    take(self._layout.object_length(0, last - first))
                    for _ in range(self._layout.parity)
                ],
            )
            for first, last in spans
        ]

    async def punch(self, offset: int, length: int) -> None:
        """Zero the range and free its space, one call to each server with an object. Raises
        NotSupported by a filesystem, Unavailable: any part may be zeros then."""
        self.forget()
        for known in self._known:
            known.length = None
        length_at = self._layout.object_length
        await self._run(
            [
                (
                    column,
                    self._columns.punch_now,
                    (column, length_at(column, offset), length_at(column, offset + length)),
                )
                for column in range(self._layout.width)
            ],
            inline=False,
        )

    # --- lengths ---

    async def trim(self, size: int) -> None:
        """Cut objects to a file of ``size`` bytes. Raises Unavailable."""
        self.forget()
        calls = []
        for column, known in enumerate(self._known):
            length = self._layout.object_length(column, size)
            if known.length is None or known.length > length:
                calls.append((column, self._columns.trim_now, (column, length)))
        await self._learn(calls)

    async def settle(self, size: int) -> None:
        """Make, cut, extend or remove objects for a file of ``size`` bytes, except failing ones of
        a protected set. ``sync`` then covers all of them, also earlier users' work. Raises NoSpace,
        QuotaExceeded, Unavailable if too many fail."""
        self.forget()
        calls = []
        for column, known in enumerate(self._known):
            length = self._layout.object_length(column, size)
            if self._inherited or not known.exact or known.length != length:
                calls.append((column, self._columns.settle_now, (column, length)))
        await self._learn(calls)
        self._inherited = False

    async def _learn(self, calls: Sequence[Work]) -> None:
        """Run the calls, and note the objects' states."""
        for column, _, _ in calls:
            self._known[column].length = None
        for column, known in (await self._run(calls, inline=False)).items():
            self._known[column] = known

    def blocks(self) -> int | None:
        """See Bytes: exact after ``settle``, a good guess while written. None before the first
        ``trim`` or ``settle`` of objects that are not new."""
        if self._inherited and any(known.length is None for known in self._known):
            return None
        copies = map(self._layout.copies, range(self._layout.width))
        return sum(max(self._known[copy].blocks for copy in same) for same in copies)

    # --- durability ---

    async def sync(self, spare: int = 0, all_objects: bool = False) -> int:
        """Make every object that we changed durable, with length, name or absence; ``all_objects``:
        each one, even if another user did. Returns the mask of those that failed.

        Raises NoSpace, QuotaExceeded, Unavailable if not even ``spare`` more columns (less than the
        layout tolerates) than needed are durable. After a failed write-back, which the system
        forgets, it fails each time.
        """
        unsynced = self._columns.unsynced
        if all_objects:
            unsynced.mark(*range(len(self._layout.servers)))
        await self._run(
            [
                (column, self._columns.sync_now, (column, generation))
                for column, generation in unsynced.snapshot().items()
            ]
        )
        self._check(min(spare, self._layout.tolerates - 1))
        return self._failed

    # --- calls ---

    async def _run(self, calls: Iterable[Work], inline: bool = True) -> dict[int, Any]:
        """Run (column, function, args) where columns have not failed; results by column of those
        that do not fail now (of several, any). Raises if too many fail."""
        usable = [call for call in calls if not self._failed >> call[0] & 1]
        is_protected = self._layout.is_protected
        results = await self._columns.attempt(
            usable, inline=inline and not is_protected, waits=not is_protected
        )
        returned: dict[int, Any] = {}
        for (column, _, _), result in zip(usable, results, strict=True):
            if not isinstance(result, FsError):
                returned[column] = result
            elif is_protected:
                self._failed |= 1 << column
                self._error = self._error or result
            else:
                raise result
        self._check(0)
        return returned

    def _check(self, spare: int) -> None:
        if self._error is not None and self._layout.spare(self._failed) < spare:
            raise self._error

    # --- descriptors ---

    def in_use(self, change: int) -> None:
        """As long as the sum of changes is more than 0, descriptors are kept. Does not block."""
        self._columns.in_use(change)

    def close_idle(self) -> int:
        """See Bytes. What has been written through a descriptor is synced first."""
        return self._columns.close_idle()

    def close(self) -> None:
        """See Bytes."""
        self._columns.close()
        self._top.end()


class Followed:
    """Reads of a striped file for a copy, through the caches that programs use: each byte comes
    from its server once, checked."""

    def __init__(self, objects: ObjectSet) -> None:
        """``objects``: made as those of the others, with checksums; of nobody else."""
        self._objects = objects
        self.data_range = objects.data_range
        self.close = objects.close

    async def read_into(self, offset: int, buffer: memoryview, size: int) -> None:
        """As of ObjectSet, but for the caches."""
        for start in range(0, len(buffer), HASHED):
            part = buffer[start : start + HASHED]
            part[:] = await self._objects.read(offset + start, len(part), size)
            if not await self._objects.is_right(offset + start, part):
                await self._objects.read_into(offset + start, part, size)


async def delete_objects(servers: Servers, layout: Striped, ino: int, oid: int) -> None:
    """Delete objects durably; missing ones are no error. Raises NoSpace, Unavailable."""
    failed = await delete_batch(servers, {oid: (ino, layout)})
    if failed:
        raise failed[oid]


async def delete_batch(
    servers: Servers, doomed: Mapping[int, tuple[int, Striped]]
) -> dict[int, FsError]:
    """Delete objects of many files, oid to (ino, layout), durably, by one request to each server.
    Returns errors by oid of those perhaps left."""
    failed: dict[int, FsError] = {}
    keys: dict[int, list[tuple[int, int]]] = {}
    for oid, (ino, layout) in doomed.items():
        for number in layout.servers:
            keys.setdefault(number, []).append((ino, oid))
    calls: list[Call] = []
    for number, chosen in keys.items():
        server = servers.find(number)
        if server is None or server.standing == LOST:
            continue  # what may lie there is nobody's concern any more
        for key in chosen:
            servers.cache.invalidate(object_name(server, key))
            servers.blocks.end(key[1])
        calls.append((server.workers, server.remove_objects, (chosen,)))
    for (_, _, [chosen]), errors in zip(calls, await outcomes(calls) if calls else [], strict=True):
        if isinstance(errors, FsError):
            errors = dict.fromkeys((oid for _, oid in chosen), errors)
        elif isinstance(errors, BaseException):
            raise errors
        failed.update(errors)
    return failed
