"""The parts of groups of ranks, made from the lowest to the highest."""

from aifs.burst.tier import BurstTier
from aifs.core.upkeep import Role
from aifs.files.drain import Drain, Ended
from aifs.files.file_io import FileIO
from aifs.files.services import Services
from aifs.files.writeback import WriteBack
from aifs.saves.closing import Closing
from aifs.saves.course import Course
from aifs.saves.group_drain import GroupDrain
from aifs.saves.joint import Joint, PartHost
from aifs.saves.life import Life, Living
from aifs.saves.members import Members
from aifs.saves.parts import Parts
from aifs.saves.protocol import Groups
from aifs.saves.ready import Barrier, Naming
from aifs.saves.table import GroupTable


class RankGroups:
    """How ranks save together. Used from one trio thread."""

    def __init__(
        self,
        services: Services,
        tier: BurstTier,
        io: FileIO,
        writeback: WriteBack,
        drain: Drain,
        barrier: Barrier,
        role: Role,
        ended: Ended,
    ) -> None:
        config, engine, servers = services.config, services.engine, services.servers
        peers = services.peers
        self.drain = GroupDrain(services, drain.drainer)
        """How the files of a group get to the data servers."""
        members = Members(engine, tier, io, writeback, drain, self.drain)
        parts = Parts(engine, barrier, role, servers, peers)
        joint = Joint(engine, parts, members, self.drain.storing, config.host.bandwidth)
        self.table = GroupTable(engine, services.upkeep)
        """All groups."""
        part_host = PartHost(engine, self.table, members, drain, parts, joint, peers)
        self.course = Course(engine, self.table, members, parts, joint, part_host, ended)
        """From one state of a group to the next."""
        self.closing = Closing(
            engine, io, writeback, drain, self.table, members, parts, self.course
        )
        """Files that a group withholds from the drain."""
        self.naming = Naming(engine, io, self.table)
        """Names that wait for a group."""
        living = Living(self.table, parts, self.course)
        self.groups = Groups(
            engine, io, barrier, services.ids, self.table, parts, self.course, living
        )
        """Requests of programs."""
        self.life = Life(services, drain, self.table, members, parts, self.course, living, role)
        """Loading, background work and closing."""
