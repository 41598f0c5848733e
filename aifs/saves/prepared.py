"""A file of the burst tier that is ready to be stored with its group."""

from collections.abc import Callable

import trio

from aifs.files.flips import Draining
from aifs.saves.sharing import Cut


class Prepared(Draining):
    """One member of a group, from the moment in which its drain begins. ``outcome`` is None while
    it can be stored.
    """

    def __init__(
        self,
        ino: int,
        on_cancel: Callable[["Prepared"], None] | None = None,
        hurry: Callable[[], bool] = lambda: True,
    ) -> None:
        super().__init__(ino)
        self.size = 0
        """In bytes."""
        self.cut = Cut((), ())
        """Its chunks; without digests as long as it has not been hashed."""
        self.hashed: dict[int, bytes] = {}
        """The digests found so far, by the chunks' numbers."""
        self.level = 0
        """Of zstd; 0 for no compression."""
        self.on_cancel = on_cancel
        """Called, on the trio thread, when somebody is about to change the file; None: nobody
        asks.
        """
        self.hurry = hurry
        """Whether it is about to be stored, so that its digests are waited for."""
        self.unwanted = False
        """It is to be released as soon as that can be."""
        self.busy = trio.Lock()
        """Held while it is being prepared."""

    @property
    def is_hashed(self) -> bool:
        return len(self.cut.digests) == len(self.cut.ranges)

    def cancel(self) -> None:
        super().cancel()
        if self.on_cancel is not None:
            self.on_cancel(self)
