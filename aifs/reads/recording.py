"""What a start touches. Files that the kernel reads itself are judged by the page cache: at the
end, less at the first open. Lent opens of small files are heard of later, in order: one block each.

Reading ahead (AHEAD) touches nothing. Touches of what was in memory at the open are unseen; so they
come from the record before (starts.py).
"""

import os
from collections.abc import Mapping

from aifs.core import clock
from aifs.core.errors import FsError
from aifs.core.log import logger
from aifs.core.start_record import BLOCK, FILES_MAX, HotFile
from aifs.files.file_io import FileIO
from aifs.files.handles import Handles
from aifs.files.open_inode import OpenInode
from aifs.meta import namespace, paths
from aifs.meta.kv import Engine, ReadTransaction
from aifs.meta.records import Inode

_log = logger(__name__)

_AT_ONCE = 64
"""Inodes that are looked up in one view."""


class _Touched:
    """A file that the start has opened."""

    __slots__ = ("before", "blocks", "copy_id", "mtime_ns", "size")

    def __init__(self, inode: Inode) -> None:
        self.size, self.mtime_ns = inode.size, inode.mtime_ns
        self.blocks: set[int] = set()  # that it is known to have touched
        self.copy_id = 0  # of the burst copy that ``before`` is about; 0: there was none
        self.before: list[int] | None = None  # by block, pages that were in memory


class StartRecording:
    """One start. Used from one trio thread."""

    def __init__(self, directory: int, uid: int) -> None:
        """``directory``: of the job, whose own files do not count. ``uid``: whose accesses do."""
        self._directory = directory
        self._uid = uid
        self._began_ns = clock.kernel_ns()
        self._files: dict[int, _Touched | None] = {}
        """By inode, in order of first access; None: small, opened by the bridge."""
        self._names: dict[int, tuple[int, bytes]] = {}
        """Of files with several names, by inode: directory and name by which they were found."""
        self.is_blind = False
        """The system does not tell memory contents: passed-through files count as a whole."""

    def takes(self, uid: int) -> bool:
        """Whether accesses of this user count."""
        return self._uid == uid

    async def opened(self, file: OpenInode) -> None:
        """The file is about to be opened for reading. Raises FsError."""
        inode, copy = file.inode, file.copy
        touched = self._files.get(inode.ino)
        if touched is None:
            if len(self._files) == FILES_MAX:
                return
            touched = self._files[inode.ino] = _Touched(inode)
            if inode.size <= BLOCK:
                touched.blocks.add(0)
        if copy is not None and touched.copy_id != copy.id and inode.size > BLOCK:
            touched.copy_id = copy.id
            touched.before = await copy.resident(BLOCK)
            self.is_blind |= touched.before is None

    def noted(self, ino: int) -> None:
        """A small file was opened, without our being asked. Does not block."""
        if len(self._files) < FILES_MAX:
            self._files.setdefault(ino, None)

    def found(self, parent: int, name: bytes, ino: int) -> None:
        """A file with several names is looked up by one of them. Does not block."""
        if len(self._names) < FILES_MAX:
            self._names[ino] = parent, name

    def read(self, ino: int, offset: int, length: int) -> None:
        """Bytes of a file are read by way of the daemon. Does not block."""
        touched = self._files.get(ino)
        if touched is not None and length:
            touched.blocks.update(range(offset // BLOCK, (offset + length - 1) // BLOCK + 1))

    async def tell(self, engine: Engine, io: FileIO) -> list[HotFile]:
        """Touches, in order, of files unchanged since their first open; no blocks in memory before.
        Other tasks run meanwhile."""
        found = []
        inos = list(self._files)
        for first in range(0, len(inos), _AT_ONCE):
            some = {ino: self._names.get(ino) for ino in inos[first : first + _AT_ONCE]}
            for now in await engine.view(_look_up, some, self._directory):
                touched = self._files[now.ino]
                if touched is None:
                    if now.size <= BLOCK and now.mtime_ns < self._began_ns:
                        found.append(now.of({0}))
                    continue
                await self._look(io, now.ino, touched)
                blocks = {n for n in touched.blocks if n * BLOCK < touched.size}
                if (now.size, now.mtime_ns) == (touched.size, touched.mtime_ns):
                    found.append(now.of(blocks))
        return found

    async def _look(self, io: FileIO, ino: int, touched: _Touched) -> None:
        """Add what the kernel has read by itself."""
        if not touched.copy_id:
            return
        everything = range(-(-touched.size // BLOCK))
        if touched.before is None:
            touched.blocks.update(everything)
            return
        try:
            async with io.inodes.held(ino) as file:
                if file.copy is None or file.copy.id != touched.copy_id:
                    return
                after = await file.copy.resident(BLOCK) or []
        except FsError as error:
            _log.info("inode %d: nobody knows what was read of it: %s", ino, error)
            return
        pairs = zip(touched.before, after, strict=False)
        touched.blocks.update(n for n, (before, now) in enumerate(pairs) if now > before)


class StartRecordings:
    """The recordings that are under way, for the calls that open and read files."""

    def __init__(self, handles: Handles) -> None:
        self._handles = handles
        self._all: list[StartRecording] = []
        self.is_on = False
        """Whether there is any: else nobody has to call the methods below."""

    def add(self, recording: StartRecording) -> None:
        self._hear()
        self._all.append(recording)
        self.is_on = True
        self._handles.watch_opens(True)

    def remove(self, recording: StartRecording) -> None:
        self._hear()
        self._all.remove(recording)
        self.is_on = bool(self._all)
        if not self.is_on:
            self._handles.watch_opens(False)

    def _hear(self) -> None:
        """Of opens that were answered without us."""
        for ino, uid in self._handles.noted_opens():
            for recording in self._all:
                if recording.takes(uid):
                    recording.noted(ino)

    async def opened(self, file: OpenInode, uid: int, ahead: bool) -> None:
        """``uid`` is about to open a file for reading; ``ahead``: of what is expected of others."""
        self._hear()
        if ahead:
            return
        for recording in [each for each in self._all if each.takes(uid)]:
            try:
                await recording.opened(file)
            except FsError as error:  # the program gets the error by its own calls
                _log.info("inode %d: nobody knows what is in memory: %s", file.inode.ino, error)

    def found(self, parent: int, name: bytes, inode: Inode) -> None:
        """A name is looked up. Does not block."""
        if inode.nlink > 1 and inode.is_file:
            for recording in self._all:
                recording.found(parent, name, inode.ino)

    def read(self, ino: int, offset: int, length: int) -> None:
        """A program reads by way of the daemon. Does not block."""
        self._hear()
        for recording in self._all:
            recording.read(ino, offset, length)


def _look_up(
    tx: ReadTransaction, names: Mapping[int, tuple[int, bytes] | None], directory: int
) -> list[HotFile]:
    """Inodes still there, not in ``directory``, with bytes outside their records: as recorded,
    without runs. Of several names, the path is by the given one."""
    found = []
    for ino, name in names.items():
        inode = namespace.find_inode(tx, ino)
        if inode is None or inode.parent == directory:
            continue
        if inode.nlink and (inode.layout is not None or inode.copy is not None):
            path = paths.find_path(tx, ino)
            if path is None and name is not None:
                above = paths.find_path(tx, name[0])
                path = None if above is None else above.rstrip(b"/") + b"/" + name[1]
            if path is not None:
                found.append(HotFile(os.fsdecode(path), ino, inode.size, inode.mtime_ns, ()))
    return found
