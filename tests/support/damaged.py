"""A store for fsck's tests: filled with every feature, then damaged record by record or object by object."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trio

from aifs.check.findings import Report
from aifs.check.fsck import check
from aifs.core import config as configuration
from aifs.core.config import Config
from aifs.meta import keys, namespace
from aifs.meta.kv import ReadTransaction, Transaction
from aifs.meta.records import Dentry, Inode, decode_dentry, encode_entry
from aifs.vfs import Filesystem, open_filesystem
from aifs.vfs.store import format_store, open_store
from aifs.vfs.types import Caller, SetAttr

UNIT = 4096
ROOT = keys.ROOT_INO
NOBODY = Caller()


class DamagedStore:
    """A formatted, filled and closed store in ``directory``. ``ino``: inode number by path."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.config: Config = configuration.load(str(directory), {"layout.unit": str(UNIT)})
        format_store(self.config, force=False)
        self.ino: dict[str, int] = {"/": ROOT}
        self.use(self._fill)

    def use(self, work: Callable[[Filesystem], Any]) -> Any:
        async def run() -> Any:
            async with open_filesystem(self.config) as fs:
                return await work(fs)

        return trio.run(run)

    async def _fill(self, fs: Filesystem) -> None:
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
        again = await fs.open(self.ino["/a/rewritten"], os.O_RDWR | os.O_TRUNC)
        await fs.write(again, 0, b"y" * 6 * UNIT)
        await fs.release(again)
        handle, inode = await fs.create(*self._place("/a/sparse"), 0o644, os.O_RDWR, NOBODY)
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

    async def write(self, fs: Filesystem, path: str, data: bytes) -> None:
        handle, inode = await fs.create(*self._place(path), 0o644, os.O_RDWR, NOBODY)
        self.ino[path] = inode.ino
        await fs.write(handle, 0, data)
        await fs.release(handle)

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

    def records(self) -> dict[bytes, bytes]:
        def function(tx: ReadTransaction) -> dict[bytes, bytes]:
            return dict(tx.range(b"", b"\xff" * 512))

        return self.transact(function)

    def tree(self) -> dict[str, int]:
        """Inode numbers by path, as programs see them, with a check that every file can be read."""

        async def walk(fs: Filesystem, ino: int, path: str, found: dict[str, int]) -> None:
            handle = await fs.opendir(ino)
            cookie = 0
            while batch := await fs.readdir(handle, cookie):
                for name, inode, place in batch:
                    cookie = place
                    below = f"{path}/{os.fsdecode(name)}"
                    assert (await fs.lookup(ino, name)).ino == inode.ino
                    found[below] = inode.ino
                    if inode.is_dir:
                        await walk(fs, inode.ino, below, found)
            await fs.releasedir(handle)

        async def run(fs: Filesystem) -> dict[str, int]:
            found: dict[str, int] = {}
            await walk(fs, ROOT, "", found)
            return found

        return self.use(run)

    # --- fsck ---

    def check(self, repair: bool = False) -> Report:
        return check(self.config, repair)

    def found(self, repair: bool = False) -> list[tuple[str, str]]:
        """Kind and place of what is found."""
        return sorted((finding.kind, finding.where) for finding in self.check(repair).findings)

    def stored(self) -> set[str]:
        """Paths of all files in the servers' directories."""
        return {
            os.path.join(directory, name)
            for server in self.config.servers
            for directory, _, names in os.walk(server)
            for name in names
        }
