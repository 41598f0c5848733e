"""Files that are extent lists, as programs meet them: read anywhere, sought in, changed, staged,
asked about.
"""

import os
import random

import pytest

from aifs.core.errors import NoSuchAddress
from aifs.layout.redundancy import PLAIN, Redundancy
from aifs.layout.striped import Striped
from aifs.meta import chunks, keys, namespace
from aifs.meta.chunks import CHUNKS_PER_RECORD
from aifs.meta.keys import ROOT_INO
from aifs.meta.server_uses import scan_chunk_lists
from aifs.upkeep.from_copies import LISTED
from aifs.vfs import Filesystem
from aifs.vfs.reports import describe
from tests.support import modes, shared
from tests.support.shared import Segment
from tests.support.stores import fs as fs

SETTINGS = modes.WAITING | {
    "layout.inline_limit": 0,
    "scrub.bandwidth": 0,
}
KINDS = {"plain": PLAIN, "replicas": Redundancy(2), "coded": Redundancy(1, 2, 1)}
POOL = [random.Random(number).randbytes(30_000) for number in range(4)]


pytestmark = pytest.mark.store(base=SETTINGS)


def segments(seed: int, count: int = 40) -> list[Segment]:
    return shared.random_segments(random.Random(seed), POOL, count)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "level",
    [
        pytest.param(0, id="as they are"),
        pytest.param(3, marks=pytest.mark.store({"data.verify": "read"}), id="compressed"),
    ],
)
@pytest.mark.parametrize("redundancy", KINDS.values(), ids=KINDS)
async def test_any_range_is_read(fs: Filesystem, redundancy: Redundancy, level: int) -> None:
    files = {b"%d" % number: segments(number) for number in range(3)}
    inos = await shared.save(fs, ROOT_INO, files, redundancy, level)
    rng = random.Random(level)
    for name, some in files.items():
        data = shared.bytes_of(some)
        handle = (await fs.open(inos[name], os.O_RDONLY)).handle
        for _ in range(60):
            offset = rng.randrange(len(data) + 10)
            length = rng.choice([1, 4096, 131_072, len(data)])
            assert bytes(await fs.read(handle, offset, length)) == data[offset : offset + length]
        await fs.release(handle)


async def test_seeking_tells_holes(fs: Filesystem) -> None:
    rows = [Segment(bytes(500_000)), Segment(POOL[0]), Segment(POOL[1])]
    rows += [Segment(bytes(9)), Segment(POOL[0]), Segment(bytes(70_000))]
    ino = (await shared.save(fs, ROOT_INO, {b"file": rows}))[b"file"]
    handle = (await fs.open(ino, os.O_RDONLY)).handle
    found = [
        await fs.lseek(handle, offset, whence)
        for offset, whence in (
            (0, os.SEEK_DATA),
            (0, os.SEEK_HOLE),
            (500_001, os.SEEK_DATA),
            (500_001, os.SEEK_HOLE),
            (560_003, os.SEEK_DATA),
            (560_010, os.SEEK_HOLE),
            (660_000, os.SEEK_HOLE),
        )
    ]
    assert found == [500_000, 0, 500_001, 560_000, 560_009, 590_009, 660_000]
    for offset in (590_009, 660_009):
        with pytest.raises(NoSuchAddress):
            await fs.lseek(handle, offset, os.SEEK_DATA)
    await fs.release(handle)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "in_place",
    [
        pytest.param(False, id="through the burst tier"),
        pytest.param(True, marks=pytest.mark.store(modes.OFF), id="in place"),
    ],
)
async def test_a_file_is_changed_and_others_keep_its_chunks(fs, in_place):
    rows = [*segments(1, 60), Segment(bytes(3 << 20)), *segments(2, 10)]
    inos = await shared.save(fs, ROOT_INO, {b"one": rows, b"two": rows})
    data = bytearray(shared.bytes_of(rows))
    handle = (await fs.open(inos[b"one"], os.O_RDWR)).handle
    for offset in (0, len(data) // 2, len(data) - 5):
        await fs.write(handle, offset, b"change")
        data[offset : offset + 6] = b"change"
    await fs.release(handle)
    if not in_place:
        fs.drain.request([inos[b"one"]])
        await fs.drain.wait([inos[b"one"]])
        assert await fs.evictor.evict(inos[b"one"])
    assert await shared.read(fs, inos[b"one"]) == bytes(data)
    assert await shared.read(fs, inos[b"two"]) == shared.bytes_of(rows)
    inode = await fs.store.engine.view(namespace.get_inode, inos[b"one"])
    assert isinstance(inode.layout, Striped)
    assert inode.blocks * 512 < len(data) - (1 << 20), "holes stay holes"


@pytest.mark.sweep
async def test_a_staged_copy_is_compared_by_extents(fs: Filesystem) -> None:
    big = Segment(random.Random(1).randbytes(LISTED - 1))
    rows = [Segment(b"x"), big, Segment(bytes(3 * LISTED)), *segments(3), big]
    files = {b"good": rows, b"bad": rows, b"zeros": rows}
    inos = await shared.save(fs, ROOT_INO, files)
    for ino in inos.values():
        assert await fs.stager.stage(ino)
    flipped = {b"bad": len(shared.bytes_of(rows)) - 9, b"zeros": 2 * LISTED + 5}
    for name, offset in flipped.items():
        copy = (await fs.getattr(inos[name])).copy
        with open(fs.store.servers[copy.server].where((0, copy.id)), "r+b") as file:
            file.seek(offset)
            file.write(b"\xa5")
    fs.scrub.start(True)
    await fs.scrub.wait()
    assert fs.scrub.status()["dropped_copies"] == 2
    for name, ino in inos.items():
        assert ((await fs.getattr(ino)).copy is None) == (name in flipped)
        assert await shared.read(fs, ino) == shared.bytes_of(rows)


async def test_where_it_lies_is_told(fs: Filesystem) -> None:
    rows = [Segment(POOL[0]), Segment(POOL[1], is_shared=False), Segment(bytes(10))]
    await shared.save(fs, ROOT_INO, {b"first": [Segment(POOL[0])]}, Redundancy(2))
    ino = (await shared.save(fs, ROOT_INO, {b"file": rows}))[b"file"]
    info = await describe(fs.store, await fs.getattr(ino), None)
    assert sum(part["bytes"] for part in info["parts"]) > len(POOL[0]) + len(POOL[1])
    view = fs.store.engine.view
    table = await view(lambda tx: [keys.number(key) for key, _ in tx.range(*keys.all_of(b"t"))])
    inode = await fs.getattr(ino)
    users = {c: (await view(scan_chunk_lists, *keys.all_of(b"l"), {c}))[0] for c in table}
    assert sum(inode.oid in oids for oids in users.values()) == 2  # the shared, its own chunk


async def test_a_long_list_goes_piece_by_piece(fs: Filesystem) -> None:
    count = chunks.DROPPED_AT_ONCE * CHUNKS_PER_RECORD
    rows = [Segment(POOL[0][number % 7 : number % 7 + 50]) for number in range(2 * count)]
    await shared.save(fs, ROOT_INO, {b"file": rows, b"other": rows[:9]})
    engine = fs.store.engine
    ino = (await fs.lookup(ROOT_INO, b"file")).ino
    await fs.unlink(ROOT_INO, b"file")
    fs.forget([ino])
    await fs.collector.drain()
    other = (await fs.lookup(ROOT_INO, b"other")).ino
    assert await shared.read(fs, other) == shared.bytes_of(rows[:9])
    left = await engine.view(lambda tx: [key for key, _ in tx.range(*keys.all_of(b"l"))])
    assert len(left) == 1 and not await engine.view(lambda tx: list(tx.range(*keys.all_of(b"y"))))
