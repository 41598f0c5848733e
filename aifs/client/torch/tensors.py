"""Files of safetensors, written at the speed of the device and loaded by mapping them.

    8 bytes       length of the header, little-endian, a multiple of 8
    header        JSON: name -> {"dtype", "shape", "data_offsets": [begin, end]}; filled up with spaces
    data          the tensors, row by row, little-endian

Largest element type first, so each tensor is aligned. Source: the format description of safetensors.
"""

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

import torch

from aifs.client.manifest import CheckpointError
from aifs.client.publishing import PathLike, plain
from aifs.client.torch.probe import writing_method
from aifs.client.torch.records import chunks
from aifs.client.torch.saving import write_file
from aifs.client.torch.sinks import BUFFERED, Sink
from aifs.core import files

_NAMES = {
    "float64": "F64", "int64": "I64", "uint64": "U64", "complex64": "C64", "float32": "F32", "int32": "I32",
    "uint32": "U32", "float16": "F16", "bfloat16": "BF16", "int16": "I16", "uint16": "U16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0", "uint8": "U8",
    "int8": "I8", "bool": "BOOL",
}  # fmt: skip
_TO_NAME = {getattr(torch, kind): name for kind, name in _NAMES.items() if hasattr(torch, kind)}
_TO_DTYPE = {name: dtype for dtype, name in _TO_NAME.items()}
_METADATA = "__metadata__"
_HEADER_MAX = 100_000_000  # as in safetensors


def save_safetensors(
    tensors: Mapping[str, torch.Tensor], path: PathLike, metadata: Mapping[str, str] | None = None, *,
    sync: bool = True, method: str | None = None,
) -> None:  # fmt: skip
    """Write ``tensors`` as the file ``path``, which appears whole or not at all; ``sync`` and ``method`` as
    of ``save``. Tensors that share memory are written each. Raises TypeError for an element type that the
    format does not have, OSError."""
    target = plain(path)
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    position = 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in _TO_NAME:
            raise TypeError(f"{name}: {tensor.dtype} cannot be in a file of safetensors")
        end = position + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _TO_NAME[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [position, end]
        }  # fmt: skip
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def fill(sink: Sink) -> None:
        sink.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            plain_values = tensors[name].detach().resolve_conj().resolve_neg()
            for chunk in chunks(plain_values.contiguous().flatten().view(torch.uint8)):
                sink.write(chunk)

    if method is None:
        method = writing_method(os.path.dirname(target), position) if sync else BUFFERED
    write_file(target, fill, sync=sync, method=method)


def load_safetensors(path: PathLike, device: Any = "cpu") -> dict[str, torch.Tensor]:
    """The tensors by name. On the CPU they are a private mapping of the file: read when used, changes are not
    written. Raises CheckpointError for what is no such file, OSError."""
    target = plain(path)
    size = os.stat(target).st_size
    fd = files.open_file(target, write=False)
    try:
        length = int.from_bytes(files.read_at(fd, 8, 0), "little")
        if size < 8 or length > min(size - 8, _HEADER_MAX):
            raise CheckpointError(f"{target}: is no file of safetensors")
        text = files.read_at(fd, length, 8)
    finally:
        files.close_file(fd)
    content = torch.empty(0, dtype=torch.uint8)
    content.set_(torch.UntypedStorage.from_file(target, False, size))
    try:
        header = json.loads(text)
        header.pop(_METADATA, None)
        return {name: _tensor(content[8 + length :], **entry).to(device) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError):
        raise CheckpointError(f"{target}: its header is damaged") from None


def _tensor(data: torch.Tensor, dtype: str, shape: list[int], data_offsets: list[int]) -> torch.Tensor:
    begin, end = data_offsets
    if not 0 <= begin <= end <= data.numel():
        raise ValueError("it ends behind the file")
    piece = data[begin:end]
    if piece.data_ptr() % _TO_DTYPE[dtype].itemsize:  # other writers may align it worse
        piece = piece.clone()
    return piece.view(_TO_DTYPE[dtype]).reshape(shape)


assert sys.byteorder == "little", "the format is little-endian, and so must be the machine"
