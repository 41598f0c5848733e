"""Tensors of torch in files of safetensors (``client/checkpoints/tensor_file.py``), written at the
speed of the device and loaded by mapping them."""

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from aifs.client.checkpoints.publishing import PathLike, plain
from aifs.client.checkpoints.tensor_file import TensorEntry
from aifs.client.torch.contents import content_of
from aifs.client.torch.loaded import Loaded, map_file
from aifs.client.torch.placing import place
from aifs.client.torch.probe import writing_method
from aifs.client.torch.records import chunks
from aifs.client.torch.saving import write_file
from aifs.client.torch.sinks import BUFFERED


def save_safetensors(
    tensors: Mapping[str, torch.Tensor],
    path: PathLike,
    metadata: Mapping[str, str] | None = None,
    *,
    sync: bool = True,
    method: str | None = None,
) -> None:
    """Write ``tensors`` as the file ``path``, which appears whole or not at all; ``sync`` and
    ``method`` as of ``save``. Tensors that share memory are written each. Raises TypeError for an
    element type that the format does not have, OSError."""
    target = plain(path)
    content = content_of(dict(tensors), metadata)
    if method is None:
        method = writing_method(os.path.dirname(target), content.size) if sync else BUFFERED
    write_file(target, content.write, sync=sync, method=method)


def load_safetensors(path: PathLike, device: Any = "cpu") -> dict[str, torch.Tensor]:
    """The tensors by name. On the CPU they are a private mapping of the file: read when used,
    changes are not written. Raises CheckpointError for what is no such file, OSError."""
    target = plain(path)
    return Loaded(target, map_file(target)).to_tensors(device)


def require_plain(name: str, tensor: torch.Tensor) -> None:
    """Raises TypeError for a tensor that is not rows of elements in memory."""
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized or tensor.is_nested:
        raise TypeError(
            f"{name}: a tensor that is sparse, nested, quantized or without memory cannot be in a "
            "file"
        )


def bytes_of(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The elements row by row; copied only if they do not lie so. Each piece is used before the
    next.
    """
    values = tensor.detach().resolve_conj().resolve_neg().contiguous()
    yield from chunks(
        values.flatten().view(torch.uint8)
    )  # a generator, so that ``values`` lives as long


def tensors_on(
    device: Any, content: memoryview, entries: Mapping[str, TensorEntry]
) -> dict[str, torch.Tensor]:
    """The tensors that lie there, on the device: on the CPU they share the memory."""
    tensors = {name: _tensor_at(content, entry) for name, entry in entries.items()}
    if torch.device(device).type in ("cpu", "meta"):
        return {name: tensor.to(device) for name, tensor in tensors.items()}
    return place(tensors, torch.device(device))


def _tensor_at(content: memoryview, entry: TensorEntry) -> torch.Tensor:
    dtype = getattr(torch, entry.dtype)
    if entry.begin == entry.end:
        return torch.empty(entry.shape, dtype=dtype)
    data = torch.frombuffer(content[entry.begin : entry.end], dtype=torch.uint8)
    if data.data_ptr() % dtype.itemsize:  # other writers may align it worse
        data = data.clone()
    return data.view(dtype).reshape(entry.shape)
