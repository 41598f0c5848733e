"""Random, always valid work on a filesystem in process, with a ledger of what it acknowledged."""

import os
import random
import stat
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import trio

from aifs.layout.placement import ACTIVE, DRAINING
from aifs.layout.striped import Striped
from aifs.saves.group_drain import GroupReport, Prepared
from aifs.vfs import Caller, SetAttr
from tests.support import modes
from tests.support.kernel import Kernel
from tests.support.ledger import Entry, Found, Ledger, State

ROOT_INO = 1
EXCHANGE = 2
CALLER = Caller()
UNIT = 4096
SETTINGS = {
    "layout.unit": str(UNIT),
    "meta.commit_interval": "10ms",
    "data.writeback_interval": "100ms",
}
MODES = {
    "off": modes.OFF,
    "on": modes.ON | {"meta.backup_interval": "50ms"},
    "tiny": modes.TINY,
    "daemon": modes.TINY | modes.BY_DAEMON,
    "interleaved": modes.TINY | modes.INTERLEAVED | {"layout.inline_limit": "0"},
    "replicas": modes.TINY | modes.REPLICAS | {"layout.count": "1"},
    "coded": modes.TINY | modes.CODED,
}
"""Of the stores that all kinds of work are done on at once."""
SIZE_MAX = 10 * UNIT
NAMES_MAX = 25
WAIT_S = 60  # for what must happen; a test that waits so long fails

_WEIGHTS = """
    create:12 write:30 append:10 truncate:14 truncate_open:4 fsync:8 rename:6 replace:4
    exchange:2 unlink:6 unlink_open:4 mkdir:4 rmdir:3 symlink:2 link:3 chmod:4 setxattr:4
    removexattr:2 open:8 close:10 sync:2 fsyncdir:4 write_during_fsync:4 drain:7 evict:7
    stage:10 compact:3 settle_all:1 remove_tree:2 scrub:2 rebuild:3 leave:3 age:2 group:5
    clone:4
"""
WEIGHTS = {kind: int(weight) for kind, weight in (each.split(":") for each in _WEIGHTS.split())}


class Churn:
    """Works on ``fs`` as programs do, and enters all of it in ``ledger``.

    ``before_note`` is called before each entry, under ``lock``; it may raise to end the work.
    Whoever holds the lock can be sure that no call begins or counts as acknowledged.
    """

    def __init__(
        self, fs: Kernel, ledger: Ledger, rng: random.Random, before_note: Callable[[], None]
    ) -> None:
        self.fs = fs
        self.ledger = ledger
        self.rng = rng
        self.lock = threading.Lock()
        self.done: Counter[str] = Counter()
        self._before_note = before_note
        self._kind = ""
        self._handles: dict[int, int] = {}  # handle -> ino
        self.disks_fail = False
        """Whether a scrub may find flaws: what a failing disk has kept from being written or read.
        """

    async def step(self) -> None:
        """One random operation, if there is something to do it to. Raises FsError as the filesystem
        does."""
        kind = self.rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        self._kind = kind
        await getattr(self, f"_{kind}")()
        self.done[kind] += 1
        await trio.lowlevel.checkpoint()

    async def close_all(self) -> None:
        """As programs do that end in order."""
        for handle in list(self._handles):
            await self._release(handle)

    def _note(self, entry: Callable[..., None], *args: Any) -> None:
        with self.lock:
            self._before_note()
            entry(*args)
            self.ledger.trace.append((self._kind, entry.__name__, args))

    # --- choices ---

    def _paths(self, kind: int) -> list[bytes]:
        return [path for path, entry in self.ledger.now.items() if stat.S_IFMT(entry.mode) == kind]

    def _choose(self, kind: int) -> bytes | None:
        return self.rng.choice(self._paths(kind) or [None])

    def _file(self) -> int | None:
        """The inode number of a file, open or not."""
        if self._handles and self.rng.random() < 0.6:
            return self.rng.choice(list(self._handles.values()))
        path = self._choose(stat.S_IFREG)
        return path and self.ledger.now[path].ino

    def _new_path(self) -> bytes:
        directory = self.rng.choice([b"", *self._paths(stat.S_IFDIR)])
        while True:
            path = directory + b"/n%03d" % self.rng.randrange(1000)
            if path not in self.ledger.now:
                return path

    def _place(self, path: bytes) -> tuple[int, bytes]:
        parent, _, name = path.rpartition(b"/")
        return (self.ledger.now[parent].ino if parent else ROOT_INO), name

    def _bytes(self) -> bytes:
        """Inline, or some units; never zeros, so that holes show."""
        length = self.rng.choice((self.rng.randint(1, 1500), self.rng.randint(1, 5 * UNIT)))
        return bytes([self.rng.randint(1, 255)]) * length

    # --- names ---

    async def _change(self, state: State, operation: Callable[..., Any], *args: Any) -> Any:
        """An operation that leads to ``state``, but for the link counts."""
        self._note(self.ledger.begin, _with_links(state))
        result = await operation(*args)
        inode = result[1] if isinstance(result, tuple) else result
        self._note(self.ledger.done, inode.ino if inode is not None else None)
        return result

    async def _make(
        self, operation: Callable[..., Any], mode: int, *args: Any, target: bytes | None = None
    ) -> Any:
        if len(self.ledger.now) >= NAMES_MAX:
            return await self._unlink()
        path = self._new_path()
        state = self.ledger.now | {path: Entry(None, mode, 1, (), target)}
        return await self._change(state, operation, *self._place(path), *args, CALLER)

    async def _create(self) -> None:
        made = await self._make(self.fs.create, stat.S_IFREG | 0o644, 0o644, os.O_RDWR)
        if made is not None:
            handle, inode = made
            self._handles[handle] = inode.ino
            self._note(self.ledger.add_file, inode.ino)
            if self.rng.random() < 0.8:
                await self._write_to(handle, 0, self._bytes())
            if self.rng.random() < 0.5:
                await self._release(handle)

    async def _mkdir(self) -> None:
        await self._make(self.fs.mkdir, stat.S_IFDIR | 0o755, 0o755)

    async def _symlink(self) -> None:
        target = b"to/%d" % self.rng.randrange(100)
        await self._make(self.fs.symlink, stat.S_IFLNK | 0o777, target, target=target)

    async def _link(self) -> None:
        path = self._choose(stat.S_IFREG)
        if path and len(self.ledger.now) < NAMES_MAX:
            new = self._new_path()
            entry = self.ledger.now[path]
            await self._change(
                self.ledger.now | {new: entry}, self.fs.link, entry.ino, *self._place(new)
            )

    async def _remove(self, operation: Callable[..., Any], path: bytes) -> None:
        entry = self.ledger.now[path]
        state = {other: one for other, one in self.ledger.now.items() if other != path}
        await self._change(state, operation, *self._place(path))
        self._forget(entry)

    def _forget(self, entry: Entry) -> None:
        """What the kernel does at once, or some time later."""
        if entry.nlink <= 1 and self.rng.random() < 0.8:
            self.fs.forget([entry.ino])

    async def _unlink(self) -> None:
        path = self._choose(self.rng.choice((stat.S_IFREG, stat.S_IFREG, stat.S_IFLNK)))
        if path:
            await self._remove(self.fs.unlink, path)

    async def _unlink_open(self) -> None:
        open_now = set(self._handles.values())
        paths = [
            path for path in self._paths(stat.S_IFREG) if self.ledger.now[path].ino in open_now
        ]
        if paths:
            await self._remove(self.fs.unlink, self.rng.choice(paths))

    async def _rmdir(self) -> None:
        path = self._choose(stat.S_IFDIR)
        if path and not any(other.startswith(path + b"/") for other in self.ledger.now):
            await self._remove(self.fs.rmdir, path)

    async def _remove_tree(self) -> None:
        path = self._choose(stat.S_IFDIR)
        if path is None:
            return
        now = self.ledger.now
        below = {
            other: entry for other, entry in now.items() if (other + b"/").startswith(path + b"/")
        }
        elsewhere = {entry.ino for other, entry in now.items() if other not in below}
        if not any(entry.ino in elsewhere for entry in below.values()):
            # Those would lose a link some time later.
            state = {other: entry for other, entry in now.items() if other not in below}
            await self._change(state, self.fs.remove_tree, *self._place(path))

    async def _clone(self) -> None:
        """A file that nobody has open, or a tree, with what is open there."""
        path, now = self._choose(self.rng.choice((stat.S_IFREG, stat.S_IFDIR))), self.ledger.now
        if path is None or now[path].ino in self._handles.values():
            return
        below = {p: e for p, e in now.items() if (p + b"/").startswith(path + b"/")}
        if len(now) + len(below) > NAMES_MAX:
            return
        new = self._new_path()
        links = Counter(entry.ino for entry in below.values() if not stat.S_ISDIR(entry.mode))
        clones = {
            new + p[len(path) :]: entry._replace(ino=None, nlink=links[entry.ino])
            for p, entry in below.items()
        }
        self.ledger.coming = {
            new + p[len(path) :]: self.ledger.content(entry.ino)
            for p, entry in below.items()
            if entry.ino in self.ledger.versions
        }
        self._note(self.ledger.begin, now | clones)
        await self.fs.clone(*self._place(path), *self._place(new), CALLER)
        inos = {b"": ROOT_INO} | {p: e.ino for p, e in now.items() if e.ino is not None}
        for clone in sorted(clones):
            parent, _, name = clone.rpartition(b"/")
            inos[clone] = (await self.fs.lookup(inos[parent], name)).ino
        self._note(self.ledger.cloned, {clone: inos[clone] for clone in clones})

    async def _rename(self) -> None:
        path = self.rng.choice([None, *self.ledger.now])
        new = self._new_path()
        if path and not (new + b"/").startswith(path + b"/"):
            await self._move(path, new)

    async def _replace(self) -> None:
        path, new = self._choose(stat.S_IFREG), self._choose(stat.S_IFREG)
        if path and self.ledger.now[path].ino != self.ledger.now[new].ino:
            lost = self.ledger.now[new]
            await self._move(path, new)
            self._forget(lost)

    async def _exchange(self) -> None:
        path, other = self._choose(stat.S_IFREG), self._choose(stat.S_IFREG)
        now = self.ledger.now
        if path and now[path].ino != now[other].ino:
            await self._publish(path, other, now | {path: now[other], other: now[path]}, EXCHANGE)

    async def _move(self, path: bytes, new: bytes) -> None:
        state = {
            new + p[len(path) :] if (p + b"/").startswith(path + b"/") else p: e
            for p, e in self.ledger.now.items()
            if p != new
        }
        await self._publish(path, new, state)

    async def _publish(self, path: bytes, new: bytes, state: State, flags: int = 0) -> None:
        """A rename: if the new name is there, so are the bytes below it; when that of a directory
        returns, the name is."""
        moving = (path, new) if flags == EXCHANGE else (path,)
        below = {
            entry.ino
            for other, entry in self.ledger.now.items()
            for top in moving
            if entry.ino in self.ledger.versions and (other + b"/").startswith(top + b"/")
        }
        self._note(self.ledger.promise, len(self.ledger.states), below)
        await self._change(
            state, self._rename_silently, *self._place(path), *self._place(new), flags
        )
        if flags == EXCHANGE or stat.S_ISDIR(state[new].mode):
            self._note(self.ledger.barrier)

    async def _rename_silently(self, *args: Any) -> None:
        await self.fs.rename(*args)

    # --- attributes ---

    async def _set(
        self, path: bytes, entry: Entry, operation: Callable[..., Any], *args: Any
    ) -> None:
        ino = entry.ino
        state = {p: entry if e.ino == ino else e for p, e in self.ledger.now.items()}
        await self._change(state, operation, ino, *args)

    async def _chmod(self) -> None:
        path = self._choose(self.rng.choice((stat.S_IFREG, stat.S_IFDIR)))
        if path:
            entry = self.ledger.now[path]
            mode = stat.S_IFMT(entry.mode) | self.rng.choice((0o600, 0o640, 0o700, 0o755))
            await self._set(
                path, entry._replace(mode=mode), self.fs.setattr, SetAttr(mode=mode), CALLER
            )

    async def _setxattr(self) -> None:
        path = self._choose(stat.S_IFREG)
        if path:
            entry = self.ledger.now[path]
            name, value = b"user.x%d" % self.rng.randrange(3), bytes([self.rng.randrange(256)]) * 50
            xattrs = tuple(sorted((dict(entry.xattrs) | {name: value}).items()))
            await self._set(path, entry._replace(xattrs=xattrs), self.fs.setxattr, name, value)

    async def _removexattr(self) -> None:
        paths = [path for path, entry in self.ledger.now.items() if entry.xattrs]
        if paths:
            path = self.rng.choice(paths)
            entry = self.ledger.now[path]
            (name, _), *rest = entry.xattrs
            await self._set(path, entry._replace(xattrs=tuple(rest)), self.fs.removexattr, name)

    # --- bytes ---

    async def _open(self) -> None:
        path = self._choose(stat.S_IFREG)
        if path and len(self._handles) < 6:
            ino = self.ledger.now[path].ino
            self._handles[await self.fs.open(ino, os.O_RDWR)] = ino

    async def _close(self) -> None:
        if self._handles:
            await self._release(self.rng.choice(list(self._handles)))

    async def _release(self, handle: int) -> None:
        del self._handles[handle]
        await self.fs.release(handle)

    async def _handle(self) -> int | None:
        """A handle of some file, opened for this if need be."""
        ino = self._file()
        if ino is None:
            return None
        handle = next((handle for handle, opened in self._handles.items() if opened == ino), None)
        if handle is None:
            handle = await self.fs.open(ino, os.O_RDWR)
            self._handles[handle] = ino
        return handle

    async def _done_with(self, handle: int) -> None:
        if self.rng.random() < 0.4:
            await self._release(handle)

    async def _write_to(self, handle: int, offset: int, data: bytes) -> None:
        ino = self._handles[handle]
        old = self.ledger.content(ino)
        data = data[: max(SIZE_MAX - offset, 1)]
        new = old[:offset].ljust(offset, b"\0") + data + old[offset + len(data) :]
        await self._alter(ino, new, self.fs.write, handle, offset, data)

    async def _alter(
        self, ino: int, content: bytes, operation: Callable[..., Any], *args: Any
    ) -> None:
        self._note(self.ledger.begin_write, ino, content)
        await operation(*args)
        self._note(self.ledger.done_write, ino)

    async def _write(self) -> None:
        handle = await self._handle()
        if handle is not None:
            size = self.ledger.size(self._handles[handle])
            offset = self.rng.choice(
                (0, self.rng.randint(0, size), self.rng.randint(0, size + 9000))
            )
            await self._write_to(handle, offset, self._bytes())
            await self._done_with(handle)

    async def _append(self) -> None:
        handle = await self._handle()
        if handle is not None:
            await self._write_to(handle, self.ledger.size(self._handles[handle]), self._bytes())
            await self._done_with(handle)

    async def _truncate(self) -> None:
        ino = self._file()
        if ino is None:
            return
        content = self.ledger.content(ino)
        size = self.rng.choice(
            (0, self.rng.randint(0, len(content)), self.rng.randint(0, SIZE_MAX))
        )
        handle = next((handle for handle, opened in self._handles.items() if opened == ino), None)
        new = content[:size].ljust(size, b"\0")
        await self._alter(ino, new, self.fs.setattr, ino, SetAttr(size=size), CALLER, handle)

    async def _truncate_open(self) -> None:
        path = self._choose(stat.S_IFREG)
        if path:
            ino = self.ledger.now[path].ino
            self._note(self.ledger.begin_write, ino, b"")
            self._handles[await self.fs.open(ino, os.O_RDWR | os.O_TRUNC)] = ino
            self._note(self.ledger.done_write, ino)

    # --- where the bytes are ---

    async def _drain(self) -> None:
        """Ask for it; wait only where nobody is writing."""
        ino = self._file()
        if ino is not None:
            self.fs.drain.request([ino])
            if ino not in self._handles.values():
                await self._drained([ino])

    async def _group(self) -> None:
        """Some files get equal parts, and are stored together as far as nobody else has drained
        them already."""
        paths = [
            path
            for path in self._paths(stat.S_IFREG)
            if self.ledger.now[path].ino not in self._handles.values()
        ]
        inos = {self.ledger.now[path].ino for path in self.rng.sample(paths, min(3, len(paths)))}
        data = b"".join(bytes([self.rng.randint(1, 3)]) * UNIT for _ in range(3))
        members = [Prepared(ino) for ino in sorted(inos)]
        try:
            for member in members:
                handle = await self.fs.open(member.ino, os.O_RDWR)
                self._handles[handle] = member.ino
                await self._write_to(handle, self.rng.choice((0, UNIT, 2 * UNIT)), data)
                await self._release(handle)
                await self.fs.group_drain.prepare(member, UNIT, GroupReport())
            with trio.CancelScope() as scope:
                if self.rng.random() < 0.2:
                    scope.deadline = trio.current_time() + self.rng.random() / 100
                await self.fs.group_drain.store(members, UNIT, GroupReport())
        finally:
            for member in members:
                await self.fs.group_drain.release(member)
        assert not any(member.outcome is None for member in members)

    async def _settle_all(self) -> None:
        """All that is closed is drained."""
        inos = self.ledger.versions.keys() - self._handles.values()
        self.fs.drain.request(list(inos))
        await self._drained(list(inos))

    async def _drained(self, inos: list[int]) -> None:
        with trio.fail_after(WAIT_S):
            await self.fs.drain.wait(inos)

    async def _evict(self) -> None:
        ino = self._file()
        if ino is not None:
            await self.fs.evictor.evict(ino)

    async def _stage(self) -> None:
        ino = self._file()
        if ino is not None:
            await self.fs.stager.stage(ino)

    async def _compact(self) -> None:
        await self.fs.compaction.compact()

    async def _scrub(self) -> None:
        self.fs.scrub.start(bandwidth=0)
        with trio.move_on_after(0.05):  # what is being written is put off, which may take long
            await self.fs.scrub.wait()
        status = self.fs.scrub.status()
        found = (status["flaws"], status["wrong"], status["dropped_copies"])
        assert self.disks_fail or found == (0, [], 0), status

    async def _rebuild(self) -> None:
        """A column of some protected file is to be made anew."""
        ino = self._file()
        file = ino and await self.fs.getattr(ino)
        if file and isinstance(file.layout, Striped) and file.layout.is_protected:
            column = self.rng.randrange(len(file.layout.servers))
            await self.fs.rebuild.request(file.oid, ino, [column])
            await self._rebuilt(lambda: self.fs.rebuild.idle)

    async def _leave(self) -> None:
        """Everything is to leave a server, for a while."""
        servers = self.fs.store.servers
        number = self.rng.choice([server.id for server in servers.capacity()])
        servers.classify(number, DRAINING, "", None)
        self.fs.rebuild.look()
        try:
            await self._rebuilt(lambda: self.fs.rebuild.left(number) == (0, 0))
        finally:
            servers.classify(number, ACTIVE, "", None)

    async def _age(self) -> None:
        """What is striped, and nobody uses, is compressed; after a crash all the time."""
        await self.fs.setxattr(ROOT_INO, b"user.aifs.age", b"0s:compress=zstd")
        await self.fs.aging.work()
        await self.fs.removexattr(ROOT_INO, b"user.aifs.age")

    async def _rebuilt(self, done: Callable[[], bool]) -> None:
        with trio.move_on_after(0.1):  # what is being written is put off, which may take long
            while not done():
                await self.fs.rebuild.news()

    # --- durability ---

    async def _fsync(self) -> None:
        handle = await self._handle()
        if handle is not None:
            await self._sync_file(handle)
            await self._done_with(handle)

    async def _sync_file(self, handle: int) -> None:
        written, state = dict(self.ledger.written), self.ledger.acknowledged
        await self.fs.fsync(handle)
        self._note(self.ledger.promise, state, [self._handles[handle]], written)
        self._note(self.ledger.barrier)

    async def _write_during_fsync(self) -> None:
        handle = await self._handle()
        if handle is not None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._sync_file, handle)
                nursery.start_soon(
                    self._write_to, handle, self.rng.randint(0, 2 * UNIT), self._bytes()
                )

    async def _sync(self) -> None:
        await self.fs.sync()
        self._note(self.ledger.all_durable)

    async def _fsyncdir(self) -> None:
        path = self._choose(stat.S_IFDIR)
        await self.fs.fsyncdir(self.ledger.now[path].ino if path else ROOT_INO)
        self._note(self.ledger.barrier)


def _with_links(state: State) -> State:
    links = Counter(entry.ino for entry in state.values() if entry.ino is not None)
    return {
        path: entry._replace(nlink=0 if stat.S_ISDIR(entry.mode) else links.get(entry.ino, 1))
        for path, entry in state.items()
    }


async def read_tree(fs: Kernel) -> dict[bytes, Found]:
    """Everything that has a name, by path."""
    tree: dict[bytes, Found] = {}

    async def walk(directory: int, path: bytes) -> None:
        cookie = 0
        while batch := await fs.readdir(directory, cookie):
            for name, inode, cookie in batch:
                assert path + b"/" + name not in tree
                tree[path + b"/" + name] = await _read(fs, inode)
                if inode.is_dir:
                    await walk(inode.ino, path + b"/" + name)

    await walk(ROOT_INO, b"")
    return tree


async def _read(fs: Kernel, inode: Any) -> Found:
    names = sorted(await fs.listxattr(inode.ino))
    xattrs = tuple([(name, await fs.getxattr(inode.ino, name)) for name in names])
    target = await fs.readlink(inode.ino) if stat.S_ISLNK(inode.mode) else None
    entry = Entry(inode.ino, inode.mode, 0 if inode.is_dir else inode.nlink, xattrs, target)
    if not inode.is_file:
        return Found(entry, None)
    handle = await fs.open(inode.ino, os.O_RDONLY)
    content = bytes(await fs.read(handle, 0, inode.size + 1))
    assert len(content) == inode.size, (len(content), inode.size)
    await fs.release(handle)
    return Found(entry, content)
