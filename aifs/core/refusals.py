"""Why a mount has refused a request, for the program that asked: errno alone seldom says it.

The mount keeps the last refusal of each user on each inode (files/refusals.py), and tells it as an
extended attribute, JSON: ``request`` (name of the hint, or "rename"), ``errno``,
``reason``, ``at_s`` (since the epoch).
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

ATTRIBUTE = "user.aifs.refused"


@contextmanager
def explained(where: str | int, request: str, path: str | None = None) -> Iterator[None]:
    """Add the reason to an OSError that is raised inside, if the mount has refused ``request``
    on ``where`` (a path, or a descriptor of ``path``)."""
    since_s = time.time()
    try:
        yield
    except OSError as error:
        reason = _reason(where, request, error, since_s)
        if not reason:
            raise
        name = path if isinstance(where, int) else where
        raise OSError(error.errno, reason, name) from None


def _reason(where: str | int, request: str, error: OSError, since_s: float) -> str:
    try:
        told = json.loads(os.getxattr(where, ATTRIBUTE))
        is_it = (told["request"], told["errno"]) == (request, error.errno)
        return told["reason"] if is_it and told["at_s"] >= since_s else ""
    except (OSError, ValueError, KeyError, TypeError):  # it is no mount of ours, or it says nothing
        return ""
