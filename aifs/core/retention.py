"""Which checkpoints of a directory are kept, as ``user.aifs.keep`` says it. Pure; the daemon and
the client share it.

    last=3       the newest 3
    every=1000   those whose step is a multiple of 1000
    age=7d       those that are younger
    bytes=2TiB   a bound for all together: the oldest go first, whatever else would keep them

A checkpoint is kept if one of the first three keeps it, or none of them is given. Never removed:
the newest complete one, one that is in use, one that is not complete.

The order is that of publishing. The checkpoints whose names differ in their step alone are a *run*:
their steps have to ascend in that order, too. If they do not, somebody has copied them, gone back
in the run, or set a clock, and nothing is removed.
"""

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from aifs.core.units import format_duration, format_size, parse_duration, parse_size

_STEP = re.compile(rb"(?:.*[^0-9])?([0-9]{1,18})", re.DOTALL)
_NUMBER_MAX = 1 << 62


class Keep(NamedTuple):
    """Which checkpoints to keep. 0: this does not keep anything, or (bytes) does not bound it."""

    last: int = 0
    every: int = 0
    age_s: float = 0.0
    bytes: int = 0


class ListedCheckpoint(NamedTuple):
    """The facts by which a policy judges a checkpoint."""

    name: bytes
    """Of its directory, in the one that the policy is for."""
    step: int | None
    """None if it is not known."""
    time_ns: int
    """Of its publish, since the epoch."""
    bytes: int
    """Of its files together."""
    complete: bool = True
    """It was shown as a whole, and is neither empty nor damaged."""
    in_use: bool = False
    """Files of it are open, a pointer such as ``latest`` leads to it, or the owner may not remove
    it."""


def parse_keep(text: str) -> Keep:
    """``key=value`` joined by commas, as above. Raises ValueError, which says what is wrong."""
    values: dict[str, Any] = {}
    for item in text.split(","):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or key not in _PARSERS:
            raise ValueError(
                f"keep: {item.strip()!r} is none of {', '.join(_PARSERS)}, as in "
                "'last=3,every=1000'"
            )
        field, parse = _PARSERS[key]
        if field in values:
            raise ValueError(f"keep: {key!r} is given twice")
        values[field] = parse(value)
        if not 0 < values[field] <= _NUMBER_MAX:
            raise ValueError(f"keep: {item.strip()!r}: it must be above 0, and there are limits")
    return Keep(**values)


def format_keep(keep: Keep) -> str:
    """The text that ``parse_keep`` reads back as ``keep``."""
    parts = [f"last={keep.last}"] if keep.last else []
    if keep.every:
        parts.append(f"every={keep.every}")
    if keep.age_s:
        parts.append(f"age={format_duration(keep.age_s)}")
    if keep.bytes:
        parts.append(f"bytes={format_size(keep.bytes)}")
    return ",".join(parts)


def step_of(name: bytes) -> int | None:
    """The number at the end of a checkpoint's name (``step-100``, ``global_step100``), or None."""
    step = run_of(name)[1]
    return None if step < 0 else step


def run_of(name: bytes) -> tuple[bytes, int]:
    """The run that a checkpoint's name says, and its step in it; -1 if the name has none."""
    match = _STEP.fullmatch(name)
    return (name[: match.start(1)], int(match[1])) if match else (name, -1)


def decide(
    checkpoints: Iterable[ListedCheckpoint], keep: Keep, now_ns: int
) -> list[ListedCheckpoint]:
    """Those that have to go, the oldest first; none if ``find_disorder`` finds something."""
    ordered = newest_last(checkpoints)
    if find_disorder(ordered):
        return []
    removable = [one for one in ordered[:-1] if not one.in_use]
    going: list[ListedCheckpoint] = []
    if keep.last or keep.every or keep.age_s:
        newest = set(ordered[-keep.last :]) if keep.last else set()
        going = [one for one in removable if one not in newest and not _is_kept(one, keep, now_ns)]
    if keep.bytes:
        total = sum(one.bytes for one in ordered) - sum(one.bytes for one in going)
        gone = set(going)
        for one in removable:
            if total <= keep.bytes:
                break
            if one not in gone:
                going.append(one)
                total -= one.bytes
    return sorted(going, key=_order)


def newest_last(checkpoints: Iterable[ListedCheckpoint]) -> list[ListedCheckpoint]:
    """The complete ones in the order of publishing, of steps where times are equal."""
    return sorted((one for one in checkpoints if one.complete), key=_order)


def find_disorder(checkpoints: Iterable[ListedCheckpoint]) -> str:
    """The first complete checkpoint published after one of its run with a higher step, in words; or
    ''."""
    highest: dict[bytes, tuple[int, bytes]] = {}
    for one in newest_last(checkpoints):
        run, step = run_of(one.name)
        before, name = highest.get(run, (-1, b""))
        if step < before:
            return f"{_text(one.name)} was published after {_text(name)}"
        highest[run] = step, one.name
    return ""


def _text(name: bytes) -> str:
    return name.decode("utf-8", "replace")


def _order(one: ListedCheckpoint) -> tuple[int, int, bytes]:
    run, step = run_of(one.name)
    return one.time_ns, step, run


def _is_kept(one: ListedCheckpoint, keep: Keep, now_ns: int) -> bool:
    if keep.every and one.step is not None and one.step % keep.every == 0:
        return True
    return bool(keep.age_s) and now_ns - one.time_ns < keep.age_s * 1e9


def _parse_count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise ValueError(f"keep: {text!r} is not a number")
    return int(text)


_PARSERS = {
    "last": ("last", _parse_count),
    "every": ("every", _parse_count),
    "age": ("age_s", parse_duration),
    "bytes": ("bytes", parse_size),
}
