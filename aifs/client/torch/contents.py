"""Files of tensors of torch, arrays of numpy, or anything with the buffer protocol: put and loaded.

Names with tensors, or one tensor (``tensor``), become a file of safetensors
(``client/checkpoints/tensor_file.py``); any other buffer becomes the file. Bytes go from where they
lie, and are loaded by mapping. Imports torch only for its tensors.
"""

import mmap
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aifs.client.checkpoints import tensor_file
from aifs.client.checkpoints.manifest import CheckpointError
from aifs.client.checkpoints.publishing import PathLike, plain
from aifs.client.torch.saving import write_file
from aifs.client.torch.sinks import BUFFERED, Sink, writing_method
from aifs.core import files

if TYPE_CHECKING:
    import torch

ONE = "tensor"
"""The name of a tensor that is alone in its file."""


@dataclass(frozen=True)
class Content:
    """``size`` bytes, which ``write`` writes to a sink; until then the memory must not change."""

    size: int
    write: Callable[[Sink], None]


def content_of(data: Any, metadata: Mapping[str, str] | None = None) -> Content:
    """Raises TypeError or ValueError for data that cannot be put into a file; nothing is copied."""
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


class Loaded:
    """The file ``path``. Its tensors and arrays share its memory, and keep it alive."""

    def __init__(self, path: str, content: memoryview) -> None:
        self.path = path
        self._content = content

    def to_buffer(self) -> memoryview:
        """All bytes of the file."""
        return self._content

    def to_tensors(self, device: Any = "cpu") -> dict[str, Any]:
        """The tensors of torch, by name. Raises CheckpointError if it is no file of tensors."""
        from aifs.client.torch.tensors import tensors_on

        return tensors_on(device, self._content, self._decode()[0])

    def to_tensor(self, name: str = ONE, device: Any = "cpu") -> Any:
        """The one tensor, or that of this name. Raises CheckpointError if there is none."""
        from aifs.client.torch.tensors import tensors_on

        return tensors_on(device, self._content, {name: self._entry(name)})[name]

    def to_arrays(self) -> dict[str, Any]:
        """Arrays of numpy, by name. Raises TypeError for element types unknown to it,
        CheckpointError."""
        return {name: self._array(name, entry) for name, entry in self._decode()[0].items()}

    def to_array(self, name: str = ONE) -> Any:
        """As ``to_tensor``, as an array of numpy."""
        return self._array(name, self._entry(name))

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata beside the tensors. Raises CheckpointError if it is no file of tensors."""
        return self._decode()[1]

    def _decode(self) -> tuple[dict[str, tensor_file.TensorEntry], dict[str, str]]:
        try:
            return tensor_file.decode(self._content)
        except tensor_file.DamagedTensors as error:
            raise CheckpointError(f"{self.path}: {error}") from None

    def _entry(self, name: str) -> tensor_file.TensorEntry:
        entries = self._decode()[0]
        if name not in entries:
            held = ", ".join(sorted(entries)[:8]) + (", ..." if len(entries) > 8 else "") or "none"
            raise CheckpointError(f"{self.path}: holds no tensor {name!r}, but: {held}")
        return entries[name]

    def _array(self, name: str, entry: tensor_file.TensorEntry) -> Any:
        import numpy

        try:
            dtype = numpy.dtype(entry.dtype)
        except TypeError:
            raise TypeError(
                f"{name}: numpy has no elements of type {entry.dtype}; take it as a tensor"
            ) from None
        data = numpy.frombuffer(self._content[entry.begin : entry.end], numpy.uint8)
        if data.ctypes.data % dtype.alignment:  # other writers may align it worse
            data = data.copy()
        return data.view(dtype).reshape(entry.shape)


def map_file(path: str) -> memoryview:
    """The file's bytes, privately mapped: read when used, changes are not written. Raises
    OSError."""
    fd = files.open_file(path, write=False)
    try:
        size = os.fstat(fd).st_size
        return memoryview(mmap.mmap(fd, size, access=mmap.ACCESS_COPY) if size else bytearray())
    finally:
        files.close_file(fd)


def save_safetensors(
    tensors: "Mapping[str, torch.Tensor]",
    path: PathLike,
    metadata: Mapping[str, str] | None = None,
    *,
    sync: bool = True,
    method: str | None = None,
) -> None:
    """Write ``tensors`` as the file ``path``, which appears whole or not at all; ``sync`` and
    ``method``: see ``save``. Tensors sharing memory are written each. Raises TypeError for an
    unknown element type, OSError."""
    target = plain(path)
    content = content_of(dict(tensors), metadata)
    if method is None:
        method = writing_method(os.path.dirname(target), content.size) if sync else BUFFERED
    write_file(target, content.write, sync=sync, method=method)


def load_safetensors(path: PathLike, device: Any = "cpu") -> "dict[str, torch.Tensor]":
    """The tensors by name; on the CPU, a private mapping: read when used, changes are not written.
    Raises CheckpointError if it is no such file, OSError."""
    target = plain(path)
    return Loaded(target, map_file(target)).to_tensors(device)
