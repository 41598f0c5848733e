"""The work of this host for others: it reads, gives up or changes files whose newest bytes are
here, and keeps mirrors of files of others (docs/design/homes.md)."""

import struct
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import trio

from aifs.burst.copy import BurstCopy
from aifs.burst.mirrors import KEEP
from aifs.burst.remote import (
    CARRY_OUT,
    DRAIN,
    DROP,
    GIVE_UP,
    READ,
    REQUEST_DRAIN,
    SHOW,
    Operation,
    RemoteCopy,
)
from aifs.burst.tier import BurstTier
from aifs.core import faults
from aifs.core.errors import Busy, FsError, NoSpace, Stale, Unavailable
from aifs.core.log import logger
from aifs.core.tasks import run_all
from aifs.core.upkeep import Role
from aifs.data.server import DataServer, MissingObject
from aifs.files import ranges
from aifs.files.drain import Drain, Undrained
from aifs.files.file_io import FileIO
from aifs.files.open_inode import OpenInode
from aifs.files.services import Services
from aifs.files.transitions import alone
from aifs.files.writeback import WriteBack
from aifs.meta import keys, mirrors, namespace
from aifs.meta.kv import ReadTransaction
from aifs.meta.mirrors import Mirrored
from aifs.meta.records import Copy, Inode, MirrorOf
from aifs.peers.transport import Answer, Body, FilePart, Peer

_log = logger(__name__)


_CLOSING_S = 0.1
"""How long a file that is open for writing is waited for: close(2) returns before we hear of it."""

_LOOK_S = 0.002

_NOTE_NAME, _NOTE_KEY, _NOTE = b"join", struct.Struct("=QQ"), struct.Struct("=Q")
"""Of notes: session and inode number; of its last join."""

_TICK_S = 1.0
"""How often it is looked whether hosts have gone that have joined us."""

_LOOKS = (Operation.READ, Operation.SYNC, Operation.SHOW, Operation.LOOK)
"""What changes nothing that the kernel knows."""


class _Joined(NamedTuple):
    """A file to which another host writes by way of this one."""

    file: OpenInode
    """It counts among its writers."""
    number: int
    """Of its last join, ascending: a host that leaves by an earlier one has joined again."""


class Home:
    """Answers Homes of other hosts. Used from one trio thread."""

    def __init__(
        self,
        services: Services,
        tier: BurstTier,
        io: FileIO,
        writeback: WriteBack,
        drain: Drain,
        close: Callable[[OpenInode, bool], Awaitable[None]],
    ) -> None:
        """``close`` follows when an acquired file is needed no more, with whether it may be
        changed."""
        self._engine = services.engine
        self._servers = services.servers
        self._tier = tier
        self._io = io
        self._writeback = writeback
        self._drain = drain
        self._close = close
        self._kernel = services.kernel
        self._peers = peers = services.peers
        self._joined: dict[tuple[int, int], _Joined] = {}
        """By session and inode number, what other hosts write to by way of this one."""
        self._joins = 0
        """How often others have joined."""
        self._kept = services.kernel.kept
        self._ready = trio.Event()
        """Set when what another daemon has left is taken up: then others are answered."""
        if not self._kept.is_taken:
            self._ready.set()
        peers.serve(READ, self._read)
        peers.serve(GIVE_UP, self._give_up)
        peers.serve(DROP, self._drop)
        peers.serve(SHOW, self._show)
        peers.serve(CARRY_OUT, self._carry_out)
        peers.serve(DRAIN, self._drain_for)
        peers.hear(REQUEST_DRAIN, lambda peer, inos, body: drain.request(inos))

    async def run(self) -> None:
        """Forget hosts that have gone, until cancelled."""
        while True:
            await trio.sleep(_TICK_S)
            live = self._peers.sessions
            for session, ino in [key for key in self._joined if key[0] not in live]:
                await self._leave(session, ino)

    async def go_on(self) -> None:
        """Others write on to files by way of this host, which another daemon has let them. The
        files that programs here have open are in core."""
        for key, note in list(self._kept.notes.items()):
            if key.startswith(_NOTE_NAME):
                session, ino = _NOTE_KEY.unpack(key[len(_NOTE_NAME) :])
                (number,) = _NOTE.unpack(note)
                self._joins = max(self._joins, number)
                try:
                    await self._join(session, ino, number)
                except FsError as error:
                    _log.warning("inode %d: session %d has to join again: %s", ino, session, error)
        self._ready.set()

    def _note(self, session: int, ino: int, number: int) -> None:
        """For the next daemon. 0: it has left."""
        if self._kept.is_on:
            note = _NOTE.pack(number) if number else b""
            self._kept.note(_NOTE_NAME + _NOTE_KEY.pack(session, ino), note)

    async def _read(self, asker: Peer, arguments: Any, body: Body) -> Answer:
        """Bytes of a burst copy, by [server, id, inode number, offset, length], fewer at its end.
        Raises Stale, once it is on record there, if it is not the file any more."""
        server, copy_id, ino, offset, length = arguments
        place = Copy(server, copy_id)
        if not await self._engine.view(_has_copy, ino, place):
            await self._engine.shown()
            raise Stale(f"inode {ino} has its bytes elsewhere")
        device = self._servers[server]
        fd, size = await self._servers.run(device, _open, device, copy_id)
        return Answer(None, FilePart(fd, offset, max(0, min(length, size - offset))))

    async def _give_up(self, asker: Peer, arguments: Any, body: Body) -> Answer:
        """Give up a file, by [inode number, whether its bytes are not needed]. Answer 0: it is on
        the data servers and nobody's, which is on record there. Else it stays here (in use, or
        cannot be given up), and the answer is the number of the asking host as a writer. Raises as
        ``_join``."""
        ino, is_emptied = arguments
        await self._ready.wait()
        async with self._io.inodes.held(ino):  # or it might be read without our knowing
            return Answer(await self._give_up_held(asker, ino, is_emptied))

    async def _give_up_held(self, asker: Peer, ino: int, is_emptied: bool) -> int:
        until_s, stays = trio.current_time() + _CLOSING_S, False
        while True:
            with trio.move_on_after(_CLOSING_S):
                while self._is_used(ino):
                    await trio.sleep(_LOOK_S)
            if stays or self._is_used(ino):
                return await self._join(asker.session, ino)
            is_home = await self._engine.view(self._is_home, ino)
            if is_emptied and is_home:  # by the asking host, in a moment
                await self._empty(ino)
            self._drain.request([ino])
            try:
                await self._drain.wait([ino], strict=True)
            except Busy:
                continue  # somebody has opened it meanwhile
            await self._writeback.sync_files([ino])
            if not await self._engine.view(self._is_home, ino) and await self._drop_clean(ino):
                await self._engine.shown()
                return 0
            # It is just being closed; or it is one that nobody can give up: its one object may be
            # mapped, it has no name any more, or it has lost bytes.
            stays = trio.current_time() >= until_s
            await trio.sleep(_LOOK_S)

    async def _drop(self, asker: Peer, ino: Any, body: Body) -> Answer:
        """Drop a clean copy of a file unless programs use it. Whether none is here, on record
        there."""
        await self._ready.wait()
        dropped = await self._drop_clean(ino)
        await self._engine.shown()
        return Answer(dropped)

    async def _show(self, asker: Peer, ino: Any, body: Body) -> Answer:
        """Bring what programs here have written to a file on record there."""
        await self._ready.wait()
        file = self._io.table.open.get(ino)
        if file is not None and not file.home:
            file.handles += 1
            try:
                await self._io.show(file, mapped=file.is_mapped)
            finally:
                await self._io.inodes.release(file)
        return Answer()

    async def _drop_clean(self, ino: int) -> bool:
        async with self._io.inodes.held(ino) as file, alone([file]):
            return await self._io.burst.drop_clean(file)

    async def _empty(self, ino: int) -> None:
        file = await self._io.inodes.acquire(ino)
        try:
            await self._io.truncate(file, 0)
        finally:
            await self._close(file, True)

    async def _drain_for(self, asker: Peer, arguments: Any, body: Body) -> Answer:
        """Drain files, by [inode numbers, strict]; they are drained or gone on record there."""
        inos, strict = arguments
        self._drain.request(inos)
        await self._drain.wait(inos, strict)
        await self._engine.shown()
        return Answer()

    async def _join(self, session: int, ino: int, number: int = 0) -> int:
        """Count another host among the writers of a file, until it leaves by the returned number
        (``number`` of an earlier join, if not 0), or ends. Raises Stale, once that is on record
        there, if this host is not its home."""
        file, is_new = await self._io.inodes.acquire(ino), False
        try:
            await self._io.begin_writing(file)
            file.opening -= 1
            if file.home:
                await self._engine.shown()
                raise Stale(f"inode {ino} has another home")
            is_new = (session, ino) not in self._joined
            file.writers += is_new
            self._joins += not number
            number = number or self._joins
            self._joined[session, ino] = _Joined(file, number)
            self._note(session, ino, number)
            return number
        finally:
            if not is_new:
                await self._close(file, True)

    async def _leave(self, session: int, ino: int) -> None:
        joined = self._joined.pop((session, ino), None)
        if joined is not None:
            try:
                await self._io.show(joined.file)
            finally:  # also if nobody waits for it any more, or the file would never be drained
                self._note(session, ino, 0)
                joined.file.writers -= 1
                await self._close(joined.file, True)

    async def _carry_out(self, asker: Peer, arguments: Any, body: Body) -> Answer:
        """An operation on a file, by [inode number, operation, *arguments], and its bytes. Answers
        size, blocks, mtime and ctime, and bytes. Raises Stale if the asking host is no writer, and
        errors of the operation."""
        ino, name, *args = arguments
        operation = Operation(name)
        await self._ready.wait()
        await self._engine.sure()
        joined = self._joined.get((asker.session, ino))
        if operation == Operation.LEAVE:
            if joined is not None and args[0] >= joined.number:
                await self._leave(asker.session, ino)
            return Answer()
        if joined is None:
            raise Stale(f"host {asker.name} does not write to inode {ino} here")
        file = joined.file
        file.handles += 1
        try:
            if operation in _LOOKS:
                data = await self._do(file, operation, args, memoryview(body))
            else:
                with self._io.table.told.held(ino, file.inode.size):
                    try:
                        data = await self._do(file, operation, args, memoryview(body))
                    finally:
                        await self._forget(file)
            inode = self._io.inodes.attributes(file)
            return Answer(_told(inode), data)
        finally:
            await self._io.inodes.release(file)

    async def _do(self, file: OpenInode, operation: Operation, args: Any, body: memoryview) -> Body:
        io = self._io
        match operation:
            case Operation.READ:
                return await io.read(file, *args)
            case Operation.WRITE:
                await io.write(file, args[0], body)
            case Operation.APPEND:
                await io.append(file, body)
            case Operation.TRUNCATE:
                await io.truncate(file, *args)
            case Operation.ALLOCATE:
                await ranges.fallocate(io, file, *args)
            case Operation.SET_MTIME:
                await io.inodes.change(file.inode.ino, _set_mtime, args[0], mtime_ns=args[0])
            case Operation.SYNC:
                await io.fsync(file)
                if file.inode.ino in io.mirrors.lacking:
                    self._drain.request([file.inode.ino])
            case Operation.SHOW:
                await io.show(file)
        return b""

    async def _forget(self, file: OpenInode) -> None:
        """Have the kernel of this host forget what it knows of a changed file."""
        if file.backing:
            await self._kernel.forget({}, [file.inode.ino], [])
        else:
            await self._kernel.drop_pages([file.inode.ino])

    def _is_home(self, tx: ReadTransaction, ino: int) -> bool:
        """Whether the record says that the newest bytes are here, or may be changed here."""
        inode, mark = namespace.find_inode(tx, ino), tx.get(keys.dirty(ino))
        copy = None if inode is None or not inode.in_burst else inode.copy
        has_copy = copy is not None and copy.server not in self._servers.elsewhere
        return has_copy or (mark is not None and keys.host_of(mark) == tx.host)

    def _is_used(self, ino: int) -> bool:
        """Whether programs have it open for writing, or read, and may map, a local file."""
        file = self._io.table.open.get(ino)
        return file is not None and (file.may_be_written or file.backing != 0)


def _told(inode: Inode) -> list[int]:
    return [inode.size, inode.blocks, inode.mtime_ns, inode.ctime_ns]


def _set_mtime(inode: Inode, mtime_ns: int) -> None:
    inode.mtime_ns = mtime_ns


def _has_copy(tx: ReadTransaction, ino: int, place: Copy) -> bool:
    inode = namespace.find_inode(tx, ino)
    return inode is not None and inode.copy == place


def _open(device: DataServer, copy_id: int) -> tuple[int, int]:
    """A descriptor of a copy, the caller's, and its size. Raises Unavailable."""
    key = (0, copy_id)
    fd = device.open_object(key, create=False, write=False)
    if fd is None:
        raise MissingObject(f"{device.name}: {device.where(key)} is missing")
    return fd, device.stat(key, fd).length


_PIECE = 4 << 20
_AT_ONCE = 4

_COPIED = faults.declare(
    "hosts.mirror.copied", "a mirror holds a burst copy's bytes, durably, and is not on record"
)
_KEPT = faults.declare("hosts.mirror.kept", "a mirror is on record, its home has not been told")
_TAKEN = faults.declare(
    "hosts.mirror.taken", "a mirror is the file, and what its dead home has is garbage"
)


class MirrorHost:
    """Answers Mirrors of other hosts. Used from one trio thread."""

    def __init__(
        self,
        services: Services,
        tier: BurstTier,
        io: FileIO,
        drain: Drain,
        role: Role,
    ) -> None:
        self._engine = services.engine
        self._servers = services.servers
        self._tier = tier
        self._homes = io.homes
        self._collector = services.collector
        self._io = io
        self._drain = drain
        self._kernel = services.kernel
        self._role = role
        services.peers.serve(KEEP, self._keep)

    # --- keeping ---

    async def _keep(self, asker: Peer, arguments: Any, body: Body) -> Answer:
        """Keep a mirror of a burst copy, by [server, inode number, id, size, mtime and ctime in
        ns]; durable and on record on return. Raises NoSpace, Unavailable, and Stale if this host
        has heard that it is not the file."""
        server, ino, *state = arguments
        of = MirrorOf._make(state)
        device = self._tier.admit("", of.size)
        if device is None:
            raise NoSpace("its burst tier has no room")
        home = Copy(server, of.id)
        copy = await self._tier.create(device)
        garbage: list[int] | None = None
        try:
            await self._fetch(self._homes.open(home, ino), copy, of.size)
            await copy.set_mtime(of.mtime_ns)
            await copy.sync()
            faults.reach(_COPIED)
            put = mirrors.put_mirror, ino, home, copy.place, of
            with trio.CancelScope(shield=True):
                garbage = await self._engine.transact(*put)
            if garbage is None:
                raise Stale(f"inode {ino} has its bytes elsewhere")
            for mirror in garbage:
                self._collector.add_garbage(mirror)
            self._tier.mirrors(copy.id, copy.server, of.size)
            faults.reach(_KEPT)
        finally:
            if garbage is None:
                self._tier.discard(copy)
            else:
                copy.close()
        await self._engine.barrier()
        return Answer()

    async def _fetch(self, source: RemoteCopy, copy: BurstCopy, size: int) -> None:
        offsets = iter(range(0, size, _PIECE))

        async def fetch_some() -> None:
            for offset in offsets:
                await copy.write(offset, await source.read(offset, min(_PIECE, size - offset)))

        await run_all(*[fetch_some] * min(_AT_ONCE, -(-size // _PIECE)))
        await copy.truncate(size)

    # --- when hosts die ---

    async def run(self) -> None:
        """Until cancelled: when sessions end, and to begin with, see to what they leave."""
        while True:
            live = self._role.live
            await self.look()
            while self._role.live == live:
                await self._role.change()

    async def look(self) -> None:
        """Become the home of files mirrored here whose home has no session any more; drain files of
        this host whose mirror is there."""
        own = [server.id for server in self._servers.burst()]
        after: int | None = 0
        while after is not None:
            found, after = await self._engine.view(mirrors.find_mirrored, after, own)
            # Looked at before, so a host whose session has begun meanwhile has changed none.
            live = await self._role.ask_live() if found else frozenset()
            for mirrored in found:
                if mirrored.copy.server in own:
                    if self._homes.of(mirrored.mirror.server) not in live:
                        self._drain.request([mirrored.inode.ino])
                elif self._homes.of(mirrored.copy.server) not in live:
                    await self._take_over(mirrored)

    async def _take_over(self, mirrored: Mirrored) -> None:
        copy = self._tier.open(mirrored.mirror)
        try:
            await copy.ensure_open()
            is_whole = copy.stat().st_size == mirrored.of.size
        except Unavailable as error:
            _log.warning("inode %d: %s", mirrored.inode.ino, error)
            is_whole = False
        finally:
            copy.close()
        if not is_whole:
            return  # its home may come back
        inode = await self._engine.transact(mirrors.take_over, mirrored)
        if inode is None:
            return
        faults.reach(_TAKEN)
        ino, inode.seq = inode.ino, self._engine.seq
        _log.info("inode %d: its home is over; it is as of its last fsync from now on", ino)
        self._tier.dirty(mirrored.mirror.id, mirrored.mirror.server, inode.space)
        before = self._io.table.cached_size(ino)
        with nullcontext() if before is None else self._io.table.told.held(ino, before):
            self._io.inodes.follow(inode)
            await self._kernel.forget({}, [ino], [ino])
        self._drain.load([Undrained(ino, mirrored.since_ns, inode.size)])
