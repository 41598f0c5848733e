"""What goes wrong on disks."""

import os
from pathlib import Path


def flip(path: Path | str, offset: int, length: int = 1) -> None:
    """A bit of each of these bytes is another."""
    with open(path, "r+b") as file:
        before = os.pread(file.fileno(), length, offset)
        assert len(before) == length, f"{path} ends before byte {offset + length}"
        os.pwrite(file.fileno(), bytes(byte ^ 0x40 for byte in before), offset)
