"""Many make, rename and remove files in one directory at once, from all hosts, and each keeps a
manifest of what was acknowledged: afterwards that is there, no more and no less.

Own names nobody else touches. *Tickets* all try to make: each is of one. *Tokens* all try to take,
by renaming them to names of their own: each exists once.
"""

import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.support.histories import HostDied

TOKENS = 4
_NAMES = 12


class Stormer:
    """One who works in the directory. ``files``: what it must find there of its own, by name.
    ``doubtful``: names of which that is not known, since its host has died meanwhile."""

    def __init__(self, number: int, host: int, root: Path, dead: set[int], seed: object) -> None:
        """``dead``: hosts where operations may fail."""
        self.files: dict[str, bytes] = {}
        self.doubtful: set[str] = set()
        self.count = 0
        """Of operations."""
        self._name = f"own.{number}"
        self.host = host
        self._dead = dead
        self._root = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        self._chance = random.Random(f"{seed} {number}")
        self._ticket = 0

    def close(self) -> None:
        os.close(self._root)

    def step(self) -> None:
        """Raises HostDied."""
        operations = (self._make, self._make, self._rename, self._rename, self._remove)
        self._chance.choice((*operations, self._make_ticket, self._take, self._give_back))()
        self.count += 1

    def _own(self) -> str:
        return f"{self._name}.{self._chance.randrange(_NAMES)}"

    def _there(self, prefix: str) -> str | None:
        """Some file of ours."""
        found = [name for name in self.files if name.startswith(prefix)]
        return self._chance.choice(found) if found else None

    def _make(self) -> None:
        """Or write over."""
        name, content = self._own(), b"%d of %s" % (self.count, os.fsencode(self._name))
        if not self._is_token(name):
            self._do(lambda: self._write(name, os.O_TRUNC, content), {name: content})

    def _rename(self) -> None:
        old, new = self._there(self._name), self._own()
        if old and old != new and not self._is_token(new):
            rename = self._renaming(old, new)
            self._do(rename, {old: None, new: self.files[old]})

    def _remove(self) -> None:
        name = self._there(self._name)
        if name and not self._is_token(name):
            self._do(lambda: os.unlink(name, dir_fd=self._root), {name: None})

    def _make_ticket(self) -> None:
        name, self._ticket = f"ticket.{self._ticket}", self._ticket + 1
        self._do(lambda: self._write(name, os.O_EXCL, b""), {name: b""})

    def _take(self) -> None:
        number, own = self._chance.randrange(TOKENS), self._own()
        if own not in self.files:
            take = self._renaming(f"token.{number}", own)
            self._do(take, {own: b"token %d" % number})

    def _give_back(self) -> None:
        taken = [name for name in self.files if self._is_token(name)]
        if taken:
            name = self._chance.choice(taken)
            back = f"token.{int(self.files[name].split()[1])}"
            self._do(self._renaming(name, back), {name: None}, doubtful={back})

    def _is_token(self, name: str) -> bool:
        return self.files.get(name, b"").startswith(b"token")

    def _renaming(self, old: str, new: str) -> Callable[[], None]:
        return lambda: os.rename(old, new, src_dir_fd=self._root, dst_dir_fd=self._root)

    def _write(self, name: str, flags: int, content: bytes) -> None:
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | flags, 0o644, dir_fd=self._root)
        try:
            os.write(fd, content)
        finally:
            os.close(fd)

    def _do(
        self,
        operation: Callable[[], None],
        after: dict[str, bytes | None],
        doubtful: set[str] = frozenset(),  # type: ignore[assignment]
    ) -> None:
        """``after``: what becomes of names, None: they are gone."""
        try:
            operation()
        except (FileExistsError, FileNotFoundError):
            names = [name for name in after if name.startswith(self._name) and name in self.files]
            if names:  # nobody else touches these
                raise
            return
        except OSError as error:
            if self.host not in self._dead:
                raise
            self.doubtful |= {*after, *doubtful}
            raise HostDied from error
        for name, content in after.items():
            if content is None:
                del self.files[name]
            else:
                self.files[name] = content


def prepare(directory: Path) -> None:
    for number in range(TOKENS):
        (directory / f"token.{number}").write_bytes(b"token %d" % number)


def require_manifests(stormers: Sequence[Stormer], places: Sequence[Path]) -> None:
    """On all hosts, when all that was done is shown."""
    of_each = Counter(name for one in stormers for name in one.files)
    assert max(of_each.values()) == 1, f"made by two: {of_each.most_common(3)}"
    doubtful = {name for one in stormers for name in one.doubtful}
    files = {name: content for one in stormers for name, content in one.files.items()}
    wanted = {name: content for name, content in files.items() if name not in doubtful}
    for place in places:
        found = {path.name: path.read_bytes() for path in place.iterdir()}
        tokens = sorted(content for content in found.values() if content.startswith(b"token"))
        assert tokens == [b"token %d" % number for number in range(TOKENS)]
        mine = {
            name: content
            for name, content in found.items()
            if name not in doubtful and not name.startswith("token.")
        }
        assert mine == wanted, f"other than acknowledged: {mine.items() ^ wanted.items()}"
