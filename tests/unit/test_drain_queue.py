"""The order in which files are drained: rank, then age; never before their time, and each by one
worker.
"""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aifs.burst.queue import BATCH_BYTES, BATCH_FILES, PACK_S, Queue, Rank

DELAY_S, DEADLINE_S = 2.0, 100.0
MIB = 1 << 20

INOS = st.integers(1, 12)
SIZES = st.sampled_from([0, 1, MIB, BATCH_BYTES // 2, BATCH_BYTES, 10 * BATCH_BYTES])


def make() -> Queue:
    return Queue(DELAY_S, DEADLINE_S)


def inos(entries) -> list[int]:
    return [entry.ino for entry in entries]


def test_a_file_waits_for_the_delay_after_its_last_close():
    queue = make()
    queue.closed(1, 10, now=5.0)
    assert queue.take(6.9) == [] and abs(queue.ready_in(6.0) - 1.0) < 1e-9
    assert inos(queue.take(7.0)) == [1] and queue.take(8.0) == []
    queue.hold(1, 7.0)
    assert queue.held == 1 and queue.ready_in(1000.0) == float("inf")
    queue.closed(1, 20, now=10.0)
    assert queue.held == 0 and queue.size == 20
    assert queue.take(11.9) == [] and inos(queue.take(12.0)) == [1]
    assert queue.done(1, 12.0)
    assert len(queue) == queue.size == 0 and queue.oldest_age(100.0) == 0.0


def test_in_a_hurry_no_file_waits_for_the_delay_but_each_that_has_failed():
    queue = make()
    queue.closed(1, 10, now=0.0)
    queue.closed(2, 10, now=0.5)
    queue.hurry(1.0)
    assert inos(queue.take(1.0)) == [1, 2]
    queue.retry(1, 1.0)
    queue.hold(2, 1.0)
    queue.hurry(1.5)
    assert queue.take(1.5) == [] and inos(queue.take(2.0)) == [1]


def test_what_is_deleted_while_it_is_drained_is_not_looked_at_again():
    queue = make()
    for ino in (1, 2, 3):
        queue.closed(ino, 10, now=0.0)
    assert inos(queue.take(5.0)) == [1, 2, 3]
    assert not any(queue.unlinked(ino) for ino in (1, 2, 3))
    assert queue.done(1, 5.0) and 1 not in queue
    queue.closed(2, 10, 5.0)  # it had left the burst tier, and somebody has written to it since
    assert not queue.done(2, 5.0) and 2 in queue
    queue.hold(3, 5.0)  # it was open: nobody tells of the last close of what has no name
    assert inos(queue.take(10.0)) == [2, 3]


def test_what_is_withheld_waits_for_whoever_drains_it():
    queue = make()
    assert queue.withhold(1, 10, now=0.0) and queue.withholds(1) and queue.withheld == 1
    queue.closed(1, 20, now=1.0)  # by a reader
    queue.prefer([1], Rank.PUBLISHED, 2.0)
    queue.prefer([1], Rank.REQUESTED, 2.0)
    assert queue.take(1000.0) == [] and queue.size == 20 and queue.late(1000.0)
    assert queue.give_back(1, 3.0) == 3.0 and not queue.withholds(1), "it has been requested"
    assert inos(queue.take(3.0)) == [1]
    queue.hold(1, 3.0)
    assert not queue.withhold(1, 20, 4.0), "somebody waits for it"
    assert (
        queue.withhold(2, 5, 4.0) and queue.drained(2) and not queue.drained(2) and 2 not in queue
    )


def test_what_is_being_drained_is_withheld_afterwards():
    queue = make()
    queue.closed(1, 10, now=0.0)
    assert inos(queue.take(DELAY_S)) == [1]
    assert queue.withhold(1, 10, now=3.0)
    assert not queue.done(1, 4.0) and queue.withholds(1) and queue.take(1000.0) == []
    assert queue.give_back(1, 5.0) == 5.0 + DELAY_S
    assert inos(queue.take(7.0)) == [1] and queue.done(1, 7.0)


def test_requested_then_published_then_the_oldest():
    queue = make()
    for ino, since in ((4, 1.0), (3, 2.0), (2, 3.0), (1, 4.0)):
        queue.add(ino, BATCH_BYTES, since, now=10.0)
    queue.prefer([2], Rank.PUBLISHED, 10.0)
    queue.prefer([1], Rank.REQUESTED, 10.0)
    queue.prefer([99], Rank.PUBLISHED, 10.0)
    assert queue.oldest_age(10.0) == 9.0
    assert [inos(queue.take(10.0)) for _ in range(5)] == [[1], [2], [4], [3], []]


def test_a_request_waits_for_nothing_but_the_last_close():
    queue = make()
    queue.closed(1, 5, now=0.0)
    queue.prefer([1, 2], Rank.REQUESTED, 0.5)
    assert sorted(inos(queue.take(0.5))) == [1, 2]
    queue.hold(2, 0.5)
    assert queue.done(1, 0.5)
    queue.closed(2, 7, 1.0)
    assert inos(queue.take(1.0)) == [2]
    assert queue.retry(2, 1.0) == 1.0 and queue.take(1.5) == []
    queue.prefer([2], Rank.REQUESTED, 1.5)
    assert inos(queue.take(1.5)) == [2]


def test_retries_come_after_longer_and_longer_pauses():
    queue = make()
    queue.add(1, 5, 0.0, 0.0)
    now, pauses = 0.0, []
    for _ in range(9):
        assert inos(queue.take(now)) == [1]
        pauses.append(queue.retry(1, now))
        assert queue.take(now + pauses[-1] - 0.01) == []
        now += pauses[-1]
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert queue.late(now) and not queue.late(50.0)


def drain_again(queue: Queue, now: float, seconds: float, is_drained: bool = True) -> None:
    """Drain file 1, which is ready, or try to in vain."""
    assert inos(queue.take(now)) == [1]
    queue.wrote(1, seconds, now)
    if is_drained:
        assert queue.done(1, now)
    else:
        queue.again(1, now)


def test_a_file_that_changes_again_and_again_is_drained_less_and_less_often():
    queue, now, waited = make(), 0.0, []
    queue.closed(1, 10, now)
    for _ in range(6):
        now += queue.ready_in(now)
        drain_again(queue, now, seconds=0.25)
        assert queue.paused(now) == {}
        queue.closed(1, 10, now)
        assert queue.paused(now) == {1: now + queue.ready_in(now)}
        queue.closed(1, 10, now + 1)
        waited.append(queue.ready_in(now))
    assert waited == [5.0, 20.0, 80.0, 90.0, 90.0, 90.0], "20 times, and always below the deadline"
    now += 90.0
    drain_again(queue, now, 0.25)
    now += 2 * DEADLINE_S
    queue.closed(1, 10, now)
    assert queue.ready_in(now) == DELAY_S, "it has not changed for long"
    drain_again(queue, now + DELAY_S, 0.25)
    queue.closed(1, 10, now + DELAY_S)
    assert queue.ready_in(now + DELAY_S) == 5.0


def test_a_drain_in_vain_counts_as_one():
    queue, now = make(), 0.0
    queue.closed(1, 10, now)
    for wait_s, is_drained in ((DELAY_S, False), (5.0, False), (20.0, True), (80.0, False)):
        assert queue.ready_in(now) == wait_s
        now += wait_s
        drain_again(queue, now, 0.25, is_drained)
        queue.closed(1, 10, now)
    assert queue.paused(now) == {1: now + 90.0}


def test_a_small_file_that_changes_again_and_again_waits_as_all_do():
    queue, now = make(), 0.0
    for _ in range(6):
        queue.closed(1, 10, now)
        assert queue.ready_in(now) == DELAY_S
        now += DELAY_S
        drain_again(queue, now, seconds=0.001)


def test_such_a_file_is_drained_at_once_where_somebody_needs_it():
    for rank, wait_s in ((Rank.REQUESTED, 0.0), (Rank.PUBLISHED, DELAY_S), (None, 0.0)):
        queue = make()
        queue.closed(1, 10, 0.0)
        drain_again(queue, 2.0, seconds=1.0)
        queue.closed(1, 10, 3.0)
        assert queue.ready_in(3.0) == 19.0
        if rank is None:
            queue.hurry(3.0)
        else:
            assert queue.prefer([1], rank, 3.0) == 3.0 + wait_s
        assert queue.ready_in(3.0) == wait_s
        assert inos(queue.take(3.0 + wait_s)) == [1]


def test_where_objects_never_grow_small_files_wait_for_each_other():
    queue = make()
    queue.packs = True
    small, closed_s = range(2, 9 * BATCH_FILES), 3 * PACK_S + 1
    queue.closed(1, MIB, closed_s)
    for ino in small:
        queue.closed(ino, 10, closed_s + ino / 1e6)
    assert inos(queue.take(closed_s + DELAY_S)) == [1], "a large one does not wait"
    assert queue.ready_in(3.5 * PACK_S) == 0.5 * PACK_S
    assert queue.prefer([7], Rank.REQUESTED, 3.5 * PACK_S) and inos(queue.take(3.5 * PACK_S)) == [7]
    assert inos(queue.take(4 * PACK_S)) == [ino for ino in small if ino != 7]


@given(st.lists(SIZES, min_size=1, max_size=200))
def test_batches_are_many_small_files_or_one_large_one(sizes):
    queue = make()
    for ino, size in enumerate(sizes, 1):
        queue.add(ino, size, float(ino), 0.0)
    taken = []
    while batch := queue.take(1.0):
        assert len(batch) <= BATCH_FILES
        assert len(batch) == 1 or sum(entry.size for entry in batch) <= BATCH_BYTES
        taken += inos(batch)
    assert taken == list(range(1, len(sizes) + 1))


class Machine(RuleBasedStateMachine):
    """Against a dictionary of what each file is: when it may be drained (None: held), or taken."""

    def __init__(self) -> None:
        super().__init__()
        self.queue, self.now = make(), 0.0
        self.sizes: dict[int, int] = {}
        self.since: dict[int, float] = {}
        self.rank: dict[int, Rank] = {}
        self.ready: dict[int, float] = {}
        self.taken: dict[int, bool] = {}  # and whether it was closed since

    def _new(self, ino: int, size: int, ready: float, rank: Rank = Rank.USUAL) -> None:
        self.sizes[ino] = size
        self.since[ino] = self.now
        self.rank[ino] = rank
        self.ready[ino] = ready

    def _delay_s(self, ino: int) -> float:
        urgent = self.rank[ino] is Rank.REQUESTED or self.now - self.since[ino] > DEADLINE_S
        return 0.0 if urgent else DELAY_S

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.0, 150.0]))
    def wait(self, seconds):
        self.now += seconds

    @rule(ino=INOS, size=SIZES)
    def closed(self, ino, size):
        self.queue.closed(ino, size, self.now)
        if ino not in self.sizes:
            self._new(ino, size, self.now + DELAY_S)
            return
        self.sizes[ino] = size
        if ino in self.taken:
            self.taken[ino] = True, self.taken[ino][1]
        elif self.ready[ino] == float("inf"):
            self.ready[ino] = self.now + self._delay_s(ino)

    @rule(ino=INOS, rank=st.sampled_from([Rank.REQUESTED, Rank.PUBLISHED]))
    def prefer(self, ino, rank):
        self.queue.prefer([ino], rank, self.now)
        if ino not in self.sizes:
            if rank is Rank.REQUESTED:
                self._new(ino, 0, self.now, rank)
            return
        if rank is Rank.REQUESTED:
            self.ready[ino] = self.now
        self.rank[ino] = min(rank, self.rank[ino])

    @rule()
    def take(self):
        batch = self.queue.take(self.now)
        ready = [ino for ino in self.sizes if ino not in self.taken and self.ready[ino] <= self.now]
        ready.sort(key=lambda ino: (self.rank[ino], self.since[ino], ino))
        assert inos(batch) == ready[: len(batch)] and bool(batch) == bool(ready)
        self.taken.update(dict.fromkeys(inos(batch), (False, False)))

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def finish(self, data):
        ino = data.draw(st.sampled_from(sorted(self.taken)))
        closed, left = self.taken.pop(ino)
        outcome = data.draw(st.sampled_from(["done", "hold", "again", "retry"]))
        match outcome:
            case "done":
                assert self.queue.done(ino, self.now) == (not closed)
            case "hold":
                self.queue.hold(ino, self.now)
            case "again":
                self.queue.again(ino, self.now)
            case "retry":
                self.ready[ino] = self.now + self.queue.retry(ino, self.now)
        if outcome == "done" and not closed:
            self._forget(ino)
        elif outcome != "retry":
            held = outcome == "hold" and not (closed or left)
            self.ready[ino] = float("inf") if held else self.now + self._delay_s(ino)

    def _forget(self, ino):
        for table in (self.sizes, self.since, self.rank, self.ready):
            del table[ino]

    @rule(ino=INOS)
    def unlinked(self, ino):
        known = ino in self.sizes and ino not in self.taken
        assert self.queue.unlinked(ino) == known
        if known:
            self._forget(ino)
        elif ino in self.taken:
            self.taken[ino] = self.taken[ino][0], True

    @invariant()
    def figures_agree(self):
        queue = self.queue
        assert len(queue) == len(self.sizes) and queue.size == sum(self.sizes.values())
        assert queue.oldest_age(self.now) == self.now - min(self.since.values(), default=self.now)
        free = {ino: at for ino, at in self.ready.items() if ino not in self.taken}
        assert queue.held == sum(at == float("inf") for at in free.values())
        assert queue.ready_in(self.now) == max(
            min(free.values(), default=float("inf")) - self.now, 0.0
        )


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
