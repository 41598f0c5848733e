"""What a mount shows over HTTP: the text for Prometheus, who is told what, and who is sent away."""

import json
import logging
import os
import re
import shutil
import socket
import struct
import subprocess
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
import yaml

from aifs.core.errors import AccessDenied
from aifs.core.kinds import split_endpoint
from aifs.watch import figures, server
from aifs.watch.server import WatchServer
from tests.support.postgres import free_port

SECRET = "the text of it"
NOBODY = 65534
LOST = 1
"""The first records of a trace that are not there any more."""


def status(**changed: Any) -> dict[str, Any]:
    data = {"id": 0, "path": "/s", "state": "ok", "last_error": "", "used_bytes": 5}
    drain = {"bytes": 7, "late": False, "oldest_age_s": 0.5, "failing_files": 0, "last_error": ""}
    served = {"count": 3, "seconds": 0.5, "bytes": 9, "buckets": [1, 0, 2], "errors": {"EIO": 1}}
    return {
        "uptime_s": 1.5,
        "requests": {"read": served},
        "servers": [{**data, "free_bytes": None}],
        "burst": {"devices": []},
        "drain": drain,
    } | changed


def samples(text: str) -> dict[tuple[str, ...], float]:
    """By name and the values of the labels, as Prometheus itself reads them."""
    parser = pytest.importorskip("prometheus_client.parser")
    families = list(parser.text_string_to_metric_families(text))
    assert all(family.documentation and family.type != "unknown" for family in families)
    found = [one for family in families for one in family.samples]
    told = {(one.name, *one.labels.values()): one.value for one in found}
    assert len(told) == len(found), "the same sample twice"
    return told


def test_prometheus_reads_what_is_told() -> None:
    told = samples(figures.expose(status()))
    bucket, count = "aifs_request_duration_seconds_bucket", "aifs_request_duration_seconds_count"
    assert told[bucket, "read", "1.6e-05"] == 1
    assert told[bucket, "read", "6.4e-05"] == told[bucket, "read", "+Inf"] == 3
    assert told[count, "read"] == 3 and told["aifs_request_bytes_total", "read"] == 9
    assert told["aifs_request_errors_total", "read", "EIO"] == 1
    assert told["aifs_server_up", "0"] == 1 and told["aifs_drain_lag_seconds",] == 0.5
    assert ("aifs_server_free_bytes", "0") not in told  # not known


def test_openmetrics_is_told_to_who_accepts_it() -> None:
    parser = pytest.importorskip("prometheus_client.openmetrics.parser")
    text = figures.expose(status(version="1.2 abc"), as_open=True)
    families = {one.name: one for one in parser.text_string_to_metric_families(text)}
    (info,) = families["aifs_build"].samples
    assert info.labels == {"version": "1.2 abc"} and families["aifs_build"].type == "info"
    assert families["aifs_request_bytes"].samples[0].name == "aifs_request_bytes_total"
    told = samples(figures.expose(status(version="1.2")))
    assert told["aifs_build_info", "1.2"] == 1


def test_names_follow_the_conventions() -> None:
    names = [metric.name for metric in figures.FIGURES]
    assert len(set(names)) == len(names)
    for metric in figures.FIGURES:
        assert metric.name.startswith("aifs_") and metric.help.endswith(".")
        assert metric.name.endswith("_total") == (metric.kind == figures.COUNTER)


def test_a_figure_is_one_row() -> None:
    """It is in Prometheus, and in the words of aifs status."""
    table = (
        'trash "bin" if on:\n  left gauge aifs_left_files: Files left.\n  > left: {left:entry}\n'
    )
    declared, parts = figures.read_table(table)
    told = {"on": 1, "trash": {"left": 3}}
    text = "# HELP aifs_left_files Files left.\n# TYPE aifs_left_files gauge\naifs_left_files 3\n"
    assert figures.expose(told, declared) == text
    assert figures.describe(told, {}, parts) == [("bin", "3 entries")]
    assert figures.describe(told | {"on": 0}, {}, parts) == []


def test_problems_are_said_in_words() -> None:
    assert figures.problems(status()) == []
    gone = {"id": 3, "path": "/s", "state": "failing", "last_error": "Input/output error"}
    late = status()["drain"] | {"late": True, "oldest_age_s": 90.0, "failing_files": 2}
    device = {"id": 1, "path": "/b", "state": "failing"}
    assert figures.problems(status(servers=[gone], drain=late, burst={"devices": [device]})) == [
        "data server 3 (/s) is failing: Input/output error",
        "burst directory 1 (/b) is failing",
        "draining is late: the oldest file waits for 90 s",
        "2 files cannot be drained: ",
    ]


CONFIG = Path(__file__).parents[2] / "config"


@pytest.mark.parametrize("name", ["alerts.yaml", "grafana.json"])
def test_what_others_look_at_is_there(name: str) -> None:
    """Each metric that the alerts and Grafana's dashboard name, with the labels that it has."""
    described = {metric.name: metric for metric in figures.FIGURES}
    loaded = yaml.safe_load((CONFIG / name).read_text())
    if name == "alerts.yaml":
        expressions = [rule["expr"] for group in loaded["groups"] for rule in group["rules"]]
    else:
        expressions = [one["expr"] for panel in loaded["panels"] for one in panel["targets"]]
        expressions += [one["query"] for one in loaded["templating"]["list"]]
    named = set(re.findall(r"aifs_\w+", " ".join(expressions)))
    assert len(named) > 5
    histograms = {f"{name}{end}" for name in described for end in ("_bucket", "_count", "_sum")}
    assert named <= described.keys() | {
        one for one in histograms if described[one.rpartition("_")[0]].kind == figures.HISTOGRAM
    }


@pytest.mark.long
def test_prometheus_takes_the_alerts_and_the_text() -> None:
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("no promtool is installed (apt install prometheus)")
    rules = [promtool, "check", "rules", CONFIG / "alerts.yaml"]
    subprocess.run(rules, check=True, capture_output=True)
    lint = [promtool, "check", "metrics"]
    text = figures.expose(status())
    done = subprocess.run(lint, input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@asynccontextmanager
async def served(
    listen: str,
    tell: Callable[[int], Any] | None = None,
    secret_file: str = "",
    traced: Sequence[dict[str, Any]] = (),
) -> AsyncIterator[list[int]]:
    """Serves a status; gives the users that were told."""
    uids: list[int] = []

    async def answer(uid: int) -> dict[str, Any]:
        uids.append(uid)
        return tell(uid) if tell else status()

    async def follow(uid: int, start: int | None) -> tuple[int, list[dict[str, Any]]]:
        if uid == NOBODY:
            raise AccessDenied("not you")
        first = len(traced) if start is None else max(start, LOST)
        return first, list(traced[first : first + 2])

    async with trio.open_nursery() as nursery:
        await nursery.start(WatchServer(listen, secret_file, answer, follow).run)
        yield uids
        nursery.cancel_scope.cancel()


async def connect(listen: str) -> trio.SocketStream:
    if listen.startswith("/"):
        return await trio.open_unix_socket(listen)
    host, port = listen.rsplit(":", 1)
    return await trio.open_tcp_stream(host, int(port))


async def said(stream: trio.SocketStream) -> bytes:
    text = b""
    while piece := await stream.receive_some():
        text += piece
    return text


async def ask(listen: str, path: str, *headers: str, method: str = "GET") -> tuple[int, str]:
    async with await connect(listen) as stream:
        lines = [f"{method} {path} HTTP/1.1", "Connection: close", *headers]
        if not any(line.startswith("Host:") for line in headers):
            lines.append("Host: localhost:1")
        await stream.send_all("\r\n".join([*lines, "", ""]).encode())
        await stream.send_eof()
        head, _, body = (await said(stream)).partition(b"\r\n\r\n")
    return int(head.split()[1]), body.decode()


async def test_what_is_served() -> None:
    listen = f"127.0.0.1:{free_port()}"
    async with served(listen) as uids:
        assert await ask(listen, "/metrics") == (200, figures.expose(status()))
        assert json.loads((await ask(listen, "/status.json?x=1"))[1]) == status()
        assert await ask(listen, "/healthz") == (200, "ok\n")
        assert await ask(listen, "/metrics", method="HEAD") == (200, "")
        assert (await ask(listen, "/"))[1].startswith("<!doctype html>")
        accept = "Accept: application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4"
        _, openly = await ask(listen, "/metrics", accept)
        assert openly == figures.expose(status(), as_open=True) and openly.endswith("# EOF\n")
        assert (await ask(listen, "/etc/passwd"))[0] == 404
        assert (await ask(listen, "/metrics", method="POST"))[0] == 405
        for host in ("evil.example:1", "evil.example"):
            assert (await ask(listen, "/metrics", f"Host: {host}"))[0] == 403
        for host in ("[::1]:1", "127.0.0.1", "localhost"):
            assert (await ask(listen, "/metrics", f"Host: {host}"))[0] == 200
        assert set(uids) == {NOBODY}  # what any user is told


def traced(duration_us: int, **changed: Any) -> dict[str, Any]:
    said = {"operation": "open", "path": "/a/b", "uid": 0, "pid": 0, "bytes": 0, "errno": 0}
    return said | {"duration_us": duration_us} | changed


async def test_who_uses_the_mount_is_summed_up(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    records = [traced(9, uid=7), traced(2), traced(5, path="/"), traced(4, errno=5), traced(1)]
    async with served(path, traced=records):
        code, begun = await ask(path, "/top.json")
        assert code == 200 and json.loads(begun)["next"] == 5
        assert json.loads(begun)["process"] == []
        told = json.loads((await ask(path, "/top.json?by=operation&since=0"))[1])
        assert (told["next"], told["lost"], told["more"]) == (5, LOST, 0)
        (one,) = told["operation"]
        assert (one["operation"], one["requests"], one["errors"]) == ("open", 4, 1)
        told = json.loads((await ask(path, "/top.json?by=path&since=2"))[1])
        assert [(each["path"], each["slowest_s"]) for each in told["path"]] == [
            ("/", 5e-6),
            ("/a", 4e-6),
        ]
        for wrong in ("by=x", "since=6", "since=-1", "since=x", f"since={'9' * 5000}", "since=%B2"):
            assert (await ask(path, f"/top.json?{wrong}"))[0] == 400


async def test_of_many_the_busiest_are_told(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    records = [traced(number, path=f"/{number}/x") for number in range(server.USERS_MAX + 3)]
    async with served(path, traced=records):
        told = json.loads((await ask(path, "/top.json?by=path&since=1"))[1])
    assert len(told["path"]) == server.USERS_MAX and told["more"] == 2
    assert told["path"][0]["path"] == f"/{server.USERS_MAX + 2}"


async def test_who_uses_it_is_not_for_all() -> None:
    listen = f"127.0.0.1:{free_port()}"
    async with served(listen):
        for query in ("", "?by=user", "?since=0"):
            assert await ask(listen, f"/top.json{query}") == (403, "not you\n")


async def test_a_probe_fails_when_something_is_wrong() -> None:
    listen = f"127.0.0.1:{free_port()}"
    late = status()["drain"] | {"late": True}
    async with served(listen, lambda uid: status(drain=late)):
        assert await ask(listen, "/healthz") == (
            503,
            "draining is late: the oldest file waits for 0 s\n",
        )


async def test_the_secret_opens_it_and_tells_what_root_is_told(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(f"{SECRET}\n")
    secret.chmod(0o600)
    listen = f"127.0.0.1:{free_port()}"
    async with served(listen, secret_file=str(secret)) as uids:
        for header in ("X: y", "Authorization: Bearer no", f"Authorization: Basic {SECRET}"):
            assert (await ask(listen, "/metrics", header))[0] == 401
        assert (await ask(listen, "/"))[0] == 200  # holds nothing of the mount
        assert not uids
        header = f"Authorization: Bearer {SECRET}"
        assert (await ask(listen, "/metrics", header, "Host: node-1:1"))[0] == 200
        assert uids == [0]


async def test_a_socket_knows_who_asks_and_is_gone_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as left_by_a_kill:
        left_by_a_kill.bind(str(path))
    async with served(str(path)) as uids:
        assert (await ask(str(path), "/metrics", "Host: x"))[0] == 200
        assert uids == [os.getuid()]
    assert not path.exists()


@pytest.mark.parametrize("taken", ["port", "socket", "file", "secret"])
async def test_who_cannot_serve_says_so_and_harms_nobody(
    tmp_path: Path, taken: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def never(*_: object) -> Any:
        raise AssertionError

    listen, secret = str(tmp_path / "place"), ""
    async with AsyncExitStack() as stack:
        if taken == "port":
            listen = f"127.0.0.1:{free_port()}"
        if taken == "file":
            Path(listen).write_text("mine")
        elif taken == "secret":
            secret = str(tmp_path / "missing")
        else:
            await stack.enter_async_context(served(listen))
        with caplog.at_level(logging.WARNING), trio.fail_after(60):
            await WatchServer(listen, secret, never, never).run()
    (record,) = caplog.records
    assert record.getMessage().startswith(f"nothing is served at metrics.listen {listen}: ")
    if taken == "file":
        assert Path(listen).read_text() == "mine"


async def test_who_says_nothing_is_sent_away(
    autojump_clock: trio.testing.MockClock, tmp_path: Path
) -> None:
    path = str(tmp_path / "socket")
    async with served(path), AsyncExitStack() as stack:
        slow = [await stack.enter_async_context(await connect(path)) for _ in range(3)]
        for stream in slow:
            assert await said(stream) == b""
        assert (await ask(path, "/healthz"))[0] == 200


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"])
async def test_who_holds_all_connections_keeps_nobody_out(sent: bytes) -> None:
    """16 silent ones kept a probe from being answered."""
    listen = f"127.0.0.1:{free_port()}"
    async with served(listen), AsyncExitStack() as stack:
        for _ in range(server.CONNECTIONS):
            stream = await stack.enter_async_context(await connect(listen))
            await stream.send_all(sent)
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(3):
            assert (await ask(listen, "/healthz"))[0] == 200


async def test_a_connection_that_is_reset_before_it_is_served_is_no_fault(
    caplog: pytest.LogCaptureFixture,
) -> None:
    listen = f"127.0.0.1:{free_port()}"
    async with served(listen):
        with socket.create_connection(split_endpoint(listen)) as reset:
            reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert (await ask(listen, "/healthz"))[0] == 200
    assert not caplog.records


@pytest.mark.parametrize("sent", [b"\0" * 99, b"GET / HTTP/x\r\n\r\n", b"x" * (1 << 20), b""])
async def test_what_is_no_request_ends_the_connection(tmp_path: Path, sent: bytes) -> None:
    path = str(tmp_path / "socket")
    async with served(path) as uids:
        async with await connect(path) as stream:
            try:
                await stream.send_all(sent)
                await stream.send_eof()
                assert await said(stream) == b""
            except trio.BrokenResourceError:
                pass
        assert not uids and (await ask(path, "/healthz"))[0] == 200


@pytest.mark.sweep
async def test_a_fault_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail(uid: int) -> dict[str, Any]:
        raise ValueError("a fault")

    path = str(tmp_path / "socket")
    async with served(path, fail):
        for _ in range(3):
            async with await connect(path) as stream:
                await stream.send_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
                assert await said(stream) == b""
    assert [record.levelname for record in caplog.records] == ["ERROR"]
