"""The kernel's caches of names and attributes, which all processes that run tests share: while a
test counts requests no other one drops them."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def kept() -> Iterator[None]:
    """No test drops the caches as long as this lasts. Blocks while one does."""
    with _locked(fcntl.LOCK_SH):
        yield


def drop() -> None:
    """Forget what no program uses: names, inodes, and the pages of these. Blocks while a test needs
    them. Never called within ``kept``."""
    with _locked(fcntl.LOCK_EX):
        Path("/proc/sys/vm/drop_caches").write_text("2")


@contextmanager
def _locked(how: int) -> Iterator[None]:
    with open(__file__) as file:  # its lock ends with it
        fcntl.flock(file, how)
        yield
