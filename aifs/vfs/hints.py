"""Virtual extended attributes ``user.aifs.*``: how programs talk to the filesystem through plain
files.

    user.aifs.layout         directory, or empty file: get and set what new files (this file) will
                             be laid out by
    user.aifs.tier           directory or file: get and set burst, capacity, pinned or default
    user.aifs.expected_size  directory, or empty file: get and set how large new files (this file)
                             will become
    user.aifs.state          directory or file: JSON, where the bytes are (BurstHints.state)
    user.aifs.sharing        directory or file: JSON, bytes that it has alone (BurstHints.sharing)
    user.aifs.drain          directory or file: JSON, what is undrained; set (empty): drain that
                             before all else
    user.aifs.stage          file, set (empty): bring it into the burst tier
    user.aifs.evict          file, set (empty): give up its copy in the burst tier
    user.aifs.remove         directory, set: name of a directory in it, to be removed with all that
                             lies below (meta/dooming.py)
    user.aifs.publish        directory: get and set burst or capacity, where bytes must be before a
                             rename into it shows them
    user.aifs.mirror         directory or file: get and set 1 or 0, whether another host keeps a
                             copy of what is fsynced or published, until it is drained
    user.aifs.pending        directory: JSON, who has committed; set 'ranks=8,step=100,job=NAME' to
                             mark it, '' to abandon
    user.aifs.commit         pending directory, set: a rank, or JSON (groups/group_hints.py)
    user.aifs.publish-as     directory, set: JSON, the final name and the pointers to it
                             (publishing/publish_hint.py)
    user.aifs.keep           directory: get and set which checkpoints in it are kept
                             (core/retention.py)
    user.aifs.shown          directory: when a publish or a rename has shown it as a whole, in
                             seconds since the epoch
    user.aifs.age            directory: get and set what becomes of old files below,
                             AGE:CLASS,compress=zstd:LEVEL (core/aging.py)
    user.aifs.trash          directory: get and set for how long what is removed below is kept, 7d
                             or off (upkeep/trash_rules.py)
    user.aifs.trashed[.N]    root: JSON, what of the caller's is in the trash (trash_requests.py)
    user.aifs.quota          directory or file: JSON, what limits it, and how much of that is used;
                             set 'size=1TiB,files=1M' on a directory (quotas.py)
    user.aifs.quotas[.N]     root: JSON, the quotas, behind project N
    user.aifs.backup         root, write only: TOKEN:[DIRECTORY], back up the metadata,
                             DIRECTORY is an absolute path (Backup.request)
    user.aifs.group          directory: get (also of what lies below) and set 'name=step,ranks=8', a
                             grouped write; '' ends it
    user.aifs.group.commit   directory: a rank of its group; file, set (empty): it counts as closed
                             (groups/group_hints.py)
    user.aifs.atime          root, write only, root user: noatime, relatime or strictatime, when
                             opening for reading is an access
    user.aifs.refused        any: JSON, the last request that the caller was refused here, and why
                             (core/refusals.py)
    user.aifs.places.N       directory: binary, sizes, times and places in containers of its files
                             (places.py)
    user.aifs.start          directory: JSON, the start that is recorded in it; set record=RUN or
                             stop (starts/starts.py)
    user.aifs.order          directory: JSON, the epochs of its dataset that are read; set
                             seed=7,epoch=1,world=8,ahead=16GiB,...; '' ends them (epochs/epochs.py)
    user.aifs.info           any: JSON, the inode and where its parts lie
    user.aifs.status         root: JSON, the state of the mount
    user.aifs.trace[.N]      root, the root user and the daemon's: JSON, requests as they are
                             answered (operation_log.tell)
    user.aifs.why[.PID]      any: JSON, what requests there and below, of a process (0: the caller),
                             wait for now, and how their seconds were spent (why.py)
    user.aifs.scrub          root: JSON, what a scrub has done and found; set
                             start[,no-repair][,bandwidth=SIZE] or stop
    user.aifs.config         root, the root user and the daemon's: JSON, the configuration; set
                             KEY=VALUE, until the next mount (settings.py)
    user.aifs.hosts          root: JSON, the hosts that have the store mounted (cluster.py)
    user.aifs.fence          root, write only, root user: the name of a host, whose session ends
    user.aifs.servers        root: JSON, the data servers and burst directories
    user.aifs.server-*       root, write only: adding, draining, replacing, removing servers
                             (server_hints.py)

``root`` is the mount's root directory. Who may read and set which of them is one table, rights.py.
They are not listed, so that copying tools leave them alone. Policies (the first three, publish and
mirror) are stored in the inode, and what is made in a directory inherits its. They, ``pending``,
``keep``, ``age``, ``quota``, ``trash`` and ``group`` can be removed.
"""

import json
import os
from collections.abc import Awaitable, Callable
from typing import Any

from aifs.core.errors import Invalid, NoAttribute, NotPermitted
from aifs.core.processes import process_of
from aifs.files.file_io import FileIO
from aifs.files.types import ATIMES, CallerLike
from aifs.store.backup import Backup
from aifs.store.store import Store
from aifs.upkeep.aging import Aging
from aifs.upkeep.scrub import Scrub
from aifs.upkeep.server_admin import ServerAdmin
from aifs.upkeep.trash_rules import TrashRules
from aifs.vfs import (
    operation_log,
    places,
    policy_hints,
    reports,
    rights,
    server_hints,
    trash_requests,
    why,
)
from aifs.vfs.attributes import Attributes
from aifs.vfs.burst_hints import BurstHints
from aifs.vfs.cluster import Cluster
from aifs.vfs.epochs.epochs import Epochs
from aifs.vfs.groups.group_hints import GroupHints
from aifs.vfs.groups.protocol import Groups
from aifs.vfs.names import Names
from aifs.vfs.operation_log import OperationLog
from aifs.vfs.policy_hints import PolicyHints
from aifs.vfs.publishing import publish_hint
from aifs.vfs.publishing.publish import Publishing
from aifs.vfs.publishing.retention import Retention
from aifs.vfs.quotas import QuotaTrees
from aifs.vfs.refusals import Refusals
from aifs.vfs.reports import MountStatus
from aifs.vfs.serve_options import ServeOptions
from aifs.vfs.settings import Settings
from aifs.vfs.starts.starts import Starts
from aifs.vfs.trash_requests import TrashRequests

PREFIX = b"user.aifs."

Statement = Callable[[int, str, CallerLike], Awaitable[None]]
Request = Callable[[int], Awaitable[Any]]


class Hints:
    """All hints. What each of them asks for is done by the part that it concerns."""

    def __init__(
        self,
        store: Store,
        io: FileIO,
        attributes: Attributes,
        names: Names,
        publishing: Publishing,
        policies: PolicyHints,
        burst: BurstHints,
        groups: Groups,
        group_hints: GroupHints,
        retention: Retention,
        quotas: QuotaTrees,
        aging: Aging,
        rules: TrashRules,
        trash: TrashRequests,
        backup: Backup,
        scrub: Scrub,
        server_admin: ServerAdmin,
        starts: Starts,
        epochs: Epochs,
        cluster: Cluster,
        status: MountStatus,
        refusals: Refusals,
        operation_log: OperationLog,
        settings: Settings,
        options: ServeOptions,
    ) -> None:
        self._store = store
        self._io = io
        self._attributes = attributes
        self._names = names
        self._publishing = publishing
        self._policies = policies
        self._burst = burst
        self._groups = groups
        self._group_hints = group_hints
        self._retention = retention
        self._quotas = quotas
        self._aging = aging
        self._rules = rules
        self._trash = trash
        self._backup = backup
        self._scrub = scrub
        self._server_admin = server_admin
        self._starts = starts
        self._epochs = epochs
        self._cluster = cluster
        self._status = status
        self._refusals = refusals
        self._operation_log = operation_log
        self._settings = settings
        self._options = options
        self._statements: dict[bytes, Statement] = {
            b"user.aifs.atime": self._set_atime,
            b"user.aifs.pending": group_hints.put_pending,
            b"user.aifs.commit": group_hints.put_pending_commit,
            b"user.aifs.group": group_hints.put,
            b"user.aifs.group.commit": group_hints.put_commit,
            b"user.aifs.publish-as": self._publish_as,
            b"user.aifs.scrub": self._order_scrub,
            b"user.aifs.fence": self._fence,
            b"user.aifs.keep": retention.set_policy,
            b"user.aifs.age": lambda ino, text, _: aging.set_rule(ino, text),
            b"user.aifs.trash": lambda ino, text, _: rules.set(ino, text),
            b"user.aifs.quota": lambda ino, text, _: quotas.set(ino, text),
            b"user.aifs.start": starts.order,
            b"user.aifs.order": self._order_epoch,
            b"user.aifs.config": settings.put,
        }
        self._requests: dict[bytes, Request] = {
            b"user.aifs.drain": burst.request_drain,
            b"user.aifs.stage": burst.stage,
            b"user.aifs.evict": burst.evict,
        }

    async def get(self, ino: int, name: bytes, caller: CallerLike) -> bytes:
        """Raises NoAttribute for a hint that does not exist or is not readable here,
        AccessDenied.
        """
        rights.of_hint(name).read(await self._attributes.getattr(ino), caller)
        stem, _, number = name.rpartition(b".")
        if stem == operation_log.ATTRIBUTE and number.isdigit():
            return await self._trace(int(number))
        if name == operation_log.ATTRIBUTE:
            return await self._trace()
        if name == why.ATTRIBUTE or (stem == why.ATTRIBUTE and number.isdigit()):
            log, pid = self._operation_log, 0
            if name != why.ATTRIBUTE and not (pid := int(number) or process_of(caller.pid)):
                raise NoAttribute("the process that asks cannot be seen from here")
            return _json(await why.tell(log, self._store.engine, ino, caller, pid))
        if stem == places.ATTRIBUTE and number.isdigit():
            return await places.tell(self._store.engine, self._io, ino, int(number))
        if name in policy_hints.DEFAULTS:
            return (await self._policies.get(ino, name)).encode()
        if name == b"user.aifs.keep" and (keep := await self._retention.policy_of(ino)):
            return keep.encode()
        if name == b"user.aifs.shown":
            if shown_ns := (await self._attributes.getattr(ino)).shown_ns:
                return b"%d.%09d" % divmod(shown_ns, 10**9)
            raise NoAttribute()
        if name == b"user.aifs.age" and (rule := await self._aging.rule_of(ino)):
            return rule.encode()
        if name == b"user.aifs.trash" and (period := self._rules.text_of(ino)):
            return period.encode()
        if stem == trash_requests.ATTRIBUTE and number.isdigit():
            return _json(await self._trash.tell(caller, int(number)))
        return _json(await self._tell(ino, name, caller))

    async def _tell(self, ino: int, name: bytes, caller: CallerLike) -> dict[str, Any]:
        """What a hint says that tells JSON. Raises NoAttribute."""
        if name == b"user.aifs.info":
            inode = await self._attributes.getattr(ino)
            return await reports.describe(self._store, inode, self._io.table.open.get(ino))
        if name == b"user.aifs.state":
            return await self._burst.state(ino)
        if name == b"user.aifs.sharing":
            return await self._burst.sharing(ino)
        if name == b"user.aifs.refused" and (refused := self._refusals.find(ino, caller)):
            return refused
        if name == b"user.aifs.drain":
            return reports.without_reason(await self._burst.progress(ino), caller)
        if name == b"user.aifs.quota":
            return await self._quotas.tell(ino)
        if name == b"user.aifs.status":
            return await self._status.tell(caller)
        if name == b"user.aifs.start" and (told := self._starts.tell(ino)):
            return told
        if name == b"user.aifs.order" and (told := self._epochs.tell(ino, caller))["epochs"]:
            return told
        if name == trash_requests.ATTRIBUTE:
            return await self._trash.tell(caller)
        if name == b"user.aifs.config":
            return self._settings.tell()
        if name == b"user.aifs.hosts":
            return await self._cluster.tell()
        if name == b"user.aifs.servers":
            told = reports.without_paths(await self._server_admin.describe(), caller)
            rows = [reports.without_reason(row, caller) for row in told["servers"]]
            return told | {"servers": rows}
        if name == b"user.aifs.scrub":
            return reports.without_paths(self._scrub.status(), caller)
        if name == b"user.aifs.pending":
            return await self._group_hints.tell_pending(ino, caller)
        if name == b"user.aifs.group":
            return await self._group_hints.tell(ino, caller)
        if name == b"user.aifs.quotas":
            return await self._quotas.list_all(caller)
        stem, _, number = name.rpartition(b".")
        if stem == b"user.aifs.group" and number.isdigit():
            return await self._group_hints.tell(ino, caller, int(number))
        if stem == b"user.aifs.quotas" and number.isdigit():
            return await self._quotas.list_all(caller, int(number))
        raise NoAttribute()

    async def _trace(self, start: int | None = None) -> bytes:
        return await operation_log.tell(self._operation_log, self._store.engine, start)

    @property
    def settable(self) -> set[bytes]:
        """All hints that ``put`` takes."""
        return {
            b"user.aifs.remove",
            b"user.aifs.backup",
            *policy_hints.DEFAULTS,
            *server_hints.ORDERS,
            *self._statements,
            *self._requests,
        }

    async def put(self, ino: int, name: bytes, value: bytes, caller: CallerLike) -> None:
        """Raises Invalid for a wrong value, NotPermitted and AccessDenied for what ``caller``
        cannot set, and what the function of the hint raises; ``user.aifs.refused`` then says why.
        """
        text = os.fsdecode(value)
        with self._refusals.noted(ino, caller, name.decode("utf-8", "replace")):
            rights.of_hint(name).change(await self._attributes.getattr(ino), caller)
            if name in policy_hints.DEFAULTS:
                await self._policies.put(ino, name, text.strip())
            elif name in self._statements:
                await self._statements[name](ino, text.strip(), caller)
            elif name in self._requests:
                if value:
                    raise Invalid("it takes no value")
                await self._requests[name](ino)
            elif name in server_hints.ORDERS:
                await server_hints.order(self._server_admin, name, text)
            elif name == b"user.aifs.remove":
                await self._names.remove_tree(ino, value, caller, locked=True)
            elif name == b"user.aifs.backup":
                token, _, directory = text.partition(":")
                if directory and not os.path.isabs(directory):
                    raise Invalid(f"backup: {directory!r} is not an absolute path")
                # Not waited for: the kernel locks the directory while it sets an attribute.
                self._backup.request(token, directory)

    async def _set_atime(self, ino: int, text: str, caller: CallerLike) -> None:
        if text not in ATIMES:
            raise Invalid(f"{text!r} is none of {', '.join(ATIMES)}")
        self._options.atime = text
        self._io.table.recall_all()

    async def _publish_as(self, ino: int, text: str, caller: CallerLike) -> None:
        what = await publish_hint.asked(self._store.engine, ino, text, caller)
        await self._publishing.publish(what, caller)

    async def _order_epoch(self, ino: int, text: str, caller: CallerLike) -> None:
        self._options.require_writable()
        await self._epochs.order(ino, text, caller)

    async def _order_scrub(self, ino: int, text: str, caller: CallerLike) -> None:
        self._options.require_writable()
        self._scrub.order(text)

    async def _fence(self, ino: int, text: str, caller: CallerLike) -> None:
        await self._cluster.fence(text)

    async def remove(self, ino: int, name: bytes, caller: CallerLike) -> None:
        """Raises NotPermitted for what cannot be removed, NoAttribute where it is not there."""
        with self._refusals.noted(ino, caller, name.decode("utf-8", "replace")):
            rights.of_hint(name).change(await self._attributes.getattr(ino), caller)
            if name == b"user.aifs.pending":
                await self._groups.abandon(ino, caller)
            elif name == b"user.aifs.group":
                await self._groups.cancel(ino, caller=caller)
            elif name == b"user.aifs.keep":
                if not await self._retention.policy_of(ino):
                    raise NoAttribute()
                await self._retention.set_policy(ino, "", caller)
            elif name == b"user.aifs.age":
                if not await self._aging.rule_of(ino):
                    raise NoAttribute()
                await self._aging.set_rule(ino, "")
            elif name == b"user.aifs.trash":
                if not self._rules.text_of(ino):
                    raise NoAttribute()
                await self._rules.set(ino, "")
            elif name == b"user.aifs.quota":
                await self._quotas.remove(ino)
            elif name in policy_hints.DEFAULTS:
                await self._policies.remove(ino, name)
            else:
                raise NotPermitted("this hint cannot be removed")


def _json(answer: dict[str, Any]) -> bytes:
    """Padded, since getfattr(1) asks twice, first for the length, and numbers may have grown
    meanwhile.
    """
    text = json.dumps(answer).encode()
    return text.ljust(-(-(len(text) + 8) // 64) * 64)
