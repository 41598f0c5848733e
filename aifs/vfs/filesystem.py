"""An open store as a POSIX filesystem: the parts that it is made of, and its table of
operations.
"""

from functools import partial

from aifs.burst.mirrors import Mirrors
from aifs.burst.pool import Pool
from aifs.burst.remote import Homes
from aifs.burst.tier import BurstTier
from aifs.burst.transfer import Limiter, Mover
from aifs.core.budget import RELAX_EVERY_S
from aifs.core.loop_share import LoopShare
from aifs.core.role import Role
from aifs.core.served import AllServed
from aifs.core.upkeep import Job, Upkeep, Work
from aifs.files.collector import Collector
from aifs.files.containers import Containers
from aifs.files.damage import Damage
from aifs.files.drain import Drain
from aifs.files.file_io import FileIO
from aifs.files.handles import Handles
from aifs.files.heirlooms import Heirlooms
from aifs.files.home import Home
from aifs.files.kernel import Kernel
from aifs.files.lock_homes import SERVICE, Alone, LockHosts, PeerHosts
from aifs.files.locks import Locks
from aifs.files.looked_up import LookedUp
from aifs.files.mirror_host import MirrorHost
from aifs.files.needs import Needs
from aifs.files.open_inodes import ACCESSES_S
from aifs.files.quotas import Quotas
from aifs.files.refusals import Refusals
from aifs.files.serve_options import ServeOptions
from aifs.files.stage import WORKERS as STAGERS
from aifs.files.together import Together
from aifs.files.tree_drain import TreeDrain
from aifs.files.writeback import WriteBack
from aifs.reads.epochs import WORKERS as EPOCHS_AT_ONCE
from aifs.reads.epochs import Epochs
from aifs.reads.recording import StartRecordings
from aifs.reads.starts import Starts
from aifs.reads.virtual.files import VirtualFiles
from aifs.saves.barrier import Barrier
from aifs.saves.closing import Closing
from aifs.saves.course import Course
from aifs.saves.group_drain import GroupDrain
from aifs.saves.joint import Joint
from aifs.saves.life import Life
from aifs.saves.living import Living
from aifs.saves.members import Members
from aifs.saves.naming import Naming
from aifs.saves.part_host import PartHost
from aifs.saves.parts import Parts
from aifs.saves.protocol import Groups
from aifs.saves.publish import Publishing
from aifs.saves.retention import Retention
from aifs.saves.table import GroupTable
from aifs.store.backup import Backup
from aifs.store.ids import IdAllocator
from aifs.store.store import Store
from aifs.upkeep.aging import Aging
from aifs.upkeep.compaction import INTERVAL_S as COMPACT_EVERY_S
from aifs.upkeep.compaction import Compaction
from aifs.upkeep.doomed import DoomedTrees
from aifs.upkeep.evict import PAUSE_S, Evictor
from aifs.upkeep.from_copies import FromCopies
from aifs.upkeep.rebuild import Rebuild
from aifs.upkeep.scrub import Scrub
from aifs.upkeep.scrub_state import Findings
from aifs.upkeep.server_admin import WATCHERS, ServerAdmin
from aifs.upkeep.trash import Trash
from aifs.upkeep.trash_rules import TrashRules
from aifs.vfs.attributes import Attributes
from aifs.vfs.burst_hints import BurstHints
from aifs.vfs.clones import Clones
from aifs.vfs.cluster import Cluster
from aifs.vfs.following import Following
from aifs.vfs.group_hints import GroupHints
from aifs.vfs.group_publish import GroupPublishing
from aifs.vfs.hints import Hints
from aifs.vfs.names import Names
from aifs.vfs.open_files import OpenFiles
from aifs.vfs.operation_log import OperationLog
from aifs.vfs.policy_hints import PolicyHints
from aifs.vfs.quotas import QuotaTrees
from aifs.vfs.recovery import Recovered
from aifs.vfs.reports import MountStatus
from aifs.vfs.server_hints import ServerOrders
from aifs.vfs.settings import Settings, set_log_level
from aifs.vfs.trash_requests import TrashRequests
from aifs.vfs.whole_files import WholeFiles
from aifs.vfs.why import Why
from aifs.vfs.xattrs import ExtendedAttributes

_DEAD_WHILE_OPEN = 32
"""A container of which one part of so many is dead is not left open until it is full."""


class Filesystem:
    """An open store as a POSIX filesystem. Made by ``open_filesystem``; used from one trio thread.

    It decides nothing. Its constructor makes the parts, from the lowest to the highest: each is
    given those that it uses, all of which stand above it here, and nothing is added to a part
    afterwards. What has to go up goes by way of three small objects that are made first: ``upkeep``
    takes word of work for others, ``damage`` of what is to be made whole, and ``findings`` of what
    a scrub has found, which decides, by ``needs``, which burst copies stay.

    The operations are methods of the parts, under the names that the kernel has for them. They
    raise FsError subclasses. A change has happened when its operation returns: everybody sees it,
    it survives the daemon's death, and a power cut within the commit interval or after the next
    fsync, fsyncdir or sync. A rename is durable when it returns, with all that lies below the new
    name.
    """

    def __init__(
        self,
        store: Store,
        kernel: Kernel,
        options: ServeOptions,
        share: LoopShare,
        hosts: LockHosts | None = None,
    ) -> None:
        """``hosts``: whom to share locks with, if not with those that the store has."""
        config, engine, servers = store.config, store.engine, store.servers
        self.store, self.kernel, self.options = store, kernel, options
        self.role: Role = store.role
        self.recovered = recovered = Recovered()
        self.refusals = refusals = Refusals()
        self.operation_log = operation_log = OperationLog(kernel.see_all)
        self.served = served = AllServed()
        self.upkeep = upkeep = Upkeep(share)
        self.damage = damage = Damage(upkeep)
        self.findings = findings = Findings()

        # What keeps the bytes of files, and gives up what nobody refers to.
        self.backup = backup = Backup(config, store.uuid, engine, servers, upkeep)
        self.ids = ids = IdAllocator(engine)
        self.quotas = quotas = Quotas(engine)
        self.handles = handles = Handles(kernel, options.access_due_ns, engine.host != 0, quotas)
        self.tier = tier = BurstTier(config, servers, engine, ids.take, upkeep)
        homes = Homes(engine, servers, store.peers, config.host.home_wait_s)
        self.needs = needs = Needs(engine, servers, findings.wrong_objects)
        self.collector = collector = Collector(engine, servers, backup, tier, upkeep, self.role)
        self.pool = pool = Pool(
            config.data.movers,
            servers,
            store.uuid,
            config.data.threads,
            config.data.hedge_s,
            [store.owner.fd],
        )
        self.containers = containers = Containers(
            engine,
            servers,
            ids,
            collector,
            config.layout.container_size,
            config.data.verify == "read",
            damage.report,
            config.data.min_spare,
        )
        peers = store.peers
        together = None if peers is None else Together(servers.cache, peers)
        self.io = io = FileIO(
            config,
            engine,
            servers,
            tier,
            containers,
            ids,
            collector,
            damage,
            needs,
            handles,
            upkeep,
            pool,
            homes,
            Mirrors(engine, peers),
            together,
            quotas,
        )
        self.writeback = writeback = WriteBack(
            engine, tier, io, servers, config.data.writeback_interval_s
        )
        self.stager = stager = io.stager
        ended = operation_log.ended
        self.drain = drain = Drain(
            config, servers, tier, io, ids, collector, containers, handles, upkeep, ended
        )

        # Groups of ranks.
        self.group_drain = group_drain = GroupDrain(
            config, engine, servers, io, ids, collector, containers, drain.movers
        )
        members = Members(engine, tier, io, writeback, drain, group_drain)
        barrier = Barrier(engine, servers, io, writeback, homes, self.role, store.peers)
        parts = Parts(engine, barrier, self.role, servers, store.peers)
        joint = Joint(engine, parts, members, group_drain.storing, config.host.bandwidth)
        self.group_table = table = GroupTable(engine, upkeep)
        part_host = PartHost(engine, table, members, drain, parts, joint, store.peers)
        course = Course(engine, table, members, parts, joint, part_host, ended)
        closing = Closing(engine, io, writeback, drain, table, members, parts, course)
        naming = Naming(engine, io, table)
        living = Living(engine, table, parts, course)
        self.groups = groups = Groups(engine, io, barrier, ids, table, parts, course, living)
        self.group_life = group_life = Life(
            engine,
            drain,
            table,
            members,
            parts,
            course,
            living,
            self.role,
            config.burst.drain_deadline_s,
        )

        # What looks after the store.
        self.trash_rules = rules = TrashRules(engine, upkeep, config.trash.keep_s)
        self.doomed = doomed = DoomedTrees(
            engine, io, drain, collector, upkeep, rules, closing.gone, kernel
        )
        self.trash = trash = Trash(engine, servers, drain, collector, doomed, rules, upkeep)
        self.retention = retention = Retention(config, engine, io, doomed, rules, upkeep, kernel)
        self.evictor = evictor = Evictor(engine, tier, io, collector, needs)
        self.compaction = compaction = Compaction(
            engine,
            servers,
            containers,
            collector,
            io.sets.movers(Mover(servers.budget, Limiter(0), config.burst.ioprio)),
            share,
            config.layout.compact_above,
            config.layout.container_size // _DEAD_WHILE_OPEN,
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
            backup,
            from_copies,
            damage,
            upkeep,
        )
        self.aging = aging = Aging(config, engine, servers, io, ids, containers, collector, upkeep)
        self.scrub = scrub = Scrub(
            config, engine, servers, io, rebuild, from_copies, evictor, handles, findings, upkeep
        )
        self.server_admin = server_admin = ServerAdmin(
            store,
            tier,
            io,
            drain,
            collector,
            backup,
            evictor,
            rebuild,
            from_copies,
            upkeep,
        )

        # What programs ask for.
        virtual = VirtualFiles(engine, io, servers, refusals)
        recordings = StartRecordings(stager, handles)
        self.files = files = OpenFiles(
            engine,
            tier,
            handles,
            io,
            writeback,
            drain,
            config.burst.drain_on_fsync,
            closing,
            kernel,
            options,
            virtual,
            recordings,
            quotas,
        )
        self.home: Home | None = None
        """What is done here for other hosts."""
        self.mirror_host: MirrorHost | None = None
        """The same, with mirrors."""
        if store.peers is not None:
            self.home = Home(
                engine, servers, tier, io, writeback, drain, files.give_up, kernel, store.peers
            )
            self.mirror_host = MirrorHost(
                engine, servers, tier, homes, collector, io, drain, kernel, self.role, store.peers
            )
            hosts = PeerHosts(store.peers)
        self.has_locks = hosts is not None
        """Whether flock(2) and fcntl(2) locks are ours: several hosts share them."""
        self.locks = locks = Locks(engine, hosts or Alone())
        if store.peers is not None:
            store.peers.serve(SERVICE, locks.answer)
        self.heirlooms = heirlooms = Heirlooms(engine)
        self.attributes = attributes = Attributes(
            engine, servers, io, files, virtual, quotas, upkeep, heirlooms
        )
        self.quota_trees = quota_trees = QuotaTrees(
            engine, io, attributes, heirlooms, quotas, upkeep
        )
        looked_up = LookedUp(engine, kernel)
        self.names = names = Names(
            engine,
            ids,
            tier,
            io,
            drain,
            closing,
            doomed,
            rules,
            kernel,
            files,
            heirlooms,
            options,
            virtual,
            looked_up,
            recordings,
            quotas,
        )
        trees = TreeDrain(engine, io, drain, homes)
        burst_hints = BurstHints(
            engine, tier, io, drain, stager, needs, evictor, attributes, homes, trees, store.peers
        )
        self.publishing = publishing = Publishing(
            engine,
            ids,
            io,
            barrier,
            drain,
            naming,
            doomed,
            rules,
            retention,
            kernel,
            heirlooms,
            trees,
            refusals,
            options,
            looked_up,
            names.unlinked,
            names.forget,
        )
        whole_files = WholeFiles(io, kernel, files, names, publishing)
        policies = PolicyHints(servers, tier, attributes)
        self.group_publishing = GroupPublishing(
            engine, io, whole_files, names, policies, publishing
        )
        self.starts = starts = Starts(
            engine, io, upkeep, kernel, whole_files.put, names.unlink, recordings
        )
        self.epochs = epochs = Epochs(engine, io, tier, evictor, upkeep)
        clones = Clones(engine, ids, io, drain, doomed, kernel, files, options, quotas)
        self.trash_requests = trash_requests = TrashRequests(
            engine, ids, trash, names, quota_trees, kernel, options
        )
        cluster = Cluster(engine, store.hosts, drain.status, tier)
        self.status = MountStatus(
            store,
            io,
            attributes,
            collector,
            kernel,
            options,
            recovered,
            scrub,
            rebuild,
            trash,
            {
                "requests": served.status,
                "waits": operation_log.waited.status,
                "journal": engine.status,
                "publishes": lambda: {"count": publishing.published},
                "background": share.status,
                "doomed": doomed.status,
                "aging": aging.status,
                "backup": backup.status,
                "burst": tier.status,
                "drain": drain.status,
                "groups": lambda: {**group_life.status(), **group_drain.status()},
                "stage": stager.status,
                "epochs": epochs.status,
                "movers": pool.status,
                "locks": locks.status,
                "cluster": cluster.status,
                "evict": lambda: {**evictor.status(), **from_copies.status()},
            }
            | ({} if together is None else {"together": together.status}),
        )
        self.following = Following(
            engine,
            store.table,
            io,
            containers,
            collector,
            findings,
            doomed,
            rules,
            retention,
            course,
            heirlooms,
            names,
            kernel,
            looked_up,
            quota_trees,
        )
        self.slow_request_s = config.kernel.slow_request_s
        """After how long a request is logged; 0: never."""
        settings = Settings(
            config,
            servers,
            {
                "burst.drain_bandwidth": drain.limiter.set_rate,
                "burst.drain_delay": drain.set_delay,
                "burst.drain_on_fsync": partial(setattr, files, "drain_on_fsync"),
                "burst.stage_on_read": partial(setattr, stager, "on_read"),
                "burst.stage_for_write": partial(setattr, stager, "for_write"),
                "rebuild.bandwidth": self._set_rebuild_bandwidth,
                "scrub.bandwidth": scrub.set_bandwidth,
                "kernel.slow_request": partial(setattr, self, "slow_request_s"),
                "log.level": set_log_level,
            },
        )
        self.hints = hints = Hints(
            engine,
            attributes,
            refusals,
            options,
            [
                aging,
                attributes,
                burst_hints,
                clones,
                cluster,
                epochs,
                files,
                GroupHints(engine, table, groups, closing, refusals, attributes, options),
                names,
                policies,
                publishing,
                quota_trees,
                refusals,
                retention,
                rules,
                ServerOrders(server_admin, scrub, backup, options),
                settings,
                starts,
                self.status,
                trash_requests,
                Why(operation_log, engine),
            ],
        )
        xattrs = ExtendedAttributes(engine, io, attributes, hints)

        # The table of operations.
        self.lookup = names.lookup
        self.create = names.create
        self.mknod = names.mknod
        self.mkdir = names.mkdir
        self.symlink = names.symlink
        self.readlink = names.readlink
        self.link = names.link
        self.unlink = names.unlink
        self.rmdir = names.rmdir
        self.readdir = names.readdir
        self.read_ahead = names.read_ahead
        self.fsyncdir = names.fsyncdir
        self.forget = names.forget
        self.remove_tree = names.remove_tree
        self.clone = clones.clone
        self.rename = publishing.rename
        self.publish = publishing.publish
        self.keeps_name = publishing.keeps_name
        self.keeps_names = publishing.keeps_names
        self.getattr = attributes.getattr
        self.setattr = attributes.setattr
        self.set_flags = attributes.set_flags
        self.getxattr = xattrs.get
        self.setxattr = xattrs.put
        self.listxattr = xattrs.names
        self.removexattr = xattrs.remove
        self.open = files.open
        self.read = files.read
        self.write = files.write
        self.fallocate = files.fallocate
        self.lseek = files.lseek
        self.copy_file_range = files.copy_file_range
        self.fsync = files.fsync
        self.flush = files.flush
        self.is_flushed = files.is_flushed
        self.release = files.release
        self.is_joined = io.by_home.is_joined
        self.changes_unseen = io.table.changes_unseen
        self.told_size = io.table.told.size
        self.sync = files.sync
        self.statfs = attributes.statfs
        self.call = hints.call
        self.wait_drained = burst_hints.wait_drained
        self.restore = trash_requests.restore
        self.empty_trash = trash_requests.empty

    def _set_rebuild_bandwidth(self, bandwidth: int) -> None:
        self.rebuild.limiter.set_rate(bandwidth)
        self.aging.limiter.set_rate(bandwidth)

    def jobs(self) -> dict[Work, Job]:
        """The background work of every host, for as long as the store is served."""
        servers, commit_s = self.store.servers, self.store.config.meta.commit_interval_s
        always = {
            Work.COLLECT: Job(self.collector.collect),
            Work.RELEASE: Job(self.collector.release),
            Work.ACCESSES: Job(self.io.inodes.record_accesses, first_s=ACCESSES_S),
            Work.WRITE_BACK: Job(self.writeback.work, retry_s=commit_s),
            Work.LOOK_AT_BURST: Job(self.tier.work),
            Work.WATCH_SERVERS: Job(self.server_admin.watch, workers=WATCHERS),
            Work.RELAX: Job(servers.budget.relax, first_s=RELAX_EVERY_S),
        }
        if self.options.read_only:
            return always
        return always | {
            Work.DRAIN: Job(self.drain.work, self.drain.workers),
            Work.GROUPS: Job(self.group_life.work),
            Work.EVICT: Job(self.evictor.work, retry_s=PAUSE_S),
            Work.STAGE: Job(self.stager.work, STAGERS),
            Work.AHEAD: Job(self.epochs.work, EPOCHS_AT_ONCE),
            Work.STARTS: Job(self.starts.work),
        }

    def jobs_of_role(self) -> dict[Work, Job]:
        """That of the host that has the role, besides."""
        always = {
            Work.SERVERS: Job(self.server_admin.work),
            Work.BACKUP: Job(self.backup.work),
        }
        if self.options.read_only:
            return always
        return always | {
            Work.COMPACT: Job(self.compaction.work, first_s=COMPACT_EVERY_S),
            Work.DOOMED: Job(self.doomed.work),
            Work.TRASH: Job(self.trash.work),
            Work.STRAYS: Job(self.rebuild.strays.work),
            Work.REBUILD: Job(self.rebuild.work),
            Work.AGING: Job(self.aging.work),
            Work.QUOTAS: Job(self.quota_trees.work),
            Work.RETENTION: Job(self.retention.work),
            Work.SCRUB: Job(self.scrub.work),
        }
