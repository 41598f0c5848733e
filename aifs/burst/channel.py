"""Messages between the daemon and its movers over a socket pair: pickled tuples of plain values,
each after its length in 8 bytes."""

import pickle
import socket
from typing import Any

import trio

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
