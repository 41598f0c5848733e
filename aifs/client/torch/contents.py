"""What may be put into a file: tensors of torch, arrays of numpy, anything with the buffer
protocol.

A mapping of names to tensors, or one tensor, which is called ``tensor`` then, becomes a tensor file
(``tensor_file``); any other buffer becomes the file as it is. Bytes go to the file from where they
lie.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from aifs.client.checkpoints import tensor_file
from aifs.client.torch.sinks import Sink

ONE = "tensor"
"""The name of a tensor that is alone in its file."""


@dataclass(frozen=True)
class Content:
    """``size`` bytes, which ``write`` writes to a sink; until then the memory must not change."""

    size: int
    write: Callable[[Sink], None]


def content_of(data: Any, metadata: Mapping[str, str] | None = None) -> Content:
    """Raises TypeError or ValueError for what cannot be put into a file; nothing is copied."""
    if isinstance(data, Mapping):
        return _tensors(data, metadata)
    if _is_tensor(data):
        return _tensors({ONE: data}, metadata)
    if metadata:
        raise TypeError("metadata need a file of tensors")
    try:
        view = memoryview(data)
    except TypeError:
        raise TypeError(
            f"{type(data).__name__}: is neither a tensor, a mapping of names to tensors, nor a "
            "buffer"
        ) from None
    if not view.c_contiguous:
        raise ValueError("the buffer's bytes do not lie one after the other")
    return Content(view.nbytes, lambda sink: sink.write(view.cast("B")) if view.nbytes else None)


def _is_tensor(data: Any) -> bool:
    return _is_torch(data) or (hasattr(data, "dtype") and hasattr(data, "shape"))


def _tensors(tensors: Mapping[str, Any], metadata: Mapping[str, str] | None) -> Content:
    described = {name: _describe(name, tensor) for name, tensor in tensors.items()}
    header = tensor_file.encode(described, metadata)
    held = [tensors[name] for name in header.names]

    def write(sink: Sink) -> None:
        sink.write(header.data)
        for tensor in held:
            for piece in _bytes_of(tensor):
                sink.write(piece)

    return Content(header.size, write)


def _describe(name: str, tensor: Any) -> tuple[str, tuple[int, ...]]:
    if not _is_tensor(tensor):
        raise TypeError(
            f"{name}: {type(tensor).__name__} is no tensor; a file of tensors holds nothing else"
        )
    if _is_torch(tensor):
        from aifs.client.torch.tensors import require_plain

        require_plain(name, tensor)
        return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    return tensor.dtype.name, tuple(tensor.shape)


def _is_torch(tensor: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(tensor, torch.Tensor)


def _bytes_of(tensor: Any) -> Iterable[memoryview]:
    if _is_torch(tensor):
        from aifs.client.torch.tensors import bytes_of

        return bytes_of(tensor)
    import numpy

    array = numpy.ascontiguousarray(tensor, dtype=tensor.dtype.newbyteorder("<"))
    return [array.reshape(-1).view(numpy.uint8).data] if array.nbytes else []
