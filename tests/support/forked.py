"""The command ``aifs`` in processes that are forked from one that has imported it already.

Starting Python and importing the package takes 0.3 to 0.5 s of a processor, which is most of what a
mount costs a test. A forked command differs from one that was started in nothing that it can see,
but that its modules are there: descriptors, environment, arguments, namespace and end are its own.

python -m tests.support.forked SOCKET PADDING
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import pkgutil
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]

_PADDING = "-" * 4096
"""Its place is taken by the arguments of the command, for whoever looks into /proc."""
_IMPORTED = (
    "aifs.check.fsck",
    "aifs.fuse.session",
    "aifs.meta.replicated.joining",
)
"""Beside the commands, and with what these import: most of what commands import when they run."""
_MESSAGE_MAX = 1 << 17
_CLONE_NEWNET = 0x40000000


class _Command(NamedTuple):
    """What is asked for; with it come descriptors: stdin, stdout, stderr, one that is told the
    command's pid and then its exit status, and that of a network namespace, if it is to be in
    one."""

    arguments: list[str]
    environment: dict[str, str]
    umask: int
    descriptors_max: int
    """0: as many as who asks."""


def run(
    arguments: Sequence[str],
    *,
    descriptors: int = 0,
    network: str = "",
    timeout_s: float,
) -> subprocess.CompletedProcess[str]:
    """``aifs`` with ``arguments``, in the repository; as subprocess.run. ``descriptors``: how many
    it may have; 0: as many as we. ``network``: the path of the namespace that it runs in."""
    command = _Command([*arguments], dict(os.environ), _umask(), descriptors)
    message = json.dumps(command, ensure_ascii=True).encode()
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    pipes = [os.pipe() for _ in range(3)]
    sent = [null, *(write for _, write in pipes)]
    if network:
        sent.append(os.open(network, os.O_RDONLY | os.O_CLOEXEC))
    try:
        socket.send_fds(_forker(os.getpid()), [message], sent)
    finally:
        for fd in sent:
            os.close(fd)
    said = _read_all([read for read, _ in pipes], time.monotonic() + timeout_s)
    if said is None:
        raise subprocess.TimeoutExpired(["aifs", *arguments], timeout_s)
    out, err, (_, status) = said[0].decode(), said[1].decode(), said[2].split()
    code = os.waitstatus_to_exitcode(int(status))
    return subprocess.CompletedProcess(["aifs", *arguments], code, out, err)


def _umask() -> int:
    """Ours, which threads may need meanwhile."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("Umask:")[2].split()[0], 8)


@cache
def _forker(of: int) -> socket.socket:
    """Where commands of this process are asked for. What asks there ends when we do."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        fd = theirs.fileno()
        command = [sys.executable, "-m", __name__, str(fd), _PADDING]
        process = subprocess.Popen(command, pass_fds=[fd], cwd=ROOT, stdin=subprocess.DEVNULL)
    atexit.register(process.wait)  # before it the socket is closed
    atexit.register(ours.close)
    return ours


def _read_all(pipes: list[int], end_s: float) -> list[bytes] | None:
    """What comes until all are closed; None, with the command killed, if that takes too long."""
    said = {fd: b"" for fd in pipes}
    left = select.poll()  # select(2) knows no descriptor above 1023
    for fd in pipes:
        left.register(fd, select.POLLIN)
    open_ones = len(pipes)
    try:
        while open_ones:
            ready = left.poll(max(0.0, end_s - time.monotonic()) * 1000)
            if not ready:
                os.kill(int(said[pipes[2]].split()[0]), signal.SIGKILL)
                return None
            for fd, _ in ready:
                piece = os.read(fd, 1 << 16)
                said[fd] += piece
                if not piece:
                    left.unregister(fd)
                    open_ones -= 1
    finally:
        for fd in pipes:
            os.close(fd)
    return [*said.values()]


# --- the process that forks ---


def _serve(control: socket.socket) -> tuple[_Command, list[int]] | None:
    """Fork until who asks has ended: then None. In a child it returns with what it is to do."""
    running: dict[int, tuple[int, int]] = {}  # by pidfd: the pid, and who is told of its end
    while True:
        ready, _, _ = select.select([control, *running], [], [])
        for ended in ready:
            if isinstance(ended, int):
                pid, told = running.pop(ended)
                _, status = os.waitpid(pid, 0)
                _tell(told, str(status))
                os.close(told)
                os.close(ended)
        if control in ready:
            message, descriptors, _, _ = socket.recv_fds(control, _MESSAGE_MAX, 5)
            if not message:
                return None
            pid = os.fork()
            if pid == 0:
                return _Command(*json.loads(message)), descriptors
            told = descriptors.pop(3)
            for fd in descriptors:
                os.close(fd)
            _tell(told, f"{pid} ")
            running[os.pidfd_open(pid)] = pid, told


def _tell(fd: int, what: str) -> None:
    try:
        os.write(fd, what.encode())
    except BrokenPipeError:  # nobody waits any more
        pass


def _become(command: _Command, descriptors: list[int]) -> None:
    """What a process is that has been started for the command."""
    if len(descriptors) > 4:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(descriptors[4], _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    for number in range(3):
        os.dup2(descriptors[number], number)
    # The streams know what kind of files they were made for.
    sys.stdin = open(0, encoding=sys.stdin.encoding, closefd=False)
    sys.stdout = open(1, "w", encoding=sys.stdout.encoding, closefd=False)
    sys.stderr = open(2, "w", 1, sys.stderr.encoding, "backslashreplace", closefd=False)
    os.closerange(3, max(map(int, os.listdir("/proc/self/fd"))) + 1)
    if command.descriptors_max:
        resource.setrlimit(resource.RLIMIT_NOFILE, (command.descriptors_max,) * 2)
    os.umask(command.umask)
    os.environ.clear()
    os.environ.update(command.environment)
    main = str(ROOT / "aifs" / "cli" / "main.py")
    sys.argv = [main, *command.arguments]
    _show_arguments([sys.executable, "-m", "aifs.cli.main", *command.arguments])


def _show_arguments(arguments: list[str]) -> None:
    """As ours in /proc."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    text = b"".join(os.fsencode(argument) + b"\0" for argument in arguments)
    ctypes.memmove(start, text[: end - start].ljust(end - start, b"\0"), end - start)


def _end(code: int) -> None:
    """As the interpreter ends, but for taking apart what it has imported."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _main() -> None:
    commands = [f"aifs.cli.{module.name}" for module in pkgutil.iter_modules([ROOT / "aifs/cli"])]
    for name in (*commands, *_IMPORTED):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as control:
        asked = _serve(control)
        if asked is None:
            return
        control.detach()
    code = 1
    try:
        _become(*asked)
        code = sys.modules["aifs.cli.main"].main()
    except BaseException:  # noqa: BLE001 (as the interpreter tells it)
        sys.excepthook(*sys.exc_info())
    _end(code)


if __name__ == "__main__":
    _main()
