"""Records of what is kept, and publications, on an engine in memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aifs.core.errors import Busy, Invalid, NotFound, Unavailable
from aifs.meta import groups, keys, namespace, publishing
from aifs.meta.askers import Asker
from aifs.meta.groups import GroupMember, GroupOptions, GroupRecord, Pending
from aifs.meta.paths import is_below
from aifs.meta.publishing import Kept, Publication
from aifs.meta.records import Inode
from tests.support.memory_engine import MemoryEngine

ROOT, DIRECTORY = keys.ROOT_INO, 0o40755
numbers = st.integers(0, 1 << 62)
ids = st.integers(0, (1 << 32) - 1)
askers = st.builds(
    Asker, ids, st.lists(ids, min_size=1, max_size=5).map(tuple), st.just(0), st.just(0)
)


@given(st.text(), askers)
def test_what_is_kept_is_read_back(policy: str, asker: Asker) -> None:
    kept = Kept(policy, asker)
    assert publishing.decode_kept(kept.encode()) == kept


@given(st.binary(max_size=60))
def test_damage_is_told(record: bytes) -> None:
    try:
        publishing.decode_kept(record)
    except Unavailable:
        pass


def test_the_records_stay_as_they_are() -> None:
    asker = Asker(1000, (1000, 7))
    assert Kept("last=1", asker).encode().hex() == (
        "01e80300000200e803000007000000" + b"last=1".hex()
    )
    assert keys.retention(5).hex() == "720000000000000005"


@pytest.fixture
async def engine() -> MemoryEngine:
    engine = MemoryEngine()
    await engine.transact(
        namespace.put_inode, Inode(ROOT, DIRECTORY, 0, 0, 2, 0, 0, 0, 0, 0, 0, ROOT)
    )
    return engine


async def mkdir(
    engine: MemoryEngine, parent: int, name: bytes, ino: int, mode: int = DIRECTORY
) -> int:
    new = Inode(ino, mode, 0, 0, 1, 0, 0, 0, 0, 0, 0)
    await engine.transact(namespace.create, parent, name, new)
    return ino


def pending(ranks: int) -> GroupRecord:
    """A group that only keeps its directory pending."""
    asker = Asker(0, (0,))
    options = GroupOptions(b"", ranks, 0, True, 0, 0, b"")
    return GroupRecord(1, options, asker, 0, pending=Pending(None, 0, b"", asker))


async def test_a_message_names_some_of_the_ranks(engine: MemoryEngine) -> None:
    await mkdir(engine, ROOT, b"tmp", 2)
    await engine.transact(groups.begin, 2, pending(100))
    for rank in (0, 2):
        await engine.transact(groups.commit, 2, 1, rank, GroupMember(0), False)
    with pytest.raises(
        Busy, match=r"98 of 100 ranks have not committed: 1, 3, 4, 5, 6, 7, 8, 9, \.\.\."
    ):
        await engine.transact(groups.conclude, 2)


async def test_a_refused_publication_changes_nothing(engine: MemoryEngine) -> None:
    await mkdir(engine, ROOT, b"tmp", 2)
    await engine.transact(groups.begin, 2, pending(1))
    before = await engine.view(lambda tx: list(tx.range(b"", b"\xff")))
    for what in (
        Publication(2, ROOT, b"final", latest=b"latest", tracker=b"tracker"),
        Publication(2, ROOT, b"final", manifest=b"manifest"),
        Publication(2, 2, b"final"),
        Publication(9, ROOT, b"final"),
        Publication(ROOT, ROOT, b"final"),
        Publication(2, 9, b"x"),
    ):
        with pytest.raises((Busy, NotFound, Invalid)):
            await engine.transact(publishing.publish, what, (0, 0), (10, 11, 12, 13), 5)
        assert await engine.view(lambda tx: list(tx.range(b"", b"\xff"))) == before


async def test_the_name_is_found_after_any_number_of_moves(engine: MemoryEngine) -> None:
    for ino in range(2, 20):
        await mkdir(engine, ROOT, b"%d" % ino, ino)
    for number, name in enumerate((b"a", b"b", b"c")):
        old = await engine.view(lambda tx: publishing.name_of(tx, namespace.get_inode(tx, 7)))
        assert old == (b"7", b"a", b"b")[number]
        cookies = (100 + number, 0)
        names = (ROOT, old), (ROOT, name)
        await engine.transact(publishing.rename, *names, 0, cookies, 1, [7], (), None)
    with pytest.raises(NotFound):
        await engine.view(lambda tx: publishing.name_of(tx, namespace.get_inode(tx, ROOT)))


async def test_below_is_told_alike_with_and_without_memory(engine: MemoryEngine) -> None:
    await mkdir(engine, ROOT, b"a", 2)
    await mkdir(engine, 2, b"b", 3)
    await mkdir(engine, 3, b"c", 4)
    await mkdir(engine, ROOT, b"d", 5)
    await mkdir(engine, 4, b"f", 6, 0o100644)
    await mkdir(engine, 5, b"g", 7, 0o100644)
    await engine.transact(namespace.link, 7, 5, b"h", 20, 1)
    for top in (ROOT, 2, 3, 4, 5, 6):
        known: dict[int, bool] = {}
        for ino in (6, 4, 3, 2, 5, 7, 99, ROOT):
            one, other = [
                await engine.view(lambda tx, known=memory: is_below(tx, ino, top, known))
                for memory in (None, known)
            ]
            assert one == other
    found = await engine.view(lambda tx: [is_below(tx, ino, 2) for ino in (2, 3, 6, 5, 7, 99)])
    assert found == [True, True, True, False, True, False]
