"""Which way of writing reaches a device soonest: measured once, and remembered.

Remembered in the process, and for the user in ``$XDG_CACHE_HOME/aifs/writing.json``: device -> way.
A device is known by its number, kind and source of its filesystem, as in /proc/self/mountinfo.
"""

import json
import mmap
import os
import time
from contextlib import suppress

from aifs.client.torch.sinks import BUFFERED, DIRECT, open_sink
from aifs.core import files, filesystems, mountinfo, trees

SIZE = 64 << 20
"""Bytes that are written to measure a way; files that are smaller are not worth it."""

_known: dict[str, str] = {}


def writing_method(directory: str, size: int) -> str:
    """For a file of ``size`` bytes in ``directory`` that shall be durable as soon as can be. Raises
    OSError."""
    if size < SIZE or filesystems.is_in_memory(directory):
        return BUFFERED
    device = device_of(directory)
    if device not in _known:
        _known.update(_read())
    if device not in _known:
        _known[device] = faster_method(directory)
        with suppress(
            OSError
        ):  # a cache directory that cannot be written: measured again by the next process
            _write(_read() | _known)
    return _known[device]


def device_of(directory: str) -> str:
    """Such as ``252:1 ext4 /dev/vda1``."""
    number = os.stat(directory).st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    for mount in mountinfo.all_mounts():
        if mount.device == number:
            return f"{device} {mount.fstype} {mount.source}"
    return device  # a subvolume: its number is in no table


def faster_method(directory: str) -> str:
    """The faster one, to stable storage."""
    taken = {}
    data = memoryview(mmap.mmap(-1, SIZE))
    for method in (BUFFERED, DIRECT):
        path = trees.beside(os.path.join(directory, "probe"))
        fd = trees.create_file(path)
        try:
            begin = time.perf_counter()
            sink = open_sink(fd, method)
            sink.write(data)
            sink.finish()
            files.sync_file(fd)
            taken[method] = time.perf_counter() - begin
        except OSError:
            if method == BUFFERED:
                raise
        finally:
            files.close_file(fd)
            files.unlink(path)
    return min(taken, key=lambda method: taken[method])


def _cache() -> str:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(base, "aifs", "writing.json")


def _read() -> dict[str, str]:
    try:
        found = json.loads(files.read_file(_cache()) or b"{}")
        return {device: method for device, method in found.items() if method in (BUFFERED, DIRECT)}
    except (ValueError, AttributeError, OSError):
        return {}


def _write(known: dict[str, str]) -> None:
    trees.make_dir(os.path.dirname(_cache()))
    trees.replace_file(_cache(), json.dumps(known, indent=1).encode(), durable=False)
