"""The start of a job: a library that is imported cold from the capacity tier, with and without a
record of what the last start has touched; an environment and a container that are there already,
against installing and unpacking them; eight hosts that start at once.

Data servers take 1 ms more for each request, but where it says otherwise. Ways take turns in each
round; before each one the kernel, by a new mount the daemon, and the burst tier have forgotten all,
so that it is what a second host would find. "warm" is the same command once more.

    python scripts/benchmarks/starts.py [--quick] [PART]...
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from containers import container_rows, image_archive
from report import Row, at_most, faster, longer, show, told
from start_hosts import start_hosts_rows
from systems import REPOSITORY, DelayedAifs, System, drop_caches, medium

from aifs.client import startup
from aifs.core.start_record import HotFile, StartRecord

FASTER, OF_WARM, PREFETCHED, MISSED, READY, KEYED_S, RECORDING, WHOLE = (
    3.0,
    1.3,
    1.5,
    0.05,
    10.0,
    0.060,
    1.03,
    2.0,
)
KEYED_RUNS = 7
FAR_MS, NOT_SLOWER = 10, 1.0
"""What a request takes to servers that are far away, such as many object stores."""
AIFS = (sys.executable, "-m", "aifs.cli.main")
_COMPILED = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
"""What is imported is compiled once, as where it is installed."""

TORCH = """
import sys, torch
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
if sys.argv[1:]:
    torch.load(sys.argv[1])
model(torch.randn(32, 256)).square().mean().backward()
with torch.no_grad():
    for parameter in model.parameters():
        parameter -= 0.1 * parameter.grad
import time
print(time.time())
"""
NUMPY = """
import sys, numpy
weights = numpy.ones((256, 8))
if sys.argv[1:]:
    numpy.load(sys.argv[1])
batch = numpy.random.default_rng(0).standard_normal((32, 256))
weights -= 0.1 * batch.T @ (batch @ weights)
import time
print(time.time())
"""
SAVE = {
    "torch": "import torch; torch.save(torch.ones({mib} << 18), {path!r})",
    "numpy": "import numpy; numpy.save(open({path!r}, 'wb'), numpy.ones({mib} << 17))",
}


class Extent(NamedTuple):
    """What is installed and imported; MiB of a checkpoint; MiB that each of so many hosts reads."""

    package: str
    checkpoint_mib: int
    host_mib: int
    hosts: int


QUICK = Extent("numpy", checkpoint_mib=16, host_mib=32, hosts=3)
NORMAL = Extent("torch", checkpoint_mib=256, host_mib=128, hosts=8)


def missed_bytes(record: StartRecord, planned: Iterable[HotFile]) -> int:
    """How much of what a start has touched was not ``planned`` to be prefetched."""
    known = {file[1:4]: file.blocks for file in planned}
    return sum(file.of(file.blocks - known.get(file[1:4], set())).bytes for file in record.files)


def start_rows(
    base: Path, extent: Extent, rounds: int, wheels: Path | None, parts: Sequence[str] = ()
) -> list[Row]:
    """The rows of the table; ``wheels`` are what is installed, without it they are downloaded."""
    rows: list[Row] = []
    if not parts or set(ON_ONE) & set(parts):
        with _installed(base, extent, wheels) as bench:
            for name, measure in ON_ONE.items():
                if not parts or name in parts:
                    rows += measure(bench, rounds)
    if not parts or "container" in parts:
        rows += container_rows(base, rounds)
    if not parts or "hosts" in parts:
        rows += start_hosts_rows(base, extent.hosts, extent.host_mib)
    return rows


@contextmanager
def _installed(base: Path, extent: Extent, wheels: Path | None) -> Iterator["_Bench"]:
    if wheels is None:
        wheels = base / "wheels"
        _download(wheels, extent.package)
    with System("start-plain", base) as plain, DelayedAifs("start-far", base) as far:
        yield _Bench(far, plain, extent, wheels.resolve(), base)


def _download(target: Path, package: str) -> None:
    """The wheels of what this interpreter has, and of what that needs."""
    names = [f"{name}=={version(name)}" for name in {package, "numpy"}]
    command = (sys.executable, "-m", "pip", "download", "--quiet", "--only-binary", ":all:")
    done = subprocess.run(
        [*command, "--dest", target, *names], check=False, capture_output=True, text=True
    )
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        raise RuntimeError(f"the wheels cannot be downloaded, give --wheels: {last}")


def _timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


class _Bench:
    """An environment in the capacity tier of ``far``; ``install_s``: how long it took to install
    the same wheels below ``plain``, until the import worked."""

    def __init__(
        self, far: DelayedAifs, plain: System, extent: Extent, wheels: Path, base: Path
    ) -> None:
        self._far, self._plain, self._extent, self._wheels = far, plain, extent, wheels
        self._archive = base / "image.tar"
        self._program = base / "step.py"
        self._program.write_text(TORCH if extent.package == "torch" else NUMPY)
        self._checkpoint = far.path / "checkpoint"
        self._install_s = _timed(lambda: self._install(plain.path / "env"))
        self._env = self._ask_for()
        save = SAVE[extent.package].format(mib=extent.checkpoint_mib, path=str(self._checkpoint))
        self._run(self._python(), "-c", save)
        self._starts = far.path / "start"

    # --- the rows ---

    def import_(self, rounds: int) -> list[Row]:
        """Cold: plainly, recorded for the first time, with that record, warm."""
        found: dict[str, list[float]] = defaultdict(list)
        fetched = 0
        self._forget()
        self._start("other")  # a second opinion on what is touched
        for round_ in range(rounds):
            job = f"job{round_}"
            self._forget()
            found["plain"].append(self._step())
            self._rest()
            found["warm"].append(self._step())
            self._forget()
            found["first"].append(self._start(job))
            self._forget()
            found["record"].append(self._start(job))
            fetched = sum(server["read_bytes"] for server in self._far.status()["servers"])
        plain, warm, first, record = (statistics.median(times) for times in found.values())
        planned, touched = (
            startup.read_records(startup.directory_of(str(self._starts), job))[-1]
            for job in ("other", "job0")
        )
        missed = missed_bytes(touched, planned.files) / touched.bytes
        of_touched = planned.bytes / touched.bytes
        package, served = self._extent.package, f"{fetched >> 20} MiB from servers"
        return [
            faster(f"import {package} and a step, cold, with a record", plain, record, FASTER),
            longer("the same / warm", warm, record, OF_WARM),
            told(
                "recorded for the first time, cold",
                f"{first:.2f} s; plain / warm {plain / warm:.1f}",
            ),
            at_most("bytes prefetched / touched", of_touched, PREFETCHED, served),
            at_most("blocks missed", missed, MISSED, f"of {touched.bytes >> 20} MiB"),
            self._recording(rounds),
        ]

    def far(self, rounds: int) -> list[Row]:
        """Cold, plainly and with a record, where waiting for servers takes longer."""
        found: dict[str, list[float]] = defaultdict(list)
        os.environ["SERVER_DELAY_MS"] = str(FAR_MS)  # of mounts from now on
        try:
            self._forget()
            self._start("far")
            for _ in range(rounds):
                self._forget()
                found["plain"].append(self._step())
                self._forget()
                found["record"].append(self._start("far"))
        finally:
            del os.environ["SERVER_DELAY_MS"]
        plain, record = (statistics.median(times) for times in found.values())
        work = f"the same import, cold, servers {FAR_MS} ms away, with a record"
        return [faster(work, plain, record, NOT_SLOWER)]

    def _recording(self, rounds: int) -> Row:
        """Warm, so that all that is recorded costs."""
        found: dict[bool, list[float]] = {False: [], True: []}
        self._step()
        self._rest()
        directory = self._starts / "cost"
        directory.mkdir(parents=True)
        for _ in range(2 * rounds + 1):
            for is_recorded, times in found.items():
                if is_recorded:
                    os.setxattr(directory, "user.aifs.start", b"record=1")
                times.append(self._step())
                if is_recorded:
                    os.setxattr(directory, "user.aifs.start", b"stop")
                    while json.loads(os.getxattr(directory, "user.aifs.start"))["state"] != "ended":
                        time.sleep(0.01)
        plain, recorded = (min(times) for times in found.values())
        return longer("cost of recording, warm", plain, recorded, RECORDING)

    def environment(self, rounds: int) -> list[Row]:
        """It is there, and no host has read it."""
        ready, keyed = [], []
        importing = ("python", "-c", f"import {self._extent.package}")
        for _ in range(rounds):
            self._forget()
            ready.append(
                _timed(lambda: self._run(*AIFS, "env", "use", self._ask_for(), "--", *importing))
            )
            keyed += [_timed(self._ask_for) for _ in range(KEYED_RUNS)]
        keyed_s = min(keyed)
        return [
            faster(
                f"environment with {self._extent.package}: ready, after a remount / pip install",
                self._install_s,
                statistics.median(ready),
                READY,
            ),
            Row(
                "aifs env run, the environment is there",
                "",
                None,
                None,
                None,
                f"{1000 * keyed_s:.0f} ms, median {1000 * statistics.median(keyed):.0f} ms",
                f"<= {1000 * KEYED_S:.0f} ms",
                keyed_s <= KEYED_S,
            ),
        ]

    def whole(self, rounds: int) -> list[Row]:
        """Image, environment, checkpoint and first step: what is there is mounted, used in place
        and prefetched; or it is unpacked and installed on this host's disk, and read cold. Of the
        container a Python is started; what trains is the host's."""
        image_archive(self._archive)
        image = self._run(*AIFS, "image", "import", self._archive, self._far.path).strip()
        root, upper = self._plain.base / "root", self._plain.base / "upper"
        found: dict[str, list[float]] = {"without": [], "with": []}
        self._rest()
        self._forget()
        self._start("whole", self._checkpoint)
        for _ in range(rounds):
            self._forget()
            found["without"].append(_timed(lambda: self._without(root)))
            shutil.rmtree(root)
            self._forget()
            upper.mkdir(), root.mkdir()
            found["with"].append(_timed(lambda: self._with(image, root, upper)))
            self._run("umount", root)
            shutil.rmtree(root), shutil.rmtree(upper)
        without, with_ = (statistics.median(times) for times in found.values())
        return [
            faster("the whole start of a job, with everything / without", without, with_, WHOLE)
        ]

    def _without(self, root: Path) -> None:
        root.mkdir()
        self._run("tar", "xf", self._archive, "-C", root, "layer.tar")
        self._run("tar", "xf", root / "layer.tar", "-C", root)
        self._run("chroot", root, "/usr/bin/python3", "-c", "pass")
        self._install(root / "env")
        self._run(root / "env/bin/python", self._program, self._checkpoint)

    def _with(self, image: str, root: Path, upper: Path) -> None:
        self._run(*AIFS, "image", "mount", image, root, "--upper", upper)
        self._run("chroot", root, "/usr/bin/python3", "-c", "pass")
        self._ask_for()
        self._start("whole", self._checkpoint)

    # --- what they are made of ---

    def _run(self, *words: object) -> str:
        done = subprocess.run(
            list(map(str, words)),
            check=False,
            capture_output=True,
            text=True,
            cwd=REPOSITORY,
            env=_COMPILED,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(map(str, words))}: {done.stderr[-2000:]}")
        return done.stdout

    def _install(self, path: Path) -> None:
        self._run(sys.executable, "-m", "venv", path)
        self._run(path / "bin/pip", "install", *self._wanted())
        self._run(path / "bin/python", "-c", f"import {self._extent.package}")

    def _wanted(self) -> tuple[str, ...]:
        quiet = ("--quiet", "--disable-pip-version-check", "--no-cache-dir")
        return (
            *quiet,
            "--no-index",
            "--find-links",
            str(self._wheels),
            self._extent.package,
            "numpy",
        )

    def _ask_for(self) -> str:
        """The environment's path: it is made if it is not there."""
        options = ("--dir", self._far.path / "envs", "--key", "bench", "--venv")
        command = ("pip", "install", *self._wanted())
        return self._run(*AIFS, "env", "run", *options, "--", *command).strip()

    def _python(self) -> str:
        return f"{self._env}/bin/python"

    def _step(self) -> float:
        """Seconds until the step is done."""
        begun_s = time.time()
        return float(self._run(self._python(), self._program)) - begun_s

    def _start(self, job: str, *words: object) -> float:
        options = ("--job", job, "--dir", self._starts, "--run", str(time.time_ns()))
        begun_s = time.time()
        command = (self._python(), self._program, *words)
        return float(self._run(*AIFS, "start", "run", *options, "--", *command)) - begun_s

    def _rest(self) -> None:
        """Nothing is drained or staged any more."""
        self._far.rest()
        while (told := self._far.status()["stage"])["active_files"] or told["waiting_files"]:
            time.sleep(0.05)

    def _forget(self) -> None:
        self._rest()
        self._run(*AIFS, "drain", self._far.path)
        self._run(*AIFS, "evict", self._far.path)
        subprocess.run(["umount", self._far.path], check=True)
        self._far.daemon.wait()
        drop_caches()
        self._far.mount_again()


ON_ONE = {
    "import": _Bench.import_,
    "far": _Bench.far,
    "environment": _Bench.environment,
    "whole": _Bench.whole,
}
"""Parts that need the installed package."""
PARTS = (*ON_ONE, "container", "hosts")


def main(words: Sequence[str]) -> None:
    quick = "--quick" in words
    parts = [word for word in words if word != "--quick"]
    if unknown := set(parts) - set(PARTS):
        raise SystemExit(f"there is no part {unknown.pop()}; there are: {', '.join(PARTS)}")
    with medium(None) as base:
        show(start_rows(base, *((QUICK, 1) if quick else (NORMAL, 3)), None, parts), False)


if __name__ == "__main__":
    main(sys.argv[1:])
