"""The table of containers: records, and counts that stay right whatever happens."""

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aifs.core.errors import Unavailable
from aifs.layout.interleaved import HEADER_BYTES, Extent, Location, container_layout, padded
from aifs.layout.redundancy import Redundancy
from aifs.layout.striped import Striped
from aifs.meta import chunks, keys
from aifs.meta.chunks import Container, Move
from aifs.meta.records import Degraded, decode_garbage
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


class Table:
    """What the records should say."""

    def __init__(self, engine: MemoryEngine) -> None:
        self.engine = engine
        self.layouts: dict[int, Striped] = {}
        self.lost: dict[int, int] = {}
        self.ends: dict[int, int] = {}
        self.open: set[int] = set()
        self.files: dict[int, list[Extent]] = {}
        self.garbage: set[int] = set()

    def live(self, container: int) -> int:
        places = [
            place
            for file in self.files.values()
            for _, place, _ in file
            if place and place.container == container
        ]
        return sum(HEADER_BYTES + place.stored for place in places)

    def place(self, number: int, size: int) -> Location | None:
        if not self.open or size % 7 == 0:
            return None
        container = sorted(self.open)[number % len(self.open)]
        offset = self.ends[container]
        self.ends[container] += HEADER_BYTES + size
        return Location(1, container, offset, size, size, 0, bytes(32))

    async def step(self, number: int, kind: str, size: int) -> None:
        transact = self.engine.transact
        if kind == "new":
            self.layouts[number] = LAYOUTS[size % 3]
            await transact(chunks.put_container, number, self.layouts[number])
            self.open.add(number)
            self.ends[number] = 0
        elif kind == "seal" and self.open:
            container = sorted(self.open)[size % len(self.open)]
            self.open.remove(container)
            self.garbage.update(await transact(chunks.seal_container, container))
        elif kind == "put":
            file = [
                Extent(size + index, self.place(number + index, size + index))
                for index in range(size % 150 + 1)
            ]
            await transact(chunks.put_lists, {number: file})
            self.files[number] = file
            lost = {e.place.container: 1 for e in file if e.place} if size % 2 else {}
            await transact(chunks.put_lost, lost)
            self.lost |= lost
        elif kind == "drop" and self.files:
            oid = sorted(self.files)[size % len(self.files)]
            del self.files[oid]
            self.garbage.update(await transact(chunks.drop_chunks, oid))
        elif kind == "move" and self.files:
            oid = sorted(self.files)[size % len(self.files)]
            moves = []
            for index, (_, old, _) in enumerate(self.files[oid]):
                new = old and self.place(number, old.stored)
                if new and index % 3:
                    moves.append(Move(oid, index, old, new))
                    self.files[oid][index] = Extent(new.raw, new)
                elif new:  # the list does not name this place
                    moves.append(Move(oid, index, old._replace(offset=old.offset + 1), new))
            nowhere = Location(1, 1, 0, 1, 1, 0, bytes(32))
            moves.append(Move(1 << 50, 0, nowhere, nowhere))
            self.garbage.update(await transact(chunks.move_chunks, moves))

    def check(self, tx) -> None:
        for container in self.ends:
            record = chunks.find_container(tx, container)
            if container in self.garbage:
                assert record is None
                assert self.live(container) == 0
                garbage = decode_garbage(tx.get(keys.garbage(container)))
                assert garbage.layout.servers == self.layouts[container].servers
                assert tx.get(keys.degraded(container)) is None
            else:
                assert record.live == self.live(container)
                assert record.layout == self.layouts[container]
                assert record.length <= padded(record.layout, self.ends[container])
                assert record.length == padded(record.layout, record.length)
                assert chunks.find_readable(tx, container) == (record, self.lost.get(container, 0))
                assert record.live or container in self.open, "nothing keeps a dead container"
        assert set(chunks.open_containers(tx)) == self.open
        assert len(list(tx.range(*keys.all_of(b"l")))) == sum(
            -(-len(file) // 64) for file in self.files.values()
        )
        for oid, file in self.files.items():
            starts = list(accumulate((extent.length for extent in file), initial=0))
            for offset in starts[:-1:50]:
                start, found = chunks.get_extents(tx, oid, 1 << 14, offset)
                first = starts.index(start)
                assert file[first : first + len(found)] == found
                assert start <= offset < starts[first + len(found)]


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["new", "seal", "put", "put", "drop", "move"]), st.integers(1, 10_000)
        ),
        max_size=25,
    )
)
async def test_counts(plan):
    engine = MemoryEngine()
    await engine.transact(put_server, 1, ServerRecord("/a"))
    table = Table(engine)
    for number, (kind, size) in enumerate(plan, 1):
        await table.step(number, kind, size)
        await engine.view(table.check)


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
