"""Chunk lists and shared chunks: records, and counts that stay right whatever happens."""

from collections import Counter
from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aifs.core.errors import Stale, Unavailable
from aifs.layout.interleaved import (
    HEADER_BYTES,
    Extent,
    Interleaved,
    Location,
    container_layout,
    named,
    padded,
)
from aifs.layout.redundancy import Redundancy
from aifs.layout.striped import Striped
from aifs.meta import chunks, forms, keys, namespace, shared
from aifs.meta.chunks import (
    CHUNKS_PER_RECORD,
    Move,
    decode_list,
    decode_shares,
    encode_list,
    is_last,
    shared_digests,
    start_of,
)
from aifs.meta.forms import FormChange
from aifs.meta.records import Copy, Inode, decode_garbage, decode_inode
from aifs.meta.servers import ServerRecord, put_server
from aifs.meta.shared import Shared
from tests.support.memory_engine import MemoryEngine

GOLDEN_LIST = (
    "0103010010000000000000"
    "0700000000000000"
    "0200"
    "2a02000000000000"
    "ff0000000000010000"
    "fe00004000" + "02" * 32 + "0001ea010000e80300005700000000000000" + "01" * 32
)
GOLDEN_SHARED = "01070000000000000057000000000000000a00000064000000010300000000000000"

LAYOUTS = (
    container_layout((1,)),
    container_layout((2, 1), Redundancy(2)),
    container_layout((0, 1, 2), Redundancy(1, 2, 1)),
)

digests = st.binary(min_size=32, max_size=32)
own = st.builds(
    Location,
    st.integers(0, 3),
    st.integers(1, 70),
    st.integers(0, 1 << 40),
    st.integers(1, 1 << 22),
    st.integers(0, 1 << 22),
    st.sampled_from([0, 1, 3]),
    digests,
).map(lambda place: place._replace(server=place.container % 3))
extent = (
    st.integers(1, 1 << 50).map(Extent)
    | own.map(lambda place: Extent(place.raw, place))
    | st.tuples(st.integers(1, 1 << 22), digests).map(lambda both: named(*both))
)


@pytest.mark.sweep
@given(
    st.integers(0, 1 << 60),
    st.lists(extent, min_size=1, max_size=CHUNKS_PER_RECORD)
    | st.lists(own.map(lambda place: Extent(place.raw, place)), min_size=1, max_size=9),
)
def test_list_round_trip(start, some):
    record = encode_list(start, some)
    assert start_of(record) == start and is_last(record) == (len(some) < CHUNKS_PER_RECORD)
    assert decode_list(record) == (start, some)
    assert shared_digests(record) == [extent.digest for extent in some if extent.shared]
    live = Counter()
    for _, place, is_shared in some:
        if place is not None and not is_shared:
            live[place.container] += HEADER_BYTES + place.stored
    assert {container: length for container, _, length in decode_shares(record)} == live
    for damaged in (
        record[:-1],
        record + b"\0",
        b"\3" + record[1:],
        b"",
        record[:1] + b"\0" + record[2:],
    ):
        with pytest.raises(Unavailable):
            decode_list(damaged)


@given(st.binary(max_size=300))
def test_anything_else_is_damage(record):
    for decode in (decode_list, shared_digests, decode_shares):
        try:
            decode(b"\1" + record)
        except Unavailable:
            pass
    with pytest.raises(Unavailable):
        shared.decode_shared(bytes(32), record)


def test_golden_records():
    place = Location(2, 7, 0x57, 490, 1000, 1, b"\1" * 32)
    some = [Extent(1 << 40), named(4 << 20, b"\2" * 32), Extent(1000, place)]
    assert encode_list(1 << 12, some).hex() == GOLDEN_LIST
    assert Shared(Location(0, 7, 0x57, 10, 100, 1, bytes(32)), 3).encode().hex() == GOLDEN_SHARED
    inode = Inode(5, 0o100644, 0, 0, 1, 0, 9, 0, 0, 0, 0, oid=7, layout=Interleaved(4 << 20))
    assert inode.encode()[1] == 3
    assert decode_inode(5, inode.encode()) == inode


class Reads:
    """A view that counts what is asked of it."""

    def __init__(self, tx) -> None:
        self.tx, self.count = tx, 0

    def get(self, key: bytes) -> bytes | None:
        self.count += 1
        return self.tx.get(key)


@pytest.mark.sweep
@given(st.lists(st.integers(1, 9), min_size=1, max_size=900), st.data())
async def test_extents_are_found_by_offset(lengths, data):
    engine = MemoryEngine()
    whole = [Extent(length) for length in lengths]
    chunk = data.draw(st.integers(1, 9))  # extents of zeros may be larger
    await engine.transact(chunks.put_records, 1, whole)

    def look(tx) -> None:
        for _ in range(5):
            offset = data.draw(st.integers(0, sum(lengths) - 1))
            start, found = chunks.get_extents(tx, 1, chunk, offset)
            assert start <= offset < start + sum(extent.length for extent in found)
            first = list(accumulate(lengths, initial=0)).index(start)
            assert whole[first : first + len(found)] == found

    await engine.view(look)


@pytest.mark.parametrize("chunk", [1 << 20, 4 << 20])
async def test_looking_up_takes_few_steps(chunk):
    engine = MemoryEngine()
    await engine.transact(chunks.put_records, 1, [Extent(4 << 20)] * (1 << 16))

    def look(tx) -> None:
        for offset in (0, 1 << 30, 1 << 37, (1 << 38) - 1):
            reads = Reads(tx)
            chunks.get_extents(reads, 1, chunk, offset)
            assert reads.count <= (1 if chunk == 4 << 20 else 25)

    await engine.view(look)
    for offset in (1 << 38, 1 << 50):
        with pytest.raises(Unavailable, match="has nothing for byte"):
            await engine.view(chunks.get_extents, 1, chunk, offset)
    with pytest.raises(Unavailable, match="the beginning of the chunk list 2 is missing"):
        await engine.view(chunks.get_extents, 2, chunk, 0)


class Files:
    """What records should say of files that share chunks."""

    def __init__(self, engine: MemoryEngine) -> None:
        self.engine = engine
        self.files: dict[int, list[Extent]] = {}
        self.places: dict[bytes, Location] = {}  # of shared chunks
        self.containers: dict[int, int] = {}  # ends
        self.layouts: dict[int, Striped] = {}
        self.lost: dict[int, int] = {}
        self.open: set[int] = set()
        self.garbage: set[int] = set()

    def place(self, number: int, digest: bytes) -> Location:
        container = sorted(self.open)[number % len(self.open)]
        offset = self.containers[container]
        size = digest[0] + 1
        self.containers[container] += HEADER_BYTES + size
        return Location(1, container, offset, size, size, 0, digest)

    def known(self) -> Counter[bytes]:
        return Counter(
            extent.digest for file in self.files.values() for extent in file if extent.shared
        )

    async def step(self, number: int, kind: str, size: int) -> None:
        transact = self.engine.transact
        if kind == "new" or not self.open:
            self.layouts[number] = LAYOUTS[size % 3]
            await transact(chunks.put_container, number, self.layouts[number])
            self.open.add(number)
            self.containers[number] = 0
        elif kind == "seal":
            container = sorted(self.open)[size % len(self.open)]
            self.open.remove(container)
            self.garbage.update(await transact(chunks.seal_container, container))
        elif kind == "put":
            known, appended = self.known(), {}
            file = []
            for index in range(size % 90 + 1):
                digest = bytes([(size + index) % 23]) * 32
                length = digest[0] + 1
                if index % 5 == 4:
                    file.append(Extent(3 * length))
                elif index % 7 == 6:
                    file.append(Extent(length, self.place(number, digest)))
                elif digest in appended:
                    file.append(Extent(length, appended[digest], True))
                elif digest in known and size % 2:
                    file.append(named(length, digest))
                else:  # perhaps in vain
                    appended[digest] = self.place(index, digest)
                    file.append(Extent(length, appended[digest], True))
            await transact(chunks.put_lists, {number: file}, set(appended))
            self.places = appended | self.places
            self.files[number] = file
            lost = {place.container: 1 for place in appended.values()} if size % 3 else {}
            await transact(chunks.put_lost, lost)
            self.lost |= lost
        elif kind == "drop" and self.files:
            oid = sorted(self.files)[size % len(self.files)]
            del self.files[oid]
            self.garbage.update(await transact(chunks.drop_chunks, oid))
            self.places = {digest: self.places[digest] for digest in self.known()}
        elif kind == "move":
            moves = []
            for digest, old in self.places.items():
                new = self.place(number, digest)
                if digest[0] % 3:
                    self.places[digest] = new
                    moves.append(Move(0, 0, old, new))
                else:  # the record does not name this place
                    moves.append(Move(0, 0, old._replace(offset=old.offset + 1), new))
            for oid, file in self.files.items():
                for index, extent in enumerate(file):
                    if extent.place and not extent.shared and index % 2:
                        new = self.place(number, extent.digest)
                        moves.append(Move(oid, index, extent.place, new))
                        file[index] = extent._replace(place=new)
                    elif extent.place and not extent.shared:  # the list names another place
                        old = extent.place._replace(offset=extent.place.offset + 1)
                        moves.append(Move(oid, index, old, self.place(number, extent.digest)))
            nowhere = Location(1, 1, 0, 1, 1, 0, bytes(32))
            moves.append(Move(1 << 50, 0, nowhere, nowhere))
            self.garbage.update(await transact(chunks.move_chunks, moves))
        elif kind == "replace":
            unknown = self.place(number, b"\xff" * 32)
            replaced = {
                digest: self.place(number, digest) for digest in self.places if digest[0] % 2
            }
            self.garbage.update(
                await transact(chunks.replace_shared, [unknown, *replaced.values()])
            )
            self.places |= replaced

    def check(self, tx) -> None:
        records = {keys.shared_digest(key): value for key, value in tx.range(*keys.all_of(b"h"))}
        found = {digest: shared.decode_shared(digest, value) for digest, value in records.items()}
        assert {digest: known.references for digest, known in found.items()} == self.known()
        assert {digest: known.place for digest, known in found.items()} == {
            digest: place._replace(server=0) for digest, place in self.places.items()
        }
        live = Counter()
        alive = [place for place in self.places.values()]
        alive += [e.place for file in self.files.values() for e in file if e.place and not e.shared]
        for place in alive:
            live[place.container] += HEADER_BYTES + place.stored
        for container, end in self.containers.items():
            record = chunks.find_container(tx, container)
            assert (record is None) == (container in self.garbage)
            layout = self.layouts[container]
            if record is not None:
                assert (record.layout, record.live) == (layout, live[container])
                assert record.length <= padded(layout, end)
                assert record.length == padded(layout, record.length)
                assert chunks.find_readable(tx, container) == (record, self.lost.get(container, 0))
                assert record.live or container in self.open, "nothing keeps a dead container"
            else:
                assert not live[container]
                garbage = decode_garbage(tx.get(keys.garbage(container)))
                assert garbage.layout.servers == layout.servers
                assert tx.get(keys.degraded(container)) is None
        assert set(chunks.open_containers(tx)) == self.open
        for place in alive:
            assert (
                place.offset + HEADER_BYTES + place.stored
                <= chunks.find_container(tx, place.container).length
            )
        for oid, file in self.files.items():
            starts = list(accumulate((extent.length for extent in file), initial=0))
            for offset in starts[:-1:50]:
                start, some = chunks.get_extents(tx, oid, 64, offset)
                first = starts.index(start)
                assert start <= offset < starts[first + len(some)]
                for was, now in zip(file[first:], some, strict=False):
                    place = self.places[was.digest]._replace(server=0) if was.shared else was.place
                    assert now == was._replace(place=place)
            shares = Counter()
            for _, record in tx.range(*keys.chunk_lists(oid)):
                for container, server, length in chunks.shares_of(tx, record):
                    shares[container] += length
                    assert server in (1, self.layouts[container].servers[0])
            stored = Counter()
            for extent in file:
                place = self.places[extent.digest] if extent.shared else extent.place
                if place:
                    stored[place.container] += HEADER_BYTES + place.stored
            assert shares == stored


@pytest.mark.sweep
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["new", "seal", "put", "put", "put", "drop", "move", "replace"]),
            st.integers(1, 10_000),
        ),
        max_size=25,
    )
)
async def test_counts(plan):
    engine = MemoryEngine()
    await engine.transact(put_server, 1, ServerRecord("/a"))
    files = Files(engine)
    for number, (kind, size) in enumerate(plan, 1):
        await files.step(number, kind, size)
        await engine.view(files.check)


async def test_a_chunk_that_has_gone_spoils_the_flip_and_nothing_else():
    engine = MemoryEngine()
    await engine.transact(put_server, 1, ServerRecord("/a"))
    await engine.transact(chunks.put_container, 7, container_layout((1,)))

    def inode(number: int) -> Inode:
        layout = Interleaved(4096)
        return Inode(number, 0o100644, 0, 0, 1, 0, 9, 0, 0, 0, 0, oid=number + 50, layout=layout)

    for number in (20, 21):
        drained = inode(number)
        await engine.transact(
            namespace.put_inode, replace(drained, oid=0, layout=None, copy=Copy(0, number + 100))
        )
    place = Location(1, 7, 0, 9, 9, 0, b"\1" * 32)
    good = FormChange(inode(20), durable=True, extents=[Extent(9, place, True)])
    stale = FormChange(inode(21), durable=True, extents=[named(9, b"\2" * 32)])
    # Where it once was.
    found = stale._replace(extents=[Extent(9, place._replace(digest=b"\2" * 32), True)])
    before = await engine.view(lambda tx: list(tx.range(b"a", b"z")))
    for spoilt in (stale, found):
        with pytest.raises(Stale):
            await engine.transact(forms.change_forms, [good, spoilt], {}, {b"\1" * 32})
        assert await engine.view(lambda tx: list(tx.range(b"a", b"z"))) == before
    again = good._replace(inode=inode(21))
    assert await engine.transact(forms.change_forms, [good, again], {}, {b"\1" * 32}) == [120, 121]
    record = await engine.view(shared.find_shared, b"\1" * 32)
    assert record == Shared(place._replace(server=0), 2)
    assert await engine.view(shared.find_all_shared, [b"\1" * 32, b"\2" * 32]) == {
        b"\1" * 32: record
    }
    assert (await engine.view(chunks.find_container, 7)).live == HEADER_BYTES + 9


async def test_a_long_list_is_loose_until_a_file_has_it():
    engine = MemoryEngine()
    await engine.transact(chunks.put_container, 7, container_layout((1, 2), Redundancy(2)))
    place = Location(1, 7, 0, 9, 9, 0, b"\1" * 32)
    some = [Extent(9, place, True)] * CHUNKS_PER_RECORD
    for first in (0, CHUNKS_PER_RECORD):
        await engine.transact(chunks.put_loose, 1, first, 9 * first, some, {place.digest}, {7: 2})
    await engine.transact(
        chunks.put_loose, 1, 2 * CHUNKS_PER_RECORD, 18 * CHUNKS_PER_RECORD, [Extent(1)]
    )
    assert (await engine.view(shared.find_shared, place.digest)).references == 2 * CHUNKS_PER_RECORD
    container, lost = await engine.view(chunks.find_readable, 7)
    assert (container.live, lost) == (HEADER_BYTES + 9, 2)
    last = 18 * CHUNKS_PER_RECORD
    assert await engine.view(chunks.get_extents, 1, 9, last) == (last, [Extent(1)])
    assert await engine.view(lambda tx: tx.get(keys.loose(1))) is not None
    with pytest.raises(Stale):
        await engine.transact(chunks.put_loose, 2, 0, 0, [named(9, b"\2" * 32)])
    assert await engine.view(lambda tx: tx.get(keys.loose(2))) is None
    inode = Inode(20, 0o100644, 0, 0, 1, 0, 9, 0, 0, 0, 0, oid=1, layout=Interleaved(4096))
    await engine.transact(namespace.put_inode, replace(inode, layout=None, copy=Copy(0, 120)))
    assert await engine.transact(forms.change_forms, [FormChange(inode)]) == [120]
    assert await engine.view(lambda tx: tx.get(keys.loose(1))) is None
    await engine.transact(chunks.seal_container, 7)
    assert await engine.transact(chunks.drop_chunks, 1) == [7]


async def test_a_shared_chunk_without_record_is_named():
    engine = MemoryEngine()
    await engine.transact(chunks.put_records, 1, [named(9, b"\2" * 32)])
    with pytest.raises(Unavailable, match="shared chunk 0202"):
        await engine.view(chunks.get_extents, 1, 9, 0)
    assert await engine.transact(chunks.drop_chunks, 1) == []
