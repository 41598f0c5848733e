"""Burst devices that are full, fail, vanish, are missing at mount; and servers that fail under a
drain.
"""

import errno
import logging
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from aifs.core.errors import NoSpace, StoreError, Unavailable
from aifs.data.health import ObjectFails
from aifs.vfs import Caller
from tests.support import modes
from tests.support.data_servers import FaultHook, failing, hooked
from tests.support.kernel import Kernel
from tests.support.modes import config_of
from tests.support.stores import drained, opened, require_sound

ROOT, ME = 1, Caller()
CONTENT = bytes(range(1, 251)) * 100
WAITING = modes.WAITING | {"layout.unit": "4KiB", "burst.stage_on_read": "0"}
BY_DAEMON = WAITING | modes.BY_DAEMON
DRAINING = modes.ON | {"layout.unit": "4KiB"}


@asynccontextmanager
async def mounted(directory: Path, settings: dict[str, str] = WAITING) -> AsyncIterator[Kernel]:
    with hooked():
        async with opened(directory, settings, sound=False) as fs, Kernel(fs) as kernel:
            yield kernel


async def make(kernel: Kernel, name: bytes, content: bytes = CONTENT) -> int:
    handle, inode = await kernel.create(ROOT, name, 0o644, os.O_RDWR, ME)
    await kernel.write(handle, 0, content)
    await kernel.release(handle)
    return inode.ino


async def content_of(kernel: Kernel, ino: int) -> bytes:
    handle = await kernel.open(ino, os.O_RDONLY)
    try:
        return bytes(await kernel.read(handle, 0, 1 << 20))
    finally:
        await kernel.release(handle)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# --- full -----------------------------------------------------------------------------------------


async def test_new_files_go_to_the_servers_when_the_device_is_full(directory: Path) -> None:
    async with mounted(directory) as kernel:
        first = await make(kernel, b"first")
        assert (await kernel.getattr(first)).in_burst
        refused = []

        def refuse(op: str, path: str) -> None:
            if (
                op == "open_file"
                and path.startswith(f"{directory}/burst")
                and not os.path.exists(path)
            ):
                refused.append(path)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with hooked(refuse):
            for number in range(80):  # more than were made ahead
                # Of different kinds, for after several tiny ones of one kind the next gets no copy.
                name = b"new.%d" % number
                ino = await make(kernel, name, CONTENT if number == 79 else b"")
        assert refused
        assert not (await kernel.getattr(ino)).in_burst
        assert await content_of(kernel, ino) == CONTENT
        assert await content_of(kernel, first) == CONTENT
        await drained(kernel, first)
    await require_sound(config_of(directory))


async def test_a_writer_is_told_that_the_device_is_full_and_loses_nothing(directory: Path) -> None:
    async with mounted(directory, BY_DAEMON) as kernel:
        handle, inode = await kernel.create(ROOT, b"f", 0o644, os.O_RDWR, ME)
        await kernel.write(handle, 0, CONTENT)
        with failing("write_at", f"{directory}/burst", errno.ENOSPC), pytest.raises(NoSpace):
            await kernel.write(handle, len(CONTENT), CONTENT)
        assert await content_of(kernel, inode.ino) == CONTENT
        await kernel.write(handle, len(CONTENT), CONTENT)
        await kernel.release(handle)
        await drained(kernel, inode.ino)
        assert await content_of(kernel, inode.ino) == 2 * CONTENT
    await require_sound(config_of(directory))


async def test_a_file_is_written_in_place_where_it_cannot_be_staged(directory: Path) -> None:
    async with mounted(directory) as kernel:
        ino = await make(kernel, b"f")
        await drained(kernel, ino)
        assert await kernel.evictor.evict(ino)
        with failing(("open_file", "write_at", "truncate"), f"{directory}/burst", errno.ENOSPC):
            handle = await kernel.open(ino, os.O_RDWR)
            await kernel.write(handle, 5, b"new")
            await kernel.release(handle)
        assert (await kernel.getattr(ino)).copy is None
        assert await content_of(kernel, ino) == CONTENT[:5] + b"new" + CONTENT[8:]
    await require_sound(config_of(directory))


# --- failing, vanished ----------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [WAITING, BY_DAEMON], ids=["passed through", "by daemon"])
async def test_clean_files_are_read_from_the_servers_while_the_device_is_away(
    directory: Path, settings: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    async with mounted(directory, settings) as kernel:
        clean, dirty = await make(kernel, b"clean"), await make(kernel, b"dirty")
        await drained(kernel, clean)
        kernel.io.recall_all()  # what is lent is opened without the daemon
        away = directory / "away"
        (directory / "burst").rename(away)
        assert await content_of(kernel, clean) == CONTENT
        with pytest.raises(Unavailable, match=f"burst.*{directory}/burst"):
            await content_of(kernel, dirty)
        new = await make(kernel, b"new")
        assert await content_of(kernel, new) == CONTENT
        assert not (await kernel.getattr(new)).in_burst
        assert list(directory.glob("burst")) == []  # it is not made anew
        away.rename(directory / "burst")
        assert await content_of(kernel, dirty) == CONTENT
        await drained(kernel, dirty)
        assert await content_of(kernel, dirty) == CONTENT
    await require_sound(config_of(directory))
    assert [line for line in warnings(caplog) if "burst directory 0" in line]


async def test_a_clean_file_can_be_written_while_the_device_is_away(directory: Path) -> None:
    async with mounted(directory) as kernel:
        ino = await make(kernel, b"clean")
        await drained(kernel, ino)
        (directory / "burst").rename(directory / "away")
        handle = await kernel.open(ino, os.O_RDWR)
        await kernel.write(handle, 0, b"new")
        await kernel.release(handle)
        assert await content_of(kernel, ino) == b"new" + CONTENT[3:]
        (directory / "away").rename(directory / "burst")
        assert await content_of(kernel, ino) == b"new" + CONTENT[3:]
    async with mounted(directory) as kernel:
        assert await content_of(kernel, ino) == b"new" + CONTENT[3:]
    await require_sound(config_of(directory))


@pytest.mark.parametrize("op", ["sync_file", "write_at", "read_into"])
async def test_what_fails_for_one_file_alone_is_no_failure_of_the_device(
    directory: Path, op: str
) -> None:
    async with mounted(directory, BY_DAEMON) as kernel:
        (device,) = kernel.store.servers.burst()
        bad, good = await make(kernel, b"bad"), await make(kernel, b"good")
        path = device.where((0, (await kernel.getattr(bad)).copy.id))
        handle = await kernel.open(bad, os.O_RDWR)
        with failing(op, path) as failed, pytest.raises(ObjectFails, match=re.escape(path)):
            await kernel.read(handle, 0, 10)
            await kernel.write(handle, 0, b"x")
            await kernel.fsync(handle)
        assert failed and device.state == "ok" and device.health.usable
        handle = await kernel.open(good, os.O_RDWR)
        await kernel.fsync(handle)
        assert (await kernel.getattr(await make(kernel, b"new"))).in_burst
        # The probe meets what fails for all files.
        with failing(op, device.address), pytest.raises(Unavailable):
            await kernel.read(handle, 0, 10)
            await kernel.write(handle, 0, b"x")
            await kernel.fsync(handle)
        assert device.state == "failing"
        assert list(Path(device.address).glob(".aifs-*")) == []
    await require_sound(config_of(directory))


async def test_a_file_that_cannot_be_synced_does_not_keep_the_store_from_being_closed(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with hooked():
        async with opened(directory, BY_DAEMON, sound=False) as fs, Kernel(fs) as kernel:
            (device,) = fs.store.servers.burst()
            bad, good = await make(kernel, b"bad"), await make(kernel, b"good")
            path = device.where((0, (await kernel.getattr(bad)).copy.id))

            def refuse(op: str, where: str) -> None:
                if op == "sync_file" and where == path:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))

            FaultHook.installed.action = refuse
    told = [line for line in warnings(caplog) if path in line]
    assert len(told) == 1 and f"inode {bad}: what was written to it last may be lost" in told[0]
    async with mounted(directory, BY_DAEMON) as kernel:
        assert kernel.store.clean
        assert kernel.recovered.unsynced_files == 1  # its mark has stayed
        assert await content_of(kernel, bad) == await content_of(kernel, good) == CONTENT
    await require_sound(config_of(directory))


# --- missing at mount -----------------------------------------------------------------------------


@pytest.mark.parametrize("replacement", ["nothing", "empty directory"])
async def test_a_missing_device_is_named_with_what_is_at_stake(
    directory: Path, replacement: str
) -> None:
    async with mounted(directory) as kernel:
        await drained(kernel, await make(kernel, b"clean"))
        inos = [await make(kernel, b"f%d" % number) for number in range(3)]
    (directory / "burst").rename(directory / "away")
    if replacement == "empty directory":
        (directory / "burst").mkdir()
    with pytest.raises(StoreError, match=re.escape(f"{directory}/burst") + ".*3 files") as told:
        async with mounted(directory):
            pass
    assert "\n" not in str(told.value)
    if replacement == "empty directory":
        (directory / "burst").rmdir()
    (directory / "away").rename(directory / "burst")
    async with mounted(directory) as kernel:
        for ino in inos:
            assert await content_of(kernel, ino) == CONTENT
            await drained(kernel, ino)
    await require_sound(config_of(directory))


# --- servers under a drain ------------------------------------------------------------------------

FAULTS = {"read-only": errno.EROFS, "full": errno.ENOSPC, "failing": errno.EIO}


@pytest.mark.parametrize("kind", ["striped", "interleaved"])
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_drain_waits_for_servers_that_cannot_be_written(
    directory: Path, fault: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with mounted(
        directory, DRAINING | {"layout.kind": kind, "burst.drain_delay": "1h"}
    ) as kernel:
        inos = [await make(kernel, b"f%d" % number) for number in range(5)]
        with failing(
            ("open_file", "write_at", "truncate", "sync_file"), f"{directory}/data", FAULTS[fault]
        ):
            kernel.drain.request(inos)
            while not kernel.drain.status()["failing_files"]:
                await trio.sleep(0.01)
            for ino in inos:
                assert (await kernel.getattr(ino)).in_burst
                assert await content_of(kernel, ino) == CONTENT
            assert await content_of(kernel, await make(kernel, b"new")) == CONTENT
            assert kernel.drain.status()["last_error"]
        await kernel.drain.wait(inos)
        for ino in inos:
            assert not (await kernel.getattr(ino)).in_burst
            await kernel.evictor.evict(ino)
            assert await content_of(kernel, ino) == CONTENT
    await require_sound(config_of(directory))
    assert len([line for line in warnings(caplog) if "draining has to wait" in line]) == 1
