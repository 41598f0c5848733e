"""The kernel, as the filesystem sees it: notifications to it, and passthrough."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from aifs.files.kept import KeptState
from aifs.files.types import Passthrough


class Kernel:
    """A kernel that keeps nothing and passes nothing through. The edge has the real one."""

    def __init__(self, kept: KeptState | None = None) -> None:
        self.passthrough: Passthrough | None = None
        """Present if the kernel can read and write local files by itself."""
        self.kept = kept or KeptState()
        """What outlives this process."""
        self.unkept: Counter[tuple[int, bytes]] = Counter()
        """Names that it must not keep, each counted as often as somebody wants that."""

    def keeps_names(self, directory: int) -> bool:
        """Whether it may keep all names of a directory."""
        return all(parent != directory for parent, _ in self.unkept)

    def see_all(self, on: bool) -> None:
        """Whether all requests are to come to us, also those that can be answered without us."""

    def begin_directory(self, ino: int) -> None:
        """The next transaction makes this directory: changes of records tell the names in it."""

    def drop_attributes(self, ino: int) -> None:
        """An inode's attributes have changed without a request; one about it may be waiting."""

    def drop_attributes_soon(self, inos: Iterable[int]) -> None:
        """Inodes have lost a name, and no request is about them."""

    def drop_name_soon(self, parent: int, name: bytes) -> None:
        """A name leads to something else, or nowhere, without the kernel having asked for it."""

    async def look_up_anew(self, names: Iterable[tuple[int, bytes]]) -> None:
        """``forget_names`` for names of directories that were moved or have appeared, at which
        programs or mounts may be, that stay."""

    async def forget_names(self, names: Iterable[tuple[int, bytes]]) -> None:
        """Forget where names (parent, name) lead; the kernel knows on return, if that is quick."""

    def keep_no_names(self, ino: int) -> None:
        """From now on it looks up names of a directory each time, as far as it asks by itself."""

    async def forget(
        self, names: Mapping[tuple[int, bytes], int], inodes: Sequence[int], pages: Sequence[int]
    ) -> Collection[int]:
        """Forget what another host has changed: names (parent, name), with their inodes now (0:
        none); attributes of ``inodes``; contents of directories ``pages``.

        The kernel shows nothing of the old state on return, whatever programs wait for. Returns
        inodes that the kernel knows, all known ones of ``inodes`` among them.
        """
        return inodes

    async def drop_pages(self, inodes: Sequence[int]) -> None:
        """Another host has changed these files: drop their pages. Waits for pages being read."""

    def drop_pages_soon(self, ino: int, then: Callable[[], None]) -> None:
        """``drop_pages`` after the request in progress, which may hold pages; then call
        ``then``."""
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
