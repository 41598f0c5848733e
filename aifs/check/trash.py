"""The check of the trash: rules, entries, and their turns. Part of the metadata scan.

An entry counts if its inode is marked, and says the same parent; its turn follows it. What is
marked without an entry has lost its name: the check of names puts it into /lost+found.
"""

from collections.abc import Callable
from functools import partial

from aifs.check import repair
from aifs.check.findings import RECORDS, Fix, Subject, View, printable, read_record
from aifs.check.table import KEPT, NONE, TRASHED, InodeTable
from aifs.core.errors import FsError
from aifs.meta import keys, trash
from aifs.meta.kv import ReadTransaction


class TrashCheck:
    """Handlers for the records ``R``, ``T`` and ``U``, in this order; then ``counters``."""

    def __init__(
        self,
        view: View,
        table: InodeTable,
        problem: Callable[[str, Subject, str, Fix | None, int], None],
    ) -> None:
        self._view = view
        self._table = table
        self._report = problem
        self._entries = self._bytes = 0

    async def rule(self, key: bytes, value: bytes) -> None:
        """For how long what is removed below a directory is kept."""
        ino = keys.number(key)
        row = self._table.find(ino)
        if row == NONE or not self._table.may_hold_names(row):
            self._delete("stray-record", ino, "rule of the trash, on what is no directory", key)
            return
        try:
            trash.decode_rule(value)
        except FsError as error:
            self._delete("unreadable-record", ino, str(error), key)

    async def entry(self, key: bytes, value: bytes) -> None:
        """What is in the trash."""
        parent, ino = keys.entry_numbers(key)
        row = self._table.find(ino)
        try:
            entry = trash.decode_entry(key, value)
        except FsError as error:
            self._delete("unreadable-record", ino, str(error), key)
            return
        name = printable(entry.name)
        is_marked = row != NONE and self._table.flags[row] & TRASHED
        if not is_marked or self._table.parent[row] != parent:
            self._delete("stray-record", ino, f"entry {name} of what is not in the trash", key)
            return
        self._table.flags[row] |= KEPT
        self._entries += 1
        self._bytes += max(entry.size, 0)
        turn, expected = keys.turn(entry.until_ns, ino), trash.encode_turn(parent)
        if await self._view(read_record, turn) != expected:
            fix = partial(repair.put, key=turn, value=expected)
            self._problem("no-turn", ino, f"entry {name} of the trash would never go", fix)

    async def turn(self, key: bytes, value: bytes) -> None:
        """When it goes for good."""
        until_ns, ino = keys.entry_numbers(key)
        row = self._table.find(ino)
        kept = None
        if row != NONE and self._table.flags[row] & KEPT:
            kept = await self._view(read_record, keys.trashed(self._table.parent[row], ino))
        if kept is None or trash.decode_entry(b"", kept).until_ns != until_ns:
            self._delete("stray-record", ino, "turn of an entry of the trash, which is none", key)

    async def counters(self) -> None:
        """What the counters of the trash say."""
        for key, counted in (
            (keys.COUNTER_TRASHED, self._entries),
            (keys.COUNTER_TRASHED_BYTES, self._bytes),
        ):
            told = await self._view(ReadTransaction.counter, key)
            if told != counted:
                fix = partial(repair.shift_counter, key=key, delta=counted - told)
                self._report(
                    "wrong-counter",
                    f"counter {key[1:].decode()}",
                    f"{told}, but {counted} is right",
                    fix,
                    RECORDS,
                )

    def _delete(self, kind: str, ino: int, detail: str, key: bytes) -> None:
        self._problem(kind, ino, detail, partial(repair.delete, key=key))

    def _problem(self, kind: str, ino: int, detail: str, fix: Fix) -> None:
        subject = ino if self._table.find(ino) != NONE else f"inode {ino}"
        self._report(kind, subject, f"inode {ino}: {detail}", fix, RECORDS)
