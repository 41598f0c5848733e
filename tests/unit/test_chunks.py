"""The table of containers. Its counts: test_chunk_lists.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aifs.core.errors import Unavailable
from aifs.layout.interleaved import Extent, Location, container_layout
from aifs.layout.redundancy import Redundancy
from aifs.layout.striped import Striped
from aifs.meta import chunks, keys
from aifs.meta.chunks import Container
from aifs.meta.records import Degraded
from aifs.meta.servers import ServerRecord, find_unprotected, put_server
from tests.support.memory_engine import MemoryEngine

GOLDEN_CONTAINER = "010010000000000000030000000000000000000100010103050001000300"

PLAIN = container_layout((1,))
LAYOUTS = (
    PLAIN,
    container_layout((2, 1), Redundancy(2)),
    container_layout((0, 1, 2), Redundancy(1, 2, 1)),
)


def test_golden_records():
    coded = Container(Striped(65536, (5, 1, 3), 1, 1), 0x1000, 3)
    assert coded.encode().hex() == GOLDEN_CONTAINER
    assert chunks.decode_container(bytes.fromhex(GOLDEN_CONTAINER)) == coded
    for damaged in (
        GOLDEN_CONTAINER[:-2],
        "03" + GOLDEN_CONTAINER[2:],
        "",
        GOLDEN_CONTAINER[:50],
    ):
        with pytest.raises(Unavailable):
            chunks.decode_container(bytes.fromhex(damaged))


@given(
    st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=32).map(tuple),
    st.integers(1, 8),
    st.integers(0, 8),
    *[st.integers(0, (1 << 64) - 1)] * 2,
)
def test_container_round_trip(servers, replicas, parity, length, live):
    layout = Striped(65536, servers, replicas, parity)
    record = Container(layout, length, live)
    if layout.width > 0:
        assert chunks.decode_container(record.encode()) == record
    else:
        with pytest.raises(Unavailable):
            chunks.decode_container(record.encode())


async def test_unknown_container_is_refused():
    engine = MemoryEngine()
    with pytest.raises(Unavailable, match="container 5"):
        place = Location(0, 5, 0, 1, 1, 0, bytes(32))
        await engine.transact(chunks.put_lists, {1: [Extent(1, place)]})


async def test_plain_containers_make_their_server_indispensable():
    engine = MemoryEngine()
    await engine.transact(put_server, 1, ServerRecord("/a"))
    await engine.transact(chunks.put_container, 7, LAYOUTS[1])
    assert await engine.view(find_unprotected) == set()
    await engine.transact(chunks.put_container, 8, PLAIN)
    assert await engine.view(find_unprotected) == {1}
    with pytest.raises(Unavailable, match="removed"):
        await engine.transact(chunks.put_container, 9, container_layout((4,)))


async def test_degraded_columns_add_up():
    engine = MemoryEngine()
    await engine.transact(chunks.put_container, 7, LAYOUTS[2])
    assert await engine.view(chunks.find_readable, 7) == (Container(LAYOUTS[2], 0, 0), 0)
    for mask in (1, 4):
        await engine.transact(chunks.put_lost, {7: mask})
    assert await engine.view(lambda tx: tx.get(keys.degraded(7))) == Degraded(0, 5).encode()
    assert await engine.view(chunks.find_readable, 7) == (Container(LAYOUTS[2], 0, 0), 5)
    assert await engine.view(chunks.find_readable, 8) is None
