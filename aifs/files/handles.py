"""Handles of open files, and whether the kernel passes them through to burst copies or objects."""

import os

import trio

from aifs.core.errors import BadHandle, FsError
from aifs.core.log import logger
from aifs.data.server import name_of
from aifs.files.kernel import Kernel
from aifs.files.open_inode import OpenInode
from aifs.files.types import FileHandle, Opened
from aifs.meta.records import APPEND_ONLY

_log = logger(__name__)


class Handles:
    """The table of handles.

    The kernel wants all opens of an inode to be of one kind, so the first one decides for all that
    follow until the last is closed: passed through to the burst copy, or to the object that is the
    whole file, or read and written by way of the daemon. Who writes to such an object does it by
    way of the daemon, beside others that are passed through.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._refused: set[int] = set()  # numbers of servers
        self.writers = 0
        """How many handles can write."""
        self.last_writer_s = -float("inf")
        """When the last one of them was made, on trio's clock."""
        self._handles: dict[int, FileHandle] = {}
        self._next = 1

    def try_out(self, server: int, fd: int) -> OSError | None:
        """Whether the kernel passes files on this server through: None, or why not. ``fd``: any
        file there.
        """
        assert self._kernel.passthrough is not None
        try:
            self._kernel.passthrough.detach(self._kernel.passthrough.attach(fd))
        except OSError as error:
            self._refused.add(server)
            return error
        return None

    async def add(self, file: OpenInode, flags: int) -> Opened:
        """A handle for one more open of ``file``, whose in-core state the caller has acquired."""
        if self._server_for(file, flags) is not None:
            await file.gate.enter_alone()  # or its form might change meanwhile
            try:
                await self._pass_through(file, flags)
            finally:
                file.gate.leave_alone()
        opened = FileHandle(file, flags)
        file.users += 1
        file.writers += opened.writable
        if opened.writable:
            self.writers += 1
            self.last_writer_s = trio.current_time()
        handle = self._next
        self._next += 1
        self._handles[handle] = opened
        return Opened(handle, file.backing, file.on_object and opened.writable)

    def _server_for(self, file: OpenInode, flags: int) -> int | None:
        """The number of the server whose file the kernel may use in place of this one; None: it may
        not.
        """
        # setuid and setgid must go with a write, which nobody would see.
        if self._kernel.passthrough is None or file.users or file.inode.is_privileged:
            return None
        if file.inode.flags & APPEND_ONLY:
            return None  # a program may take O_APPEND back
        server = _server(file, flags)
        return None if server in self._refused else server

    async def _pass_through(self, file: OpenInode, flags: int) -> None:
        server, on_object = self._server_for(file, flags), file.copy is None
        if server is None:
            return  # any more
        fd, passthrough = await _backing(file), self._kernel.passthrough
        if fd is None or passthrough is None or self._server_for(file, flags) is None:
            return
        try:
            file.backing, file.on_object = passthrough.attach(fd), on_object
        except OSError as error:
            where = name_of(server)
            _log.warning(
                "from now on the daemon reads and writes the files of %s: the kernel cannot: %s",
                where,
                error,
            )
            self._refused.add(server)

    def __getitem__(self, handle: int) -> FileHandle:
        """Raises BadHandle."""
        try:
            return self._handles[handle]
        except KeyError:
            raise BadHandle() from None

    def readable(self, handle: int) -> OpenInode:
        opened = self[handle]
        if not opened.readable:
            raise BadHandle("opened for writing only")
        return opened.file

    def writable(self, handle: int) -> OpenInode:
        opened = self[handle]
        if not opened.writable:
            raise BadHandle("opened for reading only")
        return opened.file

    def remove(self, handle: int) -> FileHandle:
        """The last descriptor of ``handle`` is closed; giving the in-core state back is left to the
        caller.
        """
        opened = self[handle]
        del self._handles[handle]
        file = opened.file
        file.users -= 1
        file.writers -= opened.writable
        self.writers -= opened.writable
        if file.users == 0 and file.backing and self._kernel.passthrough is not None:
            self._kernel.passthrough.detach(file.backing)
            file.backing, file.on_object = 0, False
        return opened


def _server(file: OpenInode, flags: int) -> int | None:
    """The number of the server that has all bytes of the file in one local file, if programs may
    use that by themselves.

    A burst copy they may also write. An object is read only, and only if it is what the record
    says.
    """
    if file.copy is not None:
        return file.copy.server
    objects, reads = file.inode.objects, flags & os.O_ACCMODE == os.O_RDONLY
    if reads and not file.marked and objects is not None and len(objects.servers) == 1:
        return objects.servers[0]
    return None


async def _backing(file: OpenInode) -> int | None:
    """The descriptor to pass a file through to; None if that does not work, or is not what it
    should be.
    """
    try:
        if file.copy is not None:
            return await file.copy.backing()
        return None if file.objects is None else await file.objects.backing(file.inode.size)
    except FsError as error:
        if file.inode.in_burst:
            raise
        _log.info("inode %d is not passed through: %s", file.inode.ino, error)
        return None
