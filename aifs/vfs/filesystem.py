"""An open store as a POSIX filesystem: its parts, and its table of operations."""

from functools import partial

from aifs.burst.block_cache import BlockCache
from aifs.burst.pool import Pool
from aifs.burst.tier import BurstTier
from aifs.burst.transfer import Limiter, Mover
from aifs.core.budget import RELAX_EVERY_S
from aifs.core.loop_share import LoopShare
from aifs.core.served import AllServed
from aifs.core.upkeep import Job, Role, Upkeep, Work
from aifs.files.collector import Collector
from aifs.files.containers import Containers
from aifs.files.damage import Damage, Needs
from aifs.files.drain import Drain
from aifs.files.file_io import FileIO
from aifs.files.handles import Handles
from aifs.files.home import Home, MirrorHost
from aifs.files.kernel import Kernel
from aifs.files.lock_homes import SERVICE, PeerHosts
from aifs.files.locks import Locks
from aifs.files.looked_up import LookedUp, LookedUpAlone
from aifs.files.open_inodes import ACCESSES_S
from aifs.files.places import Places
from aifs.files.quotas import Quotas
from aifs.files.refusals import Refusals
from aifs.files.services import Heirlooms, ServeOptions, Services
from aifs.files.stage import WORKERS as STAGERS
from aifs.files.writeback import WriteBack
from aifs.meta import degraded, forms
from aifs.reads.epochs import WORKERS as EPOCHS_AT_ONCE
from aifs.reads.epochs import Epochs
from aifs.reads.starts import Starts
from aifs.reads.virtual.files import VirtualFiles
from aifs.saves.protocol import RankGroups
from aifs.saves.publish import Publishing
from aifs.saves.ready import Barrier, OwnBarrier, Readiness, SharedBarrier
from aifs.saves.retention import Retention
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
from aifs.vfs.group_hints import GroupHints, GroupPublishing, WholeFiles
from aifs.vfs.hints import Hints
from aifs.vfs.importing import Imports
from aifs.vfs.names import Names
from aifs.vfs.open_files import OpenFiles
from aifs.vfs.operation_log import OperationLog
from aifs.vfs.policy_hints import PolicyHints
from aifs.vfs.quotas import QuotaTrees
from aifs.vfs.recovery import Recovered
from aifs.vfs.reports import MountStatus
from aifs.vfs.server_hints import ServerOrders, Settings, set_log_level
from aifs.vfs.trash_requests import TrashRequests
from aifs.vfs.why import Why
from aifs.vfs.xattrs import ExtendedAttributes

_DEAD_WHILE_OPEN = 32
"""A container of which one part of so many is dead is not left open until it is full."""


class Filesystem:
    """An open store as a POSIX filesystem. Made by ``open_filesystem``; used from one trio thread.

    It decides nothing. Its constructor makes the parts, from the lowest to the highest: each is
    given those that it uses, and nothing is added afterwards. Word goes up by three small objects
    made first: ``upkeep`` hears of work for others, ``damage`` of bytes to make whole, ``findings``
    of a scrub's results, which decide, by ``needs``, which burst copies stay.

    The operations are methods of the parts, by the kernel's names. They raise FsError subclasses.
    On return a change is visible to all and survives the daemon's death, and a power cut after the
    commit interval or the next fsync, fsyncdir or sync. A rename is durable on return, with all
    below the new name.
    """

    def __init__(
        self,
        store: Store,
        kernel: Kernel,
        options: ServeOptions,
        share: LoopShare,
        has_locks: bool = False,
    ) -> None:
        """``has_locks``: see ``open_filesystem``."""
        config, engine, servers = store.config, store.engine, store.servers
        is_shared = store.peers.is_shared
        self.store, self.kernel, self.options, self._share = store, kernel, options, share
        self.role: Role = store.role
        self.recovered = Recovered()
        self.operation_log = OperationLog(kernel.see_all)
        self.served = AllServed()
        self.upkeep = upkeep = Upkeep(share)
        self.damage = damage = Damage(upkeep)
        self.findings = findings = Findings()
        self.slow_request_s = config.kernel.slow_request_s
        """After how long a request is logged; 0: never."""

        self.backup = backup = Backup(config, store.uuid, engine, servers, upkeep)
        self.ids = ids = IdAllocator(engine)
        standing = partial(engine.view, forms.find_standing)
        is_checked = config.data.verify == "read"
        state = partial(engine.view, degraded.state_of_blocks, is_checked)
        self.blocks = BlockCache(
            servers,
            upkeep,
            standing,
            state,
            engine.barrier,
            config.burst.blocks,
            kernel.kept.is_on,
        )
        servers.keep_blocks(self.blocks)
        self.tier = tier = BurstTier(config, servers, engine, ids.take, upkeep)
        self.collector = collector = Collector(engine, servers, backup, tier, upkeep, self.role)
        self.quotas = quotas = Quotas(engine)
        self.services = services = Services(
            config,
            engine,
            servers,
            ids,
            collector,
            upkeep,
            kernel,
            options,
            quotas,
            Heirlooms(engine),
            (LookedUp if is_shared else LookedUpAlone)(engine, kernel),
            Refusals(),
            store.table,
            store.peers,
        )
        self.refusals, self.heirlooms = services.refusals, services.heirlooms

        # The bytes of files.
        places = Places(kernel, servers, engine, is_checked)
        self.handles = handles = Handles(
            kernel, options.access_due_ns, is_shared, quotas, places, servers.blocks
        )
        self.needs = needs = Needs(engine, servers, findings.wrong_objects)
        self.pool = Pool(
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
            is_checked,
            damage.report,
            config.data.min_spare,
        )
        self.io = io = FileIO(services, tier, containers, damage, needs, handles, self.pool)
        self.writeback = WriteBack(services, tier, io)
        self.stager = io.stager
        ended = self.operation_log.ended
        self.drain = drain = Drain(services, tier, io, handles, ended)

        # Groups of ranks.
        own = OwnBarrier(services, io, self.writeback)
        barrier = SharedBarrier(own, services, io.homes, self.role) if is_shared else own
        self.ranks = ranks = RankGroups(
            services, tier, io, self.writeback, drain, barrier, self.role, ended
        )
        self.group_drain, self.group_table = ranks.drain, ranks.table
        self.groups, self.group_life = ranks.groups, ranks.life

        self._make_keepers()
        virtual = VirtualFiles(engine, io, servers, services.refusals, services.kernel.kept)
        self.files = OpenFiles(
            services, tier, handles, io, self.writeback, drain, ranks.closing, virtual
        )
        self.attributes = Attributes(services, io, self.files)
        self.has_locks = has_locks or is_shared
        """Whether flock(2) and fcntl(2) locks are ours: several hosts share them."""
        self._serve_hosts()
        self._make_names(barrier)
        self._make_hints()
        self._set_operations()

    def _make_keepers(self) -> None:
        services, io, drain, tier = self.services, self.io, self.drain, self.tier
        config, engine, servers = services.config, services.engine, services.servers
        containers, handles = self.containers, self.handles
        self.trash_rules = rules = TrashRules(engine, services.upkeep, config.trash.keep_s)
        self.doomed = DoomedTrees(services, io, drain, rules, self.ranks.closing.gone)
        self.trash = Trash(services, drain, self.doomed, rules)
        self.retention = Retention(services, io, self.doomed, rules)
        self.evictor = Evictor(services, tier, io, self.needs)
        self.compaction = Compaction(
            engine,
            servers,
            containers,
            services.collector,
            io.sets.movers(Mover(servers.budget, Limiter(0), config.burst.ioprio)),
            self._share,
            config.layout.compact_above,
            config.layout.container_size // _DEAD_WHILE_OPEN,
        )
        self.from_copies = copies = FromCopies(
            services, io, containers, drain, self.needs, self.findings
        )
        self.rebuild = Rebuild(
            services, io, containers, self.compaction, handles, self.backup, copies, self.damage
        )
        self.aging = Aging(services, io, containers)
        self.scrub = Scrub(services, io, self.rebuild, copies, self.evictor, handles, self.findings)
        self.server_admin = ServerAdmin(
            services, tier, io, drain, self.backup, self.evictor, self.rebuild, copies
        )

    def _serve_hosts(self) -> None:
        services, tier, io, drain = self.services, self.tier, self.io, self.drain
        self.home = Home(services, tier, io, self.writeback, drain, self.files.give_up)
        """What is done here for other hosts."""
        self.mirror_host = MirrorHost(services, tier, io, drain, self.role)
        """The same, with mirrors."""
        self.locks = Locks(services.engine, PeerHosts(services.peers), services.kernel.kept)
        services.peers.serve(SERVICE, self.locks.answer)

    def _make_names(self, barrier: Barrier) -> None:
        services, io, tier, drain = self.services, self.io, self.tier, self.drain
        engine, doomed, files, ranks = services.engine, self.doomed, self.files, self.ranks
        self.names = names = Names(services, tier, io, drain, ranks.closing, doomed, files)
        ready = Readiness(services, io, barrier, ranks.naming, drain)
        self.publishing = publishing = Publishing(
            services, io, ready, drain, doomed, self.retention, names.unlinked, names.forget
        )
        whole_files = WholeFiles(io, self.kernel, files, names, publishing)
        self._policies = PolicyHints(services.servers, tier, self.attributes)
        self.group_publishing = GroupPublishing(
            engine, io, whole_files, names, self._policies, publishing
        )
        self.starts = Starts(services, io, whole_files.put, names.unlink, files.recordings)
        self.epochs = Epochs(services, io, tier)
        self.clones = Clones(services, io, drain, doomed, files)
        self.imports = Imports(services)
        self.quota_trees = QuotaTrees(services, io, self.attributes)
        self.trash_requests = TrashRequests(services, self.trash, names, self.quota_trees)
        self.following = Following(
            services,
            io,
            self.findings,
            doomed,
            self.retention,
            ranks.course,
            names,
            self.quota_trees,
        )

    def _make_hints(self) -> None:
        services, store, io, tier, drain = self.services, self.store, self.io, self.tier, self.drain
        engine, ranks, publishing = services.engine, self.ranks, self.publishing
        self.burst_hints = BurstHints(
            services, tier, io, drain, self.needs, self.evictor, self.attributes
        )
        cluster = Cluster(engine, services.peers, store.hosts, drain.status, tier)
        reports = {
            "recovered": lambda: str(self.recovered),
            "requests": self.served.status,
            "waits": self.operation_log.waited.status,
            "journal": engine.status,
            "publishes": lambda: {"count": publishing.published},
            "background": self._share.status,
            "doomed": self.doomed.status,
            "aging": self.aging.status,
            "backup": self.backup.status,
            "burst": tier.status,
            "drain": drain.status,
            "groups": lambda: {**ranks.life.status(), **ranks.drain.status()},
            "stage": io.stager.status,
            "blocks": self.blocks.status,
            "epochs": self.epochs.status,
            "movers": self.pool.status,
            "locks": self.locks.status,
            "cluster": cluster.status,
            "evict": lambda: {**self.evictor.status(), **self.from_copies.status()},
            "together": io.together.status,
        }
        self.status = MountStatus(
            services, store, io, self.attributes, self.scrub, self.rebuild, self.trash, reports
        )
        self.settings = Settings(
            services.config,
            services.servers,
            {
                "burst.drain_bandwidth": drain.limiter.set_rate,
                "burst.drain_delay": drain.set_delay,
                "burst.drain_on_fsync": partial(setattr, self.files, "drain_on_fsync"),
                "burst.stage_for_write": partial(setattr, io.stager, "for_write"),
                "rebuild.bandwidth": self._set_rebuild_bandwidth,
                "scrub.bandwidth": self.scrub.set_bandwidth,
                "kernel.slow_request": partial(setattr, self, "slow_request_s"),
                "log.level": set_log_level,
            },
            services.kernel.kept,
        )
        self.hints = Hints(
            engine,
            self.attributes,
            services.refusals,
            self.options,
            [
                self.aging,
                self.attributes,
                self.burst_hints,
                self.clones,
                cluster,
                self.epochs,
                self.files,
                self.imports,
                GroupHints(services, ranks.table, ranks.groups, ranks.closing, self.attributes),
                self.names,
                self._policies,
                publishing,
                self.quota_trees,
                services.refusals,
                self.retention,
                self.trash_rules,
                ServerOrders(self.server_admin, self.scrub, self.backup, self.options),
                self.settings,
                self.starts,
                self.status,
                self.trash_requests,
                Why(self.operation_log, engine),
            ],
        )

    def _set_operations(self) -> None:
        names, publishing, attributes = self.names, self.publishing, self.attributes
        files, io = self.files, self.io
        xattrs = ExtendedAttributes(self.services.engine, io, attributes, self.hints)
        self.lookup = names.lookup
        self.lookup_at_once = names.lookup_at_once
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
        self.clone = self.clones.clone
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
        self.call = self.hints.call
        self.wait_drained = self.burst_hints.wait_drained
        self.restore = self.trash_requests.restore
        self.empty_trash = self.trash_requests.empty

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
            Work.BLOCKS: Job(self.blocks.work),
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
