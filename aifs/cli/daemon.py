"""Start a daemon and wait until it is ready: double fork, a session of its own, no terminal.

The daemon reports through a pipe: its pid, then ``ready``, or ``error``, an exit code and one line.
Until then, what libraries print on stderr (libfuse says only there why it failed) is kept for that
line.
"""

import fcntl
import logging
import os
import signal
from collections.abc import Callable

from aifs.cli.output import describe_error
from aifs.core import log
from aifs.core.errors import AifsError, MountError, UserError

logger = logging.getLogger(__name__)


def run_in_background(
    work: Callable[[Callable[[], None]], None], log_file: str, log_level: str
) -> None:
    """Run ``work(on_ready)`` in a daemon that logs to ``log_file``; returns when it has called
    ``on_ready``.

    Raises the UserError that ``work`` ended with before that. When interrupted, the daemon is told
    to stop.
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        # Above the standard descriptors, which may have been closed when we were started.
        _detach(work, fcntl.fcntl(write_end, fcntl.F_DUPFD_CLOEXEC, 3), log_file, log_level)
    os.close(write_end)
    os.waitpid(child, 0)
    with open(read_end, encoding="utf-8", errors="surrogateescape") as pipe:
        pid = pipe.readline()
        try:
            report = pipe.read()
        except KeyboardInterrupt:
            os.kill(int(pid), signal.SIGTERM)
            raise
    word, _, rest = report.partition(" ")
    if word == "ready":
        return
    if word != "error":
        raise MountError(f"the daemon died before the mount was ready; its log is {log_file}")
    code, _, message = rest.partition(" ")
    error = UserError(message)
    error.exit_code = int(code)
    raise error


def _detach(
    work: Callable[[Callable[[], None]], None], pipe: int, log_file: str, log_level: str
) -> None:
    """In the first child: leave the session, fork again, run ``work`` there. Never returns."""
    code = 1
    try:
        os.setsid()
        if os.fork() > 0:
            os._exit(0)
        code = _run(work, pipe, log_file, log_level)
    finally:
        logging.shutdown()
        os._exit(code)


def _run(
    work: Callable[[Callable[[], None]], None], pipe: int, log_file: str, log_level: str
) -> int:
    ready = False

    def on_ready() -> None:
        nonlocal ready
        ready = True
        os.dup2(1, 2)
        os.write(pipe, b"ready")
        os.close(pipe)

    os.write(pipe, f"{os.getpid()}\n".encode())
    early_stderr = _leave_terminal(pipe)
    try:
        log.setup(log_file, log_level)
        work(on_ready)
        return 0
    except (AifsError, OSError, ImportError) as error:
        message, code = describe_error(error), getattr(error, "exit_code", 1)
        if ready:
            logger.error("the daemon stops: %s", message)
    except BaseException as error:  # a bug: its stack belongs in the log, one line to the user
        message, code = f"unexpected {type(error).__name__}: {error}; see {log_file}", 1
        logger.critical("the daemon stops", exc_info=True)
    if not ready:
        said = " ".join(os.pread(early_stderr, 4096, 0).decode(errors="replace").split())
        reason = f" ({said})" if said else ""
        os.write(pipe, f"error {code} {message}{reason}".encode(errors="surrogateescape"))
    return code


def _leave_terminal(pipe: int) -> int:
    """Keep no file of the caller's but ``pipe``, nor its directory; returns a file that stderr goes
    to.
    """
    os.chdir("/")
    os.umask(0o022)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.closerange(3, pipe)
    os.closerange(pipe + 1, os.sysconf("SC_OPEN_MAX"))
    early_stderr = os.memfd_create("early-stderr")
    os.dup2(early_stderr, 2)
    return early_stderr
