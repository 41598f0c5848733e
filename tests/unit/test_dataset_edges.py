"""Datasets at their edges, in each format: empty files, no rows, one row, torn and shrunk files,
hidden and linked ones; types, columns and sizes that one of the formats has.
``aifs dataset verify`` says of each what it is."""

import base64
import errno
import os
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from aifs.cli.main import cli
from aifs.client import data
from aifs.core.errors import DatasetError
from aifs.datasets.formats.columns import joined

arrow = pytest.importorskip("pyarrow")
import pyarrow.compute
import pyarrow.parquet

from tests.support import thrift  # noqa: E402
from tests.support.datasets import FORMATS, write_jsonl, write_parquet, write_tar  # noqa: E402

EVERY = FORMATS | {
    "text": (".txt", write_jsonl),
    "files": (".raw", lambda path, rows: path.write_bytes(b"%d" % len(rows))),
}


def table_in(directory: Path, format: str, table: "arrow.Table", group: int = 10) -> Path:
    """A dataset of it, in row groups and batches of so many rows."""
    directory.mkdir(exist_ok=True)
    if format == "parquet":
        pyarrow.parquet.write_table(table, directory / "0.parquet", row_group_size=group)
    else:
        with arrow.ipc.new_file(directory / "0.arrow", table.schema) as out:
            out.write_table(table, max_chunksize=group)
    return directory


def read(directory: Path, **options: Any) -> list[Any]:
    """All rows; batches have as many."""
    dataset = data.open(directory, **options)
    with data.reader(dataset, seed=1, buffer=64) as reader:
        assert sum(batch.num_rows for batch in reader.batches()) == len(dataset)
    return [dataset[row] for row in range(len(dataset))]


def verify(directory: Path) -> Result:
    return CliRunner().invoke(cli, ["dataset", "verify", str(directory)])


def refusal(directory: Path) -> str:
    """All that a dataset that is damaged is said to be."""
    found = verify(directory)
    assert isinstance(found.exception, DatasetError)
    return f"{found.output}{found.exception}"


@pytest.mark.sweep
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


@pytest.mark.sweep
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


@pytest.mark.sweep
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


@pytest.mark.parametrize("format", EVERY)
def test_hidden_files_and_directories_do_not_belong_to_it(tmp_path: Path, format: str) -> None:
    """Logs of Delta Lake, and what Spark had not committed, were rows."""
    suffix, write = EVERY[format]
    write(tmp_path / f"0{suffix}", range(3))
    found = read(tmp_path)
    for hidden in ("_9", ".9", "_delta_log/9", ".git/9", "a/_temporary/0/9"):
        path = tmp_path / f"{hidden}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, range(5))
    assert read(tmp_path) == found


@pytest.mark.parametrize("format", EVERY)
def test_links_are_followed(tmp_path: Path, format: str) -> None:
    """Those to directories were left out without a word, and those to nothing."""
    suffix, write = EVERY[format]
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / f"0{suffix}", range(3))
    alone = len(data.open(tmp_path / "here"))
    (tmp_path / "here" / "deep").symlink_to("../there")
    (tmp_path / "there" / "loop").symlink_to("../here")
    assert len(read(tmp_path / "here")) == 2 * alone
    (tmp_path / "there" / f"gone{suffix}").symlink_to("nowhere")
    with pytest.raises(FileNotFoundError, match=f"gone{suffix}"):
        data.open(tmp_path / "here")


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_columns(tmp_path: Path, format: str) -> None:
    table = arrow.table({"a": range(30), "s": [{"x": 1, "y": "z"}] * 30})
    table_in(tmp_path, format, table)
    assert read(tmp_path, columns=["s"]) == table.select(["s"]).to_pylist()
    assert read(tmp_path, columns=[]) == [{}] * 30
    for wrong in (["b"], ["a", "b"]):
        with pytest.raises(DatasetError, match=f"0.{format}: no column 'b'"):
            read(tmp_path, columns=wrong)


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_two_columns_of_one_name(tmp_path: Path, format: str) -> None:
    """A row had the last of them alone."""
    numbers = arrow.array(range(30))
    inner = arrow.StructArray.from_arrays([numbers, numbers], ["x", "x"])
    table = arrow.table([numbers, numbers, numbers], ["a", "a", "b"])
    nested = arrow.table({"s": arrow.ListArray.from_arrays(arrow.array([0, 10, 30]), inner)})
    for name, each in (("a", table), ("x", nested)):
        with pytest.raises(DatasetError, match=f"two columns have the name '{name}'"):
            read(table_in(tmp_path / name, format, each))
    assert read(tmp_path / "a", columns=["b"]) == table.select(["b"]).to_pylist()


class Tag(arrow.ExtensionType):
    """Stored as a dictionary."""

    def __init__(self) -> None:
        super().__init__(arrow.dictionary(arrow.int32(), arrow.string()), "tests.tag")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage: Any, serialized: bytes) -> "Tag":
        return cls()


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_types_that_cannot_be_taken_by_number(tmp_path: Path, format: str) -> None:
    """pyarrow takes no views by their numbers, and no runs: its own errors were raised."""
    words = arrow.array([*"abc", None, "a long word that lies elsewhere"] * 6)
    view = words.cast(arrow.string_view())
    columns = {
        "view": view,
        "bytes": words.cast(arrow.binary()).cast(arrow.binary_view()),
        "list": arrow.FixedSizeListArray.from_arrays(view[:30], 1),
        "struct": arrow.StructArray.from_arrays([view], ["inner"]),
        "dictionary": words.dictionary_encode(),
    }
    if format == "arrow":  # Parquet has neither
        columns["runs"] = arrow.compute.run_end_encode(words)
        columns["tag"] = arrow.ExtensionArray.from_storage(Tag(), words.dictionary_encode())
        kind = arrow.list_(arrow.dictionary("i4", "string"))
        columns["words"] = arrow.array([["a", None]] * 30, kind)
    table = arrow.table(columns)
    arrow.register_extension_type(Tag())
    try:
        assert read(table_in(tmp_path, format, table, group=30)) == table.to_pylist()
    finally:
        arrow.unregister_extension_type("tests.tag")


def write_encrypted(path: Path, *columns: str) -> None:
    """These columns; in two row groups."""
    encryption = pytest.importorskip("pyarrow.parquet.encryption")

    class Keys(encryption.KmsClient):
        def __init__(self, _: Any) -> None:
            super().__init__()

        def wrap_key(self, key_bytes: bytes, master_key_identifier: str) -> bytes:
            return base64.b64encode(key_bytes)

    properties = encryption.CryptoFactory(Keys).file_encryption_properties(
        encryption.KmsConnectionConfig(),
        encryption.EncryptionConfiguration(
            footer_key="footer", column_keys={"column": list(columns)}, plaintext_footer=True
        ),
    )
    table = arrow.table({"a": range(20), "b": range(20)})
    with pyarrow.parquet.ParquetWriter(
        path, table.schema, encryption_properties=properties
    ) as writer:
        writer.write_table(table, row_group_size=10)


def footer_changed(path: Path, change: Callable[[list[bytes]], None]) -> None:
    """``change`` gets the columns of the last row group, as thrift has them."""

    def of_group(reader: thrift.StructReader, kind: int) -> bytes:
        columns = [reader.rewrite({}) for _ in range(reader.elements()[1])]
        change(columns)
        return thrift.list_of(columns)

    def of_file(reader: thrift.StructReader, kind: int) -> bytes:
        _, count = reader.elements()
        groups = [reader.rewrite({}) for _ in range(count - 1)]
        return thrift.list_of([*groups, reader.rewrite({1: of_group})])

    content = path.read_bytes()
    length = int.from_bytes(content[-8:-4], "little")
    reader = thrift.StructReader(content[-8 - length : -8])
    footer = reader.rewrite({4: of_file})
    end = footer + len(footer).to_bytes(4, "little") + b"PAR1"
    path.write_bytes(content[: -8 - length] + end)


def test_encrypted_columns(tmp_path: Path) -> None:
    """They ended the process: pyarrow calls abort(3) if it is asked where such a column lies."""
    path = tmp_path / "0.parquet"
    for columns in (["a"], ["a", "b"], ["b"]):
        write_encrypted(path, *columns)
        assert "column is encrypted" in refusal(tmp_path)
    assert read(tmp_path, columns=["a"]) == [{"a": row} for row in range(20)]


def test_footers_that_end_the_process(tmp_path: Path) -> None:
    """As above, if the last row group alone is so."""
    path = tmp_path / "0.parquet"
    write_encrypted(path, "a")
    encrypted: list[bytes] = []
    footer_changed(path, lambda columns: encrypted.append(columns[0]))

    def encrypt(columns: list[bytes]) -> None:
        columns[0] = encrypted[0]

    for change in (encrypt, list.clear):
        write_parquet(path, range(20))
        footer_changed(path, change)
        assert str(path) in refusal(tmp_path)


def test_what_a_dictionary_stands_for_is_not_decoded_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of 300 bytes took 1.2 GiB, and was refused if it was 2 GiB or more."""
    word = "x" * (1 << 20)
    rows = 250
    words = arrow.DictionaryArray.from_arrays(arrow.array([0] * rows, "i4"), [word])
    path = tmp_path / "0.parquet"
    pyarrow.parquet.write_table(
        arrow.table({"word": words}), path, compression="zstd", store_schema=False
    )
    dataset = data.open(tmp_path)
    before = arrow.total_allocated_bytes()
    monkeypatch.setattr("aifs.datasets.formats.parquet._HELD", 1 << 20)
    block = dataset.open_block(0)
    assert block.take([rows - 1, 0, rows // 2]) == [{"word": word}] * 3
    assert arrow.total_allocated_bytes() - before < 64 << 20
    with pytest.raises(DatasetError, match="joined to one batch"):
        joined([block.batch(0, 1)] * 2100)


def test_batches_that_decompress_to_too_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aifs.datasets.formats.arrow.ROW_BYTES_MAX", 10_000)
    word = arrow.array(["x" * 10_000])
    tables = [
        arrow.table({"a": word}),
        arrow.table({"a": arrow.DictionaryArray.from_arrays(arrow.array([0]), word)}),
    ]
    for table in tables:
        for codec in ("lz4", "zstd", None):
            options = arrow.ipc.IpcWriteOptions(compression=codec)
            with arrow.ipc.new_file(tmp_path / "0.arrow", table.schema, options=options) as out:
                out.write_table(table)
            if codec is None:
                assert read(tmp_path) == table.to_pylist()
            else:
                assert "when decompressed" in refusal(tmp_path)


def test_arrow_offsets_that_point_outside(tmp_path: Path) -> None:
    """Such bytes were read, wherever they were."""
    path = tmp_path / "0.arrow"
    table = arrow.table({"a": ["first", "second", "third"]})
    with arrow.ipc.new_stream(path, table.schema) as out:
        out.write_table(table)
    offsets = struct.pack("<4i", 0, 5, 11, 16)
    content = path.read_bytes()
    assert content.count(offsets) == 1
    path.write_bytes(content.replace(offsets, struct.pack("<4i", 0, 1 << 30, 11, 16)))
    assert str(path) in refusal(tmp_path)


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_text_that_is_no_unicode_names_the_file(tmp_path: Path, format: str) -> None:
    """Parquet raised UnicodeDecodeError, without a name."""
    word = arrow.array([b"\xff\xfe"]).view(arrow.string())
    table_in(tmp_path, format, arrow.table({"a": word}))
    assert str(tmp_path / f"0.{format}") in refusal(tmp_path)


def test_an_archive_without_its_end_mark(tmp_path: Path) -> None:
    """As writers leave it that append, or stream; GNU tar and WebDataset read it."""
    path = tmp_path / "0.tar"
    write_tar(path, range(20))
    with path.open("r+b") as archive:
        archive.truncate(3 * tarfile.BLOCKSIZE * 20)
    assert len(read(tmp_path)) == 20
    with path.open("r+b") as archive:
        archive.truncate(3 * tarfile.BLOCKSIZE * 20 - tarfile.BLOCKSIZE)
    assert str(path) in refusal(tmp_path)
