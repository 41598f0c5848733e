"""What has to be so before a name shows: all below it is durable, where its new directory wants it,
and its group lets it get a name.
"""

from aifs.files.file_io import FileIO
from aifs.files.services import Services
from aifs.files.tree_drain import TreeDrain
from aifs.layout.hint import DEFAULT_POLICY
from aifs.meta import namespace
from aifs.meta.records import Dentry
from aifs.saves.barrier import Barrier
from aifs.saves.naming import Naming

DIRECTORY = 0o040000 >> 12
"""The type of a directory, in a dentry."""


class Readiness:
    """Used from one trio thread."""

    def __init__(
        self, services: Services, io: FileIO, barrier: Barrier, naming: Naming, trees: TreeDrain
    ) -> None:
        self._engine = services.engine
        self._heirlooms = services.heirlooms
        self._io = io
        self._barrier = barrier
        self.naming = naming
        self._trees = trees

    async def make_durable(
        self, dentry: Dentry, new_parent: int, strict: bool = False
    ) -> dict[int, object | None]:
        """Make all that ``dentry`` names ready to show in ``new_parent``. Returns the files that
        had to be synced here, as OpenTable.forgetting wants them. ``strict``: see
        Barrier.sync_below."""
        is_directory = dentry.type == DIRECTORY
        if is_directory:
            await self.naming.require_complete(dentry.ino)
        synced = await self._barrier.sync_below(dentry, strict)
        policy = (await self._heirlooms.of(new_parent)).policy or DEFAULT_POLICY
        lacking = self._io.mirrors.lacking and await self._io.mirrors.find_lacking()
        if policy.publish == "capacity" or lacking:  # a file without a mirror has to be elsewhere
            inode = await self._engine.view(namespace.get_inode, dentry.ino)
            await self._trees.wait(self._io.inodes.current(inode), strict=True)
        if is_directory:
            await self.naming.check_files(dentry.ino)
        return synced
