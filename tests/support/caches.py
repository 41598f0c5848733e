"""The kernel's caches of names, attributes and pages, which all programs of a machine share: while
a test counts requests, no other test drops them, and no demonstration or benchmark."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager

DROP = "/proc/sys/vm/drop_caches"


@contextmanager
def kept() -> Iterator[None]:
    """Nothing drops the caches as long as this lasts. Blocks while something does."""
    with open(DROP, "w") as file:  # its lock ends with it
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


def drop() -> None:
    """Forget what no program uses: names, inodes, and the pages of these. Blocks while a test needs
    them. Never called within ``kept``."""
    with open(DROP, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("2")
