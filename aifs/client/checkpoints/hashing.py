"""The bytes of a checkpoint's files: listed, made durable, hashed.

Files are hashed by plain reads, right after they were written, from memory; with a mapping an error
of the device would end the process (SIGBUS).
"""

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import blake3

from aifs.client.checkpoints.manifest import CheckpointError, Digest, Files
from aifs.core.files import close_file, open_file, read_into, sync_dir, sync_file
from aifs.core.manifest import RESERVED

WORKERS = 4
"""Files at a time, a thread each: one waits for the device while another is hashed."""

BUFFER = 1 << 20
BUFFER_ALONE = 4 << 20  # of a file that is hashed by all processors: enough to spread it over them

_threads_alone = blake3.blake3.AUTO


def _after_fork() -> None:
    """A child does not have blake3's threads, and would wait for them."""
    global _threads_alone
    _threads_alone = 1


os.register_at_fork(after_in_child=_after_fork)


def is_reserved(path: str) -> bool:
    """Whether a path below a checkpoint names a file of the protocol, not of the checkpoint."""
    return path.startswith(RESERVED)


def list_files(directory: str) -> dict[str, os.stat_result]:
    """The regular files below, without the protocol's; symlinks are not followed. Raises
    OSError."""
    return {
        path: found
        for path, found in walk(directory)
        if stat.S_ISREG(found.st_mode) and not is_reserved(path)
    }


def walk(directory: str, below: str = "") -> Iterator[tuple[str, os.stat_result]]:
    """Paths below ``directory`` with their status, directories first, without vanishing ones.
    Raises OSError."""
    for entry in list(os.scandir(os.path.join(directory, below))):
        path = os.path.join(below, entry.name)
        with suppress(FileNotFoundError):
            found = entry.stat(follow_symlinks=False)
            yield path, found
            if stat.S_ISDIR(found.st_mode):
                yield from walk(directory, path)


def sync_files(directory: str, paths: Iterable[str], hash: bool = True) -> Files:
    """Make the files durable, and describe them. Raises CheckpointError, OSError."""
    return _for_all(directory, paths, lambda path, alone: _digest(path, alone, hash, sync_file))


def digest_files(
    directory: str, paths: Iterable[str], on_bytes: Callable[[int], None] = lambda count: None
) -> Files:
    """Read the files; ``on_bytes`` is called with the bytes read since. Raises CheckpointError,
    OSError."""
    return _for_all(directory, paths, lambda path, alone: _digest(path, alone, on_bytes=on_bytes))


def sync_directories(directory: str) -> None:
    """Make durable the names in the directory, and in all below it. Raises OSError."""
    for path, found in walk(directory):
        if stat.S_ISDIR(found.st_mode):
            sync_dir(os.path.join(directory, path))
    sync_dir(directory)


def _for_all(
    directory: str, paths: Iterable[str], function: Callable[[str, bool], Digest]
) -> Files:
    """``function`` of each file, and whether it is the only one."""
    names = list(paths)
    with ThreadPoolExecutor(WORKERS) as pool:
        futures = {
            name: pool.submit(function, os.path.join(directory, name), len(names) == 1)
            for name in names
        }
        try:
            return {name: future.result() for name, future in futures.items()}
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _digest(
    path: str,
    alone: bool,
    hash: bool = True,
    sync: Callable[[int], Any] | None = None,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> Digest:
    fd = open_file(path, write=False)
    try:
        size = os.fstat(fd).st_size
        digest = _hash(fd, size, alone, on_bytes) if hash else ""
        if sync is not None:
            # After reading: only then has another host, if it wrote the bytes, let go of them.
            sync(fd)
        if os.fstat(fd).st_size != size:
            raise CheckpointError(f"{path}: is still being written")
    finally:
        close_file(fd)
    return Digest(size, digest)


def _hash(fd: int, size: int, alone: bool, on_bytes: Callable[[int], None]) -> str:
    hasher = blake3.blake3(max_threads=_threads_alone if alone else 1)
    buffer = memoryview(bytearray(min(size, BUFFER_ALONE if alone else BUFFER) or 1))
    offset = 0
    while count := read_into(fd, buffer, offset):
        hasher.update(buffer[:count])
        offset += count
        on_bytes(count)
    return hasher.hexdigest()
