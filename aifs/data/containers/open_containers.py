"""Containers that are appended to: one object, or several that protect each other.

What a server that hangs has not answered may land late, behind the end or at it. So nothing more is
appended to a plain container then; of a protected one the column is lost.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aifs.core import files
from aifs.core.errors import FsError
from aifs.data.objects.object_set import ObjectSet
from aifs.data.patience import Hanging
from aifs.data.servers import Servers
from aifs.data.workers import gather
from aifs.layout.interleaved import padded
from aifs.layout.striped import Striped

Build = Callable[[memoryview], int]
"""Fills the beginning of memory with a stripe, in a worker thread; the bytes that it takes."""


class DamagedContainer(Exception):
    """A container is not what the metadata says."""


class ContainerFails(Exception):
    """The container takes no appends: bytes behind its end may change, or be lost unnoticed."""

    def __init__(self, error: FsError) -> None:
        super().__init__(error)
        self.error = error


@contextmanager
def _failing(*kinds: type[FsError]) -> Iterator[None]:
    """Turn errors of these kinds into ContainerFails."""
    try:
        yield
    except kinds as error:
        raise ContainerFails(error) from error


class OpenContainer:
    """A container that one task appends to. Every call raises ContainerFails if that must end."""

    def __init__(
        self, servers: Servers, layout: Striped, container: int, end: int, io_priority: str
    ) -> None:
        """``io_priority``: see core.files."""
        self.servers = servers
        self.io_priority = io_priority
        self.layout = layout
        self.id = container
        self.end = end
        """Of what has been appended."""
        self.carried = 0
        """How many bytes before it are still in the caller's memory, at its beginning."""
        self.unread = 0
        """Mask of the columns that have failed."""
        if not end:  # a process that died may have made the object, and not synced its name
            for number in layout.servers:
                if (server := servers.find(number)) is not None:
                    server.doubt_names_near(container)

    async def open(self) -> None:
        """Make ready for ``append``. Raises DamagedContainer, NoSpace, Unavailable."""

    async def append(self, build: Build, memory: memoryview) -> None:
        """Write a stripe behind the end, maybe in part until the next ``append`` or ``finish``,
        with the same memory."""

    async def finish(self, memory: memoryview) -> None:
        """Write what has stayed in memory."""

    async def sync(self, spare: int) -> None:
        """All is durable on return, but for the columns that are ``unread``."""

    def close(self) -> None:
        """Give up the descriptors. Does not block."""


def open_container(
    servers: Servers, layout: Striped, container: int, end: int, io_priority: str = "none"
) -> OpenContainer:
    """Does no I/O. Raises Unavailable. A protected container must be new."""
    kind = _Protected if layout.is_protected else _Plain
    return kind(servers, layout, container, end, io_priority)


class _Plain(OpenContainer):
    """One object on one server."""

    def __init__(
        self, servers: Servers, layout: Striped, container: int, end: int, io_priority: str
    ) -> None:
        super().__init__(servers, layout, container, end, io_priority)
        self._server = servers[layout.servers[0]]
        self._key = (0, container)
        self._fd: int | None = None
        self._busy = 0
        self._closed = False

    async def open(self) -> None:
        await self._run(self._open)

    async def append(self, build: Build, memory: memoryview) -> None:
        self.end += await self._run(self._append, build, memory, self.end)

    async def sync(self, spare: int) -> None:
        await self._run(self._sync)

    async def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        self._busy += 1
        with _failing(Hanging):
            call = (self.io_priority, function, *args)
            called = [(self._server.workers, files.at_priority, call)]
            return (await gather(called, self._ended))[0]

    def _ended(self) -> None:
        self._busy -= 1
        if self._closed:
            self.close()

    def close(self) -> None:
        self._closed = True
        if self._fd is not None and not self._busy:
            self._server.close_object(self._fd)
            self._fd = None

    # --- in worker threads ---

    def _open(self) -> None:
        server, key = self._server, self._key
        with server.lock_of(self.id):
            fd = server.open_object(key, create=self.end == 0)
        if fd is None:
            raise DamagedContainer(f"{server.name}: {server.where(key)} is missing")
        try:
            length = server.stat(key, fd).length
            if length < self.end:
                raise DamagedContainer(
                    f"{server.name}: {server.where(key)} has {length} of {self.end} bytes"
                )
            if length > self.end:
                server.truncate(key, fd, self.end)
        except BaseException:
            server.storage.close(fd)
            raise
        self._fd = fd

    def _append(self, build: Build, memory: memoryview, end: int) -> int:
        fd, filled = self._fd, build(memory)
        assert fd is not None
        self._server.write(self._key, fd, memory[:filled], end)
        with self._server.workers.patience.asking("write", self._key):
            # while the next stripe is read and hashed
            self._server.storage.start_writing(fd, end, filled)
        return filled

    def _sync(self) -> None:
        """Make bytes, length and name durable."""
        assert self._fd is not None
        with _failing(FsError):  # the system forgets what it could not write; a later sync succeeds
            self._server.sync_object(self._key, self._fd)
        self._server.sync_names_near(self.id)


class _Protected(OpenContainer):
    """Replicas, or columns with parity. Coded ones have whole rows, the last filled with zeros."""

    def __init__(
        self, servers: Servers, layout: Striped, container: int, end: int, io_priority: str
    ) -> None:
        super().__init__(servers, layout, container, end, io_priority)
        self._objects = ObjectSet(servers, layout, 0, container, new=True, background=io_priority)

    async def append(self, build: Build, memory: memoryview) -> None:
        server = self.servers.idlest(self.layout.servers)
        call = (self.io_priority, build, memory[self.carried :])
        filled = await self.servers.run(server, files.at_priority, *call)
        total = self.carried + filled
        whole = total - total % self._objects.row
        await self._write(memory, whole)
        self.end += filled
        self.carried = total - whole
        memory[: self.carried] = memory[whole:total]

    async def finish(self, memory: memoryview) -> None:
        end = padded(self.layout, self.end)
        missing = end - self.end
        if missing:
            memory[self.carried : self.carried + missing] = bytes(missing)
            await self._write(memory, self.carried + missing)
        self.end, self.carried = end, 0

    async def _write(self, memory: memoryview, length: int) -> None:
        if length:
            with _failing(FsError):
                await self._objects.write(self.end - self.carried, memory[:length])

    async def sync(self, spare: int) -> None:
        with _failing(FsError):
            self.unread |= await self._objects.sync(spare)

    def close(self) -> None:
        self._objects.close()
