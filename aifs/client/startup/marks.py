"""Stages that a command in any language notes by lines of its standard output:

    AIFS-STAGE begin NAME
    AIFS-STAGE end NAME

The output is passed on as it comes, these lines too. Their time is when they arrive here, so lines
that a program keeps in a buffer are noted late."""

import errno
import fcntl
import os
import re
import resource
import select
import termios
import threading
import time
import tty
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import NamedTuple

from aifs.client.startup import stages
from aifs.client.startup.stages import Spent
from aifs.core.processes import all_below

_MARK = re.compile(rb"AIFS-STAGE (begin|end) ([^\r]+)\r?")
_LINE_MAX = 512
_PIECE = 1 << 16

_NOTED_S = 2.0
"""How long marks may take to be noted when the command has ended."""


class Marks:
    """Finds the marks in output that comes in pieces."""

    def __init__(self) -> None:
        self.line = b""
        """As far as it has come; of one that is too long, its beginning."""

    def found_in(self, piece: bytes) -> Iterator[tuple[str, str]]:
        """Event and stage of each mark whose line ends in ``piece``, which comes next."""
        *lines, rest = (self.line + piece).split(b"\n")
        self.line = rest[: _LINE_MAX + 1]
        for line in lines:
            if len(line) <= _LINE_MAX and (mark := _MARK.fullmatch(line)):
                with suppress(UnicodeDecodeError):
                    yield mark[1].decode(), mark[2].decode()


class Mark(NamedTuple):
    event: str
    stage: str
    at_s: float
    """When it came, since the epoch."""


class MarkedOutput:
    """Pass ``stdout`` of a command on to the descriptor ``target``, noting its marks by
    ``stages.note``, if possible. ``stdout`` is a terminal if ``target`` is: programs print by lines
    to those alone."""

    def __init__(self, target: int) -> None:
        self._target = target
        source, stdout = os.openpty() if os.isatty(target) else os.pipe()
        self._source = source
        """The end of ``stdout`` that is read here."""
        self.stdout = stdout
        """For the command; open until ``begin``."""
        if os.isatty(self.stdout):
            tty.setraw(self.stdout)  # the bytes are changed by the terminal of ``target``
            size = fcntl.ioctl(target, termios.TIOCGWINSZ, bytes(8))
            fcntl.ioctl(self.stdout, termios.TIOCSWINSZ, size)
        self._marks: SimpleQueue[Mark | None] = SimpleQueue()
        """That are not noted yet; None is their end."""
        self._lost: OSError | None = None
        """Why the rest of the output was not passed on."""
        self._pid = 0
        """The command, when it runs."""
        self._usage: Future[resource.struct_rusage] = Future()
        """Of the command, when it is gone."""
        self._copier = threading.Thread(target=self._copy, daemon=True)
        """Ends when the output does."""
        self._noter = threading.Thread(target=self._note, daemon=True)
        """A mount that does not answer keeps this one alone."""

    def begin(self, pid: int) -> None:
        """The command runs as the process ``pid``, and has ``stdout``, which is closed here."""
        os.close(self.stdout)
        self._pid = pid
        self._copier.start()
        self._noter.start()

    def end(self, usage: resource.struct_rusage) -> None:
        """After the command's end, wait until ``stdout`` is closed and passed on. Raises OSError if
        that fails, except if the reader has closed ``target``."""
        self._usage.set_result(usage)
        self._copier.join()
        self._noter.join(_NOTED_S)
        if self._lost is not None and self._lost.errno != errno.EPIPE:
            raise self._lost

    def _copy(self) -> None:
        marks = Marks()
        try:
            while piece := _read(self._source):
                at_s = time.time()
                self._pass_on(piece)
                for event, stage in marks.found_in(piece):
                    self._marks.put(Mark(event, stage, at_s))
        except OSError as error:
            self._lost = error
        finally:
            os.close(self._source)  # later writers get SIGPIPE
            for event, stage in marks.found_in(b"\n"):
                self._marks.put(Mark(event, stage, time.time()))
            self._marks.put(None)

    def _pass_on(self, piece: bytes) -> None:
        left = memoryview(piece)
        while left:
            try:
                left = left[os.write(self._target, left) :]
            except BlockingIOError:  # another process has set it not to block
                select.select([], [self._target], [])

    def _note(self) -> None:
        directory = os.environ.get(stages.DIRECTORY, "")
        before: dict[str, Spent] = {}
        while mark := self._marks.get():
            now = self._spent(directory) if directory else {}
            if mark.event == "begin":
                before[mark.stage] = now
                stages.note(*mark)
            else:
                stages.note(*mark, stages.since(before.pop(mark.stage, now), now))

    def _spent(self, directory: str) -> Spent:
        """Seconds of the command and its children, so far."""
        if processes := all_below(self._pid):
            return stages.of_others(directory, sum(processes.values()), processes)
        return stages.of_others(directory, stages.processor_s(self._usage.result()), ())


def _read(source: int) -> bytes:
    """b"": all writers have closed it."""
    try:
        return os.read(source, _PIECE)
    except OSError as error:
        if error.errno == errno.EIO:  # a terminal says so
            return b""
        raise
