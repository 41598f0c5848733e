"""Where the metadata of a store are, and the right of a process to use it: what differs between a
store of one host and one of many.
"""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

import trio

from aifs.core.errors import StoreBusy
from aifs.core.log import logger
from aifs.data.servers import Servers
from aifs.meta.kv import Engine
from aifs.store.owner import OwnerLock

if TYPE_CHECKING:
    from aifs.store.hosts import Hosts

_log = logger(__name__)


class StoreRight(ABC):
    """The right of this process to a store. Used from one trio thread; ``run`` keeps it up in the
    background.
    """

    def __init__(self, servers: Servers) -> None:
        self.ended = ""
        """Why there is no right any more."""
        self.over = trio.Event()
        """Set when there is none."""
        self.doubt = ""
        """Why nobody can tell whether there is one, so that requests wait; "": it is sure."""
        self._servers = servers

    @abstractmethod
    async def take(self, force: bool = False) -> None:
        """Get the right; durable on return. ``force``: the user says that its owner is dead.

        Raises StoreBusy or StoreError, which name its owner.
        """

    @abstractmethod
    async def run(self) -> None:
        """Keep it up until cancelled. When it has ended no directory is used any more."""

    @abstractmethod
    def give_back(self) -> None:
        """The next owner may have the store at once, when the servers' threads have ended. Blocks
        for a moment.
        """

    def require(self) -> None:
        """Raises StoreBusy if there is no right any more."""
        if self.ended:
            raise StoreBusy(self.ended)

    def _end(self, why: str) -> None:
        """There is no right any more, and nothing is written."""
        if not self.ended:
            self.ended = why
            _log.error("%s", why)
            self._servers.give_up(why)
            self.over.set()


class Metadata(Protocol):
    """The metadata of a store, which have been found, and how they are opened."""

    store: str
    """The store's uuid, as it was found beside the metadata."""
    where: str
    """For messages."""
    remedy: str
    """What to do if they are damaged."""
    hosts: "Hosts | None"
    """All that have the store mounted, once it is open; None: it has one host."""

    async def open(self) -> Engine:
        """Blocks the thread. Raises StoreError, StoreBusy, BrokenDatabase."""

    def give_up(self, engine: Engine) -> None:
        """Let go of what ``open`` has returned: the store cannot be used. Blocks."""

    def right(self, owner: OwnerLock, servers: Servers) -> StoreRight:
        """``owner``: of the metadata directory."""
