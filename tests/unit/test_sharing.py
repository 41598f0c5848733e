"""Which chunks of a group are stored, and who sends them where."""

import threading
import time

from hypothesis import given
from hypothesis import strategies as st

from aifs.core import config
from aifs.data.server import Throughput
from aifs.layout.interleaved import container_layout
from aifs.layout.redundancy import PLAIN, Redundancy
from aifs.saves import planner, sharing
from aifs.saves.lookups import Bandwidths
from aifs.saves.sharing import Cut, Holder

members_of = st.lists(
    st.lists(st.tuples(st.integers(0, 6), st.integers(1, 3)), max_size=8), min_size=1, max_size=5
)


def cut_of(chunks: list[tuple[int, int]]) -> Cut:
    """Each chunk is (content, length): equal contents have one length; content 0 is zeros."""
    ranges, digests, at = [], [], 0
    for content, length in chunks:
        length = length if not content else content * 100
        ranges.append((at, length))
        digests.append(b"%d" % content if content else b"")
        at += length
    return Cut(ranges, digests)


@given(members_of)
def test_distinct_chunks_and_their_holders(chunks):
    cuts = [cut_of(member) for member in chunks]
    needs, amounts = sharing.distinct(cuts)
    total = sum(length for cut in cuts for _, length in cut.ranges)
    assert amounts.zero + amounts.duplicate + amounts.distinct == total
    assert set(needs) == {digest for cut in cuts for digest in cut.digests if digest}
    assert amounts.distinct == sum(need.length for need in needs.values())
    for digest, need in needs.items():
        having = [number for number, cut in enumerate(cuts) if digest in cut.digests]
        assert [holder.member for holder in need.holders] == having
        for holder in need.holders:
            place = cuts[holder.member].digests.index(digest)
            assert cuts[holder.member].ranges[place] == (holder.offset, need.length)


@given(members_of, st.integers(1, 4))
def test_every_chunk_is_sent_once_by_a_holder(chunks, count):
    cuts = [cut_of(member) for member in chunks]
    needs, _ = sharing.distinct(cuts)
    if not needs:
        return
    devices = [number % 2 for number in range(len(cuts))]
    slots = [container_layout((number,)) for number in range(count)]
    sources = {device: 1000 * (device + 1) for device in set(devices)}
    question = sharing.ask(
        needs, devices, sources, slots, {number: (500, None) for number in range(count)}
    )
    assigned = sharing.answer(question, planner.plan(question.pattern), sources)
    assert set(assigned) == set(needs)
    for digest, (slot, device) in assigned.items():
        assert slot in range(count)
        assert device in {devices[holder.member] for holder in needs[digest].holders}


def test_slow_servers_and_full_ones_get_less():
    needs = {b"%d" % n: sharing.Need(1 << 20, [Holder(0, n << 20)]) for n in range(100)}
    slots = [container_layout((number,)) for number in range(3)]
    servers = {0: (100 << 20, None), 1: (25 << 20, None), 2: (100 << 20, 10 << 20)}
    question = sharing.ask(needs, [7], {7: 1 << 30}, slots, servers)
    assigned = sharing.answer(question, planner.plan(question.pattern), [7])
    counts = [sum(one.slot == number for one in assigned.values()) for number in range(3)]
    assert counts == [72, 18, 10]


def test_slots_of_several_servers():
    """Each column of a coded slot takes a part; a server that is in two slots serves both."""
    coded = container_layout((0, 1, 2), Redundancy(1, 2, 1))
    twice = [container_layout((0, 1), Redundancy(2)), container_layout((1, 2), Redundancy(2))]
    servers = {0: (100, 1000), 1: (60, 500), 2: (100, 1000)}
    one = sharing.ask(
        {b"a": sharing.Need(1, [Holder(0, 0)])}, [9], {9: 5}, [coded], servers
    ).pattern.destinations[0]
    assert (one.bandwidth, one.space) == (120, 1000)
    both = sharing.ask(
        {b"a": sharing.Need(1, [Holder(0, 0)])}, [9], {9: 5}, twice, servers
    ).pattern.destinations
    assert [(slot.bandwidth, slot.space) for slot in both] == [(30, 250), (30, 250)]


def test_what_a_container_is_good_enough_for():
    plain, replicas = container_layout((0,)), container_layout((0, 1), Redundancy(2))
    coded = container_layout((0, 1, 2, 3), Redundancy(1, 2, 2))
    assert sharing.protects(plain, PLAIN) and not sharing.protects(plain, Redundancy(2))
    assert sharing.protects(replicas, Redundancy(1, 4, 1)) and not sharing.protects(
        replicas, Redundancy(3)
    )
    assert sharing.protects(coded, Redundancy(3)) and not sharing.protects(coded, Redundancy(4))
    assert sharing.is_allowed(replicas, ()) and sharing.is_allowed(replicas, (0, 1, 2))
    assert not sharing.is_allowed(replicas, (1, 2))


# --- bandwidths -----------------------------------------------------------------------------------


def test_only_time_in_which_something_is_under_way_counts(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def take(seconds: float) -> None:
        now[0] += seconds

    seen = Throughput()
    assert seen.rate == 0
    seen.measure(8 << 20, take, 1.0)
    now[0] += 100
    assert seen.rate == 8 << 20
    seen.measure(4 << 20, seen.measure, 4 << 20, take, 1.0)  # two at a time
    assert seen.rate == 8 << 20
    for _ in range(200):
        seen.measure(8 << 20, take, 4.0)
    assert 2 << 20 <= seen.rate < (2 << 20) * 1.01


def test_requests_of_several_threads_are_one_busy_time():
    seen, begun, go_on = Throughput(), threading.Barrier(3), threading.Event()

    def hold() -> None:
        begun.wait()
        go_on.wait()

    threads = [threading.Thread(target=seen.measure, args=(8 << 20, hold)) for _ in range(2)]
    began_s = time.monotonic()
    for thread in threads:
        thread.start()
    begun.wait()
    go_on.set()
    for thread in threads:
        thread.join()
    assert seen.rate >= (16 << 20) / (time.monotonic() - began_s)


class _Rate:
    def __init__(self, rate: int) -> None:
        self.rate = rate


class _Server:
    seen = None

    def __init__(self, number: int, address: str, rate: int = 0) -> None:
        self.id, self.address = number, address
        self.writing = self.giving = _Rate(rate)


class _Servers(dict):
    def capacity(self) -> list[_Server]:
        return [server for number, server in self.items() if number < 0x8000]


def test_bandwidths_are_configured_or_measured(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(
        "meta: {directory: m}\nservers:\n  - {path: s0, bandwidth: 1MiB}\n  - s1\n  - s2\n  - s3\n"
    )
    servers = _Servers(
        {n: _Server(n, f"{tmp_path}/s{n}") for n in range(4)} | {0x8000: _Server(0x8000, "b", 700)}
    )
    found = Bandwidths(config.load(str(file), {}), servers)
    assert found.of_servers()[0] == 1 << 20 and len(set(list(found.of_servers().values())[1:])) == 1
    assert found.of_burst([0x8000]) == {0x8000: 700}
    assert found.free() == dict.fromkeys(range(4))
    for number, rate in ((1, 1000), (2, 950), (3, 300)):
        servers[number].writing.rate = rate
    assert found.of_servers() == {0: 1 << 20, 1: 1000, 2: 1000, 3: 300}  # nearly equal is equal
    servers[3].writing.rate = 340
    assert found.of_servers()[3] == 300  # and so is nearly what it was
    servers[3].writing.rate = 800
    assert found.of_servers()[3] == 1000
    file.write_text(file.read_text() + "burst: {bandwidth: 5MiB}\n")
    assert Bandwidths(config.load(str(file), {}), servers).of_burst([0x8000]) == {0x8000: 5 << 20}


def test_what_other_processes_move_counts_in_the_time_in_which_any_did() -> None:
    seen = Throughput()
    seen.told(6 << 20, 3.0)
    seen.told(6 << 20, 3.0)  # at the same time
    assert (4 << 20) * 0.9 < seen.rate <= 4 << 20
    assert seen.total[0] == 12 << 20
