"""scripts/demo --start: a job starts twice, from data servers that take 1 ms more for each request.
The second time what the first one has read is read ahead."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy
from benchmarks import caches
from rich.console import Console
from rich.table import Table

from aifs.client import startup

SCRIPTS = Path(__file__).resolve().parents[1]
AIFS = (sys.executable, str(SCRIPTS / "benchmarks" / "delayed.py"))
EXAMPLE = SCRIPTS / "examples" / "start.py"
PACKAGES = ("numpy", "numpy.libs")
COLUMNS = 1024


def demonstrate(work: Path, size: int, console: Console) -> None:
    """With a checkpoint of ``size`` bytes. Raises CalledProcessError, OSError. Leaves nothing but
    what is in ``work``."""
    demo = StartDemo(work, console)
    try:
        demo.run(size)
    finally:
        subprocess.run(["umount", "-l", demo.path], check=False, capture_output=True)


class StartDemo:
    def __init__(self, work: Path, console: Console) -> None:
        self.path = work / "mnt"
        self._source = work / "store"
        self._console = console
        self._began_s = time.monotonic()
        self.path.mkdir()

    def run(self, size: int) -> None:
        self._say("a store, whose servers are 1 ms away")
        self._aifs("format", self._source)
        self._aifs("mount", self._source, self.path)
        self._say("an environment, made once for all hosts")
        environment = self._environment()
        checkpoint = self.path / "checkpoint.npy"
        numpy.save(checkpoint, numpy.ones((size // 4 // COLUMNS, COLUMNS), dtype="float32"))
        for run in ("first", "second"):
            self._forget()
            self._say(f"the {run} start: this host has forgotten all, as one that is new")
            command = (sys.executable, EXAMPLE, environment, checkpoint)
            options = ("--job", "example", "--dir", self.path / "start", "--run", run)
            self._say(self._aifs("start", "run", *options, "--", *command).strip())
        self._report()
        self._aifs("umount", self.path)
        self._say(f"fsck: {self._aifs('fsck', self._source).strip().splitlines()[-1]}")

    def _environment(self) -> str:
        installed = [Path(numpy.__file__).parents[1] / name for name in PACKAGES]
        there = [str(path) for path in installed if path.exists()]
        copy = ("sh", "-c", 'cp -a "$@" "$AIFS_ENV"', "-", *there)
        key = ("--key", numpy.__version__)
        return self._aifs("env", "run", "--dir", self.path / "envs", *key, "--", *copy).strip()

    def _forget(self) -> None:
        """All is on the servers alone."""
        self._aifs("drain", self.path)
        self._aifs("evict", self.path)
        self._aifs("umount", self.path)
        if os.geteuid() == 0:
            caches.drop()
        self._aifs("mount", self._source, self.path)

    def _report(self) -> None:
        directory = str(self.path / "start" / "example")
        first, second = (startup.report(directory, run)[1] for run in ("first", "second"))
        table = Table("stage", "first start", "second start", "")
        for before, after in zip(first, second, strict=True):
            ratio = f"{before.max_s / after.max_s:.1f} times faster"
            table.add_row(before.stage, f"{before.max_s:.2f} s", f"{after.max_s:.2f} s", ratio)
        self._console.print(table)
        record = startup.read_records(directory)[0]
        self._say(f"read ahead: {len(record.files)} files, {record.bytes >> 20} MiB")

    def _aifs(self, *words: object) -> str:
        command: Sequence[str] = [*AIFS, *map(str, words)]
        done = subprocess.run(command, check=True, capture_output=True, cwd=SCRIPTS.parent)
        return done.stdout.decode()

    def _say(self, what: str) -> None:
        taken_s = time.monotonic() - self._began_s
        self._console.print(f"{taken_s:6.1f} s  {what}", soft_wrap=True)
