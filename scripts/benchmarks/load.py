"""The load: one work on one directory, timed, in a process of its own. Prints seconds as JSON.

    python load.py WORK DIRECTORY key=value...

The same loops run on every filesystem that is compared; they are as close to the bare system calls
as Python gets. Works on names stay on the first processor (systems.py keeps the daemons off it):
whether the scheduler puts client and daemon on one processor or on two changes their rates by a
factor of two, at random.
"""

import json
import mmap
import os
import random
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

MIB = 1 << 20


def create(names: list[str]) -> None:
    for name in names:
        os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))


def stat(names: list[str]) -> None:
    for name in names:
        os.stat(name)


def open_(names: list[str]) -> None:
    for name in names:
        os.close(os.open(name, os.O_RDONLY))


def rename(names: list[str]) -> None:
    for name in names:
        os.rename(name, f"r{name}")


def unlink(names: list[str]) -> None:
    for name in names:
        os.unlink(f"r{name}")


def mkdir(names: list[str]) -> None:
    for name in names:
        os.mkdir(f"d{name}")


def rmdir(names: list[str]) -> None:
    for name in names:
        os.rmdir(f"d{name}")


def listing(names: list[str]) -> None:
    with os.scandir(".") as entries:
        found = sum(entry.stat().st_nlink for entry in entries)
    assert found == len(names), f"{found} of {len(names)} entries found"


def write_file(name: str, mib: int, sync: bool = False) -> None:
    block = memoryview(bytearray(os.urandom(MIB)))
    fd = os.open(name, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o644)
    for _ in range(mib):
        assert os.write(fd, block) == MIB
    if sync:
        os.fsync(fd)
    os.close(fd)


def write_synced(name: str, mib: int) -> None:
    write_file(name, mib, sync=True)


def read_file(name: str, mib: int) -> None:
    block = memoryview(bytearray(MIB))
    fd = os.open(name, os.O_RDONLY)
    for position in range(mib):
        assert os.preadv(fd, [block], position * MIB) == MIB
    os.close(fd)


def read_mapped(name: str, mib: int) -> None:
    """By way of a mapping, as safetensors and torch.load(mmap=True) do."""
    block = bytearray(MIB)
    fd = os.open(name, os.O_RDONLY)
    with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as mapping, memoryview(mapping) as view:
        for position in range(mib):
            block[:] = view[position * MIB : (position + 1) * MIB]
    os.close(fd)


def write_randomly(name: str, mib: int) -> None:
    """256 requests of 4 KiB for each MiB, in place, at random offsets."""
    block, fd = os.urandom(4096), os.open(name, os.O_WRONLY)
    for position in _random_pages(mib):
        os.pwrite(fd, block, position)
    os.close(fd)


def read_randomly(name: str, mib: int) -> None:
    block, fd = memoryview(bytearray(4096)), os.open(name, os.O_RDONLY)
    for position in _random_pages(mib):
        os.preadv(fd, [block], position)
    os.close(fd)


def _random_pages(mib: int) -> list[int]:
    rng = random.Random(mib)
    return [rng.randrange(mib * 256) * 4096 for _ in range(mib * 256)]


def write_shard(name: str, mib: int) -> None:
    """One rank's part of a checkpoint."""
    os.makedirs("checkpoint.tmp", exist_ok=True)
    write_file(f"checkpoint.tmp/{name}", mib, sync=True)


def read_single(name: str, mib: int) -> None:
    """The kernel does not read ahead: it sends the next request when the one before has been
    answered.
    """
    fd = os.open(name, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    block = memoryview(bytearray(MIB))
    for position in range(mib):
        assert os.preadv(fd, [block], position * MIB) == MIB
    os.close(fd)


def drop_pages(jobs: int) -> None:
    """Drop the pages that the measured filesystem's files have in the kernel, and no others."""
    for job in range(jobs):
        fd = os.open(f"stream{job}", os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def in_processes(work: Callable[[str, int], None], jobs: int, mib: int) -> float:
    """Seconds from the common start of ``jobs`` processes, one file each, to the end of the
    last.
    """
    return together([partial(work, f"stream{job}", mib) for job in range(jobs)])


def together(works: Sequence[Callable[[], None]]) -> float:
    """Seconds from the common start of processes that do these to the end of the last."""
    start, go = os.pipe()
    children = []
    for work in works:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.close(go)
                os.read(start, 1)  # ends when the parent closes its end
                work()
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    os.close(start)
    begin = time.perf_counter()
    os.close(go)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(codes):
        raise RuntimeError("a job failed")
    return time.perf_counter() - begin


SMALL = 100_000
"""Bytes of a small file: a sample of a dataset."""

PAUSE_S = 0.0005


def small_write(names: list[str], size: int = SMALL) -> None:
    block = os.urandom(size)
    for name in names:
        fd = os.open(name, os.O_CREAT | os.O_WRONLY, 0o644)
        os.write(fd, block)
        os.close(fd)


def small_read(names: list[str], size: int = SMALL) -> None:
    block = memoryview(bytearray(size))
    for name in names:
        fd = os.open(name, os.O_RDONLY)
        assert os.preadv(fd, [block], 0) == size
        os.close(fd)


def probe(names: list[str]) -> list[float]:
    """Seconds that stat takes of each, with pauses between: somebody who looks about."""
    found = []
    for name in names:
        begin = time.perf_counter()
        os.stat(name)
        found.append(time.perf_counter() - begin)
        time.sleep(PAUSE_S)
    return found


def checkpoint(jobs: int, mib: int) -> float:
    """Seconds from the common start of the ranks to the end of the rename that publishes their
    shards.
    """
    shutil.rmtree("checkpoint", ignore_errors=True)
    begin = time.perf_counter()
    in_processes(write_shard, jobs, mib)
    os.rename("checkpoint.tmp", "checkpoint")
    return time.perf_counter() - begin


NAMES = {
    "create": create,
    "stat": stat,
    "open": open_,
    "rename": rename,
    "unlink": unlink,
    "mkdir": mkdir,
    "rmdir": rmdir,
    "listing": listing,
    "small-write": small_write,
    "small-read": small_read,
}
STREAMS = {
    "write": write_file,
    "write-sync": write_synced,
    "read": read_file,
    "read-mmap": read_mapped,
    "read-single": read_single,
    "random-write": write_randomly,
    "random-read": read_randomly,
}


def perform(work: str, directory: str | Path, values: Mapping[str, int]) -> float | list[float]:
    """Seconds that ``work`` takes below ``directory``; for ``probe`` of each call. The process
    stays in that directory."""
    os.makedirs(directory, exist_ok=True)
    os.chdir(directory)
    if work in NAMES and values.get("jobs", 1) > 1:
        names = [f"f{number}" for number in range(values["count"])]
        return together([partial(NAMES[work], names)] * values["jobs"])
    if work in NAMES:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        first = values.get("first", 0)
        names = [f"f{number}" for number in range(first, first + values["count"])]
        if values.get("warm"):
            NAMES[work](names)
        sized = {"size": values["bytes"]} if "bytes" in values else {}
        begin = time.perf_counter()
        NAMES[work](names, **sized)
        return time.perf_counter() - begin
    if work == "probe":
        first = values["first"]
        return probe([f"f{n}" for n in range(first, first + values["count"])])
    if work == "checkpoint":
        return checkpoint(values["jobs"], values["mib"])
    if "read" in work and values.get("cold"):
        drop_pages(values["jobs"])
    return in_processes(STREAMS[work], values["jobs"], values["mib"])


def forked(work: str, directory: str | Path, values: Mapping[str, int]) -> float:
    """As ``perform``, in a process that this one forks: begins sooner than a program of its own."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.write(writer, json.dumps(perform(work, directory, values)).encode())
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writer)
    with open(reader, "rb") as answer:
        seconds = answer.read()
    if os.waitpid(child, 0)[1]:
        raise RuntimeError(f"{work} failed")
    return json.loads(seconds)


def main() -> None:
    work, directory, *settings = sys.argv[1:]
    values = {key: int(value) for key, value in (setting.split("=") for setting in settings)}
    print(json.dumps(perform(work, directory, values)))


if __name__ == "__main__":
    main()
