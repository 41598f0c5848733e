"""Policies of files and directories, as hints: layout, tier, expected size, publishing by rename.
They are in the inode, inherited by new files."""

from collections.abc import Awaitable, Callable
from typing import Any

from aifs.burst.tier import BurstTier
from aifs.core import clock
from aifs.core.errors import Invalid
from aifs.core.units import format_size, parse_size
from aifs.data.servers import Servers
from aifs.files import rights
from aifs.files.asks import BOTH, Hint
from aifs.files.types import SIZE_MAX
from aifs.layout.hint import (
    DEFAULT_POLICY,
    MIRRORS_MAX,
    PUBLISHES,
    TIERS,
    format_layout_hint,
    parse_layout_hint,
    policy_of,
)
from aifs.layout.redundancy import PLAIN
from aifs.meta.records import Inode
from aifs.vfs.attributes import Attributes

DEFAULT_TIER = "default"
DEFAULT_PUBLISH = "burst"


def _policy(name: str, help: str, default: str, put: Callable[..., Awaitable[None]]) -> Hint:
    """``default``: the value where nothing has been set."""
    return Hint(
        name,
        BOTH,
        help,
        rights.reader,
        rights.owner,
        get=lambda policies, ask: policies.get(ask.ino, name),
        set=lambda policies, ask: put(policies, ask.ino, ask.text),
        remove=default,
    )


class PolicyHints:
    """Layout, tier, expected size, publish and mirror."""

    def __init__(self, servers: Servers, tier: BurstTier, attributes: Attributes) -> None:
        self._servers = servers
        self._tier = tier
        self._attributes = attributes

    async def get(self, ino: int, name: str) -> str:
        """'' where nothing has been set, or the inode has no such policy."""
        return _text(await self._attributes.getattr(ino), name)

    async def _set_layout(self, ino: int, text: str) -> None:
        policy = parse_layout_hint(text)
        known = [server.id for server in self._servers.capacity()]
        unknown = set(policy.servers) - set(known)
        if unknown:
            raise Invalid(f"there is no server {min(unknown)}; the store has {known}")
        least, usable = policy.redundancy(PLAIN).least_servers, len(self._servers.candidates())
        if least > usable:
            raise Invalid(
                f"layout: {least} data servers are needed; the store has {usable} for new files"
            )
        fields = policy._asdict()
        del fields["tier"], fields["expected"], fields["publish"], fields["mirror"]
        await self._attributes.change(ino, _change_policy_of_new, fields)

    async def _set_tier(self, ino: int, text: str) -> None:
        tier = "" if text == DEFAULT_TIER else text
        if text != DEFAULT_TIER and text not in TIERS[1:]:
            raise Invalid(
                f"tier {text!r} is unknown; there are {', '.join(TIERS[1:])} and {DEFAULT_TIER}"
            )
        inode = await self._attributes.change(ino, _change_policy, {"tier": tier})
        if inode.copy is not None:
            self._tier.pinned(inode.copy.id, tier == "pinned")

    async def _set_publish(self, ino: int, text: str) -> None:
        if text not in (DEFAULT_PUBLISH, *PUBLISHES[1:]):
            known = ", ".join((DEFAULT_PUBLISH, *PUBLISHES[1:]))
            raise Invalid(f"publish {text!r} is unknown; there are {known}")
        inode = await self._attributes.getattr(ino)
        if not inode.is_dir:
            raise Invalid("it can be set on a directory")
        await self._attributes.change(
            ino, _change_policy, {"publish": "" if text == DEFAULT_PUBLISH else text}
        )

    async def _set_mirror(self, ino: int, text: str) -> None:
        known = [str(count) for count in range(MIRRORS_MAX + 1)]
        if text not in known:
            raise Invalid(f"mirror {text!r} is unknown; there are {' and '.join(known)}")
        await self._attributes.change(ino, _change_policy, {"mirror": int(text)})

    async def _set_expected_size(self, ino: int, text: str) -> None:
        try:
            size = parse_size(text)
        except ValueError as error:
            raise Invalid(str(error)) from None
        if size > SIZE_MAX:
            raise Invalid(f"no file can have {text}; at most {format_size(SIZE_MAX)}")
        await self._attributes.change(ino, _change_policy_of_new, {"expected": size})

    HINTS = (
        _policy(
            "layout",
            "how new bytes lie: kind=, unit=, count=, servers=, replicas=, ec=, compress=",
            "count=0",
            _set_layout,
        ),
        _policy(
            "tier",
            "where new bytes go: burst, capacity, pinned, or default (burst, evicted at need)",
            DEFAULT_TIER,
            _set_tier,
        ),
        _policy(
            "expected_size",
            "how large new files become: room is kept in the burst tier",
            "0",
            _set_expected_size,
        ),
        _policy(
            "publish",
            "where bytes must be before a rename shows them: burst, capacity",
            DEFAULT_PUBLISH,
            _set_publish,
        ),
        _policy(
            "mirror",
            "1: another host keeps a copy of what is fsynced, until it is drained",
            "0",
            _set_mirror,
        ),
    )


def _text(inode: Inode, name: str) -> str:
    if not inode.is_dir and not inode.is_file:
        return ""
    policy = inode.policy or DEFAULT_POLICY
    if name == "tier":
        return policy.tier or DEFAULT_TIER
    if name == "expected_size" and policy.expected:
        return format_size(policy.expected)
    if name == "mirror":
        return str(policy.mirror)
    if name == "publish" and inode.is_dir:
        return policy.publish or DEFAULT_PUBLISH
    if name == "layout":
        if inode.layout is not None and inode.layout.pin is None:
            return format_layout_hint(policy_of(inode.layout))
        if policy._replace(tier="", expected=0, publish="", mirror=0) != DEFAULT_POLICY:
            return format_layout_hint(policy)
    return ""


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
    inode.ctime_ns = clock.kernel_ns()
