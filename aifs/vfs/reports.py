"""Reports as dictionaries for JSON: an inode and its parts' places, and the mount."""

import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import aifs
from aifs.core import files
from aifs.data.servers import Servers
from aifs.files import asks, rights
from aifs.files.asks import ANY, DIRECTORY, Hint
from aifs.files.file_io import FileIO
from aifs.files.open_inode import OpenInode
from aifs.files.rights import without_paths, without_reason
from aifs.files.services import Services
from aifs.files.stage import find_in_blocks
from aifs.files.types import ROOT, CallerLike
from aifs.layout.hint import format_layout_hint
from aifs.layout.placement import ACTIVE, BURST_FIRST
from aifs.layout.striped import Striped
from aifs.meta import hosts, keys
from aifs.meta.chunks import find_container, shares_of
from aifs.meta.kv import Engine, ReadTransaction
from aifs.meta.records import SNAPSHOT, Inode
from aifs.meta.slices import read_slice
from aifs.reads.virtual import walking
from aifs.store.store import Store
from aifs.upkeep.rebuild import Rebuild
from aifs.upkeep.scrub import Scrub
from aifs.upkeep.trash import Trash
from aifs.vfs import burst_hints
from aifs.vfs.attributes import Attributes

_TYPES = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFBLK: "block device",
    stat.S_IFCHR: "character device",
}

_PARTS_THAT_FAIL = ("drain", "backup", "aging")


async def describe(store: Store, inode: Inode, file: OpenInode | None) -> dict[str, Any]:
    """An inode, its form, and the place of each part. ``file``: its in-core state, if any."""
    ino = inode.ino
    info: dict[str, Any] = {
        "inode": ino,
        "type": _TYPES[stat.S_IFMT(inode.mode)],
        "size": inode.size,
        "allocated_bytes": inode.blocks * 512,
        "links": inode.links,
        "form": _form(inode),
    }
    if inode.flags & SNAPSHOT:
        info["snapshot"] = True
    if inode.policy is not None:
        if inode.policy.tier:
            info["tier"] = inode.policy.tier
        if inode.is_dir:
            info["policy"] = format_layout_hint(inode.policy)
    if inode.copy is not None:
        info["copy"] = copy = {
            "device": inode.copy.server - BURST_FIRST,
            "state": burst_hints.state_of(inode, file),
        }
        if home := store.servers.elsewhere.get(inode.copy.server):
            copy["host"] = await store.engine.view(hosts.name_of, home)
        else:
            copy["path"] = store.servers[inode.copy.server].where((0, inode.copy.id))
    if inode.layout is not None:
        blocks = store.servers.blocks
        info["block_bytes"] = (await store.engine.view(find_in_blocks, inode, blocks)).here
    if (layout := inode.objects) is not None:
        info["layout"] = {
            "kind": layout.kind,
            "unit": layout.unit,
            "servers": list(layout.servers),
            "replicas": layout.replicas,
            "parity": layout.parity,
            "width": layout.width,
        }
        info["parts"] = [
            _part(store.servers, number, inode.named_by, inode.oid, length)
            for index, number in enumerate(layout.servers)
            if (length := layout.object_length(index, inode.size))
        ]
    elif inode.layout is not None and (pin := inode.layout.pin) is not None:
        info["source"] = {"url": pin.url, "etag": pin.etag}
        info["parts"] = []
    elif (chunked := inode.chunks) is not None:
        shares = await _shares(store.engine, inode.oid)
        info["stored_bytes"] = stored = sum(shares.values())
        info["compression"] = round(inode.size / stored, 2) if stored else 1.0
        layouts = await store.engine.view(_container_layouts, shares)
        weakest = min(layouts.values(), key=lambda each: each.tolerates, default=Striped(1, (0,)))
        info["layout"] = {
            "kind": chunked.kind,
            "chunk": chunked.chunk,
            "servers": sorted({server for each in layouts.values() for server in each.servers}),
            "replicas": weakest.replicas,
            "parity": weakest.parity,
            "width": weakest.width,
        }
        info["parts"] = [
            _part(store.servers, server, 0, container, -(-shares[container] // each.width))
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


def _part(servers: Servers, server: int, ino: int, oid: int, length: int) -> dict[str, Any]:
    on = servers[server]
    state = on.state if on.standing == ACTIVE else on.standing
    return {
        "server": server,
        "domain": on.domain,
        "state": state,
        "path": on.where((ino, oid)),
        "bytes": length,
    }


async def _shares(engine: Engine, oid: int) -> Counter[int]:
    """Stored bytes of an interleaved file in each container, without redundancy."""
    shares = Counter[int]()
    start, end = keys.chunk_lists(oid)
    while start:
        found, start = await engine.view(_read_shares, start, end)
        for container, _, size in found:
            shares[container] += size
    return shares


def _read_shares(
    tx: ReadTransaction, start: bytes, end: bytes
) -> tuple[list[tuple[int, int, int]], bytes]:
    records, following = read_slice(tx, start, end)
    return [share for _, record in records for share in shares_of(tx, record)], following


def _container_layouts(tx: ReadTransaction, containers: Iterable[int]) -> dict[int, Striped]:
    """Of those that the store knows."""
    found = {number: find_container(tx, number) for number in containers}
    return {number: record.layout for number, record in found.items() if record is not None}


class MountStatus:
    """The state of the mount, which ``aifs status`` shows, and that of an inode."""

    HINTS = (
        Hint(
            "status",
            asks.ROOT,
            "the state of the mount",
            rights.reader,
            get=lambda status, ask: status.tell(ask.caller),
        ),
        Hint(
            "info",
            ANY,
            "the inode and where its parts lie (aifs info)",
            rights.reader,
            get=lambda status, ask: status.describe(ask.ino),
        ),
        Hint(
            "places.N",
            DIRECTORY,
            "binary: sizes, times and places in containers of its files, from cookie N on",
            rights.lister,
            get=lambda status, ask: status.places(ask.ino, ask.number),
        ),
    )

    def __init__(
        self,
        services: Services,
        store: Store,
        io: FileIO,
        attributes: Attributes,
        scrub: Scrub,
        rebuild: Rebuild,
        trash: Trash,
        parts: Mapping[str, Callable[[], Any]],
    ) -> None:
        """``parts``: the reports of other parts, by their names in the answer."""
        self._store = store
        self._io = io
        self._attributes = attributes
        self._collector = services.collector
        self._kernel = services.kernel
        self._options = services.options
        self._scrub = scrub
        self._rebuild = rebuild
        self._trash = trash
        self._parts = parts
        self._started_s = time.monotonic()

    async def describe(self, ino: int) -> dict[str, Any]:
        """An inode, and where its parts lie. Raises NotFound."""
        inode = await self._attributes.getattr(ino)
        return await describe(self._store, inode, self._io.table.open.get(ino))

    async def places(self, directory: int, cookie: int) -> bytes:
        """Where the files of a directory lie (reads/virtual/walking.py)."""
        return await walking.tell(self._store.engine, self._io, directory, cookie)

    async def tell(self, caller: CallerLike = ROOT) -> dict[str, Any]:
        """A dictionary for JSON. Only root and the daemon's user see paths, and reasons that may
        name them."""
        store = self._store
        servers = await store.servers.status()
        edge = self._kernel.status()
        edge["passthrough"] = self._kernel.passthrough is not None and not edge.get("missing")
        told: dict[str, Any] = {
            "pid": os.getpid(),
            "version": f"{aifs.__version__} {aifs.COMMIT}".rstrip(),
            "mountpoint": self._options.mountpoint,
            "source": store.config.source,
            "uuid": store.uuid,
            "uptime_s": round(time.monotonic() - self._started_s, 3),
            "read_only": self._options.read_only,
            "open_files": len({*self._io.table.open, *self._io.table.programs_have_open()}),
            "unsynced_files": len(self._io.table.unsynced),
            "collector_backlog": self._collector.backlog,
            "trash": await self._trash.status(),
            "rebuild": without_paths(self._rebuild.status(), caller),
            "scrub": without_paths(self._scrub.status(wrong_bytes=4096), caller),
            "servers": [server for server in servers if server["role"] == "data"],
            **{name: status() for name, status in self._parts.items()},
            "memory": store.servers.budget.status(),
            "cache": store.servers.cache.status(),
            "process": {
                "cpu_s": round(time.process_time(), 3),
                "resident_bytes": _resident_bytes(),
                "descriptors": files.descriptors(),
            },
            "bridge": edge,
            "keeper": self._kernel.kept.status(),
        }
        devices = told["burst"]["devices"]
        for part in (*told["servers"], *devices, *map(told.get, _PARTS_THAT_FAIL)):
            without_reason(part, caller)
        return told


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
