"""Making trees visible: rename as a barrier, publishing with pointers in one transaction
(docs/design/publish.md).

The bytes below a new name are durable before it appears. The name of a directory is durable when
the call returns. A directory sealed by its group (saves/ready.py) gets its name when all ranks have
committed.
"""

import os
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext, suppress
from typing import Any

from aifs.core import clock, faults
from aifs.core.errors import NotFound
from aifs.core.texts import parse_object
from aifs.files import permissions, rights, virtual
from aifs.files.asks import DIRECTORY, Ask, Hint, HintCall
from aifs.files.drain import Drain
from aifs.files.file_io import FileIO
from aifs.files.looked_up import if_looked_up
from aifs.files.services import Services
from aifs.files.types import ROOT, CallerLike
from aifs.meta import forms, keys, namespace, publishing
from aifs.meta.kv import ReadTransaction, Transaction, answers
from aifs.meta.namespace import Name
from aifs.meta.publishing import Publication, Published
from aifs.meta.records import Dentry, Inode
from aifs.meta.trash import Remover
from aifs.saves.ready import Readiness
from aifs.saves.retention import Retention
from aifs.upkeep.doomed import DoomedTrees

_DURABLE = faults.declare(
    "vfs.publish.durable", "all below a tree is durable, it has not got its new name yet"
)
_SHOWN = faults.declare(
    "vfs.publish.shown", "new names are in the journal, which is not synced yet"
)

_DIRECTORY = 0o040000 >> 12


_TAKES = {
    "final": str,
    "latest": str,
    "tracker": str,
    "content": str,
    "manifest": str,
    "replace": bool,
    "exclusive": bool,
}


class Publishing:
    """Shows trees under new names."""

    HINTS = (
        Hint(
            "publish-as",
            DIRECTORY,
            "JSON: the final name and the pointers to it, which appear together",
            change=rights.anybody,  # except for require_may_publish
            set=lambda publishing, ask: publishing.publish_as(
                ask, parse_object("publish-as", ask.text, _TAKES)
            ),
            call=HintCall(
                rights.anybody,  # except for require_may_publish
                lambda publishing, ask: publishing.publish_as(ask, ask.fields),
                {**_TAKES, "parent": int},
                "Shows the directory under its final name, with the pointers beside it, all at "
                "once; durable on return. final: a path from the directory that it lies in, or, "
                "with a slash before it, from the root of the mount, or from the directory with "
                "the inode number parent; latest: a symlink to it; tracker: a file with the "
                "content; manifest: a file that has to be in the directory; replace: a tree that "
                "has the final name is removed; exclusive: nothing may have it. EBUSY: members or "
                "files are missing; EEXIST, ENOTEMPTY: the name is taken.",
            ),
        ),
    )

    def __init__(
        self,
        services: Services,
        io: FileIO,
        ready: Readiness,
        drain: Drain,
        doomed: DoomedTrees,
        retention: Retention,
        unlinked: Callable[[Inode], None],
        forget: Callable[[list[int]], None],
    ) -> None:
        """``unlinked``: a transaction has taken a name of this inode; ``forget``: the kernel has
        dropped these inodes."""
        self._engine = services.engine
        self._ids = services.ids
        self._io = io
        self._ready = ready
        self._drain = drain
        self._naming = ready.naming
        self._doomed = doomed
        self._rules = doomed.rules
        self._retention = retention
        self._kernel = services.kernel
        self._refusals = services.refusals
        self._options = services.options
        config = services.config
        self._is_durable = config.is_cluster or config.meta.renames == "durable"
        """Whether renames of files wait for the journal, too. On other hosts they are to be seen
        on return."""
        self._looked_up = services.looked_up
        self._unlinked = unlinked
        self._forget = forget
        self.published = 0
        """How many directories ``publish`` has shown since the mount."""
        self._unkept = services.kernel.unkept
        """Names that the kernel must not keep, present or missing, because publishing changes
        several: it would forget them one by one, and programs see new and old. Pointers stay here;
        a final name, and the one before, during a publication, counted for each."""

    def keeps_name(self, directory: int, name: bytes) -> bool:
        """Whether the kernel may keep what the name leads to."""
        return (directory, name) not in self._unkept and not self._looked_up.is_shared(directory)

    def keeps_names(self, directory: int) -> bool:
        """Whether it may keep all names of a directory."""
        are_kept = self._kernel.keeps_names(directory)
        return are_kept and not self._looked_up.is_shared(directory)

    async def rename(
        self,
        parent: int,
        name: bytes,
        new_parent: int,
        new_name: bytes,
        flags: int = 0,
        caller: CallerLike = ROOT,
    ) -> None:
        """rename(2), a publishing barrier: all below is durable before; the rename on return if
        ``_is_durable`` says so, else in order, after ``meta.commit_interval``.

        Raises Busy for an incomplete pending directory, errors of a drain if the new directory's
        policy is to publish from the capacity tier, ReadOnly for virtual names, Stale for a
        directory as ``Names.rmdir``; then nothing is renamed. The kernel checks rights.
        """
        old, new = (parent, name), (new_parent, new_name)
        virtual.require_on_record(new_parent)
        self._looked_up.changed_here(parent, new_parent)
        while True:
            try:
                moving = await self._engine.view(namespace.get_dentry, parent, name)
            except NotFound:
                virtual.require_missing(parent, name)
                raise
            known: Mapping[Name, int] = {}
            if moving.type == _DIRECTORY:
                known = await self._looked_up.of(old, new)
            with self._refusals.noted(moving.ino, caller, "rename"), suppress(namespace.Overtaken):
                inode, other, synced = await self._rename(moving, old, new, flags, known, caller)
                break
        self._io.table.adopt(inode)
        if other is not None:
            self._unlinked(other)
        faults.reach(_SHOWN)
        if self._is_durable or inode.is_dir or flags == namespace.RENAME_EXCHANGE:
            await self._engine.barrier()
        self._drain.published(synced)
        if inode.is_dir:
            self._retention.shown(new_parent)
        await self._engine.shown()

    async def _rename(
        self,
        moving: Dentry,
        old: Name,
        new: Name,
        flags: int,
        known: Mapping[Name, int],
        caller: CallerLike,
    ) -> tuple[Inode, Inode | None, Collection[int]]:
        """See namespace.rename; also the files that had to be synced. Raises Overtaken if a name
        leads elsewhere; Stale if a ``known`` one does."""
        named = [moving]
        synced = await self._ready.make_durable(moving, new[0])
        if flags == namespace.RENAME_EXCHANGE:
            named.append(await self._engine.view(namespace.get_dentry, *new))
            synced |= await self._ready.make_durable(named[1], old[0])
        directories = [dentry.ino for dentry in named if dentry.type == _DIRECTORY]
        faults.reach(_DURABLE)
        cookies = (await self._ids.take(), await self._ids.take())
        async with self._naming.naming(*directories) if directories else nullcontext():
            with self._io.table.forgetting(synced) if synced else nullcontext(()) as quiet:
                inode, other = await self._engine.transact(
                    if_looked_up,
                    known,
                    publishing.rename,
                    old,
                    new,
                    flags,
                    cookies,
                    clock.kernel_ns(),
                    [dentry.ino for dentry in named],
                    quiet,
                    self._rules.remover(caller),
                )
        return inode, other, synced

    async def publish_as(self, ask: Ask, fields: Mapping[str, Any]) -> None:
        """Publish a directory as these fields of the hint say, unless another daemon has done it
        for this request. Raises as ``publish``."""
        if self._kernel.kept.repeated() is not None:
            await self._engine.barrier()
            inode = await self._engine.view(namespace.get_inode, ask.ino)
            self._retention.shown(inode.parent)
            return
        values: dict[str, Any] = {
            key: os.fsencode(value) if isinstance(value, str) else value
            for key, value in fields.items()
        }
        parent, final = values.pop("parent", 0), values.pop("final", b"")
        way, _, name = final.rpartition(b"/")
        start = keys.ROOT_INO if final.startswith(b"/") else parent
        parent = await self._engine.view(_walk, ask.ino, way, start, ask.caller)
        await self.publish(Publication(ask.ino, parent, name, **values), ask.caller)

    async def publish(self, what: Publication, caller: CallerLike) -> None:
        """Show a directory under its final name, and move pointers, in one transaction.

        All below is durable before, the names on return. Not checked by the kernel: the caller must
        be able to rename the directory, make pointers, and remove a replaced tree. Raises Busy
        (``user.aifs.refused`` says why), Exists, NotEmpty, NotADirectory, NotFound, Invalid,
        AccessDenied, NotPermitted.
        """
        self._options.require_writable()
        what.check()
        await self._engine.view(require_may_publish, what, caller)
        published = Dentry(what.ino, 0, _DIRECTORY)
        synced = await self._ready.make_durable(published, what.parent, strict=True)
        faults.reach(_DURABLE)
        final = what.parent, what.name
        old = await self._engine.view(_place_of, what.ino)
        pointers = {(what.parent, name) for name in (what.latest, what.tracker) if name}
        kept = {old, final, *(pointers - self._unkept.keys())}
        self._unkept.update((old, final, *pointers))
        try:
            await self._kernel.look_up_anew(kept)
            await self._show(what, synced, caller)
        finally:
            self._unkept.subtract((old, final))
            for name in {old, final}:
                if not self._unkept[name]:
                    del self._unkept[name]
        self._retention.shown(what.parent)

    async def _show(
        self, what: Publication, synced: dict[int, object | None], caller: CallerLike
    ) -> None:
        """Publish what is durable; the kernel keeps none of the names."""
        ids = (
            await self._ids.take(),
            await self._ids.take(),
            await self._ids.take(),
            await self._ids.take(),
        )
        async with self._naming.naming(what.ino):
            with self._io.table.forgetting(synced) as quiet:
                done = await self._engine.transact(
                    _publish,
                    what,
                    caller,
                    ids,
                    clock.kernel_ns(),
                    quiet,
                    self._rules.remover(caller),
                )
        for inode in done.unlinked:
            self._unlinked(inode)
        self._kernel.drop_attributes_soon([inode.ino for inode in done.unlinked if inode.nlink])
        if done.doomed is not None:
            self._doomed.take(done.doomed)
        faults.reach(_SHOWN)
        try:
            await self._engine.barrier()
            self.published += 1
            self._drain.published(synced)
            # Programs may work in the directory, and in what has got its new name.
            await self._kernel.look_up_anew((done.old, (what.parent, what.name)))
            pointers = [(what.parent, name) for name in (what.latest, what.tracker) if name]
            await self._kernel.forget_names(pointers)
            await self._engine.shown()
        finally:
            # Only now, for until here the kernel opened them by the names that it knew. Of those
            # that it has never looked up it does not say that it forgets them.
            self._forget([inode.ino for inode in done.unlinked])


@answers
def _publish(
    tx: Transaction,
    what: Publication,
    caller: CallerLike,
    ids: tuple[int, int, int, int],
    now: int,
    quiet: Collection[int],
    by: Remover | None,
) -> Published:
    require_may_publish(tx, what, caller)
    forms.remove_marks(tx, quiet)
    return publishing.publish(tx, what, (caller.uid, caller.gid), ids, now, by)


def _place_of(tx: ReadTransaction, ino: int) -> Name:
    inode = namespace.get_directory(tx, ino)
    return inode.parent, publishing.name_of(tx, inode)


def require_may_publish(tx: ReadTransaction, what: Publication, caller: CallerLike) -> None:
    """Check what the kernel does before a rename, for all changes of a publication. Raises
    AccessDenied, NotPermitted, NotFound, NotADirectory."""
    inode = namespace.get_directory(tx, what.ino)
    parent = namespace.get_directory(tx, what.parent)
    permissions.require_reach(tx, parent, caller)
    old_parent = (
        parent if inode.parent == what.parent else namespace.get_directory(tx, inode.parent)
    )
    permissions.require_may_remove(old_parent, inode, caller)
    permissions.require_may(parent, caller)
    if old_parent is not parent:
        permissions.require_reach(tx, old_parent, caller)
        permissions.require_may(inode, caller, permissions.WRITE)  # its ".." changes
    for name in filter(None, (what.name, what.latest, what.tracker)):
        there = publishing.find(tx, what.parent, name)
        if there is not None and there.ino != inode.ino:
            if there.is_dir and what.replace:
                permissions.require_may_remove_tree(parent, there, caller)
            else:
                permissions.require_may_remove(parent, there, caller)


def _walk(tx: ReadTransaction, ino: int, way: bytes, start: int, caller: CallerLike) -> int:
    """The directory at ``way`` from *start* (0: the one of *ino*). Raises NotFound; NotADirectory,
    also for a symlink; AccessDenied for one that ``caller`` may not search, or an unreachable
    *start*."""
    place = namespace.get_directory(tx, start or namespace.get_directory(tx, ino).parent)
    if start:
        permissions.require_reach(tx, place, caller)
    for name in way.split(b"/"):
        permissions.require_may(place, caller, permissions.SEARCH)
        permissions.require_within(tx, place, caller)
        if name == b"..":
            place = namespace.get_directory(tx, place.parent)
        elif name not in (b"", b"."):
            place = namespace.get_directory(tx, namespace.get_dentry(tx, place.ino, name).ino)
    return place.ino
