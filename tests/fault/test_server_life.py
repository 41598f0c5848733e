"""Servers come and go: added, drained, replaced, removed, lost, missing at mount and back, stale,
the wrong one.
"""

import logging
import os
import random
import shutil
import threading
from pathlib import Path

import pytest
import trio
import trio.testing

from aifs.cli import server as cli_server
from aifs.cli.server import OpenDoor
from aifs.core import config as configuration
from aifs.core import faults
from aifs.core.config import DIRECTORY_FILE, Config
from aifs.core.errors import Busy, FsError, Invalid, NotPermitted, StoreError, Unavailable
from aifs.core.faults import SimulatedCrash
from aifs.core.upkeep import Work
from aifs.data import patience
from aifs.data import servers as data_servers
from aifs.layout.placement import BURST_FIRST
from aifs.meta import keys
from aifs.meta.keys import ROOT_INO
from aifs.meta.servers import mark_unprotected, read_table
from aifs.store.directories import same_directories
from aifs.store.store import format_store, open_store
from aifs.upkeep import server_admin
from aifs.vfs import Caller
from aifs.vfs.filesystem import Filesystem
from tests.support import modes, stores
from tests.support.data_servers import failing, hooked
from tests.support.hanging import hanging, until
from tests.support.points import crash
from tests.support.server_orders import described, order, removed, row, until_empty
from tests.support.stores import by_kind, moved_out, read_file, require_sound, served
from tests.support.stores import fs as fs

UNIT = 4096
SETTINGS = modes.STRIPED | {
    "layout.unit": UNIT,
    "layout.inline_limit": 0,
    "burst.drain_delay": "0s",
    "burst.throttle_max": "0s",
    "meta.backup_interval": "0",
}
KINDS = {
    "plain": {"layout.count": 2},
    "wide": {"layout.stripe_above": 0},
    "replicas": {"layout.replicas": 2, "layout.count": 2},
    "coded": {"layout.ec": "2+1"},
    "containers": {"layout.kind": "interleaved"},
    "coded containers": {"layout.kind": "interleaved", "layout.ec": "2+1"},
}
SIZES = (UNIT, 9 * UNIT + 17, 200_000)

pytestmark = pytest.mark.store(base=SETTINGS | {"burst.directories": ["burst/0"]}, servers=5)


every_kind = by_kind(KINDS)
protected = by_kind(KINDS, "replicas", "coded", "coded containers")


@pytest.fixture
def config(directory: Path, fs: Filesystem) -> Config:
    return modes.config_of(directory)


async def make(
    scratch: Path, settings: dict[str, object], servers: int = 5, burst: int = 1
) -> Config:
    """A store beside which there is room for other directories."""
    source, directories = scratch / "store", [f"burst/{number}" for number in range(burst)]
    settings = SETTINGS | {"burst.directories": directories} | settings
    await trio.to_thread.run_sync(modes.make_store, source, settings, servers)
    return modes.config_of(source)


def allowing(config: Config) -> Config:
    return config.model_copy(update={"data": config.data.model_copy(update={"missing": "allow"})})


def bytes_of(name: str, size: int) -> bytes:
    return random.Random(name).randbytes(size)


async def write_file(fs: Filesystem, name: str, size: int) -> int:
    return await stores.write_file(fs, name.encode(), bytes_of(name, size))


async def write_files(fs: Filesystem, prefix: str = "f") -> dict[str, int]:
    """Drained, without burst copies."""
    sizes = {f"{prefix}{size}-{number}": size for size in SIZES for number in range(4)}
    inos = [await write_file(fs, name, size) for name, size in sizes.items()]
    await moved_out(fs, *inos)
    return sizes


async def require(fs: Filesystem, name: str, size: int) -> None:
    assert await read_file(fs, (await fs.lookup(ROOT_INO, name.encode())).ino) == bytes_of(
        name, size
    ), name


async def require_all(fs: Filesystem, sizes: dict[str, int]) -> None:
    for name, size in sizes.items():
        await require(fs, name, size)


async def unreadable(fs: Filesystem, sizes: dict[str, int]) -> set[str]:
    found = set()
    for name, size in sizes.items():
        try:
            await require(fs, name, size)
        except Unavailable:
            found.add(name)
    return found


def objects_in(path: Path) -> list[str]:
    return sorted(file.name for file in path.glob("objects/*/*/*"))


# --- coming and going -----------------------------------------------------------------------------


@pytest.mark.sweep
@every_kind
async def test_a_server_is_drained_and_removed(scratch: Path, kind: str) -> None:
    config = await make(scratch, KINDS[kind])
    async with served(config) as fs:
        sizes = await write_files(fs)
        assert any(objects_in(Path(path)) for path in config.servers)
        with pytest.raises(Busy, match="^data server 1 is in use: drain it first"):
            await order(fs, "remove", id=1)
        assert "drain it first" in (await described(fs))["refused"]
        os.mkdir(f"{config.servers[1]}/backup")  # of the metadata
        Path(config.servers[1], "backup", "1").write_bytes(b"x")
        await order(fs, "drain", id=1)
        assert (await row(fs, 1))["standing"] == "draining"
        assert 1 not in fs.store.servers.usable()
        await until_empty(fs, 1)
        await require_all(fs, sizes)
        sizes |= await write_files(fs, "later")
        await fs.collector.drain(urgent=True)
        assert await removed(fs, id=1) == {"reason": "", "passing": False}
        await require_all(fs, sizes)
        assert os.listdir(config.servers[1]) == []
        assert 1 not in fs.store.servers
        assert await fs.store.engine.view(
            lambda tx: (tx.get(keys.server(1)), tx.get(keys.unprotected(1)))
        ) == (None, None)
        with pytest.raises(Invalid, match="^there is no data server 1 in this store"):
            await order(fs, "drain", id=1)
        # It is an empty directory now.
        await order(fs, "add", path=config.servers[1], domain="rack-z")
        assert (await row(fs, 5))["domain"] == "rack-z"  # under a new number
    await require_sound(config)
    async with served(config) as fs:
        await require_all(fs, sizes)


async def test_what_still_has_objects_is_not_removed(fs: Filesystem, config: Config) -> None:
    sizes = await write_files(fs)
    with failing("open_file", config.servers[4]):  # where it is to be moved to, and from
        with failing(("open_file", "read_into"), config.servers[2]):
            await order(fs, "drain", id=2)
            outcome = await removed(fs, id=2)
    assert outcome["passing"] and "of data server 2 have to be moved first" in outcome["reason"]
    await order(fs, "drain", id=2, undo=True)
    assert (await row(fs, 2))["standing"] == "active"
    await fs.collector.drain(urgent=True)
    await require_all(fs, sizes)


@pytest.mark.sweep
async def test_draining_goes_on_after_a_restart(scratch: Path) -> None:
    config = await make(scratch, KINDS["coded"])
    async with served(config) as fs:
        sizes = await write_files(fs)
        await order(fs, "drain", id=0)
    async with served(config) as fs:
        assert (await row(fs, 0))["standing"] == "draining"
        await until_empty(fs, 0)
        assert not (await removed(fs, id=0))["reason"]
        await require_all(fs, sizes)
    await require_sound(config)


@pytest.mark.store(servers=2)
async def test_the_last_server_in_use_stays(fs: Filesystem) -> None:
    await order(fs, "drain", id=0)
    with pytest.raises(
        Invalid, match="^there is no other data server in use than 1: add one first"
    ):
        await order(fs, "drain", id=1)


@every_kind
async def test_a_server_that_works_is_replaced_by_moving_what_it_has(fs, scratch, kind):
    sizes = await write_files(fs)
    await order(fs, "replace", id=3, path=f"{scratch}/new")
    old, new = await row(fs, 3), await row(fs, 5)
    assert (old["standing"], old["successor"], new["standing"]) == ("draining", 5, "active")
    await until_empty(fs, 3)
    await require_all(fs, sizes)
    assert not (await removed(fs, id=3))["reason"]
    with pytest.raises(Invalid, match="there is no data server 3"):
        await order(fs, "replace", id=3, path=f"{scratch}/other")


@pytest.mark.sweep
@pytest.mark.store(KINDS["coded"])
async def test_a_server_that_goes_while_it_is_in_use_is_lost_when_it_is_replaced(
    fs, config, scratch, caplog
):
    sizes = await write_files(fs)
    await fs.store.engine.transact(mark_unprotected, range(5))  # there have been plain files once
    os.rename(config.servers[3], scratch / "gone")
    await order(fs, "replace", id=3, path=f"{scratch}/new")
    assert (await row(fs, 3))["standing"] == "lost"
    await until_empty(fs, 3)
    await require_all(fs, sizes)
    assert not (await removed(fs, id=3))["reason"]


@pytest.mark.sweep
@protected
async def test_a_server_that_is_gone_is_replaced_by_rebuilding_at_the_same_place(
    scratch: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = await make(scratch, KINDS[kind])
    async with served(config) as fs:
        sizes = await write_files(fs)
    shutil.rmtree(config.servers[2])  # a new, empty disk is mounted there
    os.mkdir(config.servers[2])
    async with served(config) as fs:
        assert (await row(fs, 2))["state"] == "gone"
        await require_all(fs, sizes)
        await order(fs, "replace", id=2, path=config.servers[2])
        assert (await row(fs, 2))["standing"] == "lost"
        await until_empty(fs, 2)
        await require_all(fs, sizes)
    async with served(config) as fs:
        await require_all(fs, sizes)
        assert not (await removed(fs, id=2))["reason"]
        assert (Path(config.servers[2]) / ".aifs").exists()  # it is the new one's
    await require_sound(config)
    assert [record for record in caplog.records if record.levelno > logging.WARNING] == []


# --- missing ones ---------------------------------------------------------------------------------


@pytest.mark.sweep
async def test_a_missing_server_with_unprotected_bytes_is_refused_or_done_without(
    scratch: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = await make(scratch, {"layout.count": 2})
    async with served(config) as fs:
        sizes = await write_files(fs)
    away = scratch / "away"
    os.rename(config.servers[1], away)
    with pytest.raises(StoreError) as caught:
        async with served(config):
            pass
    assert str(caught.value) == (
        f"data server 1: {config.servers[1]}: there is no such directory; is its filesystem "
        "mounted?; unprotected files may have bytes there; put it right, or mount without it and "
        "them: -o data.missing=allow"
    )
    async with served(allowing(config)) as fs:
        gone = await unreadable(fs, sizes)
        assert 0 < len(gone) < len(sizes)
        assert (await row(fs, 1))["state"] == "gone"
        sizes |= await write_files(fs, "later")
        assert await unreadable(fs, sizes) == gone
        os.rename(away, config.servers[1])
        await fs.store.servers.look()
        while (await row(fs, 1))["state"] == "gone":
            await trio.sleep(0.01)
        await require_all(fs, sizes)
    assert "does without a data server for now: data server 1" in caplog.text
    await require_sound(config)


@pytest.mark.sweep
@protected
async def test_a_missing_server_with_protected_bytes_alone_is_done_without(
    scratch: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = await make(scratch, KINDS[kind])
    async with served(config) as fs:
        sizes = await write_files(fs)
    away = scratch / "away"
    os.rename(config.servers[0], away)
    async with served(config) as fs:
        await require_all(fs, sizes)
        sizes |= await write_files(fs, "later")
    os.rename(away, config.servers[0])
    async with served(config) as fs:
        await require_all(fs, sizes)
    assert caplog.text.count("does without a data server for now") == 1
    await require_sound(config)


@every_kind
async def test_a_lost_server_is_removed_and_says_first_what_goes_with_it(
    scratch: Path, kind: str
) -> None:
    config = await make(scratch, KINDS[kind])
    async with served(config) as fs:
        sizes = await write_files(fs)
        dead = max(range(5), key=lambda number: len(objects_in(Path(config.servers[number]))))
        with pytest.raises(
            Busy, match=f"^data server {dead} is there: drain it instead, so that nothing is lost"
        ):
            await order(fs, "remove", id=dead, lost=True)
    stale = scratch / "stale"
    os.rename(config.servers[dead], stale)
    async with served(allowing(config)) as fs:
        gone = await unreadable(fs, sizes)
        outcome = await removed(fs, id=dead, lost=True)
        assert bool(gone) == (kind in ("plain", "wide", "containers"))
        if gone:
            files = f"{len(gone)} file{'s' * (len(gone) > 1)}"
            assert outcome == {
                "reason": f"{files} would be lost with data server {dead}",
                "passing": False,
            }
            assert (await row(fs, dead))["standing"] == "active"
            outcome = await removed(fs, id=dead, lost=True, lose_files=True)
            assert outcome["reason"].startswith(
                f"{files} cannot be read without data server {dead}"
            )
            assert (await row(fs, dead))["standing"] == "lost"
            for name in gone:
                ino = (await fs.lookup(ROOT_INO, name.encode())).ino
                await fs.unlink(ROOT_INO, name.encode())
                fs.forget([ino])
                del sizes[name]
            await fs.collector.drain(urgent=True)
    async with served(config) as fs:  # lost servers need not be allowed to be missing
        while (outcome := await removed(fs, id=dead))["passing"]:
            await trio.sleep(0.01)
        assert not outcome["reason"]
        await require_all(fs, sizes)
        os.rename(stale, config.servers[dead])
        with pytest.raises(
            Invalid, match=f"holds what data server {dead} of this store had, which is stale"
        ):
            await order(fs, "add", path=config.servers[dead])
    await require_sound(config)


async def test_a_stale_directory_is_not_taken_for_the_new_one(scratch: Path) -> None:
    config = await make(scratch, KINDS["replicas"])
    async with served(config) as fs:
        sizes = await write_files(fs)
        shutil.copytree(config.servers[2], scratch / "backup")
        await order(fs, "replace", id=2, path=f"{scratch}/new")
        await until_empty(fs, 2)
        assert not (await removed(fs, id=2))["reason"]
    shutil.rmtree(scratch / "new")
    shutil.copytree(scratch / "backup", scratch / "new")
    async with served(config) as fs:
        new = await row(fs, 5)
        assert new["state"] == "gone" and "its marker says data 2 of store" in new["last_error"]
        await require_all(fs, sizes)


# --- burst directories ----------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.store({"burst.drain_delay": "1h", "burst.directories": ["burst/0", "burst/1"]})
async def test_a_burst_directory_is_emptied_and_removed(fs, config, scratch):
    sizes = {f"f{number}": 50_000 for number in range(12)}
    inos = [await write_file(fs, name, size) for name, size in sizes.items()]
    await fs.setxattr(inos[0], b"user.aifs.tier", b"pinned")
    devices = {(await fs.getattr(ino)).copy.server for ino in inos}
    assert devices == {BURST_FIRST, BURST_FIRST + 1}
    with pytest.raises(Busy, match="^burst directory 0 is in use: drain it first"):
        await order(fs, "remove", id=0, role="burst")
    await order(fs, "drain", id=0, role="burst")
    sizes["later"] = 50_000
    assert (await fs.getattr(await write_file(fs, "later", 50_000))).copy.server == BURST_FIRST + 1
    await until_empty(fs, 0, "burst")
    while (outcome := await removed(fs, id=0, role="burst"))["passing"]:
        await trio.sleep(0.01)
    assert not outcome["reason"]
    await require_all(fs, sizes)
    assert os.listdir(config.burst.directories[0]) in ([], ["objects"])
    await order(fs, "add", path=f"{scratch}/b2", role="burst")
    assert (await row(fs, 2, "burst"))["standing"] == "active"


# --- crashes, races, nonsense ---------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("point", ["vfs.server.marked", "vfs.server.removed"])
async def test_a_crash_on_the_way_is_made_up_for_by_trying_again(scratch: Path, point: str) -> None:
    config = await make(scratch, {})
    new = f"{scratch}/new"
    with pytest.raises(SimulatedCrash):
        async with served(config) as fs:
            if point == "vfs.server.removed":
                await order(fs, "add", path=new)
                await order(fs, "drain", id=5)
                await until_empty(fs, 5)
                faults.arm(point, crash)
                await removed(fs, id=5)
            faults.arm(point, crash)
            await order(fs, "add", path=new)
    faults.disarm_all()
    async with served(config) as fs:
        await order(fs, "add", path=new)
        assert (await row(fs, 5 if point == "vfs.server.marked" else 6))["path"] == new
    await require_sound(config)


async def test_orders_that_make_no_sense_are_refused(fs: Filesystem, config: Config) -> None:
    for what, fields in [
        ("drain", {"id": 77}),
        ("drain", {"id": -1}),
        ("drain", {"id": "1"}),
        ("drain", {}),
        ("drain", {"id": 1, "role": "x"}),
        ("drain", {"id": BURST_FIRST}),
        ("replace", {"id": 1, "path": "relative"}),
        ("remove", {"id": 9}),
        ("replace", {"id": 1, "path": config.servers[2]}),
        ("add", {"path": "/x", "domain": "a\nb"}),
        ("add", {"path": config.servers[0]}),
        ("remove", {"id": 0, "role": "burst", "lost": True}),
        ("replace", {"id": 1, "path": config.meta.directory}),
    ]:
        with pytest.raises(Invalid):
            await order(fs, what, **fields)
    for value in (b"", b"[]", b"{", b"\xff", b"null"):
        with pytest.raises(Invalid):
            await fs.setxattr(ROOT_INO, b"user.aifs.server-drain", value)
    with pytest.raises(NotPermitted):
        await order(fs, "drain", caller=Caller(1000, 1000), id=1)
    with pytest.raises(FsError):
        await fs.setxattr(5, b"user.aifs.server-drain", b"{}")
    assert [server["standing"] for server in (await described(fs))["servers"]] == ["active"] * 6


def test_domains_of_the_configuration_are_those_of_the_table(tmp_path: Path) -> None:
    text = "meta: {{directory: meta}}\nservers: [{{path: s0, domain: {}}}, s1]\n"
    file = tmp_path / "c.yaml"

    def domains() -> list[tuple[str, str]]:
        async def look() -> list[tuple[str, str]]:
            store = await open_store(configuration.load(str(file), {}))
            try:
                records = (await store.engine.view(read_table)).values()
                candidates = [candidate.domain for candidate in store.servers.candidates()]
                return list(zip([record.domain for record in records], candidates, strict=True))
            finally:
                store.close()

        return trio.run(look)

    file.write_text(text.format("rack-a"))
    format_store(configuration.load(str(file), {}), force=False)
    assert domains() == [("rack-a", "rack-a"), ("", "server 1")]
    file.write_text(text.format("rack-b"))
    assert domains() == [("rack-b", "rack-b"), ("", "server 1")]
    file.write_text("meta: {directory: meta}\nservers: [s0, s1]\n")
    assert domains() == [("rack-b", "rack-b"), ("", "server 1")]


async def test_a_removal_that_is_asked_for_in_other_words_meanwhile_is_not_forgotten(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first look through the store takes its time; then the answer is that to the last
    order."""
    config = await make(scratch, KINDS["plain"])
    count, going_on = server_admin.count_uses, trio.Event()

    async def slowly(*args: object) -> object:
        await going_on.wait()
        return await count(*args)

    async with served(config) as fs:
        await write_files(fs)
    shutil.rmtree(config.servers[0])
    async with served(allowing(config)) as fs:
        monkeypatch.setattr(server_admin, "count_uses", slowly)
        await order(fs, "remove", id=0, lost=True)
        await trio.testing.wait_all_tasks_blocked(0.01)
        await order(fs, "remove", id=0, lost=True, lose_files=True)
        going_on.set()
        while (outcome := (await described(fs))["removals"][0]["outcome"]) is None:
            await trio.sleep(0.01)
        assert "cannot be read without data server 0" in outcome["reason"]
        assert (await row(fs, 0))["standing"] == "lost"


async def test_a_directory_that_takes_its_time_does_not_hold_up_the_mount(fs, config, scratch):
    new, thread = scratch / "new", []
    with hooked(
        lambda op, path: thread.append(threading.get_ident()) if path.startswith(str(new)) else None
    ):
        await order(fs, "add", path=str(new))
    assert thread and threading.get_ident() not in thread
    with pytest.raises(Invalid, match="below: is not a directory"):
        await order(fs, "add", path=f"{config.source}/{DIRECTORY_FILE}/below")
    assert len(fs.store.servers.capacity()) == 6


@pytest.mark.store({"data.timeout": "200ms"})
async def test_a_directory_that_does_not_answer_is_not_added(fs: Filesystem, scratch: Path) -> None:
    """What is written there late is nobody's: its number is not used again."""
    with hanging(str(scratch / "new"), ("rename",)) as hang:
        with pytest.raises(Invalid, match=r"new: has not answered within 0.2 s; it is not added"):
            await order(fs, "add", path=str(scratch / "new"))
        await order(fs, "add", path=str(scratch / "other"))
        hang.release()
        await until(lambda: (scratch / "new" / ".aifs").exists())
    assert [server.id for server in fs.store.servers.capacity()] == [0, 1, 2, 3, 4, 6]


@pytest.mark.store({"data.timeout": "200ms"})
async def test_a_server_is_added_beside_one_that_hangs(fs, scratch, monkeypatch):
    """Nobody looks at what hangs."""
    hung = fs.store.servers[1]
    with hanging(hung.address, ("read_file",)) as hang:
        with patience.giving_up(), pytest.raises(Unavailable):
            await fs.store.servers.run(hung, hung.identify, False)
        real = os.path.realpath
        monkeypatch.setattr(
            os.path, "realpath", lambda path: real(path) if path != hung.address else pytest.fail()
        )
        await order(fs, "add", path=str(scratch / "new"))
        monkeypatch.undo()
        hang.release()
    assert len(fs.store.servers.capacity()) == 6


def test_symlinks_are_followed_only_where_paths_are_written_otherwise(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (scratch / "link").symlink_to(scratch / "a")
    known = [f"{scratch}/a", f"{scratch}/hangs"]
    named = [f"{scratch}/x/../hangs", f"{scratch}/link", f"{scratch}/other"]
    real = os.path.realpath
    monkeypatch.setattr(
        os.path, "realpath", lambda path: real(path) if "hangs" not in path else pytest.fail()
    )
    assert same_directories(named, known) == {named[0]: known[1], named[1]: known[0]}


# --- servers that stop working below a mount ------------------------------------------------------


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that do not work are looked at all the time."""
    monkeypatch.setattr(data_servers, "_LOOK_AGAIN_S", 0.01)
    monkeypatch.setattr(data_servers, "_LOOK_S", 0.02)


@pytest.mark.parametrize("kind", ["replicas", "coded", "coded containers"])
async def test_what_is_protected_is_rebuilt_when_a_server_stays_away(
    scratch: Path, kind: str, soon: None, caplog: pytest.LogCaptureFixture
) -> None:
    """And the server is used again, without what was rebuilt, when it is back."""
    config = await make(scratch, KINDS[kind] | {"data.lost_after": "200ms"})
    async with served(config) as fs:
        sizes = await write_files(fs)
        away = scratch / "away"
        os.rename(config.servers[1], away)
        server = fs.store.servers[1]
        await until(lambda: server.given_up)
        assert server.state == "gone" and "there is no such directory" in server.last_error
        await until(lambda: fs.rebuild.idle)
        os.rename(config.servers[2], scratch / "away too")  # so what was made is needed
        await require_all(fs, sizes)
        os.rename(scratch / "away too", config.servers[2])
        os.rename(away, config.servers[1])
        await until(lambda: server.state in ("ok", "back") and not server.given_up)
        fs.upkeep.wake(Work.STRAYS)
        await until(lambda: fs.rebuild.idle and server.state == "ok")
        await require_all(fs, sizes)
    assert "has not worked for 0.2 s" in caplog.text
    await require_sound(config)


@pytest.mark.sweep
@pytest.mark.store({"layout.count": 2, "data.lost_after": "100ms"})
@pytest.mark.parametrize("is_drained", [False, True], ids=["in use", "drained"])
async def test_what_is_not_protected_waits_for_a_server_that_is_gone(
    fs, config, scratch, soon, is_drained
):
    """If the server was drained meanwhile, it is emptied when it is back."""
    sizes = await write_files(fs)
    os.rename(config.servers[1], scratch / "away")
    await until(lambda: fs.store.servers[1].given_up)
    if is_drained:
        await order(fs, "drain", id=1)
    else:
        await until(lambda: fs.rebuild.idle)
        assert not fs.rebuild.status()["failing_objects"]
    os.rename(scratch / "away", config.servers[1])
    await until(lambda: fs.store.servers[1].state == "ok")
    if is_drained:
        fs.damage.due()
        await until_empty(fs, 1)
    await require_all(fs, sizes)


@pytest.mark.sweep
@pytest.mark.store(KINDS["coded"])
async def test_a_server_that_vanished_can_be_given_up(fs, config, scratch, soon):
    sizes = await write_files(fs)
    with pytest.raises(Busy, match="is there: drain it instead"):
        await order(fs, "remove", id=1, lost=True)
    os.rename(config.servers[1], scratch / "away")
    outcome = await removed(fs, id=1, lost=True)
    while outcome["passing"]:
        await until_empty(fs, 1)
        outcome = await removed(fs, id=1)
    assert not outcome["reason"]
    await require_all(fs, sizes)


@pytest.mark.store({"meta.commit_interval": "1h", "burst.directories": []})
async def test_servers_are_watched_as_in_use_until_who_opens_a_file_says_so_again(fs):
    busy_s, idle_s = map(fs.store.servers.watch_again_s, (True, False))
    await trio.testing.wait_all_tasks_blocked()  # write-back has begun, and found nothing
    await write_file(fs, "f", UNIT)
    assert not fs.io.table.open and not fs.io.inodes.is_resting
    assert await fs.server_admin.watch() == busy_s
    await fs.writeback.work()
    assert await fs.server_admin.watch() == idle_s


@pytest.mark.store({"layout.count": 2})
async def test_a_server_works_again_as_soon_as_a_probe_does(fs: Filesystem, soon: None) -> None:
    server = fs.store.servers[1]
    with failing(("open_file", "write_at"), server.address):
        with pytest.raises(Unavailable):
            await fs.store.servers.run(server, server.create_object, (5, 1 << 40))
        assert server.state == "failing"
    await until(lambda: server.state == "ok" and server.health.usable)


@pytest.mark.sweep
@pytest.mark.store({"layout.count": 2})
async def test_who_waits_for_a_server_that_is_gone_is_told_what_cannot_be_moved(
    fs, config, scratch, soon
):
    """And of a removal, that what lies there is in the way until the server is back or lost."""
    sizes = await write_files(fs)
    os.rename(config.servers[1], scratch / "away")
    await order(fs, "replace", id=1, path=f"{scratch}/new")
    which = {"role": "data", "id": 1}
    with pytest.raises(StoreError, match=r"\d+ objects cannot be moved for now.*; /f\d+-\d: "):
        await cli_server.wait_for_order(OpenDoor(fs, "store"), which, None)
    os.rename(scratch / "away", config.servers[1])
    await until_empty(fs, 1)
    await require_all(fs, sizes)
    assert not (await removed(fs, id=1))["reason"]


@pytest.mark.store(KINDS["coded"])
async def test_nobody_waits_for_a_server_that_is_gone_with_nothing_that_is_needed(
    fs, config, scratch, soon
):
    sizes = await write_files(fs)
    await fs.store.engine.transact(mark_unprotected, range(5))
    await order(fs, "drain", id=1)
    os.rename(config.servers[1], scratch / "away")
    await until(lambda: fs.store.servers[1].state == "gone")
    await until_empty(fs, 1)
    outcome = await removed(fs, id=1)
    while outcome["passing"]:
        outcome = await removed(fs, id=1)
    assert not outcome["reason"] or "remove it with --lost" in outcome["reason"]
    if outcome["reason"]:
        assert not (await removed(fs, id=1, lost=True))["reason"]
    await require_all(fs, sizes)
