"""Virtual extended attributes ``user.aifs.*``: how programs talk to the filesystem through plain files.

    user.aifs.layout      directory, or empty file: get and set what new files (this file) will be laid out by
    user.aifs.info        any: JSON, the inode and where its parts lie
    user.aifs.status      root: JSON, the state of the mount
    user.aifs.server-add  root, write only, root user: path of a directory to add as a data server

They are not listed, so that copying tools leave them alone; the policy of ``user.aifs.layout`` is stored in the inode.
"""

import json
import os
import stat
import time
from collections.abc import Callable
from typing import Any, Protocol

from aifs.core.errors import Invalid, NoAttribute, NotPermitted, StoreError
from aifs.core.log import logger
from aifs.layout.hint import Policy, format_layout_hint, parse_layout_hint
from aifs.meta import keys
from aifs.meta.records import Inode
from aifs.vfs.collector import Collector
from aifs.vfs.file_io import FileIO
from aifs.vfs.recovery import Recovered
from aifs.vfs.store import Store, register_server
from aifs.vfs.types import CallerLike

PREFIX = b"user.aifs."

_log = logger(__name__)


class Host(Protocol):
    """What the hints need of the filesystem."""

    store: Store
    io: FileIO
    collector: Collector
    recovered: Recovered
    mountpoint: str
    read_only: bool
    started_s: float

    async def getattr(self, ino: int) -> Inode: ...

    async def change_inode(self, ino: int, change: Callable[[Inode, Any], None], argument: Any) -> Inode: ...


async def get(fs: Host, ino: int, name: bytes) -> bytes:
    """Raises NoAttribute for a hint that does not exist or is not readable here."""
    if name == b"user.aifs.info":
        return json.dumps(await _info(fs, ino)).encode()
    if name == b"user.aifs.layout":
        inode = await fs.getattr(ino)
        if inode.layout is not None:
            layout = inode.layout
            policy = Policy(layout.unit, len(layout.servers), layout.servers)
            return format_layout_hint(policy).encode()
        if inode.policy is not None and (inode.is_dir or inode.is_file):
            return format_layout_hint(inode.policy).encode()
    if name == b"user.aifs.status" and ino == keys.ROOT_INO:
        return json.dumps(await _status(fs)).encode()
    raise NoAttribute()


async def put(fs: Host, ino: int, name: bytes, value: bytes, caller: CallerLike) -> None:
    """Raises Invalid for a wrong value (the log says what is wrong), NotPermitted for what ``caller`` cannot set."""
    if name == b"user.aifs.layout":
        await _set_layout(fs, ino, value)
    elif name == b"user.aifs.server-add" and ino == keys.ROOT_INO and caller.uid == 0:
        await _add_server(fs, value)
    else:
        raise NotPermitted("this hint cannot be set")


async def _set_layout(fs: Host, ino: int, value: bytes) -> None:
    try:
        policy = parse_layout_hint(value.decode("utf-8", "replace"))
        unknown = set(policy.servers) - set(fs.store.servers)
        if unknown:
            raise Invalid(f"there is no server {min(unknown)}; the store has {sorted(fs.store.servers)}")
        await fs.change_inode(ino, _apply_policy, policy)
    except Invalid as error:
        _log.info("layout %r for inode %d is refused: %s", value, ino, error)
        raise


def _apply_policy(inode: Inode, policy: Policy) -> None:
    if not inode.is_dir and not (inode.is_file and inode.size == 0):
        raise Invalid("a layout can be set on a directory or an empty file")
    inode.policy = policy
    inode.ctime_ns = time.time_ns()


async def _add_server(fs: Host, value: bytes) -> None:
    path = os.fsdecode(value)
    try:
        number = await register_server(fs.store, path)
    except StoreError as error:
        _log.info("server %s is not added: %s", path, error)
        raise Invalid(str(error)) from error
    _log.info("server %d added: %s", number, path)


_TYPES = {
    stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink", stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket", stat.S_IFBLK: "block device", stat.S_IFCHR: "character device",
}  # fmt: skip


async def _info(fs: Host, ino: int) -> dict:
    inode = await fs.getattr(ino)
    info: dict = {
        "inode": ino,
        "type": _TYPES[stat.S_IFMT(inode.mode)],
        "size": inode.size,
        "allocated_bytes": inode.blocks * 512,
        "links": inode.nlink,
        "form": "striped" if inode.layout else "inline" if inode.data is not None else "empty",
    }
    if inode.layout is not None:
        layout = inode.layout
        info["layout"] = {"kind": "striped", "unit": layout.unit, "servers": list(layout.servers)}
        info["parts"] = [
            {"server": number, "path": fs.store.servers[number].object_path(ino, inode.oid), "bytes": length}
            for index, number in enumerate(layout.servers)
            if (length := layout.object_length(index, inode.size))
        ]
    elif inode.is_dir and inode.policy is not None:
        info["policy"] = format_layout_hint(inode.policy)
    return info


async def _status(fs: Host) -> dict:
    store = fs.store
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
        "recovered": str(fs.recovered),
        "servers": await store.servers.status(),
    }

