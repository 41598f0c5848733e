"""The arithmetic of the striped layout, against a byte-by-byte model."""

from hypothesis import given
from hypothesis import strategies as st

from aifs.layout.striped import Striped

layouts = st.builds(
    Striped, unit=st.integers(1, 9), servers=st.integers(1, 5).map(lambda count: tuple(range(count)))
)


def home(layout: Striped, byte: int) -> tuple[int, int]:
    """Object and offset of one byte, by the definition."""
    number, within = divmod(byte, layout.unit)
    return number % len(layout.servers), number // len(layout.servers) * layout.unit + within


@given(layout=layouts, offset=st.integers(0, 200), length=st.integers(0, 100))
def test_extents_cover_the_range_byte_by_byte(layout, offset, length):
    found = []
    for extent in layout.extents(offset, length):
        assert extent.length > 0
        for step in range(extent.length):
            found.append((extent.file_offset + step, (extent.index, extent.object_offset + step)))
    assert found == [(byte, home(layout, byte)) for byte in range(offset, offset + length)]


@given(layout=layouts, offset=st.integers(0, 200), length=st.integers(0, 100))
def test_a_range_is_one_run_in_each_object(layout, offset, length):
    """What lets one request be one request to each server."""
    ends: dict[int, int] = {}
    for extent in layout.extents(offset, length):
        assert ends.get(extent.index, extent.object_offset) == extent.object_offset
        ends[extent.index] = extent.object_offset + extent.length


@given(layout=layouts, size=st.integers(0, 300))
def test_object_lengths_are_those_of_a_file_that_was_written_whole(layout, size):
    lengths = [0] * len(layout.servers)
    for byte in range(size):
        index, offset = home(layout, byte)
        lengths[index] = max(lengths[index], offset + 1)
    assert [layout.object_length(index, size) for index in range(len(layout.servers))] == lengths


def test_large_files():
    layout = Striped(1 << 20, (0, 1, 2, 3))
    assert list(layout.extents((16 << 40) - 1, 2)) == [
        (3, (4 << 40) - 1, (16 << 40) - 1, 1),
        (0, 4 << 40, 16 << 40, 1),
    ]
    assert layout.object_length(3, 16 << 40) == 4 << 40
