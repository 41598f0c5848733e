"""Epochs of datasets that are read: which files are in the burst tier before their readers come to
them (reads)."""

import errno
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import trio
import trio.testing

from aifs.core.errors import AccessDenied, Busy, FsError, Invalid, NoAttribute, NotSupported
from aifs.datasets.ahead import FileNeed, files_needed, parse, shares_read
from aifs.datasets.index import INDEX_NAME, Index, IndexedFile, RowBlock, Version, encode, index_of
from aifs.datasets.sequence import Epoch
from aifs.reads import epochs
from aifs.vfs import Caller, Filesystem, SetAttr
from tests.support import modes, stores
from tests.support.cluster import cluster_of
from tests.support.stores import OWNER, ask, call, drained, moved_out, put, write_file
from tests.support.stores import fs as fs

ROOT, OTHER = 1, Caller(uid=2000, gid=2000)
SIZE = 64 << 10
SHAPE = modes.WAITING | modes.STRIPED | {"burst.reserve": "0", "burst.blocks": "always"}
SMALL = {"burst.capacity": f"{100 * SIZE}"}
"""A burst tier of 100 files, each a block: 60 are below the low mark, so 45 can be kept."""

opened = partial(stores.opened, base=SHAPE)
pytestmark = pytest.mark.store(base=SHAPE)


class Dataset:
    """Files of blocks of ten rows each, on the data servers alone."""

    def __init__(self, fs: Filesystem, ino: int, inos: Sequence[int], index: Index) -> None:
        self.fs, self.ino, self.inos, self.index = fs, ino, inos, index

    async def order(self, text: str, caller: Caller = OWNER) -> None:
        await call(self.fs, self.ino, "order", caller, order=text)

    async def there(self) -> set[int]:
        """Numbers of the files that are in blocks."""
        blocks = self.fs.tier.blocks
        return {
            number
            for number, ino in enumerate(self.inos)
            if blocks.bytes_in((await self.fs.getattr(ino)).oid, 0, SIZE) == SIZE
        }

    async def until(self, files: set[int]) -> None:
        """Wait until these are there, and no others."""
        while await self.there() != files:
            await trio.sleep(0.01)

    async def until_more(self, files: set[int]) -> None:
        """Wait until these are there, whatever others are."""
        while not files <= await self.there():
            await trio.sleep(0.01)

    async def told(self, caller: Caller = OWNER) -> dict:
        told = await self.fs.getxattr(self.ino, b"user.aifs.order", caller)
        (epoch,) = json.loads(told)["epochs"]
        return epoch

    async def until_told(self, condition: Callable[[dict], bool]) -> dict:
        while not condition(told := await self.told()):
            await trio.sleep(0.01)
        return told

    def needs(self, text: str, window: int = 0) -> list[FileNeed]:
        """All files of a window that whoever says this needs, in this order."""
        said = parse(text)
        shares = shares_read(said.world, said.readers, said.order.shares)
        return files_needed(Epoch(self.index, said.order), window, shares, 1 << 40)


async def dataset(fs: Filesystem, files: int, blocks: int = 1) -> Dataset:
    ino = (await fs.mkdir(ROOT, b"set", 0o755, OWNER)).ino
    inos: list[int] = []
    for first in range(0, files, 20):  # as many as the burst tier takes
        some = [
            await write_file(fs, b"%03d" % number, b"%09d\n" % number * (SIZE // 10), ino, OWNER)
            for number in range(first, min(first + 20, files))
        ]
        await moved_out(fs, *some)
        await fs.collector.drain()
        inos += some
    found = []
    for number, file in enumerate(inos):
        inode = await fs.getattr(file)
        version = Version(inode.size, inode.mtime_ns)
        part = inode.size // blocks
        rows = [RowBlock(part * block, part, 10) for block in range(blocks)]
        found.append(IndexedFile(b"%03d" % number, version, rows))
    index = index_of("text", found)
    await write_file(fs, INDEX_NAME.encode(), encode(index), ino, OWNER)
    await fs.tier.look()  # it is known how much room there is
    return Dataset(fs, ino, inos, index)


@pytest.mark.sweep
@pytest.mark.store(SMALL)
async def test_files_are_there_in_the_order_in_which_the_epoch_reads_them(fs: Filesystem) -> None:
    data = await dataset(fs, 40)
    text = f"seed=7,shares=4,ahead={10 * SIZE}"
    needs = data.needs(text)
    await data.order(text)
    await data.until({need.file for need in needs[:10]})
    told = await data.until_told(lambda told: told["kept_files"] == 10)
    assert told["kept_bytes"] <= told["limit_bytes"] == 10 * SIZE
    assert not told["waiting"] and not told["error"]
    assert (told["done_rows"], told["rows"]) == (0, 400)
    for done in (100, 300):  # of 400 rows
        await data.order(f"{text},done={done}")
        row = done // 4
        following = [need for need in needs if need.first >= row][:6]
        await data.until_more({need.file for need in following})
    status = (await ask(fs, ROOT, "status"))["epochs"]
    assert status["epochs"] == 1 and 6 <= status["kept_files"] <= 10


@pytest.mark.sweep
@pytest.mark.store(SMALL)
async def test_what_is_used_stays_as_long_as_there_is_room_and_goes_first(fs: Filesystem) -> None:
    old = [await write_file(fs, b"old%d" % n, bytes(SIZE)) for n in range(20)]
    await drained(fs, *old)
    data = await dataset(fs, 100)
    text = f"seed=7,shares=4,window={25 * SIZE},ahead={26 * SIZE}"
    needs = [data.needs(text, window) for window in range(4)]
    order = [[need.file for need in window] for window in needs]
    assert sum(map(len, order)) == 100
    for window in range(3):
        await data.order(f"{text},done={4 * needs[window][0].first}")
        await data.until_more(set(order[window]))
        await data.until_told(lambda told: told["kept_files"] >= 25)
    there = await data.there()
    # There is room for 40: what is used up went first.
    assert 10 < len(there & {*order[0], *order[1]}) < 20
    assert [(await fs.getattr(ino)).copy is not None for ino in old] == [True] * 20
    assert fs.tier.used(next(iter(fs.tier.devices))) <= 75 * SIZE


@pytest.mark.sweep
@pytest.mark.store(SMALL)
async def test_writers_are_never_refused_room_for_it(fs: Filesystem) -> None:
    data = await dataset(fs, 60)
    await data.order(f"seed=7,shares=4,ahead={40 * SIZE}")
    await data.until_told(lambda told: told["kept_files"] == 40)
    new = []
    for number in range(78):  # up to the high mark
        new.append(await write_file(fs, b"new%d" % number, bytes(SIZE)))
        assert (await fs.getattr(new[-1])).in_burst
        while fs.tier.needs_eviction():
            await trio.sleep(0.001)
        await fs.collector.drain()
    while await data.there():  # blocks give way
        await fs.tier.look()
    await data.order(f"seed=7,shares=4,ahead={40 * SIZE},done=4")
    await trio.testing.wait_all_tasks_blocked(0.05)
    assert not await data.there(), "nothing is brought while writers need the room"


@pytest.mark.store(SMALL)
async def test_a_window_that_cannot_be_kept_is_not_read_ahead(fs: Filesystem) -> None:
    """Each file is needed from the beginning of the epoch to its end."""
    data = await dataset(fs, 8, blocks=8)
    await data.order(f"seed=7,ahead={4 * SIZE}")
    await data.until_told(lambda told: told["rows"] == 640)
    await trio.testing.wait_all_tasks_blocked(0.1)
    assert await data.there() == set()
    await data.order(f"seed=8,ahead={8 * SIZE}")
    await data.until(set(range(8)))


@pytest.mark.sweep
async def test_each_reader_has_its_own_files_brought(fs: Filesystem) -> None:
    data = await dataset(fs, 40)
    text = "seed=7,world=4,shares=4,rank="
    for ranks in ("1", "3"):
        await data.order(text + ranks)
    files = {need.file for ranks in "13" for need in data.needs(text + ranks)}
    await data.until(files)
    assert 18 <= len(files) <= 20
    assert (await data.told())["readers"] == [1, 3]


@pytest.mark.store(SMALL)
async def test_the_slowest_reader_counts(fs: Filesystem) -> None:
    data = await dataset(fs, 40)
    text = f"seed=7,world=2,shares=2,ahead={10 * SIZE}"
    for rank, done in ((0, 400), (1, 0)):
        await data.order(f"{text},rank={rank},done={done}")
    told = await data.until_told(lambda told: told["kept_files"] == 10)
    assert told["done_rows"] == 0


async def test_readers_that_say_nothing_have_ended(fs, monkeypatch):
    data = await dataset(fs, 10)
    await data.order("seed=7")
    await data.until(set(range(10)))
    monkeypatch.setattr(epochs, "EXPIRES_S", 0.01)
    await data.order("seed=8")
    while fs.epochs.status()["epochs"]:
        await trio.sleep(0.01)
    with pytest.raises(NoAttribute):
        await data.told()
    assert await data.there() == set(range(10)), "copies stay what they are"


async def test_readers_say_that_they_have_ended(fs: Filesystem) -> None:
    data = await dataset(fs, 4)
    await data.order("seed=7,world=2")
    await data.order("seed=7,world=2,rank=0,done=end")
    assert (await data.told())["readers"] == [1]
    await put(fs, data.ino, "order", "")
    with pytest.raises(NoAttribute):
        await data.told()
    await data.order("seed=7,world=2,rank=0,done=end")  # once more than it was begun


@pytest.mark.store(SMALL)
async def test_two_epochs_of_one_dataset_share_the_room(fs: Filesystem) -> None:
    data = await dataset(fs, 40)
    texts = [f"seed={seed},ahead={60 * SIZE},window={5 * SIZE}" for seed in (7, 8)]
    for text in texts:
        await data.order(text)
    wanted = {need.file for text in texts for need in data.needs(text)}
    await data.until_more(wanted)
    limits = [told["limit_bytes"] for told in (await ask(fs, data.ino, "order"))["epochs"]]
    assert all(21 * SIZE < limit <= 23 * SIZE for limit in limits)


@pytest.mark.store(SMALL)
async def test_what_another_epoch_still_needs_is_not_used_up(fs: Filesystem) -> None:
    data = await dataset(fs, 20)
    for seed in (7, 8):
        await data.order(f"seed={seed},shares=4")
    await data.until(set(range(20)))
    while [it["kept_files"] for it in (await ask(fs, data.ino, "order"))["epochs"]] != [20, 20]:
        await trio.sleep(0.01)
    used_up: list[int] = []

    def want(source: int, offset: int, length: int, is_wanted: bool) -> None:
        used_up.extend([] if is_wanted else [source])

    with patch.object(fs.tier.blocks, "want", want):
        await data.order("seed=7,shares=4,done=200")
        while fs.epochs.status()["kept_files"] != 20:
            await trio.sleep(0.01)
        assert not used_up
        await data.order("seed=8,shares=4,done=200")
        while len(used_up) < 20:
            await trio.sleep(0.01)


async def test_readers_that_begin_at_once_are_those_of_one_epoch(fs: Filesystem) -> None:
    data = await dataset(fs, 4)
    async with trio.open_nursery() as nursery:
        for rank in range(8):
            nursery.start_soon(data.order, f"seed=7,world=8,rank={rank}")
    assert (await data.told())["readers"] == [*range(8)]


@pytest.mark.store(SMALL)
async def test_a_reader_that_begins_anew_gets_its_files_again(fs: Filesystem) -> None:
    data = await dataset(fs, 40)
    text = f"seed=7,shares=4,ahead={10 * SIZE}"
    await data.order(f"{text},done=400")
    await data.until_told(lambda told: told["rows"] == 400)
    assert await data.there() == set()
    await data.order(text)
    await data.until({need.file for need in data.needs(text)[:10]})


async def test_a_file_that_has_changed_is_named_and_left_alone(fs: Filesystem) -> None:
    data = await dataset(fs, 10)
    await stores.rewrite(fs, data.inos[3], bytes(SIZE))
    await moved_out(fs, data.inos[3])
    await data.order("seed=7")
    await data.until(set(range(10)) - {3})
    told = await data.until_told(lambda told: bool(told["error"]))
    assert told["error"] == "003 has changed since the dataset was indexed"


@pytest.mark.store(SMALL)
async def test_a_file_that_changes_during_the_epoch_is_left_alone(fs: Filesystem) -> None:
    data = await dataset(fs, 40)
    text = f"seed=7,shares=4,ahead={10 * SIZE}"
    await data.order(text)
    await data.until_told(lambda told: told["kept_files"] == 10)
    needs = data.needs(text)
    late = needs[-1].file
    await stores.rewrite(fs, data.inos[late], bytes(SIZE))
    await moved_out(fs, data.inos[late])
    await data.order(f"{text},done=360")
    told = await data.until_told(lambda told: bool(told["error"]))
    assert told["error"] == f"{late:03} has changed since the dataset was indexed"
    assert late not in await data.there()


# --- who may what ---------------------------------------------------------------------------------


async def test_who_may_only_read_the_dataset_may_say_that_he_does(fs: Filesystem) -> None:
    data = await dataset(fs, 10)
    await fs.setattr(data.inos[4], SetAttr(mode=0o600), OWNER)
    await data.order("seed=7", OTHER)
    await data.until(set(range(10)) - {4})
    assert "b'004'" in (await data.told(OTHER))["error"]
    assert "error" not in await data.told(OWNER), "it is another one's"
    await fs.setattr(data.ino, SetAttr(mode=0o700), OWNER)
    with pytest.raises(AccessDenied):
        await data.order("seed=8", OTHER)


async def test_nobody_follows_many_epochs(fs: Filesystem) -> None:
    data = await dataset(fs, 2)
    for seed in range(4):
        await data.order(f"seed={seed}", OTHER)
    with pytest.raises(Busy):
        await data.order("seed=5", OTHER)
    await data.order("seed=3,done=10", OTHER)
    await data.order("seed=5", OWNER)
    for seed in range(11):
        await data.order(f"seed={seed}", Caller())
    with pytest.raises(Busy):
        await data.order("seed=99", Caller())


async def test_what_is_refused(fs: Filesystem) -> None:
    top = (await fs.mkdir(ROOT, b"empty", 0o755, OWNER)).ino
    with pytest.raises(Invalid, match="aifs dataset index"):
        await put(fs, top, "order", "seed=7")
    with pytest.raises(Invalid, match="seed"):
        await put(fs, top, "order", "world=8")
    file = await write_file(fs, b"file", b"x", caller=OWNER)
    with pytest.raises(FsError) as refused:
        await call(fs, file, "order", order="seed=7")
    assert refused.value.errno in (errno.ENOTDIR, errno.ENODATA)


@pytest.mark.store(modes.OFF)
async def test_without_a_burst_tier_there_is_nothing_to_do(fs: Filesystem) -> None:
    top = (await fs.mkdir(ROOT, b"set", 0o755, OWNER)).ino
    with pytest.raises(NotSupported):
        await put(fs, top, "order", "seed=7")


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"AIFSidx1 torn", "no index"),
        (bytes(100), "no index"),
        (
            encode(
                index_of("text", [IndexedFile(b"../secret", Version(9, 9), [RowBlock(0, 9, 1)])])
            ),
            "../secret",
        ),
    ],
)
async def test_an_index_that_lies_does_no_harm(fs: Filesystem, content: bytes, error: str) -> None:
    await write_file(fs, b"secret", b"x" * 9)
    top = (await fs.mkdir(ROOT, b"set", 0o755, OWNER)).ino
    await write_file(fs, INDEX_NAME.encode(), content, top, OWNER)
    await put(fs, top, "order", "seed=7")
    while not (told := (await ask(fs, top, "order"))["epochs"][0]["error"]):
        await trio.sleep(0.01)
    assert error in told


async def test_a_large_index_is_not_followed(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epochs, "INDEX_MAX", 100)
    async with opened(directory) as fs:
        data = await dataset(fs, 10)
        await data.order("seed=7")
        assert "100 bytes" in (await data.until_told(lambda told: bool(told["error"])))["error"]


async def test_files_that_are_kept_out_of_the_burst_tier_stay_out(fs: Filesystem) -> None:
    data = await dataset(fs, 4)
    await put(fs, data.inos[2], "tier", "capacity")
    await data.order("seed=7")
    await data.until({0, 1, 3})


# --- what dies, and several hosts -----------------------------------------------------------------


@pytest.mark.sweep
async def test_each_host_fetches_its_own_share(scratch: Path) -> None:
    """And no more than that: all files are fetched once."""
    async with cluster_of(scratch / "s", SHAPE, ("a", "b")) as cluster:
        async with cluster.mounted("a") as a, cluster.mounted("b") as b:
            data = await dataset(a, 40)
            hosts = [Dataset(fs, data.ino, data.inos, data.index) for fs in (a, b)]
            before = [_read_bytes(fs) for fs in (a, b)]
            texts = [f"seed=7,world=2,shares=8,rank={rank}" for rank in range(2)]
            for host, text in zip(hosts, texts):
                await host.order(text)
            mine = [{need.file for need in data.needs(text)} for text in texts]
            for host, files in zip(hosts, mine):
                await host.until(files)
                await host.until_told(lambda told, files=files: told["kept_files"] == len(files))
            fetched = [_read_bytes(fs) - old for fs, old in zip((a, b), before)]
            sizes = [sum(data.index.sizes[file] for file in files) for files in mine]
            assert not mine[0] & mine[1] and len(mine[0] | mine[1]) >= 32
            assert sum(fetched) <= 1.01 * sum(sizes), (fetched, sizes)


def _read_bytes(fs: Filesystem) -> int:
    return sum(server.read_bytes for server in fs.store.servers.capacity())
