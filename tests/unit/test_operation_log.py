"""The operation log: what is kept for whom, and how a line looks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aifs.core.waiting import Activity
from aifs.vfs import operation_log
from aifs.vfs.operation_log import OperationLog, Request

REQUEST = Request("lookup", 1, b"x", b"", 0, 4711)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(operation_log.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operation_log, "_RECORDS", 8)
    monkeypatch.setattr(operation_log, "_READ_AT_ONCE", 3)


def put(log: OperationLog, number: int) -> None:
    log.ended(Activity(lambda: REQUEST, (), 0), 1000, 0, number)


def test_nothing_is_kept_while_nobody_reads(clock: list[float]) -> None:
    log = OperationLog(lambda _: None)
    assert not log.is_on
    put(log, 1)
    assert log.next == 0 and log.records(0) == (0, [])


def test_it_is_switched_off_when_the_last_reader_has_gone(clock: list[float]) -> None:
    log = OperationLog(lambda _: None)
    log.follow()
    put(log, 1)
    clock[0] += 4
    log.follow()
    clock[0] += 4
    put(log, 2)
    assert log.is_on and [record.bytes for record in log.records(0)[1]] == [1, 2]
    clock[0] += 2
    put(log, 3)
    assert not log.is_on and log.next == 2
    log.follow()
    put(log, 4)
    first, records = log.records(1)
    assert (first, [record.bytes for record in records]) == (2, [4])  # what was before is lost


@given(st.lists(st.integers(0, 12), max_size=20))
def test_a_reader_gets_each_record_once_or_is_told_how_many_are_lost(batches: list[int]) -> None:
    log = OperationLog(lambda _: None)
    log.follow()
    written = seen = lost = number = 0
    for size in [*batches, 0, 0, 0]:
        for _ in range(size):
            put(log, written)
            written += 1
        first, records = log.records(number)
        lost += first - number
        assert [record.bytes for record in records] == list(range(first, first + len(records)))
        assert len(records) <= 3
        seen += len(records)
        number = first + len(records)
    assert seen + lost == written


def test_what_took_long_is_kept_though_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [1e9]
    monkeypatch.setattr(operation_log.time, "time", lambda: now_s[0])
    monkeypatch.setattr(operation_log.time, "time_ns", lambda: round(now_s[0] * 1e9))
    log = OperationLog(lambda _: None)
    ended = Activity(lambda: REQUEST, (), 0)
    log.ended(ended, 9_000_000)
    assert log.long() == (1e9, [])
    log.ended(ended, 2_000_000_000, 5)
    now_s[0] += 599
    log.ended(ended, 10_000_000)
    since_s, records = log.long()
    assert since_s == 1e9 and [record.duration_us for record in records] == [2_000_000, 10_000]
    assert (records[0].errno, records[0].at_ns) == (5, 999_999_998 * 10**9)
    now_s[0] += 2
    since_s, records = log.long()
    assert since_s == 1e9 + 1 and len(records) == 1
    assert not log.is_on and log.records(0) == (0, [])


def test_a_flood_pushes_out_the_oldest_and_says_since_when(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = OperationLog(lambda _: None)
    began_s, _ = log.long()
    for _ in range(operation_log.LONG_KEPT + 1):
        log.ended(Activity(lambda: REQUEST, (), 0), 10_000_000)
    since_s, records = log.long()
    assert since_s >= began_s and len(records) == operation_log.LONG_KEPT
