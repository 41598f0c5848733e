"""Rules for old files, ``user.aifs.age``: ``30d:cold,compress=zstd:3``. Pure; for daemon and fsck.

First, how long nobody has written or read a file; behind the colon, one or both of a class of data
servers (of the configuration, or ``aifs server add --class``) and a compression.
"""

import re
from typing import NamedTuple

from aifs.core.units import format_compress, format_duration, parse_compress, parse_duration

_CLASS = re.compile("[a-z0-9][a-z0-9-]{0,31}")
_COMPRESS = "compress="


class AgeRule(NamedTuple):
    """A rule for files that nobody has written or read for ``age_s`` seconds."""

    age_s: float
    storage_class: str = ""
    """The class of servers that they move to; "": they stay in that where they are."""
    level: int = 0
    """Of zstd, which they are compressed with; 0: they are not."""


def parse_age_rule(text: str) -> AgeRule:
    """Raises ValueError, which says what is wrong."""
    age, _, rest = text.partition(":")
    terms = [term.strip() for term in rest.split(",")]
    compress = [term for term in terms if term.startswith(_COMPRESS)]
    classes = [term for term in terms if term not in compress]
    if not rest or len(compress) > 1 or len(classes) > 1:
        raise ValueError(
            f"age: {text!r} is not AGE:CLASS, such as 30d:cold, AGE:compress=zstd:LEVEL, or "
            "AGE:CLASS,compress=zstd:LEVEL"
        )
    level = parse_compress(compress[0].removeprefix(_COMPRESS)) if compress else 0
    if not classes and not level:
        raise ValueError(f"age: {text!r} says nothing that is to become of old files")
    return AgeRule(parse_duration(age), _named(classes[0]) if classes else "", level)


def format_age_rule(rule: AgeRule) -> str:
    terms = [rule.storage_class] if rule.storage_class else []
    if rule.level:
        terms.append(_COMPRESS + format_compress(rule.level))
    return f"{format_duration(rule.age_s)}:{','.join(terms)}"


def parse_class(value: object) -> str:
    """The name of a class of data servers; "": none. Raises ValueError."""
    return _named(value) if value != "" else ""


def _named(value: object) -> str:
    if not isinstance(value, str) or not _CLASS.fullmatch(value):
        raise ValueError(f"{value!r} is no class: up to 32 small letters, digits, and -")
    return value
