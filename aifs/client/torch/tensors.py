"""Tensors of torch as bytes of a file, and back, also on an accelerator."""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from aifs.client.checkpoints.tensor_file import TensorEntry
from aifs.client.torch.arena import module_of, queued_work
from aifs.client.torch.records import chunks

PIECE = 16 << 20
"""Bytes that are copied at a time."""
_THREADS = 4
_SMALL = 1 << 20
"""Bytes; below, handing a tensor to a thread takes longer than copying it."""


def require_plain(name: str, tensor: torch.Tensor) -> None:
    """Raises TypeError for a tensor that is not rows of elements in memory."""
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized or tensor.is_nested:
        raise TypeError(
            f"{name}: a tensor that is sparse, nested, quantized or without memory cannot be in a "
            "file"
        )


def bytes_of(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The elements row by row, copied only if needed; each piece is used before the next."""
    values = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A generator, so that ``values`` lives as long.
    yield from chunks(values.flatten().view(torch.uint8))


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


class _Lane(NamedTuple):
    """The buffer and the stream that a piece goes through."""

    memory: torch.Tensor
    """Page-locked, PIECE bytes."""
    stream: Any


def place(tensors: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """Contiguous tensors copied to an accelerator; complete on return.

    Threads fill page-locked memory while the accelerator fetches from it: it cannot fetch from a
    mapping, and one processor is slower than it.
    """
    placed = {
        name: torch.empty_like(tensor, device=device)
        if tensor.nbytes >= _SMALL
        else tensor.to(device)
        for name, tensor in tensors.items()
    }
    queued = queued_work(list(placed.values()))
    lanes: SimpleQueue[_Lane] = SimpleQueue()
    for _ in range(_THREADS if queued else 0):
        stream = module_of(device).Stream(next(iter(queued)))
        for event in queued.values():  # what the memory has been used for before
            stream.wait_event(event)
        lanes.put(_Lane(torch.empty(PIECE, dtype=torch.uint8, pin_memory=True), stream))

    def copy(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
        source, target = pair
        lane = lanes.get()
        try:
            locked = lane.memory[: len(source)]
            locked.copy_(source)
            with module_of(device).stream(lane.stream):
                target.copy_(locked, non_blocking=True)
            lane.stream.synchronize()
        finally:
            lanes.put(lane)

    with ThreadPoolExecutor(_THREADS, "aifs-placing") as pool:
        for _ in pool.map(copy, _pieces(tensors, placed)):
            pass
    return placed


def _pieces(
    tensors: Mapping[str, torch.Tensor], placed: Mapping[str, torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for name, tensor in tensors.items():
        if tensor.nbytes < _SMALL:
            continue
        source, target = (each.flatten().view(torch.uint8) for each in (tensor, placed[name]))
        yield from zip(source.split(PIECE), target.split(PIECE), strict=True)
