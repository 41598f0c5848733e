"""Data servers in temporary directories, and a hook that makes single operations on them fail or
wait.
"""

import errno
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from aifs.core import files
from aifs.data.marker import FORMAT, Marker, write_marker
from aifs.data.marker import NAME as MARKER
from aifs.data.naming import PROBE
from aifs.data.servers import Servers
from aifs.data.workers import gather

STORE = "5a0cbd2e-4d0b-4f7a-b6b7-0d5f7c5f6a10"


def make_server(path: Path, number: int, store: str = STORE, role: str = "data") -> str:
    """An empty, marked server directory; of the burst tier with its ``role``."""
    path.mkdir()
    write_marker(str(path), Marker(FORMAT, store, role, number, "2025-01-01T00:00:00+00:00"))
    return str(path)


def make_table(parent: Path, count: int) -> dict[int, str]:
    return {number: make_server(parent / f"server{number}", number) for number in range(count)}


@contextmanager
def opened(table: dict[int, str], threads: int = 8) -> Iterator[Servers]:
    """Existing servers, identified."""
    servers = Servers(table, STORE, threads)
    servers.check_identity()
    try:
        yield servers
    finally:
        servers.close()


@contextmanager
def data_servers(parent: Path, count: int = 4) -> Iterator[Servers]:
    """``count`` new servers below ``parent``, identified; on leaving, no thread and no descriptor
    may be left."""
    with threads_end(0), opened(make_table(parent, count)) as servers:
        yield servers
    assert open_below(parent) == []


@contextmanager
def threads_end(patience_s: float = 60) -> Iterator[None]:
    """On leaving, the threads of data servers that were started inside have ended, or do so in
    time. Those of an earlier test are that test's failure alone."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("aifs-data"):
            if patience_s:
                thread.join(patience_s)
            frame = sys._current_frames().get(thread.ident)
            where = "".join(traceback.format_stack(frame)) if frame is not None else ""
            assert not thread.is_alive(), f"{thread.name} is left:\n{where}"


def open_below(parent: Path) -> list[str]:
    """Files below ``parent`` that this process has open."""
    paths = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            paths.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue  # the descriptor that listed the directory
    return sorted(path for path in paths if path.startswith(f"{parent}/"))


class FaultHook:
    """Calls ``action(op, path)`` before each operation on persistent files; it may raise or
    wait."""

    installed: "FaultHook | None" = None

    def __init__(self, action: Callable[[str, str], None]) -> None:
        self.action = action

    def before(self, op: str, path: str) -> None:
        self.action(op, path)

    def after(self, op: str, path: str, *args: object) -> None:
        """Nothing to record."""


@contextmanager
def hooked(action: Callable[[str, str], None] = lambda op, path: None) -> Iterator[None]:
    """Have ``action`` called before each operation; nested, the inner one replaces the outer.

    Paths of descriptors are known only for files that were opened within the outermost.
    """
    hook = FaultHook.installed
    if hook is not None:
        outer, hook.action = hook.action, action
        try:
            yield
        finally:
            hook.action = outer
        return
    FaultHook.installed = FaultHook(action)
    files.set_hook(FaultHook.installed)
    try:
        yield
    finally:
        files.set_hook(None)
        FaultHook.installed = None


@contextmanager
def failing(ops: str | tuple[str, ...], below: str, number: int = errno.EIO) -> Iterator[list[str]]:
    """Operations ``ops`` on paths below ``below`` fail with ``number``. Yields the list of those
    that did, but for probes."""
    ops = (ops,) if isinstance(ops, str) else ops
    failed: list[str] = []

    def action(op: str, path: str) -> None:
        if op in ops and path.startswith(below):
            if os.path.basename(path) not in (PROBE, MARKER):
                failed.append(op)
            raise OSError(number, os.strerror(number))

    with hooked(action):
        yield failed


async def list_window(servers: Servers, first_oid: int, end_oid: int) -> list[tuple[int, int, int]]:
    """(server id, ino, oid) of all objects with first_oid <= oid < end_oid on servers that are
    present. Raises Unavailable."""
    everywhere = [server for server in servers.values() if not server.absent]
    results = await gather(
        [(server.workers, server.list_range, (first_oid, end_oid)) for server in everywhere]
    )
    return [
        (server.id, ino, oid)
        for server, keys in zip(everywhere, results, strict=True)
        for ino, oid in keys
    ]
