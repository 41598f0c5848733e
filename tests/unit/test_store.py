"""The table of a store's directories: what is registered, upgraded, refused."""

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from aifs.check.fsck import check
from aifs.core import config as configuration
from aifs.core.config import Config
from aifs.core.errors import StoreError
from aifs.layout.placement import BURST_FIRST
from aifs.meta import keys, namespace
from aifs.meta.kv import Transaction
from aifs.meta.lmdb_engine import LmdbEngine
from aifs.meta.records import BurstRecord, decode_inode
from aifs.store.store import FORMAT, Store, format_store, open_store


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
        config, lambda store: {server.id: server.path for server in store.servers.values()}
    )


def change(config: Config, update: Callable[[Transaction], None]) -> None:
    engine = LmdbEngine(config.meta.directory)
    try:
        trio.run(engine.transact, update)
    finally:
        engine.close()


def superblock(tx: Transaction, **fields: object) -> None:
    tx.put(keys.SUPERBLOCK, json.dumps(json.loads(tx.get(keys.SUPERBLOCK)) | fields).encode())


def make_format_1(tx: Transaction) -> None:
    tx.delete(keys.server(BURST_FIRST))
    superblock(tx, format=1)


def write_yaml(tmp_path: Path, burst: str) -> str:
    path = tmp_path / "c.yaml"
    path.write_text(
        f"meta: {{directory: meta}}\nservers: [s0, s1]\nburst: {{directories: [{burst}]}}\n"
    )
    return str(path)


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


def test_a_store_of_format_1_is_upgraded_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "aifs.store.store")
    config = make_store(tmp_path / "store")
    change(config, make_format_1)
    assert list(table_of(config)) == [0, 1, 2, 3, BURST_FIRST]
    assert list(table_of(config)) == [0, 1, 2, 3, BURST_FIRST]
    assert [record.getMessage() for record in caplog.records] == [
        f"the store was upgraded from format 1 to {FORMAT}, with 1 burst directories"
    ]


def test_a_store_of_format_4_keeps_its_inodes(tmp_path: Path) -> None:
    config = make_store(tmp_path / "store")
    found = []

    def make_format_4(tx: Transaction) -> None:
        superblock(tx, format=4)
        record = tx.get(keys.inode(keys.ROOT_INO))
        found.append(decode_inode(keys.ROOT_INO, record))
        tx.put(keys.inode(keys.ROOT_INO), b"\1" + record[1:84])

    change(config, make_format_4)
    assert not check(config, repair=False).findings  # upgrades it
    change(config, lambda tx: found.append(namespace.get_inode(tx, keys.ROOT_INO)))
    assert found[1] == replace(found[0], birth_ns=0) and found[0].birth_ns
    assert not check(config, repair=False, deep=True).findings


def test_a_store_of_format_3_is_upgraded_where_it_is(tmp_path: Path) -> None:
    config = make_store(tmp_path / "store")
    change(config, lambda tx: superblock(tx, format=3))
    marks = {}

    def look(tx: Transaction) -> None:
        marks["u"] = [key for key, _ in tx.range(*keys.all_of(b"u"))]
        marks["format"] = json.loads(tx.get(keys.SUPERBLOCK))["format"]

    assert list(table_of(config)) == [0, 1, 2, 3, BURST_FIRST]
    change(config, look)
    assert marks == {
        "u": [],
        "format": FORMAT,
    }  # a store of format 3 knows where unprotected bytes lie


def test_what_is_not_the_stores_is_not_taken_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_store(tmp_path / "store")
    change(config, make_format_1)
    make_store(tmp_path / "other")
    shutil.rmtree(tmp_path / "store" / "burst")
    shutil.copytree(tmp_path / "other" / "burst", tmp_path / "store" / "burst")
    assert list(table_of(config)) == [0, 1, 2, 3]
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert warnings[0].startswith(
        f"a burst directory is not used: {tmp_path}/store/burst: its marker says burst of"
    )


def test_a_store_of_a_later_format_is_refused(tmp_path: Path) -> None:
    config = make_store(tmp_path / "store")
    change(config, lambda tx: superblock(tx, format=FORMAT + 1))
    with pytest.raises(
        StoreError, match=f"has format {FORMAT + 1}; this version knows 1 to {FORMAT}"
    ):
        opened(config)


def put_copies(undrained: int) -> Callable[[Transaction], None]:
    """The records of five copies in the first burst directory, so many of which are undrained, and
    of one elsewhere.
    """

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
    assert (
        add_server(config, f"{tmp_path}/b1", "burst") == BURST_FIRST + 1
    )  # the missing one keeps its number


def test_a_missing_burst_directory_is_named_with_what_is_at_stake(tmp_path: Path) -> None:
    config = make_store(tmp_path / "store")
    change(config, put_copies(2))
    (tmp_path / "store" / "burst").rename(tmp_path / "elsewhere")
    with pytest.raises(StoreError) as caught:
        opened(config)
    assert str(caught.value) == (
        f"burst directory 0: {tmp_path}/store/burst: there is no such directory; is its filesystem mounted?; "
        "2 files have their newest bytes there alone: mount its filesystem or put the directory back"
    )


def test_a_burst_directory_that_is_not_the_stores_is_refused(tmp_path: Path) -> None:
    make_store_of = configuration.load(write_yaml(tmp_path, "b0"), {})
    format_store(make_store_of, force=False)
    source = write_yaml(tmp_path, "b0, b1")
    with pytest.raises(StoreError) as caught:
        opened(configuration.load(source, {}))
    assert str(caught.value) == (
        f"{source}: burst directory {tmp_path}/b1 is not part of the store; add it with: "
        f"aifs server add --burst {source} {tmp_path}/b1; or, if it has been removed, take it out of the file"
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
