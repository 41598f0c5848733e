"""The locks of one file against two judges: bytes that are locked one by one, and Linux."""

import errno
import fcntl
import os
import struct
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aifs.files.lock_table import LAST, Lock, LockOwner, LockTable, Wait

OWNERS = [LockOwner(1, 1), LockOwner(1, 2), LockOwner(2, 1)]
BYTES = 12
_OFD = struct.Struct("@hhqqi4x")


class Step(NamedTuple):
    owner: LockOwner
    start: int
    end: int
    kind: str
    """read, write or unlock"""


@st.composite
def steps(draw: st.DrawFn) -> Step:
    start = draw(st.integers(0, BYTES - 1))
    end = draw(st.one_of(st.integers(start, BYTES - 1), st.just(LAST)))
    kind = draw(st.sampled_from(["read", "write", "unlock"]))
    return Step(draw(st.sampled_from(OWNERS)), start, end, kind)


def lock_of(step: Step) -> Lock:
    return Lock(step.owner, step.start, step.end, step.kind == "write", 7)


class ByBytes:
    """The locks of each byte; the last one stands for all that follow."""

    def __init__(self) -> None:
        self.bytes: list[dict[LockOwner, bool]] = [{} for _ in range(BYTES + 1)]

    def _range(self, step: Step) -> range:
        return range(step.start, min(step.end, BYTES) + 1)

    def is_free(self, step: Step) -> bool:
        others = [
            exclusive
            for place in self._range(step)
            for owner, exclusive in self.bytes[place].items()
            if owner != step.owner
        ]
        return not any(exclusive or step.kind == "write" for exclusive in others)

    def apply(self, step: Step) -> bool:
        if step.kind != "unlock" and not self.is_free(step):
            return False
        for place in self._range(step):
            if step.kind == "unlock":
                self.bytes[place].pop(step.owner, None)
            else:
                self.bytes[place][step.owner] = step.kind == "write"
        return True


def apply(table: LockTable, step: Step) -> bool:
    if step.kind == "unlock":
        table.unlock(step.owner, step.start, step.end)
        return True
    return table.lock(lock_of(step))


def by_bytes(table: LockTable) -> list[dict[LockOwner, bool]]:
    """What the table holds, byte by byte; it is in the shortest form."""
    found: list[dict[LockOwner, bool]] = [{} for _ in range(BYTES + 1)]
    for owner in OWNERS:
        locks = [lock for lock in table.held(owner.session) if lock.owner == owner]
        for one, next_one in zip(locks, locks[1:], strict=False):
            assert one.end < next_one.start
            assert one.end + 1 < next_one.start or one.exclusive != next_one.exclusive
        for lock in locks:
            for place in range(lock.start, min(lock.end, BYTES) + 1):
                found[place][owner] = lock.exclusive
    return found


@pytest.mark.sweep
@given(st.lists(steps(), max_size=30))
def test_ranges_are_those_of_single_bytes(asked: list[Step]) -> None:
    table, judge = LockTable(False), ByBytes()
    for step in asked:
        assert apply(table, step) == judge.apply(step), step
        assert by_bytes(table) == judge.bytes
    assert bool(table) == any(judge.bytes)


@contextmanager
def descriptors(count: int) -> Iterator[list[int]]:
    """Open files of one local file, each an owner of its own."""
    with tempfile.NamedTemporaryFile() as file, ExitStack() as stack:
        opened = [os.open(file.name, os.O_RDWR) for _ in range(count)]
        for fd in opened:
            stack.callback(os.close, fd)
        yield opened


def _ofd(fd: int, command: int, step: Step) -> tuple[int, ...]:
    kind = {"read": fcntl.F_RDLCK, "write": fcntl.F_WRLCK, "unlock": fcntl.F_UNLCK}[step.kind]
    length = 0 if step.end == LAST else step.end - step.start + 1
    packed = _OFD.pack(kind, os.SEEK_SET, step.start, length, 0)
    return _OFD.unpack(fcntl.fcntl(fd, command, packed))


@pytest.mark.sweep
@given(st.lists(steps(), max_size=30))
def test_ranges_are_those_of_linux(asked: list[Step]) -> None:
    table = LockTable(False)
    with descriptors(len(OWNERS)) as opened:
        for step in asked:
            fd = opened[OWNERS.index(step.owner)]
            if step.kind != "unlock":
                kind, _, start, length, _ = _ofd(fd, fcntl.F_OFD_GETLK, step)
                found = list(table.conflicts(lock_of(step)))
                assert bool(found) == (kind != fcntl.F_UNLCK), step
                if found:
                    end = start + length - 1 if length else LAST
                    is_write = kind == fcntl.F_WRLCK
                    assert (start, end, is_write) in [(a, b, c) for _, a, b, c, _ in found]
            try:
                _ofd(fd, fcntl.F_OFD_SETLK, step)
                is_locked = True
            except BlockingIOError:
                is_locked = False
            assert apply(table, step) == is_locked, step


@given(
    st.lists(
        st.tuples(st.sampled_from(OWNERS), st.sampled_from(["read", "write", "unlock"])),
        max_size=30,
    )
)
def test_flock_is_that_of_linux(asked: list[tuple[LockOwner, str]]) -> None:
    table = LockTable(True)
    numbers = {"read": fcntl.LOCK_SH, "write": fcntl.LOCK_EX, "unlock": fcntl.LOCK_UN}
    with descriptors(len(OWNERS)) as opened:
        for owner, kind in asked:
            try:
                fcntl.flock(opened[OWNERS.index(owner)], numbers[kind] | fcntl.LOCK_NB)
                is_locked = True
            except OSError as error:
                assert error.errno == errno.EWOULDBLOCK
                is_locked = False
            assert apply(table, Step(owner, 0, LAST, kind)) == is_locked, (owner, kind)


class Waiters:
    """Those who wait at a table, and a judge of who must have got what."""

    def __init__(self, table: LockTable) -> None:
        self.table = table
        self.ended: list[tuple[int, bool]] = []
        self.waiting: dict[int, tuple[Wait, Step]] = {}

    def add(self, step: Step) -> None:
        ticket = len(self.waiting) + len(self.ended) + 1
        wait = Wait(lock_of(step), ticket, lambda: self.ended.append((ticket, wait.granted)))
        self.waiting[ticket] = wait, step
        self.table.wait(wait)


@given(st.lists(st.tuples(steps(), st.booleans()), max_size=40))
def test_waiters_get_what_becomes_free_in_their_order(asked: list[tuple[Step, bool]]) -> None:
    table, judge = LockTable(False), ByBytes()
    waiters = Waiters(table)
    for step, waits in asked:
        if not apply(table, step) and waits:
            waiters.add(step)
        else:
            judge.apply(step)
        granted = waiters.ended
        while free := [t for t, (_, s) in waiters.waiting.items() if judge.is_free(s)]:
            _, first = waiters.waiting.pop(free[0])
            judge.apply(first)
            assert granted.pop(0) == (free[0], True)
            assert table.cancel(first.owner.session, free[0])  # told that it was too late
        assert not granted
        assert by_bytes(table) == judge.bytes


def test_a_waiter_that_gives_up_is_told_whether_it_has_the_lock() -> None:
    table = LockTable(False)
    waiters = Waiters(table)
    assert apply(table, Step(OWNERS[0], 0, 5, "write"))
    waiters.add(Step(OWNERS[1], 0, 0, "write"))
    assert table.blockers(1, 1) == [OWNERS[0]]
    assert not table.cancel(2, 1)  # of another session
    assert not table.cancel(1, 1)
    assert waiters.ended == [(1, False)]
    assert table.blockers(1, 1) == []


@pytest.mark.parametrize("flock", [False, True])
def test_a_session_that_is_over_leaves_nothing(flock: bool) -> None:
    table = LockTable(flock)
    waiters = Waiters(table)
    assert apply(table, Step(OWNERS[2], 0, LAST, "write"))
    waiters.add(Step(OWNERS[0], 0, LAST, "write"))
    waiters.add(Step(OWNERS[1], 0, LAST, "write"))
    assert table.sessions() == {1, 2}
    table.restate(2)
    assert waiters.ended == [(1, True)]
    table.restate(1)
    assert waiters.ended == [(1, True), (2, False)]
    assert not table


def test_a_lock_of_the_other_kind_is_given_up_first() -> None:
    """As flock(2) does; so two readers who both want to write are no deadlock."""
    table = LockTable(True)
    waiters = Waiters(table)
    for owner in OWNERS[:2]:
        assert apply(table, Step(owner, 0, LAST, "read"))
    assert not apply(table, Step(OWNERS[0], 0, LAST, "write"))
    waiters.add(Step(OWNERS[0], 0, LAST, "write"))
    assert not apply(table, Step(OWNERS[1], 0, LAST, "write"))
    assert waiters.ended == [(1, True)]


def test_who_holds_a_lock_gets_it_again_though_others_wait() -> None:
    table = LockTable(False)
    waiters = Waiters(table)
    assert apply(table, Step(OWNERS[0], 0, 5, "read"))
    waiters.add(Step(OWNERS[1], 0, 5, "write"))
    assert apply(table, Step(OWNERS[0], 0, 5, "read"))
    assert apply(table, Step(OWNERS[2], 0, 5, "read"))
    assert apply(table, Step(OWNERS[2], 0, 5, "unlock"))
    assert not waiters.ended
    assert apply(table, Step(OWNERS[0], 0, 5, "unlock"))
    assert waiters.ended == [(1, True)]
