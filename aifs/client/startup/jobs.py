"""Starts of jobs for the program that begins them: directories with records of files they touched.

    DIR/JOB/RUN.start    what the start RUN has touched (core/start_record.py)

The mount records reads on demand; this module prefetches the records' files. No job fails because
of it: ``JobStart`` reports in one line, and goes on.

Prefetching opens files, and reads their hot parts: with the caller's rights, into the kernel's
caches, from any tier, writing nothing. Users may share DIR: JOB is no symlink, and only regular
files of this mount are opened.
"""

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import NamedTuple

from aifs.client.checkpoints import attributes
from aifs.core import beneath, files, trees
from aifs.core.errors import Invalid, UserError
from aifs.core.limits import within
from aifs.core.mountinfo import FSTYPE, all_mounts, mount_of
from aifs.core.start_record import (
    BLOCK,
    FOLLOWED,
    KEPT,
    STORED_MAX,
    SUFFIX,
    HotFile,
    StartRecord,
    decode,
    union,
)

DIRECTORY = "start"
"""Below the root of a mount: where jobs have their directories unless something else is said."""

JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:+-]{0,127}")
"""Names of jobs, keys and runs."""

_ASKED_S = 2.0
"""How long a mount may take to answer before the job goes on without it."""

_READ = 2 * KEPT
"""Records that are read at most."""

_READERS = 4
"""Files that are opened at a time."""

_PASSED_ON, _PASSED_ON_S = 256, 30.0
"""Large files that stay open for hosts that start later, and for how long after all are read."""

_ENDED_S = 5.0
"""How long a record that is being written is waited for."""


class StartUnknown(UserError):
    """There is no such job, or no place for its records. The message says which, and a remedy."""


def default_directory() -> str:
    """``start`` of the current directory's mount, or of the only one. Raises StartUnknown, also if
    everybody may make one there."""
    here = mount_of(os.getcwd())
    found = [mount.mountpoint for mount in all_mounts() if mount.fstype == FSTYPE]
    if here is not None and here.fstype == FSTYPE:
        found = [here.mountpoint]
    if len(set(found)) != 1:
        which = "several AIFS are" if found else "no AIFS is"
        raise StartUnknown(f"{which} mounted here: say --dir, where records of starts are kept")
    top = os.path.join(found[0], DIRECTORY)
    try:
        is_foreign = within(_ASKED_S, _is_foreign, top)
    except (OSError, TimeoutError) as error:
        raise StartUnknown(f"{top}: {error or 'the mount does not answer'}") from None
    if is_foreign:
        raise StartUnknown(f"{top}: anybody may have made it: say --dir")
    return top


def _is_foreign(path: str) -> bool:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return False
    return beneath.is_foreign(found, os.stat(os.path.dirname(path)))


def directory_of(top: str, job: str, key: str = "") -> str:
    """A job's directory, or that for a start with ``key``. Raises StartUnknown for an invalid
    name."""
    name = f"{job}+{key}" if key else job
    if not JOB.fullmatch(name):
        raise StartUnknown(f"{name!r} is no name of a job: letters, digits and ._:+-, up to 128")
    return os.path.join(top, name)


def run_name(environment: Mapping[str, str]) -> str:
    """The name of a start without a given one: the scheduler's, or the time."""
    for variable in ("AIFS_START_RUN", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"):
        if JOB.fullmatch(environment.get(variable, "")):
            return environment[variable]
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())


def read_records(directory: str) -> list[StartRecord]:
    """The newest records of a job, newest first, without torn and foreign ones. Raises
    StartUnknown."""
    found = []
    with opened(directory) as top:
        above, written = os.stat(top), {}
        for name in os.listdir(top):
            if name.endswith(SUFFIX) and name[0] != ".":
                with suppress(FileNotFoundError):  # the mount removes old ones
                    status = os.lstat(os.path.join(top, name))
                    if not beneath.is_foreign(status, above):
                        written[name] = status.st_mtime
        for name in sorted(written, key=lambda name: -written[name])[:_READ]:
            with suppress(Invalid, OSError):
                if data := files.read_foreign(os.path.join(top, name), STORED_MAX):
                    found.append(decode(data))
    return sorted(found, key=lambda record: record.began_s, reverse=True)


@contextmanager
def opened(directory: str, run: str = "") -> Iterator[str]:
    """Another path of a job's directory, or start, valid in the context. Raises StartUnknown if
    there is none; a symlink is none."""
    path = os.path.join(directory, run) if run else directory
    try:
        fd = job = beneath.open_directory(directory)
        if run:
            try:
                fd = beneath.open_directory(run, job)
            finally:
                os.close(job)
    except (FileNotFoundError, NotADirectoryError):
        raise StartUnknown(f"{path}: no start of this job was recorded") from None
    with beneath.path_of(fd, path) as at:
        yield at


def plan(records: Sequence[StartRecord]) -> list[HotFile]:
    """The files that the next start prefetches, in order; ``records``: of the job, newest first."""
    return union(records[:FOLLOWED])


def list_jobs(top: str) -> dict[str, list[StartRecord]]:
    """By name, the records of all jobs below ``top``, newest first. Raises OSError."""
    with os.scandir(top) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    return {name: read_records(os.path.join(top, name)) for name in names if JOB.fullmatch(name)}


def forget(directory: str) -> None:
    """Remove a job's directory. Raises StartUnknown if there is none, OSError."""
    with opened(directory):
        trees.remove_tree(directory)


class Fetched(NamedTuple):
    """The prefetched bytes and files, and how many files were left out."""

    bytes: int
    files: int
    left_out: int


def prefetch(directory: str, passed_on_s: float = 0.0) -> Fetched:
    """Read the files of the job's next start, in order, into memory, except changed or unreachable
    ones. ``passed_on_s``: large ones stay open so long, for hosts that start later. Raises
    StartUnknown."""
    from concurrent.futures import ThreadPoolExecutor  # the job need not wait for this

    hot = plan(read_records(directory))
    mount = mount_of(directory)
    kept: list[int] = []
    root = beneath.open_directory("/" if mount is None else mount.mountpoint)
    try:
        with ThreadPoolExecutor(_READERS) as pool:
            done = [file for file, ok in zip(hot, pool.map(partial(_read, root, kept), hot)) if ok]
    finally:
        os.close(root)
    time.sleep(passed_on_s if kept else 0.0)
    for fd in kept:
        files.close_file(fd)
    return Fetched(sum(file.bytes for file in done), len(done), len(hot) - len(done))


def _read(root: int, kept: list[int], hot: HotFile) -> bool:
    """Whether the file was unchanged and read. Multi-block ones stay open in ``kept``, to be passed
    on."""
    with suppress(OSError):
        fd = beneath.open_file(hot.path.lstrip("/"), root)
        try:
            now = os.fstat(fd)
            if (now.st_ino, now.st_size, now.st_mtime_ns) == hot[1:4]:
                for first, count in hot.runs:
                    for block in range(first, first + count):
                        os.preadv(fd, [_scratch.buffer], block * BLOCK)
                return True
        finally:
            if hot.size > BLOCK and len(kept) < _PASSED_ON:
                kept.append(fd)
            else:
                files.close_file(fd)
    return False


class _Scratch(threading.local):
    """A buffer of each thread for bytes that only the kernel's cache needs."""

    def __init__(self) -> None:
        self.buffer = bytearray(BLOCK)


_scratch = _Scratch()


class JobStart:
    """A begun start, prefetched by another process. Does not raise. Made while single-threaded."""

    def __init__(self, directory: str, run: str, warn: Callable[[str], None]) -> None:
        """``warn`` is called with one line that says why a part is left out."""
        self._directory = directory
        self._warn = warn
        self._is_recorded = self._try(self._begin, run)
        self._reader = self._prefetch() if self._is_recorded else 0

    def end(self) -> None:
        """The job has started, or has ended: its record is there on return, as a rule."""
        if self._reader:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(self._reader, signal.SIGKILL)
                os.waitpid(self._reader, 0)
        if self._is_recorded and self._try(self._order, "stop"):
            until_s = time.monotonic() + _ENDED_S
            while self._state() == "ending" and time.monotonic() < until_s:
                time.sleep(0.01)

    def _state(self) -> str:
        return attributes.get_json(self._directory, attributes.START).get("state", "")

    def _begin(self, run: str) -> None:
        trees.make_dir(self._directory)
        self._order(f"record={run}")

    def _order(self, text: str) -> None:
        """Raises OSError, also for a symlink in its place."""
        fd = beneath.open_directory(self._directory)
        with beneath.path_of(fd, self._directory) as directory:
            if not attributes.is_aifs(directory):
                raise OSError("it is not on an AIFS, where alone starts are recorded")
            attributes.put(directory, attributes.START, text)

    def _prefetch(self) -> int:
        child = os.fork()
        if child == 0:
            try:
                os.closerange(0, 3)  # readers of our output do not wait for it
                prefetch(self._directory, _PASSED_ON_S)
            finally:
                os._exit(0)
        return child

    def _try(self, function: Callable[..., None], *args: str) -> bool:
        try:
            within(_ASKED_S, function, *args)
            return True
        except TimeoutError:
            self._warn(f"{self._directory}: the start is not recorded: the mount does not answer")
        except OSError as error:
            why = error.strerror or error
            self._warn(f"{self._directory}: the start is not recorded: {why}")
        return False
