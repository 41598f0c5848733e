"""Looking through a whole store for what refers to a server. Others run between the slices of
it.
"""

from collections.abc import Callable
from typing import Any

import trio

from aifs.data.servers import Servers
from aifs.layout.placement import LOST
from aifs.meta import keys, server_uses
from aifs.meta.kv import Engine
from aifs.meta.server_uses import Copies, Uses, total


async def count_uses(engine: Engine, servers: Servers, server: int) -> tuple[Uses, int]:
    """What has columns on a data server, and how many files could not be read if it and all lost
    ones were gone.
    """
    gone = frozenset(
        {server, *(other.id for other in servers.capacity() if other.standing == LOST)}
    )
    files = await _collect(engine, b"i", server_uses.scan_files, server, gone)
    containers = await _collect(engine, b"t", server_uses.scan_containers, server, gone)
    lost = len(total(files).lost)
    if ids := frozenset(total(containers).lost):
        lost += len(set().union(*await _collect(engine, b"l", server_uses.scan_chunk_lists, ids)))
    return total([*files, *containers]), lost


async def find_copies(engine: Engine, device: int) -> Copies:
    """The burst copies that lie on a burst directory."""
    parts = await _collect(engine, b"b", server_uses.scan_copies, device)
    return Copies(*(tuple(item for part in parts for item in part[place]) for place in range(2)))


async def _collect(
    engine: Engine, kind: bytes, scan: Callable[..., tuple[Any, bytes]], *args: Any
) -> list[Any]:
    found = []
    start, end = keys.all_of(kind)
    while start:
        part, start = await engine.view(scan, start, end, *args)
        if part and any(part):
            found.append(part)
        await trio.lowlevel.checkpoint()
    return found
