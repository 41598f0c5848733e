"""The small HTTP server that shows a mount: h11 speaks the protocol, trio the network.

It never stops or slows the mount. A connection is one request, has ``TIMEOUT_S`` for it, and there
are at most ``CONNECTIONS`` of them: for more, one of the address (of the user, at a socket) that
has most gives way (core/secret.py). Faults are logged once.

A client on a socket of this machine gets the answer of ``aifs status`` for its user. A client on
ADDRESS:PORT gets the answer for any user, or, with the secret, the one for root.

    GET /              the page: page.html
    GET /metrics       Prometheus's text format, or OpenMetrics if the client accepts that
    GET /status.json   the output of ``aifs status --json``
    GET /top.json      the users of the mount, for those who may trace: by=process, user, path,
                       operation; since=N, the ``next`` of the answer before, else from now on
    GET /healthz       200 and "ok", or 503 and a line for each thing that is wrong
"""

import hmac
import ipaddress
import json
import os
import socket
import stat
import struct
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import h11
import trio

from aifs.core import files
from aifs.core.errors import AccessDenied, AifsError
from aifs.core.kinds import split_endpoint
from aifs.core.log import logger
from aifs.core.secret import Stranger, Strangers, read_secret, source_of
from aifs.watch import usage
from aifs.watch.figures import CONTENT_TYPE, OPEN_METRICS, expose, problems
from aifs.watch.usage import Usage

_log = logger(__name__)

CONNECTIONS = 64
TIMEOUT_S = 10.0
USERS_MAX = 32
"""How many users of the mount are told, at most."""
_HEAD_MAX = 16 << 10
_BACKLOG = 128
_PEER = struct.Struct("=iII")  # pid, uid, gid, as SO_PEERCRED tells
_NOBODY = 65534
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; frame-ancestors 'none'"
)
_HEADERS = [
    ("Content-Security-Policy", _POLICY),
    ("Referrer-Policy", "no-referrer"),
    ("Cache-Control", "no-store"),
    ("Connection", "close"),
    ("X-Content-Type-Options", "nosniff"),
]

Tell = Callable[[int], Awaitable[dict[str, Any]]]
"""The status of the mount, for the user with that number."""
Follow = Callable[[int, int | None], Awaitable[tuple[int, list[dict[str, Any]]]]]
"""The records of the trace that a mount tells a user, from a number on, some at a time, and the
number of the first one; None: none, and the number of the next one. Raises AccessDenied."""


class Reply(NamedTuple):
    """An answer of HTTP."""

    status: int
    kind: str
    body: bytes


class WatchServer:
    """Shows a mount at ``listen``: an ADDRESS:PORT, or the path of a socket."""

    def __init__(self, listen: str, secret_file: str, tell: Tell, follow: Follow) -> None:
        self._listen = listen
        self._secret_file = secret_file
        self._secret = b""
        self._tell = tell
        self._follow = follow
        self._summing = trio.CapacityLimiter(1)
        self._strangers = Strangers(CONNECTIONS)
        self._has_failed = False

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; started when it does. Raises nothing: why it cannot serve is
        logged."""
        try:
            if self._secret_file:
                self._secret = read_secret(
                    self._secret_file, "metrics.secret", "write a line of text there"
                ).encode()
            listeners = await self._listeners()
        except (AifsError, OSError) as error:
            _log.warning("nothing is served at metrics.listen %s: %s", self._listen, error)
            return
        _log.info("metrics are served at %s", self._listen)
        task_status.started()
        try:
            await trio.serve_listeners(self._serve, listeners)
        finally:
            if self._is_socket:
                with suppress(OSError):
                    files.unlink(self._listen)

    @property
    def _is_socket(self) -> bool:
        return self._listen.startswith("/")

    async def _listeners(self) -> list[trio.SocketListener]:
        if not self._is_socket:
            host, port = split_endpoint(self._listen)
            return await trio.open_tcp_listeners(port, host=host, backlog=_BACKLOG)
        _remove_stale(self._listen)
        listening = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            await listening.bind(self._listen)
            listening.listen(_BACKLOG)
        except BaseException:
            listening.close()
            raise
        return [trio.SocketListener(listening)]

    async def _serve(self, stream: trio.SocketStream) -> None:
        try:
            source = self._source_of(stream)
        except OSError:  # the other end has gone
            return await trio.aclose_forcefully(stream)
        try:
            with self._strangers.place(source) as asker:
                with trio.move_on_after(TIMEOUT_S):
                    await self._converse(stream, asker)
        except (trio.BrokenResourceError, trio.ClosedResourceError, h11.RemoteProtocolError):
            pass  # the client has gone, or does not speak HTTP
        except Exception:
            if not self._has_failed:
                self._has_failed = True
                _log.exception("a request for metrics failed; others that do are not logged")
        finally:
            await trio.aclose_forcefully(stream)

    def _source_of(self, stream: trio.SocketStream) -> str:
        """Raises OSError if the connection has been reset."""
        if self._is_socket:
            return f"user {_uid_of(stream)}"
        return source_of(stream.socket.getpeername()[0])

    async def _converse(self, stream: trio.SocketStream, asker: Stranger) -> None:
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=_HEAD_MAX)
        while (event := connection.next_event()) is h11.NEED_DATA:
            connection.receive_data(await stream.receive_some())
        if not isinstance(event, h11.Request):
            return
        asker.has_spoken = True
        reply = await self._answer(event, _uid_of(stream) if self._is_socket else _NOBODY)
        headers = [
            *_HEADERS,
            ("Content-Type", reply.kind),
            ("Content-Length", str(len(reply.body))),
        ]
        parts = (
            h11.Response(status_code=reply.status, headers=headers),
            h11.Data(data=b"" if event.method == b"HEAD" else reply.body),
            h11.EndOfMessage(),
        )
        await stream.send_all(b"".join(connection.send(part) or b"" for part in parts))
        await stream.send_eof()
        asker.has_spoken = False  # it has been told
        while await stream.receive_some():  # or what was sent is lost with what was not read
            pass

    async def _answer(self, request: h11.Request, uid: int) -> Reply:
        headers = {bytes(name): bytes(value) for name, value in request.headers}
        path, _, query = request.target.partition(b"?")
        if request.method not in (b"GET", b"HEAD"):
            return _say(405, "only GET is understood")
        if not self._is_socket and not self._secret and not _is_address(headers.get(b"host", b"")):
            return _say(403, "ask by address, such as 127.0.0.1, or as localhost")
        if path == b"/":
            return Reply(200, "text/html; charset=utf-8", _page())
        if path not in (b"/metrics", b"/status.json", b"/top.json", b"/healthz"):
            return _say(404, "there are /, /metrics, /status.json, /top.json and /healthz")
        if self._secret and not self._is_socket:
            said = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
            if not hmac.compare_digest(said, self._secret):
                return _say(401, "send Authorization: Bearer TEXT, as metrics.secret says")
            uid = 0
        if path == b"/top.json":
            return await self._top(dict(parse_qsl(query.decode("ascii", "replace"))), uid)
        status = await self._tell(uid)
        if path == b"/metrics":
            as_open = b"application/openmetrics-text" in headers.get(b"accept", b"")
            kind = OPEN_METRICS if as_open else CONTENT_TYPE
            return Reply(200, kind, expose(status, as_open=as_open).encode())
        if path == b"/status.json":
            return Reply(200, "application/json", json.dumps(status).encode())
        wrong = problems(status)
        return _say(503 if wrong else 200, "\n".join(wrong) or "ok")

    async def _top(self, asked: dict[str, str], uid: int) -> Reply:
        """Sums of the requests since a number until now, the longest first. The mount is traced
        while somebody comes again and again. Nothing is kept between."""
        by, since = asked.get("by", "process"), asked.get("since", "")
        try:
            end, _ = await self._follow(uid, None)
            number = int(since) if since else end
        except AccessDenied as error:
            return _say(403, str(error))
        except ValueError:
            return _say(400, "since is a number")
        if by not in usage.GROUPS or not 0 <= number <= end:
            return _say(400, f"by is one of {', '.join(usage.GROUPS)}; since is at most {end}")
        sums: dict[str, Usage] = {}
        at_s, lost = time.time(), 0
        while number < end:
            first, records = await self._follow(uid, number)
            lost += first - number
            number = first + len(records)
            await trio.to_thread.run_sync(  # it may have to ask for the names of users
                partial(usage.summed, records, by, sums),
                abandon_on_cancel=True,
                limiter=self._summing,
            )
        found = usage.ordered(sums, "time")
        told = {
            "at_s": at_s,
            "next": number,
            "lost": lost,
            by: [{by: key, **one.told()} for key, one in found[:USERS_MAX]],
            "more": len(found[USERS_MAX:]),
        }
        return Reply(200, "application/json", json.dumps(told).encode())


def _say(status: int, text: str) -> Reply:
    return Reply(status, "text/plain; charset=utf-8", f"{text}\n".encode("utf-8", "replace"))


def _page() -> bytes:
    with open(os.path.join(os.path.dirname(__file__), "page.html"), "rb") as file:
        return file.read()


def _is_address(host: bytes) -> bool:
    """Whether a browser that says so was told an address: a name of somebody else's that means this
    machine would let that one's page read ours (DNS rebinding)."""
    name = host.decode("ascii", "replace").rpartition(":")[0] or host.decode("ascii", "replace")
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return name == "localhost"
    return True


def _uid_of(stream: trio.SocketStream) -> int:
    said = stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return int(_PEER.unpack(said)[1])


def _remove_stale(path: str) -> None:
    """The socket that a mount has left that was killed."""
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise FileExistsError(f"{path} is there, and no socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                files.unlink(path)
            except BlockingIOError:  # somebody serves there, and is busy
                pass
