"""What all storing of groups works with, and what the files of one kind ask for."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from aifs.burst.transfer import Mover
from aifs.core.budget import Budget
from aifs.data.workers import gather
from aifs.files.collector import Collector
from aifs.files.containers import Containers
from aifs.files.flips import Flips
from aifs.layout.redundancy import Redundancy
from aifs.meta.kv import Engine
from aifs.store.ids import IdAllocator
from aifs.vfs.groups.bandwidths import Bandwidths
from aifs.vfs.groups.prepared import Prepared


class Asked(NamedTuple):
    """What the policy of a file says of where its bytes go. ``servers``: none: any."""

    servers: tuple[int, ...]
    redundancy: Redundancy


@dataclass
class Tools:
    """What storing works with; one per mount."""

    engine: Engine
    budget: Budget
    ids: IdAllocator
    collector: Collector
    containers: Containers
    mover: Mover
    flips: Flips
    bandwidths: Bandwidths

    async def work(self, member: Prepared, function: Callable[..., Any], *args: Any) -> Any:
        """In a worker thread, of the device of a member."""
        return (await gather([(member.copy.device.workers, function, args)]))[0]
