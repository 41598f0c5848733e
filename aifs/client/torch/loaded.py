"""A file that was put: its bytes, and the tensors in it, without a copy where that can be."""

import mmap
import os
from typing import Any

from aifs.client.checkpoints import tensor_file
from aifs.client.checkpoints.manifest import CheckpointError
from aifs.client.torch.contents import ONE
from aifs.core import files


class Loaded:
    """The content of the file ``path``. What is taken from it shares its memory, and keeps it
    alive.
    """

    def __init__(self, path: str, content: memoryview) -> None:
        self.path = path
        self._content = content

    def to_buffer(self) -> memoryview:
        """All bytes of the file."""
        return self._content

    def to_tensors(self, device: Any = "cpu") -> dict[str, Any]:
        """The tensors of torch, by name. Raises CheckpointError for what is no file of tensors."""
        from aifs.client.torch.tensors import tensors_on

        return tensors_on(device, self._content, self._decode()[0])

    def to_tensor(self, name: str = ONE, device: Any = "cpu") -> Any:
        """The one tensor that was put, or the one of that name. Raises CheckpointError if there is
        none.
        """
        from aifs.client.torch.tensors import tensors_on

        return tensors_on(device, self._content, {name: self._entry(name)})[name]

    def to_arrays(self) -> dict[str, Any]:
        """The tensors as arrays of numpy, by name. Raises TypeError for element types that it
        lacks, CheckpointError."""
        return {name: self._array(name, entry) for name, entry in self._decode()[0].items()}

    def to_array(self, name: str = ONE) -> Any:
        """As ``to_tensor``, as an array of numpy."""
        return self._array(name, self._entry(name))

    @property
    def metadata(self) -> dict[str, str]:
        """What was put beside the tensors. Raises CheckpointError for what is no file of
        tensors.
        """
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
    """The file's bytes, privately mapped: read when used; changes are not written. Raises
    OSError.
    """
    fd = files.open_file(path, write=False)
    try:
        size = os.fstat(fd).st_size
        return memoryview(mmap.mmap(fd, size, access=mmap.ACCESS_COPY) if size else bytearray())
    finally:
        files.close_file(fd)
