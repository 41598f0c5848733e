"""Saving while the next iteration computes: FastPersist's pipelined checkpoints.

    checkpointer.save(state, step)     # returns when the pickle is made; the bytes follow
    loss(...).backward()               # meanwhile
    checkpointer.wait()                # the state may be changed from now on
    optimizer.step()

A thread copies the state into shared memory (which costs the interpreter's lock nothing), and a
helper process hashes, writes and publishes it from there.
"""

import os
import socket
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import aifs
from aifs.client.checkpoints.manifest import CheckpointError
from aifs.client.checkpoints.publishing import PathLike, plain
from aifs.client.torch.arena import Arena, queued_work
from aifs.client.torch.helper import JobEnd, SaveJob, offsets
from aifs.client.torch.records import describe
from aifs.client.torch.saving import archive_name

_PROGRAM = "import sys; from aifs.client.torch.helper import main; main(*map(int, sys.argv[1:]))"

END_S = 10.0
"""Seconds that a helper which has nothing to do gets to end."""


class PipelinedCheckpointer:
    """Checkpoints of one rank, at most one in flight.

    ``template``: path, such as ``run/step-{step}``; ``file``: of this rank in it; ``options``: of
    ``aifs.client.checkpoint``, such as ``keep='last=3'``. Takes as much memory as the state. The
    next ``save``, ``wait`` or ``close`` raises errors, once; then a new save may be tried. For one
    thread.
    """

    def __init__(
        self,
        template: PathLike,
        *,
        file: str = "state-{rank}.pt",
        ranks: int = 1,
        rank: int = 0,
        **options: Any,
    ) -> None:
        self._template = os.fspath(template)
        """The path of a checkpoint, with ``{step}`` in it."""
        self._file = file.format(rank=rank)
        """The name of this rank's file in each."""
        self._options = {"ranks": ranks, "rank": rank, **options}
        """Of ``aifs.client.checkpoint``."""
        self._arena = Arena()
        self._pool = ThreadPoolExecutor(1, "aifs-staging")
        """The thread that copies the state to the arena."""
        self._staging: Future[None] | None = None
        """The copy that is under way, or the last one; None before."""
        self._target = ""
        """The path of the newest checkpoint; '' before the first."""
        self.helper: Helper | None = Helper(self._arena)

    def __enter__(self) -> "PipelinedCheckpointer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            return self.close()
        with suppress(OSError, CheckpointError):  # why the loop ended is what the caller must hear
            self.close()

    def save(self, state: Any, step: int) -> None:
        """Begin to save ``state``, unchanged until ``wait``, once the one before is durable. Raises
        its error, CheckpointError, OSError, and errors of pickling."""
        self.wait(durable=True)
        self._target = plain(self._template.format(step=step))
        image, storages = describe(state, archive_name(self._file))
        places = offsets(image.sizes)
        if self.helper is None:
            self.helper = Helper(self._arena)
        self._arena.grow(max(places[-1], 1))  # an empty mapping cannot be
        job = SaveJob(self._target, self._file, image, {"step": step, **self._options})
        try:
            self.helper.connection.send(job)
        except (BrokenPipeError, ConnectionResetError):
            self._fail_without_helper()
        self._staging = self._pool.submit(
            self._arena.fill, storages, places, queued_work(storages), self.helper.connection
        )

    def wait(self, *, durable: bool = False) -> None:
        """Wait until the state may change; ``durable``: until it is published. Raises OSError,
        CheckpointError (also if the helper is gone)."""
        if self._staging is None:
            return
        assert self.helper is not None
        connection = self.helper.connection
        try:
            self._staging.result()
            if not durable and not connection.poll():
                return
            connection.poll(None)  # unlike recv it may be interrupted
            report: JobEnd = connection.recv()
        except (BrokenPipeError, ConnectionResetError, EOFError):
            self._fail_without_helper()
        except Exception:  # copying has failed: the helper waits for bytes that will not come
            self.helper.kill()
            self.helper = self._staging = None
            raise
        self._staging = None
        _raise(report, self._target)

    def _fail_without_helper(self) -> NoReturn:
        assert self.helper is not None
        code = self.helper.kill()
        self.helper = self._staging = None
        raise CheckpointError(
            f"{self._target}: was not saved: the helper process has ended (exit code {code})"
        ) from None

    def close(self) -> None:
        """Until the last one is durable; then the helper is gone. Raises as ``wait``."""
        try:
            self.wait(durable=True)
        finally:
            self._pool.shutdown()
            if self.helper is not None:
                self.helper.end()
                self.helper = None
            self._arena.close()


def _raise(report: JobEnd, target: str) -> None:
    if report.errno:
        raise OSError(report.errno, report.problem, report.path or target)
    if report.problem:
        raise CheckpointError(report.problem)


class Helper:
    """The process, and the socket to it."""

    def __init__(self, arena: Arena) -> None:
        mine, its = socket.socketpair()
        environment = {**os.environ, "PYTHONPATH": _search_path(), "PYTHONSAFEPATH": "1"}
        self.connection = Connection(mine.detach())
        with its:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(its.fileno()), str(arena.fd)],
                pass_fds=(its.fileno(), arena.fd),
                env=environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # ^C is for the training process, whose end it follows
            )

    def end(self) -> None:
        """Let it end."""
        with suppress(OSError):
            self.connection.send(None)
        self.connection.close()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> int:
        """Its exit code."""
        self.connection.close()
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(0.1)  # it may be ending
        self.process.kill()
        return self.process.wait()


def _search_path() -> str:
    root = str(Path(aifs.__path__[0]).parent)
    return os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
