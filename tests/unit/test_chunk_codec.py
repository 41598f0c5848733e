"""The stored form of chunks."""

import os

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from aifs.data.containers import chunk_codec
from aifs.data.containers.chunk_codec import HINT_MAX, PLAIN, RECORDS, ZSTD, FileRecord, Header
from aifs.layout.interleaved import HEADER_BYTES, RECORD_MAX, RECORDS_HEAD
from aifs.layout.striped import Striped

GOLDEN_RECORDS = (
    "0101010300000100"
    "050001000300"
    "07000000000000000800000000000000ffffffffffffff7fa4810000e803000064000000000057c07e6816180000100002000000"
    "0500612f622f63"
)
GOLDEN = (
    "414946430101000008070605040302010000000000000001030000000000100005000000e8030000"
    "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f42d0dd8f"
)


def stored(data: bytes, level: int) -> tuple[Header, bytes]:
    memory = memoryview(bytearray(HEADER_BYTES + len(data) + 10))
    memory[HEADER_BYTES : HEADER_BYTES + len(data)] = data
    header = chunk_codec.encode(memory, len(data), level, 1, 2, 3, 4096)
    return header, bytes(memory[: HEADER_BYTES + header.stored])


contents = st.binary(min_size=1, max_size=3000) | st.binary(min_size=1, max_size=5).map(
    lambda part: part * 700
)


@given(contents, st.integers(0, 5))
def test_round_trip(data, level):
    header, record = stored(data, level)
    assert chunk_codec.unpack_header(record) == header
    assert (header.ino, header.oid, header.index, header.chunk, header.raw) == (
        1,
        2,
        3,
        4096,
        len(data),
    )
    assert header.digest == blake3(data).digest()
    assert len(record) <= HEADER_BYTES + len(data)
    assert (header.codec == ZSTD) == (header.stored < len(data))
    assert chunk_codec.decode(memoryview(record)[HEADER_BYTES:], header.codec, header.raw) == data


def test_what_does_not_shrink_stays_as_it_is():
    data = os.urandom(5000)
    header, record = stored(data, 3)
    assert (header.codec, record[HEADER_BYTES:]) == (PLAIN, data)


def test_golden_header():
    header = Header(0x0102030405060708, 1 << 56, 3, 1 << 20, ZSTD, 5, 1000, bytes(range(32)))
    packed = chunk_codec.pack_header(header)
    assert packed.hex() == GOLDEN
    assert chunk_codec.unpack_header(bytes.fromhex(GOLDEN)) == header


numbers = [st.integers(0, (1 << bits) - 1) for bits in (64, 64, 64, 32, 32, 32)]
file_records = st.builds(
    FileRecord,
    *numbers,
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.integers(0, 1 << 22),
    st.integers(0, 1 << 32 - 1),
    st.binary(max_size=HINT_MAX),
)
layouts = st.builds(
    Striped,
    st.integers(1, 1 << 30),
    st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=32).map(tuple),
    st.integers(1, 8),
    st.integers(0, 8),
)


@given(st.integers(1, 1 << 60), layouts, st.lists(file_records, max_size=20), st.data())
def test_records_of_files(container, layout, records, data):
    packed = chunk_codec.pack_records(container, layout, records)
    header, body = chunk_codec.unpack_header(packed), packed[HEADER_BYTES:]
    assert (header.ino, header.oid, header.codec) == (0, container, RECORDS)
    assert header.stored == header.raw == len(body)
    assert (
        len(packed)
        == chunk_codec.records_space(layout, records)
        <= RECORDS_HEAD + RECORD_MAX * len(records)
    )
    assert header.digest == chunk_codec.digest_of(
        chunk_codec.decode(memoryview(body), RECORDS, len(body))
    )
    assert chunk_codec.unpack_records(body) == (layout, records)
    cut = data.draw(st.integers(0, len(body) - 1))
    try:
        _, fewer = chunk_codec.unpack_records(body[:cut])
    except ValueError:
        return
    assert fewer == records[: len(fewer)], "cut between two records"


def test_golden_records():
    record = FileRecord(
        7, 8, (1 << 63) - 1, 0o100644, 1000, 100, 1735689600000000000, 1 << 20, 2, b"a/b/c"
    )
    layout = Striped(65536, (5, 1, 3), 1, 1)
    body = chunk_codec.pack_records(9, layout, [record])[HEADER_BYTES:]
    assert body.hex() == GOLDEN_RECORDS
    assert chunk_codec.unpack_records(bytes.fromhex(GOLDEN_RECORDS)) == (layout, [record])
    with pytest.raises(ValueError, match="format 2"):
        chunk_codec.unpack_records(b"\2" + body[1:])


@given(st.integers(0, HEADER_BYTES - 1), st.integers(1, 255))
def test_a_damaged_header_is_none(place, change):
    packed = bytearray(stored(b"x" * 100, 0)[1][:HEADER_BYTES])
    packed[place] ^= change
    with pytest.raises(ValueError, match="header"):
        chunk_codec.unpack_header(packed)
    with pytest.raises(ValueError, match="header"):
        chunk_codec.unpack_header(packed[:place])


@given(st.binary(max_size=300), st.integers(0, 2), st.integers(0, 5000))
def test_anything_can_be_decoded_or_refused(data, codec, raw):
    try:
        assert len(chunk_codec.decode(memoryview(data), codec, raw)) == raw
    except ValueError:
        pass
