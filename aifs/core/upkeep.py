"""Background work: one task decides which step runs next, by due time and by requests.

Each part has a *step* that does what is due, and returns seconds until the next, unless asked
earlier. A due kind of work gets a task for the step; an idle store has one sleeping task.

Kinds never wait for one another: one may hang on a server, a scrub takes days, and the burst tier
needs room. So each is a lane of one task, or of several *workers*, one more at each request up to
the number. A failed step is logged, and repeated; others go on.

Of several hosts each serves its own burst directories; the rest is added (``add``) on the holder of
the role, and lasts as long as the mount.
"""

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from enum import Enum
from typing import NamedTuple

import trio

from aifs.core.errors import FsError
from aifs.core.log import logger
from aifs.core.loop_share import LoopShare
from aifs.core.tasks import first_error

_log = logger(__name__)

RETRY_S = 10.0

NEVER_S = math.inf
"""A step that returns this runs again when it is asked for."""


class Work(Enum):
    """The kinds of background work. The value is what the log calls it."""

    __hash__ = object.__hash__  # Enum's own is written in Python, and asked for at every open

    WATCH_SERVERS = "watching the data servers"
    SERVERS = "leaving servers"
    LOOK_AT_BURST = "watching the burst tier"
    EVICT = "dropping cached copies"
    STAGE = "staging"
    BLOCKS = "keeping clean blocks"
    AHEAD = "reading ahead of epochs"
    STARTS = "looking after starts of jobs"
    DRAIN = "draining"
    GROUPS = "looking after groups"
    WRITE_BACK = "write-back"
    ACCESSES = "recording when files were read"
    COLLECT = "removing deleted files"
    RELEASE = "releasing what backups have held"
    STRAYS = "removing objects that have moved elsewhere"
    TRASH = "emptying the trash"
    DOOMED = "removing the rest of deleted trees"
    BACKUP = "the backup of the metadata"
    RETENTION = "removing old checkpoints"
    COMPACT = "compaction"
    REBUILD = "rebuilding"
    AGING = "moving old files"
    QUOTAS = "counting what lies in quotas"
    SCRUB = "the scrub"
    RELAX = "giving back memory"


class Job(NamedTuple):
    """How a kind of work is done."""

    step: Callable[[], Awaitable[float]]
    """Does what is due; returns in how many seconds it is due again. May raise FsError."""
    workers: int = 1
    """How many steps may run at once."""
    first_s: float = 0.0
    """In how many seconds it is due first, if it is not asked for before."""
    retry_s: float = RETRY_S
    """After how long it is tried again when it has raised an error."""


class Upkeep:
    """Made before the parts that ask for work. Used from one trio thread."""

    def __init__(self, share: LoopShare | None = None) -> None:
        self.share = share or LoopShare()
        """The share of the event loop that background work may have."""
        self._due_s: dict[Work, float] = {}  # by trio's clock; what is missing is not due
        self._asked = Counter[Work]()  # how many workers are wanted of what is due
        self._running = Counter[Work]()
        """How many workers of each work are at it."""
        self._failing: set[Work] = set()
        """Work whose last step has failed, which the log has said."""
        self._jobs: dict[Work, Job] = {}
        """How the kinds of work are done that are done here."""
        self._begun = Counter[Work]()
        """How many steps of each work have begun."""
        self._waiting: list[tuple[Work, int, trio.Event]] = []
        """The events of tasks that wait for the end of a step of a work."""
        self._asleep_until = -math.inf  # -inf: not asleep
        self._earlier = trio.Event()  # something is due before that

    def wake(self, work: Work) -> None:
        """There is something to do now. Does not block."""
        self._asked[work] += 1
        self.at(work, -math.inf)

    def at(self, work: Work, time_s: float) -> None:
        """There will be something to do at this time of trio's clock, if not earlier."""
        if time_s < self._due_s.get(work, math.inf):
            self._due_s[work] = time_s
            if time_s < self._asleep_until:
                self._earlier.set()

    async def have_done(self, work: Work) -> None:
        """Wait for the end, maybe with an error, of a step that began after the call; at once if
        the work is not done here."""
        if work in self._jobs:
            ended = trio.Event()
            self._waiting.append((work, self._begun[work] + 1, ended))
            self.wake(work)
            await ended.wait()

    async def run(self, jobs: Mapping[Work, Job]) -> None:
        """Do all that is due, also of what is added, until cancelled."""
        self._running.clear()
        self.add(jobs)
        with self.share.measured():
            await self._run(self._jobs)

    def add(self, jobs: Mapping[Work, Job]) -> None:
        """These are done from now on, too. Does not block."""
        self._jobs.update(jobs)
        for work, job in jobs.items():
            self.at(work, trio.current_time() + job.first_s)
        self._earlier.set()

    async def _run(self, jobs: Mapping[Work, Job]) -> None:
        async with trio.open_nursery() as nursery:
            while True:
                now_s, until_s = trio.current_time(), math.inf
                for work, job in jobs.items():
                    due_s = self._due_s.get(work, math.inf)
                    if self._running[work] >= job.workers:
                        continue  # a step that ends looks at it again
                    if due_s <= now_s:
                        del self._due_s[work]
                        asked = max(1, self._asked.pop(work, 0))
                        for _ in range(min(asked, job.workers - self._running[work])):
                            self._running[work] += 1
                            nursery.start_soon(self._step, work, job, name=work.value)
                    else:
                        until_s = min(until_s, due_s)
                self._earlier = trio.Event()
                self._asleep_until = until_s
                with trio.move_on_at(until_s):
                    await self._earlier.wait()
                self._asleep_until = -math.inf

    async def _step(self, work: Work, job: Job) -> None:
        self._begun[work] += 1
        number = self._begun[work]
        try:
            again_s = await job.step()
            if work in self._failing:
                self._failing.discard(work)
                _log.info("%s goes on", work.value)
        except Exception as error:  # noqa: BLE001 (logged; with its stack, unless it says that a disk is full or fails)
            again_s = job.retry_s
            cause = first_error(error)
            if not isinstance(cause, FsError):
                _log.exception("%s failed; it starts again in %d s", work.value, again_s)
            elif work not in self._failing:  # what follows until it works would say the same
                self._failing.add(work)
                _log.warning("%s has to wait: %s", work.value, cause)
        finally:
            self._running[work] -= 1
            for waiting in [each for each in self._waiting if each[0] is work]:
                if waiting[1] <= number:
                    self._waiting.remove(waiting)
                    waiting[2].set()
        self.at(work, trio.current_time() + again_s)
        self._earlier.set()


class Role:
    """Whether this host has the role; always with one host. Made before the parts that ask.

    The live session that joined first has it, until its end: then it uses no server
    (Ownership.over), and need not be stopped. Used from one trio thread.
    """

    def __init__(self, ask_live: Callable[[], Awaitable[frozenset[int]]] | None = None) -> None:
        """``ask_live``: hosts with sessions now, by number; None: one host. Until ``tell`` only
        that has the role."""
        self.is_shared = ask_live is not None
        """Whether several hosts may have the store mounted."""
        self.held = not self.is_shared
        self.live = frozenset[int]()
        """The hosts that had a session when that was last heard of."""
        self._ask_live = ask_live
        self._changed = trio.Event()

    def tell(self, held: bool, live: frozenset[int]) -> None:
        """Take over the contents of the table of sessions. Does not block."""
        if (held, live) != (self.held, self.live):
            self.held, self.live = held, live
            self._changed.set()
            self._changed = trio.Event()

    async def change(self) -> None:
        """Wait until ``held`` or ``live`` is another one."""
        await self._changed.wait()

    async def ask_live(self) -> frozenset[int]:
        """Hosts with a session now. Others' earlier records are nobody's: sessions begin before
        changes. Raises Unavailable."""
        assert self._ask_live is not None
        return await self._ask_live()
