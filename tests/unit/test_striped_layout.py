"""The arithmetic of the striped layout, against a byte-by-byte model."""

from hypothesis import given
from hypothesis import strategies as st

from aifs.layout.striped import Striped

layouts = st.builds(
    Striped,
    unit=st.integers(1, 9),
    servers=st.integers(1, 5).map(lambda count: tuple(range(count))),
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
            found.append((extent.file_offset + step, (extent.column, extent.object_offset + step)))
    assert found == [(byte, home(layout, byte)) for byte in range(offset, offset + length)]


@given(layout=layouts, offset=st.integers(0, 200), length=st.integers(0, 100))
def test_a_range_is_one_run_in_each_object(layout, offset, length):
    """What lets one request be one request to each server."""
    ends: dict[int, int] = {}
    for extent in layout.extents(offset, length):
        assert ends.get(extent.column, extent.object_offset) == extent.object_offset
        ends[extent.column] = extent.object_offset + extent.length


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


@st.composite
def protected_layouts(draw):
    replicas, parity = draw(st.sampled_from([(2, 0), (3, 0), (1, 1), (1, 2)]))
    columns = draw(st.integers(1, 4)) * replicas + parity
    return Striped(draw(st.integers(1, 9)), tuple(range(10, 10 + columns)), replicas, parity)


@given(layout=protected_layouts(), offset=st.integers(0, 200), length=st.integers(0, 100))
def test_data_columns_are_those_of_a_plain_layout(layout, offset, length):
    assert layout.is_protected and not layout.data.is_protected
    assert layout.width * layout.replicas + layout.parity == len(layout.servers)
    assert list(layout.extents(offset, length)) == list(layout.data.extents(offset, length))
    for column in range(layout.width):
        assert layout.object_length(column, length) == layout.data.object_length(column, length)


@given(layout=protected_layouts(), size=st.integers(0, 300))
def test_other_columns_are_as_long_as_what_they_stand_for(layout, size):
    for column in range(layout.width, len(layout.servers)):
        data = layout.data_column(column)
        assert (data is None) == bool(layout.parity)
        assert layout.object_length(column, size) == layout.object_length(data or 0, size)


@given(layout=protected_layouts(), lost=st.integers(0, 0xFFFF))
def test_what_survives(layout, lost):
    columns = range(len(layout.servers))
    lost &= (1 << len(columns)) - 1
    left = {layout.data_column(column) for column in columns if not lost >> column & 1}
    if layout.parity:
        assert layout.survives(lost) == (len(columns) - lost.bit_count() >= layout.width)
    else:
        assert layout.survives(lost) == (left == set(range(layout.width)))
    spare = layout.spare(lost)
    assert layout.spare(0) == layout.tolerates and layout.survives(lost) == (spare >= 0)
    for column in columns:
        assert layout.spare(lost | 1 << column) >= spare - 1


def test_a_column_moves():
    assert Striped(8, (3, 1, 2), parity=1).moved(1, 7) == Striped(8, (3, 7, 2), parity=1)
    assert Striped(8, (0, 1, 2, 3), replicas=2).copies(3) == (1, 3)
    assert Striped(8, (0, 1)).copies(1) == (1,) and Striped(8, (0, 1, 2), parity=1).copies(2) == (
        2,
    )
