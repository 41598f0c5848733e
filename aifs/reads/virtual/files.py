"""The namespace of virtual files, and their handles.

A file has a number for each content: an open one stays as it was, or is ESTALE, and the kernel may
keep all pages. A name leads to the directory's present contents, asked for each time. Nothing is on
record. A daemon that goes on with the mount of another one makes what programs have open again when
they use it: it stays that file if it holds the same bytes, else it is ESTALE.
"""

import os
import stat
import struct
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import trio

from aifs.core.errors import (
    AccessDenied,
    DatasetError,
    FsError,
    Invalid,
    NoSuchAddress,
    NotADirectory,
    NotFound,
    OutOfMemory,
    ReadOnly,
    Stale,
)
from aifs.core.tasks import run_all
from aifs.data.servers import Servers
from aifs.datasets.order import parsed
from aifs.datasets.virtual import ShiftedNumbers
from aifs.files.file_io import FileIO
from aifs.files.handles import HANDLE_MAX
from aifs.files.kept import KeptState
from aifs.files.permissions import asker_of
from aifs.files.refusals import Refusals
from aifs.files.settled import SMALL, SettledPart, Source
from aifs.files.types import CallerLike, Opened
from aifs.files.virtual import FILES, FIRST, ORDERS, directory_of
from aifs.meta import namespace
from aifs.meta.askers import Asker
from aifs.meta.kv import Engine
from aifs.meta.records import Inode
from aifs.reads.virtual import trees
from aifs.reads.virtual.orders import OrderFiles
from aifs.reads.virtual.sources import (
    VirtualContent,
    VirtualMemory,
    read_source,
    require_all,
    right_to,
    signature_of,
)
from aifs.reads.virtual.trees import is_joined, join_files
from aifs.reads.virtual.walking import SourceWatch, Watches

_KNOWN_MAX = 64
"""Of files that are not open: these many are remembered."""

_LEAST_BYTES = 2048
"""That are kept of a file and of what it watches, however little it holds."""

_LEFT = b"virtual "
"""Before the number of a handle, of a file that is open: the key of a note."""

_HANDLE, _NOTE = struct.Struct("=Q"), struct.Struct("=QQI16s")

_ROOT = Asker(0, (0,))

Maker = Callable[[int, SourceWatch, VirtualContent | None], Awaitable[VirtualContent]]
"""From a directory's number, and the file's old content, to the new. Sources are watched before."""


class _VirtualFile:
    """A name's content; another one when that changes."""

    __slots__ = ("content", "inode", "memory", "name", "opens", "parent", "signature", "watch")

    def __init__(
        self,
        inode: Inode,
        parent: int,
        name: bytes,
        content: VirtualContent,
        watch: SourceWatch,
        memory: int,
    ) -> None:
        self.inode = inode
        self.memory = memory
        self.parent = parent
        self.name = name
        self.content = content
        self.watch = watch
        self.opens = 0
        self.signature = b""
        """Of the content; b"": nobody has asked for it."""

    @property
    def top(self) -> int:
        """The directory on record."""
        return directory_of(self.parent)


class _Left(NamedTuple):
    """A file that a program has opened, as the next daemon finds it."""

    ino: int
    parent: int
    uid: int
    signature: bytes
    name: bytes


def _left(note: bytes) -> _Left:
    ino, parent, uid, signature = _NOTE.unpack_from(note)
    return _Left(ino, parent, uid, signature, note[_NOTE.size :])


class VirtualFiles:
    """All virtual files and directories of a mount."""

    def __init__(
        self,
        engine: Engine,
        io: FileIO,
        servers: Servers,
        refusals: Refusals,
        kept: KeptState,
    ) -> None:
        self._engine = engine
        self._kept = kept
        self._io = io
        self._buffers = servers.buffers
        self._memory = VirtualMemory(servers.budget, self._forget_one)
        self._refusals = refusals
        self._watches = Watches(engine, io)
        self._orders = OrderFiles(engine, io)
        self._named: dict[tuple[int, bytes], _VirtualFile] = {}
        """By directory and name; those that were asked for last at the end."""
        self._files: dict[int, _VirtualFile] = {}
        """By number; also those that are open, and that no name leads to any more."""
        self._opened: dict[int, tuple[_VirtualFile, int]] = {}
        """By handle, with the user who has opened it."""
        self._left = {
            _HANDLE.unpack(key.removeprefix(_LEFT))[0]: _left(note)
            for key, note in kept.notes.items()
            if key.startswith(_LEFT)
        }
        """By handle, open files of another daemon that programs have not used since."""
        self._lost = set[int]()
        """Those of them, by number, that are ESTALE."""
        self._taking_up = trio.Lock()
        """Held by the task that makes one of them again."""
        self._making: dict[tuple[int, bytes], trio.Lock] = {}
        """By directory and name, held by the task that looks at the sources."""
        self._last = time.time_ns() // 1000
        """The number that was given last, and the handle. The kernel may have pages of those that
        an earlier daemon of the mount has given."""

    # --- names ---

    async def lookup(self, parent: int, name: bytes, caller: CallerLike) -> Inode:
        """A virtual name's inode. Raises NotFound; AccessDenied if ``caller`` may not read all
        sources; and refusals of the dataset."""
        if parent < FIRST:
            directory = await self._engine.view(namespace.get_directory, parent)
            return _directory(FIRST | parent, directory)
        if parent >= FILES:
            raise NotADirectory()
        top = directory_of(parent)
        directory = await self._engine.view(namespace.get_directory, top)
        if parent < ORDERS and name == b"order":
            return _directory(ORDERS | top, directory)
        asker = asker_of(caller)
        require_all([right_to(directory)], asker)
        with self._refusals.noted(top, caller, os.fsdecode(name)):
            make = self._maker(parent, name, asker)
            file = await self._find(parent, name, make, directory, asker.uid)
            require_all(file.content.rights, asker)
        return file.inode

    def _maker(self, parent: int, name: bytes, asker: Asker) -> Maker:
        """Of a name in a virtual directory. Raises NotFound, Invalid for no order."""
        if parent < ORDERS and name == b"files.tar":
            return partial(trees.list_tree, self._engine, self._io)
        if parent < ORDERS and is_joined(name):
            return partial(join_files, self._engine, self._io, name, asker)
        if parent < ORDERS or b"=" not in name:
            raise NotFound()
        try:
            return partial(self._orders.make, parsed(name), asker)
        except DatasetError as error:
            raise Invalid(str(error)) from None

    async def _find(
        self, parent: int, name: bytes, make: Maker, directory: Inode, uid: int
    ) -> _VirtualFile:
        """What a name leads to now."""
        top = directory.ino
        key = (top, name)
        for left in [*self._left.values()]:
            if (directory_of(left.parent), left.name) == key:
                with suppress(Stale):
                    await self._take_up(left.ino)
        lock = self._making.setdefault(key, trio.Lock())
        try:
            async with lock:
                known = self._named.get(key)
                file = known
                if known is None or not self._watches.is_whole(known.watch):
                    async with self._memory.making(uid) as counted:
                        watch = self._watches.begin(counted)
                        content = await make(top, watch, None if known is None else known.content)
                    if (
                        known is not None
                        and known.content.fingerprint == content.fingerprint
                        and known.inode.ino in self._files  # not forgotten meanwhile
                    ):
                        known.content, known.watch = content, watch
                    else:
                        self._last += 1
                        ino = FILES | self._last
                        file = await self._add(ino, parent, name, content, watch, directory)
                assert file is not None
                self._named.pop(key, None)
                self._named[key] = file
                self._forget()
                return file
        finally:
            if not lock.locked():  # nor handed to a task that has waited for it
                self._making.pop(key, None)

    async def _add(
        self,
        ino: int,
        parent: int,
        name: bytes,
        content: VirtualContent,
        watch: SourceWatch,
        directory: Inode,
    ) -> _VirtualFile:
        memory = _LEAST_BYTES + content.memory + watch.memory
        memory += sum(200 + len(right.acl) for right in content.rights)
        await self._memory.take(memory)
        mode, size, time_ns = stat.S_IFREG | 0o444, content.bytes.size, content.mtime_ns
        owner, times = (directory.uid, directory.gid), (time_ns, time_ns, time_ns)
        inode = Inode(ino, mode, *owner, 1, 0, size, -(-size // 512), *times)
        file = self._files[ino] = _VirtualFile(inode, parent, name, content, watch, memory)
        return file

    def _forget(self) -> None:
        """Forget what was not asked for lately; it is made anew on demand."""
        named = set(map(id, self._named.values()))
        for file in list(self._files.values()):
            if not file.opens and id(file) not in named:
                self._drop(file)
        held = sum(file.memory for file in self._named.values() if not file.opens)
        while len(self._named) > _KNOWN_MAX or held > self._memory.idle_max:
            before = self._memory.taken
            if not self._forget_one(keep=1):
                break
            held -= before - self._memory.taken

    def _forget_one(self, keep: int = 0) -> bool:
        """Forget the first unopened one that is not among the ``keep`` last; False if there is
        none."""
        idle = [key for key, file in self._named.items() if not file.opens]
        if len(idle) <= keep:
            return False
        self._drop(self._named.pop(idle[0]))
        return True

    def _drop(self, file: _VirtualFile) -> None:
        del self._files[file.inode.ino]
        self._memory.leave(file.memory)

    async def getattr(self, ino: int) -> Inode:
        """Raises Stale for a file that is remembered no more, NotFound."""
        if ino >= FILES:
            await self._take_up(ino)
            return self._file(ino).inode
        top = directory_of(ino)
        return _directory(ino, await self._engine.view(namespace.get_directory, top))

    def _file(self, ino: int) -> _VirtualFile:
        try:
            return self._files[ino]
        except KeyError:
            raise Stale("the virtual file is to be found by its name again") from None

    # --- open files ---

    async def open(self, ino: int, flags: int, caller: CallerLike) -> Opened:
        """Raises ReadOnly; AccessDenied if ``caller`` may not read all sources; Stale if that may
        have changed since the lookup (O_PATH)."""
        if flags & (os.O_ACCMODE | os.O_TRUNC):
            raise ReadOnly("virtual files cannot be written")
        await self._take_up(ino)
        file, asker = self._file(ino), asker_of(caller)
        require_all(file.content.rights, asker)
        directory = await self._engine.view(namespace.get_directory, file.top)
        try:
            require_all([right_to(directory), *file.watch.rights], asker)
        except AccessDenied:
            raise Stale("the virtual file is to be found by its name again") from None
        if self._kept.is_on and not file.signature:
            file.signature = await signature_of(file.content)
        if self._files.get(ino) is not file:  # forgotten meanwhile
            raise Stale("the virtual file is to be found by its name again")
        with self._refusals.noted(file.top, caller, "open"):
            self._memory.open(asker.uid, ino, file.memory)
        self._last += 1
        handle = HANDLE_MAX + 1 + self._last % HANDLE_MAX
        while self.has(handle):
            handle = HANDLE_MAX + 1 + (handle + 1) % HANDLE_MAX
        self._opened[handle] = file, asker.uid
        file.opens += 1
        if self._kept.is_on:
            note = _NOTE.pack(ino, file.parent, asker.uid, file.signature) + file.name
            self._kept.note(_LEFT + _HANDLE.pack(handle), note)
        return Opened(handle)

    def has(self, handle: int) -> bool:
        """Whether it is the handle of a virtual file."""
        return handle in self._opened or handle in self._left

    async def _take_up(self, ino: int) -> None:
        """Open a file again that programs had open when another daemon died. Raises Stale if the
        directory holds other bytes now, OutOfMemory."""
        if not self._left:
            return
        async with self._taking_up:
            handles = [handle for handle, left in self._left.items() if left.ino == ino]
            if not handles:
                return
            file = None if ino in self._lost else await self._make_again(self._left[handles[0]])
            if file is None:
                self._lost.add(ino)
                raise Stale("the virtual file was opened before a daemon died, and has changed")
            for handle in handles:
                if (left := self._left.get(handle)) is not None:  # not closed meanwhile
                    self._memory.open(left.uid, ino, file.memory)
                    self._opened[handle] = file, left.uid
                    file.opens += 1
                    del self._left[handle]

    async def _make_again(self, left: _Left) -> _VirtualFile | None:
        """The file, if it can be made, and holds the same bytes."""
        top, name = directory_of(left.parent), left.name
        try:
            directory = await self._engine.view(namespace.get_directory, top)
            make = self._maker(left.parent, name, _ROOT)
            async with self._memory.making(left.uid) as counted:
                watch = self._watches.begin(counted)
                content = await make(top, watch, None)
        except OutOfMemory:
            raise
        except FsError:
            return None
        if await signature_of(content) != left.signature:
            return None
        file = await self._add(left.ino, left.parent, name, content, watch, directory)
        file.signature = left.signature
        self._named.setdefault((top, name), file)
        return file

    def release(self, handle: int) -> None:
        if self._kept.is_on:
            self._kept.note(_LEFT + _HANDLE.pack(handle), b"")
        if self._left.pop(handle, None) is not None:
            return
        file, uid = self._opened.pop(handle)
        file.opens -= 1
        self._memory.close(uid, file.inode.ino, file.memory)
        self._forget()

    async def read(self, handle: int, offset: int, length: int) -> bytes | memoryview:
        """Up to ``length`` bytes, fewer only at the end. Raises Stale if a source has changed, and
        its errors."""
        file = await self._opened_by(handle)
        content = file.content
        length = min(length, content.bytes.size - offset)
        if length <= 0:
            return b""
        data = self._buffers.take(length)
        small: list[SettledPart] = []
        reads: list[Callable[[], Awaitable[None]]] = []
        at = 0
        for piece in content.bytes.pieces(offset, length):
            target = data[at : at + (len(piece) if isinstance(piece, bytes) else piece.length)]
            at += len(target)
            if isinstance(piece, bytes):
                target[:] = piece
                continue
            source = content.source(piece.source)
            if isinstance(piece, ShiftedNumbers):
                reads.append(partial(self._read_numbers, source, piece, target))
            elif source.size <= SMALL:
                small.append(SettledPart(source, piece.offset, target))
            else:
                reads.append(partial(self._read_part, SettledPart(source, piece.offset, target)))
        if small:
            reads.append(partial(self._read_small, small))
        try:
            await run_all(*reads)
        except Stale:
            file.watch.changed = True
            raise
        return data

    async def _opened_by(self, handle: int) -> _VirtualFile:
        """Raises Stale."""
        if handle in self._left:
            await self._take_up(self._left[handle].ino)
        return self._opened[handle][0]

    async def _read_small(self, parts: list[SettledPart]) -> None:
        others = await self._io.settled.read(parts)
        await run_all(*(partial(self._read_part, part) for part in others))

    async def _read_part(self, part: SettledPart) -> None:
        part.target[:] = await read_source(self._io, part.source, part.offset, len(part.target))

    async def _read_numbers(
        self, source: Source, piece: ShiftedNumbers, target: memoryview
    ) -> None:
        _, offset, length = piece.numbers
        target[:] = piece.shifted(await read_source(self._io, source, offset, length))

    async def seek(self, handle: int, offset: int, whence: int) -> int:
        """SEEK_DATA and SEEK_HOLE of lseek(2): there are no holes. Raises NoSuchAddress, Stale."""
        size = (await self._opened_by(handle)).content.bytes.size
        if whence not in (os.SEEK_DATA, os.SEEK_HOLE):
            raise Invalid(f"whence {whence} is none of ours")
        if not 0 <= offset < size:
            raise NoSuchAddress()
        return offset if whence == os.SEEK_DATA else size


def _directory(ino: int, of: Inode) -> Inode:
    """A virtual directory, with owner and times of its real one. Reading is decided by file."""
    mode = stat.S_IFDIR | 0o555
    times = of.atime_ns, of.mtime_ns, of.ctime_ns
    return Inode(ino, mode, of.uid, of.gid, 2, 0, 0, 0, *times, of.ino)
