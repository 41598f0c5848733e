"""A mover process: carries out the daemon's orders, with servers that it opens itself.

It gets a socket's number, then what it needs (``Start``), and ends with the socket. It may be
killed at any time: nothing counts before the daemon has recorded it. It keeps no descriptors and no
bytes between pieces of work.

Messages from the daemon: ``start``, ``work``, ``go`` (the answer to ``leave``), ``stop``. To it:
``ready`` (to work), ``done``, ``leave`` (may a piece be moved?), ``ended`` (so many pieces have),
``damage``, ``health``, ``log``, ``retire`` (start another process when this one has no work left).
They are pickled tuples of plain values over a socket pair, each after its length in 8 bytes.
"""

import logging
import os
import pickle
import signal
import socket
import sys
import traceback
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NamedTuple

import trio

from aifs.burst.making import MakingTools
from aifs.burst.transfer import Limiter, Mover
from aifs.core.budget import Budget
from aifs.core.libc import PR_SET_PDEATHSIG, library
from aifs.core.tasks import first_error
from aifs.data.patience import giving_up
from aifs.data.reading.buffers import BudgetedBuffers
from aifs.data.server import NOTHING_MOVED, Moved
from aifs.data.servers import Servers
from aifs.layout.placement import LOST
from aifs.layout.striped import Striped

_AT_ONCE = 256 << 10
_LENGTH = 8


class Channel:
    """One end of the socket. Used from one trio thread."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self._socket = trio.socket.from_stdlib_socket(end)
        self._unsent = bytearray()
        self._more = trio.Event()
        """Set when something is unsent."""
        self._received = bytearray()
        """The beginning of a message."""

    def send(self, *message: Any) -> None:
        """Send in the order of calling, also to a process that has ended. Does not block."""
        content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        data = len(content).to_bytes(_LENGTH, "little") + content
        sent = 0
        if not self._unsent:
            try:
                sent = self._end.send(data)
            except BlockingIOError:
                pass
            except OSError:
                return  # the reading task finds out
        if sent < len(data):
            self._unsent += data[sent:]
            self._more.set()

    async def run(self) -> None:
        """Send what the socket does not take at once, until cancelled."""
        while True:
            await self._more.wait()
            while self._unsent:
                try:
                    del self._unsent[: await self._socket.send(self._unsent[:_AT_ONCE])]
                except OSError:
                    self._unsent.clear()
            self._more = trio.Event()

    async def receive(self) -> list[tuple[Any, ...]]:
        """The next messages, in order; none when the other end has been closed."""
        received = self._received
        while True:
            try:
                data = await self._socket.recv(_AT_ONCE)
            except OSError:
                data = b""
            if not data:
                return []
            received += data
            messages, start = [], 0
            while len(received) >= start + _LENGTH:
                begin = start + _LENGTH
                end = begin + int.from_bytes(received[start:begin], "little")
                if len(received) < end:
                    break
                with memoryview(received)[begin:end] as content:
                    messages.append(pickle.loads(content))
                start = end
            del received[:start]
            if messages:
                return messages

    def close(self) -> None:
        self._socket.close()


_LOOK_S = 0.5


class Start(NamedTuple):
    """What a mover has to know of the store."""

    store: str
    """Its uuid."""
    table: tuple[tuple[int, str, str], ...]
    """Of each server or burst directory: id, address, and why it is left alone, or ''."""
    threads: int  # see Servers
    patience_s: float  # the same
    hedge_s: float  # the same
    memory: int
    """Bytes for all that is moved at a time."""
    log_level: int
    """What is less is not logged."""


class Order(NamedTuple):
    """How a piece of work is to be done."""

    io_priority: str
    """See core.files."""
    verify: bool
    """See MakingTools."""
    gives_up: bool
    """Whether calls to servers are given up; see data/patience."""
    is_limited: bool
    """Whether bytes that a piece asks for itself must be asked for."""
    is_free: bool
    """Whether the first piece need not be asked for."""


class _AskingMover(Mover):
    """Moves pieces when the daemon lets it."""

    def __init__(self, child: "_Child", number: int, order: Order) -> None:
        buffers = child.buffers
        super().__init__(child.servers.budget, Limiter(0), order.io_priority, buffers=buffers)
        self.ended = 0
        """Pieces that have ended, and that the daemon has not been told of."""
        self.is_cancelled = False
        """The work is not wanted any more."""
        self._child = child
        self._number = number
        self._is_limited = order.is_limited
        self._may_begin = order.is_free
        self._told_bytes = 0
        """Of ``moved_bytes``."""
        self._asking = 0
        """Questions that have no answer yet."""

    async def begin(self, length: int) -> None:
        if self._may_begin:
            self._may_begin = False
        else:
            await self._ask(length, True)

    def end(self, moved: int) -> None:
        self.ended += 1
        self.moved_bytes += moved
        if self._asking:  # the answer may wait for this
            self._child.channel.send("ended", self._number, *self.tell())

    async def take(self, length: int) -> None:
        if self._is_limited:
            await self._ask(length, False)

    async def _ask(self, length: int, is_piece: bool) -> None:
        self._asking += 1
        try:
            if not await self._child.ask(self._number, length, is_piece, *self.tell()):
                self.is_cancelled = True
        finally:
            self._asking -= 1

    def tell(self) -> tuple[int, int]:
        """What the daemon has not been told: pieces that have ended, and the bytes of them."""
        news = self.ended, self.moved_bytes - self._told_bytes
        self.ended, self._told_bytes = 0, self.moved_bytes
        return news


class _Child:
    """Used from one trio thread."""

    def __init__(self, channel: Channel, start: Start) -> None:
        self.channel = channel
        table = {number: address for number, address, _ in start.table}
        self.servers = Servers(
            table,
            start.store,
            threads=start.threads,
            budget=Budget(start.memory),
            patience_s=start.patience_s,
            hedge_s=start.hedge_s,
        )
        self.buffers = BudgetedBuffers(self.servers.budget)
        self._jobs: dict[int, trio.CancelScope] = {}
        """By number, what stops a piece of work."""
        self._asking: dict[int, tuple[trio.Event, list[bool]]] = {}
        """By number of the question, what is set when it is answered, and the answer."""
        self._questions = 0
        """How many have been asked."""
        self._told: dict[int, tuple[int, bool]] = {}
        """Of servers: the failures that the daemon knows of, and whether it hangs."""
        self._moved: dict[int, Moved] = {}
        """Of servers, what the daemon knows to have been moved."""
        for number, _, why in start.table:
            self.servers[number].storage.share()
            if why:
                self.servers.classify(number, LOST, "", None)  # so it is not looked at
                self.servers[number].absent = why
        wrong = self.servers.identify()
        for number, why in wrong.items():
            self.servers[number].absent = why
        if wrong:
            channel.send("retire")

    async def serve(self, messages: list[tuple[Any, ...]]) -> None:
        """Until the daemon closes the socket. ``messages`` are the first ones."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.channel.run)
            nursery.start_soon(self._watch)
            while messages := messages or await self.channel.receive():
                following, messages = messages, []
                for kind, *args in following:
                    if kind == "work":
                        scope = self._jobs[args[0]] = trio.CancelScope()  # it may stop next
                        nursery.start_soon(self._work, scope, *args)
                    elif kind == "go":
                        self._go(*args)
                    elif args[0] in self._jobs:  # stop
                        self._jobs[args[0]].cancel()
            nursery.cancel_scope.cancel()

    # --- work ---

    async def _work(self, scope: trio.CancelScope, number: int, work: bytes, order: Order) -> None:
        mover = _AskingMover(self, number, order)

        def on_damage(layout: Striped, oid: int, ino: int, column: int) -> None:
            self.channel.send("damage", number, layout, oid, ino, column)

        tools = MakingTools(self.servers, mover, None, order.verify, on_damage)
        answer, error, trace = b"", None, ""
        patience: AbstractContextManager[None] = giving_up() if order.gives_up else nullcontext()
        with scope, patience:
            try:
                function, value = pickle.loads(work)
                result = await function(value, tools, lambda: mover.is_cancelled)
                answer = pickle.dumps(result, pickle.HIGHEST_PROTOCOL)
            except Exception as raised:  # noqa: BLE001 (raised again in the daemon)
                error = first_error(raised)
                trace = "".join(traceback.format_exception(raised))
        del self._jobs[number]
        self._tell_health()
        answer = answer if error is None else _pickled(error)
        news = (*mover.tell(), self._tell_moved())
        self.channel.send("done", number, answer, error is not None, trace, *news)

    async def ask(self, number: int, length: int, is_piece: bool, ended: int, moved: int) -> bool:
        """Whether work may go on, with ``length`` bytes; waits for that."""
        self._tell_health()
        self._questions += 1
        question, answered, answer = self._questions, trio.Event(), list[bool]()
        self._asking[question] = answered, answer
        try:
            self.channel.send("leave", number, question, length, is_piece, ended, moved)
            await answered.wait()
        finally:
            del self._asking[question]
        return answer[0]

    def _go(self, question: int, may: bool) -> None:
        if question in self._asking:
            event, answer = self._asking[question]
            answer.append(may)
            event.set()

    # --- what is said of servers ---

    async def _watch(self) -> None:
        while True:
            await trio.sleep(_LOOK_S)
            self._tell_health()

    def _tell_health(self) -> None:
        for server in self.servers.values():
            health, patience = server.health, server.workers.patience
            state = health.noted, patience.hangs
            if state != self._told.get(server.id, (0, False)):
                self._told[server.id] = state
                failing = tuple(health.failing)
                hanging = patience.given_up if patience.hangs else None
                self.channel.send("health", server.id, failing, health.last_error, hanging)

    def _tell_moved(self) -> dict[int, Moved]:
        moved = {server.id: server.moved for server in self.servers.values()}
        before, self._moved = self._moved, moved
        return {
            number: found.since(before.get(number, NOTHING_MOVED))
            for number, found in moved.items()
            if found != before.get(number, NOTHING_MOVED)
        }


def _pickled(error: BaseException) -> bytes:
    try:
        content = pickle.dumps(error, pickle.HIGHEST_PROTOCOL)
        pickle.loads(content)
    except Exception:  # noqa: BLE001 (it is told in words)
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return content


class _Handler(logging.Handler):
    """Has the daemon log it. Used from any thread."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel
        self._token = trio.lowlevel.current_trio_token()

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._channel.send, "log", record.name, record.levelno, text)


async def _serve(end: socket.socket) -> None:
    channel = Channel(end)
    messages = await channel.receive()
    if not messages:
        return
    [(_, start), *messages] = messages
    root = logging.getLogger()
    root.addHandler(_Handler(channel))
    root.setLevel(start.log_level)
    # What the daemon is told of servers it says itself.
    logging.getLogger("aifs.data.health").setLevel(logging.CRITICAL)
    child = _Child(channel, start)
    channel.send("ready")
    await child.serve(messages)


def main() -> None:
    number, parent = map(int, sys.argv[1:])
    library().prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return  # it has died before
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the daemon, which ends us
    trio.run(_serve, socket.socket(fileno=number))
    # Threads may be stuck with a server that hangs; nothing is left to be done in order.
    os._exit(0)


if __name__ == "__main__":
    main()
