"""Files that the daemon itself writes, for the program or the group that asked for them."""

import stat

from aifs.files.file_io import FileIO
from aifs.files.kernel import Kernel
from aifs.files.types import CallerLike
from aifs.saves.publish import Publishing
from aifs.vfs.names import Names
from aifs.vfs.open_files import OpenFiles


class WholeFiles:
    """Used from one trio thread."""

    def __init__(
        self, io: FileIO, kernel: Kernel, files: OpenFiles, names: Names, publishing: Publishing
    ) -> None:
        self._io = io
        self._kernel = kernel
        self._files = files
        self._names = names
        self._publishing = publishing

    async def put(
        self, directory: int, temporary: bytes, name: bytes, data: bytes, caller: CallerLike
    ) -> None:
        """Write a file under a temporary name, and rename it when it is whole. It belongs to
        ``caller``. Raises as these operations do."""
        made = await self._names.mknod(directory, temporary, stat.S_IFREG | 0o644, 0, caller)
        async with self._files.changing(made.ino) as file:
            await self._io.write(file, 0, data)
        await self._publishing.rename(directory, temporary, directory, name, caller=caller)
        await self._kernel.forget_names([(directory, name)])
