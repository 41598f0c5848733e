"""Handles of open files, and whether the kernel passes them through to burst copies or objects."""

import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping

import trio

from aifs.burst.copy import is_used
from aifs.core import files
from aifs.core.errors import BadHandle, Busy, FsError
from aifs.core.log import logger
from aifs.core.start_record import BLOCK
from aifs.data.objects.object_set import ObjectSet
from aifs.data.reading.blocks import Blocks
from aifs.data.server import name_of
from aifs.files.kept import KeptHandle
from aifs.files.kernel import Kernel
from aifs.files.open_inode import OpenInode
from aifs.files.places import Places
from aifs.files.quotas import Quotas
from aifs.files.types import LENT, WRITABLE, FileHandle, Lent, Opened
from aifs.meta.records import APPEND_ONLY, Inode

_log = logger(__name__)

WATCHED_BYTES = BLOCK
"""A watcher of opens of smaller files need not know which of their pages are in memory."""

HANDLE_MAX = (1 << 31) - 1
"""The largest handle of an inode that is not lent, except ``WRITABLE``; then they begin anew.
Virtual files have as many above."""


class Handles:
    """The table of handles, and what of it is lent to the bridge.

    The kernel wants all opens of an inode to be of one kind, so the first one decides until the
    last close: passed through to the burst copy, or to the object that is the whole file (written
    by way of the daemon all the same), or read and written by way of the daemon.

    An inode that is not in core may be *lent*: the bridge answers its opens for reading, and keeps
    its backing id. It is taken back, with its handles, when it comes into core; so nothing of it
    changes while it is lent, unless ``recall`` says that it is not open.
    """

    def __init__(
        self,
        kernel: Kernel,
        access_due_ns: Callable[[Inode], int],
        is_shared: bool,
        quotas: Quotas,
        places: Places,
        blocks: Blocks,
    ) -> None:
        """``access_due_ns``: from when an open for reading counts as access (Passthrough.lend).
        ``is_shared``: with several hosts, no objects are passed through, because others may replace
        them."""
        self.kernel = kernel
        self._kept = kernel.kept
        self.places = places
        """Those of files that are in core, or lent, and of no others."""
        self._blocks = blocks
        self._sources: dict[int, int] = {}
        """By id of an object set that is passed through to its blocks, the inode."""
        blocks.tell(self._recall_source)
        self._is_shared = is_shared
        self._quotas = quotas
        self._access_due_ns = access_due_ns
        self._lends = True
        """The kernel is there."""
        self._is_watched = False
        """A watcher wants to know what is read of files that have no burst copy."""
        self._lent_sizes: dict[int, int] = {}
        """By inode number, of those that are lent and of which the kernel keeps pages."""
        self._accessed: dict[int, int] = {}
        """By inode number: last opens of lent inodes that count as access, not on record yet."""
        self._refused: set[int] = set()  # numbers of servers
        self._places: dict[int, tuple[int, int]] = {}
        """By backing id, the local file behind it: the number of its server, and its id."""
        self._unseen = Counter[int]()
        """By inode number: closed handles of lent inodes that the bridge does not know of."""
        self.writers = 0
        """How many handles can write."""
        self.last_writer_s = -float("inf")
        """When the last one of them was made, on trio's clock."""
        self._handles: dict[int, FileHandle] = {}
        """What is open, by handle."""
        self._next = 1
        """The handle that is tried next."""

    def try_out(self, server: int, fd: int) -> OSError | None:
        """Why the kernel does not pass files on this server through; None: it does. ``fd``: any
        file there."""
        assert self.kernel.passthrough is not None
        try:
            self.kernel.passthrough.detach(self.kernel.passthrough.attach(fd))
        except OSError as error:
            self._refused.add(server)
            return error
        return None

    async def add(self, file: OpenInode, flags: int, is_new: bool = False) -> Opened:
        """A handle for one more open of ``file``, whose in-core state the caller has acquired.
        ``is_new``: the file is made with it."""
        file.was_opened = True
        if not file.users and (file.kept or self._place_for(file, flags) is not None):
            await file.gate.enter_alone()  # or its form might change meanwhile
            try:
                await self._pass_through(file, flags)
            finally:
                file.gate.leave_alone()
        made_s = trio.current_time() if is_new else -math.inf
        opened = FileHandle(file, flags, made_s=made_s)
        opened.shared = self._is_shared and opened.writable
        # Another host may have replaced the bytes, or have changed them elsewhere.
        is_elsewhere = file.backing != 0 and not self._is_backed(file)
        if is_elsewhere and opened.maps:
            raise Busy(
                f"inode {file.inode.ino}: a program on this host has had it open since before "
                "another host replaced its bytes; what is mapped would be written to the old ones"
            )
        # Each write comes to us, with O_APPEND as it is then (fcntl(2) may take it back), and what
        # is mapped to be written is not: the kernel refuses that of handles that it does not cache.
        is_guarded = opened.writable and bool(file.inode.flags & APPEND_ONLY)
        if is_guarded and file.backing and opened.maps:
            raise Busy(
                f"inode {file.inode.ino}: a program has had it open since before it became "
                "append-only; until it closes it, it can be opened with O_WRONLY and O_APPEND alone"
            )
        was_mapped = file.is_mapped
        file.users += 1
        file.writers += opened.writable
        file.mappers += opened.maps
        if file.is_mapped and not (was_mapped or is_new):
            self.kernel.drop_attributes(file.inode.ino)  # it keeps none from now on
        if opened.writable:
            if file.backing:
                self._quotas.watch(file)
            self.writers += 1
            self.last_writer_s = trio.current_time()
        kind = WRITABLE if opened.writable else 0
        while (handle := self._next | kind) in self._handles:
            self._next = self._next % HANDLE_MAX + 1
        self._next = self._next % HANDLE_MAX + 1
        self._handles[handle] = opened
        file.uncached |= file.is_joined or is_guarded
        # The kernel would put what is appended where it takes the end to be, and keep the page
        # locked until we answer.
        appends = opened.shared and opened.appends and not file.backing
        opened.direct = (
            file.uncached
            or is_elsewhere
            or appends
            or (opened.writable and file.backing != 0 and (file.on_object or file.on_source))
        )
        file.cached |= not (file.backing or opened.direct)
        self._kept.add(KeptHandle(handle, file.inode.ino, flags, 1, file.backing, opened.direct))
        return Opened(handle, file.backing, opened.direct)

    def _place_for(self, file: OpenInode, flags: int) -> tuple[int, int] | None:
        """The local file that the kernel may use for this one, as server and id; None: none."""
        # setuid and setgid must go with a write, which nobody would see.
        if self.kernel.passthrough is None or file.inode.is_privileged:
            return None
        if file.inode.flags & APPEND_ONLY:
            return None  # a program may take O_APPEND back
        place, copy = self._place(file, flags), file.copy
        if place is None or place[0] in self._refused:
            return None
        if copy is None and (self._is_shared or self._is_watched):
            return None
        if flags & os.O_ACCMODE != os.O_RDONLY and not self._quotas.may_pass_through(file):
            return None  # the daemon refuses what is too much
        if copy is not None and copy.device.health.failing and not file.inode.in_burst:
            return None  # the daemon reads from the data servers what it cannot read there
        return place

    async def _pass_through(self, file: OpenInode, flags: int) -> None:
        place = self._place_for(file, flags)
        on_object = _is_object(file, place)
        if file.users:
            return  # somebody else was first
        if file.kept and self._is_at(file.kept, place):
            file.backing, file.kept, file.on_object = file.kept, 0, on_object
            return
        self._drop_kept(file)
        if place is None:
            return
        is_own = file.copy is None and not on_object
        fd, passthrough = await self._backing(file, on_object), self.kernel.passthrough
        if fd is None:
            return
        try:
            if passthrough is None or file.users or self._place_for(file, flags) != place:
                return
            file.backing, file.on_object = passthrough.attach(fd), on_object
            self._places[file.backing] = place
            self._kept.attach(file.backing, place)
            file.source_backing = file.backing if is_own else 0
            if file.on_source:
                self._sources[place[1]] = file.inode.ino
                self._blocks.lend(place[1], True)
        except OSError as error:
            where = name_of(place[0])
            _log.warning(
                "from now on the daemon reads and writes the files of %s: the kernel cannot: %s",
                where,
                error,
            )
            self._refused.add(place[0])
        finally:
            if is_own:
                files.close_file(fd)

    def drop_kept(self, file: OpenInode) -> None:
        """Before a change: the kernel gives up blocks of a file that is not open. Does not
        block."""
        if file.kept and file.copy is None:
            self._drop_kept(file)

    def _drop_kept(self, file: OpenInode) -> None:
        kept, file.kept = file.kept, 0
        self._detach(kept)

    def _detach(self, backing: int) -> None:
        if backing and self.kernel.passthrough is not None:
            place = self._places.pop(backing)
            self.kernel.passthrough.detach(backing)
            self._kept.detach(backing)
            if self._sources.pop(place[1], None) is not None:
                self._blocks.lend(place[1], False)

    def _recall_source(self, oid: int) -> None:
        """Blocks of these objects go: inodes that are not open are lent no more."""
        ino = self._sources.get(oid)
        if ino is not None:
            self.recall(ino)

    def _place(self, file: OpenInode, flags: int) -> tuple[int, int] | None:
        """The one local file with all bytes of the file that programs may use by themselves: a
        burst copy, or, read only and if it is what the record says, an object or blocks."""
        is_at_rest = flags & os.O_ACCMODE == os.O_RDONLY and not file.marked
        return self._local_place(file) if file.copy is not None or is_at_rest else None

    def _local_place(self, file: OpenInode) -> tuple[int, int] | None:
        """The one local file that has all bytes of the file, as server and id."""
        if file.home:
            return None
        if file.copy is not None:
            return file.copy.place
        objects, oid = file.inode.objects, file.inode.oid
        # A change has to reach those who have it passed through: not what clones share.
        if objects is None or file.inode.named:
            return None
        if len(objects.servers) == 1 and (file.on_object or not _is_kept_near(file)):
            return objects.servers[0], oid
        if file.opening:  # a program that is going to write
            return None
        server = self._blocks.place_of(oid, file.inode.size)
        return None if server is None else (server, oid)

    def _is_backed(self, file: OpenInode) -> bool:
        """Whether what users of the file are passed through to is still all of it."""
        backing = self._places[file.backing]
        copy = None if file.home else file.copy
        if copy is not None and (copy.server, copy.source) == backing:
            return True
        return self._is_at(file.backing, self._local_place(file))

    def _is_at(self, backing: int, place: tuple[int, int] | None) -> bool:
        """Whether a backing id is this local file: blocks that have come again are another one."""
        if place is None or self._places[backing] != place:
            return False
        return place[1] not in self._sources or self._blocks.is_lent(place[1])

    def _may_get_place(self, file: OpenInode) -> bool:
        """Whether it is going to be one local file: an object once synced, or its blocks."""
        objects = file.inode.objects
        if objects is None:
            return False
        if _is_kept_near(file):
            return not (self._is_shared or file.inode.named)
        return len(objects.servers) == 1 and file.marked

    async def _backing(self, file: OpenInode, on_object: bool) -> int | None:
        """The descriptor to pass a file through to; None if that does not work."""
        inode = file.inode
        try:
            if file.copy is not None:
                return await file.copy.backing()
            if not on_object:
                return await self._blocks.backing(inode.oid, inode.size)
            return None if file.objects is None else await file.objects.backing(inode.size)
        except FsError as error:
            if inode.in_burst:
                raise
            _log.info("inode %d is not passed through: %s", inode.ino, error)
            return None

    async def is_used(self, file: OpenInode) -> bool:
        """Whether programs use blocks or the one object of a clean file, open or mapped. Raises
        Unavailable."""
        return await self._blocks.is_used(file.own_source) or await self._is_object_used(file)

    async def keep_object(self, file: OpenInode) -> None:
        """Before a change: keep the one object as the file if it is mapped. The gate is held
        alone."""
        file.on_object = file.on_object or await self._is_object_used(file)

    async def _is_object_used(self, file: OpenInode) -> bool:
        objects = file.inode.objects
        is_one = objects is not None and len(objects.servers) == 1 and file.own_source
        if not is_one or file.copy is not None or self._is_shared:
            return False
        if self.kernel.passthrough is None:
            return False
        fd = await self._backing(file, on_object=True)
        return fd is not None and is_used(fd)

    # --- inodes that are lent ---

    def lend(self, file: OpenInode) -> None:
        """Lend a file that leaves core to the bridge, if programs have had it open and its opens
        would be answered the same way. Does not block."""
        inode, place = file.inode, self._place_for(file, os.O_RDONLY)
        if file.kept and not (self._is_at(file.kept, place) and inode.nlink):
            self._drop_kept(file)
        passthrough, backing = self.kernel.passthrough, file.kept
        if (
            passthrough is None
            or not self._lends
            or not (file.was_opened and inode.nlink)
            or file.home
            or (not backing and (place is not None or self._may_get_place(file)))
        ):
            self.places.take(inode.ino)
            return
        copy_id = 0 if file.copy is None else file.copy.id
        due_ns, asks = self._access_due_ns(inode), inode.size > WATCHED_BYTES
        left = passthrough.lend(inode.ino, backing, copy_id, due_ns, asks)
        if not backing:
            self._lent_sizes[inode.ino] = inode.size
        if left is not None:
            self._give_up(left)

    def leave(self, file: OpenInode) -> None:
        """Forget a file that leaves core unlent, because another host changed it. Does not
        block."""
        self._drop_kept(file)
        self.places.take(file.inode.ino)

    def is_lent(self, ino: int) -> bool:
        """Does not block."""
        passthrough = self.kernel.passthrough
        return passthrough is not None and passthrough.find_lent(ino) is not None

    @property
    def lent_count(self) -> int:
        """How many inodes are lent of which the kernel keeps pages."""
        return len(self._lent_sizes)

    def lend_unseen(self, inode: Inode, record: bytes) -> None:
        """Lend a claimed, settled inode with places that was not in core. ``record``: as it is on
        record. Does not block."""
        passthrough = self.kernel.passthrough
        if passthrough is None or not self._lends:
            self.places.take(inode.ino)
            return
        due_ns, asks = self._access_due_ns(inode), inode.size > WATCHED_BYTES
        left = passthrough.lend(inode.ino, 0, 0, due_ns, asks)
        self._lent_sizes[inode.ino] = inode.size
        if left is not None:
            self._give_up(left)
        if not (self._is_shared or self.was_accessed(inode.ino)):  # else it may show another time
            passthrough.note_attributes(inode.ino, record)

    def note_entries(self, entries: list[tuple[bytes, bytes]]) -> None:
        """See Passthrough. Does not block."""
        if self.kernel.passthrough is not None:
            self.kernel.passthrough.note_entries(entries)

    def notes_entries(self, directory: int) -> bool:
        """Whether the bridge may know names there. Does not block."""
        return self.kernel.keeps_names(directory) and not self._is_shared

    def open_lent(self, ino: int, flags: int, uid: int) -> bool:
        """Open a lent inode for reading, as the bridge does. Whether it has one more handle. Does
        not block."""
        passthrough = self.kernel.passthrough
        return passthrough is not None and passthrough.open_lent(ino, flags, uid)

    def take_back(self, file: OpenInode) -> None:
        """The file is in core from now on: if it was lent, its handles are ours. Does not block."""
        inode, passthrough = file.inode, self.kernel.passthrough
        lent = None if passthrough is None else passthrough.find_lent(inode.ino)
        if lent is not None and passthrough is not None:
            opens = lent.opens - self._unseen.pop(inode.ino, 0)
            if opens:  # somebody knows of them at each moment
                number = LENT | inode.ino
                self._kept.know(
                    KeptHandle(number, inode.ino, os.O_RDONLY, opens, lent.backing, False)
                )
            passthrough.take_back(inode.ino)
            self._note(lent)
            file.was_opened = True
            is_source = lent.backing and self._places[lent.backing][1] in self._sources
            file.source_backing = lent.backing if is_source else 0
            if not opens:
                file.kept = lent.backing
            else:
                handle = FileHandle(file, os.O_RDONLY, opens)
                self._handles[LENT | inode.ino] = handle
                file.handles += opens
                file.users += opens
                file.backing = lent.backing
                file.cached = not lent.backing
                file.on_object = bool(lent.backing) and _is_object(file, self._places[lent.backing])
        self._lent_sizes.pop(inode.ino, None)
        accessed_ns = self._accessed.pop(inode.ino, 0)
        if accessed_ns and accessed_ns > inode.atime_ns:
            inode.atime_ns, file.unsaved = accessed_ns, True

    def recall(self, ino: int) -> bool:
        """Whether an inode that is not in core is open; if not, it is lent no more, else its next
        request brings it into core. Does not block."""
        passthrough = self.kernel.passthrough
        lent = None if passthrough is None else passthrough.take_back(ino, idle=True)
        if lent is None:
            return False
        if lent.opens:
            self.places.take(ino)
            return True
        self._give_up(lent)
        return False

    def close_unseen(self, ino: int) -> bool:
        """Close a handle of a lent inode that could not be brought into core. Whether it is still
        open. Does not block."""
        passthrough = self.kernel.passthrough
        self._unseen[ino] += 1
        if self.recall(ino) and passthrough is not None:
            lent = passthrough.find_lent(ino)
            if lent is not None and lent.opens > self._unseen[ino]:
                return True
            passthrough.take_back(ino)
            if lent is not None:
                self._give_up(lent)
        del self._unseen[ino]
        return False

    def stays_lent(self, ino: int) -> bool:
        """Whether the inode stays lent while its attributes change, until ``lend_still``: no access
        has to be recorded with them. Does not block."""
        passthrough = self.kernel.passthrough
        lent = None if passthrough is None else passthrough.find_lent(ino)
        return lent is not None and not lent.accessed_ns and ino not in self._accessed

    def lend_still(self, inode: Inode) -> None:
        """Tell the bridge new attributes of an inode, if it is lent. Does not block."""
        passthrough = self.kernel.passthrough
        lent = None if passthrough is None else passthrough.find_lent(inode.ino)
        if passthrough is None or lent is None:
            return
        if inode.is_privileged or inode.flags & APPEND_ONLY:  # see _place_for
            self.recall(inode.ino)
        else:  # by the mount's rule an open may count as access from another time on
            due_ns = self._access_due_ns(inode)
            asks = inode.size > WATCHED_BYTES
            passthrough.lend(inode.ino, lent.backing, lent.copy_id, due_ns, asks)

    def recall_all(self) -> None:
        """What is lent was lent by rules that have changed. Does not block."""
        passthrough = self.kernel.passthrough
        for lent in [] if passthrough is None else passthrough.all_lent("all"):
            self.recall(lent.ino)

    def watch_opens(self, is_watched: bool) -> None:
        """Note opens that the bridge answers from now on, each anew, or do not; those of files
        above WATCHED_BYTES are asked for. Does not block."""
        self._is_watched = is_watched
        if self.kernel.passthrough is not None:
            self.kernel.passthrough.watch_opens(is_watched)

    def noted_opens(self) -> list[tuple[int, int]]:
        """See Passthrough. Does not block."""
        passthrough = self.kernel.passthrough
        return [] if passthrough is None else passthrough.noted_opens()

    def end(self) -> None:
        """The kernel has gone, and all that was open and lent with it."""
        self._lends = False
        passthrough = self.kernel.passthrough
        if passthrough is not None:
            for lent in passthrough.all_lent("all"):
                passthrough.take_back(lent.ino)
                self._note(lent)
        self.places.end()

    def lent_size(self, ino: int) -> int | None:
        """The size of a lent inode; None if the kernel keeps no pages of it for programs."""
        return self._lent_sizes.get(ino)

    def _give_up(self, lent: Lent) -> None:
        self._note(lent)
        self._lent_sizes.pop(lent.ino, None)
        self.places.take(lent.ino)
        self._detach(lent.backing)

    def _note(self, lent: Lent) -> None:
        if lent.accessed_ns:
            self._accessed[lent.ino] = lent.accessed_ns

    def lent_open(self) -> list[int]:
        """Inodes that are open though they are not in core. Takes a millisecond."""
        passthrough = self.kernel.passthrough
        found = [] if passthrough is None else passthrough.all_lent("open")
        return [lent.ino for lent in found if lent.opens > self._unseen[lent.ino]]

    def used_copies(self) -> list[int]:
        """Ids of burst copies of lent files opened since the last call."""
        passthrough = self.kernel.passthrough
        used = [] if passthrough is None else passthrough.all_lent("used")
        for lent in used:
            self._note(lent)
        return [lent.copy_id for lent in used if lent.copy_id]

    def accessed(self, inode: Inode) -> Inode:
        """An inode that is not in core, as its record says, but as it was accessed since."""
        passthrough = self.kernel.passthrough
        lent = None if passthrough is None else passthrough.find_lent(inode.ino)
        accessed_ns = lent.accessed_ns if lent is not None else 0
        accessed_ns = accessed_ns or self._accessed.get(inode.ino, 0)
        if not accessed_ns or accessed_ns <= inode.atime_ns:
            return inode
        return inode.but(atime_ns=accessed_ns)

    def was_accessed(self, ino: int) -> bool:
        """Whether an inode that is not lent was accessed, which is not on record."""
        return ino in self._accessed

    @property
    def accessed_inos(self) -> list[int]:
        """The inodes that have been accessed, as far as that is known and not on record."""
        return list(self._accessed)

    def find_accessed(self, inos: Collection[int]) -> dict[int, int]:
        """When those of these inodes were accessed."""
        return {ino: self._accessed[ino] for ino in inos if ino in self._accessed}

    def forget_accessed(self, times: Mapping[int, int]) -> None:
        """What ``find_accessed`` has said is on record."""
        for ino, accessed_ns in times.items():
            if self._accessed.get(ino) == accessed_ns:  # else it was accessed once more meanwhile
                del self._accessed[ino]

    # --- handles ---

    def has(self, handle: int) -> bool:
        """Whether it is open, and not lent."""
        return handle in self._handles

    def find(self, handle: int) -> FileHandle | None:
        """None if it is not open, or lent."""
        return self._handles.get(handle)

    def __getitem__(self, handle: int) -> FileHandle:
        """Raises BadHandle."""
        try:
            return self._handles[handle]
        except KeyError:
            raise BadHandle() from None

    def readable(self, handle: int) -> OpenInode:
        opened = self[handle]
        if not opened.readable:
            raise BadHandle("opened for writing only")
        return opened.file

    def writable(self, handle: int) -> OpenInode:
        opened = self[handle]
        if not opened.writable:
            raise BadHandle("opened for reading only")
        return opened.file

    # --- after the death of another daemon ---

    def take_over(self, backings: Mapping[int, tuple[int, int]]) -> None:
        """The kernel knows these backing ids, and the local files behind them."""
        self._places.update(backings)

    def give_back(self, backing: int) -> None:
        """No program has a handle with this one of them."""
        self._blocks.lend(self._places.pop(backing)[1], False)
        self._kept.give_back(backing)

    def take_over_handle(self, file: OpenInode, kept: KeptHandle) -> None:
        """Take over a handle of an acquired file that programs already have. Does not block."""
        place = self._places.get(kept.backing)
        if place is not None:
            file.on_object = _is_object(file, place)
            if file.copy is not None:
                file.backing = kept.backing
                if place != file.copy.place:
                    file.copy.source = place[1]  # it was that when it was passed through
            elif file.on_object:
                file.backing = kept.backing
            elif place[1] == file.inode.oid:
                file.backing = file.source_backing = kept.backing
                self._sources[place[1]] = file.inode.ino
            # Else its last close was being done: the copy is gone, the bytes are in the record.
        opened = FileHandle(file, kept.flags, kept.opens)
        opened.direct = kept.direct
        opened.shared = self._is_shared and opened.writable
        self._handles[kept.handle] = opened
        file.was_opened = True
        file.handles += kept.opens - 1
        file.users += kept.opens
        file.writers += opened.writable
        file.mappers += opened.maps
        file.uncached |= kept.direct
        file.cached |= not (kept.backing or kept.direct)
        self.writers += opened.writable
        if opened.writable and file.backing:
            self._quotas.watch(file)
        if kept.handle < LENT:
            self._next = max(self._next, (kept.handle & HANDLE_MAX) % HANDLE_MAX + 1)
        self._kept.know(kept)

    def remove(self, handle: int) -> FileHandle:
        """Remove a closed handle; the caller gives the in-core state back, then calls
        ``removed``."""
        opened = self[handle]
        opened.opens -= 1
        if not opened.opens:
            del self._handles[handle]
        file = opened.file
        file.users -= 1
        file.writers -= opened.writable
        file.mappers -= opened.maps
        file.outlived |= opened.maps and file.backing != 0
        self.writers -= opened.writable
        if file.users == 0:
            file.kept, file.backing, file.on_object = file.backing, 0, False
            file.cached = file.uncached = False
        return opened

    def removed(self, handle: int) -> None:
        """All that the close of a handle is about has been done. Does not block."""
        opened = self._handles.get(handle)
        self._kept.set_opens(handle, 0 if opened is None else opened.opens)


def _is_kept_near(file: OpenInode) -> bool:
    return isinstance(file.objects, ObjectSet) and file.objects.is_kept_near


def _is_object(file: OpenInode, place: tuple[int, int] | None) -> bool:
    objects = file.inode.objects
    return (
        file.copy is None
        and objects is not None
        and place is not None
        and place[0] in objects.servers
    )
