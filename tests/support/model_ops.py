"""Random operations for the filesystem without a kernel: what they are called, and with which
arguments.

Paths are tuples of names, slots stand for handles. What each operation does is ``lockstep``'s
business.
"""

import os
import random
import stat

from aifs.files.ranges import KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE
from tests.support.oracle import EXCHANGE, NOREPLACE
from tests.support.sequences import Op, Weighted

SLOTS = 6

_ops = Weighted()


def _path(rng: random.Random) -> tuple[bytes, ...]:
    depth = rng.choices((1, 2, 3), (6, 4, 2))[0]
    names = [rng.choice((b"a", b"b", b"c", b"\xff\n")) for _ in range(depth)]
    if rng.random() < 0.02:
        names[-1] = rng.choice((b"n" * 255, b"n" * 256))
    return tuple(names)


def _target(rng: random.Random) -> tuple[bytes, ...] | int:
    return rng.randrange(SLOTS) if rng.random() < 0.3 else _path(rng)


def _caller(rng: random.Random) -> tuple[int, int]:
    return rng.choice(((0, 0), (0, 0), (1000, 1000), (4_000_000_000, 7)))


def _offset(rng: random.Random) -> int:
    if rng.random() < 0.04:
        return 1 << rng.choice((31, 32, 40, 44))
    border = rng.choice((0, 0, 100, 2048, 4096, 8192, 16384, 65536))
    return max(0, border + rng.randint(-200, 200)) if rng.random() < 0.7 else rng.randrange(80_000)


def _length(rng: random.Random) -> int:
    return rng.choice((1, rng.randrange(1, 100), rng.randrange(1, 3000), rng.randrange(1, 30000)))


def _slot(rng: random.Random) -> int:
    return rng.randrange(SLOTS)


def _ns(rng: random.Random) -> int:
    return rng.choice((0, 999_999_999, 1_700_000_000_123_456_789, rng.randrange(1 << 61)))


def _xattr(rng: random.Random) -> bytes:
    return rng.choice((b"user.a", b"user.b", b"trusted.a", b"security.a", b"user." + b"n" * 250))


def _seed(rng: random.Random) -> int:
    return rng.randrange(1 << 30)


@_ops.add(14)
def create(rng: random.Random) -> Op:
    flags = (
        os.O_RDWR
        | rng.choice((0, os.O_EXCL))
        | rng.choice((0, 0, os.O_TRUNC))
        | rng.choice((0, 0, os.O_APPEND))
    )
    return _slot(rng), _path(rng), rng.choice((0o644, 0o600, 0o4755, 0o2755)), flags, _caller(rng)


@_ops.add(5)
def open(rng: random.Random) -> Op:
    flags = rng.choice(
        (os.O_RDONLY, os.O_RDWR, os.O_RDWR, os.O_RDWR | os.O_TRUNC, os.O_WRONLY | os.O_APPEND)
    )
    return _slot(rng), _path(rng), flags


@_ops.add(3)
def clone(rng: random.Random) -> Op:
    return _path(rng), _path(rng)


@_ops.add(12)
def write(rng: random.Random) -> Op:
    return _slot(rng), _seed(rng), _length(rng), _offset(rng)


@_ops.add(5)
def append(rng: random.Random) -> Op:
    return _slot(rng), _seed(rng), _length(rng)


@_ops.add(8)
def read(rng: random.Random) -> Op:
    return _slot(rng), _offset(rng), rng.choice((_length(rng), 131072))


@_ops.add(4)
def parallel(rng: random.Random) -> Op:
    reads = tuple((_slot(rng), _offset(rng), _length(rng)) for _ in range(3))
    return _slot(rng), _seed(rng), _length(rng), _offset(rng), reads, _slot(rng)


@_ops.add(5)
def truncate(rng: random.Random) -> Op:
    return _path(rng), rng.choice((0, _offset(rng), _offset(rng)))


@_ops.add(6)
def ftruncate(rng: random.Random) -> Op:
    return _slot(rng), rng.choice((0, _offset(rng), _offset(rng)))


@_ops.add(4)
def fsync(rng: random.Random) -> Op:
    return _slot(rng), rng.random() < 0.5


@_ops.add(1)
def sync(rng: random.Random) -> Op:
    return ()


@_ops.add(4)
def fallocate(rng: random.Random) -> Op:
    mode = rng.choice((0, KEEP_SIZE, PUNCH_HOLE | KEEP_SIZE, ZERO_RANGE, ZERO_RANGE | KEEP_SIZE))
    return _slot(rng), mode, _offset(rng), _length(rng)


@_ops.add(3)
def copy_file_range(rng: random.Random) -> Op:
    return _slot(rng), _offset(rng), _slot(rng), _offset(rng), _length(rng)


@_ops.add(3)
def seek(rng: random.Random) -> Op:
    return _slot(rng), _offset(rng), rng.choice((os.SEEK_DATA, os.SEEK_HOLE))


@_ops.add(4)
def map(rng: random.Random) -> Op:
    return _slot(rng), rng.randrange(1, 80_000)


@_ops.add(4)
def map_write(rng: random.Random) -> Op:
    return _slot(rng), _seed(rng), _length(rng), rng.randrange(80_000)


@_ops.add(3)
def unmap(rng: random.Random) -> Op:
    return (_slot(rng),)


@_ops.add(4)
def drain(rng: random.Random) -> Op:
    """Wait for it, or let it go on beside what follows."""
    return _path(rng), rng.random() < 0.5


@_ops.add(1)
def drain_all(rng: random.Random) -> Op:
    return ()


@_ops.add(4)
def evict(rng: random.Random) -> Op:
    return (_path(rng),)


@_ops.add(4)
def stage(rng: random.Random) -> Op:
    return (_path(rng),)


@_ops.add(2)
def compact(rng: random.Random) -> Op:
    return ()


@_ops.add(3)
def pause(rng: random.Random) -> Op:
    """Give the background some turns."""
    return (rng.choice((1, 3, 10, 100)),)


@_ops.add(4)
def close(rng: random.Random) -> Op:
    return (_slot(rng),)


@_ops.add(3)
def lookup(rng: random.Random) -> Op:
    return (_path(rng),)


@_ops.add(2)
def getattr_(rng: random.Random) -> Op:
    return (_target(rng),)


@_ops.add(10)
def mkdir(rng: random.Random) -> Op:
    return _path(rng), rng.choice((0o755, 0o700, 0o2755, 0o1777)), _caller(rng)


@_ops.add(4)
def rmdir(rng: random.Random) -> Op:
    return (_path(rng),)


@_ops.add(7)
def unlink(rng: random.Random) -> Op:
    return (_path(rng),)


@_ops.add(4)
def restore(rng: random.Random) -> Op:
    """Out of the trash; there is nothing in it where nothing is kept."""
    return (_path(rng),)


@_ops.add(9)
def rename(rng: random.Random) -> Op:
    return _path(rng), _path(rng), 0


@_ops.add(4)
def rename_noreplace(rng: random.Random) -> Op:
    return _path(rng), _path(rng), NOREPLACE


@_ops.add(5)
def rename_exchange(rng: random.Random) -> Op:
    return (
        _path(rng),
        _path(rng),
        rng.choice((EXCHANGE, EXCHANGE, EXCHANGE, EXCHANGE | NOREPLACE, 8)),
    )


@_ops.add(5)
def link(rng: random.Random) -> Op:
    return _target(rng), _path(rng)


@_ops.add(4)
def symlink(rng: random.Random) -> Op:
    return _path(rng), _seed(rng), rng.choice((1, 20, 4000)), _caller(rng)


@_ops.add(2)
def readlink(rng: random.Random) -> Op:
    return (_path(rng),)


@_ops.add(3)
def mknod(rng: random.Random) -> Op:
    kind = rng.choice((stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFREG, stat.S_IFCHR, stat.S_IFBLK))
    return (
        _path(rng),
        kind | 0o640,
        os.makedev(rng.randrange(300), rng.randrange(70000)),
        _caller(rng),
    )


@_ops.add(4)
def chmod(rng: random.Random) -> Op:
    return _target(rng), rng.randrange(0o10000)


@_ops.add(3)
def chown(rng: random.Random) -> Op:
    return _target(rng), rng.choice((None, 0, 1000)), rng.choice((None, 0, 4_000_000_000))


@_ops.add(4)
def utimens(rng: random.Random) -> Op:
    return _target(rng), rng.choice((None, _ns(rng))), rng.choice((None, _ns(rng)))


@_ops.add(6)
def setxattr(rng: random.Random) -> Op:
    flags = rng.choice((0, os.XATTR_CREATE, os.XATTR_REPLACE))
    return _target(rng), _xattr(rng), _seed(rng), rng.choice((0, 10, 1000, 65536)), flags


@_ops.add(3)
def getxattr(rng: random.Random) -> Op:
    return _target(rng), _xattr(rng)


@_ops.add(2)
def listxattr(rng: random.Random) -> Op:
    return (_target(rng),)


@_ops.add(3)
def removexattr(rng: random.Random) -> Op:
    return _target(rng), _xattr(rng)


@_ops.add(3)
def list_all(rng: random.Random) -> Op:
    return (_path(rng),)


@_ops.add(3)
def opendir(rng: random.Random) -> Op:
    return _slot(rng), _path(rng)


@_ops.add(5)
def list_some(rng: random.Random) -> Op:
    return _slot(rng), rng.randint(1, 3)


@_ops.add(1)
def many_names(rng: random.Random) -> Op:
    return _path(rng), rng.choice((3, 40, 150)), rng.random() < 0.5


@_ops.add(1)
def closedir(rng: random.Random) -> Op:
    return (_slot(rng),)


@_ops.add(2)
def statfs(rng: random.Random) -> Op:
    return ()


@_ops.add(3)
def forget(rng: random.Random) -> Op:
    return ()


@_ops.add(2)
def compare(rng: random.Random) -> Op:
    return ()


@_ops.add(1)
def remount(rng: random.Random) -> Op:
    return ()


@_ops.add(2)
def crash(rng: random.Random) -> Op:
    return ()


_quotas = Weighted(_ops)


@_quotas.add(12)
def set_quota(rng: random.Random) -> Op:
    """Of bytes, files, or both; None: unlimited."""
    return (
        _path(rng),
        rng.choice((None, rng.randrange(20_000), rng.randrange(500_000))),
        rng.choice((None, rng.randrange(40))),
    )


@_quotas.add(2)
def remove_quota(rng: random.Random) -> Op:
    return (_path(rng),)


KINDS = _quotas.kinds
generate = _ops.sequence
generate_with_quotas = _quotas.sequence
