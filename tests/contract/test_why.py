"""Why something takes long, of a filesystem in process: what is told, of what, and to whom."""

import json
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from aifs.core.errors import NoAttribute
from aifs.core.waiting import JOURNAL, Activity, Request, begin, under_way, waits_for
from aifs.data.server import DataServer
from aifs.files.drain import Drain
from aifs.vfs import Caller, Filesystem, operation_log
from aifs.vfs import why as why_module
from aifs.vfs.why import watch_slow
from tests.support import modes
from tests.support.data_servers import hooked
from tests.support.hanging import hanging, until
from tests.support.memory_engine import MemoryEngine
from tests.support.stores import LIMIT_S, OWNER, ask, call, get, opened, put, write_file
from tests.support.stores import fs as fs

ROOT = Caller()
OTHER = Caller(2000, 2000, os.getpid())
STRIPED = modes.ON | modes.STRIPED

pytestmark = pytest.mark.store(base=STRIPED)


@pytest.fixture(autouse=True)
def hook() -> Iterator[None]:
    """Everything is done by workers."""
    with hooked():
        yield


async def asked(
    fs: Filesystem, operation: str, ino: int, does: Callable[[], Awaitable], uid: int = OWNER.uid
) -> None:
    """As the kernel asks for it."""
    request = Request(operation, ino, uid=uid, pid=os.getpid())
    activity = Activity(lambda: request, (), operation_log.time.perf_counter_ns())
    begin(activity)
    try:
        await does()
    finally:
        duration_ns = operation_log.time.perf_counter_ns() - activity.began_ns
        fs.operation_log.ended(activity, duration_ns)
        activity.args = None


async def why(fs: Filesystem, ino: int, caller: Caller = ROOT, pid: int = 0) -> dict:
    name = f"user.aifs.why.{pid}" if pid else "user.aifs.why"
    return json.loads(await fs.getxattr(ino, name.encode(), caller))


def waits(told: dict) -> list[tuple[str, str]]:
    return [(one["operation"], *one["waits_for"][:1]) for one in told["now"]]


@pytest.mark.store({"layout.inline_limit": 0, "layout.unit": "64KiB"})
async def test_a_read_that_waits_for_a_server_names_it(fs: Filesystem) -> None:
    top = (await fs.mkdir(1, b"d", 0o755, OWNER)).ino
    ino = await write_file(fs, b"file", bytes(300_000), top)
    beside = (await fs.mkdir(1, b"beside", 0o755, OWNER)).ino
    await fs.wait_drained(ino, LIMIT_S)
    await put(fs, ino, "evict", caller=ROOT)
    bad = fs.store.servers[2]

    async def read() -> None:
        (handle, *_) = await fs.open(ino, os.O_RDONLY, False, OWNER)
        await fs.read(handle, 0, 300_000)
        await fs.release(handle)

    with hanging(bad.address, ("read_into",)) as hang:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(asked, fs, "read", ino, read)
            await until(lambda: hang.held)
            while waits(await why(fs, ino)) != [("read", "data server 2")]:
                await trio.sleep(0.005)  # until the others have answered
            for place in (ino, top, 1):
                told = await why(fs, place)
                assert waits(told) == [("read", "data server 2")]
                assert told["waited_s"]["data server 2"] > 0
            assert told["now"][0]["path"] == "/d/file"
            assert waits(await why(fs, 1, pid=os.getpid())) == waits(told)
            mine = json.loads(await get(fs, 1, "why.0", caller=ROOT._replace(pid=os.getpid())))
            assert mine["pid"] == os.getpid() and waits(mine) == waits(told)
            with pytest.raises(NoAttribute):  # of another namespace of processes
                await get(fs, 1, "why.0", caller=ROOT)
            for told in (await why(fs, beside), await why(fs, 1, pid=1)):
                assert told["now"] == [] and told["seconds"] == 0
            await trio.sleep(operation_log.LONG_S)
            hang.release()
    told = await why(fs, top)
    assert told["now"] == [] and told["requests"] >= 1
    (one,) = [each for each in told["slowest"] if each["operation"] == "read"]
    assert one["waited_us"]["data server 2"] >= 0.9e6 * operation_log.LONG_S


async def test_who_waits_for_ranks_is_told_which(fs: Filesystem) -> None:
    top = (await fs.mkdir(1, b"step", 0o755, OWNER)).ino
    await put(fs, top, "pending", "ranks=3,step=1")
    await put(fs, top, "commit", "1")

    async def wait() -> None:
        await call(fs, top, "group.wait", **{"for": "buffered"})

    async with trio.open_nursery() as nursery:
        nursery.start_soon(asked, fs, "ioctl", top, wait)
        await trio.testing.wait_all_tasks_blocked()
        (one,) = (await why(fs, top))["now"]
        assert one["waits_for"][0].startswith("other rank ") and "0" in one["waits_for"][0]
        nursery.cancel_scope.cancel()


@pytest.mark.store(
    {
        "layout.inline_limit": 0,
        "layout.unit": "64KiB",  # it has bytes on each server
        "burst.drain_delay": "0s",
        "data.movers": 0,
    }
)
async def test_drains_are_told_to_who_may_read_the_file(fs: Filesystem) -> None:
    bad = fs.store.servers[0]
    with hanging(bad.address) as hang:
        ino = await write_file(fs, b"file", bytes(300_000))
        await until(lambda: hang.held)
        told = await why(fs, ino, OTHER)
        assert waits(told) == [("drain", "data server 0")]
        assert told["now"][0]["path"] is None
    await fs.wait_drained(ino, LIMIT_S)


async def test_users_are_told_of_their_own_requests_alone(fs: Filesystem) -> None:
    ino = await write_file(fs, b"file", b"x")
    async with trio.open_nursery() as nursery:
        for uid in (OWNER.uid, OTHER.uid):
            nursery.start_soon(asked, fs, "fsync", ino, trio.sleep_forever, uid)
        await trio.testing.wait_all_tasks_blocked()
        for caller, uids in ((ROOT, {OWNER.uid, OTHER.uid}), (OTHER, {OTHER.uid})):
            told = await why(fs, 1, caller)
            assert {one["uid"] for one in told["now"]} == uids
            assert all(one["waits_for"] == [] for one in told["now"])
        nursery.cancel_scope.cancel()


async def test_very_many_requests_fit_into_an_answer(fs: Filesystem) -> None:
    name = b"x" * 255
    parent = 1
    for _ in range(8):
        parent = (await fs.mkdir(parent, name, 0o755, ROOT)).ino
    async with trio.open_nursery() as nursery:
        for _ in range(200):
            nursery.start_soon(asked, fs, "fsync", parent, trio.sleep_forever)
        await trio.testing.wait_all_tasks_blocked()
        text = await get(fs, 1, "why")
        assert len(text) < 60_000 and 0 < len(json.loads(text)["now"]) < 64
        nursery.cancel_scope.cancel()


async def test_a_slow_request_is_logged_once_with_its_stack(
    directory: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[bool] = []
    monkeypatch.setattr(why_module, "_LOOK_S", 0.02)
    monkeypatch.setattr(why_module, "under_way", lambda: (looked.append(True), *under_way())[1:])
    async with opened(directory, base=STRIPED) as fs:
        ino = await write_file(fs, b"file", b"x")

        async def stuck_here() -> None:
            await trio.sleep_forever()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(asked, fs, "setlkw", ino, trio.sleep_forever)  # by intention
            nursery.start_soon(asked, fs, "fsync", ino, stuck_here)
            nursery.start_soon(watch_slow, fs.store.engine, lambda: 0.01)
            await until(lambda: caplog.records)
            looks = len(looked)
            await until(lambda: len(looked) > looks + 1)
            nursery.cancel_scope.cancel()
        (record,) = caplog.records
        assert "fsync of /file" in record.message and "stuck_here" in record.message
        assert "waits for the daemon itself" in record.message


async def test_a_slow_request_is_logged_though_the_metadata_do_not_answer(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for the database, and what it waits for is not that of a later moment."""
    monkeypatch.setattr(why_module, "_LOOK_S", 0.02)
    monkeypatch.setattr(why_module, "_NAMES_S", 0.02)

    class Silent(MemoryEngine):
        async def view(self, function: Any, *args: Any) -> Any:
            await trio.sleep_forever()

    async def waiting() -> None:
        begin(Activity(lambda: Request("fsync", 7, pid=os.getpid()), (), 0))
        with waits_for(JOURNAL):
            await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(waiting)
        nursery.start_soon(watch_slow, Silent(), lambda: 0.01)
        await until(lambda: caplog.records)
        nursery.cancel_scope.cancel()
    (record,) = caplog.records
    assert "fsync of ? (inode 7)" in record.message and "waits for journal" in record.message
    caplog.clear()


async def test_users_are_not_told_how_a_server_fails(fs, monkeypatch):
    """The words of an error may name a file on it."""
    reason = "write /srv/disk/objects/1234: Input/output error"
    monkeypatch.setattr(DataServer, "last_error", reason)
    monkeypatch.setattr(Drain, "obstacle", reason)
    for caller, said in ((ROOT, reason), (OTHER, "only root may see why")):
        status = await fs.status.tell(caller)
        assert {server["last_error"] for server in status["servers"]} == {said}
        assert status["drain"]["last_error"] == ""
        assert (await ask(fs, 1, "drain", caller))["error"] == said
        servers = (await ask(fs, 1, "servers", caller))["servers"]
        assert {server["last_error"] for server in servers} == {said}
