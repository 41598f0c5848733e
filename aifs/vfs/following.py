"""Changes of other hosts, made known here (docs/design/replicated.md): to core at once, and to the
kernel by a task. With one host none of this runs."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

import trio

from aifs.core.errors import FsError
from aifs.core.log import logger
from aifs.files.file_io import FileIO
from aifs.files.open_table import Hold
from aifs.files.services import Services
from aifs.meta import keys, namespace
from aifs.meta.chunks import decode_container
from aifs.meta.dooming import decode_doomed
from aifs.meta.groups import decode_group, decode_member, decode_part
from aifs.meta.records import Inode, decode_dentry, decode_inode
from aifs.meta.trash import UNKNOWN, decode_entry, decode_rule
from aifs.saves.course import Course
from aifs.saves.retention import Retention
from aifs.upkeep import scrub_state
from aifs.upkeep.doomed import DoomedTrees
from aifs.upkeep.scrub_state import Findings
from aifs.vfs.names import Names
from aifs.vfs.quotas import QuotaTrees

_log = logger(__name__)

AT_ONCE = 64
"""Change sets that the kernel is told of together."""


@dataclass(slots=True)
class _Unshown:
    """What the kernel has to forget."""

    seq: int = 0
    """Of the last change set."""
    names: dict[tuple[int, bytes], int] = field(default_factory=dict)
    """Names, as (directory, name), and the inodes that they lead to now; 0: to none."""
    inodes: list[int] = field(default_factory=list)
    """Numbers of inodes whose attributes have changed."""
    listings: list[int] = field(default_factory=list)
    """Numbers of directories of which it may keep a listing that is old."""
    files: list[int] = field(default_factory=list)
    """Those inodes among them of which it may keep pages that are old."""
    orphans: list[int] = field(default_factory=list)
    """Those that have no name any more, and are open here: they are held before this is shown."""


class Following:
    """Hears of each change set of another host from the engine, when views see it.

    Core takes it over before any other task runs (``_take``): so core is never older than the
    record. Afterwards ``run`` tells the kernel, never within a request or under a lock; when that
    has forgotten the old state, the change set is *shown*, and the engine tells its host.
    """

    def __init__(
        self,
        services: Services,
        io: FileIO,
        findings: Findings,
        doomed: DoomedTrees,
        retention: Retention,
        course: Course,
        names: Names,
        quotas: QuotaTrees,
    ) -> None:
        self._engine = services.engine
        self._table = services.table
        self._io = io
        self._blocks = services.servers.blocks
        self._cache = services.servers.cache
        self._containers = io.containers
        self._collector = services.collector
        self._findings = findings
        self._doomed = doomed
        self._rules = doomed.rules
        self._retention = retention
        self._course = course
        self._heirlooms = services.heirlooms
        self._names = names
        self._kernel = services.kernel
        self._looked_up = services.looked_up
        self._takers: dict[int, Callable[[bytes, bytes | None, _Unshown], None]] = {
            ord("i"): self._take_inode,
            ord("d"): self._take_name,
            ord("w"): self._take_mark,
            ord("z"): self._take_doomed,
            ord("R"): self._take_rule,
            ord("T"): self._take_trashed,
            ord("r"): self._take_policy,
            ord("n"): self._take_group,
            ord("t"): self._take_container,
            ord("q"): self._take_degraded,
            ord("k"): self._take_checksums,
            ord("s"): self._take_server,
            ord("j"): self._take_job,
            ord("Q"): lambda *_: quotas.follow(),
            ord("P"): lambda key, *_: quotas.follow_count(key),
        }
        """By the letter of keys (meta/keys.py). Other records are not kept in core, or only by the
        host that writes them."""
        self._unshown: deque[_Unshown] = deque()
        """The kernel has not been told of these yet, the oldest first."""
        self._changed = trio.Event()
        """There are some."""
        self._stale: dict[int, int] = {}
        """Files of which the kernel may keep pages that are old, with the ``seq`` of the change."""
        self._grown: dict[int, Hold] = {}
        """Those that are larger now: until then the kernel is told the size from before."""
        self._servers: set[int] = set()
        """Servers whose record has changed."""
        self._moved = trio.Event()
        """There are some of either, or ``io.table.overtaken`` has some."""
        services.engine.follow(self._take)

    async def run(self) -> None:
        """Until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._follow_bytes, nursery)
            while True:
                while self._unshown:
                    await self._show()
                await self._changed.wait()
                self._changed = trio.Event()

    async def _show(self) -> None:
        some = list(islice(self._unshown, AT_ONCE))
        known = await self._kernel.forget(
            {name: ino for each in some for name, ino in each.names.items()},
            [ino for each in some for ino in each.inodes],
            [ino for each in some for ino in each.listings],
        )
        # Pages are not waited for: a reader of one may wait, by way of its home, for what is shown
        # here. Who opens the file meanwhile gets none of them (``OpenTable.stale``).
        files = {ino: each.seq for each in some for ino in each.files}
        self._dropped({ino: seq for ino, seq in files.items() if ino not in known})
        self._stale |= {ino: seq for ino, seq in files.items() if ino in known}
        if self._stale:
            self._moved.set()
        orphans = [ino for each in some for ino in each.orphans]
        if orphans:
            try:
                await self._engine.transact(namespace.put_holds, orphans)
            except FsError as error:
                _log.warning("files that others have unlinked may go while open: %s", error)
        for each in some:  # only now: what fails is begun once more
            self._unshown.popleft()
            for name in each.names:
                self._looked_up.shown(name, each.seq)
        self._engine.note_shown(some[-1].seq)

    async def _follow_bytes(self, nursery: trio.Nursery) -> None:
        """Follow bytes in a task of its own: servers may hang, and gates be held for long."""
        while True:
            await self._moved.wait()
            self._moved = trio.Event()
            servers, self._servers = self._servers, set()
            due = [partial(self._table.follow, number) for number in servers]
            due += [partial(self._io.by_home.follow_bytes, ino) for ino in self._io.table.overtaken]
            for follow in due:
                try:
                    await follow()
                except FsError as error:  # such as of a file that has been erased meanwhile
                    _log.info("what another host has changed could not be looked up: %s", error)
            if self._stale:
                nursery.start_soon(self._drop_pages, self._stale)
                self._stale = {}

    async def _drop_pages(self, files: dict[int, int]) -> None:
        await self._kernel.drop_pages(list(files))
        self._dropped(files)

    def _dropped(self, files: dict[int, int]) -> None:
        """The kernel has dropped the pages of these files from before these changes."""
        for ino, seq in files.items():
            if self._io.table.stale.get(ino) == seq:  # else another change has come since
                del self._io.table.stale[ino]
                if ino in self._grown:
                    self._io.table.told.let_go(self._grown.pop(ino))

    # --- what a change set says ---

    def _take(self, writes: Mapping[bytes, bytes | None]) -> None:
        unshown = _Unshown(self._engine.seq)
        for key, record in writes.items():
            taker = self._takers.get(key[0])
            if taker is not None:
                try:
                    taker(key, record, unshown)
                except FsError as error:
                    # Who reads it is told; the kernel forgets what it knew all the same.
                    _log.warning("another host has made a record that cannot be read: %s", error)
        self._collector.follow(writes)
        self._unshown.append(unshown)
        self._changed.set()
        if self._servers or self._io.table.overtaken:
            self._moved.set()

    def _take_inode(self, key: bytes, record: bytes | None, unshown: _Unshown) -> None:
        ino = keys.number(key)
        unshown.inodes.append(ino)
        self._io.table.take_places(ino)
        self._heirlooms.changed(ino)
        if record is None:
            self._names.erased(ino)
            return
        inode = decode_inode(ino, record)
        inode.seq = unshown.seq
        if inode.is_file:
            self._hold_size(inode)
        is_open = self._io.inodes.follow(inode)
        if inode.nlink == 0:
            self._names.unlinked_elsewhere(inode, is_open)
            if is_open:
                unshown.orphans.append(ino)
        if inode.is_file:
            self._io.table.stale[ino] = unshown.seq
            unshown.files.append(ino)

    def _hold_size(self, inode: Inode) -> None:
        """Keep the size told of a file whose pages are going to be stale."""
        ino, table = inode.ino, self._io.table
        before = table.cached_size(ino)
        if ino in self._grown:
            table.told.lower(ino, inode.size)
        elif before is not None and before < inode.size:
            self._grown[ino] = table.told.hold(ino, before)

    def _take_name(self, key: bytes, record: bytes | None, unshown: _Unshown) -> None:
        parent, name = keys.dentry_parts(key)
        ino = unshown.names[parent, name] = 0 if record is None else decode_dentry(record).ino
        unshown.listings.append(parent)
        self._looked_up.changed((parent, name), ino, unshown.seq)
        if record is not None:
            self._retention.shown(parent)

    def _take_doomed(self, key: bytes, record: bytes | None, _: _Unshown) -> None:
        self._doomed.follow(keys.number(key), None if record is None else decode_doomed(record))

    def _take_rule(self, key: bytes, record: bytes | None, _: _Unshown) -> None:
        self._rules.follow(keys.number(key), None if record is None else decode_rule(record))

    def _take_trashed(self, key: bytes, record: bytes | None, _: _Unshown) -> None:
        if record is not None and (entry := decode_entry(key, record)).size == UNKNOWN:
            self._doomed.follow_kept(entry.ino)

    def _take_policy(self, key: bytes, record: bytes | None, _: _Unshown) -> None:
        if record is not None:
            self._retention.follow(keys.number(key))

    def _take_group(self, key: bytes, record: bytes | None, _: _Unshown) -> None:
        if keys.is_group(key):
            self._course.follow(keys.number(key), None if record is None else decode_group(record))
            return
        ino, number = keys.entry_numbers(key)
        host = keys.part_host(key)
        if host is not None:
            part = None if record is None else decode_part(record)
            self._course.follow_part(ino, host, part)
        else:
            member = None if record is None else decode_member(record)
            self._course.follow_member(ino, number, member)

    def _take_container(self, key: bytes, record: bytes | None, _: _Unshown) -> None:
        container = keys.number(key)
        layout = None if record is None else decode_container(record).layout
        self._containers.files.follow(container, layout)
        if record is None:
            self._blocks.end(container)

    def _take_degraded(self, key: bytes, record: bytes | None, _: _Unshown) -> None:
        oid = keys.number(key)
        # They may have been read when they were wrong.
        self._blocks.correct(oid)
        self._cache.invalidate_id(oid)
        self._containers.moved(oid)
        self._io.table.overtake_objects(oid)

    def _take_checksums(self, key: bytes, record: bytes | None, _: _Unshown) -> None:
        if record is None:  # its bytes are going to change, or nobody has them any more
            self._blocks.end(keys.entry_numbers(key)[0])

    def _take_mark(self, key: bytes, record: bytes | None, _: _Unshown) -> None:
        self._io.table.overtake(keys.number(key))

    def _take_server(self, key: bytes, record: bytes | None, _: _Unshown) -> None:
        self._servers.add(keys.number(key))

    def _take_job(self, key: bytes, record: bytes | None, _: _Unshown) -> None:
        if key == scrub_state.KEY and record is not None:
            self._findings.begin(scrub_state.decode(record))
