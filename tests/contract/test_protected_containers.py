"""Containers with replicas or parity: read right whatever servers are lost, appended to while one
of them fails.
"""

import errno
import os
import threading
from itertools import combinations
from pathlib import Path

import pytest
import trio

from aifs.core.errors import FsError, NoSpace, Unavailable
from aifs.data.containers.scan import ContainerScan
from aifs.layout.interleaved import HEADER_BYTES, Location
from aifs.layout.redundancy import Redundancy
from tests.support.data_servers import data_servers, failing, hooked
from tests.support.points import armed
from tests.support.shelf import Shelf, content, shelf

KINDS = {
    "2": Redundancy(2),
    "3": Redundancy(3),
    "2+1": Redundancy(1, 2, 1),
    "3+2": Redundancy(1, 3, 2),
}
SIZES = {1: 300_000, 2: 1000, 3: 700_000, 4: 65536, 5: 1_100_000}
FILES = {oid: content(oid, size) for oid, size in SIZES.items()}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def redundancy(request) -> Redundancy:
    return request.param


def enough(scratch: Path, redundancy: Redundancy):
    return data_servers(scratch, redundancy.least_servers)


def paths_of(made: Shelf, server: int) -> list[Path]:
    """The containers' objects on a server."""
    paths = [Path(made.servers[server].where((0, container))) for container in made.table]
    return [path for path in paths if path.exists()]


def empty(path: Path) -> None:
    path.write_bytes(b"")


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size * 2 // 3)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for place in range(500, len(data), 9001):
        data[place] ^= 0x20
    path.write_bytes(data)


async def settle(made: Shelf) -> None:
    """What still reads for nobody has ended."""
    await made.servers.cache.settle()
    for server in made.servers.values():
        await made.servers.run(server, os.getpid)


async def check(made: Shelf, files: dict[int, bytes] = FILES) -> None:
    """By a reader that knows nothing yet."""
    reader = Shelf(made.servers, made.directory, made.verify)
    reader.go_on(made)
    made.damaged = reader.damaged
    try:
        for oid, data in files.items():
            assert await reader.content(oid, len(data)) == data
        objects = reader.objects(3)
        assert bytes(await objects.read(140_000, 3, SIZES[3], True)) == FILES[3][140_000:140_003]
    finally:
        reader.close()
        await settle(made)


@pytest.mark.sweep
@pytest.mark.parametrize("harm", [os.unlink, empty, cut, flip])
async def test_any_servers_may_be_lost(scratch, redundancy, harm):
    verify = harm is flip
    with (
        enough(scratch, redundancy) as servers,
        shelf(servers, scratch, verify, redundancy) as made,
    ):
        await made.store(FILES, 65536, 3)
        good = {path: path.read_bytes() for server in servers for path in paths_of(made, server)}
        for lost in combinations(servers, redundancy.tolerates):
            for server in lost:
                for path in paths_of(made, server):
                    harm(path)
            await check(made)
            assert {made.table[oid].servers[column] for oid, column in made.damaged} <= set(lost)
            for path, data in good.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
            for container, layout in made.table.items():
                made.changed(container, layout)


@pytest.mark.parametrize("op", ["open_file", "read_into"])
async def test_servers_that_fail(scratch, redundancy, op):
    with (
        hooked(),
        enough(scratch, redundancy) as servers,
        shelf(servers, scratch, False, redundancy) as made,
    ):
        await made.store(FILES, 65536)
        with failing(op, servers[1].address):
            await check(made)


async def test_too_many_lost_is_an_error_and_never_zeros(scratch, redundancy):
    with enough(scratch, redundancy) as servers, shelf(servers, scratch, False, redundancy) as made:
        await made.store(FILES, 65536)
        for server in list(servers)[: redundancy.tolerates + 1]:
            for path in paths_of(made, server):
                path.unlink()
        with pytest.raises(FsError):
            await check(made)


async def test_wrong_bytes_are_reported_once_they_are_met(scratch, redundancy, caplog):
    with enough(scratch, redundancy) as servers, shelf(servers, scratch, True, redundancy) as made:
        await made.store(FILES, 65536)
        for path in paths_of(made, 0):
            flip(path)
        await check(made)
        assert made.damaged
        assert all(made.table[oid].servers[column] == 0 for oid, column in made.damaged)
    caplog.clear()


async def test_degraded_columns_are_not_read(scratch, redundancy):
    with (
        hooked(),
        enough(scratch, redundancy) as servers,
        shelf(servers, scratch, False, redundancy) as made,
    ):
        await made.store(FILES, 65536)
        for path in paths_of(made, 1):
            path.write_bytes(os.urandom(path.stat().st_size))
        for container, layout in made.table.items():
            made.lost[container] = 1 << layout.servers.index(1) if 1 in layout.servers else 0
        await check(made)


# --- appending ---


@pytest.mark.sweep
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("op", ["open_file", "write_at", "sync_file", "sync_dir"])
async def test_a_column_that_fails_while_appending(scratch, redundancy, op, number):
    """The bytes are stored; the column is known to lack; nothing more goes to such a container."""
    with (
        hooked(),
        enough(scratch, redundancy) as servers,
        shelf(servers, scratch, False, redundancy) as made,
    ):
        before = {10: content(10, 200_000)}
        await made.store(before, 65536)
        with failing(op, servers[1].address, number) as failed:
            await made.store(FILES, 65536)
        assert failed
        degraded = {c: mask for c, mask in made.lost.items() if mask}
        assert {made.table[c].servers[mask.bit_length() - 1] for c, mask in degraded.items()} == {1}
        assert all(mask.bit_count() == 1 for mask in degraded.values())
        assert set(degraded) <= made.sealed
        after = {20: content(20, 200_000)}
        await made.store(after, 65536)
        assert not {place.container for place in made.lists[20] if place} & set(degraded)
        await check(made, before | FILES | after)


async def test_spare_columns_may_be_asked_for(scratch):
    redundancy = KINDS["3+2"]
    with (
        hooked(),
        enough(scratch, redundancy) as servers,
        shelf(servers, scratch, False, redundancy) as made,
    ):
        made.writer.spare = 1
        with failing("write_at", (f"{scratch}/server0", f"{scratch}/server1")):
            with pytest.raises(Unavailable):
                await made.store(FILES, 65536)
        assert not made.lists
        assert made.sealed == set(made.table)
        with failing("write_at", servers[0].address):
            await made.store(FILES, 65536)
        await check(made)


async def test_when_too_many_fail_nothing_counts(scratch, redundancy):
    with (
        hooked(),
        enough(scratch, redundancy) as servers,
        shelf(servers, scratch, False, redundancy) as made,
    ):
        await made.store({10: content(10, 200_000)}, 65536)
        ends = dict(made.ends)
        with failing("write_at", f"{scratch}/server", errno.ENOSPC), pytest.raises(NoSpace):
            await made.store(FILES, 65536)
        assert made.ends == ends
        await made.store(FILES, 65536)
        await check(made, {10: content(10, 200_000)} | FILES)


@pytest.mark.sweep
async def test_cancelled_between_stripes(scratch, redundancy):
    with enough(scratch, redundancy) as servers, shelf(servers, scratch, True, redundancy) as made:
        await made.store(FILES, 65536)
        with trio.CancelScope() as scope:
            with armed("data.append.written", scope.cancel):
                await made.store(
                    {10 + number: content(number, 6 << 20) for number in range(4)}, 1 << 20
                )
        assert scope.cancelled_caught
        big = {20: content(20, 9 << 20)}
        await made.store(big, 1 << 20)
        await check(made, FILES | big)


@pytest.mark.sweep
async def test_several_stripes_share_rows(scratch):
    """The end of an append is filled up to a row, not the end of each stripe."""
    redundancy = KINDS["2+1"]
    with enough(scratch, redundancy) as servers, shelf(servers, scratch, True, redundancy) as made:
        data = os.urandom(30_000_000)
        await made.store({3: data}, 1 << 20)
        stored = sum(HEADER_BYTES + place.stored for place in made.lists[3])
        lanes = len({place.container for place in made.lists[3]})
        assert sum(made.ends.values()) - stored < lanes * 2 * 65536 + 10 * 200
        assert await made.content(3, len(data)) == data
        for container, layout in made.table.items():
            for column, server in enumerate(layout.servers):
                size = os.path.getsize(servers[server].where((0, container)))
                assert size == layout.object_length(column, made.ends[container])


# --- what is found by headers alone ---


async def found_in(made: Shelf, container: int) -> list[tuple[Location | None, bytes]]:
    scan = ContainerScan(made.files, container, made.table[container], made.ends[container])
    found = []
    while some := await scan.following():
        found += [
            (container, chunk.offset, chunk.header.oid, chunk.header.number) for chunk in some
        ]
    return found


def expected_in(made: Shelf) -> set[tuple]:
    return {
        (place.container, place.offset, oid, index)
        for oid, file in made.lists.items()
        for index, place in enumerate(file)
        if place
    }


@pytest.mark.sweep("harmed")
@pytest.mark.parametrize("harmed", [None, 0, 1])
async def test_chunks_are_found_by_their_headers(scratch, redundancy, harmed):
    with enough(scratch, redundancy) as servers, shelf(servers, scratch, False, redundancy) as made:
        for first in (0, 10, 20):
            await made.store({first + oid: data for oid, data in FILES.items()}, 65536, 3)
        await made.store({100 + number: content(number, 3000) for number in range(200)}, 65536)
        if harmed is not None:
            for path in paths_of(made, harmed):
                path.write_bytes(bytes(byte ^ 0x40 for byte in path.read_bytes()))
        found = [chunk for container in made.ends for chunk in await found_in(made, container)]
        assert set(found) == expected_in(made)
        assert len(found) == len(set(found))


@pytest.mark.parametrize("verify", [False, True])
async def test_a_server_that_hangs_holds_nobody_up(scratch, redundancy, verify):
    release = threading.Event()

    def hang(op: str, path: str) -> None:
        if op == "read_into" and path.startswith(f"{scratch}/server1"):
            release.wait()

    with (
        hooked(),
        enough(scratch, redundancy) as servers,
        shelf(servers, scratch, verify, redundancy) as made,
    ):
        await made.store(FILES, 65536, 3)
        try:
            with trio.fail_after(60), hooked(hang):
                for oid, data in FILES.items():
                    assert await made.content(oid, len(data)) == data
        finally:
            release.set()
        await settle(made)
