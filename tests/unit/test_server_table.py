"""The table of servers: its records, numbers, marks; and what those in use do without and
prefer.
"""

import logging
import shutil
from pathlib import Path

import pytest
import trio

from aifs.core.errors import StoreError, Unavailable
from aifs.data.servers import Servers
from aifs.data.storage import Space
from aifs.layout.placement import ACTIVE, BURST_FIRST, DRAINING, LOST, WEIGHTS
from aifs.meta import keys, server_uses, servers
from aifs.meta.servers import ServerRecord, decode_server
from tests.support.data_servers import STORE, data_servers, failing, hooked, make_table, opened
from tests.support.memory_engine import MemoryEngine

# --- records --------------------------------------------------------------------------------------


def test_a_record_is_as_documented() -> None:
    record = ServerRecord("data/3", DRAINING, "rack-a", 7, 2, "cold")
    assert record.encode() == (
        b'{"path": "data/3", "state": "draining", "domain": "rack-a", "successor": 7, "host": 2, '
        b'"storage_class": "cold"}'
    )
    assert decode_server(record.encode()) == record


def test_records_of_earlier_formats_are_read() -> None:
    assert decode_server(b'{"path": "data/3"}') == ServerRecord("data/3", ACTIVE, "", None)


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"[]",
        b"{}",
        b'{"path": 1}',
        b'{"path": "a", "state": "x"}',
        b'{"path": "a", "successor": "1"}',
        b'{"path": "a", "extra": 1}',
        b'{"path": "a", "domain": null}',
        b'{"path": "a", "state": []}',
    ],
)
def test_a_damaged_record_is_told(value: bytes) -> None:
    with pytest.raises(Unavailable, match="table of servers is damaged"):
        decode_server(value)


async def test_numbers_are_never_used_again() -> None:
    engine = MemoryEngine()

    def look(tx) -> tuple[int, int]:
        return servers.next_number(tx, "data"), servers.next_number(tx, "burst")

    assert await engine.view(look) == (0, BURST_FIRST)
    await engine.transact(
        servers.put_servers, {number: ServerRecord("x") for number in (0, 1, BURST_FIRST)}
    )
    assert await engine.view(look) == (2, BURST_FIRST + 1)
    await engine.transact(servers.remove_server, 1)
    await engine.transact(servers.remove_server, BURST_FIRST)
    await engine.transact(servers.put_server, 0, ServerRecord("y"))
    assert await engine.view(look) == (2, BURST_FIRST + 1)
    assert await engine.view(servers.read_table) == {0: ServerRecord("y")}


async def test_a_table_of_an_earlier_format_goes_on_counting() -> None:
    engine = MemoryEngine()
    await engine.transact(lambda tx: tx.put(keys.server(5), b'{"path": "x"}'))
    assert await engine.view(servers.next_number, "data") == 6
    await engine.transact(servers.put_server, 5, ServerRecord("x", DRAINING))
    await engine.transact(servers.remove_server, 5)
    assert await engine.view(servers.next_number, "data") == 6


async def test_marks_of_unprotected_bytes_stay_while_the_server_does() -> None:
    engine = MemoryEngine()
    await engine.transact(servers.put_servers, {number: ServerRecord("x") for number in range(3)})
    await engine.transact(servers.mark_unprotected, (0, 2))
    await engine.transact(servers.mark_unprotected, (2,))
    assert await engine.view(servers.find_unprotected) == {0, 2}
    await engine.transact(servers.remove_server, 2)
    assert await engine.view(servers.find_unprotected) == {0}
    with pytest.raises(Unavailable, match="^data server 2 has been removed from the store"):
        await engine.transact(servers.mark_unprotected, (0, 2))


async def test_nothing_refers_to_a_server_of_an_empty_store() -> None:
    engine = MemoryEngine()
    for kind, scan in ((b"i", server_uses.scan_files), (b"t", server_uses.scan_containers)):
        found = await engine.view(scan, *keys.all_of(kind), 1, frozenset())
        assert found == (server_uses.Uses(), b"")


# --- servers in use -------------------------------------------------------------------------------


async def test_an_absent_server_is_left_alone_until_it_is_back(tmp_path: Path, caplog) -> None:
    caplog.set_level(logging.INFO)
    table = make_table(tmp_path, 3)
    shutil.move(table[1], tmp_path / "away")
    with pytest.raises(StoreError, match="unprotected files may have bytes there"), opened(table):
        pass
    touched: list[str] = []
    with hooked(lambda op, path: touched.append(path)):
        servers = Servers(table, STORE)
        try:
            servers.check_identity(dispensable={1})
            assert [server.state for server in servers.values()] == ["ok", "gone", "ok"]
            assert servers.usable() == (0, 2)
            touched.clear()
            for call in (
                servers[1].space,
                servers[1].sync_all,
                lambda: servers[1].open_object((5, 6), create=True),
            ):
                with pytest.raises(
                    Unavailable, match=r"^data server 1 \(.*\) is absent: .*no such directory"
                ):
                    call()
            assert touched == []
            await servers.sync_all()
            assert servers.statfs().total > 0
            shutil.move(tmp_path / "away", table[1])
            await servers.look()
            with trio.fail_after(60):
                while servers[1].state != "ok":
                    await trio.sleep(0.001)
            assert servers.usable() == (0, 1, 2)
        finally:
            servers.close()
    assert any("is there again" in record.getMessage() for record in caplog.records)


async def test_candidates_have_domains_and_weights_by_free_space(tmp_path: Path) -> None:
    with data_servers(tmp_path, 5) as servers:
        servers.classify(1, ACTIVE, "rack-a", None)
        servers.classify(2, DRAINING, "", 4)
        servers.classify(3, LOST, "", None)
        for number, free in ((0, 800), (1, 90), (4, 500)):
            servers[number].seen = Space(1000, free, free, 10, 10)
        assert servers.candidates() == (
            (0, "server 0", WEIGHTS[3]),
            (1, "rack-a", WEIGHTS[0]),
            (4, "server 4", WEIGHTS[3]),
        )
        assert servers.prefer == {2: 4}
        with pytest.raises(Unavailable, match="is absent: it is lost"):
            servers[3].space()
        with failing("open_file", servers[0].address), pytest.raises(Unavailable):
            servers[0].open_object((5, 6), create=True)
        assert servers.usable() == (1, 4)
        held = servers[4]
        servers.drop(4)
        assert servers.find(4) is None and servers.usable() == (1,)
        with pytest.raises(Unavailable, match="removed from the store"):
            held.space()


async def test_space_where_no_new_files_go_is_not_free(tmp_path: Path) -> None:
    with data_servers(tmp_path, 2) as servers:
        assert servers.statfs().available > 0
        servers.classify(0, DRAINING, "", None)
        assert servers.statfs().available > 0  # they share the filesystem
        servers.classify(1, DRAINING, "", None)
        space = servers.statfs()
        assert (space.free, space.available) == (0, 0) and space.total > 0


async def test_more_than_half_of_the_servers_are_not_given_up(tmp_path: Path, caplog) -> None:
    """It is rather this host that cannot reach them."""
    changes: list[list[bool]] = []
    with data_servers(tmp_path, 5) as servers:
        servers.lost_after_s = 0.0

        def judged(*missing: int) -> list[str]:
            for server in servers.values():
                server.missing = "it is not there" if server.id in missing else ""
            known = servers.changes
            servers.judge()
            if servers.changes != known:
                changes.append([s.given_up for s in servers.values()])
            return [server.state for server in servers.values()]

        assert judged(1) == ["ok", "gone", "ok", "ok", "ok"]
        assert servers.usable() == (0, 2, 3, 4)
        assert judged(1, 2) == ["ok", "gone", "gone", "ok", "ok"]
        assert judged(0, 1, 2) == ["gone", "gone", "gone", "ok", "ok"]
        assert judged() == ["back", "back", "back", "ok", "ok"]
    no, yes = False, True
    assert changes == [
        [no, yes, no, no, no],
        [no, yes, yes, no, no],
        [no, no, no, no, no],
        [no, no, no, no, no],
    ]
    assert caplog.text.count("what is protected is made anew on others: it is not there") == 2
