"""``save(obj, path)``: the file of ``torch.save``, written as fast as the device takes it."""

import os
import pickle
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from aifs.client.checkpoints import locks
from aifs.client.checkpoints.publishing import PathLike, plain
from aifs.client.torch.archive import Chunks, Image, length_of, write_archive
from aifs.client.torch.sinks import BUFFERED, Sink, open_sink, writing_method
from aifs.core import files

if TYPE_CHECKING:
    from collections.abc import Callable


def save(
    obj: Any,
    path: PathLike,
    *,
    sync: bool = True,
    method: str | None = None,
    pickle_module: Any = pickle,
    pickle_protocol: int = 2,
) -> None:
    """Like ``torch.save(obj, path)``, and the same file, which appears whole or not at all.

    With ``sync`` it is durable when this returns, and written in the way that a measurement of this
    device found to be the fastest; else it goes to the page cache. ``method``: 'buffered' or
    'direct' to decide oneself. Raises OSError, and errors of pickling."""
    from aifs.client.torch.records import chunks_of, describe

    target = plain(path)
    image, storages = describe(obj, archive_name(target), pickle_module, pickle_protocol)
    save_image(
        image, (chunks_of(storage) for storage in storages), target, sync=sync, method=method
    )


def save_image(
    image: Image,
    storages: Iterable[Chunks],
    target: str,
    *,
    sync: bool = True,
    method: str | None = None,
) -> None:
    """The archive becomes the file ``target``."""
    if method is None:
        method = writing_method(os.path.dirname(target), length_of(image)) if sync else BUFFERED
    write_file(target, lambda sink: write_archive(image, storages, sink), sync=sync, method=method)


def write_file(target: str, fill: "Callable[[Sink], object]", *, sync: bool, method: str) -> None:
    """Write ``target`` by ``fill``, whole; ``sync``: durably. Raises OSError."""
    temporary, fd = locks.create_beside(target)
    try:
        try:
            sink = open_sink(fd, method, write_back=sync)
            try:
                fill(sink)
                sink.finish()
            finally:
                sink.abandon()
            if sync:
                files.sync_file(fd)
        finally:
            files.close_file(fd)
        files.rename(temporary, target)
    except BaseException:
        with suppress(FileNotFoundError):
            files.unlink(temporary)
        raise
    if sync:
        files.sync_dir(os.path.dirname(target))


def archive_name(target: str) -> str:
    """The folder in the archive: the file's name without what follows its last dot."""
    name = os.path.basename(target)
    stem = name[: name.rindex(".")] if "." in name else name
    return stem if stem and stem.isascii() else "archive"
