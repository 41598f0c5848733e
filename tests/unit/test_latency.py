"""Latencies, when to hedge, and asking several for the same."""

import math

import pytest
import trio

from aifs.core.errors import NoSpace, Unavailable
from aifs.core.tasks import some_of
from aifs.data.health import Hedging, Latency


def test_quantiles_are_of_what_was_seen_lately() -> None:
    latency = Latency()
    assert latency.quantile("read", 4096, 0.99) is None
    for _ in range(200):
        latency.observe("read", 4096, 0.001)
    assert 0.001 <= latency.quantile("read", 4096, 0.99) < 0.003
    assert latency.quantile("read", 1 << 20, 0.99) is None, "large requests are another matter"
    for _ in range(2000):
        latency.observe("read", 4096, 0.5)
    assert 0.5 <= latency.quantile("read", 4096, 0.99) < 1.1


def test_delays_are_bounded_and_follow_the_slowest_server() -> None:
    fast, slow = Latency(), Latency()
    for _ in range(100):
        fast.observe("read", 4096, 1e-5)
        slow.observe("read", 4096, 0.1)
    assert Hedging().delay_s([fast], 4096) == 0.01
    assert 0.1 < Hedging().delay_s([fast, slow], 4096) < 0.5
    assert Hedging().delay_s([Latency()], 4096) == 0.1
    assert (
        Hedging(0.25).delay_s([fast], 4096) == 0.25
        and Hedging(math.inf).delay_s([fast], 4096) == math.inf
    )


def test_a_slow_server_is_waited_for_as_long_as_enough_others_take() -> None:
    """Not by its own quantile: it would be waited for in each read (ec=2+1)."""
    fast, fair, slow = Latency(), Latency(), Latency()
    for _ in range(100):
        fast.observe("read", 4096, 0.001)
        fair.observe("read", 4096, 0.015)
        slow.observe("read", 4096, 0.2)
    servers = [slow, fast, fair]
    assert 0.02 < Hedging().delay_s([fast, slow], 4096, servers, 2) < 0.1
    assert Hedging().delay_s([slow], 4096, servers, 1) == 0.01
    assert Hedging().delay_s([fast], 4096, servers, 2) == 0.01
    assert Hedging().delay_s([slow], 4096, [slow], 2) > 0.2, "nobody else can tell it"
    assert Hedging().delay_s([slow], 4096, [slow, slow, fast], 2) > 0.2, "all are slow"


def test_few_reads_are_hedged_early() -> None:
    fast, hedging = Latency(), Hedging()
    for _ in range(100):
        fast.observe("read", 4096, 1e-5)
    early = 0
    for _ in range(1000):
        if hedging.delay_s([fast], 4096) < 1:
            early += 1
            hedging.hedged()
    assert hedging.count == early <= 16 + 1000 * 0.05 + 1
    assert hedging.usual_s([fast], 4096) == 0.01


def test_a_late_server_is_late_for_a_while() -> None:
    latency = Latency()
    assert not latency.is_late
    latency.was_late()
    assert latency.is_late


async def give(value: int) -> int:
    return value


async def fail() -> int:
    raise Unavailable("first")


async def fail_otherwise() -> int:
    raise NoSpace()


async def hang() -> int:
    await trio.sleep_forever()


@pytest.mark.parametrize(
    ("attempts", "needed", "delay_s", "expected"),
    [
        ([give, hang], 1, math.inf, {0}),
        ([fail, give], 1, math.inf, {1}),
        ([hang, fail, give], 1, 0.0, {2}),
        ([hang, give, give], 2, 0.0, {1, 2}),
        ([give, fail, hang, give], 2, 0.01, {0, 3}),
    ],
)
async def test_some_of_many(attempts: list, needed: int, delay_s: float, expected: set) -> None:
    calls = [lambda a=a, n=n: a(n) if a is give else a() for n, a in enumerate(attempts)]
    with trio.fail_after(60):
        assert await some_of(calls, needed, delay_s) == {number: number for number in expected}


async def test_too_few_raise_the_first_error_and_wait_for_nobody() -> None:
    with trio.fail_after(60):
        with pytest.raises(Unavailable, match="first"):
            await some_of([fail, fail_otherwise], 1, math.inf)
        with pytest.raises(Unavailable, match="first"):
            await some_of([hang, fail], 2, math.inf)
