"""The rows of hints as text: the C header of the ioctl, and docs/reference/hints.md."""

import textwrap

from aifs.core.ioctl import HEAD, NUMBER, SIZES, TYPE, VERSION
from aifs.files import rights
from aifs.vfs.hints import described, rows

_HEADER = """\
/* The ioctl of AIFS. Made by scripts/reference from the rows of hints. */
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

_WORDS = {int: "integer", str: "string", bool: "boolean", list: "array", dict: "object"}


def _calls() -> list[tuple[str, str, str]]:
    """Name, fields and description of each call."""
    found = []
    for hint in rows():
        if hint.call is not None:
            takes = (f'"{field}": {_WORDS[kind]}' for field, kind in hint.call.takes.items())
            fields = f"{{{', '.join(takes)}}}, where: {hint.call.where}"
            found.append((hint.stem, fields, hint.call.help))
    return sorted(found)


def _wrapped(text: str, indent: str = "", behind: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        98 if indent else 100,
        initial_indent=indent,
        subsequent_indent=indent + behind,
        break_long_words=False,
        break_on_hyphens=False,
    )


def c_header() -> str:
    """aifs/fuse/aifs_ioctl.h."""
    small, large = (size - HEAD.size for size in SIZES)
    sizes = {"version": VERSION, "small": small, "large": large, "type": TYPE, "number": NUMBER}
    lines = []
    for name, fields, help in _calls():
        lines += [" *", *_wrapped(f"{name} {fields}", " * ", "  "), *_wrapped(help, " *   ", "  ")]
    return _HEADER % sizes + "\n".join(lines) + "\n */\n\n#endif\n"


def reference() -> str:
    """docs/reference/hints.md."""
    lines = [
        "# Hints",
        "",
        "Made by `scripts/reference` from the rows of the code. A hint is an extended attribute",
        "`user.aifs.NAME` (getfattr(1), setfattr(1)), a call of the ioctl (`aifs_ioctl.h`), or",
        "both. The columns get, set and call say which callers may; empty: nobody can.",
        "",
        "| hint | where | get | set | call | meaning |",
        "|---|---|---|---|---|---|",
    ]
    rules = set()
    for hint in sorted(rows(), key=lambda hint: hint.name):
        told = described(hint)
        cells = (told[key] for key in ("where", "get", "set", "call", "help"))
        lines.append(f"| `{hint.name}` | {' | '.join(cells)} |")
        rules |= {told["get"], told["set"], told["call"]} - {""}
    lines += ["", "| callers | |", "|---|---|"]
    for rule in sorted(rules):
        lines.append(f"| {rule} | {' '.join(getattr(rights, rule).__doc__.split())} |")
    lines += ["", "## Calls", "", "The argument is a JSON object with these fields, or nothing."]
    for name, fields, help in _calls():
        lines += ["", *_wrapped(f"`{name}` {fields}. {help}")]
    return "\n".join(lines) + "\n"
