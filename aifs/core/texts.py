"""Texts that programs write: ``key=value,key=value``, and JSON objects. Pure."""

import difflib
import json
import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any

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


def parse_object(what: str, text: str, known: Mapping[str, type]) -> dict[str, Any]:
    """The object with keys and types of ``known``. Raises Invalid, which begins with ``what``."""
    try:
        asked = json.loads(text)
        if "\\u" in text:  # no escape is half of a character
            os.fsencode(json.dumps(asked, ensure_ascii=False))
    except (ValueError, RecursionError) as error:
        raise Invalid(f"{what}: not valid JSON: {error}") from None
    if not isinstance(asked, dict):
        raise Invalid(f"{what}: not a JSON object")
    for key, value in asked.items():
        if key not in known:
            raise Invalid(f"{what}: no key is called {key!r}; there are {', '.join(known)}")
        if type(value) is not known[key]:
            raise Invalid(f"{what}: {key} is {value!r}, not a {known[key].__name__}")
    return asked
