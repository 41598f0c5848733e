"""What is read and compared for scrubs, groups and compaction is a plain value: it can be pickled,
and carried out where there is nothing but the servers."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from aifs.burst.making import InChunks
from aifs.burst.pool import Function
from aifs.core.errors import Unavailable
from aifs.data.checks import CheckedPart, digests_of
from aifs.data.chunk_codec import ChunkHeader
from aifs.data.containers.files import ContainerEntry
from aifs.data.containers.scan import Scanned, ScannedChunk, Scanning, scan
from aifs.layout.interleaved import container_layout
from aifs.layout.striped import Striped
from aifs.meta.keys import ROOT_INO
from aifs.meta.moves import SetRecord
from aifs.meta.records import Copy
from aifs.saves.digests import CopyToHash, Hashing, hash_chunks
from aifs.upkeep import scrubbing
from aifs.upkeep.from_copies import CopyRange, Judgement, compare, find_parts, judge_copy
from aifs.upkeep.scrubbing import Inspected, ObjectRange, inspect
from aifs.vfs import Filesystem
from tests.support.maker import make_elsewhere
from tests.support.shared import Segment, save
from tests.support.spoil import flip
from tests.support.stores import drained, opened, write_file
from tests.support.stores import fs as fs

MIB = 1 << 20
DATA = os.urandom(9 * MIB + 4321)
KINDS = {
    "striped": {},
    "replicated": {"layout.replicas": "2"},
    "coded": {"layout.ec": "2+1"},
    "interleaved": {"layout.kind": "interleaved"},
    "interleaved, coded": {"layout.kind": "interleaved", "layout.ec": "2+1"},
}
HERE_AND_ELSEWHERE = pytest.mark.parametrize("where", ["here", "elsewhere"])
EACH_KIND = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.parametrize(
    "value",
    [
        ObjectRange(
            SetRecord(7, 70, Striped(4096, (1, 2, 3), 1, 1), 5000), 0b10, 0, 5000, b"d" * 32
        ),
        ObjectRange(
            SetRecord(0, 70, Striped(4096, (1, 2)), 9999), 0, 50, 90, known=(b"row", [(1, 2)])
        ),
        Inspected(123, 456, [400], True, (b"row", [(1, 2)])),
        CopyRange(Copy(0x8000, 30), 5, [CheckedPart(0, 5, b"d" * 32), CheckedPart(5, 9, None)]),
        *Judgement,
        Hashing({3: CopyToHash(Copy(0x8000, 30), True)}, [(4096, [(3, 0), (3, 8192)])]),
        Scanning(70, ContainerEntry(container_layout((1,)), 5000, 0b1), 64),
        Scanned([ScannedChunk(64, ChunkHeader(7, 1, 0, 90, 90, b"d" * 32))], 218),
    ],
    ids=lambda value: type(value).__name__,
)
def test_it_can_be_pickled(value: Any) -> None:
    assert pickle.loads(pickle.dumps(value)) == value


async def carried_out(fs: Filesystem, where: str, function: Function[Any, Any], value: Any) -> Any:
    if where == "elsewhere":
        [answers] = await make_elsewhere([value], fs.store.servers, function)
        return answers
    return await function(value, fs.drain.movers.tools, lambda: False)


async def object_sets(fs: Filesystem, ino: int) -> list[ObjectRange]:
    """The objects of a file, or the containers that it is in."""
    origin = await fs.io.capacity.describe(await fs.getattr(ino))
    if isinstance(origin, InChunks):
        return [
            ObjectRange(SetRecord(0, number, entry.layout, entry.length), 0, 0, entry.length)
            for number, entry in origin.containers
        ]
    objects = SetRecord(ino, origin.oid, origin.layout, len(DATA))
    return [ObjectRange(objects, origin.unread, 0, len(DATA), origin.digests)]


@EACH_KIND
@HERE_AND_ELSEWHERE
async def test_objects_that_are_right_and_objects_that_are_not(
    directory: Path, kind: str, where: str
) -> None:
    async with opened(directory, KINDS[kind], servers=3) as fs:
        await drained(fs, ino := await write_file(fs, b"file", DATA))
        ranges = await object_sets(fs, ino)
        answers = await carried_out(fs, where, inspect, ranges)
        assert all(answer.is_right for answer in answers)
        for asked, answer in zip(ranges, answers, strict=True):
            layout, size = asked.objects.layout, asked.objects.size
            lengths = [layout.object_length(c, size) for c in range(len(layout.servers))]
            assert sum(lengths) <= answer.read_bytes <= 2 * sum(lengths)
            assert answer.next == size
        _, oid, layout, size = ranges[-1].objects
        column = len(layout.servers) - 1  # parity and replicas, too
        key = (ranges[-1].objects.ino, oid)
        path = fs.store.servers[layout.servers[column]].where(key)
        flip(path, layout.object_length(column, size) // 2)
        *others, hit = await carried_out(fs, where, inspect, ranges)
        assert all(answer.is_right for answer in others)
        assert not hit.is_right and len(hit.wrong) == 1
        flip(path, layout.object_length(column, size) // 2)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["striped", "interleaved, coded"])
async def test_what_is_asked_in_parts_is_what_is_asked_at_once(
    directory: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a container each part has to know what the one before has told."""
    monkeypatch.setattr(scrubbing, "STRIPE", MIB)
    async with opened(directory, KINDS[kind], servers=3) as fs:
        await drained(fs, ino := await write_file(fs, b"file", DATA))
        step = 4 * MIB if kind == "striped" else 2 * MIB
        ranges = await object_sets(fs, ino)
        assert any(whole.end > step for whole in ranges)
        for whole in ranges:
            at, known, read_bytes = 0, whole.known, 0
            while at < whole.end:
                end = min(at + step, whole.end)
                digests = whole.digests[at // MIB * 32 : -(-end // MIB) * 32]
                part = whole._replace(start=at, end=end, digests=digests, known=known)
                [found] = await carried_out(fs, "here", inspect, pickle.loads(pickle.dumps([part])))
                assert found.is_right
                at, known, read_bytes = found.next, found.known, read_bytes + found.read_bytes
            assert at == whole.end
            assert read_bytes >= whole.end


@pytest.mark.sweep
@EACH_KIND
@HERE_AND_ELSEWHERE
async def test_burst_copies(directory: Path, kind: str, where: str) -> None:
    async with opened(directory, KINDS[kind], servers=3) as fs:
        await drained(fs, ino := await write_file(fs, b"file", DATA))
        inode = await fs.getattr(ino)
        parts = [
            part
            for start in range(0, len(DATA), 4 * MIB)
            for part in await fs.store.engine.view(find_parts, inode, start)
        ]
        assert b"".join(part.digest for part in parts) == digests_of(DATA)
        right = CopyRange(inode.copy, len(DATA), parts)
        missing = right._replace(place=inode.copy._replace(id=1 << 40))
        nowhere = right._replace(place=inode.copy._replace(server=0x8007))
        longer = right._replace(size=len(DATA) + 1)
        path = fs.store.servers[inode.copy.server].where((0, inode.copy.id))
        asked = [right, missing, nowhere, longer]
        answers = await carried_out(fs, where, compare, asked)
        others = [Judgement.WRONG, Judgement.UNREADABLE, Judgement.WRONG]
        assert answers == [Judgement.RIGHT, *others]
        flip(path, 5 * MIB)
        answers = await carried_out(fs, where, compare, asked)
        assert answers == [Judgement.WRONG, *others]
        flip(path, 5 * MIB)


async def test_a_copy_is_right_though_its_last_chunk_begins_in_the_mib_looked_up_before(
    directory: Path,
) -> None:
    async with opened(directory, servers=3) as fs:
        segments = [Segment(os.urandom(3 * MIB)), Segment(os.urandom(2 * MIB))]
        [ino] = (await save(fs, ROOT_INO, {b"file": segments})).values()
        assert await fs.stager.stage(ino)
        inode = await fs.getattr(ino)
        judged = await judge_copy(fs.store.engine, fs.drain.movers, inode)
        assert judged is Judgement.RIGHT


@HERE_AND_ELSEWHERE
async def test_chunks_of_groups(fs: Filesystem, where: str) -> None:
    """What is equal is hashed once; a copy that is gone does not spoil it for the others."""
    inos = [await write_file(fs, b"%d" % rank, DATA) for rank in range(3)]
    copies = {
        number: CopyToHash((await fs.getattr(ino)).copy, sparse=False)
        for number, ino in enumerate(inos)
    }
    copies[2] = CopyToHash(copies[2].place._replace(id=1 << 40), sparse=False)
    columns = [(MIB, [(number, MIB) for number in copies]), (4321, [(0, 9 * MIB)])]
    (whole, compared), end = await carried_out(fs, where, hash_chunks, Hashing(copies, columns))
    right = digests_of(DATA[MIB : 2 * MIB])
    assert (whole[:2], compared) == ([right] * 2, MIB)
    assert isinstance(whole[2], Unavailable)
    assert end.digests == [digests_of(DATA[9 * MIB :])]


@pytest.mark.store(KINDS["interleaved"], servers=3)
@HERE_AND_ELSEWHERE
async def test_chunks_of_a_container(fs: Filesystem, where: str) -> None:
    await drained(fs, ino := await write_file(fs, b"file", DATA))
    origin = await fs.io.capacity.describe(await fs.getattr(ino))
    found = set()
    for container, entry in origin.containers:
        scanned = await carried_out(fs, where, scan, Scanning(container, entry, 0))
        assert scanned.offset == entry.length
        found |= {(container, at, header.digest) for at, header in scanned.chunks}
    assert found == {(e.place.container, e.place.offset, e.digest) for e in origin.extents}


@pytest.mark.sweep
@pytest.mark.parametrize("function", [inspect, compare])
async def test_what_is_not_wanted_any_more_ends(fs, function):
    await drained(fs, ino := await write_file(fs, b"file", DATA))
    copy = CopyRange((await fs.getattr(ino)).copy, len(DATA), ())
    asked = await object_sets(fs, ino) if function is inspect else [copy]
    tools = fs.drain.movers.tools
    assert await function(asked, tools, lambda: True) is None
