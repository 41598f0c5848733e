"""Small files are packed: which files go into containers, how many objects they make, and how their
space comes back.
"""

import errno
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from aifs.core.errors import NoSpace
from aifs.data import storages
from aifs.data.storage import Space
from aifs.files import transitions
from aifs.files.containers import StoredFiles
from aifs.files.draining import Draining, DrainOutcome
from aifs.layout.hint import Policy, parse_layout_hint
from aifs.layout.interleaved import Interleaved
from aifs.layout.striped import Striped
from aifs.meta import keys
from aifs.meta.chunks import find_container
from aifs.vfs import Filesystem
from tests.support import modes
from tests.support.data_servers import data_servers, failing, hooked
from tests.support.memory_storage import BUCKETS, MemoryStorage
from tests.support.stores import (
    drained,
    moved_out,
    numbers,
    opened,
    overwrite,
    read_file,
    rewrite,
    set_policy,
    write_file,
)
from tests.support.stores import fs as fs

KIB = 1 << 10


def objects_in(fs: Filesystem) -> int:
    """How many objects all data servers have together."""
    return sum(
        len(names)
        for server in fs.store.servers.capacity()
        for _, _, names in os.walk(os.path.join(server.address, "objects"))
    )


async def form_of(fs: Filesystem, size: int, policy: Policy) -> object:
    """The layout of a drained file."""
    ino = await write_file(fs, b"%d" % size, bytes([size % 251]) * size)
    await set_policy(fs, ino, policy)
    await drained(fs, ino)
    return (await fs.getattr(ino)).layout


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("pack_below", "policy", "size", "expected"),
    [
        ("unit", "", 20 * KIB, Interleaved),
        ("unit", "", 1024 * KIB - 1, Interleaved),
        ("unit", "", 1024 * KIB, Striped),
        ("unit", "kind=striped", 20 * KIB, Interleaved),
        ("unit", "unit=8KiB", 20 * KIB, Striped),
        ("unit", "unit=8KiB", 7 * KIB, Interleaved),
        ("unit", "unit=4MiB", 1024 * KIB, Striped),
        ("100KiB", "unit=8KiB", 20 * KIB, Interleaved),
        ("100KiB", "", 100 * KIB, Striped),
        ("100KiB", "kind=interleaved", 100 * KIB, Interleaved),
        ("0", "", 20 * KIB, Striped),
    ],
)
async def test_which_files_are_packed(
    directory: Path, pack_below: str, policy: str, size: int, expected: type
) -> None:
    async with opened(directory, {"layout.pack_below": pack_below}) as fs:
        found = await form_of(fs, size, parse_layout_hint(policy) if policy else Policy())
        assert isinstance(found, expected)


@pytest.mark.store(servers=3)
@pytest.mark.parametrize("policy", ["replicas=2", "ec=2+1"])
async def test_packed_files_are_protected_as_their_policy_says(fs: Filesystem, policy: str) -> None:
    assert isinstance(await form_of(fs, 20 * KIB, parse_layout_hint(policy)), Interleaved)
    (container,) = await numbers(fs, b"t")
    record = await fs.store.engine.view(find_container, container)
    assert record is not None and record.layout.is_protected


@pytest.mark.store(servers=1)
async def test_a_file_that_no_container_can_protect_gets_objects_of_its_own(fs: Filesystem) -> None:
    layout = await form_of(fs, 20 * KIB, Policy(replicas=2))
    assert isinstance(layout, Striped) and not layout.is_protected
    assert await numbers(fs, b"q"), "it is on record that protection is due"


@pytest.mark.store(servers=2)
@pytest.mark.sweep
async def test_some_thousand_files_make_a_few_objects(fs: Filesystem) -> None:
    content = os.urandom(6000)
    inos = [
        await write_file(fs, b"%d" % number, b"%06d" % number + content) for number in range(3000)
    ]
    await moved_out(fs, *inos)
    # Containers of tests are small: in one of the default size there are 8,000 times as many.
    most = 2 * 3000 * 6100 // modes.CONTAINER_SIZE
    assert objects_in(fs) <= most
    for number in range(0, 3000, 97):
        assert (await read_file(fs, inos[number]))[:6] == b"%06d" % number


@pytest.mark.store(servers=1)
async def test_space_of_emptied_files_comes_back_though_their_container_is_open(fs):
    inos = [await write_file(fs, b"%d" % number, bytes([number]) * 5000) for number in range(5)]
    await moved_out(fs, *inos)
    (container,) = await numbers(fs, b"a")  # it is open
    for number in range(4):
        await rewrite(fs, inos[number], b"")
    await fs.collector.drain()
    await fs.compaction.compact()
    await fs.collector.drain()
    assert container not in await numbers(fs, b"t")
    assert await read_file(fs, inos[4]) == bytes([4]) * 5000


@pytest.mark.store(servers=1)
async def test_a_file_that_is_rewritten_again_and_again_leaves_no_dead_containers(fs):
    ino = await write_file(fs, b"f", bytes(20 * KIB))
    for turn in range(20):
        await overwrite(fs, ino, 0, bytes([turn]) * 20 * KIB)
        await drained(fs, ino)
    await fs.collector.drain()
    await fs.compaction.compact()
    await fs.collector.drain()
    assert objects_in(fs) <= 2
    assert await read_file(fs, ino) == bytes([19]) * 20 * KIB


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(storages.KINDS, "memory", MemoryStorage)
    yield
    BUCKETS.clear()


@pytest.mark.sweep
@pytest.mark.usefixtures("memory")
async def test_small_files_go_beside_containers_where_only_those_servers_have_room_that_cannot_grow(
    directory: Path,
) -> None:
    content = {b"%d" % number: os.urandom(20 * KIB) for number in range(40)}
    with hooked():
        async with opened(directory, modes.WAITING, servers=["data/0", "memory://1"]) as fs:
            inos = {name: await write_file(fs, name, data) for name, data in content.items()}
            full = ("write_at", "truncate")
            with failing(full, fs.store.servers[0].address, errno.ENOSPC) as failed:
                await drained(fs, *inos.values())
            assert failed
            for name, ino in inos.items():
                layout = (await fs.getattr(ino)).layout
                assert isinstance(layout, Striped) and layout.servers == (1,)
                await fs.evictor.evict(ino)
                assert await read_file(fs, ino) == content[name]
            ino = await write_file(fs, b"later", os.urandom(20 * KIB))
            await drained(fs, ino)
            assert isinstance((await fs.getattr(ino)).layout, Interleaved)


async def test_a_list_that_there_was_no_room_to_flip_to_is_dropped(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of a batch that lacks room get objects of their own; the lists of their chunks go."""
    monkeypatch.setattr(transitions, "LISTED_AT_ONCE", 0)
    async with opened(directory, modes.WAITING) as fs:
        listed, list_extents = list[int](), fs.containers.list_extents

        async def some(oid: int, *args: Any) -> None:
            await list_extents(oid, *args)
            listed.append(oid)
            if len(listed) == 2:
                raise NoSpace("no more room")

        monkeypatch.setattr(fs.containers, "list_extents", some)
        content = {b"%d" % number: os.urandom(20 * KIB) for number in range(3)}
        inos = {name: await write_file(fs, name, data) for name, data in content.items()}
        await drained(fs, *inos.values())
        for name, ino in inos.items():
            assert isinstance((await fs.getattr(ino)).layout, Striped)
            assert await read_file(fs, ino) == content[name]
        await fs.collector.drain()
        lists = await fs.store.engine.view(lambda tx: list(tx.range(*keys.all_of(b"y"))))
        assert len(listed) == 2 and not lists


async def test_a_file_that_is_cut_while_its_batch_is_packed_fails_alone(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(directory, modes.WAITING) as fs:
        inos = [await write_file(fs, b"%d" % number, os.urandom(20 * KIB)) for number in range(3)]
        batch, append = [Draining(ino) for ino in inos], fs.containers.append

        @asynccontextmanager
        async def append_later(*args: Any) -> AsyncIterator[StoredFiles]:
            if not batch[1].cancelled:
                await rewrite(fs, inos[1], b"cut")
            async with append(*args) as stored:
                yield stored

        monkeypatch.setattr(fs.containers, "append", append_later)
        await fs.drain.drainer.drain(batch)
        whole, cut = DrainOutcome.DRAINED, DrainOutcome.CHANGED
        assert [draining.outcome for draining in batch] == [whole, cut, whole]


async def test_a_drain_that_the_metadata_has_no_room_for_says_so(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(directory, modes.WAITING | modes.STRIPED) as fs:
        inos = [await write_file(fs, b"%d" % number, os.urandom(20 * KIB)) for number in range(3)]
        batch = [Draining(ino) for ino in inos]

        async def full(*_: Any) -> None:
            raise NoSpace("no more room")

        with monkeypatch.context() as patch:
            patch.setattr(fs.store.engine, "transact", full)
            await fs.drain.drainer.drain(batch)
        assert [str(draining.outcome) for draining in batch] == ["no more room"] * 3
        await drained(fs, *inos)


def test_full_servers_get_nothing_while_others_have_room(tmp_path: Path) -> None:
    with data_servers(tmp_path, 3) as servers:
        for server, left in zip(servers.values(), (1 << 30, 0, 1 << 20), strict=True):
            server.seen = Space(1 << 40, left, left, 1, 1)
        assert [candidate.id for candidate in servers.candidates()] == [0]
        servers[0].seen = Space(1 << 40, 0, 0, 1, 1)
        assert [candidate.id for candidate in servers.candidates()] == [0, 1, 2]


@pytest.mark.sweep
async def test_files_that_find_no_room_keep_no_memory_from_others(directory: Path) -> None:
    """A batch of files once waited for ever for memory that the frames of its errors held."""
    settings = modes.WAITING | modes.STRIPED | {"memory.budget": "64MiB"}
    with hooked():
        async with opened(directory, settings, servers=["data/0"]) as fs:
            content = {b"%d" % number: os.urandom(4 << 20) for number in range(24)}
            inos = {name: await write_file(fs, name, data) for name, data in content.items()}
            with failing("write_at", fs.store.servers[0].address, errno.ENOSPC):
                fs.drain.request(inos.values())
                with trio.fail_after(60):
                    while fs.drain.status()["failing_files"] < len(inos):
                        await trio.testing.wait_all_tasks_blocked(0.01)
            await drained(fs, *inos.values())
            for name, ino in inos.items():
                assert await read_file(fs, ino) == content[name]
