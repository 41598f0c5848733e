"""Tensor-native files, in the format of safetensors: a description of the tensors, then their
bytes. Needs neither torch nor numpy.

    8 bytes       length of the header, little-endian
    header        JSON: name -> {"dtype", "shape", "data_offsets": [begin, end]}; filled up with
                  spaces, so that the data begin at a multiple of ALIGNMENT
    data          the tensors, row by row, little-endian, with nothing between them

Largest element type first, so each tensor is aligned in a mapping of the file. Source: the format
description of safetensors."""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

ALIGNMENT = 4096
HEADER_MAX = 100_000_000  # as in safetensors

_METADATA = "__metadata__"
KINDS = {
    "F64": ("float64", 8),
    "I64": ("int64", 8),
    "U64": ("uint64", 8),
    "C64": ("complex64", 8),
    "F32": ("float32", 4),
    "I32": ("int32", 4),
    "U32": ("uint32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I16": ("int16", 2),
    "U16": ("uint16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "BOOL": ("bool", 1),
}
_CODES = {dtype: code for code, (dtype, _) in KINDS.items()}


class DamagedTensors(ValueError):
    """The bytes are no file of this format; the message says why."""


class TensorEntry(NamedTuple):
    """One tensor: its element type by the name of torch and numpy, and its place in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class TensorHeader(NamedTuple):
    """The bytes before the data. ``names``: in order of the data; ``size``: of the file."""

    data: bytes
    names: list[str]
    size: int


def itemsize(name: str, dtype: str) -> int:
    """Bytes of one element. Raises TypeError, naming the tensor ``name``, for an unknown type."""
    if dtype not in _CODES:
        raise TypeError(f"{name}: elements of type {dtype} cannot be in a file of tensors")
    return KINDS[_CODES[dtype]][1]


def encode(
    tensors: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> TensorHeader:
    """Of tensors that are given by element type and shape. Raises TypeError, ValueError."""
    for name in [*tensors, *(metadata or {}), *(metadata or {}).values()]:
        if not isinstance(name, str):
            raise TypeError(f"{name!r}: names of tensors, and metadata, are strings")
        try:
            name.encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"{name!r}: cannot be written as UTF-8, which the format wants"
            ) from None
    if _METADATA in tensors:
        raise ValueError(f"{_METADATA}: a tensor cannot have this name")
    names = sorted(tensors, key=lambda name: (-itemsize(name, tensors[name][0]), name))
    fields: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    position = 0
    for name in names:
        dtype, shape = tensors[name]
        end = position + math.prod(shape) * itemsize(name, dtype)
        fields[name] = {
            "dtype": _CODES[dtype],
            "shape": list(shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    if len(text) > HEADER_MAX:
        raise ValueError(
            f"{len(tensors)} tensors: names and shapes take {len(text)} bytes, more than "
            f"{HEADER_MAX}"
        )
    return TensorHeader(len(text).to_bytes(8, "little") + text, names, 8 + len(text) + position)


def decode(content: memoryview) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """The tensors of a file, and its metadata. Raises DamagedTensors."""
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > min(len(content) - 8, HEADER_MAX):
        raise DamagedTensors("is no file of tensors")
    start = 8 + length
    try:
        fields = json.loads(bytes(content[8:start]))
        metadata = dict(fields.pop(_METADATA, {}))
        for name, field in fields.items():
            if field["dtype"] not in KINDS:
                raise DamagedTensors(
                    f"{name} has elements of a type that is not known: {field['dtype']}"
                )
        return {
            name: _entry(start, len(content), **field) for name, field in fields.items()
        }, metadata
    except DamagedTensors:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DamagedTensors("its header is damaged") from None


def _entry(
    start: int, size: int, dtype: str, shape: list[int], data_offsets: list[int]
) -> TensorEntry:
    begin, end = data_offsets
    if any(type(number) is not int for number in (begin, end, *shape)):
        raise ValueError("its place or its shape is not one of whole numbers")
    kind, length = KINDS[dtype]
    if (
        not 0 <= begin <= end <= size - start
        or min(shape, default=0) < 0
        or end - begin != math.prod(shape) * length
    ):
        raise ValueError("its place is not what its shape needs, or lies behind the file")
    return TensorEntry(kind, tuple(shape), start + begin, start + end)


assert sys.byteorder == "little", "the format is little-endian, and so must be the machine"
