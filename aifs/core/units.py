"""Sizes, counts, durations (s), and compression, as people write them: ``1MiB``, ``1M``, ``100ms``,
``zstd:3``. Pure."""

import math
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from decimal import Decimal

_SIZES = {"B": 1}
for _power, _letter in enumerate("KMGTPE", start=1):
    _SIZES[f"{_letter}iB"] = 1024**_power
    _SIZES[f"{_letter}B"] = 1000**_power
_SIZES["kB"] = 1000

_COUNTS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9}

_DURATIONS = {"us": 1, "ms": 10**3, "s": 10**6, "min": 60 * 10**6, "h": 3600 * 10**6}
_DURATIONS["d"] = 24 * _DURATIONS["h"]  # in microseconds

_ZSTD_LEVEL = 3

_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)


def _exact(number: str) -> "Decimal":
    from decimal import Decimal  # most commands are given no quantity, and this takes 3 ms

    return Decimal(number)


def parse_size(text: str) -> int:
    """Bytes, from ``4096``, ``4KiB`` (1024s) or ``2GB`` (1000s). ValueError says what is
    allowed."""
    match = _QUANTITY.fullmatch(text)
    factor = _SIZES.get(match[2] or "B") if match else None
    size = _exact(match[1]) * factor if match and factor else None
    if size is None or size != int(size):
        raise ValueError(f"{text!r} is not a size in bytes, such as 4096, 64KiB, 1MiB or 2GB")
    return int(size)


def parse_count(text: str) -> int:
    """How many: ``1500``, ``20k``, ``1.5M``, ``2G`` (1000s). ValueError says what is allowed."""
    match = _QUANTITY.fullmatch(text)
    factor = _COUNTS.get(match[2]) if match else None
    number = _exact(match[1]) * factor if match and factor else None
    if number is None or number != int(number):
        raise ValueError(f"{text!r} is not a number, such as 1500, 20k or 1M")
    return int(number)


def parse_duration(text: str) -> float:
    """Seconds, from ``1s``, ``100ms``, ``2h`` or a bare number of seconds. ValueError: not so."""
    match = _QUANTITY.fullmatch(text)
    factor = _DURATIONS.get(match[2] or "s") if match else None
    if match is None or factor is None:
        raise ValueError(f"{text!r} is not a duration, such as 100ms, 1s, 5min, 2h or 1d")
    seconds = float(_exact(match[1]) * factor / _DURATIONS["s"])
    if seconds == math.inf:
        raise ValueError(f"{text[:16]!r}... is longer than any duration")
    return seconds


def format_size(size: int) -> str:
    """The shortest form that ``parse_size`` reads back as exactly ``size``: ``1MiB``, ``1500``."""
    for letter in "EPTGMK":
        factor = _SIZES[f"{letter}iB"]
        if size and size % factor == 0:
            return f"{size // factor}{letter}iB"
    return str(size)


def format_duration(seconds: float) -> str:
    """In the largest unit that divides it, for ``parse_duration``: ``1d``, ``100ms``."""
    us = _exact(str(seconds)) * _DURATIONS["s"]
    for unit in ("d", "h", "min", "s", "ms"):
        if us and us % _DURATIONS[unit] == 0:
            return f"{int(us / _DURATIONS[unit])}{unit}"
    return f"{int(us)}us" if us else "0s"


def describe_size(size: int) -> str:
    """About how much, for tables: three digits and a binary unit, such as ``3.21 GiB``."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if value < 1000:
            break
        value /= 1024
    else:
        unit = "EiB"
    return f"{size} B" if unit == "B" else f"{value:.{2 - (value >= 10) - (value >= 100)}f} {unit}"


def parse_compress(text: str) -> int:
    """The zstd level of ``none``, ``zstd``, ``zstd:LEVEL``; 0 for none. ValueError says what is
    allowed."""
    codec, colon, level = text.partition(":")
    if text == "none":
        return 0
    if codec != "zstd" or (
        colon and not (level.isascii() and level.isdigit() and 1 <= int(level) <= 19)
    ):
        raise ValueError(
            f"compress={text} is neither 'none' nor 'zstd:LEVEL' with a level from 1 to 19"
        )
    return int(level) if colon else _ZSTD_LEVEL


def format_compress(level: int) -> str:
    """The text that ``parse_compress`` reads back as ``level``."""
    return f"zstd:{level}" if level else "none"
