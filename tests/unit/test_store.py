"""The table of a store's directories: what is registered, upgraded, refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from aifs.check.fsck import check
from aifs.cli.main import main
from aifs.core import config as configuration
from aifs.core import files
from aifs.core.config import Config
from aifs.core.errors import StoreError
from aifs.layout.placement import BURST_FIRST
from aifs.meta import keys
from aifs.meta.kv import Transaction
from aifs.meta.lmdb_engine import LmdbEngine
from aifs.meta.records import BurstRecord
from aifs.store.store import Store, format_store, open_store


def test_a_relative_path_is_made_below_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files.make_dirs("above/below")
    assert (tmp_path / "above" / "below").is_dir()


def make_store(source: Path) -> Config:
    config = configuration.load(str(source), {})
    format_store(config, force=False)
    return config


def opened(config: Config, look: Callable[[Store], object] = lambda store: None) -> object:
    async def run() -> object:
        store = await open_store(config)
        try:
            return look(store)
        finally:
            store.close()

    return trio.run(run)


def add_server(config: Config, directory: str, role: str = "data") -> int:
    async def add() -> int:
        store = await open_store(config, adding=directory)
        try:
            return await store.table.add(directory, role)
        finally:
            store.close()

    return trio.run(add)


def table_of(config: Config) -> dict[int, str]:
    return opened(
        config, lambda store: {server.id: server.address for server in store.servers.values()}
    )


def change(config: Config, update: Callable[[Transaction], None]) -> None:
    engine = LmdbEngine(config.meta.directory)
    try:
        trio.run(engine.transact, update)
    finally:
        engine.close()


def superblock(tx: Transaction, **fields: object) -> None:
    tx.put(keys.SUPERBLOCK, json.dumps(json.loads(tx.get(keys.SUPERBLOCK)) | fields).encode())


def write_yaml(tmp_path: Path, burst: str) -> str:
    path = tmp_path / "c.yaml"
    path.write_text(
        f"meta: {{directory: meta}}\nservers: [s0, s1]\nburst: {{directories: [{burst}]}}\n"
    )
    return str(path)


def test_its_owner_alone_may_enter_the_directories_of_a_store(tmp_path: Path) -> None:
    config = make_store(tmp_path / "store")
    for path in (config.meta.directory, *config.servers, *config.burst.directories):
        assert Path(path).stat().st_mode & 0o777 == 0o700, path


def test_burst_directories_are_registered_beside_data_servers(tmp_path: Path) -> None:
    config = make_store(tmp_path / "store")
    table = table_of(config)
    assert list(table) == [0, 1, 2, 3, BURST_FIRST]
    assert table[BURST_FIRST] == f"{tmp_path}/store/burst"
    kinds = opened(
        config, lambda store: [(server.name, server.role) for server in store.servers.burst()]
    )
    assert kinds == [("burst directory 0", "burst")]
    assert opened(config, lambda store: store.servers.usable()) == (0, 1, 2, 3)


def test_a_store_can_be_moved_with_its_burst_directory(tmp_path: Path) -> None:
    make_store(tmp_path / "old")
    (tmp_path / "old").rename(tmp_path / "new")
    assert (
        table_of(configuration.load(f"{tmp_path}/new", {}))[BURST_FIRST] == f"{tmp_path}/new/burst"
    )


def test_a_store_of_a_later_format_is_refused(tmp_path: Path) -> None:
    config = make_store(tmp_path / "store")
    change(config, lambda tx: superblock(tx, format="aifs 3"))
    with pytest.raises(StoreError, match="has format 'aifs 3'; this version knows 'aifs 2' alone"):
        opened(config)


def test_a_store_of_an_unreleased_version_is_refused_in_one_line_and_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its format was a number, whichever."""
    source = tmp_path / "store"
    make_store(source)
    for path in source.rglob(".aifs"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 1}) + "\n")

    def contents() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in source.rglob("*") if path.is_file()}

    before = contents()
    for command in (["fsck"], ["fsck", "--repair"], ["meta", "backup"], ["server", "ls"]):
        assert main([*command, str(source)]) != 0
        printed = capsys.readouterr().err.strip()
        assert "an unreleased version of AIFS made" in printed and "\n" not in printed, command
    assert contents() == before


def test_what_a_killed_probe_has_left_is_nobodys(tmp_path: Path) -> None:
    for place in ("store/data/0", "store/data/1"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / ".aifs-probe").write_bytes(b"x")
    config = make_store(tmp_path / "store")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / ".aifs-probe").write_bytes(b"x")
    assert add_server(config, str(tmp_path / "new")) == 4
    assert not check(config, repair=False).findings


def put_copies(undrained: int) -> Callable[[Transaction], None]:
    """The records of five copies in the first burst directory, so many of which are undrained, and
    of one elsewhere."""

    def put(tx: Transaction) -> None:
        for copy_id in range(5):
            record = BurstRecord(copy_id, BURST_FIRST, copy_id < undrained, True, 0)
            tx.put(keys.burst_copy(copy_id), record.encode())
        tx.put(keys.burst_copy(9), BurstRecord(9, BURST_FIRST + 1, True, True, 0).encode())

    return put


def test_a_missing_burst_directory_with_cached_copies_alone_is_done_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_store(tmp_path / "store")
    change(config, put_copies(0))
    (tmp_path / "store" / "burst").rename(tmp_path / "elsewhere")
    opened(config)
    assert "does without a burst directory for now: burst directory 0" in caplog.text
    # The missing one keeps its number.
    assert add_server(config, f"{tmp_path}/b1", "burst") == BURST_FIRST + 1


def test_a_missing_burst_directory_is_named_with_what_is_at_stake(tmp_path: Path) -> None:
    config = make_store(tmp_path / "store")
    change(config, put_copies(2))
    (tmp_path / "store" / "burst").rename(tmp_path / "elsewhere")
    with pytest.raises(StoreError) as caught:
        opened(config)
    assert str(caught.value) == (
        f"burst directory 0: {tmp_path}/store/burst: there is no such directory; is its filesystem "
        "mounted?; 2 files have their newest bytes there alone: mount its filesystem or put the "
        "directory back; or, if they are lost, mount without them: -o burst.missing=allow"
    )


def test_a_burst_directory_that_is_not_the_stores_is_refused(tmp_path: Path) -> None:
    make_store_of = configuration.load(write_yaml(tmp_path, "b0"), {})
    format_store(make_store_of, force=False)
    source = write_yaml(tmp_path, "b0, b1")
    with pytest.raises(StoreError) as caught:
        opened(configuration.load(source, {}))
    assert str(caught.value) == (
        f"{source}: burst directory {tmp_path}/b1 is not part of the store; add it with: "
        f"aifs server add --burst {source} {tmp_path}/b1; or, if it has been removed, take it out "
        "of the file"
    )


def test_directories_of_both_kinds_are_added(tmp_path: Path) -> None:
    config = make_store(tmp_path / "store")
    assert add_server(config, f"{tmp_path}/b1", "burst") == BURST_FIRST + 1
    assert add_server(config, f"{tmp_path}/s4") == 4
    assert list(table_of(config)) == [0, 1, 2, 3, 4, BURST_FIRST, BURST_FIRST + 1]


def test_formatting_again_erases_burst_copies(tmp_path: Path) -> None:
    config = make_store(tmp_path / "store")
    copies = tmp_path / "store" / "burst" / "objects" / "0" / "00"
    copies.mkdir(parents=True)
    (copies / f"{5:016x}.0").write_bytes(b"x")
    format_store(config, force=True)
    assert [path.name for path in (tmp_path / "store" / "burst").iterdir()] == [".aifs"]
