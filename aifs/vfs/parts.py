"""What an open filesystem is made of: each part is made here, once, and knows only those above
it.
"""

from aifs.burst.tier import BurstTier
from aifs.core.budget import RELAX_EVERY_S
from aifs.core.upkeep import Job, Upkeep, Work
from aifs.files.collector import Collector
from aifs.files.containers import Containers
from aifs.files.damage import Damage
from aifs.files.drain import Drain
from aifs.files.file_io import FileIO
from aifs.files.handles import Handles
from aifs.files.kernel import Kernel
from aifs.files.needs import Needs
from aifs.files.stage import WORKERS as STAGERS
from aifs.files.stage import Stager
from aifs.files.writeback import WriteBack
from aifs.store.backup import Backup
from aifs.store.ids import IdAllocator
from aifs.store.store import Store
from aifs.upkeep.compaction import INTERVAL_S as COMPACT_EVERY_S
from aifs.upkeep.compaction import Compaction
from aifs.upkeep.evict import PAUSE_S, Evictor
from aifs.upkeep.from_copies import FromCopies
from aifs.upkeep.rebuild import Rebuild
from aifs.upkeep.scrub import Scrub
from aifs.upkeep.scrub_state import Findings
from aifs.upkeep.server_admin import WATCHERS, ServerAdmin
from aifs.upkeep.trash import Trash
from aifs.vfs.groups.group_drain import GroupDrain
from aifs.vfs.groups.members import Members
from aifs.vfs.groups.protocol import Groups
from aifs.vfs.publishing.retention import Retention


class Parts:
    """The parts of one open store, from the lowest to the highest: each is given those that it
    uses, all of which stand above it here, and nothing is added to a part afterwards.

    What has to go up goes by way of three small objects that are made first: ``upkeep`` takes word
    of work for others, ``damage`` of what is to be made whole, and ``findings`` of what a scrub has
    found, which decides, by ``needs``, which burst copies stay.
    """

    def __init__(self, store: Store, kernel: Kernel) -> None:
        config, engine, servers = store.config, store.engine, store.servers
        self.store, self.kernel = store, kernel
        self.upkeep = upkeep = Upkeep()
        self.damage = damage = Damage(upkeep)
        self.findings = findings = Findings()

        # What keeps the bytes of files, and gives up what nobody refers to.
        self.backup = Backup(config, store.uuid, engine, servers, upkeep)
        self.ids = ids = IdAllocator(engine)
        self.handles = handles = Handles(kernel)
        self.tier = tier = BurstTier(config, servers, engine, ids.take, upkeep)
        self.needs = needs = Needs(engine, servers, findings.wrong_objects)
        self.collector = collector = Collector(engine, servers, self.backup, tier, upkeep)
        self.containers = containers = Containers(
            engine,
            servers,
            ids,
            collector,
            servers.budget,
            config.layout.container_size,
            config.data.verify == "read",
            damage.report,
            config.data.min_spare,
        )
        self.io = io = FileIO(
            config, engine, servers, tier, containers, ids, collector, damage, needs, upkeep
        )
        self.writeback = writeback = WriteBack(
            io, engine, servers, config.data.writeback_interval_s
        )
        self.stager = io.burst.stager = Stager(config, servers, tier, io, upkeep)
        self.drain = drain = Drain(
            config, engine, servers, tier, io, ids, collector, containers, handles, upkeep
        )

        # Groups of ranks.
        self.group_drain = GroupDrain(
            config, engine, servers, io, ids, collector, containers, drain.mover
        )
        members = Members(engine, tier, io, writeback, drain, self.group_drain)
        self.groups = Groups(
            engine, io, writeback, ids, drain, members, upkeep, config.burst.drain_deadline_s
        )

        # What looks after the store.
        self.trash = Trash(engine, io, drain, collector, upkeep, self.groups.gone, kernel)
        self.retention = Retention(config, engine, io, self.trash, upkeep, kernel)
        self.evictor = evictor = Evictor(engine, tier, io, collector, needs)
        self.compaction = compaction = Compaction(
            engine, servers, containers, collector, config.layout.compact_above
        )
        self.from_copies = from_copies = FromCopies(
            engine, servers, io, containers, drain, needs, findings
        )
        self.rebuild = rebuild = Rebuild(
            config,
            engine,
            servers,
            io,
            ids,
            containers,
            compaction,
            handles,
            self.backup,
            from_copies,
            damage,
            upkeep,
        )
        self.scrub = Scrub(
            config, engine, servers, rebuild, from_copies, evictor, handles, findings, upkeep
        )
        self.server_admin = ServerAdmin(
            store,
            tier,
            io,
            drain,
            collector,
            self.backup,
            evictor,
            rebuild,
            from_copies,
            upkeep,
        )

    def jobs(self, read_only: bool) -> dict[Work, Job]:
        """The background work for as long as the store is served."""
        servers, commit_s = self.store.servers, self.store.config.meta.commit_interval_s
        always = {
            Work.COLLECT: Job(self.collector.collect),
            Work.RELEASE: Job(self.collector.release),
            Work.WRITE_BACK: Job(self.writeback.work, retry_s=commit_s),
            Work.LOOK_AT_BURST: Job(self.tier.work),
            Work.WATCH_SERVERS: Job(self.server_admin.watch, workers=WATCHERS),
            Work.SERVERS: Job(self.server_admin.work),
            Work.BACKUP: Job(self.backup.work),
            Work.RELAX: Job(servers.budget.relax, first_s=RELAX_EVERY_S),
        }
        if read_only:
            return always
        return always | {
            Work.DRAIN: Job(self.drain.work, self.drain.workers),
            Work.GROUPS: Job(self.groups.work),
            Work.EVICT: Job(self.evictor.work, retry_s=PAUSE_S),
            Work.STAGE: Job(self.stager.work, STAGERS),
            Work.COMPACT: Job(self.compaction.work, first_s=COMPACT_EVERY_S),
            Work.TRASH: Job(self.trash.work),
            Work.STRAYS: Job(self.rebuild.strays.work),
            Work.REBUILD: Job(self.rebuild.work),
            Work.RETENTION: Job(self.retention.work),
            Work.SCRUB: Job(self.scrub.work),
        }
