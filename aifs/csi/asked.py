"""Capabilities, capacities and pages of lists, as requests ask for them."""

from collections.abc import Iterable, Sequence
from typing import Any

from grpc import StatusCode

from aifs.core.binds import OPTIONS
from aifs.csi import csi_pb2
from aifs.csi.calls import CallRefused

_MODE = csi_pb2.VolumeCapability.AccessMode
READ_ONLY = (_MODE.SINGLE_NODE_READER_ONLY, _MODE.MULTI_NODE_READER_ONLY)
SINGLE_WRITER = _MODE.SINGLE_NODE_SINGLE_WRITER
_TYPES = ("", "aifs", "fuse.aifs")
_OF_KUBERNETES = "csi.storage.k8s.io/"
"""The beginning of keys that Kubernetes adds to parameters and contexts."""
_MARK = "after:"
"""The beginning of the token of a next page; the last entry of the page before follows."""


def obstacle(capability: Any) -> str:
    """Why a volume cannot be used so; '' if it can."""
    if capability.WhichOneof("access_type") != "mount":
        return "a volume is a directory, which is mounted; it is no block device"
    if capability.access_mode.mode not in _MODE.Mode.values()[1:]:
        return "the access mode is missing, or not known"
    if capability.mount.fs_type not in _TYPES:
        return f"the type of filesystem is aifs, not {capability.mount.fs_type}"
    unknown = [flag for flag in capability.mount.mount_flags if flag not in OPTIONS]
    if unknown:
        return f"the mount option {unknown[0]} is not known; there are: {' '.join(OPTIONS)}"
    return ""


def require_usable(*capabilities: Any) -> None:
    """Raises CallRefused (INVALID_ARGUMENT)."""
    for capability in capabilities:
        if reason := obstacle(capability):
            raise CallRefused(StatusCode.INVALID_ARGUMENT, reason)


def own(words: Any) -> dict[str, str]:
    """The parameters, or the context, without what Kubernetes adds."""
    return {key: words[key] for key in words if not key.startswith(_OF_KUBERNETES)}


def capacity(range_: Any) -> int:
    """Bytes of a volume with this range; 0: no limit. Raises CallRefused (INVALID_ARGUMENT,
    OUT_OF_RANGE)."""
    least, most = range_.required_bytes, range_.limit_bytes
    if least < 0 or most < 0:
        raise CallRefused(StatusCode.INVALID_ARGUMENT, "a capacity is negative")
    if most and least > most:
        raise CallRefused(
            StatusCode.OUT_OF_RANGE, f"{least} bytes are more than the limit of {most}"
        )
    return least or most


def is_within(size: int, range_: Any) -> bool:
    """Whether a volume of ``size`` (0: no limit) is in the range."""
    if not size:
        return not range_.limit_bytes
    return size >= range_.required_bytes and (not range_.limit_bytes or size <= range_.limit_bytes)


def page(names: Iterable[str], request: Any) -> tuple[Sequence[str], str]:
    """The names that come next, sorted, and the token of the page behind; '': there is none.
    Raises CallRefused: INVALID_ARGUMENT, or ABORTED for a token that is none (begin anew)."""
    if request.max_entries < 0:
        raise CallRefused(StatusCode.INVALID_ARGUMENT, "max_entries is negative")
    token = request.starting_token
    if token and not token.startswith(_MARK):
        raise CallRefused(StatusCode.ABORTED, f"{token} is the token of no page")
    after = token.removeprefix(_MARK)
    left = sorted(name for name in names if name > after)
    found = left[: request.max_entries or None]
    return found, f"{_MARK}{found[-1]}" if len(found) < len(left) else ""
