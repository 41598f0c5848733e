"""The order of an epoch as a file, of each format: its bytes against the formats' own readers."""

import io
import json
import os
import pickle
import random
import struct
import tarfile
import tracemalloc
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

np = pytest.importorskip("numpy")
pa = pytest.importorskip("pyarrow")
import pyarrow.parquet as pq  # noqa: E402

from aifs.client import data  # noqa: E402
from aifs.core.errors import DatasetError  # noqa: E402
from aifs.datasets.disk import DiskFile  # noqa: E402
from aifs.datasets.formats.arrow import has_dictionaries  # noqa: E402
from aifs.datasets.formats.reading import InMemory  # noqa: E402
from aifs.datasets.index import Index  # noqa: E402
from aifs.datasets.order_files import parquet, thrift  # noqa: E402
from aifs.datasets.order_files.making import order_bytes  # noqa: E402
from aifs.datasets.order_files.names import OrderName, parsed  # noqa: E402
from aifs.datasets.virtual import Joined, ShiftedNumbers, SourceRange, cut  # noqa: E402
from aifs.layout.order import key_of, permuted  # noqa: E402

FILES, ROWS = 3, 1300


def table(file: int) -> Any:
    numbers = range(file * ROWS, (file + 1) * ROWS)
    texts = [f"row {number}" * (number % 7) for number in numbers]
    return pa.table({"n": numbers, "text": texts, "list": [[number] for number in numbers]})


def write_parquet(directory: Path) -> None:
    for file in range(FILES):
        path = directory / f"{file}.parquet"
        options: dict[str, Any] = {"row_group_size": 300 + file, "write_page_index": file == 1}
        pq.write_table(table(file), path, **options)


def write_arrow(directory: Path) -> None:
    for file, make in enumerate([pa.ipc.new_stream, pa.ipc.new_file, pa.ipc.new_stream]):
        with make(str(directory / f"{file}.arrow"), table(file).schema) as writer:
            writer.write_table(table(file), max_chunksize=300 + file)


def write_jsonl(directory: Path) -> None:
    for file in range(FILES):
        lines = [json.dumps(row) for row in table(file).to_pylist()]
        lines[5] = "\n" + lines[5]
        (directory / f"{file}.jsonl").write_text("\n".join(lines) + "\n" * (file == 1))


def write_tar(directory: Path) -> None:
    for file in range(FILES):
        with tarfile.open(directory / f"{file}.tar", "w") as archive:
            for row in table(file).to_pylist():
                for extension in ("json", "txt"):
                    content = json.dumps(row).encode() if extension == "json" else b"text"
                    folder = "é" if row["n"] % 100 == 0 else "e"  # in a longer header
                    member = tarfile.TarInfo(f"{folder}/{row['n']:06}.{extension}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))


def write_records(directory: Path) -> None:
    for file in range(FILES):
        numbers = range(file * ROWS, (file + 1) * ROWS)
        (directory / f"{file}.data").write_bytes(b"".join(b"%016d" % each for each in numbers))


def write_megatron(directory: Path) -> None:
    """A document has its number as a token, ``number % 5`` times, in as many sequences of it."""
    for file in range(FILES):
        counts = [(file * ROWS + row) % 5 for row in range(ROWS)]
        tokens = np.repeat(np.arange(file * ROWS, (file + 1) * ROWS), counts).astype("<i4")
        (directory / f"{file}.bin").write_bytes(tokens.tobytes())
        ends = np.cumsum([0, *counts])
        head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, len(tokens), ROWS + 1)
        lengths, pointers = np.ones(len(tokens), "<i4"), np.arange(len(tokens)).astype("<i8") * 4
        (directory / f"{file}.idx").write_bytes(
            head + lengths.tobytes() + pointers.tobytes() + ends.astype("<i8").tobytes()
        )


def as_json(row: Any) -> Any:
    return json.loads(row["json"])


def as_tokens(row: Any) -> Any:
    return row.tolist()


def as_it_is(row: Any) -> Any:
    return row


class Format:
    def __init__(
        self, write: Callable[[Path], None], suffix: str, decoded: Callable[[Any], Any], **more: Any
    ) -> None:
        self.write, self.suffix, self.decoded, self.options = write, suffix, decoded, more

    def name(self, seed: int = 7, epoch: int = 0, rank: str = "0-of-1") -> OrderName:
        record = ",record_bytes=16" if self.suffix == ".rec" else ""
        return parsed(f"seed={seed},epoch={epoch},rank={rank}{record}{self.suffix}".encode())


FORMATS = {
    "parquet": Format(write_parquet, ".parquet", as_it_is),
    "arrow": Format(write_arrow, ".arrows", as_it_is),
    "jsonl": Format(write_jsonl, ".jsonl", as_it_is),
    "tar": Format(write_tar, ".tar", as_json),
    "records": Format(write_records, ".rec", as_it_is, format="records", record_bytes=16),
    "megatron": Format(write_megatron, ".bin", as_tokens),
}


class Sources:
    def __init__(self, directory: Path, index: Index) -> None:
        self.index = index
        self._paths = [directory / os.fsdecode(path) for path in index.paths]

    def open(self, source: int) -> DiskFile:
        if source < len(self._paths):
            return DiskFile(str(self._paths[source]))
        return DiskFile(str(self._paths[source - len(self._paths)].with_suffix(".idx")))

    def beside(self, file: int) -> int:
        return len(self._paths) + file

    def apart(self, function: Callable[[Any], bytes], value: Any) -> bytes:
        return pickle.loads(pickle.dumps(function(pickle.loads(pickle.dumps(value)))))

    def read(self, joined: Joined, offset: int = 0, length: int = 1 << 40) -> bytes:
        parts = []
        for piece in joined.pieces(offset, length):
            if isinstance(piece, SourceRange):
                piece = self.open(piece.source).read(piece.offset, piece.length)
            elif isinstance(piece, ShiftedNumbers):
                source, at, whole = piece.numbers
                piece = piece.shifted(self.open(source).read(at, whole))
            assert piece
            parts.append(piece)
        return b"".join(parts)


def dataset_of(directory: Path, format: Format) -> data.Dataset:
    if not directory.exists():
        directory.mkdir()
        format.write(directory)
    return data.open(directory, **format.options)


def made(directory: Path, format: Format, name: OrderName) -> tuple[bytes, Sources, Joined]:
    dataset = dataset_of(directory, format)
    sources = Sources(directory, dataset.index)
    joined = order_bytes(dataset.index, name, sources)
    return sources.read(joined), sources, joined


def rows_in(path: Path, format: Format) -> list[Any]:
    dataset = data.open(path, **format.options)
    with data.reader(dataset, shuffle="none", shares=1, transform=format.decoded) as reader:
        return list(reader)


def expected(directory: Path, format: Format, seed: int, epoch: int) -> list[list[Any]]:
    """Of each block of the epoch its rows."""
    dataset = dataset_of(directory, format)
    count = len(dataset.index.rows)
    key = key_of(seed, epoch, 2, 0)
    numbers = [permuted(place, count, key) for place in range(count)]
    return [
        [*map(format.decoded, dataset.open_block(one).take(range(dataset.index.rows[one])))]
        for one in numbers
    ]


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_it_holds_the_blocks_in_their_order(tmp_path: Path, format: Format) -> None:
    directory, target = tmp_path / "set", tmp_path / f"order{format.suffix}"
    blocks = expected(directory, format, 7, 3)
    rows = []
    for rank in range(4):
        name = format.name(7, 3, f"{rank}-of-4")
        target.write_bytes(made(directory, format, name)[0])
        if format.suffix == ".bin":
            idx = name._replace(suffix=b".idx")
            target.with_suffix(".idx").write_bytes(made(directory, format, idx)[0])
        found = rows_in(target, format)
        assert abs(len(found) - FILES * ROWS / 4) <= max(map(len, blocks))
        rows += found
    assert rows == [row for block in blocks for row in block]


@pytest.mark.parametrize("suffix", [".idx", ".parquet", ".arrows", ".jsonl"])
def test_any_range_is_that_of_the_whole(tmp_path: Path, suffix: str) -> None:
    by_suffix = {format.suffix: format for format in FORMATS.values()}
    format = FORMATS["megatron"] if suffix == ".idx" else by_suffix[suffix]
    name = format.name()._replace(suffix=suffix.encode())
    whole, sources, joined = made(tmp_path / "set", format, name)
    assert len(whole) == joined.size
    rng = random.Random(1)
    for _ in range(100):
        offset, length = rng.randrange(len(whole)), rng.choice([1, 7, 8, 9, 5000, 100_000])
        assert sources.read(joined, offset, length) == whole[offset : offset + length]
    assert sources.read(joined, len(whole), 1) == b""


def test_as_pyarrow_reads_it(tmp_path: Path) -> None:
    wanted = sorted(range(FILES * ROWS))
    for kind in ("parquet", "arrow"):
        format = FORMATS[kind]
        content, *_ = made(tmp_path / kind, format, format.name())
        if kind == "parquet":
            file = pq.ParquetFile(io.BytesIO(content))
            assert file.metadata.num_rows == FILES * ROWS
            assert file.schema_arrow == table(0).schema
            column = file.read(use_threads=False)["n"]
            first = file.metadata.row_group(0).column(0)
            assert first.statistics.has_min_max and not first.has_offset_index
        else:
            stream = pa.ipc.open_stream(content)
            assert stream.schema == table(0).schema
            column = stream.read_all()["n"]
        assert sorted(column.to_pylist()) == wanted != column.to_pylist()


def test_epochs_and_seeds_differ(tmp_path: Path) -> None:
    format = FORMATS["records"]
    names = [format.name(7, 0), format.name(7, 1), format.name(8, 0)]
    contents = {made(tmp_path / "set", format, name)[0] for name in names}
    assert len(contents) == 3 and len({bytes(sorted(each)) for each in contents}) == 1


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_more_ranks_than_blocks(tmp_path: Path, format: Format) -> None:
    """Who has no block has a file without rows, which readers take."""
    directory, target = tmp_path / "set", tmp_path / f"order{format.suffix}"
    index = dataset_of(directory, format).index
    many = len(index.rows) + 40
    names = [format.name(rank=f"{rank}-of-{many}") for rank in range(many)]
    sources = Sources(directory, index)
    smallest = min((order_bytes(index, name, sources) for name in names), key=lambda one: one.size)
    target.write_bytes(sources.read(smallest))
    if format.suffix == ".parquet":
        assert pq.read_table(target).num_rows == 0
    elif format.suffix == ".arrows":
        assert pa.ipc.open_stream(target.read_bytes()).read_all().num_rows == 0
    elif format.suffix == ".tar":
        with tarfile.open(target) as archive:
            assert archive.getnames() == []
    else:
        assert target.read_bytes() == b""


@pytest.mark.parametrize(
    "name, says",
    [
        ("seed=1.zip", "ends with one of"),
        ("seed=x.tar", "'x' is no number"),
        ("seed=01.tar", "'01' is no number"),
        ("epoch=1.tar", "'' is no number"),
        ("seed=1,seed=2.tar", "'seed=2'"),
        ("seed=1,speed=2.tar", "'speed=2'"),
        ("seed=1,rank=2-of-2.tar", "ranks count from 0"),
        ("seed=1,rank=2.tar", "'' is no number"),
        ("seed=1.rec", "has record_bytes="),
        ("seed=1,record_bytes=5.tar", "has record_bytes="),
        ("\udcff=1.tar", "in the name of an order file"),
    ],
)
def test_names_that_are_none(name: str, says: str) -> None:
    with pytest.raises(DatasetError, match=says):
        parsed(os.fsencode(name))


def test_what_cannot_be_put_into_an_order_is_named(tmp_path: Path) -> None:
    def refused(kind: str, write: Callable[[Path], None]) -> str:
        format = Format(write, FORMATS[kind].suffix, as_it_is)
        directory = tmp_path / str(len(os.listdir(tmp_path)))
        with pytest.raises(DatasetError) as caught:
            made(directory, format, format.name())
        return str(caught.value)

    def two_schemas(directory: Path) -> None:
        for file, column in enumerate("nm"):
            pq.write_table(pa.table({column: [1, 2]}), directory / f"{file}.parquet")
            with pa.ipc.new_stream(directory / f"{file}.arrow", pa.schema([(column, "i8")])) as out:
                out.write_table(pa.table({column: pa.array([1], "i8")}))

    def dictionaries(directory: Path) -> None:
        values = pa.array([[{"a": "x"}]]).cast(
            pa.list_(pa.struct([("a", pa.dictionary(pa.int8(), pa.string()))]))
        )
        columns = pa.table({"n": [1], "deep": values})
        with pa.ipc.new_file(directory / "0.arrow", columns.schema) as out:
            out.write_table(columns)

    def compressed(directory: Path) -> None:
        import gzip

        (directory / "0.jsonl.gz").write_bytes(gzip.compress(b"{}\n"))

    assert refused("parquet", two_schemas) == "1.parquet: its schema is not that of the other files"
    assert refused("jsonl", compressed).startswith("0.jsonl.gz: compressed lines")
    says = "0.arrow: columns with dictionaries cannot be put into another order"
    assert refused("arrow", dictionaries) == says
    (tmp_path / "arrows").mkdir()
    two_schemas(tmp_path / "arrows")
    for path in (tmp_path / "arrows").glob("*.parquet"):
        path.unlink()
    with pytest.raises(DatasetError, match="1.arrow: its schema is not that"):
        made(tmp_path / "arrows", FORMATS["arrow"], FORMATS["arrow"].name())


def test_too_many_footers_are_refused_before_any_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding took a minute, and then the last one was too many."""
    format = FORMATS["parquet"]
    monkeypatch.setattr(parquet, "FOOTERS_MAX", 1000)
    monkeypatch.setattr(parquet, "footer_of", lambda files: pytest.fail("one was looked into"))
    with pytest.raises(DatasetError, match="more than 1000 bytes of footers"):
        made(tmp_path / "set", format, format.name())


def test_an_index_that_lies_is_refused(tmp_path: Path) -> None:
    """It is a user's file."""
    format = FORMATS["jsonl"]
    index = dataset_of(tmp_path / "set", format).index
    sources = Sources(tmp_path / "set", index)
    for wrong in (
        {"offsets": [index.sizes[0], *index.offsets[1:]]},
        {"offsets": [-1, *index.offsets[1:]]},
        {"rows": [-5, *index.rows[1:]]},
        {"rows": [0, *index.rows[1:]]},
        {"first_blocks": [5, *index.first_blocks[1:]]},
        {"first_blocks": [*index.first_blocks[:-1], 1]},
    ):
        broken = Index(**{name: getattr(index, name) for name in NAMES} | wrong)
        with pytest.raises(DatasetError, match="index is damaged"):
            order_bytes(broken, format.name(), sources)


NAMES = (
    *("format", "paths", "sizes", "mtimes_ns", "first_blocks"),
    *("offsets", "lengths", "rows", "catalogue"),
)


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Parquet file of several row groups, in a directory of its own."""
    path = tmp_path_factory.mktemp("grouped") / "0.parquet"
    pq.write_table(table(0), path, row_group_size=500, write_page_index=True)
    return path


def footer_of(content: bytes) -> bytes:
    length = int.from_bytes(content[-8:-4], "little")
    return content[-8 - length : -8]


def test_thrift_is_written_as_it_was_read(grouped: Path) -> None:
    footer = footer_of(grouped.read_bytes())
    assert thrift.StructReader(footer, 10_000).rewrite({}) == footer
    with pytest.raises(DatasetError, match="nested without an end"):
        thrift.StructReader(b"\x19" * 100_000, 1 << 20).rewrite({})


@pytest.mark.parametrize("head", [b"", b"\x49\xfc\x80\x80\x10"])
def test_fields_of_a_footer_are_bounded_and_not_kept(
    monkeypatch: pytest.MonkeyPatch, head: bytes
) -> None:
    """20 MiB of the smallest ones took 2.5 GB and 150 s of the daemon. Here: booleans, and row
    groups without anything."""
    monkeypatch.setattr(parquet, "FIELDS_MAX", 1 << 13)
    damaged = head + (bytes(1 << 18) if head else b"\xf1" * (1 << 18))
    tracemalloc.start()
    try:
        with pytest.raises(DatasetError, match="a.parquet: .* too many fields"):
            parquet.footer_of([parquet.FileFooter("a.parquet", damaged, {})])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@given(st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=5))
@settings(max_examples=200)
def test_damaged_footers(grouped: Path, changes: list[tuple[float, int]]) -> None:
    """They are refused with the file's name, or pass, and nothing else."""
    content = grouped.read_bytes()
    broken = bytearray(footer_of(content))
    for place, byte in changes:
        broken[int(place * len(broken))] = byte
    index = data.open(grouped.parent).index

    class Broken(Sources):
        def open(self, source: int) -> Any:
            return InMemory(content[: -8 - len(broken)] + broken + content[-8:])

    try:
        order_bytes(index, FORMATS["parquet"].name(), Broken(grouped.parent, index))
    except DatasetError as error:
        assert str(error).startswith("0.parquet: ")


def test_numbers_are_shifted() -> None:
    rng = random.Random(2)
    numbers = [rng.randrange(1 << 40, 1 << 62) for _ in range(3000)]
    source = struct.pack("<3000q", *numbers)
    for plus in (1, -1, 12345, -(1 << 39)):
        whole = struct.pack("<3000q", *(number + plus for number in numbers))
        piece = ShiftedNumbers(0, 0, len(source), plus)
        for _ in range(50):
            skip, length = rng.randrange(len(source)), rng.randrange(1, 9000)
            (found,) = cut(iter([piece]), skip, length)
            assert isinstance(found, ShiftedNumbers)
            (again,) = cut(iter([found]), min(3, found.length - 1), length)
            assert isinstance(again, ShiftedNumbers)
            for each, at in ((found, skip), (again, skip + min(3, found.length - 1))):
                _, offset, size = each.numbers
                bytes_ = each.shifted(source[offset : offset + size])
                assert bytes_ == whole[at : at + each.length]


def test_fields_of_an_arrow_schema_are_bounded_and_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A schema is anybody's: all fields that it names were held before one was looked at."""
    count = 1 << 15
    at = 44 + 4 * count  # of the only field, which each entry of the list leads to
    head = struct.pack("<I5H2xiI", 16, 10, 8, 0, 0, 4, 12, 12)  # the message
    monkeypatch.setattr("aifs.datasets.formats.arrow._FIELDS_MAX", 4096)
    head += struct.pack("<4HiII", 8, 8, 0, 4, 8, 4, count)  # the schema, and its list
    entries = array("I", range(at + 4 - 44, at + 4 - 44 - 4 * count, -4)).tobytes()
    message = head + entries + struct.pack("<HHi", 4, 4, 4)
    tracemalloc.start()
    try:
        with pytest.raises(DatasetError, match="a schema of more than 4096 fields"):
            has_dictionaries(bytes(4) + message)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
