"""The do-nothing filesystem: pyfuse3 with answers from dictionaries, no bytes kept, nothing
persistent.

It is the baseline that shows what a filesystem in this binding costs before it does anything: the
kernel, libfuse, pyfuse3 and trio. So it is as bare as it can be while every work of the benchmark
runs on it: attributes are ready-made objects, files hold zeros, and only the number of links, the
size and the names are kept. Timeouts, open flags and read-ahead are those of AIFS, so that the
kernel asks as often.

    python nothing.py MOUNTPOINT [--bare]

It serves until it is unmounted. It waits for requests as AIFS does (aifs.fuse.requests), so that
the difference is the cost of the filesystem alone; with --bare, as pyfuse3 does.
"""

import os
import stat
import sys
import threading
import time
from pathlib import Path

import pyfuse3
import trio

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from aifs.fuse import requests

TIMEOUT_S = 86400
READ_AHEAD_KB = 4096
NO_DATA = pyfuse3.FUSEError(pyfuse3.ENOATTR)
ZEROS = memoryview(bytes(1 << 20))


class Nothing(pyfuse3.Operations):
    """Dictionaries only. A file handle is the inode number; a directory handle has its own list."""

    def __init__(self) -> None:
        self.inodes: dict[int, pyfuse3.EntryAttributes] = {}
        self.names: dict[int, dict[bytes, int]] = {}
        self.listings: dict[int, list[tuple[bytes, int]]] = {}
        self.negative = pyfuse3.EntryAttributes()
        self.negative.entry_timeout = TIMEOUT_S
        self.next_ino = pyfuse3.ROOT_INODE
        self.new(stat.S_IFDIR | 0o755, None)

    def new(self, mode: int, ctx: pyfuse3.RequestContext | None) -> pyfuse3.EntryAttributes:
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = self.next_ino
        self.next_ino += 1
        entry.st_mode = mode
        if ctx is not None:
            entry.st_uid, entry.st_gid = ctx.uid, ctx.gid
        entry.entry_timeout = entry.attr_timeout = TIMEOUT_S
        entry.st_atime_ns = entry.st_mtime_ns = entry.st_ctime_ns = time.time_ns()
        if stat.S_ISDIR(mode):
            entry.st_nlink = 2
            self.names[entry.st_ino] = {}
        self.inodes[entry.st_ino] = entry
        return entry

    async def lookup(self, parent, name, ctx):
        ino = self.names[parent].get(name)
        return self.negative if ino is None else self.inodes[ino]

    async def getattr(self, ino, ctx):
        return self.inodes[ino]

    async def setattr(self, ino, attr, fields, fh, ctx):
        entry = self.inodes[ino]
        if fields.update_size:
            entry.st_size = attr.st_size
        return entry

    async def create(self, parent, name, mode, flags, ctx):
        entry = self.new(mode, ctx)
        self.names[parent][name] = entry.st_ino
        return pyfuse3.FileInfo(entry.st_ino), entry

    async def mkdir(self, parent, name, mode, ctx):
        entry = self.new(mode, ctx)
        self.names[parent][name] = entry.st_ino
        return entry

    async def unlink(self, parent, name, ctx):
        del self.inodes[self.names[parent].pop(name)]

    async def rmdir(self, parent, name, ctx):
        ino = self.names[parent].pop(name)
        del self.inodes[ino], self.names[ino]

    async def rename(self, parent, name, new_parent, new_name, flags, ctx):
        replaced = self.names[new_parent].get(new_name)
        self.names[new_parent][new_name] = self.names[parent].pop(name)
        if replaced is not None:
            del self.inodes[replaced]

    async def forget(self, inode_list):
        pass

    async def open(self, ino, flags, ctx):
        if flags & os.O_TRUNC:
            self.inodes[ino].st_size = 0
        return pyfuse3.FileInfo(ino)

    async def read(self, fh, offset, length):
        return ZEROS[: max(0, min(length, self.inodes[fh].st_size - offset))]

    async def write(self, fh, offset, data):
        entry = self.inodes[fh]
        entry.st_size = max(entry.st_size, offset + len(data))
        return len(data)

    async def release(self, fh):
        pass

    async def fsync(self, fh, datasync):
        pass

    async def opendir(self, ino, ctx):
        handle = max(self.listings, default=0) + 1
        self.listings[handle] = list(self.names[ino].items())
        return handle

    async def readdir(self, fh, start_id, token):
        listing, inodes = self.listings[fh], self.inodes
        for position in range(start_id, len(listing)):
            name, ino = listing[position]
            if not pyfuse3.readdir_reply(token, name, inodes[ino], position + 1):
                break

    async def releasedir(self, fh):
        del self.listings[fh]

    async def fsyncdir(self, fh, datasync):
        pass

    async def getxattr(self, ino, name, ctx):
        raise NO_DATA

    async def statfs(self, ctx):
        data = pyfuse3.StatvfsData()
        data.f_bsize = data.f_frsize = 4096
        data.f_namemax = 255
        return data


def set_read_ahead(mountpoint: str) -> None:
    """As AIFS does. In a thread of its own: stat asks the main one."""
    device = os.stat(mountpoint).st_dev
    with open(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb", "w") as file:
        file.write(str(READ_AHEAD_KB))


def main() -> None:
    mountpoint, *options = sys.argv[1:]
    if "--bare" not in options:
        requests.install()
    pyfuse3.init(Nothing(), mountpoint, {"fsname=nothing", "default_permissions", "allow_other"})
    threading.Thread(target=set_read_ahead, args=(mountpoint,), daemon=True).start()
    try:
        trio.run(pyfuse3.main)
    finally:
        pyfuse3.close(unmount=True)


if __name__ == "__main__":
    main()
