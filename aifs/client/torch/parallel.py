"""The replicas of a data-parallel job write and read one checkpoint together.

All hold the same state, so each writer writes a part of the file that ``torch.save`` would write:
the file ``FILE.DIGEST.0002-of-0004`` holds the third quarter of its bytes, to the byte. The parts
one after the other are a file for ``torch.load``; ``DIGEST`` says of which state they are. CRC-32s
are not taken, as no replica looks at all bytes; the checkpoint's manifest has a hash of each part.
"""

import os
import re
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import blake3
import torch
import torch.distributed as dist

from aifs.client.checkpoints.manifest import NAME, CheckpointError, read_document
from aifs.client.checkpoints.publishing import PathLike, plain
from aifs.client.checkpoints.saving import checkpoint
from aifs.client.startup.stages import stage
from aifs.client.torch.archive import Image, Sink, length_of, write_archive
from aifs.client.torch.gather_files import AsFile, FoundFiles, split
from aifs.client.torch.gathered import read_alone, read_files
from aifs.client.torch.records import chunks_of, describe
from aifs.client.torch.saving import archive_name, write_file
from aifs.client.torch.sinks import writing_method
from aifs.core import files

REPLICA, SOCKET, DEVICE = "replica", "socket", "device"

_PART = re.compile(r"(.+)\.([0-9a-f]{16})\.(\d{4,})-of-(\d{4,})", re.DOTALL)


def choose(places: Sequence[Hashable]) -> list[int]:
    """The first rank at each place."""
    return sorted({place: rank for rank, place in reversed(list(enumerate(places)))}.values())


def parallel_save(
    state: Any,
    path: PathLike,
    group: Any = None,
    *,
    writers: str = REPLICA,
    file: str | None = None,
    **options: Any,
) -> None:
    """All ranks of ``group`` save the same ``state`` as the checkpoint ``path``, each its part.

    ``group``: a process group of torch.distributed, None for the default one, or (name, rank,
    size). ``writers``: every 'replica', or the first rank of each processor 'socket', or of each
    'device' (on each host) that the checkpoint goes to. ``options``: of ``aifs.client.checkpoint``.
    Rank 0's pickle is the one that counts; with a named group all must be equal. Raises
    CheckpointError if the replicas differ, and as ``checkpoint``."""
    if writers not in (REPLICA, SOCKET, DEVICE):
        raise ValueError(f"writers={writers!r}: it is one of {REPLICA!r}, {SOCKET!r}, {DEVICE!r}")
    target = plain(path)
    named = isinstance(group, tuple)
    if named and writers != REPLICA:
        raise ValueError(
            f"writers={writers!r} needs a process group: of a named one nobody knows where they are"
        )
    file = file or (f"{group[0]}.pt" if named else "state.pt")
    image, storages = describe(state, archive_name(file))
    image = replace(image, crc=False)
    rank, size = (
        (group[1], group[2]) if named else (dist.get_rank(group), dist.get_world_size(group))
    )
    if named:
        chosen = list(range(size))
    else:
        image, places = _agree(image, _place(writers, rank, target), group, target)
        chosen = choose(places)
    digest = blake3.blake3(image.pickle).update(repr(image.sizes).encode()).hexdigest()[:16]
    check = partial(_require_one, target, file) if named else None
    with checkpoint(target, ranks=size, rank=rank, check=check, **options) as directory:
        if rank in chosen:
            index, length = chosen.index(rank), length_of(image)
            begin, end = split(length, len(chosen))[index]
            part = str(directory / f"{file}.{digest}.{index:04}-of-{len(chosen):04}")
            write_file(
                part,
                lambda sink: write_archive(
                    image, map(chunks_of, storages), _Window(sink, begin, end)
                ),
                sync=True,
                method=writing_method(str(directory), end - begin),
            )


def _require_one(target: str, file: str, directory: Path) -> None:
    """Check that all parts are of one state. Raises CheckpointError."""
    try:
        find_parts(str(directory), file)
    except CheckpointError:
        raise CheckpointError(f"{target}: was not saved: the replicas' states differ") from None


def _place(writers: str, rank: int, target: str) -> Hashable:
    if writers == REPLICA:
        return rank
    host = files.boot_id()
    if writers == DEVICE:
        return host, os.stat(os.path.dirname(target)).st_dev
    processor = min(os.sched_getaffinity(0))
    with open(
        f"/sys/devices/system/cpu/cpu{processor}/topology/physical_package_id", encoding="ascii"
    ) as file:
        return host, file.read().strip()


def _agree(image: Image, place: Hashable, group: Any, target: str) -> tuple[Image, list[Hashable]]:
    """The image with rank 0's pickle, whose devices may have other names; and all places."""
    mine = (place, image.sizes, image.pickle if dist.get_rank(group) == 0 else b"")
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group)
    differing = [rank for rank, (_, sizes, _) in enumerate(everyone) if sizes != everyone[0][1]]
    if differing:
        raise CheckpointError(
            f"{target}: rank {differing[0]} does not hold the same tensors as rank 0"
        )
    return replace(image, pickle=everyone[0][2]), [place for place, _, _ in everyone]


class _Window:
    """Lets the bytes from ``begin`` to ``end`` through."""

    def __init__(self, sink: Sink, begin: int, end: int) -> None:
        self._sink, self._begin, self._end, self._position = sink, begin, end, 0

    def write(self, data: bytes | memoryview) -> None:
        first = max(self._begin - self._position, 0)
        last = min(self._end - self._position, len(data))
        if first < last:
            self._sink.write(memoryview(data)[first:last])
        self._position += len(data)

    def skip(self, size: int) -> bool:
        if self._position < self._end and self._position + size > self._begin:
            return False
        self._position += size
        return True


def has_parts(directory: str) -> bool:
    """Whether something that ``parallel_save`` has written is in it. Raises OSError."""
    return any(map(_PART.fullmatch, os.listdir(directory)))


def find_parts(directory: str, file: str | None = None) -> list[str]:
    """The parts' paths in order. ``file``: of the parts; None: there must be one. Raises
    CheckpointError, OSError."""
    found: dict[tuple[str, str, int], dict[int, str]] = {}
    for name in os.listdir(directory):
        match = _PART.fullmatch(name)
        if match and file in (None, match[1]):
            parts = found.setdefault((match[1], match[2], int(match[4])), {})
            parts[int(match[3])] = os.path.join(directory, name)
    if len(found) != 1:
        raise CheckpointError(f"{directory}: holds parts of {len(found) or 'no'} files, not of one")
    (_, _, count), parts = found.popitem()
    missing = [index for index in range(count) if index not in parts]
    if missing:
        raise CheckpointError(f"{directory}: part {missing[0]} of {count} is missing")
    return [parts[index] for index in range(count)]


@stage("parallel_load")
def parallel_load(
    path: PathLike,
    group: Any = None,
    *,
    file: str | None = None,
    map_location: Any = None,
    weights_only: bool = True,
) -> Any:
    """Load the state that ``parallel_save`` has saved, in every rank of ``group``, which may have
    another size.

    Across hosts each byte is read once, and passed on (see ``gathered``). With a named group, or
    without torch.distributed, all is read. Raises CheckpointError (in all ranks, if one cannot
    read, or ends), OSError."""
    directory = plain(path)
    find = partial(find_files, directory, file)
    content = read_alone(find) if isinstance(group, tuple) else read_files(find, directory, group)

    def copy(target: memoryview, begin: int) -> None:
        target[:] = content[begin : begin + len(target)]

    source: Any = AsFile(len(content), copy)  # enough of a file for torch
    return torch.load(source, map_location=map_location, weights_only=weights_only)


def find_files(directory: str, file: str | None = None) -> FoundFiles:
    """Equal names and sizes may be different states; manifests differ. Pointers, as the latest
    checkpoint's, are resolved once: they may be moved."""
    directory = os.path.realpath(directory)
    parts = find_parts(directory, file)
    listed = read_document(os.path.join(directory, NAME))
    return (
        FoundFiles(parts)
        if listed is None
        else FoundFiles(parts, blake3.blake3(listed).hexdigest())
    )
