"""Directories in memory: what tests write there costs no disk, and the filesystem may do it on the
trio thread.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def in_memory() -> Iterator[Path]:
    """An empty directory, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="aifs-test-", dir="/dev/shm") as path:
        yield Path(path)
