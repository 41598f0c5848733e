"""A tree as a tar archive, against Python's tarfile."""

import io
import random
import stat
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aifs.datasets.archive import Archive, ArchiveMember, header_of, is_member
from aifs.datasets.virtual import SourceRange, cut

NS = 10**9
MEMBERS = [
    ArchiveMember(b"d", 1, stat.S_IFDIR | 0o2755, 0, 0, 0, 5 * NS),
    ArchiveMember(b"d/one", 2, stat.S_IFREG | 0o644, 1000, 1001, 700, 1_700_000_000 * NS + 5),
    ArchiveMember(b"d/empty", 3, stat.S_IFREG | 0o4755, 0, 0, 0, 0),
    ArchiveMember(b"block", 4, stat.S_IFREG | 0o600, 0, 0, 1024, NS),
    ArchiveMember(b"l" * 100, 5, stat.S_IFREG | 0o600, 0, 0, 3, NS),
    ArchiveMember(b"n/" * 120 + b"deep", 6, stat.S_IFREG | 0o600, 0, 0, 1, NS + 123456789),
    ArchiveMember("grün".encode(), 7, stat.S_IFREG | 0o600, 0, 0, 9, NS),
    ArchiveMember(b"no \xff text", 8, stat.S_IFREG | 0o600, 0, 0, 9, NS),
    ArchiveMember(b"owner", 9, stat.S_IFREG | 0o600, 3_000_000, 4_000_000_000, 9, NS),
    ArchiveMember(b"before 1970", 10, stat.S_IFREG | 0o600, 0, 0, 9, -7 * NS),
    ArchiveMember(b"link", 11, stat.S_IFLNK | 0o777, 0, 0, 0, NS, b"d/one"),
    ArchiveMember(b"long", 12, stat.S_IFLNK | 0o777, 0, 0, 0, NS, b"../" * 50 + b"x"),
    ArchiveMember(b"fifo", 13, stat.S_IFIFO | 0o600, 0, 0, 0, NS),
]


def archive_of(members: list[ArchiveMember]) -> Archive:
    archive = Archive()
    for member in members:
        archive.add(member)
    return archive


def bytes_of(source: int, size: int) -> bytes:
    return random.Random(source).randbytes(size)


def read(archive: Archive, offset: int, length: int) -> bytes:
    parts = []
    for piece in archive.pieces(offset, length):
        if isinstance(piece, SourceRange):
            assert piece.length
            end = piece.offset + piece.length
            size = archive.sizes[piece.source]
            piece = bytes_of(archive.sources[piece.source], size)[piece.offset : end]
        assert piece
        parts.append(piece)
    return b"".join(parts)


@pytest.mark.parametrize("count", [1, 4, len(MEMBERS)])
def test_tarfile_reads_what_was_added(count: int) -> None:
    archive = archive_of(MEMBERS[:count])
    whole = read(archive, 0, archive.size + 5)
    assert len(whole) == archive.size and archive.size % tarfile.RECORDSIZE == 0
    with tarfile.open(fileobj=io.BytesIO(whole), errors="surrogateescape") as tar:
        found = tar.getmembers()
        assert len(found) == count
        for member, info in zip(MEMBERS, found, strict=False):
            assert info.name.encode("utf-8", "surrogateescape") == member.name
            assert info.linkname.encode() == member.target
            assert info.mode == stat.S_IMODE(member.mode)
            assert (info.uid, info.gid, info.size) == (member.uid, member.gid, member.size)
            assert int(info.mtime) == member.mtime_ns // NS
            if info.isreg():
                file = tar.extractfile(info)
                assert file is not None
                assert file.read() == bytes_of(member.source, member.size)


@pytest.mark.parametrize(
    "member",
    [
        ArchiveMember(b"d" * 99, 1, stat.S_IFDIR | 0o7777, 8**7 - 1, 8**7 - 1, 0, 0),
        ArchiveMember(b"f" * 99, 1, stat.S_IFREG, 0, 0, 8**11 - 1, 8**11 * NS - 1),
        ArchiveMember(b"l", 1, stat.S_IFLNK | 0o777, 0, 0, 0, NS, b"t" * 99),
    ],
)
def test_a_header_of_ustar_is_that_of_pax(member: ArchiveMember) -> None:
    """Where ustar can just say it all."""
    info = tarfile.TarInfo.frombuf(header_of(member), "ascii", "strict")
    assert info.tobuf(tarfile.PAX_FORMAT, "ascii", "strict") == header_of(member)


def test_any_range_is_that_of_the_whole() -> None:
    archive = archive_of(MEMBERS)
    whole = read(archive, 0, archive.size)
    rng = random.Random(3)
    edges = [edge + by for edge in range(0, archive.size, 512) for by in (-1, 0, 1)]
    for _ in range(600):
        offset = max(0, rng.choice([rng.randrange(archive.size), rng.choice(edges)]))
        length = rng.choice([1, 511, 512, 513, rng.randrange(1, 9000)])
        assert read(archive, offset, length) == whole[offset : offset + length]
    assert read(archive, archive.size, 9) == b""


def test_huge_files_have_their_size() -> None:
    archive = archive_of([ArchiveMember(b"huge", 1, stat.S_IFREG | 0o600, 0, 0, 9 << 30, NS)])
    header = b"".join(piece for piece in archive.pieces(0, 4096) if isinstance(piece, bytes))
    with tarfile.open(fileobj=io.BytesIO(header + bytes(512))) as tar:
        first = tar.next()
        assert first is not None and first.size == 9 << 30
    assert archive.size > 9 << 30


def test_sockets_and_devices_are_left_out() -> None:
    assert not is_member(stat.S_IFSOCK) and not is_member(stat.S_IFBLK)


def test_cut_joins_what_it_was_given() -> None:
    rng = random.Random(1)
    whole = rng.randbytes(5000)
    for _ in range(200):
        pieces, at = [], 0
        while at < len(whole):
            size = min(rng.randrange(1, 700), len(whole) - at)
            is_source = rng.random() < 0.5
            pieces.append(SourceRange(0, at, size) if is_source else whole[at : at + size])
            at += size
        skip, length = rng.randrange(5200), rng.randrange(1, 3000)
        found = [
            whole[each.offset : each.offset + each.length]
            if isinstance(each, SourceRange)
            else each
            for each in cut(iter(pieces), skip, length)
        ]
        assert b"".join(found) == whole[skip : skip + length]
        assert all(found)


@given(
    name=st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=98),
    kind=st.sampled_from([stat.S_IFREG, stat.S_IFDIR, stat.S_IFIFO]),
    mode=st.integers(0, 0o7777),
    owner=st.integers(0, 8**7 - 1),
    size=st.integers(0, 8**11 - 1),
    seconds=st.integers(0, 8**11 - 1),
)
def test_a_plain_header_is_that_of_tarfile(
    name: str, kind: int, mode: int, owner: int, size: int, seconds: int
) -> None:
    size = size if kind == stat.S_IFREG else 0
    info = tarfile.TarInfo(name.strip("/") or "x")
    info.type = {
        stat.S_IFREG: tarfile.REGTYPE,
        stat.S_IFDIR: tarfile.DIRTYPE,
        stat.S_IFIFO: tarfile.FIFOTYPE,
    }[kind]
    info.mode, info.uid, info.gid, info.size, info.mtime = mode, owner, owner // 2, size, seconds
    member = ArchiveMember(
        info.name.encode(), 1, kind | mode, owner, owner // 2, size, seconds * NS + 7
    )
    assert header_of(member) == info.tobuf(tarfile.USTAR_FORMAT)
