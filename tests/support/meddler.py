"""What a network may do to two hosts: a relay between them that delays, drops, repeats and reorders
frames.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import trio

from aifs.peers.transport import FRAME, HELLO, PROOF_BYTES

Meddle = Callable[[bytes], Iterable[bytes]]
"""What is passed on for a frame."""


class Meddler:
    """Passes connections to ``port`` of ``host`` on. Who dials ``address`` is connected to it.
    ``meddle`` may raise EOFError: then the connection ends."""

    def __init__(
        self,
        port: int,
        meddle: Meddle = lambda frame: [frame],
        host: str = "127.0.0.1",
        at: str = "127.0.0.1",
    ) -> None:
        """``at``: where it listens."""
        self.target = port
        self._host = host
        self._at = at
        self.delay_s: Callable[[], float] = lambda: 0.0
        """How long each frame is kept, and all behind it."""
        self.meddle = meddle
        self.address = ""
        self.is_open = trio.Event()
        """What was sent passes when this is set."""
        self.is_open.set()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as nursery:
            listeners = await trio.open_tcp_listeners(0, host=self._at)
            self.address = f"{self._at}:{listeners[0].socket.getsockname()[1]}"
            task_status.started()
            await trio.serve_listeners(self._relay, listeners, handler_nursery=nursery)

    async def _relay(self, stream: trio.SocketStream) -> None:
        try:
            other = await trio.open_tcp_stream(self._host, self.target)
        except OSError:
            return
        async with stream, other, trio.open_nursery() as nursery:

            async def pass_on(source: trio.SocketStream, sink: trio.SocketStream) -> None:
                try:
                    await self._pass_on(source, sink)
                except (trio.BrokenResourceError, trio.ClosedResourceError, EOFError):
                    pass
                nursery.cancel_scope.cancel()

            nursery.start_soon(pass_on, stream, other)
            nursery.start_soon(pass_on, other, stream)

    async def _pass_on(self, source: trio.SocketStream, sink: trio.SocketStream) -> None:
        hello = await _read(source, HELLO.size)
        hello += await _read(source, HELLO.unpack(hello)[2])
        await sink.send_all(hello)
        await sink.send_all(await _read(source, PROOF_BYTES))
        while True:
            start = await _read(source, FRAME.size)
            _, _, head, body = FRAME.unpack(start)
            frame = start + await _read(source, head + body)
            await self.is_open.wait()
            if delay_s := self.delay_s():
                await trio.sleep(delay_s)
            for passed in self.meddle(frame):
                await sink.send_all(passed)


@contextmanager
def in_thread(meddler: Meddler) -> Iterator[None]:
    """It runs meanwhile, in a thread of its own."""
    started, scope = threading.Event(), trio.CancelScope()
    tokens: list[trio.lowlevel.TrioToken] = []

    async def run() -> None:
        with scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(meddler.run)
                tokens.append(trio.lowlevel.current_trio_token())
                started.set()

    thread = threading.Thread(target=trio.run, args=(run,))
    thread.start()
    try:
        started.wait()
        yield
    finally:
        tokens[0].run_sync_soon(scope.cancel)
        thread.join()


async def _read(stream: trio.SocketStream, length: int) -> bytes:
    data = b""
    while len(data) < length:
        piece = await stream.receive_some(length - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data
