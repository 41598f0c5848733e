"""The load: one work on one directory, timed, in a process of its own. Prints seconds as JSON.

    python load.py WORK DIRECTORY key=value...

The same loops run on every filesystem that is compared; they are as close to the bare system calls as Python gets.
Works on names stay on the first processor (systems.py keeps the daemons off it): whether the scheduler puts client
and daemon on one processor or on two changes their rates by a factor of two, at random.
"""

import json
import os
import sys
import time
from collections.abc import Callable

MIB = 1 << 20


def create(names: list[str]) -> None:
    for name in names:
        os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))


def stat(names: list[str]) -> None:
    for name in names:
        os.stat(name)


def rename(names: list[str]) -> None:
    for name in names:
        os.rename(name, f"r{name}")


def unlink(names: list[str]) -> None:
    for name in names:
        os.unlink(f"r{name}")


def mkdir(names: list[str]) -> None:
    for name in names:
        os.mkdir(f"d{name}")


def listing(names: list[str]) -> None:
    with os.scandir(".") as entries:
        found = sum(entry.stat().st_nlink for entry in entries)
    assert found == len(names), f"{found} of {len(names)} entries found"


def write_file(name: str, mib: int) -> None:
    block = memoryview(bytearray(os.urandom(MIB)))
    fd = os.open(name, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o644)
    for _ in range(mib):
        assert os.write(fd, block) == MIB
    os.close(fd)


def read_file(name: str, mib: int) -> None:
    block = memoryview(bytearray(MIB))
    fd = os.open(name, os.O_RDONLY)
    for position in range(mib):
        assert os.preadv(fd, [block], position * MIB) == MIB
    os.close(fd)


def read_single(name: str, mib: int) -> None:
    """The kernel does not read ahead: it sends the next request when the one before has been answered."""
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
    """Seconds from the common start of ``jobs`` processes, one file each, to the end of the last."""
    start, go = os.pipe()
    children = []
    for job in range(jobs):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.close(go)
                os.read(start, 1)  # ends when the parent closes its end
                work(f"stream{job}", mib)
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    os.close(start)
    begin = time.perf_counter()
    os.close(go)
    for child in children:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "a job failed"
    return time.perf_counter() - begin


NAMES = {
    "create": create, "stat": stat, "rename": rename, "unlink": unlink, "mkdir": mkdir, "listing": listing,
}  # fmt: skip
STREAMS = {"write": write_file, "read": read_file, "read_single": read_single}


def main() -> None:
    work, directory, *settings = sys.argv[1:]
    values = {key: int(value) for key, value in (setting.split("=") for setting in settings)}
    os.makedirs(directory, exist_ok=True)
    os.chdir(directory)
    if work in NAMES:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        names = [f"f{number}" for number in range(values["count"])]
        if values.get("warm"):
            NAMES[work](names)
        begin = time.perf_counter()
        NAMES[work](names)
        seconds = time.perf_counter() - begin
    else:
        if work.startswith("read"):
            drop_pages(values["jobs"])
        seconds = in_processes(STREAMS[work], values["jobs"], values["mib"])
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
