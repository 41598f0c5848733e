"""Files whose home is another host: they are taken from it, or changed by way of it
(docs/design/homes.md)."""

from collections.abc import Sequence

from aifs.burst.remote import Homes, Operation
from aifs.core.errors import Stale, Unavailable
from aifs.core.log import logger
from aifs.files.open_inode import LostBytes, OpenInode
from aifs.files.open_inodes import OpenInodes
from aifs.files.open_table import OpenTable
from aifs.files.transitions import Transitions, alone
from aifs.meta import forms, namespace
from aifs.meta.kv import Engine, ReadTransaction
from aifs.meta.records import Copy
from aifs.peers.transport import Answer

_log = logger(__name__)

_CHANGES = (Operation.WRITE, Operation.APPEND, Operation.TRUNCATE, Operation.ALLOCATE)
"""What is lost with its home, unless it has been synced there."""


class ByHome:
    """Used from one trio thread."""

    def __init__(
        self,
        engine: Engine,
        homes: Homes,
        transitions: Transitions,
        table: OpenTable,
        inodes: OpenInodes,
    ) -> None:
        self._engine = engine
        self._homes = homes
        self._transitions = transitions
        self._table = table
        self._inodes = inodes

    async def take_from_home(self, file: OpenInode, is_emptied: bool = False) -> bool:
        """Have the other host that has the newest bytes, or a clean copy, give the file up.

        Returns whether it is in use there: then this host has joined its writers, and reads and
        changes it by way of its home (``at_home``). ``is_emptied``: its bytes are not needed.
        Raises Unavailable, which names the host.
        """
        ino = file.inode.ino
        if file.cached_at and not file.home:
            await self._take_from_cache(file, is_emptied)
        while home := file.home:
            if file.is_joined:
                return True
            try:
                number = await self._homes.give_up(home, ino, is_emptied, file.inode.copy)
                if number:
                    file.joined, file.joined_as = home, max(number, file.joined_as)
                    continue
            except Stale:
                pass  # it is not its home any more
            await self.follow_bytes(ino)
        return False

    async def _take_from_cache(self, file: OpenInode, is_emptied: bool) -> None:
        """Have another host give up a clean copy; if it keeps it, it becomes the home. A host that
        cannot be asked is passed over."""
        host, file.cached_at, ino = file.cached_at, 0, file.inode.ino
        try:
            number = await self._homes.give_up(host, ino, is_emptied, None, waits=False)
        except (Stale, Unavailable) as error:
            _log.info("inode %d is changed without asking the host that has a copy: %s", ino, error)
            return
        await self.follow_bytes(ino)
        if number:
            file.joined, file.joined_as = host, max(number, file.joined_as)

    async def request_drain(self, inos: Sequence[int]) -> None:
        """Have other hosts drain those of these files that they have first; does not wait for
        it."""
        copies = await self._engine.view(_find_undrained, inos)
        hosts: dict[int, list[int]] = {}
        for ino, copy in copies.items():
            hosts.setdefault(self._homes.of(copy.server), []).append(ino)
        hosts.pop(0, None)  # ours
        for host, wanted in hosts.items():
            await self._homes.request_drain(host, wanted)

    async def take_cache(self, file: OpenInode) -> bool:
        """Whether the file may have a clean copy here: no other host has one that is in use."""
        if not file.cached_at:
            return True
        try:
            dropped = await self._homes.drop(file.cached_at, file.inode.ino)
        except (Stale, Unavailable):
            return False
        await self.follow_bytes(file.inode.ino)
        return dropped

    async def at_home(
        self, file: OpenInode, operation: Operation, *args: int, body: bytes | memoryview = b""
    ) -> Answer | None:
        """Have its home do this with a file that we have joined. None: it is not its home any more,
        or does not know of us; nothing has been done. Raises Unavailable, which names the host, and
        errors of the operation."""
        home, inode, unsynced = file.joined, file.inode, file.unsynced_there
        try:
            answer = await self._homes.carry_out(home, inode.ino, operation, args, body, inode.copy)
        except Stale:
            if file.joined == home:
                file.joined = file.joined_as = 0
            await self.follow_bytes(inode.ino)
            return None
        if file.joined == home:  # else it may be ours by now, and have been changed since
            if file.cached and answer.value[0] > inode.size:
                self._table.told.drop_pages_soon(inode.ino, inode.size)
            inode.size, inode.blocks, inode.mtime_ns, inode.ctime_ns = answer.value
        if operation == Operation.SYNC:
            if file.unsynced_there is unsynced:  # else a write has ended meanwhile
                file.unsynced_there = None
        elif operation in _CHANGES and file.joined == home:
            file.unsynced_there = object()
        return answer

    async def look_at_home(self, file: OpenInode) -> None:
        """Take over the attributes of a file that we have joined, as far as its home tells."""
        file.handles += 1
        try:
            if file.is_joined:
                await self.at_home(file, Operation.LOOK)
        except Unavailable as error:
            _log.info("what is known of inode %d may be old: %s", file.inode.ino, error)
        finally:
            await self._inodes.release(file)

    def is_joined(self, ino: int) -> bool:
        """Whether it is open here, and changed by way of its home, which is another host."""
        file = self._table.open.get(ino)
        return file is not None and file.is_joined

    async def set_mtime_at_home(self, ino: int, mtime_ns: int) -> None:
        """Have the home, if another host, give the inode up or set its mtime, before it is set
        here."""
        inode, changer, _ = await self._engine.view(forms.load, ino)
        copy = inode.copy if inode.in_burst else None
        is_here = copy is None or not self._homes.of(copy.server)
        if inode.is_file and (changer or not is_here):
            file = await self._inodes.acquire(ino)
            try:
                while await self.take_from_home(file):
                    if await self.at_home(file, Operation.SET_MTIME, mtime_ns):
                        break
            finally:
                await self._inodes.release(file)

    async def have_shown(self, file: OpenInode) -> None:
        """Have the home show what its programs have written to a file (only one with a dirty mark
        differs from its record). A home that cannot be asked is passed over."""
        _, changer, _ = await self._engine.view(forms.load, file.inode.ino)
        if changer:
            try:
                await self._homes.show(changer, file.inode.ino)
            except Unavailable as error:
                _log.info("what is read of inode %d may be old: %s", file.inode.ino, error)

    async def follow_bytes(self, ino: int) -> None:
        """Read an open file, which another host has moved or changed, as it is now."""
        while ino in self._table.claims:
            await self._table.claims[ino].wait()
        token, file = self._table.overtaken.get(ino), self._table.open.get(ino)
        if file is not None:
            file.handles += 1  # or it might be closed meanwhile, and opened anew
            try:
                async with alone([file]):
                    await self._transitions.look_again(file)
                if file.unsynced_there is not None and not file.is_joined:
                    file.unsynced_there = None
                    why = f"inode {ino}: its home has begun a new session, or has ended"
                    file.lost = LostBytes(0, why)
            finally:
                await self._inodes.release(file)
        if self._table.overtaken.get(ino) is token:
            self._table.overtaken.pop(ino, None)


class HomeHere(ByHome):
    """Where the store has one host, which is the home of all files."""

    async def request_drain(self, inos: Sequence[int]) -> None:
        pass

    async def set_mtime_at_home(self, ino: int, mtime_ns: int) -> None:
        pass


def _find_undrained(tx: ReadTransaction, inos: Sequence[int]) -> dict[int, Copy]:
    found = [namespace.find_inode(tx, ino) for ino in inos]
    return {each.ino: each.copy for each in found if each and each.in_burst and each.copy}
