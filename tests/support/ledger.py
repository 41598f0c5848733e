"""What a filesystem has acknowledged, and what may therefore be found after a crash.

Names and attributes change one transaction at a time, so they are a list of *states*; after a crash
the tree must be exactly one of them. The bytes of each file are a list of *versions*. A *floor*
says that from some state on some files have at least these versions. Of what was changed after
that, any byte may be old or new, or zero where the file did not always reach.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple


class Entry(NamedTuple):
    """One name; ``ino`` is None while the answer that tells it is outstanding."""

    ino: int | None
    mode: int
    nlink: int  # 0 for directories, whose links follow from the tree
    xattrs: tuple[tuple[bytes, bytes], ...]
    target: bytes | None = None  # of a symlink


class Found(NamedTuple):
    """One name as the filesystem shows it; ``content`` is None but for regular files."""

    entry: Entry
    content: bytes | None


State = dict[bytes, Entry]


@dataclass
class Ledger:
    """Filled by whoever calls the filesystem: ``begin`` before each change of names, ``done`` after
    it."""

    states: list[State] = field(default_factory=lambda: [{}])
    acknowledged: int = 0  # index of a state
    durable: int = 0  # the same
    versions: dict[int, list[bytes]] = field(default_factory=dict)  # of regular files
    # Index of the version that was acknowledged last.
    written: dict[int, int] = field(default_factory=dict)
    # (state, versions from there on).
    floors: list[tuple[int, dict[int, int]]] = field(default_factory=list)
    coming: dict[bytes, bytes] = field(default_factory=dict)
    """By name, what files hold that a clone is about to make, whose numbers nobody knows yet."""
    # All of it in order, for whoever looks into a failure.
    trace: list[tuple] = field(default_factory=list)

    @classmethod
    def of(cls, tree: dict[bytes, Found]) -> "Ledger":
        """All that was found counts as durable."""
        ledger = cls(states=[{path: found.entry for path, found in tree.items()}])
        for found in tree.values():
            if found.content is not None:
                ledger.add_file(found.entry.ino, found.content)
        ledger.all_durable()
        return ledger

    @property
    def now(self) -> State:
        """The names as the program that made all the calls sees them."""
        return self.states[self.acknowledged]

    def content(self, ino: int) -> bytes:
        return self.versions[ino][self.written[ino]]

    def size(self, ino: int) -> int:
        return len(self.content(ino))

    # --- what happens ---

    def begin(self, state: State) -> None:
        self.states.append(state)

    def done(self, ino: int | None = None) -> None:
        """The last change of names is acknowledged; ``ino`` is the number of what it made."""
        self.acknowledged = len(self.states) - 1
        if ino is not None:
            state = self.states[-1]
            self.states[-1] = {
                p: e._replace(ino=ino) if e.ino is None else e for p, e in state.items()
            }

    def cloned(self, inos: dict[bytes, int]) -> None:
        """The clones that were ``coming`` are there, by name, and durable."""
        self.acknowledged = len(self.states) - 1
        state = self.states[-1]
        self.states[-1] = {p: e._replace(ino=inos.get(p, e.ino)) for p, e in state.items()}
        for path, content in self.coming.items():
            self.add_file(inos[path], content)
        self.coming = {}
        self.barrier()

    def add_file(self, ino: int, content: bytes = b"") -> None:
        self.versions[ino], self.written[ino] = [content], 0

    def begin_write(self, ino: int, content: bytes) -> None:
        self.versions[ino].append(content)

    def done_write(self, ino: int) -> None:
        self.written[ino] = len(self.versions[ino]) - 1

    def promise(
        self, state: int, files: Iterable[int], written: dict[int, int] | None = None
    ) -> None:
        """If the tree is at ``state`` or later, ``files`` have at least the versions acknowledged
        by now."""
        written = written or self.written
        self.floors.append((state, {ino: written[ino] for ino in files}))

    def barrier(self) -> None:
        """All changes of names that were acknowledged are durable."""
        self.durable = self.acknowledged

    def all_durable(self) -> None:
        self.promise(self.acknowledged, self.versions)
        self.barrier()

    # --- what is found ---

    def check(self, tree: dict[bytes, Found], killed: bool, any_size: bool = False) -> None:
        """AssertionError unless a crash may leave ``tree``.

        ``killed``: only the process died, so everything acknowledged must be there. ``any_size``:
        what is not durable may have any size between those that it had, as on a local filesystem.
        """
        found = {path: one.entry for path, one in tree.items()}
        first = self.acknowledged if killed else self.durable
        index = next(
            (n for n in range(first, len(self.states)) if _agree(self.states[n], found)), None
        )
        assert index is not None, _explain(self.states[first], found, len(self.states) - first)
        least = dict(self.written) if killed else {}
        for state, versions in self.floors:
            if state <= index:
                for ino, version in versions.items():
                    least[ino] = max(version, least.get(ino, 0))
        for path, (entry, content) in tree.items():
            if content is not None:
                made = [self.coming.get(path, b"")]
                versions = self.versions.get(entry.ino, made)[least.get(entry.ino, 0) :]
                _check_content(path, content, versions, any_size)


def _agree(state: State, found: State) -> bool:
    if state.keys() != found.keys():
        return False
    return all(
        entry == found[path]._replace(ino=entry.ino and found[path].ino)
        for path, entry in state.items()
    )


def _explain(state: State, found: State, count: int) -> str:
    lines = [f"the names are none of the {count} possible states; beside the first of them:"]
    for path in sorted(state.keys() | found.keys()):
        if state.get(path) != found.get(path):
            lines.append(f"  {path!r}: {found.get(path)} for {state.get(path)}")
    return "\n".join(lines)


def _check_content(path: bytes, content: bytes, versions: list[bytes], any_size: bool) -> None:
    if content in versions:
        return
    sizes = {len(version) for version in versions}
    between = any_size and min(sizes) < len(content) < max(sizes)
    assert between or len(content) in sizes, (
        f"{path!r} has {len(content)} bytes, not one of {sorted(sizes)}"
    )
    assert len(versions) > 1, (
        f"{path!r} is durable but differs: {_first_difference(content, versions[0])}"
    )
    shortest = min(sizes)
    for place, byte in enumerate(content):
        allowed = [version[place] for version in versions if place < len(version)]
        if byte not in allowed and (byte or place < shortest):
            raise AssertionError(
                f"{path!r}: byte {place} of {len(content)} is {byte}, not one of {set(allowed)}"
            )


def _first_difference(found: bytes, wanted: bytes) -> str:
    place = next(n for n in range(len(found)) if found[n] != wanted[n])
    return f"byte {place} of {len(found)} is {found[place]} for {wanted[place]}"
