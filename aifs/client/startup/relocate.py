"""A tree of files made under one name, to work under another of the same length.

Installers write their target's path into scripts, ``pyvenv.cfg``, ``.pth`` files, compiled Python
and shared objects. The first name is random, and stands nowhere else; the lengths are equal: so one
is exchanged for the other wherever it stands, and no other byte moves.
"""

import base64
import csv
import hashlib
import io
import os
import stat
from concurrent.futures import ThreadPoolExecutor

from aifs.client.checkpoints.hashing import WORKERS, walk
from aifs.core import files, trees

PIECE = 4 << 20


def relocate(directory: str, old: str, new: str) -> int:
    """Replace ``old`` by ``new`` in all below ``directory``; returns how many files and symlinks.

    Changed files are new ones, with mode and times: they may be hard links into an installer's
    cache. Entries in pip's ``RECORD`` follow. Nothing is durable. Raises OSError; ValueError for
    other lengths.
    """
    before, after = os.fsencode(old), os.fsencode(new)
    if len(before) != len(after):
        raise ValueError(f"{old} and {new} differ in length")
    below = list(walk(directory))
    changed = {
        path
        for path, found in below
        if stat.S_ISLNK(found.st_mode) and _relink(os.path.join(directory, path), old, new)
    }
    regular = [path for path, found in below if stat.S_ISREG(found.st_mode)]
    with ThreadPoolExecutor(WORKERS) as pool:
        say = pool.map(lambda path: _says(os.path.join(directory, path), before), regular)
        for path, does in zip(regular, say, strict=True):
            if does:
                _rewrite(os.path.join(directory, path), before, after)
                changed.add(path)
    for path in regular:
        if os.path.basename(path) == "RECORD" and os.path.dirname(path).endswith(".dist-info"):
            note(directory, path, changed)
    return len(changed)


def _relink(path: str, old: str, new: str) -> bool:
    target = os.readlink(path)
    if old in target:
        trees.replace_symlink(path, target.replace(old, new))
    return old in target


def _says(path: str, wanted: bytes) -> bool:
    """Whether the bytes stand in the file."""
    fd = files.open_file(path, write=False)
    try:
        offset, tail = 0, b""
        while piece := files.read_at(fd, PIECE, offset):
            if wanted in piece or wanted in tail + piece[: len(wanted)]:
                return True
            offset, tail = offset + len(piece), piece[-len(wanted) :]
        return False
    finally:
        files.close_file(fd)


def _rewrite(path: str, before: bytes, after: bytes) -> None:
    data = files.read_file(path)
    assert data is not None
    _replace(path, data.replace(before, after))


def _replace(path: str, data: bytes) -> None:
    """A new file of this name, mode and time: Python checks compiled modules by their sources'
    times."""
    found = os.stat(path)
    temporary = trees.beside(path)
    fd = trees.create_file(temporary)
    try:
        files.write_at(fd, data, 0)
        files.copy_mode(fd, found)
        files.set_mtime(fd, found.st_mtime_ns)
    finally:
        files.close_file(fd)
    files.rename(temporary, path)


def note(directory: str, record: str, changed: set[str], reached: str = "") -> None:
    """Update a RECORD (path, hash, size) for ``changed`` files. ``reached``: another path of it."""
    reached = reached or os.path.join(directory, record)
    site = os.path.dirname(os.path.dirname(record))
    data = files.read_file(reached)
    assert data is not None
    rows = list(csv.reader(io.StringIO(data.decode())))
    found = False
    for row in rows:
        path = os.path.normpath(os.path.join(site, row[0])) if row else ""
        if path in changed and len(row) == 3 and row[1]:
            content = files.read_file(os.path.join(directory, path)) or b""
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
            row[1:] = [f"sha256={digest.decode()}", str(len(content))]
            found = True
    if found:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        _replace(reached, text.getvalue().encode())
