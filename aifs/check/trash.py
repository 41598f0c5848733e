"""The check of the trash: entries, and their turns. Part of the metadata scan.

An entry counts if its inode is marked, and says the same parent; its turn follows it. An inode that
is marked, but has no entry, has lost its name: the check of names puts it into /lost+found.
"""

from functools import partial

from aifs.check import repair
from aifs.check.findings import printable
from aifs.check.records import Records
from aifs.check.table import KEPT, NONE, TRASHED
from aifs.core.errors import FsError
from aifs.meta import keys, trash


class TrashCheck:
    """Handlers for the records ``T`` and ``U``, in this order; then ``counters``."""

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
