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
from tests.support.sequences import Op, Weighted, below, between, chance, one_of

SLOTS = 6

_slot = below(SLOTS)
_seed = below(1 << 30)


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


def _ns(rng: random.Random) -> int:
    return rng.choice((0, 999_999_999, 1_700_000_000_123_456_789, rng.randrange(1 << 61)))


def _xattr(rng: random.Random) -> bytes:
    return rng.choice((b"user.a", b"user.b", b"trusted.a", b"security.a", b"user." + b"n" * 250))


def _create(rng: random.Random) -> Op:
    flags = (
        os.O_RDWR
        | rng.choice((0, os.O_EXCL))
        | rng.choice((0, 0, os.O_TRUNC))
        | rng.choice((0, 0, os.O_APPEND))
    )
    return _slot(rng), _path(rng), rng.choice((0o644, 0o600, 0o4755, 0o2755)), flags, _caller(rng)


def _open(rng: random.Random) -> Op:
    flags = rng.choice(
        (os.O_RDONLY, os.O_RDWR, os.O_RDWR, os.O_RDWR | os.O_TRUNC, os.O_WRONLY | os.O_APPEND)
    )
    return _slot(rng), _path(rng), flags


def _parallel(rng: random.Random) -> Op:
    reads = tuple((_slot(rng), _offset(rng), _length(rng)) for _ in range(3))
    return _slot(rng), _seed(rng), _length(rng), _offset(rng), reads, _slot(rng)


def _fallocate(rng: random.Random) -> Op:
    mode = rng.choice((0, KEEP_SIZE, PUNCH_HOLE | KEEP_SIZE, ZERO_RANGE, ZERO_RANGE | KEEP_SIZE))
    return _slot(rng), mode, _offset(rng), _length(rng)


def _mknod(rng: random.Random) -> Op:
    kind = rng.choice((stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFREG, stat.S_IFCHR, stat.S_IFBLK))
    return (
        _path(rng),
        kind | 0o640,
        os.makedev(rng.randrange(300), rng.randrange(70000)),
        _caller(rng),
    )


def _setxattr(rng: random.Random) -> Op:
    flags = rng.choice((0, os.XATTR_CREATE, os.XATTR_REPLACE))
    return _target(rng), _xattr(rng), _seed(rng), rng.choice((0, 10, 1000, 65536)), flags


_ops = Weighted()
_ops.add("create", 14, draw=_create)
_ops.add("open", 5, draw=_open)
_ops.add("clone", 3, _path, _path)
_ops.add("write", 12, _slot, _seed, _length, _offset)
_ops.add("append", 5, _slot, _seed, _length)
_ops.add("read", 8, _slot, _offset, one_of(_length, 131072))
_ops.add("parallel", 4, draw=_parallel)
_ops.add("truncate", 5, _path, one_of(0, _offset, _offset))
_ops.add("ftruncate", 6, _slot, one_of(0, _offset, _offset))
_ops.add("fsync", 4, _slot, chance(0.5))
_ops.add("sync", 1)
_ops.add("fallocate", 4, draw=_fallocate)
_ops.add("copy_file_range", 3, _slot, _offset, _slot, _offset, _length)
_ops.add("seek", 3, _slot, _offset, one_of(os.SEEK_DATA, os.SEEK_HOLE))
_ops.add("map", 4, _slot, between(1, 79_999))
_ops.add("map_write", 4, _slot, _seed, _length, below(80_000))
_ops.add("unmap", 3, _slot)
# Wait for it, or let it go on beside what follows.
_ops.add("drain", 4, _path, chance(0.5))
_ops.add("drain_all", 1)
_ops.add("evict", 4, _path)
_ops.add("stage", 4, _path)
_ops.add("compact", 2)
# Give the background some turns.
_ops.add("pause", 3, one_of(1, 3, 10, 100))
_ops.add("close", 4, _slot)
_ops.add("lookup", 3, _path)
_ops.add("getattr_", 2, _target)
_ops.add("mkdir", 10, _path, one_of(0o755, 0o700, 0o2755, 0o1777), _caller)
_ops.add("rmdir", 4, _path)
_ops.add("unlink", 7, _path)
# Out of the trash; there is nothing in it where nothing is kept.
_ops.add("restore", 4, _path)
_ops.add("rename", 9, _path, _path, 0)
_ops.add("rename_noreplace", 4, _path, _path, NOREPLACE)
_exchanges = one_of(EXCHANGE, EXCHANGE, EXCHANGE, EXCHANGE | NOREPLACE, 8)
_ops.add("rename_exchange", 5, _path, _path, _exchanges)
_ops.add("link", 5, _target, _path)
_ops.add("symlink", 4, _path, _seed, one_of(1, 20, 4000), _caller)
_ops.add("readlink", 2, _path)
_ops.add("mknod", 3, draw=_mknod)
_ops.add("chmod", 4, _target, below(0o10000))
_ops.add("chown", 3, _target, one_of(None, 0, 1000), one_of(None, 0, 4_000_000_000))
_ops.add("utimens", 4, _target, one_of(None, _ns), one_of(None, _ns))
_ops.add("setxattr", 6, draw=_setxattr)
_ops.add("getxattr", 3, _target, _xattr)
_ops.add("listxattr", 2, _target)
_ops.add("removexattr", 3, _target, _xattr)
_ops.add("list_all", 3, _path)
_ops.add("opendir", 3, _slot, _path)
_ops.add("list_some", 5, _slot, between(1, 3))
_ops.add("many_names", 1, _path, one_of(3, 40, 150), chance(0.5))
_ops.add("closedir", 1, _slot)
_ops.add("statfs", 2)
_ops.add("forget", 3)
_ops.add("compare", 2)
_ops.add("remount", 1)
_ops.add("crash", 2)

_quotas = Weighted(_ops)
# Of bytes, files, or both; None: unlimited.
_quotas.add(
    "set_quota", 12, _path, one_of(None, below(20_000), below(500_000)), one_of(None, below(40))
)
_quotas.add("remove_quota", 2, _path)

KINDS = _quotas.kinds
generate = _ops.sequence
generate_with_quotas = _quotas.sequence
