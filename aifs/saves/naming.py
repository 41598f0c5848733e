"""Directories that are pending until all ranks of their group have committed: what their new names
wait for."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aifs.core.errors import Busy
from aifs.files.file_io import FileIO
from aifs.meta import groups
from aifs.meta.kv import Engine
from aifs.saves.listed import first_wrong
from aifs.saves.sizes import find_unequal
from aifs.saves.table import GroupTable


class Naming:
    """Used from one trio thread."""

    def __init__(self, engine: Engine, io: FileIO, table: GroupTable) -> None:
        self._engine = engine
        self._io = io
        self._table = table

    async def require_complete(self, ino: int) -> None:
        """A directory may get a new name, as far as its group is concerned: early, because what
        follows may take long. The transaction decides. Raises Busy."""
        group = self._table.by_directory.get(ino)
        if group is not None and group.record.seals:
            await self._engine.view(groups.require_complete, ino, group.record)

    async def check_files(self, ino: int) -> None:
        """The files that the ranks of a directory have committed are there, in their sizes, and, if
        they must, all have one. Raises Busy, which names the first that is not."""
        group = self._table.by_directory.get(ino)
        if group is None or not group.record.seals:
            return
        for rank in await self._engine.view(groups.committed, ino):
            member = await self._engine.view(groups.get_member, ino, rank)
            files = () if member is None else member.files
            wrong = await first_wrong(self._engine, self._io, ino, files)
            if wrong:
                raise Busy(f"rank {rank}: {wrong}")
        unequal = await find_unequal(self._engine, group) if group.is_open else ""
        if unequal:
            raise Busy(unequal)

    @asynccontextmanager
    async def naming(self, *inos: int) -> AsyncIterator[None]:
        """What is done inside gives these directories new names, in a transaction."""
        async with self._table.recording:
            yield
            sealed = [g for g in map(self._table.by_directory.get, inos) if g and g.record.seals]
            for group in sealed:
                group.record = group.record._replace(pending=None)
                if not group.shares:
                    group.record = group.record._replace(state="committed")
                    del self._table.by_directory[group.ino]
                    group.wake()
            if sealed:
                self._table.look()
