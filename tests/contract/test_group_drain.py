"""Draining members of a group: equal bytes are stored once, whatever happens meanwhile, and every
file keeps its own.
"""

import errno
import os
import random
from collections.abc import Sequence
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio
import trio.testing

from aifs.core import faults
from aifs.core.errors import NoSpace, Unavailable
from aifs.files import containers, transitions
from aifs.files.types import ROOT, SetAttr
from aifs.layout.hint import Policy
from aifs.layout.interleaved import Interleaved, Location, redundancy_of
from aifs.layout.redundancy import Redundancy
from aifs.meta import chunks, keys, shared
from aifs.meta.chunks import CHUNKS_PER_RECORD
from aifs.meta.keys import ROOT_INO
from aifs.saves import digests, storing
from aifs.saves.group_drain import DrainOutcome, GroupDrain, GroupReport, Prepared
from aifs.saves.storing import Storing
from aifs.vfs.filesystem import Filesystem
from tests.support import modes, stores
from tests.support.data_servers import failing, hooked
from tests.support.kernel import Kernel
from tests.support.points import once
from tests.support.stores import fs as fs
from tests.support.stores import read_file, rewrite, set_policy

KIB = 1 << 10
CHUNK = 64 * KIB
WAITING = modes.WAITING
KINDS = {
    "plain": {},
    "replicas": modes.REPLICAS,
    "coded": modes.CODED,
    "compressed": {"layout.compress": "zstd:1"},
}

mounted = partial(stores.opened, base=WAITING)
pytestmark = pytest.mark.store(base=WAITING)


def group_drain(fs: Filesystem) -> GroupDrain:
    return GroupDrain(fs.services, fs.drain.drainer)


async def write_file(fs: Filesystem, name: bytes, data: bytes, policy: Policy | None = None) -> int:
    opened, inode = await fs.create(ROOT_INO, name, 0o600, os.O_RDWR, ROOT)
    if policy is not None:
        await set_policy(fs, inode.ino, policy)
    await fs.write(opened.handle, 0, data)
    await fs.release(opened.handle)
    return inode.ino


async def write_files(fs: Filesystem, data: Sequence[bytes]) -> dict[int, bytes]:
    """One for each rank; what they hold by inode number."""
    return {await write_file(fs, b"%d" % rank, one): one for rank, one in enumerate(data)}


async def remove(fs: Filesystem, name: bytes, ino: int) -> None:
    await fs.unlink(ROOT_INO, name)
    fs.forget([ino])
    await fs.collector.drain()


async def store(
    fs: Filesystem, drain: GroupDrain, inos: Sequence[int], chunk: int = CHUNK
) -> tuple[list[Prepared], GroupReport]:
    report = GroupReport()
    members = [Prepared(ino) for ino in inos]
    for member in members:
        await drain.prepare(member, chunk, report)
        assert member.outcome is None
    await drain.store(members, chunk, report)
    return members, report


def outcomes(members: Sequence[Prepared]) -> list[object]:
    return [member.outcome for member in members]


async def check_contents(fs: Filesystem, contents: dict[int, bytes]) -> None:
    """From the capacity tier alone."""
    for ino, data in contents.items():
        await fs.evictor.evict(ino)
        inode = await fs.getattr(ino)
        assert inode.copy is None and inode.size == len(data)
        assert await read_file(fs, ino) == data


async def shared_chunks(fs: Filesystem) -> dict[bytes, shared.Shared]:
    def read(tx):
        return {
            (digest := keys.shared_digest(key)): shared.decode_shared(digest, value)
            for key, value in tx.range(*keys.all_of(b"h"))
        }

    return await fs.store.engine.view(read)


rng = random.Random(5)
EQUAL = rng.randbytes(5 * CHUNK + 100)


def ranks(count: int = 4) -> list[bytes]:
    """Equal parts, a part of each one's own, zeros, and what is equal inside one."""
    made = []
    for rank in range(count):
        own = random.Random(rank).randbytes(CHUNK)
        made.append(EQUAL[: 4 * CHUNK] + own + own + bytes(3 * CHUNK) + EQUAL[4 * CHUNK :])
    return made


@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_equal_is_stored_once(directory, kind):
    async with mounted(directory, KINDS[kind]) as fs:
        drain, data = group_drain(fs), ranks()
        contents = await write_files(fs, data)
        members, report = await store(fs, drain, list(contents))
        assert outcomes(members) == [DrainOutcome.DRAINED] * 4
        assert report.bytes == sum(map(len, data))
        assert report.zero_bytes == 4 * 3 * CHUNK
        assert report.distinct_bytes == len(EQUAL) + 4 * CHUNK and report.found_bytes == 0
        assert report.duplicate_bytes == 3 * len(EQUAL) + 4 * CHUNK
        overhead = (len(EQUAL) // CHUNK + 1 + 4 + 4) * 2000
        assert report.distinct_bytes < report.stored_bytes < report.distinct_bytes + overhead
        assert len(await shared_chunks(fs)) == len(EQUAL) // CHUNK + 1 + 4
        for ino in contents:
            inode = await fs.getattr(ino)
            assert inode.layout == Interleaved(CHUNK)
        await check_contents(fs, contents)
    async with mounted(directory) as fs:
        assert str(fs.recovered) == "nothing to recover"
        await check_contents(fs, contents)
        for number, ino in enumerate(contents):
            await remove(fs, b"%d" % number, ino)
            await check_contents(fs, dict(list(contents.items())[number + 1 :]))
        assert not await shared_chunks(fs)


async def test_what_the_store_has_is_not_stored_again(fs: Filesystem) -> None:
    drain, data = group_drain(fs), ranks(3)
    contents = await write_files(fs, data)
    inos = list(contents)
    await store(fs, drain, inos[:2])
    before = await shared_chunks(fs)
    members, report = await store(fs, drain, inos[2:])
    assert outcomes(members) == [DrainOutcome.DRAINED]
    assert report.found_bytes == len(EQUAL) and report.distinct_bytes == CHUNK
    after = await shared_chunks(fs)
    assert len(after) == len(before) + 1
    assert all(after[digest].place == known.place for digest, known in before.items())
    await check_contents(fs, contents)


async def test_long_lists_are_on_record_before_the_flip(directory, monkeypatch):
    """Also where the flip has to wait for another round, so that the first list is dropped."""
    for module in (transitions, containers):
        monkeypatch.setattr(module, "LISTED_AT_ONCE", CHUNKS_PER_RECORD)
    async with mounted(directory) as fs:
        drain, pool = group_drain(fs), rng.randbytes(256 * KIB)
        data = [pool[: (40 + 30 * rank) * 4 * KIB] * 3 for rank in range(2)]
        contents = await write_files(fs, data)
        inos, chunk = list(contents), 4 * KIB
        members, report = [Prepared(ino) for ino in inos], GroupReport()
        for member in members:
            await drain.prepare(member, chunk, report)
        once("vfs.containers.listed", lambda: fs.io.table.open[inos[0]].cancel_lease())
        await drain.store(members, chunk, report)
        assert outcomes(members) == [DrainOutcome.CHANGED, DrainOutcome.DRAINED]
        members, report = await store(fs, drain, inos[:1], chunk)
        assert outcomes(members) == [DrainOutcome.DRAINED]
        await check_contents(fs, contents)


# --- what others do meanwhile ---------------------------------------------------------------------


async def test_who_opens_a_member_for_writing_has_it_stored_without_it(fs: Filesystem) -> None:
    """The others lose nothing, also where their chunks were to come from the one that has
    changed."""
    drain, data = group_drain(fs), ranks(3)
    contents = await write_files(fs, data)
    inos = list(contents)
    told = []
    members = [Prepared(ino, told.append) for ino in inos]
    report = GroupReport()
    for member in members:
        await drain.prepare(member, CHUNK, report)
    once("data.append.synced", lambda: fs.io.table.open[inos[0]].cancel_lease())
    await drain.store(members, CHUNK, report)
    assert (
        outcomes(members) == [DrainOutcome.CHANGED, DrainOutcome.DRAINED, DrainOutcome.DRAINED]
        and told == members[:1]
    )
    await check_contents(fs, dict(list(contents.items())[1:]))
    assert (await fs.getattr(inos[0])).in_burst
    await rewrite(fs, inos[0], data[1])
    members, report = await store(fs, drain, inos[:1])
    assert outcomes(members) == [DrainOutcome.DRAINED] and report.distinct_bytes == 0
    await check_contents(fs, contents | {inos[0]: data[1]})


async def test_one_that_is_cut_while_it_is_read_does_not_spoil_it_for_the_others(fs):
    drain, data = group_drain(fs), ranks(3)
    contents = await write_files(fs, data)
    inos = list(contents)
    members, report = [Prepared(ino) for ino in inos], GroupReport()
    for member in members:
        await drain.prepare(member, CHUNK, report)
    append = fs.containers.append_pieces

    @asynccontextmanager
    async def cut_first(*args):
        fs.containers.append_pieces = append
        copy = members[0].copy
        fs.io.table.open[inos[0]].cancel_lease()
        os.truncate(fs.store.servers[copy.server].where((0, copy.id)), 10)
        async with append(*args) as appended:
            yield appended

    fs.containers.append_pieces = cut_first
    await drain.store(members, CHUNK, report)
    assert outcomes(members) == [DrainOutcome.CHANGED, DrainOutcome.DRAINED, DrainOutcome.DRAINED]
    await rewrite(fs, inos[0], data[0])
    members, _ = await store(fs, drain, inos[:1])
    assert outcomes(members) == [DrainOutcome.DRAINED]
    await check_contents(fs, contents)


async def test_hashing_waits_for_writers_unless_it_is_waited_for(directory):
    """On a machine with so few processors that there is none to spare."""
    async with mounted(directory) as fs, trio.open_nursery() as nursery:
        drain, hurry = group_drain(fs), [False]
        drain._hasher._lanes = 2
        ino = await write_file(fs, b"a", EQUAL)
        writer, _ = await fs.create(ROOT_INO, b"b", 0o600, os.O_RDWR, ROOT)
        member, report, done = Prepared(ino), GroupReport(), trio.Event()
        member.hurry = lambda: hurry[0]

        async def prepare():
            await drain.prepare(member, CHUNK, report)
            done.set()

        nursery.start_soon(prepare)
        await trio.testing.wait_all_tasks_blocked()
        assert not done.is_set() and not drain._hasher.hashed_bytes
        hurry[0] = True
        drain.hurry()
        await done.wait()
        assert member.outcome is None and not report.hashed_bytes
        await drain.store([member], CHUNK, report)
        assert member.outcome is DrainOutcome.DRAINED and report.hashed_bytes == len(EQUAL)
        await fs.release(writer.handle)


async def test_what_is_equal_in_members_is_hashed_once(fs: Filesystem) -> None:
    drain = group_drain(fs)
    whole = random.Random(1).randbytes(6 * CHUNK)
    parts = [
        whole,
        whole[: 3 * CHUNK] + bytes(CHUNK) + whole[4 * CHUNK :],
        whole[CHUNK:],
        whole[:-1] + b"x",
        whole,
    ]
    contents = await write_files(fs, parts)
    members, report = await store(fs, drain, list(contents))
    assert outcomes(members) == [DrainOutcome.DRAINED] * len(parts)
    # The first, the zeros, all that is shifted, and a last chunk.
    assert report.hashed_bytes == (6 + 1 + 5 + 1) * CHUNK
    assert report.hashed_bytes + report.compared_bytes == sum(map(len, parts))
    await check_contents(fs, contents)


async def test_one_that_changes_while_others_are_compared_with_it_does_not_spoil_it_for_them(
    directory, monkeypatch
):
    monkeypatch.setattr(digests, "_PART_MAX", 16 * KIB)
    monkeypatch.setattr(digests, "_NOTHING", memoryview(bytearray(16 * KIB)))
    async with mounted(directory) as fs:
        drain = group_drain(fs)
        data = random.Random(1).randbytes(4 * CHUNK)
        token = trio.lowlevel.current_trio_token()
        inos = [await write_file(fs, b"%d" % rank, data) for rank in range(3)]
        members, read, changed = [Prepared(ino) for ino in inos], digests.HashSource.read, []
        for member in members:
            await drain.prepare(member, CHUNK, GroupReport())

        def read_changing(source, offset, part):
            if source.key == (0, members[0].copy.id) and offset == CHUNK + 32 * KIB:
                trio.from_thread.run_sync(fs.io.table.open[inos[0]].cancel_lease, trio_token=token)
                with open(source.device.where(source.key), "r+b") as file:
                    file.seek(CHUNK)
                    file.write(bytes(CHUNK))
                changed.append(offset)
            read(source, offset, part)

        with monkeypatch.context() as patch:
            patch.setattr(digests.HashSource, "read", read_changing)
            await drain.store(members, CHUNK, GroupReport())
        assert changed and outcomes(members) == [
            DrainOutcome.CHANGED,
            DrainOutcome.DRAINED,
            DrainOutcome.DRAINED,
        ]
        await check_contents(fs, dict.fromkeys(inos[1:], data))
        members, _ = await store(fs, drain, inos[:1])
        assert outcomes(members) == [DrainOutcome.DRAINED]
        await check_contents(fs, {inos[0]: data[:CHUNK] + bytes(CHUNK) + data[2 * CHUNK :]})


async def test_one_that_cannot_be_read_fails_alone(fs: Filesystem, monkeypatch) -> None:
    drain, data = group_drain(fs), random.Random(1).randbytes(4 * CHUNK)
    inos = [await write_file(fs, b"%d" % rank, data) for rank in range(3)]
    members, read = [Prepared(ino) for ino in inos], digests.HashSource.read
    for member in members:
        await drain.prepare(member, CHUNK, GroupReport())

    def read_failing(source, offset, part):
        if source.key == (0, members[0].copy.id) and offset >= CHUNK:
            raise Unavailable("not now")
        read(source, offset, part)

    with monkeypatch.context() as patch:
        patch.setattr(digests.HashSource, "read", read_failing)
        await drain.store(members, CHUNK, GroupReport())
    assert (
        isinstance(members[0].outcome, Unavailable)
        and outcomes(members[1:]) == [DrainOutcome.DRAINED] * 2
    )
    members, _ = await store(fs, drain, inos[:1])
    assert outcomes(members) == [DrainOutcome.DRAINED]
    await check_contents(fs, dict.fromkeys(inos, data))


async def test_a_member_may_be_released_while_it_is_being_prepared(directory):
    async with mounted(directory) as fs, trio.open_nursery() as nursery:
        drain = group_drain(fs)
        ino = await write_file(fs, b"a", EQUAL)
        member, hash_ = Prepared(ino), drain._hasher.hash

        async def hash_after_all(*args):
            nursery.start_soon(drain.release, member)
            await trio.testing.wait_all_tasks_blocked()
            return await hash_(*args)

        drain._hasher.hash = hash_after_all
        await drain.prepare(member, CHUNK, GroupReport())
        assert member.outcome is DrainOutcome.CHANGED and member.file is None
        await trio.testing.wait_all_tasks_blocked()
        assert not fs.io.table.open
        drain._hasher.hash = hash_
        members, _ = await store(fs, drain, [ino])
        assert outcomes(members) == [DrainOutcome.DRAINED]


async def test_a_member_that_changes_before_it_is_stored_is_left_out(fs: Filesystem) -> None:
    drain, data = group_drain(fs), ranks(2)
    inos = list(await write_files(fs, data))
    told = []
    members = [Prepared(ino, told.append) for ino in inos]
    report = GroupReport()
    for member in members:
        await drain.prepare(member, CHUNK, report)
    await rewrite(fs, inos[0], b"x" * CHUNK)
    assert told == members[:1] and members[0].cancelled
    await drain.store(members, CHUNK, report)
    assert outcomes(members) == [DrainOutcome.CHANGED, DrainOutcome.DRAINED]
    await check_contents(fs, {inos[1]: data[1]})
    assert await read_file(fs, inos[0]) == b"x" * CHUNK


async def test_a_member_that_is_deleted_takes_nothing_with_it(fs: Filesystem) -> None:
    drain, data = group_drain(fs), ranks(2)
    inos = list(await write_files(fs, data))
    members, report = [Prepared(ino) for ino in inos], GroupReport()
    for member in members:
        await drain.prepare(member, CHUNK, report)
    await fs.unlink(ROOT_INO, b"0")
    await drain.store(members, CHUNK, report)
    assert outcomes(members) == [DrainOutcome.GONE, DrainOutcome.DRAINED]
    await check_contents(fs, {inos[1]: data[1]})
    fs.forget(inos[:1])


async def test_chunks_that_go_while_they_are_leaned_on_are_stored_again(fs, monkeypatch):
    """Found, then deleted with the last file that had them, before the transaction."""
    drain, data = group_drain(fs), ranks(3)
    contents = await write_files(fs, data)
    first, *inos = contents
    await store(fs, drain, [first])
    flip = Storing._flip

    async def after_a_deletion(*args):
        monkeypatch.undo()
        await remove(fs, b"0", first)
        assert not await shared_chunks(fs)
        await flip(*args)

    monkeypatch.setattr(Storing, "_flip", after_a_deletion)
    members, _ = await store(fs, drain, inos)
    assert outcomes(members) == [DrainOutcome.DRAINED] * 2
    await check_contents(fs, dict(list(contents.items())[1:]))


async def test_what_is_not_prepared_is_said_so_and_let_go(fs: Filesystem) -> None:
    drain = group_drain(fs)
    opened, inode = await fs.create(ROOT_INO, b"open", 0o600, os.O_RDWR, ROOT)
    await fs.write(opened.handle, 0, EQUAL)
    member, other = Prepared(inode.ino), Prepared(inode.ino + 1000)
    await drain.prepare(member, CHUNK, GroupReport())
    await drain.prepare(other, CHUNK, GroupReport())
    assert outcomes([member, other]) == [DrainOutcome.OPEN, DrainOutcome.GONE]
    await fs.release(opened.handle)
    member, twice = Prepared(inode.ino), Prepared(inode.ino)
    await drain.prepare(member, CHUNK, GroupReport())
    await drain.prepare(twice, CHUNK, GroupReport())
    assert outcomes([member, twice]) == [None, DrainOutcome.BUSY]
    await drain.release(member)
    await drain.release(member)
    assert member.outcome is DrainOutcome.CHANGED and not fs.io.table.open
    big = await write_file(fs, b"sparse", b"x" * CHUNK)
    await fs.setattr(big, SetAttr(size=1 << 50), ROOT)
    member = Prepared(big)
    await drain.prepare(member, CHUNK, GroupReport())
    assert member.outcome is DrainOutcome.UNFIT and not fs.io.table.open
    await remove(fs, b"sparse", big)


async def test_a_cancelled_preparation_leaves_the_file_as_it_was(fs: Filesystem) -> None:
    drain = group_drain(fs)
    ino = await write_file(fs, b"a", EQUAL)
    member = Prepared(ino)
    with trio.CancelScope() as scope:
        scope.cancel()
        await drain.prepare(member, CHUNK, GroupReport())
    assert member.file is None and not fs.io.table.open
    members, _ = await store(fs, drain, [ino])
    assert outcomes(members) == [DrainOutcome.DRAINED]
    await check_contents(fs, {ino: EQUAL})


async def test_a_cancelled_store_leaves_what_is_not_flipped_as_it_was(fs: Filesystem) -> None:
    drain, data = group_drain(fs), ranks(2)
    contents = await write_files(fs, data)
    members, report = [Prepared(ino) for ino in contents], GroupReport()
    for member in members:
        await drain.prepare(member, CHUNK, report)
    append = fs.containers.append_pieces

    @asynccontextmanager
    async def append_and_cancel(*args):
        async with append(*args) as appended:
            scope.cancel()
            await trio.lowlevel.checkpoint()
            yield appended

    with trio.CancelScope() as scope:
        fs.containers.append_pieces = append_and_cancel
        await drain.store(members, CHUNK, report)
    fs.containers.append_pieces = append
    assert scope.cancelled_caught and outcomes(members) == [DrainOutcome.CHANGED] * 2
    assert not fs.io.table.open and not await shared_chunks(fs)
    members, _ = await store(fs, drain, list(contents))
    assert outcomes(members) == [DrainOutcome.DRAINED] * 2
    await check_contents(fs, contents)


async def test_a_tiny_member_goes_to_its_inode(fs: Filesystem) -> None:
    drain = group_drain(fs)
    writer, inode = await fs.create(ROOT_INO, b"tiny", 0o600, os.O_RDWR, ROOT)
    # Else it would have gone there when it was closed.
    reader = await fs.open(inode.ino, os.O_RDONLY)
    await fs.write(writer.handle, 0, b"tiny")
    await fs.release(writer.handle)
    members, report = await store(fs, drain, [inode.ino, await write_file(fs, b"other", EQUAL)])
    assert outcomes(members) == [DrainOutcome.DRAINED] * 2 and report.inline_bytes == 4
    await fs.release(reader.handle)
    await check_contents(fs, {inode.ino: b"tiny", members[1].ino: EQUAL})
    assert (await fs.getattr(inode.ino)).layout is None


async def test_files_are_flipped_some_at_a_time(directory, monkeypatch):
    monkeypatch.setattr(storing, "_BATCH", 2 * CHUNK)
    async with mounted(directory) as fs:
        drain, data = group_drain(fs), ranks(4)
        contents = await write_files(fs, data)
        flipped = []
        faults.arm("vfs.group.flipped", lambda: flipped.append(1))
        members, report = await store(fs, drain, list(contents))
        assert outcomes(members) == [DrainOutcome.DRAINED] * 4 and len(flipped) == 3
        assert report.distinct_bytes == len(EQUAL) + 4 * CHUNK
        await check_contents(fs, contents)


# --- servers that fail ----------------------------------------------------------------------------


async def test_a_full_server_leaves_the_files_in_the_burst_tier(fs: Filesystem) -> None:
    drain, data = group_drain(fs), ranks(2)
    contents = await write_files(fs, data)
    with hooked(), failing("write_at", fs.store.servers[1].address, errno.ENOSPC):
        members, report = await store(fs, drain, list(contents))
    assert all(isinstance(outcome, NoSpace) for outcome in outcomes(members))
    assert report.bytes == report.distinct_bytes == report.chunks == 0, "the next try counts them"
    assert not await shared_chunks(fs) and not fs.io.table.open
    for ino in contents:
        assert (await fs.getattr(ino)).in_burst
    members, _ = await store(fs, drain, list(contents))
    assert outcomes(members) == [DrainOutcome.DRAINED] * 2
    await check_contents(fs, contents)


async def test_what_was_appended_beside_a_full_server_counts_as_dead(fs: Filesystem) -> None:
    contents = await write_files(fs, ranks(2))
    with hooked(), failing("write_at", fs.store.servers[1].address, errno.ENOSPC):
        await store(fs, group_drain(fs), list(contents))
    known = {
        number: await fs.store.engine.view(chunks.find_container, number)
        for number in await stores.numbers(fs, b"t")
    }
    lengths = {number: record.length for number, record in known.items() if record.length}
    assert lengths and not any(record.live for record in known.values())
    for number, length in lengths.items():
        path = fs.store.servers[known[number].layout.servers[0]].where((0, number))
        assert os.stat(path).st_size == length
    members, _ = await store(fs, group_drain(fs), list(contents))
    assert outcomes(members) == [DrainOutcome.DRAINED] * 2


async def spoil_one(fs: Filesystem) -> Location:
    """Where a shared chunk lies that has other bytes now."""
    known = await shared_chunks(fs)
    spoilt = next(known.place for known in known.values() if known.place.raw == CHUNK)
    record = await fs.store.engine.view(chunks.find_container, spoilt.container)
    server = fs.store.servers[record.layout.servers[0]]
    fd = os.open(server.where((0, spoilt.container)), os.O_WRONLY)
    os.pwrite(fd, b"spoilt", spoilt.offset + 1000)
    os.close(fd)
    return spoilt


async def test_a_bad_chunk_is_replaced_for_all_before_more_files_lean_on_it(fs: Filesystem) -> None:
    drain, data = group_drain(fs), ranks(3)
    contents = await write_files(fs, data)
    inos = list(contents)
    await store(fs, drain, inos[:1])
    spoilt = await spoil_one(fs)
    members, report = await store(fs, drain, inos[1:2])
    assert outcomes(members) == [DrainOutcome.DRAINED]
    assert report.replaced_chunks == 1 and report.verified_chunks == len(EQUAL) // CHUNK + 1
    after = await shared_chunks(fs)
    assert after[spoilt.digest].place != spoilt
    members, report = await store(fs, drain, inos[2:])
    # The third of them leans on what the second has seen.
    assert report.verified_chunks == report.replaced_chunks == 0
    await check_contents(fs, contents)


async def test_a_lent_file_is_read_with_what_has_replaced_a_bad_chunk(fs: Filesystem) -> None:
    drain, data = group_drain(fs), ranks(2)
    first, second = await write_files(fs, data)
    await store(fs, drain, [first])
    await fs.containers.retire(lambda container, layout: True)
    await fs.evictor.evict(first)
    async with Kernel(fs) as kernel:
        for is_spoilt in (False, True):
            if is_spoilt:
                await spoil_one(fs)
                _, report = await store(fs, drain, [second])
                assert report.replaced_chunks == 1
            reader = await kernel.open(first, os.O_RDONLY)
            for start in range(0, len(data[0]), CHUNK):
                expected = data[0][start : start + CHUNK]
                assert bytes(await kernel.read(reader, start, CHUNK)) == expected
            await kernel.release(reader)


# --- policies -------------------------------------------------------------------------------------


async def test_a_chunk_that_is_protected_too_little_is_stored_anew_for_all(fs: Filesystem) -> None:
    drain, data = group_drain(fs), ranks(2)
    plain = await write_file(fs, b"plain", data[0])
    await store(fs, drain, [plain])
    safe = await write_file(fs, b"safe", data[1], Policy(replicas=2))
    members, report = await store(fs, drain, [safe])
    assert outcomes(members) == [DrainOutcome.DRAINED]
    assert report.replaced_chunks == len(EQUAL) // CHUNK + 1
    for digest, known in (await shared_chunks(fs)).items():
        layout = (await fs.store.engine.view(chunks.find_container, known.place.container)).layout
        expected = 1 if known.references == 2 and digest not in members[0].cut.digests else 2
        assert redundancy_of(layout) in (Redundancy(expected), Redundancy(2))
    leaned = [k for k in (await shared_chunks(fs)).values() if k.references == 2]
    assert len(leaned) >= len(EQUAL) // CHUNK + 1
    await check_contents(fs, {plain: data[0], safe: data[1]})


async def test_members_of_one_group_may_ask_for_different_things(fs: Filesystem) -> None:
    drain, data = group_drain(fs), ranks(3)
    policies = [Policy(), Policy(replicas=2), Policy(compress=1)]
    contents = {await write_file(fs, b"%d" % n, data[n], policies[n]): data[n] for n in range(3)}
    members, report = await store(fs, drain, list(contents))
    assert outcomes(members) == [DrainOutcome.DRAINED] * 3
    assert report.replaced_chunks == 0  # the safest come first
    await check_contents(fs, contents)


async def test_a_file_that_must_lie_on_some_servers_does_not_lean_on_others(fs: Filesystem) -> None:
    drain, data = group_drain(fs), ranks(2)
    anywhere = await write_file(fs, b"anywhere", data[0])
    await store(fs, drain, [anywhere])
    here = await write_file(fs, b"here", data[1], Policy(servers=(2,)))
    members, report = await store(fs, drain, [here])
    assert outcomes(members) == [DrainOutcome.DRAINED] and set(report.servers) == {2}
    await check_contents(fs, {anywhere: data[0], here: data[1]})


# --- plans ----------------------------------------------------------------------------------------


async def test_steps_of_one_shape_are_planned_one_after_the_other(fs: Filesystem) -> None:
    drain = group_drain(fs)
    for step in range(3):
        contents = {}
        for rank in range(2):
            data = random.Random(step).randbytes(4 * CHUNK) + random.Random(
                100 + 10 * step + rank
            ).randbytes(CHUNK)
            contents[await write_file(fs, b"%d-%d" % (step, rank), data)] = data
        _, report = await store(fs, drain, list(contents))
        assert report.planned_s >= report.lower_bound_s > 0
        await check_contents(fs, contents)


# --- protection -----------------------------------------------------------------------------------


async def test_a_protected_file_never_comes_to_lean_on_an_unprotected_chunk(fs, monkeypatch):
    """What cannot be read just now is not replaced by what is protected less."""
    drain, data = group_drain(fs), random.Random(1).randbytes(3 * CHUNK)
    safe = await write_file(fs, b"safe", data, Policy(replicas=2))
    assert outcomes((await store(fs, drain, [safe]))[0]) == [DrainOutcome.DRAINED]
    before = await shared_chunks(fs)

    async def unreadable(*args):
        raise Unavailable("not now")

    with monkeypatch.context() as patch:
        patch.setattr(fs.containers.files, "read_stored", unreadable)
        plain = await write_file(fs, b"plain", data)
        members, report = await store(fs, drain, [plain])
    assert outcomes(members) == [DrainOutcome.DRAINED] and report.replaced_chunks == 0
    assert await shared_chunks(fs) == before
    await check_contents(fs, {safe: data, plain: data})
