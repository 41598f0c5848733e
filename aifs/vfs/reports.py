"""What the filesystem tells of itself, as JSON-able dictionaries: an inode and where its parts lie,
the whole mount.
"""

import os
import stat
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any, Protocol

from aifs.burst.tier import BurstTier
from aifs.files.collector import Collector
from aifs.files.drain import Drain
from aifs.files.file_io import FileIO
from aifs.files.kernel import Kernel
from aifs.files.stage import Stager
from aifs.files.types import ROOT, CallerLike
from aifs.layout.hint import format_layout_hint
from aifs.layout.placement import ACTIVE
from aifs.layout.striped import Striped
from aifs.meta import keys
from aifs.meta.chunks import find_container
from aifs.meta.extents import shares_of
from aifs.meta.kv import ReadTransaction
from aifs.meta.records import Inode
from aifs.store.backup import Backup
from aifs.store.store import Store
from aifs.upkeep.evict import Evictor
from aifs.upkeep.from_copies import FromCopies
from aifs.upkeep.rebuild import Rebuild
from aifs.upkeep.scrub import Scrub
from aifs.upkeep.trash import Trash
from aifs.vfs import burst_hints
from aifs.vfs.groups.group_drain import GroupDrain
from aifs.vfs.groups.protocol import Groups
from aifs.vfs.recovery import Recovered

_TYPES = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFBLK: "block device",
    stat.S_IFCHR: "character device",
}

_RECORDS = 256


class Host(Protocol):
    """What the reports need of the filesystem."""

    store: Store
    io: FileIO
    tier: BurstTier
    drain: Drain
    groups: Groups
    group_drain: GroupDrain
    stager: Stager
    evictor: Evictor
    from_copies: FromCopies
    collector: Collector
    trash: Trash
    backup: Backup
    rebuild: Rebuild
    scrub: Scrub
    recovered: Recovered
    mountpoint: str
    read_only: bool
    started_s: float
    kernel: Kernel

    async def getattr(self, ino: int) -> Inode: ...


async def describe(fs: Host, ino: int) -> dict[str, Any]:
    """An inode, the form that its bytes are in, and where each part of them lies."""
    inode = await fs.getattr(ino)
    layout = inode.layout
    info: dict[str, Any] = {
        "inode": ino,
        "type": _TYPES[stat.S_IFMT(inode.mode)],
        "size": inode.size,
        "allocated_bytes": inode.blocks * 512,
        "links": inode.nlink,
        "form": _form(inode),
    }
    if inode.policy is not None:
        if inode.policy.tier:
            info["tier"] = inode.policy.tier
        if inode.is_dir:
            info["policy"] = format_layout_hint(inode.policy)
    if inode.copy is not None:
        device = fs.store.servers[inode.copy.server]
        info["copy"] = {
            "device": device.number,
            "state": burst_hints.state_of(inode, fs.io.open.get(ino)),
            "path": device.object_path(0, inode.copy.id),
        }
    if inode.objects is not None:
        info["layout"] = {
            "kind": layout.kind,
            "unit": layout.unit,
            "servers": list(layout.servers),
            "replicas": layout.replicas,
            "parity": layout.parity,
            "width": layout.width,
        }
        info["parts"] = [
            _part(fs, number, ino, inode.oid, length)
            for index, number in enumerate(layout.servers)
            if (length := layout.object_length(index, inode.size))
        ]
    elif layout is not None:
        shares = await _shares(fs, inode.oid)
        layouts = await fs.store.engine.view(_container_layouts, shares)
        weakest = min(layouts.values(), key=lambda each: each.tolerates, default=Striped(1, (0,)))
        info["layout"] = {
            "kind": layout.kind,
            "chunk": layout.chunk,
            "servers": sorted({server for each in layouts.values() for server in each.servers}),
            "replicas": weakest.replicas,
            "parity": weakest.parity,
            "width": weakest.width,
        }
        info["parts"] = [
            _part(fs, server, 0, container, -(-shares[container] // each.width))
            for container, each in layouts.items()
            for server in each.servers
        ]
    return info


def _form(inode: Inode) -> str:
    if inode.in_burst:
        return "burst"
    if inode.layout is not None:
        return inode.layout.kind
    return "empty" if inode.data is None else "inline"


def _part(fs: Host, server: int, ino: int, oid: int, length: int) -> dict[str, Any]:
    on = fs.store.servers[server]
    state = on.state if on.standing == ACTIVE else on.standing
    return {
        "server": server,
        "domain": on.domain,
        "state": state,
        "path": on.object_path(ino, oid),
        "bytes": length,
    }


async def _shares(fs: Host, oid: int) -> Counter[int]:
    """How many bytes of an interleaved file are in each container, as they are stored, without
    redundancy.
    """
    shares = Counter[int]()
    start, end = keys.chunk_lists(oid)
    while start:
        found, start = await fs.store.engine.view(_read_shares, start, end)
        for container, _, size in found:
            shares[container] += size
    return shares


def _read_shares(
    tx: ReadTransaction, start: bytes, end: bytes
) -> tuple[list[tuple[int, int, int]], bytes]:
    records = list(tx.range(start, end, _RECORDS))
    found = [share for _, record in records for share in shares_of(tx, record)]
    return found, records[-1][0] + b"\0" if len(records) == _RECORDS else b""


def _container_layouts(tx: ReadTransaction, containers: Iterable[int]) -> dict[int, Striped]:
    """Of those that the store knows."""
    found = {number: find_container(tx, number) for number in containers}
    return {number: record.layout for number, record in found.items() if record is not None}


def without_paths(state: dict[str, Any], caller: CallerLike) -> dict[str, Any]:
    """What a scrub or a rebuild says of itself; to others than root, files by their inodes
    alone.
    """
    if caller.uid != 0:
        for entry in state.get("wrong", ()):
            entry["paths"] = [f"inode {entry['inode']}"]
        for entry in state.get("failed", ()):
            entry["path"] = f"inode {entry['ino']}" if entry["ino"] else entry["path"]
    return state


async def status(fs: Host, caller: CallerLike = ROOT) -> dict[str, Any]:
    """The state of the mount; ``aifs status`` shows it."""
    store = fs.store
    servers = await store.servers.status()
    edge = fs.kernel.status()
    edge["passthrough"] = fs.kernel.passthrough is not None and not edge.get("missing")
    return {
        "pid": os.getpid(),
        "mountpoint": fs.mountpoint,
        "source": store.config.source,
        "uuid": store.uuid,
        "uptime_s": round(time.monotonic() - fs.started_s, 3),
        "read_only": fs.read_only,
        "open_files": len(fs.io.open),
        "unsynced_files": len(fs.io.unsynced),
        "collector_backlog": fs.collector.backlog,
        "trash": fs.trash.status(),
        "backup": fs.backup.status(),
        "rebuild": without_paths(fs.rebuild.status(), caller),
        "scrub": without_paths(fs.scrub.status(wrong_bytes=4096), caller),
        "recovered": str(fs.recovered),
        "servers": [server for server in servers if server["role"] == "data"],
        "burst": fs.tier.status(),
        "drain": fs.drain.status(),
        "groups": {**fs.groups.status(), **fs.group_drain.status()},
        "stage": fs.stager.status(),
        "evict": {**fs.evictor.status(), **fs.from_copies.status()},
        "memory": store.servers.budget.status(),
        "cache": store.servers.cache.status(),
        "bridge": edge,
    }
