"""Pending directories as programs use them: marking, committing, telling, and what is checked
before the publish.

All of it goes through extended attributes (``hints``) and ioctls of the directory; docs/publish.md
has the protocol.
"""

import json
import os
import stat
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import trio

from aifs.core.errors import Busy, Invalid, NoAttribute, NotADirectory, NotFound
from aifs.files import permissions
from aifs.files.file_io import FileIO
from aifs.files.types import SIZE_MAX, CallerLike
from aifs.files.writeback import WriteBack
from aifs.meta import keys, namespace, publishing
from aifs.meta.kv import Engine, ReadTransaction
from aifs.meta.publishing import ANY_SIZE, Member, Pending, Publication
from aifs.meta.records import Dentry, Inode
from aifs.store.store import Store
from aifs.vfs.publishing.barrier import sync_below, sync_files

_SLICE = 64  # files that are looked up in one go: about 0.3 ms
_JOB_MAX = 255
_STEP_MAX = 1 << 62
_PATH_MAX = 4095


class Host(Protocol):
    """What this module needs of the filesystem."""

    store: Store
    io: FileIO
    writeback: WriteBack
    refused: dict[int, str]

    async def publish(self, what: Publication, caller: CallerLike) -> None: ...

    async def committed_pending(self, ino: int, rank: int) -> None: ...


# --- the mark -------------------------------------------------------------------------------------


async def put(fs: Host, ino: int, text: str, caller: CallerLike) -> None:
    """``ranks=8,step=100,job=NAME`` marks a directory, '' takes the mark away. Raises Invalid,
    NotADirectory, NotFound."""
    if not text:
        await remove(fs, ino)
        return
    values: dict[str, str] = {}
    for item in text.split(","):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or key not in ("ranks", "step", "job") or key in values:
            raise Invalid(
                f"pending: {item.strip()!r}: write 'ranks=8', and if you like ',step=100,job=NAME'"
            )
        values[key] = value
    ranks = _number("ranks", values.get("ranks", ""), publishing.RANKS_MAX)
    step = _number("step", values["step"], _STEP_MAX) if "step" in values else None
    job = os.fsencode(values.get("job", ""))
    if not ranks or len(job) > _JOB_MAX:
        raise Invalid(
            f"pending: there are 1 to {publishing.RANKS_MAX} ranks, and a job's name has up to {_JOB_MAX} bytes"
        )
    mark = Pending(ranks, step, time.time_ns(), job, permissions.asker_of(caller))
    await fs.store.engine.transact(publishing.mark, ino, mark)


def _number(what: str, text: str, most: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= most):
        raise Invalid(f"pending: {what}={text!r} is not a number up to {most}")
    return int(text)


async def remove(fs: Host, ino: int) -> None:
    """Abandon: the mark and all commits go, the files stay. Raises NoAttribute."""
    await fs.store.engine.transact(publishing.abandon, ino)
    fs.refused.pop(ino, None)


async def tell(fs: Host, ino: int, caller: CallerLike) -> dict[str, Any]:
    """What ``user.aifs.pending`` says. Why it was refused may name what lies below, so that is for
    the owner and root. Raises NoAttribute."""
    mark, members, owner = await fs.store.engine.view(_read, ino)
    return {
        "ranks": mark.ranks,
        "step": mark.step,
        "job": os.fsdecode(mark.job),
        "created_s": mark.created_ns / 1e9,
        "age_s": max(0.0, round((time.time_ns() - mark.created_ns) / 1e9, 3)),
        "members": members,
        "missing": publishing.missing(mark.ranks, members),
        "refused": fs.refused.get(ino, "") if caller.uid in (0, owner) else "",
    }


def _read(tx: ReadTransaction, ino: int) -> tuple[Pending, list[int], int]:
    """The mark, which ranks have committed, and whose the directory is."""
    mark = publishing.find_pending(tx, ino)
    if mark is None:
        raise NoAttribute()
    return mark, publishing.committed(tx, ino), namespace.get_inode(tx, ino).uid


# --- commits --------------------------------------------------------------------------------------


async def put_commit(fs: Host, ino: int, text: str, caller: CallerLike) -> None:
    """``3``, or JSON {"rank": 3, "files": {path: size}} or {"rank": 3, "list": name}, with "again"
    to commit anew."""
    asked = (
        _object("commit", text)
        if text.startswith("{")
        else {"rank": _number("commit", text, publishing.RANKS_MAX)}
    )
    _require_known("commit", asked, {"rank": int, "files": dict, "list": str, "again": bool})
    if "rank" not in asked or ("files" in asked and "list" in asked):
        raise Invalid("commit: it needs a rank, and 'files' or 'list' or neither")
    files = None
    if "files" in asked:
        files = [
            (path_below(os.fsencode(path)), _size(path, size))
            for path, size in asked["files"].items()
        ]
    listing = path_below(os.fsencode(asked["list"])) if asked.get("list") else b""
    await commit(fs, ino, asked["rank"], files, listing, asked.get("again", False))


async def commit(
    fs: Host,
    ino: int,
    rank: int,
    files: Sequence[tuple[bytes, int]] | None,
    listing: bytes = b"",
    again: bool = False,
) -> None:
    """A rank has written its part: its files, names and the commit itself are durable on return.

    ``files``: what it has written, as (path below the directory, bytes); None: all that is unsynced
    below is synced. ``listing``: path of a file that says it. Raises Invalid: not pending, no such
    rank, committed before, or a file is not there in that size.
    """
    engine = fs.store.engine
    await engine.view(publishing.get_pending, ino)
    wanted = list(files or ()) + ([(listing, ANY_SIZE)] if listing else [])
    if files is None:
        await sync_below(engine, fs.io, fs.writeback, Dentry(ino, 0, stat.S_IFDIR >> 12))
    else:
        found = await _look_up(engine, fs.io, ino, wanted)
        await sync_files(fs.io, fs.writeback, [inode.ino for _, _, inode in found if inode])
    wrong = await first_wrong(engine, fs.io, ino, wanted)
    if wrong:
        raise Invalid(f"commit: rank {rank}: {wrong}")
    await engine.transact(
        publishing.commit, ino, rank, Member(time.time_ns(), tuple(wanted)), again
    )
    await engine.barrier()
    await fs.committed_pending(ino, rank)


async def check_files(fs: Host, ino: int) -> None:
    """The files of all members of a pending directory are there, in the sizes that were committed.
    Raises Busy, which names the first that is not."""
    engine = fs.store.engine
    for rank in await engine.view(publishing.committed, ino):
        member = await engine.view(publishing.get_member, ino, rank)
        wrong = await first_wrong(engine, fs.io, ino, member.files) if member is not None else ""
        if wrong:
            raise Busy(f"rank {rank}: {wrong}")


async def first_wrong(
    engine: Engine, io: FileIO, ino: int, files: Sequence[tuple[bytes, int]]
) -> str:
    """Which of ``files``, (path below the directory ``ino``, bytes), is missing or has another
    size; ''.
    """
    for path, size, inode in await _look_up(engine, io, ino, files):
        if inode is None:
            return f"{os.fsdecode(path)!r} is missing"
        if size != ANY_SIZE and inode.size != size:
            return f"{os.fsdecode(path)!r} has {inode.size} bytes, not {size}"
    return ""


async def _look_up(
    engine: Engine, io: FileIO, ino: int, files: Sequence[tuple[bytes, int]]
) -> list[tuple[bytes, int, Inode | None]]:
    """``files`` with the inodes of those that are regular files, as they are now. Others run
    between slices."""
    found = []
    for start in range(0, len(files), _SLICE):
        for path, size, inode in await engine.view(_find_files, ino, files[start : start + _SLICE]):
            file = io.open.get(inode.ino) if inode is not None else None
            found.append((path, size, inode if file is None else io.attributes(file)))
        await trio.lowlevel.checkpoint()
    return found


def _find_files(
    tx: ReadTransaction, ino: int, files: Sequence[tuple[bytes, int]]
) -> list[tuple[bytes, int, Inode | None]]:
    return [(path, size, find_file(tx, ino, path)) for path, size in files]


def find_file(tx: ReadTransaction, ino: int, path: bytes) -> Inode | None:
    """The regular file at ``path`` below a directory, as it is on record."""
    try:
        for name in path.split(b"/"):
            inode = namespace.lookup(tx, ino, name)
            ino = inode.ino
    except (NotFound, NotADirectory):
        return None
    return inode if inode.is_file else None


# --- publishing -----------------------------------------------------------------------------------


async def publish_as(fs: Host, ino: int, text: str, caller: CallerLike) -> None:
    """JSON {"final": ..., "latest": ..., "tracker": ..., "content": ..., "manifest": ..., "replace"
    or "exclusive": true}.

    ``final`` is looked for from the directory that ``ino`` lies in, or, with a slash before it,
    from the root of the mount. Raises as ``Filesystem.publish``.
    """
    asked = _object("publish-as", text)
    _require_known("publish-as", asked, _PUBLISH_AS)
    values: dict[str, Any] = {
        key: os.fsencode(value) if isinstance(value, str) else value for key, value in asked.items()
    }
    way, _, name = values.pop("final", b"").rpartition(b"/")
    parent = await fs.store.engine.view(
        _walk, ino, way, os.fsencode(asked.get("final", "")).startswith(b"/"), caller
    )
    await fs.publish(Publication(ino, parent, name, **values), caller)


_PUBLISH_AS = {
    "final": str,
    "latest": str,
    "tracker": str,
    "content": str,
    "manifest": str,
    "replace": bool,
    "exclusive": bool,
}


def _walk(tx: ReadTransaction, ino: int, way: bytes, absolute: bool, caller: CallerLike) -> int:
    """The directory that ``way`` leads to. Raises NotFound, NotADirectory: also for a symlink;
    AccessDenied for one that ``caller`` may not search, whatever it holds."""
    place = namespace.get_directory(
        tx, keys.ROOT_INO if absolute else namespace.get_directory(tx, ino).parent
    )
    for name in way.split(b"/"):
        permissions.require_may(place, caller, permissions.SEARCH)
        if name == b"..":
            place = namespace.get_directory(tx, place.parent)
        elif name not in (b"", b"."):
            place = namespace.get_directory(tx, namespace.get_dentry(tx, place.ino, name).ino)
    return place.ino


# --- what programs write --------------------------------------------------------------------------


def _object(what: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
        os.fsencode(json.dumps(value, ensure_ascii=False))  # no escape is half of a character
    except (ValueError, RecursionError) as error:
        raise Invalid(f"{what}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise Invalid(f"{what}: not a JSON object")
    return value


def _require_known(what: str, asked: Mapping[str, Any], known: Mapping[str, type]) -> None:
    for key, value in asked.items():
        if key not in known:
            raise Invalid(f"{what}: no key is called {key!r}; there are {', '.join(known)}")
        if type(value) is not known[key]:
            raise Invalid(f"{what}: {key} is {value!r}, not a {known[key].__name__}")


def path_below(path: bytes) -> bytes:
    """The same path, if it leads below the directory that it starts from. Raises Invalid."""
    if (
        len(path) > _PATH_MAX
        or b"\0" in path
        or any(name in (b"", b".", b"..") for name in path.split(b"/"))
    ):
        raise Invalid(f"commit: {path!r} is not the path of a file below the directory")
    return path


def _size(path: str, size: Any) -> int:
    if type(size) is not int or not 0 <= size <= SIZE_MAX:
        raise Invalid(f"commit: {path!r}: {size!r} is not a size in bytes")
    return size
