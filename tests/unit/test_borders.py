"""Where files are cut: at tensors, alike wherever they lie; and never wrongly, whatever a file
pretends to be.
"""

import io
import itertools
import json
import random
import struct
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aifs.layout.borders import SMALL, cut

CHUNK = 256 << 10


def ranges(data: bytes, chunk: int = CHUNK, size: int | None = None) -> list[tuple[int, int]]:
    return cut(
        lambda offset, length: data[offset : offset + length],
        len(data) if size is None else size,
        chunk,
    )


def require_cover(found: list[tuple[int, int]], size: int, chunk: int = CHUNK) -> None:
    """Without gaps, none empty, none too long."""
    assert all(0 < length <= chunk for _, length in found)
    assert [offset for offset, _ in found] == list(
        itertools.accumulate((n for _, n in found), initial=0)
    )[:-1]
    assert sum(length for _, length in found) == size


def plain(size: int, chunk: int = CHUNK) -> list[tuple[int, int]]:
    return [(offset, min(chunk, size - offset)) for offset in range(0, size, chunk)]


def pieces(data: bytes, found: list[tuple[int, int]]) -> set[bytes]:
    return {data[offset : offset + length] for offset, length in found if length > 10}


def safetensors(tensors: list[bytes], spaces: int = 0) -> bytes:
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for number, tensor in enumerate(tensors):
        header[f"layer.{number}"] = {
            "dtype": "U8",
            "shape": [len(tensor)],
            "data_offsets": [end, end + len(tensor)],
        }
        end += len(tensor)
    text = json.dumps(header, indent=spaces or None).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(tensors)


def archive(tensors: list[bytes], stem: str = "rank0", method: int = zipfile.ZIP_STORED) -> bytes:
    """What torch.save writes, but for its padding."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as made:
        made.writestr(f"{stem}/data.pkl", b"a pickle")
        for number, tensor in enumerate(tensors):
            made.writestr(f"{stem}/data/{number}", tensor)
        made.writestr(f"{stem}/version", b"3\n")
    return file.getvalue()


MAKERS = {"safetensors": safetensors, "archive": archive}
rng = random.Random(3)


@pytest.mark.parametrize("maker", MAKERS)
def test_equal_tensors_are_cut_alike_wherever_they_lie(maker):
    shared = [rng.randbytes(size) for size in (3 * CHUNK + 17, SMALL, CHUNK)]
    one = MAKERS[maker](
        [rng.randbytes(1000), shared[0], rng.randbytes(SMALL - 1), shared[1], shared[2]]
    )
    other = MAKERS[maker](
        [shared[2], rng.randbytes(CHUNK + 5), shared[0], shared[1], rng.randbytes(333)]
    )
    for data in (one, other):
        require_cover(ranges(data), len(data))
    both = pieces(one, ranges(one)) & pieces(other, ranges(other))
    assert sum(map(len, both)) == sum(map(len, shared))


def test_neighbours_that_are_small_are_one_range():
    small = [rng.randbytes(5000) for _ in range(100)]
    data = safetensors([rng.randbytes(SMALL), *small, rng.randbytes(SMALL)])
    found = ranges(data)
    header = len(data) - 2 * SMALL - 500_000
    assert found == [
        (0, header),
        (header, SMALL),
        (header + SMALL, CHUNK),
        (header + SMALL + CHUNK, 500_000 - CHUNK),
        (len(data) - SMALL, SMALL),
    ]


@pytest.mark.sweep
def test_a_header_longer_than_what_is_read_at_once():
    tensors = [rng.randbytes(SMALL) for _ in range(30)]
    for spaces in (0, 1):
        data = safetensors([b""] * 20_000 + tensors, spaces)
        assert len(data) - 30 * SMALL > 1 << 20
        assert pieces(data, ranges(data)) >= set(tensors)


def test_a_zip64_archive():
    """Offsets beyond 4 GiB, of which only the end is there."""
    tensor, shift = 1 << 20, 5 << 30
    local = (
        struct.pack(
            "<4s5H3I2H", b"PK\3\4", 45, 0, 0, 0, 0, 0, 2**32 - 1, 2**32 - 1, len(b"x/data/0"), 4
        )
        + b"x/data/0FB\0\0"
    )
    extra = struct.pack("<HH3Q", 1, 24, tensor, tensor, shift)
    fields = (45, 45, *[0] * 5, *[2**32 - 1] * 2, 8, len(extra), *[0] * 4, 2**32 - 1)
    entry = struct.pack("<4s6H3I5H2I", b"PK\1\2", *fields) + b"x/data/0" + extra
    directory = shift + len(local) + tensor
    end64 = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, len(entry), directory)
    place = struct.pack("<4sIQI", b"PK\6\7", 0, directory + len(entry), 1)
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 2**16 - 1, 2**16 - 1, 2**32 - 1, 2**32 - 1, 0)
    tail = entry + end64 + place + end
    size = directory + len(tail)
    parts = {0: b"PK\3\4" + bytes(5), shift: local, directory: tail}

    def read(offset: int, length: int) -> bytes:
        base = max(start for start in parts if start <= offset)
        return parts[base][offset - base : offset - base + length]

    found = cut(read, size, 4 << 20)
    require_cover(found, size, 4 << 20)
    assert (shift + len(local), tensor) in found


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x",
        rng.randbytes(3 * CHUNK + 1),
        struct.pack("<Q", 2**63) + b"{" + bytes(SMALL),
        struct.pack("<Q", 0) + b"{" + bytes(SMALL),
        struct.pack("<Q", 200_000) + b"{" + bytes(SMALL),  # longer than the file
        struct.pack("<Q", 60) + b'{"a":{"data_offsets":[0,99999999999]}}'.ljust(60) + bytes(SMALL),
        struct.pack("<Q", 60) + b'{"a":{"data_offsets":[99999,3]}}'.ljust(60) + bytes(2 * SMALL),
        struct.pack("<Q", 90)
        + b'{"a":{"data_offsets":[0,65536]},"b":{"data_offsets":[9,70000]}}'.ljust(90)
        + bytes(2 * SMALL),
        struct.pack("<Q", 60) + b'{"a":{"data_offsets":[-5,65536]}}'.ljust(60) + bytes(2 * SMALL),
        b"PK\3\4" + bytes(SMALL),
        archive([rng.randbytes(SMALL)])[:-30],
        archive([rng.randbytes(SMALL)]) + b"more",
        archive([rng.randbytes(SMALL)], method=zipfile.ZIP_DEFLATED),
    ],
)
def test_what_is_odd_is_cut_plainly(data):
    assert ranges(data) == plain(len(data))


@pytest.mark.sweep
@given(st.data())
def test_damage_never_hurts(data):
    made = bytearray(data.draw(st.sampled_from([_SAFE, _ZIP])))
    places = st.integers(0, 400) | st.integers(len(made) - 700, len(made) - 1)
    for place, value in data.draw(st.lists(st.tuples(places, st.integers(0, 255)), max_size=6)):
        made[place] = value
    size = data.draw(st.sampled_from([len(made), len(made) - 1, SMALL, len(made) + 1000, 1 << 30]))
    require_cover(ranges(bytes(made), 1 << 20, size), size, 1 << 20)


_SAFE = safetensors([rng.randbytes(SMALL + 5), rng.randbytes(10), rng.randbytes(2 * SMALL)])
_ZIP = archive([rng.randbytes(SMALL + 5), rng.randbytes(10), rng.randbytes(2 * SMALL)])


def test_more_tensors_than_anybody_has_are_not_listed():
    def read(offset: int, length: int) -> bytes:
        if offset < 9:
            return (struct.pack("<Q", 64 << 20) + b"{")[offset : offset + length]
        return (b'"data_offsets":[0,0],' * (length // 21 + 1))[:length]

    size = 80 << 20
    assert cut(read, size, 4 << 20) == plain(size, 4 << 20)
