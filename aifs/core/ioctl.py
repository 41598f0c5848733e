"""The ioctl of AIFS, for the daemon, the client and C programs: a call by name, with JSON.

The argument is a header (version, length of the JSON, name) and a JSON object, or nothing; on
return it holds the answer, which is a JSON object, in the same form. The number of the ioctl says
which of two sizes the argument has. The calls are rows (files/asks.py); the C header
(fuse/aifs_ioctl.h) is made from them. Integers are in the byte order of the machine.
"""

import errno
import fcntl
import json
import struct
import textwrap
from collections.abc import Iterable
from typing import Any, NamedTuple

from aifs.core.errors import Invalid
from aifs.core.refusals import explained

TYPE = 0xAF
"""The type byte of the ioctl (``_IOC_TYPE``); the bridge answers each other type with ENOTTY."""

VERSION = 3
"""Of the argument and of the calls; it goes up if one of them changes, not if one is added."""

_NUMBER = 16
HEAD = struct.Struct("=II56s")
SIZES = 1024, 16320
"""Bytes of an argument; 14 bits of the number say which."""

GROUP_STATES = ("open", "committed", "draining", "durable", "failed", "cancelled", "expired")
"""Of a group."""


def _request(size: int) -> int:
    """As _IOWR of <linux/ioctl.h>."""
    return 3 << 30 | size << 16 | TYPE << 8 | _NUMBER


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
    """Call the hint *name* on an open file or directory, *path*. Raises OSError: ENOTTY where there
    is no such call, EINTR, and the errors of the call, with the reason.
    """
    text = json.dumps(fields).encode()
    request = next((it for it in REQUESTS if len(text) <= REQUESTS[it] - HEAD.size), None)
    if request is None:
        raise OSError(errno.E2BIG, f"{name}: {len(text)} bytes of JSON are too many", path)
    argument = bytearray(pack(name, text).ljust(REQUESTS[request], b"\0"))
    with explained(fd, f"user.aifs.{name}", path):
        fcntl.ioctl(fd, request, argument)
    return json.loads(unpack(argument).text)


class Described(NamedTuple):
    """A call for C programmers."""

    name: str
    where: str
    fields: dict[str, type]
    help: str

    @property
    def signature(self) -> str:
        """The fields of the argument."""
        takes = (f'"{field}": {_WORDS[kind]}' for field, kind in self.fields.items())
        return f"{{{', '.join(takes)}}}"


_WORDS = {int: "integer", str: "string", bool: "boolean", list: "array", dict: "object"}

_HEADER = """\
/* The ioctl of AIFS. Made by scripts/reference from aifs/core/ioctl.py and the rows of hints. */
#ifndef AIFS_IOCTL_H
#define AIFS_IOCTL_H

#include <errno.h>
#include <linux/ioctl.h>
#include <linux/types.h>
#include <string.h>
#include <sys/ioctl.h>

#define AIFS_CALL_VERSION %(version)d

/* A call by its name, with a JSON object of that length (0: no fields), then with the answer. */
struct aifs_call {
	__u32 version; /* AIFS_CALL_VERSION */
	__u32 length;
	char name[56];
	char json[%(small)d];
};
struct aifs_large_call {
	__u32 version;
	__u32 length;
	char name[56];
	char json[%(large)d];
};
#define AIFS_IOC_CALL _IOWR(%(type)#x, %(number)d, struct aifs_call)
#define AIFS_IOC_LARGE_CALL _IOWR(%(type)#x, %(number)d, struct aifs_large_call)

/*
 * Make the call on an open file or directory. 0, and the answer in call->json, which ends with a
 * zero byte; or -1 and errno: ENOTTY: there is no such call; EINVAL: wrong fields, or another
 * version; E2BIG. Then the attribute user.aifs.refused of the file or directory says why.
 */
static inline int aifs_do_call(int fd, struct aifs_call *call, const char *name, const char *json)
{
	size_t length = strlen(json);
	if (length >= sizeof call->json || strlen(name) >= sizeof call->name) {
		errno = E2BIG;
		return -1;
	}
	memset(call, 0, sizeof *call);
	call->version = AIFS_CALL_VERSION;
	call->length = (__u32)length;
	memcpy(call->name, name, strlen(name));
	memcpy(call->json, json, length);
	if (ioctl(fd, AIFS_IOC_CALL, call) < 0)
		return -1;
	call->json[call->length < sizeof call->json ? call->length : sizeof call->json - 1] = 0;
	return 0;
}

/*
 * The calls. Names and paths are strings; bytes that are not UTF-8 are \\udc80 to \\udcff.
"""


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text,
        98,
        initial_indent=f" * {indent}",
        subsequent_indent=f" *   {indent}",
        break_long_words=False,
        break_on_hyphens=False,
    )


def c_header(calls: Iterable[Described]) -> str:
    """aifs/fuse/aifs_ioctl.h."""
    small, large = (size - HEAD.size for size in SIZES)
    text = _HEADER % {
        "version": VERSION,
        "small": small,
        "large": large,
        "type": TYPE,
        "number": _NUMBER,
    }
    for one in calls:
        head = f"{one.name} {one.signature}, where: {one.where}"
        text += "".join(
            f"{line}\n" for line in (" *", *_wrapped(head, ""), *_wrapped(one.help, "  "))
        )
    return f"{text} */\n\n#endif\n"
