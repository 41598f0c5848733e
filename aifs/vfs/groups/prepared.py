"""A file of the burst tier that is ready to be stored with its group."""

from collections.abc import Callable
from typing import NamedTuple

import trio

from aifs.files.flips import Draining
from aifs.layout.interleaved import CHUNK_MAX
from aifs.vfs.groups.sharing import Cut


class StoringOptions(NamedTuple):
    """What a group asks for. ``chunk``: bytes of its largest chunks."""

    chunk: int = CHUNK_MAX


class Prepared(Draining):
    """One member of a group, from the moment in which its drain begins.

    ``outcome``: None while it can be stored. ``cut``: its chunks; without digests as long as it has
    not been hashed. ``digests``: those found so far, by the chunks' numbers. ``level``: of zstd.
    ``on_cancel`` is called, on the trio thread, when somebody is about to change the file.
    ``hurry``: whether it is about to be stored, so that its digests are waited for. ``unwanted``:
    it is to be released as soon as that can be; ``busy`` is held while it is being prepared.
    """

    def __init__(
        self,
        ino: int,
        on_cancel: Callable[["Prepared"], None] | None = None,
        hurry: Callable[[], bool] = lambda: True,
    ) -> None:
        super().__init__(ino)
        self.size = 0
        self.cut = Cut((), ())
        self.digests: dict[int, bytes] = {}
        self.level = 0
        self.on_cancel = on_cancel
        self.hurry = hurry
        self.unwanted = False
        self.busy = trio.Lock()

    @property
    def is_hashed(self) -> bool:
        return len(self.cut.digests) == len(self.cut.ranges)

    def cancel(self) -> None:
        super().cancel()
        if self.on_cancel is not None:
            self.on_cancel(self)
