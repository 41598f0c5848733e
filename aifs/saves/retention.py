"""Removing old checkpoints, by their directory's policy, and abandoned pending directories.

Checkpoints are what a publish or rename has shown as a whole (``Inode.shown_ns``), not what
programs write in place. The decision is pure (core/retention.py). What goes is doomed, or trashed,
in a transaction that checks again that it is unchanged, and that the user that set the policy, or
marked the directory, may remove it.
"""

import math
import stat
from collections.abc import Callable, Set
from typing import Any

import trio

from aifs.core import clock, retention
from aifs.core.clock import careful_clock
from aifs.core.errors import AccessDenied, FsError, Invalid, NotFound, NotPermitted, Unavailable
from aifs.core.log import logger
from aifs.core.retention import Keep, ListedCheckpoint
from aifs.core.upkeep import Work
from aifs.files import permissions, rights
from aifs.files.asks import DIRECTORY, Hint
from aifs.files.file_io import FileIO
from aifs.files.services import Services
from aifs.files.types import CallerLike
from aifs.meta import dooming, groups, keys, namespace, paths, publishing
from aifs.meta.askers import Asker
from aifs.meta.kv import ReadTransaction, Transaction, grows
from aifs.meta.listing import list_directory
from aifs.meta.publishing import Kept, decode_kept
from aifs.meta.records import Inode, decode_entry
from aifs.saves.listed import MANIFEST, NO_PART, read_manifest
from aifs.upkeep.doomed import DoomedTrees
from aifs.upkeep.trash import tree_size
from aifs.upkeep.trash_rules import TrashRules

_log = logger(__name__)

_INTERVAL_S = 3600.0
_ENTRIES = 64  # looked at in one go: about 0.3 ms


class Retention:
    """Looks after directories with a policy after each publication, and after all now and then."""

    def __init__(
        self,
        services: Services,
        io: FileIO,
        doomed: DoomedTrees,
        rules: TrashRules,
    ) -> None:
        self._abandoned_after_s = services.config.publish.abandoned_after_s
        self._engine = services.engine
        self._io = io
        self._doomed = doomed
        self._rules = rules
        self.kept: set[int] = set()  # directories that have, or had, a policy
        self._due: set[int] = set()
        self._everything_at_s = -math.inf  # by trio's clock
        self._upkeep = services.upkeep
        self._kernel = services.kernel
        self.now_ns = careful_clock()
        """The time of day by which things are old."""

    # --- policies ---

    async def load(self) -> None:
        """Which directories have a policy."""
        self.kept.update(await self._engine.view(_all_kept))

    async def set_policy(self, ino: int, text: str, caller: CallerLike) -> None:
        """Set a directory's policy, '' to remove it, from now on; it removes what ``caller`` may.
        Raises Invalid, NotFound, NotADirectory."""
        try:
            policy = retention.format_keep(retention.parse_keep(text)) if text else ""
        except ValueError as error:
            raise Invalid(str(error)) from None
        await self._engine.transact(_put_policy, ino, Kept(policy, permissions.asker_of(caller)))
        if policy:
            self.follow(ino)

    def follow(self, ino: int) -> None:
        """A directory has another policy now."""
        self.kept.add(ino)
        self.shown(ino)

    async def policy_of(self, ino: int) -> str:
        """The policy of a directory, '' if it has none."""
        kept = await self._engine.view(_get_kept, ino)
        return "" if kept is None else kept.policy

    HINTS = (
        Hint(
            "keep",
            DIRECTORY,
            "which checkpoints in it remain: last=3,every=1000,age=7d,bytes=2TiB",
            rights.reader,
            rights.owner,
            get=lambda retention, ask: retention.policy_of(ask.ino),
            set=lambda retention, ask: retention.set_policy(ask.ino, ask.text, ask.caller),
            remove="",
        ),
    )

    # --- what is done ---

    def shown(self, parent: int) -> None:
        """A directory has got a name in ``parent``, or its policy has changed."""
        if parent in self.kept:
            self._due.add(parent)
            self._upkeep.wake(Work.RETENTION)

    async def work(self) -> float:
        """Enforce policies that are due; in how many seconds all are."""
        if trio.current_time() >= self._everything_at_s:
            self._everything_at_s = trio.current_time() + _INTERVAL_S
            self._due |= self.kept
            await self._attempt(self.remove_abandoned)
        while self._due:
            ino = self._due.pop()
            await self._attempt(self.enforce, ino)
        return self._everything_at_s - trio.current_time()

    async def _attempt(self, function: Callable, *args: int) -> None:
        try:
            await function(*args)
        except FsError as error:
            _log.warning("old checkpoints stay for now: %s", error)

    async def enforce(self, ino: int) -> None:
        """Remove what the policy of the directory ``ino`` does not keep."""
        kept = await self._engine.view(_get_kept, ino)
        if kept is None:  # or the directory is gone
            return
        try:
            keep = retention.parse_keep(kept.policy)
        except ValueError as error:
            raise Unavailable(f"inode {ino}: its policy of retention is damaged: {error}") from None
        inodes, checkpoints = await self._survey(ino, keep)
        if disorder := retention.find_disorder(checkpoints):
            where = await self._engine.view(paths.describe, ino)
            _log.warning("%s: all checkpoints stay, despite %s: %s", where, kept.policy, disorder)
        for going in await self._decide(inodes, checkpoints, keep):
            if await self._remove(_doom_old, ino, going.name, inodes[going.name], kept):
                _log.info(
                    "checkpoint %r is removed: %s keeps others",
                    going.name.decode("utf-8", "replace"),
                    kept.policy,
                )

    async def _decide(
        self, inodes: dict[bytes, int], checkpoints: list[ListedCheckpoint], keep: Keep
    ) -> list[ListedCheckpoint]:
        """What has to go. Reads manifests of these and of the newest alone: each is a look at all
        its files."""
        known, read = {one.name: one for one in checkpoints}, set[bytes]()
        while going := retention.decide(known.values(), keep, self.now_ns()):
            newest = retention.newest_last(known.values())[-max(keep.last, 1) :]
            unread = {one.name for one in (*going, *newest)} - read
            if not unread:
                break
            for name in unread:
                read.add(name)
                listed = await read_manifest(self._engine, self._io, inodes[name])
                if listed is not None:
                    known[name] = known[name]._replace(step=listed.step, complete=listed.complete)
        return going

    async def remove_abandoned(self) -> None:
        """Remove long idle pending directories, if the user that marked them may."""
        if not self._abandoned_after_s:
            return
        in_use = await self._directories_in_use()
        for ino in await self._engine.view(_all_pending):
            since_ns = self.now_ns() - int(self._abandoned_after_s * 1e9)
            place = await self._engine.view(_find_idle, ino, since_ns)
            if (
                place is not None
                and ino not in in_use
                and await self._remove(_doom_idle, *place, ino, since_ns)
            ):
                _log.info(
                    "pending directory %r is removed: nobody went on with it",
                    place[1].decode("utf-8", "replace"),
                )

    async def _remove(
        self, doom: Callable[..., Inode | None], parent: int, name: bytes, ino: int, more: Any
    ) -> bool:
        now = clock.kernel_ns()
        try:
            inode = await self._engine.transact(doom, parent, name, ino, now, self._rules, more)
        except (NotFound, NotPermitted):  # it has gone, or something in it is immutable
            return False
        if inode is None:
            return False
        self._doomed.take(inode)
        self._kernel.drop_name_soon(parent, name)
        return True

    # --- what is there ---

    async def _survey(
        self, directory: int, keep: Keep
    ) -> tuple[dict[bytes, int], list[ListedCheckpoint]]:
        """Inode numbers by name, and a directory's checkpoints, without reading files. Other tasks
        run between slices."""
        in_use, found, cookie = await self._directories_in_use(), [], 0
        pointed: set[bytes] = set()
        while places := await self._engine.view(_list, directory, cookie):
            for name, inode, cookie, is_checkpoint, is_theirs in places:
                if stat.S_ISLNK(inode.mode):
                    # It may lead to a file in a checkpoint.
                    pointed.update((inode.data or b"").split(b"/"))
                elif is_checkpoint:
                    found.append((name, inode, is_theirs))
            await trio.lowlevel.checkpoint()
        checkpoints = [
            ListedCheckpoint(
                name,
                retention.step_of(name),
                inode.shown_ns,
                await tree_size(self._engine, inode.ino) if keep.bytes else 0,
                in_use=is_theirs or inode.ino in in_use or name in pointed,
            )
            for name, inode, is_theirs in found
        ]
        return {name: inode.ino for name, inode, _ in found}, checkpoints

    async def _directories_in_use(self) -> set[int]:
        """All directories above open files, except files that have had several names, which
        stay."""
        found: set[int] = set()
        for ino in self._io.table.programs_have_open():
            found |= await self._engine.view(_ancestors, ino, found)
        return found


@grows
def _put_policy(tx: Transaction, ino: int, kept: Kept) -> None:
    namespace.get_directory(tx, ino)
    if kept.policy:
        tx.put(keys.retention(ino), kept.encode())
    else:
        tx.delete(keys.retention(ino))


def _get_kept(tx: ReadTransaction, ino: int) -> Kept | None:
    record = tx.get(keys.retention(ino))
    return None if record is None else decode_kept(record)


def _all_kept(tx: ReadTransaction) -> list[int]:
    return [keys.number(key) for key, _ in tx.range(*keys.all_of(b"r"))]


def _all_pending(tx: ReadTransaction) -> list[int]:
    """Pending directories with readable records."""
    found, _ = groups.load(tx)
    return [ino for ino, (record, _) in found.items() if record.pending is not None]


def _find_idle(tx: ReadTransaction, ino: int, since_ns: int) -> tuple[int, bytes] | None:
    """A pending directory's place, if idle since ``since_ns``."""
    record, inode = groups.find(tx, ino), namespace.find_inode(tx, ino)
    if record is None or record.pending is None or inode is None or not inode.links:
        return None
    commits = [member.when_ns for member in groups.members(tx, ino).values()]
    last_ns = max(record.created_ns, record.pending.created_ns, inode.mtime_ns, *commits)
    return None if last_ns > since_ns else (inode.parent, publishing.name_of(tx, inode))


def _list(
    tx: ReadTransaction, directory: int, cookie: int
) -> list[tuple[bytes, Inode, int, bool, bool]]:
    """Entries as (name, inode, cookie, is it a checkpoint, must the policy's user let it be)."""
    asker, found = _policy_setter(tx, directory), []
    for name, inode, place in list_directory(tx, directory, cookie, _ENTRIES):
        is_one = _is_checkpoint(tx, name, inode)
        is_theirs = is_one and (asker is None or not _may_remove(tx, inode, asker))
        found.append((name, inode, place, is_one, is_theirs))
    return found


def _is_checkpoint(tx: ReadTransaction, name: bytes, inode: Inode) -> bool:
    """Whether it was shown as a whole, is named as a checkpoint, and holds files."""
    if not inode.shown_ns or name.startswith(b".") or groups.is_pending(tx, inode.ino):
        return False
    has_manifest = tx.get(keys.dentry(inode.ino, MANIFEST)) is not None
    return (has_manifest or retention.step_of(name) is not None) and _holds_files(tx, inode.ino)


def _holds_files(tx: ReadTransaction, ino: int) -> bool:
    """Whether regular files, besides AIFS's own, lie below; also for too many names to look at."""
    directories, left = [ino], _ENTRIES
    for directory in directories:
        for _, value in tx.range(*keys.entries_after(directory, 0), left):
            child, type_, name = decode_entry(value)
            left -= 1
            if type_ == stat.S_IFREG >> 12 and not name.startswith(NO_PART):
                return True
            if type_ == stat.S_IFDIR >> 12:
                directories.append(child)
        if not left:
            return True
    return False


def _ancestors(tx: ReadTransaction, ino: int, known: Set[int]) -> set[int]:
    """Directories above, up to ``known`` ones."""
    found: set[int] = set()
    while ino not in (keys.ROOT_INO, namespace.SEVERAL) and ino not in known:
        inode = namespace.find_inode(tx, ino)
        if inode is None:
            break
        if inode.is_dir:
            found.add(ino)
        ino = inode.parent
    return found


def _doom_old(
    tx: Transaction, parent: int, name: bytes, ino: int, now: int, rules: TrashRules, kept: Kept
) -> Inode | None:
    """Doom a checkpoint if it still has the name, and ``kept`` is the policy."""
    if _get_kept(tx, parent) != kept:
        return None
    return _doom(tx, parent, name, ino, now, rules, kept.asker)


def _doom_idle(
    tx: Transaction, parent: int, name: bytes, ino: int, now: int, rules: TrashRules, since_ns: int
) -> Inode | None:
    """Doom a pending directory that still has the name, idle since."""
    if _find_idle(tx, ino, since_ns) is None:
        return None
    record = groups.find(tx, ino)
    assert record is not None and record.pending is not None
    return _doom(tx, parent, name, ino, now, rules, record.pending.asker)


def _doom(
    tx: Transaction,
    parent: int,
    name: bytes,
    ino: int,
    now: int,
    rules: TrashRules,
    asker: Asker | None,
) -> Inode | None:
    there = publishing.find(tx, parent, name)
    if asker is None or there is None or there.ino != ino or not _may_remove(tx, there, asker):
        return None
    return dooming.doom(tx, parent, name, now, asker.uid, rules.remover(asker))


def _may_remove(tx: ReadTransaction, inode: Inode, asker: Asker) -> bool:
    """Whether the asker may remove the directory's tree, as `aifs rm -r` would."""
    try:
        parent = namespace.get_directory(tx, inode.parent)
        permissions.require_may_remove_tree(parent, inode, asker)
        permissions.require_reach(tx, parent, asker)
    except (AccessDenied, NotPermitted):
        return False
    return True


def _policy_setter(tx: ReadTransaction, ino: int) -> Asker | None:
    """The user whose rights remove checkpoints by a directory's policy."""
    kept = _get_kept(tx, ino)
    return None if kept is None else kept.asker
