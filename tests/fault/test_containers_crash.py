"""Containers after power cuts at every step of storing, deleting and compacting, and compaction
itself.

Files here are inodes without names: what a drain does to a file, and nothing else of the
filesystem.
"""

import errno
import itertools
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from aifs.burst.making import MakingTools
from aifs.burst.pool import Movers
from aifs.burst.transfer import Limiter, Mover
from aifs.core import faults
from aifs.core.config import load
from aifs.core.loop_share import LoopShare
from aifs.core.tasks import first_error
from aifs.core.upkeep import Role, Upkeep
from aifs.data import health
from aifs.data.chunk_codec import digest_of
from aifs.data.containers.pieces import FileSource, HashedPiece
from aifs.data.containers.scan import ContainerScan
from aifs.data.objects.object_set import delete_objects
from aifs.data.server import DataServer
from aifs.data.servers import Servers
from aifs.files import containers as vfs_containers
from aifs.files.collector import Collector
from aifs.files.containers import Containers
from aifs.layout.interleaved import HEADER_BYTES, Extent, Interleaved, container_layout, named
from aifs.layout.redundancy import PLAIN, Redundancy
from aifs.layout.striped import Striped
from aifs.meta import chunks, journal, keys, lmdb_database, namespace, shared
from aifs.meta.chunks import decode_list
from aifs.meta.kv import ReadTransaction, Transaction
from aifs.meta.lmdb_engine import LmdbEngine
from aifs.meta.records import Inode
from aifs.meta.server_uses import users_of
from aifs.meta.servers import ServerRecord, put_servers
from aifs.store import ids as vfs_ids
from aifs.store.backup import Backup
from aifs.store.ids import IdAllocator
from aifs.upkeep.compaction import Compaction
from tests.support.copies import DESCRIPTORS, WithDescriptors
from tests.support.data_servers import failing, hooked, list_window, make_table, open_below, opened
from tests.support.powercut import PowerCut

SERVERS = 3
KINDS = {"plain": PLAIN, "replicas": Redundancy(2), "coded": Redundancy(1, 2, 1)}
CONTAINER = 120_000
ROW = container_layout((0, 1, 2), Redundancy(1, 2, 1)).row
CHUNK = 16384
LAYOUT = Interleaved(CHUNK)
LAYOUT = Interleaved(CHUNK)
POINTS = [
    name
    for name in sorted(faults.POINTS)
    if name.startswith(("data.append.", "vfs.compact.", "vfs.containers.", "vfs.collect.d"))
]


STEPS = ("store", "share", "delete", "delete", "delete", "compact", "collect", "collect", "barrier")
OFTEN = {"append": 3, "collect": 1}
"""How often a point is reached in most lives, at least; others: twice."""


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 256 << 10)
    monkeypatch.setattr(lmdb_database, "INITIAL_MAP_BYTES", 128 << 10)
    monkeypatch.setattr(vfs_ids, "WINDOW", 64)
    monkeypatch.setattr(vfs_containers, "LISTED_AT_ONCE", 64)


@pytest.fixture
def root() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="aifs-containers-", dir="/dev/shm"))
    make_store(directory / "0")
    yield directory
    shutil.rmtree(directory)


def make_store(directory: Path) -> None:
    directory.mkdir()
    (directory / "meta").mkdir()
    make_table(directory, SERVERS)
    engine = LmdbEngine(str(directory / "meta"))
    trio.run(engine.transact, Transaction.add, keys.COUNTER_IDS, keys.FIRST_FREE_ID)
    trio.run(engine.transact, put_servers, {number: ServerRecord("") for number in range(SERVERS)})
    engine.close()


class Mounted:
    """What of a mounted store has to do with containers."""

    def __init__(self, engine: LmdbEngine, servers: Servers, redundancy: Redundancy) -> None:
        self.redundancy = redundancy
        self.engine = engine
        self.servers = servers
        self.ids = IdAllocator(engine)
        backup = Backup(
            load("/nowhere", {"meta.backup_interval": "0"}), "", engine, servers, Upkeep()
        )
        self.collector = Collector(engine, servers, backup, None, Upkeep(), Role())
        size = CONTAINER if not redundancy.parity else 3 * ROW
        with_descriptors = WithDescriptors(servers)
        self.containers = Containers(
            engine,
            with_descriptors,
            self.ids,
            self.collector,
            size,
            True,
            on_damage=lambda oid, ino, column: None,
        )
        mover = Mover(servers.budget, Limiter(0), "none")
        self.movers = Movers(MakingTools(with_descriptors, mover, self.containers.files))
        self.compaction = Compaction(
            engine, servers, self.containers, self.collector, self.movers, LoopShare(), 0.3, size
        )

    async def recover(self) -> None:
        for kind in (b"g", b"y"):
            start, end = keys.all_of(kind)
            for key, _ in await self.engine.view(
                lambda tx, start=start, end=end: list(tx.range(start, end))
            ):
                self.collector.add_garbage(keys.number(key))
        windows = await vfs_ids.last_windows(self.engine)
        found = [await list_window(self.servers, *window) for window in windows]
        for server, ino, oid in itertools.chain(*found):
            known = await self.engine.view(
                lambda tx, oid=oid: (
                    chunks.find_container(tx, oid) or tx.get(keys.garbage(oid)) is not None
                )
            )
            if not known:
                await delete_objects(self.servers, Striped(1, (server,)), ino, oid)
        await self.containers.recover()

    async def store(self, contents: list[bytes], copy_of: "Copies") -> list[int]:
        """Drain them together; returns the inodes."""
        inos = [await self.ids.take() for _ in contents]
        oids = [await self.ids.take() for _ in contents]
        sources = [
            FileSource(ino, oid, len(content), copy_of(content), LAYOUT, ino % 2)
            for ino, oid, content in zip(inos, oids, contents, strict=True)
        ]
        slots = self.containers.slots(self.redundancy)
        async with self.containers.append(sources, slots, self.movers) as (lists, lost):
            await self.engine.transact(put_files, sources, lists, lost)
        return inos

    async def share(self, contents: list[bytes], copy_of: "Copies") -> list[int]:
        """The same as extent lists: equal chunks are stored once, but for the first of each third
        file."""
        inos = [await self.ids.take() for _ in contents]
        oids = [await self.ids.take() for _ in contents]
        lists: list[list[Extent]] = []
        wanted: dict[tuple[bytes, int], HashedPiece] = {}  # by digest, and the oid of its owner
        for ino, oid, content in zip(inos, oids, contents, strict=True):
            copy, rows = copy_of(content), []
            step = 700 if ino % 16 == 0 else CHUNK  # a long list
            for start in range(0, len(content), step):
                part = content[start : start + step]
                piece = HashedPiece(copy, ino, start, len(part), digest_of(part), ino % 2)
                if ino % 3 == 0 and not rows:
                    piece = piece._replace(oid=oid, number=0)
                wanted.setdefault((piece.digest, piece.oid), piece)
                rows.append(Extent(len(part), named(len(part), piece.digest).place, not piece.oid))
            lists.append(rows)
        known = await self.engine.view(shared.find_all_shared, {digest for digest, _ in wanted})
        new = {key: piece for key, piece in wanted.items() if key[1] or key[0] not in known}
        slots = self.containers.slots(self.redundancy)
        appending = self.containers.append_pieces(list(new.values()), slots, self.movers)
        async with appending as (places, lost):
            found = {key: place for key, place in zip(new, places, strict=True)}
            for oid, rows in zip(oids, lists, strict=True):
                for index, extent in enumerate(rows):
                    place = found.get((extent.digest, 0 if extent.shared else oid), extent.place)
                    rows[index] = extent._replace(place=place)
            digests = frozenset(digest for digest, owner in new if not owner)
            for number, oid in enumerate(oids):
                if inos[number] % 4 == 0:  # as long ones are
                    await self.containers.list_extents(oid, lists[number], digests, lost)
                    lists[number] = []
            await self.engine.transact(put_extent_lists, inos, oids, contents, lists, lost, digests)
        return inos

    async def delete(self, ino: int) -> None:
        for oid in await self.engine.transact(delete_file, ino):
            self.collector.add_garbage(oid)

    async def contents(self) -> dict[int, bytes]:
        """All files, and a check of all that must be true of the table, of lists and of objects."""
        found = {}
        for inode in await self.engine.view(inodes):
            objects = self.containers.objects_of(inode.chunks, inode.oid)
            data = await objects.read(0, inode.size, inode.size, True)
            found[inode.ino] = bytes(data)
        table, live, garbage = await self.engine.view(accounts)
        assert {container: record.live for container, record in table.items()} == {
            container: live.get(container, 0) for container in table
        }
        stored = set()
        for server in self.servers.values():
            for item in server.list_objects():
                stored.add(item.oid)
                if item.oid in table:
                    layout, length = table[item.oid].layout, table[item.oid].length
                    assert item.length >= layout.object_length(
                        layout.servers.index(server.id), length
                    )
                else:
                    assert item.oid in garbage, "an object that nobody knows"
        assert {container for container, record in table.items() if record.live} <= stored
        return found


class Copies:
    """Burst copies: files with given content, which outlive a mount."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._fds: list[int] = []

    def __call__(self, content: bytes) -> tuple[int, int]:
        path = self._directory / "copy"
        path.write_bytes(content)
        self._fds.append(os.open(path, os.O_RDONLY))
        path.unlink()
        return DESCRIPTORS, self._fds[-1]

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)


def put_files(
    tx: Transaction, sources: list[FileSource], lists: list[list[Extent]], lost: dict[int, int]
) -> None:
    chunks.put_lists(tx, {s.oid: extents for s, extents in zip(sources, lists, strict=True)})
    for source in sources:
        inode = Inode(
            source.ino,
            0o100644,
            0,
            0,
            1,
            0,
            source.size,
            0,
            0,
            0,
            0,
            oid=source.oid,
            layout=source.layout,
        )
        namespace.put_inode(tx, inode)
    chunks.put_lost(tx, lost)


def put_extent_lists(
    tx: Transaction,
    inos: list[int],
    oids: list[int],
    contents: list[bytes],
    lists: list[list[Extent]],
    lost: dict[int, int],
    new: frozenset[bytes],
) -> None:
    chunks.put_lists(tx, dict(zip(oids, lists, strict=True)), new)
    for ino, oid, content in zip(inos, oids, contents, strict=True):
        chunks.put_named(tx, oid)
        inode = Inode(ino, 0o100644, 0, 0, 1, 0, len(content), 0, 0, 0, 0, oid=oid, layout=LAYOUT)
        namespace.put_inode(tx, inode)
    chunks.put_lost(tx, lost)


def delete_file(tx: Transaction, ino: int) -> list[int]:
    inode = namespace.get_inode(tx, ino)
    tx.delete(keys.inode(ino))
    return chunks.drop_chunks(tx, inode.oid)


def inodes(tx: ReadTransaction) -> list[Inode]:
    numbers = [keys.number(key) for key, _ in tx.range(*keys.all_of(b"i"))]
    return [namespace.get_inode(tx, ino) for ino in numbers]


def listed(tx: ReadTransaction) -> set[int]:
    """Oids that have chunk lists."""
    return {keys.chunk_list_parts(key)[0] for key, _ in tx.range(*keys.all_of(b"l"))}


def accounts(tx: ReadTransaction) -> tuple[dict[int, chunks.Container], dict[int, int], set[int]]:
    table = {
        keys.number(key): chunks.decode_container(value)
        for key, value in tx.range(*keys.all_of(b"t"))
    }
    live: dict[int, int] = {}
    named = Counter()
    places = []
    for _, value in tx.range(*keys.all_of(b"l")):
        extents = decode_list(value)[1]
        places += [e.place for e in extents if e.place is not None and not e.shared]
        named.update(extent.digest for extent in extents if extent.shared)
    for key, value in tx.range(*keys.all_of(b"h")):
        known = shared.decode_shared(keys.shared_digest(key), value)
        assert known.references == named.pop(keys.shared_digest(key))
        places.append(known.place)
    assert not named, "shared chunks without a record"
    for place in places:
        assert place.offset + HEADER_BYTES + place.stored <= table[place.container].length
        live[place.container] = live.get(place.container, 0) + HEADER_BYTES + place.stored
    return table, live, {keys.number(key) for key, _ in tx.range(*keys.all_of(b"g"))}


@asynccontextmanager
async def mounted(directory: Path, redundancy: Redundancy = PLAIN) -> AsyncIterator[Mounted]:
    table = {number: str(directory / f"server{number}") for number in range(SERVERS)}
    with opened(table) as servers:
        engine = LmdbEngine(str(directory / "meta"), 0.01)
        crashed = True
        try:
            mount = Mounted(engine, servers, redundancy)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(engine.run)
                await mount.recover()
                yield mount
                nursery.cancel_scope.cancel()
            crashed = False
            await servers.cache.settle()
            mount.containers.close()
        finally:
            engine.abandon() if crashed else engine.close()


def content(rng: random.Random) -> bytes:
    size = rng.choice((1, 3000, CHUNK, 40_000, 60_000))
    return rng.choice((rng.randbytes(size), b"pattern" * (size // 7 + 1)))


async def work(
    directory: Path,
    seed: int,
    expected: dict[int, bytes],
    doubtful: dict[int, bytes],
    cut: PowerCut,
    redundancy: Redundancy,
) -> None:
    """Store, delete and compact until a crash. ``expected``: durable; ``doubtful``: may be there or
    not."""
    rng = random.Random(seed)
    copies = Copies(directory.parent)
    try:
        async with mounted(directory, redundancy) as mount:
            for _ in range(40):
                step = rng.choice(STEPS)
                if step in ("store", "share"):
                    batch = [content(rng) for _ in range(rng.randint(1, 6))]
                    store = mount.store if step == "store" else mount.share
                    doubtful |= dict(zip(await store(batch, copies), batch, strict=True))
                elif step == "delete" and expected | doubtful:
                    ino = rng.choice(sorted(expected | doubtful))
                    doubtful[ino] = expected.pop(ino, None) or doubtful[ino]
                    if (
                        await mount.engine.view(lambda tx, ino=ino: tx.get(keys.inode(ino)))
                        is not None
                    ):
                        await mount.delete(ino)
                elif step == "compact":
                    await mount.compaction.compact()
                elif step == "collect":
                    await mount.collector.drain()
                elif step == "barrier":
                    await mount.engine.barrier()
                    if not cut.crashed:
                        there = {inode.ino for inode in await mount.engine.view(inodes)}
                        expected |= {ino: data for ino, data in doubtful.items() if ino in there}
                        doubtful.clear()
    finally:
        copies.close()


@pytest.mark.parametrize("redundancy", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("point", POINTS)
def test_power_cuts(
    root: Path, point: str, redundancy: Redundancy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "DROPPED_AT_ONCE", 0)  # as if all lists were long
    reached, (seeds, wanted) = 0, (12, 6) if redundancy == PLAIN else (6, 3)
    expected: dict[int, bytes] = {}
    for seed in range(10 * seeds):
        if seed >= seeds and reached >= wanted:
            break
        doubtful: dict[int, bytes] = {}
        directory, after = root / str(seed), root / str(seed + 1)
        with PowerCut(directory) as cut:
            cut.crash_at(point, 1 + seed % OFTEN.get(point.split(".")[1], 2))
            try:
                trio.run(work, directory, seed, expected, doubtful, cut, redundancy)
            except BaseException as error:  # noqa: BLE001 (a crash comes in groups)
                if not isinstance(first_error(error), faults.SimulatedCrash):
                    raise
            reached += cut.crashed
            cut.materialise(after, random.Random(seed))
        shutil.rmtree(directory)
        expected = trio.run(found_after, after, expected, expected | doubtful)
    assert reached >= wanted, "the point was hardly ever reached"


async def found_after(
    directory: Path, required: dict[int, bytes], allowed: dict[int, bytes]
) -> dict[int, bytes]:
    async with mounted(directory) as mount:
        await mount.collector.drain()
        assert not await mount.engine.view(lambda tx: list(tx.range(*keys.all_of(b"y"))))
        assert await mount.engine.view(listed) == {
            inode.oid for inode in await mount.engine.view(inodes)
        }
        found = await mount.contents()
        assert required.items() <= found.items(), f"lost: {required.keys() - found.keys()}"
        assert found.items() <= allowed.items(), "bytes that were never written"
        await mount.compaction.compact()
        await mount.collector.drain()
        assert await mount.contents() == found
    return found


# --- compaction ---


async def test_compaction_gives_space_back(root: Path) -> None:
    copies, rng = Copies(root), random.Random(1)
    async with mounted(root / "0") as mount:
        batch = [rng.randbytes(30_000) for _ in range(80)]
        inos = []
        for first in range(0, 80, 8):
            inos += await mount.store(batch[first : first + 8], copies)
        full = stored_bytes(mount.servers)
        kept = dict(zip(inos, batch, strict=True))
        for ino in inos:
            if ino % 5:
                del kept[ino]
                await mount.delete(ino)
        readers = {
            inode.ino: mount.containers.objects_of(inode.chunks, inode.oid)
            for inode in await mount.engine.view(inodes)
        }
        for ino, objects in readers.items():
            assert bytes(await objects.read(0, 30_000, 30_000, True)) == kept[ino]
        await mount.compaction.compact()
        await mount.collector.drain()
        assert stored_bytes(mount.servers) < 0.5 * full
        assert await mount.contents() == kept
        for ino, objects in readers.items():
            assert bytes(await objects.read(0, 30_000, 30_000, True)) == kept[ino], (
                "read by the old places"
            )
        sizes = []
        for _ in range(5):
            await mount.compaction.compact()
            await mount.collector.drain()
            sizes.append(stored_bytes(mount.servers))
        assert sizes[-1] == sizes[-2], "there is nothing left to do"
    copies.close()


async def test_what_compaction_has_emptied_is_not_kept_open(root: Path) -> None:
    copies, rng = Copies(root), random.Random(1)
    async with mounted(root / "0") as mount:
        inos = []
        for _ in range(10):
            inos += await mount.store([rng.randbytes(30_000) for _ in range(8)], copies)
        for ino in inos:
            if ino % 5:
                await mount.delete(ino)
        await mount.compaction.compact()
        await mount.collector.drain()
        await mount.servers.cache.settle()
        for server in mount.servers.values():
            await mount.servers.run(server, os.getpid)  # closed before this
        assert [path for path in open_below(root / "0") if path.endswith(" (deleted)")] == []
    copies.close()


def stored_bytes(servers: Servers) -> int:
    return sum(item.length for server in servers.values() for item in server.list_objects())


async def test_compaction_moves_shared_chunks_once(root: Path) -> None:
    """And with them all that name them, also who reads them since before."""
    copies, rng = Copies(root), random.Random(1)
    async with mounted(root / "0") as mount:
        common = [rng.randbytes(CHUNK) for _ in range(4)]
        batch = [b"".join(rng.sample(common, 3)) + rng.randbytes(20_000) for _ in range(30)]
        inos = []
        for first in range(0, 30, 6):
            inos += await mount.share(batch[first : first + 6], copies)
        kept = dict(zip(inos, batch, strict=True))
        before = await mount.engine.view(
            shared.find_all_shared, [digest_of(chunk) for chunk in common]
        )
        assert len(before) == 4 and sum(known.references for known in before.values()) in range(
            60, 90
        )
        for ino in inos[:-5]:
            del kept[ino]
            await mount.delete(ino)
        readers = {
            inode.ino: mount.containers.objects_of(inode.chunks, inode.oid)
            for inode in await mount.engine.view(inodes)
        }
        size = len(batch[0])
        for ino, objects in readers.items():
            assert bytes(await objects.read(0, size, size, True)) == kept[ino]
        full = stored_bytes(mount.servers)
        await seal_all(mount)
        await mount.compaction.compact()
        await mount.collector.drain()
        assert stored_bytes(mount.servers) < 0.7 * full
        after = await mount.engine.view(shared.find_all_shared, list(before))
        assert any(before[digest].place != known.place for digest, known in after.items())
        assert await mount.contents() == kept
        for ino, objects in readers.items():
            assert bytes(await objects.read(0, size, size, True)) == kept[ino], (
                "read by the old places"
            )
        for container in {known.place.container for known in after.values()}:
            assert await mount.compaction.evacuate(container)
            assert await mount.engine.view(chunks.find_container, container) is None
        assert await mount.contents() == kept
        for ino in kept:
            await mount.delete(ino)
        await seal_all(mount)
        await mount.collector.drain()
        assert not await mount.engine.view(lambda tx: list(tx.range(*keys.all_of(b"h"))))
        assert stored_bytes(mount.servers) == 0
    copies.close()


async def test_who_uses_a_container(root: Path) -> None:
    copies = Copies(root)
    async with mounted(root / "0") as mount:
        common = bytes([7]) * CHUNK
        batch = [common + b"a" * 1000 + bytes([number]) * 50 for number in range(6)]
        inos = await mount.share(batch, copies) + await mount.store([common * 2 + b"b"], copies)
        oids = {inode.ino: inode.oid for inode in await mount.engine.view(inodes)}
        table, _, _ = await mount.engine.view(accounts)
        found: dict[int, set[tuple[int, int]]] = {}
        for container, record in table.items():
            scan = ContainerScan(mount.containers.files, container, record.layout, record.length)
            starts = set()
            while some := await scan.following():
                starts |= {chunk.offset for chunk in some}
            users = await users_of(mount.engine, {container})
            assert {user.start for user in users} == starts
            for user in users:
                assert oids[user.ino] == user.oid
                found.setdefault(user.ino, set()).add((user.first, user.last))
        size = CHUNK + 1050
        for ino in inos[:-1]:
            assert found[ino] == {(0, CHUNK - 1), (CHUNK, size - 1)}
        assert found[inos[-1]] == {(0, CHUNK - 1), (CHUNK, 2 * CHUNK - 1), (2 * CHUNK, 2 * CHUNK)}
    copies.close()


async def test_a_bad_chunk_is_replaced_for_all_who_name_it(root: Path) -> None:
    copies = Copies(root)
    async with mounted(root / "0") as mount:
        batch = [b"common" * 2000] * 4
        kept = dict(zip(await mount.share(batch, copies), batch, strict=True))
        readers = {
            inode.ino: mount.containers.objects_of(inode.chunks, inode.oid)
            for inode in await mount.engine.view(inodes)
        }
        digest = digest_of(batch[0])
        known = await mount.engine.view(shared.find_shared, digest)
        for objects in readers.values():
            await objects.data_range(0, 12000)  # has learned the place
        container = await mount.engine.view(chunks.find_container, known.place.container)
        server = mount.servers[container.layout.servers[0]]
        with open(server.where((0, known.place.container)), "r+b") as file:
            file.seek(known.place.offset + HEADER_BYTES)
            file.write(b"damage")
        piece = HashedPiece(copies(batch[0]), 1, 0, 12000, digest, 0)
        slots = mount.containers.slots(mount.redundancy)
        async with mount.containers.append_pieces([piece], slots, mount.movers) as (places, lost):
            await mount.engine.transact(chunks.replace_shared, places, lost)
        assert (
            (await mount.engine.view(shared.find_shared, digest)).references == known.references > 1
        )
        assert await mount.contents() == kept
        for ino, objects in readers.items():
            assert bytes(await objects.read(0, 12000, 12000, True)) == kept[ino], (
                "read by the old places"
            )
    copies.close()


@pytest.mark.sweep
async def test_a_long_list_is_recorded_and_dropped_piece_by_piece(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "DROPPED_AT_ONCE", 1)
    copies, rng = Copies(root), random.Random(3)
    async with mounted(root / "0") as mount:
        batch = [rng.randbytes(100_000) for _ in range(32)]
        inos = await mount.share(batch, copies)
        assert await mount.contents() == dict(zip(inos, batch, strict=True))
        long = [ino for ino in inos if ino % 16 == 0]
        listed = await mount.engine.view(
            lambda tx: [key for key, _ in tx.range(*keys.all_of(b"l"))]
        )
        records = Counter(keys.chunk_list_parts(key)[0] for key in listed)
        assert max(records.values()) == 3
        for ino in inos:
            await mount.delete(ino)
        loose = await mount.engine.view(
            lambda tx: [keys.number(key) for key, _ in tx.range(*keys.all_of(b"y"))]
        )
        assert len(loose) == len(long) == 2
        await mount.contents()  # what they name is alive until then
        await seal_all(mount)
        await mount.collector.drain()
        for kind in (b"y", b"l", b"h", b"t"):
            assert not await mount.engine.view(
                lambda tx, kind=kind: list(tx.range(*keys.all_of(kind)))
            )
        assert stored_bytes(mount.servers) == 0
    copies.close()


async def test_a_file_deleted_while_its_chunks_move(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = Copies(root)
    async with mounted(root / "0") as mount:
        batch = [bytes([number]) * 30_000 for number in range(20)]
        inos = await mount.store(batch, copies)
        await seal_all(mount)
        for ino in inos[::2]:
            await mount.delete(ino)
        victim, deleted = inos[1], []
        oid = (await mount.engine.view(namespace.get_inode, victim)).oid
        original = vfs_containers.Containers.append_pieces

        @asynccontextmanager
        async def append_pieces(self, pieces, *how):
            async with original(self, pieces, *how) as appended:
                if any(piece.header.oid == oid for piece in pieces):
                    await mount.delete(victim)
                    deleted.append(victim)
                yield appended

        monkeypatch.setattr(vfs_containers.Containers, "append_pieces", append_pieces)
        await mount.compaction.compact()
        await mount.collector.drain()
        assert deleted == [victim]
        assert set(await mount.contents()) == set(inos[1::2]) - {victim}
    copies.close()


async def test_a_damaged_chunk_stays_where_it_is(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copies = Copies(root)
    async with mounted(root / "0") as mount:
        inos = await mount.store([os.urandom(50_000) for _ in range(20)], copies)
        for ino in inos[:5] + inos[6:-3]:
            await mount.delete(ino)
        oid = (await mount.engine.view(namespace.get_inode, inos[5])).oid
        place = (await mount.engine.view(chunks.get_extents, oid, CHUNK, 0))[1][0].place
        server: DataServer = mount.servers[place.server]
        with open(server.where((0, place.container)), "r+b") as file:
            file.seek(place.offset + HEADER_BYTES + 10)
            file.write(b"damage")
        await seal_all(mount)
        await mount.compaction.compact()
        assert (
            f"container {place.container} is not compacted: data server {server.id}" in caplog.text
        )
        caplog.clear()
        await mount.compaction.compact()
        assert not caplog.text, "it is said once"
        record = await mount.engine.view(chunks.find_container, place.container)
        assert record is not None
    copies.close()


async def seal_all(mount: Mounted) -> None:
    """As if all containers were full."""
    for container in await mount.engine.view(chunks.open_containers):
        await mount.containers.seal(container)
    await mount.containers.retire(lambda container, layout: True)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
async def test_a_failing_server_delays_compaction(
    root: Path, number: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "RETRY_S", 0.0)
    copies = Copies(root)
    with hooked():
        async with mounted(root / "0") as mount:
            batch = [os.urandom(50_000) for _ in range(20)]
            inos = await mount.store(batch, copies)
            kept = dict(zip(inos[-3:], batch[-3:], strict=True))
            for ino in inos[:-3]:
                await mount.delete(ino)
            await seal_all(mount)
            before = stored_bytes(mount.servers)
            with failing("write_at", str(root / "0" / "server"), number):
                await mount.compaction.compact()
            assert await mount.contents() == kept
            assert "not compacted" not in caplog.text
            caplog.clear()
            await mount.compaction.compact()
            await mount.collector.drain()
            assert stored_bytes(mount.servers) < before
            assert await mount.contents() == kept
    copies.close()
