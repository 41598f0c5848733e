"""The shared memory that a state is copied to, beside what processors and accelerators compute."""

import ctypes
import mmap
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from aifs.client.torch.helper import CHUNK
from aifs.client.torch.records import bytes_in, view
from aifs.core import files

_ALL_DEVICES = 1
"""Of cudaHostRegister: memory is page-locked for all devices."""


def queued_work(storages: Sequence[Any]) -> dict[torch.device, Any]:
    """For each accelerator of storages, or tensors: an event behind all work queued by this
    thread."""
    events = {}
    for device in {storage.device for storage in storages if is_on_accelerator(storage)}:
        events[device] = torch.Event(device)
        events[device].record(module_of(device).current_stream(device))
    return events


class Arena:
    """Shared memory without a name, which grows."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("aifs-staging")
        self._map: mmap.mmap | None = None
        self._size = self._address = 0
        self._locked = False
        """Whether accelerators reach it by themselves."""

    def grow(self, size: int) -> None:
        if size <= self._size:
            return
        self._drop()
        files.truncate(self.fd, size)
        self._map, self._size = mmap.mmap(self.fd, size), size
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def _drop(self) -> None:
        if self._locked:
            torch.cuda.cudart().cudaHostUnregister(self._address)
        if self._map is not None:
            self._map.close()
        self._map, self._size, self._locked = None, 0, False

    def close(self) -> None:
        self._drop()
        if self.fd != -1:
            files.close_file(self.fd)
            self.fd = -1

    def fill(
        self,
        storages: Sequence[Any],
        places: Sequence[int],
        queued: Mapping[torch.device, Any],
        connection: Connection,
    ) -> None:
        """Copy each storage to its place (``places`` ends with the end), accelerators' behind
        ``queued``, and report progress to the helper. Raises OSError if it is gone."""
        told = 0
        for end in self._copy(storages, places, queued):
            if end - told >= CHUNK:
                connection.send(end)
                told = end
        if told < places[-1]:
            connection.send(places[-1])

    def _copy(
        self, storages: Sequence[Any], places: Sequence[int], queued: Mapping[torch.device, Any]
    ) -> Iterator[int]:
        """Where the copied part ends, after each piece."""
        coming = self._fetch(storages, places, queued) if queued else deque()
        for storage, place in zip(storages, places, strict=False):
            if is_on_accelerator(storage):
                while coming and coming[0][0] <= place + storage.nbytes():
                    end, event = coming.popleft()
                    event.synchronize()
                    yield end
                continue
            for begin in range(0, storage.nbytes(), CHUNK):
                size = min(CHUNK, storage.nbytes() - begin)
                ctypes.memmove(self._address + place + begin, storage.data_ptr() + begin, size)
                yield place + begin + size

    def _fetch(
        self, storages: Sequence[Any], places: Sequence[int], queued: Mapping[torch.device, Any]
    ) -> deque[tuple[int, Any]]:
        """Have accelerators copy storages in separate streams, not behind computing. Returns each
        piece's end and event."""
        if torch.cuda.is_initialized() and not self._locked:
            # Memory that could not be locked is copied to by way of the driver's, which is slower.
            failed = torch.cuda.cudart().cudaHostRegister(self._address, self._size, _ALL_DEVICES)
            self._locked = not int(failed)
        memory = torch.frombuffer(view(self._address, self._size), dtype=torch.uint8)
        streams = {}
        for device, event in queued.items():
            streams[device] = module_of(device).Stream(device)
            streams[device].wait_event(event)
        coming: deque[tuple[int, Any]] = deque()
        for storage, place in zip(storages, places, strict=False):
            if not is_on_accelerator(storage):
                continue
            stream, source = streams[storage.device], bytes_in(storage)
            with module_of(storage.device).stream(stream):
                for begin in range(0, len(source), CHUNK):
                    part = source[begin : begin + CHUNK]
                    end = place + begin + len(part)
                    memory[end - len(part) : end].copy_(part, non_blocking=True)
                    event = torch.Event(storage.device, blocking=True)  # waits without spinning
                    event.record(stream)
                    coming.append((end, event))
        return coming


def is_on_accelerator(storage: Any) -> bool:
    return storage.device.type != "cpu"


def module_of(device: torch.device) -> Any:
    """torch's part for that kind of accelerator, such as torch.cuda."""
    return getattr(torch, device.type)
