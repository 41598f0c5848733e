"""Hosts that speak to one another, over real sockets: calls, pushes, strangers, faults of the
network."""

import logging
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from aifs.core.errors import ConfigError, NotFound, NotSupported, Unavailable
from aifs.meta.kv import DamagedRecord
from aifs.peers import transport
from aifs.peers.peers import PeerAddress, Peers
from aifs.peers.transport import (
    FRAME,
    PUSH,
    REQUEST,
    SILENCE_S,
    Answer,
    Body,
    FilePart,
    Overloaded,
    Peer,
    Refused,
    shake_hands,
)
from tests.support.meddler import Meddler

STORE, SECRET = "5b0f1c2e", b"a secret of the tests"
ANYWHERE = ("127.0.0.1", 0)
PATIENT_S = 60.0  # for what happens, on a machine with much else to do
SOON_S = 0.2  # for what does not


def made(name: str, secret: bytes = SECRET, store: str = STORE) -> Peers:
    return Peers(store, name, secret, ANYWHERE)


def member(peers: Peers, name: str, session: int) -> PeerAddress:
    return PeerAddress(name, session, f"127.0.0.1:{peers.port}")


class Two:
    """Hosts a and b. b has the younger session, so it dials. ``heard``: what a has been told."""

    def __init__(self) -> None:
        self.a, self.b = made("a"), made("b")
        self.heard: list[tuple[str, Any, bytes]] = []
        self.a.hear(
            "news", lambda peer, value, body: self.heard.append((peer.name, value, bytes(body)))
        )
        self.a.serve("echo", self._echo)
        self.b.serve("echo", self._echo)

    async def _echo(self, peer: Peer, arguments: Any, body: Body) -> Answer:
        return Answer([peer.name, arguments], bytes(body))

    def introduce(self, address: str = "") -> None:
        """They know of each other; b dials ``address`` for a."""
        of_a = member(self.a, "a", 1)
        members = [of_a._replace(address=address or of_a.address), member(self.b, "b", 2)]
        self.a.update(1, members)
        self.b.update(2, members)

    @asynccontextmanager
    async def running(self, address: str = "") -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.a.run)
            nursery.start_soon(self.b.run)
            self.introduce(address)
            await self.b.call("a", "echo", timeout_s=PATIENT_S)
            yield
            nursery.cancel_scope.cancel()


@pytest.fixture
def two() -> Two:
    return Two()


@asynccontextmanager
async def meddled(two: Two, **options: Any) -> AsyncIterator[Meddler]:
    """The two with a relay between them."""
    async with trio.open_nursery() as nursery:
        relay = Meddler(two.a.port, **options)
        await nursery.start(relay.run)
        async with two.running(relay.address):
            yield relay
        nursery.cancel_scope.cancel()


async def until(condition: Any) -> None:
    with trio.fail_after(PATIENT_S):
        while not condition():
            await trio.sleep(0.005)


async def test_calls_go_both_ways(two: Two) -> None:
    async with two.running():
        for one, other, own in ((two.a, "b", "a"), (two.b, "a", "b")):
            answer = await one.call(other, "echo", {"n": [1, "\udcff"]}, b"bytes")
            assert answer == ([own, {"n": [1, "\udcff"]}], b"bytes")
        assert (two.a.connected, two.b.connected) == ({"b": 2}, {"a": 1})


@pytest.mark.sweep
@pytest.mark.parametrize("length", [0, 1, 100_000, 5_000_001, transport.MAX_BODY])
async def test_bytes_come_from_a_file_into_a_buffer(two: Two, tmp_path: Path, length: int) -> None:
    path, content = tmp_path / "file", os.urandom(length + 3)
    path.write_bytes(content)

    async def read(peer: Peer, arguments: Any, body: Body) -> Answer:
        return Answer(None, FilePart(os.open(path, os.O_RDONLY), 3, length))

    two.a.serve("read", read)
    async with two.running():
        buffer = memoryview(bytearray(length + 1))
        answer = await two.b.call("a", "read", into=buffer, timeout_s=PATIENT_S)
        assert answer.body == content[3:] and buffer[:length] == content[3:]
        assert (await two.b.call("a", "read", timeout_s=PATIENT_S)).body == content[3:]
        small = memoryview(bytearray(length // 2))
        answer = await two.b.call("a", "read", into=small, timeout_s=PATIENT_S)
        assert answer.body == content[3:] and small == bytes(length // 2)
    assert not [fd for fd in os.listdir("/proc/self/fd") if _leads_to(fd) == str(path)]


def _leads_to(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return ""


async def test_a_file_that_is_too_short_ends_the_call_alone(two: Two, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"short")

    async def read(peer: Peer, arguments: Any, body: Body) -> Answer:
        return Answer(None, FilePart(os.open(path, os.O_RDONLY), 0, 10_000))

    two.a.serve("read", read)
    async with two.running():
        with pytest.raises(Unavailable, match="host a"):
            await two.b.call("a", "read", timeout_s=PATIENT_S)
        await two.b.call("a", "echo", timeout_s=PATIENT_S)


async def test_many_at_once_are_answered_in_any_order(two: Two) -> None:
    turns, arrived = [trio.Event() for _ in range(200)], 0

    async def turned(peer: Peer, number: int, body: Body) -> Answer:
        nonlocal arrived
        arrived += 1
        if arrived == len(turns):
            turns[-1].set()
        await turns[number].wait()
        turns[number - 1].set()
        return Answer(number, bytes(body[:1]) * 1000)

    two.a.serve("turned", turned)
    answers = []

    async def ask(number: int) -> None:
        body = bytes([number]) * 2000
        answer = await two.b.call("a", "turned", number, body, timeout_s=PATIENT_S)
        assert answer == (number, body[:1000])
        answers.append(number)

    async with two.running(), trio.open_nursery() as nursery:
        for number in range(200):
            nursery.start_soon(ask, number)
    assert sorted(answers) == list(range(200))


async def test_errors_travel(two: Two, caplog: pytest.LogCaptureFixture) -> None:
    async def fail(peer: Peer, which: str, body: Body) -> Answer:
        raise {
            "known": NotFound("no such thing \udcff"),
            "derived": DamagedRecord(b"k", "a bad record"),
            "unexpected": KeyError("a bug"),
        }[which]

    two.a.serve("fail", fail)
    async with two.running():
        with pytest.raises(NotFound, match="no such thing \udcff"):
            await two.b.call("a", "fail", "known", timeout_s=PATIENT_S)
        with pytest.raises(Unavailable, match="a bad record"):
            await two.b.call("a", "fail", "derived", timeout_s=PATIENT_S)
        assert not caplog.records
        with pytest.raises(Unavailable, match="unexpected KeyError"):
            await two.b.call("a", "fail", "unexpected", timeout_s=PATIENT_S)
        assert "request fail of host b" in caplog.text
        with pytest.raises(NotSupported, match="nothing"):
            await two.b.call("a", "nothing", timeout_s=PATIENT_S)


async def test_an_answer_that_cannot_be_sent_is_an_error(
    two: Two, caplog: pytest.LogCaptureFixture
) -> None:
    async def answer(peer: Peer, which: str, body: Body) -> Answer:
        return Answer(object()) if which == "value" else Answer(0, bytes(transport.MAX_BODY + 1))

    two.a.serve("answer", answer)
    async with two.running():
        for which in ("value", "body"):
            with pytest.raises(Unavailable, match="unexpected"):
                await two.b.call("a", "answer", which, timeout_s=PATIENT_S)


async def test_pushes_come_in_order(two: Two) -> None:
    async with two.running():
        for number in range(5000):
            two.b.push("news", number, b"%d" % number)
        two.b.push("unheard of")
        two.b.tell("a", "news", "last")
        two.b.tell("nobody", "news")
        await until(lambda: two.heard and two.heard[-1][1] == "last")
    assert two.heard[:-1] == [("b", n, b"%d" % n) for n in range(5000)]


async def test_a_listener_that_fails_ends_nothing(
    two: Two, caplog: pytest.LogCaptureFixture
) -> None:
    two.a.hear("bad", lambda *_: 1 // 0)
    async with two.running():
        two.b.push("bad")
        two.b.push("news", 1)
        await until(lambda: two.heard)
    assert "ZeroDivisionError" in caplog.text


async def test_who_asks_no_more_is_not_served_any_more(two: Two) -> None:
    begun, ended = trio.Event(), trio.Event()

    async def wait(peer: Peer, arguments: Any, body: Body) -> Answer:
        begun.set()
        try:
            await trio.sleep_forever()
        finally:
            ended.set()
        return Answer()

    two.a.serve("wait", wait)
    async with two.running(), trio.open_nursery() as nursery:

        async def ask() -> None:
            await two.b.call("a", "wait", timeout_s=PATIENT_S)

        nursery.start_soon(ask)
        await begun.wait()
        nursery.cancel_scope.cancel()
    assert ended.is_set()


@pytest.mark.sweep
async def test_a_cancelled_call_leaves_its_buffer_alone(two: Two) -> None:
    async def read(peer: Peer, arguments: Any, body: Body) -> Answer:
        return Answer(None, b"x" * transport.MAX_BODY)

    two.a.serve("read", read)
    async with two.running():
        buffer = memoryview(bytearray(transport.MAX_BODY))
        for pause_s in (0, 0.001, 0.003, 0.01):
            with trio.move_on_after(pause_s):
                await two.b.call("a", "read", into=buffer, timeout_s=PATIENT_S)
            buffer[:] = bytes(len(buffer))
            await two.b.call("a", "echo", timeout_s=PATIENT_S)  # behind all that was on its way
            assert buffer == bytes(len(buffer))


async def test_too_much_at_once_is_refused(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MAX_REQUESTS", 2)
    go = trio.Event()

    async def wait(peer: Peer, arguments: Any, body: Body) -> Answer:
        await go.wait()
        return Answer()

    two.a.serve("wait", wait)
    refused = []

    async def ask() -> None:
        try:
            await two.b.call("a", "wait", timeout_s=PATIENT_S)
        except Overloaded:
            refused.append(1)
            go.set()

    async with two.running(), trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(ask)
    assert refused == [1]


async def test_who_is_not_there_is_not_waited_for(two: Two) -> None:
    async with two.running():
        with pytest.raises(Unavailable, match="host c is not there"):
            await two.b.call("c", "echo", timeout_s=PATIENT_S)
        two.b.update(2, [member(two.b, "b", 2)])
        with pytest.raises(Unavailable):
            await two.b.call("a", "echo", timeout_s=PATIENT_S)


async def test_a_host_that_cannot_be_dialed_is_waited_for_as_long_as_asked() -> None:
    gone, host = made("gone"), made("host")
    gone.close()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(host.run)
        host.update(2, [member(gone, "gone", 1)])
        with pytest.raises(Unavailable, match=r"host gone has not answered for 0\.1 s"):
            await host.call("gone", "echo", timeout_s=0.1)
        nursery.cancel_scope.cancel()


async def test_the_younger_session_of_a_host_takes_its_place(two: Two) -> None:
    async with two.running():
        again = made("b")
        again.serve("who", lambda *_: _answered("younger"))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(again.run)
            again.update(3, [member(two.a, "a", 1), member(again, "b", 3)])
            await again.call("a", "echo", timeout_s=PATIENT_S)
            two.a.update(1, [member(two.a, "a", 1), member(again, "b", 3)])
            assert (await two.a.call("b", "who", timeout_s=PATIENT_S)).value == "younger"
            nursery.cancel_scope.cancel()


async def _answered(value: Any) -> Answer:
    return Answer(value)


@pytest.mark.parametrize(
    ("stranger", "said"),
    [
        (Peer(STORE, "b", 2), "host b has another secret"),
        (Peer("another", "b", 2), "host b is of another store, another"),
    ],
)
async def test_strangers_are_named_once_and_told_nothing(
    caplog: pytest.LogCaptureFixture, stranger: Peer, said: str
) -> None:
    a = made("a")
    secret = SECRET if stranger.store != STORE else b"another"
    b = Peers(stranger.store, "b", secret, ANYWHERE)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(a.run)
        nursery.start_soon(b.run)
        a.update(1, [])
        b.update(2, [member(a, "a", 1)])
        with pytest.raises(Unavailable):
            await b.call("a", "echo", timeout_s=1.0)  # which tries several times
        nursery.cancel_scope.cancel()
    lines = [record.getMessage() for record in caplog.records]
    assert len([line for line in lines if said in line]) == 1, lines
    assert len([line for line in lines if "host a" in line]) == 1, lines
    assert len(lines) == 2


@pytest.mark.sweep
async def test_silent_strangers_keep_no_host_out(two: Two) -> None:
    """As many as may wait did, for 3 s each, with more behind them."""
    async with AsyncExitStack() as stack, trio.open_nursery() as nursery:
        nursery.start_soon(two.a.run)
        for _ in range(600):
            await stack.enter_async_context(await trio.open_tcp_stream("127.0.0.1", two.a.port))
        nursery.start_soon(two.b.run)
        two.introduce()
        began_s = trio.current_time()
        await two.b.call("a", "echo", timeout_s=PATIENT_S)
        assert trio.current_time() - began_s < SILENCE_S
        nursery.cancel_scope.cancel()


async def test_a_stranger_is_one_short_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Each said another long name, until the log held nothing else."""
    a = made("a")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(a.run)
        for number in range(20):
            own = Peer("another", f"{number}" + "x" * 3000, 1)
            async with await trio.open_tcp_stream("127.0.0.1", a.port) as stream:
                with pytest.raises((Refused, OSError, trio.BrokenResourceError)):
                    await shake_hands(stream, own, SECRET, "a")
        nursery.cancel_scope.cancel()
    (line,) = [record.getMessage() for record in caplog.records]
    assert len(line) < 300


async def test_another_host_at_the_address_is_named(caplog: pytest.LogCaptureFixture) -> None:
    a, b = made("a"), made("b")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(a.run)
        nursery.start_soon(b.run)
        a.update(1, [])
        b.update(2, [member(a, "c", 1)])
        with pytest.raises(Unavailable, match="host c"):
            await b.call("c", "echo", timeout_s=0.5)
        nursery.cancel_scope.cancel()
    assert "where host c should be, there is host a" in caplog.text


async def test_who_hangs_is_given_up_and_comes_back(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "ALIVE_S", 0.1)
    monkeypatch.setattr(transport, "SILENCE_S", 1.0)
    async with meddled(two) as relay:
        relay.is_open = trio.Event()
        with pytest.raises(Unavailable, match="host a"):
            await two.b.call("a", "echo", timeout_s=PATIENT_S)
        await until(lambda: "b" not in two.a.connected)
        relay.is_open.set()
        await two.b.call("a", "echo", timeout_s=PATIENT_S)
        await two.a.call("b", "echo", timeout_s=PATIENT_S)


async def test_signs_of_life_keep_a_connection(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "ALIVE_S", 0.01)
    frames = 0

    def count(frame: bytes) -> Iterator[bytes]:
        nonlocal frames
        frames += 1
        yield frame

    async with meddled(two, meddle=count):
        await until(lambda: frames > 20)
        assert two.a.connected


async def test_an_answer_that_is_lost_is_not_waited_for_for_ever(two: Two) -> None:
    async with meddled(two) as relay:
        relay.meddle = lambda frame: (
            [] if FRAME.unpack_from(frame)[0] == transport.ANSWER else [frame]
        )
        with pytest.raises(Unavailable, match="host a has not answered for"):
            await two.b.call("a", "echo", timeout_s=SOON_S)


async def test_a_request_that_comes_twice_is_carried_out_once(two: Two) -> None:
    count = 0

    async def increase(peer: Peer, arguments: Any, body: Body) -> Answer:
        nonlocal count
        count += 1
        return Answer(count)

    two.a.serve("increase", increase)
    async with meddled(two) as relay:
        relay.meddle = lambda frame: [frame, frame]
        for expected in range(1, 20):
            answer = await two.b.call("a", "increase", timeout_s=PATIENT_S)
            assert answer.value == expected


@pytest.mark.sweep
@given(fates=st.lists(st.sampled_from(["pass", "drop", "twice", "later"]), min_size=1, max_size=30))
@settings(max_examples=30)
async def test_what_is_pushed_may_be_lost_doubled_and_late(fates: list[str]) -> None:
    """Nothing but that happens to it: what comes is whole, and calls still work."""
    two, kept, left = Two(), [], list(fates)

    def meddle(frame: bytes) -> list[bytes]:
        if FRAME.unpack_from(frame)[0] != PUSH or not left:
            passed = [frame, *kept]
            kept.clear()
            return passed
        fate = left.pop(0)
        if fate == "later":
            kept.append(frame)
        return {"pass": [frame], "twice": [frame, frame]}.get(fate, [])

    async with meddled(two, meddle=meddle):
        for number in range(len(fates)):
            two.b.push("news", number, bytes(number))
        assert await two.b.call("a", "echo", 1, b"2", timeout_s=PATIENT_S) == (["b", 1], b"2")
        await two.b.call("a", "echo", timeout_s=PATIENT_S)  # which releases what was kept
    times = {"pass": 1, "twice": 2, "later": 1, "drop": 0}
    wanted = sorted(n for n, fate in enumerate(fates) for _ in range(times[fate]))
    assert sorted(number for _, number, _ in two.heard) == wanted
    assert all(body == bytes(number) for _, number, body in two.heard)


def frame(kind: int, head: bytes = b"", body: bytes = b"", number: int = 1) -> bytes:
    return FRAME.pack(kind, number, len(head), len(body)) + head + body


_TORN = st.one_of(
    st.binary(max_size=200),
    st.builds(
        frame,
        st.integers(0, 8),
        st.one_of(
            st.binary(max_size=40), st.sampled_from([b'["echo",1]', b'["news",2]', b"[1,2]"])
        ),
        st.binary(max_size=40),
        st.integers(0, 1 << 63),
    ),
    st.builds(FRAME.pack, st.integers(0, 8), st.just(1), *(2 * [st.integers(0, 0xFFFFFFFF)])),
    st.just(frame(REQUEST, b"[" * 60_000)),
)


@pytest.mark.sweep
@given(pieces=st.lists(_TORN, min_size=1, max_size=5), shaken=st.booleans())
@settings(max_examples=60)
def test_no_bytes_do_harm(pieces: list[bytes], shaken: bool) -> None:
    """Whatever comes from a stranger, or from somebody of ours: others are served on."""

    async def send() -> None:
        two = Two()
        async with two.running():
            stream = await trio.open_tcp_stream("127.0.0.1", two.a.port)
            async with stream:
                if shaken:
                    own = Peer(STORE, "c", 3)
                    await shake_hands(stream, own, SECRET, "a")
                try:
                    await stream.send_all(b"".join(pieces))
                    await stream.send_eof()
                    while await stream.receive_some():
                        pass
                except (OSError, trio.BrokenResourceError):
                    pass
            answer = await two.b.call("a", "echo", 1, b"2", timeout_s=PATIENT_S)
            assert answer == (["b", 1], b"2")

    logging.disable(logging.CRITICAL)
    try:
        trio.run(send)
    finally:
        logging.disable(logging.NOTSET)


async def test_a_frame_that_is_too_large_ends_the_connection_with_a_line(
    two: Two, caplog: pytest.LogCaptureFixture
) -> None:
    async with two.running():
        stream = await trio.open_tcp_stream("127.0.0.1", two.a.port)
        async with stream:
            await shake_hands(stream, Peer(STORE, "c", 3), SECRET, "a")
            await stream.send_all(FRAME.pack(PUSH, 0, 10, transport.MAX_BODY + 1))
            while await stream.receive_some():
                pass
        await until(lambda: caplog.records)
    assert f"host c sends a frame of 10 and {transport.MAX_BODY + 1} bytes" in caplog.text


async def test_what_a_host_does_not_take_is_bounded(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is pushed behind it is dropped, not kept."""
    async with meddled(two) as relay:
        relay.is_open = trio.Event()
        body = bytes(1 << 20)
        for number in range(100):
            two.b.push("news", number, body)
        relay.is_open.set()
        two.b.tell("a", "echo")
        await two.b.call("a", "echo", timeout_s=PATIENT_S)
        assert 0 < len(two.heard) < 50
        assert [number for _, number, _ in two.heard] == list(range(len(two.heard)))


def test_a_port_that_is_taken_is_a_mistake_of_the_configuration() -> None:
    first = made("a")
    with pytest.raises(ConfigError, match=r"host\.listen: cannot listen at 127"):
        Peers(STORE, "b", SECRET, ("127.0.0.1", first.port))
    first.close()
