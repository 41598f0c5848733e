"""What tells that the sources of a virtual file are still those that it was made of, without
looking at each."""

from collections.abc import Iterable, Mapping
from weakref import WeakSet

from aifs.files.file_io import FileIO
from aifs.meta import keys
from aifs.meta.kv import Engine
from aifs.meta.records import decode_inode, place_of
from aifs.reads.virtual.memory import Counted
from aifs.reads.virtual.sources import ReadRight, right_to

_ENTRY, _INODE = b"e"[0], b"i"[0]

_RIGHTS_MAX = 4096
_NOBODY = ReadRight(b"", 0, 0, 0)
"""A right that root alone has."""


class SourceWatch:
    """Of some directories: their names, and the attributes of what these lead to."""

    __slots__ = ("__weakref__", "changed", "counted", "directories", "rights")

    def __init__(self, counted: Counted) -> None:
        self.counted = counted
        """Told how many names have been looked at."""
        self.directories: set[int] = set()
        """A directory is put here before it is looked at."""
        self.changed = False
        """Whether something may be otherwise since; it is told again, in vain, that it is."""
        self.rights: set[ReadRight] = set()
        """The rights to what has been recorded there since."""

    @property
    def memory(self) -> int:
        """About how many bytes are kept."""
        return 100 * len(self.directories)


class Watches:
    """All that is watched. As long as nothing ever was, transactions are not listened to."""

    def __init__(self, engine: Engine, io: FileIO) -> None:
        self._engine = engine
        self._io = io
        self._watches: WeakSet[SourceWatch] = WeakSet()
        self._listens = False

    def begin(self, counted: Counted) -> SourceWatch:
        if not self._listens:
            self._listens = True
            self._engine.listen(self._note)
        watch = SourceWatch(counted)
        self._watches.add(watch)
        return watch

    def is_whole(self, watch: SourceWatch) -> bool:
        """Whether nothing has changed. What programs write to past us is on record only later."""
        written = [
            file.inode.parent for file in self._io.table.open.values() if file.may_be_written
        ]
        self._tell(watch, written)
        return not watch.changed

    def _note(self, writes: Mapping[bytes, bytes | None], _: int) -> None:
        watching = list(self._watches)
        if not watching:
            return
        changed = set()
        for key, record in writes.items():
            if key[0] == _ENTRY:
                changed.add(keys.entry_numbers(key)[0])
            elif key[0] == _INODE and record is not None:
                parent = place_of(record).parent
                changed.add(parent)
                for watch in watching:
                    if parent in watch.directories or not parent:
                        is_full = len(watch.rights) >= _RIGHTS_MAX
                        right = right_to(decode_inode(keys.number(key), record))
                        watch.rights.add(_NOBODY if is_full else right)
        for watch in watching:
            self._tell(watch, changed)

    def _tell(self, watch: SourceWatch, directories: Iterable[int]) -> None:
        """What has several names, 0, may have one in any directory."""
        if any(ino in watch.directories or not ino for ino in directories):
            watch.changed = True
