"""The object sets and containers that hold files on the capacity tier, and their movers."""

from functools import partial

from aifs.burst.making import MakingTools
from aifs.burst.pool import Movers, Pool
from aifs.burst.transfer import Mover
from aifs.data.objects.object_set import Bytes, Followed, ObjectSet, Reading
from aifs.data.objects.together import Sharing
from aifs.data.servers import Servers
from aifs.files.containers import Containers
from aifs.files.damage import Damage
from aifs.files.open_table import OpenTable
from aifs.files.together import Together
from aifs.layout.striped import Striped
from aifs.meta import forms
from aifs.meta.degraded import find_unread
from aifs.meta.kv import Engine
from aifs.meta.records import Inode


class ObjectSets:
    """Used from one trio thread."""

    def __init__(
        self,
        engine: Engine,
        servers: Servers,
        containers: Containers,
        table: OpenTable,
        damage: Damage,
        pool: Pool,
        verify: bool,
        together: Together,
    ) -> None:
        """``verify``: what is read through the caches is compared with checksums."""
        self._engine = engine
        self._servers = servers
        self._containers = containers
        self._table = table
        self._damage = damage
        self._pool = pool
        self._verify = verify
        self._join = together.join if together.is_shared else None
        """Tells other hosts what large files are read here; None: there are none."""

    def objects_of(self, inode: Inode, unread: int = 0) -> Bytes | None:
        """The bytes of a file on the capacity tier, or None. ``unread``: mask of columns not to
        read."""
        layout = inode.layout
        if layout is None:
            return None
        chunks = layout.chunks
        if chunks is not None:
            return self._containers.objects_of(chunks, inode.oid)
        objects = layout.read_as
        assert objects is not None  # what is not cut into chunks is read so
        return self.set_of(objects, inode.named_by, inode.oid, unread, self._verify, is_read=True)

    def set_of(
        self,
        layout: Striped,
        ino: int,
        oid: int,
        unread: int = 0,
        checked: bool = False,
        is_read: bool = False,
    ) -> ObjectSet:
        """The objects of a striped file. ``checked``: reads past caches are compared with
        checksums. ``is_read``: by programs, so hosts that read them hear of it (unless they are
        imported), and reads are kept near."""
        load = partial(self._engine.view, forms.get_checksums, oid)
        join = self._join if is_read and layout.pin is None else None
        return ObjectSet(
            self._servers,
            layout,
            ino,
            oid,
            reading=Reading(
                unread,
                partial(self._damaged, layout),
                digests=load if checked else None,
                verify=self._verify,
                shared=None if join is None else Sharing(load, join),
                near=is_read,
            ),
        )

    async def to_be_copied(self, inode: Inode) -> Bytes | Followed:
        """The bytes of a settled file, checked, by way of the caches of those who read it."""
        ino, oid, layout, unread = inode.named_by, inode.oid, inode.read_as, 0
        if inode.chunks is not None:
            return self._containers.objects_of(inode.chunks, oid, copied=True)
        assert layout is not None  # what is not cut into chunks is read so
        if layout.is_protected:
            unread = await self._engine.view(find_unread, oid)
        return Followed(self.set_of(layout, ino, oid, unread, checked=True))

    def movers(self, mover: Mover) -> Movers:
        """Processes that work under the limits of ``mover``."""
        containers = self._containers.files
        tools = MakingTools(self._servers, mover, containers, self._verify, self._damaged)
        return Movers(tools, self._pool)

    def _damaged(self, layout: Striped, oid: int, ino: int, column: int) -> None:
        """A reader by this layout found damage: an old object of a moved column may be gone."""
        for file in self._table.users_of(oid, ino):
            now = file.inode.objects
            if now is not None and now.servers[column] == layout.servers[column]:
                self._damage.report(oid, ino, column)
                return
