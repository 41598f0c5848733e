"""The ranges that a job's ranks will read of a checkpoint, in order, by the loaders' own functions
or torch's. Reads only what loaders need, and runs no code of a checkpoint."""

import os
import pickle
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten_with_path

from aifs.client.checkpoints import tensor_file
from aifs.client.checkpoints.manifest import CheckpointError
from aifs.client.checkpoints.publishing import PathLike, plain
from aifs.client.torch.contents import map_file
from aifs.client.torch.gather_files import (
    DISTRIBUTED,
    MAPPED,
    METADATA,
    PARALLEL,
    PIECE,
    READ,
    TOGETHER,
    WHOLE,
    AsFile,
    FileRange,
    Files,
    LoadPlan,
    Range,
    RankReads,
    Speeds,
    TensorPlace,
    pieces,
    plan,
)
from aifs.client.torch.parallel import find_files, has_parts

_ARCHIVE = b"PK\3\4"


def plan_load(
    paths: Sequence[PathLike],
    ranks: int,
    hosts: int = 1,
    *,
    together: bool = False,
    sharded: bool = False,
) -> LoadPlan:
    """The ranges that ``ranks`` on ``hosts``, as many on each, read first of all in a job. Later
    ``gathered`` may choose another way, by the speeds that it has measured.

    ``paths``: a directory or file that all load, or a file for each rank. ``together``: a file is
    read by ``gathered.read``. ``sharded``: of a checkpoint of torch.distributed each rank asks for
    its part of each tensor by the first dimension, as FSDP does; else for all. Raises ValueError
    for a world that cannot be, CheckpointError, OSError."""
    if not 0 < hosts <= ranks:
        raise ValueError(f"{ranks} ranks cannot run on {hosts} hosts")
    on = [rank * hosts // ranks for rank in range(ranks)]
    found = [plain(path) for path in paths]
    kind = _kind(found[0]) if len(found) == 1 else WHOLE
    if sharded and kind != DISTRIBUTED:
        raise ValueError(f"{found[0]}: is not of torch.distributed.checkpoint, so it has no shards")
    if together and kind != WHOLE:
        raise ValueError(f"{found[0]}: only a file is read together; {kind} loads this")
    if kind == PARALLEL:
        return _gathered(PARALLEL, find_files(found[0]).paths, on)
    if kind == DISTRIBUTED:
        from aifs.client.torch.distributed import plan_distributed  # takes long to import

        return plan_distributed(found[0], on, sharded)
    files = _files_of(found, ranks)
    if together and len(files) > 1:
        raise ValueError("only one file is read together")
    return _gathered(TOGETHER, files, on) if together else _by_themselves(files, on)


def _kind(path: str) -> str:
    if not os.path.isdir(path):
        return WHOLE
    if has_parts(path):
        return PARALLEL
    if os.path.exists(os.path.join(path, METADATA)):
        return DISTRIBUTED
    return WHOLE


def _files_of(paths: Sequence[str], ranks: int) -> list[str]:
    """One for all, or one a rank."""
    files, what = list(paths), "given"
    if len(paths) == 1 and os.path.isdir(paths[0]):
        what = f"in {paths[0]}"
        entries = [each for each in os.scandir(paths[0]) if not each.name.startswith(".")]
        files = sorted((each.path for each in entries if each.is_file()), key=_by_numbers)
        if not files:
            raise CheckpointError(
                f"{paths[0]}: holds no files of a checkpoint; of several checkpoints "
                "aifs checkpoint latest prints the newest"
            )
    if len(files) not in (1, ranks):
        raise CheckpointError(
            f"{len(files)} files are {what}, and nothing says which of {ranks} ranks loads which: "
            "name one for each rank, or one for all"
        )
    return files


def _by_numbers(path: str) -> list[tuple[bool, int, str]]:
    """So that rank-10 follows rank-2."""
    parts = re.split(r"([0-9]+)", path)
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]


def _by_themselves(files: Sequence[str], on: Sequence[int]) -> LoadPlan:
    sizes, tensors = {}, []
    loader = WHOLE
    for path in files:
        with Files([path]) as source:
            sizes[path] = source.size
            if not _is_archive(source):
                loader = MAPPED
            tensors += _tensors_of(source, [path])
    ranks = []
    for rank, host in enumerate(on):
        path = files[rank % len(files)]
        ranks.append(RankReads(host, [FileRange(path, 0, sizes[path])]))
    return LoadPlan(loader, READ, sizes, ranks, tensors)


def _gathered(loader: str, paths: Sequence[str], on: Sequence[int]) -> LoadPlan:
    with Files(paths) as source:
        shared = plan(source.size, on, [Speeds()] * len(on))
        todo = list(pieces(source.size, (), PIECE))
        ranks = [
            RankReads(
                host,
                [
                    each
                    for read in shared.reads_of(rank, todo)
                    for each in _ranges(source, paths, *read)
                ],
            )
            for rank, host in enumerate(on)
        ]
        sizes = dict(zip(paths, source.sizes, strict=True))
        return LoadPlan(loader, shared.way, sizes, ranks, _tensors_of(source, paths))


def _ranges(source: Files, paths: Sequence[str], begin: int, end: int) -> Iterator[FileRange]:
    for number, place in source.places(begin, end):
        yield FileRange(paths[number], *place)


# --- what is in a file ---


def _is_archive(source: Files) -> bool:
    head = bytearray(min(len(_ARCHIVE), source.size))
    source.read_into(memoryview(head), 0)
    return head == _ARCHIVE


def _tensors_of(source: Files, paths: Sequence[str]) -> list[TensorPlace]:
    """As they lie. Raises CheckpointError."""
    places = _archived(source, paths[0]) if _is_archive(source) else _mapped(paths[0])
    return [
        TensorPlace(name, list(_ranges(source, paths, begin, end)))
        for name, (begin, end) in sorted(places.items(), key=lambda item: item[1])
    ]


def _archived(source: Files, what: str) -> dict[str, Range]:
    """The tensors of a ``torch.save`` file; none if it holds more than weights."""
    content: Any = AsFile(source.size, source.read_into)
    try:
        with FakeTensorMode():  # storages say where they lie, and are not read
            state = torch.load(content, weights_only=True)
    except pickle.UnpicklingError:
        return {}
    except RuntimeError as error:
        raise CheckpointError(f"{what}: {str(error).partition('.')[0]}") from None
    found = {}
    for path, value in tree_flatten_with_path(state)[0]:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            begin = getattr(storage, "_checkpoint_offset", None)  # torch 2.7 and later
            if begin is not None:
                name = ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)
                found[name] = (begin, begin + storage.nbytes())
    return found


def _mapped(path: str) -> dict[str, Range]:
    try:
        entries, _ = tensor_file.decode(map_file(path))
    except tensor_file.DamagedTensors:
        raise CheckpointError(
            f"{path}: is neither a file of torch.save nor one of tensors (safetensors)"
        ) from None
    return {name: (entry.begin, entry.end) for name, entry in entries.items()}
