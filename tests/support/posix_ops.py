"""Random system calls: what they are called, and with which arguments.

They mention only names, slots (for descriptors) and numbers, so that the same sequence runs on any
filesystem. ``machine`` runs them.
"""

import mmap
import os
import random
import stat

from aifs.files.ranges import KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE
from aifs.meta import acl
from aifs.meta.acl import AclEntry
from tests.support.sequences import Op, Weighted, payload

SLOTS = 6
USERS = (1000, 65534)
LARGEST = 96 * 1024
PAGE = mmap.PAGESIZE


def _path(rng: random.Random) -> bytes:
    depth = rng.choices((1, 2, 3), (5, 4, 2))[0]
    return b"/".join(rng.choice((b"a", b"b", b"c", b"\xff\xfe d")) for _ in range(depth))


def _odd_path(rng: random.Random) -> bytes:
    base = _path(rng)
    odd = (
        base + b"/.",
        base + b"/..",
        base + b"/",
        b".",
        b"n" * 255,
        b"n" * 256,
        base + b"/a/a/a/a",
    )
    return rng.choice(odd) if rng.random() < 0.04 else base


def _offset(rng: random.Random) -> int:
    if rng.random() < 0.03:
        return 1 << rng.choice((31, 32, 36, 40))
    border = rng.choice((0, 0, 2048, 4096, 8192, 16384, 65536))
    return max(0, border + rng.randint(-300, 300)) if rng.random() < 0.6 else rng.randrange(LARGEST)


def _length(rng: random.Random) -> int:
    return rng.choice(
        (0, 1, rng.randrange(100), rng.randrange(3000), rng.randrange(3000), rng.randrange(40000))
    )


def _slot(rng: random.Random) -> int:
    return rng.randrange(SLOTS)


def _mode(rng: random.Random) -> int:
    usual = (0o644, 0o600, 0o755, 0o777, 0o4755, 0o2755, 0o1777, 0o444, 0o000)
    mode = rng.choice((*usual, rng.randrange(0o10000)))
    # FUSE in the kernel does not clear a setgid bit that comes without group execution: nothing to
    # compare.
    return mode | 0o010 if mode & 0o2000 else mode


def _owner(rng: random.Random) -> int:
    return rng.choice((-1, 0, 1000, 65534, 4_000_000_000))


def _ns(rng: random.Random) -> int:
    return rng.choice((0, 1, 999_999_999, 1_700_000_000_123_456_789, rng.randrange(1 << 60)))


def _xattr(rng: random.Random) -> str:
    return rng.choice(
        (
            "user.a",
            "user.b",
            "trusted.a",
            "security.a",
            "user." + "n" * 250,
            "user." + "n" * 251,
            "bogus.a",
        )
    )


def _value(rng: random.Random) -> bytes:
    """Never twice the same: a filesystem may take that for no change."""
    return payload(rng.randrange(1 << 60), rng.choice((8, 40, 400)))


_ops = Weighted()
_READ, _WRITE, _BOTH = os.O_RDONLY, os.O_WRONLY, os.O_RDWR


@_ops.add(14)
def open(rng: random.Random) -> Op:
    flags = rng.choice((_READ, _WRITE, _BOTH, _BOTH, _BOTH))
    for flag, chance in (
        (os.O_CREAT, 0.75),
        (os.O_EXCL, 0.15),
        (os.O_TRUNC, 0.2),
        (os.O_APPEND, 0.15),
        (os.O_NOFOLLOW, 0.1),
        (os.O_DIRECTORY, 0.04),
        (os.O_SYNC, 0.05),
    ):
        if rng.random() < chance:
            flags |= flag
    if flags & os.O_DIRECTORY:
        flags &= ~os.O_CREAT  # the pair means different things on different kernels
    return _slot(rng), _odd_path(rng), flags | os.O_NONBLOCK, _mode(rng)


@_ops.add(4)
def close(rng: random.Random) -> Op:
    return (_slot(rng),)


@_ops.add(6)
def read(rng: random.Random) -> Op:
    return _slot(rng), _length(rng)


@_ops.add(8)
def pread(rng: random.Random) -> Op:
    return _slot(rng), _length(rng), _offset(rng)


@_ops.add(8)
def write(rng: random.Random) -> Op:
    return _slot(rng), rng.randrange(1 << 30), _length(rng)


@_ops.add(12)
def pwrite(rng: random.Random) -> Op:
    return _slot(rng), rng.randrange(1 << 30), _length(rng), _offset(rng)


@_ops.add(3)
def lseek(rng: random.Random) -> Op:
    return (
        _slot(rng),
        rng.choice((0, -1, -100, _offset(rng))),
        rng.choice((os.SEEK_SET, os.SEEK_CUR, os.SEEK_END)),
    )


@_ops.add(6)
def ftruncate(rng: random.Random) -> Op:
    return _slot(rng), rng.choice((0, _offset(rng), _offset(rng)))


@_ops.add(5)
def truncate(rng: random.Random) -> Op:
    return _odd_path(rng), rng.choice((0, _offset(rng), -1))


@_ops.add(3)
def fsync(rng: random.Random) -> Op:
    return _slot(rng), rng.random() < 0.5


@_ops.add(3)
def fstat(rng: random.Random) -> Op:
    return (_slot(rng),)


@_ops.add(3)
def follow_stat(rng: random.Random) -> Op:
    return (_odd_path(rng),)


@_ops.add(10)
def mkdir(rng: random.Random) -> Op:
    return _odd_path(rng), rng.choice((0o755, 0o755, 0o777, 0o700, 0o2755, 0o1777, 0o2777))


@_ops.add(4)
def rmdir(rng: random.Random) -> Op:
    return (_odd_path(rng),)


@_ops.add(6)
def unlink(rng: random.Random) -> Op:
    return (_odd_path(rng),)


@_ops.add(10)
def rename(rng: random.Random) -> Op:
    return _odd_path(rng), _odd_path(rng)


@_ops.add(7)
def rename2(rng: random.Random) -> Op:
    return _odd_path(rng), _odd_path(rng), rng.choice((0, 1, 1, 2, 2, 2, 3))


@_ops.add(6)
def link(rng: random.Random) -> Op:
    return _odd_path(rng), _odd_path(rng)


@_ops.add(5)
def symlink(rng: random.Random) -> Op:
    """The target is repeated; it never leads upwards, so that nothing outside is reached."""
    return (
        rng.choice((_path(rng), _path(rng), b"nowhere/at all")),
        rng.choice((1, 1, 1, 200)),
        _odd_path(rng),
    )


@_ops.add(3)
def readlink(rng: random.Random) -> Op:
    return (_odd_path(rng),)


@_ops.add(3)
def mknod(rng: random.Random) -> Op:
    kind = rng.choice((stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFREG, stat.S_IFCHR, stat.S_IFBLK))
    return (
        _odd_path(rng),
        kind | rng.choice((0o644, 0o600)),
        os.makedev(rng.randrange(300), rng.randrange(70000)),
    )


@_ops.add(6)
def chmod(rng: random.Random) -> Op:
    return _odd_path(rng), _mode(rng)


@_ops.add(2)
def fchmod(rng: random.Random) -> Op:
    return _slot(rng), _mode(rng)


@_ops.add(5)
def chown(rng: random.Random) -> Op:
    return _odd_path(rng), _owner(rng), _owner(rng), rng.random() < 0.6


@_ops.add(1)
def fchown(rng: random.Random) -> Op:
    return _slot(rng), _owner(rng), _owner(rng)


@_ops.add(4)
def utime(rng: random.Random) -> Op:
    return _odd_path(rng), rng.choice((None, (_ns(rng), _ns(rng)))), rng.random() < 0.6


@_ops.add(2)
def futime(rng: random.Random) -> Op:
    return _slot(rng), (_ns(rng), _ns(rng))


@_ops.add(5)
def setxattr(rng: random.Random) -> Op:
    return (
        _odd_path(rng),
        _xattr(rng),
        _value(rng),
        rng.choice((0, 0, os.XATTR_CREATE, os.XATTR_REPLACE)),
    )


@_ops.add(1)
def fsetxattr(rng: random.Random) -> Op:
    return _slot(rng), _xattr(rng), _value(rng), 0


@_ops.add(3)
def getxattr(rng: random.Random) -> Op:
    return _odd_path(rng), _xattr(rng)


@_ops.add(2)
def listxattr(rng: random.Random) -> Op:
    return (_odd_path(rng),)


@_ops.add(2)
def removexattr(rng: random.Random) -> Op:
    return _odd_path(rng), _xattr(rng)


@_ops.add(4)
def listdir(rng: random.Random) -> Op:
    return (_odd_path(rng),)


@_ops.add(2)
def access(rng: random.Random) -> Op:
    return _odd_path(rng), rng.randrange(8)


@_ops.add(5)
def map_write(rng: random.Random) -> Op:
    return _slot(rng), rng.randrange(1 << 30), _length(rng), _offset(rng)


@_ops.add(4)
def map_read(rng: random.Random) -> Op:
    return _slot(rng), _length(rng), _offset(rng)


@_ops.add(4)
def direct_write(rng: random.Random) -> Op:
    return _path(rng), rng.randrange(1 << 30), PAGE * rng.randint(1, 8), PAGE * rng.randrange(16)


@_ops.add(3)
def direct_read(rng: random.Random) -> Op:
    return _path(rng), PAGE * rng.randint(1, 8), PAGE * rng.randrange(16)


@_ops.add(2)
def copy_range(rng: random.Random) -> Op:
    return _slot(rng), _slot(rng), _length(rng), _offset(rng), _offset(rng)


_bridged = Weighted(_ops)


@_bridged.add(30)
def open_plain(rng: random.Random) -> Op:
    """Something that can be mapped, and mostly is there."""
    flags = rng.choice((_BOTH, _BOTH, _BOTH | os.O_TRUNC, _BOTH | os.O_APPEND, _READ))
    return _slot(rng), rng.choice((b"f", b"g", b"h")), flags | os.O_CREAT, 0o644


@_bridged.add(10)
def fill(rng: random.Random) -> Op:
    return (
        _slot(rng),
        rng.randrange(1 << 30),
        rng.randrange(20000, 100_000),
        PAGE * rng.randrange(4),
    )


@_bridged.add(8)
def fallocate(rng: random.Random) -> Op:
    mode = rng.choice(
        (0, KEEP_SIZE, PUNCH_HOLE | KEEP_SIZE, ZERO_RANGE, ZERO_RANGE | KEEP_SIZE, PUNCH_HOLE)
    )
    return _slot(rng), mode, _offset(rng), _length(rng)


@_bridged.add(6)
def seek_data(rng: random.Random) -> Op:
    return _slot(rng), _offset(rng)


@_bridged.add(5)
def keep_map(rng: random.Random) -> Op:
    return _slot(rng), rng.randrange(2), rng.randrange(1, 60_000), 0


@_bridged.add(8)
def poke(rng: random.Random) -> Op:
    return rng.randrange(2), rng.randrange(1 << 30), rng.randrange(1, 3000), rng.randrange(20_000)


@_bridged.add(2)
def drop_map(rng: random.Random) -> Op:
    return (rng.randrange(2),)


@_bridged.add(10)
def set_acl(rng: random.Random) -> Op:
    """setfacl(1), sometimes of what is no ACL."""
    nobody = 0xFFFFFFFF
    ids = sorted(rng.sample((0, *USERS, 4_000_000_000), rng.choice((0, 1, 2))))
    entries = [AclEntry(acl.USER_OBJ, rng.randrange(8), nobody)]
    entries += [AclEntry(acl.USER, rng.randrange(8), uid) for uid in ids]
    entries += [AclEntry(acl.GROUP_OBJ, rng.randrange(8), nobody)]
    entries += [AclEntry(acl.GROUP, rng.randrange(8), gid) for gid in ids[1:]]
    if ids or rng.random() < 0.2:
        entries.append(AclEntry(acl.MASK, rng.randrange(8), nobody))
    entries.append(AclEntry(acl.OTHER, rng.randrange(8), nobody))
    if rng.random() < 0.05:
        del entries[rng.randrange(len(entries))]
    return _path(rng), _acl_name(rng), acl.encode(entries), 0


@_bridged.add(2)
def drop_acl(rng: random.Random) -> Op:
    return _path(rng), _acl_name(rng)


def _acl_name(rng: random.Random) -> str:
    return rng.choice((acl.ACCESS, acl.DEFAULT, acl.DEFAULT)).decode()


@_bridged.add(5)
def tmpfile(rng: random.Random) -> Op:
    """O_TMPFILE."""
    flags = rng.choice((_WRITE, _BOTH, _BOTH, _READ)) | rng.choice((0, 0, os.O_EXCL))
    return _slot(rng), rng.choice((b".", _path(rng))), flags | os.O_TMPFILE, _mode(rng)


@_bridged.add(5)
def link_slot(rng: random.Random) -> Op:
    return _slot(rng), _path(rng)


def generate(seed: int, length: int, users: bool = True, bridged: bool = False) -> list[Op]:
    """A sequence; with ``users`` some operations run as another user: ("as_user", uid, op).

    ``bridged``: also what plain pyfuse3 does not serve.
    """
    rng = random.Random(~seed)
    ops = (_bridged if bridged else _ops).sequence(seed, length)
    return [
        ("as_user", rng.choice(USERS), op) if users and rng.random() < 0.15 else op for op in ops
    ]
