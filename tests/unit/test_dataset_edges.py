"""Datasets at their edges, in each format: empty files, no rows, one row, torn and shrunk files.
``aifs dataset verify`` says of each what it is."""

import errno
import io
import json
import os
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from aifs.cli.dataset import dataset_group
from aifs.client import data
from aifs.core.errors import DatasetError

arrow = pytest.importorskip("pyarrow")
import pyarrow.parquet  # noqa: E402


def write_parquet(path: Path, rows: range) -> None:
    pyarrow.parquet.write_table(arrow.table({"n": rows}), path, row_group_size=7)


def write_arrow(path: Path, rows: range) -> None:
    table = arrow.table({"n": rows})
    with arrow.ipc.new_file(path, table.schema) as out:
        out.write_table(table, max_chunksize=7)


def write_jsonl(path: Path, rows: range) -> None:
    path.write_text("".join(json.dumps({"n": row}) + "\n" for row in rows))


def write_tar(path: Path, rows: range) -> None:
    with tarfile.open(path, "w") as archive:
        for row in rows:
            member = tarfile.TarInfo(f"{row}.json")
            member.size = 1000
            archive.addfile(member, io.BytesIO(b"%1000d" % row))


def write_megatron(path: Path, rows: range) -> None:
    count = len(rows)
    path.write_bytes(struct.pack(f"<{count}i", *rows))
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, count, count + 1)
    numbers = [*([1] * count), *(4 * row for row in range(count)), *range(count + 1)]
    path.with_suffix(".idx").write_bytes(
        head + struct.pack(f"<{count}i{count}q{count + 1}q", *numbers)
    )


FORMATS: dict[str, tuple[str, Callable[[Path, range], None]]] = {
    "parquet": (".parquet", write_parquet),
    "arrow": (".arrow", write_arrow),
    "jsonl": (".jsonl", write_jsonl),
    "tar": (".tar", write_tar),
    "megatron": (".bin", write_megatron),
}


def verify(directory: Path) -> Result:
    return CliRunner().invoke(dataset_group, ["verify", str(directory)])


def refusal(directory: Path) -> str:
    """All that a dataset that is damaged is said to be."""
    found = verify(directory)
    assert isinstance(found.exception, DatasetError)
    return f"{found.output}{found.exception}"


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("counts", [[0], [1], [0, 1, 0], [20, 0, 1]], ids=str)
def test_few_rows(tmp_path: Path, format: str, counts: list[int]) -> None:
    suffix, write = FORMATS[format]
    for number, count in enumerate(counts):
        write(tmp_path / f"{number}{suffix}", range(count))
    assert len(data.open(tmp_path)) == sum(counts)
    assert verify(tmp_path).output.startswith(f"{sum(counts)} row")
    with data.reader(data.open(tmp_path)) as reader:
        assert sum(1 for _ in reader) == sum(counts)


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_without_a_byte(tmp_path: Path, format: str) -> None:
    """It has no rows; but a .bin has to have its .idx."""
    suffix, write = FORMATS[format]
    write(tmp_path / f"0{suffix}", range(20))
    (tmp_path / f"1{suffix}").touch()
    if format == "megatron":
        assert "1.bin: its .idx is missing" in refusal(tmp_path)
        (tmp_path / "1.idx").touch()
        assert "1.bin: its .idx is none of Megatron's" in refusal(tmp_path)
    else:
        assert verify(tmp_path).output.startswith("20 rows")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("cut", [1, 13, 600])
def test_a_torn_file_is_named(tmp_path: Path, format: str, cut: int) -> None:
    suffix, write = FORMATS[format]
    for number in range(2):
        write(tmp_path / f"{number}{suffix}", range(200))
    path = tmp_path / f"1{suffix}"
    with path.open("r+b") as file:
        # An archive's end is padded: it is whole without that.
        size = tarfile.BLOCKSIZE * 3 * 200 if format == "tar" else path.stat().st_size
        file.truncate(size - cut)
    if format == "jsonl" and cut == 1:
        assert verify(tmp_path).output.startswith("400 rows")  # the last line needs no end
    else:
        assert str(path) in refusal(tmp_path)


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_a_corrupt_footer_is_named(tmp_path: Path, format: str) -> None:
    suffix, write = FORMATS[format]
    path = tmp_path / f"0{suffix}"
    write(path, range(200))
    content = path.read_bytes()
    path.write_bytes(content[:-10] + bytes(4) + content[-6:])  # in its length
    assert str(path) in refusal(tmp_path)


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path, format: str) -> None:
    suffix, write = FORMATS[format]
    path = tmp_path / f"0{suffix}"
    write(path, range(5000))
    with data.reader(data.open(tmp_path), buffer=64, shares=1) as reader:
        next(reader)
        os.truncate(path, 100)
        # Rows that were fetched ahead are those of before.
        with pytest.raises(OSError, match="has changed") as caught:
            for _ in reader:
                pass
    assert (caught.value.errno, caught.value.filename) == (errno.ESTALE, str(path))
