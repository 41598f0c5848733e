"""What the ranks of a job will read of a checkpoint of torch.distributed.checkpoint: by torch's own
planner. Nothing that its metadata say is run.
"""

import os
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as saved
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from aifs.client.checkpoints.manifest import CheckpointError
from aifs.client.torch.distributed import AifsReader
from aifs.client.torch.gather_plan import READ
from aifs.client.torch.load_plan import (
    DISTRIBUTED,
    METADATA,
    FileRange,
    LoadPlan,
    RankReads,
    TensorPlace,
)

_GLOBALS = {
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
}


def plan_distributed(path: str, on: Sequence[int], sharded: bool) -> LoadPlan:
    """What ranks on the hosts ``on`` read. Raises CheckpointError, OSError."""
    directory = os.fspath(AifsReader(path).path)
    what = os.path.join(directory, METADATA)
    metadata = _read_metadata(what)
    sizes = {what: os.stat(what).st_size}
    ranks, first = [], dict[str, int]()
    ranges: dict[str, dict[FileRange, None]] = {}
    for host, items in zip(on, _items(metadata, len(on), sharded), strict=True):
        by_file: dict[str, list[tuple[str, FileRange]]] = {}
        for item in items:  # file by file, as FileSystemReader reads them
            info = metadata.storage_data[item.storage_index]
            file = os.path.join(directory, info.relative_path)
            each = FileRange(file, info.offset, info.offset + info.length)
            by_file.setdefault(file, []).append((item.storage_index.fqn, each))
        reads = [read for found in by_file.values() for read in found]
        for place, (name, each) in enumerate(reads):
            first[name] = min(first.get(name, place), place)
            ranges.setdefault(name, {})[each] = None
        sizes |= {file: os.stat(file).st_size for file in by_file if file not in sizes}
        ranks.append(
            RankReads(host, [FileRange(what, 0, sizes[what]), *(read for _, read in reads)])
        )
    tensors = [
        TensorPlace(name, list(ranges[name])) for name in sorted(first, key=lambda n: first[n])
    ]
    return LoadPlan(DISTRIBUTED, READ, sizes, ranks, tensors)


def _items(metadata: saved.Metadata, ranks: int, sharded: bool) -> list[list[ReadItem]]:
    """What each rank asks for: in the order of the saved state, but for its outermost keys, which
    dcp.load sorts.
    """
    found: list[list[ReadItem]] = [[] for _ in range(ranks)]
    paths = metadata.planner_data or {}
    places = {name: place for place, name in enumerate(paths)}

    def order(name: str) -> tuple[str, int]:
        return str(paths.get(name, (name,))[0]), places.get(name, 0)

    for name in sorted(metadata.state_dict_metadata, key=order):
        one = metadata.state_dict_metadata[name]
        wanted = None
        if isinstance(one, saved.TensorStorageMetadata):
            if sharded and one.size:
                shards = _shards(one.size, ranks)
                for item in create_read_items_for_chunk_list(name, one, shards):
                    assert item.dest_index.index is not None
                    found[item.dest_index.index].append(item)
                continue
            wanted = torch.empty(one.size, device="meta")
        items = create_default_local_load_plan({name: wanted}, metadata).items
        for each in found:
            each += items
    return found


def _shards(size: torch.Size, ranks: int) -> list[saved.ChunkStorageMetadata]:
    """The parts by the first dimension, of those ranks that get one."""
    chunks, begin = [], 0
    for part in torch.empty(size[0], device="meta").chunk(ranks):
        offsets = torch.Size((begin, *(0 for _ in size[1:])))
        chunks.append(saved.ChunkStorageMetadata(offsets, torch.Size((len(part), *size[1:]))))
        begin += len(part)
    return chunks


def _read_metadata(path: str) -> saved.Metadata:
    try:
        with open(path, "rb") as file:
            found = _MetadataUnpickler(file).load()
    except (pickle.UnpicklingError, AttributeError, EOFError, ImportError, TypeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    if not isinstance(found, saved.Metadata):
        raise CheckpointError(f"{path}: does not describe a checkpoint")
    return found


class _MetadataUnpickler(pickle.Unpickler):
    """Makes what torch itself writes there, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        own = vars(saved).get(name)
        if module == saved.__name__ and getattr(own, "__module__", "") == module:
            return own
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if (module, name) in _GLOBALS:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it holds {module}.{name}")
