"""Texts of the form ``key=value,key=value``. Pure."""

import difflib
from collections.abc import Collection, Iterator

from aifs.core.errors import Invalid


def parse_pairs(
    what: str, text: str, keys: Collection[str], example: str
) -> Iterator[tuple[str, str]]:
    """Keys and values of ``text``, in order. Raises Invalid, naming ``what``, at the first item
    that is no pair, not of these ``keys``, or repeated."""
    seen = set()
    for item in text.split(","):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals:
            raise Invalid(f"{what}: {item.strip()!r} is not key=value, as in {example!r}")
        if key not in keys:
            near = difflib.get_close_matches(key, keys, 1)
            advice = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(keys)}"
            raise Invalid(f"{what}: no key is called {key!r}; {advice}")
        if key in seen:
            raise Invalid(f"{what}: {key!r} is given twice")
        seen.add(key)
        yield key, value
