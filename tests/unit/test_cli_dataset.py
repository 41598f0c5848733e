"""``aifs dataset``: what it says of a dataset, and of one that is damaged."""

import json
import os
from pathlib import Path

import pytest

from tests.support.mounts import aifs, aifs_on_terminal


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "set"
    made.mkdir()
    for number in range(3):
        lines = "".join(f'{{"n": {row}}}\n' for row in range(100))
        (made / f"{number}.jsonl").write_text(lines)
    return made


@pytest.mark.sweep
def test_show(directory: Path):
    told = json.loads(aifs("dataset", "show", directory, "--json").stdout)
    size = sum(path.stat().st_size for path in directory.glob("*.jsonl"))
    assert told.pop("seconds") >= 0
    assert told == {"format": "jsonl", "files": 3, "blocks": 3, "rows": 300, "bytes": size}
    assert "rows     300\n" in aifs("dataset", "show", directory).stdout


@pytest.mark.sweep
def test_show_of_a_directory_of_files(directory: Path):
    told = json.loads(aifs("dataset", "show", directory, "--format", "files", "--json").stdout)
    assert (told["files"], told["rows"], told["bytes"]) == (3, 3, None)
    assert "bytes    -\n" in aifs("dataset", "show", directory, "--format", "files").stdout


def test_the_order_is_drawn(directory: Path, tmp_path: Path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (the figures extra)")
    aifs("dataset", "show", directory, "--plot", tmp_path / "order.svg")
    assert "<svg" in (tmp_path / "order.svg").read_text()


@pytest.mark.sweep
def test_index_is_made_once(directory: Path):
    assert aifs("dataset", "index", directory).stdout.startswith("3 files, 300 rows: ")
    made = (directory / ".aifs-index").stat()
    aifs("dataset", "index", directory)
    again = (directory / ".aifs-index").stat()  # which reading may have given another atime
    assert (again.st_ino, again.st_mtime_ns) == (made.st_ino, made.st_mtime_ns)


@pytest.mark.sweep
def test_a_terminal_is_shown_how_far_it_is(directory: Path):
    assert "3 files, 300 rows" in aifs_on_terminal("dataset", "index", directory)
    assert "all right" in aifs_on_terminal("dataset", "verify", directory)


@pytest.mark.sweep
def test_verify(directory: Path):
    assert aifs("dataset", "verify", directory).stdout == "300 rows in 3 blocks: all right\n"


@pytest.mark.sweep
def test_a_damaged_file_is_named_once(tmp_path: Path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"a": ["x" * 100] * 100}), path)
    damaged = bytearray(path.read_bytes())
    damaged[30:50] = bytes(20)
    path.write_bytes(damaged)
    done = aifs("dataset", "verify", tmp_path, check=False)
    assert done.returncode == 9
    assert done.stderr.count(str(path)) == 1 and "damaged in the block at byte 4" in done.stderr


@pytest.mark.sweep
def test_verify_names_files_of_other_columns(tmp_path: Path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    for number, column in enumerate(("a", "a", "b")):
        table = pyarrow.table({column: [1, 2]})
        parquet.write_table(table, tmp_path / f"{number}.parquet")
    done = aifs("dataset", "verify", tmp_path, check=False)
    assert done.returncode == 9
    said = f"{tmp_path}/2.parquet: its columns are b int64, those of files before a int64"
    assert said in done.stderr and "1 block of 3" in done.stderr


@pytest.mark.sweep
def test_verify_names_what_is_damaged(directory: Path):
    path = directory / "1.jsonl"
    path.write_text(path.read_text().replace('{"n": 50}', '{"n" 50}}'))
    said = aifs("dataset", "verify", directory, check=False)
    assert said.returncode == 9
    first, last = said.stderr.splitlines()
    assert str(path) in first
    assert "1 block of 3 cannot be read" in last


def test_bench(directory: Path):
    told = json.loads(aifs("dataset", "bench", directory, "--seconds", "0.05", "--json").stdout)
    assert told.keys() == {"none", "blocks", "rows"}
    assert all(rate["rows_per_s"] > 0 for rate in told.values())
    lines = aifs("dataset", "bench", directory, "--seconds", "0.05").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["order", "in", "shuffled", "row"]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--format", "csv"], "format 'csv' is unknown"),
        (["--record-bytes", "8"], "has no option 'record_bytes'"),
        (["--format", "records"], "needs record_bytes"),
    ],
)
def test_wrong_options_are_one_line(directory: Path, words: list[str], says: str):
    said = aifs("dataset", "index", directory, *words, check=False)
    assert (said.returncode, said.stderr.count("\n")) == (9, 1)
    assert says in said.stderr


@pytest.mark.sweep
def test_what_is_no_dataset_is_one_line(tmp_path: Path):
    for path in (tmp_path, tmp_path / "none"):
        said = aifs("dataset", "show", path, check=False)
        assert said.returncode in (1, 9)
        assert said.stderr.startswith(f"aifs: {path}: ")
        assert said.stderr.count("\n") == 1
    assert os.listdir(tmp_path) == []
