"""Removed trees, and the background work that takes them apart.

Removing the name costs one transaction (meta/dooming.py); space comes back as this work proceeds.
Open files below go on until closed. A program still in the tree finds the top empty, and the rest
until its turn; files made there meanwhile are removed, too.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import trio

from aifs.core import clock, faults
from aifs.core.errors import NotADirectory
from aifs.core.log import logger
from aifs.core.upkeep import NEVER_S, Work
from aifs.files import permissions
from aifs.files.drain import Drain
from aifs.files.file_io import FileIO
from aifs.files.services import Services
from aifs.files.types import ROOT, CallerLike
from aifs.meta import dooming, namespace
from aifs.meta.kv import Transaction, answers
from aifs.meta.records import Inode
from aifs.meta.trash import Remover
from aifs.upkeep.trash_rules import TrashRules

_log = logger(__name__)

NAMES = 16
"""Names that one transaction removes: half a millisecond in which no request is answered."""

_BACKLOG_MAX = 1024  # garbage that may wait for the collector before this part lets it catch up

_REMOVED = faults.declare(
    "vfs.doomed.removed", "a directory has lost its name and is doomed, untouched below"
)
_EMPTIED = faults.declare("vfs.doomed.emptied", "some names of a doomed directory are removed")


class DoomedTrees:
    """Takes trees, whose names are gone, and empties them in ``work``. Objects go by the collector,
    so only after the transaction that made them garbage is durable (I5)."""

    def __init__(
        self,
        services: Services,
        io: FileIO,
        drain: Drain,
        rules: TrashRules,
        on_gone: Callable[[int], None],
    ) -> None:
        """``on_gone`` is called with doomed directories, and files without names."""
        self._engine = services.engine
        self._io = io
        self._drain = drain
        self._collector = services.collector
        self.directories: dict[int, int] = {}
        """By inode number, the top of its tree; the last one is emptied next."""
        self._emptied: dict[int, int] = {}
        """By directory, the cookie up to which its names are removed."""
        self._trees = Counter[int]()  # top -> how many of its directories are left
        self._stuck: set[int] = set()  # directories that have to wait for fsck
        self.kept: dict[int, None] = {}
        """Trees that went to the trash instead, and that nobody has added up."""
        self._removed_inodes = 0
        """Since the mount."""
        self._upkeep = services.upkeep
        self.rules = rules
        self._on_gone = on_gone
        self._kernel = services.kernel
        self.emptying = trio.Lock()
        """Held by the task that takes trees apart."""

    async def load(self) -> None:
        """Take over the trees that earlier mounts have left."""
        for ino, doomed in await self._engine.view(dooming.all_doomed):
            self.follow(ino, doomed)

    def follow(self, ino: int, doomed: dooming.Doomed | None) -> None:
        """The record of a doomed directory is this one now; None: it is gone."""
        if doomed is None and ino in self.directories:
            self._finish(ino, self.directories[ino])
        elif doomed is not None and doomed.maker is None and ino not in self.directories:
            self._add(ino, doomed.tree)

    async def doom(self, parent: int, name: bytes, caller: CallerLike = ROOT) -> Inode:
        """Remove the directory ``name`` with its tree, or put it in its trash; returns its inode.

        The name is gone on return, like after rmdir. The owner of the top may remove a tree with
        files of others. Raises NotFound, NotADirectory, AccessDenied, NotPermitted.
        """
        inode = await self._engine.transact(
            _doom, parent, name, caller, clock.kernel_ns(), self.rules.remover(caller)
        )
        self.take(inode)
        return inode

    def take(self, inode: Inode) -> None:
        """A transaction has doomed this directory, or put it into the trash."""
        if inode.is_trashed:
            self.follow_kept(inode.ino)
            self._on_gone(inode.ino)
        else:
            self._add(inode.ino, inode.ino)
        faults.reach(_REMOVED)

    def follow_kept(self, ino: int) -> None:
        """A tree has gone to the trash, here or on another host."""
        self.kept[ino] = None
        self._upkeep.wake(Work.TRASH)

    def _add(self, ino: int, tree: int) -> None:
        if ino in self.directories:
            return
        self.directories[ino] = tree
        self._trees[tree] += 1
        self._upkeep.wake(Work.DOOMED)
        self._on_gone(ino)

    def holds(self, ino: int) -> bool:
        """Whether this directory is doomed itself: nobody shall see the names left in it."""
        return ino in self.directories

    def status(self) -> dict[str, Any]:
        """Trees and directories left to take apart; inodes removed since the mount."""
        return {
            "trees": len(self._trees),
            "directories": len(self.directories),
            "removed_inodes": self._removed_inodes,
        }

    # --- in the background ---

    async def work(self) -> float:
        """Take doomed trees apart."""
        await self.empty()
        return NEVER_S

    async def empty(self) -> None:
        """Take apart all doomed trees. Raises NoSpace or Unavailable if the metadata cannot be
        changed."""
        async with self.emptying:
            await self._empty()

    async def _empty(self) -> None:
        while len(self.directories) > len(self._stuck):
            ino = next(ino for ino in reversed(self.directories) if ino not in self._stuck)
            try:
                await self.remove_slice(ino)
            except dooming.DamagedTree as error:
                _log.warning(
                    "a deleted directory, inode %d, cannot be emptied until fsck has repaired it: "
                    "%s",
                    ino,
                    error,
                )
                self._stuck.add(ino)
            await self._upkeep.share.give_way()
            if self._collector.due > _BACKLOG_MAX:
                await self._collector.drain()

    async def remove_slice(self, ino: int) -> None:
        tree, after = self.directories[ino], self._emptied.get(ino, 0)
        inos = await self._engine.view(dooming.find_slice, ino, after, NAMES)
        with self._io.table.opening(*inos) as closed:
            done = await self._engine.transact(
                dooming.remove_slice, ino, closed, after, NAMES, clock.kernel_ns()
            )
        if ino not in self.directories:
            return  # another host has finished it
        self._emptied[ino] = done.after
        for erased in done.erased:
            self._drain.gone(erased)
            self._on_gone(erased)
            self._io.table.unsynced.pop(erased, None)
        for inode in done.kept:
            self.lose(inode)
        self._kernel.drop_attributes_soon([inode.ino for inode in done.kept])
        for oid in done.garbage:
            self._collector.add_garbage(oid)
        for directory in done.directories:
            self._add(directory, tree)
        self._removed_inodes += len(done.erased)
        if done.finished:
            self._finish(ino, tree)
        faults.reach(_EMPTIED)

    def _finish(self, ino: int, tree: int) -> None:
        del self.directories[ino]
        self._emptied.pop(ino, None)
        self._trees[tree] -= 1
        if not self._trees[tree]:
            del self._trees[tree]

    def lose(self, inode: Inode) -> None:
        """A file has lost a name, perhaps its last; then it goes when it is closed."""
        file = self._io.table.adopt(inode)
        if inode.nlink == 0:
            if file is not None:
                file.cancel_lease()
            self._io.table.forget(inode.ino)
            self._drain.gone(inode.ino)
            self._on_gone(inode.ino)


@answers
def _doom(
    tx: Transaction, parent: int, name: bytes, caller: CallerLike, now: int, by: Remover | None
) -> Inode:
    inode = namespace.lookup(tx, parent, name)
    if not inode.is_dir:
        raise NotADirectory()
    permissions.require_may_remove_tree(namespace.get_directory(tx, parent), inode, caller)
    return dooming.doom(tx, parent, name, now, caller.uid, by)
