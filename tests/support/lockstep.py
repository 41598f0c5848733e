"""Runs operations on the real filesystem, in process, and on the oracle, and compares what they
say.
"""

import errno
import json
import math
import mmap
import os
import stat
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import trio

from aifs.core import clock
from aifs.core.config import Config
from aifs.core.errors import Busy, FsError, NoAttribute, NotSupported
from aifs.files.types import Caller, SetAttr
from aifs.vfs.trash_requests import Restoring
from tests.support.kernel import Kernel
from tests.support.oracle import PAGE, ROOT, Oracle, OracleInode, Stamp
from tests.support.sequences import Op, payload

Path = tuple[bytes, ...]
Target = Path | int
"""A path, or the slot of a handle."""

_END_OF_TIME = 1 << 63
_CLONED_MAX = 20  # inodes, or trees would get ever larger
_WAIT_S = 60  # for what must happen; a test that waits so long fails


class Life:
    """The filesystem, open, beside the oracle. ``numbers``: oracle inode number to the real one."""

    def __init__(self, fs: Kernel, oracle: Oracle, numbers: dict[int, int], config: Config) -> None:
        layout = config.layout
        self.fs = fs
        self.oracle = oracle
        self.numbers = numbers
        self._inline_limit = layout.inline_limit
        # Chunks of interleaved files have no holes of single pages, nor has what is staged,
        # protected or unprotected later.
        plain = layout.kind == "striped" and layout.replicas == 1 and not layout.ec[1]
        self._exact_blocks = plain and not config.burst.directories
        self._slots: dict[int, tuple[Any, int]] = {}
        self._appending: set[int] = set()
        self._dirs: dict[int, tuple[Any, int, Any, list[bytes]]] = {}
        self._maps: dict[int, tuple[mmap.mmap, OracleInode]] = {}

    async def run(self, op: Op) -> None:
        kind, *args = op
        await getattr(self, "_" + kind)(*args)

    async def both(
        self,
        method: str,
        real_args: tuple,
        oracle_args: tuple,
        call: Callable[..., Awaitable[Any]] | None = None,
    ) -> tuple[Any, Any] | None:
        """Call the method of both, of the filesystem ``call`` if that is given. The two results, or
        None where both failed with the same errno."""
        self.oracle.clock = now = Stamp(clock.kernel_ns(), _END_OF_TIME)
        expected, expected_error = _attempt(getattr(self.oracle, method), oracle_args)
        found, found_error = None, None
        try:
            found = await (call or getattr(self.fs, method))(*real_args)
        except FsError as error:
            found_error = errno.errorcode[error.errno]
        now.high = time.time_ns()
        wanted, got = expected_error or "success", found_error or "success"
        assert wanted == got, f"{method}{real_args!r:.300}: {got} where the oracle says {wanted}"
        return None if expected_error else (found, expected)

    def resolve(self, path: Path) -> tuple[OracleInode, bytes]:
        """The deepest directory on the way to ``path`` that exists, and the last name."""
        directory = self.oracle.inodes[ROOT]
        for name in path[:-1]:
            below = directory.names.get(name)
            if below is None or not below.is_dir:
                break
            directory = below
        return directory, path[-1]

    def target(self, target: Target) -> OracleInode | None:
        """An inode by path, or by the slot of a handle; None if there is none."""
        if isinstance(target, int):
            return self.oracle.handles[self._slots[target][1]] if target in self._slots else None
        directory, name = self.resolve(target)
        return directory.names.get(name)

    def same(self, real: Any, inode: OracleInode) -> None:
        """The real inode has the attributes that it must have."""
        where = f"inode {real.ino} (the oracle's {inode.ino})"
        assert self.numbers.setdefault(inode.ino, real.ino) == real.ino, (
            f"{where} has changed its number"
        )
        # A write that is passed through takes setuid and setgid away, whoever writes.
        kept = ~0o6000 if stat.S_ISREG(inode.mode) else ~0
        wanted = (inode.mode & kept, inode.uid, inode.gid, inode.nlink, inode.rdev)
        assert (real.mode & kept, real.uid, real.gid, real.links, real.rdev) == wanted, (
            f"{where}: {real} for {wanted}"
        )
        for name in ("atime", "mtime", "ctime"):
            time_ns, stamp = getattr(real, name + "_ns"), getattr(inode, name)
            assert time_ns in stamp, f"{where}: {name} {time_ns} is not within {stamp}"
        if not inode.is_dir:
            assert real.size == inode.size, f"{where}: size {real.size} for {inode.size}"
        if stat.S_ISREG(inode.mode) and inode.size > self._inline_limit:
            allocated, most = real.blocks * 512, (len(inode.content.pages) + 1) * PAGE
            holds_bytes = any(page.strip(b"\0") for page in inode.content.pages.values())
            assert allocated or not holds_bytes, f"{where}: nothing is allocated for its bytes"
            known_exactly = self._exact_blocks and not inode.handles and not inode.allocated
            assert allocated <= most or not known_exactly, (
                f"{where}: {allocated} bytes allocated, {most} at most"
            )

    # Operations on names.

    async def _make(self, method: str, path: Path, *args: Any) -> None:
        directory, name = self.resolve(path)
        results = await self.both(
            method, (self.numbers[directory.ino], name, *args), (directory.ino, name, *args)
        )
        if results:
            self.same(*results)

    async def _mkdir(self, path: Path, mode: int, caller: tuple[int, int]) -> None:
        await self._make("mkdir", path, mode, Caller(*caller))

    async def _mknod(self, path: Path, mode: int, device: int, caller: tuple[int, int]) -> None:
        rdev = device if stat.S_IFMT(mode) in (stat.S_IFCHR, stat.S_IFBLK) else 0
        await self._make("mknod", path, mode, rdev, Caller(*caller))

    async def _symlink(self, path: Path, seed: int, length: int, caller: tuple[int, int]) -> None:
        await self._make("symlink", path, payload(seed, length), Caller(*caller))

    async def _lookup(self, path: Path) -> None:
        await self._make("lookup", path)

    async def _link(self, target: Target, path: Path) -> None:
        inode = self.target(target)
        directory, name = self.resolve(path)
        if inode:
            real = (self.numbers[inode.ino], self.numbers[directory.ino], name)
            results = await self.both("link", real, (inode.ino, directory.ino, name))
            if results:
                self.same(*results)

    async def _remove(self, method: str, path: Path) -> None:
        directory, name = self.resolve(path)
        real = (self.numbers[directory.ino], name, Caller())
        await self.both(method, real, (directory.ino, name))
        await self._check(directory)

    async def _unlink(self, path: Path) -> None:
        await self._remove("unlink", path)

    async def _restore(self, path: Path) -> None:
        directory, name = self.resolve(path)
        wanted = Restoring(self.numbers[directory.ino], name)
        results = await self.both("restore", (wanted, Caller()), (directory.ino, name))
        if results:
            self.same(*results)
            await self._list_all(path)
        await self._check(directory)

    async def _rmdir(self, path: Path) -> None:
        await self._remove("rmdir", path)

    async def _rename(self, source: Path, target: Path, flags: int) -> None:
        old, new = self.resolve(source), self.resolve(target)
        real = (self.numbers[old[0].ino], old[1], self.numbers[new[0].ino], new[1], flags, Caller())
        await self.both("rename", real, (old[0].ino, old[1], new[0].ino, new[1], flags))
        for directory, name in (old, new):
            await self._check(directory)
            if name in directory.names:
                await self._check(directory.names[name])

    async def _clone(self, source: Path, target: Path) -> None:
        inode = self.target(source)
        if inode and (
            _count(inode) > _CLONED_MAX or (not inode.is_dir and self._is_written(inode))
        ):
            return
        old, new = self.resolve(source), self.resolve(target)
        real = (self.numbers[old[0].ino], old[1], self.numbers[new[0].ino], new[1], Caller())
        if await self.both("clone", real, (old[0].ino, old[1], new[0].ino, new[1], Caller())):
            await self._check_below(*new)
            await self._check(new[0])
        else:
            await self.fs.doomed.empty()  # what was too much for a quota counts until it is erased
            await self.fs.collector.drain()

    async def _check_below(self, directory: OracleInode, name: bytes) -> None:
        inode = directory.names[name]
        args = (self.numbers[directory.ino], name), (directory.ino, name)
        results = await self.both("lookup", *args)
        assert results
        self.same(*results)
        for below in inode.names:
            await self._check_below(inode, below)

    _rename_noreplace = _rename_exchange = _rename

    async def _set_quota(self, path: Path, bytes_max: int | None, files_max: int | None) -> None:
        inode = self.target(path)
        limits = {"size": bytes_max, "files": files_max}
        if inode and inode.is_dir and any(limit is not None for limit in limits.values()):
            text = ",".join(
                f"{key}={'none' if limit is None else limit}" for key, limit in limits.items()
            )
            real = self.numbers[inode.ino], b"user.aifs.quota", text.encode()
            known = [math.inf if limit is None else limit for limit in limits.values()]
            await self.both("set_quota", real, (inode.ino, *known), self.fs.setxattr)
            await self.fs.quota_trees.work()
            await self._check_quota(inode)

    async def _remove_quota(self, path: Path) -> None:
        inode = self.target(path)
        if inode and inode.is_dir:
            real = self.numbers[inode.ino], b"user.aifs.quota"
            await self.both("remove_quota", real, (inode.ino,), self.fs.removexattr)
            await self.fs.quota_trees.work()
            await self._check_quota(inode)

    async def _check_quota(self, inode: OracleInode) -> None:
        """What counts an inode counts what it should."""
        try:
            told = json.loads(await self.fs.getxattr(self.numbers[inode.ino], b"user.aifs.quota"))
        except NoAttribute:
            told = None
        chain = inode.counted.chain if inode.counted else []
        found = [] if told is None else [told, *told["within"]]
        expected = [self.oracle.used(quota) for quota in chain]
        counts = [(quota["used_bytes"], quota["used_files"]) for quota in found]
        assert counts == expected, f"{told} at {inode.ino}: {expected}"

    async def _readlink(self, path: Path) -> None:
        inode = self.target(path)
        if inode and stat.S_ISLNK(inode.mode):
            await self._equal("readlink", inode)

    # Operations on attributes.

    async def _check(self, inode: OracleInode) -> None:
        results = await self.both("getattr", (self.numbers[inode.ino],), (inode.ino,))
        assert results
        self.same(*results)

    async def _getattr_(self, target: Target) -> None:
        inode = self.target(target)
        if inode:
            await self._check(inode)

    async def _setattr(
        self, inode: OracleInode | None, changes: SetAttr, handles: tuple[Any, Any] = (None, None)
    ) -> None:
        if inode:
            real = (self.numbers[inode.ino], changes, Caller(), handles[0])
            results = await self.both("setattr", real, (inode.ino, changes, Caller(), handles[1]))
            if results:
                self.same(*results)

    async def _chmod(self, target: Target, mode: int) -> None:
        inode = self.target(target)
        if inode and not stat.S_ISLNK(inode.mode):
            await self._setattr(inode, SetAttr(mode=stat.S_IFMT(inode.mode) | mode))

    async def _chown(self, target: Target, uid: int | None, gid: int | None) -> None:
        inode = self.target(target)
        mode = None
        if inode and stat.S_ISREG(inode.mode) and inode.mode & 0o6000:
            mode = inode.mode & ~0o6000  # this is how the kernel says it
        await self._setattr(inode, SetAttr(mode=mode, uid=uid, gid=gid))

    async def _utimens(self, target: Target, atime_ns: int | None, mtime_ns: int | None) -> None:
        await self._setattr(self.target(target), SetAttr(atime_ns=atime_ns, mtime_ns=mtime_ns))

    async def _truncate(self, path: Path, size: int) -> None:
        inode = self.target(path)
        if inode and stat.S_ISREG(inode.mode):
            await self._setattr(inode, SetAttr(size=size))

    async def _ftruncate(self, slot: int, size: int) -> None:
        if slot in self._slots:
            await self._setattr(self.target(slot), SetAttr(size=size), self._slots[slot])

    async def _equal(self, method: str, inode: OracleInode | None, *args: Any) -> None:
        if inode:
            results = await self.both(method, (self.numbers[inode.ino], *args), (inode.ino, *args))
            if results:
                assert results[0] == results[1], (
                    f"{method} of inode {inode.ino}: {_difference(*results)}"
                )
            await self._check(inode)

    async def _setxattr(
        self, target: Target, name: bytes, seed: int, length: int, flags: int
    ) -> None:
        await self._equal("setxattr", self.target(target), name, payload(seed, length), flags)

    async def _getxattr(self, target: Target, name: bytes) -> None:
        await self._equal("getxattr", self.target(target), name)

    async def _removexattr(self, target: Target, name: bytes) -> None:
        await self._equal("removexattr", self.target(target), name)

    async def _listxattr(self, target: Target) -> None:
        inode = self.target(target)
        if inode:
            results = await self.both("listxattr", (self.numbers[inode.ino],), (inode.ino,))
            assert results and sorted(results[0]) == sorted(results[1]), (
                f"listxattr of inode {inode.ino}: {results}"
            )

    # Operations on bytes.

    async def _put(self, slot: int, handles: tuple[Any, int], flags: int) -> None:
        await self._close(slot)
        self._slots[slot] = handles
        if flags & os.O_APPEND:
            self._appending.add(slot)

    async def _create(
        self, slot: int, path: Path, mode: int, flags: int, caller: tuple[int, int]
    ) -> None:
        directory, name = self.resolve(path)
        if not flags & os.O_EXCL and name in directory.names:
            return await self._open(slot, path, flags)  # what the kernel makes of it
        args = (name, mode, flags | os.O_CREAT, Caller(*caller))
        results = await self.both(
            "create", (self.numbers[directory.ino], *args), (directory.ino, *args)
        )
        if results:
            (real_handle, real), (handle, inode) = results
            self.same(real, inode)
            await self._put(slot, (real_handle, handle), flags)

    async def _open(self, slot: int, path: Path, flags: int) -> None:
        inode = self.target(path)
        if inode and stat.S_ISREG(inode.mode):
            results = await self.both("open", (self.numbers[inode.ino], flags), (inode.ino, flags))
            await self._put(slot, results, flags)
            await self._check(inode)

    async def _close(self, slot: int) -> None:
        if slot in self._slots:
            await self._on_handle("release", slot)
            del self._slots[slot]
            self._appending.discard(slot)

    async def _on_handle(self, method: str, slot: int, *args: Any) -> None:
        if slot in self._slots:
            real_handle, handle = self._slots[slot]
            results = await self.both(method, (real_handle, *args), (handle, *args))
            if results:
                found, expected = results
                found = bytes(found) if isinstance(found, bytes | bytearray | memoryview) else found
                assert found == expected, f"{method} {args}: {_difference(found, expected)}"

    def _place(self, slot: int, offset: int) -> int:
        """Where a write goes; for a handle with O_APPEND the kernel asks for the end of the
        file."""
        return self.target(slot).size if slot in self._appending else offset

    async def _write(self, slot: int, seed: int, length: int, offset: int) -> None:
        offset = self._place(slot, offset)
        await self._on_handle("write", slot, offset, payload(seed, length))
        await self._getattr_(slot)

    async def _append(self, slot: int, seed: int, length: int) -> None:
        if slot in self._slots:
            await self._write(slot, seed, length, self.target(slot).size)

    async def _read(self, slot: int, offset: int, length: int) -> None:
        await self._on_handle("read", slot, offset, length)

    async def _fsync(self, slot: int, data_only: bool) -> None:
        await self._on_handle("fsync", slot, data_only)

    async def _sync(self) -> None:
        await self.both("sync", (), ())

    # Ranges, and mappings of passed-through files.

    async def _fallocate(self, slot: int, mode: int, offset: int, length: int) -> None:
        if slot not in self._slots:
            return
        (real, handle), end = self._slots[slot], offset + length
        ino = self.numbers[self.target(slot).ino]

        async def allocate(*args: Any) -> None:
            """Where nothing can be reserved, what a program does then, without writing zeros."""
            try:
                await self.fs.fallocate(*args)
            except NotSupported:
                if not mode and end > (await self.fs.getattr(ino)).size:
                    await self.fs.setattr(ino, SetAttr(size=end), Caller(), real)

        arguments = mode, offset, length
        await self.both("fallocate", (real, *arguments), (handle, *arguments), allocate)
        await self._getattr_(slot)

    async def _copy_file_range(
        self, slot: int, offset: int, to_slot: int, to: int, length: int
    ) -> None:
        if slot in self._slots and to_slot in self._slots:
            (real, handle), (to_real, to_handle) = self._slots[slot], self._slots[to_slot]
            size, copied = self.oracle.handles[handle].content.size, list[int]()
            results = await self.both(
                "copy_file_range",
                (real, offset, to_real, to, length, size, copied),
                (handle, offset, to_handle, to, length),
                self._copy_whole_range,
            )
            if results is None and copied:  # there was room for a part, as up to a hole
                self.oracle.copy_file_range(handle, offset, to_handle, to, sum(copied))
            assert not results or results[0] == results[1], f"copy_file_range: {results}"
            await self._getattr_(to_slot)

    async def _copy_whole_range(
        self,
        source: int,
        offset: int,
        target: int,
        to: int,
        length: int,
        size: int,
        copied: list[int],
    ) -> int:
        """As programs do: a call may copy less, such as up to a hole. The source has ``size`` bytes
        before the first one; ``copied`` gets what each call has copied."""
        copied.append(await self.fs.copy_file_range(source, offset, target, to, length))
        wanted = min(length, size - offset)
        while copied[-1] and (done := sum(copied)) < wanted:
            copied.append(
                await self.fs.copy_file_range(
                    source, offset + done, target, to + done, wanted - done
                )
            )
        return sum(copied)

    async def _seek(self, slot: int, offset: int, whence: int) -> None:
        """What is passed over on the way to the next data, and what follows a hole's begin, must be
        zeros."""
        inode = self.target(slot)
        if inode is None:
            return
        try:
            found = await self.fs.lseek(self._slots[slot][0], offset, whence)
        except FsError as error:
            assert error.errno == errno.ENXIO, error
            assert offset >= inode.size or whence == os.SEEK_DATA, f"no hole from {offset} on"
            found = max(offset, inode.size)
        assert offset <= found <= max(inode.size, offset), f"lseek({offset}, {whence}) is {found}"
        zeros = (offset, found) if whence == os.SEEK_DATA else (found, found + 1)
        assert not inode.content.any_data(*zeros), (
            f"lseek({offset}, {whence}) is {found}, but there is data"
        )

    async def _map(self, slot: int, length: int) -> None:
        await self._unmap(slot)
        mapping = self.fs.map(self._slots[slot][0], length) if slot in self._slots else None
        if mapping is not None:
            self._maps[slot] = (mapping, self.target(slot))

    async def _map_write(self, slot: int, seed: int, length: int, offset: int) -> None:
        """As the processor does it: nobody is told, and the file may have been closed long ago."""
        if slot in self._maps:
            mapping, inode = self._maps[slot]
            length = min(length, len(mapping) - offset, inode.size - offset)
            if length > 0:
                mapping[offset : offset + length] = data = payload(seed, length)
                self.oracle.clock = Stamp(0, time.time_ns())
                self.oracle.map_write(inode, offset, data)

    async def _unmap(self, slot: int) -> None:
        if slot in self._maps:
            self._maps.pop(slot)[0].close()

    def _is_written(self, inode: OracleInode) -> bool:
        """Whether a program could write to it now, so that it cannot be drained."""
        mapped = any(other is inode for _, other in self._maps.values())
        return mapped or self.oracle.has_writers(inode)

    # Where the bytes are.

    async def _drain(self, path: Path, wait: bool) -> None:
        inode = self.target(path)
        if inode and stat.S_ISREG(inode.mode):
            number = self.numbers[inode.ino]
            self.fs.drain.request([number])
            if wait and not self._is_written(inode):
                await self._drained([number])

    async def _drain_all(self) -> None:
        inodes = [i for i in self.oracle.inodes.values() if stat.S_ISREG(i.mode) and i.nlink]
        numbers = [self.numbers[inode.ino] for inode in inodes if not self._is_written(inode)]
        self.fs.drain.request(numbers)
        await self._drained(numbers)

    async def _drained(self, numbers: list[int]) -> None:
        try:
            with trio.fail_after(_WAIT_S):
                await self.fs.drain.wait(numbers)
        except trio.TooSlowError:
            raise AssertionError(
                f"inodes {numbers} are not drained: {self.fs.drain.status()}"
            ) from None
        for number in numbers:
            assert not (await self.fs.getattr(number)).in_burst, (
                f"inode {number} is still in the burst tier"
            )

    async def _evict(self, path: Path) -> None:
        inode = self.target(path)
        if inode and stat.S_ISREG(inode.mode):
            number = self.numbers[inode.ino]
            with suppress(Busy):
                await self.fs.setxattr(number, b"user.aifs.evict", b"")
                if not self.fs.store.engine.host:  # another one may have brought it back
                    assert (await self.fs.getattr(number)).copy is None, (
                        f"inode {number} has kept its copy"
                    )
            await self._check(inode)

    async def _stage(self, path: Path) -> None:
        inode = self.target(path)
        if inode and stat.S_ISREG(inode.mode):
            number = self.numbers[inode.ino]
            if await self.fs.stager.stage(number):
                assert (await self.fs.getattr(number)).copy is not None, (
                    f"inode {number} has no copy"
                )
            await self._check(inode)

    async def _compact(self) -> None:
        await self.fs.compaction.compact()

    async def _pause(self, turns: int) -> None:
        for _ in range(turns):
            await trio.lowlevel.checkpoint()

    async def close_all(self) -> None:
        """As programs that end."""
        self.close_maps()
        for slot in list(self._slots):
            await self._close(slot)
        for slot in list(self._dirs):
            await self._closedir(slot)

    def close_maps(self) -> None:
        """The programs end."""
        for slot in list(self._maps):
            self._maps.pop(slot)[0].close()

    async def _parallel(
        self,
        slot: int,
        seed: int,
        length: int,
        offset: int,
        reads: tuple[tuple, ...],
        sync_slot: int,
    ) -> None:
        """One write at the same time as an fsync, and reads of bytes that it does not change."""
        written, offset = self.target(slot), self._place(slot, offset)
        sizes = {inode.ino: inode.size for inode in self.oracle.inodes.values()}
        async with trio.open_nursery() as nursery:
            if sync_slot in self._slots:
                nursery.start_soon(self._fsync, sync_slot, False)
            nursery.start_soon(self._write, slot, seed, length, offset)
            for read_slot, start, wanted in reads:
                inode = self.target(read_slot)
                if inode is None:
                    continue
                wanted = min(wanted, sizes[inode.ino] - start)
                touched = inode is written and start < offset + length and offset < start + wanted
                if wanted > 0 and not touched:
                    nursery.start_soon(self._read, read_slot, start, wanted)

    # Operations on directories and on the whole.

    async def _opendir(self, slot: int, path: Path) -> None:
        inode = self.target(path)
        if inode and inode.is_dir:
            await self._closedir(slot)
            self._dirs[slot] = (self.numbers[inode.ino], self.oracle.opendir(inode.ino), 0, [])

    async def _list_some(self, slot: int, batches: int) -> None:
        """Go on with a listing; at its end, it must have been true to what stayed and what came and
        went."""
        if slot not in self._dirs:
            return
        number, handle, cookie, seen = self._dirs[slot]
        for _ in range(batches):
            batch = [*await self.fs.readdir(number, cookie)]
            if not batch:
                opened = self.oracle.dir_handles[handle]
                missing, wrong = opened.always - set(seen), set(seen) - opened.ever
                assert not missing and not wrong, f"readdir left out {missing} and invented {wrong}"
                stable = [name for name in seen if name in opened.always]
                assert len(stable) == len(set(stable)), f"readdir repeated a name: {seen}"
                return await self._closedir(slot)
            for name, real, next_cookie in batch:
                seen.append(name)
                cookie = next_cookie
                inode = self.oracle.dir_handles[handle].directory.names.get(name)
                if inode:
                    self.same(real, inode)
        self._dirs[slot] = (number, handle, cookie, seen)

    async def _closedir(self, slot: int) -> None:
        if slot in self._dirs:
            self.oracle.releasedir(self._dirs.pop(slot)[1])

    async def _list_all(self, path: Path) -> None:
        inode = self.target(path)
        if inode and inode.is_dir:
            listed = dict(await self._listing(inode))
            assert sorted(listed) == sorted(inode.names), f"readdir of {path}: {sorted(listed)}"
            for name, real in listed.items():
                self.same(real, inode.names[name])

    async def _listing(self, inode: OracleInode) -> list[tuple[bytes, Any]]:
        self.oracle.clock = Stamp(clock.kernel_ns(), _END_OF_TIME)
        self.oracle.touch_atime(inode)
        found, cookie = [], 0
        while batch := [*await self.fs.readdir(self.numbers[inode.ino], cookie)]:
            found += [(name, real) for name, real, _ in batch]
            cookie = batch[-1][2]
        assert len(found) == len({name for name, _ in found}), f"readdir repeated a name: {found}"
        return found

    async def _many_names(self, path: Path, count: int, remove: bool) -> None:
        for number in range(count):
            name = (*path[:-1], b"m%d" % number)
            await (
                self._unlink(name) if remove else self._mknod(name, stat.S_IFREG | 0o644, 0, (0, 0))
            )

    async def _statfs(self) -> None:
        found = await self.fs.statfs()
        assert found.name_max == 255 and found.block_size >= 512
        assert 0 <= found.available <= found.free <= found.blocks
        assert found.files >= len(self.oracle.inodes) and found.files_free > 0

    async def _forget(self) -> None:
        """The kernel drops everything that it may drop; it may drop what has a name, too."""
        gone = self.oracle.forgettable()
        named = [inode.ino for inode in self.oracle.inodes.values() if inode.nlink][:5]
        self.fs.forget([self.numbers[ino] for ino in gone + named if ino != ROOT])
        self.oracle.forget(gone)
        for ino in gone:
            del self.numbers[ino]
        await self.fs.collector.drain()  # what is erased is not counted any more

    async def _compare(self) -> None:
        """Everything that has a name: attributes, listings, extended attributes, bytes."""
        checked: set[int] = set()
        await self.fs.collector.drain()
        for path, inode in self.oracle.walk().items():
            if inode.ino in checked:
                continue
            checked.add(inode.ino)
            if path:
                place = tuple(path.split(b"/")[1:])
                await self._make("lookup", place)
                await self._listxattr(place)
            await self._check(inode)
            await self._check_quota(inode)
            for name in inode.xattrs:
                await self._equal("getxattr", inode, name)
            if inode.is_dir:
                names = [name for name, _ in await self._listing(inode)]
                assert sorted(names) == sorted(inode.names), f"{path}: {names}"
            elif stat.S_ISLNK(inode.mode):
                await self._equal("readlink", inode)
            elif stat.S_ISREG(inode.mode):
                await self._compare_bytes(inode)

    async def _compare_bytes(self, inode: OracleInode) -> None:
        self.oracle.clock = Stamp(clock.kernel_ns(), _END_OF_TIME)
        self.oracle.touch_atime(inode)
        handle = await self.fs.open(self.numbers[inode.ino], os.O_RDONLY)
        places = {page * PAGE for page in inode.content.pages} | {
            0,
            max(0, inode.size - 1) // PAGE * PAGE,
        }
        for offset in sorted(places):
            found = bytes(await self.fs.read(handle, offset, PAGE))
            expected = inode.content.read(offset, PAGE)
            assert found == expected, (
                f"inode {inode.ino} at {offset}: {_difference(found, expected)}"
            )
        await self.fs.release(handle)


def _count(inode: OracleInode) -> int:
    return 1 + sum(map(_count, inode.names.values()))


def _attempt(function: Callable, args: tuple) -> tuple[Any, str | None]:
    try:
        return function(*args), None
    except FsError as error:
        return None, errno.errorcode[error.errno]


def _difference(found: Any, expected: Any) -> str:
    if not isinstance(found, bytes) or len(found) != len(expected):
        describe = [
            f"{len(value)} bytes" if isinstance(value, bytes) else repr(value)
            for value in (found, expected)
        ]
        return f"{describe[0]} for {describe[1]}"
    first = next(place for place in range(len(found)) if found[place] != expected[place])
    return f"byte {first} is {found[first]} for {expected[first]}"
