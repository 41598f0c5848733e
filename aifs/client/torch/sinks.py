"""Where a checkpoint's bytes go: large writes through the page cache, or past it through aligned
buffers.

*buffered*: large pieces go to the kernel from where they lie; small ones are gathered. The system
is asked to write them back early.

*direct* (O_DIRECT): two aligned buffers, one of which is filled while a thread writes the other.
The rest behind the last multiple of the alignment is written through the page cache (FastPersist,
section 4.1).

The way that reaches a device sooner is measured once, and remembered in the process, and for the
user in ``$XDG_CACHE_HOME/aifs/writing.json``: device -> way. A device is known by its number, kind
and source of its filesystem, as in /proc/self/mountinfo."""

import ctypes
import json
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from aifs.core import files, mountinfo, trees

BUFFERED, DIRECT = "buffered", "direct"

BUFFER = 16 << 20
ALIGNMENT = (
    4096  # of offsets, lengths and memory: enough for every device with sectors up to so much
)
_LARGE = 1 << 20
_WRITE_BACK = 64 << 20


class BufferedSink:
    """Through the page cache, to the descriptor ``fd``."""

    def __init__(self, fd: int, *, write_back: bool = True) -> None:
        self._fd, self._write_back = fd, write_back
        self._small = bytearray()
        self._position = self._handed = 0

    def write(self, data: bytes | memoryview) -> None:
        if len(data) < _LARGE:
            self._small += data
            if len(self._small) >= _LARGE:
                self._flush()
            return
        self._flush()
        view = memoryview(data)
        for begin in range(0, len(view), BUFFER):
            self._put(view[begin : begin + BUFFER])

    def skip(self, size: int) -> bool:
        return False

    def _flush(self) -> None:
        if self._small:
            self._put(memoryview(self._small))
            self._small = bytearray()

    def _put(self, data: memoryview) -> None:
        files.write_at(self._fd, data, self._position)
        self._position += len(data)
        if self._write_back and self._position - self._handed >= _WRITE_BACK:
            files.start_writing(self._fd, self._handed, self._position - self._handed)
            self._handed = self._position

    def finish(self) -> None:
        """Everything has been written; nothing is durable. Raises OSError."""
        self._flush()

    def abandon(self) -> None:
        """Nothing is written any more when this returns."""


class DirectSink:
    """Past the page cache, to the empty file ``fd``. Raises OSError (EINVAL) if impossible."""

    def __init__(self, fd: int) -> None:
        files.set_direct(fd, True)
        self._fd = fd
        self._buffers = [mmap.mmap(-1, BUFFER) for _ in range(2)]
        """Two, which take turns: one is filled while the other is written."""
        self._addresses = [
            ctypes.addressof(ctypes.c_char.from_buffer(buffer)) for buffer in self._buffers
        ]
        """Where each of them begins in memory."""
        self._pending: list[Future[None] | None] = [None, None]
        """The write of each that is under way; None: none is."""
        self._side = 0
        """Which of them is being filled."""
        self._filled = 0
        """How many bytes of that are."""
        self._position = 0
        """Where in the file it will be written."""
        self._pool = ThreadPoolExecutor(1, "aifs-direct")
        """The thread that writes."""

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        done = 0
        while done < len(view):
            count = min(BUFFER - self._filled, len(view) - done)
            _copy(self._addresses[self._side] + self._filled, view[done : done + count])
            self._filled += count
            done += count
            if self._filled == BUFFER:
                self._turn(BUFFER)

    def skip(self, size: int) -> bool:
        return False

    def _turn(self, length: int) -> None:
        """Have this buffer written; take the other."""
        data = memoryview(self._buffers[self._side])[:length]
        self._pending[self._side] = self._pool.submit(
            files.write_at, self._fd, data, self._position
        )
        self._position += length
        self._side, self._filled = 1 - self._side, 0
        other, self._pending[self._side] = self._pending[self._side], None
        if other is not None:
            other.result()

    def finish(self) -> None:
        """Everything has been written; nothing is durable. Raises OSError."""
        tail = self._filled % ALIGNMENT
        whole = self._filled - tail
        rest = bytes(self._buffers[self._side][whole : self._filled])
        try:
            if whole:
                self._turn(whole)
            for future in self._pending:
                if future is not None:
                    future.result()
        finally:
            self.abandon()
        if rest:
            files.set_direct(self._fd, False)
            files.write_at(self._fd, rest, self._position)

    def abandon(self) -> None:
        """Nothing is written any more when this returns."""
        self._pool.shutdown(cancel_futures=True)


Sink = BufferedSink | DirectSink


def open_sink(fd: int, method: str, *, write_back: bool = True) -> Sink:
    """``method``: BUFFERED or DIRECT."""
    makers: dict[str, Callable[[], Sink]] = {
        BUFFERED: lambda: BufferedSink(fd, write_back=write_back),
        DIRECT: lambda: DirectSink(fd),
    }
    return makers[method]()


def _copy(address: int, data: memoryview) -> None:
    if data.readonly:
        ctypes.memmove(address, bytes(data), len(data))
    else:
        ctypes.memmove(address, (ctypes.c_char * len(data)).from_buffer(data), len(data))


SIZE = 64 << 20
"""Bytes that are written to measure a way; files that are smaller are not worth it."""

_known: dict[str, str] = {}


def writing_method(directory: str, size: int) -> str:
    """For a file of ``size`` bytes that shall soon be durable in ``directory``. Raises OSError."""
    if size < SIZE or mountinfo.is_in_memory(directory):
        return BUFFERED
    device = device_of(directory)
    if device not in _known:
        _known.update(_read())
    if device not in _known:
        _known[device] = faster_method(directory)
        with suppress(OSError):
            # A cache directory that cannot be written: measured again by the next process.
            _write(_read() | _known)
    return _known[device]


def device_of(directory: str) -> str:
    """Such as ``252:1 ext4 /dev/vda1``."""
    number = os.stat(directory).st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    for mount in mountinfo.all_mounts():
        if mount.device == number:
            return f"{device} {mount.fstype} {mount.source}"
    return device  # a subvolume: its number is in no table


def faster_method(directory: str) -> str:
    """The faster one, to stable storage."""
    taken = {}
    data = memoryview(mmap.mmap(-1, SIZE))
    for method in (BUFFERED, DIRECT):
        path = trees.beside(os.path.join(directory, "probe"))
        fd = trees.create_file(path)
        try:
            begin = time.perf_counter()
            sink = open_sink(fd, method)
            sink.write(data)
            sink.finish()
            files.sync_file(fd)
            taken[method] = time.perf_counter() - begin
        except OSError:
            if method == BUFFERED:
                raise
        finally:
            files.close_file(fd)
            files.unlink(path)
    return min(taken, key=lambda method: taken[method])


def _cache() -> str:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(base, "aifs", "writing.json")


def _read() -> dict[str, str]:
    try:
        found = json.loads(files.read_file(_cache()) or b"{}")
        return {device: method for device, method in found.items() if method in (BUFFERED, DIRECT)}
    except (ValueError, AttributeError, OSError):
        return {}


def _write(known: dict[str, str]) -> None:
    trees.make_dir(os.path.dirname(_cache()))
    trees.replace_file(_cache(), json.dumps(known, indent=1).encode(), durable=False)
