"""Publishing a complete group's directory under its hint's name (``publish=NAME``), with a manifest
and the pointer ``latest``, as ``aifs checkpoint publish`` does."""

import os
import stat
import time
from contextlib import suppress
from functools import partial

import trio
from blake3 import blake3

from aifs.core import retention
from aifs.core.errors import FsError
from aifs.core.manifest import Digest, Manifest, encode
from aifs.core.tasks import run_all
from aifs.files.file_io import FileIO
from aifs.files.kernel import Kernel
from aifs.files.types import CallerLike
from aifs.meta import namespace
from aifs.meta.kv import Engine, ReadTransaction
from aifs.meta.listing import entries_of
from aifs.meta.publishing import Publication, find, name_of
from aifs.saves.listed import MANIFEST, NO_PART
from aifs.saves.publish import Publishing, require_may_publish
from aifs.vfs.names import Names
from aifs.vfs.open_files import OpenFiles
from aifs.vfs.policy_hints import PolicyHints


class WholeFiles:
    """Used from one trio thread."""

    def __init__(
        self, io: FileIO, kernel: Kernel, files: OpenFiles, names: Names, publishing: Publishing
    ) -> None:
        self._io = io
        self._kernel = kernel
        self._files = files
        self._names = names
        self._publishing = publishing

    async def put(
        self, directory: int, temporary: bytes, name: bytes, data: bytes, caller: CallerLike
    ) -> None:
        """Write a file of ``caller``'s under a temporary name, and rename it when whole. Raises as
        these."""
        made = await self._names.mknod(directory, temporary, stat.S_IFREG | 0o644, 0, caller)
        async with self._files.changing(made.ino) as file:
            await self._io.write(file, 0, data)
        await self._publishing.rename(directory, temporary, directory, name, caller=caller)
        await self._kernel.forget_names([(directory, name)])


LATEST = b"latest"

_PIECE = 4 << 20  # bytes that are read and hashed at once
_AT_ONCE = 4  # files: while one waits for the device, another is hashed
_TEMPORARY = b"." + MANIFEST


class GroupPublishing:
    """Used from one trio thread."""

    def __init__(
        self,
        engine: Engine,
        io: FileIO,
        files: WholeFiles,
        names: Names,
        policies: PolicyHints,
        publishing: Publishing,
    ) -> None:
        self._engine = engine
        self._io = io
        self._files = files
        self._names = names
        self._policies = policies
        self._publishing = publishing
        self._places = trio.CapacityLimiter(_AT_ONCE)

    async def publish(self, ino: int, name: bytes, ranks: int, caller: CallerLike) -> None:
        """Show the directory ``ino`` as ``name`` beside it. Raises as ``Publishing.publish``, and
        Unavailable for an unreadable file, without leaving a manifest."""
        what, is_shown = await self._engine.view(_publication, ino, name)
        await self._engine.view(require_may_publish, what, caller)
        if not is_shown:
            await self._write_manifest(what, ranks, caller)
        try:
            await self._publishing.publish(what, caller)
        except FsError:
            with suppress(FsError):
                _, is_shown = await self._engine.view(_publication, ino, name)
                if not is_shown:
                    await self._names.unlink(ino, MANIFEST)
            raise

    async def _write_manifest(self, what: Publication, ranks: int, caller: CallerLike) -> None:
        listed: list[tuple[bytes, int]] = []
        reserved: list[bytes] = []
        waiting = [(b"", what.ino)]
        while waiting:
            above, directory = waiting.pop()
            async for name, inode in entries_of(self._engine, directory):
                path = above + name
                if path.startswith(NO_PART):
                    reserved.append(path)
                elif inode.is_dir:
                    waiting.append((path + b"/", inode.ino))
                elif inode.is_file:
                    listed.append((path, inode.ino))
        digests: dict[str, Digest] = {}
        await run_all(*(partial(self._digest, path, ino, digests) for path, ino in listed))
        policy = await self._policies.get(what.ino, "layout")
        manifest = Manifest(retention.step_of(what.name), time.time(), ranks, "", policy, digests)
        text = "".join(encode(manifest)).encode()
        for path in (*reserved, _TEMPORARY):
            with suppress(FsError):  # a directory of somebody's, or gone
                await self._names.unlink(what.ino, path)
        await self._files.put(what.ino, _TEMPORARY, MANIFEST, text, caller)

    async def _digest(self, path: bytes, ino: int, digests: dict[str, Digest]) -> None:
        hasher, size = blake3(), 0
        async with self._places, self._io.inodes.held(ino) as file:
            while piece := await self._io.read(file, size, _PIECE):
                await trio.to_thread.run_sync(hasher.update, piece)
                size += len(piece)
        digests[os.fsdecode(path)] = Digest(size, hasher.hexdigest())


def _publication(tx: ReadTransaction, ino: int, name: bytes) -> tuple[Publication, bool]:
    """The publication, and whether it happened before a crash: then the pointer was moved, too, and
    may lead to a later one."""
    directory = namespace.get_directory(tx, ino)
    what = Publication(ino, directory.parent, name, manifest=MANIFEST)
    if name_of(tx, directory) == name and find(tx, ino, MANIFEST) is not None:
        return what, True
    pointed = find(tx, directory.parent, LATEST)
    if name == LATEST or (pointed is not None and pointed.is_dir):
        return what, False
    return what._replace(latest=LATEST), False
