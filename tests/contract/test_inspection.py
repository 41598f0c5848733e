"""Judging object sets column by column: every flip is found, named and told right, and nothing else
is.
"""

import os
import random
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest

from aifs.core.budget import Budget
from aifs.data.checks import HASHED, FileCheck, digests_of
from aifs.data.inspecting.inspection import Inspection
from aifs.data.inspecting.window import LONG, MISSING, SHORT, UNREADABLE, WRONG, Flaw, Loss
from aifs.data.objects.columns import Columns
from aifs.data.objects.object_set import ObjectSet
from aifs.data.reading.buffers import BudgetedBuffers
from aifs.data.servers import Servers
from aifs.layout.striped import Striped
from tests.support.data_servers import data_servers, failing
from tests.support.spoil import flip

KIB, MIB = 1 << 10, 1 << 20
INO, OID = 0x99, 0x40404

PLAIN = [Striped(MIB, (0, 1, 2)), Striped(64 * KIB, (3, 1)), Striped(4 * KIB, (2,))]
PROTECTED = [
    Striped(256 * KIB, (0, 1, 2, 3), replicas=2),
    Striped(MIB, (0, 1, 2), replicas=3),
    Striped(512 * KIB, (4, 2, 0), parity=1),
    Striped(256 * KIB, (0, 1, 2, 3, 4), parity=2),
    Striped(MIB, (5, 4, 3, 2, 1, 0), parity=2),
]
SIZE = 5 * MIB + 12_345


@pytest.fixture
def servers(scratch: Path) -> Iterator[Servers]:
    with data_servers(scratch, 6) as servers:
        yield servers


def name(layout: Striped) -> str:
    kind = f"r{layout.replicas}" if layout.replicas > 1 else f"+{layout.parity}"
    return f"{layout.unit >> 10}KiBx{layout.width}{kind}"


async def write(servers: Servers, layout: Striped, size: int = SIZE) -> bytes:
    data = random.Random(size).randbytes(size)
    kind = ObjectSet if layout.is_protected else ObjectSet
    objects = kind(servers, layout, INO, OID, new=True)
    step = 4 * MIB // layout.row * layout.row
    for start in range(0, size, step):
        await objects.write(start, data[start : start + step])
    await objects.settle(size)
    await objects.sync()
    objects.close()
    return data


def path_of(servers: Servers, layout: Striped, column: int) -> Path:
    return Path(servers[layout.servers[column]].where((INO, OID)))


async def inspect(
    servers: Servers, layout: Striped, digests: bytes, size: int = SIZE, unread: int = 0
) -> tuple[list[Flaw], list[Loss]]:
    columns = Columns(servers, layout, INO, OID)
    inspection = Inspection(
        servers, BudgetedBuffers(Budget(64 * MIB)), columns, size, unread=unread
    )
    flaws, losses, at = await inspection.excess(), [], 0
    try:
        while at < size:
            verdict = await inspection.judge(at, FileCheck(size, 0, digests))
            assert verdict.next > at
            at = verdict.next
            flaws += verdict.flaws
            losses += verdict.losses
    finally:
        inspection.close()
    return flaws, losses


def covers(flaws: list[Flaw], column: int, offset: int) -> bool:
    return any(f.column == column and f.offset <= offset < f.offset + f.length for f in flaws)


@pytest.mark.parametrize("layout", PLAIN + PROTECTED, ids=name)
@pytest.mark.parametrize("size", [1, 5000, MIB, SIZE])
async def test_nothing_is_found_where_nothing_is_wrong(servers, layout, size):
    data = await write(servers, layout, size)
    assert await inspect(servers, layout, digests_of(data), size) == ([], [])
    assert await inspect(servers, layout, b"", size) == ([], [])


@pytest.mark.sweep
@pytest.mark.parametrize("layout", PROTECTED, ids=name)
async def test_every_flip_is_found_and_told_right(servers: Servers, layout: Striped) -> None:
    """In any column and any place, as many at a time as can be told."""
    data = await write(servers, layout)
    before = {c: path_of(servers, layout, c).read_bytes() for c in range(len(layout.servers))}
    chance = random.Random(7)
    for _ in range(6):
        planted = set()
        for column in chance.sample(sorted(before), chance.randint(1, layout.tolerates)):
            if layout.survives(sum(1 << other for other, _ in planted) | 1 << column):
                planted |= {(column, chance.randrange(len(before[column]))) for _ in range(3)}
        for column, offset in planted:
            flip(path_of(servers, layout, column), offset)
        flaws, losses = await inspect(servers, layout, digests_of(data))
        assert losses == []
        assert all(flaw.kind == WRONG for flaw in flaws)
        assert all(covers(flaws, *flip) for flip in planted)
        blocks = {(column, offset // 4096) for column, offset in planted}
        assert sum(flaw.length for flaw in flaws) <= 4096 * len(blocks)
        for flaw in flaws:
            assert flaw.right == before[flaw.column][flaw.offset : flaw.offset + flaw.length]
        for column, offset in planted:
            flip(path_of(servers, layout, column), offset)


@pytest.mark.sweep
@pytest.mark.parametrize("layout", PROTECTED, ids=name)
async def test_objects_that_are_missing_short_or_long(servers: Servers, layout: Striped) -> None:
    data = await write(servers, layout)
    for column in (0, len(layout.servers) - 1):
        path = path_of(servers, layout, column)
        kept, length = path.read_bytes(), layout.object_length(column, SIZE)
        for change, kind in ((None, MISSING), (kept[: length // 3], SHORT), (kept + b"x", LONG)):
            if change is None:
                path.unlink()
            else:
                path.write_bytes(change)
            flaws, losses = await inspect(servers, layout, digests_of(data))
            assert losses == []
            assert {(flaw.column, flaw.kind) for flaw in flaws} <= {(column, kind), (column, SHORT)}
            assert (column, kind) in {(flaw.column, flaw.kind) for flaw in flaws}
            path.write_bytes(kept)


@pytest.mark.parametrize("layout", PROTECTED, ids=name)
async def test_what_cannot_be_read_is_told_by_others(servers: Servers, layout: Striped) -> None:
    data = await write(servers, layout)
    before = path_of(servers, layout, 1).read_bytes()
    with failing("read_into", str(path_of(servers, layout, 1))):
        flaws, losses = await inspect(servers, layout, digests_of(data))
    assert losses == []
    assert {flaw.kind for flaw in flaws if flaw.length} == {UNREADABLE}
    told = {flaw.offset: flaw.right for flaw in flaws}
    assert b"".join(told[offset] for offset in sorted(told)) == before


@pytest.mark.parametrize("layout", PROTECTED, ids=name)
async def test_columns_that_are_known_to_be_lost_are_not_told_about(servers, layout):
    data = await write(servers, layout)
    for unread in combinations(range(len(layout.servers)), layout.tolerates):
        kept = {column: path_of(servers, layout, column).read_bytes() for column in unread}
        for column in unread:
            path_of(servers, layout, column).write_bytes(b"stale" * 1000)
        mask = sum(1 << column for column in unread)
        assert await inspect(servers, layout, digests_of(data), unread=mask) == ([], [])
        for column in unread:
            path_of(servers, layout, column).write_bytes(kept[column])


@pytest.mark.parametrize("layout", PLAIN + PROTECTED, ids=name)
async def test_what_nobody_can_tell_is_lost_and_named(servers: Servers, layout: Striped) -> None:
    data = await write(servers, layout)
    columns = range(layout.tolerates + 1) if layout.parity else layout.copies(0)
    offset = 3 * 4096 + 5
    for column in columns:
        flip(path_of(servers, layout, column), offset)
    flaws, losses = await inspect(servers, layout, digests_of(data))
    [extent] = [
        e
        for e in layout.extents(0, SIZE)
        if e.column == 0 and e.object_offset <= offset < e.object_offset + e.length
    ]
    bad = extent.file_offset + offset - extent.object_offset
    assert any(loss.start <= bad < loss.end and 0 in loss.columns for loss in losses)
    assert all(loss.certain for loss in losses)
    assert sum(loss.end - loss.start for loss in losses) <= len(columns) * HASHED
    assert not flaws


async def test_without_checksums_two_replicas_that_differ_are_a_loss_that_is_not_certain(servers):
    layout = Striped(MIB, (0, 1), replicas=2)
    await write(servers, layout)
    flip(path_of(servers, layout, 1), 2 * MIB + 7)
    flaws, losses = await inspect(servers, layout, b"")
    assert not flaws
    assert [loss.certain for loss in losses] == [False]
    assert losses[0].start <= 2 * MIB + 7 < losses[0].end
    os.unlink(path_of(servers, layout, 1))
    flaws, losses = await inspect(servers, layout, b"")
    assert not losses
    assert {flaw.kind for flaw in flaws} == {MISSING, SHORT} or {flaw.kind for flaw in flaws} == {
        MISSING
    }
