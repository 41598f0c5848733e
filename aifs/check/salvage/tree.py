"""Names for files that are known by hints at their paths alone, and the directories for these.
Pure.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from aifs.check.repair import LOST_AND_FOUND
from aifs.check.salvage.inventory import Saved
from aifs.meta.keys import ROOT_INO
from aifs.meta.namespace import NAME_MAX

_UNKNOWN = b"?"  # as in hints


@dataclass(slots=True)
class Directory:
    """``uid`` and ``gid`` are those of the first file below; ``links`` its link count."""

    ino: int
    parent: int
    path: bytes
    uid: int
    gid: int
    links: int = 2


@dataclass(slots=True)
class Named:
    """A file with its place in the tree. ``renamed``: another one has the name of its hint."""

    saved: Saved
    parent: int
    path: bytes
    renamed: bool = False

    @property
    def name(self) -> bytes:
        return self.path.rpartition(b"/")[2]


def plant(
    files: Iterable[Saved], take_id: Callable[[], int]
) -> tuple[list[Directory], list[Named]]:
    """All directories, the root first and each behind its parent, and all files. Of files with one
    path the newest has it.
    """
    newest_first = sorted(files, key=lambda saved: (-saved.mtime_ns, saved.ino))
    directories = {b"": Directory(ROOT_INO, ROOT_INO, b"", 0, 0)}
    placed = [(saved, *place_of(saved)) for saved in newest_first]
    for saved, parents, _ in placed:
        path = b""
        for name in parents:
            above, path = directories[path], path + b"/" + name
            if path not in directories:
                directories[path] = Directory(take_id(), above.ino, path, saved.uid, saved.gid)
                above.links += 1
    taken = set(directories)
    named = []
    for saved, parents, name in placed:
        above = b"".join(b"/" + part for part in parents)
        path, number = above + b"/" + name, 0
        while path in taken:
            suffix = b".%d" % saved.ino + (b".%d" % number if number else b"")
            path, number = above + b"/" + name[: NAME_MAX - len(suffix)] + suffix, number + 1
        taken.add(path)
        named.append(Named(saved, directories[above].ino, path, number > 0))
    return list(directories.values()), named


def place_of(saved: Saved) -> tuple[list[bytes], bytes]:
    """The names of the directories above, and its own. What cannot be told is below lost+found."""
    first, *rest = saved.path.split(b"/")
    if not rest:
        return [LOST_AND_FOUND], b"%d" % saved.ino
    *parents, name = rest
    if first:  # the end of a path that was too long: where it begins, part of a name
        parents = [LOST_AND_FOUND, *parents]
    if not all(map(_is_name, parents)):
        return [LOST_AND_FOUND], b"%d" % saved.ino
    return parents, name if _is_name(name) and name != _UNKNOWN else b"%d" % saved.ino


def _is_name(name: bytes) -> bool:
    return 0 < len(name) <= NAME_MAX and name not in (b".", b"..") and b"\0" not in name
