"""Programs and the kernel's part of their calls, in process: descriptors, and passthrough to local
files.

``Kernel`` has the methods of the filesystem, with plain handles. Where the filesystem answers an
open with a backing id, reads and writes go to that file directly, behind the filesystem's back, as
FUSE passthrough does; where the open file is also "direct", they go to the filesystem. They go
through ``files``, so that a test's hook sees them.
"""

import errno
import inspect
import mmap
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any, Self

from aifs.core import clock, files
from aifs.core.errors import BadHandle, FileTooLarge, FsError, NoSpace, Unavailable
from aifs.files.types import AHEAD, EVERY_SOURCE, LENT, LENT_HERE, Lent, Opened, ReadPlace
from aifs.vfs import Filesystem

_NOT_DIRECT = (None, 0)
_NOT_LENT = os.O_ACCMODE | os.O_TRUNC  # opens with one of these are not answered by the bridge
_LENT_MAX = 4
_PLACED_MAX = 4
_SERIAL = 40  # the handles of an inode that is lent differ here alone, and only for tests
_ERRORS = {
    errno.EBADF: BadHandle,
    errno.ENOSPC: NoSpace,
    errno.EFBIG: FileTooLarge,
    errno.EIO: Unavailable,
}


class Kernel:
    """What lies between programs and ``fs``. It passes files through unless the configuration
    forbids it.

    Like the kernel, it insists that all opens of an inode at a time are of one kind, and it opens
    the backing file anew for each handle, with the handle's access mode. That must not have to wait
    for a lease. Of the bridge it has the table of inodes that are lent, for few of them.
    """

    def __init__(self, fs: Filesystem) -> None:
        self._fs = fs
        self._backing: dict[int, str] = {}  # backing id -> path
        self._next = 1
        self._direct: dict[
            int, tuple[int, int]
        ] = {}  # handle -> descriptor of the burst copy, flags
        self._opened: dict[int, dict[int, int]] = {}  # ino -> handle -> backing id
        self._inos: dict[int, int] = {}  # handle -> ino
        self._lent: dict[int, Lent] = {}
        self._due_ns: dict[int, int] = {}
        self._asks: dict[int, bool] = {}
        self._recalled: set[int] = set()
        self._is_watched = False
        self._noted: dict[tuple[int, int], None] = {}
        self._told: set[tuple[int, int]] = set()
        self._lent_handles = 0
        self._sources: dict[int, tuple[int, Sequence[int]]] = {}  # number -> unit, descriptors
        self._read_units = Counter[int]()  # by number, a mask
        self._placed: dict[int, tuple[int, Sequence[ReadPlace]]] = {}  # ino -> size, places
        self._begun: set[int] = set()  # sources that have places
        self.answered = 0
        """Opens that were answered without the filesystem, as the bridge does."""
        self.direct_bytes = 0
        """Bytes that were read and written behind the filesystem's back."""
        self.placed_bytes = 0
        """Bytes that were read from places, as the bridge does."""
        if fs.store.config.burst.passthrough:
            fs.kernel.passthrough = self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        """The programs end, and the mount with them: it closes by itself what is open."""
        for fd, _ in self._direct.values():
            files.close_file(fd)
        self._direct.clear()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._fs, name)
        if not inspect.iscoroutinefunction(method):
            return method

        def call(*args: Any, **others: Any) -> Any:
            return method(
                *map(_as_sent, args), **{key: _as_sent(arg) for key, arg in others.items()}
            )

        return call

    # --- what the filesystem asks of the kernel ---

    def attach(self, fd: int) -> int:
        backing, self._next = self._next, self._next + 1
        path = os.readlink(f"/proc/self/fd/{fd}")
        if "/blocks/" in path:  # it may get another name
            path = f"/proc/self/fd/{os.open(path, os.O_PATH)}"
        self._backing[backing] = path
        return backing

    def detach(self, backing: int) -> None:
        path = self._backing.pop(backing)
        if path.startswith("/proc/self/fd/"):
            os.close(int(path.rpartition("/")[2]))

    @property
    def backed(self) -> list[str]:
        """The local files that it keeps open to pass files through."""
        return list(self._backing.values())

    def lend(self, ino: int, backing: int, copy_id: int, due_ns: int, asks: bool) -> Lent | None:
        assert not backing or backing in self._backing
        self._asks[ino] = asks
        if ino in self._lent:
            assert self._lent[ino].backing == backing and self._lent[ino].copy_id == copy_id
            self._due_ns[ino] = due_ns
            return None
        assert not self._opened.get(ino)
        left = self._lent.pop(next(iter(self._lent))) if len(self._lent) >= _LENT_MAX else None
        if left is not None and left.opens:
            self._lent[left.ino] = left
            return Lent(ino, backing, copy_id, 0, 0)
        self._lent[ino], self._due_ns[ino] = Lent(ino, backing, copy_id, 0, 0), due_ns
        return left

    def note_attributes(self, ino: int, record: bytes) -> None:
        """Names are the filesystem's here."""

    def note_entries(self, entries: list[tuple[bytes, bytes]]) -> None:
        """The same."""

    def take_back(self, ino: int, idle: bool = False) -> Lent | None:
        lent = self._lent.get(ino)
        if lent is not None and idle and lent.opens:
            self._recalled.add(ino)
        elif lent is not None:
            del self._lent[ino]
            self._recalled.discard(ino)
        return lent

    def find_lent(self, ino: int) -> Lent | None:
        return self._lent.get(ino)

    def open_lent(self, ino: int, flags: int, uid: int) -> bool:
        lent, asks = self._lent.get(ino), self._is_watched and self._asks.get(ino)
        if lent is None or ino in self._recalled or asks or flags & _NOT_LENT:
            return False
        if self._is_watched and not flags & AHEAD and (ino, uid) not in self._told:
            self._noted[ino, uid] = None
        now_ns, due_ns = clock.kernel_ns(), self._due_ns[ino]
        accessed_ns = now_ns if now_ns >= due_ns else lent.accessed_ns
        self._lent[ino] = lent._replace(opens=lent.opens + 1, accessed_ns=accessed_ns)
        return True

    def all_lent(self, which: str) -> list[Lent]:
        if which == "all":
            return list(self._lent.values())
        used = which == "used"
        found = [lent for lent in self._lent.values() if lent.opens or (used and lent.accessed_ns)]
        if used:
            self._lent = {ino: each._replace(accessed_ns=0) for ino, each in self._lent.items()}
        return found

    def watch_opens(self, on: bool) -> None:
        self._is_watched = on
        self._told.clear()

    def noted_opens(self) -> list[tuple[int, int]]:
        noted = list(self._noted)
        self._told |= self._noted.keys()
        self._noted.clear()
        return noted

    def put_source(self, number: int, unit: int, in_memory: bool, fds: Sequence[int]) -> None:
        assert not any(place.source == number for place in self._all_places())
        assert all(fd < 0 or os.fstat(fd) for fd in fds)
        self._sources[number] = unit, tuple(fds)

    def put_places(
        self, ino: int, size: int, places: Sequence[ReadPlace]
    ) -> tuple[bool, list[int]]:
        assert all(place.source in self._sources for place in places)
        given_way = next(iter(self._placed)) if len(self._placed) >= _PLACED_MAX else ino
        self._placed.pop(given_way, None)
        self._placed[ino] = size, places
        self._begun |= {place.source for place in places}
        return True, self._idle()

    def take_places(self, ino: int) -> list[int]:
        self._placed.pop(ino, None)
        return self._idle()

    def take_source(self, number: int) -> list[int]:
        for ino, (_, places) in list(self._placed.items()):
            if number == EVERY_SOURCE or any(place.source == number for place in places):
                del self._placed[ino]
        of_all = number == EVERY_SOURCE
        self._begun |= self._sources.keys() if of_all else self._sources.keys() & {number}
        return self._idle()

    def has_places(self, ino: int) -> bool:
        """Whether reads of an inode are answered without the filesystem."""
        return ino in self._placed

    def read_units(self) -> list[tuple[int, int]]:
        found = list(self._read_units.items())
        self._read_units.clear()
        return found

    def _all_places(self) -> list[ReadPlace]:
        return [place for _, places in self._placed.values() for place in places]

    def _idle(self) -> list[int]:
        """Sources that have lost their last place, and are forgotten."""
        idle = list(self._begun - {place.source for place in self._all_places()})
        for number in idle:
            del self._sources[number]
            self._read_units.pop(number, None)
        self._begun -= {*idle}
        return idle

    def read_placed(self, ino: int, offset: int, length: int) -> bytes | None:
        """What the bridge answers to READ; None: the filesystem answers it."""
        if ino not in self._placed or files.is_hooked() or self._is_watched:
            return None
        size, places = self._placed[ino]
        data = b""
        while offset < min(offset + length, size):
            place = next((each for each in places if each.start <= offset < each.end), None)
            if place is None:
                return None
            unit, fds = self._sources[place.source]
            row_unit, within = divmod(place.offset + offset - place.start, unit)
            step = min(unit - within, length, place.end - offset)
            fd = fds[row_unit % len(fds)]
            self._read_units[place.source] |= 1 << row_unit % 64
            read = files.read_at(fd, step, row_unit // len(fds) * unit + within)
            if len(read) < step:
                return None
            data, offset, length = data + read, offset + step, length - step
        self.placed_bytes += len(data)
        return data

    # --- what programs ask of the kernel ---

    async def open(self, ino: int, flags: int, uid: int = 0) -> int:
        if self.open_lent(ino, flags, uid):
            self.answered += 1
            opened = Opened(LENT_HERE, self._lent[ino].backing)
        else:
            opened = await self._fs.open(ino, flags)
        if opened.handle == LENT_HERE:
            self._lent_handles += 1
            opened = opened._replace(handle=LENT | self._lent_handles << _SERIAL | ino)
        return await self._add(ino, opened, flags)

    async def create(
        self, parent: int, name: bytes, mode: int, flags: int, caller: Any
    ) -> tuple[int, Any]:
        opened, inode = await self._fs.create(parent, name, mode, flags, caller)
        return await self._add(inode.ino, opened, flags), inode

    async def _add(self, ino: int, opened: Opened, flags: int) -> int:
        handle, backing, direct, _ = opened
        others = self._opened.setdefault(ino, {})
        assert set(others.values()) <= {backing}, (
            f"inode {ino} is open in two ways: {others} and {backing}"
        )
        others[handle] = backing
        self._inos[handle] = ino
        if backing and not direct:
            access = flags & os.O_ACCMODE
            try:
                self._direct[handle] = (
                    _attempt(_open_backing, self._backing[backing], access),
                    flags,
                )
            except FsError:
                await self.release(handle)
                raise
        return handle

    async def release(self, handle: int) -> None:
        direct = self._direct.pop(handle, None)
        if direct is not None:
            files.close_file(direct[0])
        ino = self._inos.pop(handle)
        del self._opened[ino][handle]
        lent = self._lent.get(ino)
        if handle < LENT or lent is None or ino in self._recalled:
            await self._fs.release(_as_sent(handle))
        else:
            self._lent[ino] = lent._replace(opens=lent.opens - 1)

    async def read(self, handle: int, offset: int, length: int) -> bytes | memoryview:
        fd, flags = self._direct.get(handle, _NOT_DIRECT)
        if fd is None:
            data = self.read_placed(self._inos.get(handle, 0), offset, length)
            if data is not None:
                return data
            return await self._fs.read(_as_sent(handle), offset, length)
        if flags & os.O_ACCMODE == os.O_WRONLY:
            raise BadHandle()
        data = _attempt(files.read_at, fd, length, offset)
        self.direct_bytes += len(data)
        return data

    async def write(self, handle: int, offset: int, data: bytes) -> int:
        fd, flags = self._direct.get(handle, _NOT_DIRECT)
        if fd is None:
            return await self._fs.write(handle, offset, data)
        _attempt(files.write_at, fd, data, offset)
        if flags & os.O_DSYNC:
            _attempt(files.sync_file, fd)
        self.direct_bytes += len(data)
        return len(data)

    def map(self, handle: int, length: int, access: int = os.O_RDWR) -> mmap.mmap | None:
        """A shared mapping of a passed-through file, which outlives the handle; None if it cannot
        be. It is writable, unless ``access`` is O_RDONLY."""
        fd, flags = self._direct.get(handle, _NOT_DIRECT)
        if (
            fd is None
            or flags & os.O_ACCMODE != access
            or not length
            or os.fstat(fd).st_size < length
        ):
            return None
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if access == os.O_RDWR else 0)
        return mmap.mmap(fd, length, prot=protection)


def _as_sent(argument: Any) -> Any:
    """A handle of an inode that is lent, as the filesystem knows it; other arguments as they
    are."""
    if isinstance(argument, int) and argument >= LENT:
        return LENT | argument & ((1 << _SERIAL) - 1)
    return argument


def _open_backing(path: str, access: int) -> int:
    # EWOULDBLOCK: the filesystem has kept its lease.
    os.close(os.open(path, access | os.O_NONBLOCK))
    if path.startswith("/proc/") and os.path.exists(name := os.readlink(path)):
        path = name  # a test's hook knows the file by that
    return files.open_file(path, write=access != os.O_RDONLY)


def _attempt(function: Any, *args: Any) -> Any:
    try:
        return function(*args)
    except OSError as error:
        kind = _ERRORS.get(error.errno)
        if kind is None:
            raise
        raise kind(str(error)) from None


async def all_of(kernel: Kernel, handle: int) -> bytes:
    """The bytes of a small file, as one read gives them."""
    return bytes(await kernel.read(handle, 0, 1 << 20))
