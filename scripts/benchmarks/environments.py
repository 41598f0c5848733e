"""What users do all day: unpack, find, copy and remove trees of small files, clone a repository,
install packages and import them. Each is a command that is timed as a whole; ratios are of rates.
"""

import configparser
import io
import os
import random
import shutil
import statistics
import subprocess
import sys
import tarfile
import time
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from report import Row
from systems import REPOSITORY, Aifs, MountedSystem, Nothing, System, drop_caches

OF_PASSTHROUGH, RSYNC_OF_PLAIN = 1.5, 3.0
"""How many times as long AIFS may take as the C pass-through; rsync as the plain directory."""

PER_DIRECTORY = 100

MEAN_BYTES = 4000
"""Of an unpacked or copied file."""


class Amounts(NamedTuple):
    """Files to unpack, files to copy, trees like this repository's in the one that is cloned, and
    which of setup.cfg's extras are installed beside what the package needs in any case.
    """

    unpacked: int
    copied: int
    trees: int
    extras: tuple[str, ...]


class Missing(Exception):
    """A step cannot be done here; its text says why."""


class Passthrough(MountedSystem):
    """libfuse's example in C, which serves another directory and has the kernel pass files
    through to it: what names cost in C. It has a descriptor open for each file that the kernel
    knows, so that there is a number of files that it cannot do.
    """

    def __init__(self, name: str, base: Path, program: str) -> None:
        super().__init__(name, base)
        self.source = self.base / "source"
        self.command = [program, "--foreground", self.source, self.path]

    def __enter__(self) -> System:
        self.source.mkdir(parents=True)
        return super().__enter__()


class Step(NamedTuple):
    """Commands that are timed together. ``by_nothing``: the do-nothing filesystem can do them too,
    though it keeps no bytes.
    """

    name: str
    commands: list[list[str | Path]]
    by_nothing: bool = False
    of_plain: float | None = None


Part = list[Step] | Missing


def env_rows(base: Path, amounts: Amounts, rounds: int, wheels: Path | None) -> list[Row]:
    """The rows; ``wheels`` are what is installed, without it they are downloaded."""
    materials = base / "materials"
    materials.mkdir()
    systems = [System("plain-env", base), Nothing("nothing-env", base, False)]
    program = shutil.which("passthrough_hp")
    if program is not None:
        systems.append(Passthrough("c-env", base, program))
    systems.append(Aifs("aifs-env", base))
    parts = {
        "tar x, find, rm -rf": _try(lambda: _archive_steps(materials, amounts.unpacked)),
        "rsync": _try(lambda: _rsync_steps(materials, amounts.copied)),
        "git": _try(lambda: _git_steps(materials, amounts.trees)),
        "pip install": _try(lambda: _package_steps(materials, amounts.extras, wheels)),
    }
    able = [part for part in parts.values() if isinstance(part, list)]
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for _ in range(rounds):
        for system in systems:
            with system:
                for part in able:
                    for name, seconds in _measure(system, part):
                        found[system.name, name].append(seconds)
    shutil.rmtree(materials)
    times = {key: statistics.median(values) for key, values in found.items()}
    rows = [_row(step, times) for part in able for step in part]
    for name, part in parts.items():
        if isinstance(part, Missing):
            rows.append(Row(name, "", None, None, None, "", f"not done: {part}", True))
    return rows


def _try(make: Callable[[], list[Step]]) -> Part:
    try:
        return make()
    except Missing as missing:
        return missing


def _require(*tools: str) -> None:
    for tool in tools:
        if shutil.which(tool) is None:
            raise Missing(f"{tool} is not installed")


def _measure(system: System, part: list[Step]) -> list[tuple[str, float]]:
    """The seconds of each step; nothing if the system cannot do one of them, unless it is what is
    measured, or the plain directory.
    """
    if isinstance(system, Nothing) and not all(step.by_nothing for step in part):
        return []
    try:
        return [(step.name, _seconds(system, step)) for step in part]
    except subprocess.CalledProcessError as error:
        if not isinstance(system, Passthrough):
            raise
        print(f"{system.name}: {error}:\n{error.stderr[:200]}", file=sys.stderr)
        return []


def _seconds(system: System, step: Step) -> float:
    """How long the step takes when nothing else goes on, and the kernel knows nothing of what is
    there; a step whose name ends in "warm" finds what the one before has left in the caches.
    """
    system.rest()
    if not step.name.endswith("warm"):
        drop_caches()
    begin = time.perf_counter()
    for command in step.commands:
        subprocess.run(
            command,
            check=True,
            cwd=system.path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
    return time.perf_counter() - begin


def _row(step: Step, times: dict[tuple[str, str], float]) -> Row:
    plain, nothing, c, aifs = (
        times.get((f"{system}-env", step.name)) for system in ("plain", "nothing", "c", "aifs")
    )
    assert plain is not None and aifs is not None
    targets, passed = [], True
    if c is not None:
        targets.append(f"<= {OF_PASSTHROUGH} x C pass-through's time")
        passed &= aifs <= OF_PASSTHROUGH * c
    if step.of_plain is not None:
        targets.append(f"<= {step.of_plain:g} x plain's time")
        passed &= aifs <= step.of_plain * plain
    return Row(
        step.name,
        f"{plain:.2f} s",
        None if nothing is None else plain / nothing,
        plain / aifs,
        None if nothing is None else nothing / aifs,
        f"{aifs:.2f} s",
        ", ".join(targets),
        passed,
        None if c is None else plain / c,
    )


# --- trees of small files ---


def _small_files(count: int) -> list[tuple[str, bytes]]:
    """Names of directories and files, and what is in the files: always the same."""
    rng = random.Random(count)
    return [
        (
            f"d{number // PER_DIRECTORY}/f{number}",
            rng.randbytes(int(rng.expovariate(1 / MEAN_BYTES))),
        )
        for number in range(count)
    ]


def _archive_steps(materials: Path, count: int) -> list[Step]:
    _require("tar", "find", "rm")
    archive = materials / "files.tar"
    with tarfile.open(archive, "w") as target:
        for name, content in _small_files(count):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            target.addfile(entry, io.BytesIO(content))
    files = f"{count:,} files"
    return [
        Step(f"tar x of {files}", [["mkdir", "tree"], ["tar", "xf", archive, "-C", "tree"]], True),
        Step(f"find of {files}, sizes", [["find", "tree", "-printf", "%s\n"]], True),
        Step(f"rm -rf of {files}", [["rm", "-rf", "tree"]], True),
    ]


def _rsync_steps(materials: Path, count: int) -> list[Step]:
    _require("rsync")
    source = materials / "tree"
    for name, content in _small_files(count):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(content)
    command: list[str | Path] = ["rsync", "-a", f"{source}/", "copy"]
    return [Step(f"rsync -a of {count:,} files", [command], True, RSYNC_OF_PLAIN)]


# --- a repository ---


def _git_steps(materials: Path, trees: int) -> list[Step]:
    """This repository's history, and a commit on it whose tree is ``trees`` times this one's."""
    _require("git")
    if not (REPOSITORY / ".git").exists():
        raise Missing(f"{REPOSITORY} is no git repository")
    target = materials / "repository"
    who = {
        f"GIT_{one}_{what}": "bench"
        for one in ("AUTHOR", "COMMITTER")
        for what in ("NAME", "EMAIL")
    }

    def git(*words: str | Path) -> str:
        done = subprocess.run(
            ["git", "-C", target, *words],
            check=True,
            env={**os.environ, **who},
            stdout=subprocess.PIPE,
            text=True,
        )
        return done.stdout.strip()

    target.mkdir()
    git("clone", "-q", "--no-checkout", "--no-local", REPOSITORY, ".")
    for number in range(trees):
        git("read-tree", f"--prefix=tree{number}/", "HEAD")
    git("update-ref", "HEAD", git("commit-tree", git("write-tree"), "-p", "HEAD", "-m", "trees"))
    return [
        Step(f"git clone, {trees} trees", [["git", "clone", "-q", "--no-local", target, "clone"]]),
        Step("git status", [["git", "-C", "clone", "status", "--short"]]),
    ]


# --- packages ---


def _package_steps(materials: Path, extras: tuple[str, ...], wheels: Path | None) -> list[Step]:
    """Into a virtual environment on the filesystem."""
    if wheels is None:
        wheels = materials / "wheels"
        _download(wheels, extras)
    files = sorted(wheels.resolve().glob("*.whl"))
    if not files:
        raise Missing(f"there are no wheels in {wheels}")
    package = _largest_package(files)
    quiet = ("--quiet", "--disable-pip-version-check", "--no-cache-dir")
    install = ["-m", "pip", "--python", "env/bin/python", "install", "--no-index", "--no-deps"]
    importing: list[str | Path] = ["env/bin/python", "-c", f"import {package}"]
    return [
        Step(
            f"pip install of {len(files)} packages",
            [
                [sys.executable, "-m", "venv", "--without-pip", "env"],
                [sys.executable, *install, *quiet, *files],
            ],
        ),
        Step(f"import {package}, cold", [importing]),
        Step(f"import {package}, warm", [importing]),
    ]


def _download(target: Path, extras: tuple[str, ...]) -> None:
    """The wheels of what setup.cfg names, and of what that needs."""
    setup = configparser.ConfigParser()
    setup.read(REPOSITORY / "setup.cfg")
    lists = [setup["options"]["install_requires"]]
    lists += [setup["options.extras_require"][extra] for extra in extras]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary", ":all:"]
        + ["--dest", target, *"\n".join(lists).split()],
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        raise Missing(f"the wheels cannot be downloaded, give --wheels: {last}")


def _largest_package(wheels: list[Path]) -> str:
    """The package, importable by its name, that has most bytes."""
    sizes: Counter[str] = Counter()
    packages = set()
    for wheel in wheels:
        for entry in zipfile.ZipFile(wheel).infolist():
            top, _, rest = entry.filename.partition("/")
            sizes[top] += entry.file_size
            if rest == "__init__.py":
                packages.add(top)
    return max(packages, key=lambda name: sizes[name])
