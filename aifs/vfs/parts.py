"""What an open filesystem is made of: each part is made here, once, and knows only those above
it.
"""

from aifs.burst.tier import BurstTier
from aifs.data.latency import Hedging
from aifs.files.collector import Collector
from aifs.files.containers import Containers
from aifs.files.drain import Drain
from aifs.files.file_io import FileIO
from aifs.files.handles import Handles
from aifs.files.stage import Stager
from aifs.files.writeback import WriteBack
from aifs.store.backup import Backup
from aifs.store.ids import IdAllocator
from aifs.store.store import Store
from aifs.upkeep.compaction import Compaction
from aifs.upkeep.evict import Evictor
from aifs.upkeep.from_copies import FromCopies
from aifs.upkeep.rebuild import Rebuild
from aifs.upkeep.scrub import Scrub
from aifs.upkeep.server_admin import ServerAdmin
from aifs.upkeep.trash import Trash
from aifs.vfs.groups.group_drain import GroupDrain
from aifs.vfs.groups.members import Members
from aifs.vfs.groups.protocol import Groups
from aifs.vfs.publishing.retention import Retention


class Parts:
    """The parts of one open store. Those in ``background`` have a task each."""

    def __init__(self, store: Store) -> None:
        config, engine, servers = store.config, store.engine, store.servers
        self.store = store
        servers.hedging = Hedging(config.data.hedge_s)
        self.backup = Backup(config, store.uuid, engine, servers)
        self.ids = ids = IdAllocator(engine)
        self.handles = handles = Handles()
        self.tier = tier = BurstTier(config, servers, engine, ids.take)
        self.collector = collector = Collector(engine, servers, self.backup, tier)
        self.containers = containers = Containers(
            engine,
            servers,
            ids,
            collector,
            servers.budget,
            config.layout.container_size,
            config.data.verify == "read",
            config.data.min_spare,
        )
        self.io = io = FileIO(config, engine, servers, tier, containers, ids, collector)
        self.writeback = WriteBack(
            io, engine, servers, config.meta.commit_interval_s, config.data.writeback_interval_s
        )
        self.stager = io.burst.stager = Stager(config, engine, servers, tier, io, collector)
        self.drain = Drain(config, engine, servers, tier, io, ids, collector, containers, handles)
        self.group_drain = group_drain = GroupDrain(
            config, engine, servers, tier, io, ids, collector, containers, self.drain.mover
        )
        members = Members(engine, tier, io, self.writeback, self.drain, group_drain)
        self.groups = Groups(
            engine, io, self.writeback, ids, self.drain, members, config.burst.drain_deadline_s
        )
        self.trash = Trash(engine, io, self.drain, collector)
        self.trash.on_gone = self.groups.gone
        self.retention = Retention(config, engine, io, self.trash)
        self.evictor = Evictor(engine, servers, tier, io, collector)
        self.compaction = Compaction(
            engine, servers, containers, collector, config.layout.compact_above
        )
        self.rebuild = Rebuild(
            config,
            engine,
            servers,
            io,
            ids,
            collector,
            containers,
            self.compaction,
            handles,
            self.backup,
        )
        self.from_copies = from_copies = FromCopies(
            engine, servers, io, containers, self.drain, self.evictor
        )
        self.scrub = Scrub(
            config, engine, servers, self.rebuild, from_copies, self.evictor, handles
        )
        self.server_admin = ServerAdmin(store, tier, self.drain, self.evictor, self.rebuild)
        self.server_admin.leave_backups = self.backup.leave_servers
        self.rebuild.rescue, self.rebuild.restore = from_copies.rescue, from_copies.restore_users
        self.server_admin.rescue, self.server_admin.clean_up = from_copies.rescue, self.clean_up
        self.evictor.restore, self.evictor.wrong_objects = (
            from_copies.restore,
            self.scrub.wrong_objects,
        )
        io.burst.find_needed = self.evictor.find_needed
        from_copies.on_restored = self.scrub.restored
        io.on_damage = containers.files.on_damage = self.rebuild.on_damage
        io.capacity.on_due = self.rebuild.wake

    async def clean_up(self) -> None:
        """Delete now what waits to be deleted on servers. Raises NoSpace or Unavailable if the
        metadata store cannot be changed.
        """
        await self.collector.drain(urgent=True)
        await self.rebuild.strays.sweep(urgent=True)

    def background(self, read_only: bool) -> tuple:
        """What has a method ``run`` to be called for as long as the store is served."""
        always = (
            self.collector,
            self.writeback,
            self.tier,
            self.server_admin,
            self.backup,
            self.store.servers.budget,
        )
        if read_only:
            return always
        between_tiers = (self.drain, self.groups, self.evictor, self.stager)
        return (
            *always,
            *between_tiers,
            self.compaction,
            self.trash,
            self.rebuild,
            self.retention,
            self.scrub,
        )
