"""Pictures for AIFS and for the loaders of others: each writes them in the format that it wants,
and reads them once in shuffled order.

    peer_epoch.py write PEER DIRECTORY PICTURES
    peer_epoch.py read PEER     for each line, a DIRECTORY, prints {"samples": N, "seconds": S}

Both print "ready" first, unless what the peer imports is not there.
"""

import io
import json
import os
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

WORKERS, BATCH, BUFFER = 2, 64, 1000
SHARD = 100
"""Pictures of one file, where several are in one: 10 MB."""


def picture(number: int) -> bytes:
    """100 KB on average; nothing compresses them."""
    rng = np.random.default_rng(number)
    return rng.bytes(int(rng.integers(50_000, 150_000)))


def touched(content: bytes) -> int:
    """What stands for decoding: each page is looked at."""
    return int(np.frombuffer(content, np.uint8)[::4096].sum(dtype=np.int64))


def of_row(row: dict[str, Any]) -> int:
    return touched(row["data"])


def of_image(row: dict[str, Any]) -> int:
    return touched(row["image"])


def of_member(row: dict[str, Any]) -> int:
    return touched(row["jpg"])


def of_images(rows: list[dict[str, Any]]) -> list[int]:
    return [touched(row["image"]) for row in rows]


def write_files(directory: Path, count: int) -> None:
    for number in range(count):
        (directory / f"{number:06}.jpg").write_bytes(picture(number))


def write_tar(directory: Path, count: int) -> None:
    for shard in _shards(count):
        with tarfile.open(directory / f"{shard.start:06}.tar", "w") as archive:
            for number in shard:
                content = picture(number)
                member = tarfile.TarInfo(f"{number:06}.jpg")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def write_parquet(directory: Path, count: int) -> None:
    import pyarrow
    from pyarrow import parquet

    for shard in _shards(count):
        table = pyarrow.table({"image": [picture(number) for number in shard]})
        parquet.write_table(table, directory / f"{shard.start:06}.parquet", row_group_size=100)


def write_litdata(directory: Path, count: int) -> None:
    import litdata

    litdata.optimize(
        of_number, list(range(count)), str(directory), chunk_bytes="10MB", num_workers=1
    )


def of_number(number: int) -> dict[str, bytes]:
    return {"image": picture(number)}


def write_mosaicml(directory: Path, count: int) -> None:
    import streaming

    with streaming.MDSWriter(
        out=str(directory), columns={"image": "bytes"}, size_limit=10 << 20
    ) as out:
        for number in range(count):
            out.write({"image": picture(number)})


def _shards(count: int) -> Iterator[range]:
    for first in range(0, count, SHARD):
        yield range(first, min(first + SHARD, count))


def read_aifs(directory: Path) -> Iterable[Any]:
    return _aifs(directory, of_row)


def read_aifs_tar(directory: Path) -> Iterable[Any]:
    return _aifs(directory, of_member)


def _aifs(directory: Path, transform: Callable[[Any], int]) -> Iterable[Any]:
    from aifs.client import data

    order = {"seed": 1, "buffer": BUFFER}
    dataset = data.open(directory)
    return data.Loader(dataset, BATCH, num_workers=WORKERS, transform=transform, order=order)


def read_webdataset(directory: Path) -> Iterable[Any]:
    import webdataset
    from torch.utils.data import DataLoader

    shards = sorted(map(str, directory.glob("*.tar")))
    rows = webdataset.WebDataset(shards, shardshuffle=len(shards)).shuffle(BUFFER).map(of_member)
    return DataLoader(rows, batch_size=BATCH, num_workers=WORKERS)


def read_litdata(directory: Path) -> Iterable[Any]:
    import litdata

    rows = litdata.StreamingDataset(str(directory), shuffle=True, seed=1, transform=of_image)
    return litdata.StreamingDataLoader(rows, batch_size=BATCH, num_workers=WORKERS)


def read_mosaicml(directory: Path) -> Iterable[Any]:
    import streaming
    from torch.utils.data import DataLoader

    rows = streaming.StreamingDataset(local=str(directory), shuffle=True, batch_size=BATCH)
    return DataLoader(rows, batch_size=BATCH, num_workers=WORKERS, collate_fn=of_images)


def read_datasets(directory: Path) -> Iterable[Any]:
    from datasets import load_dataset
    from torch.utils.data import DataLoader

    files = sorted(map(str, directory.glob("*.parquet")))
    rows = load_dataset("parquet", data_files=files, split="train", streaming=True)
    mixed = rows.shuffle(seed=1, buffer_size=BUFFER)
    return DataLoader(mixed, batch_size=BATCH, num_workers=WORKERS, collate_fn=of_images)


class Peer(NamedTuple):
    """How it writes, and how it reads."""

    module: str
    """Whose import tells whether it is there."""

    write: Callable[[Path, int], None]
    read: Callable[[Path], Iterable[Any]]


PEERS = {
    "AIFS, a directory of files": Peer("aifs.client.data.torch", write_files, read_aifs),
    "AIFS, tar": Peer("aifs.client.data.torch", write_tar, read_aifs_tar),
    "WebDataset": Peer("webdataset", write_tar, read_webdataset),
    "LitData": Peer("litdata", write_litdata, read_litdata),
    "MosaicML streaming": Peer("streaming", write_mosaicml, read_mosaicml),
    "HF datasets, parquet": Peer("datasets", write_parquet, read_datasets),
}


def import_peer(peer: Peer) -> None:
    """Raises ImportError, RuntimeError if it is not there."""
    import torch

    if peer.module == "streaming":
        # It imports torchvision, which asks for these on its import; without a GPU its package,
        # made for one, does not bring them. Nobody calls them here.
        for name in ("nms", "qnms"):
            torch.library.define(
                f"torchvision::{name}",
                "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
            )
    __import__(peer.module)


def read(peer: Peer, directory: Path) -> dict[str, float]:
    begun = time.perf_counter()
    samples = sum(len(batch) for batch in peer.read(directory))
    return {"samples": samples, "seconds": time.perf_counter() - begun}


def serve(peer: Peer) -> None:
    """Read each directory that is named on the standard input, each in a process of its own, which
    ends afterwards: what is imported once takes longer than the reading."""
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            print(json.dumps(read(peer, Path(line.strip()))), flush=True)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            raise SystemExit(f"{line.strip()} was not read")


def main() -> None:
    what, name, *words = sys.argv[1:]
    peer = PEERS[name]
    import_peer(peer)
    print("ready", flush=True)
    if what == "write":
        directory, count = words
        peer.write(Path(directory), int(count))
    else:
        serve(peer)


if __name__ == "__main__":
    main()
