"""One authenticated connection between two hosts: the handshake, frames, requests with answers.

A connection is one of TCP. Both ends prove that they have the secret, and say which store, host and
session they are of; strangers get no further. Bytes are neither encrypted nor signed afterwards:
the network between hosts is trusted not to change them.

Handshake: the dialing host sends a *hello*, the dialed one another; then the dialing host sends its
proof, and gets the other's. A proof is HMAC-SHA256, with the secret as its key, of one byte
(which host proves) and of both hellos. A hello is

    magic     8 bytes, "AIFSHOST"
    version   u16
    length    u16, of what follows: the JSON object {store, name, session, to, nonce}

with ``to`` the name of the host that is dialed, and ``nonce`` 32 random bytes as hexadecimal
digits. A host that gets a wrong proof, or is not the one that was dialed, closes the connection;
zeros instead of a proof say that the other one's was wrong.

After it both ends send *frames*, all numbers little-endian:

    kind      u8: REQUEST, ANSWER, ERROR, PUSH, CANCEL, ALIVE
    number    u64: of the request that this is, answers or cancels; 0 of others
    head      u32: length of the head, at most MAX_HEAD
    body      u32: length of the body, at most MAX_BODY

and then head (JSON: ``[name, arguments]`` of REQUEST and PUSH, the value of ANSWER, ``[class,
text]`` of ERROR, else empty) and body. Frames of one end arrive in the order in which it has sent
them. What is not of this form ends the connection.

Each end sends something at least each ``ALIVE_S``; a host that has heard nothing for ``SILENCE_S``
ends the connection: the other one is stopped, cut off or dead. All requests that are under way then
fail with Unavailable: whether they have been carried out is not known. None is carried out twice.
"""

import hmac
import json
import logging
import os
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, NamedTuple

import trio

from aifs.core import errors, files
from aifs.core.errors import AifsError, Busy, NotSupported, Unavailable, UserError

log = logging.getLogger(__name__)

REQUEST, ANSWER, ERROR, PUSH, CANCEL, ALIVE = range(1, 7)
FRAME = struct.Struct("<BQII")
HELLO = struct.Struct("<8sHH")
MAGIC, VERSION = b"AIFSHOST", 1
MAX_HELLO = 4096
PROOF_BYTES = 32
_NAME_SAID = 64  # letters of a name that a stranger says, in a message
MAX_HEAD = 64 << 10
MAX_BODY = 16 << 20
MAX_REQUESTS = 1024
"""Of the other end that are under way here; more are refused with Overloaded."""
MAX_WAITING = 64 << 20
"""Bytes of bodies of the requests that are under way here; more are refused with Overloaded."""
MAX_UNSENT = 8 << 20
"""Unsent bytes: beyond, requests and answers wait, and pushes are dropped."""

ALIVE_S = 1.0
SILENCE_S = 3.0
"""Less than the 5 s after which a host that reaches nobody stops by itself."""

_READ_AHEAD = 256 << 10
_PIECES = 64  # of one system call

Body = bytes | bytearray | memoryview


class FilePart(NamedTuple):
    """Bytes of a file as an answer's body. The connection closes the descriptor; a shorter file
    ends it."""

    fd: int
    offset: int
    length: int


class Answer(NamedTuple):
    """A service's answer: value (JSON) and bytes; at the asking host, maybe in its own buffer."""

    value: Any = None
    body: Body | FilePart = b""


class Peer(NamedTuple):
    """The identity of a host, for others."""

    store: str
    name: str
    session: int
    """The number of its session; 0: it has none yet."""


Service = Callable[[Peer, Any, Body], Awaitable[Answer]]
"""Called with the asking host, arguments and body. Its AifsError is raised there. Cancelled when
its answer is unwanted, also at the connection's end."""

Listener = Callable[[Peer, Any, Body], None]
"""Called with the pushing host, and message, in order. Does not block."""


class Refused(UserError):
    """The other end is another host, store or version than expected, as the text says."""


class Overloaded(Busy):
    """The other host has too many requests of this one, and has not begun this: ask again."""


async def shake_hands(
    end: trio.SocketStream,
    own: Peer,
    secret: bytes,
    dialed: str | None,
    heard: Callable[[], None] = lambda: None,
) -> Peer:
    """The host at the other end. ``dialed``: by us, or None. ``heard`` is called after its hello,
    which proves nothing. Raises Refused, and OSError or trio's errors when the connection ends."""
    ours = _hello(own, own.name if dialed is None else dialed)
    if dialed is None:
        text = theirs = await _read_hello(end)
        await end.send_all(ours)
        text += ours
    else:
        await end.send_all(ours)
        theirs = await _read_hello(end)
        text = ours + theirs
    other, to = _parse_hello(theirs)
    name = _short(other.name)
    if other.store != own.store:
        raise Refused(f"host {name} is of another store, {_short(other.store)}")
    if dialed is None and to != own.name:
        raise Refused(f"host {name} takes us for host {_short(to)}, and we are {own.name}")
    if dialed is not None and other.name != dialed:
        raise Refused(f"where host {dialed} should be, there is host {name}")
    heard()
    mine = hmac.digest(secret, (b"A" if dialed is None else b"D") + text, "sha256")
    wanted = hmac.digest(secret, (b"D" if dialed is None else b"A") + text, "sha256")
    if dialed is not None:
        await end.send_all(mine)
    is_right = hmac.compare_digest(await _read(end, PROOF_BYTES), wanted)
    if dialed is None:
        await end.send_all(mine if is_right else bytes(PROOF_BYTES))
    if not is_right:
        raise Refused(
            f"host {name} has another secret; all hosts of a store have the same file (meta.secret)"
        )
    return other


def _short(name: str) -> str:
    """A stranger may call itself anything."""
    return name[:_NAME_SAID]


def _hello(own: Peer, to: str) -> bytes:
    fields = {**own._asdict(), "to": to, "nonce": os.urandom(32).hex()}
    content = json.dumps(fields).encode()
    return HELLO.pack(MAGIC, VERSION, len(content)) + content


async def _read_hello(end: trio.SocketStream) -> bytes:
    start = await _read(end, HELLO.size)
    magic, version, length = HELLO.unpack(start)
    if magic != MAGIC or length > MAX_HELLO:
        raise Refused("what is at the other end is no AIFS")
    if version != VERSION:
        raise Refused(f"the AIFS at the other end speaks version {version}, and we {VERSION}")
    return start + await _read(end, length)


def _parse_hello(hello: bytes) -> tuple[Peer, str]:
    """The host of the hello, and its addressee."""
    try:
        fields = json.loads(hello[HELLO.size :])
        store, name, session = fields["store"], fields["name"], fields["session"]
        to, nonce = fields["to"], bytes.fromhex(fields["nonce"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Refused("what is at the other end is no AIFS") from error
    is_right = all(isinstance(text, str) and text.isprintable() for text in (store, name, to))
    if not is_right or type(session) is not int or len(nonce) < 32:
        raise Refused("what is at the other end is no AIFS")
    return Peer(store, name, session), to


async def _read(end: trio.SocketStream, length: int) -> bytes:
    data = b""
    while len(data) < length:
        piece = await end.receive_some(length - len(data))
        if not piece:
            raise ConnectionResetError("the other end has closed the connection")
        data += piece
    return data


class _Asked:
    """A request of ours that is under way."""

    def __init__(self, into: memoryview | None) -> None:
        self.into = into
        self.is_arriving = False
        """The answer is being received, into the buffer of who asks."""
        self.done = trio.Event()
        self.answer = Answer()
        self.error: AifsError | None = None


class PeerLink:
    """One end of a connection, after the handshake, with ``peer``'s ``session``. Used from one trio
    thread."""

    def __init__(
        self,
        stream: trio.SocketStream,
        peer: Peer,
        services: dict[str, Service],
        listeners: dict[str, Listener],
    ) -> None:
        self.peer = peer
        self._services = services
        self._listeners = listeners
        self._socket = _unwrapped(stream)
        """It does not wait."""
        self._unsent: deque[memoryview | FilePart] = deque()
        """What it has not taken yet."""
        self._unsent_bytes = 0
        """Of what is not sent yet, parts of files included."""
        self._more = trio.Event()
        """Set when something is unsent."""
        self._room = trio.Event()
        """Set when no more than MAX_UNSENT is unsent."""
        self._last = 0
        """The number of our last request."""
        self._asked: dict[int, _Asked] = {}
        """Requests of ours, by number."""
        self._heard = 0
        """The number of the last request of the other end."""
        self._serving: dict[int, trio.CancelScope] = {}
        """Requests of the other end, by number."""
        self._waiting_bytes = 0
        """Of the bodies of these."""
        self._received = trio.current_time()
        """When something came last, by trio's clock."""
        self._buffer = bytearray(_READ_AHEAD)
        """What is received goes there first, unless it is large."""
        self._start = self._end = 0
        """Which part of the buffer has been received and not been used."""
        self._scope = trio.CancelScope()
        """Of ``run``."""
        self._fault = ""
        """Why the connection has ended, if it was the other end's mistake."""
        self.is_over = trio.Event()
        """Set when nothing of it is under way any more."""

    def __str__(self) -> str:
        return f"host {self.peer.name}"

    async def run(self) -> str:
        """Send, receive and serve until the end, or ``close``. Returns the other end's fault, or
        ''."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._send)
                    nursery.start_soon(self._watch)
                    await self._receive(nursery)
                    nursery.cancel_scope.cancel()
        finally:
            self.is_over.set()
            self._socket.close()
            for piece in self._unsent:
                _drop(piece)
            self._unsent.clear()
            self._room.set()
            for asked in self._asked.values():
                asked.error = asked.error or Unavailable(f"the connection to {self} has ended")
                asked.done.set()
        return self._fault

    def close(self) -> None:
        self._scope.cancel()

    async def request(
        self, name: str, arguments: Any = None, body: Body = b"", into: memoryview | None = None
    ) -> Answer:
        """The answer of the other host's service ``name``, its bytes ``into`` a buffer if they fit.
        Raises its errors; Unavailable if the connection ends before: it may have been carried
        out."""
        while self._unsent_bytes > MAX_UNSENT and not self.is_over.is_set():
            await self._room.wait()
        if self.is_over.is_set():
            raise Unavailable(f"the connection to {self} has ended")
        self._last = number = self._last + 1
        asked = self._asked[number] = _Asked(into)
        try:
            self._queue(REQUEST, number, _json([name, arguments]), body)
            await asked.done.wait()
        except trio.Cancelled:
            self._queue(CANCEL, number)
            if asked.is_arriving:  # the asking task must have its buffer for itself again
                with trio.CancelScope(shield=True):
                    await asked.done.wait()
            raise
        finally:
            del self._asked[number]
        if asked.error is not None:
            raise asked.error
        return asked.answer

    def push(self, head: bytes, body: Body) -> None:
        """Tell the other end, if possible. ``head``: a frame's. Does not block."""
        if self._unsent_bytes <= MAX_UNSENT:
            self._queue(PUSH, 0, head, body)

    def _queue(
        self, kind: int, number: int, head: bytes = b"", body: Body | FilePart = b""
    ) -> None:
        """Send a frame behind all others. Does not block."""
        length = body.length if isinstance(body, FilePart) else len(body)
        if len(head) > MAX_HEAD or length > MAX_BODY:
            _drop(body)
            raise ValueError(f"a frame of {len(head)} and {length} bytes")
        if self.is_over.is_set():
            _drop(body)
            return
        was_idle = not self._unsent
        self._unsent.append(memoryview(FRAME.pack(kind, number, len(head), length) + head))
        if length:
            self._unsent.append(body if isinstance(body, FilePart) else memoryview(body))
        else:
            _drop(body)
        self._unsent_bytes += FRAME.size + len(head) + length
        if was_idle:  # else the sending task comes to it
            with suppress(OSError):  # the receiving task finds out
                self._send_now()
        if self._unsent:
            self._more.set()

    def _send_now(self) -> bool:
        """Send what the socket takes, up to a file's part. Whether it took all of that."""
        unsent = self._unsent
        while unsent and not isinstance(unsent[0], FilePart):
            pieces: list[memoryview] = []
            for piece in unsent:
                if isinstance(piece, FilePart) or len(pieces) == _PIECES:
                    break
                pieces.append(piece)
            try:
                sent = self._socket.sendmsg(pieces)
            except BlockingIOError:
                return False
            self._count_sent(sent)
            while sent:
                piece = unsent[0]
                assert not isinstance(piece, FilePart)
                if sent < len(piece):
                    unsent[0] = piece[sent:]
                    break
                sent -= len(piece)
                unsent.popleft()
        return True

    def _count_sent(self, length: int) -> None:
        was_full = self._unsent_bytes > MAX_UNSENT
        self._unsent_bytes -= length
        if was_full and self._unsent_bytes <= MAX_UNSENT:
            self._room.set()
            self._room = trio.Event()

    async def _send(self) -> None:
        """Send the rest, and a sign of life now and then."""
        while True:
            self._more = trio.Event()
            if not self._unsent:
                with trio.move_on_after(ALIVE_S):
                    await self._more.wait()
            if not self._unsent:
                self._queue(ALIVE, 0)
            try:
                while self._unsent:
                    if not self._send_now():
                        await trio.lowlevel.wait_writable(self._socket)
                    elif self._unsent:
                        await self._send_part()
            except OSError:
                self._scope.cancel()
                await trio.sleep_forever()

    async def _send_part(self) -> None:
        """Send the next part of a file. Raises OSError."""
        part = self._unsent[0]
        assert isinstance(part, FilePart)
        sent = await trio.to_thread.run_sync(
            files.send_range, self._socket.fileno(), part.fd, part.offset, part.length
        )
        self._count_sent(sent)
        if sent < part.length:
            self._unsent[0] = FilePart(part.fd, part.offset + sent, part.length - sent)
            await trio.lowlevel.wait_writable(self._socket)
        else:
            self._unsent.popleft()
            _drop(part)

    async def _watch(self) -> None:
        """End the connection after long silence."""
        while (silent_s := trio.current_time() - self._received) < SILENCE_S:
            await trio.sleep(SILENCE_S - silent_s)
        log.info("peers: nothing from %s for %g s; its connection is ended", self, SILENCE_S)
        self._scope.cancel()

    async def _receive(self, nursery: trio.Nursery) -> None:
        """Take frames until there are no more."""
        try:
            while True:
                start = await self._bytes(FRAME.size)
                kind, number, head_length, length = FRAME.unpack(start)
                if head_length > MAX_HEAD or length > MAX_BODY:
                    raise Refused(f"{self} sends a frame of {head_length} and {length} bytes")
                head = await self._bytes(head_length)
                if kind == REQUEST:
                    await self._serve(nursery, number, head, length)
                elif kind in (ANSWER, ERROR):
                    await self._take_answer(kind, number, head, length)
                elif kind == PUSH:
                    self._hear(head, await self._bytes(length))
                elif kind == CANCEL:
                    await self._bytes(length)
                    if number in self._serving:
                        self._serving[number].cancel()
                elif kind == ALIVE:
                    await self._bytes(length)
                else:
                    raise Refused(f"{self} sends a frame of the unknown kind {kind}")
        except Refused as error:
            self._fault = str(error)
        except (EOFError, OSError):
            pass

    async def _bytes(self, length: int) -> bytearray:
        """The next bytes. Raises EOFError, OSError."""
        have = self._end - self._start
        if length <= have:
            self._start += length
            return self._buffer[self._start - length : self._start]
        data = bytearray(length)
        await self._fill(memoryview(data))
        return data

    async def _fill(self, into: memoryview) -> None:
        """Receive the next bytes into a buffer, all of it."""
        while into:
            if self._start < self._end:
                count = min(self._end - self._start, len(into))
                with memoryview(self._buffer) as buffer:
                    into[:count] = buffer[self._start : self._start + count]
                self._start += count
            elif len(into) >= _READ_AHEAD:
                count = await self._receive_into(into)
            else:
                with memoryview(self._buffer) as buffer:
                    self._end = await self._receive_into(buffer)
                self._start = count = 0
            into = into[count:]

    async def _receive_into(self, buffer: memoryview) -> int:
        await trio.lowlevel.checkpoint()
        while True:
            try:
                count = self._socket.recv_into(buffer)
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self._socket)
                continue
            if not count:
                raise EOFError
            self._received = trio.current_time()
            return count

    async def _serve(
        self, nursery: trio.Nursery, number: int, head: bytearray, length: int
    ) -> None:
        """Have a request of the other end carried out."""
        name, arguments = _named(head, self)
        body = await self._bytes(length)
        if number <= self._heard:
            return  # it has been carried out, or is
        self._heard = number
        if len(self._serving) >= MAX_REQUESTS or self._waiting_bytes + length > MAX_WAITING:
            self._answer_error(number, Overloaded(f"too many requests of {self} are under way"))
        elif name not in self._services:
            self._answer_error(number, NotSupported(f"no host answers {name!r}"))
        else:
            scope = self._serving[number] = trio.CancelScope()
            self._waiting_bytes += length
            nursery.start_soon(self._carry_out, scope, number, name, arguments, body)

    async def _carry_out(
        self, scope: trio.CancelScope, number: int, name: str, arguments: Any, body: bytearray
    ) -> None:
        answer = None
        try:
            with scope:
                answer = await self._services[name](self.peer, arguments, body)
                while self._unsent_bytes > MAX_UNSENT:
                    await self._room.wait()
                value, content = answer
                head = _json(value)
                answer = None  # the frame has its file now
                self._queue(ANSWER, number, head, content)
        except AifsError as error:
            self._answer_error(number, error)
        except Exception as error:
            log.exception("peers: request %s of %s", name, self)
            fault = f"an unexpected {type(error).__name__} at the host that was asked for {name}"
            self._answer_error(number, Unavailable(fault))
        finally:
            if answer is not None:
                _drop(answer.body)
            self._waiting_bytes -= len(body)
            del self._serving[number]

    def _answer_error(self, number: int, error: AifsError) -> None:
        kinds = type(error).__mro__
        name = next(
            kind.__name__
            for kind in kinds
            if kind is Overloaded or kind.__module__ == errors.__name__
        )
        self._queue(ERROR, number, _json([name, str(error)[: MAX_HEAD >> 4]]))

    async def _take_answer(self, kind: int, number: int, head: bytearray, length: int) -> None:
        asked = self._asked.get(number)
        if asked is None or asked.done.is_set():  # the asking task has gone
            await self._bytes(length)
            return
        body: Body
        if asked.into is not None and kind == ANSWER and 0 < length <= len(asked.into):
            asked.is_arriving = True
            body = asked.into[:length]
            await self._fill(body)
        else:
            body = await self._bytes(length)
        value = _parsed(head, self)
        if kind == ANSWER:
            asked.answer = Answer(value, body)
        else:
            asked.error = _error_of(value)
        asked.done.set()

    def _hear(self, head: bytearray, body: bytearray) -> None:
        name, arguments = _named(head, self)
        listener = self._listeners.get(name)
        if listener is None:
            return  # a newer version tells more
        try:
            listener(self.peer, arguments, body)
        except Exception:
            log.exception("peers: what %s has pushed, %s", self, name)


def head_of(name: str, arguments: Any) -> bytes:
    """The head of a frame that is pushed: made once for all hosts."""
    return _json([name, arguments])


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _parsed(head: bytearray, link: PeerLink) -> Any:
    try:
        return json.loads(head) if head else None
    except (ValueError, RecursionError):
        raise Refused(f"{link} sends a frame whose head is no JSON") from None


def _named(head: bytearray, link: PeerLink) -> tuple[str, Any]:
    value = _parsed(head, link)
    if not isinstance(value, list) or len(value) != 2 or not isinstance(value[0], str):
        raise Refused(f"{link} sends a frame that names no service")
    return value[0], value[1]


def _error_of(value: Any) -> AifsError:
    """The error that another host has raised."""
    name, text = value if isinstance(value, list) and len(value) == 2 else ("", str(value))
    kind = Overloaded if name == Overloaded.__name__ else getattr(errors, str(name), None)
    if not isinstance(kind, type) or not issubclass(kind, AifsError):
        kind = Unavailable
    return kind(text)


def _drop(piece: object) -> None:
    if isinstance(piece, FilePart):
        os.close(piece.fd)


def _unwrapped(stream: trio.SocketStream) -> socket.socket:
    """A stream's socket, for us alone."""
    own = socket.socket(fileno=stream.socket.detach())
    own.setblocking(False)
    own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return own
