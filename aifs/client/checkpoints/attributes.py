"""The extended attributes through which programs talk to a mount of AIFS; empty elsewhere."""

import json
import os
import time
from collections.abc import Iterator
from typing import Any

from aifs.core.ioctl import explained

INFO = "user.aifs.info"
LAYOUT = "user.aifs.layout"
KEEP = "user.aifs.keep"
SHOWN = "user.aifs.shown"
PENDING = "user.aifs.pending"
COMMIT = "user.aifs.commit"
PUBLISH_AS = "user.aifs.publish-as"
REMOVE = "user.aifs.remove"
START = "user.aifs.start"
DRAIN = "user.aifs.drain"
WHY = "user.aifs.why"
GROUP = "user.aifs.group"
GROUP_COMMIT = "user.aifs.group.commit"


def is_aifs(path: str) -> bool:
    """Whether the file or directory ``path`` lies in a mount of AIFS."""
    return bool(_read(path, INFO))


def get(path: str, name: str) -> str:
    """The value, or '' if there is none, or the filesystem is another. Follows a symlink."""
    value = _read(path, name)
    return value if value and is_aifs(path) else ""


def _read(path: str, name: str) -> str:
    try:
        return os.fsdecode(os.getxattr(path, name)).strip()
    except OSError:
        # No such attribute, no attributes at all, no such file: nothing to be had from it.
        return ""


def get_json(path: str, name: str) -> dict[str, Any]:
    """The value, or {} if there is none here."""
    text = get(path, name)
    return json.loads(text) if text else {}


def ask_json(path: str, name: str) -> dict[str, Any]:
    """The value. Raises OSError, also if there is none."""
    return json.loads(os.getxattr(path, name))


def put(path: str, name: str, value: str) -> None:
    """Raises OSError, which says why the mount has refused it."""
    with explained(path, name):
        os.setxattr(path, name, os.fsencode(value))


def remove(path: str, name: str) -> None:
    """As ``put``."""
    with explained(path, name):
        os.removexattr(path, name)


_DELAY_MIN_S, _DELAY_MAX_S = 0.0005, 0.1


def delays() -> Iterator[None]:
    """For a loop that looks until something has changed: at once, then ever more slowly."""
    delay = _DELAY_MIN_S
    while True:
        yield
        time.sleep(delay)
        delay = min(delay * 1.5, _DELAY_MAX_S)
