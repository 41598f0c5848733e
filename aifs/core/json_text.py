"""JSON objects that programs write. Pure."""

import json
import os
from collections.abc import Mapping
from typing import Any

from aifs.core.errors import Invalid


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
