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
from tests.support.sequences import Draw, Op, Weighted, below, between, chance, one_of, payload

SLOTS = 6
USERS = (1000, 65534)
LARGEST = 96 * 1024
PAGE = mmap.PAGESIZE

_READ, _WRITE, _BOTH = os.O_RDONLY, os.O_WRONLY, os.O_RDWR
_slot = below(SLOTS)
_seed = below(1 << 30)
_owner = one_of(-1, 0, 1000, 65534, 4_000_000_000)


def _path(rng: random.Random) -> bytes:
    depth = rng.choices((1, 2, 3), (5, 4, 2))[0]
    return b"/".join(rng.choice((b"a", b"b", b"c", b"\xff\xfe d")) for _ in range(depth))


def _odd_path(rng: random.Random) -> bytes:
    base = _path(rng)
    beside = [base + end for end in (b"/.", b"/..", b"/")]
    odd = (*beside, b".", b"n" * 255, b"n" * 256, base + b"/a/a/a/a")
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


def _pages(first: int, last: int) -> Draw:
    return lambda rng: PAGE * rng.randint(first, last)


def _mode(rng: random.Random) -> int:
    usual = (0o644, 0o600, 0o755, 0o777, 0o4755, 0o2755, 0o1777, 0o444, 0o000)
    mode = rng.choice((*usual, rng.randrange(0o10000)))
    # FUSE in the kernel does not clear a setgid bit that comes without group execution: nothing to
    # compare.
    return mode | 0o010 if mode & 0o2000 else mode


def _ns(rng: random.Random) -> int:
    return rng.choice((0, 1, 999_999_999, 1_700_000_000_123_456_789, rng.randrange(1 << 60)))


def _xattr(rng: random.Random) -> str:
    longest = "user." + "n" * 250
    return rng.choice(
        ("user.a", "user.b", "trusted.a", "security.a", longest, longest + "n", "bogus.a")
    )


def _value(rng: random.Random) -> bytes:
    """Never twice the same: a filesystem may take that for no change."""
    return payload(rng.randrange(1 << 60), rng.choice((8, 40, 400)))


def _open(rng: random.Random) -> Op:
    flags = rng.choice((_READ, _WRITE, _BOTH, _BOTH, _BOTH))
    for flag, often in (
        (os.O_CREAT, 0.75),
        (os.O_EXCL, 0.15),
        (os.O_TRUNC, 0.2),
        (os.O_APPEND, 0.15),
        (os.O_NOFOLLOW, 0.1),
        (os.O_DIRECTORY, 0.04),
        (os.O_SYNC, 0.05),
    ):
        if rng.random() < often:
            flags |= flag
    if flags & os.O_DIRECTORY:
        flags &= ~os.O_CREAT  # the pair means different things on different kernels
    return _slot(rng), _odd_path(rng), flags | os.O_NONBLOCK, _mode(rng)


def _mknod(rng: random.Random) -> Op:
    kind = rng.choice((stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFREG, stat.S_IFCHR, stat.S_IFBLK))
    return (
        _odd_path(rng),
        kind | rng.choice((0o644, 0o600)),
        os.makedev(rng.randrange(300), rng.randrange(70000)),
    )


def _times(rng: random.Random) -> tuple[int, int]:
    return _ns(rng), _ns(rng)


def _open_plain(rng: random.Random) -> Op:
    """Something that can be mapped, and mostly is there."""
    flags = rng.choice((_BOTH, _BOTH, _BOTH | os.O_TRUNC, _BOTH | os.O_APPEND, _READ))
    return _slot(rng), rng.choice((b"f", b"g", b"h")), flags | os.O_CREAT, 0o644


def _fallocate(rng: random.Random) -> Op:
    mode = rng.choice(
        (0, KEEP_SIZE, PUNCH_HOLE | KEEP_SIZE, ZERO_RANGE, ZERO_RANGE | KEEP_SIZE, PUNCH_HOLE)
    )
    return _slot(rng), mode, _offset(rng), _length(rng)


def _set_acl(rng: random.Random) -> Op:
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


def _acl_name(rng: random.Random) -> str:
    return rng.choice((acl.ACCESS, acl.DEFAULT, acl.DEFAULT)).decode()


def _tmpfile(rng: random.Random) -> Op:
    """O_TMPFILE."""
    flags = rng.choice((_WRITE, _BOTH, _BOTH, _READ)) | rng.choice((0, 0, os.O_EXCL))
    return _slot(rng), rng.choice((b".", _path(rng))), flags | os.O_TMPFILE, _mode(rng)


_ops = Weighted()
_ops.add("open", 14, draw=_open)
_ops.add("close", 4, _slot)
_ops.add("read", 6, _slot, _length)
_ops.add("pread", 8, _slot, _length, _offset)
_ops.add("write", 8, _slot, _seed, _length)
_ops.add("pwrite", 12, _slot, _seed, _length, _offset)
_ops.add(
    "lseek", 3, _slot, one_of(0, -1, -100, _offset), one_of(os.SEEK_SET, os.SEEK_CUR, os.SEEK_END)
)
_ops.add("ftruncate", 6, _slot, one_of(0, _offset, _offset))
_ops.add("truncate", 5, _odd_path, one_of(0, _offset, -1))
_ops.add("fsync", 3, _slot, chance(0.5))
_ops.add("fstat", 3, _slot)
_ops.add("follow_stat", 3, _odd_path)
_ops.add("mkdir", 10, _odd_path, one_of(0o755, 0o755, 0o777, 0o700, 0o2755, 0o1777, 0o2777))
_ops.add("rmdir", 4, _odd_path)
_ops.add("unlink", 6, _odd_path)
_ops.add("rename", 10, _odd_path, _odd_path)
_ops.add("rename2", 7, _odd_path, _odd_path, one_of(0, 1, 1, 2, 2, 2, 3))
_ops.add("link", 6, _odd_path, _odd_path)
# The target is repeated; it never leads upwards, so that nothing outside is reached.
_ops.add("symlink", 5, one_of(_path, _path, b"nowhere/at all"), one_of(1, 1, 1, 200), _odd_path)
_ops.add("readlink", 3, _odd_path)
_ops.add("mknod", 3, draw=_mknod)
_ops.add("chmod", 6, _odd_path, _mode)
_ops.add("fchmod", 2, _slot, _mode)
_ops.add("chown", 5, _odd_path, _owner, _owner, chance(0.6))
_ops.add("fchown", 1, _slot, _owner, _owner)
_ops.add("utime", 4, _odd_path, one_of(None, _times), chance(0.6))
_ops.add("futime", 2, _slot, _times)
_ops.add("setxattr", 5, _odd_path, _xattr, _value, one_of(0, 0, os.XATTR_CREATE, os.XATTR_REPLACE))
_ops.add("fsetxattr", 1, _slot, _xattr, _value, 0)
_ops.add("getxattr", 3, _odd_path, _xattr)
_ops.add("listxattr", 2, _odd_path)
_ops.add("removexattr", 2, _odd_path, _xattr)
_ops.add("listdir", 4, _odd_path)
_ops.add("access", 2, _odd_path, below(8))
_ops.add("map_write", 5, _slot, _seed, _length, _offset)
_ops.add("map_read", 4, _slot, _length, _offset)
_ops.add("direct_write", 4, _path, _seed, _pages(1, 8), _pages(0, 15))
_ops.add("direct_read", 3, _path, _pages(1, 8), _pages(0, 15))
_ops.add("copy_range", 2, _slot, _slot, _length, _offset, _offset)

_bridged = Weighted(_ops)
_bridged.add("open_plain", 30, draw=_open_plain)
_bridged.add("fill", 10, _slot, _seed, between(20_000, 99_999), _pages(0, 3))
_bridged.add("fallocate", 8, draw=_fallocate)
_bridged.add("seek_data", 6, _slot, _offset)
_bridged.add("keep_map", 5, _slot, below(2), between(1, 59_999), 0)
_bridged.add("poke", 8, below(2), _seed, between(1, 2999), below(20_000))
_bridged.add("drop_map", 2, below(2))
_bridged.add("set_acl", 10, draw=_set_acl)
_bridged.add("drop_acl", 2, _path, _acl_name)
_bridged.add("tmpfile", 5, draw=_tmpfile)
_bridged.add("link_slot", 5, _slot, _path)


def generate(seed: int, length: int, users: bool = True, bridged: bool = False) -> list[Op]:
    """A sequence; with ``users`` some operations run as another user: ("as_user", uid, op).

    ``bridged``: also what plain pyfuse3 does not serve.
    """
    rng = random.Random(~seed)
    ops = (_bridged if bridged else _ops).sequence(seed, length)
    return [
        ("as_user", rng.choice(USERS), op) if users and rng.random() < 0.15 else op for op in ops
    ]
