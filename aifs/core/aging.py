"""Where files go when they are old, as ``user.aifs.age`` says it: ``30d:cold``. Pure; the daemon
and fsck share it.

The first part is how long nobody has written or read a file; the second one a class of data
servers, as the configuration and ``aifs server add --class`` name them.
"""

import re
from typing import NamedTuple

from aifs.core.units import format_duration, parse_duration

_CLASS = re.compile("[a-z0-9][a-z0-9-]{0,31}")


class AgeRule(NamedTuple):
    """Files that nobody has written or read for ``age_s`` seconds move to a class of servers."""

    age_s: float
    storage_class: str


def parse_age_rule(text: str) -> AgeRule:
    """Raises ValueError, which says what is wrong."""
    age, colon, storage_class = text.partition(":")
    if not colon:
        raise ValueError(f"age: {text!r} is not AGE:CLASS, such as 30d:cold")
    return AgeRule(parse_duration(age), _named(storage_class))


def format_age_rule(rule: AgeRule) -> str:
    return f"{format_duration(rule.age_s)}:{rule.storage_class}"


def parse_class(value: object) -> str:
    """The name of a class of data servers; "": none. Raises ValueError."""
    return _named(value) if value != "" else ""


def _named(value: object) -> str:
    if not isinstance(value, str) or not _CLASS.fullmatch(value):
        raise ValueError(f"{value!r} is no class: up to 32 small letters, digits, and -")
    return value
