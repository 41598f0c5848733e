"""The readers of others, over files of a mount and over order files of them: each row once."""

import io
import json
import tarfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from aifs.client import data
from tests.support.users import in_process

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]  # imports take many seconds

np = pytest.importorskip("numpy")
arrow = pytest.importorskip("pyarrow")
import pyarrow.parquet  # noqa: E402

ROWS = 1000


@pytest.fixture(autouse=True)
def _offline(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("HF_HOME", str(scratch / "hf")), ("HF_HUB_OFFLINE", "1")):
        monkeypatch.setenv(name, value)


def write(directory: Path, kind: str) -> None:
    """Two files of half the rows each."""
    directory.mkdir()
    for part in range(2):
        rows = range(part * ROWS // 2, (part + 1) * ROWS // 2)
        table, path = arrow.table({"n": rows}), directory / f"{part}.{kind}"
        if kind == "parquet":
            pyarrow.parquet.write_table(table, path, row_group_size=40)
        elif kind == "arrow":
            with arrow.ipc.new_stream(path, table.schema) as out:
                out.write_table(table, max_chunksize=40)
        elif kind == "jsonl":
            path.write_text(
                "".join(json.dumps({"n": row, "text": "x" * 20_000}) + "\n" for row in rows)
            )
        else:
            with tarfile.open(path, "w") as archive:
                for row in rows:
                    # So large that a block holds few of them.
                    for extension, content in (
                        ("json", b'{"n": %d}' % row),
                        ("bin", bytes(40_000)),
                    ):
                        member = tarfile.TarInfo(f"{row:06}.{extension}")
                        member.size = len(content)
                        archive.addfile(member, io.BytesIO(content))
    data.open(directory)


def orders(directory: Path, suffix: str, world: int = 2) -> list[str]:
    below = directory / ".aifs-data" / "order"
    return [f"{below}/seed=3,rank={rank}-of-{world}{suffix}" for rank in range(world)]


def require_each_row_once(rows: Iterable[int], in_order: bool) -> None:
    found = list(rows)
    assert sorted(found) == list(range(ROWS))
    assert (found == sorted(found)) == in_order


@pytest.mark.parametrize(
    "kind, suffix, builder",
    [
        ("parquet", "", "parquet"),
        ("arrow", "", "arrow"),
        ("jsonl", ".jsonl", "json"),
        ("tar", ".tar", "webdataset"),
    ],
)
def test_datasets(on_mount: Path, kind: str, suffix: str, builder: str) -> None:
    load_dataset = pytest.importorskip("datasets", reason="pip install .[peers]").load_dataset
    directory = on_mount / "set"
    write(directory, kind)
    read = [([str(directory / f"{part}.{kind}") for part in range(2)], True)]
    if suffix:  # Parquet and Arrow have no order files
        read.append((orders(directory, suffix), False))
    for files, in_order in read:
        rows = load_dataset(builder, data_files=files, split="train", streaming=True)
        numbers = [row["json"]["n"] if kind == "tar" else row["n"] for row in rows]
        require_each_row_once(numbers, in_order)
        shuffled = rows.shuffle(seed=1, buffer_size=100)
        assert len({str(row) for row in shuffled}) == ROWS


def test_webdataset(on_mount: Path) -> None:
    webdataset = pytest.importorskip("webdataset", reason="pip install .[peers]")
    directory = on_mount / "set"
    write(directory, "tar")

    def number(sample: Any) -> int:
        return json.loads(sample["json"])["n"]

    for files, in_order in (
        ([str(directory / f"{part}.tar") for part in range(2)], True),
        (orders(directory, ".tar"), False),
    ):
        require_each_row_once(
            map(number, webdataset.WebDataset(files, shardshuffle=False)), in_order
        )


def test_webdataset_of_small_files(on_mount: Path) -> None:
    webdataset = pytest.importorskip("webdataset", reason="pip install .[peers]")
    for row in range(ROWS):
        (on_mount / f"{row}.cls").write_text(str(row))
        (on_mount / f"{row}.bin").write_bytes(bytes(40_000))
    found = webdataset.WebDataset(orders(on_mount, ".tar"), shardshuffle=False)
    require_each_row_once((int(sample["cls"]) for sample in found), False)


def test_megatron(on_mount: Path) -> None:
    pytest.importorskip("megatron.core", reason="pip install .[recipes]")
    torch = pytest.importorskip("torch")
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

    directory = on_mount / "set"
    directory.mkdir()
    for part in range(2):
        builder = IndexedDatasetBuilder(str(directory / f"{part}.bin"), dtype=np.int32)
        for row in range(part * ROWS // 2, (part + 1) * ROWS // 2):
            sequences = [6000, 3 * (row % 5), 1]
            builder.add_document(torch.full([sum(sequences)], row, dtype=torch.int32), sequences)
        builder.finalize(str(directory / f"{part}.idx"))
    data.open(directory)

    def rows_of(order: str, mmap: bool) -> list[int]:
        theirs = IndexedDataset(order, mmap=mmap)
        bounds = theirs.document_indices
        assert len(theirs) == bounds[-1]
        found = []
        for first, end in zip(bounds[:-1], bounds[1:], strict=True):
            parts = [theirs[each] for each in range(first, end)]
            row = int(parts[0][0])
            assert [len(part) for part in parts] == [6000, 3 * (row % 5), 1]
            assert (np.concatenate(parts) == row).all()
            found.append(row)
        return found

    for mmap in (True, False):
        # It keeps what it has mapped, so that the mount would stay busy.
        ranks = [in_process(partial(rows_of, order, mmap), 0) for order in orders(directory, "")]
        require_each_row_once([row for rows in ranks for row in rows], False)
