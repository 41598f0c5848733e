"""The check of names: dentries, their index, and the directories' tree. Part of the metadata scan.
The index (entries) follows the dentries, inodes follow their names."""

from array import array
from collections import Counter
from functools import partial

from aifs.check import repair
from aifs.check.findings import NAMELESS, RECORDS, RECOVERY, SILENT, Problem, printable
from aifs.check.records import Records
from aifs.check.table import (
    DIRECTORY,
    DOOMED,
    HAS_NAMES,
    KEPT,
    LOSES_NAME,
    MISSING,
    NONE,
    ORPHAN,
    TRASHED,
    UNREADABLE,
    find_dentry,
)
from aifs.core.errors import FsError
from aifs.core.names import is_name
from aifs.meta import keys, namespace, trash
from aifs.meta.kv import ReadTransaction
from aifs.meta.quotas import COMPLETE, FIRST_PROJECT, REMOVED, Quota, inherited
from aifs.meta.records import Dentry, charge_of, decode_dentry, decode_entry, encode_entry


class NameCheck:
    """Called in order: ``dentry`` for all, ``resolve_dangling``, ``entry`` for all,
    ``conclude``."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._table = records.table
        self._dangling: list[tuple[int, bytes, Dentry]] = []
        self._unreadable: dict[bytes, Problem] = {}  # dentries, by key
        self._rewritten = set[bytes]()  # keys of entries that the repair of a dentry puts right

    # --- dentries ---

    async def dentry(self, key: bytes, value: bytes) -> None:
        parent, name = keys.dentry_parts(key)
        remove = partial(repair.remove_name, parent=parent, name=name)
        try:
            dentry = decode_dentry(value)
        except FsError as error:
            forget = partial(repair.delete, key=key)
            self._unreadable[key] = self._records.problem(
                "unreadable-record", (parent, name), str(error), forget
            )
            return
        table = self._table
        directory = table.find(parent)
        if (
            directory == NONE
            and await self._records.get(keys.entry(parent, dentry.cookie)) is not None
        ):
            # Two records speak of it: there was such a directory.
            directory = table.add(parent, DIRECTORY, MISSING)
            self._records.in_use(parent)
        if directory == NONE or not table.may_hold_names(directory):
            self._records.problem(
                "misplaced-dentry", (parent, name), f"inode {parent} is not a directory", remove
            )
            self._will_lose_name(dentry, NONE)
            return
        table.flags[directory] |= HAS_NAMES
        if not is_name(name):
            self._records.problem(
                "bad-name", (parent, name), f"leads to inode {dentry.ino}", remove
            )
            self._will_lose_name(dentry, directory)
        elif dentry.ino == keys.ROOT_INO:
            self._records.problem("loop", (parent, name), "leads to the root", remove)
            table.removed[directory] += dentry.type == DIRECTORY
        elif table.find(dentry.ino) == NONE:
            self._dangling.append((parent, name, dentry))  # it may be a directory without an inode
        else:
            await self._check_index(parent, name, dentry)
            await self._add_name(parent, name, dentry)

    async def resolve_dangling(self) -> None:
        for parent, name, dentry in self._dangling:
            if self._table.find(dentry.ino) != NONE:
                await self._check_index(parent, name, dentry)
                await self._add_name(parent, name, dentry)
                continue
            remove = partial(repair.remove_name, parent=parent, name=name)
            detail = f"inode {dentry.ino} does not exist"
            self._records.problem("dangling-dentry", (parent, name), detail, remove)
            self._table.removed[self._table.find(parent)] += dentry.type == DIRECTORY

    def _type_of(self, row: int, told: int) -> int:
        return told if self._table.flags[row] & UNREADABLE else self._table.type[row]

    def _will_lose_name(self, dentry: Dentry, directory: int) -> None:
        row = self._table.find(dentry.ino)
        if row == NONE:
            return
        self._table.flags[row] |= LOSES_NAME
        if self._type_of(row, dentry.type) != DIRECTORY:
            self._table.removed[row] += 1
        elif directory != NONE:
            self._table.removed[directory] += 1

    async def _check_index(self, parent: int, name: bytes, dentry: Dentry) -> None:
        type_ = self._type_of(self._table.find(dentry.ino), dentry.type)
        key = keys.entry(parent, dentry.cookie)
        record = await self._records.get(key)
        matches = dentry.cookie and record == encode_entry(dentry.ino, type_, name)
        if matches:
            self._records.in_use(dentry.cookie)
        if matches and dentry.type == type_:
            return
        fix = partial(repair.rewrite_name, parent=parent, name=name, type_=type_)
        if record is not None and not await self._records.view(
            repair.is_taken, parent, dentry.cookie, name
        ):
            self._rewritten.add(key)
        kind, detail = "name-index", "is not listed, or listed as something else"
        if dentry.type != type_:
            kind, detail = "wrong-type", f"says {dentry.type}, inode {dentry.ino} has {type_}"
        self._records.problem(kind, (parent, name), detail, fix)

    async def _add_name(self, parent: int, name: bytes, dentry: Dentry) -> None:
        table = self._table
        row, directory = table.find(dentry.ino), table.find(parent)
        if self._type_of(row, dentry.type) != DIRECTORY:
            table.names[row] += 1
        else:
            if table.names[row]:
                loser = (parent, name)
                if table.parent[row] == parent != table.at[row]:
                    loser = await self._records.view(table.place, dentry.ino) or loser
                    lost_by = table.find(table.at[row])
                    table.subdirs[lost_by] -= 1
                    table.subdirs[directory] += 1
                    table.at[row], table.cookie[row] = parent, dentry.cookie
                else:
                    lost_by = directory
                table.removed[lost_by] += 1
                remove = partial(repair.remove_name, parent=loser[0], name=loser[1])
                detail = f"directory {dentry.ino} has another name"
                self._records.problem("second-name", loser, detail, remove)
                return
            table.names[row] = 1
            table.subdirs[directory] += 1
        if not table.at[row]:
            table.at[row], table.cookie[row] = parent, dentry.cookie

    # --- entries ---

    async def entry(self, key: bytes, value: bytes) -> None:
        if key in self._rewritten:
            return
        parent, cookie = keys.entry_numbers(key)
        try:
            ino, type_, name = decode_entry(value)
        except FsError as error:
            where = f"entry {cookie} of directory {parent}"
            self._records.drop("unreadable-record", where, str(error), key)
            return
        dentry = await self._records.view(find_dentry, parent, name)
        if dentry is not None and dentry.cookie == cookie:
            return  # whether they match was seen from the dentry
        lone = Dentry(ino, cookie, type_)
        if dentry is None and self._may_restore(parent, name, lone):
            await self._restore(parent, name, lone)
        else:
            detail = f"is listed at {cookie}, where it is not"
            self._records.drop("name-index", (parent, name), detail, key)

    def _may_restore(self, parent: int, name: bytes, dentry: Dentry) -> bool:
        """Whether the inode's dentry of this name is lost."""
        table = self._table
        row, directory = table.find(dentry.ino), table.find(parent)
        if NONE in (row, directory) or not is_name(name) or not table.may_hold_names(directory):
            return False
        type_ = self._type_of(row, dentry.type)
        has_one_name = type_ == DIRECTORY or table.flags[row] & UNREADABLE
        lacks = table.names[row] < (1 if has_one_name else table.links[row])
        return lacks and type_ == dentry.type and dentry.ino != keys.ROOT_INO

    async def _restore(self, parent: int, name: bytes, dentry: Dentry) -> None:
        table = self._table
        fix = partial(repair.restore_name, parent=parent, name=name, dentry=dentry)
        unreadable = self._unreadable.pop(keys.dentry(parent, name), None)
        if unreadable is not None:
            unreadable.fix = fix
        else:
            self._records.problem("name-index", (parent, name), "is listed, but is not a name", fix)
        await self._add_name(parent, name, dentry)
        changed = table.find(parent if dentry.type == DIRECTORY else dentry.ino)
        table.removed[changed] -= 1

    # --- the tree ---

    async def conclude(self) -> None:
        if self._table.find(keys.ROOT_INO) == NONE:
            self._table.add(keys.ROOT_INO, DIRECTORY, MISSING)
        await self._cut_loops()
        for row in range(len(self._table)):
            if not self._table.flags[row] & UNREADABLE:
                self._conclude_row(row)

    async def _cut_loops(self) -> None:
        table = self._table
        walk_of = array("Q", bytes(8 * len(table)))  # the walk upwards that came by; 0: none yet
        for start in range(len(table)):
            row, path = start, []
            while (
                row != NONE and not walk_of[row] and table.type[row] == DIRECTORY and table.at[row]
            ):
                walk_of[row] = start + 1
                path.append(row)
                row = table.find(table.at[row])
            if path and row != NONE and walk_of[row] == start + 1:
                await self._cut_loop(min(path[path.index(row) :]))

    async def _cut_loop(self, row: int) -> None:
        table = self._table
        ino = table.ino[row]
        parent, name = await self._records.view(table.place, ino) or (table.at[row], b"")
        remove = partial(repair.remove_name, parent=parent, name=name)
        detail = f"lies below itself, as {printable(name)} in directory {parent}"
        self._records.problem("loop", ino, detail, remove)
        above = table.find(parent)
        table.subdirs[above] -= 1
        table.removed[above] += 1
        table.at[row] = table.names[row] = 0
        table.flags[row] |= LOSES_NAME

    def _links(self, row: int) -> int:
        """The inode's right link count, by names or subdirectories."""
        table = self._table
        return 2 + table.subdirs[row] if table.type[row] == DIRECTORY else table.names[row]

    def _conclude_row(self, row: int) -> None:
        table = self._table
        ino, flags, links = table.ino[row], table.flags[row], self._links(row)
        if flags & MISSING:
            self._missing_directory(ino, table.at[row], links)
            return
        is_root = ino == keys.ROOT_INO
        is_dir = table.type[row] == DIRECTORY
        has_name = is_root or bool(table.names[row])
        if flags & ORPHAN:
            if not has_name and not table.links[row] and not flags & HAS_NAMES:
                return  # deleted; it waits for the collector
            detail = f"inode {ino} has an orphan record, but is not deleted"
            self._records.drop("stray-record", ino, detail, keys.orphan(ino), RECOVERY)
        if flags & DOOMED:
            if is_dir and not has_name and not table.links[row]:
                return  # it waits for being emptied
            detail = f"inode {ino} has a record of the doomed, but is not removed"
            self._records.drop("stray-record", ino, detail, keys.doomed(ino), RECOVERY)
        if flags & TRASHED:
            if has_name:
                detail = f"inode {ino} says that it is in the trash, but has a name"
                clear = partial(repair.clear_trashed, ino=ino)
                self._records.problem("stray-record", ino, detail, clear)
            elif flags & KEPT:
                links, has_name = max(links, 1), True
        if not has_name:
            kind = SILENT if flags & LOSES_NAME else "orphan-inode"
            attach = partial(repair.attach, ino=ino, links=max(links, 1))
            self._records.problem(kind, ino, f"inode {ino} has no name", attach, NAMELESS)
            return
        at = keys.ROOT_INO if is_root else table.at[row]
        if is_dir and table.parent[row] != at and not flags & KEPT:
            fix = partial(repair.change_inode, ino=ino, changes={"parent": at})
            detail = f"says that it lies in {table.parent[row]}, not in {at}"
            self._records.problem("wrong-parent", ino, detail, fix)
        if table.links[row] != links:
            told = table.links[row] == links + table.removed[row]
            fix = partial(repair.change_inode, ino=ino, changes={"nlink": links})
            detail = f"inode {ino}: {table.links[row]} links, but {links} are right"
            self._records.problem(SILENT if told else "wrong-link-count", ino, detail, fix)

    def _missing_directory(self, ino: int, at: int, links: int) -> None:
        parent = keys.ROOT_INO if ino == keys.ROOT_INO else at
        fix = partial(repair.restore_directory, ino=ino, parent=parent, links=links)
        detail, stage = f"inode {ino} does not exist", RECORDS if parent else NAMELESS
        self._records.problem("missing-directory", ino, detail, fix, stage)


class TrashCheck:
    """The check of the trash, entries and turns: handlers for ``T`` and ``U``, in this order,
    before the names; then ``counters``.

    An entry counts if its inode is marked, with the same parent; its turn follows it. A marked
    inode without entry has lost its name: ``NameCheck`` puts it into /lost+found.
    """

    def __init__(self, records: Records) -> None:
        self._records = records
        self._table = records.table
        self._entries = self._bytes = 0

    async def entry(self, key: bytes, value: bytes) -> None:
        """A name in the trash."""
        parent, ino = keys.entry_numbers(key)
        row = self._table.find(ino)
        try:
            entry = trash.decode_entry(key, value)
        except FsError as error:
            self._drop("unreadable-record", ino, str(error), key)
            return
        name = printable(entry.name)
        is_marked = row != NONE and self._table.flags[row] & TRASHED
        if not is_marked or self._table.parent[row] != parent:
            detail = f"entry {name} of an inode that is not in the trash"
            self._drop("stray-record", ino, detail, key)
            return
        self._table.flags[row] |= KEPT
        self._entries += 1
        self._bytes += max(entry.size, 0)
        turn, expected = keys.turn(entry.until_ns, ino), trash.encode_turn(parent)
        if await self._records.get(turn) != expected:
            fix = partial(repair.put, key=turn, value=expected)
            detail = f"inode {ino}: entry {name} of the trash would never go"
            self._records.problem("no-turn", self._records.of_inode(ino), detail, fix)

    async def turn(self, key: bytes, value: bytes) -> None:
        """When an entry goes for good."""
        until_ns, ino = keys.entry_numbers(key)
        row = self._table.find(ino)
        kept = None
        if row != NONE and self._table.flags[row] & KEPT:
            kept = await self._records.get(keys.trashed(self._table.parent[row], ino))
        if kept is None or trash.decode_entry(b"", kept).until_ns != until_ns:
            self._drop("stray-record", ino, "turn of an entry of the trash, which is none", key)

    async def counters(self) -> None:
        for key, right in (
            (keys.COUNTER_TRASHED, self._entries),
            (keys.COUNTER_TRASHED_BYTES, self._bytes),
        ):
            await self._records.require_counter(key, right, f"counter {key[1:].decode()}")

    def _drop(self, kind: str, ino: int, detail: str, key: bytes) -> None:
        self._records.drop(kind, self._records.of_inode(ino), f"inode {ino}: {detail}", key)


class QuotaCheck:
    """Handlers for the records ``Q`` and ``P``. A doubtful quota goes; its contents stay."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._used = Counter[bytes]()
        """By the keys of counters, the sums over all inodes."""
        self._counted: set[bytes] = set()
        """The keys of the counters that there are."""
        self._is_unfinished = False
        """Some are still being given to the files below."""
        self._moved: list[tuple[bytes, Quota, int]] = []
        """Those that name a wrong quota above them, with their keys and the right one."""
        self._last = FIRST_PROJECT - 1
        """The largest project of a quota."""

    def inode(self, record: bytes) -> None:
        """Count an inode."""
        project, size = charge_of(record)
        if project >= FIRST_PROJECT:
            self._used[keys.used_inodes(project)] += 1
            self._used[keys.used_bytes(project)] += size
            self._last = max(self._last, project)

    async def quota(self, key: bytes, quota: Quota) -> None:
        """A directory, and how much may lie below. All inodes have been seen."""
        project = keys.number(key)
        self._is_unfinished |= quota.state != COMPLETE
        above = await self._records.view(_find_above, quota, project)
        if quota.state != REMOVED and above is None:
            detail = f"directory {quota.directory}, whose quota it would be, has another project"
            self._records.drop("stray-record", f"quota {project}", detail, key)
        elif above != quota.above:
            self._moved.append((key, quota, above or 0))
        if FIRST_PROJECT <= project < 1 << 32:
            self._last = max(self._last, project)

    def use(self, key: bytes, value: bytes) -> None:
        """A counter."""
        if key in (keys.used_bytes(keys.use_project(key)), keys.used_inodes(keys.use_project(key))):
            self._counted.add(key)
        else:
            self._records.drop("stray-record", f"record {key.hex()}", "it counts nothing", key)

    async def conclude(self) -> None:
        """All records have been seen."""
        for key in sorted(self._used.keys() | self._counted):
            project = keys.use_project(key)
            kind = " bytes" if key == keys.used_bytes(project) else " files"
            await self._records.require_counter(key, self._used[key], f"quota {project}", kind)
        for key, quota, above in [] if self._is_unfinished else self._moved:
            detail = f"it lies in that of project {quota.above}, it says, but in that of {above}"
            fix = partial(repair.put, key=key, value=quota._replace(above=above).encode())
            self._records.problem("wrong-parent", f"quota {keys.number(key)}", detail, fix)
        made = await self._records.view(ReadTransaction.counter, keys.COUNTER_QUOTAS)
        least = self._last + 1 - FIRST_PROJECT
        if made < least:
            fix = partial(repair.shift_counter, key=keys.COUNTER_QUOTAS, delta=least - made)
            detail = f"{made}, but {least} have been made"
            self._records.problem("wrong-counter", "counter quotas", detail, fix)


def _find_above(tx: ReadTransaction, quota: Quota, project: int) -> int | None:
    """The project of the quota around a quota's directory; 0: none; None: it is not the directory.
    An unreadable record is reported itself, and a lost directory needs no correction."""
    try:
        directory = namespace.find_inode(tx, quota.directory)
        if directory is None or not directory.is_dir or directory.project != project:
            return None
        found, passed = None, set[int]()  # there may be a loop
        while directory.links and directory.ino not in {keys.ROOT_INO, *passed}:
            passed.add(directory.ino)
            directory = namespace.get_inode(tx, directory.parent)
            found = inherited(directory) if found is None else found
        if found is None or not directory.links:
            return quota.above
        return found if found >= FIRST_PROJECT else 0
    except FsError:
        return quota.above
