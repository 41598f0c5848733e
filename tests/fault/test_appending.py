"""What is appended to a container is a plain value: it can be pickled, and carried out where there
is nothing but the servers.
"""

import os
import pickle
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path

import pytest

from aifs.burst.making import NewObjects, never
from aifs.burst.transfer import Limiter, Mover
from aifs.core import files
from aifs.core.errors import Unavailable
from aifs.data.chunk_codec import ChunkHeader, digest_of
from aifs.data.containers.appending import Appended, Appending, append
from aifs.data.containers.files import ContainerEntry, ContainerFiles
from aifs.data.containers.open_containers import ContainerFails, DamagedContainer
from aifs.data.containers.pieces import FilePiece, FileSource, HashedPiece, StoredPiece
from aifs.layout.interleaved import HEADER_BYTES, Interleaved, Location, container_layout
from aifs.layout.redundancy import PLAIN, Redundancy
from aifs.vfs import Filesystem
from tests.support.maker import make_elsewhere
from tests.support.stores import moved_out, opened, write_file

CHUNK, MIB = 65_536, 1 << 20
DATA = os.urandom(3 * CHUNK) + b"ab" * 30_000 + os.urandom(4321)
KINDS = {"plain": PLAIN, "replicas": Redundancy(2), "coded": Redundancy(1, 2, 1)}
UNDRAINED = {"burst.drain_delay": "1h"}


def layout_of(kind: str, first: int = 0):
    servers = [(first + number) % 3 for number in range(KINDS[kind].least_servers)]
    return container_layout(tuple(servers), KINDS[kind])


def test_it_can_be_pickled() -> None:
    source = FileSource(7, 70, 5000, (0x8000, 9), Interleaved(CHUNK), 3, sparse=True)
    place = Location(1, 71, 4096, 900, 1000, 1, b"d" * 32)
    value = Appending(
        72,
        layout_of("coded"),
        12_288,
        (
            FilePiece(source, 0),
            HashedPiece((0x8000, 9), 7, 0, 5000, b"d" * 32, 3, 70, 2),
            StoredPiece(ChunkHeader(70, 3, 1, 900, 1000, b"d" * 32), place),
        ),
        spare=1,
        containers=((71, ContainerEntry(layout_of("plain"), 5000, 0)),),
    )
    assert pickle.loads(pickle.dumps(value)) == value
    appended = Appended([place], 16_384, 0b10)
    assert pickle.loads(pickle.dumps(appended)) == appended
    fails = pickle.loads(pickle.dumps(ContainerFails(Unavailable("why"))))
    assert isinstance(fails.error, Unavailable) and str(fails.error) == "why"


@asynccontextmanager
async def new_container(fs: Filesystem, kind: str, first: int = 0) -> AsyncIterator[Callable]:
    """Makes the values that append to it."""
    number, layout = await fs.ids.take(), layout_of(kind, first)

    def appending(end: int, *pieces: object, containers: tuple = ()) -> Appending:
        return Appending(number, layout, end, pieces, containers=containers)

    async with fs.io.transitions.making(NewObjects(0, number, layout)):
        yield appending


async def carry_out(fs: Filesystem, where: str, value: Appending) -> Appended:
    if where == "elsewhere":
        (appended,) = await make_elsewhere([value], fs.store.servers, append)
        return appended
    tools = replace(fs.drain.movers.tools, containers=None)  # the metadata does not know them
    appended = await append(value, tools, never)
    assert appended is not None
    return appended


async def chunks_of(fs: Filesystem, appended: Appended, value: Appending) -> list[bytes]:
    """As somebody reads them who has not read before."""

    async def find(container: int) -> ContainerEntry:
        assert container == value.container
        return ContainerEntry(value.layout, appended.end, appended.unread)

    with closing(ContainerFiles(fs.store.servers, find, lambda *_: None)) as files:
        found = [bytes(await files.read_chunk(place)) for place in appended.places]
        files.moved(value.container)
    return found


async def copied(fs: Filesystem, level: int = 0) -> FileSource:
    """A file in the burst tier."""
    ino = await write_file(fs, b"file", DATA)
    copy = (await fs.getattr(ino)).copy
    return FileSource(ino, await fs.ids.take(), len(DATA), copy, Interleaved(CHUNK), level)


@pytest.mark.sweep
@pytest.mark.parametrize("where", ["here", "elsewhere"])
@pytest.mark.parametrize("kind", KINDS)
async def test_chunks_of_all_kinds(directory: Path, kind: str, where: str) -> None:
    async with (
        opened(directory, UNDRAINED, servers=3) as fs,
        new_container(fs, kind) as first,
        new_container(fs, kind, 1) as second,
    ):
        source = await copied(fs, level=3)
        count = source.layout.count(source.size)
        pieces = [FilePiece(source, number) for number in range(count)]
        value = first(0, *pieces)
        appended = await carry_out(fs, where, value)
        parts = [DATA[start : start + CHUNK] for start in range(0, len(DATA), CHUNK)]
        assert await chunks_of(fs, appended, value) == parts
        assert {place.codec for place in appended.places} == {0, 1}

        # What lies behind the end is overwritten, and the end is where it was said to be.
        part = DATA[100:20_000]
        hashed = HashedPiece(source.origin, source.ino, 100, len(part), digest_of(part), 0)
        for _ in range(2):
            value = first(appended.end, hashed)
            more = await carry_out(fs, where, value)
            assert more.places[0].offset == appended.end
            assert await chunks_of(fs, more, value) == [part]

        entry = ContainerEntry(value.layout, more.end)
        headers = [
            ChunkHeader(source.oid, number, place.codec, place.stored, place.raw, place.digest)
            for number, place in enumerate(appended.places)
        ]
        stored = [StoredPiece(*pair) for pair in zip(headers, appended.places, strict=True)]
        value = second(0, *stored, containers=((value.container, entry),))
        moved = await carry_out(fs, where, value)
        assert await chunks_of(fs, moved, value) == parts
        assert [place.stored for place in moved.places] == [
            place.stored for place in appended.places
        ]


@pytest.mark.sweep
@pytest.mark.parametrize("where", ["here", "elsewhere"])
async def test_chunks_whose_bytes_are_in_objects(directory: Path, where: str) -> None:
    data = b"ab" * MIB + os.urandom(MIB) + b"cd" * 1000
    async with opened(directory, UNDRAINED, servers=3) as fs, new_container(fs, "plain") as first:
        ino = await write_file(fs, b"file", data)
        await moved_out(fs, ino)
        origin = await fs.io.capacity.describe(await fs.getattr(ino))
        source = FileSource(ino, await fs.ids.take(), len(data), origin, Interleaved(MIB), 3)
        value = first(0, *(FilePiece(source, number) for number in range(4)))
        appended = await carry_out(fs, where, value)
        assert b"".join(await chunks_of(fs, appended, value)) == data
        assert [place.codec for place in appended.places] == [1, 1, 0, 1]


async def test_what_it_is_not_done_with(directory: Path) -> None:
    async with opened(directory, UNDRAINED) as fs, new_container(fs, "plain") as appending:
        source = await copied(fs)
        tools, piece = fs.drain.movers.tools, FilePiece(source, 0)
        with pytest.raises(DamagedContainer, match="missing"):
            await append(appending(4096, piece), tools, never)
        assert await append(appending(0, piece), tools, lambda: True) is None
        gone = piece._replace(source=source._replace(origin=(source.origin[0], 1 << 50)))
        with pytest.raises(Unavailable, match="is missing"):
            await append(appending(0, gone), tools, never)
        appended = await carry_out(fs, "here", appending(0, piece))
        with pytest.raises(DamagedContainer, match=f"{HEADER_BYTES + CHUNK} of"):
            await append(appending(appended.end + 1, piece), tools, never)
        path = fs.store.servers[0].where((0, appending(0).container))
        assert os.path.getsize(path) == appended.end
        assert await carry_out(fs, "here", appending(100)) == Appended([], 100)
        assert os.path.getsize(path) == 100


@pytest.mark.parametrize("kind", KINDS)
async def test_each_stripe_is_written_when_it_may_be_and_at_the_priority_of_its_mover(
    directory: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    at: list[str] = []
    at_priority = files.at_priority

    def noted(priority: str, *call: object) -> object:
        at.append(priority)
        return at_priority(priority, *call)

    class Asked(Mover):
        async def begin(self, length: int) -> None:
            asked.append(length)
            await super().begin(length)

    async with opened(directory, UNDRAINED, servers=3) as fs, new_container(fs, kind) as first:
        data = os.urandom(9 << 20)
        ino = await write_file(fs, b"large", data)
        copy = (await fs.getattr(ino)).copy
        source = FileSource(ino, await fs.ids.take(), len(data), copy, Interleaved(1 << 20), 0)
        value = first(0, *(FilePiece(source, number) for number in range(9)))
        mover = Asked(fs.store.servers.budget, Limiter(0), "idle")
        tools = replace(fs.drain.movers.tools, mover=mover, containers=None)
        monkeypatch.setattr(files, "at_priority", noted)
        appended = await append(value, tools, never)
        monkeypatch.undo()
        assert appended is not None and len(appended.places) == 9
        assert len(asked) == 3 and max(asked) < 5 << 20
        assert mover.moved_bytes == sum(asked) >= len(data)
        assert at and set(at) == {"idle"}
