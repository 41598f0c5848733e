"""Records and keys of the metadata store: golden bytes, round trips, order, refusal of damage."""

import stat

import pytest
from hypothesis import given
from hypothesis import strategies as some

from aifs.core.errors import Unavailable
from aifs.layout.hint import KINDS, MIRRORS_MAX, PUBLISHES, TIERS, Policy
from aifs.layout.imported import Imported, Pin
from aifs.layout.interleaved import Interleaved
from aifs.layout.striped import Striped
from aifs.meta import keys, records
from aifs.meta.dooming import Doomed, decode_doomed
from aifs.meta.records import BurstRecord, Copy, Degraded, Dentry, Garbage, Inode, MirrorOf

U8, U16, U32, U64 = (some.integers(0, (1 << bits) - 1) for bits in (8, 16, 32, 64))
I64 = some.integers(-(1 << 63), (1 << 63) - 1)
COPIES = some.none() | some.builds(Copy, U16, U64)
MIRRORS = some.none() | some.builds(MirrorOf, U64, U64, I64, I64)
SERVERS = some.lists(U16, max_size=20).map(tuple)
SOME_SERVERS = some.lists(U16, min_size=1, max_size=255).map(tuple)
NAMES = some.binary(min_size=1, max_size=255)
POLICIES = some.builds(
    Policy,
    U32,
    U8,
    SERVERS,
    some.sampled_from(KINDS),
    some.none() | some.integers(0, 19),
    some.sampled_from(TIERS),
    U64,
    U8,
    U8,
    U8,
    some.sampled_from(PUBLISHES),
    some.integers(0, MIRRORS_MAX),
)
PLAIN_LAYOUTS = some.builds(Striped, U32, SOME_SERVERS, some.just(1), some.just(0))


@some.composite
def protected_layouts(draw: some.DrawFn) -> Striped:
    replicas, parity, width = draw(some.sampled_from([(2, 0), (3, 0), (1, 1), (1, 4)])) + (
        draw(some.integers(1, 9)),
    )
    columns = width * replicas + parity
    return Striped(
        draw(U32),
        tuple(draw(some.lists(U16, min_size=columns, max_size=columns))),
        replicas,
        parity,
    )


LAYOUTS = PLAIN_LAYOUTS | protected_layouts()
INODES = some.builds(
    Inode,
    U64,  # ino
    *[U32] * 5,  # mode to rdev
    *[U64] * 2,  # size, blocks
    *[I64] * 3,  # times
    *[U64] * 2,  # parent, oid
    some.none() | POLICIES,
    copy=COPIES,
    birth_ns=I64,
    flags=U32,
    project=U32,
    acl=some.binary(max_size=300),
    default_acl=some.binary(max_size=300),
)

HEAD = (
    "{form}"  # format, form, policy length, number of servers
    "a4810000e8030000e90300000200000000000000"  # mode, uid, gid, nlink, rdev
    # size to ctime
    "0900000000000000100000000000000001000000000000000200000000000000fdffffffffffffff"
    "04000000000000000500000000000000"  # parent, oid
)
"""Bytes that stores on disk consist of: if a test of them fails, the format number must change."""
# Birth, flags, project, lengths of the ACLs.
REST = "0700000000000000" + "00000000" * 2 + "0000" * 2


def an_inode(**changes: object) -> Inode:
    numbers = (7, stat.S_IFREG | 0o644, 1000, 1001, 2, 0, 9, 16, 1, 2, -3, 4, 5)
    return Inode(*numbers, **({"birth_ns": 7} | changes))


GOLDEN = [
    (an_inode(), HEAD.format(form="01000000") + "00000000"),
    (an_inode(data=b"123456789"), HEAD.format(form="01010000") + "00000000" + b"123456789".hex()),
    (
        an_inode(layout=Striped(1 << 20, (3, 0, 258))),
        HEAD.format(form="01020003") + "00001000" + "030000000201",
    ),
    (
        an_inode(policy=Policy(8192, 2, (1, 513)), layout=Striped(4096, (1,))),
        HEAD.format(form="01020901") + "00100000" + "00200000" + "02" + "01000102" + "0100",
    ),
    (
        an_inode(copy=Copy(0x8001, 0x102)),
        HEAD.format(form="01800000") + "00000000" + "0180" + "0201000000000000",
    ),
    (
        an_inode(data=b"123456789", copy=Copy(0x8001, 0x102)),
        HEAD.format(form="01810000")
        + "00000000"
        + "0180"
        + "0201000000000000"
        + b"123456789".hex(),
    ),
    (
        an_inode(layout=Striped(1 << 20, (3,)), copy=Copy(0x8001, 0x102)),
        HEAD.format(form="01820001") + "00001000" + "0300" + "0180" + "0201000000000000",
    ),
    (an_inode(layout=Interleaved(1 << 20)), HEAD.format(form="01030000") + "00001000"),
    (
        an_inode(layout=Striped(1 << 16, (3, 0, 258), parity=1), copy=Copy(0x8001, 0x102)),
        HEAD.format(form="01840003")
        + "00000100"
        + "0101"
        + "030000000201"
        + "0180"
        + "0201000000000000",
    ),
    (
        an_inode(policy=Policy(8192, replicas=2), layout=Striped(1 << 16, (3, 258), replicas=2)),
        HEAD.format(form="01041402")
        + "00000100"
        + "0020000000"
        + "80ff00"
        + "0000000000000000"
        + "02000000"
        + "0200"
        + "03000201",
    ),
    (
        an_inode(layout=Striped(1 << 20, (3,)), copy=Copy(0x8001, 0x102), named=0x305),
        HEAD.format(form="01c20001")
        + "00001000"
        + "0300"
        + ("0180" + "0201000000000000")
        + "0503000000000000",
    ),
    (
        an_inode(layout=Interleaved(1 << 20), named=0x305),
        HEAD.format(form="01430000") + "00001000" + "0503000000000000",
    ),
]


@pytest.mark.parametrize(
    ("inode", "golden"),
    GOLDEN,
    ids=(
        "empty,inline,striped,policy,burst,inline cached,striped cached,interleaved,coded,"
        "replicated,shared and cached,shared chunks"
    ).split(","),
)
def test_golden_inodes(inode: Inode, golden: str) -> None:
    """``REST`` stands behind the unit of each."""
    unit = len(HEAD.format(form="01000000")) + 8
    golden = golden[:unit] + REST + golden[unit:]
    assert inode.encode().hex() == golden
    assert records.decode_inode(7, bytes.fromhex(golden)) == inode


def test_a_golden_inode_with_flags_and_acls() -> None:
    inode = an_inode(policy=Policy(8192), birth_ns=7, acl=b"abc", default_acl=b"de", data=b"1")
    inode.flags, inode.project = records.IMMUTABLE, 9
    golden = (
        HEAD.format(form="01010500")
        + "00000000"
        + ("0700000000000000" + "10000000" + "09000000" + "0300" + "0200")
        + ("00200000" + "00" + b"abcde1".hex())
    )
    assert inode.encode().hex() == golden
    assert records.decode_inode(7, bytes.fromhex(golden)) == inode


def test_a_golden_directory_that_was_shown() -> None:
    inode = an_inode(shown_ns=0x102).but(mode=stat.S_IFDIR | 0o644)
    head = HEAD.format(form="01400000").replace("a4810000", "a4410000")
    golden = head + "00000000" + REST + "0201000000000000"
    assert inode.encode().hex() == golden
    assert records.decode_inode(7, bytes.fromhex(golden)) == inode


def test_a_golden_imported_file() -> None:
    pin = Pin("s3://b/p?region=r", "a/é", '"e-3"', 9)
    inode = an_inode(layout=Imported(source=pin), copy=Copy(0x8001, 0x102))
    golden = (
        HEAD.format(form="02850000")
        + "00000000"
        + REST
        + ("0180" + "0201000000000000")
        + 's3://b/p?region=r\0a/é\0"e-3"'.encode().hex()
    )
    assert inode.encode().hex() == golden
    assert records.decode_inode(7, bytes.fromhex(golden)) == inode
    for damaged in (golden[:-14], golden[:2] + "02" + golden[4:], golden + "ff"):
        with pytest.raises(Unavailable):
            records.decode_inode(7, bytes.fromhex(damaged))


def test_golden_records_of_doomed_trees() -> None:
    removed, made = Doomed(0x102, 7, 9), Doomed(0x102, 7, 9, 0x304)
    head = "01" + "0201000000000000" + "0700000000000000" + "09000000"
    assert removed.encode().hex() == head
    assert made.encode().hex() == head + "0403"
    assert [decode_doomed(one.encode()) for one in (removed, made)] == [removed, made]
    with pytest.raises(Unavailable):
        decode_doomed(made.encode()[:-1])


def test_other_golden_records() -> None:
    assert Dentry(0x0102, 0x03, 4).encode().hex() == "0201000000000000" + "0300000000000000" + "04"
    assert (
        records.encode_entry(0x0102, 8, b"name").hex() == "0000000000000102" + "08" + b"name".hex()
    )
    garbage = Garbage(9, Striped(4096, (1, 256)), 3)
    assert garbage.encode().hex() == "0900000000000000" + "00100000" + "0300" + "01000001"
    assert records.encode_policy(Policy(4096, 3, (2,))).hex() == "00100000" + "03" + "0200"
    policy = Policy(4096, 3, (2,), "interleaved", 5, "pinned", 0x102)
    assert (
        records.encode_policy(policy).hex()
        == "00100000" + "03" + "02" + "05" + "03" + "0201000000000000" + "0200"
    )
    policy = Policy(4096, 0, (2,), data=4, parity=2)
    assert (
        records.encode_policy(policy).hex()
        == "00100000" + "00" + "80" + "ff" + "00" + "0000000000000000" + "00040200" + "0200"
    )
    policy = Policy(publish="capacity")
    assert (
        records.encode_policy(policy).hex()
        == "00000000" + "00" + "80" + "ff" + "00" + "0000000000000000" + "00000001"
    )
    assert Degraded(0x102, 0x80000001).encode().hex() == "0201000000000000" + "01000080"
    copy = BurstRecord(0x102, 0x8001, undrained=True, durable=False, since_ns=3)
    assert copy.encode().hex() == "0201000000000000" + "0180" + "01" + "0300000000000000"


def test_golden_keys() -> None:
    assert (
        keys.SUPERBLOCK == b"S"
        and keys.COUNTER_IDS == b"cids"
        and keys.COUNTER_INODES == b"cinodes"
    )
    number = bytes.fromhex("0000000000000102")
    assert keys.inode(0x102) == b"i" + number
    assert keys.dentry(0x102, b"name") == b"d" + number + b"name"
    assert keys.entry(1, 0x102) == b"e" + bytes(7) + b"\1" + number
    assert keys.xattr(0x102, b"user.x") == b"x" + number + b"user.x"
    assert [key(0x102)[:1] for key in (keys.dirty, keys.orphan, keys.garbage)] == [b"w", b"o", b"g"]
    assert keys.server(0x102) == b"s\1\2"
    assert keys.burst_copy(0x102) == b"b" + number
    assert (
        keys.degraded(0x102) == b"q" + number
        and keys.stray(0x102, 0x304) == b"m" + number + b"\3\4"
    )
    assert keys.unprotected(0x102) == b"u\1\2" and keys.job(b"scrub") == b"jscrub"
    assert keys.doomed(0x102) == b"z" + number and keys.group(0x102) == b"n" + number
    assert keys.checksums(1, 0x102) == b"k" + bytes(7) + b"\1" + number
    assert keys.clone(1, 0x102) == b"C" + bytes(7) + b"\1" + number


@given(INODES, some.none() | some.binary(max_size=200) | LAYOUTS | some.builds(Interleaved, U32))
def test_inodes_come_back(inode: Inode, form: bytes | Striped | Interleaved | None) -> None:
    inode.layout = form if isinstance(form, Striped | Interleaved) else None
    inode.data = form if isinstance(form, bytes) else None
    inode.named = inode.oid if inode.layout is not None else 0
    assert records.decode_inode(inode.ino, inode.encode()) == inode


@pytest.mark.sweep
@given(INODES, some.none() | LAYOUTS | some.binary(max_size=99), INODES)
def test_a_record_takes_attributes_and_inline_bytes_without_being_decoded(
    inode: Inode, form: Striped | bytes | None, opened: Inode
) -> None:
    inode.layout = form if isinstance(form, Striped) else None
    inode.data = form if isinstance(form, bytes) else None
    after = inode.but(
        size=7,
        blocks=8,
        atime_ns=opened.atime_ns,
        mtime_ns=opened.mtime_ns,
        ctime_ns=max(inode.ctime_ns, opened.ctime_ns),
    )
    changed = records.with_attributes(inode.encode(), opened, 7, 8)
    assert records.decode_inode(inode.ino, changed) == after
    if inode.layout is None and inode.copy is None:
        for data in (b"new", b""):
            found = records.decode_inode(inode.ino, records.with_data(changed, data))
            assert found == after.but(data=data or None)


@pytest.mark.sweep
@given(
    some.builds(Dentry, U64, U64, U8),
    some.builds(Garbage, U64, PLAIN_LAYOUTS, U16),
    some.builds(Degraded, U64, U32),
    some.builds(BurstRecord, U64, U16, some.booleans(), some.booleans(), I64, COPIES, MIRRORS),
)
def test_other_records_come_back(
    dentry: Dentry, garbage: Garbage, degraded: Degraded, copy: BurstRecord
) -> None:
    assert records.decode_dentry(dentry.encode()) == dentry
    assert records.decode_garbage(garbage.encode()) == garbage
    assert records.decode_degraded(degraded.encode()) == degraded
    assert records.decode_burst(copy.encode()) == copy


@given(POLICIES, U64, U8, NAMES)
def test_policies_and_entries_come_back(policy: Policy, ino: int, type_: int, name: bytes) -> None:
    assert records.decode_policy(records.encode_policy(policy)) == policy
    assert records.decode_entry(records.encode_entry(ino, type_, name)) == (ino, type_, name)


@given(U64, U64, NAMES, U16)
def test_keys_come_apart(one: int, two: int, name: bytes, server: int) -> None:
    assert keys.stray_parts(keys.stray(one, server)) == (one, server)
    for key in (keys.inode, keys.dirty, keys.orphan, keys.garbage, keys.degraded):
        assert keys.number(key(one)) == one
    assert keys.entry_numbers(keys.entry(one, two)) == (one, two)
    assert keys.dentry_parts(keys.dentry(one, name)) == (one, name)
    assert keys.xattr_parts(keys.xattr(one, name)) == (one, name)


@given(some.integers(0, (1 << 64) - 2), some.integers(0, (1 << 64) - 2), U64)
def test_keys_are_in_numeric_order(one: int, two: int, cookie: int) -> None:
    assert (keys.inode(one) < keys.inode(two)) == (one < two)
    assert (keys.entry(7, one) < keys.entry(7, two)) == (one < two)
    start, end = keys.entries_after(one, two)
    assert (start <= keys.entry(one, cookie) < end) == (cookie > two)
    assert not start <= keys.entry(one + 1, cookie) < end
    start, end = keys.all_of(b"i")
    assert start <= keys.inode(one) < end and not start <= keys.dirty(one) < end


@given(INODES, some.data())
def test_a_record_that_is_cut_short_is_refused(inode: Inode, data: some.DataObject) -> None:
    head = inode.encode()[: records.INODE.size]
    with pytest.raises(Unavailable, match=f"inode {inode.ino} "):
        records.decode_inode(inode.ino, head[: data.draw(some.integers(0, len(head) - 1))])


def test_a_record_of_another_format_is_refused() -> None:
    record = bytes([records.FORMAT + 1]) + an_inode().encode()[1:]
    with pytest.raises(Unavailable, match="reads format 1"):
        records.decode_inode(7, record)


@pytest.mark.parametrize(
    "decode",
    [records.decode_dentry, records.decode_entry, records.decode_garbage, records.decode_degraded],
)
def test_a_damaged_record_is_refused(decode: object) -> None:
    with pytest.raises(Unavailable, match="damaged"):
        decode(b"\1\2\3")
