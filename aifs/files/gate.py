"""A lock that many may hold together or one alone; free of cost while there is no contention."""

import trio

from aifs.core.waiting import LOCK, waits_for


class Gate:
    """Guards the bytes of one file: reads and writes enter together, changes of its form enter
    alone.

    Waiting is fair: while someone waits to enter alone, nobody else enters. Both forms are entered
    with an await that does not suspend unless it must wait, and left synchronously.
    """

    __slots__ = ("_alone", "_inside", "_queue", "_waiting_alone")

    def __init__(self) -> None:
        self._inside = 0
        self._alone = False
        self._waiting_alone = 0
        self._queue: trio.lowlevel.ParkingLot | None = None

    @property
    def is_free(self) -> bool:
        """Whether nobody is inside."""
        return not self._alone and not self._inside

    async def enter_shared(self) -> None:
        while self._alone or self._waiting_alone:
            await self._park()
        self._inside += 1

    def leave_shared(self) -> None:
        self._inside -= 1
        if self._queue and not self._inside:
            self._queue.unpark_all()

    async def enter_alone(self) -> None:
        if self._alone or self._inside:
            await self._wait_alone()
        self._alone = True

    async def _wait_alone(self) -> None:
        self._waiting_alone += 1
        try:
            while self._alone or self._inside:
                await self._park()
        except BaseException:  # cancelled: those who stood behind us may go on
            if self._queue:
                self._queue.unpark_all()
            raise
        finally:
            self._waiting_alone -= 1

    def leave_alone(self) -> None:
        self._alone = False
        if self._queue:
            self._queue.unpark_all()

    async def _park(self) -> None:
        if self._queue is None:
            self._queue = trio.lowlevel.ParkingLot()
        with waits_for(LOCK):
            await self._queue.park()
