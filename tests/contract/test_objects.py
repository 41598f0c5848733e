"""What every layout's objects owe, against a plain bytearray. Each layout adds itself to
``LAYOUTS``.
"""

import os
import tempfile
from pathlib import Path

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from aifs.core.errors import Unavailable
from aifs.data.objects.columns import Columns
from aifs.data.objects.object_set import ObjectSet, delete_batch, delete_objects
from aifs.data.servers import Servers
from aifs.data.storage import ForeignFile, StoredObject
from aifs.layout.striped import Striped
from tests.support.data_servers import data_servers, hooked, list_window, open_below, opened

INO, OID = 0x1234, 0x20305
MEMORY = "/dev/shm"

LAYOUTS = [
    Striped(4096, (0,)),
    Striped(4096, (2, 0)),
    Striped(4096, (3, 1, 0, 2)),
    Striped(65536, (1, 2, 3, 0)),
]
LARGEST = 300_000


@pytest.fixture
async def servers(place):
    with data_servers(place) as servers:
        yield servers
        await servers.cache.settle()  # what is read ahead holds descriptors


@pytest.fixture(params=LAYOUTS, ids=lambda layout: f"{layout.unit}x{len(layout.servers)}")
def layout(request):
    return request.param


def pattern(length: int, seed: int = 1) -> bytes:
    return bytes((seed + 7 * index + index // 251) % 256 for index in range(4096)) * (
        length // 4096 + 1
    )


def lengths(servers: Servers, layout: Striped, ino: int = INO, oid: int = OID) -> list[int | None]:
    paths = [servers[number].where((ino, oid)) for number in layout.servers]
    return [os.path.getsize(path) if os.path.exists(path) else None for path in paths]


def exact(layout: Striped, size: int) -> list[int | None]:
    return [layout.object_length(index, size) or None for index in range(len(layout.servers))]


# --- random use -----------------------------------------------------------------------------------

offsets = st.integers(0, LARGEST - 1) | st.integers(0, LARGEST // 4096 - 1).map(
    lambda page: page * 4096
)
spans = st.integers(1, 70_000) | st.sampled_from([4096, 65536])
steps = st.lists(
    st.tuples(st.just("write"), offsets, spans)
    | st.tuples(st.just("append"), st.just(0), spans)
    | st.tuples(st.just("truncate"), offsets, st.just(0))
    | st.tuples(st.just("settle"), st.just(0), st.just(0))
    | st.tuples(st.just("reopen"), st.just(0), st.just(0))
    | st.tuples(st.just("sync"), st.just(0), st.just(0))
    | st.tuples(st.just("read"), offsets, spans),
    max_size=15,
)


async def use(servers: Servers, layout: Striped, plan: list[tuple[str, int, int]]) -> None:
    model = bytearray()
    objects = ObjectSet(servers, layout, INO, OID, new=True)
    settled = False
    for number, (step, offset, length) in enumerate(plan):
        if step == "append":
            offset = min(len(model), LARGEST)
        if step in ("write", "append"):
            data = pattern(length, number)[:length]
            await objects.write(offset, data)
            model.extend(bytes(max(0, offset - len(model))))
            model[offset : offset + length] = data
        elif step == "truncate":
            del model[offset:]
            model.extend(bytes(offset - len(model)))
            await objects.trim(len(model))
        elif step == "settle":
            await objects.settle(len(model))
            assert lengths(servers, layout) == exact(layout, len(model))
            assert objects.blocks() == sum(
                os.stat(servers[number].where((INO, OID))).st_blocks
                for number, length in zip(layout.servers, lengths(servers, layout), strict=True)
                if length is not None
            )
        elif step == "sync":
            await objects.sync()
        elif step == "reopen":
            objects.close()
            objects = ObjectSet(servers, layout, INO, OID)
            assert objects.blocks() is None
            await objects.trim(len(model))
            assert objects.blocks() is not None
        settled = step in ("settle", "sync", "reopen", "read") and (settled or step == "settle")
        if step == "read":
            length = max(0, min(length, len(model) - offset))
            if length:
                assert (
                    await objects.read(offset, length, len(model), settled)
                    == model[offset : offset + length]
                )
    if model:
        assert await objects.read(0, len(model), len(model), False) == model
    await objects.settle(len(model))
    if model:
        assert await objects.read(0, len(model), len(model), True) == model
    assert lengths(servers, layout) == exact(layout, len(model))
    objects.close()
    await delete_objects(servers, layout, INO, OID)
    assert lengths(servers, layout) == [None] * len(layout.servers)


@pytest.mark.sweep
@pytest.mark.parametrize("parent", [MEMORY, None], ids=["memory", "disk"])
@pytest.mark.parametrize("threaded", [False, True], ids=["free", "hooked"])
@settings(max_examples=25, deadline=None)
@given(plan=steps, layout=st.sampled_from(LAYOUTS))
def test_like_a_bytearray(parent, threaded, plan, layout):
    with (
        tempfile.TemporaryDirectory(dir=parent) as directory,
        data_servers(Path(directory)) as servers,
    ):
        if threaded:
            seen = []
            with hooked(lambda op, path: seen.append(op)):
                trio.run(use, servers, layout, plan)
            assert "unlink" in seen
        else:
            trio.run(use, servers, layout, plan)


# --- holes, damage, lengths -----------------------------------------------------------------------


async def test_what_no_object_holds_is_zeros_or_damage(servers, layout):
    objects = ObjectSet(servers, layout, INO, OID, new=True)
    data = pattern(100_000)[:100_000]
    await objects.write(0, data)
    await objects.settle(len(data))
    victim = 0
    path = servers[layout.servers[victim]].where((INO, OID))
    held = os.path.getsize(path)
    os.truncate(path, held - 1)
    lost = max(
        extent.file_offset + extent.length - 1
        for extent in layout.extents(0, len(data))
        if extent.column == victim and extent.object_offset + extent.length == held
    )
    expected = bytearray(data)
    expected[lost] = 0
    assert await objects.read(0, len(data), len(data), False) == expected
    complaint = f"^data server {layout.servers[victim]}: {path} ends before byte"
    with pytest.raises(Unavailable, match=complaint):
        await objects.read(0, len(data), len(data), True)
    assert await objects.read(0, lost, len(data), True) == data[:lost]
    objects.close()

    os.unlink(path)
    objects = ObjectSet(servers, layout, INO, OID)
    with pytest.raises(
        Unavailable, match=f"^data server {layout.servers[victim]}: {path} is missing"
    ):
        await objects.read(lost, 1, len(data), True)
    assert await objects.read(lost, 1, len(data), False) == b"\0"
    objects.close()


async def test_a_reused_buffer_shows_nothing_of_its_last_use(servers, layout):
    objects = ObjectSet(servers, layout, INO, OID, new=True)
    await objects.write(0, b"\xff" * 200_000)
    for _ in range(3):
        view = await objects.read(0, 200_000, 400_000, False)
        assert view == b"\xff" * 200_000
        del view
        assert await objects.read(200_000, 200_000, 400_000, False) == bytes(200_000)
    objects.close()


async def test_settle_learns_about_objects_that_it_did_not_write(servers, layout):
    objects = ObjectSet(servers, layout, INO, OID, new=True)
    await objects.write(0, pattern(80_000)[:80_000])
    objects.close()
    for size in (80_000, 5000, 120_000, 0):
        objects = ObjectSet(servers, layout, INO, OID)
        await objects.settle(size)
        assert lengths(servers, layout) == exact(layout, size)
        if size:
            seen = await objects.read(0, size, size, True)
            kept = pattern(5000)[:5000] if size > 80_000 else pattern(80_000)[: min(size, 80_000)]
            assert seen[: len(kept)] == kept
            assert not any(seen[len(kept) :])
        objects.close()


async def test_trim_cuts_and_never_extends(servers, layout):
    objects = ObjectSet(servers, layout, INO, OID, new=True)
    await objects.write(0, pattern(80_000)[:80_000])
    before = lengths(servers, layout)
    await objects.trim(1 << 40)
    assert lengths(servers, layout) == before
    await objects.trim(5000)
    assert all(
        length is None or length <= layout.object_length(index, 5000)
        for index, length in enumerate(lengths(servers, layout))
    )
    await objects.write(9999, b"x")
    assert await objects.read(5000, 5000, 10_000, False) == bytes(4999) + b"x"
    objects.close()


async def test_removed_objects_are_made_again(servers, layout):
    objects = ObjectSet(servers, layout, INO, OID, new=True)
    await objects.write(0, b"old" * 50_000)
    await objects.settle(0)
    assert lengths(servers, layout) == [None] * len(layout.servers)
    await objects.write(0, b"new")
    await objects.settle(3)
    assert await objects.read(0, 3, 3, True) == b"new"
    assert lengths(servers, layout) == exact(layout, 3)
    objects.close()


async def test_a_sparse_file_of_16_tib(servers):
    layout = Striped(1 << 20, (0, 1, 2, 3))
    size = 16 << 40
    objects = ObjectSet(servers, layout, INO, OID, new=True)
    try:
        await objects.write(size - 4, b"tail")
    except Unavailable as error:
        pytest.skip(f"this filesystem has no files of 4 TiB: {error}")
    await objects.settle(size)
    assert lengths(servers, layout) == exact(layout, size)
    assert objects.blocks() <= 4 * 64
    assert await objects.read(size - 8, 8, size, True) == b"\0\0\0\0tail"
    assert await objects.read(1 << 43, 1 << 20, size, True) == bytes(1 << 20)
    objects.close()


async def test_streaming_needs_no_question_to_the_servers(servers, layout):
    """A new file that was written front to back is settled already."""
    objects = ObjectSet(servers, layout, INO, OID, new=True)
    calls = []
    await objects.trim(0)
    for offset in range(0, 131_072, 4096):
        await objects.write(offset, b"d" * 4096)
    await objects.write(131_072, b"end")
    with hooked(lambda op, path: calls.append(op)):
        await objects.settle(131_075)
    assert calls == []
    assert lengths(servers, layout) == exact(layout, 131_075)
    objects.close()


# --- durability -----------------------------------------------------------------------------------


async def test_sync_covers_bytes_and_names_once(servers, layout):
    objects = ObjectSet(servers, layout, INO, OID, new=True)
    await objects.write(0, pattern(300_000)[:300_000])
    calls: list[tuple[str, str]] = []
    with hooked(lambda op, path: calls.append((op, path))):
        await objects.sync()
        first = list(calls)
        calls.clear()
        await objects.sync()
        assert calls == []
        await objects.write(0, b"x")
        calls.clear()
        await objects.sync()
        assert [op for op, _ in calls] == ["sync_file"]
    objects.close()
    assert [op for op, _ in first].count("sync_file") == len(layout.servers)
    for number in layout.servers:
        server = servers[number]
        directory = os.path.dirname(server.where((INO, OID)))
        chain = [directory, os.path.dirname(directory), f"{server.address}/objects", server.address]
        synced = [
            path for op, path in first if op == "sync_dir" and path.startswith(server.address)
        ]
        assert sorted(synced) == sorted(chain)


async def test_settle_then_sync_covers_what_an_earlier_user_left(servers, layout):
    objects = ObjectSet(servers, layout, INO, OID, new=True)
    await objects.write(0, pattern(300_000)[:300_000])
    objects.close()
    objects = ObjectSet(servers, layout, INO, OID)
    await objects.trim(300_000)
    await objects.settle(300_000)
    calls = []
    with hooked(lambda op, path: calls.append(op)):
        await objects.sync()
    assert calls.count("sync_file") == len(layout.servers)
    assert "sync_dir" in calls
    objects.close()


@pytest.mark.parametrize("by_columns", [False, True])
async def test_a_name_that_a_mover_made_before_it_died_is_synced(servers, layout, by_columns):
    """Who does its work again finds the object, in a directory that was in order before."""
    await store(servers, layout, OID + 1)
    with opened({server.id: server.address for server in servers.values()}) as of_mover:
        died = ObjectSet(of_mover, layout, INO, OID, new=True)
        await died.write(0, b"x" * 300_000)
        died.close()
    synced = []
    with hooked(lambda op, path: synced.append(path) if op == "sync_dir" else None):
        if by_columns:
            columns = Columns(servers, layout, INO, OID)
            for column in range(len(layout.servers)):
                assert await columns.read(column, 0, memoryview(bytearray(1)))
                await columns.sync(column)
            columns.close()
        else:
            again = ObjectSet(servers, layout, INO, OID, new=True)
            await again.write(0, b"x" * 300_000)
            await again.sync()
            again.close()
    for number in layout.servers:
        assert os.path.dirname(servers[number].where((INO, OID))) in synced


async def store(servers: Servers, layout: Striped, oid: int) -> None:
    objects = ObjectSet(servers, layout, INO, oid, new=True)
    await objects.write(0, b"x" * 300_000)
    await objects.sync()
    objects.close()


async def test_deletions_are_durable(servers, layout):
    oids = (OID, OID + 1, OID + 0x10000)
    for oid in oids:
        await store(servers, layout, oid)
    calls: list[str] = []
    with hooked(lambda op, path: calls.append(f"{op} {path}")):
        assert await delete_batch(servers, {oid: (INO, layout) for oid in oids[:2]}) == {}
        await delete_objects(servers, layout, INO, OID)  # again: no error
    for number in layout.servers:
        path = servers[number].where((INO, OID))
        upper = os.path.dirname(os.path.dirname(path))
        # The emptied directory went away, and that is what had to be synced.
        assert calls.index(f"unlink {path}") < calls.index(f"sync_dir {upper}")
        assert os.listdir(upper) == []
        assert os.path.exists(servers[number].where((INO, oids[2])))


async def test_a_shared_directory_stays_and_is_synced(servers, layout):
    for oid in (OID, OID + 1):
        await store(servers, layout, oid)
    calls: list[str] = []
    with hooked(lambda op, path: calls.append(f"{op} {path}")):
        await delete_objects(servers, layout, INO, OID)
    for number in layout.servers:
        path = servers[number].where((INO, OID))
        assert calls.index(f"unlink {path}") < calls.index(f"sync_dir {os.path.dirname(path)}")
        assert os.path.exists(servers[number].where((INO, OID + 1)))


async def test_sync_all_covers_names(servers, layout):
    objects = ObjectSet(servers, layout, INO, OID, new=True)
    await objects.write(0, b"x" * 300_000)
    objects.close()
    calls = []
    with hooked(lambda op, path: calls.append(op)):
        await servers.sync_all()
        for server in servers.values():
            server.sync_names_near(OID)
    assert calls == ["sync_filesystem"] * len(servers)


# --- tasks together -------------------------------------------------------------------------------


async def test_many_tasks_share_one_file(servers, layout):
    objects = ObjectSet(servers, layout, INO, OID, new=True)
    size, piece = 262_144, 8192
    data = pattern(size)[:size]

    async def writer(start: int) -> None:
        for offset in range(start, size, 4 * piece):
            await objects.write(offset, data[offset : offset + piece])

    async def reader(start: int) -> None:
        for offset in range(start, size, 4 * piece):
            view = await objects.read(offset, piece, size, True)
            assert view == data[offset : offset + piece]

    async with trio.open_nursery() as nursery:
        for start in range(4):
            nursery.start_soon(writer, start * piece)
    await objects.settle(size)
    async with trio.open_nursery() as nursery:
        for start in range(4):
            nursery.start_soon(reader, start * piece)
    objects.close()


async def test_a_view_keeps_its_bytes(servers):
    layout = Striped(1 << 20, (0, 1, 2, 3))
    objects = ObjectSet(servers, layout, INO, OID, new=True)
    count = 40  # more than the pool holds
    for number in range(count):
        await objects.write(number << 20, bytes([number]) * (1 << 20))
    views = [
        await objects.read(number << 20, 1 << 20, count << 20, True) for number in range(count)
    ]
    for number, view in enumerate(views):
        assert view[0] == view[-1] == number
    objects.close()


# --- what lies there ------------------------------------------------------------------------------


async def test_windows_and_listings(servers, layout):
    oids = [0xFF, 0x100, 0x1FFFF, 0x20000, 0x20305]
    for oid in oids:
        objects = ObjectSet(servers, layout, INO + oid, oid, new=True)
        await objects.write(0, b"x" * 300_000)
        objects.close()
    everywhere = sorted((number, INO + oid, oid) for number in layout.servers for oid in oids)
    assert sorted(await list_window(servers, 0, 0x20306)) == everywhere
    assert sorted(await list_window(servers, 0x100, 0x20000)) == [
        entry for entry in everywhere if 0x100 <= entry[2] < 0x20000
    ]
    assert await list_window(servers, 5, 5) == []
    for number in servers:
        found = list(servers[number].list_objects())
        assert sorted((number, item.ino, item.oid) for item in found) == [
            e for e in everywhere if e[0] == number
        ]
        for item in found:
            assert isinstance(item, StoredObject)
            status = os.stat(item.where)
            assert (item.length, item.allocated) == (status.st_size, status.st_blocks * 512)


async def test_foreign_files_are_told_from_objects(servers):
    layout = Striped(4096, (0,))
    objects = ObjectSet(servers, layout, INO, OID, new=True)
    await objects.write(0, b"x")
    objects.close()
    server = servers[0]
    path = server.where((INO, OID))
    directory = os.path.dirname(path)
    foreign = [
        f"{server.address}/notes",
        f"{server.address}/objects/README",
        f"{server.address}/objects/2/zz",
        f"{directory}/{OID:016x}.0{INO:x}",  # a leading zero
        f"{directory}/{OID + 256:016x}.{INO:x}",  # belongs into the next directory
        f"{directory}/notes",
    ]
    for name in foreign:
        Path(name).write_bytes(b"")
    os.symlink(path, f"{directory}/{OID + 1:016x}.1")
    foreign.append(f"{directory}/{OID + 1:016x}.1")
    os.mkdir(f"{directory}/{OID + 2:016x}.1")
    foreign.append(f"{directory}/{OID + 2:016x}.1")
    found = list(server.list_objects())
    assert [item.where for item in found if isinstance(item, StoredObject)] == [path]
    assert sorted(item.where for item in found if isinstance(item, ForeignFile)) == sorted(foreign)


async def test_descriptors_are_few_and_given_back(servers):
    layout = Striped(4096, (0, 1, 2, 3))
    parent = Path(servers[0].address).parent
    objects = ObjectSet(servers, layout, INO, OID, new=True)
    await objects.write(4096, b"x")
    assert open_below(parent) == [servers[1].where((INO, OID))]
    objects.close()
    for server in servers.values():
        await servers.run(server, int)  # descriptors are closed in order by the same threads
    servers.close()
    assert open_below(parent) == []


async def test_space(servers):
    space = servers.statfs()
    status = os.statvfs(servers[0].address)
    assert space.total == status.f_blocks * status.f_frsize  # one filesystem, counted once
    assert space.files == status.f_files
    for entry in await servers.status():
        assert entry["state"] == "ok"
        assert entry["path"] == servers[entry["id"]].address
        assert 0 < entry["used_bytes"] < space.total
        assert 0 < entry["free_bytes"] <= space.total
