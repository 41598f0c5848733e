"""Empty files made ahead, for devices on which making one may wait for the disk.

Making one file in a worker costs the caller 80 to 160 us, a batch about 20 us a file, and taking a
spare one nothing.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple

import trio

from aifs.core import files
from aifs.core.errors import FsError
from aifs.core.log import logger
from aifs.data.server import DataServer
from aifs.data.workers import gather

_log = logger(__name__)

BATCH = 64
KEEP_S = 2.0
"""Spares that nobody takes are removed soon: after a crash they are looked for in the newest ids
alone.
"""
_END_S = 30.0
"""How long the end of a mount waits for a device to remove them."""


class _Spare(NamedTuple):
    id: int
    fd: int


class Spares:
    """The spare files of one device. After a crash, they are unknown objects with recent ids."""

    def __init__(self, device: DataServer, take_id: Callable[[], Awaitable[int]]) -> None:
        self._device = device
        self._take_id = take_id
        self._files: deque[_Spare] = deque()
        self._made_s = 0.0
        self._done: trio.Event | None = None  # while more are being made
        self._stopped = False
        self._left: list[int] = []  # ids of those that ``close`` has to remove

    @property
    def empty(self) -> bool:
        return not self._files

    async def take(self) -> tuple[int, int]:
        """Id of an empty file, and a descriptor that is open for reading. Raises NoSpace,
        Unavailable.
        """
        if len(self._files) <= BATCH // 2 and self._done is None and not self._stopped:
            await self._refill()
        if self._files:
            return self._files.popleft()
        copy_id = await self._take_id()
        return copy_id, (
            await gather([(self._device.workers, self._device.create_object, ((0, copy_id),))])
        )[0]

    async def _refill(self) -> None:
        """Begin to make more."""
        self._done = done = trio.Event()
        refilled = partial(self._refilled, done)
        try:
            ids = [await self._take_id() for _ in range(BATCH)]
            self._device.workers.start(refilled, _make, self._device, ids)
        except BaseException:  # also if no thread can be started: ``close`` waits for this
            refilled([])
            raise

    def _refilled(self, done: trio.Event, made: list[_Spare] | BaseException) -> None:
        if isinstance(made, list):
            self._files.extend(made)
            self._made_s = trio.current_time()
        done.set()
        self._done = None
        if self._stopped:
            self.stop()

    async def refilled(self) -> None:
        """No files are being made on return."""
        if self._done is not None:
            await self._done.wait()

    def expire(self) -> None:
        """Remove them, in the background, if it is some time that the last ones were made. Does not
        block.
        """
        if self._files and self._done is None and trio.current_time() - self._made_s > KEEP_S:
            ids = self._close_all()
            self._device.workers.post(remove_copies, self._device, ids)

    def stop(self) -> None:
        """Make no more, and give up the descriptors. Does not block."""
        self._stopped = True
        self._left += self._close_all()

    async def close(self) -> None:
        """No spare file is left on return, unless its device fails, or does not answer in time.
        ``stop`` has been called."""
        with trio.move_on_after(_END_S):
            await self.refilled()
            if self._left:
                work = self._device.workers, remove_copies, (self._device, self._left)
                await gather([work], abandonable=True)
                self._left = []

    def _close_all(self) -> list[int]:
        ids = []
        while self._files:
            spare = self._files.popleft()
            files.close_file(spare.fd)
            ids.append(spare.id)
        return ids


def _make(device: DataServer, ids: Sequence[int]) -> list[_Spare]:
    made = []
    try:
        for copy_id in ids:
            made.append(_Spare(copy_id, device.create_object((0, copy_id))))
    except FsError:
        pass  # the next one is made while its caller waits, and gets the error
    return made


def remove_copies(device: DataServer, ids: Sequence[int]) -> None:
    """Remove files that no record knows, durably: recovery looks for them among the newest ids
    alone. Blocks.

    Those that cannot be removed, even when it is tried again, are left to recovery and fsck.
    """
    failed = device.remove_objects([(0, copy_id) for copy_id in ids])
    if failed:
        failed = device.remove_objects([(0, copy_id) for copy_id in failed])
    for error in failed.values():
        _log.info("an unused burst copy is left behind: %s", error)
