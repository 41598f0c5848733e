"""Groups as text: ``name=step,ranks=8,dedup=4MiB``, and pending directories, whose
``ranks=8,step=100`` is short for ``ranks=8,commit=explicit,dedup=no,pending=yes,step=100``. Pure.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from aifs.core.errors import Invalid
from aifs.core.texts import parse_pairs
from aifs.core.units import format_duration, format_size, parse_duration, parse_size
from aifs.layout.interleaved import CHUNK_MAX
from aifs.meta.groups import RANKS_MAX, GroupOptions

CHUNK_MIN = 64 << 10
NAME_MAX, PUBLISH_MAX, JOB_MAX = 63, 255, 63
PENDING_JOB_MAX = 255
_STEP_MAX = 1 << 62
_PAGE = 4096
_TIMEOUT_MS, _TIMEOUT_MAX_MS = 600_000, 1 << 40
_COMMITS = ("close", "explicit")
WHOLE_FILE = "file"
"""Of ``dedup``: as much at a time as can be, which is CHUNK_MAX."""
NOTHING = "no"
"""Of ``dedup``: files are left to the usual drain."""


class Wanted(NamedTuple):
    """What somebody asks of a directory."""

    options: GroupOptions
    mark: tuple[int | None, bytes] | None = None
    """If it is to be pending: step and job."""
    anew: bool = False
    """What an earlier attempt has left does not count."""


def parse_group(text: str) -> Wanted:
    """The group that ``text`` asks for: ``name=step,ranks=8[,dedup=4MiB|file|no]
    [,commit=close|explicit][,timeout=10min][,grace=0s][,publish=NAME][,same_size=yes|no][,job=ID]
    [,pending=yes|no][,step=N][,anew=yes|no]``. Raises Invalid."""
    return wanted(dict(parse_pairs("group", text, _PARSERS, "name=step,ranks=8")))


def wanted(words: Mapping[str, Any]) -> Wanted:
    """The group that the words of ``parse_group`` and their values ask for. Raises Invalid."""
    values = {key: _PARSERS[key](key, str(value)) for key, value in words.items()}
    is_pending, chunk = values.get("pending") == "yes", values.get("dedup", CHUNK_MAX)
    needed = ("ranks",) if chunk == 0 else ("name", "ranks")
    lacking = [key for key in needed if key not in values]
    if lacking:
        raise Invalid(f"group: {' and '.join(lacking)} must be given, as in 'name=step,ranks=8'")
    if not is_pending and (chunk == 0 or "step" in values or "anew" in values):
        raise Invalid("group: dedup=no, step and anew are for directories that are pending=yes")
    if is_pending and values.get("commit") != "explicit":
        raise Invalid("group: the ranks of a pending directory commit, so say commit=explicit")
    mark = (values.get("step"), values.get("job", b"")) if is_pending else None
    anew = values.get("anew") == "yes"
    if chunk == 0:
        more = [
            key for key in ("name", "timeout", "grace", "publish", "same_size") if key in values
        ]
        if more:
            raise Invalid(f"group: {', '.join(more)} needs more than dedup=no")
        return Wanted(_bare(values), mark, anew)
    options = GroupOptions(
        values["name"],
        values["ranks"],
        min(chunk, CHUNK_MAX),
        values.get("commit") == "explicit",
        values.get("timeout") or _TIMEOUT_MS,
        values.get("grace", 0),
        values.get("publish", b""),
        values.get("same_size") == "yes",
        values.get("job", b""),
    )
    _check(options)
    return Wanted(options, mark, anew)


def parse_pending(text: str) -> Wanted:
    """``ranks=8[,step=100][,job=NAME][,anew=yes|no]``. Raises Invalid."""
    values: dict[str, Any] = {}
    for key, value in parse_pairs("pending", text, _PENDING, "ranks=8,step=100"):
        values[key] = _PENDING[key](key, value)
    if "ranks" not in values:
        raise Invalid("pending: ranks must be given, as in 'ranks=8,step=100'")
    mark = values.get("step"), values.get("job", b"")
    return Wanted(_bare(values), mark, values.get("anew") == "yes")


def _bare(values: Mapping[str, Any]) -> GroupOptions:
    """For a group that only keeps its directory pending."""
    _require_ranks(values["ranks"])
    if len(values.get("job", b"")) > PENDING_JOB_MAX:
        raise Invalid(f"pending: a job's name has up to {PENDING_JOB_MAX} bytes")
    return GroupOptions(b"", values["ranks"], 0, True, 0, 0, b"")


def _require_ranks(ranks: int) -> None:
    if not 0 < ranks <= RANKS_MAX:
        raise Invalid(f"group: there are 1 to {RANKS_MAX} ranks, not {ranks}")


def _check(options: GroupOptions) -> None:
    """Raises Invalid. Larger chunks mean CHUNK_MAX: a digest costs the same a byte, and smaller
    ones find more equal bytes."""
    name, job, publish, chunk = options.name, options.job, options.publish, options.chunk
    longest_ms = max(options.timeout_ms, options.grace_ms)
    for what, text, least, most in (("name", name, 1, NAME_MAX), ("job", job, 0, JOB_MAX)):
        if (
            not least <= len(text) <= most
            or b"," in text
            or not text.isascii()
            or not text.decode().isprintable()
        ):
            raise Invalid(
                f"group: a {what} has {least} to {most} printable ASCII characters, and no comma"
            )
    _require_ranks(options.ranks)
    if chunk < CHUNK_MIN or chunk % _PAGE:
        raise Invalid(
            f"group: dedup={format_size(chunk)} is no multiple of {_PAGE} bytes from "
            f"{format_size(CHUNK_MIN)} on"
        )
    if longest_ms > _TIMEOUT_MAX_MS:
        raise Invalid(f"group: no time is longer than {format_duration(_TIMEOUT_MAX_MS / 1000)}")
    if (
        len(publish) > PUBLISH_MAX
        or b"\0" in publish
        or b"/" in publish
        or publish in (b".", b"..")
    ):
        raise Invalid(
            f"group: publish is a name beside the directory, of up to {PUBLISH_MAX} bytes"
        )


def format_group(options: GroupOptions) -> str:
    """The text that ``parse_group`` reads back as ``options``, if its files are stored together."""
    text = (
        f"name={os.fsdecode(options.name)},ranks={options.ranks},dedup={format_size(options.chunk)},"
        f"commit={_COMMITS[options.explicit]},timeout={format_duration(options.timeout_ms / 1000)},"
        f"grace={format_duration(options.grace_ms / 1000)}"
    )
    text += f",publish={os.fsdecode(options.publish)}" if options.publish else ""
    text += ",same_size=yes" if options.same_size else ""
    return text + (f",job={os.fsdecode(options.job)}" if options.job else "")


def _parse_name(key: str, text: str) -> bytes:
    return os.fsencode(text)


def _parse_number(key: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= _STEP_MAX):
        raise Invalid(f"group: {key}={text} is not a whole number up to {_STEP_MAX}")
    return int(text)


def _parse_chunk(key: str, text: str) -> int:
    if text == WHOLE_FILE:
        return CHUNK_MAX
    if text == NOTHING:
        return 0
    try:
        return max(parse_size(text), 1)
    except ValueError as error:
        raise Invalid(f"group: dedup: {error}") from None


def _parse_time(key: str, text: str) -> int:
    try:
        return round(parse_duration(text) * 1000)
    except ValueError as error:
        raise Invalid(f"group: {key}: {error}") from None


def _choice(*choices: str) -> Callable[[str, str], str]:
    def parse(key: str, text: str) -> str:
        if text not in choices:
            raise Invalid(f"group: {key}={text} is none of {', '.join(choices)}")
        return text

    return parse


_PARSERS: dict[str, Callable[[str, str], Any]] = {
    "name": _parse_name,
    "ranks": _parse_number,
    "dedup": _parse_chunk,
    "commit": _choice(*_COMMITS),
    "timeout": _parse_time,
    "grace": _parse_time,
    "publish": _parse_name,
    "same_size": _choice("yes", "no"),
    "job": _parse_name,
    "pending": _choice("yes", "no"),
    "step": _parse_number,
    "anew": _choice("yes", "no"),
}

TAKES = dict.fromkeys(_PARSERS, str) | {"ranks": int, "step": int}
"""The words as fields of a call."""

_PENDING = {key: _PARSERS[key] for key in ("ranks", "step", "job", "anew")}
