"""Records of columns that lack or move: what each transaction does, and refuses; where a column
moves to.
"""

import os
import stat
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aifs.core.errors import Unavailable
from aifs.layout.interleaved import container_layout
from aifs.layout.placement import WEIGHTS, Candidate
from aifs.layout.redundancy import Redundancy
from aifs.layout.striped import Striped
from aifs.meta import chunks, degraded, forms, keys, moves, namespace, paths
from aifs.meta.forms import FormChange
from aifs.meta.moves import SetRecord, Stray
from aifs.meta.records import Inode, decode_garbage, encode_entry
from aifs.meta.servers import ServerRecord, find_unprotected, put_server
from aifs.upkeep.moves import choose_target
from tests.support.memory_engine import MemoryEngine

INO, OID, SIZE = 77, 900, 50_000
PLAIN = Striped(4096, (0, 1, 2))
MIRRORED = Striped(4096, (0, 1, 2, 3), 2)
CODED = Striped(4096, (0, 1, 2, 3, 4), 1, 2)
LAYOUTS = pytest.mark.parametrize(
    "layout", [PLAIN, MIRRORED, CODED], ids=["plain", "mirrored", "coded"]
)


def inode_with(layout: Striped, **changes: object) -> Inode:
    return Inode(
        INO, stat.S_IFREG | 0o600, 0, 0, 1, 0, SIZE, 8, 1, 2, 3, oid=OID, layout=layout, **changes
    )


async def engine_with(layout: Striped) -> MemoryEngine:
    """A store with one file, and servers 0 to 9."""
    engine = MemoryEngine()

    def fill(tx):
        for number in range(10):
            put_server(tx, number, ServerRecord(f"data/{number}"))
        namespace.put_inode(tx, inode_with(layout))

    await engine.transact(fill)
    return engine


async def objects_of(engine: MemoryEngine) -> SetRecord | None:
    return await engine.view(moves.find_objects, INO, OID)


async def strays_of(engine: MemoryEngine) -> set[Stray]:
    return set(await engine.view(moves.load_strays))


# --- degraded ---


@LAYOUTS
async def test_damage_is_noted_as_far_as_the_bytes_survive(layout):
    engine = await engine_with(layout)
    for column in range(len(layout.servers)):
        known = await engine.view(degraded.find_unread, OID)
        noted = await engine.transact(moves.put_damaged, OID, INO, 1 << column)
        survives = layout.survives(known | 1 << column)
        assert noted == (known | 1 << column if survives else 0)
        assert await engine.view(degraded.find_unread, OID) == (
            known | 1 << column if noted else known
        )
        assert not await engine.transact(moves.put_damaged, OID, INO, 1 << column), "no news"
    for oid, ino, mask in ((OID + 1, INO, 1), (OID, INO + 1, 1), (OID, INO, 1 << 31), (OID, 0, 1)):
        assert not await engine.transact(moves.put_damaged, oid, ino, mask)


async def test_marks_go_with_the_objects():
    engine = await engine_with(CODED)
    await engine.transact(degraded.put_unread, OID, INO, 2)
    await engine.transact(degraded.put_unread, OID, INO, 1)
    assert await engine.view(degraded.find_unread, OID) == 3
    emptied = replace(inode_with(CODED), layout=None, size=0, blocks=0)
    assert await engine.transact(forms.change_forms, [FormChange(emptied)]) == [OID]
    assert not await engine.view(degraded.is_marked, OID)
    await engine.transact(degraded.put_unread, OID, INO, 0)
    assert (
        await engine.view(degraded.is_marked, OID)
        and await engine.view(degraded.find_unread, OID) == 0
    )


# --- strays and flips ---


@LAYOUTS
async def test_a_column_moves_in_one_transaction(layout):
    engine = await engine_with(layout)
    before = await objects_of(engine)
    new, old = Stray(INO, OID, 9), Stray(INO, OID, 1)
    assert await engine.transact(moves.put_stray, new)
    assert not await engine.transact(moves.put_stray, new), "an object may be there already"
    if layout.is_protected:
        await engine.transact(degraded.put_unread, OID, INO, 0b11)
    after = await engine.transact(moves.flip, before, 1, 9)
    assert after == await objects_of(engine) == before._replace(layout=layout.moved(1, 9))
    assert await strays_of(engine) == {old}
    assert await engine.view(degraded.find_unread, OID) == (1 if layout.is_protected else 0)
    assert await engine.view(find_unprotected) == (set() if layout.is_protected else {9})
    await engine.transact(moves.forget_strays, [old])
    assert await strays_of(engine) == set()


async def test_a_column_that_is_made_anew_in_its_place_leaves_no_stray():
    engine = await engine_with(CODED)
    await engine.transact(degraded.put_unread, OID, INO, 0b10)
    before = await objects_of(engine)
    assert await engine.transact(moves.flip, before, 1, 1) == before
    assert not await engine.view(degraded.is_marked, OID)
    assert await strays_of(engine) == set()


@pytest.mark.parametrize("change", ["gone", "rewritten", "moved", "dirty", "grown"])
async def test_a_flip_is_refused_where_something_has_changed(change):
    engine = await engine_with(PLAIN)
    before = await objects_of(engine)
    await engine.transact(moves.put_stray, Stray(INO, OID, 9))

    def act(tx):
        if change == "gone":
            tx.delete(keys.inode(INO))
        elif change == "dirty":
            tx.put(keys.dirty(INO), b"")
        else:
            changes = {
                "rewritten": {"oid": OID + 1},
                "moved": {"layout": PLAIN.moved(0, 5)},
                "grown": {"size": SIZE + 1},
            }
            namespace.put_inode(tx, replace(inode_with(PLAIN), **changes[change]))

    await engine.transact(act)
    assert await engine.transact(moves.flip, before, 1, 9) is None
    assert await strays_of(engine) == {Stray(INO, OID, 9)}


async def test_a_container_moves_only_when_it_is_sealed():
    engine = await engine_with(PLAIN)
    layout = container_layout((2, 1), Redundancy(2))
    await engine.transact(chunks.put_container, 500, layout)
    before = await engine.view(moves.find_objects, 0, 500)
    assert before == SetRecord(0, 500, layout, 0)
    assert await engine.transact(moves.flip, before, 0, 7) is None
    await engine.transact(lambda tx: tx.delete(keys.open_container(500)))
    after = await engine.transact(moves.flip, before, 0, 7)
    assert after.layout.servers == (7, 1) and await engine.view(moves.find_objects, 0, 500) == after
    assert await strays_of(engine) == {Stray(0, 500, 2)}


async def test_protected_objects_replace_plain_ones():
    engine = await engine_with(PLAIN)
    after = SetRecord(INO, OID + 1, CODED, SIZE)
    await engine.transact(degraded.put_unread, OID, INO, 0)
    await engine.transact(forms.put_garbage, [(INO, OID + 1, CODED)])
    relaid = replace(inode_with(PLAIN), oid=OID + 1, layout=CODED, blocks=99)
    change = FormChange(relaid, digests=b"d" * 32, unread=0b100)
    assert await engine.transact(forms.change_forms, [change]) == [OID]
    assert await engine.view(moves.find_objects, INO, OID + 1) == after
    assert (await engine.view(namespace.get_inode, INO)).blocks == 99
    assert await engine.view(degraded.find_unread, OID + 1) == 0b100
    assert not await engine.view(degraded.is_marked, OID)
    records = await engine.view(lambda tx: dict(tx.range(*keys.all_of(b"g"))))
    assert decode_garbage(records[keys.garbage(OID)]).layout == PLAIN and len(records) == 1


def test_damaged_records_of_strays_are_refused():
    with pytest.raises(Unavailable):
        moves.decode_stray(keys.stray(1, 2), b"123")


# --- what is due ---


@LAYOUTS
async def test_what_is_due_is_found_in_slices(layout):
    engine = await engine_with(layout)
    staying = frozenset(range(10)) - {1}
    found, following = await engine.view(moves.scan_files, *keys.all_of(b"i"), 1, staying)
    length = layout.object_length(1, SIZE)
    assert found == [(INO, OID, ((1, length),), length)]
    rest = await engine.view(moves.scan_files, following, keys.all_of(b"i")[1], 1, staying)
    everywhere = frozenset(range(10))
    none = await engine.view(moves.scan_files, *keys.all_of(b"i"), 9, everywhere)
    assert rest == none == ([], b"")
    await engine.transact(degraded.put_unread, OID, INO, 0b101)
    await engine.transact(degraded.put_unread, OID + 5, INO, 1)
    found, following = await engine.view(moves.scan_degraded, *keys.all_of(b"q"), 9)
    servers = [[server for server, _ in due.columns] for due in found]
    assert servers == [[layout.servers[0], layout.servers[2]], []] and following == b""


def test_degraded_columns_come_first():
    assert moves.due_columns(CODED, 0b10100, frozenset((1, 2, 3, 4))) == (2, 4, 0)


# --- where to ---

layouts = st.sampled_from([PLAIN, MIRRORED, CODED])
candidate_sets = st.lists(
    st.builds(Candidate, st.integers(0, 12), st.sampled_from("abcdef"), st.sampled_from(WEIGHTS)),
    max_size=10,
    unique_by=lambda candidate: candidate.id,
)


@pytest.mark.sweep
@given(layouts, candidate_sets, st.integers(0, 1 << 40), st.data())
def test_a_target_is_the_best_of_those_that_the_layout_does_not_name(
    layout, candidates, seed, data
):
    column = data.draw(st.integers(0, len(layout.servers) - 1))
    domains = {number: data.draw(st.sampled_from("abcdef")) for number in layout.servers}
    domains |= {candidate.id: candidate.domain for candidate in candidates}
    free = [candidate for candidate in candidates if candidate.id not in layout.servers]
    chosen = choose_target(seed, layout, column, candidates, domains)
    if not free:
        assert chosen is None
        return
    [target] = [candidate for candidate in free if candidate.id == chosen]
    others = [domains[server] for number, server in enumerate(layout.servers) if number != column]
    copies = [
        domains[layout.servers[number]] for number in layout.copies(column) if number != column
    ]

    def clashes(candidate):
        return copies.count(candidate.domain), others.count(candidate.domain)

    assert clashes(target) == min(map(clashes, free))
    assert target.weight == max(c.weight for c in free if clashes(c) == clashes(target))
    assert (
        choose_target(seed, layout, column, candidates, domains, preferred=free[-1].id)
        == free[-1].id
    )
    assert (
        choose_target(seed, layout, column, candidates, domains, preferred=layout.servers[0])
        == chosen
    )


def test_columns_that_move_are_spread():
    candidates = [Candidate(number, str(number)) for number in range(3, 9)]
    domains = {number: str(number) for number in range(9)}
    chosen = [choose_target(seed, PLAIN, 0, candidates, domains) for seed in range(600)]
    assert all(60 <= chosen.count(number) <= 140 for number in range(3, 9))


# --- paths ---


async def test_paths_are_told_from_below():
    engine = MemoryEngine()

    def put(tx, ino, parent, name, mode):
        inode = Inode(ino, mode, 0, 0, 1, 0, 0, 0, 0, 0, 0, parent=parent)
        namespace.create(tx, parent, name, inode)

    def fill(tx):
        root = Inode(1, stat.S_IFDIR | 0o755, 0, 0, 2, 0, 0, 0, 0, 0, 0, parent=1)
        namespace.put_inode(tx, root)
        put(tx, 10, 1, b"dir", stat.S_IFDIR | 0o755)
        put(tx, 11, 10, b"a\xff", stat.S_IFREG | 0o600)
        put(tx, 12, 10, b"b", stat.S_IFREG | 0o600)
        namespace.rename(tx, (10, b"b"), (1, b"c"), 0, (13, 14), 5, (12,))
        put(tx, 15, 10, b"d", stat.S_IFREG | 0o600)
        namespace.link(tx, 15, 1, b"e", 16, 5)

    await engine.transact(fill)
    assert await engine.view(paths.find_path, 11) == b"/dir/a\xff"
    assert await engine.view(paths.describe, 11) == os.fsdecode(b"/dir/a\xff")
    assert await engine.view(paths.find_path, 12) == b"/c"
    assert await engine.view(paths.find_path, 15) is None
    assert await engine.view(paths.describe, 15) == "inode 15"
    assert await engine.view(paths.find_path, 99) is None


async def test_directories_that_lie_in_each_other_have_no_path():
    engine = MemoryEngine()

    def fill(tx):
        for ino, parent, cookie in ((1, 1, 20), (10, 11, 21), (11, 10, 22)):
            directory = Inode(ino, stat.S_IFDIR | 0o755, 0, 0, 2, 0, 0, 0, 0, 0, 0, parent=parent)
            namespace.put_inode(tx, directory)
            tx.put(keys.entry(parent, cookie), encode_entry(ino, 4, b"in"))

    await engine.transact(fill)
    assert await engine.view(paths.find_path, 10) is None
    assert await engine.view(paths.describe, 11) == "inode 11"
