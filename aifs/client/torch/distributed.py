"""Storage of torch.distributed.checkpoint: ``dcp.save``, ``dcp.async_save``, ``dcp.load``.

    dcp.save(state, storage_writer=AifsWriter("run/step-100"))
    dcp.load(state, storage_reader=AifsReader("run"))               # the newest

Torch's own planner says which ranges ranks will read (``plan_distributed``). Code in a checkpoint's
metadata is never run.

The files are those of torch's own FileSystemWriter, and either reader reads them. They are written
into a pending directory and are durable when their rank has written them; the coordinator publishes
when it has written the metadata, so a save that failed or crashed shows no checkpoint."""

import io
import math
import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint import metadata as saved
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from aifs.client.checkpoints import attributes
from aifs.client.checkpoints.catalog import keep as keep_checkpoints
from aifs.client.checkpoints.catalog import latest as latest_of
from aifs.client.checkpoints.catalog import parse_keep, remove_leftovers, set_policy
from aifs.client.checkpoints.manifest import CheckpointError
from aifs.client.checkpoints.publishing import (
    PathLike,
    commit,
    pending_path,
    plain,
    publish,
    require_free,
)
from aifs.client.torch.gather_files import (
    DISTRIBUTED,
    METADATA,
    READ,
    FileRange,
    LoadPlan,
    RankReads,
    TensorPlace,
)
from aifs.client.torch.sinks import Sink, open_sink, writing_method
from aifs.core import files, trees

_GLOBALS = {
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
}


class _Stream(io.RawIOBase):
    """A sink as a file."""

    def __init__(self, sink: Sink) -> None:
        self._sink, self._position = sink, 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._sink.write(view)
        self._position += len(view)
        return len(view)


class _Files(FileSystem):
    """FileSystemWriter's files: in the pending directory, through sinks, unsynced."""

    method = "buffered"

    def init_path(self, path: PathLike) -> Path:
        return pending_path(plain(path))

    @contextmanager
    def create_stream(self, path: PathLike, mode: str) -> Iterator[Any]:
        fd = trees.create_file(os.fspath(path))
        try:
            sink = open_sink(fd, self.method)
            try:
                yield _Stream(sink)
                sink.finish()
            finally:
                sink.abandon()
        finally:
            files.close_file(fd)

    def mkdir(self, path: PathLike) -> None:
        trees.make_dir(os.fspath(path))

    def rename(self, path: PathLike, new_path: PathLike) -> None:
        files.rename(os.fspath(path), os.fspath(new_path))

    def rm_file(self, path: PathLike) -> None:
        files.unlink(os.fspath(path))


class AifsWriter(FileSystemWriter):
    """Saves the checkpoint ``path``. ``latest``, ``tracker``, ``keep``, ``step``, ``hash``,
    ``replace``: as of ``aifs.client.checkpoint``; ``options``: of FileSystemWriter. Each save needs
    another path (dcp's ``checkpoint_id``), unless ``replace``. ``group``: on a mount, the ranks'
    files are one grouped write with these options, such as 'name=step': bytes that the servers hold
    already are not stored again (docs/guide/grouped.md).

    Raises (wrapped by dcp) FileExistsError, CheckpointError, OSError."""

    def __init__(
        self,
        path: PathLike,
        *,
        step: int | None = None,
        latest: str | None = "latest",
        tracker: str | None = None,
        keep: str | None = None,
        hash: bool = True,
        replace: bool = False,
        group: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(path, **{**options, "sync_files": False})
        if keep is not None:
            parse_keep(keep)
        self._target = plain(path)
        self._keep, self._hash, self._replace, self._group = keep, hash, replace, group
        self._pointers: dict[str, Any] = {"step": step, "latest": latest, "tracker": tracker}
        self.fs = _Files()
        self.path = self.fs.init_path(path)

    def reset(self, checkpoint_id: PathLike | None = None) -> None:
        super().reset(checkpoint_id)
        if checkpoint_id:
            self._target = plain(checkpoint_id)

    @property
    def checkpoint_id(self) -> str:
        return self._target

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        if not getattr(self, "use_collectives", True):
            raise CheckpointError(
                f"{self._target}: use_collectives=False leaves nobody who could publish"
            )

    def prepare_local_plan(self, plan: Any) -> Any:
        require_free(self._target, self._replace)
        self.fs.mkdir(self.path)
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        """In the coordinator, before any rank writes: remove the files of a crashed save."""
        remove_leftovers(os.path.dirname(self._target))
        trees.empty_dir(os.fspath(self.path))
        if self._group is not None:
            _begin_group(os.fspath(self.path), f"{self._group},ranks={len(plans)},commit=explicit")
        return super().prepare_global_plan(plans)

    def write_data(self, plan: Any, planner: Any) -> Any:
        tensors = [item.tensor_data for item in plan.items if item.tensor_data is not None]
        size = sum(
            math.prod(tensor.chunk.sizes) * tensor.properties.dtype.itemsize for tensor in tensors
        )
        fs: Any = self.fs  # ours
        fs.method = writing_method(os.fspath(self.path), size)
        written = super().write_data(plan, planner)
        names = {result.storage_data.relative_path for result in written.wait()}
        rank = int(plan.storage_data.prefix.strip("_"))
        commit(self.path, rank, sorted(names), hash=self._hash)
        if self._group is not None and attributes.is_aifs(os.fspath(self.path)):
            attributes.put(os.fspath(self.path), attributes.GROUP_COMMIT, str(rank))
        return written

    def finish(self, metadata: Any, results: list[list[Any]]) -> None:
        """In the coordinator, when all have written: metadata, then publish."""
        super().finish(metadata, results)
        publish(
            self.path,
            self._target,
            ranks=len(results),
            replace=self._replace,
            hash=self._hash,
            **self._pointers,
        )
        parent = os.path.dirname(self._target)
        if self._keep is not None and not set_policy(parent, parse_keep(self._keep)):
            keep_checkpoints(parent, self._keep)


def _begin_group(directory: str, text: str) -> None:
    """Begin a grouped write of the directory's files, ending a crashed attempt."""
    if not attributes.is_aifs(directory):
        return
    if attributes.get(directory, attributes.GROUP):
        attributes.remove(directory, attributes.GROUP)
    attributes.put(directory, attributes.GROUP, text)


class AifsReader(FileSystemReader):
    """Loads the checkpoint ``path``, or a directory's newest. Raises FileNotFoundError."""

    def __init__(self, path: PathLike, **options: Any) -> None:
        super().__init__(_resolve(path), **options)

    def reset(self, checkpoint_id: PathLike | None = None) -> None:
        super().reset(_resolve(checkpoint_id) if checkpoint_id else None)


def _resolve(path: PathLike) -> Path:
    directory = plain(path)
    if os.path.exists(os.path.join(directory, METADATA)):
        return Path(directory)
    newest = latest_of(directory)
    if newest is None:
        raise FileNotFoundError(f"{directory}: holds no complete checkpoint")
    return newest


# --- what ranks will read ---


def plan_distributed(path: str, on: Sequence[int], sharded: bool) -> LoadPlan:
    """The ranges that ranks on the hosts ``on`` read. Raises CheckpointError, OSError."""
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
    """The items that each rank reads, in the saved order, except for outermost keys, which dcp.load
    sorts."""
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
    """Parts by the first dimension, of the ranks that get one."""
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
