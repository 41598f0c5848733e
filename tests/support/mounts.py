"""A real mount for tests: its own store, a daemon process started through the command line, checks
at the end.
"""

import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from aifs.core import ioctl
from aifs.core.config import DIRECTORY_FILE
from tests.support import forked

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 120  # for what must happen, on a machine with much else to do
_TABLE_CHANGED = 2
"""umount(8)'s status for an error before it has asked the kernel: it seems to read the table of
mounts while other tests change it. Seen once in many thousand calls."""
_TRIES = 3
_WITHOUT_MOVERS = "data: {movers: 0}\n"
"""Each mount would start a process, which costs more than what most tests have it do. Tests that
are about movers mount with ``data.movers=1``."""
_WITHOUT_KEEPER = "kernel.restarts=0"
"""Tests kill daemons, and look at what they leave. Those of mounts that outlive them set another
number."""
_WITHOUT_BURST = "burst: {directories: []}\n"

_PROBLEM = re.compile(r" (WARNING|ERROR|CRITICAL) ")


def call(path: Path, hint: str, /, **fields: object) -> dict:
    """The ioctl of a file or directory. Raises OSError."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return ioctl.call(fd, hint, **fields)
    finally:
        os.close(fd)


def aifs(
    *args: str | Path,
    check: bool = True,
    descriptors: int = 0,
    inside: Sequence[str] = (),
    module: str = "aifs.cli.main",
) -> subprocess.CompletedProcess[str]:
    """Run the command ``aifs``, or another ``module``, with ``args``; with ``check`` a failure
    fails the test with what it said.

    ``descriptors``: how many it, and a daemon that it starts, may have (0: as many as we).
    ``inside``: the command that runs it elsewhere, such as in a namespace."""
    network = _network_of(inside)
    if module == "aifs.cli.main" and network is not None:
        words = [*map(str, args)]
        done = forked.run(words, descriptors=descriptors, network=network, timeout_s=TIMEOUT_S)
    else:
        command = [*inside, sys.executable, "-m", module, *map(str, args)]
        if descriptors:
            command = ["sh", "-c", f'ulimit -n {descriptors}; exec "$@"', "sh", *command]
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, cwd=ROOT, timeout=TIMEOUT_S
        )
    if check and done.returncode:
        raise AssertionError(
            f"aifs {' '.join(map(str, args))}: exit {done.returncode}\n{done.stdout}{done.stderr}"
        )
    return done


def _network_of(inside: Sequence[str]) -> str | None:
    """The network namespace that this enters, empty: our own; None if it does something else."""
    if not inside:
        return ""
    program, *options = inside
    is_network = program == "nsenter" and len(options) == 1 and options[0].startswith("--net=")
    return options[0].removeprefix("--net=") if is_network else None


def aifs_on_terminal(*args: str | Path) -> str:
    """What the command ``aifs`` prints when its output is a terminal. It must succeed."""
    command = [sys.executable, "-m", "aifs.cli.main", *map(str, args)]
    ours, theirs = os.openpty()
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, cwd=ROOT) as running:
        os.close(theirs)
        said = b""
        with suppress(OSError), os.fdopen(ours, "rb", buffering=0) as terminal:  # EIO is its end
            while piece := terminal.read(4096):
                said += piece
    assert running.returncode == 0, said
    return said.decode().replace("\r\n", "\n")


class Mounted:
    """A store and its mount. ``path`` is the mountpoint, ``source`` the store's directory, ``pid``
    the daemon.

    The store has the settings that its directory holds already, or none but what a test needs.
    """

    def __init__(self, directory: Path, options: Sequence[str] = (), burst: bool = True) -> None:
        self.path = directory / "mnt"
        self.source = directory / "store"
        self.log = self.source / "log" / "aifs.log"
        self.options = tuple(options)
        self.expected = [r"session: .* is not in use: "]  # the kernel or the bridge lacks something
        """Regular expressions of warnings and errors that the log may hold."""
        self.module = "aifs.cli.main"
        """What mounts it: a module with the command line of ``aifs``."""
        self.descriptors = 0
        """How many the daemon may have; 0: as many as we."""
        self.inside: Sequence[str] = ()
        """How a command gets where the daemon runs; nothing: it runs here."""
        self.pid = 0
        self._ended = -1  # a descriptor of the daemon that becomes readable when it has ended
        self.path.mkdir()
        settings = self.source / DIRECTORY_FILE
        if not settings.exists():
            self.source.mkdir()
            text = _WITHOUT_MOVERS if burst else _WITHOUT_MOVERS + _WITHOUT_BURST
            settings.write_text(text)
        aifs("format", self.source)

    def mount(self) -> None:
        """Start the daemon; returns when the mount serves."""
        chosen = (_WITHOUT_KEEPER, *self.options)
        options = [word for option in chosen for word in ("-o", option)]
        command = ("mount", *options, self.source, self.path)
        aifs(*command, descriptors=self.descriptors, inside=self.inside, module=self.module)
        self.adopt()

    def adopt(self) -> None:
        """The mount serves now."""
        self.pid = json.loads(os.getxattr(self.path, "user.aifs.status"))["pid"]
        self._ended = os.pidfd_open(self.pid)

    def follow(self) -> None:
        """The daemon has died, and the mount has another one, which serves."""
        self.wait_for_end()
        self.adopt()

    def unmount(self) -> None:
        """umount(8); returns when the daemon has ended."""
        for _ in range(_TRIES):
            done = subprocess.run(["umount", self.path], stderr=subprocess.PIPE, timeout=TIMEOUT_S)
            if done.returncode != _TABLE_CHANGED:
                break
        assert done.returncode == 0, f"umount: {done.returncode}: {os.fsdecode(done.stderr)}"
        self.wait_for_end()

    def remount(self) -> None:
        self.unmount()
        self.mount()

    def kill(self) -> None:
        """kill -9 of the daemon; the dead mount is removed."""
        self.kill_only()
        subprocess.run(
            ["umount", "-l", self.path], check=True, capture_output=True, timeout=TIMEOUT_S
        )

    def kill_only(self) -> None:
        """kill -9 of the daemon; its mount stays behind."""
        self.signal(signal.SIGKILL)
        self.wait_for_end()

    def fsck(self) -> None:
        """The unmounted store has no fault."""
        aifs("fsck", self.source)

    def signal(self, number: int) -> None:
        """Send a signal to the daemon."""
        signal.pidfd_send_signal(self._ended, number)

    def wait_for_end(self) -> None:
        """Until the daemon has ended."""
        assert select.select([self._ended], [], [], TIMEOUT_S)[0], (
            f"the daemon does not end: {self._doing()}"
        )
        os.close(self._ended)
        self._ended = -1

    def _doing(self) -> str:
        """Where the daemon's threads are in the kernel, and the end of its log."""
        threads = [path.read_text() for path in Path(f"/proc/{self.pid}/task").glob("*/wchan")]
        return (
            f"threads in {threads}; the log ends "
            f"with\n{self.log.read_text()[-2000:] if self.log.exists() else ''}"
        )

    def is_alive(self) -> bool:
        return self._ended != -1 and not select.select([self._ended], [], [], 0)[0]

    def is_mounted(self) -> bool:
        return os.path.ismount(self.path)

    def finish(self) -> None:
        """Unmount, and check everything that must be true afterwards."""
        if self.is_mounted():
            self.unmount()
        assert self._ended == -1, "the daemon outlived its mount"
        self.fsck()
        self.check_log()

    def check_log(self) -> None:
        """The log holds no warning or error that the test did not expect."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        problems = [line for line in lines if _PROBLEM.search(line) or line.startswith("Traceback")]
        unexpected = [
            line for line in problems if not any(re.search(one, line) for one in self.expected)
        ]
        assert not unexpected, "unexpected in the log:\n" + "\n".join(unexpected)

    def abandon(self) -> None:
        """After a failure: leave neither mount nor process behind."""
        for keeper in keepers(self):
            os.kill(keeper, signal.SIGKILL)
        if self._ended != -1:
            with suppress(ProcessLookupError):
                self.signal(signal.SIGKILL)
            self.wait_for_end()
        subprocess.run(
            ["umount", "-l", self.path], check=False, capture_output=True, timeout=TIMEOUT_S
        )


def keepers(store: Mounted) -> list[int]:
    """The processes that keep its mount."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if any(word.endswith(b"/keeper.py") for word in words) and os.fsencode(
            json.dumps(str(store.path))
        ) in b" ".join(words):
            found.append(int(path.parent.name))
    return found


@contextmanager
def mounted_store(
    directory: Path, options: Sequence[str] = (), mount: bool = True, burst: bool = True
) -> Iterator[Mounted]:
    """A freshly formatted store below ``directory``, mounted; at the end unmounted and checked."""
    store = Mounted(directory, options, burst)
    try:
        if mount:
            store.mount()
        yield store
        store.finish()
    finally:
        store.abandon()
