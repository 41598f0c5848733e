"""Clones of files and trees: the call ``clone`` of the ioctl (records and sharing: meta/clones.py).

A file's bytes are as of one moment between call and return; files of a tree have different moments.
Undrained files are drained first; files open for writing are copied as a reader sees them.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import trio

from aifs.core import clock, faults
from aifs.core.errors import (
    AccessDenied,
    Busy,
    Exists,
    NotADirectory,
    NotFound,
    Stale,
)
from aifs.files import permissions, ranges, rights, virtual
from aifs.files.asks import DIRECTORY, Hint, HintCall
from aifs.files.drain import Drain
from aifs.files.file_io import FileIO
from aifs.files.open_inode import OpenInode
from aifs.files.services import Services
from aifs.files.transitions import alone
from aifs.files.types import CallerLike
from aifs.meta import clones, dooming, namespace
from aifs.meta.clones import Terms, Unshared
from aifs.meta.kv import ReadTransaction, Result, Transaction, answers, grows
from aifs.meta.records import Inode
from aifs.upkeep.doomed import DoomedTrees
from aifs.vfs.open_files import OpenFiles

NAMES = 32
"""Names that one transaction clones: some 3 ms in which no request is answered."""

_BEGUN = faults.declare("vfs.clone.begun", "the top of a clone is on record, without a name")
_SLICED = faults.declare("vfs.clone.sliced", "some names of a tree are cloned, which has no name")
_FILLED = faults.declare("vfs.clone.filled", "the clone of a tree is whole, but has no name yet")
_SHOWN = faults.declare("vfs.clone.shown", "a clone has its name, which is not durable yet")


class Clones:
    """Used from one trio thread."""

    def __init__(
        self,
        services: Services,
        io: FileIO,
        drain: Drain,
        doomed: DoomedTrees,
        files: OpenFiles,
    ) -> None:
        self._engine = services.engine
        self._quotas = services.quotas
        self._ids = services.ids
        self._io = io
        self._drain = drain
        self._doomed = doomed
        self._kernel = services.kernel
        self._files = files
        self._options = services.options

    async def clone(
        self,
        directory: int,
        name: bytes,
        parent: int,
        new_name: bytes,
        caller: CallerLike,
        is_snapshot: bool = False,
    ) -> None:
        """Make ``new_name`` in ``parent`` a clone of ``name`` (or ``.``) in ``directory``, with all
        below. It appears when complete, and is durable on return.

        A snapshot, of a directory, is read-only; ``.snapshots`` are left out. Bytes are shared
        until one of both changes. Callers must be able to read all of it, and to make names in
        ``parent``. Root's clones keep the owners. Raises AccessDenied, NotFound, NotADirectory,
        Exists, Invalid, NameTooLong, ReadOnly, NoSpace, Unavailable; Busy for a single file open
        for writing.
        """
        self._options.require_writable()
        for ino in (directory, parent):
            virtual.require_on_record(ino)
        namespace.require_name(new_name)
        if self._kernel.kept.repeated() is None:
            await self._clone(directory, name, parent, new_name, caller, is_snapshot)
            faults.reach(_SHOWN)
        await self._kernel.look_up_anew([(parent, new_name)])
        await self._engine.barrier()
        await self._engine.shown()

    HINTS = (
        Hint(
            "clone",
            DIRECTORY,
            "makes a clone of a file or a tree",
            call=HintCall(
                rights.anybody,  # except for files below that the caller may not read
                lambda clones, ask: clones.clone(
                    ask.ino,
                    ask.path("name"),
                    ask.fields.get("parent", ask.ino),
                    ask.path("clone"),
                    ask.caller,
                    ask.fields.get("snapshot", False),
                ),
                {"name": str, "parent": int, "clone": str, "snapshot": bool},
                "Makes a clone of what has the name in it (. is the directory itself), with all "
                "that lies below, under the name clone in the directory parent, by inode number. "
                "It appears when it is complete, and is durable on return; no bytes are copied "
                "except of files that are open for writing. snapshot, of a directory: it stays as "
                "it is, and can only be removed as a whole. EACCES: not all may be read, or no "
                "name made there; EEXIST; EBUSY: a single file is open for writing.",
            ),
        ),
    )

    async def _clone(
        self,
        directory: int,
        name: bytes,
        parent: int,
        new_name: bytes,
        caller: CallerLike,
        is_snapshot: bool,
    ) -> None:
        source, target = await self._engine.view(_find, directory, name, parent, new_name, caller)
        groups = permissions.groups_of(caller)
        terms = Terms(
            clock.kernel_ns(),
            caller.uid,
            [caller.gid, *groups],
            partial(_require_readable, caller=caller),
            is_snapshot=is_snapshot,
        ).below(target)
        name_it = answers(grows(partial(_allowed, parent, caller)))
        if source.is_dir:
            await self._clone_tree(source.ino, parent, new_name, terms, name_it)
        elif is_snapshot:
            raise NotADirectory()
        else:
            await self._clone_file(source, parent, new_name, terms, name_it)

    async def _clone_file(
        self,
        source: Inode,
        parent: int,
        name: bytes,
        terms: Terms,
        name_it: Callable[..., Any],
    ) -> None:
        args = name_it, clones.clone_named, source.ino, parent, name, await self._ids.take(), terms
        if not source.is_file:
            async with self._quotas.granted(terms.project, 0, inodes=1):
                await self._engine.transact(*args)
            return
        granted = self._quotas.granted(terms.project, source.size, inodes=1)
        async with granted, self._io.inodes.held(source.ino) as file:
            if await self._share(file, *args) is None:
                await self._drained([source.ino])
                if await self._share(file, *args) is None:
                    raise Busy("somebody changes it; cp copies what is there now")

    # --- trees ---

    async def _clone_tree(
        self,
        source: int,
        parent: int,
        name: bytes,
        terms: Terms,
        name_it: Callable[..., Any],
    ) -> None:
        top = await self._ids.take()
        await self._engine.transact(clones.begin_tree, source, top, terms)
        try:
            faults.reach(_BEGUN)
            subdirectories = await self._fill(source, top, terms)
            faults.reach(_FILLED)
            args = top, subdirectories, parent, name, await self._ids.take(), clock.kernel_ns()
            await self._engine.transact(name_it, clones.show_tree, *args)
        except BaseException as error:
            if not isinstance(error, faults.SimulatedCrash):
                with trio.CancelScope(shield=True):
                    await self._give_up(top)
            raise

    async def _give_up(self, top: int) -> None:
        """Remove the tree, as others, unless it has its name."""
        await self._engine.transact(dooming.put_abandoned, [top])
        self._doomed.follow(top, await self._engine.view(dooming.find_doomed, top))

    async def _fill(self, source: int, top: int, terms: Terms) -> int:
        """Clone all below ``source`` into ``top``; returns the number of its subdirectories."""
        subdirectories, left, linked = 0, list[Unshared](), dict[int, int]()
        pending = [(source, top)]
        while pending:
            directory, target = pending.pop()
            after, finished = 0, False
            while not finished:
                listed = await self._engine.view(clones.find_slice, directory, after, NAMES)
                # One more tells that there are no others.
                ids = [await self._ids.take() for _ in range(len(listed.inos) + 1)]
                with self._io.table.opening(*listed.inos) as ready:
                    args = directory, target, after, ids, ready, listed.xattrs, linked, terms
                    done = await self._engine.transact(clones.clone_slice, *args)
                faults.reach(_SLICED)
                await self._quotas.require_kept(terms.project)  # else the tree is given up
                after, finished = done.after, done.finished
                linked |= done.linked
                left += done.left
                pending += done.directories
                subdirectories += len(done.directories) if target == top else 0
                await trio.lowlevel.checkpoint()
        await self._drained(list({each.source for each in left}))
        for each in left:
            with suppress(NotFound, Stale):  # it has been removed meanwhile
                await self._clone_left(each, linked, terms)
            await self._quotas.require_kept(terms.project)
        return subdirectories

    async def _clone_left(self, left: Unshared, linked: dict[int, int], terms: Terms) -> None:
        source, directory, name = left
        ino = await self._ids.take()
        if source in linked:
            await self._engine.transact(clones.add_link, linked[source], directory, name, ino)
            return
        args = clones.clone_file, source, directory, name, ino, terms
        async with self._io.inodes.held(source) as file:
            if await self._share(file, *args) is None:
                await self._engine.transact(*args, False)
                await self._copy(file, ino)
            if file.inode.nlink > 1:
                linked[source] = ino

    # --- bytes ---

    async def _share(
        self, file: OpenInode, function: Callable[..., Inode | None], *args: Any
    ) -> Inode | None:
        """Clone a file, open or not; None if its bytes cannot be shared now."""
        if file.home and await self._io.by_home.take_from_home(file):
            return None  # programs of that host use it
        if file.marked and not file.inode.in_burst and not file.may_be_written:
            await self._io.sync(file)  # which has them rest, if nobody has it mapped
        async with alone([file]):
            if file.home or file.marked or file.inode.in_burst:
                return None
            if file.on_object:
                return None
            return await self._io.transitions.share(file, function, *args)

    async def _drained(self, inos: list[int]) -> None:
        """Drain those of these files that are not open for writing; other hosts begin with theirs.
        Raises errors of a drain."""
        found = (self._io.table.open.get(ino) for ino in inos)
        written = {file.inode.ino for file in found if file is not None and file.may_be_written}
        waiting = [ino for ino in inos if ino not in written]
        await self._io.by_home.request_drain(waiting)
        self._drain.request(waiting)
        for ino in waiting:
            with suppress(Busy):  # opened for writing just now
                await self._drain.wait([ino], strict=True)

    async def _copy(self, source: OpenInode, ino: int) -> None:
        """Copy what a reader sees into the empty clone ``ino``."""
        async with self._files.changing(ino) as target:
            done = 0
            while copied := await ranges.copy(
                self._io, source, done, target, done, ranges.WHOLE - done
            ):
                done += copied
            await self._io.sync(target)  # as all that is shared is durable, too
        inode = self._io.inodes.attributes(source)
        times = inode.atime_ns, inode.mtime_ns
        await self._io.inodes.change(ino, _put_times, times, times[1])


# --- transaction functions ------------------------------------------------------------------------


def _find(
    tx: ReadTransaction,
    directory: int,
    name: bytes,
    parent: int,
    new_name: bytes,
    caller: CallerLike,
) -> tuple[Inode, Inode]:
    """The source, and the new name's directory: an early check, repeated in the end."""
    permissions.require_may(namespace.get_directory(tx, directory), caller, permissions.SEARCH)
    source, target = namespace.lookup(tx, directory, name), namespace.get_directory(tx, parent)
    permissions.require_reach(tx, target, caller)
    permissions.require_may(target, caller)
    with suppress(NotFound):
        namespace.get_dentry(tx, parent, new_name)
        raise Exists()
    return source, target


def _allowed(
    parent: int,
    caller: CallerLike,
    tx: Transaction,
    function: Callable[..., Result],
    *args: Any,
) -> Result:
    permissions.require_may(namespace.get_directory(tx, parent), caller)
    return function(tx, *args)


def _require_readable(inode: Inode, caller: CallerLike) -> None:
    if inode.is_dir:
        permissions.require_may(inode, caller, permissions.READ | permissions.SEARCH)
    elif inode.is_file:
        permissions.require_may(inode, caller, permissions.READ)
    elif inode.rdev and caller.uid:
        raise AccessDenied("only root makes device nodes")


def _put_times(inode: Inode, times: tuple[int, int]) -> None:
    inode.atime_ns, inode.mtime_ns = times
