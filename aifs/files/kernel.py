"""The kernel, as the filesystem sees it: what it has to be told, and whether it reads and writes
local files by itself."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from aifs.files.kept import KeptState
from aifs.files.types import Passthrough


class Kernel:
    """There is none: nobody keeps anything, and nothing is passed through. The edge has one that
    tells the real kernel."""

    def __init__(self, kept: KeptState | None = None) -> None:
        self.passthrough: Passthrough | None = None
        """Present if the kernel can read and write local files by itself."""
        self.kept = kept or KeptState()
        """What outlives this process."""
        self.unkept: Counter[tuple[int, bytes]] = Counter()
        """Names of which it is not to keep what they lead to, each counted as often as somebody
        wants that."""

    def keeps_names(self, directory: int) -> bool:
        """Whether it may keep all names of a directory."""
        return all(parent != directory for parent, _ in self.unkept)

    def see_all(self, on: bool) -> None:
        """Whether all requests are to come to us, also those that can be answered without us."""

    def begin_directory(self, ino: int) -> None:
        """The transaction that comes next makes this directory; whether names are in it can be
        known from the changes of records."""

    def drop_attributes(self, ino: int) -> None:
        """An inode's attributes have changed without the kernel having asked for it. It is waiting
        for an answer about this inode."""

    def drop_attributes_soon(self, inos: Iterable[int]) -> None:
        """Inodes have lost a name, and no request is about them."""

    def drop_name_soon(self, parent: int, name: bytes) -> None:
        """A name leads to something else, or nowhere, without the kernel having asked for it."""

    async def look_up_anew(self, names: Iterable[tuple[int, bytes]]) -> None:
        """As ``forget_names``, of names at which programs may be, or mounts, that stay: directories
        that were moved, or that have appeared."""

    async def forget_names(self, names: Iterable[tuple[int, bytes]]) -> None:
        """Names (parent, name) lead somewhere else; the kernel knows it on return, if that does not
        take long."""

    def keep_no_names(self, ino: int) -> None:
        """From now on it looks up names of a directory each time, as far as it asks by itself."""

    async def forget(
        self, names: Mapping[tuple[int, bytes], int], inodes: Sequence[int], pages: Sequence[int]
    ) -> Collection[int]:
        """Another host has changed what these names (parent, name) lead to: inodes now, 0 for
        nothing; the attributes of these
        inodes, or what these directories hold (``pages``). The kernel shows nothing of the state
        before on return, whatever programs wait for. Inodes that the kernel knows, all of
        ``inodes`` that it does among them."""
        return inodes

    async def drop_pages(self, inodes: Sequence[int]) -> None:
        """Another host has changed these files. The kernel has none of the pages from before on
        return, which waits for those that are being read."""

    def drop_pages_soon(self, ino: int, then: Callable[[], None]) -> None:
        """As ``drop_pages``, when the request that is being answered has been answered: it may hold
        some of them. Then ``then`` is called."""
        then()

    def may_know(self, ino: int) -> bool:
        """Whether it may have been told of an inode, in a reply or a listing."""
        return False

    async def is_known(self, ino: int) -> bool:
        """Whether programs have a removed inode open, or work in it."""
        return False

    def status(self) -> dict[str, Any]:
        """What the edge says of itself, for ``aifs status``."""
        return {}
