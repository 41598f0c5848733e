"""What new files and directories inherit from the directory in which they are made."""

from typing import NamedTuple

from aifs.layout.hint import Policy
from aifs.meta import namespace
from aifs.meta.kv import Engine
from aifs.meta.quotas import inherited

_DIRECTORIES_MAX = 1024


class Heirloom(NamedTuple):
    """What is inherited by all that is made in a directory."""

    policy: Policy | None
    project: int


class Heirlooms:
    """The heirlooms of the directories that were asked for last. Used from one trio thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._of: dict[int, Heirloom] = {}
        """By directory."""
        self._changes = 0  # so that what was read before a change is not kept after it

    def changed(self, ino: int) -> None:
        """The record of ``ino`` is another one now."""
        self._of.pop(ino, None)
        self._changes += 1

    async def of(self, directory: int) -> Heirloom:
        """Raises NotFound."""
        try:
            return self._of[directory]
        except KeyError:
            if len(self._of) >= _DIRECTORIES_MAX:
                self._of.clear()
            changes = self._changes
            inode = await self._engine.view(namespace.get_inode, directory)
            found = Heirloom(inode.policy, inherited(inode))
            if changes == self._changes:
                self._of[directory] = found
            return found
