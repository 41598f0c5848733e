"""The ioctl of AIFS, for daemon, client and C programs: a call by name, with JSON.

The argument is a header (version, length of the JSON, name) and a JSON object, or nothing; the
answer has the same form. The ioctl's number gives one of two sizes. Calls are rows (files/asks.py),
from which scripts/reference makes fuse/aifs_ioctl.h. Integers have the machine's byte order.
"""

import errno
import fcntl
import json
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from aifs.core.errors import Invalid

TYPE = 0xAF
"""The type byte of the ioctl (``_IOC_TYPE``); the bridge answers each other type with ENOTTY."""

VERSION = 3
"""Of the argument and of the calls; it goes up if one of them changes, not if one is added."""

NUMBER = 16
HEAD = struct.Struct("=II56s")
SIZES = 1024, 16320
"""Bytes of an argument; 14 bits of the number say which."""

GROUP_STATES = ("open", "committed", "draining", "durable", "failed", "cancelled", "expired")
"""Of a group."""


def _request(size: int) -> int:
    """As _IOWR of <linux/ioctl.h>."""
    return 3 << 30 | size << 16 | TYPE << 8 | NUMBER


REQUESTS = {_request(size): size for size in SIZES}
"""The numbers that ioctl(2) takes, and the sizes."""


class Argument(NamedTuple):
    version: int
    name: str
    text: bytes
    """JSON; b"": no fields."""


def pack(name: str, text: bytes) -> bytes:
    """The used part of an argument."""
    return HEAD.pack(VERSION, len(text), name.encode()) + text


def unpack(data: bytes | bytearray) -> Argument:
    """Raises Invalid for lengths and names that cannot be."""
    if len(data) < HEAD.size:
        raise Invalid("the argument is too short")
    version, length, name = HEAD.unpack_from(data)
    if length > len(data) - HEAD.size:
        raise Invalid(f"the argument has no room for {length} bytes of JSON")
    name, end, _ = name.partition(b"\0")
    if not end or not name.isascii():
        raise Invalid("the name does not end in a zero byte, or is not ASCII")
    return Argument(version, name.decode(), bytes(data[HEAD.size : HEAD.size + length]))


def call(fd: int, name: str, path: str = "", /, **fields: Any) -> dict[str, Any]:
    """Call the hint *name* on an open file or directory, *path*. Raises OSError: ENOTTY for no such
    call, EINTR, and errors of the call, with the reason."""
    text = json.dumps(fields).encode()
    request = next((it for it in REQUESTS if len(text) <= REQUESTS[it] - HEAD.size), None)
    if request is None:
        raise OSError(errno.E2BIG, f"{name}: {len(text)} bytes of JSON are too many", path)
    argument = bytearray(pack(name, text).ljust(REQUESTS[request], b"\0"))
    with explained(fd, f"user.aifs.{name}", path):
        fcntl.ioctl(fd, request, argument)
    return json.loads(unpack(argument).text)


def call_at(directory: str, name: str, path: str = "", /, **fields: Any) -> dict[str, Any]:
    """``call`` on a directory, which is opened for it. Errors name ``path``, or else that."""
    fd = os.open(directory or ".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        return call(fd, name, path or directory, **fields)
    finally:
        os.close(fd)


REFUSED = "user.aifs.refused"
"""Each user's last refusal on an inode (files/refusals.py): JSON with ``request`` (the hint's name,
or "rename"), ``errno``, ``reason``, ``at_s`` (since the epoch)."""


@contextmanager
def explained(where: str | int, request: str, path: str | None = None) -> Iterator[None]:
    """Add the mount's reason to an OSError inside, if it refused ``request`` on ``where`` (a path,
    or a descriptor of ``path``)."""
    since_s = time.time()
    try:
        yield
    except OSError as error:
        reason = _reason(where, request, error, since_s)
        if not reason:
            raise
        name = path if isinstance(where, int) else where
        raise OSError(error.errno, reason, name) from None


def _reason(where: str | int, request: str, error: OSError, since_s: float) -> str:
    try:
        told = json.loads(os.getxattr(where, REFUSED))
        is_it = (told["request"], told["errno"]) == (request, error.errno)
        return told["reason"] if is_it and told["at_s"] >= since_s else ""
    except (OSError, ValueError, KeyError, TypeError):  # it is no mount of ours, or it says nothing
        return ""
