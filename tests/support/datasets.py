"""Datasets whose rows are numbers, one file of a format each."""

import io
import json
import struct
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow
import pyarrow.parquet


def write_parquet(path: Path, rows: Sequence[int], group: int = 7) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"n": rows}), path, row_group_size=group)


def write_arrow(path: Path, rows: Sequence[int], group: int = 7) -> None:
    table = pyarrow.table({"n": rows})
    with pyarrow.ipc.new_file(path, table.schema) as out:
        out.write_table(table, max_chunksize=group)


def write_jsonl(path: Path, rows: Sequence[int]) -> None:
    path.write_text("".join(json.dumps({"n": row}) + "\n" for row in rows))


def write_tar(path: Path, rows: Sequence[int]) -> None:
    with tarfile.open(path, "w") as archive:
        for row in rows:
            member = tarfile.TarInfo(f"{row:04}.json")
            member.size = 1000
            archive.addfile(member, io.BytesIO(b"%1000d" % row))


def write_records(path: Path, rows: Sequence[int]) -> None:
    path.write_bytes(b"".join(b"%08d" % row for row in rows))


def write_megatron(path: Path, rows: Sequence[int]) -> None:
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
"""Suffix and writer of each format that says by itself which rows it has."""
