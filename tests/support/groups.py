"""Grouped writes from outside: what a shell script or a C program would do on a mount."""

import json
import os
from pathlib import Path
from typing import Any

from aifs.core import ioctl

WAIT_MAX_S = 240


def begin(directory: Path, text: str) -> None:
    os.setxattr(directory, "user.aifs.group", text.encode())


def described(directory: Path) -> dict[str, Any]:
    return json.loads(os.getxattr(directory, "user.aifs.group"))


def wait_durable(directory: Path) -> None:
    """Until the group of a directory is on the data servers. Raises OSError if it has failed."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        ioctl.call(fd, "group.wait", timeout_ms=WAIT_MAX_S * 1000)
    finally:
        os.close(fd)
