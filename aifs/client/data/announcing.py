"""A reader's announcements to the mount of its dataset: which epoch it reads, in which order, and
how far it is, so that files are in the burst tier before it comes to them (docs/guide/datasets.md,
Reading ahead).

Elsewhere, and where the mount refuses them, there are none, and nothing is lost."""

import time
from contextlib import suppress

from aifs.client.data.dataset import Dataset
from aifs.core import files, ioctl
from aifs.datasets.ahead import Announced
from aifs.datasets.sequence import Epoch

EVERY_S = 0.25
"""Seconds between announcements. The mount forgets a reader after a minute without one."""


class Announcer:
    """Of one reader. Ends with the last reference to it; one thread may use it."""

    def __init__(self, dataset: Dataset, epoch: Epoch, readers: int, number: int) -> None:
        """Reader ``number`` of so many. Tells nothing yet."""
        self._dataset = dataset
        self._epoch = epoch
        self._window = 0  # which is read
        self._told = Announced(epoch.order, readers, range(number, number + 1), 0, 0)
        self._due_s = 0.0  # by time.monotonic(), when to tell next
        self._fd = -1  # of the directory; -1: the mount takes no announcements
        # What has an index in its directory, and can be known a while ahead.
        if epoch.order.shuffle == "blocks" and dataset.has_kept_index:
            with suppress(OSError):
                self._fd = files.open_file(dataset.path, write=False)

    def tell(self, row: int) -> None:
        """So many rows of each share have been handed out. Files of windows that are over are
        closed, because open files cannot make room for others. Costs little most of the time."""
        window = self._epoch.window_of(row)
        if window > self._window:
            for number in range(self._window, window):
                self._dataset.let_go(self._epoch.windows[number])
            self._window = window
            self._due_s = 0.0
        if time.monotonic() >= self._due_s:
            self._tell(row)

    def end(self, row: int) -> None:
        """So many have been, and no more will be."""
        self._tell(row)
        self._tell(None)
        self._close()

    def _tell(self, row: int | None) -> None:
        self._due_s = time.monotonic() + EVERY_S
        if self._fd == -1:
            return
        try:
            ioctl.call(self._fd, "order", order=self._told._replace(row=row).text())
        except InterruptedError:
            pass  # the next time will do
        except OSError:  # no mount of AIFS, one without a burst tier, or with too many readers
            self._close()

    def _close(self) -> None:
        if self._fd != -1:
            files.close_file(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self._close()
