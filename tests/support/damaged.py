"""A store for fsck's tests: filled with every feature, then damaged record by record or object by
object.
"""

import copy
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trio

from aifs.check.findings import FsckReport
from aifs.check.fsck import check
from aifs.core import config as configuration
from aifs.core.config import Config
from aifs.data.chunk_codec import digest_of
from aifs.data.containers.pieces import FileSource
from aifs.data.naming import object_path
from aifs.files.services import ServeOptions
from aifs.files.types import Caller, SetAttr
from aifs.layout.interleaved import Extent, Interleaved
from aifs.layout.placement import BURST_FIRST
from aifs.layout.redundancy import Redundancy
from aifs.meta import chunks, keys, namespace
from aifs.meta.kv import ReadTransaction, Transaction
from aifs.meta.records import Copy, Dentry, Inode, decode_burst, decode_dentry, encode_entry
from aifs.store.store import format_store, open_store
from aifs.vfs import Filesystem, open_filesystem
from tests.support import shared
from tests.support.copies import Copies
from tests.support.shared import Segment

UNIT = 4096
ROOT = keys.ROOT_INO
NOBODY = Caller()
CHUNK = 64 << 10
COMMON = Segment(b"common" * 50)
COPY_ID = 6000  # of copies that the store is given; within the first window of ids
OPTIONS = {"meta.backup_interval": "0", "layout.unit": str(UNIT), "burst.drain_delay": "1h"}


class DamagedStore:
    """A formatted, filled and closed store in ``directory``. ``ino``: inode number by path."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.directory = directory
        self.config: Config = configuration.load(str(directory), OPTIONS)
        format_store(self.config, force=False)
        self.ino: dict[str, int] = {"/": ROOT}
        self._copies = 0
        self.use(self._fill)
        self._add_copies()

    def copied_to(self, directory: Path) -> "DamagedStore":
        """The same store in another place, which is much faster than to fill one."""
        other = copy.copy(self)
        shutil.copytree(self.directory, directory)
        other.directory, other.ino = directory, dict(self.ino)
        other.config = configuration.load(str(directory), OPTIONS)
        return other

    def use(self, work: Callable[[Filesystem], Any]) -> Any:
        return self._mount(work, read_only=False)

    def look(self, work: Callable[[Filesystem], Any]) -> Any:
        """On a read-only mount, which leaves undrained what is."""
        return self._mount(work, read_only=True)

    def _mount(self, work: Callable[[Filesystem], Any], read_only: bool) -> Any:
        async def run() -> Any:
            async with open_filesystem(self.config, ServeOptions(read_only=read_only)) as fs:
                return await work(fs)

        return trio.run(run)

    async def _fill(self, fs: Filesystem) -> None:
        await fs.setxattr(ROOT, b"user.aifs.tier", b"capacity")
        for path in ("/a", "/a/b", "/a/b/c", "/empty", "/z"):
            self.ino[path] = (await fs.mkdir(*self._place(path), 0o755, NOBODY)).ino
        for path, size in (
            ("/a/striped", 10 * UNIT + 5),
            ("/a/b/short", UNIT),
            ("/inline", 100),
            ("/nothing", 0),
        ):
            await self.write(fs, path, os.urandom(size))
        await self.write(fs, "/a/rewritten", b"x" * 5 * UNIT)
        again = (await fs.open(self.ino["/a/rewritten"], os.O_RDWR | os.O_TRUNC)).handle
        await fs.write(again, 0, b"y" * 6 * UNIT)
        await fs.release(again)
        (handle, *_), inode = await fs.create(*self._place("/a/sparse"), 0o644, os.O_RDWR, NOBODY)
        await fs.setattr(inode.ino, SetAttr(size=1000 * UNIT), NOBODY, handle)
        await fs.write(handle, 500 * UNIT, b"island")
        await fs.release(handle)
        self.ino["/a/sparse"] = inode.ino
        await fs.link(self.ino["/a/striped"], *self._place("/z/second"))
        self.ino["/link"] = (await fs.symlink(*self._place("/link"), b"a/striped", NOBODY)).ino
        self.ino["/fifo"] = (await fs.mknod(*self._place("/fifo"), 0o010644, 0, NOBODY)).ino
        await fs.setxattr(self.ino["/inline"], b"user.colour", b"blue")
        await fs.setxattr(self.ino["/a"], b"user.aifs.layout", b"unit=8KiB,count=2")
        await self.write(fs, "/a/two", b"z" * 50_000)
        await fs.rename(*self._place("/a/two"), self.ino["/z"], b"moved")
        self.ino["/z/moved"] = self.ino.pop("/a/two")
        self.ino["/fast"] = (await fs.mkdir(*self._place("/fast"), 0o755, NOBODY)).ino
        for path, size in (("/fast/cached", 5 * UNIT + 1), ("/fast/tiny", 50)):
            await self.write(fs, path, os.urandom(size))
        await fs.setxattr(self.ino["/fast"], b"user.aifs.tier", b"burst")
        await self.write(fs, "/fast/new", os.urandom(3 * UNIT + 7))
        await self._interleave(
            fs, {"/a/chunks": os.urandom(3 * CHUNK + 5), "/z/chunk": os.urandom(100)}
        )
        await self._share(fs)

    async def _interleave(self, fs: Filesystem, contents: dict[str, bytes]) -> None:
        """Interleaved files, as a drain stores them."""
        sources, copies = [], Copies(fs.store.servers)
        for path, data in contents.items():
            self.ino[path] = ino = (await fs.mknod(*self._place(path), 0o100644, 0, NOBODY)).ino
            sources.append(FileSource(ino, ino, len(data), copies(data), Interleaved(CHUNK), 0))

        def flip(tx: Transaction, lists: list[list[Extent]]) -> None:
            for source, extents in zip(sources, lists, strict=True):
                chunks.put_lists(tx, {source.oid: extents})
                inode = namespace.get_inode(tx, source.ino)
                inode.layout, inode.oid, inode.size = source.layout, source.oid, source.size
                namespace.put_inode(tx, inode)

        slots = fs.containers.slots(Redundancy(), (0, 1))
        async with fs.containers.append(sources, slots, fs.drain.movers) as (lists, _):
            await fs.store.engine.transact(flip, lists)
        copies.close()

    async def _share(self, fs: Filesystem) -> None:
        """Two files that have the chunk COMMON in common; the first one has many records of its
        extent list."""
        private = Segment(os.urandom(70), is_shared=False)
        contents = {
            "/a/first": [COMMON, private, *[Segment(bytes(UNIT))] * 150, COMMON],
            "/z/other": [Segment(os.urandom(500), is_shared=False), COMMON],
        }
        for path in contents:
            self.ino[path] = (await fs.mknod(*self._place(path), 0o100644, 0, NOBODY)).ino
        await shared.store(
            fs, {self.ino[path]: rows for path, rows in contents.items()}, servers=(2,)
        )

    def _add_copies(self) -> None:
        """Burst copies of files on the capacity tier, and checksums, as a drain leaves them."""
        contents = self.look(
            lambda fs: self._read_all(fs, ("/fast/cached", "/fast/tiny", "/z/moved"))
        )

        for path in ("/fast/cached", "/fast/tiny"):
            self.add_copy(path, contents[path])
        digest = digest_of(contents["/z/moved"])
        self.transact(lambda tx: tx.put(keys.checksums(self._oid_of(tx, "/z/moved"), 0), digest))

    def _oid_of(self, tx: ReadTransaction, path: str) -> int:
        return namespace.get_inode(tx, self.ino[path]).oid

    def add_copy(self, path: str, content: bytes) -> None:
        """A clean burst copy of a file on the capacity tier, with this content."""
        place = Copy(BURST_FIRST, COPY_ID + self._copies)
        self._copies += 1

        def add(tx: Transaction) -> None:
            inode = namespace.get_inode(tx, self.ino[path])
            inode.copy = place
            namespace.put_inode(tx, inode)
            namespace.put_copy(tx, inode.ino, place, undrained=False, durable=True, now=1)

        self.transact(add)
        self.copy(path).parent.mkdir(parents=True, exist_ok=True)
        self.copy(path).write_bytes(content)

    async def _read_all(self, fs: Filesystem, paths: tuple[str, ...]) -> dict[str, bytes]:
        contents = {}
        for path in paths:
            handle = (await fs.open(self.ino[path], os.O_RDONLY)).handle
            contents[path] = bytes(await fs.read(handle, 0, 1 << 30))
            await fs.release(handle)
        return contents

    async def write(self, fs: Filesystem, path: str, data: bytes) -> None:
        (handle, *_), inode = await fs.create(*self._place(path), 0o644, os.O_RDWR, NOBODY)
        self.ino[path] = inode.ino
        await fs.write(handle, 0, data)
        await fs.release(handle)

    def read(self, path: str) -> bytes:
        return self.look(lambda fs: self._read_all(fs, (path,)))[path]

    def _place(self, path: str) -> tuple[int, bytes]:
        parent, _, name = path.rpartition("/")
        return self.ino[parent or "/"], name.encode()

    # --- damage, and a look ---

    def transact(self, function: Callable[[Transaction], Any]) -> Any:
        """Run a transaction function on the store, behind the back of the filesystem."""

        async def run() -> Any:
            store = await open_store(self.config)
            try:
                return await store.engine.transact(function)
            finally:
                store.close()

        return trio.run(run)

    def change(self, path: str, **changes: Any) -> None:
        """Set fields of the inode's record."""

        def function(tx: Transaction) -> None:
            inode = namespace.get_inode(tx, self.ino[path])
            for name, value in changes.items():
                setattr(inode, name, value)
            tx.put(keys.inode(inode.ino), inode.encode())

        self.transact(function)

    def change_copy_record(self, path: str, **changes: Any) -> None:
        """Set fields of the record of the file's burst copy."""
        key = keys.burst_copy(self.inode(path).copy.id)
        self.transact(
            lambda tx: tx.put(key, decode_burst(tx.get(key))._replace(**changes).encode())
        )

    def put(self, key: bytes, value: bytes) -> None:
        self.transact(lambda tx: tx.put(key, value))

    def delete(self, *doomed: bytes) -> None:
        self.transact(lambda tx: [tx.delete(key) for key in doomed])

    def inode(self, path: str) -> Inode:
        return self.transact(lambda tx: namespace.get_inode(tx, self.ino[path]))

    def dentry_key(self, path: str) -> bytes:
        return keys.dentry(*self._place(path))

    def dentry(self, path: str) -> Dentry:
        return self.transact(lambda tx: decode_dentry(tx.get(self.dentry_key(path))))

    def entry_key(self, path: str) -> bytes:
        return keys.entry(self._place(path)[0], self.dentry(path).cookie)

    def add_name(self, path: str, target: int, type_: int, cookie: int) -> None:
        """A dentry and its entry, as they are, whatever they do to the tree."""
        parent, name = self._place(path)

        def function(tx: Transaction) -> None:
            tx.put(keys.dentry(parent, name), Dentry(target, cookie, type_).encode())
            tx.put(keys.entry(parent, cookie), encode_entry(target, type_, name))

        self.transact(function)

    def remove_name(self, path: str) -> None:
        self.delete(self.entry_key(path), self.dentry_key(path))

    def object(self, path: str, index: int) -> tuple[int, Path]:
        """Server id and path of an object of the file."""
        inode = self.inode(path)
        number = inode.layout.servers[index]
        root = Path(self.config.servers[number])
        (found,) = root.glob(f"objects/*/*/{inode.oid:016x}.{inode.ino:x}")
        return number, found

    def copy(self, path: str) -> Path:
        """The burst copy of the file."""
        return Path(object_path(self.config.burst.directories[0], 0, self.inode(path).copy.id))

    def container(self) -> tuple[int, Path]:
        """Number and path of the container that the first chunk of /a/chunks lies in."""
        oid = self.inode("/a/chunks").oid
        place = self.transact(lambda tx: chunks.get_extents(tx, oid, CHUNK, 0)[1][0].place)
        return place.container, Path(
            object_path(self.config.servers[place.server], 0, place.container)
        )

    def shared_container(self) -> tuple[int, Path]:
        """Number and path of the container that all shared chunks lie in, beside the own chunk of
        /z/other."""
        oid = self.inode("/z/other").oid
        record = self.transact(lambda tx: tx.get(keys.chunk_list(oid, 0)))
        ((number, _, _),) = chunks.decode_shares(record)
        return number, Path(object_path(self.config.servers[2], 0, number))

    def records(self) -> dict[bytes, bytes]:
        def function(tx: ReadTransaction) -> dict[bytes, bytes]:
            return dict(tx.range(b"", b"\xff" * 512))

        return self.transact(function)

    def tree(self) -> dict[str, int]:
        """Inode numbers by path, as programs see them, with a check that every file can be read."""

        async def walk(fs: Filesystem, ino: int, path: str, found: dict[str, int]) -> None:
            cookie = 0
            while batch := await fs.readdir(ino, cookie):
                for name, inode, place in batch:
                    cookie = place
                    below = f"{path}/{os.fsdecode(name)}"
                    assert (await fs.lookup(ino, name)).ino == inode.ino
                    found[below] = inode.ino
                    if inode.is_dir:
                        await walk(fs, inode.ino, below, found)

        async def run(fs: Filesystem) -> dict[str, int]:
            found: dict[str, int] = {}
            await walk(fs, ROOT, "", found)
            return found

        return self.look(run)

    # --- fsck ---

    def check(self, repair: bool = False, deep: bool = False) -> FsckReport:
        return check(self.config, repair, deep=deep)

    def found(self, repair: bool = False) -> list[tuple[str, str]]:
        """Kind and place of what is found."""
        return sorted((finding.kind, finding.where) for finding in self.check(repair).findings)

    def stored(self) -> set[str]:
        """Paths of all files in the servers' directories."""
        return {
            os.path.join(directory, name)
            for server in (*self.config.servers, *self.config.burst.directories)
            for directory, _, names in os.walk(server)
            for name in names
        }
