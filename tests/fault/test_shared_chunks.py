"""Shared chunks: references after any work, damage that several files suffer from, servers that are
lost.
"""

import os
import random
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from aifs.check.findings import Finding
from aifs.check.fsck import check
from aifs.core import faults
from aifs.core.errors import Unavailable
from aifs.core.tasks import first_error
from aifs.data.chunk_codec import digest_of
from aifs.layout.interleaved import HEADER_BYTES
from aifs.layout.redundancy import PLAIN, Redundancy
from aifs.meta import chunks, keys
from aifs.meta import shared as shared_records
from aifs.meta.keys import ROOT_INO
from aifs.vfs import Caller, Filesystem, open_filesystem
from tests.support import modes, shared
from tests.support.shared import Segment

ME = Caller()
LIVES = 8
SETTINGS = modes.WAITING | {
    "layout.compact_above": 0.05,
    "layout.inline_limit": 0,
    "scrub.bandwidth": 0,
}
REDUNDANCIES = {"plain": PLAIN, "replicas": Redundancy(2), "coded": Redundancy(1, 2, 1)}
PROTECTED = [name for name in REDUNDANCIES if name != "plain"]
by_redundancy = pytest.mark.parametrize("redundancy", REDUNDANCIES.values(), ids=REDUNDANCIES)
by_protection = pytest.mark.parametrize(
    "redundancy", [REDUNDANCIES[name] for name in PROTECTED], ids=PROTECTED
)


@pytest.fixture
def source() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="aifs-shared-", dir="/dev/shm") as parent:
        yield Path(parent, "store")


def make(source: Path, settings: dict[str, object] | None = None) -> None:
    modes.make_store(source, SETTINGS | (settings or {}), servers=5)


def use(source: Path, work: Callable[[Filesystem], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        with trio.fail_after(120):
            async with open_filesystem(modes.config_of(source)) as fs:
                return await work(fs)

    return trio.run(run)


def findings(source: Path, deep: bool = True) -> list[Finding]:
    return check(modes.config_of(source), repair=False, deep=deep).findings


# --- references ---


class Work:
    """Random saves and all that ends them. ``contents``: what the files have, by inode number;
    ``names``: where they are."""

    def __init__(self, redundancy: Redundancy, seed: int) -> None:
        self.contents: dict[int, bytes] = {}
        self.names: dict[tuple[int, bytes], int] = {}
        self._directories: dict[int, bytes] = {}
        self._redundancy = redundancy
        self._rng = random.Random(seed)
        self._pool = [self._rng.randbytes(self._rng.randrange(1, 9000)) for _ in range(9)]
        self._steps = self._links = 0

    async def live(self, fs: Filesystem, count: int = 4) -> None:
        await self.compare(fs)
        works = [
            self.save,
            self.save,
            self.save_again,
            self.rewrite,
            self.unlink,
            self.link,
            self.remove,
            self.retain,
            self.compact,
        ]
        for _ in range(count):
            await self._rng.choice(works)(fs)
        if self._rng.random() < 0.5:
            await self.crash(fs)

    async def crash(self, fs: Filesystem) -> None:
        """With a deleted file still open."""
        if self.names:
            place, ino = self._rng.choice(list(self.names.items()))
            await fs.open(ino, os.O_RDONLY)
            await self._unlink(fs, place)
        await fs.sync()
        raise faults.SimulatedCrash("the daemon ends")

    def _segments(self) -> list[Segment]:
        return shared.random_segments(self._rng, self._pool, self._rng.choice([1, 3, 10, 80]))

    async def save(self, fs: Filesystem) -> None:
        self._steps += 1
        directory = (await fs.mkdir(ROOT_INO, b"tmp", 0o755, ME)).ino
        self._directories[directory] = b"step-%d" % self._steps
        files = {b"rank-%d" % rank: self._segments() for rank in range(self._rng.randrange(1, 4))}
        inos = await shared.save(
            fs, directory, files, self._redundancy, level=self._rng.choice([0, 3])
        )
        for name, ino in inos.items():
            self.names[directory, name], self.contents[ino] = ino, shared.bytes_of(files[name])
        await fs.rename(ROOT_INO, b"tmp", ROOT_INO, self._directories[directory], 0, ME)

    async def save_again(self, fs: Filesystem) -> None:
        """Other bytes for files that there are."""
        inos = self._rng.sample(sorted(self.contents), min(2, len(self.contents)))
        files = {ino: self._segments() for ino in inos}
        await shared.store(fs, files, self._redundancy)
        self.contents |= {ino: shared.bytes_of(rows) for ino, rows in files.items()}

    async def rewrite(self, fs: Filesystem) -> None:
        """By way of the burst tier, as programs do; the usual drain then stores it by itself."""
        if not self.contents:
            return
        ino = self._rng.choice(sorted(self.contents))
        data = bytearray(self.contents[ino])
        at, part = self._rng.randrange(len(data)), self._rng.randbytes(3000)
        handle = (await fs.open(ino, os.O_RDWR)).handle
        await fs.write(handle, at, part)
        await fs.release(handle)
        data[at : at + len(part)] = part
        self.contents[ino] = bytes(data)
        fs.drain.request([ino])
        await fs.drain.wait([ino])
        assert await fs.evictor.evict(ino)

    async def unlink(self, fs: Filesystem) -> None:
        if self.names:
            place = self._rng.choice(list(self.names))
            ino = self.names[place]
            await self._unlink(fs, place)
            fs.forget([ino])

    async def _unlink(self, fs: Filesystem, place: tuple[int, bytes]) -> None:
        await fs.unlink(*place)
        self._forget([place])

    def _forget(self, places: list[tuple[int, bytes]]) -> None:
        for place in places:
            ino = self.names.pop(place)
            if ino not in self.names.values():
                del self.contents[ino]

    async def link(self, fs: Filesystem) -> None:
        if self.names:
            (directory, _), ino = self._rng.choice(list(self.names.items()))
            self._links += 1
            other = directory, b"link-%d" % self._links
            await fs.link(ino, *other)
            self.names[other] = ino

    async def remove(self, fs: Filesystem) -> None:
        """``rm -r``."""
        if self._directories:
            directory = self._rng.choice(sorted(self._directories))
            await fs.remove_tree(ROOT_INO, self._directories[directory])
            self._forget_below(directory)

    def _forget_below(self, directory: int) -> None:
        del self._directories[directory]
        self._forget([place for place in self.names if place[0] == directory])

    async def retain(self, fs: Filesystem) -> None:
        await fs.setxattr(ROOT_INO, b"user.aifs.keep", b"last=2")
        await fs.retention.enforce(ROOT_INO)
        await fs.setxattr(ROOT_INO, b"user.aifs.keep", b"")  # nothing goes behind our back
        left = {name for name, _, _ in await fs.readdir(ROOT_INO, 0)}
        gone = [directory for directory, name in self._directories.items() if name not in left]
        for directory in gone:
            self._forget_below(directory)
        assert len(self._directories) <= 2

    async def compact(self, fs: Filesystem) -> None:
        await fs.doomed.empty()
        await fs.collector.drain()
        await fs.compaction.compact()

    async def compare(self, fs: Filesystem) -> None:
        for ino, data in self.contents.items():
            assert await shared.read(fs, ino) == data


def live(source: Path, work: Work) -> None:
    try:
        use(source, work.live)
    except BaseException as error:
        if not isinstance(first_error(error), faults.SimulatedCrash):
            raise


def go_through(source: Path, redundancy: Redundancy, seed: int, lives: int) -> None:
    make(source)
    work = Work(redundancy, seed)
    for _ in range(lives):
        live(source, work)
        assert findings(source, deep=False) == []
    use(source, work.compare)
    assert findings(source) == []


@pytest.mark.sweep
@by_redundancy
def test_references_are_right_after_any_work(source: Path, redundancy: Redundancy) -> None:
    go_through(source, redundancy, 3, LIVES)


@pytest.mark.long
@by_redundancy
@pytest.mark.parametrize("seed", range(30))
def test_references_are_right_after_much_work(
    source: Path, redundancy: Redundancy, seed: int
) -> None:
    go_through(source, redundancy, seed, 20)


def test_nothing_is_left_when_all_files_are_deleted(source: Path) -> None:
    make(source)
    rng = random.Random(8)
    pool = [rng.randbytes(5000) for _ in range(5)]

    async def work(fs: Filesystem) -> None:
        files = {b"file-%d" % number: shared.random_segments(rng, pool, 100) for number in range(5)}
        inos = await shared.save(fs, ROOT_INO, files)
        assert await count(fs, b"h") > 5
        for name, ino in inos.items():
            await fs.unlink(ROOT_INO, name)
            fs.forget([ino])
        await fs.collector.drain()
        assert (await count(fs, b"h"), await count(fs, b"l")) == (0, 0)
        await fs.compaction.compact()

    use(source, work)
    assert findings(source) == []


async def count(fs: Filesystem, kind: bytes) -> int:
    return await fs.store.engine.view(lambda tx: sum(1 for _ in tx.range(*keys.all_of(kind))))


# --- damage ---

SIZE = 60_000


class Pair:
    """Two files that have one chunk in common, and one that has nothing to do with them."""

    def __init__(self, seed: int = 9) -> None:
        rng = random.Random(seed)
        self.common = Segment(rng.randbytes(SIZE))
        self.files = {
            b"first": [self.common, Segment(rng.randbytes(5000), is_shared=False)],
            b"second": [Segment(rng.randbytes(7000)), self.common, Segment(bytes(10)), self.common],
            b"other": [Segment(rng.randbytes(6000))],
        }
        self.inos: dict[bytes, int] = {}

    async def save(self, fs: Filesystem, redundancy: Redundancy) -> None:
        self.inos = await shared.save(fs, ROOT_INO, self.files, redundancy)

    async def compare(self, fs: Filesystem) -> None:
        for name, ino in self.inos.items():
            assert await shared.read(fs, ino) == shared.bytes_of(self.files[name])

    async def objects(self, fs: Filesystem) -> list[Path]:
        """Of the container that the common chunk lies in, by column."""
        found = await fs.store.engine.view(shared_records.find_shared, digest_of(self.common.data))
        record = await fs.store.engine.view(chunks.find_container, found.place.container)
        return [
            Path(fs.store.servers[number].where((0, found.place.container)))
            for number in record.layout.servers
        ]


def spoil(path: Path, data: bytes) -> int:
    """Flip bits of some of these bytes, as far as they are in an object; where."""
    whole = bytearray(path.read_bytes())
    at = whole.find(data)
    assert at >= HEADER_BYTES
    whole[at + 1] ^= 0x10
    path.write_bytes(whole)
    return at


async def scrub(fs: Filesystem) -> dict[str, Any]:
    fs.scrub.start(True)
    await fs.scrub.wait()
    while not fs.rebuild.idle:
        await fs.rebuild.news()
    return fs.scrub.status()


def test_what_a_plain_chunk_has_lost_is_named_for_all_its_users(
    source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(source, {"data.verify": "read"})
    pair = Pair()

    async def work(fs: Filesystem) -> dict[str, Any]:
        await pair.save(fs, PLAIN)
        (path,) = await pair.objects(fs)
        spoil(path, pair.common.data[1000:2000])
        for name in (b"first", b"second"):
            with pytest.raises(Unavailable):
                await shared.read(fs, pair.inos[name])
        assert await shared.read(fs, pair.inos[b"other"]) == shared.bytes_of(pair.files[b"other"])
        return await scrub(fs)

    status = use(source, work)
    wrong = {(*entry["paths"], entry["start"], entry["end"]) for entry in status["wrong"]}
    assert wrong == {
        ("/first", 0, SIZE),
        ("/second", 7000, 7000 + SIZE),
        ("/second", 7010 + SIZE, 7010 + 2 * SIZE),
    }
    assert {(finding.kind, finding.where) for finding in findings(source)} == {
        ("wrong-checksum", "/first"),
        ("wrong-checksum", "/second"),
    }
    caplog.clear()


@by_protection
@pytest.mark.parametrize("by", ["read", "scrub"])
def test_a_protected_chunk_is_repaired_for_all_its_users(
    source: Path, redundancy: Redundancy, by: str, caplog: pytest.LogCaptureFixture
) -> None:
    make(source, {"data.verify": "read"})
    pair = Pair()

    async def work(fs: Filesystem) -> None:
        await pair.save(fs, redundancy)
        spoil((await pair.objects(fs))[0], pair.common.data[1000:2000])
        if by == "read":
            await pair.compare(fs)
        status = await scrub(fs)  # a read may not have met the wrong replica
        assert status["wrong"] == [] and (
            by == "read" or status["repaired"] == status["flaws"] == 1
        )
        await pair.compare(fs)

    use(source, work)
    assert findings(source) == []
    caplog.clear()


@by_protection
def test_shared_chunks_outlive_a_server(
    source: Path, redundancy: Redundancy, caplog: pytest.LogCaptureFixture
) -> None:
    make(source)
    pair = Pair()

    async def lose(fs: Filesystem) -> None:
        await pair.save(fs, redundancy)
        for path in (await pair.objects(fs))[:1]:
            shutil.rmtree(path.parents[2])

    async def work(fs: Filesystem) -> None:
        await pair.compare(fs)
        await scrub(fs)
        await pair.compare(fs)
        for path in await pair.objects(fs):
            assert path.exists()

    use(source, lose)
    use(source, work)
    assert findings(source) == []
    caplog.clear()


@by_redundancy
def test_an_evacuated_server_holds_no_shared_chunks(source: Path, redundancy: Redundancy) -> None:
    make(source)
    pair = Pair()

    async def work(fs: Filesystem) -> None:
        await pair.save(fs, redundancy)
        number = int((await pair.objects(fs))[0].parents[3].name)
        await fs.store.table.change(number, "draining")
        fs.rebuild.look()
        while fs.rebuild.left(number) != (0, 0):
            await fs.rebuild.news()
        assert all(int(path.parents[3].name) != number for path in await pair.objects(fs))
        await pair.compare(fs)

    use(source, work)
    use(source, pair.compare)
    assert findings(source) == []
