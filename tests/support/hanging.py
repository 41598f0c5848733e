"""Servers that do not answer: operations below a directory wait until they are released, and are
done then.
"""

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import trio

from aifs.vfs.filesystem import Filesystem
from tests.support.data_servers import hooked

WAIT_S = 60  # for what must happen; a test that waits so long fails

_ALL = (
    "open_file write_at truncate sync_file sync_dir sync_filesystem unlink make_dir remove_dir "
    "read_into replace_file start_writing"
)
ALL = tuple(_ALL.split())


class Hang:
    """``held`` operations wait now; ``landed`` ones have waited and go on."""

    def __init__(self) -> None:
        self.held: list[tuple[str, str]] = []
        self.landed: list[tuple[str, str]] = []
        self._go = threading.Event()

    def hold(self, op: str, path: str) -> None:
        self.held.append((op, path))
        assert self._go.wait(WAIT_S)
        self.held.remove((op, path))
        self.landed.append((op, path))

    @property
    def is_over(self) -> bool:
        return self._go.is_set()

    def release(self) -> None:
        self._go.set()

    def again(self) -> None:
        self._go.clear()


@contextmanager
def hanging(below: str, ops: Collection[str] = ALL) -> Iterator[Hang]:
    """Operations ``ops`` below a directory hang, until released, at the latest at the end."""
    hang = Hang()

    def action(op: str, path: str) -> None:
        if op in ops and path.startswith(below) and not hang.is_over:
            hang.hold(op, path)

    with hooked(action):
        try:
            yield hang
        finally:
            hang.release()


async def until(condition) -> None:
    with trio.fail_after(WAIT_S):
        while not condition():
            await trio.sleep(0.005)


async def answered(fs: Filesystem, number: int) -> None:
    """All calls that were given up have ended."""
    await until(lambda: not fs.store.servers[number].hangs)
