"""Files stored in containers, against plain bytes: what is appended is read back, what fails leaves
nothing.
"""

import errno
import os
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from aifs.core import files
from aifs.core.errors import FsError, NoSpace, Unavailable
from aifs.data.chunk_codec import unpack_header
from aifs.data.containers import pieces
from aifs.data.containers.pieces import StoredPiece
from aifs.data.containers.scan import ContainerScan
from aifs.layout.interleaved import HEADER_BYTES, STRIPE, Extent
from tests.support.data_servers import data_servers, failing, hooked, open_below
from tests.support.memory import in_memory
from tests.support.points import armed
from tests.support.shelf import CONTAINER, KINDS, Shelf, content, shelf


@pytest.fixture
async def servers(place):
    with data_servers(place, 3) as servers:
        yield servers
        await servers.cache.settle()  # what is read ahead holds descriptors
        with trio.fail_after(60):
            while open_below(place):  # until the last reader has heard that it has ended
                await trio.sleep(0.01)


batches = st.lists(
    st.tuples(
        st.lists(
            st.integers(1, 3000) | st.integers(1, 300_000) | st.just(131_072),
            min_size=1,
            max_size=8,
        ),
        st.sampled_from([4096, 65536, 1 << 20]),
        st.sampled_from([0, 0, 3]),
        st.booleans(),
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.sweep
@settings(deadline=None, max_examples=25)
@given(batches, st.booleans(), st.data())
@pytest.mark.parametrize("redundancy", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("where", [nullcontext, hooked], ids=["inline", "workers"])
def test_oracle(where, redundancy, batches, verify, data):
    async def use(made: Shelf) -> None:
        expected = {}
        for number, (sizes, chunk, level, variable) in enumerate(batches):
            batch = {
                100 * number + place: content(100 * number + place, size)
                for place, size in enumerate(sizes)
            }
            await (made.store_extents if variable else made.store)(batch, chunk, level)
            expected |= batch
        for oid, whole in expected.items():
            objects = made.objects(oid)
            size = len(whole)
            assert bytes(await objects.read(0, size, size, True)) == whole
            offset = data.draw(st.integers(0, size - 1))
            length = data.draw(st.integers(1, size - offset))
            assert (
                bytes(await objects.read(offset, length, size, True))
                == whole[offset : offset + length]
            )
        for oid in expected:
            for place in made.lists[oid]:
                if place:
                    stored = memoryview(bytearray(HEADER_BYTES + place.stored))
                    await made.files.read_stored(place, stored)
                    header = unpack_header(stored)
                    assert (header.oid, header.digest) == (oid, place.digest)
        await made.servers.cache.settle()  # what is read ahead holds descriptors

    with in_memory() as directory, data_servers(directory, 3) as servers:
        with where(), shelf(servers, directory, verify, redundancy) as made:
            trio.run(use, made)


@pytest.mark.sweep
async def test_containers_are_dense_and_few(servers, tmp_path):
    with shelf(servers, tmp_path) as made:
        size = 100_000
        for batch in range(4):
            await made.store(
                {batch * 200 + number: content(1, size) for number in range(200)}, 1 << 20
            )
        stored = sum(os.path.getsize(servers[s].where((0, c))) for c, s in made.server_of.items())
        chunks = sum(place is not None for file in made.lists.values() for place in file)
        assert stored == chunks * (HEADER_BYTES + size)
        assert len(made.server_of) <= stored // CONTAINER + 2 * len(servers)
        assert all(
            os.path.getsize(servers[s].where((0, c))) > CONTAINER - STRIPE
            for c, s in made.server_of.items()
            if c in made.sealed
        )
        assert made.sealed


async def test_writing_early_is_only_a_wish(servers, tmp_path):
    """What fails there the sync would say, so nobody hears of it."""
    data = content(1, 300_000)
    with shelf(servers, tmp_path) as made:
        with hooked(), failing("start_writing", servers[0].address, errno.EIO):
            await made.store({1: data}, 1 << 20)
        assert await made.content(1, len(data)) == data


async def test_extents(servers, tmp_path):
    """Equal chunks are stored once, zeros never; where they are, seeking says."""
    with shelf(servers, tmp_path) as made:
        data = os.urandom(400_000) + bytes(300_000) + os.urandom(100_000)
        await made.store_extents({1: data, 2: data, 3: bytes(200_000)}, 100_000)
        for oid in (1, 2):
            assert await made.content(oid, len(data)) == data
        assert await made.content(3, 200_000) == bytes(200_000)
        places = {extent.place for oid in (1, 2) for extent in made.extents[oid] if extent.shared}
        own = [
            extent.place
            for oid in (1, 2)
            for extent in made.extents[oid]
            if extent.place and not extent.shared
        ]
        zeros = sum(extent.length for extent in made.extents[1] if extent.place is None)
        assert (
            sum(place.raw for place in places) + sum(place.raw for place in own) // 2
            == len(data) - zeros
        )
        chunks = sum(HEADER_BYTES + place.stored for place in [*places, *own])
        assert sum(lengths(made).values()) == chunks
        for _ in range(2):
            objects = made.objects(1)
            start, hole = await objects.data_range(0, len(data))
            assert start == 0 and 400_000 <= hole < 500_000
            after, end = await objects.data_range(hole, len(data))
            assert 600_000 < after <= 700_000 and end == len(data)
            assert await objects.data_range(after, len(data)) == (after, end)
        assert await made.objects(3).data_range(0, 200_000) == (200_000, 200_000)


async def test_holes_take_no_space(servers, tmp_path):
    with shelf(servers, tmp_path) as made:
        data = bytes(1 << 20) + b"x" * 10 + bytes((3 << 20) - 10)
        await made.store({1: data, 2: bytes(500_000)})
        assert sum(place is not None for place in made.lists[1]) == 1
        assert set(made.lists[2]) == {None}
        assert await made.content(1, len(data)) == data
        assert await made.content(2, 500_000) == bytes(500_000)


@pytest.mark.sweep
@pytest.mark.parametrize("op", ["open_file", "write_at", "sync_file", "sync_dir"])
async def test_a_failing_server_leaves_nothing_that_counts(servers, tmp_path, op):
    with hooked(), shelf(servers, tmp_path) as made:
        await made.store({1: content(1, 200_000)})
        ends = lengths(made)
        with failing(op, servers[1].address, errno.ENOSPC), pytest.raises(NoSpace):
            await made.store(
                {10 + number: content(number, 3 << 20) for number in range(8)}, 1 << 20
            )
        if op == "write_at":
            assert sum(lengths(made).values()) == sum(ends.values()), "others may need the room"
        assert await made.content(1, 200_000) == content(1, 200_000)
        batch = {30 + number: content(number, 3 << 20) for number in range(8)}
        await made.store(batch, 1 << 20)
        for oid, data in batch.items():
            assert await made.content(oid, len(data)) == data
        if op != "sync_file":
            chunks = sum(
                HEADER_BYTES + place.stored for oid in batch for place in made.lists[oid] if place
            )
            assert sum(lengths(made).values()) - sum(ends.values()) == chunks


def lengths(made: Shelf) -> dict[int, int]:
    paths = {c: made.servers[s].where((0, c)) for c, s in made.server_of.items()}
    return {c: os.path.getsize(path) for c, path in paths.items() if os.path.exists(path)}


async def test_after_a_failed_sync_nothing_is_appended_to_the_container(servers, tmp_path):
    with hooked(), shelf(servers, tmp_path) as made:
        with failing("sync_file", servers[0].address), pytest.raises(Unavailable):
            await made.store({1: content(1, 200_000)})
        (failed,) = made.server_of
        assert made.sealed == {failed}
        for number in range(4):
            await made.store({2 + number: content(1, 200_000)})
        assert failed not in {
            place.container for file in made.lists.values() for place in file if place
        }


async def test_full_containers_are_sealed_when_the_metadata_takes_it(
    servers, tmp_path, monkeypatch
):
    """What has been recorded in them is; and others that are full at the same time are not
    forgotten."""
    with shelf(servers, tmp_path) as made:
        made.writer.size = 100_000
        with monkeypatch.context() as patch:

            async def full(container: int) -> None:
                raise NoSpace("told to")

            patch.setattr(made, "seal", full)
            for oid in range(1, 8):
                await made.store({oid: content(oid, 200_000)})
            assert not made.sealed and len(made.lists) == 7
        open_ones = made.writer.idle
        await made.writer.retire(lambda container, layout: False)
        assert made.sealed == set(made.table) - open_ones and made.sealed


@pytest.mark.sweep
async def test_cancelled_between_stripes(servers, tmp_path):
    with shelf(servers, tmp_path) as made:
        await made.store({1: content(1, 200_000)})
        with trio.CancelScope() as scope:
            with armed("data.append.written", scope.cancel):
                await made.store(
                    {10 + number: content(number, 6 << 20) for number in range(8)}, 1 << 20
                )
        assert scope.cancelled_caught
        assert list(made.lists) == [1]
        await made.store({2: content(2, 9 << 20)}, 1 << 20)
        assert await made.content(1, 200_000) == content(1, 200_000)
        assert await made.content(2, 9 << 20) == content(2, 9 << 20)


async def test_a_source_that_shrinks_is_refused(servers, tmp_path):
    with shelf(servers, tmp_path) as made, made.sources({1: b"x" * 100_000}) as sources:
        device, number = sources[0].origin
        os.truncate(servers[device].where((0, number)), 70_000)
        with pytest.raises(Unavailable, match="fewer bytes"):
            piece = pieces.FilePiece(sources[0], 1)
            async with made.writer.append([piece], made.slots, made.carry_out):
                raise AssertionError


async def test_several_writers_at_once(servers, tmp_path):
    with shelf(servers, tmp_path) as made:
        expected = {number: content(number, 150_000 + number) for number in range(60)}

        async with trio.open_nursery() as nursery:
            for first in range(0, 60, 10):
                batch = {number: expected[number] for number in range(first, first + 10)}
                nursery.start_soon(partial(made.store, batch, keep=True))
        for oid, data in expected.items():
            assert await made.content(oid, len(data)) == data
        assert len(made.server_of) <= 6 * len(servers)
        assert made.budget.used <= made.budget.total


async def test_goes_on_where_what_is_on_record_ends(servers, tmp_path):
    with shelf(servers, tmp_path) as made:
        await made.store({1: content(1, 200_000)})
        places = [place for place in made.lists[1] if place]
        end = max(place.offset + HEADER_BYTES + place.stored for place in places)
        (container,) = made.server_of
        made.files.forget()
        path = servers[places[0].server].where((0, container))
        with open(path, "ab") as file:
            file.write(b"torn" * 1000)
        again = Shelf(servers, made.directory)
        again.go_on(made)
        again.writer.adopt(made.table[container], container, end)
        for number in range(len(servers)):
            await again.store({2 + number: content(2, 100_000)})
        after = [
            place
            for oid in range(2, 5)
            for place in again.lists[oid]
            if place and place.container == container
        ]
        assert after[0].offset == end
        assert 0 <= os.path.getsize(path) - after[-1].offset - HEADER_BYTES - after[-1].stored < 10
        assert await again.content(1, 200_000) == content(1, 200_000)
        again.close()


@pytest.mark.parametrize("damage", ["missing", "short"])
async def test_a_damaged_container_is_left_alone(servers, tmp_path, damage, caplog):
    with shelf(servers, tmp_path) as made:
        made.table[7] = made.slots[0]
        path = Path(servers[0].where((0, 7)))
        if damage == "short":
            path.parent.mkdir(parents=True)
            path.write_bytes(b"x" * 99)
        made.writer.adopt(made.slots[0], 7, 100)
        await made.store({1: content(1, 100_000)})
        assert made.sealed == {7}
        assert 7 not in {place.container for place in made.lists[1] if place}
        assert path.exists() == (damage == "short")
    assert "nothing is appended to it any more" in caplog.text
    caplog.clear()


async def test_damage_is_found_where_it_is_looked_for(servers, tmp_path):
    with shelf(servers, tmp_path) as made:
        await made.store({1: content(3, 300_000)}, 65536, 3)
        await made.store({2: os.urandom(300_000)}, 65536)
        places = {oid: made.lists[oid][1] for oid in (1, 2)}
        for place in places.values():
            with open(servers[place.server].where((0, place.container)), "r+b") as file:
                file.seek(place.offset + HEADER_BYTES + place.stored - 1)
                file.write(b"\xff")
        checking = Shelf(servers, made.directory, verify=True)
        checking.go_on(made)
        for oid in (1, 2):
            await checking.objects(oid).read(0, 65536, 300_000, True)
            with pytest.raises(
                Unavailable, match=f"{servers[places[oid].server].name}: .*chunk at"
            ):
                await checking.objects(oid).read(65536, 100, 300_000, True)
        assert len(await made.objects(2).read(65536, 65536, 300_000, True)) == 65536
        checking.close()


async def test_a_short_container_is_an_error(servers, tmp_path):
    with shelf(servers, tmp_path) as made:
        await made.store({1: b"x" * 300_000})
        last = made.lists[1][-1]
        path = servers[last.server].where((0, last.container))
        os.truncate(path, os.path.getsize(path) - 1)
        with pytest.raises(Unavailable, match="ends before byte"):
            await made.content(1, 300_000)
        assert len(await made.objects(1).read(0, 65536, 300_000, True)) == 65536


async def test_a_chunk_that_has_moved_is_found_again(servers, tmp_path):
    with shelf(servers, tmp_path) as made:
        data = os.urandom(200_000)
        await made.store({1: data})
        objects = made.objects(1)
        assert bytes(await objects.read(0, 10, 200_000, True)) == data[:10]
        old = made.lists[1]
        (container,) = made.server_of
        server = servers[made.server_of[container]]
        scan = ContainerScan(made.files, container, made.table[container], made.ends[container])
        found = []
        while some := await scan.following():
            found += some
        stored = [StoredPiece(chunk.header, place) for chunk, place in zip(found, old, strict=True)]
        other = (server.id + 1) % len(servers)
        async with made.writer.append(stored, [made.slots[other]], made.carry_out) as (
            places,
            lost,
        ):
            made.extents[1] = [Extent(place.raw, place) for place in places]
            made.record(places, lost)
        os.unlink(server.where((0, container)))
        made.files.forget()
        made.changed(container, made.table.pop(container))
        assert bytes(await objects.read(0, 200_000, 200_000, True)) == data
        os.unlink(servers[other].where((0, places[0].container)))
        made.files.forget()
        made.changed(places[0].container, made.slots[other])
        with pytest.raises(FsError, match="is missing"):
            await made.objects(1).read(0, 200_000, 200_000, True)


async def test_descriptors_are_shared_and_given_back(servers, tmp_path):
    with shelf(servers, tmp_path) as made:
        for number in range(30):
            await made.store({number: content(number, 10_000 + number)})
        for number in range(30):
            await made.content(number, 10_000 + number)
        assert len(open_below(Path(servers[0].address).parent)) <= len(made.server_of)
        made.files.forget()
        await made.servers.cache.settle()
        for server in servers.values():
            await servers.run(server, os.getpid)  # closed before this
        assert open_below(Path(servers[0].address).parent) == []


async def test_what_the_page_cache_has_is_read_there_though_the_container_is_not_open(
    servers, tmp_path
):
    """Else the first reader would fetch a whole stripe."""
    with shelf(servers, tmp_path) as made:
        await made.store({0: content(0, 10_000)})
        made.files.forget()
        assert await made.content(0, 10_000) == content(0, 10_000)
        server = servers[0]
        if server.may_inline or server.storage.can_read_cached:
            assert servers.cache.status()["fetched_bytes"] == 0


async def test_files_that_are_closed_for_good_are_asked_for_no_descriptors(
    servers, tmp_path, monkeypatch
):
    asked = []
    monkeypatch.setattr(servers.descriptors, "add_users", asked.append)
    monkeypatch.setattr(servers.descriptors, "remove_users", asked.remove)
    with shelf(servers, tmp_path) as made:
        made.files.forget()
        assert len(asked) == 1
    assert not asked


async def fill_many(made) -> None:
    """Files of 10,000 bytes, 0 to 11, in a container each."""
    for number in range(12):
        await made.store({number: content(number, 10_000)})
        for container in set(made.server_of) - made.sealed:
            await made.writer.retire(lambda other, _, container=container: other == container)


async def test_they_give_way_to_who_needs_descriptors(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_open", set())
    monkeypatch.setattr(files, "descriptors_max", lambda: 16)
    with data_servers(tmp_path, 4) as servers, shelf(servers, tmp_path) as made:
        await fill_many(made)
        assert len(made.server_of) >= 8
        for _ in range(2):
            for number in range(12):
                await servers.descriptors.find_room()
                assert await made.content(number, 10_000) == content(number, 10_000)
                assert files.descriptors() <= 6


async def test_who_reads_one_container_after_the_other_takes_no_more_descriptors(
    tmp_path, monkeypatch
):
    """As who reads one large file does, and opens none meanwhile."""
    monkeypatch.setattr(files, "_open", set())
    monkeypatch.setattr(files, "descriptors_max", lambda: 16)
    with data_servers(tmp_path, 4) as servers, shelf(servers, tmp_path) as made:
        await fill_many(made)
        for number in range(12):
            assert await made.content(number, 10_000) == content(number, 10_000)
            assert files.descriptors() <= 6


@pytest.mark.sweep
async def test_neighbours_come_with_one_request(tmp_path):
    """Small files in the order in which they were stored: large reads, whatever the size of the
    files."""
    with data_servers(tmp_path, 2) as servers, shelf(servers, tmp_path) as made:
        expected = {number: content(number, 20_000) for number in range(600)}
        await made.store(expected)
        reads = []
        with hooked(lambda op, path: reads.append(op) if op.startswith("read") else None):
            for number, data in expected.items():
                assert await made.content(number, len(data)) == data
        assert len(reads) < 12
