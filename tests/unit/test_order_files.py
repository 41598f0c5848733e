"""The order of an epoch as a file, of each format: its bytes against the formats' own readers."""

import gzip
import io
import json
import os
import random
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

np = pytest.importorskip("numpy")
pa = pytest.importorskip("pyarrow")

from aifs.client import data  # noqa: E402
from aifs.core.errors import DatasetError  # noqa: E402
from aifs.datasets.disk import DiskFile  # noqa: E402
from aifs.datasets.formats.known import order_bytes  # noqa: E402
from aifs.datasets.index import Index  # noqa: E402
from aifs.datasets.order import OrderName, parsed  # noqa: E402
from aifs.datasets.sequence import key_of, permuted  # noqa: E402
from aifs.datasets.virtual import Joined, ShiftedNumbers, SourceRange, cut  # noqa: E402

FILES, ROWS = 3, 1300


def table(file: int) -> Any:
    numbers = range(file * ROWS, (file + 1) * ROWS)
    texts = [f"row {number}" * (number % 7) for number in numbers]
    return pa.table({"n": numbers, "text": texts, "list": [[number] for number in numbers]})


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


@pytest.mark.sweep
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


@pytest.mark.parametrize("suffix", [".idx", ".tar", ".jsonl"])
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


def test_epochs_and_seeds_differ(tmp_path: Path) -> None:
    format = FORMATS["records"]
    names = [format.name(7, 0), format.name(7, 1), format.name(8, 0)]
    contents = {made(tmp_path / "set", format, name)[0] for name in names}
    assert len(contents) == 3 and len({bytes(sorted(each)) for each in contents}) == 1


@pytest.mark.sweep
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
    if format.suffix == ".tar":
        with tarfile.open(target) as archive:
            assert archive.getnames() == []
    else:
        assert target.read_bytes() == b""


@pytest.mark.parametrize(
    "name, says",
    [
        ("seed=1.zip", "ends with one of"),
        ("seed=1.parquet", "Parquet and Arrow have no order files"),
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


def test_compressed_lines_cannot_be_put_into_an_order(tmp_path: Path) -> None:
    def write(directory: Path) -> None:
        (directory / "0.jsonl.gz").write_bytes(gzip.compress(b"{}\n"))

    format = Format(write, ".jsonl", as_it_is)
    with pytest.raises(DatasetError, match=r"^0\.jsonl\.gz: compressed lines"):
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
