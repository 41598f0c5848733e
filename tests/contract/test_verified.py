"""Reads that are compared with checksums: right bytes, each MiB checked once, and no wrong byte for
anybody.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from aifs.core.errors import Unavailable
from aifs.data.checks import DIGEST_BYTES, DIGESTS_AT_ONCE, digests_of, suspect_sets
from aifs.data.objects.object_set import ObjectSet, Reading
from aifs.data.servers import Servers
from aifs.layout.striped import Striped
from aifs.meta import keys
from tests.support.data_servers import data_servers, hooked

KIB, MIB = 1 << 10, 1 << 20
INO, OID = 0x71, 0x50505
SIZE = 5 * MIB + 4321

PLAIN = [Striped(MIB, (0, 1)), Striped(64 * KIB, (2, 0, 1))]
PROTECTED = [
    Striped(256 * KIB, (0, 1, 2, 3), replicas=2),
    Striped(256 * KIB, (3, 2, 1), parity=1),
    Striped(MIB, (0, 1, 2, 3, 4), parity=2),
]


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    with data_servers(tmp_path, 5) as servers:
        yield servers


def name(layout: Striped) -> str:
    return f"{layout.unit >> 10}KiBx{layout.width}r{layout.replicas}+{layout.parity}"


class File:
    """A file that has been drained; ``damage``: what was reported."""

    def __init__(self, servers: Servers, layout: Striped, size: int = SIZE) -> None:
        self.servers, self.layout = servers, layout
        self.data = random.Random(5).randbytes(size)
        self.digests = digests_of(self.data)
        self.damage: list[tuple[int, int, int]] = []

    async def write(self) -> None:
        objects = ObjectSet(self.servers, self.layout, INO, OID, new=True)
        step = 4 * MIB // self.layout.row * self.layout.row
        for start in range(0, len(self.data), step):
            await objects.write(start, self.data[start : start + step])
        await objects.settle(len(self.data))
        await objects.sync()
        objects.close()

    def open(self, lost: int = 0) -> ObjectSet:
        async def load(number: int) -> tuple[int, bytes]:
            first = number - number % DIGESTS_AT_ONCE
            return first, self.digests[
                first * DIGEST_BYTES : (first + DIGESTS_AT_ONCE) * DIGEST_BYTES
            ]

        def on_damage(oid: int, ino: int, column: int) -> None:
            self.damage.append((oid, ino, column))

        reading = Reading(lost, on_damage, load)
        return ObjectSet(self.servers, self.layout, INO, OID, reading=reading)

    def path(self, column: int) -> Path:
        return Path(self.servers[self.layout.servers[column]].where((INO, OID)))

    def flip(self, column: int, offset: int) -> None:
        with self.path(column).open("r+b") as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 1]))


def test_records_of_checksums_are_as_long_as_they_are_read() -> None:
    assert (DIGESTS_AT_ONCE, DIGEST_BYTES) == (keys.DIGESTS_PER_RECORD, keys.DIGEST_BYTES)


@pytest.mark.parametrize("layout", PLAIN + PROTECTED, ids=name)
async def test_reads_are_those_of_the_file(servers: Servers, layout: Striped) -> None:
    file, chance = File(servers, layout), random.Random(1)
    await file.write()
    objects = file.open()
    for start in range(0, SIZE, 300_000):  # sequential
        length = min(300_000, SIZE - start)
        assert (
            bytes(await objects.read(start, length, SIZE, True))
            == file.data[start : start + length]
        )
    for _ in range(30):
        start = chance.randrange(SIZE)
        length = chance.randint(1, min(2 * MIB, SIZE - start))
        assert (
            bytes(await objects.read(start, length, SIZE, True))
            == file.data[start : start + length]
        )
    buffer = memoryview(bytearray(SIZE))
    await objects.read_into(0, buffer, SIZE)
    assert bytes(buffer) == file.data
    assert await objects.backing(SIZE) is None
    await servers.cache.settle()
    objects.close()
    assert file.damage == []


async def test_each_mib_is_read_and_checked_once_while_it_is_cached(servers: Servers) -> None:
    file = File(servers, Striped(MIB, (0, 1)))
    reads: list[str] = []
    await file.write()
    objects = file.open()
    with hooked(lambda op, path: reads.append(path) if op == "read_into" else None):
        for start in range(3 * MIB, 4 * MIB, 4096):
            assert (
                bytes(await objects.read(start, 4096, SIZE, True))
                == file.data[start : start + 4096]
            )
        await servers.cache.settle()
    objects.close()
    assert len(reads) <= 6  # the last may be read ahead; none is read twice


@pytest.mark.parametrize("layout", PROTECTED, ids=name)
async def test_wrong_bytes_are_told_by_others_and_reported(servers, layout):
    file = File(servers, layout)
    await file.write()
    for column in range(layout.width):
        file.flip(column, 77)
        objects = file.open()
        for start in range(0, SIZE, MIB):
            length = min(MIB, SIZE - start)
            assert (
                bytes(await objects.read(start, length, SIZE, True))
                == file.data[start : start + length]
            )
        await servers.cache.settle()
        objects.forget()
        objects.close()
        file.flip(column, 77)
        assert {found[2] for found in file.damage} <= {column}
        if layout.parity:  # of replicas one that is right may have been chosen
            assert set(file.damage) == {(OID, INO, column)}
        file.damage.clear()


async def test_two_wrong_columns_of_one_mib_are_found_out(servers: Servers) -> None:
    layout = Striped(64 * KIB, (0, 1, 2, 3, 4), parity=2)
    file = File(servers, layout)
    await file.write()
    file.flip(0, 5)
    file.flip(2, 5)
    objects = file.open()
    assert bytes(await objects.read(10, 1000, SIZE, True)) == file.data[10:1010]
    await servers.cache.settle()
    objects.close()
    assert sorted(file.damage) == [(OID, INO, 0), (OID, INO, 2)]


async def test_a_wrong_parity_beside_a_lost_column_is_found_out(servers: Servers) -> None:
    layout = Striped(64 * KIB, (0, 1, 2, 3, 4), parity=2)
    file = File(servers, layout)
    await file.write()
    file.path(1).unlink()
    file.flip(3, 5)
    objects = file.open(lost=0b00010)
    assert bytes(await objects.read(0, MIB, SIZE, True)) == file.data[:MIB]
    await servers.cache.settle()
    objects.close()
    assert set(file.damage) <= {(OID, INO, 3)}


@pytest.mark.parametrize("layout", PLAIN, ids=name)
async def test_wrong_bytes_that_nobody_can_tell_are_an_error_that_names_them(servers, layout):
    file = File(servers, layout)
    await file.write()
    file.flip(1, 2 * layout.unit + 9 if layout.unit < MIB else 9)
    objects = file.open()
    wrong = 1 if layout.unit == MIB else 0
    good = (1 - wrong) * MIB
    assert bytes(await objects.read(good, 5000, SIZE, True)) == file.data[good : good + 5000]
    for _ in range(2):  # it does not get into the cache
        with pytest.raises(
            Unavailable,
            match=f"inode {INO}: bytes {wrong * MIB} to {(wrong + 1) * MIB - 1}, on data server",
        ):
            await objects.read(wrong * MIB + 100, 10, SIZE, True)
    await servers.cache.settle()
    objects.close()


async def test_files_without_checksums_and_files_being_changed_are_read_as_they_are(servers):
    file = File(servers, Striped(MIB, (0, 1)))
    await file.write()
    objects = file.open()
    assert bytes(await objects.read(0, 10, SIZE, True)) == file.data[:10]
    file.digests = b""  # as the transaction does that comes before the change
    await objects.write(0, b"changed")
    assert bytes(await objects.read(0, 10, SIZE, False)) == b"changed" + file.data[7:10]
    await objects.settle(SIZE)
    assert bytes(await objects.read(0, 10, SIZE, True)) == b"changed" + file.data[7:10]
    await servers.cache.settle()
    objects.close()


def test_suspects_are_those_that_the_others_can_do_without() -> None:
    mirror = Striped(4096, (0, 1, 2, 3), replicas=2)
    assert list(suspect_sets(mirror, [0])) == [0, 0b0001, 0b0100]
    assert list(suspect_sets(mirror, [0], unread=0b0100)) == [0b0100]
    coded = Striped(4096, (0, 1, 2, 3), parity=2)
    sets = list(suspect_sets(coded, [1]))
    assert sets[:5] == [0, 0b0001, 0b0010, 0b0100, 0b1000]
    assert len(sets) == 1 + 4 + 6
    assert list(suspect_sets(coded, [1], unread=0b0001)) == [1, 0b11, 0b101, 0b1001]
    assert list(suspect_sets(Striped(4096, (0, 1)), [0, 1])) == [0]
    assert len(list(suspect_sets(Striped(4096, tuple(range(32)), replicas=2), range(16)))) == 256
