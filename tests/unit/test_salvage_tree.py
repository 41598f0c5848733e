"""Names for files of which hints are all that is known."""

from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from aifs.check.salvage.inventory import Part, Saved, place
from aifs.check.salvage.tree import plant
from aifs.data.objects.object_label import Label
from aifs.layout.striped import Striped


def saved(ino: int, path: bytes, mtime_ns: int = 0) -> Saved:
    return Saved(ino, ino, 1, 0o100644, ino, ino, mtime_ns, path)


def paths(*files: Saved) -> dict[int, bytes]:
    _, named = plant(files, count(1000).__next__)
    return {one.saved.ino: one.path for one in named}


names = st.sampled_from(
    [b"a", b"b", b"?", b"", b".", b"..", b"a\0", b"n" * 255, b"n" * 256, b"lost+found"]
)
hints = st.lists(names, max_size=4).map(b"/".join) | st.lists(names, max_size=4).map(
    lambda parts: b"/" + b"/".join(parts)
)


@given(st.lists(st.tuples(hints, st.integers(0, 3)), max_size=12))
def test_any_hints_make_a_tree(given_hints: list[tuple[bytes, int]]) -> None:
    files = [saved(ino, path, mtime) for ino, (path, mtime) in enumerate(given_hints, 10)]
    directories, named = plant(files, count(1000).__next__)
    everything = [directory.path for directory in directories] + [one.path for one in named]
    assert len(everything) == len(set(everything)), "no path twice"
    assert {one.saved.ino for one in named} == {one.ino for one in files}
    by_path = {directory.path: directory for directory in directories}
    for item in [*directories[1:], *named]:
        above, _, name = item.path.rpartition(b"/")
        assert item.parent == by_path[above].ino
        assert 0 < len(name) <= 255 and name not in (b".", b"..") and b"\0" not in name
    for directory in directories:
        below = sum(other.path.rpartition(b"/")[0] == directory.path for other in directories[1:])
        assert directory.links == 2 + below


def test_the_newest_has_the_name() -> None:
    assert paths(saved(5, b"/a/b", 1), saved(6, b"/a/b", 2), saved(7, b"/a", 3)) == {
        5: b"/a/b.5",
        6: b"/a/b",
        7: b"/a.7",
    }


def test_what_has_no_name_is_found_in_lost_and_found() -> None:
    assert paths(
        saved(5, b""), saved(6, b"f/dir/file"), saved(7, b"/dir/?"), saved(8, b"/?/x")
    ) == {
        5: b"/lost+found/5",
        6: b"/lost+found/dir/file",
        7: b"/dir/7",
        8: b"/?/x",
    }


def part(server: int, column: int, layout: Striped) -> Part:
    return Part(server, 10, 8, 0, column, Label(1, 2, layout) if column >= 0 else None)


def test_columns_are_where_they_are_found() -> None:
    layout = Striped(4096, (0, 1, 2), 1, 1)
    moved = place([part(0, 0, layout), part(7, 1, layout), part(2, -1, layout)], layout, range(8))
    assert moved.layout.servers == (0, 7, 2)
    # Column 0 was on 0 when this was written, but 0 has column 1 now.
    crossed = place([part(0, 1, layout), part(2, 2, layout)], layout, range(8))
    assert crossed.layout.servers == (3, 0, 2)
