"""Users' requests to the trash: to list what is theirs, to restore it, to be rid of it.

*Theirs* are entries of inodes that they own, or removed; root's are all. Others' entries are not
shown. Restoring needs the right to make the name.
"""

import json
import stat
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import trio

from aifs.core import clock, faults
from aifs.core.errors import AccessDenied, Busy, Exists, Invalid, NotFound, NotPermitted
from aifs.files import permissions, rights
from aifs.files.asks import DIRECTORY, ROOT, Ask, Hint, HintCall
from aifs.files.services import Services
from aifs.files.types import CallerLike
from aifs.files.views import has_all, reaches
from aifs.meta import keys, namespace, publishing, quotas, restoring
from aifs.meta.kv import ReadTransaction, Transaction, answers
from aifs.meta.quotas import inherited
from aifs.meta.records import Inode
from aifs.meta.restoring import Turns
from aifs.meta.trash import UNKNOWN, Entry
from aifs.upkeep.trash import AT_ONCE, Trash
from aifs.vfs.names import Names
from aifs.vfs.quotas import QuotaTrees

TOGETHER_S = 3600
"""Seconds before a directory's removal from which removed entries return with it: ``rm -r`` removes
names first."""

_PAGE_BYTES = 32 << 10
"""Of what one answer tells; the kernel takes 64 KiB."""

_SLICE = 64
"""Entries that are looked at in one view."""

_PATH_MAX = 4096

_GATHERED = faults.declare(
    "vfs.trash.gathered", "a directory in the trash holds again part of what was removed from it"
)
_RESTORED = faults.declare(
    "vfs.trash.restored", "something in the trash has a name again, which no host was told"
)


class Restoring(NamedTuple):
    """What is to be restored, and where to."""

    directory: int
    """From where ``path`` leads."""
    path: bytes
    """What it was called, from ``directory`` on; b"" if ``ino`` says which."""
    ino: int = 0
    """Its inode number; 0: the last one that had the path."""
    parent: int = 0
    """The directory for it; 0: its own, or the nearest above that is left."""
    name: bytes = b""
    """Its name there; b"": the one that it had."""


class TrashRequests:
    """Used from one trio thread."""

    def __init__(
        self,
        services: Services,
        trash: Trash,
        names: Names,
        quotas: QuotaTrees,
    ) -> None:
        self._quotas = quotas
        self._engine = services.engine
        self._ids = services.ids
        self._trash = trash
        self._names = names
        self._kernel = services.kernel
        self._options = services.options

    # --- what is there ---

    async def tell(self, caller: CallerLike, cursor: int = 0) -> dict[str, Any]:
        """Some of the caller's entries, the first to go first, and the next cursor (None: the end).

        Each as {"id", "path" (from the root of the mount; None if the caller may not find the way),
        "name", "type", "uid", "bytes" (None: not known yet), "removed_by", "removed_s", "until_s"}.
        """
        start, end = keys.all_of(b"U")
        if cursor:
            start = keys.turn(cursor >> 64, cursor & (1 << 64) - 1)
        told: list[dict[str, Any]] = []
        room = _PAGE_BYTES
        while start:
            some, start = await self._engine.view(_describe, start, end, caller)
            for entry, one in some:
                room -= len(json.dumps(one))
                if room < 0 and told:
                    return {"entries": told, "next": str(entry.until_ns << 64 | entry.ino)}
                told.append(one)
            await trio.lowlevel.checkpoint()
        return {"entries": told, "next": None}

    HINTS = (
        Hint(
            "trashed[.N]",
            ROOT,
            "what of the caller's is in the trash, from entry N on",
            rights.reader,
            get=lambda trash, ask: trash.tell(ask.caller, ask.number or 0),
        ),
        Hint(
            "restore",
            DIRECTORY,
            "gives back what was removed",
            call=HintCall(
                rights.anybody,  # except for entries and places that are not the caller's
                lambda trash, ask: trash.call_restore(ask),
                {"path": str, "id": int, "parent": int, "name": str},
                "Restores from the trash what is the caller's: what had this path from there, the "
                "last of several that had; or, if id is not 0, the inode with that number. It goes "
                "to the directory with the inode number parent (0: where it lay, or the nearest "
                "directory above that is still there), under this name (empty: its own). Answers "
                "{id, parent}. Durable on return. ENOENT: there is none; EEXIST: the name is "
                "taken; EBUSY: programs are in a directory that rmdir(2) has removed; EACCES.",
            ),
        ),
        Hint(
            "trash.empty",
            DIRECTORY,
            "has what is in the trash go for good",
            call=HintCall(
                rights.anybody,  # except for entries that are not the caller's
                lambda trash, ask: trash.empty(ask.fields.get("ids", ()), ask.caller),
                {"ids": list},
                "Has these inodes that are in the trash, and the caller's, go for good; without "
                "ids all. ENOENT: one of them is not there.",
            ),
        ),
    )

    async def call_restore(self, ask: Ask) -> dict[str, int]:
        """See ``restore``."""
        which, parent = ask.fields.get("id", 0), ask.fields.get("parent", 0)
        wanted = Restoring(ask.ino, ask.path("path"), which, parent, ask.path("name"))
        done = self._kernel.kept.repeated()
        if done is None:
            inode = await self.restore(wanted, ask.caller)
        else:
            inode = await self._engine.view(namespace.get_inode, done.handle)
            name = await self._engine.view(publishing.name_of, inode)
            await self._show(inode, name)
        return {"id": inode.ino, "parent": inode.parent}

    # --- restoring ---

    async def restore(self, wanted: Restoring, caller: CallerLike) -> Inode:
        """Give an entry a name; returns the inode, whose parent tells where.

        A directory appears with all removed from it, or below, shortly before (TOGETHER_S); a crash
        leaves it trashed or restored. In its place it counts in the present quotas, none of which
        refuses it; elsewhere, too, if its own quota is gone. Raises NotFound, Exists, AccessDenied,
        NotPermitted, Busy (programs are in a directory that rmdir(2) has removed), Invalid,
        CrossDevice (another project, elsewhere), ReadOnly.
        """
        self._options.require_writable()
        entry = await self._engine.view(_find, wanted, caller)
        # Before anything is changed.
        home, _ = await self._engine.view(_find_place, entry, wanted, caller)
        inode = await self._engine.view(namespace.get_inode, entry.ino)
        if entry.is_dead:
            if await self._kernel.is_known(entry.ino):
                raise Busy("a program has the removed directory open, or works in it")
            await self._gather(entry, caller)
        is_counted = inode.project == inherited(home)
        is_home = wanted.parent in (0, entry.parent)
        if is_counted:
            is_due = entry.is_dead
        else:
            is_due = is_home or await self._engine.view(quotas.is_left, inode)
        if is_due:
            # Quotas may have been set or removed since: they count it as if it had been there.
            await self._quotas.take_in(entry.ino, home)
        cookie = await self._ids.take()
        self._kernel.kept.about(entry.ino)
        inode, name = await self._engine.transact(
            _restore, entry, wanted, caller, cookie, clock.kernel_ns()
        )
        faults.reach(_RESTORED)
        inode = self._names.adopt(inode)
        await self._show(inode, name)
        return inode

    async def _show(self, inode: Inode, name: bytes) -> None:
        """It has its name again."""
        await self._engine.barrier()
        await self._kernel.look_up_anew([(inode.parent, name)])
        self._kernel.drop_attributes_soon([inode.ino])
        await self._engine.shown()

    async def _gather(self, top: Entry, caller: CallerLike) -> None:
        """Put what was removed from a trashed directory back into it, deepest first."""
        since_ns = top.since_ns - TOGETHER_S * 10**9
        above = [top]
        found = {top.ino: await self._removed_from(top, since_ns, caller)}
        while above:
            directory = above[-1]
            some = found[directory.ino]
            deeper = next((one for one in some if one.is_dead and one.ino not in found), None)
            if deeper is not None:
                found[deeper.ino] = await self._removed_from(deeper, since_ns, caller)
                above.append(deeper)
                continue
            for first in range(0, len(some), AT_ONCE):
                entries = some[first : first + AT_ONCE]
                for inode in await self._engine.transact(
                    restoring.gather, directory, entries, clock.kernel_ns()
                ):
                    self._names.adopt(inode)
                faults.reach(_GATHERED)
                await trio.lowlevel.checkpoint()
            above.pop()

    async def _removed_from(
        self, directory: Entry, since_ns: int, caller: CallerLike
    ) -> list[Entry]:
        """The caller's last entry of each name removed from a directory since."""
        newest: dict[bytes, Entry] = {}
        after: int | None = 0
        while after is not None:
            some, after = await self._engine.view(_read_own, directory.ino, after, caller)
            for entry in some:
                other = newest.get(entry.name)
                if entry.since_ns >= since_ns and (
                    other is None or other.since_ns < entry.since_ns
                ):
                    newest[entry.name] = entry
            await trio.lowlevel.checkpoint()
        return list(newest.values())

    # --- emptying ---

    async def empty(self, inos: Sequence[int], caller: CallerLike) -> int:
        """Delete these, by inode number, or all of the caller's, for good; returns the bytes.
        Raises NotFound (also for others' entries), ReadOnly."""
        self._options.require_writable()
        if inos:
            wanted: list[Entry] = []
            are_some_gone = self._kernel.kept.repeated() is not None
            for first in range(0, len(inos), AT_ONCE):
                some = inos[first : first + AT_ONCE]
                wanted += await self._engine.view(_own, some, caller, are_some_gone)
                await trio.lowlevel.checkpoint()
            return await self._trash.empty(wanted)
        size, (start, end) = 0, keys.all_of(b"U")
        while start:
            found = await self._engine.view(restoring.read_turns, start, end, AT_ONCE)
            size += await self._trash.empty(await self._engine.view(_of, found, caller))
            start = found.end
        return size


def _is_own(tx: ReadTransaction, entry: Entry, inode: Inode, caller: CallerLike) -> bool:
    if caller.uid not in (0, entry.uid, inode.uid):
        return False
    return has_all(caller) or reaches(tx, restoring.home_of(tx, entry), caller)


def _of(tx: ReadTransaction, turns: Turns, caller: CallerLike) -> list[Entry]:
    return [entry for entry, inode in turns.entries if _is_own(tx, entry, inode, caller)]


def _own(
    tx: ReadTransaction, inos: Sequence[int], caller: CallerLike, are_some_gone: bool
) -> list[Entry]:
    found: list[Entry] = []
    for ino in inos:
        with suppress(*[NotFound] * are_some_gone):
            found.append(_find(tx, Restoring(keys.ROOT_INO, b"", ino), caller))
    return found


def _find(tx: ReadTransaction, wanted: Restoring, caller: CallerLike) -> Entry:
    """The wanted entry. Raises Invalid, NotFound: the same for missing and for others' entries."""
    path = wanted.path.split(b"/")
    if not wanted.ino and any(name in (b"", b".", b"..") for name in path):
        raise Invalid(f"{wanted.path!r} is not a path below the directory")

    def is_own(entry: Entry) -> bool:
        return _is_own(tx, entry, namespace.get_inode(tx, entry.ino), caller)

    with suppress(NotFound):
        if not wanted.ino:
            return restoring.look_up(tx, wanted.directory, path, is_own)
        entry = restoring.entry_of(tx, wanted.ino)
        if is_own(entry):
            return entry
    raise NotFound("nothing in the trash was called so, or has this number, and is yours")


def _find_place(
    tx: ReadTransaction, entry: Entry, wanted: Restoring, caller: CallerLike
) -> tuple[Inode, bytes]:
    """An entry's new directory and free name, the caller's to make."""
    if wanted.parent:
        home = namespace.get_directory(tx, wanted.parent)
    else:
        home = restoring.home_of(tx, entry)
    permissions.require_reach(tx, home, caller)
    permissions.require_may(home, caller)
    name = wanted.name or entry.name
    namespace.require_name(name)
    if tx.get(keys.dentry(home.ino, name)) is not None:
        raise Exists("the name is taken")
    return home, name


@answers
def _restore(
    tx: Transaction, entry: Entry, wanted: Restoring, caller: CallerLike, cookie: int, now: int
) -> tuple[Inode, bytes]:
    home, name = _find_place(tx, entry, wanted, caller)
    return restoring.restore(tx, entry, home.ino, name, cookie, now), name


def _read_own(
    tx: ReadTransaction, directory: int, after: int, caller: CallerLike
) -> tuple[list[Entry], int | None]:
    """Some entries from a directory, and where the next begin."""
    found = restoring.removed_from(tx, directory, after, _SLICE)
    own = [
        entry
        for entry in found
        if (inode := namespace.find_inode(tx, entry.ino)) and _is_own(tx, entry, inode, caller)
    ]
    return own, found[-1].ino if len(found) == _SLICE else None


def _describe(
    tx: ReadTransaction, start: bytes, end: bytes, caller: CallerLike
) -> tuple[list[tuple[Entry, dict[str, Any]]], bytes]:
    """The caller's among the next entries, and where the others start."""
    found: Turns = restoring.read_turns(tx, start, end, _SLICE)
    ways: dict[int, bytes | None] = {}
    told = []
    for entry, inode in found.entries:
        if _is_own(tx, entry, inode, caller):
            if entry.parent not in ways:
                ways[entry.parent] = _way_to(tx, entry.parent, caller)
            told.append((entry, _told(entry, inode, ways[entry.parent])))
    return told, found.end


def _told(entry: Entry, inode: Inode, way: bytes | None) -> dict[str, Any]:
    name = entry.name.decode("utf-8", "surrogateescape")
    return {
        "id": entry.ino,
        "path": None if way is None else f"{way.decode('utf-8', 'surrogateescape')}/{name}",
        "name": name,
        "type": _TYPES.get(stat.S_IFMT(inode.mode), "special"),
        "uid": inode.uid,
        "bytes": None if entry.size == UNKNOWN else entry.size,
        "removed_by": entry.uid,
        "removed_s": entry.since_ns / 1e9,
        "until_s": entry.until_ns / 1e9,
    }


_TYPES = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}


def _way_to(tx: ReadTransaction, directory: int, caller: CallerLike) -> bytes | None:
    """A directory's path, maybe in the trash; None if the caller may not find it."""
    way = restoring.way_up(tx, directory)
    if (way[-1][0].parent if way else directory) != keys.ROOT_INO:
        return None
    wanted = permissions.READ | permissions.SEARCH
    with suppress(AccessDenied, NotPermitted):
        for inode, _ in way:
            permissions.require_may(inode, caller, wanted)
        permissions.require_may(namespace.get_inode(tx, keys.ROOT_INO), caller, wanted)
        path = b"".join(b"/" + name for _, name in reversed(way))
        return path if len(path) < _PATH_MAX else None
    return None
