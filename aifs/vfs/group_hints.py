"""The hints of groups, and their short forms ``pending`` and ``commit`` (docs/design/commit.md)."""

import json
import os
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any

import trio
from blake3 import blake3

from aifs.core import retention
from aifs.core.errors import FsError, Invalid
from aifs.core.manifest import Digest, Manifest, encode
from aifs.core.tasks import run_all
from aifs.core.texts import parse_object
from aifs.files import permissions, rights
from aifs.files.asks import ANY, BOTH, DIRECTORY, Ask, Hint, HintCall
from aifs.files.file_io import FileIO
from aifs.files.kernel import Kernel
from aifs.files.services import Services
from aifs.files.types import SIZE_MAX, CallerLike
from aifs.meta import namespace, paths
from aifs.meta.hosts import read_hosts
from aifs.meta.kv import Engine, ReadTransaction
from aifs.meta.listing import entries_of
from aifs.meta.publishing import Publication, find, name_of
from aifs.saves.closing import Closing
from aifs.saves.group import DirectoryGroup, File, describe_ranks
from aifs.saves.group_text import TAKES, Wanted, parse_group, parse_pending, wanted
from aifs.saves.listed import MANIFEST, NO_PART, path_below
from aifs.saves.protocol import Commit, Groups
from aifs.saves.publish import Publishing, require_may_publish
from aifs.saves.table import GroupTable
from aifs.vfs.attributes import Attributes
from aifs.vfs.names import Names
from aifs.vfs.open_files import OpenFiles
from aifs.vfs.policy_hints import PolicyHints

_UNEQUAL = "not all files have one size"
_SHOWN = 256  # files, and ranks
_SLICE = 64
_REASON_MAX = 127
_LENGTH_MAX = 60_000  # an extended attribute has up to 64 KiB

SUMS = ("bytes", "zero_bytes", "duplicate_bytes", "found_bytes", "distinct_bytes", "stored_bytes")


_COMMIT = {"rank": int, "files": dict, "list": str, "again": bool}


class GroupHints:
    """Groups as programs see them. A group's id of 0 or none means the directory's present, or
    last, one."""

    HINTS = (
        Hint(
            "group[.ID]",
            BOTH,
            "files that are written together: name=step,ranks=8",
            rights.reader,
            rights.writer,  # with pending=yes as "pending"
            get=lambda hints, ask: hints.tell(ask.ino, ask.caller, ask.number or 0),
            set=lambda hints, ask: hints.put(ask.ino, ask.text, ask.caller),
            remove=lambda hints, ask: hints.put(ask.ino, "", ask.caller),
            call=HintCall(
                rights.writer,
                lambda hints, ask: hints.begin(ask.ino, wanted(ask.fields), ask.caller),
                TAKES,
                "Begins a group in the directory, or finds the open one that was begun so. The "
                "fields are the words of user.aifs.group, docs/design/commit.md. Answers {id}. "
                "EINVAL: another group is open, or a job whose ranks live is writing; EBUSY: it is "
                "not durable yet.",
            ),
        ),
        Hint(
            "group.commit",
            BOTH,
            "a rank of the group commits; of a file, '': it counts as closed",
            change=rights.writer,
            set=lambda hints, ask: hints.put_commit(ask.ino, ask.text),
            call=HintCall(
                rights.writer,
                lambda hints, ask: hints.groups.commit(
                    ask.ino, _id(ask), Commit(ask.need("rank"), sized=ask.path("file"))
                ),
                {"rank": int, "id": int, "file": str},
                "All that is unsynced below the directory is durable in the burst tier on return, "
                "and the rank has committed. file: path of a file below that the rank has written; "
                "its size is compared if all files have to have one. EINVAL: no such rank, it has "
                "committed, the group commits by closing, or the file has another size than that "
                "of the first rank to commit.",
            ),
        ),
        Hint(
            "group.join",
            DIRECTORY,
            "the calling process is a rank",
            call=HintCall(
                rights.writer,
                lambda hints, ask: hints.groups.join(
                    ask.ino, _id(ask), ask.need("rank"), ask.caller
                ),
                {"rank": int, "id": int},
                "The calling process is this rank from now on: if it ends before the rank has "
                "committed, the group fails, at once or when its grace is over. EINVAL: no such "
                "rank, a process that lives is it already, or the group commits by closing; "
                "EOPNOTSUPP: the daemon cannot see the process.",
            ),
        ),
        Hint(
            "group.wait",
            ANY,
            "waits until all ranks have committed",
            call=HintCall(
                rights.anybody,
                lambda hints, ask: hints.wait(ask),
                {"for": str, "id": int, "timeout_ms": int},
                "Returns when all ranks have committed and their bytes are durable in the burst "
                'tier ("for": "buffered") or on the capacity tier ("durable"). timeout_ms 0: none. '
                "EINVAL: files have sizes that differ; EOWNERDEAD: a rank died; ECANCELED; ETIME: "
                "the group's own time was over; ETIMEDOUT: timeout_ms were.",
                where=ANY,
                changes=False,
            ),
        ),
        Hint(
            "group.cancel",
            DIRECTORY,
            "ends a group",
            call=HintCall(
                rights.writer,
                lambda hints, ask: hints.groups.cancel(ask.ino, _id(ask), _reason(ask), ask.caller),
                {"id": int, "reason": str},
                "Ends the group; its files are drained as usual. Others read the reason, of up to "
                "127 characters.",
            ),
        ),
        Hint(
            "group.state",
            ANY,
            "the numbers of a group",
            call=HintCall(
                rights.anybody,
                lambda hints, ask: hints.state(ask),
                {"id": int},
                "Answers {id, state, ranks, joined, committed, files, dead, bytes, zero_bytes, "
                "duplicate_bytes, found_bytes, distinct_bytes, stored_bytes, created_ns, "
                "buffered_ns, durable_ns}. state: open, committed, draining, durable, failed, "
                "cancelled or expired; joined, committed: how many ranks; dead: a rank, or -1; "
                "times since the epoch, 0 if not yet.",
                where=ANY,
                changes=False,
            ),
        ),
        Hint(
            "pending",
            DIRECTORY,
            "a checkpoint that is being saved, by whom: ranks=8,step=100",
            rights.reader,
            rights.writer,  # and its owner, except to begin anew what nobody goes on with
            get=lambda hints, ask: hints.tell_pending(ask.ino, ask.caller),
            set=lambda hints, ask: hints.put_pending(ask.ino, ask.text, ask.caller),
            remove=lambda hints, ask: hints.put_pending(ask.ino, "", ask.caller),
        ),
        Hint(
            "commit",
            ANY,
            "a rank of the pending directory commits: a rank, or JSON",
            change=rights.writer,
            set=lambda hints, ask: hints.groups.commit_pending(ask.ino, _parse_commit(ask.text)),
            call=HintCall(
                rights.writer,
                lambda hints, ask: hints.groups.commit_pending(ask.ino, _commit_of(ask.fields)),
                _COMMIT,
                "All that is unsynced below the pending directory is durable on return, and the "
                "rank has committed. files: {path: bytes}, what it has written, or list: path of a "
                "file below that says it; again: it may have committed before. EINVAL: not "
                "pending, no such rank, or it has committed.",
                where=ANY,
            ),
        ),
    )

    def __init__(
        self,
        services: Services,
        table: GroupTable,
        groups: Groups,
        closing: Closing,
        attributes: Attributes,
    ) -> None:
        self._engine = services.engine
        self._table = table
        self.groups = groups
        self._closing = closing
        self._refusals = services.refusals
        self._attributes = attributes
        self._options = services.options

    # --- calls ---

    async def begin(self, ino: int, what: Wanted, caller: CallerLike) -> dict[str, int]:
        """Raises as Groups.begin."""
        return {"id": (await self.groups.begin(ino, what, caller)).record.id}

    async def wait(self, ask: Ask) -> None:
        """Raises as Groups.wait, and ReadOnly where nothing goes on in this mount."""
        until = ask.fields.get("for", "durable")
        if until not in ("buffered", "durable"):
            raise Invalid(f"group: {until!r} is neither buffered nor durable")
        group = await self._table.find(ask.ino, _id(ask))
        if group.is_live:
            self._options.require_writable()
        await self.groups.wait(ask.ino, _id(ask), until == "durable", ask.timeout_s())

    async def state(self, ask: Ask) -> dict[str, Any]:
        """Raises as GroupTable.find."""
        group = await self._table.find(ask.ino, _id(ask))
        record, told = group.record, report_of(group)
        sums = {key: told.get(key, 0) for key in SUMS}
        sums["bytes"] = sums["bytes"] or sum(file.size for file in group.files.values())
        is_explicit = record.options.explicit
        return {
            "id": record.id,
            "state": record.state,
            "ranks": record.options.ranks,
            "joined": len(group.processes) + len(group.joined_elsewhere),
            "committed": len(group.committed) if is_explicit else group.closed_files,
            "files": len(group.files),
            "dead": record.dead,
            **sums,
            "created_ns": record.created_ns,
            "buffered_ns": record.buffered_ns,
            "durable_ns": record.durable_ns,
        }

    # --- attributes that programs write ---

    async def put(self, ino: int, text: str, caller: CallerLike) -> None:
        """Begin a group of the directory by ``text``; '' ends it. Raises as Groups.begin,
        Groups.cancel."""
        if not text:
            await self.groups.cancel(ino, caller=caller)
            return
        if not (await self._attributes.getattr(ino)).is_dir:
            raise Invalid("a group belongs to a directory")
        self._options.require_writable()
        await self.groups.begin(ino, parse_group(text), caller)

    async def put_pending(self, ino: int, text: str, caller: CallerLike) -> None:
        """``ranks=8,step=100,job=NAME`` marks a directory, '' unmarks it: short for
        ``user.aifs.group``. Raises as ``put``, NotADirectory."""
        if not text:
            await self.groups.abandon(ino, caller)
            return
        if "anew" not in text:  # else Groups.begin asks whether ranks go on with it
            rights.owner(await self._attributes.getattr(ino), caller)
        await self.groups.begin(ino, parse_pending(text), caller)

    async def put_commit(self, ino: int, text: str) -> None:
        """On a directory: commit a rank (``_parse_commit``), or the rank ``text``, with the path of
        one of its files behind it. On a file, with '': count it as closed. Raises as Groups.commit
        and Closing.commit_file."""
        inode = await self._attributes.getattr(ino)
        if inode.is_dir:
            rank, _, file = text.partition(" ")
            is_plain = rank.isascii() and rank.isdigit()
            what = (
                Commit(_rank(rank), sized=os.fsencode(file.strip()))
                if is_plain
                else _parse_commit(text)
            )
            await self.groups.commit(ino, 0, what)
        elif text or not inode.is_file:
            raise Invalid("group: a rank commits on the directory; a file takes no value")
        else:
            await self._closing.commit_file(inode)

    # --- and read ---

    async def tell_pending(self, ino: int, caller: CallerLike) -> dict[str, Any]:
        """Answer ``user.aifs.pending``. Raises NoAttribute."""
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
        """Why any user's last request was refused; for owner and root, because it may name
        files."""
        return self._refusals.last(ino, since_ns / 1e9)

    async def tell(self, ino: int, caller: CallerLike, group_id: int = 0) -> dict[str, Any]:
        """Answer ``user.aifs.group`` about a directory's group, or that above ``ino``;
        ``user.aifs.group.ID`` also about an earlier one. Many files and ranks are cut, uncommitted
        ranks first. Files that ``caller`` could not find are named by inode. Errors, which may name
        files, are for the user that began the group, the owner, and root. Raises NoAttribute,
        Stale."""
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
        hosts = await self._engine.view(read_hosts)
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
    return _commit_of(parse_object("commit", text, _COMMIT))


def _commit_of(asked: Mapping[str, Any]) -> Commit:
    """Raises Invalid."""
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


def _id(ask: Ask) -> int:
    return ask.fields.get("id", 0)


def _reason(ask: Ask) -> str:
    return ask.path("reason").decode(errors="replace")[:_REASON_MAX]


def report_of(group: DirectoryGroup) -> dict[str, Any]:
    """The report of its drain, in this mount or an earlier one."""
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


# --- publishing -----------------------------------------------------------------------------------

# A complete group's directory gets its hint's name (``publish=NAME``), with a manifest and the
# pointer ``latest``, as by ``aifs checkpoint publish``.


class WholeFiles:
    """Used from one trio thread."""

    def __init__(
        self, io: FileIO, kernel: Kernel, files: OpenFiles, names: Names, publishing: Publishing
    ) -> None:
        self._io = io
        self._kernel = kernel
        self._files = files
        self._names = names
        self._publishing = publishing

    async def put(
        self, directory: int, temporary: bytes, name: bytes, data: bytes, caller: CallerLike
    ) -> None:
        """Write a file of ``caller``'s under a temporary name, and rename it when whole. Raises as
        these."""
        made = await self._names.mknod(directory, temporary, stat.S_IFREG | 0o644, 0, caller)
        async with self._files.changing(made.ino) as file:
            await self._io.write(file, 0, data)
        await self._publishing.rename(directory, temporary, directory, name, caller=caller)
        await self._kernel.forget_names([(directory, name)])


LATEST = b"latest"

_PIECE = 4 << 20  # bytes that are read and hashed at once
_AT_ONCE = 4  # files: while one waits for the device, another is hashed
_TEMPORARY = b"." + MANIFEST


class GroupPublishing:
    """Used from one trio thread."""

    def __init__(
        self,
        engine: Engine,
        io: FileIO,
        files: WholeFiles,
        names: Names,
        policies: PolicyHints,
        publishing: Publishing,
    ) -> None:
        self._engine = engine
        self._io = io
        self._files = files
        self._names = names
        self._policies = policies
        self._publishing = publishing
        self._places = trio.CapacityLimiter(_AT_ONCE)

    async def publish(self, ino: int, name: bytes, ranks: int, caller: CallerLike) -> None:
        """Show the directory ``ino`` as ``name`` beside it. Raises as ``Publishing.publish``, and
        Unavailable for an unreadable file, without leaving a manifest."""
        what, is_shown = await self._engine.view(_publication, ino, name)
        await self._engine.view(require_may_publish, what, caller)
        if not is_shown:
            await self._write_manifest(what, ranks, caller)
        try:
            await self._publishing.publish(what, caller)
        except FsError:
            with suppress(FsError):
                _, is_shown = await self._engine.view(_publication, ino, name)
                if not is_shown:
                    await self._names.unlink(ino, MANIFEST)
            raise

    async def _write_manifest(self, what: Publication, ranks: int, caller: CallerLike) -> None:
        listed: list[tuple[bytes, int]] = []
        reserved: list[bytes] = []
        waiting = [(b"", what.ino)]
        while waiting:
            above, directory = waiting.pop()
            async for name, inode in entries_of(self._engine, directory):
                path = above + name
                if path.startswith(NO_PART):
                    reserved.append(path)
                elif inode.is_dir:
                    waiting.append((path + b"/", inode.ino))
                elif inode.is_file:
                    listed.append((path, inode.ino))
        digests: dict[str, Digest] = {}
        await run_all(*(partial(self._digest, path, ino, digests) for path, ino in listed))
        policy = await self._policies.get(what.ino, "layout")
        manifest = Manifest(retention.step_of(what.name), time.time(), ranks, "", policy, digests)
        text = "".join(encode(manifest)).encode()
        for path in (*reserved, _TEMPORARY):
            with suppress(FsError):  # a directory of somebody's, or gone
                await self._names.unlink(what.ino, path)
        await self._files.put(what.ino, _TEMPORARY, MANIFEST, text, caller)

    async def _digest(self, path: bytes, ino: int, digests: dict[str, Digest]) -> None:
        hasher, size = blake3(), 0
        async with self._places, self._io.inodes.held(ino) as file:
            while piece := await self._io.read(file, size, _PIECE):
                await trio.to_thread.run_sync(hasher.update, piece)
                size += len(piece)
        digests[os.fsdecode(path)] = Digest(size, hasher.hexdigest())


def _publication(tx: ReadTransaction, ino: int, name: bytes) -> tuple[Publication, bool]:
    """The publication, and whether it happened before a crash: then the pointer was moved, too, and
    may lead to a later one."""
    directory = namespace.get_directory(tx, ino)
    what = Publication(ino, directory.parent, name, manifest=MANIFEST)
    if name_of(tx, directory) == name and find(tx, ino, MANIFEST) is not None:
        return what, True
    pointed = find(tx, directory.parent, LATEST)
    if name == LATEST or (pointed is not None and pointed.is_dir):
        return what, False
    return what._replace(latest=LATEST), False
