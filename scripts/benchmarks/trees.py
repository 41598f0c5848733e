"""Trees of AIFS that the gate compares: how one is installed beside this checkout, how its commands
and attributes are spelled, and its mount as a system under test.
"""

import errno
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeVar

import load
from systems import REPOSITORY, MountedSystem

CACHE = Path(sys.prefix) / "trees"
"""Below the virtual environment of this checkout."""
KEPT = 4
"""Installed trees that stay in the cache."""
EXTRAS = "mount,cluster"
UNINSTALLED = shutil.ignore_patterns(
    ".*", "__pycache__", "*.so", "*.egg-info", "build", "tests", "docs"
)
OPTIONS = "burst.drain_delay=1h,meta.backup_interval=0,scrub.bandwidth=0"
"""So that nothing but what is measured happens."""
DURATION_S = 120
"""The longest that a work in the background may take."""

SPELLINGS: dict[str, tuple[tuple[str, ...], ...]] = {
    "format": (("format", "{source}"),),
    "mount": (("mount", "--foreground", "-o", "{options}", "{source}", "{path}"),),
    "replace": (("server", "replace", "{path}", "{server}", "{directory}", "--wait"),),
}
"""Commands, newest spelling first; a tree is driven by the first that it has. A mount is taken away
by umount(8), whatever the tree."""

ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "status": ("user.aifs.status",),
    "drain": ("user.aifs.drain",),
    "evict": ("user.aifs.evict",),
    "scrub": ("user.aifs.scrub",),
    "tier": ("user.aifs.tier",),
    "layout": ("user.aifs.layout",),
    "group": ("user.aifs.group",),
}
"""The same of extended attributes."""


Answer = TypeVar("Answer")


class Absent(Exception):
    """A tree lacks what a row needs."""


class Tree(NamedTuple):
    """An installed tree. ``title``: what it was asked for by, with its commit if it has one."""

    title: str
    program: Path
    """What stands for the command ``aifs``."""

    def command(self, name: str, **values: object) -> list[str]:
        """Raises Absent."""
        words = _spelling(self.program, name)
        return [str(self.program), *(word.format(**values) for word in words)]


@cache
def _spelling(program: Path, name: str) -> tuple[str, ...]:
    for words in SPELLINGS[name]:
        named = [word for word in words[:2] if not word.startswith(("-", "{"))]
        asked = subprocess.run([program, *named, "--help"], check=False, capture_output=True)
        if asked.returncode == 0:
            return words
    raise Absent(f"there is no command {name}")


# --- installation ---


def this_tree() -> Tree:
    """The checkout that this program lies in, as scripts/bench has installed it."""
    changed = _git("status", "--porcelain", "--", "aifs", "setup.py", "setup.cfg")
    title = _git("describe", "--always", "HEAD") + (" and what is not committed" if changed else "")
    return Tree(title, Path(sys.prefix) / "bin" / "aifs")


def default_revision() -> str:
    """Where this work left main; on main itself HEAD, if the package has changed since, or else
    its parent."""
    head = _git("rev-parse", "HEAD")
    with suppress(subprocess.CalledProcessError):
        base = _git("merge-base", "HEAD", "main")
        if base != head:
            return base
    changed = _git("status", "--porcelain", "--", "aifs", "setup.py", "setup.cfg")
    return head if changed else _git("rev-parse", "HEAD~1")


def installed(named: str, say: Callable[[str], None]) -> Tree:
    """The tree of a directory or git revision, copied to the cache and installed there in a virtual
    environment of its own, with the versions of this one's packages as far as it allows them.

    Raises CalledProcessError.
    """
    with tempfile.TemporaryDirectory() as copied:
        source = Path(copied) / "source"
        if (Path(named) / "setup.py").exists():
            shutil.copytree(named, source, symlinks=True, ignore=UNINSTALLED)
            title, key = named, f"copy-{_digest(source)}"
        else:
            commit = _git("rev-parse", "--verify", f"{named}^{{commit}}")
            title = key = _git("rev-parse", "--short=12", commit)
            source.mkdir()
            archive = ["git", "-C", str(REPOSITORY), "archive", commit]
            with subprocess.Popen(archive, stdout=subprocess.PIPE) as packed:
                subprocess.run(["tar", "x", "-C", source], stdin=packed.stdout, check=True)
        place = CACHE / key
        tree = Tree(title, place / "venv" / "bin" / "aifs")
        if not (place / "complete").exists():
            say(f"installing {title}")
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(source, place / "source", symlinks=True)
            _install(place)
            (place / "complete").touch()
    os.utime(place)
    for old in sorted(CACHE.iterdir(), key=lambda path: path.stat().st_mtime)[:-KEPT]:
        shutil.rmtree(old)
    return tree


def _install(place: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", place / "venv"], check=True)
    constraints = place / "constraints.txt"
    ours = {found.name: found.version for found in importlib.metadata.distributions()}
    ours.pop("aifs", None)
    constraints.write_text("".join(f"{name}=={version}\n" for name, version in ours.items()))
    pip = [place / "venv" / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check"]
    command = [*pip, "--editable", f"{place / 'source'}[{EXTRAS}]"]
    constrained = [*command, "--constraint", constraints]
    if subprocess.run(constrained, check=False, capture_output=True).returncode:
        subprocess.run(command, check=True, stdout=sys.stderr)


def _digest(directory: Path) -> str:
    found = hashlib.sha256()
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            found.update(f"{path.relative_to(directory)}\0".encode() + path.read_bytes())
    return found.hexdigest()[:12]


def _git(*words: str) -> str:
    command = ["git", "-C", str(REPOSITORY), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _done(command: Sequence[str]) -> None:
    """Raises RuntimeError with what the command says."""
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip() or done.stdout.strip())


# --- processor time ---


def processor_s(roots: Iterable[int]) -> float:
    """Processor time of processes and of all their descendants, to the nanosecond for those that
    live, and to the clock tick for those that have ended."""
    total = 0.0
    left = list(roots)
    while left:
        pid = left.pop()
        with suppress(OSError):
            total += time.clock_gettime(~pid << 3 | 2)  # as clock_getcpuclockid(3) makes it
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")
            for task in Path(f"/proc/{pid}/task").iterdir():
                left += map(int, (task / "children").read_text().split())
    return total


def pin(pids: Iterable[int], work: str) -> None:
    """Keep daemons off the processor that a work on names stays on; for others let them run on
    all."""
    processors = os.sched_getaffinity(0)
    if work in load.NAMES and len(processors) > 1:
        processors -= {min(processors)}
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(ProcessLookupError):  # it has ended since
                os.sched_setaffinity(int(task.name), processors)


# --- a mount ---


class TreeMount(MountedSystem):
    """A mount of a tree, in the foreground, of a new store."""

    def __init__(self, name: str, tree: Tree, base: Path) -> None:
        super().__init__(name, base)
        self.tree = tree
        self.store = self.base / "store"
        self._replaced = self.store / "data" / "0"
        options = {"source": self.store, "path": self.path, "options": OPTIONS}
        self.command = tree.command("mount", **options)

    def __enter__(self) -> "TreeMount":
        command = self.tree.command("format", source=self.store)
        _done(command)
        super().__enter__()
        return self

    def processor_s(self) -> float:
        return processor_s([self.daemon.pid])

    def run(self, work: str, directory: str, **settings: int) -> float:
        pin([self.daemon.pid], work)
        return load.forked(work, self.path / directory, settings)

    def remove(self, directory: str) -> None:
        super().remove(directory)
        self.rest()

    def rest(self) -> None:
        """Return when nothing is drained, staged or deleted any more."""
        self._await(self._is_at_rest)

    def _is_at_rest(self) -> bool:
        status = self.status()
        stage = status["stage"]
        return not (
            status["collector_backlog"]
            or status["drain"]["active_files"]
            or stage["active_files"]
            or stage["waiting_files"]
        )

    def drain(self, directory: str) -> None:
        """Return when all below is on the data servers. Asking costs the daemon a look at each file
        that is not, so not often."""
        self._set(directory, "drain")
        self._await(lambda: not self._get(directory, "drain")["files"])

    def evict(self, directory: str) -> None:
        """Files that are still being closed are tried again."""

        def is_evicted(file: Path) -> bool:
            try:
                self._set(file, "evict")
            except OSError as error:
                if error.errno != errno.EBUSY:
                    raise
                return False
            return True

        for file in (self.path / directory).iterdir():
            self._await(lambda file=file: is_evicted(file))

    def scrub(self) -> None:
        self._set(self.path, "scrub", "start")
        self._await(lambda: not self.status()["scrub"]["running"])

    def replace(self) -> None:
        """The directory of a data server vanishes; another one takes its place."""
        lost = self._replaced
        servers = self.status()["servers"]
        (number,) = (server["id"] for server in servers if server["path"] == str(lost))
        self._replaced = lost.with_name(f"instead-of-{number}")
        lost.rename(self.base / "lost")
        values = {"path": self.path, "server": number, "directory": self._replaced}
        _done(self.tree.command("replace", **values))
        shutil.rmtree(self.base / "lost")

    def hint(self, directory: str, attribute: str, text: str) -> None:
        (self.path / directory).mkdir(exist_ok=True)
        self._set(directory, attribute, text)

    def await_group(self, directory: str) -> None:
        """Return when the group of a directory is durable."""

        def is_durable() -> bool:
            group = self._get(directory, "group")
            if group["state"] in ("failed", "cancelled", "expired"):
                raise RuntimeError(group["error"])
            return group["state"] == "durable"

        self._await(is_durable, 0.002)

    def status(self) -> dict:
        return self._get(self.path, "status")

    def umount(self) -> None:
        subprocess.run(["umount", self.path], check=True)
        self.daemon.wait()

    def _set(self, path: Path | str, attribute: str, text: str = "") -> None:
        self._spelled(attribute, lambda name: os.setxattr(self.path / path, name, text.encode()))

    def _get(self, path: Path | str, attribute: str) -> dict:
        found = self._spelled(attribute, lambda name: os.getxattr(self.path / path, name))
        return json.loads(found)

    def _spelled(self, attribute: str, act: Callable[[str], Answer]) -> Answer:
        """Raises Absent."""
        for name in ATTRIBUTES[attribute]:
            try:
                return act(name)
            except OSError as error:
                if error.errno not in (errno.ENODATA, errno.ENOTSUP, errno.EINVAL):
                    raise
        raise Absent(f"there is no attribute for {attribute}")

    def _await(self, condition: Callable[[], bool], pause_s: float = 0.02) -> None:
        end_s = time.monotonic() + DURATION_S
        while not condition():
            if time.monotonic() > end_s:
                raise TimeoutError(f"{self.name}: work in the background does not end")
            time.sleep(pause_s)
