"""What programs ask for by ``user.aifs.start``, set on the directory of a job:

    record=RUN    record what is touched until ``stop``, for WINDOW_S at most: that becomes the
                  record RUN in the directory
    stop          end it; a job that has asked several times says it as often

Nobody waits for any of this, and nothing of it makes a job fail: what cannot be done is left out,
and ``notes`` of the JSON that the hint tells says why.
"""

import json
import re
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import trio

from aifs.core.errors import AccessDenied, Busy, FsError, Invalid, NotADirectory, NotFound
from aifs.core.log import logger
from aifs.core.start_record import KEPT, STORED_MAX, SUFFIX, StartRecord, decode, encode
from aifs.core.upkeep import NEVER_S, Work
from aifs.files import rights
from aifs.files.asks import DIRECTORY, Hint
from aifs.files.file_io import FileIO
from aifs.files.permissions import READ, asker_of, require_may
from aifs.files.services import Services
from aifs.files.types import CallerLike
from aifs.meta import namespace
from aifs.meta.askers import Asker
from aifs.meta.listing import entries_of
from aifs.meta.records import Inode
from aifs.reads.recording import StartRecording, StartRecordings

_log = logger(__name__)

WINDOW_S = 120.0
"""How long a start is recorded at most."""

_STARTED = b"start "
"""Before the directory of a start that is recorded: the key of a note."""

_STARTS_MAX = 64
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:+-]{0,127}")
_LOST = "the daemon has died meanwhile: what was touched before is left out"
_BLIND = "the system does not tell what is in memory (cachestat(2)): files count as a whole"


Put = Callable[[int, bytes, bytes, bytes, CallerLike], Awaitable[None]]
"""Writes a file of a directory under a temporary name, and gives it its name when it is whole."""


class _Start:
    """One job that starts."""

    def __init__(self, directory: int, caller: Asker, run: str) -> None:
        self.directory = directory
        self.caller = caller
        self.run = run
        self.recording = StartRecording(directory, caller.uid)
        self.state = "recording"  # then ending, then ended
        self.users = 1  # that have begun it and not stopped it yet
        self.began_s = time.time()  # since the epoch
        self.ends_s = trio.current_time() + WINDOW_S  # by trio's clock, at the latest
        self.files = self.bytes = 0  # what it has touched, once that is known
        self.notes: list[str] = []  # what was left out, and why

    def note(self) -> bytes:
        """For the daemon that follows."""
        uid, gids, _, umask = self.caller
        return json.dumps([self.run, self.users, self.began_s, uid, gids, umask]).encode()

    def tell(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "state": self.state,
            "files": self.files,
            "bytes": self.bytes,
            "notes": self.notes,
        }


class Starts:
    """Used from one trio thread."""

    def __init__(
        self,
        services: Services,
        io: FileIO,
        put: Put,
        unlink: Callable[[int, bytes], Awaitable[None]],
        recordings: StartRecordings,
    ) -> None:
        """``unlink``: the name of a file in a directory."""
        self._engine = services.engine
        self._io = io
        self._upkeep = services.upkeep
        self._kernel = services.kernel
        self._kept = services.kernel.kept
        self._put = put
        self._unlink = unlink
        self._recordings = recordings
        self._starts: dict[int, _Start] = {}
        """By directory, the newest one, the oldest first."""
        self._ending: deque[_Start] = deque()
        """Those whose records are to be written."""

    # --- what is asked for ---

    async def order(self, ino: int, text: str, caller: CallerLike) -> None:
        """See above. Raises Invalid, NotADirectory; Busy if too many jobs start."""
        inode = await self._engine.view(namespace.get_inode, ino)
        if not inode.is_dir:
            raise NotADirectory()
        verb, _, run = text.partition("=")
        if text == "stop":
            self._stop(ino)
        elif verb == "record" and _RUN.fullmatch(run):
            self._begin(ino, asker_of(caller)._replace(umask=caller.umask), run)
        else:
            raise Invalid(f"{text!r} is neither stop nor record=RUN, with a name such as 2026-1")

    def tell(self, ino: int) -> dict[str, Any]:
        """How the start of the job with this directory goes; empty: there was none."""
        start = self._starts.get(ino)
        return {} if start is None else start.tell()

    HINTS = (
        Hint(
            "start",
            DIRECTORY,
            "which start of a job is recorded in it, and how it goes: record=RUN, stop",
            rights.lister,
            rights.writer,
            get=lambda starts, ask: starts.tell(ask.ino),
            set=lambda starts, ask: starts.order(ask.ino, ask.text, ask.caller),
        ),
    )

    def _begin(self, ino: int, caller: Asker, run: str) -> None:
        start = self._starts.get(ino)
        if start is not None and start.state == "recording":
            if (start.run, start.caller.uid) == (run, caller.uid):
                start.users += 1
                self._kept.note(_key(ino), start.note())
                return
            self._end(start)
        self._starts.pop(ino, None)
        if len(self._starts) >= _STARTS_MAX:
            ended = [it for it, start in self._starts.items() if start.state == "ended"]
            if not ended:
                raise Busy(f"{_STARTS_MAX} jobs start already")
            del self._starts[ended[0]]
        self._record_from_now(_Start(ino, caller, run))

    def _record_from_now(self, start: _Start) -> None:
        self._starts[start.directory] = start
        self._kept.note(_key(start.directory), start.note())
        self._recordings.add(start.recording)
        self._upkeep.at(Work.STARTS, start.ends_s)

    def go_on(self) -> None:
        """Record the starts on that another daemon recorded when it died. Does not block."""
        for key, note in list(self._kept.notes.items()):
            if key.startswith(_STARTED):
                run, users, began_s, uid, gids, umask = json.loads(note)
                ino = int(key.removeprefix(_STARTED))
                start = _Start(ino, Asker(uid, tuple(gids), umask=umask), run)
                start.users, start.began_s = users, began_s
                start.ends_s -= min(max(0.0, time.time() - began_s), WINDOW_S)
                start.notes.append(_LOST)
                self._record_from_now(start)
                if not users:
                    self._end(start)

    def _stop(self, ino: int) -> None:
        start = self._starts.get(ino)
        if start is not None and start.state == "recording":
            start.users -= 1
            self._kept.note(_key(ino), start.note())
            if not start.users:
                self._end(start)

    def _end(self, start: _Start) -> None:
        start.state = "ending"
        self._recordings.remove(start.recording)
        self._ending.append(start)
        self._upkeep.wake(Work.STARTS)

    # --- in the background ---

    async def work(self) -> float:
        """Write records of starts that are over; see Upkeep."""
        now_s, due_s = trio.current_time(), []
        for start in self._starts.values():
            if start.state == "recording" and start.ends_s <= now_s:
                self._end(start)
            if start.state == "recording":
                due_s.append(start.ends_s)
        while self._ending:
            await self._record(self._ending.popleft())
        return max(0.0, min(due_s) - trio.current_time()) if due_s else NEVER_S

    async def _record(self, start: _Start) -> None:
        try:
            touched = await start.recording.tell(self._engine, self._io)
            # What has been in memory since, such as what was prefetched, is not seen to be touched.
            before = await self._blocks_before(start)
            touched = [file.of(file.blocks | before.get(file[1:4], set())) for file in touched]
            touched = [file for file in touched if file.runs]
            if start.recording.is_blind:
                start.notes.append(_BLIND)
            start.files, start.bytes = len(touched), sum(file.bytes for file in touched)
            took_s = time.time() - start.began_s
            record = StartRecord(
                start.run, socket.gethostname(), start.began_s, took_s, tuple(touched)
            )
            if touched or _LOST not in start.notes:
                await self._write(start, await trio.to_thread.run_sync(encode, record))
        except FsError as error:
            start.notes.append(f"no record was written: {error}")
            _log.info("the start %s was not recorded: %s", start.run, error)
        finally:
            start.state = "ended"
            if self._starts.get(start.directory) is start:
                self._kept.note(_key(start.directory), b"")

    async def _blocks_before(self, start: _Start) -> dict[tuple[int, int, int], set[int]]:
        """The newest record's blocks of files unchanged since. Raises FsError."""
        for _, inode in await self._list_records(start.directory):
            with suppress(Invalid, AccessDenied):
                require_may(inode, start.caller, READ)
                if inode.size <= STORED_MAX:
                    data = await self._io.read_whole(inode.ino)
                    record = await self._io.waited_for.call(decode, data)
                    return {file[1:4]: file.blocks for file in record.files}
        return {}

    async def _write(self, start: _Start, data: bytes) -> None:
        """Raises FsError."""
        name = f"{start.run}{SUFFIX}".encode()
        temporary = f".{start.run}.{socket.gethostname()}".encode()  # other hosts may be at it, too
        directory, caller = start.directory, start.caller
        with suppress(NotFound):
            await self._unlink(directory, temporary)  # of a daemon that was killed
        await self._put(directory, temporary, name, data, caller)
        for old, inode in (await self._list_records(directory))[KEPT:]:
            if caller.uid in (0, inode.uid):
                await self._unlink(directory, old)
                await self._kernel.forget_names([(directory, old)])

    async def _list_records(self, directory: int) -> list[tuple[bytes, Inode]]:
        """Newest first."""
        found = [
            (name, inode)
            async for name, inode in entries_of(self._engine, directory)
            if name.endswith(SUFFIX.encode()) and not name.startswith(b".") and inode.is_file
        ]
        return sorted(found, key=lambda each: each[1].mtime_ns, reverse=True)


def _key(directory: int) -> bytes:
    return _STARTED + b"%d" % directory
