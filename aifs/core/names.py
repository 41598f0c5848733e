"""Rules for the names of files."""

import os
import re

NAME_MAX = 255
"""In bytes."""

VIRTUAL = b".aifs-data"
"""The directory of virtual files in each directory. Not a marker's name: a server may lie in a
mount. Stores of earlier versions may have it on record."""


_ADDRESS = re.compile(r"[a-z][a-z0-9+]*://")


def is_path(address: str) -> bool:
    """Whether an address is a path, not KIND://REST."""
    return _ADDRESS.match(address) is None


def absolute(address: str) -> str:
    """The address, if it is a path as an absolute one. Links are not followed."""
    return os.path.abspath(address) if is_path(address) else address


def is_name(name: bytes) -> bool:
    """Whether a file can have this name."""
    is_one = name not in (b"", b".", b"..") and b"/" not in name and b"\0" not in name
    return is_one and len(name) <= NAME_MAX
