"""Virtual extended attributes ``user.aifs.*``: how programs talk to the filesystem through plain
files.

    user.aifs.layout         directory, or empty file: get and set what new files (this file) will
                             be laid out by
    user.aifs.tier           directory or file: get and set burst, capacity, pinned or default
    user.aifs.expected_size  directory, or empty file: get and set how large new files (this file)
                             will become
    user.aifs.state          directory or file: JSON, where the bytes are (burst_hints.state)
    user.aifs.drain          directory or file: JSON, what is undrained; set (empty): drain that
                             before all else
    user.aifs.stage          file, set (empty): bring it into the burst tier
    user.aifs.evict          file, set (empty): give up its copy in the burst tier
    user.aifs.remove         directory, set: name of a directory in it, to be removed with all that
                             lies below (trash.py)
    user.aifs.publish        directory: get and set burst or capacity, where bytes must be before a
                             rename into it shows them
    user.aifs.pending        directory: JSON, who has committed; set 'ranks=8,step=100,job=NAME' to
                             mark it, '' to abandon
    user.aifs.commit         pending directory, set: a rank, or JSON (groups/group_hints.py)
    user.aifs.publish-as     directory, set: JSON, the final name and the pointers to it
                             (publishing/publish_hint.py)
    user.aifs.keep           directory: get and set which checkpoints in it are kept
                             (core/retention.py)
    user.aifs.backup         root, write only: TOKEN:[DIRECTORY], back up the metadata
                             (backup.request)
    user.aifs.group          directory: get (also of what lies below) and set 'name=step,ranks=8', a
                             grouped write; '' ends it
    user.aifs.group.commit   directory: a rank of its group; file, set (empty): it counts as closed
                             (groups/group_hints.py)
    user.aifs.atime          root, write only, root user: noatime, relatime or strictatime, when
                             opening for reading is an access
    user.aifs.refused        any: JSON, the last request that the caller was refused here, and why
                             (core/refusals.py)
    user.aifs.info           any: JSON, the inode and where its parts lie
    user.aifs.status         root: JSON, the state of the mount
    user.aifs.trace[.N]      root, the root user and the daemon's: JSON, requests as they are
                             answered (operation_log.tell)
    user.aifs.scrub          root: JSON, what a scrub has done and found; set
                             start[,no-repair][,bandwidth=SIZE] or stop
    user.aifs.servers        root: JSON, the data servers and burst directories
    user.aifs.server-*       root, write only: adding, draining, replacing, removing servers
                             (server_hints.py)

``root`` is the mount's root directory. Who may read and set which of them is one table, rights.py.
They are not listed, so that copying tools leave them alone. Policies (the first three, and publish)
are stored in the inode, and what is made in a directory inherits its. They, ``pending``, ``keep``
and ``group`` can be removed.
"""

import json
import os
import time
from collections.abc import Callable
from typing import Any, Protocol

from aifs.core.errors import Invalid, NoAttribute, NotPermitted
from aifs.core.units import format_size, parse_size
from aifs.files.types import ATIMES, SIZE_MAX, CallerLike
from aifs.layout.hint import (
    DEFAULT_POLICY,
    PUBLISHES,
    TIERS,
    format_layout_hint,
    parse_layout_hint,
    policy_of,
)
from aifs.layout.redundancy import PLAIN
from aifs.meta.publishing import Publication
from aifs.meta.records import Inode
from aifs.upkeep import scrub
from aifs.vfs import burst_hints, operation_log, reports, rights, server_hints
from aifs.vfs.groups import group_hints
from aifs.vfs.operation_log import OperationLog
from aifs.vfs.publishing import publish_hint
from aifs.vfs.publishing.retention import Retention
from aifs.vfs.refusals import Refusals

PREFIX = b"user.aifs."

DEFAULT_TIER = "default"
DEFAULT_PUBLISH = "burst"


class Host(reports.Host, burst_hints.Host, server_hints.Host, group_hints.Host, Protocol):
    """What the hints need of the filesystem."""

    retention: Retention
    refusals: Refusals
    operation_log: OperationLog
    atime: str

    async def publish(self, what: Publication, caller: CallerLike) -> None: ...

    async def remove_tree(
        self, parent: int, name: bytes, caller: CallerLike, locked: bool
    ) -> None: ...

    async def change_inode(
        self, ino: int, change: Callable[[Inode, Any], None], argument: Any
    ) -> Inode: ...


async def get(fs: Host, ino: int, name: bytes, caller: CallerLike) -> bytes:
    """Raises NoAttribute for a hint that does not exist or is not readable here, AccessDenied."""
    rights.of_hint(name).read(await fs.getattr(ino), caller)
    if name == b"user.aifs.info":
        return _json(await reports.describe(fs, ino))
    if name == b"user.aifs.state":
        return _json(await burst_hints.state(fs, ino))
    if name == b"user.aifs.refused" and (refused := fs.refusals.find(ino, caller)):
        return _json(refused)
    if name == b"user.aifs.drain":
        return _json(await burst_hints.progress(fs, ino))
    if name == b"user.aifs.status":
        return _json(await reports.status(fs, caller))
    if name == b"user.aifs.servers":
        return _json(await fs.server_admin.describe())
    if name == operation_log.ATTRIBUTE:
        return await operation_log.tell(fs.operation_log, fs.store.engine)
    if name.startswith(b"user.aifs.trace.") and name[16:].isdigit():
        return await operation_log.tell(fs.operation_log, fs.store.engine, int(name[16:]))
    if name == b"user.aifs.scrub":
        return _json(reports.without_paths(fs.scrub.status(), caller))
    if name == b"user.aifs.pending":
        return _json(await group_hints.tell_pending(fs, ino, caller))
    if name == b"user.aifs.group":
        return _json(await group_hints.tell(fs, ino, caller))
    if name.startswith(b"user.aifs.group.") and name[16:].isdigit():
        return _json(await group_hints.tell(fs, ino, caller, int(name[16:])))
    if name == b"user.aifs.keep" and (keep := await fs.retention.policy_of(ino)):
        return keep.encode()
    inode = await fs.getattr(ino)
    if inode.is_dir or inode.is_file:
        text = _policy_text(inode, name)
        if text:
            return text.encode()
    raise NoAttribute()


def _json(answer: dict[str, Any]) -> bytes:
    """Padded, since getfattr(1) asks twice, first for the length, and numbers may have grown
    meanwhile.
    """
    text = json.dumps(answer).encode()
    return text.ljust(-(-(len(text) + 8) // 64) * 64)


def _policy_text(inode: Inode, name: bytes) -> str:
    policy = inode.policy or DEFAULT_POLICY
    if name == b"user.aifs.tier":
        return policy.tier or DEFAULT_TIER
    if name == b"user.aifs.expected_size" and policy.expected:
        return format_size(policy.expected)
    if name == b"user.aifs.publish" and inode.is_dir:
        return policy.publish or DEFAULT_PUBLISH
    if name == b"user.aifs.layout":
        if inode.layout is not None:
            return format_layout_hint(policy_of(inode.layout))
        if policy._replace(tier="", expected=0, publish="") != DEFAULT_POLICY:
            return format_layout_hint(policy)
    return ""


async def put(fs: Host, ino: int, name: bytes, value: bytes, caller: CallerLike) -> None:
    """Raises Invalid for a wrong value, NotPermitted and AccessDenied for what ``caller`` cannot
    set, and what the function of the hint raises; ``user.aifs.refused`` then says why."""
    with fs.refusals.noted(ino, caller, name.decode("utf-8", "replace")):
        rights.of_hint(name).change(await fs.getattr(ino), caller)
        if name in server_hints.ORDERS:
            await server_hints.order(fs, name, value)
        elif name in _POLICIES:
            await _POLICIES[name](fs, ino, value.decode("utf-8", "replace").strip())
        elif name in _ORDERS:
            await _ORDERS[name](fs, ino, value, caller)
        elif name in _STATEMENTS:
            await _STATEMENTS[name](fs, ino, os.fsdecode(value).strip(), caller)
        elif name in _REQUESTS:
            if value:
                raise Invalid("it takes no value")
            await _REQUESTS[name](fs, ino, caller)


async def _back_up(fs: Host, ino: int, value: bytes, caller: CallerLike) -> None:
    token, _, directory = os.fsdecode(value).partition(":")
    fs.backup.request(
        token, directory
    )  # not waited for: the kernel locks the directory while it sets an attribute


async def _set_atime(fs: Host, ino: int, text: str, caller: CallerLike) -> None:
    if text not in ATIMES:
        raise Invalid(f"{text!r} is none of {', '.join(ATIMES)}")
    fs.atime = text


async def remove(fs: Host, ino: int, name: bytes, caller: CallerLike) -> None:
    """Raises NotPermitted for what cannot be removed, NoAttribute where it is not there."""
    with fs.refusals.noted(ino, caller, name.decode("utf-8", "replace")):
        rights.of_hint(name).change(await fs.getattr(ino), caller)
        await _remove(fs, ino, name, caller)


async def _remove(fs: Host, ino: int, name: bytes, caller: CallerLike) -> None:
    if name == b"user.aifs.pending":
        await fs.groups.abandon(ino, caller)
    elif name == b"user.aifs.group":
        await fs.groups.cancel(ino, caller=caller)
    elif name == b"user.aifs.keep":
        if not await fs.retention.policy_of(ino):
            raise NoAttribute()
        await fs.retention.set_policy(ino, "", caller)
    elif name in _POLICIES:
        if not _policy_text(await fs.getattr(ino), name):
            raise NoAttribute()
        await _POLICIES[name](fs, ino, _DEFAULTS[name])
    else:
        raise NotPermitted("this hint cannot be removed")


async def _set_layout(fs: Host, ino: int, text: str) -> None:
    policy = parse_layout_hint(text)
    known = [server.id for server in fs.store.servers.capacity()]
    unknown = set(policy.servers) - set(known)
    if unknown:
        raise Invalid(f"there is no server {min(unknown)}; the store has {known}")
    least, usable = policy.redundancy(PLAIN).least_servers, len(fs.store.servers.candidates())
    if least > usable:
        raise Invalid(
            f"layout: {least} data servers are needed; the store has {usable} for new files"
        )
    fields = policy._asdict()
    del fields["tier"], fields["expected"], fields["publish"]
    await fs.change_inode(ino, _change_policy_of_new, fields)


async def _set_tier(fs: Host, ino: int, text: str) -> None:
    tier = "" if text == DEFAULT_TIER else text
    if text != DEFAULT_TIER and text not in TIERS[1:]:
        raise Invalid(
            f"tier {text!r} is unknown; there are {', '.join(TIERS[1:])} and {DEFAULT_TIER}"
        )
    inode = await fs.change_inode(ino, _change_policy, {"tier": tier})
    if inode.copy is not None:
        fs.tier.pinned(inode.copy.id, tier == "pinned")


async def _set_publish(fs: Host, ino: int, text: str) -> None:
    if text not in (DEFAULT_PUBLISH, *PUBLISHES[1:]):
        raise Invalid(
            f"publish {text!r} is unknown; there are {DEFAULT_PUBLISH}, {', '.join(PUBLISHES[1:])}"
        )
    inode = await fs.getattr(ino)
    if not inode.is_dir:
        raise Invalid("it can be set on a directory")
    await fs.change_inode(ino, _change_policy, {"publish": "" if text == DEFAULT_PUBLISH else text})


async def _set_expected_size(fs: Host, ino: int, text: str) -> None:
    try:
        size = parse_size(text)
    except ValueError as error:
        raise Invalid(str(error)) from None
    if size > SIZE_MAX:
        raise Invalid(f"no file can have {text}; at most {format_size(SIZE_MAX)}")
    await fs.change_inode(ino, _change_policy_of_new, {"expected": size})


def _change_policy_of_new(inode: Inode, fields: dict[str, Any]) -> None:
    if inode.is_file and inode.size:
        raise Invalid("it can be set on a directory or an empty file")
    _change_policy(inode, fields)


def _change_policy(inode: Inode, fields: dict[str, Any]) -> None:
    if not inode.is_dir and not inode.is_file:
        raise Invalid("it can be set on a directory or a file")
    inode.require_unguarded()
    policy = (inode.policy or DEFAULT_POLICY)._replace(**fields)
    inode.policy = None if policy == DEFAULT_POLICY else policy
    inode.ctime_ns = time.time_ns()


async def _request_drain(fs: Host, ino: int, caller: CallerLike) -> None:
    await burst_hints.request_drain(fs, ino)


_POLICIES = {
    b"user.aifs.layout": _set_layout,
    b"user.aifs.tier": _set_tier,
    b"user.aifs.expected_size": _set_expected_size,
    b"user.aifs.publish": _set_publish,
}

_DEFAULTS = {
    b"user.aifs.layout": "count=0",
    b"user.aifs.tier": DEFAULT_TIER,
    b"user.aifs.expected_size": "0",
    b"user.aifs.publish": DEFAULT_PUBLISH,
}
"""What each of these is where nothing has been said."""

_ORDERS = {
    b"user.aifs.backup": _back_up,
    b"user.aifs.remove": lambda fs, ino, value, caller: fs.remove_tree(
        ino, value, caller, locked=True
    ),
}

_STATEMENTS = {
    b"user.aifs.atime": _set_atime,
    b"user.aifs.pending": group_hints.put_pending,
    b"user.aifs.commit": group_hints.put_pending_commit,
    b"user.aifs.group": group_hints.put,
    b"user.aifs.group.commit": group_hints.put_commit,
    b"user.aifs.publish-as": publish_hint.publish_as,
    b"user.aifs.scrub": scrub.order,
    b"user.aifs.keep": lambda fs, ino, text, caller: fs.retention.set_policy(ino, text, caller),
}

_REQUESTS = {
    b"user.aifs.drain": _request_drain,
    b"user.aifs.stage": burst_hints.stage,
    b"user.aifs.evict": burst_hints.evict,
}
