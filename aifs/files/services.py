"""The services of an open store that its parts share, and the smallest of them."""

from dataclasses import dataclass
from typing import NamedTuple

from aifs.core.config import Config
from aifs.core.errors import ReadOnly
from aifs.core.upkeep import Upkeep
from aifs.data.servers import Servers
from aifs.files.collector import Collector
from aifs.files.kernel import Kernel
from aifs.files.looked_up import LookedUp
from aifs.files.quotas import Quotas
from aifs.files.refusals import Refusals
from aifs.layout.hint import Policy
from aifs.meta import namespace
from aifs.meta.kv import Engine
from aifs.meta.quotas import inherited
from aifs.meta.records import Inode
from aifs.peers.peers import Peers
from aifs.store.ids import IdAllocator
from aifs.store.server_table import ServerTable

_ATIME_INTERVAL_NS = 24 * 3600 * 10**9  # relatime, as in mount(8)

_NEVER_NS = (1 << 64) - 1


@dataclass(slots=True)
class ServeOptions:
    """``mountpoint``: '' without a kernel. ``atime``: one of ATIMES, which may change at any
    time."""

    mountpoint: str = ""
    read_only: bool = False
    atime: str = "relatime"

    def access_due_ns(self, inode: Inode) -> int:
        """From when an open for reading is an access, once a day; 0: each time."""
        if self.read_only or self.atime == "noatime":
            return _NEVER_NS
        if self.atime == "strictatime":
            return 0
        if inode.atime_ns <= max(inode.mtime_ns, inode.ctime_ns):
            return 1
        return max(1, inode.atime_ns + _ATIME_INTERVAL_NS)

    def require_writable(self) -> None:
        """Raises ReadOnly. For requests that the kernel lets pass on a read-only mount."""
        if self.read_only:
            raise ReadOnly()


_DIRECTORIES_MAX = 1024


class Heirloom(NamedTuple):
    """What is inherited by all that is made in a directory."""

    policy: Policy | None
    project: int


class Heirlooms:
    """The heirlooms of the directories that were asked for last. Used from one trio thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._of: dict[int, Heirloom] = {}
        """By directory."""
        self._changes = 0  # so that what was read before a change is not kept after it

    def changed(self, ino: int) -> None:
        """The record of ``ino`` is another one now."""
        self._of.pop(ino, None)
        self._changes += 1

    async def of(self, directory: int) -> Heirloom:
        """Raises NotFound."""
        try:
            return self._of[directory]
        except KeyError:
            if len(self._of) >= _DIRECTORIES_MAX:
                self._of.clear()
            changes = self._changes
            inode = await self._engine.view(namespace.get_inode, directory)
            found = Heirloom(inode.policy, inherited(inode))
            if changes == self._changes:
                self._of[directory] = found
            return found


@dataclass(frozen=True, slots=True)
class Services:
    """Leaves alone: none knows a part that gets this record. Parts take what they need in their
    constructors, and name other parts."""

    config: Config
    engine: Engine
    servers: Servers
    ids: IdAllocator
    collector: Collector
    upkeep: Upkeep
    kernel: Kernel
    options: ServeOptions
    quotas: Quotas
    heirlooms: Heirlooms
    looked_up: LookedUp
    refusals: Refusals
    table: ServerTable
    peers: Peers
