"""An object as ``torch.save`` writes it: a pickle in which storages are numbers, and storages."""

import io
import pickle
import sys
from collections.abc import Iterator
from ctypes import c_char
from typing import Any

import torch
from torch.serialization import location_tag, normalize_storage_type

from aifs.client.torch.archive import Image, record_names

CHUNK = 32 << 20  # bytes that are copied from an accelerator at a time


def describe(
    obj: Any, name: str, pickle_module: Any = pickle, pickle_protocol: int = 2
) -> tuple[Image, list[Any]]:
    """The archive of ``obj``, and its unread storages. Raises the errors of pickling."""
    storages: dict[
        int, Any
    ] = {}  # address of the storage's handle -> it; in the order of the archive
    numbers: dict[int, str] = {}
    dtypes: dict[int, Any] = {}

    def persistent_id(_: Any, one: Any) -> tuple[Any, ...] | None:
        storage: Any
        if isinstance(one, torch.storage.TypedStorage):
            storage, dtype, count = one._untyped_storage, one.dtype, one._size()
            kind = getattr(torch, one._pickle_storage_type())
        elif torch.is_storage(one):
            storage, dtype, count = one, torch.uint8, one.nbytes()
            kind = normalize_storage_type(type(one))
        else:
            return None
        address = storage.data_ptr() if storage.device.type != "meta" else 0
        if address and dtypes.setdefault(address, dtype) != dtype:
            raise RuntimeError(
                "cannot save tensors or storages that view the same memory as different types"
            )
        storages.setdefault(storage._cdata, storage)
        numbers.setdefault(storage._cdata, str(len(numbers)))
        return ("storage", kind, numbers[storage._cdata], location_tag(storage), count)

    pickler = type("Pickler", (pickle_module.Pickler,), {"persistent_id": persistent_id})
    buffer = io.BytesIO()
    pickler(buffer, protocol=pickle_protocol).dump(obj)
    found = list(storages.values())
    image = Image(
        name,
        buffer.getvalue(),
        tuple(storage.nbytes() for storage in found),
        names_hash(len(found)),
        _alignment(),
        sys.byteorder,
        _wants_crc(),
    )
    return image, found


def names_hash(count: int) -> str:
    """The first half of the serialization id: by the order of a hash table, so from torch's
    writer."""
    written: list[bytes] = []

    class Recorder:
        def write(self, data: Any) -> int:
            written.append(bytes(data))
            return len(data)

    writer = torch._C.PyTorchFileWriter(Recorder())  # type: ignore[call-overload]
    for name in record_names(count)[:-1]:  # it writes the version by itself
        writer.write_record(name, b"", 0)
    writer.write_end_of_file()
    return next(data for data in written if len(data) == 40 and data.isdigit())[:20].decode()


def _alignment() -> int:
    ask = getattr(torch.serialization, "_get_storage_alignment", None)
    return ask() if ask else 64


def _wants_crc() -> bool:
    ask = getattr(torch.serialization, "get_crc32_options", None)
    return ask() if ask else True


def chunks_of(storage: Any) -> Iterator[memoryview]:
    """The bytes of a storage; see ``chunks``."""
    if storage.device.type == "cpu":
        return iter([view(storage.data_ptr(), storage.nbytes())] if storage.nbytes() else [])
    return chunks(bytes_in(storage))


def bytes_in(storage: Any) -> torch.Tensor:
    """The storage as a tensor of bytes, on its device."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def chunks(source: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor, in place, or from its device through two page-locked buffers in
    turn."""
    size = source.numel()
    if source.device.type == "cpu":
        if size:
            yield view(source.data_ptr(), size)
        return
    buffers = [torch.empty(min(CHUNK, size), dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    events = [torch.Event(source.device), torch.Event(source.device)]

    def fetch(begin: int) -> memoryview:
        side, count = begin // CHUNK % 2, min(CHUNK, size - begin)
        buffers[side][:count].copy_(source[begin : begin + count], non_blocking=True)
        events[side].record()
        return view(buffers[side].data_ptr(), count)

    coming = fetch(0) if size else memoryview(b"")
    for begin in range(0, size, CHUNK):
        ready = coming
        if begin + CHUNK < size:
            coming = fetch(begin + CHUNK)
        events[begin // CHUNK % 2].synchronize()
        yield ready


def view(address: int, size: int) -> memoryview:
    """A view of memory. Callers keep the memory alive."""
    return memoryview((c_char * size).from_address(address)).cast("B")
