"""A deep check: all bytes are read, and compared with their checksums."""

import errno
import os
from pathlib import Path

import pytest

from aifs.check.fsck import check
from aifs.core import files
from aifs.data import chunk_codec
from aifs.layout.interleaved import HEADER_BYTES
from aifs.layout.placement import BURST_FIRST
from aifs.meta import chunks, keys
from aifs.meta.records import Copy
from tests.support.damaged import CHUNK, COPY_ID, DamagedStore
from tests.support.damages import (
    common,
    kinds_of,
)
from tests.support.damages import store as store
from tests.support.damages import template as template


@pytest.mark.sweep
def test_all_bytes_are_what_was_stored(store: DamagedStore) -> None:
    calls: list[tuple[str, int, int]] = []
    report = check(store.config, False, lambda *call: calls.append(call), deep=True)
    assert report.findings == []
    records = [value for key, value in store.records().items() if key[:1] == b"t"]
    size = store.inode("/z/moved").size + sum(
        chunks.decode_container(record).length for record in records
    )
    assert [call for call in calls if call[0] == "bytes"][-1] == ("bytes", size, size)


def test_changed_bytes_of_striped_files_are_found_by_a_deep_check_alone(
    store: DamagedStore,
) -> None:
    server, path = store.object("/z/moved", 1)
    _spoil(path, 5)
    assert store.found() == []
    (finding,) = store.check(repair=True, deep=True).findings
    assert (finding.kind, finding.where, finding.repaired) == ("wrong-checksum", "/z/moved", False)
    numbers = sorted(store.inode("/z/moved").layout.servers)
    servers = " or ".join(f"data server {number}" for number in numbers)
    assert finding.detail == f"bytes 0 to 49999, on {servers}"


@pytest.mark.sweep
def test_each_wrong_mib_of_a_large_file_is_told(store: DamagedStore) -> None:
    mib = 1 << 20
    data = bytes(range(256)) * (20 * mib // 256) + b"end"
    store.use(lambda fs: store.write(fs, "/a/large", data))
    parts = [data[start : start + mib] for start in range(0, len(data), mib)]
    store.put(
        keys.checksums(store.inode("/a/large").oid, 0), b"".join(map(chunk_codec.digest_of, parts))
    )
    assert store.check(deep=True).findings == []
    for index, number in ((0, 3), (1, 4), (0, 9)):
        _spoil(store.object("/a/large", index)[1], number * mib // 2)  # two servers
    _spoil(store.object("/a/large", 0)[1], len(store.object("/a/large", 0)[1].read_bytes()) - 1)
    (finding,) = store.check(deep=True).findings
    ranges = [part.split(",")[0] for part in finding.detail.split("; ")]
    assert finding.where == "/a/large"
    assert ranges == [
        f"bytes {3 * mib} to {5 * mib - 1}",
        f"bytes {9 * mib} to {10 * mib - 1}",
        f"bytes {20 * mib} to {len(data) - 1}",
    ]


def test_changed_bytes_of_chunks_are_found(store: DamagedStore) -> None:
    number, path = store.container()
    oid = store.ino["/a/chunks"]
    extents = store.transact(lambda tx: chunks.get_extents(tx, oid, CHUNK, 0)[1])
    places = [extent.place for extent in extents]
    _spoil(path, places[1].offset + HEADER_BYTES)
    _spoil(path, places[2].offset + 20)
    _spoil(path, places[2].offset + HEADER_BYTES + 1)
    (finding,) = store.check(deep=True).findings
    assert (finding.kind, finding.where) == ("wrong-checksum", "/a/chunks")
    assert finding.detail == f"bytes {CHUNK} to {3 * CHUNK - 1}, on data server {places[1].server}"


def test_changed_bytes_of_a_shared_chunk_are_read_once_and_all_its_users_are_named(
    store: DamagedStore,
) -> None:
    _, path = store.shared_container()
    place = common(store).place
    _spoil(path, place.offset + HEADER_BYTES + 1)
    found = {finding.where: finding.detail for finding in store.check(deep=True).findings}
    size, last = store.inode("/a/first").size, place.raw - 1
    assert found == {
        "/a/first": (
            f"bytes 0 to {last}, on data server 2; bytes {size - place.raw} to {size - 1}, "
            "on data server 2"
        ),
        "/z/other": f"bytes 500 to {500 + last}, on data server 2",
    }


def test_bytes_that_a_server_does_not_give_are_named(
    store: DamagedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_into = files.read_into

    def fail(fd: int, buffer: memoryview, offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(files, "read_into", fail)
    found = sorted((finding.kind, finding.where) for finding in store.check(deep=True).findings)
    paths = ("/a/chunks", "/a/first", "/z/chunk", "/z/moved", "/z/other")
    assert found == [("unreadable-bytes", path) for path in paths]
    monkeypatch.setattr(files, "read_into", read_into)


@pytest.mark.sweep
@pytest.mark.parametrize("path", ["/z/moved", "/a/chunks"])
def test_a_cached_copy_with_other_bytes_is_dropped(store: DamagedStore, path: str) -> None:
    data = store.read(path)
    store.add_copy(path, data)
    assert store.check(deep=True).findings == []
    _spoil(store.copy(path), 40_000)
    assert store.found() == []
    report = store.check(repair=True, deep=True)
    assert kinds_of(report) == [("bad-cache", path)] and report.ok
    assert store.inode(path).copy is None and store.read(path) == data
    assert store.check(deep=True).findings == []


def test_a_cached_copy_is_kept_where_the_data_servers_lack_bytes(store: DamagedStore) -> None:
    store.add_copy("/z/moved", store.read("/z/moved"))
    _spoil(store.object("/z/moved", 1)[1], 5)
    (finding,) = store.check(repair=True, deep=True).findings
    assert finding.kind == "wrong-checksum" and finding.detail.endswith(
        f"whole: {store.copy('/z/moved')}"
    )
    _spoil(store.copy("/z/moved"), 10)
    report = store.check(repair=True, deep=True)
    assert kinds_of(report) == [("bad-cache", "/z/moved"), ("wrong-checksum", "/z/moved")]
    assert not any(finding.repaired for finding in report.findings)


def test_lost_bytes_are_named_though_the_burst_copy_is_in_a_directory_that_is_none(
    store: DamagedStore,
) -> None:
    store.add_copy("/z/moved", store.read("/z/moved"))
    store.change("/z/moved", copy=Copy(BURST_FIRST + 7, COPY_ID))
    _spoil(store.object("/z/moved", 1)[1], 5)
    found = {finding.kind: finding.detail for finding in store.check(deep=True).findings}
    assert found["wrong-checksum"].startswith("bytes 0 to 49999, on data server")
    assert "whole" not in found["wrong-checksum"]


def test_a_damaged_record_of_degraded_objects_ends_no_deep_check(store: DamagedStore) -> None:
    number, _ = store.container()
    _spoil(store.object("/z/moved", 1)[1], 5)
    store.put(keys.degraded(number), b"damaged")
    kinds = {finding.kind for finding in store.check(deep=True).findings}
    assert kinds == {"unreadable-record", "unreadable-bytes", "wrong-checksum"}


def test_files_that_lack_bytes_are_not_read(store: DamagedStore) -> None:
    store.object("/z/moved", 0)[1].unlink()
    store.container()[1].unlink()
    kinds = {kind for kind, _ in kinds_of(store.check(deep=True))}
    assert kinds == {"missing-object", "missing-container", "lost-chunk"}


def _spoil(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes((byte[0] ^ 255,)))
