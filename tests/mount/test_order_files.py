"""Orders of an epoch as files, on a mount: as programs that know nothing of AIFS read them."""

import errno
import json
import mmap
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from aifs.client import data
from tests.support.mounts import aifs
from tests.support.users import errno_of, in_process

pytest.importorskip("pyarrow")
from tests.support import datasets  # noqa: E402

ALICE = 1000
ROWS = 3000


def rows_of_lines(path: Path) -> list[int]:
    with path.open() as lines:
        return [json.loads(line)["n"] for line in lines]


def rows_of_records(path: Path) -> list[int]:
    content = path.read_bytes()
    return [int(content[at : at + 8]) for at in range(0, len(content), 8)]


def write_lines(directory: Path) -> None:
    for part in range(2):
        lines = (json.dumps({"n": row}) for row in range(part, ROWS, 2))
        (directory / f"{part}.jsonl").write_text("\n".join(lines))


def write_records(directory: Path) -> None:
    for part in range(2):
        datasets.write_records(directory / f"{part}.rec", range(part, ROWS, 2))


FORMATS: dict[str, tuple[Callable[[Path], None], Callable[[Path], list[int]], str]] = {
    "jsonl": (write_lines, rows_of_lines, ".jsonl"),
    "records": (write_records, rows_of_records, ",record_bytes=8.rec"),
}


def order(directory: Path, name: str) -> Path:
    return directory / ".aifs-data" / "order" / name


def refused(directory: Path) -> str:
    return json.loads(os.getxattr(directory, "user.aifs.refused"))["reason"]


@pytest.mark.sweep
@pytest.mark.parametrize("format", FORMATS)
def test_all_ranks_have_each_row_once(here: Path, format: str) -> None:
    write, rows_in, suffix = FORMATS[format]
    write(here)
    if format != "records":
        data.open(here)
    ranks = [rows_in(order(here, f"seed=7,epoch=1,rank={rank}-of-3{suffix}")) for rank in range(3)]
    rows = [row for rank in ranks for row in rank]
    assert sorted(rows) == list(range(ROWS)) != rows
    whole = order(here, f"seed=7,epoch=1{suffix}")
    assert rows_in(whole) == rows
    before = whole.stat()
    aifs("drain", here)
    aifs("evict", here)
    assert rows_in(whole) == rows
    after = whole.stat()
    assert (before.st_ino, before.st_size) == (after.st_ino, after.st_size)
    other = rows_in(order(here, f"seed=7,epoch=2{suffix}"))
    assert sorted(other) == list(range(ROWS)) and other != rows


def test_any_range_by_any_call(here: Path) -> None:
    write_lines(here)
    data.open(here)
    path = order(here, "seed=1.jsonl")
    whole = path.read_bytes()
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        for at in range(0, len(whole), 4999):
            assert os.pread(file.fileno(), 3000, at) == whole[at : at + 3000]
            assert mapped[at : at + 3000] == whole[at : at + 3000]
        mapped.close()


def test_small_files_are_rows_of_an_archive(here: Path) -> None:
    """Those of one stem follow one another."""
    for row in range(60):
        directory = here / str(row % 2)
        directory.mkdir(exist_ok=True)
        (directory / f"{row}.bin").write_bytes(bytes([row]) * 400_000)
        (directory / f"{row}.cls").write_text(str(row % 2))
    (here / ".hidden").write_text("none")
    names = []
    for rank in range(2):
        if rank:
            aifs("drain", here)  # where they lie changes, and nothing else
        with tarfile.open(order(here, f"seed=1,rank={rank}-of-2.tar")) as archive:
            for member in archive:
                file = archive.extractfile(member)
                assert file is not None and file.read() == (here / member.name).read_bytes()
                names.append(member.name)
    stems = [name.rpartition(".")[0] for name in names]
    assert stems[0::2] == stems[1::2] and len(set(stems[0::2])) == 60
    assert stems[0::2] != sorted(stems[0::2])


def test_it_needs_an_index_of_these_files(here: Path) -> None:
    write_lines(here)
    path = order(here, "seed=1.jsonl")
    assert errno_of(path.stat) == errno.EINVAL
    assert refused(here) == "the dataset has no index: run `aifs dataset index` on the directory"
    aifs("dataset", "index", here)
    assert len(rows_of_lines(path)) == ROWS
    (here / "2.jsonl").write_text('{"n": -1}\n')
    assert errno_of(path.stat) == errno.EINVAL
    assert refused(here).startswith("2.jsonl is not in the dataset's index")
    (here / "2.jsonl").unlink()
    assert len(rows_of_lines(path)) == ROWS
    assert errno_of(order(here, "seed=1.txt").stat) == errno.EINVAL
    assert refused(here) == "the dataset's index is of format jsonl, not text"
    assert errno_of(order(here, "speed=1.jsonl").stat) == errno.EINVAL
    assert "'speed=1'" in refused(here)
    assert errno_of(order(here, "nothing").stat) == errno.ENOENT
    assert os.listdir(here / ".aifs-data" / "order") == []
    assert os.listdir(here / ".aifs-data") == []
    assert errno_of(lambda: order(here, "seed=2.jsonl").write_bytes(b"")) == errno.EROFS


def test_a_source_that_changes_is_noticed(here: Path) -> None:
    write_lines(here)
    data.open(here)
    path = order(here, "seed=1.jsonl")
    with path.open("rb", buffering=0) as opened:
        (here / "1.jsonl").write_bytes((here / "1.jsonl").read_bytes().upper())
        with pytest.raises(OSError) as caught:
            while opened.read(1 << 20):
                pass
        assert caught.value.errno == errno.ESTALE
    assert errno_of(path.stat) == errno.EINVAL
    assert refused(here).startswith("1.jsonl is not as the dataset's index has it")
    data.open(here)
    assert b'"N"' in path.read_bytes()


@pytest.mark.sweep
def test_it_gives_nobody_more_rights(here: Path) -> None:
    write_lines(here)
    data.open(here)
    path = order(here, "seed=1,rank=0-of-1000.jsonl")
    assert in_process(lambda: errno_of(path.read_bytes), ALICE) == 0
    (here / "1.jsonl").chmod(0o600)
    assert in_process(lambda: errno_of(path.read_bytes), ALICE) == errno.EACCES
    # Who may not read all of it is told nothing of it.
    other = order(here, "seed=1.txt")
    assert in_process(lambda: errno_of(other.stat), ALICE) == errno.EINVAL
    (here / "1.jsonl").unlink()
    assert in_process(lambda: errno_of(path.stat), ALICE) == errno.EINVAL
    (here / ".aifs-index").chmod(0o600)
    assert in_process(lambda: errno_of(path.stat), ALICE) == errno.EACCES


def test_a_hostile_index_is_refused(here: Path) -> None:
    write_lines(here)
    data.open(here)
    index = here / ".aifs-index"
    content = index.read_bytes()
    path = order(here, "seed=1.jsonl")
    for wrong in (b"", content[:-1], content[:100], b"AIFSidx1" + b"\xff" * 40, content[::-1]):
        index.write_bytes(wrong)
        assert errno_of(path.stat) == errno.EINVAL
        assert "index" in refused(here)
    index.unlink()
    index.symlink_to("0.jsonl")
    assert errno_of(path.stat) == errno.EINVAL
