"""The helper process of a PipelinedCheckpointer: writes and publishes what the training process
stages.

Both have the arena, a piece of shared memory without a name, and a socket. The training process
sends a ``SaveJob``, then how many bytes of the arena are staged, again and again up to all; it gets
a ``JobEnd``. None, or its end, ends the helper; an end before all is staged gives the checkpoint
up. Needs no torch.
"""

import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from aifs.client.checkpoints.saving import checkpoint
from aifs.client.torch.archive import Image, length_of
from aifs.client.torch.saving import save_image
from aifs.client.torch.sinks import writing_method

CHUNK = 32 << 20  # bytes that are staged, and written, at a time
_ALIGNMENT = 64


@dataclass(frozen=True)
class SaveJob:
    """Write ``image`` as ``file`` of the checkpoint ``target``; ``options`` of ``checkpoint``."""

    target: str
    file: str
    image: Image
    options: dict[str, Any]


@dataclass(frozen=True)
class JobEnd:
    """How a job ended: all fields are empty if well."""

    errno: int = 0
    problem: str = ""
    path: str | None = None


def offsets(sizes: tuple[int, ...]) -> list[int]:
    """Where in the arena the storages begin; last, where it ends."""
    found = [0]
    for size in sizes:
        found.append(found[-1] + size + -size % _ALIGNMENT)
    return found


class _Staging:
    """The bytes that the training process has staged so far."""

    def __init__(self, connection: Connection, arena: memoryview) -> None:
        self._connection, self._arena, self._done = connection, arena, 0

    def chunks(self, begin: int, size: int) -> Iterator[memoryview]:
        for start in range(begin, begin + size, CHUNK):
            end = min(start + CHUNK, begin + size)
            self.await_bytes(end)
            yield self._arena[start:end]

    def await_bytes(self, end: int) -> None:
        """Raises EOFError if the training process is gone."""
        while self._done < end:
            self._done = self._connection.recv()


def _work(job: SaveJob, connection: Connection, arena_fd: int) -> JobEnd:
    *starts, end = offsets(job.image.sizes)
    with mmap.mmap(arena_fd, max(end, 1)) as arena, memoryview(arena) as view:
        staging = _Staging(connection, view)
        report = JobEnd()
        try:
            with checkpoint(job.target, **job.options) as directory:
                storages = (
                    staging.chunks(*place) for place in zip(starts, job.image.sizes, strict=True)
                )
                method = writing_method(str(directory), length_of(job.image))
                save_image(job.image, storages, str(directory / job.file), method=method)
        except EOFError:
            raise
        except OSError as error:
            report = JobEnd(error.errno or 0, error.strerror or str(error), error.filename)
        except Exception as error:  # told to the training process
            report = JobEnd(problem=str(error) or type(error).__name__)
        staging.await_bytes(end)  # the next message is a job
        return report


def main(connection_fd: int, arena_fd: int) -> None:
    with Connection(connection_fd) as connection:
        receive: Callable[[], SaveJob | None] = connection.recv
        try:
            while (job := receive()) is not None:
                connection.send(_work(job, connection, arena_fd))
        except (EOFError, BrokenPipeError, ConnectionResetError):  # the training process is gone
            os._exit(1)  # without waiting for what still refers to the arena
