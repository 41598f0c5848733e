"""One file, thrashed: random reads, writes, truncations and mappings over the borders of stripes.

A bytearray says what the file must hold. After the manner of fsx: every size and offset is likely
to lie near a border, and every so often the file is closed, and the whole is unmounted, or killed
after an fsync.
"""

import itertools
import mmap
import multiprocessing
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.mounts import Mounted
from tests.support.sequences import payload

PAGE = mmap.PAGESIZE

MountStore = Callable[..., Mounted]


class Thrasher:
    """A file below ``directory`` and the bytes that it must hold, at most ``largest`` of them."""

    def __init__(self, path: Path, unit: int, largest: int, seed: int) -> None:
        self.path = path
        self.expected = bytearray()
        self.trace: list[str] = []
        self._unit = unit
        self._largest = largest
        self._rng = random.Random(seed)
        self._fds: list[int] = []
        self._kinds = {
            self.read: 20,
            self.write: 20,
            self.append: 5,
            self.map_read: 10,
            self.map_write: 10,
            self.truncate: 8,
            self.direct_read: 5,
            self.direct_write: 5,
            self.scattered: 4,
            self.fsync: 2,
            self.reopen: 3,
            self.punch_by_rewrite: 2,
        }

    def run(self, count: int) -> None:
        kinds, weights = list(self._kinds), list(self._kinds.values())
        for kind in self._rng.choices(kinds, weights, k=count):
            self.trace.append(kind.__name__)
            kind()
            assert os.fstat(self._fd).st_size == len(self.expected), self.history
        self.check_all()

    @property
    def history(self) -> str:
        return "the last operations were:\n" + "\n".join(self.trace[-12:])

    def open(self) -> None:
        self._fds = [os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644) for _ in range(2)]

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())

    @property
    def _fd(self) -> int:
        return self._rng.choice(self._fds)

    def _range(self, limit: int, step: int = 1) -> tuple[int, int]:
        """Offset and length, within ``limit`` bytes, near borders as often as not."""
        offset = self._place(limit)
        length = min(
            self._rng.choice((10, 2 * PAGE, self._unit, 3 * self._unit + 5, self._largest)),
            limit - offset,
        )
        offset = offset // step * step
        length = max(step, self._rng.randint(0, max(0, length)) // step * step)
        self.trace[-1] += f" offset {offset} length {length} size {len(self.expected)}"
        return offset, length

    def _place(self, limit: int) -> int:
        if self._rng.random() < 0.5:
            return self._rng.randint(0, max(0, limit - 1))
        border = self._rng.choice((PAGE, self._unit, 4 * self._unit, 2048))
        near = self._rng.randint(0, limit // border) * border + self._rng.randint(-3, 3)
        return max(0, min(near, limit - 1))

    def _data(self, length: int) -> bytes:
        return payload(self._rng.randrange(1 << 30), length)

    def _compare(self, offset: int, found: bytes, length: int) -> None:
        expected = self.expected[offset : offset + length]
        if found != expected:
            first = next(
                (i for i, pair in enumerate(zip(found, expected)) if pair[0] != pair[1]), -1
            )
            raise AssertionError(
                f"{len(found)} bytes read for {len(expected)}; the first difference is at "
                f"{offset + first}; {self.history}"
            )

    def _store(self, offset: int, data: bytes) -> None:
        if offset > len(self.expected):
            self.expected.extend(bytes(offset - len(self.expected)))
        self.expected[offset : offset + len(data)] = data

    def check_all(self) -> None:
        found = b""
        while part := os.pread(self._fds[0], 1 << 20, len(found)):
            found += part
        self._compare(0, found, len(self.expected) + 1)

    def read(self) -> None:
        offset, length = self._range(self._largest)
        self._compare(offset, os.pread(self._fd, length, offset), length)

    def write(self) -> None:
        offset, length = self._range(self._largest)
        data = self._data(length)
        assert os.pwrite(self._fd, data, offset) == length
        self._store(offset, data)

    def append(self) -> None:
        data = self._data(self._rng.randint(1, self._unit))
        if len(self.expected) + len(data) <= self._largest:
            fd = os.open(self.path, os.O_WRONLY | os.O_APPEND)
            try:
                assert os.write(fd, data) == len(data)
            finally:
                os.close(fd)
            self.expected += data

    def scattered(self) -> None:
        """preadv and pwritev of several buffers."""
        offset, length = self._range(self._largest)
        parts = [self._data(length // 3 + 1) for _ in range(3)]
        assert os.pwritev(self._fd, parts, offset) == sum(map(len, parts))
        self._store(offset, b"".join(parts))
        buffers = [bytearray(100), bytearray(length)]
        count = os.preadv(self._fd, buffers, offset)
        self._compare(offset, b"".join(buffers)[:count], 100 + length)

    def truncate(self) -> None:
        size = self._rng.choice(
            (0, self._place(self._largest), self._place(self._largest), self._place(self._largest))
        )
        self.trace[-1] += f" to {size} from {len(self.expected)}"
        if self._rng.random() < 0.5:
            os.truncate(self.path, size)
        else:
            os.ftruncate(self._fd, size)
        del self.expected[size:]
        self.expected.extend(bytes(size - len(self.expected)))

    def map_read(self) -> None:
        if self.expected:
            offset, length = self._range(len(self.expected))
            length = min(length, len(self.expected) - offset)
            start = offset // PAGE * PAGE
            with mmap.mmap(
                self._fd, offset + length - start, prot=mmap.PROT_READ, offset=start
            ) as view:
                self._compare(offset, view[offset - start :], length)

    def map_write(self) -> None:
        if self.expected:
            offset, length = self._range(len(self.expected))
            data = self._data(min(length, len(self.expected) - offset))
            start = offset // PAGE * PAGE
            with mmap.mmap(self._fd, offset + len(data) - start, offset=start) as view:
                view[offset - start :] = data
                if self._rng.random() < 0.5:
                    view.flush()
            self._store(offset, data)

    def direct_read(self) -> None:
        offset, length = self._range(self._largest, PAGE)
        with _direct(self.path, os.O_RDONLY) as fd, mmap.mmap(-1, length) as aligned:
            count = os.preadv(fd, [aligned], offset)
            self._compare(offset, aligned[:count], length)

    def direct_write(self) -> None:
        offset, length = self._range(self._largest, PAGE)
        data = self._data(length)
        with _direct(self.path, os.O_WRONLY) as fd, mmap.mmap(-1, length) as aligned:
            aligned[:] = data
            assert os.pwritev(fd, [aligned], offset) == length
        self._store(offset, data)

    def punch_by_rewrite(self) -> None:
        """Cut the file short and extend it again: what was there must not come back."""
        size = len(self.expected)
        cut = self._place(max(1, size))
        os.ftruncate(self._fd, cut)
        os.ftruncate(self._fd, size)
        self.expected[cut:] = bytes(size - min(cut, size))

    def fsync(self) -> None:
        os.fsync(self._fd)

    def reopen(self) -> None:
        self.close()
        self.open()
        self.check_all()


@contextmanager
def _direct(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags | os.O_DIRECT)
    try:
        yield fd
    finally:
        os.close(fd)


def _thrash(store: Mounted, unit: int, largest: int, seed: int, rounds: int, count: int) -> None:
    directory = store.path / "fsx"
    directory.mkdir()
    os.setxattr(directory, "user.aifs.layout", b"unit=%d" % unit)
    thrasher = Thrasher(directory / "file", unit, largest, seed)
    for number in range(rounds):
        thrasher.open()
        try:
            thrasher.run(count)
            if number % 3 == 2:
                thrasher.fsync()
                thrasher.trace.append("kill")
        finally:
            thrasher.close()
        if number % 3 == 0:
            thrasher.trace.append("remount")
            store.remount()
        elif number % 3 == 2:
            store.kill()
            store.mount()
    thrasher.open()
    try:
        thrasher.check_all()
    finally:
        thrasher.close()


@pytest.mark.sweep("unit", "largest")
@pytest.mark.parametrize(("unit", "largest"), [(4096, 150_000), (65536, 1_000_000)])
def test_thrash_one_file(mounted: Mounted, unit: int, largest: int) -> None:
    _thrash(mounted, unit, largest, seed=unit, rounds=4, count=400)


@pytest.mark.sweep
def test_thrash_one_file_without_inline_bytes(mount_store: MountStore) -> None:
    _thrash(
        mount_store("layout.inline_limit=0", "layout.count=2"),
        4096,
        60_000,
        seed=5,
        rounds=2,
        count=400,
    )


@pytest.mark.sweep
def test_kill_loses_no_byte_that_was_written(mounted: Mounted) -> None:
    """Neither closed nor synced: a write that has returned survives the daemon's death."""
    os.setxattr(mounted.path, "user.aifs.layout", b"unit=4KiB")
    rng = random.Random(6)
    expected: dict[Path, bytearray] = {
        mounted.path / f"file{number}": bytearray() for number in range(8)
    }
    for _ in range(3):
        fds = {path: os.open(path, os.O_RDWR | os.O_CREAT) for path in expected}
        for _ in range(150):
            path = rng.choice(list(expected))
            held = expected[path]
            if rng.random() < 0.15:
                size = rng.randrange(40_000)
                os.ftruncate(fds[path], size)
                del held[size:]
                held.extend(bytes(size - len(held)))
            else:
                offset = rng.randrange(40_000)
                data = payload(rng.randrange(1 << 30), rng.randint(1, 20_000))
                os.pwrite(fds[path], data, offset)
                held.extend(bytes(max(0, offset - len(held))))
                held[offset : offset + len(data)] = data
        mounted.kill()
        for fd in fds.values():
            with suppress(OSError):  # the descriptors are of a mount that is gone
                os.close(fd)
        mounted.mount()
        assert [path.read_bytes() == held for path, held in expected.items()] == [True] * 8


def _thrash_region(path: Path, start: int, end: int, seed: int) -> bytes:
    """Random writes to, and reads of, the bytes from ``start`` to ``end`` of a shared file; what is
    there at last."""
    rng = random.Random(seed)
    expected = bytearray(end - start)
    fd = os.open(path, os.O_RDWR)
    for number in range(300):
        offset = rng.randrange(len(expected))
        length = rng.randint(1, len(expected) - offset)
        if rng.random() < 0.5:
            expected[offset : offset + length] = data = payload(rng.randrange(1 << 30), length)
            os.pwrite(fd, data, start + offset)
        else:
            found = os.pread(fd, length, start + offset)
            assert found == expected[offset : offset + length], (number, start + offset, length)
        if rng.random() < 0.03:
            os.fsync(fd)
    os.close(fd)
    return bytes(expected)


@pytest.mark.sweep
def test_several_processes_on_one_file(mounted: Mounted) -> None:
    """Each has a part of the file to itself, with borders inside pages and stripe units."""
    os.setxattr(mounted.path, "user.aifs.layout", b"unit=4KiB")
    path = mounted.path / "shared"
    borders = [0, 50_001, 99_999, 180_000, 250_123]
    path.write_bytes(bytes(borders[-1]))
    regions = list(itertools.pairwise(borders))
    context = multiprocessing.get_context("fork")
    with context.Pool(len(regions)) as pool:
        arguments = [(path, start, end, start) for start, end in regions]
        parts = pool.starmap(_thrash_region, arguments, chunksize=1)
    assert path.read_bytes() == b"".join(parts)
    mounted.remount()
    assert path.read_bytes() == b"".join(parts)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_thrash_one_file_for_long(mounted: Mounted, seed: int) -> None:
    unit = random.Random(seed).choice((4096, 8192, 65536, 1 << 20))
    _thrash(mounted, unit, 20 * unit, seed, rounds=9, count=5000)
