"""Power cuts: record what the program does to persistent files, and make states that a cut could
leave.

``PowerCut`` hooks itself below ``aifs.core.files``. The model is strict:

* Nothing of a file is on disk but what ``sync_file`` (or ``sync_filesystem``) covered. Of the
  writes and truncations since then a random prefix is kept; of the writes after the last truncation
  in it any may be missing, and the last may be torn.
* Names are on disk when their directory is synced, whatever became of the file. Of the changes of
  names since then a random prefix is kept, for each directory by itself. A rename within a
  directory is all or nothing.
* LMDB writes its data file itself. Its content is copied at the fault points around an LMDB commit;
  a crash at the later one may leave the old content, the new one, or all new pages with the old
  meta pages.

Files that are there at the start, or come to be in other ways than through ``files``, count as
synced.
"""

import os
import random
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import pytest

from aifs.burst import tier
from aifs.core import faults, files
from aifs.files import containers
from aifs.meta import chunks, journal, lmdb_database, lmdb_engine
from aifs.meta.chunks import CHUNKS_PER_RECORD
from aifs.meta.lmdb_database import AFTER_LMDB, BEFORE_COMMIT
from aifs.store import ids, ownership

MAPPED = "data.mdb"
_META_PAGES_BYTES = 2 * 4096
_ZEROS = bytes(1 << 16)
_READS = ("read_at", "read_into", "read_file")


@dataclass
class _Changes:
    """Changes of one file or directory since the last sync; ``synced`` counts those before."""

    unsynced: list = field(default_factory=list)
    synced: int = 0

    def mark(self) -> int:
        return self.synced + len(self.unsynced)

    def take(self, mark: int) -> list:
        count = max(0, mark - self.synced)
        taken, self.unsynced = self.unsynced[:count], self.unsynced[count:]
        self.synced += len(taken)
        return taken


@dataclass
class _File:
    content: bytearray
    changes: _Changes = field(default_factory=_Changes)

    def sync(self, mark: int) -> None:
        for change in self.changes.take(mark):
            _apply(self.content, change)

    def after_cut(self, rng: random.Random) -> bytearray:
        kept = self.changes.unsynced[: _prefix(len(self.changes.unsynced), rng)]
        truncations = [number for number, change in enumerate(kept) if isinstance(change, int)]
        since_truncation = truncations[-1] + 1 if truncations else 0
        if rng.random() < 0.5:
            kept[since_truncation:] = [
                change for change in kept[since_truncation:] if rng.random() < 0.5
            ]
        if len(kept) > since_truncation and rng.random() < 0.5:
            offset, data = kept[-1]
            kept[-1] = (offset, data[: rng.randrange(len(data) + 1)])
        content = bytearray(self.content)
        for change in kept:
            _apply(content, change)
        return content


@dataclass
class _Directory:
    synced: dict = field(default_factory=dict)  # name -> _File | _Directory
    now: dict = field(default_factory=dict)
    changes: _Changes = field(default_factory=_Changes)

    def change(self, names: dict) -> None:
        """Set names to nodes, or with None remove them, in one step."""
        _set_names(self.now, names)
        self.changes.unsynced.append(names)

    def adopt(self, name: str, node: "_File | _Directory") -> None:
        self.synced[name] = self.now[name] = node

    def sync(self, mark: int) -> None:
        for names in self.changes.take(mark):
            _set_names(self.synced, names)

    def after_cut(self, rng: random.Random) -> dict:
        names = dict(self.synced)
        for change in self.changes.unsynced[: _prefix(len(self.changes.unsynced), rng)]:
            _set_names(names, change)
        return names


def make_sizes_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that commits, new windows of ids and growth of the map happen all the time; each cut is a
    new boot."""
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 64 << 10)
    monkeypatch.setattr(lmdb_engine, "CHUNK_KEYS", 20)
    monkeypatch.setattr(lmdb_engine, "COMMIT_AGE_S", 0.02)
    monkeypatch.setattr(lmdb_database, "INITIAL_MAP_BYTES", 128 << 10)
    monkeypatch.setattr(ids, "WINDOW", 256)
    monkeypatch.setattr(tier, "BATCH", 4)
    monkeypatch.setattr(chunks, "DROPPED_AT_ONCE", 0)  # as if all chunk lists were long
    monkeypatch.setattr(containers, "LISTED_AT_ONCE", CHUNKS_PER_RECORD)
    monkeypatch.setattr(files, "boot_id", lambda: f"boot {PowerCut.boots}")
    make_copies_one_disk(monkeypatch)


def make_copies_one_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that a cut left is opened by the owner that had the store, wherever it was written
    to."""
    monkeypatch.setattr(ownership, "place_of", lambda meta: (0, 0, 0))


class PowerCut:
    """``with PowerCut(root) as cut:`` records everything below ``root`` that is opened from then
    on.

    ``crashed`` says whether a fault point given to ``crash_at`` was reached; from then on nothing
    more is recorded, so the program under test may be closed in the ordinary way. ``boots`` counts
    the states that were made: the machine has been started anew for each.
    """

    boots = 0

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._lock = threading.RLock()
        self._tree = _scan(root)
        self._opened: dict[str, _File] = {}
        self._marks: dict[int, list] = {}  # thread -> what its sync covers
        self._mapped: dict[str, list[bytes]] = {}  # path below root -> possible contents
        self._crash_points: dict[str, int] = {}
        self.crashed = False

    def __enter__(self) -> Self:
        self._copy_mapped()
        files.set_hook(self)
        for point in (BEFORE_COMMIT, AFTER_LMDB):
            faults.arm(point, lambda point=point: self._reached(point))
        return self

    def __exit__(self, *_: object) -> None:
        files.set_hook(None)
        faults.disarm_all()

    def stop_if_crashed(self) -> None:
        """For a program to call between its steps. Raises SimulatedCrash."""
        if self.crashed:
            raise faults.SimulatedCrash("in the background")

    def crash_at(self, point: str, occurrence: int = 1) -> None:
        """Raise SimulatedCrash when ``point`` is reached for the ``occurrence``-th time from
        now."""
        self._crash_points[point] = occurrence
        faults.arm(point, lambda: self._reached(point))

    def _reached(self, point: str) -> None:
        with self._lock:
            if self.crashed:
                return
            left = self._crash_points[point] = self._crash_points.get(point, 0) - 1
            self.crashed = left == 0
            if point == BEFORE_COMMIT:
                self._copy_mapped()
            elif point == AFTER_LMDB:
                self._copy_mapped(in_commit=self.crashed)
            if self.crashed:
                raise faults.SimulatedCrash(point)

    def _copy_mapped(self, in_commit: bool = False) -> None:
        for path in Path(self._root).rglob(MAPPED):
            new = path.read_bytes()
            name = str(path.relative_to(self._root))
            if in_commit and name in self._mapped:
                old = self._mapped[name][-1]
                torn = old[:_META_PAGES_BYTES] + new[_META_PAGES_BYTES:]
                self._mapped[name] = [old, new, torn]
            else:
                self._mapped[name] = [new]

    # The hook

    def before(self, op: str, path: str) -> None:
        if self.crashed:
            return
        if not path and op not in _READS:
            raise RuntimeError(f"{op} on a descriptor that was opened before the PowerCut")
        if not op.startswith("sync_"):
            return
        with self._lock:
            if op == "sync_filesystem":
                covered = list(_nodes(self._tree))
            elif not self._is_below(path):
                covered = []
            else:
                covered = [self._opened[path] if op == "sync_file" else self._directory(path)]
            self._marks[threading.get_ident()] = [(node, node.changes.mark()) for node in covered]

    def after(self, op: str, path: str, *args: object) -> None:
        with self._lock:
            if self.crashed:
                return
            if op.startswith("sync_"):
                for node, mark in self._marks.pop(threading.get_ident()):
                    node.sync(mark)
            elif op not in _READS and self._is_below(path):
                getattr(self, f"_{op}")(path, *args)

    def _open_file(self, path: str, create: bool) -> None:
        parent, name = self._parent(path)
        if name not in parent.now:
            if create:
                parent.change({name: _File(bytearray())})
            else:
                parent.adopt(name, _File(bytearray(Path(path).read_bytes())))
        self._opened[path] = parent.now[name]

    def _write_at(self, path: str, data: bytes, offset: int) -> None:
        self._opened[path].changes.unsynced.append((offset, bytes(data)))

    def _truncate(self, path: str, length: int) -> None:
        self._opened[path].changes.unsynced.append(length)

    def _make_dir(self, path: str) -> None:
        parent, name = self._parent(path)
        parent.change({name: _Directory()})

    def _rename(self, old: str, new: str) -> None:
        (old_parent, old_name), (new_parent, new_name) = self._parent(old), self._parent(new)
        node = old_parent.now[old_name]
        if old_parent is new_parent:
            old_parent.change({old_name: None, new_name: node})
        else:
            new_parent.change({new_name: node})
            old_parent.change({old_name: None})
        if old in self._opened:
            self._opened[new] = self._opened[old]

    def _unlink(self, path: str) -> None:
        parent, name = self._parent(path)
        parent.change({name: None})

    _remove_dir = _unlink

    def _is_below(self, path: str) -> bool:
        return path == self._root or path.startswith(self._root + os.sep)

    def _directory(self, path: str) -> _Directory:
        node = self._tree
        for name in Path(path).relative_to(self._root).parts:
            if name not in node.now:
                node.adopt(name, _Directory())
            node = node.now[name]
        return node

    def _parent(self, path: str) -> tuple[_Directory, str]:
        parent, name = os.path.split(path)
        return self._directory(parent), name

    # The outcome

    def materialise(self, target: Path, rng: random.Random) -> None:
        """Fill the empty or missing ``target`` with a state that a cut now, or at the crash, may
        leave."""
        PowerCut.boots += 1
        with self._lock:
            _write_tree(self._tree, target, rng)
            for name, contents in self._mapped.items():
                if (target / name).parent.is_dir():
                    (target / name).write_bytes(rng.choice(contents))


def _scan(root: Path) -> _Directory:
    directory = _Directory()
    for path in root.iterdir():
        if path.is_dir():
            directory.adopt(path.name, _scan(path))
        elif path.name != MAPPED:
            directory.adopt(path.name, _File(bytearray(path.read_bytes())))
    return directory


def _nodes(directory: _Directory):
    yield directory
    for node in directory.now.values():
        if isinstance(node, _Directory):
            yield from _nodes(node)
        else:
            yield node


def _write_tree(directory: _Directory, target: Path, rng: random.Random) -> None:
    target.mkdir(mode=0o700, exist_ok=True)
    for name, node in directory.after_cut(rng).items():
        if isinstance(node, _Directory):
            _write_tree(node, target / name, rng)
        else:
            content = node.after_cut(rng)
            with open(target / name, "wb") as file:
                file.write(content[: _end_of_data(content)])
                file.truncate(len(content))


def _end_of_data(content: bytearray) -> int:
    """Behind it are only zeros, which ``rstrip`` alone would look at one by one."""
    end = len(content)
    while end >= len(_ZEROS) and content.endswith(_ZEROS, 0, end):
        end -= len(_ZEROS)
    start = max(0, end - len(_ZEROS))
    return start + len(content[start:end].rstrip(b"\0"))


def _apply(content: bytearray, change: int | tuple[int, bytes]) -> None:
    """A length is a truncation, (offset, data) a write."""
    if isinstance(change, int):
        del content[change:]
        content.extend(bytes(change - len(content)))
        return
    offset, data = change
    if len(content) < offset:
        content.extend(bytes(offset - len(content)))
    content[offset : offset + len(data)] = data


def _set_names(names: dict, change: dict) -> None:
    for name, node in change.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


def _prefix(count: int, rng: random.Random) -> int:
    """A length from 0 to count; the two ends are as likely as all between."""
    return rng.choice((0, count, rng.randint(0, count)))


class Cut(PowerCut):
    """A power cut that comes after a number of changes of files, wherever that is; or at a fault
    point.

    ``killed``: the daemon alone ends; nothing that it would do to files while it unwinds happens.
    """

    def __init__(self, root: Path, killed: bool) -> None:
        super().__init__(root)
        self.changes_left = 0
        self._killed = killed

    def before(self, op: str, path: str) -> None:
        if self.crashed and self._killed and not op.startswith("read"):
            raise faults.SimulatedCrash(f"killed before {op} {path}")
        super().before(op, path)

    def after(self, op: str, path: str, *args: object) -> None:
        super().after(op, path, *args)
        if op.startswith("read") or self.crashed or not self.changes_left:
            return
        self.changes_left -= 1
        if not self.changes_left:
            self.crashed = True
            raise faults.SimulatedCrash(f"after {op} {path}")


def is_crash(error: BaseException) -> bool:
    """Whether a simulated crash is in ``error``."""
    parts = getattr(error, "exceptions", ())
    return isinstance(error, faults.SimulatedCrash) or any(is_crash(part) for part in parts)
