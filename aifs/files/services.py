"""The services of an open store that its parts share."""

from dataclasses import dataclass

from aifs.core.config import Config
from aifs.core.upkeep import Upkeep
from aifs.data.servers import Servers
from aifs.files.collector import Collector
from aifs.files.heirlooms import Heirlooms
from aifs.files.kernel import Kernel
from aifs.files.looked_up import LookedUp
from aifs.files.quotas import Quotas
from aifs.files.refusals import Refusals
from aifs.files.serve_options import ServeOptions
from aifs.meta.kv import Engine
from aifs.peers.peers import Peers
from aifs.store.ids import IdAllocator
from aifs.store.server_table import ServerTable


@dataclass(frozen=True, slots=True)
class Services:
    """Leaves alone: none of them knows a part that is given this record. A part takes what it needs
    in its constructor, and names the other parts that it uses.
    """

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
    peers: Peers | None
    """None where the store has one host."""
