"""Virtual extended attributes ``user.aifs.*``: how programs talk to the filesystem through plain files.

    user.aifs.layout         directory, or empty file: get and set what new files (this file) will be laid out by
    user.aifs.tier           directory or file: get and set burst, capacity, pinned or default
    user.aifs.expected_size  directory, or empty file: get and set how large new files (this file) will become
    user.aifs.state          directory or file: JSON, where the bytes are (burst_hints.state)
    user.aifs.drain          directory or file: JSON, what is undrained; set (empty): drain that before all else
    user.aifs.stage          file, set (empty), owner or root: bring it into the burst tier
    user.aifs.evict          file, set (empty), owner or root: give up its copy in the burst tier
    user.aifs.info           any: JSON, the inode and where its parts lie
    user.aifs.status         root: JSON, the state of the mount
    user.aifs.server-add     root, write only, root user: path of a directory to add as a data server
    user.aifs.burst-add      the same, as a burst directory

They are not listed, so that copying tools leave them alone. Policies (the first three) are stored in the inode, and
what is made in a directory inherits its.
"""

import json
import os
import time
from collections.abc import Callable
from typing import Any, Protocol

from aifs.core.errors import Busy, Invalid, NoAttribute, NotPermitted, StoreError
from aifs.core.log import logger
from aifs.core.units import format_size, parse_size
from aifs.layout.hint import DEFAULT_POLICY, TIERS, Policy, format_layout_hint, parse_layout_hint
from aifs.layout.striped import Striped
from aifs.meta import keys
from aifs.meta.records import Inode
from aifs.vfs import burst_hints, reports
from aifs.vfs.store import register_server
from aifs.vfs.types import SIZE_MAX, CallerLike

PREFIX = b"user.aifs."

DEFAULT_TIER = "default"

_log = logger(__name__)


class Host(reports.Host, burst_hints.Host, Protocol):
    """What the hints need of the filesystem."""

    async def change_inode(self, ino: int, change: Callable[[Inode, Any], None], argument: Any) -> Inode: ...


async def get(fs: Host, ino: int, name: bytes) -> bytes:
    """Raises NoAttribute for a hint that does not exist or is not readable here."""
    if name == b"user.aifs.info":
        return _json(await reports.describe(fs, ino))
    if name == b"user.aifs.state":
        return _json(await burst_hints.state(fs, ino))
    if name == b"user.aifs.drain":
        return _json(await burst_hints.progress(fs, ino))
    if name == b"user.aifs.status" and ino == keys.ROOT_INO:
        return _json(await reports.status(fs))
    inode = await fs.getattr(ino)
    if inode.is_dir or inode.is_file:
        text = _policy_text(inode, name)
        if text:
            return text.encode()
    raise NoAttribute()


def _json(answer: dict[str, Any]) -> bytes:
    """Padded, since getfattr(1) asks twice, first for the length, and numbers may have grown meanwhile."""
    text = json.dumps(answer).encode()
    return text.ljust(-(-(len(text) + 8) // 64) * 64)


def _policy_text(inode: Inode, name: bytes) -> str:
    policy = inode.policy or DEFAULT_POLICY
    if name == b"user.aifs.tier":
        return policy.tier or DEFAULT_TIER
    if name == b"user.aifs.expected_size" and policy.expected:
        return format_size(policy.expected)
    if name == b"user.aifs.layout":
        layout = inode.layout
        if isinstance(layout, Striped):
            return format_layout_hint(Policy(layout.unit, len(layout.servers), layout.servers))
        if layout is not None:
            return format_layout_hint(Policy(kind="interleaved"))
        if policy._replace(tier="", expected=0) != DEFAULT_POLICY:
            return format_layout_hint(policy)
    return ""


async def put(fs: Host, ino: int, name: bytes, value: bytes, caller: CallerLike) -> None:
    """Raises Invalid for a wrong value (the log says what is wrong), NotPermitted for what ``caller`` cannot set, and
    what the function of the hint raises."""
    try:
        if name in _ROLES and ino == keys.ROOT_INO and caller.uid == 0:
            await _add_server(fs, value, _ROLES[name])
        elif name in _POLICIES:
            await _POLICIES[name](fs, ino, value.decode("utf-8", "replace").strip())
        elif name in _REQUESTS:
            if value:
                raise Invalid("it takes no value")
            await _REQUESTS[name](fs, ino, caller)
        else:
            raise NotPermitted("this hint cannot be set")
    except (Invalid, Busy) as error:
        _log.info("%s=%r for inode %d is refused: %s", name.decode("utf-8", "replace"), value, ino, error)
        raise


async def _set_layout(fs: Host, ino: int, text: str) -> None:
    policy = parse_layout_hint(text)
    known = [server.id for server in fs.store.servers.capacity()]
    unknown = set(policy.servers) - set(known)
    if unknown:
        raise Invalid(f"there is no server {min(unknown)}; the store has {known}")
    fields = policy._asdict()
    del fields["tier"], fields["expected"]
    await fs.change_inode(ino, _change_policy_of_new, fields)


async def _set_tier(fs: Host, ino: int, text: str) -> None:
    tier = "" if text == DEFAULT_TIER else text
    if text != DEFAULT_TIER and text not in TIERS[1:]:
        raise Invalid(f"tier {text!r} is unknown; there are {', '.join(TIERS[1:])} and {DEFAULT_TIER}")
    inode = await fs.change_inode(ino, _change_policy, {"tier": tier})
    if inode.copy is not None:
        fs.tier.pinned(inode.copy.id, tier == "pinned")


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
    policy = (inode.policy or DEFAULT_POLICY)._replace(**fields)
    inode.policy = None if policy == DEFAULT_POLICY else policy
    inode.ctime_ns = time.time_ns()


async def _request_drain(fs: Host, ino: int, caller: CallerLike) -> None:
    await burst_hints.request_drain(fs, ino)


async def _add_server(fs: Host, value: bytes, role: str) -> None:
    path = os.fsdecode(value)
    try:
        await register_server(fs.store, path, role)
    except StoreError as error:
        raise Invalid(str(error)) from error
    _log.info("%s directory added: %s", role, path)


_ROLES = {b"user.aifs.server-add": "data", b"user.aifs.burst-add": "burst"}

_POLICIES = {
    b"user.aifs.layout": _set_layout,
    b"user.aifs.tier": _set_tier,
    b"user.aifs.expected_size": _set_expected_size,
}

_REQUESTS = {
    b"user.aifs.drain": _request_drain,
    b"user.aifs.stage": burst_hints.stage,
    b"user.aifs.evict": burst_hints.evict,
}
