"""The demonstration behind scripts/demo; see there."""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import caches
from demonstration.hosts import demonstrate
from demonstration.job import Ranks, command
from demonstration.kill import demonstrate as demonstrate_kill
from demonstration.start import demonstrate as demonstrate_start
from machines import Failed
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from aifs.core.units import describe_size, parse_size

RANKS = 4
STEPS = 10
MOST_HOSTS = 16

DRAIN_WHEN_TOLD = "burst.drain_delay=1h"
"""So that the drain is a step of its own, and does not disturb what is measured before."""

COPIES = 3
"""Of all bytes: in the plain directory, in the burst tier, on the data servers."""

START_SHARE = 8
"""Of --size that the checkpoint of a job has that starts."""

SPACE_OF_A_STORE = parse_size("256MiB")

console = Console()


def size(text: str) -> int:
    """A type of argument: its name is in argparse's messages."""
    return parse_size(text)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/demo",
        description="Save and load a GPT-style model with Adam state through an AIFS mount.",
    )
    parser.add_argument(
        "--size", type=size, default=parse_size("1GB"), help="bytes in all (default: 1GB)"
    )
    parser.add_argument(
        "--dir", default=tempfile.gettempdir(), help="where to work: a store and a plain directory"
    )
    parser.add_argument("--keep", action="store_true", help="leave the store mounted at the end")
    parser.add_argument(
        "--hosts",
        type=int,
        nargs="?",
        const=4,
        default=0,
        metavar="N",
        help="N hosts that share a store, in network namespaces of this machine; one of them is "
        "killed (needs root; 4, if N is left out)",
    )
    parser.add_argument(
        "--start",
        action="store_true",
        help="a job starts twice: what the first start has read is read ahead for the second one",
    )
    parser.add_argument(
        "--kill",
        action="store_true",
        help="the daemon is killed each second while a job trains, which sees no error",
    )
    arguments = parser.parse_args()
    if arguments.kill and (arguments.hosts or arguments.keep or arguments.start):
        parser.error("--kill: not with --hosts, --keep or --start")
    if arguments.start and (arguments.hosts or arguments.keep):
        parser.error("--start: not with --hosts or --keep")
    if arguments.hosts and (arguments.keep or not 2 <= arguments.hosts <= MOST_HOSTS):
        parser.error(f"--hosts: 2 to {MOST_HOSTS}, and not with --keep")
    smallest = (arguments.hosts or RANKS) * 52_000_000
    if arguments.size < smallest:
        parser.error(f"--size: the smallest model takes {smallest // 1_000_000}MB")
    if not os.path.isdir(arguments.dir):
        parser.error(f"--dir: {arguments.dir}: there is no such directory")
    needed, free = COPIES * arguments.size + SPACE_OF_A_STORE, shutil.disk_usage(arguments.dir).free
    if free < needed:
        what = f"has {describe_size(free)} free, the demo needs {describe_size(needed)}"
        parser.error(
            f"--dir: {arguments.dir} {what}; choose another directory, or a smaller --size"
        )
    work = Path(tempfile.mkdtemp(prefix="aifs-demo-", dir=arguments.dir))
    if arguments.hosts:
        return apart(work, demonstrate, work, arguments.hosts, arguments.size, console)
    if arguments.kill:
        return apart(work, demonstrate_kill, work, console)
    if arguments.start:
        return apart(work, demonstrate_start, work, arguments.size // START_SHARE, console)
    demo = Demo(work, arguments.size)
    try:
        demo.run()
        if arguments.keep:
            demo.aifs("mount", demo.source, demo.mountpoint)
            command = Path(sys.executable).parent / "aifs"
            console.print(
                f"Mounted at {demo.mountpoint}. Unmount it, then remove it with:", soft_wrap=True
            )
            console.print(f"  {command} umount {demo.mountpoint} && rm -r {work}", soft_wrap=True)
    finally:
        if not arguments.keep:
            demo.clean_up()
    return 0


def apart(work: Path, show: Callable[..., None], *words: object) -> int:
    """A demonstration that takes down what it has made, however it ends."""

    def end(number: int, frame: object) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)  # so that everything is taken down
    try:
        show(*words)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (Failed, OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or b""
        sys.exit(f"scripts/demo: {error} {said.decode().strip()}".rstrip())
    finally:
        shutil.rmtree(work)
    return 0


class Demo:
    def __init__(self, work: Path, size: int) -> None:
        self.work = work
        self.size = size
        self.source = work / "store"
        self.mountpoint = work / "mnt"
        self.plain = work / "plain"
        self.results: dict[tuple[str, str], tuple[float, int]] = {}

    def run(self) -> None:
        columns = (TextColumn("{task.description:<44}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("", total=STEPS)

            def step(description: str) -> None:
                progress.update(task, description=description)

            def done() -> None:
                progress.advance(task)

            self.mountpoint.mkdir()
            self.plain.mkdir()
            step("format and mount")
            self.aifs("format", self.source)
            self.aifs("mount", self.source, self.mountpoint, "-o", DRAIN_WHEN_TOLD)
            done()
            self.save(step, done)
            self.load(step, done, "load and compare")
            step("drain the burst tier to the data servers")
            self.drain()
            done()
            step("unmount, mount again")
            self.aifs("umount", self.mountpoint)
            self.aifs("mount", self.source, self.mountpoint)
            done()
            self.load(step, done, "load and compare again")
            status = json.loads(self.aifs("status", self.mountpoint, "--json"))
            servers = [*status["servers"], *status["burst"]["devices"]]
            step("unmount, fsck")
            self.aifs("umount", self.mountpoint)
            report = self.aifs("fsck", self.source)
            done()
            step("done")
        self.report(servers)
        console.print(f"fsck: {report.strip().splitlines()[-1]}")

    def save(self, step, done) -> None:
        """Both directories, in turn, by the same processes: write to a temporary directory, sync,
        rename.
        """
        targets = {
            "AIFS": self.mountpoint / "checkpoint",
            "plain directory": self.plain / "checkpoint",
        }
        temporaries = [f"{target}.tmp" for target in targets.values()]
        step(f"{RANKS} processes build the model")
        ranks = Ranks(
            [command("save", rank, self.size // RANKS, temporaries) for rank in range(RANKS)]
        )
        done()
        for (name, target), temporary in zip(targets.items(), temporaries, strict=True):
            step(f"save to {name}")
            os.mkdir(temporary)
            start = time.monotonic()
            written = sum(count for _, count in ranks.step())
            os.rename(temporary, target)
            sync_directory(target.parent)
            self.results[name, "save"] = time.monotonic() - start, written
            done()
        ranks.finish()

    def load(self, step, done, description: str) -> None:
        directories = {
            "plain directory": self.plain / "checkpoint",
            "AIFS": self.mountpoint / "checkpoint",
        }
        ranks = Ranks([command("load", rank, 0, directories.values()) for rank in range(RANKS)])
        step(description)
        for name in directories:
            drop_page_cache()
            start = time.monotonic()
            read = sum(count for _, count in ranks.step())
            self.results.setdefault((name, "load"), (time.monotonic() - start, read))
        compared = ranks.step()
        ranks.finish()
        self.tensors = sum(int(count) for count, _ in compared)
        done()

    def drain(self) -> None:
        """How long until the checkpoint is on the data servers, too."""
        name = self.mountpoint / "checkpoint"
        waiting = json.loads(os.getxattr(name, "user.aifs.state"))["bytes"]
        start = time.monotonic()
        self.aifs("drain", self.mountpoint)
        self.results["AIFS", "drain to the data servers"] = (
            time.monotonic() - start,
            waiting["dirty"],
        )

    def report(self, servers: list[dict]) -> None:
        table = Table(
            "",
            "bytes",
            "seconds",
            "GB/s",
            title="Checkpoint: save with fsync and rename, load with cold caches",
        )
        for (name, work), (seconds, count) in self.results.items():
            table.add_row(
                f"{work}, {name}", f"{count:,}", f"{seconds:.2f}", f"{count / seconds / 1e9:.2f}"
            )
        console.print(table)
        table = Table(
            "directory",
            "bytes",
            title="Where the bytes lie: durable on the servers, cached in the burst tier",
        )
        for server in servers:
            objects = Path(server["path"]).rglob("objects/**/*")
            table.add_row(
                server["path"], f"{sum(p.stat().st_size for p in objects if p.is_file()):,}"
            )
        console.print(table)
        console.print(
            f"{self.tensors} tensors compared bit by bit, before and after the remount: all equal"
        )

    def aifs(self, *arguments: object) -> str:
        command = [sys.executable, "-m", "aifs.cli.main", *map(str, arguments)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            sys.exit(
                f"aifs {' '.join(map(str, arguments))}: "
                f"{result.stderr.strip() or result.stdout.strip()}"
            )
        return result.stdout

    def clean_up(self) -> None:
        if self.mountpoint.is_mount():
            self.aifs("umount", self.mountpoint)
        shutil.rmtree(self.work)


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def drop_page_cache() -> None:
    """So that both directories are read from the disk; without root, caches stay warm for both."""
    if os.geteuid() == 0:
        os.sync()
        caches.drop()


if __name__ == "__main__":
    sys.exit(main())
