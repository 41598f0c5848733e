"""Each format against its own library's reader; torn, foreign and hostile files."""

import gc
import gzip
import io
import json
import os
import random
import struct
import tarfile
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

np = pytest.importorskip("numpy")
pa = pytest.importorskip("pyarrow")
import pyarrow.parquet as pq

from aifs.core.errors import DatasetError
from aifs.datasets.formats import files, parquet
from aifs.datasets.formats.known import FORMATS, format_of, format_of_bytes
from aifs.datasets.formats.reading import InMemory
from aifs.datasets.index import BLOCK_BYTES, BLOCK_ROWS, RowBlock


class Disk:
    """A file on disk, as both sides want it; counts what is read."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.data = path.read_bytes()
        self.size = len(self.data)
        self.reads: list[int] = []

    def read(self, offset: int, length: int) -> bytes:
        self.reads.append(length)
        return self.data[offset : offset + length]

    def beside(self, suffix: str) -> "Disk":
        return Disk(Path(self.path).with_suffix(suffix))


class Memory(InMemory):
    path = "memory"

    def __init__(self, data: bytes, beside: bytes | None = None) -> None:
        super().__init__(data)
        self._beside = beside

    def beside(self, suffix: str) -> InMemory:
        return InMemory(self._beside) if self._beside is not None else super().beside(suffix)


def blocks_of(format: str, file: Any, options: Mapping[str, Any] = {}) -> list[RowBlock]:
    blocks = list(FORMATS[format].blocks(file, options))
    end = 0
    for block in sorted(blocks):
        assert end <= block.offset and block.offset + block.length <= file.size, "blocks overlap"
        assert block.rows > 0
        end = block.offset + block.length
    return blocks


def rows_of(format: str, file: Any, options: Mapping[str, Any] = {}) -> list[Any]:
    """All rows, in order; batches have as many."""
    opened = import_module(f"aifs.datasets.formats.{format}").open_file(file, options)
    rows = []
    for number, block in enumerate(blocks_of(format, file, options)):
        in_block = opened(number, block)
        found = in_block.take(range(block.rows))
        some = random.Random(number).sample(range(block.rows), min(5, block.rows))
        again = in_block.take(some)
        assert list(map(str, again)) == [str(found[row]) for row in some]
        batch = in_block.batch(block.rows // 2, block.rows - block.rows // 2)
        assert batch.num_rows == block.rows - block.rows // 2
        rows += found
    return rows


def a_table(rows: int) -> Any:
    return pa.table(
        {
            "number": range(rows),
            "text": [f"row {number}" * (number % 7) for number in range(rows)],
            "list": [[number] * (number % 3) for number in range(rows)],
        }
    )


def a_parquet(path: Path, rows: int = 2500, group: int = 400) -> Path:
    pq.write_table(a_table(rows), path, row_group_size=group)
    return path


def an_arrow(path: Path, stream: bool, table: Any = None) -> Path:
    table = a_table(2500) if table is None else table
    make = pa.ipc.new_stream if stream else pa.ipc.new_file
    with make(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=400)
    return path


def a_tar(path: Path, rows: int = 1200, format: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, "w", format=format) as archive:
        folder = tarfile.TarInfo("deep")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for number in range(rows):
            stem = f"deep/{'x' * (number % 150)}é{number:06}"
            cls, image = str(number % 10).encode(), os.urandom(number % 1500)
            for extension, data in (("JPG", image), ("cls", cls), ("seg.json", b'{"a": 1}')):
                member = tarfile.TarInfo(f"{stem}.{extension}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
            if number % 100 == 0:
                link = tarfile.TarInfo(f"deep/link{number}.jpg")
                link.type, link.linkname = tarfile.LNKTYPE, f"{stem}.JPG"
                archive.addfile(link)
    return path


def a_megatron(path: Path, lengths: list[int], code: int = 8, size: int = 2) -> Path:
    """Each document is one sequence."""
    pointers = np.cumsum([0, *lengths])[:-1].astype("<i8") * size
    tokens = np.arange(sum(lengths)).astype(np.uint16)
    path.write_bytes(tokens.tobytes())
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(lengths), len(lengths) + 1)
    bounds = np.arange(len(lengths) + 1).astype("<i8")
    idx = head + np.array(lengths, "<i4").tobytes() + pointers.tobytes() + bounds.tobytes()
    path.with_suffix(".idx").write_bytes(idx)
    return path


@pytest.mark.parametrize("held", [1 << 30, 0], ids=["held", "streamed"])
def test_parquet(tmp_path: Path, held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aifs.datasets.formats.parquet._HELD", held)
    path = a_parquet(tmp_path / "a.parquet")
    assert rows_of("parquet", Disk(path)) == pq.read_table(path).to_pylist()
    some = rows_of("parquet", Disk(path), {"columns": ["text"]})
    assert some == pq.read_table(path, columns=["text"]).to_pylist()


def test_a_streamed_row_group_holds_what_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aifs.datasets.formats.parquet._HELD", 0)
    file = Disk(a_parquet(tmp_path / "a.parquet", 20_000, 20_000))
    [block] = blocks_of("parquet", file)
    opened = import_module("aifs.datasets.formats.parquet").open_file(file, {})
    rows = opened(0, block)
    for first in (0, 3000, 3100, 19_990, 5):
        assert [row["number"] for row in rows.take([first + 3, first])] == [first + 3, first]
        assert sum(piece.num_rows for piece in rows.pieces) <= 2048


def test_a_block_of_parquet_is_as_long_as_its_columns(tmp_path: Path) -> None:
    path = a_parquet(tmp_path / "a.parquet")
    meta = parquet.metadata(parquet.footer(Disk(path)))
    by_columns = [
        sum(
            meta.row_group(group).column(number).total_compressed_size
            for number in range(meta.num_columns)
        )
        for group in range(meta.num_row_groups)
    ]
    assert [block.length for block in blocks_of("parquet", Disk(path))][:-1] == by_columns[:-1]


def test_parquet_with_row_groups_that_have_no_rows(tmp_path: Path) -> None:
    """Valid files were refused: such a group may say that it lies at byte 0."""
    path = tmp_path / "a.parquet"
    table = a_table(4)
    for counts in ((0,), (3, 0, 4, 0), (0, 2)):
        with pq.ParquetWriter(path, table.schema) as writer:
            for count in counts:
                writer.write_table(table.slice(0, count))
        assert rows_of("parquet", Disk(path)) == pq.read_table(path).to_pylist()


@pytest.mark.parametrize("stream", [True, False])
def test_arrow(tmp_path: Path, stream: bool) -> None:
    path = an_arrow(tmp_path / "a.arrow", stream)
    opened = pa.ipc.open_stream(path) if stream else pa.ipc.open_file(path)
    with opened as reader:
        expected = reader.read_all()
    assert rows_of("arrow", Disk(path)) == expected.to_pylist()
    some = rows_of("arrow", Disk(path), {"columns": ["list"]})
    assert some == expected.select(["list"]).to_pylist()


@pytest.mark.parametrize("stream", [True, False])
def test_arrow_with_dictionaries(tmp_path: Path, stream: bool) -> None:
    words = pa.array([f"word {number % 5}" for number in range(2500)]).dictionary_encode()
    table = pa.table({"word": words})
    path = an_arrow(tmp_path / "a.arrow", stream, table)
    assert rows_of("arrow", Disk(path)) == table.to_pylist()


def test_large_batches_are_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aifs.datasets.formats.arrow._MAPPED", 100)
    path = an_arrow(tmp_path / "a.arrow", stream=True)
    assert rows_of("arrow", Disk(path)) == a_table(2500).to_pylist()


LINES = [b"x" * (number * 37 % 400) for number in range(5000)]


@pytest.mark.parametrize("end", [b"\n", b""])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_text(tmp_path: Path, end: bytes, newline: bytes) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(newline.join(LINES) + end)
    assert rows_of("text", Disk(path)) == path.read_text().splitlines()
    assert max(block.rows for block in blocks_of("text", Disk(path))) == BLOCK_ROWS


def test_lines_longer_than_a_block(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    lines = [b"a", b"b" * (2 * BLOCK_BYTES + 5), b"c", b"d" * BLOCK_BYTES]
    path.write_bytes(b"\n".join(lines))
    assert [row.encode() for row in rows_of("text", Disk(path))] == lines


@given(st.lists(st.sampled_from(["1", "", "  ", '{"a": 2}', " 3", "\t", '"' + "x" * 50 + '"'])))
def test_jsonl_as_json_reads_it(lines: list[str]) -> None:
    for newline in ("\n", "\r\n"):
        data = newline.join(["0", *lines])
        expected = [json.loads(line) for line in data.splitlines() if line.strip()]
        for stored in (data.encode(), gzip.compress(data.encode())):
            assert rows_of("jsonl", Memory(stored)) == expected


@pytest.mark.parametrize("data", [b"", b"\n1", b"\r\n\r\n2\r\n", b'"a"\n\nNaN'])
def test_a_byte_order_mark_belongs_to_no_row(data: bytes) -> None:
    """It was a part of the first row of texts, or a row of JSON that nothing could read."""
    marked = b"\xef\xbb\xbf" + data
    text = data.decode().replace("\r", "").removesuffix("\n")
    lines = text.split("\n") if data else []
    for stored in (
        marked,
        gzip.compress(marked),
        gzip.compress(marked[:2]) + gzip.compress(marked[2:]),
    ):
        assert rows_of("text", Memory(stored)) == lines
        objects = [json.loads(line) for line in lines if line]
        assert str(rows_of("jsonl", Memory(stored))) == str(objects)
    assert str(rows_of("jsonl", Memory(b"NaN\n1"))) == "[nan, 1]"


def test_jsonl_with_a_schema() -> None:
    data = b'{"a": 1, "b": "x"}\n{"b": "y"}\n'
    opened = import_module("aifs.datasets.formats.jsonl").open_file
    [block] = blocks_of("jsonl", Memory(data))
    schema = pa.schema({"b": pa.string()})
    batch = opened(Memory(data), {"schema": schema})(0, block).batch(0, 2)
    assert batch.schema == schema and batch.to_pylist() == [{"b": "x"}, {"b": "y"}]
    for line in (b'{"b": "x"} {"b": "y"}\n', b'{"b": "x"\n}\n'):
        [block] = blocks_of("jsonl", Memory(line))
        rows = opened(Memory(line), {"schema": schema})(0, block)
        with pytest.raises(DatasetError, match="where the index has"):
            rows.batch(0, block.rows)


def test_zstd(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    frames = [zstandard.compress(b"\n".join(LINES[:2500]) + b"\n"), zstandard.compress(b"last")]
    expected = [line.decode() for line in LINES[:2500]] + ["last"]
    assert rows_of("text", Memory(b"".join(frames))) == expected
    with pytest.raises(DatasetError, match="torn"):
        blocks_of("text", Memory(b"".join(frames)[:-3]))


def test_zstd_that_begins_with_a_frame_without_data() -> None:
    """As pzstd writes it: it was taken for text."""
    zstandard = pytest.importorskip("zstandard")
    notes = b"\x5e\x2a\x4d\x18" + struct.pack("<I", 4) + b"note"
    assert rows_of("text", Memory(notes + zstandard.compress(b"a\nb") + notes)) == ["a", "b"]


def test_many_small_gzip_members_take_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that follows a member was copied, 4 MiB for each 20 bytes."""
    reads: list[int] = []
    file = Memory(gzip.compress(b"") * 5000 + gzip.compress(b"last"))
    read = file.read
    monkeypatch.setattr(file, "read", lambda at, length: reads.append(length) or read(at, length))
    assert blocks_of("text", file)[0].rows == 1
    assert max(reads) <= 64 << 10


def test_a_block_has_no_more_lines_than_it_may() -> None:
    data = b"x\n" * BLOCK_ROWS + b"y"
    assert [block.rows for block in blocks_of("text", Memory(data))] == [BLOCK_ROWS, 1]


@pytest.mark.sweep
@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_tar(tmp_path: Path, format: int) -> None:
    path = a_tar(tmp_path / "a.tar", format=format)
    expected: dict[str, dict[str, bytes]] = {}
    with tarfile.open(path) as archive:
        for member in archive:
            if member.isreg():
                folder, name = member.name.rsplit("/", 1)
                stem, extension = name.split(".", 1)
                row = expected.setdefault(f"{folder}/{stem}", {})
                row[extension.lower()] = archive.extractfile(member).read()
    rows = rows_of("tar", Disk(path))
    assert rows == [{"__key__": stem, **parts} for stem, parts in expected.items()]
    decoded = rows_of("tar", Disk(path), {"decode": True})
    assert [row["cls"] for row in decoded] == [number % 10 for number in range(1200)]
    assert decoded[0]["seg.json"] == {"a": 1}


@pytest.mark.filterwarnings("ignore")  # it leaves its files to the collector
def test_tar_as_webdataset_reads_it(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    path = a_tar(tmp_path / "a.tar", rows=300)
    theirs = [
        {key: value for key, value in sample.items() if key not in ("__url__", "__local_path__")}
        for sample in webdataset.WebDataset(str(path), shardshuffle=False, empty_check=False)
    ]
    gc.collect()
    assert rows_of("tar", Disk(path)) == theirs


def test_tar_headers_alone_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        for number in range(100):
            member = tarfile.TarInfo(f"{number}.jpg")
            member.size = 300_000
            archive.addfile(member, io.BytesIO(bytes(300_000)))
    file = Disk(path)
    assert sum(block.rows for block in blocks_of("tar", file)) == 100
    assert sum(file.reads) <= 102 * 4096


def test_megatron(tmp_path: Path) -> None:
    lengths = [number * 7919 % 5000 for number in range(3000)] + [0] * 5
    file = Disk(a_megatron(tmp_path / "a.bin", lengths))
    rows = rows_of("megatron", file)
    assert [len(row) for row in rows] == lengths
    assert np.array_equal(np.concatenate(rows), np.arange(sum(lengths)).astype(np.uint16))


@pytest.mark.sweep
@settings(max_examples=15)
@given(st.lists(st.sampled_from([0, 0, 1, 5, 3_000_000]), max_size=12))
def test_megatron_with_empty_and_long_documents(lengths: list[int]) -> None:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        path = a_megatron(Path(folder) / "a.bin", lengths)
        assert [len(row) for row in rows_of("megatron", Disk(path))] == lengths


def test_an_idx_that_shrinks_or_changes(tmp_path: Path) -> None:
    """Neither ends the process nor gives other rows."""
    path = a_megatron(tmp_path / "a.bin", [5] * 3000)
    opened = import_module("aifs.datasets.formats.megatron").open_file(Disk(path), {})
    blocks = blocks_of("megatron", Disk(path))
    assert len(opened(0, blocks[0]).take([0])[0]) == 5
    idx = path.with_suffix(".idx")
    content = idx.read_bytes()
    for change in (content[:100], content[:-8] + bytes(8)):
        idx.write_bytes(change)
        with pytest.raises(OSError, match="has changed"):
            opened(1, blocks[1])


@pytest.mark.long  # its import takes many seconds
@pytest.mark.filterwarnings("ignore")
def test_megatron_as_megatron_reads_it(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core", reason="pip install .[recipes]")
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

    torch = pytest.importorskip("torch")

    builder = IndexedDatasetBuilder(str(tmp_path / "a.bin"), dtype=np.int32)
    for number in range(50):
        tokens = torch.arange(number * 3, dtype=torch.int32)
        builder.add_document(tokens, [number, number, number])
    builder.finalize(str(tmp_path / "a.idx"))
    rows = rows_of("megatron", Disk(tmp_path / "a.bin"))
    theirs = IndexedDataset(str(tmp_path / "a"))
    bounds = theirs.document_indices
    assert len(rows) == 50
    for number, row in enumerate(rows):
        parts = [theirs[each] for each in range(bounds[number], bounds[number + 1])]
        assert np.array_equal(row, np.concatenate(parts))


@pytest.mark.sweep
def test_files(tmp_path: Path) -> None:
    for label in ("dog", "cat"):
        (tmp_path / label).mkdir()
        for number in range(700):
            (tmp_path / label / f"{number}\n.jpg").write_bytes(b"%d" % number * number)
    (tmp_path / ".hidden").write_bytes(b"no row")
    catalogue, blocks = files.catalogue(str(tmp_path), {})
    assert max(block.rows for block in blocks) <= BLOCK_ROWS

    file = Memory(catalogue)
    file.path = str(tmp_path)
    opened = import_module("aifs.datasets.formats.files").open_file(file, {})
    rows = []
    for number, block in enumerate(blocks):
        rows += opened(number, block).take(range(block.rows))
        assert opened(number, block).batch(0, 1).num_rows == 1
    found = [each for each in tmp_path.rglob("*.jpg")]
    expected = {
        str(each.relative_to(tmp_path)): (each.read_bytes(), int(each.parent.name == "dog"))
        for each in found
    }
    assert {row["path"]: (row["data"], row["label"]) for row in rows} == expected
    assert [row["path"] for row in rows] == sorted(expected)

    (tmp_path / "cat" / "7\n.jpg").write_bytes(b"longer than it was")
    with pytest.raises(OSError, match="changed"):
        for number, block in enumerate(blocks):
            opened(number, block)


def test_format_by_names() -> None:
    assert format_of([b"README.txt", b"a/1.parquet"]) == "parquet"
    assert format_of([b"state.json", b"data-00000-of-00001.arrow"]) == "arrow"
    assert format_of([b"a.bin", b"a.idx"]) == "megatron"
    assert format_of([b"a.bin"]) == "files"
    assert format_of([b"c4.00000.json.gz"]) == "jsonl"
    assert format_of([b"notes.txt", b"1.jpg", b"2.jpg"]) == "files"
    with pytest.raises(DatasetError, match="no files"):
        format_of([b".hidden"])


MAKERS: dict[str, Callable[[Path], Path]] = {
    "parquet": lambda folder: a_parquet(folder / "a", 40, 10),
    "arrow": lambda folder: an_arrow(folder / "a", True, a_table(40)),
    "arrow file": lambda folder: an_arrow(folder / "a", False, a_table(40)),
    "tar": lambda folder: a_tar(folder / "a", 20, tarfile.GNU_FORMAT),
    "megatron": lambda folder: a_megatron(folder / "a.bin", [3, 0, 5, 2] * 5),
}


@pytest.fixture(scope="module", params=MAKERS)
def valid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = MAKERS[request.param](tmp_path_factory.mktemp("valid"))
    idx = path.with_suffix(".idx")
    return request.param.split()[0], path.read_bytes(), idx.read_bytes() if idx.exists() else None


@pytest.mark.sweep
def test_torn_files(valid: tuple[str, bytes, bytes | None]) -> None:
    """An Arrow stream may end after any message; other files are whole, or are no files."""
    format, data, idx = valid
    whole = sum(block.rows for block in blocks_of(format, Memory(data, idx)))
    if idx is None:
        assert not blocks_of(format, Memory(b""))
    for length in range(1, len(data.rstrip(b"\0")), max(1, len(data) // 200)):
        try:
            found = blocks_of(format, Memory(data[:length], idx))
        except DatasetError:
            continue
        assert format == "arrow" and data[:6] != b"ARROW1"
        assert sum(block.rows for block in found) < whole


@pytest.mark.sweep
@given(changes=st.lists(st.tuples(st.integers(0, 1 << 30), st.binary(min_size=1, max_size=9))))
def test_mutated_files(
    valid: tuple[str, bytes, bytes | None], changes: list[tuple[int, bytes]]
) -> None:
    """Are told, or are read as far as blocks go; nothing else is raised."""
    format, data, idx = valid
    mutated = bytearray(idx or data)
    for at, new in changes:
        # Half of them near an end, where most formats keep what is about the rest.
        at = at % len(mutated) if at % 2 else len(mutated) - 1 - at // 2 % min(400, len(mutated))
        mutated[at : at + len(new)] = new
    file = Memory(data, bytes(mutated)) if idx else Memory(bytes(mutated))
    try:
        blocks_of(format, file) if format != "parquet" else list(parquet.blocks(file, {}))
        if format == "tar":
            rows_of(format, file)
    except DatasetError:
        pass


@given(
    data=st.binary(max_size=3000), magic=st.sampled_from([b"", b"PAR1", b"ARROW1\0\0", b"\xff" * 4])
)
@pytest.mark.parametrize("format", ["parquet", "arrow", "tar", "megatron", "jsonl", "text"])
def test_random_bytes(format: str, data: bytes, magic: bytes) -> None:
    try:
        blocks_of(format, Memory(magic + data + magic[:6], b"MMIDIDX\0\0" + data))
    except DatasetError:
        pass
    format_of_bytes(Memory(magic + data))


@pytest.mark.parametrize(
    "format, data, what",
    [
        ("parquet", b"PAR1" + b"\xff" * 4 + b"PAR1", "damaged"),
        ("parquet", b"PAR1" + bytes(100), "torn"),
        ("arrow", b"\xff" * 4 + b"\xff\xff\xff\x7f" + bytes(100), "torn"),
        ("arrow", b"no arrow at all", "no message"),
        ("tar", b"\x1f\x8b" + bytes(600), "compressed"),
        ("jsonl", b"<html>", "no JSON"),
        ("jsonl", gzip.compress(b"1\n" * 1000, mtime=0)[:-5], "torn"),
        ("jsonl", b"\x1f\x8b" + bytes(50), "damaged gzip"),
    ],
)
def test_foreign_files(format: str, data: bytes, what: str) -> None:
    with pytest.raises(DatasetError, match=what):
        blocks_of(format, Memory(data))


def test_decompression_bombs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aifs.datasets.formats.text.ROW_BYTES_MAX", 1 << 20)
    with pytest.raises(DatasetError, match="when decompressed"):
        blocks_of("text", Memory(gzip.compress(bytes(2 << 20))))


def test_damaged_rows_name_the_file() -> None:
    for format, data in (("jsonl", b"[1\n"), ("text", b"\xff\n")):
        with pytest.raises(DatasetError, match="memory: "):
            rows_of(format, Memory(data))
