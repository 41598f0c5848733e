"""A store has one owner, also where its metadata directory has been copied or restored:
docs/design/servers.md, Owner.
"""

import fcntl
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from aifs.check.fsck import check
from aifs.cli.fsck import EXIT_CANNOT_CHECK
from aifs.cli.main import main
from aifs.core import faults, files
from aifs.core.config import Config
from aifs.core.errors import StoreBusy, StoreError, Unavailable
from aifs.data.claim import Claim, put_claim, read_claim
from aifs.data.directory_storage import DirectoryStorage
from aifs.files.services import ServeOptions
from aifs.store import owner, ownership
from aifs.store.owner import OwnerLock
from aifs.store.restore import restore
from aifs.store.store import format_store
from aifs.vfs import Filesystem, open_filesystem
from tests.support import modes
from tests.support.hanging import hanging, until
from tests.support.stores import LIMIT_S, drained, read_file, require_sound, served, write_file

RENEWED_S = 0.01


@pytest.fixture
def config(directory: Path) -> Config:
    modes.make_store(directory, {**modes.WAITING, "meta.backup_interval": "1h"}, servers=3)
    return modes.config_of(directory)


@pytest.fixture
def renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Often, so that tests do not wait."""
    monkeypatch.setattr(ownership, "INTERVAL_S", RENEWED_S)
    monkeypatch.setattr(ownership, "WATCH_S", 20 * RENEWED_S)


def with_copy_of_metadata(config: Config, name: str = "copy") -> Config:
    """The same servers, with a copy of the metadata directory as it is now."""
    meta = config.meta.directory
    copy = os.path.join(os.path.dirname(meta), name)
    shutil.copytree(meta, copy)
    return moved_to(config, copy)


def moved_to(config: Config, meta: str) -> Config:
    return config.model_copy(update={"meta": config.meta.model_copy(update={"directory": meta})})


def directories(config: Config) -> tuple[str, ...]:
    return (*config.servers, *config.burst.directories)


def claim_of(path: str) -> Claim | None:
    return read_claim(DirectoryStorage(path))


async def die(
    config: Config, work: Callable[[Filesystem], Awaitable[object]] | None = None
) -> None:
    """A mount that ends as by kill -9."""
    with pytest.raises(faults.SimulatedCrash):
        async with served(config) as fs:
            if work is not None:
                await work(fs)
            raise faults.SimulatedCrash("killed")


async def ended(fs: Filesystem) -> None:
    await until(lambda: fs.store.ownership.ended)


# --- refused ---


async def test_copied_metadata_are_refused_while_the_store_is_in_use(config: Config) -> None:
    async with served(config) as fs:
        await write_file(fs, b"file", b"content")
        copy = with_copy_of_metadata(config)
        claims = [claim_of(path) for path in directories(config)]
        with pytest.raises(StoreBusy) as refused:
            async with served(copy):
                pass
        said = str(refused.value)
        assert os.uname().nodename in said and config.meta.directory in said and "--force" in said
        assert re.search(r"renewed last at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", said), said
        assert claims == [claim_of(path) for path in directories(config)], "nothing is changed"
        with pytest.raises(StoreBusy):
            await trio.to_thread.run_sync(lambda: check(copy, repair=True))
    await require_sound(config)


@pytest.mark.sweep
@pytest.mark.parametrize("of_a_mount", [False, True], ids=["unmounted", "mounted"])
async def test_metadata_that_were_copied_are_refused_when_the_store_was_used_since(
    config: Config, of_a_mount: bool
) -> None:
    if not of_a_mount:
        async with served(config):
            pass
        copy = with_copy_of_metadata(config)
    async with served(config) as fs:
        if of_a_mount:
            copy = with_copy_of_metadata(config)
        ino = await write_file(fs, b"file", b"content")
    with pytest.raises(StoreError, match=r"are older than those in .*/meta on host"):
        async with served(copy):
            pass
    async with served(config) as fs:
        assert await read_file(fs, ino) == b"content"
    await require_sound(config)


async def test_fsck_of_copied_metadata_takes_the_store_over_by_force_alone(
    config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    await die(config, lambda fs: write_file(fs, b"file", bytes(100_000)))
    meta = config.meta.directory
    os.rename(meta, meta + ".old")
    shutil.copytree(meta + ".old", meta)
    assert await trio.to_thread.run_sync(main, ["fsck", config.source]) == EXIT_CANNOT_CHECK
    assert "fsck --force" in capsys.readouterr().err
    assert await trio.to_thread.run_sync(main, ["fsck", "--force", config.source]) == 0
    with pytest.raises(StoreError, match="older"):
        async with served(moved_to(config, meta + ".old")):
            pass
    await require_sound(config)


async def test_copied_metadata_of_an_owner_that_died_need_force(config: Config) -> None:
    await die(config, lambda fs: write_file(fs, b"file", bytes(100_000)))
    copy = with_copy_of_metadata(config)
    with pytest.raises(StoreBusy):
        async with served(copy):
            pass
    with trio.fail_after(LIMIT_S):
        async with open_filesystem(copy, force=True) as fs:
            assert await read_file(fs, (await fs.lookup(1, b"file")).ino) == bytes(100_000)
    with pytest.raises(StoreError, match="older"):
        async with served(config):
            pass
    await require_sound(copy)


@pytest.mark.parametrize("alive", [True, False])
async def test_after_a_restart_the_claim_is_watched(
    config: Config, renewed: None, alive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be another machine with a clone of the metadata's disk."""
    await die(config)
    monkeypatch.setattr(files, "boot_id", lambda: "another")
    if not alive:
        late = claim_of(config.servers[0])  # on a server that had failed before the others
        for path in directories(config)[1:]:
            put_claim(DirectoryStorage(path), replace(late, renewals=7), durable=True)
        await require_sound(config)
        return
    path = os.path.join(config.servers[1], "owner")
    claim = claim_of(config.servers[1])
    content = Path(path).read_bytes()

    async def renew() -> None:
        for number in range(1, 10_000):
            put_claim(
                DirectoryStorage(config.servers[1]), replace(claim, renewals=number), durable=False
            )
            await trio.sleep(RENEWED_S)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(renew)
        with pytest.raises(StoreBusy):
            async with open_filesystem(config):
                pass
        nursery.cancel_scope.cancel()
    Path(path).write_bytes(content)
    await require_sound(config)


async def test_a_copy_that_was_mounted_read_only_takes_nothing_over(config: Config) -> None:
    await require_sound(config)
    copy = with_copy_of_metadata(config)
    for _ in range(2):
        async with open_filesystem(copy, ServeOptions(read_only=True)):
            pass
    async with served(config) as fs:
        with pytest.raises(StoreBusy):
            async with open_filesystem(copy):
                pass
        assert not fs.store.ownership.ended
    await require_sound(config)


async def test_a_store_in_use_is_not_formatted(config: Config, renewed: None) -> None:
    async with served(config):
        other = moved_to(config, f"{config.meta.directory}-other")
        with pytest.raises(StoreBusy):
            await trio.to_thread.run_sync(lambda: format_store(other, force=True))
    await require_sound(config)


async def test_of_two_that_come_at_once_one_at_most_has_the_store(config: Config) -> None:
    """And it is nobody's loss: who was refused may try again, unless the other one has got it."""
    await require_sound(config)
    both = (config, with_copy_of_metadata(config))
    for _ in range(5):
        inside, refused = [], []

        async def use(one: Config, inside: list = inside, refused: list = refused) -> None:
            try:
                async with open_filesystem(one) as fs:
                    inside.append(one)
                    assert len(inside) == 1
                    await trio.sleep(RENEWED_S)
                    assert not fs.store.ownership.ended
                    inside.remove(one)
            except StoreError:
                refused.append(one)

        async with trio.open_nursery() as nursery:
            for one in both:
                nursery.start_soon(use, one)
        assert refused
        if len(refused) == 1:
            break
    else:
        refused = [both[1]]
    winner = both[0] if refused[0] is both[1] else both[1]
    await require_sound(winner)
    with pytest.raises(StoreError):
        async with open_filesystem(refused[0]):
            pass


# --- not refused ---


@pytest.fixture
def never_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "WATCH_S", float("inf"))


@pytest.mark.usefixtures("never_watched")
async def test_the_same_metadata_are_mounted_at_once_after_a_kill(config: Config) -> None:
    await die(config)
    await die(config)
    await require_sound(config)


KILLED = """
import os, signal, sys
from aifs.store.owner import OwnerLock
lock = OwnerLock(sys.argv[1], "/mnt")
if os.fork():
    os.kill(os.getpid(), signal.SIGKILL)
sys.stdin.read()
"""


def test_an_owner_that_was_killed_counts_as_dead_before_it_is_reaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it began has its lock for a moment longer."""
    command = [sys.executable, "-c", KILLED, tmp_path]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        waited = []
        monkeypatch.setattr(time, "sleep", lambda _: waited.append(process.stdin.close()))
        OwnerLock(str(tmp_path), "/mnt").release(orderly=True)
    assert waited


def test_a_holder_of_the_lock_without_a_record_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was killed before it wrote its record, or has erased it and is about to end."""
    with open(tmp_path / owner.NAME, "wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        waited = []
        monkeypatch.setattr(time, "sleep", lambda _: waited.append(held.close()))
        OwnerLock(str(tmp_path), "/mnt").release(orderly=True)
    assert waited


@pytest.mark.usefixtures("never_watched")
async def test_a_clean_unmount_gives_the_right_back(config: Config) -> None:
    """Whoever has a copy that was made after it may have the store."""
    async with served(config):
        pass
    assert not any(claim_of(path).held for path in directories(config))
    await require_sound(with_copy_of_metadata(config))


@pytest.mark.usefixtures("never_watched")
async def test_a_store_that_knows_no_claims_is_opened(config: Config) -> None:
    await require_sound(config)
    for path in directories(config):
        os.unlink(os.path.join(path, "owner"))
    await require_sound(config)


# --- the old owner ---


async def take_over(config: Config) -> None:
    async with open_filesystem(config, force=True):
        pass


async def test_an_owner_notices_that_it_has_lost_its_right(
    config: Config, renewed: None, caplog: pytest.LogCaptureFixture
) -> None:
    """It writes and deletes nothing any more, and says who has the store."""
    with pytest.raises(StoreBusy, match="was taken over by pid"), trio.fail_after(LIMIT_S):
        async with open_filesystem(config) as fs:
            kept = await write_file(fs, b"kept", bytes(200_000))
            await drained(fs, kept)
            copy = with_copy_of_metadata(config)
            await take_over(copy)
            assert fs.store.ownership.ended, "before the new owner has begun"
            before = {path: sorted(Path(path).rglob("*.*")) for path in directories(config)}
            with pytest.raises(Unavailable):
                await write_file(fs, b"new", bytes(200_000))
            await fs.unlink(1, b"kept")
            await fs.collector.drain()
            assert before == {path: sorted(Path(path).rglob("*.*")) for path in directories(config)}
    assert "taken over" in caplog.text
    async with served(copy) as fs:
        assert await read_file(fs, kept) == bytes(200_000)
    await require_sound(copy)


async def test_a_restore_ends_the_right_of_the_old_metadata(config: Config, renewed: None) -> None:
    async with served(config) as fs:
        ino = await write_file(fs, b"file", bytes(100_000))
    new = moved_to(config, f"{config.meta.directory}-new")
    with pytest.raises(StoreBusy, match="was taken over by"), trio.fail_after(LIMIT_S):
        async with open_filesystem(config) as fs:
            with pytest.raises(StoreBusy, match="Unmount it there"):
                await trio.to_thread.run_sync(lambda: restore(new, "", None))
            assert not os.path.exists(new.meta.directory)
            await trio.to_thread.run_sync(lambda: restore(new, "", None, force=True))
            await ended(fs)
    with pytest.raises(StoreError, match="older"):
        async with served(config):
            pass
    async with served(new) as fs:
        assert await read_file(fs, ino) == bytes(100_000)


async def test_servers_that_fail_or_hang_end_no_right(config: Config, renewed: None) -> None:
    async with served(config) as fs:
        claims = [claim_of(path) for path in directories(config)]
        with hanging(config.servers[0]) as hang:
            await until(lambda: hang.held)
            seen = claim_of(config.servers[1]).renewals
            await until(lambda: claim_of(config.servers[1]).renewals > seen + 2)
            assert len(hang.held) == 1, "one thread waits"
        seen = claim_of(config.servers[0]).renewals
        await until(lambda: claim_of(config.servers[0]).renewals > seen)
        assert not fs.store.ownership.ended
        assert claims[0].epoch == claim_of(config.servers[0]).epoch
    await require_sound(config)
