"""Groups as extended attributes: ``user.aifs.group`` and ``user.aifs.group.commit``, and their
short forms for pending directories, ``user.aifs.pending`` and ``user.aifs.commit``
(docs/design/commit.md).
"""

import json
import os
import time
from itertools import islice
from typing import Any

import trio

from aifs.core.errors import Invalid, NoAttribute
from aifs.core.json_text import parse_object
from aifs.files import permissions
from aifs.files.types import SIZE_MAX, CallerLike
from aifs.meta import namespace, paths
from aifs.meta.hosts import read_hosts
from aifs.meta.kv import Engine, ReadTransaction
from aifs.vfs import rights
from aifs.vfs.attributes import Attributes
from aifs.vfs.groups.closing import Closing
from aifs.vfs.groups.group import DirectoryGroup, File, describe_ranks
from aifs.vfs.groups.group_text import parse_group, parse_pending
from aifs.vfs.groups.protocol import Commit, Groups
from aifs.vfs.groups.table import GroupTable
from aifs.vfs.publishing.listed import path_below
from aifs.vfs.refusals import Refusals
from aifs.vfs.serve_options import ServeOptions

_UNEQUAL = "not all files have one size"
_SHOWN = 256  # files, and ranks
_SLICE = 64
_LENGTH_MAX = 60_000  # an extended attribute has up to 64 KiB

SUMS = ("bytes", "zero_bytes", "duplicate_bytes", "found_bytes", "distinct_bytes", "stored_bytes")


class GroupHints:
    """What programs say of groups, and are told, by extended attributes."""

    def __init__(
        self,
        engine: Engine,
        table: GroupTable,
        groups: Groups,
        closing: Closing,
        refusals: Refusals,
        attributes: Attributes,
        options: ServeOptions,
    ) -> None:
        self._engine = engine
        self._table = table
        self._groups = groups
        self._closing = closing
        self._refusals = refusals
        self._attributes = attributes
        self._options = options

    # --- what programs write ---

    async def put(self, ino: int, text: str, caller: CallerLike) -> None:
        """Begin a group of the directory, as ``text`` says; '' ends it. Raises as Groups.begin and
        Groups.cancel."""
        if not text:
            await self._groups.cancel(ino, caller=caller)
            return
        if not (await self._attributes.getattr(ino)).is_dir:
            raise Invalid("a group belongs to a directory")
        self._options.require_writable()
        await self._groups.begin(ino, parse_group(text), caller)

    async def put_pending(self, ino: int, text: str, caller: CallerLike) -> None:
        """``ranks=8,step=100,job=NAME`` marks a directory, '' takes the mark away: short for what
        ``user.aifs.group`` can say. Raises as ``put``, NotADirectory."""
        if not text:
            await self._groups.abandon(ino, caller)
            return
        if "anew" not in text:  # else it is looked at who goes on with the directory
            rights.owner(await self._attributes.getattr(ino), caller)
        await self._groups.begin(ino, parse_pending(text), caller)

    async def put_commit(self, ino: int, text: str, caller: CallerLike) -> None:
        """On a directory: a rank commits (``_parse_commit``), or the rank ``text``; behind it may
        be the path of one of its files. On a file, with '': it counts as closed. Raises as
        Groups.commit and Closing.commit_file."""
        inode = await self._attributes.getattr(ino)
        if inode.is_dir:
            rank, _, file = text.partition(" ")
            is_plain = rank.isascii() and rank.isdigit()
            what = (
                Commit(_rank(rank), sized=os.fsencode(file.strip()))
                if is_plain
                else _parse_commit(text)
            )
            await self._groups.commit(ino, 0, what)
        elif text or not inode.is_file:
            raise Invalid("group: a rank commits on the directory; a file takes no value")
        else:
            await self._closing.commit_file(inode)

    async def put_pending_commit(self, ino: int, text: str, caller: CallerLike) -> None:
        """A rank of a pending directory commits (``_parse_commit``), whatever has become of its
        group. Raises as Groups.commit_pending."""
        await self._groups.commit_pending(ino, _parse_commit(text))

    # --- what they are told ---

    async def tell_pending(self, ino: int, caller: CallerLike) -> dict[str, Any]:
        """What ``user.aifs.pending`` says. Raises NoAttribute."""
        group = self._table.pending(ino)
        mark = group.pending
        assert mark is not None
        owner = (await self._attributes.getattr(ino)).uid
        return {
            "ranks": group.record.options.ranks,
            "step": mark.step,
            "job": os.fsdecode(mark.job),
            "created_s": mark.created_ns / 1e9,
            "age_s": max(0.0, round((time.time_ns() - mark.created_ns) / 1e9, 3)),
            "members": sorted(group.committed),
            "missing": group.missing(),
            "refused": self._refused(ino, mark.created_ns) if caller.uid in (0, owner) else "",
        }

    def _refused(self, ino: int, since_ns: int) -> str:
        """Why the last request about the directory was refused, whoever asked; it may name what
        lies below, so that is for the owner and root."""
        return self._refusals.last(ino, since_ns / 1e9)

    async def tell(self, ino: int, caller: CallerLike, group_id: int = 0) -> dict[str, Any]:
        """What ``user.aifs.group`` says of a directory's group, or of the one that ``ino`` lies
        below; ``user.aifs.group.ID`` of one that it may have followed. Of many files and ranks it
        names some; of ranks those first that have not committed. Files that ``caller`` could not
        find are told by their inodes, and what has gone wrong, which may name some, is for who
        began the group, the directory's owner, and root. Raises NoAttribute, Stale."""
        inode = await self._attributes.getattr(ino)
        if not inode.is_dir and not inode.is_file:
            raise NoAttribute()
        group = await (
            self._table.find(ino, group_id) if group_id else self._closing.find_above(ino)
        )
        record, options = group.record, group.record.options
        shown = list(islice(group.files.values(), _SHOWN))
        names: list[str] = []
        for start in range(0, len(shown), _SLICE):
            names += await self._engine.view(
                _names, shown[start : start + _SLICE], group.ino, caller
            )
            await trio.lowlevel.checkpoint()
        told = report_of(group)
        hosts = await self._engine.view(read_hosts) if self._engine.host else {}
        owners = {0, record.asker.uid, (await self._engine.view(_owner, group.ino))}
        wrong = {
            "error": record.error,
            "publish_error": record.publish_error,
            "refused": self._refused(group.ino, record.created_ns),
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
            "pending": group.pending is not None,
            "publish": os.fsdecode(options.publish),
            "published": record.published,
            "members": describe_ranks(group, _SHOWN, hosts),
            "hosts": [
                {
                    "name": hosts.get(host),
                    "ranks": list(part.ranks),
                    "has_files": part.has_files,
                    "sees_to_it": host == record.host,
                }
                for host, part in sorted(group.parts.items())
            ],
            "missing": missing[:_SHOWN],
            "missing_ranks": len(missing),
            "missing_files": 0
            if options.explicit
            else max(0, options.ranks - group.closed_files)
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


def _parse_commit(text: str) -> Commit:
    """``3``, or JSON {"rank": 3, "files": {path: size}} or {"rank": 3, "list": path}, with "again"
    to commit anew. Raises Invalid."""
    if not text.startswith("{"):
        return Commit(_rank(text))
    known = {"rank": int, "files": dict, "list": str, "again": bool}
    asked = parse_object("commit", text, known)
    if "rank" not in asked or ("files" in asked and "list" in asked):
        raise Invalid("commit: it needs a rank, and 'files' or 'list' or neither")
    files = None
    if "files" in asked:
        files = tuple(
            (path_below(os.fsencode(path)), _size(path, size))
            for path, size in asked["files"].items()
        )
    listing = path_below(os.fsencode(asked["list"])) if asked.get("list") else b""
    return Commit(asked["rank"], files, listing, asked.get("again", False))


def _rank(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise Invalid(f"commit: {text!r} is not a rank")
    return int(text)


def _size(path: str, size: Any) -> int:
    if type(size) is not int or not 0 <= size <= SIZE_MAX:
        raise Invalid(f"commit: {path!r}: {size!r} is not a size in bytes")
    return size


def report_of(group: DirectoryGroup) -> dict[str, Any]:
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
