"""What an open filesystem is made of: each part is made here, once, and knows only those above it."""

from aifs.burst.tier import BurstTier
from aifs.vfs.collector import Collector
from aifs.vfs.compaction import Compaction
from aifs.vfs.containers import Containers
from aifs.vfs.drain import Drain
from aifs.vfs.evict import Evictor
from aifs.vfs.file_io import FileIO
from aifs.vfs.handles import Handles
from aifs.vfs.ids import IdAllocator
from aifs.vfs.stage import Stager
from aifs.vfs.store import Store
from aifs.vfs.writeback import WriteBack


class Parts:
    """The parts of one open store. Those in ``background`` have a task each."""

    def __init__(self, store: Store) -> None:
        config, engine, servers = store.config, store.engine, store.servers
        self.store = store
        self.ids = ids = IdAllocator(engine)
        self.handles = handles = Handles()
        self.collector = collector = Collector(engine, servers)
        self.tier = tier = BurstTier(config, servers, ids.take)
        self.containers = containers = Containers(
            engine, servers, ids, collector, servers.budget, config.layout.container_size, config.data.verify == "read"
        )
        self.io = io = FileIO(config, engine, servers, tier, containers, ids, collector)
        self.writeback = WriteBack(
            io, engine, servers, config.meta.commit_interval_s, config.data.writeback_interval_s
        )
        self.stager = io.burst.stager = Stager(config, engine, servers, tier, io, collector)
        self.drain = Drain(config, engine, servers, tier, io, ids, collector, containers, handles)
        self.evictor = Evictor(engine, tier, io, collector)
        self.compaction = Compaction(engine, servers, containers, collector, config.layout.compact_above)
        collector.on_deleted = tier.deleted

    def background(self, read_only: bool) -> tuple:
        """What has a method ``run`` to be called for as long as the store is served."""
        always = (self.collector, self.writeback, self.tier)
        return always if read_only else (*always, self.drain, self.evictor, self.stager, self.compaction)
