"""The stored form of chunks."""

import os

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from aifs.data import chunk_codec
from aifs.data.chunk_codec import PLAIN, ZSTD, ChunkHeader
from aifs.layout.interleaved import HEADER_BYTES

GOLDEN = (
    "414946430101000008070605040302010300000005000000e8030000"
    "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1fc49ec5eb"
)


def stored(data: bytes, level: int) -> tuple[ChunkHeader, bytes]:
    memory = memoryview(bytearray(HEADER_BYTES + len(data) + 10))
    memory[HEADER_BYTES : HEADER_BYTES + len(data)] = data
    header = chunk_codec.encode(memory, len(data), level, 2, 3)
    return header, bytes(memory[: HEADER_BYTES + header.stored])


contents = st.binary(min_size=1, max_size=3000) | st.binary(min_size=1, max_size=5).map(
    lambda part: part * 700
)


@given(contents, st.integers(0, 5))
def test_round_trip(data, level):
    header, record = stored(data, level)
    assert chunk_codec.unpack_header(record) == header
    assert (header.oid, header.number, header.raw) == (2, 3, len(data))
    assert header.digest == blake3(data).digest()
    assert len(record) <= HEADER_BYTES + len(data)
    assert (header.codec == ZSTD) == (header.stored < len(data))
    assert chunk_codec.decode(memoryview(record)[HEADER_BYTES:], header.codec, header.raw) == data


def test_what_does_not_shrink_stays_as_it_is():
    data = os.urandom(5000)
    header, record = stored(data, 3)
    assert (header.codec, record[HEADER_BYTES:]) == (PLAIN, data)


def test_golden_header():
    header = ChunkHeader(0x0102030405060708, 3, ZSTD, 5, 1000, bytes(range(32)))
    packed = chunk_codec.pack_header(header)
    assert packed.hex() == GOLDEN
    assert chunk_codec.unpack_header(bytes.fromhex(GOLDEN)) == header


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
