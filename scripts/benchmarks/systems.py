"""What is compared: a plain directory, the do-nothing filesystem, and AIFS, each below one
directory of one medium.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import caches
import load

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent


class System:
    """A filesystem under test: ``path`` is where the load works, inside ``with system:``."""

    def __init__(self, name: str, base: Path) -> None:
        self.name = name
        self.base = base / name
        self.path = self.base / "work"

    def __enter__(self) -> "System":  # noqa: PYI034 (Self needs Python 3.11)
        self.path.mkdir(parents=True)
        return self

    def __exit__(self, *exception: object) -> None:
        shutil.rmtree(self.base)

    def run(self, work: str, directory: str, **settings: int) -> float:
        """Seconds that ``work`` of load.py takes below ``directory``."""
        words = [f"{key}={value}" for key, value in settings.items()]
        done = subprocess.run(
            [sys.executable, HERE / "load.py", work, self.path / directory, *words],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        return json.loads(done.stdout)

    def remove(self, directory: str) -> None:
        """Remove what a work has left below ``directory``, and let the medium come to rest."""
        shutil.rmtree(self.path / directory, ignore_errors=True)

    def use_capacity_tier(self, directory: str) -> None:
        """New files below ``directory`` are to go straight to the data servers, where there are
        any.
        """

    def begin_background(self) -> None:
        """Return when the background work that the last writes cause has begun, where there is
        any.
        """

    def rest(self) -> None:
        """Return when no background work goes on."""

    def forget(self) -> None:
        """What was read from data servers is in nobody's memory any more; what is in the burst tier
        stays there, as what was just written does."""


class MountedSystem(System):
    """A system whose ``command``, a FUSE daemon in the foreground, serves ``path``."""

    command: Sequence[str | Path]

    def __enter__(self) -> "System":
        super().__enter__()
        self.mount_again()
        return self

    def mount_again(self) -> None:
        """Start the daemon; returns when it serves."""
        device = self.path.stat().st_dev
        with (self.base / "log").open("w") as log:
            self.daemon = subprocess.Popen(self.command, cwd=REPOSITORY, stderr=log)
        while self.path.stat().st_dev == device:
            if self.daemon.poll() is not None:
                raise RuntimeError(
                    f"{self.name} does not mount:\n{(self.base / 'log').read_text()}"
                )
            time.sleep(0.005)

    def __exit__(self, *exception: object) -> None:
        if self.daemon.poll() is not None:  # a failed work is this one's doing
            sys.stderr.write(f"{self.name} died:\n{(self.base / 'log').read_text()}")
        subprocess.run(["umount", "-l", self.path], check=False)
        self.daemon.wait()
        super().__exit__(*exception)

    def run(self, work: str, directory: str, **settings: int) -> float:
        processors = os.sched_getaffinity(0)
        alone = work in load.NAMES and len(processors) > 1
        os.sched_setaffinity(
            self.daemon.pid, processors - {min(processors)} if alone else processors
        )
        return super().run(work, directory, **settings)


class Nothing(MountedSystem):
    """The do-nothing filesystem, served by AIFS's request loop or (``bare``) by pyfuse3's own."""

    def __init__(self, name: str, base: Path, bare: bool) -> None:
        super().__init__(name, base)
        self.command = [
            sys.executable,
            HERE / "nothing.py",
            self.path,
            *(["--bare"] if bare else []),
        ]


class Aifs(MountedSystem):
    """AIFS with its default configuration, but for ``options`` of the mount; ``program`` is what
    stands for the command ``aifs``.
    """

    def __init__(
        self,
        name: str,
        base: Path,
        program: Sequence[str | Path] = ("-m", "aifs.cli.main"),
        *options: str,
    ) -> None:
        super().__init__(name, base)
        self._aifs = [sys.executable, *program]
        chosen = [word for option in options for word in ("-o", option)]
        mount = ("mount", "--foreground", *chosen)
        self.command = [*self._aifs, *mount, self.base / "store", self.path]

    def __enter__(self) -> "System":
        format_command = [*self._aifs, "format", self.base / "store"]
        subprocess.run(format_command, check=True, stdout=subprocess.DEVNULL, cwd=REPOSITORY)
        return super().__enter__()

    def use_capacity_tier(self, directory: str) -> None:
        (self.path / directory).mkdir(exist_ok=True)
        os.setxattr(self.path / directory, "user.aifs.tier", b"capacity")

    def remove(self, directory: str) -> None:
        super().remove(directory)
        while self.status()["collector_backlog"]:
            time.sleep(0.05)

    def begin_background(self) -> None:
        while self._is_draining() and not self.status()["drain"]["active_files"]:
            time.sleep(0.01)

    def rest(self) -> None:
        os.setxattr(self.path, "user.aifs.drain", b"")  # what has changed again may wait for long
        while self._is_draining() or self.status()["collector_backlog"]:
            time.sleep(0.05)

    def _is_draining(self) -> bool:
        """Whether files wait to be drained, or are."""
        return self.status()["drain"]["files"] > 0

    def evict(self) -> None:
        """Nothing that has been drained is in the burst tier any more."""
        command = [*self._aifs, "evict", self.path]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=REPOSITORY)

    def status(self) -> dict:
        """What the mount says of itself."""
        return json.loads(os.getxattr(self.path, "user.aifs.status"))

    def cpu_s(self) -> float:
        """Processor time that the daemon has used."""
        fields = Path(f"/proc/{self.daemon.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident_bytes(self) -> int:
        """Memory of the daemon that is in RAM now, mapped files included."""
        fields = Path(f"/proc/{self.daemon.pid}/status").read_text().split("\n")
        return next(int(field.split()[1]) << 10 for field in fields if field.startswith("VmRSS:"))


class DelayedAifs(Aifs):
    """AIFS with 1 ms added to every request to a data server."""

    def __init__(self, name: str, base: Path, *options: str) -> None:
        super().__init__(name, base, (HERE / "delayed.py",), *options)

    def forget(self) -> None:
        drop_caches()
        subprocess.run(["umount", self.path], check=True)
        self.daemon.wait()
        self.mount_again()


@contextmanager
def medium(directory: str | None) -> Iterator[Path]:
    """An empty directory on the medium: below ``directory``, or on a tmpfs of its own.

    That tmpfs has huge pages: allocating memory by pages of 4 KiB costs more than copying into it,
    and would be most of what the streams measure. They are not larger than what is written
    (within_size): with ``always`` a file of 100 KB takes 2 MiB, and whoever writes it clears them
    all, in the kernel and uninterrupted; where a virtual machine's host first has to find that
    memory, for 5 ms.
    """
    with tempfile.TemporaryDirectory(prefix="aifs-bench-", dir=directory) as path:
        if directory is None:
            subprocess.run(
                ["mount", "-t", "tmpfs", "-o", "huge=within_size,size=75%", "aifs-bench", path],
                check=True,
            )
        try:
            yield Path(path)
        finally:
            if directory is None:
                subprocess.run(["umount", path], check=True)


def touch_memory(directory: Path, mib: int) -> None:
    """Use ``mib`` MiB once: a virtual machine may have to get memory from its host, which costs
    more than a write.
    """
    file = directory / "touched"
    with file.open("wb", buffering=0) as target:
        for _ in range(mib):
            target.write(bytes(1 << 20))
    file.unlink()


def drop_names() -> None:
    """Have the kernel forget names and attributes, so that it asks the filesystems again."""
    caches.drop(caches.NAMES)


def drop_caches() -> None:
    """Have the kernel forget names, attributes and the pages of files."""
    caches.drop()
