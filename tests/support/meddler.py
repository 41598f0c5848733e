"""What a network may do to two hosts: a relay between them that delays, drops, repeats and reorders
frames.
"""

from collections.abc import Callable, Iterable

import trio

from aifs.peers.transport import FRAME, HELLO, PROOF_BYTES

Meddle = Callable[[bytes], Iterable[bytes]]
"""What is passed on for a frame."""


class Meddler:
    """Passes connections to ``port`` on. Who dials ``address`` is connected to it."""

    def __init__(self, port: int, meddle: Meddle = lambda frame: [frame]) -> None:
        self.target = port
        self.meddle = meddle
        self.address = ""
        self.is_open = trio.Event()
        """What was sent passes when this is set."""
        self.is_open.set()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as nursery:
            listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
            self.address = f"127.0.0.1:{listeners[0].socket.getsockname()[1]}"
            task_status.started()
            await trio.serve_listeners(self._relay, listeners, handler_nursery=nursery)

    async def _relay(self, stream: trio.SocketStream) -> None:
        try:
            other = await trio.open_tcp_stream("127.0.0.1", self.target)
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
            for passed in self.meddle(frame):
                await sink.send_all(passed)


async def _read(stream: trio.SocketStream, length: int) -> bytes:
    data = b""
    while len(data) < length:
        piece = await stream.receive_some(length - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data
