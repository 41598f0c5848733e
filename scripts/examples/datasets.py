"""A small model is trained from each format of docs/guide/datasets.md: pictures of 8 x 8 pixels, of
ten classes, which are written here first.

    python scripts/examples/datasets.py DIRECTORY
"""

import io
import json
import struct
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from torch.nn import functional

from aifs.client import data

ROWS, PIXELS, CLASSES, EPOCHS = 1000, 64, 10, 3

Sample = tuple[torch.Tensor, int]
"""A picture, float32 of shape (64,), and its class."""


def train(directory: Path, sample_of: Callable[[Any], Sample], **options: Any) -> float:
    """The share of all pictures that the model knows after three epochs."""
    dataset = data.open(directory, **options)
    loader = data.Loader(dataset, batch_size=50, transform=sample_of, order={"seed": 7})
    model = torch.nn.Sequential(
        torch.nn.Linear(PIXELS, 64), torch.nn.ReLU(), torch.nn.Linear(64, CLASSES)
    )
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(EPOCHS):
        for pictures, classes in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(pictures), classes).backward()
            optimizer.step()
    with torch.no_grad():
        known = [(model(x).argmax(1) == y).float().mean() for x, y in loader]
    return float(torch.stack(known).mean())


def sample(pixels: bytes | list[int] | np.ndarray, label: int | bytes) -> Sample:
    values = np.frombuffer(pixels, np.uint8) if isinstance(pixels, bytes) else np.array(pixels)
    return torch.from_numpy(values.astype(np.float32) / 255), int(label)


def pictures() -> Iterator[tuple[bytes, int]]:
    """The same ones each time: a class is a pattern, under noise."""
    rng = np.random.default_rng(5)
    patterns = rng.integers(0, 200, (CLASSES, PIXELS))
    for row in range(ROWS):
        noise = rng.integers(0, 56, PIXELS)
        yield (patterns[row % CLASSES] + noise).astype(np.uint8).tobytes(), row % CLASSES


def write_parquet(directory: Path) -> None:
    pyarrow.parquet.write_table(_table(), directory / "a.parquet", row_group_size=100)


def write_arrow(directory: Path) -> None:
    table = _table()
    with pyarrow.ipc.new_file(directory / "a.arrow", table.schema) as out:
        out.write_table(table, max_chunksize=100)


def _table() -> pyarrow.Table:
    pixels, labels = zip(*pictures(), strict=True)
    return pyarrow.table({"pixels": pixels, "label": labels})


def write_jsonl(directory: Path) -> None:
    lines = [json.dumps({"pixels": list(pixels), "label": label}) for pixels, label in pictures()]
    (directory / "a.jsonl").write_text("\n".join(lines))


def write_text(directory: Path) -> None:
    lines = [f"{label} {pixels.hex()}\n" for pixels, label in pictures()]
    (directory / "a.txt").write_text("".join(lines))


def write_tar(directory: Path) -> None:
    with tarfile.open(directory / "a.tar", "w") as archive:
        for row, (pixels, label) in enumerate(pictures()):
            for extension, content in (("raw", pixels), ("cls", b"%d" % label)):
                member = tarfile.TarInfo(f"{row:06}.{extension}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def write_megatron(directory: Path) -> None:
    """A document is a picture and its class; tokens have 16 bits."""
    tokens = PIXELS + 1
    rows = [np.array([*pixels, label], "<u2").tobytes() for pixels, label in pictures()]
    (directory / "a.bin").write_bytes(b"".join(rows))
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, ROWS, ROWS + 1)
    lengths, starts = np.full(ROWS, tokens, "<i4"), np.arange(ROWS, dtype="<i8") * 2 * tokens
    bounds = np.arange(ROWS + 1, dtype="<i8")
    (directory / "a.idx").write_bytes(
        head + lengths.tobytes() + starts.tobytes() + bounds.tobytes()
    )


def write_records(directory: Path) -> None:
    rows = [pixels + bytes([label]) for pixels, label in pictures()]
    (directory / "a.dat").write_bytes(b"".join(rows))


def write_files(directory: Path) -> None:
    for row, (pixels, label) in enumerate(pictures()):
        (directory / str(label)).mkdir(exist_ok=True)
        (directory / str(label) / f"{row:06}.raw").write_bytes(pixels)


class Way(NamedTuple):
    """How a format is written, and what makes a sample of a row."""

    write: Callable[[Path], None]
    decode: Callable[[Any], Sample]
    options: dict[str, Any] = {}


def of_columns(row: dict[str, Any]) -> Sample:
    return sample(row["pixels"], row["label"])


def of_line(row: str) -> Sample:
    label, pixels = row.split(" ")
    return sample(bytes.fromhex(pixels), int(label))


def of_members(row: dict[str, Any]) -> Sample:
    return sample(row["raw"], row["cls"])


def of_tokens(row: np.ndarray) -> Sample:
    return sample(row[:-1], int(row[-1]))


def of_record(row: bytes) -> Sample:
    return sample(row[:-1], row[-1])


def of_file(row: dict[str, Any]) -> Sample:
    return sample(row["data"], row["label"])


WAYS = {
    "parquet": Way(write_parquet, of_columns),
    "arrow": Way(write_arrow, of_columns),
    "jsonl": Way(write_jsonl, of_columns),
    "text": Way(write_text, of_line),
    "tar": Way(write_tar, of_members),
    "megatron": Way(write_megatron, of_tokens),
    "records": Way(write_records, of_record, {"format": "records", "record_bytes": PIXELS + 1}),
    "files": Way(write_files, of_file),
}


def main() -> None:
    for format, way in WAYS.items():
        directory = Path(sys.argv[1]) / format
        directory.mkdir()
        way.write(directory)
        torch.manual_seed(0)
        known = train(directory, way.decode, **way.options)
        print(f"{format}: {known:.0%} of the pictures are known")


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit(f"usage: {sys.argv[0]} DIRECTORY; a directory that is there")
    main()
