"""The reply to READDIRPLUS, which C makes from records: it reads them as Python's codecs do."""

import struct
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aifs.core.errors import NotFound
from aifs.fuse import extension
from aifs.fuse.bridge import Bridge, listing_reply
from aifs.meta import keys
from aifs.meta.listing import Listing, list_directory
from aifs.meta.records import Inode, encode_entry
from tests.support.memory_engine import MemoryEngine
from tests.unit.test_records import INODES, NAMES, U64

pytestmark = pytest.mark.skipif(extension is None, reason="the bridge has not been built")

ENTRY = struct.Struct("=QQQQII QQQQQQ IIIIIIIIII QQII")
"""struct fuse_direntplus: the entry's numbers and times, the attributes, the dirent."""

PLACES = st.lists(st.tuples(INODES, NAMES, U64.map(lambda number: number >> 1)), max_size=6)


def listing_of(places: list[tuple[Inode, bytes, int]], parent: int = 5) -> Listing:
    entries = [
        (keys.entry(parent, cookie), encode_entry(inode.ino, inode.mode >> 12 & 15, name))
        for inode, name, cookie in places
    ]
    return Listing(entries, [inode.encode() for inode, _, _ in places], 0)


def parts(reply: bytes) -> list[tuple[SimpleNamespace, bytes]]:
    """The entries of a reply, with their names."""
    found, at = [], 0
    while at < len(reply):
        numbers = ENTRY.unpack_from(reply, at)
        fields = (
            "nodeid generation entry_s attr_s entry_ns attr_ns ino size blocks atime mtime ctime "
            "atime_ns mtime_ns ctime_ns mode nlink uid gid rdev block_size flags "
            "listed_ino next name_length type"
        )
        entry = SimpleNamespace(**dict(zip(fields.split(), numbers, strict=True)))
        end = at + ENTRY.size + entry.name_length
        found.append((entry, reply[at + ENTRY.size : end]))
        at = -(-end // 8) * 8
        assert not any(reply[end:at])
    assert at == len(reply)
    return found


@pytest.fixture(scope="module", autouse=True)
def timeouts() -> None:
    Bridge(
        SimpleNamespace(  # type: ignore[arg-type]
            bridge="off",
            max_background=0,
            entry_timeout_s=86400.25,
            negative_timeout_s=1.0,
            attr_timeout_s=1.5,
        ),
        lambda *_: False,
        busy_polls=False,
    )


@pytest.mark.sweep
@given(PLACES, st.booleans())
def test_c_reads_records_as_python_does(
    places: list[tuple[Inode, bytes, int]], are_kept: bool
) -> None:
    listing = listing_of(places)
    found = parts(listing_reply(listing, 1 << 20, are_kept)[0])
    assert len(found) == len(places)
    for (entry, name), (listed, inode, cookie) in zip(found, listing, strict=True):
        assert (name, entry.next, entry.type) == (listed, cookie + 1, inode.mode >> 12 & 15)
        assert entry.nodeid == entry.ino == entry.listed_ino == inode.ino
        kept = (86400, 250_000_000) if are_kept else (0, 0)
        assert (entry.entry_s, entry.entry_ns) == kept
        assert (entry.attr_s, entry.attr_ns, entry.generation) == (1, 500_000_000, 0)
        assert (entry.size, entry.blocks, entry.mode) == (inode.size, inode.blocks, inode.mode)
        assert (entry.nlink, entry.uid, entry.gid) == (inode.nlink, inode.uid, inode.gid)
        assert (entry.rdev, entry.block_size, entry.flags) == (inode.rdev, 65536, 0)
        for which in ("atime", "mtime", "ctime"):
            seconds, rest = divmod(getattr(inode, f"{which}_ns"), 10**9)
            assert getattr(entry, which) == seconds % (1 << 64)  # from which the kernel takes a s64
            assert getattr(entry, f"{which}_ns") == rest


def test_attributes_that_may_change_unseen_are_not_kept() -> None:
    listing = listing_of([(Inode(9 + i, 0o100644, *[0] * 9), b"a%d" % i, 9 + i) for i in range(3)])
    listing.unkept = {1}
    listing.put_dots(Inode(5, 0o040755, *[0] * 9, parent=3), 0)
    found = parts(listing_reply(listing, 4096, True)[0])
    assert [entry.attr_ns != 0 for entry, _ in found] == [True, True, True, False, True]
    assert all(entry.entry_s for entry, _ in found)


@pytest.mark.sweep
@given(PLACES, st.integers(0, 1000))
def test_a_reply_holds_as_many_entries_as_fit(
    places: list[tuple[Inode, bytes, int]], size: int
) -> None:
    whole, _ = listing_reply(listing_of(places), 1 << 20, True)
    reply, count = listing_reply(listing_of(places), size, True)
    assert count == len(parts(reply))
    assert len(reply) <= size and whole.startswith(reply)
    more = parts(whole)[len(parts(reply)) :]
    assert not more or len(reply) + -(-(ENTRY.size + more[0][0].name_length) // 8) * 8 > size


@pytest.mark.parametrize(
    ("key", "entry", "inode"),
    [
        (b"e" + bytes(15), encode_entry(7, 8, b"a"), Inode(7, *[0] * 10).encode()),
        (keys.entry(1, 2), encode_entry(7, 8, b""), Inode(7, *[0] * 10).encode()),
        (keys.entry(1, 2), encode_entry(7, 8, b"a"), Inode(7, *[0] * 10).encode()[:-1]),
        (keys.entry(1, 2), encode_entry(7, 8, b"a"), b"\2" + Inode(7, *[0] * 10).encode()[1:]),
        (keys.entry(1, 2), encode_entry(7, 8, b"a"), None),
    ],
)
def test_records_that_cannot_be_read_are_refused(
    key: bytes, entry: bytes, inode: bytes | None
) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        extension.listing([(key, entry)], [inode], set(), 4096, True, False)


def test_an_entry_that_is_no_pair_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        extension.listing([b"e"], [b"i"], set(), 4096, True, False)


@pytest.mark.parametrize("place", [0, 1])
def test_dots_are_in_front(place: int) -> None:
    listing = listing_of([(Inode(9, 0o100644, *[0] * 9), b"a", 9)])
    listing.put_dots(Inode(5, 0o040755, *[0] * 9, parent=3), place)
    dots = [(b".", 5, 0), (b"..", 3, 1)][place:]
    assert [(name, inode.ino, cookie) for name, inode, cookie in listing] == [*dots, (b"a", 9, 9)]
    assert listing.inos == (*[ino for _, ino, _ in dots], 9)
    assert [entry.next for entry, _ in parts(listing_reply(listing, 4096, True)[0])] == [
        *[1, 2][place:],
        10,
    ]


async def test_an_entry_that_leads_nowhere_is_named() -> None:
    engine = MemoryEngine()
    key, entry = keys.entry(5, 6), encode_entry(7, 8, b"lost")
    await engine.transact(lambda tx: tx.put(key, entry))
    with pytest.raises(NotFound, match="inode 7 does not exist.*directory 5"):
        await engine.view(list_directory, 5, 0, 10)
