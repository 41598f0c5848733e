"""Work in mover processes: it is as if the daemon did it, and whatever kills one loses nothing."""

import errno
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from aifs.burst import pool as pool_module
from aifs.burst.pool import Movers
from aifs.burst.transfer import Limiter, Mover, TargetFails
from aifs.core.errors import NoSpace, StoreBusy, Unavailable
from aifs.data.checks import Untold
from aifs.layout.placement import DRAINING
from aifs.layout.striped import Striped
from aifs.vfs import Filesystem
from tests.support import movers as work
from tests.support.modes import WAITING
from tests.support.stores import drained, moved_out, opened, read_file, write_file

MIB = 1 << 20
DATA = os.urandom(9 * MIB + 4321)
ONE = {"data.movers": "1"}
WHERE = pytest.mark.parametrize("count", ["0", "1"], ids=["daemon", "process"])


@asynccontextmanager
async def served(directory: Path, **settings: str) -> AsyncIterator[Filesystem]:
    """What nobody asks for is not drained, so all work is the test's."""
    given = {key.replace("__", "."): value for key, value in settings.items()}
    async with opened(directory, WAITING | ONE | given, servers=3) as fs:
        yield fs


@pytest.fixture
async def fs(directory: Path) -> AsyncIterator[Filesystem]:
    async with served(directory) as fs:
        yield fs


@pytest.fixture(autouse=True)
def like_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that is busy with other tests, processes have the processor all the same."""
    monkeypatch.setattr(pool_module, "may_leave_idle", lambda: False)


async def until(condition) -> None:
    while not condition():
        await trio.sleep(0.005)


# --- the same wherever it is done ---


@pytest.mark.sweep
@WHERE
async def test_what_it_returns_comes_back(directory: Path, count: str) -> None:
    async with served(directory, data__movers=count) as fs:
        value = ("text", b"bytes", Striped(4096, (0, 1)), list(range(100_000)))
        assert await fs.drain.movers.carry_out(work.echo, value) == value
        is_here = await fs.drain.movers.carry_out(work.pid, None) == os.getpid()
        assert is_here == (count == "0")
        assert await fs.drain.movers.carry_out(work.pid, None, here=True) == os.getpid()


@pytest.mark.sweep
@WHERE
@pytest.mark.parametrize(
    "error",
    [NoSpace("no room there"), Untold("nobody can tell"), TargetFails(NoSpace("not written"))],
    ids=lambda error: type(error).__name__,
)
async def test_what_it_raises_is_raised(directory: Path, count: str, error: Exception) -> None:
    async with served(directory, data__movers=count) as fs:
        with pytest.raises(type(error), match=str(error)) as caught:
            await fs.drain.movers.carry_out(work.fail, error)
        assert getattr(caught.value, "errno", 0) == getattr(error, "errno", 0)


@pytest.mark.sweep
@WHERE
async def test_damage_is_told(directory: Path, count: str) -> None:
    async with served(directory, data__movers=count) as fs:
        told = []
        tools = replace(fs.drain.movers.tools, on_damage=lambda *args: told.append(args))
        wrong = Striped(4096, (0, 1), 2), 70, 7, 1
        await Movers(tools, fs.pool).carry_out(work.damage, wrong)
        assert told == [wrong]


@pytest.mark.sweep
@WHERE
async def test_it_ends_when_it_is_not_wanted(directory: Path, tmp_path: Path, count: str) -> None:
    """Asked between pieces; and when the task is cancelled nothing of it goes on."""
    path, unwanted = tmp_path / "begun", False
    async with served(directory, data__movers=count) as fs:
        movers = fs.drain.movers
        async with trio.open_nursery() as nursery:
            nursery.start_soon(movers.carry_out, work.pieces, str(path), lambda: unwanted)
            await until(path.exists)
            unwanted = True
        async with trio.open_nursery() as nursery:
            path.unlink()
            nursery.start_soon(movers.carry_out, work.pieces, str(path))
            await until(path.exists)
            nursery.cancel_scope.cancel()
        begun = path.read_text()
        if count == "1":
            await movers.carry_out(work.echo, None)
        assert path.read_text() == begun
        assert movers.tools.mover.moved_bytes > 0


@pytest.mark.sweep
@WHERE
async def test_writers_come_first(directory: Path, tmp_path: Path, count: str) -> None:
    """One piece at a time is moved while they need the processor."""
    async with served(directory, data__movers=count) as fs:
        is_in_the_way, most, begun, ended = True, 0, 0, 0
        mover = Mover(fs.store.servers.budget, Limiter(0), "none", lambda: is_in_the_way)
        begin, end = mover.begin, mover.end

        async def counted(length: int) -> None:
            nonlocal begun, most
            await begin(length)
            begun += 1
            most = max(most, begun - ended)

        def counted_end(moved: int) -> None:
            nonlocal ended
            ended += 1
            end(moved)

        mover.begin, mover.end = counted, counted_end  # type: ignore[method-assign]
        movers = fs.io.sets.movers(mover)
        async with trio.open_nursery() as nursery:
            for number in range(4):
                path = str(tmp_path / str(number))
                nursery.start_soon(movers.carry_out, work.pieces, path, lambda: begun > 40)
        assert most == 1
        assert begun == ended > 40


@pytest.mark.sweep
@WHERE
async def test_the_last_pieces_of_a_file_wait_for_one_another(directory: Path, count: str) -> None:
    """Each is told when another one has ended, though that is followed by none."""
    async with served(directory, data__movers=count) as fs:
        mover = Mover(fs.store.servers.budget, Limiter(0), "none", lambda: True)
        await fs.io.sets.movers(mover).carry_out(work.pieces_at_once, 4)
        assert mover.moved_bytes == 4


# --- processes ---


@pytest.mark.sweep
async def test_it_is_started_for_work_and_ends_when_it_is_idle(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "_IDLE_S", 0.0)
    async with served(directory) as fs:
        used = fs.store.servers.budget.used
        assert fs.pool.status()["running"] == 0
        pid = await fs.drain.movers.carry_out(work.pid, None)
        assert fs.store.servers.budget.used >= used + (16 << 20)
        await until(lambda: fs.pool.status()["running"] == 0)
        assert fs.store.servers.budget.used == used
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        assert await fs.drain.movers.carry_out(work.pid, None) != pid
    assert fs.pool.status()["running"] == 0


@pytest.mark.sweep
async def test_it_ends_when_others_need_its_memory(fs: Filesystem) -> None:
    await fs.drain.movers.carry_out(work.pid, None)
    budget = fs.store.servers.budget
    needed = budget.free + 1
    async with budget.reserve(needed):
        assert fs.pool.status()["running"] == 0


@pytest.mark.sweep
async def test_it_goes_on_while_nobody_needs_its_memory(fs: Filesystem) -> None:
    pid = await fs.drain.movers.carry_out(work.pid, None)
    await fs.store.servers.budget.relax()
    assert await fs.drain.movers.carry_out(work.pid, None) == pid


@pytest.mark.sweep
async def test_what_needs_more_memory_than_it_has_is_done_by_the_daemon(fs: Filesystem) -> None:
    size = 100 << 20
    assert await fs.drain.movers.carry_out(work.take, size) == (os.getpid(), size)
    pid, taken = await fs.drain.movers.carry_out(work.take, MIB)
    assert (pid != os.getpid(), taken) == (True, MIB)


@pytest.mark.sweep
async def test_more_work_has_more_processes(directory: Path, tmp_path: Path) -> None:
    async with served(directory, data__movers="2") as fs:
        async with trio.open_nursery() as nursery:
            for number in range(10):
                path = str(tmp_path / str(number))
                nursery.start_soon(fs.drain.movers.carry_out, work.pieces, path)
            await until(lambda: len(list(tmp_path.iterdir())) == 10)
            assert fs.pool.status()["running"] == fs.pool.status()["busy"] == 2
            nursery.cancel_scope.cancel()
        assert fs.pool.status()["busy"] == 0


async def test_what_it_logs_is_in_the_log(fs: Filesystem, caplog: pytest.LogCaptureFixture) -> None:
    await fs.drain.movers.carry_out(work.warn, "something odd")
    await until(lambda: "something odd" in caplog.text)
    [record] = [each for each in caplog.records if each.name == "aifs.test"]
    assert (record.levelname, record.getMessage()) == ("WARNING", "something odd")


@pytest.mark.sweep
async def test_work_that_kills_them_fails(fs: Filesystem, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(Unavailable, match="3 mover processes have died of it"):
        await fs.drain.movers.carry_out(work.die, None)
    assert fs.pool.status()["restarts"] == 3
    assert "3 movers have died of one piece of work: die of None" in caplog.text
    assert await fs.drain.movers.carry_out(work.echo, 7) == 7


async def test_all_are_gone_when_the_store_is_taken_over(directory: Path, tmp_path: Path) -> None:
    path = tmp_path / "begun"
    async with served(directory) as fs, trio.open_nursery() as nursery:

        async def wait_for_the_end() -> None:
            with pytest.raises(Unavailable, match="is being closed"):
                await fs.drain.movers.carry_out(work.pieces, str(path))

        pid = await fs.drain.movers.carry_out(work.pid, None)
        nursery.start_soon(wait_for_the_end)
        await until(path.exists)
        fs.store.ownership.over.set()
        await until(lambda: fs.pool.status()["running"] == 0)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.sweep
async def test_work_may_stop_before_its_process_runs(fs: Filesystem, tmp_path: Path) -> None:
    """The orders to begin and to end reach it together."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fs.drain.movers.carry_out, work.pieces, str(tmp_path / "begun"))
        await until(lambda: fs.pool.status()["running"])
        nursery.cancel_scope.cancel()
    assert fs.pool.status()["busy"] == 0


async def test_what_cannot_be_started_is_not_needed(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The daemon works itself then, and after a while it is tried again."""
    monkeypatch.setattr(pool_module, "_RETRY_S", 0.0)
    async with served(directory) as fs:
        with monkeypatch.context() as none:

            def fail(*args: object, **options: object) -> None:
                raise OSError(errno.EAGAIN, "there are too many")

            none.setattr(pool_module.subprocess, "Popen", fail)
            assert await fs.drain.movers.carry_out(work.pid, None) == os.getpid()
        assert "no mover process can be started" in caplog.text
        with monkeypatch.context() as none:
            none.setattr(sys, "executable", shutil.which("false"))
            assert await fs.drain.movers.carry_out(work.pid, None) == os.getpid()
        assert "it has ended before it began" in caplog.text
        assert await fs.drain.movers.carry_out(work.pid, None) != os.getpid()
        monkeypatch.setattr(pool_module, "_RETRY_S", 3600.0)
        fs.pool.failed("of the test")
        assert await fs.drain.movers.carry_out(work.pid, None) == os.getpid()


@pytest.mark.sweep
async def test_its_modules_are_ours(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing comes from the directory that the daemon is in."""
    (tmp_path / "trio.py").write_text("raise SystemExit")
    monkeypatch.chdir(tmp_path)
    async with served(directory) as fs:
        assert await fs.drain.movers.carry_out(work.pid, None) != os.getpid()


@pytest.mark.sweep
async def test_work_is_not_put_into_words_that_nobody_reads(fs: Filesystem) -> None:
    await fs.drain.movers.carry_out(work.echo, work.Unprintable())


@pytest.mark.sweep
async def test_one_that_cannot_be_ended_does_not_hold_up_the_end(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It keeps the store from being opened by others."""
    send = signal.pidfd_send_signal
    settings = WAITING | ONE | {"data.timeout": "100ms"}
    async with opened(directory, settings, sound=False) as fs:
        pid = await fs.drain.movers.carry_out(work.pid, None)
        monkeypatch.setattr(pool_module, "_END_S", 0.0)
        os.kill(pid, signal.SIGSTOP)
        monkeypatch.setattr(signal, "pidfd_send_signal", lambda *args: None)
    monkeypatch.setattr(signal, "pidfd_send_signal", send)
    assert f"mover process {pid} cannot be ended" in caplog.text
    with pytest.raises(StoreBusy):
        async with opened(directory):
            pass
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    async with opened(directory):
        pass


@pytest.mark.sweep
async def test_what_it_writes_counts_for_the_rate_of_servers(directory: Path) -> None:
    async with served(directory, layout__stripe_above="0") as fs:
        inos = [await write_file(fs, b"%d" % n, os.urandom(3 << 20)) for n in range(3)]
        before = [server.writing.total[0] for server in fs.store.servers.capacity()]
        await drained(fs, *inos)
        assert fs.pool.status()["jobs"]
        after = [server.writing.total[0] for server in fs.store.servers.capacity()]
        assert sum(after) - sum(before) >= 9 << 20
        assert all(server.writing.total[1] > 0 for server in fs.store.servers.capacity())


@pytest.mark.sweep
@pytest.mark.skipif(not pool_module.may_leave_idle(), reason="needs CAP_SYS_NICE")
async def test_it_has_the_processor_when_nobody_needs_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless somebody waits for it."""
    monkeypatch.setattr(pool_module, "may_leave_idle", lambda: True)
    async with served(directory) as fs:
        is_urgent = False
        mover = Mover(fs.store.servers.budget, Limiter(0), "none", is_urgent=lambda: is_urgent)
        movers = fs.io.sets.movers(mover)
        while await movers.carry_out(work.policy, None) != os.SCHED_IDLE:
            pass
        is_urgent = True
        while await movers.carry_out(work.policy, None) != os.SCHED_OTHER:
            pass


# --- they are killed in the middle ---


async def armed(fs: Filesystem, op: str, number: int) -> int:
    """The pid of the one process, which will die at the nth operation of a kind."""
    return await fs.drain.movers.carry_out(work.die_at, (op, number))


def assert_died_once(fs: Filesystem, pid: int) -> None:
    assert fs.pool.status()["restarts"] == 1
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


OPS = [("write_at", 1), ("write_at", 5), ("sync_file", 1), ("sync_dir", 1)]
KILLED = pytest.mark.parametrize(("op", "number"), OPS, ids=lambda value: str(value))


@pytest.mark.sweep
@KILLED
@pytest.mark.parametrize("kind", ["striped", "replicated"])
async def test_a_drain_goes_on(directory: Path, op: str, number: int, kind: str) -> None:
    protection = {"layout__replicas": "2"} if kind == "replicated" else {}
    async with served(directory, **protection) as fs:
        inos = [await write_file(fs, b"file%d" % n, DATA[n:]) for n in range(3)]
        pid = await armed(fs, op, number)
        await drained(fs, *inos)
        assert_died_once(fs, pid)
        for n, ino in enumerate(inos):
            await fs.evictor.evict(ino)
            assert await read_file(fs, ino) == DATA[n:]


@pytest.mark.sweep
@pytest.mark.parametrize(("op", "number"), OPS[:2])
@pytest.mark.parametrize("kind", ["striped", "interleaved"])
async def test_a_staging_goes_on(directory: Path, op: str, number: int, kind: str) -> None:
    async with served(directory, layout__kind=kind) as fs:
        ino = await write_file(fs, b"file", DATA)
        await moved_out(fs, ino)
        pid = await armed(fs, op, number)
        assert await fs.stager.stage(ino)
        assert_died_once(fs, pid)
        assert await read_file(fs, ino) == DATA


@pytest.mark.sweep
@pytest.mark.parametrize("settings", [{}, {"layout__replicas": "2"}], ids=["plain", "replicated"])
@pytest.mark.parametrize("count", ["2", "0"], ids=["moved", "laid out anew"])
@KILLED
async def test_a_server_is_left(
    directory: Path, op: str, number: int, count: str, settings: dict[str, str]
) -> None:
    """Columns are made elsewhere, or files that lie on all servers are laid out anew."""
    async with served(directory, layout__count=count, layout__unit="64KiB", **settings) as fs:
        inos = [await write_file(fs, b"file%d" % n, DATA[n:]) for n in range(3)]
        await moved_out(fs, *inos)
        pid = await armed(fs, op, number)
        await fs.store.table.change(1, DRAINING)
        fs.rebuild.look()
        while fs.rebuild.left(1) != (0, 0):
            await fs.rebuild.news()
        assert_died_once(fs, pid)
        for n, ino in enumerate(inos):
            assert 1 not in (await fs.getattr(ino)).layout.servers
            assert await read_file(fs, ino) == DATA[n:]


# --- servers that fail and hang ---


@pytest.mark.sweep
async def test_a_server_that_fails_there_fails_for_all(fs, caplog):
    """Until it is looked at, and works."""
    ino = await write_file(fs, b"file", DATA)
    await fs.drain.movers.carry_out(work.fail_writes, None)
    fs.drain.request([ino])
    servers = fs.store.servers
    await until(lambda: fs.drain.status()["last_error"])
    assert "the device fails" in fs.drain.status()["last_error"]
    await until(lambda: "is failing" in caplog.text)
    await servers.look()
    assert [server.state for server in servers.capacity()] == ["ok"] * 3
    os.kill(await fs.drain.movers.carry_out(work.pid, None), signal.SIGKILL)
    await drained(fs, ino)


async def test_a_server_that_hangs_there_hangs_for_all(
    directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Until the process whose call it does not answer is gone, which gets no work any more."""
    path = tmp_path / "hangs"
    async with served(directory, data__timeout="100ms", layout__count="1") as fs:
        servers, movers = fs.store.servers, fs.drain.movers
        pid = await movers.carry_out(work.hang_while, str(path))
        path.touch()
        ino = await write_file(fs, b"file", DATA)
        await drained(fs, ino)
        await until(lambda: not any(server.hangs for server in servers.capacity()))
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        assert "has not ended within" in caplog.text


@pytest.mark.sweep
async def test_the_table_of_servers_that_it_has_is_that_of_the_store(fs, directory):
    """One that is added is known to the processes that are given work from then on."""
    before = await fs.drain.movers.carry_out(work.pid, None)
    number = await fs.store.table.add(str(directory / "data" / "new"))
    inos = [await write_file(fs, b"file %d" % n, DATA) for n in range(4)]
    await drained(fs, *inos)
    layouts = [(await fs.getattr(ino)).layout for ino in inos]
    assert number in {server for layout in layouts for server in layout.servers}
    assert await fs.drain.movers.carry_out(work.pid, None) != before
