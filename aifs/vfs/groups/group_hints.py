"""Groups as extended attributes: ``user.aifs.group`` and ``user.aifs.group.commit``
(docs/grouped.md).
"""

import json
import os
from itertools import islice
from typing import Any, Protocol

import trio

from aifs.core.errors import Invalid, NoAttribute
from aifs.files import permissions
from aifs.files.types import CallerLike
from aifs.meta import namespace, paths
from aifs.meta.groups import Options
from aifs.meta.kv import ReadTransaction
from aifs.meta.records import Inode
from aifs.store.store import Store
from aifs.vfs.groups.group import File, Group, describe_ranks
from aifs.vfs.groups.group_text import parse_group
from aifs.vfs.groups.protocol import Groups

_UNEQUAL = "not all files have one size"
_SHOWN = 256  # files, and ranks
_SLICE = 64
_LENGTH_MAX = 60_000  # an extended attribute has up to 64 KiB

SUMS = ("bytes", "zero_bytes", "duplicate_bytes", "found_bytes", "distinct_bytes", "stored_bytes")


class Host(Protocol):
    """What these hints need of the filesystem."""

    store: Store
    groups: Groups

    async def getattr(self, ino: int) -> Inode: ...

    async def begin_group(self, ino: int, options: Options, caller: CallerLike) -> int: ...


async def put(fs: Host, ino: int, text: str, caller: CallerLike) -> None:
    """Begin a group of the directory, as ``text`` says; '' cancels it. Raises Invalid, Busy."""
    if not text:
        await fs.groups.cancel(ino)
        return
    if not (await fs.getattr(ino)).is_dir:
        raise Invalid("a group belongs to a directory")
    await fs.begin_group(ino, parse_group(text), caller)


async def put_commit(fs: Host, ino: int, text: str, caller: CallerLike) -> None:
    """On a directory: the rank ``text`` commits; behind it may be the path of one of its files. On
    a file, with '': it counts as closed. Raises as Groups.commit and Groups.commit_file."""
    inode = await fs.getattr(ino)
    if inode.is_dir:
        rank, _, file = text.partition(" ")
        if not (rank.isascii() and rank.isdigit() and len(rank) < 10):
            raise Invalid(f"group: {rank!r} is not a rank")
        await fs.groups.commit(ino, 0, int(rank), os.fsencode(file.strip()))
    elif text or not inode.is_file:
        raise Invalid("group: a rank commits on the directory; a file takes no value")
    else:
        await fs.groups.commit_file(inode)


async def tell(fs: Host, ino: int, caller: CallerLike, group_id: int = 0) -> dict[str, Any]:
    """What ``user.aifs.group`` says of a directory's group, or of the one that ``ino`` lies below;
    ``user.aifs.group.ID`` of one that it may have followed. Of many files and ranks it names some;
    of ranks those first that have not committed. Files that ``caller`` could not find are told by
    their inodes, and what has gone wrong, which may name some, is for who began the group, the
    directory's owner, and root. Raises NoAttribute, Stale."""
    inode = await fs.getattr(ino)
    if not inode.is_dir and not inode.is_file:
        raise NoAttribute()
    groups = fs.groups
    group = await (groups.find(ino, group_id) if group_id else groups.find_above(ino))
    record, options = group.record, group.record.options
    shown = list(islice(group.files.values(), _SHOWN))
    names: list[str] = []
    for start in range(0, len(shown), _SLICE):
        names += await fs.store.engine.view(
            _names, shown[start : start + _SLICE], group.ino, caller
        )
        await trio.lowlevel.checkpoint()
    told = report_of(group)
    owners = {0, record.uid, (await fs.store.engine.view(_owner, group.ino))}
    wrong = {
        "error": record.error,
        "publish_error": record.publish_error,
        "refused": group.refused,
        "drain_error": group.drain_error,
    }
    if caller.uid not in owners:
        error = _UNEQUAL if record.unequal else record.error
        wrong = dict.fromkeys(wrong, "") | {"error": error}
    missing = group.missing() if group.is_live else []
    answer = {
        "id": record.id,
        "name": os.fsdecode(options.name),
        "directory": group.ino,
        "state": record.state,
        "ranks": options.ranks,
        "commit": "explicit" if options.explicit else "close",
        "chunk": options.chunk,
        "timeout_s": options.timeout_ms / 1000,
        "grace_s": options.grace_ms / 1000,
        "same_size": options.same_size,
        "job": os.fsdecode(options.job),
        "publish": os.fsdecode(options.publish),
        "published": record.published,
        "members": describe_ranks(group, _SHOWN),
        "missing": missing[:_SHOWN],
        "missing_ranks": len(missing),
        "missing_files": 0
        if options.explicit
        else max(0, options.ranks - group.counted)
        if group.is_open
        else 0,
        "files": [
            {"ino": file.ino, "name": name, "bytes": file.size, "state": file.state.value}
            for file, name in zip(shown, names, strict=True)
        ],
        "file_count": len(group.files),
        "dead": record.dead if record.dead >= 0 else None,
        "unequal": record.unequal,
        **wrong,
        **{key: told.get(key, 0) for key in SUMS},
        "bytes": told.get("bytes", 0) or sum(file.size for file in group.files.values()),
        "plan": told,
        "times": {
            "open": record.created_ns / 1e9,
            "committed": record.committed_ns / 1e9 or None,
            "buffered": record.buffered_ns / 1e9 or None,
            "durable": record.durable_ns / 1e9 or None,
        },
    }
    while answer["files"] and len(json.dumps(answer)) > _LENGTH_MAX:  # paths may be long
        del answer["files"][len(answer["files"]) // 2 :]
    return answer


def report_of(group: Group) -> dict[str, Any]:
    """What its drain says, or has said to an earlier mount."""
    return json.loads(group.record.report) if group.record.report else group.report.to_json()


def _names(tx: ReadTransaction, files: list[File], top: int, caller: CallerLike) -> list[str]:
    inodes = [namespace.find_inode(tx, file.ino) for file in files]
    return [
        paths.describe(tx, file.ino)
        if inode is not None and permissions.may_find(tx, inode, top, caller)
        else f"inode {file.ino}"
        for file, inode in zip(files, inodes, strict=True)
    ]


def _owner(tx: ReadTransaction, ino: int) -> int:
    """0 if the directory is gone."""
    inode = namespace.find_inode(tx, ino)
    return 0 if inode is None else inode.uid
